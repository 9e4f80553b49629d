//! Changes holdings: expiry, mode and token, and asks for their release.

use std::collections::BTreeSet;

use super::row::remaining;
use super::{Entry, Key, Lease, Memory, Prepared, Strength, Write};
use crate::backend::micros;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::{
    AcquisitionId, AskOutcome, ChangeOutcome, ClientId, EntryState, Extension, Holder, Mode, Response,
};

impl Memory {
    pub(super) fn extend(&self, extension: &Extension, now: i64) -> Prepared {
        let entries = self.extend_entries(extension, now);
        let extended = entries.or_else(|| self.extend_lease(extension, now));
        extended.unwrap_or_else(|| Prepared::new(Response::Extended(ChangeOutcome::NotHeld)))
    }

    /// Extends the entries that hold with the token. Acquisitions of one owner from several clients
    /// share a token. `None`: no entry holds with it.
    fn extend_entries(&self, extension: &Extension, now: i64) -> Option<Prepared> {
        let Extension { name, renamed, token, lasts, ttl, .. } = extension;
        let answer = |extended| Some(Prepared::new(Response::Extended(extended)));
        let holds = |(id, e): &(AcquisitionId, &Entry)| {
            is_named(extension, *id) && e.state == EntryState::Holding(token.get()) && e.owner.is_some()
        };
        let mut holding = self.entries_named(name).filter(holds).peekable();
        holding.peek()?;
        let is_valid = |(_, e): &(AcquisitionId, &Entry)| counts(extension, self.entry_until(e), e.client, now);
        let valid: Vec<(AcquisitionId, &Entry)> = holding.filter(is_valid).collect();
        if valid.is_empty() {
            return answer(ChangeOutcome::NotHeld);
        }
        // The id is part of the key of an entry, which a fence locks.
        let strength = |id| if renamed.is_some_and(|to| to != id) { Strength::Ending } else { Strength::Plain };
        if valid.iter().any(|(id, _)| self.is_locked(&Key::Entry(name.clone(), *id), strength(*id))) {
            return answer(ChangeOutcome::Locked);
        }
        let mut prepared = Prepared::new(Response::Extended(ChangeOutcome::Done));
        for (id, entry) in valid {
            let longer = Entry {
                client: new_client(extension, entry.client),
                ttl: entry.ttl.max(ttl.map_or(0, micros)),
                expires_at: entry.expires_at.max(now + micros(*lasts)),
                ..entry.clone()
            };
            let new_id = renamed.unwrap_or(id);
            if new_id != id {
                prepared = prepared.write(Write::Entry(name.clone(), id, None));
            }
            prepared = prepared.write(Write::Entry(name.clone(), new_id, Some(longer)));
        }
        Some(prepared)
    }

    /// Extends the holding in the row of the name. `None`: it does not hold with the token.
    fn extend_lease(&self, extension: &Extension, now: i64) -> Option<Prepared> {
        let Extension { name, id, renamed, token, lasts, ttl, .. } = extension;
        let row = self.leases.get(name).filter(|row| row.token == token.get())?;
        let holder = match row.holder {
            Holder::Lease(id) if is_named(extension, id) => renamed.unwrap_or(id),
            Holder::Nobody if is_on(Mutation::ExtendReleased) => (*id)?,
            _ => return None,
        };
        let until = self.valid_until(row.expires_at, row.client, row.ttl);
        if row.holder != Holder::Nobody && !counts(extension, until, row.client, now) {
            return None;
        }
        if self.is_lease_locked(name, Strength::Plain) {
            return Some(Prepared::new(Response::Extended(ChangeOutcome::Locked)));
        }
        let longer = Lease {
            holder: Holder::Lease(holder),
            client: new_client(extension, row.client),
            ttl: row.ttl.max(ttl.map_or(0, micros)),
            expires_at: row.expires_at.max(now + micros(*lasts)),
            ..row.clone()
        };
        Some(Prepared::new(Response::Extended(ChangeOutcome::Done)).write(Write::Lease(name.clone(), longer)))
    }

    pub(super) fn downgrade(&self, name: &LockName, id: AcquisitionId, token: i64) -> Prepared {
        let answer = |downgraded| Prepared::new(Response::Downgraded(downgraded));
        let shares = |entry: &Entry| entry.state == EntryState::Holding(token) && entry.mode == Mode::READ;
        if self.owned_entry(name, id).is_some_and(shares) {
            return answer(ChangeOutcome::Done);
        }
        // The owner had several acquisitions, and this one is the last.
        let only = self.owned_entry(name, id).filter(|entry| {
            let others =
                self.entries_named(name).filter(|(other, entry)| *other != id && entry.state != EntryState::Waiting);
            entry.state == EntryState::Holding(token) && entry.mode == Mode::Exclusive && others.count() == 0
        });
        if let (Some(entry), Some(row)) = (only, self.leases.get(name)) {
            if self.is_lease_locked(name, Strength::Ending) || self.is_entry_locked(name, id) {
                return answer(ChangeOutcome::Locked);
            }
            let entry = Entry { mode: Mode::READ, ..entry.clone() };
            let row = Lease { owner: None, ..row.clone() };
            return answer(ChangeOutcome::Done)
                .write(Write::Entry(name.clone(), id, Some(entry)))
                .write(Write::Lease(name.clone(), row));
        }
        let Some(mut row) = self.exclusive_holding(name, id, token) else {
            return answer(ChangeOutcome::NotHeld);
        };
        if self.is_lease_locked(name, Strength::Ending) {
            return answer(ChangeOutcome::Locked);
        }
        let entry = Entry {
            client: row.client,
            owner: row.owner,
            is_renewed: row.client.is_some(),
            mode: Mode::READ,
            state: EntryState::Holding(token),
            arrived: 0,
            ttl: row.ttl,
            expires_at: row.expires_at,
        };
        (row.holder, row.client, row.owner) = (Holder::Entries, None, None);
        answer(ChangeOutcome::Done)
            .write(Write::Entry(name.clone(), id, Some(entry)))
            .write(Write::Lease(name.clone(), row))
    }

    pub(super) fn raise(&self, name: &LockName, id: AcquisitionId, token: i64, to: i64) -> Prepared {
        let answer = |raised| Prepared::new(Response::Raised(raised));
        if self.exclusive_holding(name, id, to).is_some() {
            return answer(ChangeOutcome::Done);
        }
        match self.exclusive_holding(name, id, token) {
            Some(_) if self.is_lease_locked(name, Strength::Ending) => answer(ChangeOutcome::Locked),
            Some(row) if to > token => {
                answer(ChangeOutcome::Done).write(Write::Lease(name.clone(), Lease { token: to, ..row }))
            }
            _ => answer(ChangeOutcome::NotHeld),
        }
    }

    pub(super) fn ask(&self, name: &LockName, now: i64) -> Prepared {
        let answer = |asked| Prepared::new(Response::Asked(asked));
        let Some(row) = self.leases.get(name) else {
            return answer(AskOutcome::Holders(0));
        };
        let is_live = |(_, e): &(AcquisitionId, &Entry)| {
            matches!(e.state, EntryState::Holding(_)) && e.owner.is_some() && self.entry_until(e) > now
        };
        let is_alone = matches!(row.holder, Holder::Lease(_)) && self.read_row(row, now).remaining.is_some();
        let alone = is_alone.then_some((row.token, row.client));
        let shared = self.entries_named(name).filter(is_live).filter_map(|(_, entry)| match entry.state {
            EntryState::Holding(token) => Some((token, entry.client)),
            EntryState::Waiting => None,
        });
        // Acquisitions of one owner from several clients share a token, and are one holder.
        let holders: Vec<(i64, Option<ClientId>)> = alone.into_iter().chain(shared).collect();
        let tokens: BTreeSet<i64> = holders.iter().map(|(token, _)| *token).collect();
        if tokens.is_empty() {
            return answer(AskOutcome::Holders(0));
        }
        let clients: Vec<ClientId> = holders.iter().filter_map(|(_, client)| *client).collect();
        let notices = if is_on(Mutation::AskInSilence) { Some(Vec::new()) } else { self.notices(&clients, now) };
        let Some(notices) = notices.filter(|_| !self.is_lease_locked(name, Strength::Plain)) else {
            return answer(AskOutcome::Locked);
        };
        let mut prepared = answer(AskOutcome::Holders(u32::try_from(tokens.len()).unwrap_or(u32::MAX)));
        prepared.writes = notices;
        prepared.write(Write::Lease(name.clone(), Lease { asked: row.token, ..row.clone() }))
    }

    /// Returns the row of a name that one lease holds with this token.
    pub(super) fn exclusive_holding(&self, name: &LockName, id: AcquisitionId, token: i64) -> Option<Lease> {
        self.leases.get(name).filter(|row| row.holder == Holder::Lease(id) && row.token == token).cloned()
    }
}

/// Returns whether an extension is about this acquisition.
fn is_named(extension: &Extension, id: AcquisitionId) -> bool {
    extension.id.is_none_or(|named| named == id) || extension.renamed == Some(id)
}

/// Returns whether a holding is valid for an extension. A holding that the client itself keeps may
/// seem expired: the next heartbeat would move its expiry.
fn counts(extension: &Extension, until: i64, client: Option<ClientId>, now: i64) -> bool {
    let (_, removed) = extension.client_change.clients();
    let is_removed = removed.is_some() && client == removed;
    is_removed || remaining(until, now).is_some()
}

/// Returns the client whose heartbeat renews a holding after an extension.
fn new_client(extension: &Extension, client: Option<ClientId>) -> Option<ClientId> {
    let (new, removed) = extension.client_change.clients();
    new.or(client.filter(|_| client != removed))
}
