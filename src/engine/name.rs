//! One name: its waiters in this process, its holdings, and the next statement about it.
//!
//! At most one statement that changes a name is on its way at any time, so their answers never
//! cross. The first waiter asks the store; when it is refused, it gets an entry there. The other
//! waiters wait behind it in this process, and get entries only while they could hold the name
//! together with the first.

use std::collections::VecDeque;
use std::time::Duration;

use super::action::{Amendment, Exported, Patience, WaiterId};
use super::heartbeat::Epoch;
use super::holding::{Holding, HoldingState};
use crate::clock::Moment;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::timing::GRANT;
use crate::protocol::{
    Claim, ClientId, Enqueue, EntryState, Extension, Holder, Keeper, LeaseId, Mode, Queue, Release, Request,
};
use crate::token::FencingToken;

/// How many entries of a client wait for one name at most.
const ENTRIES: usize = 16;

/// How many waiting entries are read to decide which one is next.
const LIMIT: u32 = 32;

/// The time between two tries of a name that is free and yet not granted.
const BETWEEN_TRIES: Duration = Duration::from_millis(5);

/// A wait that is about as short as a round trip says nothing about the store.
const SILENCE: Duration = Duration::from_millis(100);

/// A store that has not answered for so long is out of reach.
pub(super) const LONG_SILENCE: Duration = Duration::from_secs(1);

/// The pause before a statement is repeated for the first time.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// For how long a request may take effect after the last attempt to send it was given up.
pub(super) const LATE_EFFECT: Duration = Duration::from_secs(60);

/// How the claim of a waiter stands in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaiterState {
    /// It has not asked.
    New,
    /// It was refused: it is to get an entry, or, if it only tries, the name is to be read.
    Refused,
    /// Its entry waits.
    Queued,
    /// The store granted it the name with this token. The grant must be confirmed before the caller
    /// hears of it.
    Granted(FencingToken),
}

/// A caller that wants the name.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    pub(super) id: WaiterId,
    pub(super) claim: Claim,
    pub(super) reenters: bool,
    pub(super) max_hold: Option<Duration>,
    pub(super) since: Moment,
    pub(super) patience: Patience,
    pub(super) state: WaiterState,
    /// A request about its claim may take effect late.
    pub(super) lingers: bool,
    /// Its owner may hold the name elsewhere: the store is asked before it is refused.
    pub(super) may_join: bool,
    /// The exported lease that it takes over.
    pub(super) resumes: Option<Exported>,
    /// It met a locked row, and is not asked for before.
    pub(super) ask_at: Moment,
    /// How often the store has not known the lease that it takes over.
    pub(super) unknown: u32,
    /// Its caller knows that it waits.
    pub(super) is_told: bool,
}

impl Waiter {
    /// Returns whether its caller is to be notified of the wait: once, and not for a try.
    pub(super) fn tell_wait(&mut self) -> bool {
        !self.tries() && !std::mem::replace(&mut self.is_told, true)
    }

    pub(super) fn tries(&self) -> bool {
        matches!(self.patience, Patience::Try(_))
    }

    pub(super) fn ends_at(&self) -> Option<Moment> {
        match self.patience {
            Patience::Try(until) => Some(until),
            Patience::Wait(until) => until,
        }
    }

    /// It stands in the queue from now on.
    pub(super) fn begin_to_wait(&mut self) {
        self.patience = Patience::Wait(self.ends_at());
    }

    /// Whether its owner, if it shares the name, may share it again past waiting entries.
    pub(super) fn may_share_again(&self) -> bool {
        self.reenters && self.claim.mode == Mode::READ
    }

    /// Whether it can be handed the name by the release of a lease of this client.
    fn can_follow(&self) -> bool {
        self.claim.mode == Mode::Exclusive && matches!(self.state, WaiterState::New | WaiterState::Refused)
    }

    /// Whether the store may know of it.
    pub(super) fn leaves_traces(&self) -> bool {
        self.lingers || matches!(self.state, WaiterState::Queued | WaiterState::Granted(_))
    }

    /// The statement that makes a grant what the caller has asked for.
    fn confirmation(&self, token: FencingToken) -> Extension {
        let extension = Extension::to_claim(&self.claim, token);
        match self.resumes {
            // It becomes an acquisition of this client.
            Some(exported) => Extension { id: Some(exported.id), renamed: Some(self.claim.id), ..extension },
            None => extension,
        }
    }

    /// Whether it takes over the very holding that was exported, instead of joining it.
    pub(super) fn adopts(&self) -> bool {
        self.resumes.is_some() && self.claim.mode != Mode::Exclusive
    }

    pub(super) fn is_queued(&self) -> bool {
        self.state == WaiterState::Queued
    }
}

/// An acquisition that is to leave no trace in the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Withdrawal {
    pub(super) id: LeaseId,
    pub(super) due: Moment,
    pub(super) pause: Duration,
    /// A request for it may take effect until then, so it is withdrawn again.
    pub(super) until: Option<Moment>,
    /// The holding with this token was given to another process, and stays.
    pub(super) except: Option<FencingToken>,
    /// The waiter that timed out, and the latest moment of its refusal. The answer to the withdrawal
    /// refuses it earlier.
    pub(super) timed_out: Option<(WaiterId, Moment)>,
}

impl Withdrawal {
    /// Sets when it is repeated: later each time, at most after `longest`.
    pub(super) fn put_off(&mut self, now: Moment, longest: Duration) {
        self.due = now + self.pause;
        self.pause = (self.pause * 2).min(longest);
    }
}

/// An exported lease that the heartbeat of this client still keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Detachment {
    pub(super) id: LeaseId,
    /// The identity that it is to have again.
    pub(super) renamed: Option<LeaseId>,
    pub(super) token: FencingToken,
    pub(super) client: ClientId,
    pub(super) ttl: Duration,
    pub(super) due: Moment,
    pub(super) pause: Duration,
    /// A request may make the lease one of this client until then, so the detachment is repeated.
    pub(super) until: Option<Moment>,
    /// The lease has got its last TTL.
    pub(super) is_done: bool,
}

impl Detachment {
    pub(super) fn put_off(&mut self, now: Moment) {
        self.due = now + self.pause;
        self.pause = (self.pause * 2).min(Duration::from_secs(1));
    }

    fn request(&self, name: &LockName) -> Request {
        let Self { id, renamed, token, client, ttl, is_done, .. } = *self;
        let (name, keeper) = (name.clone(), Keeper::NotThisClient(client));
        let lasts = if is_done { Duration::ZERO } else { ttl };
        Request::Extend(Extension { name, id: Some(id), renamed, token, lasts, ttl: None, keeper })
    }
}

/// Why the next statement is sent.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Acquire(LeaseId),
    Join(LeaseId),
    Enqueue,
    Release(LeaseId),
    Withdraw(LeaseId),
    /// How the entries of this client stand.
    Poll,
    /// Whether a holding still stands, after a notice.
    Verify(LeaseId),
    /// Which entry may be next, while a holding is released.
    Read {
        given_up: Option<LeaseId>,
    },
    Transition {
        given_up: Option<LeaseId>,
    },
    Extend(LeaseId),
    /// A change that the caller has asked for.
    Amend(LeaseId),
    /// The heartbeat is taken away from an exported lease.
    Detach(LeaseId),
}

/// What a name asks of the client, beside the statements about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Needs {
    /// The shortest TTL that the heartbeat keeps. `None`: it keeps nothing.
    pub(super) ttl: Option<Duration>,
    /// Something is held, wanted or on its way, or is withdrawn for the first time.
    pub(super) attention: bool,
}

#[derive(Default)]
pub(super) struct Name {
    /// What it needed when it was last advanced.
    pub(super) needs: Needs,
    /// In the order of their arrival. Tries come first: a try is refused while a waiter waits,
    /// unless its owner was given.
    pub(super) waiters: VecDeque<Waiter>,
    /// How many of them have an owner that was given.
    pub(super) reentering: usize,
    pub(super) holdings: Vec<Holding>,
    pub(super) withdrawals: Vec<Withdrawal>,
    pub(super) detachments: Vec<Detachment>,
    /// Since when a statement is on its way.
    pub(super) busy_since: Option<Moment>,
    /// The name may be granted to an entry, or belong to a forgotten acquisition: it is to be read
    /// at that moment.
    pub(super) read_at: Option<Moment>,
    /// When an acquisition of this client ended last.
    pub(super) ended_at: Option<Moment>,
    /// The store may keep an acquisition that has ended: the name is read until it answers.
    pub(super) is_rechecked: bool,
    /// When the first entry of this client is to be looked at.
    pub(super) poll_at: Option<Moment>,
    /// Another client may have granted it to an entry of this one. The notification may come before
    /// the answer to the request that adds the entry.
    pub(super) is_notified: bool,
    /// Other clients wait for it, as far as is known.
    pub(super) is_wanted: bool,
    /// How often in a row a decision was overtaken.
    pub(super) overtaken: u32,
}

impl Name {
    /// A statement is on its way. There is one at a time, beside looks.
    pub(super) fn is_busy(&self) -> bool {
        self.busy_since.is_some()
    }

    pub(super) fn is_idle(&self) -> bool {
        let is_empty = self.waiters.is_empty() && self.holdings.is_empty() && self.withdrawals.is_empty();
        is_empty && self.detachments.is_empty() && !self.is_busy() && self.read_at.is_none()
    }

    pub(super) fn push_waiter(&mut self, waiter: Waiter) {
        self.reentering += usize::from(waiter.reenters);
        self.waiters.push_back(waiter);
    }

    pub(super) fn remove_waiter(&mut self, i: usize) -> Option<Waiter> {
        let waiter = self.waiters.remove(i)?;
        self.reentering -= usize::from(waiter.reenters);
        Some(waiter)
    }

    /// Removes the first waiter of an owner that was given.
    pub(super) fn remove_waiter_of(&mut self, owner: Owner) -> Option<Waiter> {
        let i = self.foremost().position(|waiter| waiter.reenters && waiter.claim.owner == owner)?;
        self.remove_waiter(i)
    }

    /// Whether the store has not answered a waiter: the waiter only tries, or a request that it
    /// needs has been on its way for too long.
    pub(super) fn is_unanswered(&self, id: WaiterId, now: Moment) -> bool {
        let is_silent = |pause| self.busy_since.is_some_and(|since| now.since(since) >= pause);
        let is_asked = |waiter: &Waiter| match waiter.state {
            WaiterState::New => {
                let is_first = self.first().is_some_and(|first| first.id == waiter.id);
                is_first && is_silent(SILENCE) && self.holdings.is_empty()
            }
            _ => is_silent(LONG_SILENCE),
        };
        self.waiters.iter().any(|waiter| waiter.id == id && (waiter.tries() || is_asked(waiter)))
    }

    /// The waiters that may have an entry in the store; all waiters, if some have an owner that was
    /// given. The work per answer does not grow with the number of waiters behind them.
    pub(super) fn foremost(&mut self) -> impl Iterator<Item = &mut Waiter> {
        let reach = self.reach();
        self.waiters.iter_mut().take(reach)
    }

    fn reach(&self) -> usize {
        if self.reentering > 0 { usize::MAX } else { 2 * ENTRIES }
    }

    /// The first in the queue. A waiter that resumes a lease stands in no queue.
    pub(super) fn first(&self) -> Option<&Waiter> {
        self.waiters.iter().find(|waiter| waiter.resumes.is_none())
    }

    /// The waiter for which the holder and the queue are read from the store: the first, or a try
    /// whose owner may share the name.
    pub(super) fn candidate(&self) -> Option<&Waiter> {
        let is_refused = |waiter: &&Waiter| waiter.state == WaiterState::Refused && !waiter.may_join;
        let tries = if self.reentering > 0 { usize::MAX } else { 0 };
        let of_owner = || self.waiters.iter().take(tries).find(|w| w.tries() && w.reenters && is_refused(w));
        self.first().filter(is_refused).or_else(of_owner)
    }

    /// Whether something is wanted or done about an acquisition that waits or holds like this.
    pub(super) fn knows(&self, id: LeaseId, state: EntryState) -> bool {
        let exported = self.exported_token(id).map(|token| EntryState::Holding(token.get()));
        self.waiters.iter().take(self.reach()).any(|waiter| waiter.claim.id == id)
            || self.holdings.iter().any(|holding| holding.id() == id)
            || self.withdrawals.iter().any(|withdrawal| withdrawal.id == id)
            || exported == Some(state)
    }

    /// The token of an exported lease that is detached or resumed here.
    fn exported_token(&self, id: LeaseId) -> Option<FencingToken> {
        let is_it = |detachment: &&Detachment| detachment.id == id || detachment.renamed == Some(id);
        let detached = self.detachments.iter().find(is_it).map(|detachment| detachment.token);
        let resumed = self
            .waiters
            .iter()
            .take(self.reach())
            .filter_map(|waiter| waiter.resumes)
            .find(|exported| exported.id == id);
        detached.or(resumed.map(|exported| exported.token))
    }

    /// Withdraws what the store keeps for this client and the client does not know: the store has
    /// missed how that ended.
    pub(super) fn withdraw_forgotten(&mut self, now: Moment, client: ClientId, queue: &Queue) {
        let in_row = match queue.row.holder {
            Holder::Lease(id) if queue.row.client == Some(client) => Some((id, EntryState::Holding(queue.row.token))),
            _ => None,
        };
        let entries = queue.entries.iter().filter(|entry| entry.client == Some(client));
        let stored = entries.map(|entry| (entry.id, entry.state)).chain(in_row);
        let forgotten: Vec<LeaseId> = stored.filter(|(id, state)| !self.knows(*id, *state)).map(|(id, _)| id).collect();
        for id in forgotten {
            self.withdraw(id, now, false);
            let except = self.exported_token(id);
            self.withdrawals.iter_mut().filter(|other| other.id == id).for_each(|other| other.except = except);
        }
    }

    pub(super) fn holding(&mut self, id: LeaseId) -> Option<&mut Holding> {
        self.holdings.iter_mut().find(|holding| holding.id() == id)
    }

    pub(super) fn waiter(&mut self, id: LeaseId) -> Option<&mut Waiter> {
        self.waiters.iter_mut().find(|waiter| waiter.claim.id == id)
    }

    /// A holding of this client excludes a holding in this mode.
    pub(super) fn is_taken(&self, mode: Mode) -> bool {
        self.holdings.iter().any(|holding| mode == Mode::Exclusive || holding.claim.mode == Mode::Exclusive)
    }

    /// This client holds the name by a lease of its own.
    pub(super) fn is_held_alone(&self) -> bool {
        self.holdings.iter().any(|holding| holding.claim.mode == Mode::Exclusive)
    }

    /// Whether entries of this client wait in the store.
    pub(super) fn has_entries(&self) -> bool {
        self.waiters.iter().take(self.reach()).any(Waiter::is_queued)
    }

    /// What it needs now.
    pub(super) fn needs_now(&self) -> Needs {
        let held = self.holdings.iter().filter(|holding| holding.is_kept).map(|holding| holding.ttl).min();
        let detaching = self.detachments.iter().map(|detachment| detachment.ttl);
        let ttl = held.into_iter().chain(self.has_entries().then_some(GRANT)).chain(detaching).min();
        let rests = self.waiters.is_empty() && self.holdings.is_empty() && !self.is_busy();
        let is_settled = rests
            && self.withdrawals.iter().all(|withdrawal| withdrawal.until.is_some() && withdrawal.pause > FIRST_PAUSE)
            && self.detachments.iter().all(|detachment| detachment.pause > FIRST_PAUSE);
        Needs { ttl, attention: !is_settled }
    }

    /// Deletes every trace of an acquisition from the store, now and, if a request may take effect
    /// late, again later.
    pub(super) fn withdraw(&mut self, id: LeaseId, now: Moment, lingers: bool) {
        self.withdraw_after(id, now, Duration::ZERO, lingers);
    }

    /// The same, but not yet.
    pub(super) fn withdraw_after(&mut self, id: LeaseId, now: Moment, pause: Duration, lingers: bool) {
        if is_on(Mutation::ForgetLost) {
            return;
        }
        let before = self.withdrawals.iter().position(|other| other.id == id).map(|i| self.withdrawals.remove(i));
        let until = before.and_then(|before| before.until).max(lingers.then(|| now + LATE_EFFECT));
        let timed_out = before.and_then(|before| before.timed_out);
        let due = now + pause;
        self.withdrawals.push(Withdrawal { id, due, pause: FIRST_PAUSE, until, except: None, timed_out });
    }

    /// The next statement, if one is due. `is_steady`: entries that have expired are dead.
    pub(super) fn next(
        &mut self,
        name: &LockName,
        now: Moment,
        epoch: Epoch,
        is_steady: bool,
    ) -> Option<(Step, Request)> {
        // A look changes nothing, and must not wait for a statement that meets a locked row.
        let unlooked = self.holdings.iter_mut().find(|holding| holding.needs_look(epoch) && holding.again_at <= now);
        if let Some(holding) = unlooked {
            holding.look();
            let id = holding.id();
            return Some((Step::Verify(id), Request::Poll { name: name.clone(), ids: vec![id] }));
        }
        if self.is_busy() {
            return None;
        }
        if std::mem::take(&mut self.is_notified) {
            self.poll_at = Some(now);
        }
        if let Some(holding) = self.holdings.iter().find(|holding| !holding.is_held() && holding.again_at <= now) {
            return Some(self.give_back(name, now, is_steady, holding));
        }
        let amendable = self.holdings.iter().filter(|holding| holding.again_at <= now);
        let amendment = amendable.filter_map(|h| Some((h.id(), h.token, h.next_amendment()?))).next();
        if let Some((id, token, amendment)) = amendment {
            // A share lets other clients in: waiters here that came earlier take their turns among
            // their waiters.
            if amendment == Amendment::Downgrade
                && let Some(enqueue) = self.enqueue(now)
            {
                return Some(enqueue);
            }
            return Some((Step::Amend(id), amend(name, id, token, amendment)));
        }
        // What follows may grant the name to other clients: waiters here that came earlier take
        // their turns among theirs.
        let serves =
            self.read_at.is_some_and(|due| due <= now) || self.withdrawals.iter().any(|other| other.due <= now);
        if serves && let Some(enqueue) = self.enqueue(now) {
            return Some(enqueue);
        }
        if let Some(withdrawal) = self.withdrawals.iter().find(|withdrawal| withdrawal.due <= now) {
            let id = withdrawal.id;
            let except = withdrawal.except;
            return Some((Step::Withdraw(id), Request::Withdraw { name: name.clone(), id, except }));
        }
        if let Some(detachment) = self.detachments.iter().find(|detachment| detachment.due <= now) {
            return Some((Step::Detach(detachment.id), detachment.request(name)));
        }
        if self.read_at.is_some_and(|due| due <= now) {
            return Some(read(name, None));
        }
        if let Some(step) = self.ask(name, now) {
            return Some(step);
        }
        let due = |holding: &&Holding| holding.extend_at.is_some_and(|at| at.max(holding.again_at) <= now);
        self.holdings.iter().find(due).map(|holding| {
            (Step::Extend(holding.id()), Request::Extend(Extension::to_claim(&holding.claim, holding.token)))
        })
    }

    /// The statement that ends a holding.
    fn give_back(&self, name: &LockName, now: Moment, is_steady: bool, holding: &Holding) -> (Step, Request) {
        let (id, token) = (holding.id(), holding.token);
        let keep_for = match holding.state {
            // The statement would pass over entries that only seem to be dead.
            HoldingState::Releasing { keep_for, .. }
                if !is_steady && keep_for.is_zero() && holding.is_handed_over() =>
            {
                return read(name, Some(id));
            }
            HoldingState::Releasing { by_transition: false, keep_for, .. } => keep_for,
            _ => return read(name, Some(id)),
        };
        let is_alone = holding.claim.mode == Mode::Exclusive && self.holdings.len() == 1 && keep_for.is_zero();
        let first = self.waiters.iter().find(|waiter| !waiter.tries());
        let hands_on = is_alone && !self.is_wanted && !holding.is_joined;
        let next = first.filter(|waiter| hands_on && waiter.can_follow());
        // The entry of the next waiter here takes its turn among the entries of other clients.
        if is_alone
            && next.is_none()
            && let Some(enqueue) = self.enqueue(now)
        {
            return enqueue;
        }
        let next = next.map(|waiter| waiter.claim.clone());
        (Step::Release(id), Request::Release(Release { name: name.clone(), id, token, keep_for, next }))
    }

    /// The statement that the waiters need.
    fn ask(&mut self, name: &LockName, now: Moment) -> Option<(Step, Request)> {
        // Neither a grant to be confirmed nor a holding of the same owner elsewhere waits for
        // earlier waiters.
        let confirmed = self.foremost().filter(|waiter| waiter.ask_at <= now).find_map(|waiter| match waiter.state {
            WaiterState::Granted(token) => Some((waiter.claim.id, waiter.confirmation(token))),
            _ => None,
        });
        if let Some((id, extension)) = confirmed {
            return Some((Step::Extend(id), Request::Extend(extension)));
        }
        let joins = |waiter: &&mut Waiter| waiter.may_join && !waiter.is_queued() && waiter.ask_at <= now;
        if let Some(waiter) = self.foremost().find(joins) {
            return Some((Step::Join(waiter.claim.id), Request::Join(waiter.claim.clone())));
        }
        if self.candidate().is_some_and(|waiter| waiter.tries() && waiter.ask_at <= now) && !self.is_held_alone() {
            self.read_at = Some(now);
            return Some(read(name, None));
        }
        let first = self.first().filter(|first| !first.may_join || first.is_queued())?;
        let (id, claim) = (first.claim.id, first.claim.clone());
        // Behind a lease of this client the first waits here: the release of that lease grants it.
        // A share may be the last one when another client releases its own, so the waiter behind it
        // has an entry.
        if self.is_held_alone() {
            return if self.is_wanted { self.enqueue(now) } else { None };
        }
        match first.state {
            WaiterState::New if self.is_wanted && !first.tries() => self.enqueue(now),
            WaiterState::New => Some((Step::Acquire(id), Request::Acquire(claim))),
            WaiterState::Refused => self.enqueue(now),
            WaiterState::Granted(_) => None,
            WaiterState::Queued => {
                if let Some(enqueue) = self.enqueue(now) {
                    return Some(enqueue);
                }
                // A new waiter with another mode may be tried while the first is queued.
                let due = self.poll_at.is_some_and(|due| due <= now) && !is_on(Mutation::NeverPoll);
                let looked_at = if is_on(Mutation::PollFirstOnly) { 1 } else { self.reach() };
                let queued = self.waiters.iter().take(looked_at).filter(|waiter| waiter.is_queued());
                due.then(|| {
                    (Step::Poll, Request::Poll { name: name.clone(), ids: queued.map(|w| w.claim.id).collect() })
                })
            }
        }
    }

    /// Entries for the waiters that may be granted the name together with the first, and for the
    /// next one behind them, which keeps later readers of other clients out; and for waiters whose
    /// owner may share the name again.
    fn enqueue(&self, now: Moment) -> Option<(Step, Request)> {
        let mut entries = Vec::new();
        let mut open = ENTRIES;
        // A waiter whose owner holds the name elsewhere joins that holding, and needs no entry.
        for waiter in self.waiters.iter().filter(|waiter| !waiter.tries() && !waiter.may_join) {
            if open == 0 && self.reentering == 0 {
                break;
            }
            if open == 0 && !waiter.may_share_again() {
                continue;
            }
            if matches!(waiter.state, WaiterState::New | WaiterState::Refused) {
                entries.push(Enqueue { claim: waiter.claim.clone(), age: now.since(waiter.since) });
            }
            let is_last = waiter.claim.mode == Mode::Exclusive;
            open = if is_last { 0 } else { open.saturating_sub(1) };
        }
        (!entries.is_empty()).then_some((Step::Enqueue, Request::Enqueue(entries)))
    }

    /// Sets when the name is read again: later after each decision that was overtaken.
    pub(super) fn read_again(&mut self, now: Moment) {
        self.overtaken += 1;
        let pause = BETWEEN_TRIES * 2_u32.pow(self.overtaken.min(6)) / 2;
        self.read_at = Some(now + if self.overtaken == 1 { Duration::ZERO } else { pause });
    }

    /// When something is due, apart from deadlines of holdings and waiters.
    pub(super) fn wakes_at(&self) -> impl Iterator<Item = Moment> {
        let is_idle = !self.is_busy();
        let of_holding = |h: &Holding| match h.next_amendment() {
            None if h.is_held() => h.extend_at.map(|at| at.max(h.again_at)),
            _ => Some(h.again_at),
        };
        let holdings = self.holdings.iter().filter_map(of_holding);
        let withdrawals = self.withdrawals.iter().map(|withdrawal| withdrawal.due);
        let timeouts = self.withdrawals.iter().filter_map(|withdrawal| withdrawal.timed_out).map(|(_, at)| at);
        let detachments = self.detachments.iter().map(|detachment| detachment.due);
        let polls = self.poll_at.filter(|_| self.has_entries());
        let asks = self.waiters.iter().take(self.reach()).map(|waiter| waiter.ask_at);
        holdings
            .chain(withdrawals)
            .chain(detachments)
            .chain(asks)
            .chain(self.read_at)
            .chain(polls)
            .filter(move |_| is_idle)
            .chain(timeouts)
    }
}

fn amend(name: &LockName, id: LeaseId, token: FencingToken, amendment: Amendment) -> Request {
    let name = name.clone();
    match amendment {
        Amendment::Extend(lasts) => {
            let (id, keeper) = (Some(id), Keeper::Same);
            Request::Extend(Extension { name, id, renamed: None, token, lasts, ttl: None, keeper })
        }
        Amendment::Downgrade => Request::Downgrade { name, id, token },
        Amendment::Raise(to) => Request::Raise { name, id, token, to },
    }
}

fn read(name: &LockName, given_up: Option<LeaseId>) -> (Step, Request) {
    (Step::Read { given_up }, Request::Read { name: name.clone(), limit: LIMIT })
}
