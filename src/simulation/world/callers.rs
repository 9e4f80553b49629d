//! Callers, which acquire, hold, fence, change and release leases.

use std::time::Duration;

use super::super::checker::{self, Belief};
use super::{
    Actor, ActorState, Delivery, ENTERED_WITHIN, EXTENDED_WITHIN, FAULTS_END, Fenced, Kept, LONGEST_FENCE, MILLISECOND,
    NAMES, NOTICED_WITHIN, Releasing, Resumable, SECOND, Wait, World, WorldEvent, owner, store_clock_at,
};
use crate::backend::memory::{End, TransactionId};
use crate::engine::{
    Amendment, Exported, Grant, HoldTime, Input, LeaseId, LeaseSpec, NotAmended, Refusal, Verdict, WaitMode, WaiterId,
};
use crate::error::LossCause;
use crate::name::LockName;
use crate::protocol::{AcquisitionId, Mode};
use crate::token::FencingToken;

/// The number of tries of one client at the same moment: more than the waiters that an engine looks
/// for in an answer.
const CROWD: u32 = 40;

/// Returns how long a name stays taken, in nanoseconds, by the slowest clock.
fn least_nanos(hold_at_least: Duration) -> u64 {
    hold_at_least.mul_f64(0.99).as_nanos() as u64
}

impl World {
    pub(super) fn act(&mut self, actor: usize, turn: u32) {
        if self.actors[actor].turn != turn {
            return;
        }
        let client = self.actors[actor].client;
        let life = self.clients[client].life;
        match self.actors[actor].state {
            ActorState::Idle => self.ask_for_lease(actor),
            // The actor stops waiting.
            ActorState::Waiting(Wait { waiter, .. }) => {
                self.tell(|| format!("client {client} cancels {waiter:?}"));
                self.rest(actor);
                self.feed(client, life, Input::Cancel { waiter });
            }
            ActorState::Holding { lease, id, releases_at, fences } => {
                if fences {
                    self.fence(actor, lease, id, releases_at);
                } else if self.chance_of_change() {
                    self.change(actor, lease);
                } else {
                    self.release(actor, lease);
                }
            }
            ActorState::Releasing | ActorState::Changing { .. } => {}
        }
    }

    pub(super) fn ask_for_lease(&mut self, actor: usize) {
        let client = self.actors[actor].client;
        if self.actors[actor].left == 0 || self.clients[client].engine.is_none() {
            return;
        }
        self.actors[actor].left -= 1;
        if !self.exported.is_empty() && self.random.permille(700) {
            return self.resume(actor);
        }
        let number = self.random.below(self.profile.names);
        let name = LockName::new(NAMES[number as usize]).expect("a name");
        let reenters = self.random.permille(self.profile.given_owners);
        let owner = if reenters { self.owners[self.random.below(2) as usize] } else { owner(self.random.next()) };
        // Permits and shared leases of one name count with different limits, and permits are not
        // re-entered.
        let mode = if self.random.permille(self.profile.shared) && !(number == 1 && reenters) {
            let units = 1 + self.random.below(2) as u32;
            if number == 0 { Mode::READ } else { Mode::Shared { units, permits: 3 } }
        } else {
            Mode::Exclusive
        };
        let ttl = Duration::from_secs([1, 2, 5][self.random.below(3) as usize]);
        let now = self.clients[client].local(self.now);
        let kind = self.random.below(10);
        let wait_mode = match kind {
            0..3 => WaitMode::Try(now + Duration::from_secs(5)),
            3 => WaitMode::Wait(Some(now + Duration::from_millis(self.random.range(20..2_000)))),
            _ => WaitMode::Wait(None),
        };
        if self.random.permille(self.profile.asks) {
            self.ask(&name);
        }
        self.next_waiter += 1;
        let waiter = WaiterId(self.next_waiter);
        let is_renewed = self.random.permille(850);
        let spec = LeaseSpec {
            name: name.clone(),
            owner,
            reenters,
            mode,
            ttl,
            is_renewed,
            hold_time: HoldTime {
                at_least: Duration::from_millis(if self.random.permille(100) { self.random.below(2_500) } else { 0 }),
                at_most: self.random.permille(100).then(|| Duration::from_millis(1_500)),
            },
            label: "".into(),
            wait_mode,
        };
        let (is_renewed, hold_time) = (spec.is_renewed, spec.hold_time);
        let text =
            format!("{name} {mode:?} ttl {ttl:?} {wait_mode:?} kept {is_renewed} reenters {reenters} {hold_time:?}");
        self.tell(|| format!("client {client} requests {waiter:?}: {text}"));
        let wait = Wait::new(waiter, self.now, &spec);
        let is_unlimited = wait.is_unlimited;
        self.actors[actor].state = ActorState::Waiting(wait);
        self.actors[actor].turn += 1;
        if is_unlimited && self.random.permille(200) && self.now < FAULTS_END {
            let (turn, delay) = (self.actors[actor].turn, self.random.below(3 * SECOND));
            self.after(delay, WorldEvent::Actor { actor, turn });
        }
        let life = self.clients[client].life;
        let may_crowd = self.profile.crowds > 0 && is_unlimited && spec.mode == Mode::Exclusive;
        let crowds = may_crowd && self.random.permille(self.profile.crowds);
        let first = crowds.then(|| self.crowd(client, &spec));
        self.feed(client, life, Input::Acquire { waiter, spec });
        if let Some(waiter) = first {
            self.tell(|| format!("client {client} cancels {waiter:?}, the first of a crowd"));
            self.crowd.remove(&waiter);
            self.feed(client, life, Input::Cancel { waiter });
        }
    }

    /// Lets many callers of a client try a name at once. Returns the first of them.
    fn crowd(&mut self, client: usize, spec: &LeaseSpec) -> WaiterId {
        let (first, life) = (self.next_waiter + 1, self.clients[client].life);
        let wait_mode = WaitMode::Try(self.clients[client].local(self.now) + Duration::from_secs(5));
        for _ in 0..CROWD {
            self.next_waiter += 1;
            let waiter = WaiterId(self.next_waiter);
            self.crowd.insert(waiter);
            let owner = owner(self.random.next());
            let spec = LeaseSpec { owner, reenters: false, wait_mode, ..spec.clone() };
            self.feed(client, life, Input::Acquire { waiter, spec });
        }
        WaiterId(first)
    }

    /// Pauses an actor before its next request.
    pub(super) fn rest(&mut self, actor: usize) {
        self.actors[actor].state = ActorState::Idle;
        self.actors[actor].turn += 1;
        let (turn, pause) = (self.actors[actor].turn, self.random.below(1_500 * MILLISECOND));
        self.after(pause, WorldEvent::Actor { actor, turn });
    }

    pub(super) fn waiting(&self, client: usize, waiter: WaiterId) -> Option<usize> {
        let waits = |actor: &Actor| {
            actor.client == client && matches!(&actor.state, ActorState::Waiting(wait) if wait.waiter == waiter)
        };
        self.actors.iter().position(waits)
    }

    /// The engine reports that a caller waits behind another one.
    pub(super) fn wait_reported(&mut self, client: usize, waiter: WaiterId) {
        if self.crowd.contains(&waiter) {
            return;
        }
        let actor = self.waiting(client, waiter).map(|actor| &mut self.actors[actor].state);
        let Some(ActorState::Waiting(wait)) = actor else {
            return self.violate(format!("client {client} reports that {waiter:?} waits, which does not wait"));
        };
        if std::mem::replace(&mut wait.is_reported, true) {
            self.violate(format!("client {client} reports twice that {waiter:?} waits"));
        }
    }

    pub(super) fn granted(&mut self, client: usize, waiter: WaiterId, grant: &Grant) {
        if self.crowd.remove(&waiter) {
            self.handed_back.insert((client, grant.lease));
            return self.unwanted.push((client, grant.lease));
        }
        let Some(actor) = self.waiting(client, waiter) else {
            return self.violate(format!("client {client}: {waiter:?} is granted a name without waiting for it"));
        };
        let ActorState::Waiting(wait) = &self.actors[actor].state else {
            return;
        };
        let Wait { name, owner, mode, ttl, hold_at_least, is_renewed, since, resumes, .. } = wait.clone();
        self.summary.grants += 1;
        match resumes {
            Some(exported) if exported.token != grant.token => {
                self.violate(format!("client {client} resumes {exported:?} of {name} and gets {}", grant.token));
            }
            Some(exported) => self.deliveries.push(Delivery { client, lease: grant.lease, exported }),
            None => self.check_order(client, &name, mode, since),
        }
        self.check_kept(client, &name, owner, mode);
        // An owner may enter a holding that a failover has brought back.
        let is_back = self.failover.has_happened() && (resumes.is_some() || self.owners.contains(&owner));
        // A lease that enters a holding shares its eviction.
        let end = self.store.ends.get(&(name.clone(), grant.token.get()));
        let is_evicted = end.is_some_and(|(end, _)| *end == End::Evicted);
        let is_held_already =
            is_back || is_evicted || self.beliefs.values().any(|b| b.name == name && b.owner == owner);
        // The answer of a store can arrive after a grant of the store that has replaced it.
        let is_late = self.failover.has_lost(&name, grant.token);
        if !is_held_already && !is_late && resumes.is_none() {
            self.check_token(&name, owner, mode, grant.token);
        }
        self.tokens.entry(name.clone()).or_default().add(grant.token, owner, mode);
        if is_evicted {
            self.evicted.insert((client, grant.lease), self.now);
            let (life, lease) = (self.clients[client].life, grant.lease);
            self.after(NOTICED_WITHIN, WorldEvent::CheckEvicted { client, life, lease, at: self.now });
        }
        // A lease that enters a holding without a heartbeat may end with it.
        let is_renewed = is_renewed && !self.owners.contains(&owner);
        let (id, token) = (grant.id, grant.token);
        let keeps_until = self.now + least_nanos(hold_at_least);
        let belief =
            Belief { client, name, id, owner, mode, ttl, token, may_have: None, is_renewed, until: 0, keeps_until };
        self.beliefs.insert((client, grant.lease), belief);
        self.note_if_lost((client, grant.lease));
        self.note_asked_grant(client, grant);
        let life = self.clients[client].life;
        self.after(EXTENDED_WITHIN, WorldEvent::CheckTtl { client, life, lease: grant.lease, at: self.now });
        let fences = self.random.permille(self.profile.fences);
        let held = self.random.below(2_500 * MILLISECOND);
        let held = match self.random.below(20) {
            0 => held * 3,
            1..6 => held,
            _ => held / 20,
        };
        // The hold is long enough to learn of a request from before the grant.
        let held = if self.was_asked(grant) { held + NOTICED_WITHIN } else { held };
        let held = if self.is_awaited_by_owner(client, grant.lease) { held + ENTERED_WITHIN + SECOND } else { held };
        let releases_at = self.now + held;
        self.actors[actor].state = ActorState::Holding { lease: grant.lease, id: grant.id, releases_at, fences };
        self.actors[actor].turn += 1;
        let (turn, at) = (self.actors[actor].turn, if fences { self.now + held / 2 } else { releases_at });
        self.at(at, WorldEvent::Actor { actor, turn });
    }

    pub(super) fn refused(&mut self, client: usize, waiter: WaiterId, refusal: &Refusal) {
        if self.crowd.remove(&waiter) {
            return;
        }
        let Some(actor) = self.waiting(client, waiter) else {
            return self.violate(format!("client {client}: {waiter:?} is refused without waiting"));
        };
        let ActorState::Waiting(wait) = &self.actors[actor].state else {
            return;
        };
        let wait = wait.clone();
        let Wait { is_try, is_unlimited, resumes, .. } = wait;
        let exported_at = resumes.and_then(|exported| self.exported_at.remove(&exported.id));
        match refusal {
            Refusal::Lost if exported_at.is_some_and(|at| self.now < at + SECOND) => {
                self.violate(format!("client {client}: {waiter:?} resumes {resumes:?}: refused as lost"));
            }
            Refusal::Taken if !is_try => {
                self.violate(format!("client {client}: {waiter:?} waits, and is refused because the name is held"))
            }
            Refusal::Timeout if is_unlimited => {
                self.violate(format!("client {client}: {waiter:?} would wait for ever, and timed out"))
            }
            Refusal::Failed(_) | Refusal::NoAnswer if self.profile.is_quick() => {
                self.violate(format!("client {client}: {waiter:?} fails without a reason: {refusal:?}"));
            }
            Refusal::Taken => {
                self.check_refused_try(client, &wait);
                self.summary.refused += 1;
            }
            Refusal::Timeout => self.summary.timeouts += 1,
            _ => self.summary.failed += 1,
        }
        self.rest(actor);
    }

    pub(super) fn chance_of_change(&mut self) -> bool {
        self.random.permille(self.profile.changes)
    }

    /// Changes a lease instead of releasing it.
    pub(super) fn change(&mut self, actor: usize, lease: LeaseId) {
        let client = self.actors[actor].client;
        let life = self.clients[client].life;
        let Some(belief) = self.beliefs.get_mut(&(client, lease)) else {
            return self.rest(actor);
        };
        let lasts = Duration::from_millis(self.random.range(1_000..5_000));
        let to = FencingToken::new(belief.token.get() + 1_000).expect("positive");
        let amendment = match self.random.below(6) {
            0 => Amendment::Extend(lasts),
            1 if belief.mode == Mode::Exclusive && belief.name.as_str() == "a" => {
                // The store may grant other readers the name before the holder has the answer.
                belief.mode = Mode::READ;
                Amendment::Downgrade
            }
            2 if belief.mode == Mode::Exclusive => {
                belief.may_have = Some(to);
                Amendment::Raise(to)
            }
            3 => {
                let hold_time = HoldTime { at_least: lasts / 8, at_most: Some(lasts / 4) };
                // The lease may end earlier than before.
                belief.until = 0;
                belief.keeps_until = self.now + least_nanos(hold_time.at_least);
                self.tell(|| format!("client {client} limits {lease:?}: {hold_time:?}"));
                self.hold_on(actor, lease);
                return self.feed(client, life, Input::StartHoldTime { lease, hold_time });
            }
            _ => {
                self.tell(|| format!("client {client} is to export {lease:?}"));
                return self.feed(client, life, Input::Export { lease });
            }
        };
        self.tell(|| format!("client {client} changes {lease:?}: {amendment:?}"));
        self.actors[actor].state = ActorState::Changing { lease, amendment };
        self.actors[actor].turn += 1;
        self.feed(client, life, Input::Amend { lease, amendment });
    }

    pub(super) fn amended(&mut self, client: usize, lease: LeaseId, result: &Result<(), NotAmended>) {
        let changes = |actor: &Actor| {
            actor.client == client && matches!(actor.state, ActorState::Changing { lease: l, .. } if l == lease)
        };
        let Some(actor) = self.actors.iter().position(changes) else {
            return;
        };
        let ActorState::Changing { amendment, .. } = self.actors[actor].state else {
            return;
        };
        if let (Ok(()), Amendment::Raise(to), Some(belief)) =
            (result, amendment, self.beliefs.get_mut(&(client, lease)))
        {
            belief.token = to;
            self.tokens.entry(belief.name.clone()).or_default().add(to, belief.owner, belief.mode);
            self.note_if_lost((client, lease));
        }
        // The caller still holds the name alone.
        if let (Err(NotAmended::EnteredAgain | NotAmended::Locked), Amendment::Downgrade, Some(belief)) =
            (result, amendment, self.beliefs.get_mut(&(client, lease)))
        {
            belief.mode = Mode::Exclusive;
        }
        if self.profile.is_quick() && matches!(result, Err(NotAmended::Failed(_))) {
            self.violate(format!("client {client}: {lease:?} is not changed: {result:?}"));
        }
        self.hold_on(actor, lease);
    }

    /// Lets an actor hold a changed lease for some more time.
    fn hold_on(&mut self, actor: usize, lease: LeaseId) {
        let id = AcquisitionId::from_u128(0);
        let releases_at = self.now + self.random.below(SECOND);
        self.actors[actor].state = ActorState::Holding { lease, id, releases_at, fences: false };
        self.actors[actor].turn += 1;
        let turn = self.actors[actor].turn;
        self.at(releases_at, WorldEvent::Actor { actor, turn });
    }

    pub(super) fn was_exported(&mut self, client: usize, lease: LeaseId, exported: Option<Exported>) {
        let holds = |actor: &Actor| {
            actor.client == client && matches!(actor.state, ActorState::Holding { lease: l, .. } if l == lease)
        };
        let (actor, exported) = match (self.actors.iter().position(holds), exported) {
            (Some(actor), Some(exported)) => (actor, exported),
            (Some(actor), None) => return self.release(actor, lease),
            // The lease has just been lost.
            (None, None) => return,
            (None, Some(_)) => {
                return self.violate(format!("client {client}: {lease:?} is exported without a request"));
            }
        };
        self.evicted.remove(&(client, lease));
        if let Some(belief) = self.beliefs.remove(&(client, lease)) {
            if belief.is_renewed && self.profile.is_calm() {
                self.exported_at.insert(exported.id, self.now);
            }
            let Belief { name, owner, mode, .. } = belief;
            self.exported.push(Resumable { exported, name, owner, mode });
        }
        self.rest(actor);
    }

    /// Resumes an exported lease. In rare cases it can be resumed once more after that.
    pub(super) fn resume(&mut self, actor: usize) {
        let client = self.actors[actor].client;
        let chosen = self.random.below(self.exported.len() as u64) as usize;
        let chosen = if self.random.permille(100) {
            let again = self.exported[chosen].clone();
            self.exported_at.remove(&again.exported.id);
            again
        } else {
            self.exported.swap_remove(chosen)
        };
        let Resumable { exported, name, owner, mode } = chosen;
        self.next_waiter += 1;
        let waiter = WaiterId(self.next_waiter);
        let (now, ttl) = (self.clients[client].local(self.now), Duration::from_secs(2));
        let spec = LeaseSpec {
            name: name.clone(),
            owner,
            reenters: true,
            mode,
            ttl,
            is_renewed: true,
            hold_time: HoldTime::default(),
            label: "".into(),
            wait_mode: WaitMode::Try(now + Duration::from_secs(5)),
        };
        self.tell(|| format!("client {client} resumes {exported:?} of {name}, {mode:?}, as {waiter:?}"));
        let wait = Wait { is_renewed: false, resumes: Some(exported), ..Wait::new(waiter, self.now, &spec) };
        self.actors[actor].state = ActorState::Waiting(wait);
        self.actors[actor].turn += 1;
        let life = self.clients[client].life;
        self.feed(client, life, Input::Resume { waiter, spec, exported });
    }

    pub(super) fn release(&mut self, actor: usize, lease: LeaseId) {
        let client = self.actors[actor].client;
        let life = self.clients[client].life;
        self.actors[actor].state = ActorState::Releasing;
        let Some(belief) = self.beliefs.remove(&(client, lease)) else {
            return self.rest(actor);
        };
        self.evicted.remove(&(client, lease));
        self.keep(&belief);
        let (Belief { name, token, .. }, asked_at) = (belief, self.now);
        self.releasing.insert((client, lease), Releasing { name, token, actor, asked_at });
        self.tell(|| format!("client {client} releases {lease:?}"));
        self.feed(client, life, Input::Release { lease });
    }

    /// Notes until when the name of a released lease stays taken. The last lease of a client and an
    /// owner decides.
    fn keep(&mut self, belief: &Belief) {
        let is_last = !self.beliefs.values().any(|other| (&other.name, other.owner) == (&belief.name, belief.owner));
        if is_last && belief.until > self.now && belief.keeps_until > self.now {
            let Belief { name, owner, mode, token, keeps_until, .. } = belief.clone();
            self.kept.push(Kept { name, owner, mode, token, until: keeps_until });
        }
    }

    pub(super) fn released(&mut self, client: usize, lease: LeaseId, verdict: &Verdict) {
        let Some(released) = self.releasing.remove(&(client, lease)) else {
            return self.violate(format!("client {client}: {lease:?} was not being released"));
        };
        let Releasing { name, token, actor, asked_at } = released;
        self.summary.released += 1;
        if matches!(verdict, Verdict::Unknown) {
            self.summary.unknown += 1;
        }
        let end = self.store.ends.get(&(name.clone(), token.get())).copied();
        // An older copy may have the lease under its id before it was resumed here, and the
        // withdrawal of that id releases it.
        let is_lost = matches!(verdict, Verdict::Lost(_));
        let is_forgotten = self.failover.has_happened() && end.is_none_or(|(end, _)| is_lost && end == End::Released);
        if let Err(violation) = checker::verdict(&name, token, verdict, end, store_clock_at(asked_at))
            && !is_forgotten
        {
            self.violate(violation);
        }
        // Only a release that was repeated may have ended the holding before.
        let is_delayed = self.was_delayed_since(client, &name, asked_at) || self.failover.has_happened();
        if matches!(verdict, Verdict::Unknown) && !is_delayed {
            self.violate(format!("client {client}: the release of {name} has an unknown outcome without a reason"));
        }
        if self.profile.is_quick() && !matches!(verdict, Verdict::Held | Verdict::Lost(LossCause::Expired)) {
            self.violate(format!("client {client}: the release of {name} ended with {verdict:?}"));
        }
        self.rest(actor);
    }

    /// Begins a fenced transaction of a caller.
    pub(super) fn fence(&mut self, actor: usize, lease: LeaseId, id: AcquisitionId, releases_at: u64) {
        let client = self.actors[actor].client;
        self.actors[actor].state = ActorState::Holding { lease, id, releases_at, fences: false };
        let turn = self.actors[actor].turn;
        self.at(releases_at, WorldEvent::Actor { actor, turn });
        let Some(Belief { name, owner, mode, token, until, .. }) = self.beliefs.get(&(client, lease)).cloned() else {
            return;
        };
        let transaction = self.next_transaction();
        match self.store.fence(transaction, &name, id, token) {
            Ok(true) => {
                self.summary.fenced += 1;
                self.tell(|| format!("client {client} begins a transaction fenced by token {token}"));
                let longest = if self.random.permille(200) { LONGEST_FENCE } else { 30 * MILLISECOND };
                let takes = self.random.below(longest);
                let fenced_until = self.fenced_until.entry(name.clone()).or_insert(0);
                *fenced_until = (*fenced_until).max(self.now + takes);
                self.fenced.insert(transaction, Fenced { name, owner, mode, token, client });
                self.after(takes, WorldEvent::EndFence { transaction });
            }
            Ok(false) if until > self.now && self.is_undisputed(&(client, lease)) => {
                self.violate(format!(
                    "client {client} believes in {name}, token {token}, and the store knows nothing of it"
                ));
            }
            Ok(false) => self.look_up(client, &name),
            Err(_) => {}
        }
    }

    pub(super) fn end_fence(&mut self, transaction: TransactionId) {
        self.store.unlock(transaction);
        if let Some(fenced) = self.fenced.remove(&transaction) {
            self.tell(|| format!("client {} ends a transaction fenced by token {}", fenced.client, fenced.token));
        }
    }
}
