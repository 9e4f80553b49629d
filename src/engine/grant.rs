//! How waiters get a name: by an answer to their own request, or by a grant of another client.

use std::time::Duration;

use super::action::{Action, Grant, Refusal, WaiterId};
use super::heartbeat::Epoch;
use super::holding::{EXTEND_AFTER, Holding};
use super::lifetime::relied_on;
use super::poll_interval::{QueuePace, longest_interval};
use super::waiter::{Waiter, WaiterState};
use super::{Engine, GrantTerms, ReentryTerms, enter};
use crate::clock::Moment;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{AcquisitionId, Claim, CurrentHolder, Granted, Holder, Mode, Polled, Presence};
use crate::token::FencingToken;

impl Engine {
    /// Handles a granted claim of this client. Its waiter still waits, or the claim is being
    /// withdrawn.
    pub(super) fn on_granted(&mut self, now: Moment, name: &LockName, id: AcquisitionId, terms: GrantTerms) {
        let GrantTerms { token, since, lasts, ttl, may_linger, .. } = terms;
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some(i) = state.waiters.iter().position(|waiter| waiter.claim.id == id) else {
            if is_on(Mutation::KeepUnwanted) {
                state.withdrawals.retain(|withdrawal| withdrawal.id != id);
            }
            return;
        };
        // The claim is being deleted from the store, so its waiter asks anew.
        let is_withdrawn = state.withdrawals.iter().any(|withdrawal| withdrawal.id == id);
        if is_withdrawn && !state.waiters[i].adopts() && !is_on(Mutation::SeeFirstOnly) {
            return self.requeue(now, name, id, WaiterState::New, may_linger);
        }
        let deadline = since + relied_on(lasts);
        if deadline <= now + ttl / 4 && !is_on(Mutation::UseLateGrant) {
            // The lease is over, or ends before a heartbeat can extend it. A waiter keeps its turn
            // and asks anew.
            let waiter = &state.waiters[i];
            if waiter.tries() && !waiter.adopts() {
                let waiter = waiter.id;
                state.withdraw(id, now, may_linger);
                return self.leave(now, waiter, Some(Refusal::TooLate));
            }
            return self.requeue(now, name, id, WaiterState::New, may_linger);
        }
        let Some(waiter) = state.remove_waiter(i) else {
            return;
        };
        self.waiters.remove(&waiter.id);
        self.timeouts.remove(&waiter);
        state.queue_pace = None;
        let is_release_requested = state.release_requested_up_to >= token.get();
        let was_try = waiter.tries();
        let (is_adopted, lingers) = (waiter.adopts(), waiter.lingers || may_linger);
        let mut holding =
            Holding { is_adopted, is_release_requested, lingers, ..Holding::from_terms(now, waiter.claim, &terms) };
        if holding.lifetime.is_renewed {
            self.heartbeat.schedule_for(since, ttl);
        }
        let grant = enter(&mut holding, now, waiter.hold_time, &mut self.next_lease);
        let (is_exclusive, is_joined) = (holding.claim.mode == Mode::Exclusive, holding.is_joined);
        // A holding that this grant has replaced ends with the answer to its release.
        state
            .holdings
            .iter_mut()
            .filter(|other| other.may_have_been_replaced(now))
            .for_each(|other| other.retry_at = now);
        state.holdings.push(holding);
        self.deliver(waiter.id, grant, is_release_requested);
        self.admit(now, name, id);
        self.refuse_tries(now, name, is_exclusive);
        // Waiters behind another waiter were reported when they came. A reader that has joined an
        // exclusive holding excludes the readers behind it.
        if was_try || is_joined {
            self.report_waits(name);
        }
    }

    /// Reports the waits of this client behind a holding of its own.
    fn report_waits(&mut self, name: &LockName) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let is_held_alone = state.is_held_alone();
        let is_held = !state.holdings.is_empty();
        for waiter in &mut state.waiters {
            if (is_held_alone || is_held && waiter.claim.mode == Mode::Exclusive) && waiter.report_wait() {
                self.actions.push(Action::Waits { waiter: waiter.id });
            }
        }
    }

    /// Refuses the tries that a grant to this client excludes.
    fn refuse_tries(&mut self, now: Moment, name: &LockName, is_exclusive: bool) {
        let Some(state) = self.names.get(name) else {
            return;
        };
        let is_excluded = |waiter: &&Waiter| is_exclusive || waiter.claim.mode == Mode::Exclusive;
        let refused = state.tries().filter(is_excluded).map(|waiter| (waiter.id, waiter.refusal()));
        for (waiter, refusal) in refused.collect::<Vec<_>>() {
            self.leave(now, waiter, Some(refusal));
        }
    }

    /// Lets other waiters of the owner enter an exclusive holding.
    pub(super) fn admit(&mut self, now: Moment, name: &LockName, id: AcquisitionId) {
        while let Some(state) = self.names.get_mut(name)
            && let Some(i) = state.holdings.iter().position(|h| h.id() == id && h.can_be_entered())
            && let Some(other) = state.remove_waiter_of(state.holdings[i].claim.owner)
        {
            if state.may_know(&other) {
                state.withdraw(other.claim.id, now, other.lingers);
            }
            self.waiters.remove(&other.id);
            self.timeouts.remove(&other);
            let token = state.holdings[i].token;
            match other.resumes {
                Some(exported) if exported.token != token => {
                    self.actions.push(Action::Refused { waiter: other.id, refusal: Refusal::Lost });
                    continue;
                }
                _ => {}
            }
            let Claim { ttl, is_renewed, .. } = other.claim;
            self.enter_holding(now, name, id, other.id, ReentryTerms { ttl, is_renewed, hold_time: other.hold_time });
        }
    }

    /// Lets a caller share a holding of its owner.
    pub(super) fn enter_holding(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        waiter: WaiterId,
        ReentryTerms { ttl, is_renewed, hold_time }: ReentryTerms,
    ) {
        let Some(holding) = self.names.get_mut(name).and_then(|state| state.holding(id)) else {
            return;
        };
        holding.raise_ttl(now, ttl, is_renewed);
        let grant = enter(holding, now, hold_time, &mut self.next_lease);
        let is_release_requested = holding.is_release_requested;
        self.deliver(waiter, grant, is_release_requested);
    }

    /// Grants a lease to its caller. `is_release_requested`: the holder was asked earlier to
    /// release it.
    pub(super) fn deliver(&mut self, waiter: WaiterId, grant: Grant, is_release_requested: bool) {
        let lease = grant.lease;
        self.leases.insert(lease, (grant.name.clone(), grant.id));
        self.actions.push(Action::Granted { waiter, grant });
        if is_release_requested && !is_on(Mutation::TellFirstOnly) {
            self.actions.push(Action::ReleaseRequested { lease });
        }
    }

    /// Handles a notification of a grant.
    ///
    /// Until the TTL has passed after a heartbeat, nothing ends the holding of an entry without a
    /// notice to its client. So without a notice since the grant, the latest heartbeat tells until
    /// when the grant lasts. Otherwise, or if that is too soon, a poll does.
    pub(super) fn on_grant_notified(
        &mut self,
        now: Moment,
        name: &LockName,
        Granted { id, token }: Granted,
        notice: i64,
    ) {
        let is_meant = |waiter: &&Waiter| waiter.claim.id == id && waiter.is_queued();
        let state = self.names.get(name).filter(|state| !state.is_busy());
        let ttl = state.and_then(|state| state.foremost().find(is_meant)).map(|waiter| waiter.claim.ttl.min(GRANT_TTL));
        match (self.heartbeat.beat_at_notice(notice), ttl) {
            (Some(beat_at), Some(ttl)) if !ends_soon(now, beat_at, ttl, ttl) => {
                self.on_granted_by_other(now, name, id, token, (beat_at, Some(ttl)), self.heartbeat.epoch());
                // Any role may notify. The answer to an extension shows that the store granted it.
                if let Some(holding) = self.names.get_mut(name).and_then(|state| state.holding(id)) {
                    holding.extend_at.get_or_insert(now + EXTEND_AFTER);
                }
                self.advance(now, name);
            }
            _ => self.on_notified(now, name),
        }
    }

    /// Handles a grant by a transition or a release. It lasts for `remaining` from `since`, the
    /// time at which the request that reported the grant was sent.
    pub(super) fn on_granted_by_other(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        token: FencingToken,
        (since, remaining): (Moment, Option<Duration>),
        epoch: Epoch,
    ) {
        let Some(waiter) = self.names.get_mut(name).and_then(|state| state.waiter(id)) else {
            return;
        };
        let ttl = waiter.claim.ttl.min(GRANT_TTL);
        let (since, remaining) = if is_on(Mutation::CountFromNews) { (now, Some(ttl)) } else { (since, remaining) };
        let lasts = remaining.unwrap_or_default();
        // Where no heartbeat moves the expiry, or the expiry is near, an extension sets it before
        // the caller gets the lease.
        if !waiter.claim.is_renewed || ends_soon(now, since, lasts, ttl) {
            (waiter.state, waiter.granted_in) = (WaiterState::Granted(token), Some(epoch));
            return;
        }
        let may_linger = waiter.lingers;
        let terms = GrantTerms { token, since, lasts, ttl, epoch, may_linger, is_joined: false };
        self.on_granted(now, name, id, terms);
    }

    /// Handles the store's refusal of a plain acquire.
    pub(super) fn on_refused(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        sent_at: Moment,
        holder: CurrentHolder,
    ) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some(waiter) = state.waiter(id) else {
            return;
        };
        waiter.state = WaiterState::Refused;
        match holder {
            CurrentHolder::Valid { owner, .. } if waiter.reenters && owner == Some(waiter.claim.owner) => {
                waiter.may_join = true
            }
            // One of the holders that share the name may be of the same owner.
            CurrentHolder::Valid { owner, .. } if waiter.tries() && !(waiter.reenters && owner.is_none()) => {
                let (first, mode) = (waiter.id, waiter.claim.mode);
                // The answer refuses every try that came before the request was sent, too.
                let is_refused = |other: &&Waiter| {
                    let is_like = other.claim.mode == mode || other.claim.mode == Mode::Exclusive;
                    is_like && !other.reenters && other.state == WaiterState::New && other.since <= sent_at
                };
                let others = state.tries().filter(is_refused).map(|other| other.id);
                let refused: Vec<WaiterId> = std::iter::once(first).chain(others).collect();
                for waiter in refused {
                    self.leave(now, waiter, Some(Refusal::Taken));
                }
            }
            CurrentHolder::Vacant if waiter.tries() && is_on(Mutation::RefuseExpired) => {
                let waiter = waiter.id;
                self.leave(now, waiter, Some(Refusal::Taken));
            }
            CurrentHolder::Valid { .. } if waiter.report_wait() => {
                let waiter = waiter.id;
                self.actions.push(Action::Waits { waiter });
            }
            _ => {}
        }
    }

    /// Handles a waiter whose owner has no holding to enter: it waits like any other waiter.
    pub(super) fn on_not_joined(&mut self, now: Moment, name: &LockName, id: AcquisitionId) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let is_first = state.first().is_some_and(|first| first.claim.id == id);
        let Some(waiter) = state.waiter(id) else {
            return;
        };
        if waiter.resumes.is_some() {
            let waiter = waiter.id;
            return self.leave(now, waiter, Some(Refusal::Lost));
        }
        waiter.may_join = false;
        let (waiter_id, mode, tries) = (waiter.id, waiter.claim.mode, waiter.tries());
        if tries && !is_first {
            // The owner may share the name.
            waiter.state = WaiterState::Refused;
        }
        if tries && state.is_taken(mode) {
            self.leave(now, waiter_id, Some(Refusal::Taken));
        }
    }

    pub(super) fn on_enqueued(
        &mut self,
        now: Moment,
        name: &LockName,
        ids: &[AcquisitionId],
        sent_at: Moment,
        holder: CurrentHolder,
    ) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        if !state.has_entries() {
            state.queue_pace = Some(QueuePace::new(now));
        }
        let mut is_any = false;
        for waiter in state.waiters.iter_mut().filter(|waiter| ids.contains(&waiter.claim.id)) {
            (waiter.state, waiter.may_join) = (WaiterState::Queued, false);
            is_any = true;
            if matches!(holder, CurrentHolder::Valid { .. }) && waiter.report_wait() {
                self.actions.push(Action::Waits { waiter: waiter.id });
            }
        }
        if !is_any {
            return;
        }
        match holder {
            CurrentHolder::Valid { remaining, .. } => self.poll_later(now, name, 0, Some(remaining)),
            CurrentHolder::Vacant | CurrentHolder::Unknown => {
                state.read_at = Some(now);
                // The decision that follows may end without another poll.
                state.poll_at.get_or_insert(now + longest_interval(0));
            }
        }
        self.heartbeat.schedule_for_entry(sent_at);
    }

    pub(super) fn on_polled(
        &mut self,
        now: Moment,
        name: &LockName,
        ids: &[AcquisitionId],
        sent_at: Moment,
        epoch: Epoch,
        polled: Option<Polled>,
    ) {
        let Some(Polled { row, presences }) = polled else {
            return self.without_row(name, None);
        };
        // A forgotten holding is valid as long as this client beats, so the queue behind it would
        // never be read.
        let client = self.heartbeat.client;
        if let Some(state) = self.names.get_mut(name) {
            state.withdraw_forgotten(now, client, &row, &[]);
        }
        if !is_on(Mutation::ForgetAskedGrant) {
            self.note_release_requests(name, row.asked);
        }
        let ahead = least_ahead(&presences);
        let is_valid = match row.holder {
            Holder::Nobody => false,
            Holder::Lease(_) | Holder::Kept => row.remaining.is_some(),
            Holder::Entries => ahead > 0,
        };
        self.poll_later(now, name, ahead, row.remaining);
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let holder = state.exclusive_owner();
        let in_entries = row.holder == Holder::Entries;
        let mut needs_read = !is_valid;
        for waiter in state.foremost_mut() {
            let is_own = waiter.reenters && row.owner == Some(waiter.claim.owner) && !is_on(Mutation::WaitForOneself);
            waiter.may_join |= is_own && is_valid && !in_entries;
            // Only the queue shows whether the owner has released its entries, which keep the name.
            needs_read |= is_own && in_entries;
        }
        if needs_read {
            state.read_at = Some(now);
        }
        for (id, presence) in ids.iter().zip(presences) {
            let Some(waiter) = self.names.get_mut(name).and_then(|state| state.waiter(*id)) else {
                continue;
            };
            match presence {
                Presence::Holding { token, remaining } => {
                    self.on_granted_by_other(now, name, *id, token, (sent_at, remaining), epoch);
                }
                Presence::Waiting { .. } if waiter.can_join(holder) => {
                    self.requeue(now, name, *id, WaiterState::Refused, false)
                }
                Presence::Waiting { .. } => waiter.state = WaiterState::Queued,
                // The entry or its grant has expired. The waiter keeps its turn and joins anew.
                Presence::None => self.requeue(now, name, *id, WaiterState::Refused, false),
            }
        }
    }

    /// Withdraws a waiter's claim from the store, and lets the waiter ask anew under another
    /// identity.
    pub(super) fn requeue(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        state: WaiterState,
        may_linger: bool,
    ) {
        let new_id = self.new_id();
        let Some(queue) = self.names.get_mut(name) else {
            return;
        };
        // A waiter asks for an adopted holding under the holding's own identity.
        if let Some(waiter) = queue.waiter(id).filter(|waiter| !waiter.adopts()) {
            let lingers = std::mem::take(&mut waiter.lingers) || may_linger;
            (waiter.claim.id, waiter.state) = (new_id, state);
            queue.withdraw(id, now, lingers);
        }
    }
}

/// Returns whether a grant that lasts for `lasts` from `since` ends within half of its TTL.
fn ends_soon(now: Moment, since: Moment, lasts: Duration, ttl: Duration) -> bool {
    since + relied_on(lasts) <= now + ttl / 2
}

/// Returns how many entries of other clients are before the first of these entries. In the store,
/// the entries of one client may have another order: a request may have been sent twice.
fn least_ahead(presences: &[Presence]) -> u32 {
    let ahead = presences.iter().filter_map(|presence| match presence {
        Presence::Waiting { ahead } => Some(*ahead),
        Presence::None | Presence::Holding { .. } => None,
    });
    ahead.min().unwrap_or(u32::MAX)
}
