//! Requests to holders to release a name, and whether the holders receive them.

use super::super::checker::Belief;
use super::{MILLISECOND, NOTICED_WITHIN, World, WorldEvent};
use crate::engine::{Grant, LeaseId};
use crate::name::LockName;
use crate::protocol::{AskOutcome, Request, Response};

/// By how much changes may have raised the token of a lease since its release was asked for.
const RAISED_BY: i64 = 10_000;

impl World {
    /// A caller asks the holders of a name to release it.
    pub(super) fn ask(&mut self, name: &LockName) {
        if self.now < self.store_is_away_until {
            return;
        }
        let transaction = self.next_transaction();
        let clock = self.store_clock();
        let Ok(prepared) = self.store.prepare(transaction, clock, &Request::Ask { name: name.clone() }) else {
            return;
        };
        if matches!(prepared.response, Response::Asked(AskOutcome::Holders(0) | AskOutcome::Locked)) {
            return;
        }
        self.store.commit(transaction, clock, prepared);
        let token = self.store.leases.get(name).map_or(0, |row| row.asked);
        self.tell(|| format!("the holders of {name}, up to token {token}, are asked to release it"));
        self.summary.asked += 1;
        self.asked.insert(name.clone(), token);
        let holders: Vec<(usize, LeaseId)> = self
            .beliefs
            .iter()
            .filter(|(_, belief)| belief.name == *name && belief.is_renewed && belief.token.get() <= token)
            .map(|(key, _)| *key)
            .collect();
        for (client, lease) in holders {
            self.must_be_informed_soon(client, lease);
        }
    }

    /// Checks later that the engine has reported the request for this lease.
    fn must_be_informed_soon(&mut self, client: usize, lease: LeaseId) {
        let life = self.clients[client].life;
        self.after(NOTICED_WITHIN, WorldEvent::CheckInformed { client, life, lease, at: self.now });
    }

    /// Checks that a holder whose heartbeat goes on has received the request.
    pub(super) fn check_informed(&mut self, client: usize, life: u32, lease: LeaseId, at: u64) {
        let key = (client, lease);
        let believes = self.beliefs.get(&key).is_some_and(|belief| belief.is_renewed && belief.until > self.now);
        let is_delayed = self.clients[client].disturbed_at >= at || self.store_is_away_until >= at;
        let is_over = self.clients[client].life != life || !believes || !self.is_undisputed(&key);
        if !is_over && !is_delayed && !self.informed.contains(&key) {
            self.violate(format!(
                "client {client} did not receive the request to release {lease:?} within {} ms",
                NOTICED_WITHIN / MILLISECOND
            ));
        }
    }

    /// Returns whether a request to release the name concerns this grant.
    pub(super) fn was_asked(&self, grant: &Grant) -> bool {
        self.asked.get(&grant.name).is_some_and(|asked| grant.token.get() <= *asked)
    }

    /// Checks later that a request reaches a lease which was granted before the request, but is
    /// discovered after it. A lease that enters the holding of an informed holder is informed at
    /// once.
    pub(super) fn note_asked_grant(&mut self, client: usize, grant: &Grant) {
        let Some(granted) = self.beliefs.get(&(client, grant.lease)).filter(|_| self.was_asked(grant)) else {
            return;
        };
        let shares = |(key, belief): (&(usize, LeaseId), &Belief)| {
            key.0 == client
                && self.informed.contains(key)
                && (&belief.name, belief.token, belief.owner) == (&granted.name, granted.token, granted.owner)
        };
        let (is_renewed, enters) = (granted.is_renewed, self.beliefs.iter().any(shares));
        if enters {
            self.must_be_informed.push((client, grant.lease));
        }
        if is_renewed {
            self.must_be_informed_soon(client, grant.lease);
        }
    }

    pub(super) fn check_entries(&mut self) {
        for (client, lease) in std::mem::take(&mut self.must_be_informed) {
            if !self.informed.contains(&(client, lease)) {
                self.violate(format!("client {client}: {lease:?} enters a holding and does not receive the request"));
            }
        }
    }

    /// The engine reports a request to release a lease.
    pub(super) fn release_requested(&mut self, client: usize, lease: LeaseId) {
        if !self.informed.insert((client, lease)) {
            self.violate(format!("client {client} received the request to release {lease:?} twice"));
        }
        let Some(belief) = self.beliefs.get(&(client, lease)) else {
            return;
        };
        let asked = self.asked.get(&belief.name).copied().unwrap_or(0);
        if belief.token.get() > asked + RAISED_BY {
            self.violate(format!("client {client} received a request to release {lease:?} that no caller has made"));
        }
    }
}
