//! Acquires a name, and joins a holding of the same owner.

use super::row::{positive, remaining};
use super::{Entry, Key, Lease, Memory, MustWait, Prepared, Strength, Write};
use crate::backend::micros;
use crate::mutation::{Mutation, is_on};
use crate::protocol::{AcquisitionId, Claim, EntryState, Holder, JoinOutcome, Mode, Response};
use crate::token::FencingToken;

impl Memory {
    pub(super) fn acquire(&self, claim: &Claim, now: i64) -> Result<Prepared, MustWait> {
        let name = &claim.name;
        if let Some(prolonged) = self.prolong(claim, now) {
            return prolonged;
        }
        let mut row = self.leases.get(name).cloned().unwrap_or_else(Lease::free);
        let overtakes =
            is_on(Mutation::OvertakeQueue) || (is_on(Mutation::ReadersOvertake) && claim.mode == Mode::READ);
        if !self.has_room(claim, &row, now) || (self.is_awaited(name, &row) && !overtakes) {
            return Ok(Prepared::new(Response::Acquired(Err(self.current_holder(name, now)))));
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

    /// Prolongs the holding of a repeated claim. The repetition may arrive long after the holding
    /// was extended, so it shortens nothing. `None`: the claim has no holding.
    fn prolong(&self, claim: &Claim, now: i64) -> Option<Result<Prepared, MustWait>> {
        let name = &claim.name;
        let client = claim.is_renewed.then_some(claim.client);
        let ttl = micros(claim.ttl);
        let expires_at = if is_on(Mutation::RepeatKeepsExpiry) { 0 } else { now + ttl };
        if let Some(row) = self.leases.get(name).filter(|row| row.holder == Holder::Lease(claim.id)) {
            if self.is_lease_locked(name, Strength::Plain) {
                return Some(Err(MustWait));
            }
            let (client, ttl, expires_at) = (row.client.or(client), row.ttl.max(ttl), row.expires_at.max(expires_at));
            let longer = Lease { client, ttl, expires_at, ..row.clone() };
            return Some(Ok(granted(positive(row.token)).write(Write::Lease(name.clone(), longer))));
        }
        let entry = self.entries.get(&(name.clone(), claim.id))?;
        let EntryState::Holding(token) = entry.state else {
            return None;
        };
        if entry.owner.is_none() {
            return Some(Ok(Prepared::new(Response::Acquired(Err(self.current_holder(name, now))))));
        }
        if self.is_locked(&Key::Entry(name.clone(), claim.id), Strength::Plain) {
            return Some(Err(MustWait));
        }
        let (client, ttl, expires_at) = (entry.client.or(client), entry.ttl.max(ttl), entry.expires_at.max(expires_at));
        let longer = Entry { client, ttl, expires_at, ..entry.clone() };
        Some(Ok(granted(positive(token)).write(Write::Entry(name.clone(), claim.id, Some(longer)))))
    }

    /// Returns whether the holders of a name leave room for a claim.
    fn has_room(&self, claim: &Claim, row: &Lease, now: i64) -> bool {
        let expired = is_on(Mutation::AcquireExpired) && row.expires_at < now && matches!(row.holder, Holder::Lease(_));
        let is_vacant = row.holder == Holder::Nobody || expired;
        let Mode::Shared { units, permits } = claim.mode else {
            return is_vacant;
        };
        let holding = || self.entries_named(&claim.name).filter(|(_, e)| e.state != EntryState::Waiting);
        let taken: u64 = holding().map(|(_, entry)| entry.mode.units()).sum();
        let mut modes = holding().map(|(_, entry)| entry.mode).peekable();
        let is_shared = modes.peek().is_some() && modes.all(|mode| mode != Mode::Exclusive);
        let fits = taken + u64::from(units) <= u64::from(permits) || is_on(Mutation::IgnorePermits);
        (is_vacant || (row.holder == Holder::Entries && is_shared)) && fits
    }

    pub(super) fn join(&self, claim: &Claim, now: i64) -> Prepared {
        let name = &claim.name;
        let answer = |joined| Prepared::new(Response::Joined(joined));
        let Some(mut row) = self.leases.get(name).cloned() else {
            return answer(JoinOutcome::NotHeld);
        };
        let holding = |client, ttl, expires_at| Entry {
            client,
            owner: Some(claim.owner),
            is_renewed: true,
            mode: Mode::Exclusive,
            state: EntryState::Holding(row.token),
            arrived: 0,
            ttl,
            expires_at,
        };
        let mut own = holding(claim.is_renewed.then_some(claim.client), micros(claim.ttl), now + micros(claim.ttl));
        if let Some(before) = self.owned_entry(name, claim.id).filter(|before| before.state == own.state) {
            own.client = before.client.or(own.client);
            (own.ttl, own.expires_at) = (own.ttl.max(before.ttl), own.expires_at.max(before.expires_at));
        }
        let is_live = |(_, e): &(AcquisitionId, &Entry)| {
            e.state == EntryState::Holding(row.token)
                && e.mode == Mode::Exclusive
                && e.owner == Some(claim.owner)
                && remaining(self.entry_until(e), now).is_some()
        };
        let mut writes = match row.holder {
            Holder::Lease(id) if row.owner == Some(claim.owner) && self.read_row(&row, now).remaining.is_some() => {
                if id == claim.id {
                    return answer(JoinOutcome::NotHeld);
                }
                let first = holding(row.client, row.ttl, row.expires_at);
                vec![Write::Entry(name.clone(), id, Some(first))]
            }
            Holder::Entries if row.owner == Some(claim.owner) && self.entries_named(name).any(|e| is_live(&e)) => {
                Vec::new()
            }
            _ => return answer(JoinOutcome::NotHeld),
        };
        if self.is_lease_locked(name, Strength::Plain) {
            return answer(JoinOutcome::Locked);
        }
        let token = positive(row.token);
        (row.holder, row.client) = (Holder::Entries, None);
        writes.push(Write::Entry(name.clone(), claim.id, Some(own)));
        writes.push(Write::Lease(name.clone(), row));
        Prepared { writes, ..answer(JoinOutcome::Done(token)) }
    }
}

fn granted(token: FencingToken) -> Prepared {
    Prepared::new(Response::Acquired(Ok(token)))
}
