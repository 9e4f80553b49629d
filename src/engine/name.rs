//! One name: its waiters in this process, its holdings, and the withdrawals of earlier ones.
//!
//! At most one statement that changes a name is in flight at any time, so answers never cross. The
//! first waiter asks the store; after a refusal, it gets an entry there. The other waiters wait
//! behind it in this process. These waiters get entries: those that could hold the name together
//! with the first, the next waiter behind them, and those whose owner may share the name again.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::action::{Exported, WaiterId};
use super::holding::Holding;
use super::poll_interval::QueuePace;
use super::recheck::Ended;
use super::waiter::{Waiter, WaiterState};
use super::withdrawal::{Detachment, FIRST_PAUSE, LATE_EFFECT, Withdrawal};
use crate::backoff::ROUND_TRIP;
use crate::clock::Moment;
use crate::mutation::{Mutation, is_on};
use crate::owner::Owner;
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{AcquisitionId, Claim, ClientId, EntryRow, EntryState, Holder, LeaseRow, Mode, Request};
use crate::token::FencingToken;

/// The most entries of a client that wait for one name, without those whose owner may share it
/// again.
pub(super) const MAX_ENTRIES: usize = 16;

/// The time between two tries of a name that is free and yet not granted.
const OVERTAKEN_PAUSE: Duration = Duration::from_millis(5);

/// A store that has not answered for this long is out of reach.
pub(super) const UNREACHABLE_AFTER: Duration = Duration::from_secs(1);

/// The needs of a name, apart from the statements about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Needs {
    /// The shortest TTL that the heartbeat renews. `None`: no heartbeat is needed.
    pub(super) ttl: Option<Duration>,
    /// The name has a holding, a waiter, a statement in flight, or a withdrawal that was not sent
    /// yet or must still be confirmed.
    pub(super) is_unsettled: bool,
    /// An entry waits for a grant, perhaps by another client.
    pub(super) awaits_grant: bool,
}

/// The state of one name in this client: its waiters, its holdings and its withdrawals.
#[derive(Default)]
pub(super) struct NameState {
    /// The needs of the name when it was last advanced.
    pub(super) needs: Needs,
    /// In order of arrival, but tries come first: a try without a named owner is refused while a
    /// waiter waits.
    pub(super) waiters: VecDeque<Waiter>,
    /// The number of waiters whose owner was named by the caller.
    pub(super) reentering: usize,
    /// The number of waiters that only try.
    tries: usize,
    /// Tries that came while the store took long to answer the first waiter. Its answer shows
    /// whether they are refused.
    pub(super) undecided: Vec<Waiter>,
    pub(super) holdings: Vec<Holding>,
    pub(super) withdrawals: Vec<Withdrawal>,
    pub(super) detachments: Vec<Detachment>,
    /// The statement in flight, and when it was sent. Looks do not count.
    pub(super) sent: Option<(Moment, Arc<Request>)>,
    /// When the timer of the name is due.
    pub(super) timer: Option<Moment>,
    /// When to read the name: it may be granted to an entry, or belong to a forgotten acquisition.
    pub(super) read_at: Option<Moment>,
    /// When an acquisition of this client ended last.
    pub(super) ended_at: Option<Moment>,
    /// The store may still have an acquisition that has ended: the read is repeated until the store
    /// answers.
    pub(super) is_rechecked: bool,
    /// When to poll the entries of this client.
    pub(super) poll_at: Option<Moment>,
    /// `None`: no entry of this client has waited since the last grant.
    pub(super) queue_pace: Option<QueuePace>,
    /// Another client may have granted the name to an entry of this client. The notification may
    /// come before the answer to the request that adds the entry.
    pub(super) is_notified: bool,
    /// The highest known token whose holder was asked to release the name.
    pub(super) release_requested_up_to: i64,
    /// Other clients are known to wait for the name.
    pub(super) is_contended: bool,
    /// Since when a decision has been put off because entries of other clients seem to be dead.
    pub(super) put_off_since: Option<Moment>,
    /// How often in a row a decision was overtaken.
    pub(super) overtaken: u32,
    /// The last decision was to end expired holding entries, and was overtaken: they may be locked
    /// for as long as a transaction that they fence is open.
    pub(super) may_be_fenced: bool,
}

impl NameState {
    /// `is_contended`: other clients are expected to wait for the name, or to hold it.
    pub(super) fn new(is_contended: bool) -> Self {
        // Most names have one waiter and one holding. Room for four of them, which the first would
        // make, is too large for the allocator's fast path.
        let (waiters, holdings) = (VecDeque::with_capacity(1), Vec::with_capacity(1));
        Self { is_contended, waiters, holdings, ..Self::default() }
    }

    /// Returns whether a statement is in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.sent.is_some()
    }

    /// Returns whether the store may know the claim of a waiter, or come to know it.
    pub(super) fn may_know(&self, waiter: &Waiter) -> bool {
        waiter.leaves_traces() || self.sent.as_ref().is_some_and(|(_, body)| body.may_create(waiter.claim.id))
    }

    pub(super) fn is_idle(&self) -> bool {
        let is_empty = self.waiters.is_empty() && self.holdings.is_empty() && self.withdrawals.is_empty();
        let is_decided = self.undecided.is_empty() && self.detachments.is_empty() && self.read_at.is_none();
        is_empty && is_decided && !self.is_busy()
    }

    /// Returns the end of the last acquisition, if one has ended.
    pub(super) fn ended(&self) -> Option<Ended> {
        self.ended_at.map(|at| Ended { at, is_contended: self.is_contended })
    }

    pub(super) fn push_waiter(&mut self, waiter: Waiter) {
        self.reentering += usize::from(waiter.reenters);
        self.tries += usize::from(waiter.tries());
        self.waiters.push_back(waiter);
    }

    pub(super) fn remove_waiter(&mut self, i: usize) -> Option<Waiter> {
        let waiter = self.waiters.remove(i)?;
        self.reentering -= usize::from(waiter.reenters);
        self.tries -= usize::from(waiter.tries());
        Some(waiter)
    }

    /// Puts a try into the queue.
    pub(super) fn begin_to_wait(&mut self, id: WaiterId) {
        if let Some(waiter) = self.waiters.iter_mut().find(|waiter| waiter.id == id && waiter.tries()) {
            waiter.begin_to_wait();
            self.tries -= 1;
        }
    }

    /// Removes a try that the answer to the first waiter decides.
    pub(super) fn remove_undecided(&mut self, id: WaiterId) -> Option<Waiter> {
        let i = self.undecided.iter().position(|waiter| waiter.id == id)?;
        Some(self.undecided.remove(i))
    }

    /// Returns whether a try without a named owner is refused in this mode: this client holds the
    /// name or waits for it.
    pub(super) fn excludes_try(&self, mode: Mode) -> bool {
        self.is_taken(mode) || self.has_waiters()
    }

    /// Returns whether a caller waits for the name.
    pub(super) fn has_waiters(&self) -> bool {
        self.waiters.iter().any(|waiter| !waiter.tries())
    }

    /// Removes the first waiter for which the caller named this owner.
    pub(super) fn remove_waiter_of(&mut self, owner: Owner) -> Option<Waiter> {
        if self.reentering == 0 {
            return None;
        }
        let i = self.waiters.iter().position(|waiter| waiter.reenters && waiter.claim.owner == owner)?;
        self.remove_waiter(i)
    }

    /// Returns whether the store has not answered a waiter: a request that it needs has been in
    /// flight for too long.
    pub(super) fn is_unanswered(&self, id: WaiterId, now: Moment) -> bool {
        let waits_for_answer = |waiter: &Waiter| match waiter.state {
            _ if waiter.tries() => self.is_busy_for(ROUND_TRIP, now),
            WaiterState::New => {
                let is_long = waiter.ends_at().is_some_and(|ends_at| ends_at.since(waiter.since) >= ROUND_TRIP);
                is_long && self.is_silent(now)
            }
            _ => self.is_busy_for(UNREACHABLE_AFTER, now),
        };
        // A try that ends undecided is not refused by anyone.
        self.waiters.iter().any(|waiter| waiter.id == id && waits_for_answer(waiter))
            || self.undecided.iter().any(|waiter| waiter.id == id)
    }

    /// Returns whether neither this client nor its first waiter knows whether the name is held.
    pub(super) fn is_unknown(&self) -> bool {
        self.holdings.is_empty() && self.first().is_some_and(|first| first.state == WaiterState::New)
    }

    /// Returns whether the store has not answered anything about the name for a while.
    pub(super) fn is_silent(&self, now: Moment) -> bool {
        self.is_unknown() && self.is_busy_for(ROUND_TRIP, now)
    }

    /// Returns whether a request has been in flight for this long.
    fn is_busy_for(&self, time: Duration, now: Moment) -> bool {
        self.sent.as_ref().is_some_and(|(sent_at, _)| now.since(*sent_at) >= time)
    }

    /// Returns the places of the waiters that may have an entry in the store: the first ones behind
    /// the tries, which get no entries, or all waiters if any has a named owner. The work per
    /// answer does not grow with the number of waiters before and behind them.
    fn places(&self) -> Range<usize> {
        let all = 0..self.waiters.len();
        if self.reentering > 0 {
            return all;
        }
        let start = if is_on(Mutation::SeeFirstOnly) { 0 } else { self.tries };
        start.min(all.end)..(start + 2 * MAX_ENTRIES).min(all.end)
    }

    /// Returns the waiters that may have an entry in the store.
    pub(super) fn foremost(&self) -> impl Iterator<Item = &Waiter> {
        self.waiters.range(self.places())
    }

    pub(super) fn foremost_mut(&mut self) -> impl Iterator<Item = &mut Waiter> {
        self.waiters.range_mut(self.places())
    }

    /// Returns the waiters that may get an entry, and those behind them.
    pub(super) fn queue(&self) -> impl Iterator<Item = &Waiter> {
        self.waiters.range(self.places().start..).filter(|waiter| !waiter.tries())
    }

    /// Returns the waiters that only try. They come first, except for owners that may share the
    /// name.
    pub(super) fn tries(&self) -> impl Iterator<Item = &Waiter> {
        self.waiters.iter().filter(|waiter| waiter.tries()).take(self.tries)
    }

    /// Returns the first waiter in the queue. A waiter that resumes a lease is in no queue.
    pub(super) fn first(&self) -> Option<&Waiter> {
        self.waiters.iter().find(|waiter| waiter.resumes.is_none())
    }

    /// Returns the waiter for which the holder and the queue are read: the first, or a try whose
    /// owner may share the name.
    pub(super) fn candidate(&self) -> Option<&Waiter> {
        let is_refused = |waiter: &&Waiter| waiter.state == WaiterState::Refused && !waiter.may_join;
        let tries = if self.reentering > 0 { usize::MAX } else { 0 };
        let of_owner = || self.waiters.iter().take(tries).find(|w| w.tries() && w.reenters && is_refused(w));
        self.first().filter(is_refused).or_else(of_owner)
    }

    /// Returns whether the name has work for an acquisition in this state.
    pub(super) fn knows(&self, id: AcquisitionId, state: EntryState) -> bool {
        let exported = self.exported_token(id).map(|token| EntryState::Holding(token.get()));
        self.foremost().chain(self.first()).any(|waiter| waiter.claim.id == id)
            || self.holdings.iter().any(|holding| holding.id() == id)
            || self.withdrawals.iter().any(|withdrawal| withdrawal.id == id)
            || exported == Some(state)
    }

    /// Returns the token of an exported lease that this client detaches or resumes.
    fn exported_token(&self, id: AcquisitionId) -> Option<FencingToken> {
        let is_of_lease = |detachment: &&Detachment| detachment.id == id || detachment.renamed == Some(id);
        let detached = self.detachments.iter().find(is_of_lease).map(|detachment| detachment.token);
        let resumed = self.foremost().filter_map(|waiter| waiter.resumes).find(|exported| exported.id == id);
        detached.or(resumed.map(|exported| exported.token))
    }

    /// Withdraws acquisitions that the store has for this client but the client does not know: the
    /// store has missed their end. An export that the store has missed is repeated, also while a
    /// waiter resumes the lease, because the waiter may hand it back.
    pub(super) fn withdraw_forgotten(&mut self, now: Moment, client: ClientId, row: &LeaseRow, entries: &[EntryRow]) {
        let in_row = match row.holder {
            Holder::Lease(id) if row.client == Some(client) => Some((id, EntryState::Holding(row.token))),
            _ => None,
        };
        let entries = entries.iter().filter(|entry| entry.client == Some(client));
        let stored: Vec<_> = entries.map(|entry| (entry.id, entry.state)).chain(in_row).collect();
        let is_stored =
            |exported: &Exported| stored.contains(&(exported.id, EntryState::Holding(exported.token.get())));
        let missed = self.foremost().filter_map(|waiter| {
            let exported = waiter.resumes.filter(is_stored)?;
            let is_detached = self.detachments.iter().any(|detachment| detachment.id == exported.id);
            (!is_detached).then(|| (Claim { id: exported.id, ..waiter.claim.clone() }, exported.token))
        });
        for (claim, token) in missed.collect::<Vec<_>>() {
            self.detach(&claim, token, None, now, false);
        }
        let forgotten = stored.into_iter().filter(|(id, state)| !self.knows(*id, *state)).map(|(id, _)| id);
        for id in forgotten.collect::<Vec<AcquisitionId>>() {
            self.withdraw(id, now, false);
            let except = self.exported_token(id);
            self.withdrawals.iter_mut().filter(|other| other.id == id).for_each(|other| other.except = except);
        }
    }

    pub(super) fn holding(&mut self, id: AcquisitionId) -> Option<&mut Holding> {
        self.holdings.iter_mut().find(|holding| holding.id() == id)
    }

    pub(super) fn waiter(&mut self, id: AcquisitionId) -> Option<&mut Waiter> {
        self.waiters.iter_mut().find(|waiter| waiter.claim.id == id)
    }

    /// Returns whether a holding of this client excludes a holding in this mode.
    pub(super) fn is_taken(&self, mode: Mode) -> bool {
        self.holdings.iter().any(|holding| mode == Mode::Exclusive || holding.claim.mode == Mode::Exclusive)
    }

    /// Returns the owner for which this client holds the name in exclusive mode.
    pub(super) fn exclusive_owner(&self) -> Option<Owner> {
        let exclusive = self.holdings.iter().find(|holding| holding.claim.mode == Mode::Exclusive);
        exclusive.map(|holding| holding.claim.owner)
    }

    /// Returns whether this client holds the name in exclusive mode.
    pub(super) fn is_held_alone(&self) -> bool {
        self.exclusive_owner().is_some()
    }

    /// Returns whether entries of this client wait in the store.
    pub(super) fn has_entries(&self) -> bool {
        self.foremost().any(Waiter::is_queued)
    }

    /// Returns the current needs of the name.
    pub(super) fn needs_now(&self) -> Needs {
        let held = self
            .holdings
            .iter()
            .map(|holding| &holding.lifetime)
            .filter(|time| time.is_renewed)
            .map(|time| time.ttl)
            .min();
        let detaching = self.detachments.iter().map(|detachment| detachment.ttl);
        let awaits_grant = self.has_entries();
        let ttl = held.into_iter().chain(awaits_grant.then_some(GRANT_TTL)).chain(detaching).min();
        let rests = self.waiters.is_empty() && self.holdings.is_empty() && !self.is_busy();
        let is_settled = rests
            && self.withdrawals.iter().all(Withdrawal::may_be_forgotten)
            && self.detachments.iter().all(|detachment| detachment.pause > FIRST_PAUSE);
        Needs { ttl, is_unsettled: !is_settled, awaits_grant }
    }

    /// Schedules the deletion of every trace of an acquisition from the store: now and, if a
    /// request may take effect late, again later.
    pub(super) fn withdraw(&mut self, id: AcquisitionId, now: Moment, lingers: bool) {
        self.withdraw_after(id, now, Duration::ZERO, lingers);
    }

    /// Withdraws an acquisition as [`Self::withdraw`] does, after a pause.
    pub(super) fn withdraw_after(&mut self, id: AcquisitionId, now: Moment, pause: Duration, lingers: bool) {
        if is_on(Mutation::ForgetLost) {
            return;
        }
        let before = self.withdrawals.iter().position(|other| other.id == id).map(|i| self.withdrawals.remove(i));
        let until = before.and_then(|before| before.until).max(lingers.then(|| now + LATE_EFFECT));
        let timed_out = before.and_then(|before| before.timed_out);
        let due = now + pause;
        let (pause, is_kept, except) = (FIRST_PAUSE, false, None);
        self.withdrawals.push(Withdrawal { id, due, pause, until, is_kept, except, timed_out });
    }

    /// Withdraws an acquisition as [`Self::withdraw`] does, when it no longer keeps the name.
    pub(super) fn withdraw_kept(&mut self, id: AcquisitionId, now: Moment, kept_until: Moment) {
        self.withdraw_after(id, now, kept_until.since(now), true);
        if let Some(withdrawal) = self.withdrawals.last_mut().filter(|last| last.id == id) {
            withdrawal.is_kept = true;
        }
    }

    /// Counts a decision that was overtaken. Returns the pause before the next one: longer each time.
    pub(super) fn count_overtaken(&mut self) -> Duration {
        self.overtaken += 1;
        if self.overtaken == 1 { Duration::ZERO } else { OVERTAKEN_PAUSE * 2_u32.pow(self.overtaken.min(6)) / 2 }
    }

    /// Returns the moments at which work is due, apart from deadlines of holdings and waiters.
    pub(super) fn wakes_at(&self) -> impl Iterator<Item = Moment> {
        let is_idle = !self.is_busy();
        let of_holding = |h: &Holding| match h.next_amendment() {
            None if h.is_held() => h.extend_at.map(|at| at.max(h.retry_at)),
            _ => Some(h.retry_at),
        };
        let holdings = self.holdings.iter().filter_map(of_holding);
        let looks = self.holdings.iter().filter_map(|holding| holding.looks.retry_at);
        let withdrawals = self.withdrawals.iter().map(|withdrawal| withdrawal.due);
        let timeouts = self.withdrawals.iter().filter_map(|withdrawal| withdrawal.timed_out).map(|(_, at)| at);
        let detachments = self.detachments.iter().map(|detachment| detachment.due);
        let polls = self.poll_at.filter(|_| self.has_entries());
        let retries = self.foremost().chain(self.first()).map(|waiter| waiter.retry_at);
        holdings
            .chain(withdrawals)
            .chain(detachments)
            .chain(retries)
            .chain(self.read_at)
            .chain(polls)
            .filter(move |_| is_idle)
            .chain(timeouts)
            .chain(looks)
    }
}
