//! The state of a coordinator.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use foldhash::HashMap;
use tokio::sync::{Notify, oneshot};

use super::HeldLease;
use super::report::Report;
use crate::clock::Moment;
use crate::engine::{Engine, Exported, LeaseId, NotAmended, Refusal, SharedError, Verdict, WaiterId};
use crate::error::{LossCause, Result};
use crate::events::{Event, RefusalReason};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{Mode, Request, RequestId};
use crate::token::FencingToken;

/// The state of a coordinator, behind its lock.
pub(super) struct State {
    pub(super) engine: Engine,
    pub(super) next_waiter: u64,
    pub(super) waiters: BTreeMap<WaiterId, WaitingCaller>,
    pub(super) signals: HashMap<LeaseId, Arc<LeaseSignals>>,
    /// The leases whose end is not reported yet.
    pub(super) unreported: HashMap<LeaseId, Hold>,
    pub(super) release_replies: HashMap<LeaseId, oneshot::Sender<Verdict>>,
    pub(super) amendment_replies: HashMap<LeaseId, VecDeque<oneshot::Sender<Result<(), NotAmended>>>>,
    /// The evictions by this application that are in progress.
    pub(super) evictions: Vec<(LockName, FencingToken)>,
    /// The result of the export in progress, until its caller reads it.
    pub(super) exported: Option<(LeaseId, Exported)>,
    pub(super) close_replies: Vec<oneshot::Sender<Option<SharedError>>>,
    pub(super) phase: Phase,
    /// Whether the runtime of the tasks has ended.
    pub(super) is_abandoned: bool,
    /// When the timer wakes.
    pub(super) asleep_until: Option<Moment>,
    /// When the store last answered a request.
    pub(super) answered_at: Moment,
    /// The last answered heartbeat.
    pub(super) last_beat: Option<AnsweredBeat>,
    pub(super) heartbeat: HeartbeatReport,
    /// Why heartbeats have failed since the last answered one, as last reported.
    pub(super) heartbeat_failure: Option<String>,
    pub(super) is_started: bool,
}

/// Whether the client takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Open,
    /// Every request is refused. Leases stay held.
    Draining,
    /// Every lease is released.
    Closed,
}

/// The fields of a lease that appear in its events.
pub(super) struct Hold {
    pub(super) name: LockName,
    pub(super) token: FencingToken,
    pub(super) since: Moment,
}

/// The last reported state of the heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeartbeatReport {
    Fine,
    /// The heartbeat in flight is late.
    Late,
    /// A heartbeat has failed, and the one in flight is not late.
    Failed,
}

/// An answered heartbeat.
#[derive(Clone, Copy)]
pub(super) struct AnsweredBeat {
    pub(super) sent_at: Moment,
    pub(super) round_trip: Duration,
}

/// A caller that waits.
pub(super) struct WaitingCaller {
    pub(super) name: LockName,
    pub(super) mode: Mode,
    pub(super) since: Moment,
    pub(super) owner: Owner,
    pub(super) resumes: Option<Exported>,
    pub(super) reply: oneshot::Sender<Result<HeldLease, Refusal>>,
}

/// The signals that the handles of a lease wait for: its loss, and the request to release it.
#[derive(Default)]
pub(super) struct LeaseSignals {
    pub(super) cause: OnceLock<LossCause>,
    pub(super) ended: Notify,
    is_release_requested: AtomicBool,
    release_requested: Notify,
}

impl LeaseSignals {
    pub(super) fn request_release(&self) {
        self.is_release_requested.store(true, Ordering::Release);
        self.release_requested.notify_waiters();
    }

    /// Waits until the release is requested.
    pub(super) async fn release_requested(&self) {
        let mut requested = std::pin::pin!(self.release_requested.notified());
        requested.as_mut().enable();
        if !self.is_release_requested.load(Ordering::Acquire) {
            requested.await;
        }
    }
}

/// The work to do after the lock is released.
#[derive(Default)]
pub(super) struct Outbox {
    pub(super) sends: Vec<Sending>,
    /// Grants without a waiter. Dropping them releases them.
    pub(super) unwanted: Vec<Result<HeldLease, Refusal>>,
    pub(super) reports: Vec<Report>,
}

/// A request to send.
pub(super) struct Sending {
    pub(super) request: RequestId,
    pub(super) body: Arc<Request>,
    /// How long a heartbeat or an urgent request may take.
    pub(super) answer_timeout: Duration,
    pub(super) is_urgent: bool,
}

impl State {
    pub(super) fn new(engine: Engine, now: Moment) -> Self {
        Self {
            engine,
            next_waiter: 0,
            waiters: BTreeMap::new(),
            signals: HashMap::default(),
            unreported: HashMap::default(),
            release_replies: HashMap::default(),
            amendment_replies: HashMap::default(),
            evictions: Vec::new(),
            exported: None,
            close_replies: Vec::new(),
            phase: Phase::Open,
            is_abandoned: false,
            asleep_until: None,
            answered_at: now,
            last_beat: None,
            heartbeat: HeartbeatReport::Fine,
            heartbeat_failure: None,
            is_started: false,
        }
    }

    /// Removes the state of a lease whose handle was dropped.
    pub(super) fn forget(&mut self, lease: LeaseId) {
        self.signals.remove(&lease);
        self.amendment_replies.remove(&lease);
    }

    /// Returns whether an eviction by this application has caused the loss. A heartbeat may report
    /// the loss before the eviction is answered.
    pub(super) fn is_eviction(&self, event: &Event) -> bool {
        let Event::Lost { name, token, cause: LossCause::Superseded, .. } = event else {
            return false;
        };
        self.evictions.iter().any(|(evicted, evicted_token)| (evicted, evicted_token) == (name, token))
    }
}

impl WaitingCaller {
    /// Makes the event of a refusal.
    pub(super) fn refused(&self, now: Moment, reason: RefusalReason) -> Event {
        Event::Refused { name: self.name.clone(), reason, waited: now.since(self.since) }
    }
}
