//! The queue of a name: waiting entries and transitions.

use std::time::Duration;

use super::row::{positive, remaining};
use super::{End, Entry, Lease, Memory, MustWait, Prepared, Strength, Write};
use crate::backend::micros;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::timing::GRANT;
use crate::protocol::{
    Enqueue, EntryRow, EntryState, Granted, Holder, HolderChange, HolderNow, LeaseId, Mode, Polled, Presence, Queue,
    Response, Transition,
};

impl Memory {
    pub(super) fn enqueue(&self, entries: &[Enqueue], now: i64) -> Result<Prepared, MustWait> {
        let Some(first) = entries.first() else {
            return Ok(Prepared::new(Response::Enqueued(HolderNow::Unknown)));
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
        let mut prepared = Prepared::new(Response::Enqueued(HolderNow::Unknown));
        prepared.reads_holder_after_commit = Some(name.clone());
        for Enqueue { claim, age } in added {
            let age = if is_on(Mutation::ForgetArrival) { 0 } else { micros(*age) };
            let entry = Entry::new(claim, EntryState::Waiting, Some(claim.client), now - age, now + micros(GRANT));
            prepared = prepared.write(Write::Entry(name.clone(), claim.id, Some(entry)));
        }
        if writes_row {
            row.waiting = if self.marks_waiting { now.max(row.waiting + 1) } else { 0 };
            prepared = prepared.write(Write::Lease(name.clone(), row));
        }
        Ok(prepared)
    }

    pub(super) fn poll(&self, name: &LockName, ids: &[LeaseId], now: i64) -> Option<Polled> {
        let row = self.read_row(self.leases.get(name)?, now);
        let presence = |id: &LeaseId| {
            let entry = self.entries.get(&(name.clone(), *id));
            let is_ahead = |other: &Entry, of: &Entry, other_id| {
                let is_live = remaining(self.entry_until(other), now).is_some();
                is_live && other.state == EntryState::Waiting && (other.arrived, other_id) < (of.arrived, *id)
            };
            let ahead = entry.map_or(0, |own| self.entries_named(name).filter(|(i, e)| is_ahead(e, own, *i)).count());
            let state = entry.map(|entry| (entry.state, remaining(self.entry_until(entry), now)));
            Presence::of(*id, &row, state, u32::try_from(ahead).unwrap_or(u32::MAX))
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
                is_kept: entry.is_kept,
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
        let holding = entries.iter().filter(|entry| entry.state != EntryState::Waiting).count();
        let is_cut_off = entries.len() - holding > limit as usize;
        entries.truncate(holding + limit as usize);
        Some(Queue { row, entries, is_cut_off })
    }

    pub(super) fn transition(&self, transition: &Transition, now: i64) -> Prepared {
        let changed = self.apply_transition(transition, now);
        changed.unwrap_or_else(|| Prepared::new(Response::Transitioned(None)))
    }

    pub(super) fn apply_transition(&self, transition: &Transition, now: i64) -> Option<Prepared> {
        let Transition { name, seen, given_up, expired, change, is_last } = transition;
        let mut row = self.leases.get(name)?.clone();
        let is_same = row.holder == seen.holder && row.token == seen.token;
        if !is_same || (*is_last && row.waiting != seen.waiting) {
            return None;
        }
        let mut prepared = Prepared::new(Response::Transitioned(Some(Vec::new())));
        let mut losers = Vec::new();
        let ends_row = match row.holder {
            Holder::Lease(_) if given_up.is_some() => {
                prepared.ends.push((name.clone(), row.token, End::Released));
                true
            }
            Holder::Lease(_) | Holder::Kept => {
                let has_expired = self.read_row(&row, now).remaining.is_none() || is_on(Mutation::TakeOverUnchecked);
                if !has_expired {
                    return None;
                }
                if matches!(row.holder, Holder::Lease(_)) {
                    losers.extend(row.client);
                    row.lost = row.lost.max(row.token);
                    prepared.ends.push((name.clone(), row.token, End::TakenOver));
                }
                true
            }
            Holder::Nobody | Holder::Entries => false,
        };
        for id in expired {
            let entry = self.entries.get(&(name.clone(), *id))?;
            let has_expired = remaining(self.entry_until(entry), now).is_none() || is_on(Mutation::TakeOverUnchecked);
            if !has_expired || self.is_entry_locked(name, *id) {
                return None;
            }
            if let EntryState::Holding(token) = entry.state {
                // An entry without an owner was released before and only kept the name unavailable.
                // A token shared by several acquisitions of one owner is lost with the last of
                // them.
                let is_shared = |(other, e): (LeaseId, &Entry)| e.state == entry.state && !expired.contains(&other);
                losers.extend(entry.client);
                if entry.owner.is_some() && !self.entries_named(name).any(is_shared) {
                    row.lost = row.lost.max(token);
                    prepared.ends.push((name.clone(), token, End::TakenOver));
                }
            }
            prepared = prepared.write(Write::Entry(name.clone(), *id, None));
        }
        let sharers_stay = row.holder == Holder::Entries
            && self
                .entries_named(name)
                .any(|(id, e)| e.state != EntryState::Waiting && e.mode != Mode::Exclusive && !expired.contains(&id));
        let is_plain = sharers_stay && matches!(change, HolderChange::Shared(_) | HolderChange::None);
        let strength = if is_plain { Strength::Plain } else { Strength::Ending };
        if self.is_lease_locked(name, strength) && !is_on(Mutation::TransitThroughFence) {
            return None;
        }
        // An acquisition may have joined since the queue was read: joining does not raise the
        // token.
        let mut staying =
            self.entries_named(name).filter(|(id, e)| e.state != EntryState::Waiting && !expired.contains(id));
        let is_prevented = match change {
            HolderChange::None => false,
            HolderChange::Shared(_) => staying.any(|(_, entry)| entry.mode == Mode::Exclusive),
            HolderChange::Claim(claim) if claim.mode != Mode::Exclusive => {
                staying.any(|(_, entry)| entry.mode == Mode::Exclusive)
            }
            HolderChange::Free | HolderChange::Exclusive(_) | HolderChange::Claim(_) => staying.next().is_some(),
        };
        if is_prevented {
            return None;
        }
        if ends_row && matches!(change, HolderChange::None) {
            return None;
        }
        prepared.writes.extend(self.notices(&losers)?);
        let mut granted = Vec::new();
        let waiting = |id: LeaseId| {
            let entry = self.entries.get(&(name.clone(), id)).filter(|entry| entry.state == EntryState::Waiting)?;
            (!self.is_entry_locked(name, id)).then_some(entry)
        };
        match change {
            HolderChange::None => {}
            HolderChange::Free => row.end(),
            HolderChange::Claim(_)
                if self.entries_named(name).any(|(id, e)| e.state == EntryState::Waiting && !expired.contains(&id)) =>
            {
                return None;
            }
            HolderChange::Claim(claim) if claim.mode == Mode::Exclusive => {
                granted.push(row.grant(claim, now));
            }
            HolderChange::Claim(claim) => {
                let (share, entry) = row.share(claim, now);
                granted.push(share);
                prepared = prepared.write(Write::Entry(name.clone(), claim.id, Some(entry)));
            }
            HolderChange::Exclusive(grantee) => {
                let entry = waiting(grantee.id)?;
                granted.push(row.grant_to(grantee.id, entry.owner, entry.keeper(), grantee.ttl, now));
                prepared = prepared.write(Write::Entry(name.clone(), grantee.id, None));
            }
            HolderChange::Shared(grantees) => {
                (row.holder, row.client, row.owner) = (Holder::Entries, None, None);
                for grantee in grantees {
                    let entry = waiting(grantee.id)?.clone();
                    row.token = row.next_token(now);
                    let state = EntryState::Holding(row.token);
                    granted.push(Granted { id: grantee.id, token: positive(row.token) });
                    let ttl = micros(grantee.ttl);
                    let holding = Entry { state, client: entry.keeper(), ttl, expires_at: now + ttl, ..entry };
                    let kept = (!is_on(Mutation::DeleteShareOnGrant)).then_some(holding);
                    prepared = prepared.write(Write::Entry(name.clone(), grantee.id, kept));
                }
            }
        }
        if *is_last {
            row.waiting = 0;
        }
        prepared.response = Response::Transitioned(Some(granted));
        Some(prepared.write(Write::Lease(name.clone(), row)))
    }
}
