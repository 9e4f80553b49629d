//! The queue of a name: its entries, and reads of them.

use std::time::Duration;

use super::row::remaining;
use super::{Entry, Lease, Memory, MustWait, Prepared, Strength, Write};
use crate::backend::micros;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{
    AcquisitionId, CurrentHolder, Enqueue, EntryRow, EntryState, Holder, Polled, Presence, Queue, Response,
};

impl Memory {
    pub(super) fn enqueue(&self, entries: &[Enqueue], now: i64) -> Result<Prepared, MustWait> {
        let Some(first) = entries.first() else {
            return Ok(Prepared::new(Response::Enqueued(CurrentHolder::Unknown)));
        };
        let name = &first.claim.name;
        let known = self.leases.get(name);
        let mut row = known.cloned().unwrap_or_else(Lease::free);
        let is_new = |entry: &&Enqueue| {
            !self.entries.contains_key(&(name.clone(), entry.claim.id)) && row.holder != Holder::Lease(entry.claim.id)
        };
        let added: Vec<&Enqueue> = entries.iter().filter(is_new).collect();
        let writes_row = known.is_none() || (self.marks_waiting && !added.is_empty());
        if writes_row && self.is_lease_locked(name, Strength::Plain) {
            return Err(MustWait);
        }
        let mut prepared = Prepared::new(Response::Enqueued(CurrentHolder::Unknown));
        prepared.reads_holder_after_commit = Some(name.clone());
        for Enqueue { claim, age } in added {
            let age = if is_on(Mutation::ForgetArrival) { 0 } else { micros(*age) };
            let entry = Entry::new(claim, EntryState::Waiting, Some(claim.client), now - age, now + micros(GRANT_TTL));
            prepared = prepared.write(Write::Entry(name.clone(), claim.id, Some(entry)));
        }
        if writes_row {
            row.waiting = if self.marks_waiting { now.max(row.waiting + 1) } else { 0 };
            prepared = prepared.write(Write::Lease(name.clone(), row));
        }
        Ok(prepared)
    }

    pub(super) fn poll(&self, name: &LockName, ids: &[AcquisitionId], now: i64) -> Option<Polled> {
        let row = self.read_row(self.leases.get(name)?, now);
        let presence = |id: &AcquisitionId| {
            let entry = self.entries.get(&(name.clone(), *id));
            let is_ahead = |other: &Entry, of: &Entry, other_id| {
                let is_live = remaining(self.entry_until(other), now).is_some();
                is_live && other.state == EntryState::Waiting && (other.arrived, other_id) < (of.arrived, *id)
            };
            let ahead = entry.map_or(0, |own| self.entries_named(name).filter(|(i, e)| is_ahead(e, own, *i)).count());
            let state = entry.map(|entry| (entry.state, remaining(self.entry_until(entry), now)));
            Presence::from_rows(*id, &row, state, u32::try_from(ahead).unwrap_or(u32::MAX))
        };
        let presences = ids.iter().map(presence).collect();
        Some(Polled { row, presences })
    }

    pub(super) fn read(&self, name: &LockName, limit: u32, now: i64) -> Option<Queue> {
        let row = self.read_row(self.leases.get(name)?, now);
        let mut entries: Vec<EntryRow> = self
            .entries_named(name)
            .map(|(id, entry)| EntryRow {
                id,
                client: entry.client,
                owner: entry.owner,
                is_renewed: entry.is_renewed,
                mode: entry.mode,
                state: entry.state,
                ttl: Duration::from_micros(u64::try_from(entry.ttl).unwrap_or(0)),
                arrived: entry.arrived,
                remaining: remaining(self.entry_until(entry), now),
            })
            .collect();
        entries.sort_by_key(|entry| (entry.state == EntryState::Waiting, entry.arrived, entry.id));
        if is_on(Mutation::ServeLast) {
            entries.sort_by_key(|entry| (entry.state == EntryState::Waiting, -entry.arrived, entry.id));
        }
        Some(Queue::limited(row, entries, limit))
    }
}
