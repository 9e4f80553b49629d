//! The heartbeat that renews all leases and entries of one client.
//!
//! One beat extends every lease of the client, so a holder may rely on a lease until `time before
//! the beat was sent + TTL`, less a margin. A beat whose answer has a new notice begins an epoch: a
//! lease was taken away from the client, or its release was requested. That beat and later ones
//! extend a holding only after the holding was looked up in that epoch. The same applies to the
//! first answered beat after a failed beat: another store may answer, which has missed the last
//! grants. The sessions of ZooKeeper and Chubby work alike.

use std::time::Duration;

use super::name::UNREACHABLE_AFTER;
use crate::clock::Moment;
use crate::mutation::{Mutation, is_on};
use crate::protocol::timing::{GRANT_TTL, HEARTBEAT_INTERVAL};
use crate::protocol::{ClientId, Request, RequestId, Response};

/// The time until a failed beat is sent again.
const BEAT_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Counts the notices that this client has acted upon. The beats of an epoch extend the holdings
/// that were looked up in that epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Epoch(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The client has no row in the store.
    Unregistered,
    /// The client has a row, with this latest notice.
    Beating(i64),
}

/// The state of the heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeartbeatStatus {
    /// No heartbeat is needed.
    Idle,
    Answered,
    /// A beat has failed, and none was answered since. A later beat may be in flight, for less than
    /// a second.
    Failed,
    /// A beat has been in flight for so long that the store may be out of reach.
    Late(Duration),
}

pub(super) struct Heartbeat {
    pub(super) client: ClientId,
    /// A client whose heartbeat is answered is notified of grants by other clients.
    pub(super) can_notify: bool,
    state: State,
    epoch: Epoch,
    /// The epoch that the last interruption or registration has begun: one store has answered the
    /// beats since then.
    first_of_store: Epoch,
    /// When the last answered beat of this epoch was sent.
    beat_at: Option<Moment>,
    /// When the last answered beat was sent.
    answered_at: Moment,
    /// The beat in flight, and when it was sent.
    in_flight: Option<(RequestId, Moment)>,
    due: Option<Moment>,
    /// The next answer may come from another server: a beat has failed, or, before the first beat,
    /// another request was repeated.
    is_interrupted: bool,
    /// For [`heartbeat_status`](Self::heartbeat_status): the last beat has failed. Reset when no
    /// beat is needed.
    has_failed: bool,
}

impl Heartbeat {
    pub(super) fn new(client: ClientId) -> Self {
        Self {
            client,
            can_notify: false,
            state: State::Unregistered,
            epoch: Epoch(1),
            first_of_store: Epoch(1),
            beat_at: None,
            answered_at: Moment::default(),
            in_flight: None,
            due: None,
            is_interrupted: false,
            has_failed: false,
        }
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns when the latest beat that extends holdings of this epoch was sent.
    pub(super) fn beat_at(&self, epoch: Epoch) -> Option<Moment> {
        self.beat_at.filter(|_| epoch == self.epoch || is_on(Mutation::IgnoreNotice))
    }

    /// Returns whether one store has answered every beat since the begin of this epoch.
    pub(super) fn is_uninterrupted_since(&self, epoch: Epoch) -> bool {
        !self.is_interrupted && self.state != State::Unregistered && epoch >= self.first_of_store
    }

    /// Returns when the latest answered beat was sent, if its answer had this notice: no later one
    /// was given before that beat.
    pub(super) fn beat_at_notice(&self, notice: i64) -> Option<Moment> {
        let is_latest = self.state == State::Beating(notice) && !self.is_interrupted;
        self.beat_at.filter(|_| is_latest)
    }

    /// Returns when to send the next beat, if any.
    pub(super) fn due(&self) -> Option<Moment> {
        self.due.filter(|_| self.in_flight.is_none())
    }

    /// Schedules a beat for a lease or entry that lasts for `ttl` from `since`.
    pub(super) fn schedule_for(&mut self, since: Moment, ttl: Duration) {
        let due = since + (ttl / 3).min(HEARTBEAT_INTERVAL);
        self.due = Some(self.due.map_or(due, |before| before.min(due)));
    }

    /// Schedules a beat for an entry that waits since `since`. Where the store can notify, the beat
    /// follows the last answered one: a client is notified only after its first beat, and then needs
    /// no poll if its latest beat is recent.
    pub(super) fn schedule_for_entry(&mut self, since: Moment) {
        self.schedule_for(if self.can_notify { self.answered_at } else { since }, GRANT_TTL);
    }

    /// Cancels the next beat, which nothing needs.
    pub(super) fn cancel_next_beat(&mut self) {
        self.due = None;
        self.has_failed = false;
    }

    /// Returns whether a beat has been in flight for so long that the store may be out of reach.
    pub(super) fn is_late(&self, now: Moment) -> bool {
        self.in_flight.is_some_and(|(_, since)| now.since(since) >= UNREACHABLE_AFTER)
    }

    pub(super) fn heartbeat_status(&self, now: Moment) -> HeartbeatStatus {
        match self.in_flight {
            Some((_, since)) if self.is_late(now) => HeartbeatStatus::Late(now.since(since)),
            _ if self.has_failed => HeartbeatStatus::Failed,
            _ => HeartbeatStatus::Answered,
        }
    }

    /// Returns whether this request is the beat in flight.
    pub(super) fn is_beat(&self, request: RequestId) -> bool {
        self.in_flight.is_some_and(|(beat, _)| beat == request)
    }

    pub(super) fn send(&mut self, now: Moment, request: RequestId) -> Request {
        self.in_flight = Some((request, now));
        self.due = None;
        match self.state {
            State::Unregistered => Request::Register { client: self.client },
            State::Beating(_) => Request::Beat { client: self.client },
        }
    }

    /// Records that a beat has failed: another store may answer the next one.
    pub(super) fn on_interrupted(&mut self) {
        self.is_interrupted = !is_on(Mutation::TrustAnyStore);
        self.has_failed = true;
        if is_on(Mutation::DiscardBeats) {
            self.beat_at = None;
        }
    }

    /// Records that another request was repeated. Before the first beat, only this tells that the
    /// store may have been restarted and has lost the latest releases.
    pub(super) fn repeated(&mut self) {
        self.is_interrupted |= self.answered_at == Moment::default() && !is_on(Mutation::TrustAnyStore);
    }

    /// Returns when the latest answered beat was sent.
    pub(super) fn answered_at(&self) -> Moment {
        self.answered_at
    }

    /// Returns when the latest answered beat was sent, if a beat has failed since: the store that
    /// answers next may have missed later changes.
    pub(super) fn interrupted_since(&self) -> Option<Moment> {
        self.is_interrupted.then_some(self.answered_at)
    }

    /// Returns whether an answer to a beat begins a new epoch.
    pub(super) fn is_news(&self, response: &Response) -> bool {
        let (Response::Registered(notice) | Response::Beat(Some(notice))) = response else {
            return false;
        };
        // The first answer after a registration is always news: earlier notices were not seen.
        self.is_interrupted || (self.state != State::Beating(*notice) && !is_on(Mutation::IgnoreNotice))
    }

    /// Handles the answer to a beat that was sent at `sent_at`. `shortest`: the shortest TTL to
    /// keep. Returns `true` if a new epoch has begun, in which every holding must be looked up.
    pub(super) fn on_answered(
        &mut self,
        sent_at: Moment,
        now: Moment,
        shortest: Option<Duration>,
        response: Option<Response>,
    ) -> bool {
        self.in_flight = None;
        let is_new = response.as_ref().is_some_and(|response| self.is_news(response));
        let notice = match response {
            Some(Response::Registered(notice) | Response::Beat(Some(notice))) => notice,
            Some(Response::Beat(None)) => {
                self.state = State::Unregistered;
                self.due = Some(now);
                return false;
            }
            _ => {
                self.due = Some(now + BEAT_RETRY_PAUSE);
                return false;
            }
        };
        let may_be_other_store = self.is_interrupted || self.state == State::Unregistered;
        self.state = State::Beating(notice);
        self.answered_at = sent_at;
        if is_new {
            self.epoch = Epoch(self.epoch.0 + 1);
            self.beat_at = None;
        }
        if may_be_other_store {
            self.first_of_store = self.epoch;
        }
        (self.is_interrupted, self.has_failed) = (false, false);
        self.beat_at = self.beat_at.max(Some(sent_at));
        self.due = None;
        if let Some(ttl) = shortest {
            self.schedule_for(sent_at, ttl);
        }
        is_new
    }
}
