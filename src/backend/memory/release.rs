//! Ends holdings: by release, withdrawal or eviction.

use super::{End, Entry, Memory, Prepared, Strength, Write};
use crate::backend::micros;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::timing::GRANT;
use crate::protocol::{Amended, ClientId, EntryState, Holder, LeaseId, Mode, Release, Released, Response, Withdrawn};
use crate::token::FencingToken;

impl Memory {
    pub(super) fn release(&self, release: &Release, now: i64) -> Prepared {
        let (name, token) = (&release.name, release.token.get());
        let answer = |released| Prepared::new(Response::Released(released));
        let Some(mut row) = self.leases.get(name).cloned() else {
            return answer(Released::NotHeld { lost: 0, token: 0 });
        };
        if let Some(entry) =
            self.owned_entry(name, release.id).filter(|entry| entry.state == EntryState::Holding(token))
        {
            if self.is_entry_locked(name, release.id) && !is_on(Mutation::ReleaseThroughFence) {
                return answer(Released::Locked);
            }
            let reserved = (!release.keep_for.is_zero()).then(|| Entry {
                client: None,
                owner: None,
                expires_at: now + micros(release.keep_for),
                ..entry.clone()
            });
            let awaited = self.is_awaited(name, &row);
            let mut prepared = answer(Released::Ended { awaited });
            let is_shared = |(id, e): (LeaseId, &Entry)| e.state == entry.state && id != release.id;
            if !self.entries_named(name).any(is_shared) {
                prepared.ends.push((name.clone(), token, End::Released));
            }
            return prepared.write(Write::Entry(name.clone(), release.id, reserved));
        }
        let is_held = row.holder == Holder::Lease(release.id) && row.token == token;
        let is_held = is_held || (is_on(Mutation::ReleaseUnchecked) && matches!(row.holder, Holder::Lease(_)));
        if !is_held {
            return answer(Released::NotHeld { lost: row.lost, token: row.token });
        }
        if self.is_lease_locked(name, Strength::Ending) && !is_on(Mutation::ReleaseThroughFence) {
            return answer(Released::Locked);
        }
        let lease = |row| Write::Lease(name.clone(), row);
        let ended = |released, row| {
            let mut prepared = answer(released).write(lease(row));
            prepared.ends.push((name.clone(), token, End::Released));
            prepared
        };
        if !release.keep_for.is_zero() {
            (row.holder, row.client, row.owner) = (Holder::Kept, None, None);
            row.expires_at = now + micros(release.keep_for);
            return ended(Released::Ended { awaited: self.is_awaited(name, &row) }, row);
        }
        if self.is_awaited(name, &row) {
            let queue = self.read(name, 64, now);
            let first = queue.and_then(|queue| queue.waiting().find(|entry| entry.remaining.is_some()).cloned());
            let Some(first) = first.filter(|e| e.mode == Mode::Exclusive && release.next.is_none()) else {
                return answer(Released::Awaited);
            };
            if self.is_entry_locked(name, first.id) {
                return answer(Released::Awaited);
            }
            let keeper = first.client.filter(|_| first.is_kept);
            let granted = row.grant_to(first.id, first.owner, keeper, first.ttl.min(GRANT), now);
            return ended(Released::ToEntry(granted), row).write(Write::Entry(name.clone(), first.id, None));
        }
        match &release.next {
            Some(claim) => {
                let granted = row.grant(claim, now);
                ended(Released::ToNext(granted.token), row)
            }
            None => {
                row.end();
                ended(Released::Ended { awaited: false }, row)
            }
        }
    }

    pub(super) fn withdraw(&self, name: &LockName, id: LeaseId, except: Option<FencingToken>) -> Prepared {
        let answer = |withdrawn| Prepared::new(Response::Withdrawn(withdrawn));
        let row = self.leases.get(name).cloned();
        let stays = |token: i64| except.is_some_and(|except| except.get() == token);
        let holds = row.as_ref().is_some_and(|row| row.holder == Holder::Lease(id) && !stays(row.token));
        let entry =
            self.owned_entry(name, id).filter(|e| !matches!(e.state, EntryState::Holding(token) if stays(token)));
        let entry_is_locked = entry.is_some() && self.is_entry_locked(name, id);
        if entry_is_locked || (holds && self.is_lease_locked(name, Strength::Ending)) {
            return answer(Withdrawn::Locked);
        }
        let awaited = row.as_ref().is_some_and(|row| {
            let others = self.entries_named(name).any(|(i, e)| i != id && e.state == EntryState::Waiting);
            others || (self.marks_waiting && row.waiting != 0)
        });
        let mut prepared = answer(Withdrawn::Gone { awaited });
        if let Some(entry) = entry {
            if let EntryState::Holding(token) = entry.state {
                prepared.ends.push((name.clone(), token, End::Released));
            }
            prepared = prepared.write(Write::Entry(name.clone(), id, None));
        }
        if let Some(mut row) = row.filter(|_| holds && !is_on(Mutation::WithdrawEntryOnly)) {
            prepared.ends.push((name.clone(), row.token, End::Released));
            row.end();
            prepared = prepared.write(Write::Lease(name.clone(), row));
        }
        prepared
    }

    pub(super) fn evict(&self, name: &LockName, token: i64, now: i64) -> Prepared {
        let answer = |evicted| Prepared::new(Response::Evicted(evicted));
        let Some(mut row) = self.leases.get(name).cloned() else {
            return answer(Amended::NotHeld);
        };
        // Acquisitions of one owner from several clients share a token, and end together.
        let ended: Vec<(LeaseId, Option<ClientId>)> = self
            .entries_named(name)
            .filter(|(_, entry)| entry.state == EntryState::Holding(token))
            .map(|(id, entry)| (id, entry.client))
            .collect();
        // A released holding that keeps the name unavailable is not counted as lost.
        let is_owned = |(_, e): (LeaseId, &Entry)| e.state == EntryState::Holding(token) && e.owner.is_some();
        let is_lost = self.entries_named(name).any(is_owned) || matches!(row.holder, Holder::Lease(_));
        let ends_row = matches!(row.holder, Holder::Lease(_) | Holder::Kept) && row.token == token;
        if !ends_row && ended.is_empty() {
            return answer(Amended::NotHeld);
        }
        let losers: Vec<ClientId> = if ends_row {
            row.client.into_iter().collect()
        } else {
            ended.iter().filter_map(|(_, client)| *client).collect()
        };
        let notices = if is_on(Mutation::EvictInSilence) { Some(Vec::new()) } else { self.notices(&losers, now) };
        let is_locked =
            self.is_lease_locked(name, Strength::Ending) || ended.iter().any(|(id, _)| self.is_entry_locked(name, *id));
        let Some(notices) = notices.filter(|_| !is_locked) else {
            return answer(Amended::Locked);
        };
        let mut prepared = answer(Amended::Done);
        prepared.writes = notices;
        if ends_row {
            row.end();
        }
        for (id, _) in ended {
            prepared = prepared.write(Write::Entry(name.clone(), id, None));
        }
        if is_lost {
            row.lost = row.lost.max(token);
            prepared.ends.push((name.clone(), token, End::Evicted));
        }
        prepared.write(Write::Lease(name.clone(), row))
    }
}
