//! A failover: an older copy replaces the store, as a promoted asynchronous standby does.
//!
//! Writes that the copy has missed are lost: grants and releases. Exclusion cannot hold then. The
//! holder of a lost lease must notice it soon, and a released lease must not stay held.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{MILLISECOND, NOTICED_WITHIN, SECOND, World, WorldEvent};
use crate::backend::memory::Memory;
use crate::engine::LeaseId;
use crate::name::LockName;
use crate::protocol::{ClientId, EntryState, Holder};
use crate::token::FencingToken;

/// How many copies are kept, one for each step of the faults.
const COPIES: usize = 40;
/// For how long after a failover a lease may overlap with another: the longest TTL, since its last
/// heartbeats may be lost.
const MAY_OVERLAP: u64 = 6 * SECOND;
/// The heartbeats of a client come at least as often, in microseconds.
const LATEST_BEAT: i64 = 2_000_000;
/// A token of the old store is not greater than its clock at the failover plus the callers' raises.
const RAISED_BY: i64 = 2_000;

#[derive(Default)]
pub(super) struct Failover {
    copies: VecDeque<Memory>,
    /// The store's clock at the latest failover, and the tokens known to the copy.
    latest: Option<(i64, BTreeSet<(LockName, i64)>)>,
    /// Leases that the copy has, and until when other owners may hold their names.
    may_overlap: BTreeMap<(usize, LeaseId), u64>,
    /// When the new store answers.
    until: u64,
}

impl Failover {
    pub(super) fn has_happened(&self) -> bool {
        self.latest.is_some()
    }

    pub(super) fn may_overlap(&self, key: &(usize, LeaseId), now: u64) -> bool {
        self.may_overlap.get(key).is_some_and(|until| now < *until)
    }

    /// Returns whether the current store never had a lease with this token.
    pub(super) fn has_lost(&self, name: &LockName, token: FencingToken) -> bool {
        self.latest
            .as_ref()
            .is_some_and(|(at, known)| token.get() < at + RAISED_BY && !known.contains(&(name.clone(), token.get())))
    }
}

impl World {
    /// Keeps a copy of the current store, and sometimes replaces the store by an older one.
    pub(super) fn may_fail_over(&mut self) {
        if self.profile.failovers == 0 {
            return;
        }
        self.failover.copies.push_back(self.store.copy());
        if self.failover.copies.len() > COPIES {
            self.failover.copies.pop_front();
        }
        if self.random.permille(self.profile.failovers) {
            self.fail_over();
        }
    }

    fn fail_over(&mut self) {
        let chosen = self.random.below(self.failover.copies.len() as u64) as usize;
        let lasts = self.random.range(100 * MILLISECOND..3 * SECOND);
        let age = 50 * (self.failover.copies.len() - 1 - chosen);
        self.tell(|| format!("a copy replaces the store, {age} ms old, in {} ms", lasts / MILLISECOND));
        self.store = self.failover.copies.swap_remove_back(chosen).unwrap_or_default();
        self.failover.copies.clear();
        self.transactions.clear();
        self.fenced.clear();
        self.exported_at.clear();
        self.store_is_away_until = self.now + lasts;
        self.failover.until = self.now + lasts + 2 * SECOND;
        self.disturb_all(self.failover.until);
        let at = self.failover.until + 1;
        for client in 0..self.clients.len() {
            self.clients[client].is_cut = true;
            let life = self.clients[client].life;
            self.at(at + NOTICED_WITHIN, WorldEvent::CheckForgotten { client, life, at });
        }
        let rows = self.store.leases.iter().map(|(name, row)| (name.clone(), row.token));
        let entries = self.store.entries.iter().filter_map(|((name, _), entry)| match entry.state {
            EntryState::Holding(token) => Some((name.clone(), token)),
            EntryState::Waiting => None,
        });
        self.failover.latest = Some((self.store_clock(), rows.chain(entries).collect()));
        for key in self.beliefs.keys().copied().collect::<Vec<_>>() {
            self.note_if_lost(key);
        }
    }

    /// Checks that the heartbeat of a client, which no fault has delayed since `at`, renews no
    /// lease that the client does not have.
    pub(super) fn check_forgotten(&mut self, client: usize, life: u32, at: u64) {
        let state = &self.clients[client];
        let is_delayed = state.life != life || state.disturbed_at >= at || self.store_is_away_until >= at;
        let Some(engine) = state.engine.as_ref().filter(|_| !is_delayed) else {
            return;
        };
        // Without heartbeats, leases expire soon.
        let is_renewed = |client: Option<ClientId>, ttl: i64| {
            client == Some(state.id) && self.store.valid_until(0, client, ttl.min(LATEST_BEAT)) > self.store_clock()
        };
        let rows = self.store.leases.iter().filter_map(|(name, row)| match row.holder {
            Holder::Lease(id) if is_renewed(row.client, row.ttl) => Some((name, id, EntryState::Holding(row.token))),
            _ => None,
        });
        let entries = self.store.entries.iter().filter(|(_, entry)| is_renewed(entry.client, entry.ttl));
        let entries = entries.map(|((name, id), entry)| (name, *id, entry.state));
        if let Some((name, id, _)) = rows.chain(entries).find(|(name, id, state)| !engine.knows(name, *id, *state)) {
            let violation = format!("client {client} renews {id} of {name}, and does not have it");
            self.violate(violation);
        }
    }

    /// Records a lease that the current store does not have, or may not have. Its holder must
    /// notice.
    pub(super) fn note_if_lost(&mut self, (client, lease): (usize, LeaseId)) {
        // An answer of the old store may be in transit.
        if self.now < self.failover.until {
            self.failover.may_overlap.insert((client, lease), self.now + MAY_OVERLAP);
        }
        let lost = self.beliefs.get(&(client, lease)).filter(|b| self.failover.has_lost(&b.name, b.token));
        if lost.is_none() || self.evicted.contains_key(&(client, lease)) {
            return;
        }
        self.evicted.insert((client, lease), self.now);
        let (life, at) = (self.clients[client].life, self.now.max(self.failover.until) + 1);
        self.at(at + NOTICED_WITHIN, WorldEvent::CheckEvicted { client, life, lease, at });
    }
}
