//! Faults: pauses, crashes, outages, locks of other transactions, evictions.

use super::super::checker::Belief;
use super::{ActorState, FAULTS_END, MILLISECOND, NOTICED_WITHIN, SECOND, World, WorldEvent};
use crate::backend::memory::{Key, TransactionId};
use crate::engine::{Input, LeaseId};
use crate::name::LockName;
use crate::protocol::{ChangeOutcome, Request, Response};
use crate::token::FencingToken;

impl World {
    pub(super) fn fault(&mut self) {
        if self.now >= FAULTS_END {
            return;
        }
        self.after(50 * MILLISECOND, WorldEvent::Fault);
        let client = self.random.below(self.profile.clients) as usize;
        if self.random.permille(self.profile.pauses) {
            let pause = self.random.range(200 * MILLISECOND..6 * SECOND);
            self.tell(|| format!("client {client} is paused for {} ms", pause / MILLISECOND));
            let until = self.clients[client].paused_until.max(self.now + pause);
            self.clients[client].paused_until = until;
            self.disturb(client, until);
        }
        if self.random.permille(self.profile.crashes) && self.clients[client].engine.is_some() {
            self.crash(client);
        }
        if self.random.permille(self.profile.closes) {
            self.tell(|| format!("client {client} shuts down"));
            let life = self.clients[client].life;
            self.feed(client, life, Input::Close);
        }
        if self.random.permille(self.profile.outages) {
            let lasts = self.random.range(200 * MILLISECOND..4 * SECOND);
            self.tell(|| format!("the store is unavailable for {} ms", lasts / MILLISECOND));
            self.store_is_away_until = self.now + lasts;
            let open: Vec<TransactionId> = self.transactions.keys().copied().collect();
            for transaction in open {
                if self.random.permille(500) {
                    self.transactions.remove(&transaction);
                    self.store.unlock(transaction);
                }
            }
        }
        self.may_fail_over();
        if self.random.permille(self.profile.foreign_locks) {
            self.lock_row(client);
        }
        if self.random.permille(self.profile.evictions) {
            self.evict();
        }
    }

    pub(super) fn crash(&mut self, client: usize) {
        self.tell(|| format!("client {client} crashes"));
        self.stop(client);
    }

    /// Ends a client without a shutdown, and schedules its restart.
    pub(super) fn stop(&mut self, client: usize) {
        let state = &mut self.clients[client];
        state.engine = None;
        state.life += 1;
        state.requests.clear();
        self.beliefs.retain(|(c, _), _| *c != client);
        self.evicted.retain(|(c, _), _| *c != client);
        self.informed.retain(|(c, _)| *c != client);
        self.releasing.retain(|(c, _), _| *c != client);
        self.handed_back.retain(|(c, _)| *c != client);
        for actor in self.actors.iter_mut().filter(|actor| actor.client == client) {
            actor.state = ActorState::Idle;
            actor.turn += 1;
        }
        let pause = self.random.below(2 * SECOND);
        self.after(pause, WorldEvent::Restart { client });
    }

    /// Locks a row for a while, in a transaction of the application.
    pub(super) fn lock_row(&mut self, client: usize) {
        let names: Vec<LockName> = self.store.leases.keys().cloned().collect();
        let key = match self.random.below(3) {
            0 if !self.profile.is_calm() && self.store.clients.contains_key(&self.clients[client].id) => {
                Key::Client(self.clients[client].id)
            }
            _ if names.is_empty() => return,
            _ => Key::Lease(names[self.random.below(names.len() as u64) as usize].clone()),
        };
        let transaction = self.next_transaction();
        if self.store.lock(transaction, key.clone()) {
            let lasts = self.random.range(50 * MILLISECOND..1_500 * MILLISECOND);
            self.tell(|| format!("a transaction locks {key:?} for {} ms", lasts / MILLISECOND));
            self.disturb_all(self.now + lasts);
            self.after(lasts, WorldEvent::Unlock { transaction });
        }
    }

    pub(super) fn evict(&mut self) {
        if self.beliefs.is_empty() || self.now < self.store_is_away_until {
            return;
        }
        let chosen = self.random.below(self.beliefs.len() as u64) as usize;
        let Some(belief) = self.beliefs.values().nth(chosen).cloned() else {
            return;
        };
        if !self.evict_token(&belief.name, belief.token) {
            return;
        }
        let operator = self.random.below(self.profile.clients) as usize;
        if self.random.permille(300) && self.clients[operator].paused_until <= self.now {
            self.confirm_eviction(operator, &belief);
        }
    }

    /// Evicts the holder of a token. Returns whether the name had it.
    pub(super) fn evict_token(&mut self, name: &LockName, token: FencingToken) -> bool {
        let transaction = self.next_transaction();
        let clock = self.store_clock();
        let evict = Request::Evict { name: name.clone(), token };
        let Ok(prepared) = self.store.prepare(transaction, clock, &evict) else {
            return false;
        };
        if prepared.response != Response::Evicted(ChangeOutcome::Done) {
            return false;
        }
        self.tell(|| format!("an operator evicts token {token} of {name}"));
        self.summary.evicted += 1;
        self.store.commit(transaction, clock, prepared);
        let ended: Vec<(usize, LeaseId)> = self
            .beliefs
            .iter()
            .filter(|(_, b)| b.name == *name && (b.token == token || b.may_have == Some(token)))
            .map(|(key, _)| *key)
            .collect();
        for (client, lease) in ended {
            self.evicted.insert((client, lease), self.now);
            let life = self.clients[client].life;
            self.after(NOTICED_WITHIN, WorldEvent::CheckEvicted { client, life, lease, at: self.now });
            if self.random.permille(200) {
                self.look_up(client, name);
            }
        }
        self.check_fences();
        true
    }

    /// Tells a client that it has evicted the holder of a name. Its own lease must end at once.
    fn confirm_eviction(&mut self, client: usize, evicted: &Belief) {
        let (name, token, life) = (evicted.name.clone(), evicted.token, self.clients[client].life);
        self.feed(client, life, Input::Evicted { name, token });
        let is_kept = |b: &Belief| b.client == client && b.name == evicted.name && b.token == token;
        if self.beliefs.values().any(is_kept) {
            self.violate(format!("client {client} has evicted its lease of {} and keeps it", evicted.name));
        }
    }

    /// A caller of a client suspects that its lease has ended.
    pub(super) fn look_up(&mut self, client: usize, name: &LockName) {
        self.tell(|| format!("client {client} looks {name} up"));
        let life = self.clients[client].life;
        self.feed(client, life, Input::LookUp { name: name.clone() });
    }
}
