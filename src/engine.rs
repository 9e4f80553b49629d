//! The engine of one client: inputs and the time in, actions out.
//!
//! The engine decides what every lease and every wait of the client needs next, and does no I/O: it
//! reads no clock, owns no channel and no task. The caller passes the time and an input to
//! [`Engine::handle`], carries out the [`Action`]s, and calls again no later than
//! [`Engine::wakes_at`]. The connection state machine of quinn-proto is built alike.
//!
//! ```text
//! callers ──Acquire, Release──▶ ┌────────┐ ──Send──▶ store (one change per name at a time)
//!         ◀──Granted, Lost───── │ Engine │ ◀─Answer──
//!                               └────────┘
//! ```
//!
//! A caller's [`LeaseSpec`] becomes a waiter. The waiter has a claim: its request as the store sees it,
//! identified by an [`AcquisitionId`]. While a claim waits in the store, it is an entry there; once
//! it is granted, it is a holding. Leases of one owner, each with a [`LeaseId`], may share a
//! holding.
//!
//! Three rules make the engine safe, whatever the transport does:
//!
//! - A holder relies on a lease no longer than its TTL, counted from before a request that the
//!   store answered, less a margin.
//! - A holding that ended locally stays ended: later answers do not bring it back. The engine
//!   repeats its withdrawal until the store confirms it.
//! - A release is confirmed only by an answer of the store. That a request was sent more than once
//!   can only turn "lost" into "unknown".

mod action;
mod amendment;
mod answer;
mod apply_decision;
pub(crate) mod decision;
mod grant;
mod heartbeat;
mod holding;
mod lifetime;
mod looks;
mod loss;
mod name;
mod poll_interval;
mod recheck;
mod release;
mod schedule;
mod step;
#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, reason = "tests")]
mod tests;
mod transfer;
mod waiter;
mod waiting;
mod withdrawal;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use foldhash::HashMap;

pub(crate) use action::{
    Action, Amendment, Answer, Exported, Grant, HoldTime, Input, LeaseId, LeaseSpec, NotAmended, Refusal, SharedError,
    Verdict, WaitMode, WaiterId,
};
pub(crate) use heartbeat::HeartbeatStatus;
use heartbeat::{Epoch, Heartbeat};
use holding::{Holding, HoldingState, LocalLease};
use name::NameState;
use poll_interval::{QueuePace, longest_interval};
use recheck::Ended;
use step::Step;
use waiter::Timeouts;

use crate::clock::Moment;
use crate::error::LossCause;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, Claim, ClientId, Notification, Request, RequestId};
use crate::token::FencingToken;

/// After a notification without a name, the engine polls every name with entries, and then pauses
/// for this time for each of them: with 100 names, it polls as often as without notifications.
const POLL_EACH: Duration = Duration::from_millis(1);

/// A request on its way.
struct InFlight {
    name: LockName,
    step: Step,
    body: Arc<Request>,
    /// The epoch when the request was sent.
    epoch: Epoch,
    /// When the latest beat of that epoch was sent that was answered before the request was sent.
    beat_at: Option<Moment>,
}

/// See the [module](self).
pub(crate) struct Engine {
    heartbeat: Heartbeat,
    /// The client's description for people.
    holder: Arc<str>,
    /// Boxed: the table copies its values when it grows, while callers wait.
    names: HashMap<LockName, Box<NameState>>,
    waiters: HashMap<WaiterId, LockName>,
    leases: HashMap<LeaseId, (LockName, AcquisitionId)>,
    in_flight: HashMap<RequestId, InFlight>,
    /// The moments at which names need attention.
    timers: BTreeSet<(Moment, LockName)>,
    /// How many names need the heartbeat, by the shortest TTL of each.
    ttls: BTreeMap<Duration, usize>,
    /// How many names need attention.
    unsettled: usize,
    /// The names with a waiting entry.
    queued: BTreeSet<LockName>,
    /// When the entries of all names are polled, after a notification without a name.
    poll_all_at: Option<Moment>,
    /// The earliest moment of the next poll of all names.
    poll_all_not_before: Moment,
    /// The last acquisition of this client, for each name that has nothing else to do.
    ended: HashMap<LockName, Ended>,
    timeouts: Timeouts,
    next_id: AcquisitionId,
    next_request: u64,
    next_lease: u64,
    /// When the client began to close.
    closing_since: Option<Moment>,
    /// Why the last release failed while the client closed.
    unreleased: Option<SharedError>,
    /// From this moment on, expired entries of other clients are dead: the store has answered this
    /// client promptly for long enough.
    steady_at: Moment,
    /// The last answer of the store.
    answered_at: Option<Moment>,
    /// From this moment on, this client would have noticed an interruption of the store: no long
    /// gap between its answers precedes it.
    gap_free_from: Moment,
    actions: Vec<Action>,
}

/// The token of a grant, and how long the holder may rely on it.
struct GrantTerms {
    token: FencingToken,
    /// The grant was made after this moment.
    since: Moment,
    /// How long the grant lasts from `since` without a heartbeat.
    lasts: Duration,
    /// How long the grant lasts after a heartbeat.
    ttl: Duration,
    epoch: Epoch,
    may_linger: bool,
    /// The grant adds to an exclusive holding of the owner elsewhere, whatever the claim asked for.
    is_joined: bool,
}

impl Engine {
    /// Creates the engine of a client without a row; `holder` describes the client to people.
    /// `first_id` is random: the identities of all acquisitions start from it.
    pub(crate) fn new(client: ClientId, holder: Arc<str>, first_id: AcquisitionId) -> Self {
        Self {
            heartbeat: Heartbeat::new(client),
            holder,
            names: HashMap::default(),
            waiters: HashMap::default(),
            leases: HashMap::default(),
            in_flight: HashMap::default(),
            timers: BTreeSet::new(),
            ttls: BTreeMap::new(),
            unsettled: 0,
            queued: BTreeSet::new(),
            poll_all_at: None,
            poll_all_not_before: Moment::default(),
            ended: HashMap::default(),
            timeouts: Timeouts::default(),
            next_id: first_id,
            next_request: 0,
            next_lease: 0,
            closing_since: None,
            unreleased: None,
            steady_at: Moment::default(),
            answered_at: None,
            gap_free_from: Moment::default(),
            actions: Vec::new(),
        }
    }

    /// Handles an input and returns the actions to carry out, in order.
    pub(crate) fn handle(&mut self, now: Moment, input: Input) -> Vec<Action> {
        self.expire(now);
        match input {
            Input::Acquire { waiter, spec } => self.acquire(now, waiter, spec),
            Input::Resume { waiter, spec, exported } => self.resume(now, waiter, spec, exported),
            Input::Amend { lease, amendment } => self.amend(now, lease, amendment),
            Input::StartHoldTime { lease, hold_time } => self.start_hold_time(now, lease, hold_time),
            Input::Export { lease } => self.export(now, lease, None),
            Input::Delivered { lease, exported } => self.on_delivered(now, lease, exported),
            Input::HandBack { lease, exported } => self.hand_back(now, lease, exported),
            Input::Cancel { waiter } => {
                if let Some(name) = self.waiters.get(&waiter).cloned() {
                    self.leave(now, waiter, None);
                    self.advance(now, &name);
                }
            }
            Input::Release { lease } => self.release(now, lease, true),
            Input::Discard { lease } => self.release(now, lease, false),
            Input::Answer { request, answer } => self.on_answered(now, request, answer),
            Input::Evicted { name, token } => self.on_evicted(now, &name, token),
            Input::LookUp { name } => self.look_up(now, &name),
            Input::Notified(Notification::Granted { name, granted, notice }) => {
                self.on_grant_notified(now, &name, granted, notice)
            }
            Input::Notified(Notification::AnyName) => self.poll_all_at = Some(now.max(self.poll_all_not_before)),
            Input::Tick => {}
            Input::Close => self.close(now),
        }
        self.poll_all(now);
        self.beat(now);
        if self.is_closing() && self.is_settled() {
            self.names.clear();
            self.ttls.clear();
            self.queued.clear();
            let error = self.unreleased.take();
            self.actions.push(Action::Closed { error });
        }
        std::mem::take(&mut self.actions)
    }

    /// Sets whether a client whose heartbeat is answered is notified of grants by other clients. It
    /// is not, unless set.
    pub(crate) fn set_can_notify(&mut self, can_notify: bool) {
        self.heartbeat.can_notify = can_notify;
    }

    /// Returns the number of leases that callers hold.
    pub(crate) fn held(&self) -> usize {
        self.leases.len()
    }

    fn is_closing(&self) -> bool {
        self.closing_since.is_some()
    }

    /// Returns whether an entry waits for a name that another client may grant it.
    pub(crate) fn is_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Returns the state of the heartbeat.
    pub(crate) fn heartbeat_status(&self, now: Moment) -> HeartbeatStatus {
        match self.shortest() {
            Some(_) => self.heartbeat.heartbeat_status(now),
            None => HeartbeatStatus::Idle,
        }
    }

    /// Returns the moment until which the holder may rely on a lease. `None`: the lease has ended.
    pub(crate) fn deadline(&self, lease: LeaseId) -> Option<Moment> {
        let (name, id) = self.leases.get(&lease)?;
        let holding = self.names.get(name)?.holdings.iter().find(|holding| holding.id() == *id)?;
        let HoldingState::Held(leases) = &holding.state else {
            return None;
        };
        let ends = leases.iter().find(|local| local.id == lease)?.ends;
        let deadline = holding.lifetime.deadline(&self.heartbeat);
        Some(ends.map_or(deadline, |ends| ends.min(deadline)))
    }

    /// Returns the identity of a waiter's claim, and how many waiters of this client without an
    /// entry are ahead of it.
    pub(crate) fn position(&self, waiter: WaiterId) -> Option<(AcquisitionId, usize)> {
        let waiters = &self.names.get(self.waiters.get(&waiter)?)?.waiters;
        let own = waiters.iter().position(|other| other.id == waiter)?;
        let ahead = waiters.iter().take(own).filter(|other| !other.has_entry()).count();
        Some((waiters[own].claim.id, ahead))
    }

    /// Returns whether the only work left is to repeat withdrawals in case a request takes effect
    /// late.
    pub(crate) fn is_settled(&self) -> bool {
        self.unsettled == 0
    }

    /// Returns whether the engine has work for an acquisition in this state.
    #[cfg(test)]
    pub(crate) fn knows(&self, name: &LockName, id: AcquisitionId, state: crate::protocol::EntryState) -> bool {
        self.names.get(name).is_some_and(|name| name.knows(id, state))
    }

    /// Returns whether the engine has no holding, no waiter and no request in flight.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        let is_empty = self.names.is_empty() && self.in_flight.is_empty() && self.timeouts.next().is_none();
        is_empty && self.waiters.is_empty() && self.leases.is_empty()
    }

    /// Polls the entries of a name, because another client may have granted the name to one of
    /// them.
    fn on_notified(&mut self, now: Moment, name: &LockName) {
        if let Some(state) = self.names.get_mut(name) {
            state.is_notified = true;
        }
        self.advance(now, name);
    }

    /// Sets when the entries of a name are polled. The first of them waits behind `ahead` others;
    /// the holder expires after `remaining`.
    fn poll_later(&mut self, now: Moment, name: &LockName, ahead: u32, remaining: Option<Duration>) {
        let can_notify = self.heartbeat.can_notify;
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let pace = state.queue_pace.get_or_insert(QueuePace::new(now));
        pace.on_polled(now, ahead);
        let pause = if can_notify { longest_interval(ahead) } else { pace.interval(now) };
        state.poll_at = Some(now + remaining.map_or(pause, |remaining| remaining.min(pause)));
    }

    /// Polls the entries of every name if a poll is due.
    fn poll_all(&mut self, now: Moment) {
        if self.poll_all_at.is_none_or(|at| at > now) {
            return;
        }
        self.poll_all_at = None;
        let names = self.queued.clone();
        self.poll_all_not_before = now + POLL_EACH * u32::try_from(names.len()).unwrap_or(u32::MAX);
        names.iter().for_each(|name| self.on_notified(now, name));
    }

    /// Releases a lease. `honours_hold_time`: the name stays taken until the requested minimum hold
    /// time is over.
    fn release(&mut self, now: Moment, lease: LeaseId, honours_hold_time: bool) {
        let Some((name, id)) = self.leases.remove(&lease) else {
            // The lease was lost just before, and its holder may wait for a verdict.
            let verdict = Verdict::Lost(LossCause::Expired);
            return self.actions.push(Action::Released { lease, verdict });
        };
        let Some(holding) = self.names.get_mut(&name).and_then(|state| state.holding(id)) else {
            return;
        };
        if let HoldingState::Held(leases) = &mut holding.state {
            let released: Vec<_> = leases.extract_if(.., |other| other.id == lease).collect();
            if leases.is_empty() {
                holding.begin_release(now, &released, Some(lease), honours_hold_time);
            } else {
                holding.looks.leave(lease);
            }
        }
        self.advance(now, &name);
    }

    fn close(&mut self, now: Moment) {
        self.closing_since.get_or_insert(now);
        for waiter in self.waiters.keys().copied().collect::<BTreeSet<_>>() {
            self.leave(now, waiter, Some(Refusal::Closed));
        }
        for name in self.sorted_names() {
            let Some(state) = self.names.get_mut(&name) else {
                continue;
            };
            state.withdrawals.retain(|withdrawal| !(withdrawal.is_kept && withdrawal.due > now));
            for withdrawal in &mut state.withdrawals {
                withdrawal.due = withdrawal.due.min(now);
                withdrawal.timed_out.iter_mut().for_each(|(_, at)| *at = now);
            }
            for holding in &mut state.holdings {
                if let HoldingState::Held(leases) = &mut holding.state {
                    let ended = std::mem::take(leases);
                    for lease in &ended {
                        self.leases.remove(&lease.id);
                        self.actions.push(Action::Lost { lease: lease.id, cause: LossCause::Shutdown });
                    }
                    holding.begin_release(now, &ended, None, true);
                }
            }
            self.refuse_timed_out(now, &name, None);
            self.advance(now, &name);
        }
    }

    /// Sends the heartbeat that is due.
    fn beat(&mut self, now: Moment) {
        if self.heartbeat.due().is_none_or(|due| due > now) {
            return;
        }
        if is_on(Mutation::BeatBehindOthers) && !self.in_flight.is_empty() {
            return;
        }
        if self.shortest().is_none() {
            return self.heartbeat.cancel_next_beat();
        }
        let request = self.new_request();
        let body = Arc::new(self.heartbeat.send(now, request));
        self.actions.push(Action::Send { request, body, is_urgent: true });
    }

    /// Returns the names in an order that does not depend on the table of names.
    fn sorted_names(&self) -> Vec<LockName> {
        let mut names: Vec<_> = self.names.keys().cloned().collect();
        names.sort_unstable();
        names
    }

    // ---- statements

    /// Sends the due statements about a name: one that changes the name, and looks.
    fn advance(&mut self, now: Moment, name: &LockName) {
        self.decide_tries(name);
        let (epoch, is_steady) = (self.heartbeat.epoch(), self.is_steady(now));
        let next = |state: &mut Box<NameState>| state.next(name, now, epoch, is_steady);
        while let Some((step, body)) = self.names.get_mut(name).and_then(next) {
            self.send(now, name, step, body);
        }
        self.reschedule(now, name);
    }

    /// Returns whether the store has answered this client promptly for long enough, so that expired
    /// entries of other clients are dead.
    fn is_steady(&self, now: Moment) -> bool {
        now >= self.steady_at && !self.heartbeat.is_late(now)
    }

    fn send(&mut self, now: Moment, name: &LockName, step: Step, body: Request) {
        let (request, body) = (self.new_request(), Arc::new(body));
        if let Some(state) = self.names.get_mut(name).filter(|_| !matches!(step, Step::Look(_))) {
            debug_assert!(!state.is_busy(), "one statement at a time");
            state.sent = Some((now, Arc::clone(&body)));
        }
        let epoch = self.heartbeat.epoch();
        let beat_at = self.heartbeat.beat_at(epoch);
        let is_urgent = matches!(step, Step::Look(_));
        self.in_flight.insert(request, InFlight { name: name.clone(), step, body: Arc::clone(&body), epoch, beat_at });
        self.actions.push(Action::Send { request, body, is_urgent });
    }

    fn new_request(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId(self.next_request)
    }

    fn new_id(&mut self) -> AcquisitionId {
        self.next_id = self.next_id.next();
        self.next_id
    }
}

/// The terms of a lease that enters a holding.
struct ReentryTerms {
    ttl: Duration,
    is_renewed: bool,
    hold_time: HoldTime,
}

/// Adds a lease to a holding.
fn enter(holding: &mut Holding, now: Moment, hold_time: HoldTime, next_lease: &mut u64) -> Grant {
    *next_lease += 1;
    let lease = LeaseId(*next_lease);
    if let HoldingState::Held(leases) = &mut holding.state {
        leases.push(LocalLease::new(lease, now, hold_time));
    }
    let Claim { name, mode, .. } = &holding.claim;
    Grant { lease, name: name.clone(), id: holding.id(), token: holding.token, mode: *mode }
}
