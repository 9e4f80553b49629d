//! The engine of one client: events in, actions out.
//!
//! It decides what every lease and every wait of the client needs next, and does no I/O: it reads no clock, owns no channel and no task.
//! Its caller passes the time and what happened to [`Engine::handle`], carries out the [`Action`]s, and calls again no later than
//! [`Engine::wakes_at`]. The connection state machine of quinn-proto is built alike.
//!
//! ```text
//! callers ──Acquire, Release──▶ ┌────────┐ ──Send──▶ store (one statement per name at a time)
//!         ◀──Granted, Lost───── │ Engine │ ◀─Answer──
//!                               └────────┘
//! ```
//!
//! Three rules make it safe, whatever the transport does:
//!
//! - A holder relies on a lease no longer than its TTL, counted from before a request that the store answered, less a margin.
//! - What ended locally has ended: later answers do not bring it back. It is withdrawn until the store has confirmed that.
//! - Every verdict follows from an answer of the store, never from how often a request was sent.

mod action;
mod amendment;
mod heartbeat;
mod holding;
mod name;
pub(crate) mod policy;
mod transfer;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

pub(crate) use action::{
    Action, Amendment, Answer, Event, Exported, Failure, Grant, LeaseKey, NotAmended, Patience, Refusal, RequestId,
    Verdict, WaiterId, Wish,
};
use heartbeat::{Epoch, Heartbeat};
use holding::{Holding, HoldingState, LocalLease, relied_on};
use name::{FIRST_PAUSE, Name, Step, Waiter, WaiterState};
use policy::{Decision, decide};

use crate::clock::Moment;
use crate::error::LossCause;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::timing::{BEAT, GRANT};
use crate::protocol::{
    Amended, Claim, ClientId, Holder, HolderChange, HolderNow, Joined, Keeper, LeaseId, Mode, Polled, Presence, Queue,
    Released, Request, Response, Withdrawn,
};
use crate::token::FencingToken;

/// How often the first of those who wait looks at the name, and how often the others, when nobody tells them.
const POLL_FIRST: Duration = Duration::from_millis(100);
const POLL_OTHERS: Duration = Duration::from_millis(250);

/// How often a release is repeated that the store leaves without effect.
pub(crate) const IGNORED: u32 = 16;

/// When the TTL of a grant by another client is raised. A lease that is released earlier saves the statement.
const RAISE_AFTER: Duration = Duration::from_millis(200);

/// How long the answer to a heartbeat may take at least, and at most.
const SHORTEST_PATIENCE: Duration = Duration::from_millis(100);
const LONGEST_PATIENCE: Duration = Duration::from_secs(4);

/// When a statement is repeated that met a locked row.
const WHILE_LOCKED: Duration = Duration::from_millis(50);

/// How often a name is read for a try while it is free and yet not granted.
const TRIES: u32 = 5;

/// A request on its way.
struct InFlight {
    name: LockName,
    step: Step,
    body: Request,
    /// The epoch when it was sent.
    epoch: Epoch,
}

/// See the [module](self).
pub(crate) struct Engine {
    heartbeat: Heartbeat,
    /// The client in words.
    holder: Arc<str>,
    names: BTreeMap<LockName, Name>,
    waiters: HashMap<WaiterId, LockName>,
    leases: HashMap<LeaseKey, (LockName, LeaseId)>,
    in_flight: HashMap<RequestId, InFlight>,
    /// When which name needs attention.
    timers: BTreeSet<(Moment, LockName)>,
    wakes: HashMap<LockName, Moment>,
    /// When which waiter gives up. One that has left before is passed over.
    patience: BTreeSet<(Moment, WaiterId)>,
    next_id: LeaseId,
    next_request: u64,
    next_lease: u64,
    is_closing: bool,
    actions: Vec<Action>,
}

/// How a grant came about.
struct Granting {
    token: FencingToken,
    /// The grant was made after this moment.
    since: Moment,
    /// How long it lasts from then on by itself.
    lasts: Duration,
    /// How long it lasts after a heartbeat.
    ttl: Duration,
    epoch: Epoch,
    may_linger: bool,
}

impl Engine {
    /// An engine for a client without a row, which `holder` names for people. `first_id` is random: it begins the identities of all
    /// acquisitions.
    pub(crate) fn new(client: ClientId, holder: Arc<str>, first_id: LeaseId) -> Self {
        Self {
            heartbeat: Heartbeat::new(client),
            holder,
            names: BTreeMap::new(),
            waiters: HashMap::new(),
            leases: HashMap::new(),
            in_flight: HashMap::new(),
            timers: BTreeSet::new(),
            wakes: HashMap::new(),
            patience: BTreeSet::new(),
            next_id: first_id,
            next_request: 0,
            next_lease: 0,
            is_closing: false,
            actions: Vec::new(),
        }
    }

    /// Takes in what has happened and returns what is to be done, in this order.
    pub(crate) fn handle(&mut self, now: Moment, event: Event) -> Vec<Action> {
        self.expire(now);
        match event {
            Event::Acquire { waiter, wish } => self.acquire(now, waiter, wish),
            Event::Resume { waiter, wish, exported } => self.resume(now, waiter, wish, exported),
            Event::Amend { lease, amendment } => self.amend(now, lease, amendment),
            Event::Export { lease } => self.export(now, lease, None),
            Event::Delivered { lease, exported } => self.delivered(now, lease, exported),
            Event::HandBack { lease, exported } => self.hand_back(now, lease, exported),
            Event::Cancel { waiter } => {
                if let Some(name) = self.waiters.get(&waiter).cloned() {
                    self.leave(now, waiter, None);
                    self.advance(now, &name);
                }
            }
            Event::Release { lease, keep_for } => self.release(now, lease, keep_for),
            Event::Answer { request, answer } => self.answered(now, request, answer),
            Event::Notified { name } => {
                if let Some(state) = self.names.get_mut(&name).filter(|state| state.has_entries()) {
                    state.poll_at = Some(now);
                    self.advance(now, &name);
                }
            }
            Event::Doubted { name } => self.doubt(now, &name),
            Event::Tick => {}
            Event::Close => self.close(now),
        }
        self.beat(now);
        if self.is_closing && self.names.values().all(is_settled) {
            self.names.clear();
            self.actions.push(Action::Closed);
        }
        std::mem::take(&mut self.actions)
    }

    /// When [`handle`](Self::handle) must be called again, if nothing happens before.
    pub(crate) fn wakes_at(&self) -> Option<Moment> {
        let timer = self.timers.first().map(|(at, _)| *at);
        let patience = self.patience.first().map(|(at, _)| *at);
        timer.into_iter().chain(patience).chain(self.heartbeat.due()).min()
    }

    /// How long the answer to a heartbeat may take: there must be time for another one before any lease ends.
    pub(crate) fn heartbeat_patience(&self) -> Duration {
        (self.shortest().unwrap_or(BEAT) / 4).clamp(SHORTEST_PATIENCE, LONGEST_PATIENCE)
    }

    /// Until when the holder of a lease may rely on it. `None`: it has ended.
    pub(crate) fn deadline(&self, lease: LeaseKey) -> Option<Moment> {
        let (name, id) = self.leases.get(&lease)?;
        let holding = self.names.get(name)?.holdings.iter().find(|holding| holding.id() == *id)?;
        let HoldingState::Held(leases) = &holding.state else {
            return None;
        };
        let ends = leases.iter().find(|local| local.key == lease)?.ends;
        let deadline = holding.deadline(&self.heartbeat);
        Some(ends.map_or(deadline, |ends| ends.min(deadline)))
    }

    /// How a waiter stands: the identity of its claim, and how many wait before it in this process.
    pub(crate) fn position(&self, waiter: WaiterId) -> Option<(LeaseId, usize)> {
        let waiters = &self.names.get(self.waiters.get(&waiter)?)?.waiters;
        let ahead = waiters.iter().position(|other| other.id == waiter)?;
        Some((waiters[ahead].claim.id, ahead))
    }

    /// Whether nothing is held, wanted or on its way.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.names.is_empty() && self.in_flight.is_empty() && self.waiters.is_empty() && self.leases.is_empty()
    }

    /// Looks every holding of a name up.
    fn doubt(&mut self, now: Moment, name: &LockName) {
        for holding in self.names.get_mut(name).into_iter().flat_map(|state| &mut state.holdings) {
            holding.settle(&self.heartbeat);
            holding.epoch = Epoch::default();
            holding.is_doubted = true;
        }
        self.advance(now, name);
    }

    // ---- what callers do

    fn acquire(&mut self, now: Moment, id: WaiterId, wish: Wish) {
        if self.is_closing {
            return self.refuse(id, Refusal::Closed);
        }
        let claim_id = self.new_id();
        let client = self.heartbeat.client;
        let state = self.names.entry(wish.name.clone()).or_default();
        let Wish { name, owner, reenters, mode, ttl, is_kept, max_hold, label, patience } = wish;
        // A holding that no heartbeat keeps, and that is about to end, is not entered any more.
        let lasts = |h: &Holding| h.is_kept || h.deadline > now + ttl.min(h.ttl) / 4;
        let entered = state.holdings.iter_mut().find(|h| h.is_held() && h.claim.owner == owner && lasts(h));
        // While a holding is converted nobody enters it: what it will be is not known yet.
        let is_converting = entered.as_ref().is_some_and(|holding| holding.is_converting());
        if reenters && let Some(holding) = entered.filter(|_| !is_converting) {
            match (holding.claim.mode, mode) {
                (Mode::Exclusive, _) | (Mode::READ, Mode::READ) => {
                    holding.want(now, ttl, is_kept);
                    let grant = enter(holding, now, max_hold, &mut self.next_lease);
                    self.leases.insert(grant.lease, (name.clone(), grant.id));
                    self.actions.push(Action::Granted { waiter: id, grant });
                    return self.advance(now, &name);
                }
                (Mode::READ, Mode::Exclusive) => return self.refuse(id, Refusal::Conversion { name }),
                _ => {}
            }
        }
        let is_try = matches!(patience, Patience::Try(_));
        let waits = state.waiters.iter().any(|waiter| !waiter.tries());
        if is_try && !is_converting && (state.is_held_alone() || (!reenters && (state.is_taken(mode) || waits))) {
            return self.refuse(id, Refusal::Held);
        }
        let holder = self.holder.clone();
        let claim = Claim { name: name.clone(), id: claim_id, owner, client, is_kept, mode, ttl, holder, label };
        let waiter = Waiter {
            id,
            claim,
            reenters,
            max_hold,
            since: now,
            patience,
            state: WaiterState::New,
            lingers: false,
            // The first learns of the owner when it is refused.
            may_join: reenters && !state.waiters.is_empty(),
            resumes: None,
            ask_at: now,
        };
        self.patience.extend(waiter.ends_at().map(|at| (at, id)));
        state.push_waiter(waiter);
        self.waiters.insert(id, name.clone());
        self.advance(now, &name);
    }

    /// A waiter leaves, told why. Its name must be advanced afterwards.
    fn leave(&mut self, now: Moment, id: WaiterId, refusal: Option<Refusal>) {
        let Some(name) = self.waiters.remove(&id) else {
            return;
        };
        if let Some(state) = self.names.get_mut(&name)
            && let Some(i) = state.waiters.iter().position(|waiter| waiter.id == id)
            && let Some(waiter) = state.remove_waiter(i)
            && !is_on(Mutation::LeaveEntry)
        {
            match waiter.resumes {
                // Another may resume the lease.
                Some(exported) if waiter.adopts() => {
                    let lingers = waiter.lingers || state.is_busy;
                    state.detach(&waiter.claim, exported.token, Some(exported.id), now, lingers);
                }
                _ if waiter.leaves_traces() || state.is_busy => state.withdraw(waiter.claim.id, now, waiter.lingers),
                _ => {}
            }
        }
        if let Some(refusal) = refusal {
            self.refuse(id, refusal);
        }
    }

    fn refuse(&mut self, waiter: WaiterId, refusal: Refusal) {
        self.actions.push(Action::Refused { waiter, refusal });
    }

    fn release(&mut self, now: Moment, lease: LeaseKey, keep_for: Duration) {
        let Some((name, id)) = self.leases.remove(&lease) else {
            // It was lost just before, and its holder may wait for a verdict.
            let verdict = Verdict::Lost(LossCause::Expired);
            return self.actions.push(Action::Released { lease, verdict });
        };
        let Some(holding) = self.names.get_mut(&name).and_then(|state| state.holding(id)) else {
            return;
        };
        if let HoldingState::Held(leases) = &mut holding.state {
            leases.retain(|other| other.key != lease);
            if leases.is_empty() {
                holding.state = HoldingState::Releasing { lease: Some(lease), keep_for, by_transition: false };
                holding.again_at = now;
            } else {
                holding.leaving.push(lease);
            }
        }
        self.advance(now, &name);
    }

    fn close(&mut self, now: Moment) {
        self.is_closing = true;
        for waiter in self.waiters.keys().copied().collect::<BTreeSet<_>>() {
            self.leave(now, waiter, Some(Refusal::Closed));
        }
        for name in self.names.keys().cloned().collect::<Vec<_>>() {
            let held = self.names.get_mut(&name).map(|state| &mut state.holdings);
            for holding in held.into_iter().flatten() {
                if let HoldingState::Held(leases) = &mut holding.state {
                    for lease in std::mem::take(leases) {
                        self.leases.remove(&lease.key);
                        self.actions.push(Action::Lost { lease: lease.key, cause: LossCause::Shutdown });
                    }
                    let keep_for = Duration::ZERO;
                    holding.state = HoldingState::Releasing { lease: None, keep_for, by_transition: false };
                }
            }
            self.advance(now, &name);
        }
    }

    // ---- time

    /// Ends what has run out by now.
    fn expire(&mut self, now: Moment) {
        let mut due = Vec::new();
        while self.timers.first().is_some_and(|(at, _)| *at <= now) {
            due.extend(self.timers.pop_first());
        }
        for (_, name) in due {
            self.wakes.remove(&name);
            self.end_overdue(now, &name);
            self.advance(now, &name);
        }
        while self.patience.first().is_some_and(|(at, _)| *at <= now) {
            let waiter = self.patience.pop_first().map(|(_, waiter)| waiter);
            if let Some((waiter, name)) = waiter.and_then(|waiter| Some((waiter, self.waiters.get(&waiter)?.clone()))) {
                let tries = self.names.get_mut(&name).is_some_and(|state| state.tries(waiter));
                let refusal = if tries { Refusal::NoAnswer } else { Refusal::Timeout { name: name.clone() } };
                self.leave(now, waiter, Some(refusal));
                self.advance(now, &name);
            }
        }
    }

    /// Ends the holdings of a name whose deadline has passed, and the leases whose `max_hold` is over.
    fn end_overdue(&mut self, now: Moment, name: &LockName) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let mut lost = Vec::new();
        for holding in &mut state.holdings {
            if holding.deadline(&self.heartbeat) <= now {
                lost.push(holding.id());
                continue;
            }
            if let HoldingState::Held(leases) = &mut holding.state {
                for lease in leases.extract_if(.., |lease| lease.ends.is_some_and(|at| at <= now)) {
                    self.leases.remove(&lease.key);
                    self.actions.push(Action::Lost { lease: lease.key, cause: LossCause::MaxHold });
                }
                if leases.is_empty() {
                    let keep_for = Duration::ZERO;
                    holding.state = HoldingState::Releasing { lease: None, keep_for, by_transition: false };
                }
            }
        }
        for id in lost {
            if !is_on(Mutation::ReviveLost) {
                self.lose(now, name, id, LossCause::Expired);
            }
        }
    }

    /// A holding has ended without being released. It is given back, in case the store knows it still.
    fn lose(&mut self, now: Moment, name: &LockName, id: LeaseId, cause: LossCause) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some(i) = state.holdings.iter().position(|holding| holding.id() == id) else {
            return;
        };
        let holding = state.holdings.remove(i);
        state.withdraw(id, now, holding.lingers || state.is_busy);
        for lease in holding.leaving {
            self.actions.push(Action::Released { lease, verdict: Verdict::Lost(cause) });
        }
        for amending in holding.amendments {
            self.actions.push(Action::Amended { lease: amending.lease, result: Err(NotAmended::Lost(cause)) });
        }
        match holding.state {
            HoldingState::Held(leases) => {
                for lease in leases {
                    self.leases.remove(&lease.key);
                    self.actions.push(Action::Lost { lease: lease.key, cause });
                }
            }
            HoldingState::Releasing { lease: Some(lease), .. } => {
                self.actions.push(Action::Released { lease, verdict: Verdict::Lost(cause) });
            }
            HoldingState::Releasing { lease: None, .. } => {}
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
            return self.heartbeat.rest();
        }
        let request = self.new_request();
        let body = self.heartbeat.send(request);
        self.actions.push(Action::Send { request, body });
    }

    /// The shortest TTL that the heartbeat keeps. `None`: it keeps nothing.
    fn shortest(&self) -> Option<Duration> {
        let of_name = |state: &Name| {
            let held = state.holdings.iter().filter(|holding| holding.is_kept).map(|holding| holding.ttl).min();
            let detaching = state.detachments.iter().map(|detachment| detachment.ttl);
            held.into_iter().chain(state.has_entries().then_some(GRANT)).chain(detaching).min()
        };
        self.names.values().filter_map(of_name).min()
    }

    // ---- statements

    /// Sends the statements about a name that are due: one that changes it, and looks.
    fn advance(&mut self, now: Moment, name: &LockName) {
        let epoch = self.heartbeat.epoch();
        while let Some((step, body)) = self.names.get_mut(name).and_then(|state| state.next(name, now, epoch)) {
            self.send(name, step, body);
        }
        self.touch(now, name);
    }

    fn send(&mut self, name: &LockName, step: Step, body: Request) {
        let request = self.new_request();
        if let Some(state) = self.names.get_mut(name).filter(|_| !matches!(step, Step::Verify(_))) {
            debug_assert!(!state.is_busy, "one statement at a time");
            state.is_busy = true;
        }
        let epoch = self.heartbeat.epoch();
        self.in_flight.insert(request, InFlight { name: name.clone(), step, body: body.clone(), epoch });
        self.actions.push(Action::Send { request, body });
    }

    /// Sets the timer of a name, or forgets the name when there is nothing left to do.
    fn touch(&mut self, now: Moment, name: &LockName) {
        if let Some(before) = self.wakes.remove(name) {
            self.timers.remove(&(before, name.clone()));
        }
        let Some(state) = self.names.get(name) else {
            return;
        };
        if state.is_idle() {
            self.names.remove(name);
            return;
        }
        let of_holding = |holding: &Holding| {
            let ends = match &holding.state {
                HoldingState::Held(leases) => leases.iter().filter_map(|lease| lease.ends).min(),
                HoldingState::Releasing { .. } => None,
            };
            [Some(holding.deadline(&self.heartbeat)), ends]
        };
        let deadlines = state.holdings.iter().flat_map(of_holding).flatten();
        // What is due already waits for something else to happen.
        if let Some(at) = deadlines.chain(state.wakes_at()).filter(|at| *at > now).min() {
            self.timers.insert((at, name.clone()));
            self.wakes.insert(name.clone(), at);
        }
    }

    fn new_request(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId(self.next_request)
    }

    fn new_id(&mut self) -> LeaseId {
        self.next_id = self.next_id.following();
        self.next_id
    }

    // ---- answers

    fn answered(&mut self, now: Moment, request: RequestId, answer: Answer) {
        let Some(InFlight { name, step, body, epoch }) = self.in_flight.remove(&request) else {
            return self.beaten(now, answer);
        };
        if let Some(state) = self.names.get_mut(&name).filter(|_| !matches!(step, Step::Verify(_))) {
            state.is_busy = false;
        }
        let Answer { sent_at, may_linger, result } = answer;
        let sent_at = if is_on(Mutation::CountFromAnswer) { now } else { sent_at };
        if may_linger {
            self.mark_lingering(now, &name, &body);
        }
        let granting = |token, ttl| Granting { token, since: sent_at, lasts: ttl, ttl, epoch, may_linger };
        match (result, step, body) {
            (Err(failure), step, body) => self.failed(now, &name, step, body, failure),
            (Ok(Response::Acquired(Ok(token))), Step::Acquire(id), Request::Acquire(claim)) => {
                self.granted(now, &name, id, granting(token, claim.ttl));
            }
            (Ok(Response::Acquired(Err(holder))), Step::Acquire(id), _) => self.refused(now, &name, id, holder),
            (Ok(Response::Joined(Joined::Done(token))), Step::Join(id), Request::Join(claim)) => {
                if self.joined_as_exported(now, &name, id, token) {
                    if let Some(waiter) = self.names.get_mut(&name).and_then(|state| state.waiter(id)) {
                        waiter.claim.mode = Mode::Exclusive;
                    }
                    self.granted(now, &name, id, granting(token, claim.ttl));
                    let holding = self.names.get_mut(&name).and_then(|state| state.holding(id));
                    holding.into_iter().for_each(|holding| holding.is_joined = true);
                }
            }
            (Ok(Response::Joined(Joined::Locked)), Step::Join(id), _) => {
                let waiter = self.names.get_mut(&name).and_then(|state| state.waiter(id));
                waiter.into_iter().for_each(|waiter| waiter.ask_at = now + WHILE_LOCKED);
            }
            (Ok(Response::Joined(Joined::NotHeld)), Step::Join(id), _) => self.not_joined(now, &name, id),
            (Ok(Response::Enqueued(holder)), Step::Enqueue, Request::Enqueue(entries)) => {
                let ids: Vec<LeaseId> = entries.iter().map(|entry| entry.claim.id).collect();
                self.enqueued(now, &name, &ids, sent_at, holder);
            }
            (Ok(Response::Released(released)), Step::Release(id), Request::Release(release)) => {
                let next = release.next.map(|claim| (claim.id, claim.ttl));
                self.released(now, &name, id, next, released, granting);
            }
            (Ok(Response::Withdrawn(withdrawn)), Step::Withdraw(id), _) => self.withdrawn(now, &name, id, withdrawn),
            (Ok(Response::Polled(polled)), Step::Poll, Request::Poll { ids, .. }) => {
                self.polled(now, &name, &ids, sent_at, epoch, polled);
            }
            (Ok(Response::Polled(polled)), Step::Verify(id), _) => self.verified(now, &name, id, epoch, polled),
            (Ok(Response::Read(queue)), Step::Read { given_up }, _) => {
                self.read(now, &name, given_up, sent_at, epoch, queue)
            }
            (Ok(Response::Transitioned(granted)), Step::Transition { given_up }, Request::Transition(transition)) => {
                let Some(granted) = granted else {
                    self.overtaken(now, &name, given_up);
                    return self.advance(now, &name);
                };
                let ttl_of = |id| match &transition.change {
                    HolderChange::Exclusive(grantee) => grantee.ttl,
                    HolderChange::Shared(grantees) => grantees.iter().find(|g| g.id == id).map_or(GRANT, |g| g.ttl),
                    HolderChange::Claim(claim) => claim.ttl,
                    HolderChange::None | HolderChange::Free => GRANT,
                };
                self.conclude(now, &name, given_up, Verdict::Kept);
                if let Some(state) = self.names.get_mut(&name) {
                    state.overtaken = 0;
                    state.is_wanted = !transition.is_last;
                    state.poll_at = Some(now + POLL_FIRST);
                }
                for grant in granted {
                    self.granted(now, &name, grant.id, granting(grant.token, ttl_of(grant.id)));
                }
            }
            (Ok(Response::Extended(extended)), Step::Extend(id), Request::Extend(extension)) => {
                let is_kept = matches!(extension.keeper, Keeper::Client(_));
                self.extended(now, &name, id, is_kept, granting(extension.token, extension.lasts), extended);
            }
            (Ok(Response::Extended(a) | Response::Downgraded(a) | Response::Raised(a)), Step::Amend(id), _) => {
                self.amended(now, &name, id, sent_at, a);
            }
            (Ok(Response::Extended(amended)), Step::Detach(id), _) => self.detached(now, &name, id, Some(amended)),
            (Ok(_), ..) => {}
        }
        self.advance(now, &name);
    }

    /// Takes in the answer to a heartbeat.
    fn beaten(&mut self, now: Moment, answer: Answer) {
        let response = answer.result.ok();
        let sent_at = if is_on(Mutation::CountFromAnswer) { now } else { answer.sent_at };
        if response.as_ref().is_some_and(|response| self.heartbeat.is_news(response)) {
            for holding in self.names.values_mut().flat_map(|state| &mut state.holdings) {
                holding.settle(&self.heartbeat);
            }
        }
        let shortest = self.shortest();
        if self.heartbeat.answered(sent_at, now, shortest, response) {
            for name in self.names.keys().cloned().collect::<Vec<_>>() {
                self.advance(now, &name);
            }
        }
    }

    /// Notes that a request about these acquisitions may take effect late.
    fn mark_lingering(&mut self, now: Moment, name: &LockName, body: &Request) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let ids: Vec<LeaseId> = match body {
            Request::Acquire(claim) | Request::Join(claim) => vec![claim.id],
            Request::Enqueue(entries) => entries.iter().map(|entry| entry.claim.id).collect(),
            Request::Release(release) => release.next.iter().map(|claim| claim.id).collect(),
            Request::Transition(transition) => match &transition.change {
                HolderChange::Claim(claim) => vec![claim.id],
                _ => Vec::new(),
            },
            _ => Vec::new(),
        };
        if let Request::Extend(extension) = body {
            let waiter = extension.renamed.and_then(|id| state.waiter(id));
            waiter.into_iter().for_each(|waiter| waiter.lingers = true);
            let holding = extension.id.and_then(|id| state.holding(id));
            holding.into_iter().for_each(|holding| holding.lingers = true);
        }
        for id in ids {
            if let Some(waiter) = state.waiter(id) {
                waiter.lingers = true;
            } else if !is_on(Mutation::ForgetUnknown) {
                state.withdraw(id, now, true);
            }
        }
    }

    /// A claim of this client was granted. Somebody still waits for it, or it is being withdrawn.
    fn granted(&mut self, now: Moment, name: &LockName, id: LeaseId, granting: Granting) {
        let Granting { token, since, lasts, ttl, epoch, may_linger } = granting;
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some(i) = state.waiters.iter().position(|waiter| waiter.claim.id == id) else {
            if is_on(Mutation::KeepUnwanted) {
                state.withdrawals.retain(|withdrawal| withdrawal.id != id);
            }
            return;
        };
        let deadline = since + relied_on(lasts);
        if deadline <= now + ttl / 4 && !is_on(Mutation::UseLateGrant) {
            // The lease is over, or will be before a heartbeat can keep it. A waiter keeps its turn and asks anew.
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
        let extend_at = (ttl < waiter.claim.ttl).then(|| now + RAISE_AFTER);
        let is_kept = waiter.claim.is_kept;
        let is_adopted = waiter.adopts();
        let mut holding = Holding {
            claim: waiter.claim,
            is_kept,
            token,
            former_tokens: Vec::new(),
            is_joined: false,
            is_adopted,
            is_doubted: false,
            state: HoldingState::Held(Vec::new()),
            ttl,
            deadline,
            epoch,
            extend_at,
            again_at: now,
            pause: Duration::from_millis(50),
            ignored: 0,
            lingers: waiter.lingers || may_linger,
            amendments: VecDeque::new(),
            leaving: Vec::new(),
            asked: None,
        };
        if holding.is_kept {
            self.heartbeat.keep(since, ttl);
        }
        let grant = enter(&mut holding, now, waiter.max_hold, &mut self.next_lease);
        self.leases.insert(grant.lease, (name.clone(), id));
        self.actions.push(Action::Granted { waiter: waiter.id, grant });
        let alone = holding.claim.mode == Mode::Exclusive;
        state.holdings.push(holding);
        self.admit(now, name, id);
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let is_taken = |mode| mode == Mode::Exclusive || alone;
        let refused: Vec<WaiterId> =
            state.foremost().filter(|w| w.tries() && is_taken(w.claim.mode)).map(|w| w.id).collect();
        for waiter in refused {
            self.leave(now, waiter, Some(Refusal::Held));
        }
    }

    /// Lets other waiters of the owner enter an exclusive holding.
    pub(super) fn admit(&mut self, now: Moment, name: &LockName, id: LeaseId) {
        while let Some(state) = self.names.get_mut(name)
            && let Some(i) = state.holdings.iter().position(|h| h.id() == id && h.can_be_entered())
            && let Some(other) = state.remove_waiter_of(state.holdings[i].claim.owner)
        {
            if other.leaves_traces() || state.is_busy {
                state.withdraw(other.claim.id, now, other.lingers);
            }
            self.waiters.remove(&other.id);
            let token = state.holdings[i].token;
            match other.resumes {
                Some(exported) if exported.token != token => {
                    self.actions.push(Action::Refused { waiter: other.id, refusal: Refusal::Lost });
                    continue;
                }
                _ => {}
            }
            let holding = &mut state.holdings[i];
            holding.want(now, other.claim.ttl, other.claim.is_kept);
            let grant = enter(holding, now, other.max_hold, &mut self.next_lease);
            self.leases.insert(grant.lease, (name.clone(), id));
            self.actions.push(Action::Granted { waiter: other.id, grant });
        }
    }

    /// Another client granted the name to a waiter of this one. An answer to a request that was sent at `since` told how long the
    /// grant lasts.
    fn granted_by_other(
        &mut self,
        now: Moment,
        name: &LockName,
        id: LeaseId,
        token: FencingToken,
        (since, remaining): (Moment, Option<Duration>),
        epoch: Epoch,
    ) {
        let Some(waiter) = self.names.get_mut(name).and_then(|state| state.waiter(id)) else {
            return;
        };
        let ttl = waiter.claim.ttl.min(GRANT);
        let (since, remaining) = if is_on(Mutation::CountFromNews) { (now, Some(ttl)) } else { (since, remaining) };
        let lasts = remaining.unwrap_or_default();
        // Where no heartbeat moves the expiry, or the expiry may have passed, an extension sets it before the caller gets the lease.
        if !waiter.claim.is_kept || since + relied_on(lasts) <= now + ttl / 4 {
            waiter.state = WaiterState::Granted(token);
            return;
        }
        let may_linger = waiter.lingers;
        self.granted(now, name, id, Granting { token, since, lasts, ttl, epoch, may_linger });
    }

    /// The store refused a plain acquire.
    fn refused(&mut self, now: Moment, name: &LockName, id: LeaseId, holder: HolderNow) {
        let Some(waiter) = self.names.get_mut(name).and_then(|state| state.waiter(id)) else {
            return;
        };
        waiter.state = WaiterState::Refused;
        match holder {
            HolderNow::Valid { owner, .. } if waiter.reenters && owner == Some(waiter.claim.owner) => {
                waiter.may_join = true
            }
            HolderNow::Valid { .. } if waiter.tries() => {
                let waiter = waiter.id;
                self.leave(now, waiter, Some(Refusal::Held));
            }
            _ => {}
        }
    }

    /// The owner of a waiter holds nothing that it could enter: it waits like others.
    fn not_joined(&mut self, now: Moment, name: &LockName, id: LeaseId) {
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
        let (waiter, mode, tries) = (waiter.id, waiter.claim.mode, waiter.tries());
        if tries && (!is_first || state.is_taken(mode)) {
            self.leave(now, waiter, Some(Refusal::Held));
        }
    }

    fn enqueued(&mut self, now: Moment, name: &LockName, ids: &[LeaseId], sent_at: Moment, holder: HolderNow) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let mut is_any = false;
        for waiter in state.waiters.iter_mut().filter(|waiter| ids.contains(&waiter.claim.id)) {
            waiter.state = WaiterState::Queued;
            is_any = true;
        }
        if !is_any {
            return;
        }
        match holder {
            HolderNow::Valid { remaining, .. } => state.poll_at = Some(now + remaining.min(POLL_FIRST)),
            HolderNow::Vacant | HolderNow::Unknown => state.read_at = Some(now),
        }
        self.heartbeat.keep(sent_at, GRANT);
    }

    fn released(
        &mut self,
        now: Moment,
        name: &LockName,
        id: LeaseId,
        next: Option<(LeaseId, Duration)>,
        released: Released,
        granting: impl Fn(FencingToken, Duration) -> Granting,
    ) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some(holding) = state.holding(id) else {
            // It ran out meanwhile and is being withdrawn; what it was followed by counts.
            match (released, next) {
                (Released::ToNext(token), Some((next, ttl))) => self.granted(now, name, next, granting(token, ttl)),
                (Released::ToEntry(grant), _) => self.handed_over(now, name, grant.id, grant.token, &granting),
                _ => {}
            }
            return;
        };
        let token = holding.token.get();
        match released {
            Released::Ended { awaited } => {
                if awaited {
                    (state.is_wanted, state.read_at) = (true, Some(now));
                }
                self.conclude(now, name, Some(id), Verdict::Kept);
            }
            Released::ToNext(token) => {
                self.conclude(now, name, Some(id), Verdict::Kept);
                if let Some((next, ttl)) = next {
                    self.granted(now, name, next, granting(token, ttl));
                }
            }
            Released::ToEntry(grant) => {
                state.is_wanted = true;
                self.conclude(now, name, Some(id), Verdict::Kept);
                self.handed_over(now, name, grant.id, grant.token, &granting);
            }
            Released::Awaited if holding.is_ignored() => {
                self.conclude(now, name, Some(id), Verdict::NoEffect);
            }
            Released::Awaited => {
                holding.release_by_transition(next.is_none());
                state.is_wanted = true;
            }
            Released::Locked => {
                holding.put_off(now);
                if let HoldingState::Releasing { lease, .. } = &mut holding.state
                    && let Some(lease) = lease.take()
                {
                    self.actions.push(Action::Released { lease, verdict: Verdict::Kept });
                }
            }
            // It was raised by a request whose answer was lost.
            Released::NotHeld { token: latest, .. } if holding.is_being_raised_to(latest) => {
                holding.token = FencingToken::new(latest).unwrap_or(holding.token);
                holding.again_at = now;
            }
            Released::NotHeld { lost, token: latest } => {
                let verdict = if is_on(Mutation::TrustRelease) || (lost < token && latest >= token) {
                    Verdict::Kept
                } else if lost == token || latest < token {
                    Verdict::Lost(LossCause::Superseded)
                } else {
                    Verdict::Unknown
                };
                self.conclude(now, name, Some(id), verdict);
            }
        }
    }

    /// A release handed the name to an entry, which may be of this client.
    fn handed_over(
        &mut self,
        now: Moment,
        name: &LockName,
        id: LeaseId,
        token: FencingToken,
        granting: &impl Fn(FencingToken, Duration) -> Granting,
    ) {
        let Some(waiter) = self.names.get_mut(name).and_then(|state| state.waiter(id)) else {
            return;
        };
        if !waiter.claim.is_kept {
            waiter.state = WaiterState::Granted(token);
            return;
        }
        let ttl = waiter.claim.ttl.min(GRANT);
        self.granted(now, name, id, granting(token, ttl));
    }

    /// Ends a holding that was being released, and tells its holder.
    fn conclude(&mut self, now: Moment, name: &LockName, id: Option<LeaseId>, verdict: Verdict) {
        let (Some(state), Some(id)) = (self.names.get_mut(name), id) else {
            return;
        };
        let Some(i) = state.holdings.iter().position(|holding| holding.id() == id) else {
            return;
        };
        let holding = state.holdings.remove(i);
        if holding.lingers || matches!(verdict, Verdict::Failed(_) | Verdict::NoEffect) {
            state.withdraw(id, now, true);
        }
        let last = if let HoldingState::Releasing { lease, .. } = holding.state { lease } else { None };
        for lease in holding.leaving.into_iter().chain(last) {
            self.actions.push(Action::Released { lease, verdict: verdict.clone() });
        }
        for amending in holding.amendments {
            let result = Err(NotAmended::Lost(LossCause::Superseded));
            self.actions.push(Action::Amended { lease: amending.lease, result });
        }
    }

    fn withdrawn(&mut self, now: Moment, name: &LockName, id: LeaseId, withdrawn: Withdrawn) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some(i) = state.withdrawals.iter().position(|withdrawal| withdrawal.id == id) else {
            return;
        };
        let withdrawal = &mut state.withdrawals[i];
        // An entry that joins late stands in the way of others until it is withdrawn again.
        withdrawal.put_off(now, GRANT);
        if let Withdrawn::Gone { awaited } = withdrawn {
            if withdrawal.until.is_none_or(|until| until <= now) {
                state.withdrawals.remove(i);
            }
            if awaited {
                state.read_at = Some(now);
            }
        }
    }

    fn polled(
        &mut self,
        now: Moment,
        name: &LockName,
        ids: &[LeaseId],
        sent_at: Moment,
        epoch: Epoch,
        polled: Option<Polled>,
    ) {
        let Some(Polled { row, presences }) = polled else {
            return self.without_row(name, None);
        };
        // In the store, the entries of one client may stand in another order: a request may have been sent twice.
        let is_first = presences.contains(&Presence::Waiting { ahead: 0 });
        let is_valid = match row.holder {
            Holder::Nobody => false,
            Holder::Lease(_) | Holder::Kept => row.remaining.is_some(),
            Holder::Entries => !is_first,
        };
        if let Some(state) = self.names.get_mut(name) {
            let interval = if is_first { POLL_FIRST } else { POLL_OTHERS };
            state.poll_at = Some(now + row.remaining.map_or(interval, |remaining| remaining.min(interval)));
            if !is_valid {
                state.read_at = Some(now);
            }
        }
        for waiter in self.names.get_mut(name).into_iter().flat_map(Name::foremost) {
            waiter.may_join |= waiter.reenters && row.owner == Some(waiter.claim.owner) && is_valid;
        }
        for (id, presence) in ids.iter().zip(presences) {
            let Some(waiter) = self.names.get_mut(name).and_then(|state| state.waiter(*id)) else {
                continue;
            };
            match presence {
                Presence::Holding { token, remaining } => {
                    self.granted_by_other(now, name, *id, token, (sent_at, remaining), epoch);
                }
                Presence::Waiting { .. } if waiter.may_join => {
                    self.requeue(now, name, *id, WaiterState::Refused, false)
                }
                Presence::Waiting { .. } => waiter.state = WaiterState::Queued,
                // The entry has expired, or its grant has. The waiter keeps its turn and joins anew.
                Presence::None => self.requeue(now, name, *id, WaiterState::Refused, false),
            }
        }
    }

    /// A waiter asks anew: what the store knows of its claim is withdrawn, and the claim gets another identity.
    fn requeue(&mut self, now: Moment, name: &LockName, id: LeaseId, state: WaiterState, may_linger: bool) {
        let new_id = self.new_id();
        let Some(queue) = self.names.get_mut(name) else {
            return;
        };
        // The holding that a waiter adopts is asked for under its own identity.
        if let Some(waiter) = queue.waiter(id).filter(|waiter| !waiter.adopts()) {
            let lingers = std::mem::take(&mut waiter.lingers) || may_linger;
            (waiter.claim.id, waiter.state) = (new_id, state);
            queue.withdraw(id, now, lingers);
        }
    }

    /// A holding was looked up after a notice.
    fn verified(&mut self, now: Moment, name: &LockName, id: LeaseId, epoch: Epoch, polled: Option<Polled>) {
        let Some(holding) = self.names.get_mut(name).and_then(|state| state.holding(id)) else {
            return;
        };
        let asked = holding.asked.take().unwrap_or(0);
        // Its release is on its way, and tells.
        if !holding.is_held() {
            return;
        }
        let found = match polled.as_ref().map(|polled| &polled.presences[..]) {
            Some([Presence::Holding { token, .. }]) => Some(*token),
            _ => None,
        };
        let Some(token) = found.filter(|token| holding.has_token(*token)) else {
            return self.lose(now, name, id, LossCause::Superseded);
        };
        holding.epoch = epoch;
        holding.is_doubted = false;
        for lease in holding.leaving.drain(..asked) {
            self.actions.push(Action::Released { lease, verdict: Verdict::Kept });
        }
        self.looked_up(now, name, id, token);
    }

    fn read(
        &mut self,
        now: Moment,
        name: &LockName,
        given_up: Option<LeaseId>,
        sent_at: Moment,
        epoch: Epoch,
        queue: Option<Queue>,
    ) {
        let client = self.heartbeat.client;
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        state.read_at = None;
        let Some(queue) = queue else {
            self.without_row(name, given_up);
            return;
        };
        state.is_wanted = queue.waiting().any(|entry| entry.client != Some(client));
        let mut granted = Vec::new();
        let mut vanished = Vec::new();
        let mut converting = Vec::new();
        for waiter in state.foremost() {
            let id = waiter.claim.id;
            let entry = queue.entries.iter().find(|entry| entry.id == id);
            let presence = Presence::of(id, &queue.row, entry.map(|entry| (entry.state, entry.remaining)), 0);
            let is_queued = waiter.is_queued();
            match presence {
                Presence::Holding { token, remaining } if is_queued => granted.push((id, token, remaining)),
                Presence::None if is_queued && !queue.is_cut_off => vanished.push(id),
                _ => {}
            }
            if waiter.reenters {
                let own = Some(waiter.claim.owner);
                let shares = queue.holding().any(|e| e.owner == own && e.mode == Mode::READ && e.remaining.is_some());
                let holds = queue.row.owner == own && queue.row.holder != Holder::Nobody;
                if shares && waiter.claim.mode == Mode::Exclusive {
                    converting.push(waiter.id);
                } else if holds && (queue.row.remaining.is_some() || queue.row.holder == Holder::Entries) {
                    waiter.may_join = true;
                    if is_queued && !matches!(presence, Presence::Holding { .. }) {
                        vanished.push(id);
                    }
                }
            }
        }
        for id in vanished {
            self.requeue(now, name, id, WaiterState::Refused, false);
        }
        for (id, token, remaining) in granted {
            self.granted_by_other(now, name, id, token, (sent_at, remaining), epoch);
        }
        for waiter in converting {
            self.leave(now, waiter, Some(Refusal::Conversion { name: name.clone() }));
        }
        self.decide(now, name, given_up, &queue);
    }

    /// The name has no row: it was swept, or the store has forgotten it.
    fn without_row(&mut self, name: &LockName, given_up: Option<LeaseId>) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        if let Some(holding) = given_up.and_then(|id| state.holding(id)) {
            holding.release_by_transition(false);
        }
        for waiter in &mut state.waiters {
            waiter.state = match waiter.state {
                WaiterState::Queued | WaiterState::Refused => WaiterState::New,
                state => state,
            };
        }
        state.is_wanted = false;
    }

    fn decide(&mut self, now: Moment, name: &LockName, given_up: Option<LeaseId>, queue: &Queue) {
        let client = self.heartbeat.client;
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        // What is held here and not given up stays.
        let giving =
            given_up.and_then(|id| state.holding(id)).map(|h| crate::protocol::GivenUp { id: h.id(), token: h.token });
        let first = state.first().filter(|waiter| waiter.state == WaiterState::Refused && !waiter.may_join);
        let claim = first.map(|waiter| waiter.claim.clone());
        let tries = first.filter(|waiter| waiter.tries()).map(|waiter| waiter.id);
        let is_held_here = state.is_taken(Mode::Exclusive) && giving.is_none() && queue.row.remaining.is_some();
        match decide(name, queue, client, giving, claim.as_ref()) {
            Decision::Apply(transition) if !is_held_here => {
                // The row says otherwise: the plain release tells what has become of the holding.
                if transition.given_up.is_none()
                    && let Some(holding) = given_up.and_then(|id| state.holding(id))
                {
                    holding.release_by_transition(false);
                }
                let given_up = transition.given_up.map(|given| given.id);
                let body = Request::Transition(transition);
                self.send(name, Step::Transition { given_up }, body);
            }
            decision => {
                let remaining = if let Decision::Wait(remaining) = decision { remaining } else { None };
                state.overtaken = 0;
                state.poll_at = Some(now + remaining.map_or(POLL_FIRST, |remaining| remaining.min(POLL_FIRST)));
                if let Some(holding) = given_up.and_then(|id| state.holding(id)).filter(|holding| !holding.is_held()) {
                    holding.release_by_transition(false);
                    holding.put_off(now);
                }
                if let Some(waiter) = tries {
                    self.leave(now, waiter, Some(Refusal::Held));
                }
            }
        }
    }

    /// A decision was not carried out: the name has changed, or a row was locked.
    fn overtaken(&mut self, now: Moment, name: &LockName, given_up: Option<LeaseId>) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let is_repeated = state.overtaken > 0;
        if let Some(holding) = given_up.and_then(|id| state.holding(id)) {
            // It may be fenced: the plain release tells.
            holding.release_by_transition(false);
            if is_repeated {
                holding.put_off(now);
            }
            state.overtaken += 1;
            return;
        }
        state.read_again(now);
        let first = state.first();
        if state.overtaken > TRIES
            && let Some(waiter) = first.filter(|waiter| waiter.tries()).map(|waiter| waiter.id)
        {
            self.leave(now, waiter, Some(Refusal::Held));
        }
    }

    fn extended(
        &mut self,
        now: Moment,
        name: &LockName,
        id: LeaseId,
        is_kept: bool,
        granting: Granting,
        extended: Amended,
    ) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        if state.waiter(id).is_some() {
            return match extended {
                Amended::Done => self.granted(now, name, id, granting),
                Amended::Locked => {
                    state.waiter(id).into_iter().for_each(|waiter| waiter.ask_at = now + WHILE_LOCKED);
                }
                Amended::NotHeld => match state.waiter(id).filter(|waiter| waiter.resumes.is_some()).map(|w| w.id) {
                    Some(waiter) => self.leave(now, waiter, Some(Refusal::Lost)),
                    None => self.requeue(now, name, id, WaiterState::Refused, false),
                },
            };
        }
        let Some(holding) = state.holding(id) else {
            return;
        };
        holding.extend_at = None;
        match extended {
            Amended::Done => {
                holding.settle(&self.heartbeat);
                holding.ttl = granting.ttl;
                holding.is_kept |= is_kept;
                if is_kept {
                    self.heartbeat.keep(granting.since, granting.ttl);
                }
                holding.epoch = granting.epoch;
                holding.deadline = holding.deadline.max(granting.since + relied_on(granting.ttl));
            }
            Amended::Locked => {
                holding.put_off(now);
                holding.extend_at = Some(holding.again_at);
            }
            // It has been taken away, or was about to run out: the next look tells.
            Amended::NotHeld => {
                holding.settle(&self.heartbeat);
                holding.epoch = Epoch::default();
            }
        }
    }

    /// A request was not answered.
    fn failed(&mut self, now: Moment, name: &LockName, step: Step, body: Request, failure: Failure) {
        self.mark_lingering(now, name, &body);
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let mut refused: Vec<WaiterId> = Vec::new();
        match (step, &body) {
            (Step::Acquire(id) | Step::Join(id), _) => refused.extend(state.waiter(id).map(|waiter| waiter.id)),
            (Step::Withdraw(id), _) => {
                if let Some(withdrawal) = state.withdrawals.iter_mut().find(|withdrawal| withdrawal.id == id) {
                    withdrawal.put_off(now, Duration::from_secs(1));
                }
                if is_on(Mutation::WithdrawOnce) {
                    state.withdrawals.retain(|withdrawal| withdrawal.id != id);
                }
            }
            (Step::Release(id), Request::Release(release)) => {
                if let Some(next) = release.next.as_ref().map(|claim| claim.id) {
                    // It may have been granted the name.
                    self.requeue(now, name, next, WaiterState::New, true);
                }
                self.conclude(now, name, Some(id), Verdict::Failed(failure.clone()));
            }
            (Step::Amend(id), _) => self.amendment_failed(now, name, id, failure.clone()),
            (Step::Detach(id), _) => self.detached(now, name, id, None),
            (Step::Verify(id) | Step::Extend(id), _) => {
                if let Some(holding) = state.holding(id) {
                    holding.asked = None;
                    holding.put_off(now);
                } else {
                    refused.extend(state.waiter(id).map(|waiter| waiter.id));
                }
            }
            (Step::Enqueue | Step::Poll | Step::Read { given_up: None } | Step::Transition { given_up: None }, _) => {
                state.read_at = None;
                refused.extend(state.waiters.iter().map(|waiter| waiter.id));
            }
            (Step::Read { given_up } | Step::Transition { given_up }, _) => {
                self.conclude(now, name, given_up, Verdict::Failed(failure.clone()));
            }
            (Step::Release(_), _) => {}
        }
        for waiter in refused {
            let known = self.names.get_mut(name).into_iter().flat_map(|state| &mut state.waiters);
            known.filter(|known| known.id == waiter).for_each(|known| known.lingers = true);
            self.leave(now, waiter, Some(Refusal::Failed(failure.clone())));
        }
    }
}

/// Lets a caller share a holding.
fn enter(holding: &mut Holding, now: Moment, max_hold: Option<Duration>, next_lease: &mut u64) -> Grant {
    *next_lease += 1;
    let lease = LeaseKey(*next_lease);
    if let HoldingState::Held(leases) = &mut holding.state {
        leases.push(LocalLease { key: lease, ends: max_hold.map(|at_most| now + at_most) });
    }
    Grant { lease, name: holding.claim.name.clone(), id: holding.id(), token: holding.token }
}

/// Whether nothing of a name is left but acquisitions that are withdrawn once more in case a request takes effect late.
fn is_settled(state: &Name) -> bool {
    let rest = state.waiters.is_empty() && state.holdings.is_empty() && !state.is_busy;
    rest && state.withdrawals.iter().all(|withdrawal| withdrawal.until.is_some() && withdrawal.pause > FIRST_PAUSE)
        && state.detachments.iter().all(|detachment| detachment.pause > FIRST_PAUSE)
}
