//! Ends holdings: by release, withdrawal or eviction.

use super::{End, Entry, Lease, Memory, Prepared, Strength, Write};
use crate::backend::micros;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{
    AcquisitionId, ChangeOutcome, ClientId, EntryState, Holder, Mode, Release, ReleaseOutcome, Response,
    WithdrawalOutcome,
};
use crate::token::FencingToken;

impl Memory {
    pub(super) fn release(&self, release: &Release, now: i64) -> Prepared {
        let answer = |released| Prepared::new(Response::Released(released));
        let Some(row) = self.leases.get(&release.name) else {
            return answer(ReleaseOutcome::NotHeld { lost: 0, token: 0 });
        };
        let holds = |entry: &&Entry| entry.state == EntryState::Holding(release.token.get());
        if let Some(entry) = self.owned_entry(&release.name, release.id).filter(holds) {
            return self.release_entry(release, row, entry, now);
        }
        let is_held = row.holder == Holder::Lease(release.id) && row.token == release.token.get();
        let is_held = is_held || (is_on(Mutation::ReleaseUnchecked) && matches!(row.holder, Holder::Lease(_)));
        if !is_held {
            return answer(ReleaseOutcome::NotHeld { lost: row.lost, token: row.token });
        }
        if self.is_lease_locked(&release.name, Strength::Ending) && !is_on(Mutation::ReleaseThroughFence) {
            return answer(ReleaseOutcome::Locked);
        }
        self.release_lease(release, row.clone(), now).unwrap_or_else(|| answer(ReleaseOutcome::Awaited))
    }

    /// Ends the holding of an entry, or reserves the name for the rest of a minimum time.
    fn release_entry(&self, release: &Release, row: &Lease, entry: &Entry, now: i64) -> Prepared {
        let Release { name, id, token, keep_for, .. } = release;
        if self.is_entry_locked(name, *id) && !is_on(Mutation::ReleaseThroughFence) {
            return Prepared::new(Response::Released(ReleaseOutcome::Locked));
        }
        let reserved = (!keep_for.is_zero()).then(|| Entry {
            client: None,
            owner: None,
            expires_at: now + micros(*keep_for),
            ..entry.clone()
        });
        let awaited = self.is_awaited(name, row);
        let mut prepared = Prepared::new(Response::Released(ReleaseOutcome::Ended { awaited }));
        let is_shared = |(other, e): (AcquisitionId, &Entry)| e.state == entry.state && other != *id;
        if !self.entries_named(name).any(is_shared) {
            prepared.ends.push((name.clone(), token.get(), End::Released));
        }
        prepared.write(Write::Entry(name.clone(), *id, reserved))
    }

    /// Ends the holding in the row of the name, and grants the name to the next acquisition.
    /// `None`: only a transition can find the next one.
    fn release_lease(&self, release: &Release, mut row: Lease, now: i64) -> Option<Prepared> {
        let Release { name, token, keep_for, next, .. } = release;
        let mut granted_entry = None;
        if keep_for.is_zero() && next.is_none() && self.entries_named(name).next().is_none() {
            row.waiting = 0;
        }
        let released = if !keep_for.is_zero() {
            (row.holder, row.client, row.owner) = (Holder::Kept, None, None);
            row.expires_at = now + micros(*keep_for);
            ReleaseOutcome::Ended { awaited: self.is_awaited(name, &row) }
        } else if self.is_awaited(name, &row) {
            let queue = self.read(name, 64, now)?;
            let first = queue.waiting().find(|entry| entry.remaining.is_some())?;
            if first.mode != Mode::Exclusive || next.is_some() || self.is_entry_locked(name, first.id) {
                return None;
            }
            granted_entry = Some(first.id);
            let client = first.client.filter(|_| first.is_renewed);
            ReleaseOutcome::ToEntry(row.grant_to(first.id, first.owner, client, first.ttl.min(GRANT_TTL), now))
        } else if let Some(claim) = next {
            ReleaseOutcome::ToNext(row.grant(claim, now).token)
        } else {
            row.end();
            ReleaseOutcome::Ended { awaited: false }
        };
        let mut prepared = Prepared::new(Response::Released(released)).write(Write::Lease(name.clone(), row));
        prepared.ends.push((name.clone(), token.get(), End::Released));
        Some(match granted_entry {
            Some(id) => prepared.write(Write::Entry(name.clone(), id, None)),
            None => prepared,
        })
    }

    pub(super) fn withdraw(&self, name: &LockName, id: AcquisitionId, except: Option<FencingToken>) -> Prepared {
        let answer = |withdrawn| Prepared::new(Response::Withdrawn(withdrawn));
        let row = self.leases.get(name).cloned();
        let stays = |token: i64| except.is_some_and(|except| except.get() == token);
        let holds = row.as_ref().is_some_and(|row| row.holder == Holder::Lease(id) && !stays(row.token));
        let entry =
            self.owned_entry(name, id).filter(|e| !matches!(e.state, EntryState::Holding(token) if stays(token)));
        let entry_is_locked = entry.is_some() && self.is_entry_locked(name, id);
        if entry_is_locked || (holds && self.is_lease_locked(name, Strength::Ending)) {
            return answer(WithdrawalOutcome::Locked);
        }
        let awaited = row.as_ref().is_some_and(|row| {
            let others = self.entries_named(name).any(|(i, e)| i != id && e.state == EntryState::Waiting);
            others || (self.marks_waiting && row.waiting != 0)
        });
        let mut prepared = answer(WithdrawalOutcome::Gone { awaited });
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
            return answer(ChangeOutcome::NotHeld);
        };
        // Acquisitions of one owner from several clients share a token, and end together.
        let ended: Vec<(AcquisitionId, Option<ClientId>)> = self
            .entries_named(name)
            .filter(|(_, entry)| entry.state == EntryState::Holding(token))
            .map(|(id, entry)| (id, entry.client))
            .collect();
        // A released holding that keeps the name unavailable is not counted as lost.
        let is_owned = |(_, e): (AcquisitionId, &Entry)| e.state == EntryState::Holding(token) && e.owner.is_some();
        let is_lost = self.entries_named(name).any(is_owned) || matches!(row.holder, Holder::Lease(_));
        let ends_row = matches!(row.holder, Holder::Lease(_) | Holder::Kept) && row.token == token;
        if !ends_row && ended.is_empty() {
            return answer(ChangeOutcome::NotHeld);
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
            return answer(ChangeOutcome::Locked);
        };
        let mut prepared = answer(ChangeOutcome::Done);
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
