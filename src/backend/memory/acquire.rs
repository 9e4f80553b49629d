//! Acquires a name, and joins a holding of the same owner.

use super::row::{positive, remaining};
use super::{Entry, Key, Lease, Memory, MustWait, Prepared, Strength, Write};
use crate::backend::micros;
use crate::mutation::{Mutation, is_on};
use crate::protocol::{Claim, EntryState, Holder, Joined, LeaseId, Mode, Response};

impl Memory {
    pub(super) fn acquire(&self, claim: &Claim, now: i64) -> Result<Prepared, MustWait> {
        let name = &claim.name;
        let granted = |token| Prepared::new(Response::Acquired(Ok(token)));
        let refused = || Ok(Prepared::new(Response::Acquired(Err(self.holder_now(name, now)))));
        let mut row = self.leases.get(name).cloned().unwrap_or_else(Lease::free);
        // A repeated claim prolongs its holding. The repetition may also arrive long after the
        // holding was extended, so it shortens nothing.
        let client = claim.is_kept.then_some(claim.client);
        let (ttl, expires_at) = (micros(claim.ttl), now + micros(claim.ttl));
        if row.holder == Holder::Lease(claim.id) {
            if self.is_lease_locked(name, Strength::Plain) {
                return Err(MustWait);
            }
            let (client, ttl, expires_at) = (row.client.or(client), row.ttl.max(ttl), row.expires_at.max(expires_at));
            let longer = Lease { client, ttl, expires_at, ..row };
            return Ok(granted(positive(longer.token)).write(Write::Lease(name.clone(), longer)));
        }
        if let Some(entry @ Entry { state: EntryState::Holding(token), .. }) =
            self.entries.get(&(name.clone(), claim.id))
        {
            if entry.owner.is_none() {
                return refused();
            }
            if self.is_locked(&Key::Entry(name.clone(), claim.id), Strength::Plain) {
                return Err(MustWait);
            }
            let (client, ttl, expires_at) =
                (entry.client.or(client), entry.ttl.max(ttl), entry.expires_at.max(expires_at));
            let longer = Entry { client, ttl, expires_at, ..entry.clone() };
            return Ok(granted(positive(*token)).write(Write::Entry(name.clone(), claim.id, Some(longer))));
        }
        let expired = is_on(Mutation::AcquireExpired) && row.expires_at < now && matches!(row.holder, Holder::Lease(_));
        let is_vacant = row.holder == Holder::Nobody || expired;
        let sharing: Vec<&Entry> =
            self.entries_named(name).filter(|(_, e)| e.state != EntryState::Waiting).map(|(_, e)| e).collect();
        let has_room = match claim.mode {
            Mode::Exclusive => is_vacant,
            Mode::Shared { units, permits } => {
                let taken: u64 = sharing.iter().map(|entry| entry.mode.units()).sum();
                let is_shared = !sharing.is_empty() && sharing.iter().all(|entry| entry.mode != Mode::Exclusive);
                let fits = taken + u64::from(units) <= u64::from(permits) || is_on(Mutation::IgnorePermits);
                (is_vacant || (row.holder == Holder::Entries && is_shared)) && fits
            }
        };
        let overtakes =
            is_on(Mutation::OvertakeQueue) || (is_on(Mutation::ReadersOvertake) && claim.mode == Mode::READ);
        if !has_room || (self.is_awaited(name, &row) && !overtakes) {
            return refused();
        }
        let strength = if row.holder == Holder::Entries { Strength::Plain } else { Strength::Ending };
        if self.is_lease_locked(name, strength) {
            return Err(MustWait);
        }
        let prepared = match claim.mode {
            Mode::Exclusive => granted(row.grant(claim, now).token),
            Mode::Shared { .. } => {
                let (share, entry) = row.share(claim, now);
                granted(share.token).write(Write::Entry(name.clone(), claim.id, Some(entry)))
            }
        };
        Ok(prepared.write(Write::Lease(name.clone(), row)))
    }

    pub(super) fn join(&self, claim: &Claim, now: i64) -> Prepared {
        let name = &claim.name;
        let answer = |joined| Prepared::new(Response::Joined(joined));
        let Some(mut row) = self.leases.get(name).cloned() else {
            return answer(Joined::NotHeld);
        };
        let holding = |client, ttl, expires_at| Entry {
            client,
            owner: Some(claim.owner),
            is_kept: true,
            mode: Mode::Exclusive,
            state: EntryState::Holding(row.token),
            arrived: 0,
            ttl,
            expires_at,
        };
        let mut own = holding(claim.is_kept.then_some(claim.client), micros(claim.ttl), now + micros(claim.ttl));
        if let Some(before) = self.owned_entry(name, claim.id).filter(|before| before.state == own.state) {
            own.client = before.client.or(own.client);
            (own.ttl, own.expires_at) = (own.ttl.max(before.ttl), own.expires_at.max(before.expires_at));
        }
        let is_live = |(_, e): &(LeaseId, &Entry)| {
            e.state == EntryState::Holding(row.token)
                && e.mode == Mode::Exclusive
                && e.owner == Some(claim.owner)
                && remaining(self.entry_until(e), now).is_some()
        };
        let mut writes = match row.holder {
            Holder::Lease(id) if row.owner == Some(claim.owner) && self.read_row(&row, now).remaining.is_some() => {
                if id == claim.id {
                    return answer(Joined::NotHeld);
                }
                let first = holding(row.client, row.ttl, row.expires_at);
                vec![Write::Entry(name.clone(), id, Some(first))]
            }
            Holder::Entries if row.owner == Some(claim.owner) && self.entries_named(name).any(|e| is_live(&e)) => {
                Vec::new()
            }
            _ => return answer(Joined::NotHeld),
        };
        if self.is_lease_locked(name, Strength::Plain) {
            return answer(Joined::Locked);
        }
        let token = positive(row.token);
        (row.holder, row.client) = (Holder::Entries, None);
        writes.push(Write::Entry(name.clone(), claim.id, Some(own)));
        writes.push(Write::Lease(name.clone(), row));
        Prepared { writes, ..answer(Joined::Done(token)) }
    }
}
