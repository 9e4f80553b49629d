//! The sweeper, which deletes unused rows.

use super::{ActorState, World};
use crate::backend::memory::{Key, TransactionId};
use crate::backend::micros;
use crate::name::LockName;
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{ClientId, EntryState};

/// For how long the rows were unused, in microseconds.
const RETENTION: i64 = 60_000_000;
/// How many more requests each caller makes.
const MORE: u32 = 3;
/// How often these callers ask the holders to release the name, in a thousand.
const ASKS: u64 = 500;

impl World {
    /// Deletes the rows that no client has used for the retention, as the statements of the
    /// databases do. Then the callers go on.
    pub(super) fn sweep(&mut self) {
        let latest = self.store_clock() - RETENTION;
        let transaction = self.next_transaction();
        self.sweep_names(transaction, latest);
        self.sweep_clients(transaction, latest);
        self.store.unlock(transaction);
        self.profile.asks = ASKS;
        for actor in 0..self.actors.len() {
            self.actors[actor].left += MORE;
            if matches!(self.actors[actor].state, ActorState::Idle) {
                self.rest(actor);
            }
        }
    }

    fn sweep_names(&mut self, transaction: TransactionId, latest: i64) {
        let store = &self.store;
        let unused = store.entries.iter().filter(|(_, entry)| {
            let ttl = if entry.state == EntryState::Waiting { micros(GRANT_TTL) } else { entry.ttl };
            store.valid_until(entry.expires_at, entry.client, ttl) < latest
        });
        for key in unused.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
            if self.store.lock(transaction, Key::Entry(key.0.clone(), key.1)) {
                self.store.entries.remove(&key);
            }
        }
        let store = &self.store;
        let unused = store.leases.iter().filter(|(name, row)| {
            let is_old = row.token < latest && store.valid_until(row.expires_at, row.client, row.ttl) < latest;
            is_old && !store.entries.keys().any(|(other, _)| other == *name)
        });
        for name in unused.map(|(name, _)| name.clone()).collect::<Vec<LockName>>() {
            if self.store.lock(transaction, Key::Lease(name.clone())) {
                self.tell(|| format!("{name} is swept"));
                self.store.leases.remove(&name);
            }
        }
    }

    fn sweep_clients(&mut self, transaction: TransactionId, latest: i64) {
        let store = &self.store;
        let is_used = |id: ClientId| {
            store.leases.values().any(|row| row.client == Some(id))
                || store.entries.values().any(|entry| entry.client == Some(id))
        };
        let unused = store.clients.iter().filter(|(id, client)| client.beat_at < latest && !is_used(**id));
        for id in unused.map(|(id, _)| *id).collect::<Vec<_>>() {
            if self.store.lock(transaction, Key::Client(id)) {
                self.tell(|| format!("{id:?} is swept"));
                self.store.clients.remove(&id);
            }
        }
    }
}
