//! Transitions of a name: holdings end, and waiting entries are granted.

use super::row::{positive, remaining};
use super::{End, Entry, Lease, Memory, Prepared, Strength, Write};
use crate::backend::micros;
use crate::mutation::{Mutation, is_on};
use crate::protocol::{AcquisitionId, ClientId, EntryState, Granted, Holder, HolderChange, Mode, Response, Transition};

/// A transition that is being prepared.
struct Draft<'t> {
    transition: &'t Transition,
    now: i64,
    row: Lease,
    prepared: Prepared,
    /// The clients whose holdings expired.
    losers: Vec<ClientId>,
}

impl Memory {
    pub(super) fn transition(&self, transition: &Transition, now: i64) -> Prepared {
        let changed = self.apply_transition(transition, now);
        changed.unwrap_or_else(|| Prepared::new(Response::Transitioned(None)))
    }

    /// Returns `None` if the rows are not as the transition expects them, or a fence has locked
    /// one.
    fn apply_transition(&self, transition: &Transition, now: i64) -> Option<Prepared> {
        let Transition { name, seen, is_last, .. } = transition;
        let row = self.leases.get(name)?.clone();
        let is_same = row.holder == seen.holder && row.token == seen.token;
        if !is_same || (*is_last && row.waiting != seen.waiting) {
            return None;
        }
        let prepared = Prepared::new(Response::Transitioned(None));
        let mut draft = Draft { transition, now, row, prepared, losers: Vec::new() };
        self.end_holder(&mut draft)?;
        self.end_entries(&mut draft)?;
        if self.is_fenced(&draft) || self.excludes_change(&draft) {
            return None;
        }
        let notices = self.notices(&draft.losers, now)?;
        draft.prepared.writes.extend(notices);
        let granted = self.grant(&mut draft)?;
        let Draft { mut row, mut prepared, .. } = draft;
        if *is_last {
            row.waiting = 0;
        }
        prepared.response = Response::Transitioned(Some(granted));
        Some(prepared.write(Write::Lease(name.clone(), row)))
    }

    /// Ends the holding that the row itself names, if any: it is given up, or has expired.
    fn end_holder(&self, draft: &mut Draft<'_>) -> Option<()> {
        let Transition { name, given_up, change, .. } = draft.transition;
        let Draft { now, row, prepared, losers, .. } = draft;
        let is_lease = match row.holder {
            Holder::Lease(_) => true,
            Holder::Kept => false,
            Holder::Nobody | Holder::Entries => return Some(()),
        };
        if is_lease && given_up.is_some() {
            prepared.ends.push((name.clone(), row.token, End::Released));
        } else if self.read_row(row, *now).remaining.is_some() && !is_on(Mutation::TakeOverUnchecked) {
            return None;
        } else if is_lease {
            losers.extend(row.client);
            row.lost = row.lost.max(row.token);
            prepared.ends.push((name.clone(), row.token, End::TakenOver));
        }
        (!matches!(change, HolderChange::None)).then_some(())
    }

    /// Deletes the entries that have expired.
    fn end_entries(&self, draft: &mut Draft<'_>) -> Option<()> {
        let Transition { name, expired, .. } = draft.transition;
        let Draft { now, row, prepared, losers, .. } = draft;
        for id in expired {
            let entry = self.entries.get(&(name.clone(), *id))?;
            let has_expired = remaining(self.entry_until(entry), *now).is_none() || is_on(Mutation::TakeOverUnchecked);
            if !has_expired || self.is_entry_locked(name, *id) {
                return None;
            }
            if let EntryState::Holding(token) = entry.state {
                // An entry without an owner was released before and only kept the name unavailable.
                // A token shared by several acquisitions of one owner is lost with the last of
                // them.
                let is_shared =
                    |(other, e): (AcquisitionId, &Entry)| e.state == entry.state && !expired.contains(&other);
                losers.extend(entry.client);
                if entry.owner.is_some() && !self.entries_named(name).any(is_shared) {
                    row.lost = row.lost.max(token);
                    prepared.ends.push((name.clone(), token, End::TakenOver));
                }
            }
            prepared.writes.push(Write::Entry(name.clone(), *id, None));
        }
        Some(())
    }

    /// Returns whether a fence has locked the row of the name. While sharers stay, their fences do
    /// not keep other clients from sharing the name or leaving it.
    fn is_fenced(&self, draft: &Draft<'_>) -> bool {
        let mut staying = self.staying(draft.transition);
        let sharers_stay =
            draft.row.holder == Holder::Entries && staying.any(|(_, entry)| entry.mode != Mode::Exclusive);
        let is_plain = matches!(draft.transition.change, HolderChange::Shared(_) | HolderChange::None);
        let strength = if sharers_stay && is_plain { Strength::Plain } else { Strength::Ending };
        self.is_lease_locked(&draft.transition.name, strength) && !is_on(Mutation::TransitThroughFence)
    }

    /// Returns whether a holding that stays, or a waiting entry, excludes the new holder. An
    /// acquisition may have joined since the queue was read: joining does not raise the token.
    fn excludes_change(&self, draft: &Draft<'_>) -> bool {
        let Transition { name, expired, change, .. } = draft.transition;
        let mut staying = self.staying(draft.transition);
        let is_waiting = |(id, e): (AcquisitionId, &Entry)| e.state == EntryState::Waiting && !expired.contains(&id);
        if matches!(change, HolderChange::Claim(_)) && self.entries_named(name).any(is_waiting) {
            return true;
        }
        let is_shared = match change {
            HolderChange::None => return false,
            HolderChange::Shared(_) => true,
            HolderChange::Claim(claim) => claim.mode != Mode::Exclusive,
            HolderChange::Free | HolderChange::Exclusive(_) => false,
        };
        staying.any(|(_, entry)| !is_shared || entry.mode == Mode::Exclusive)
    }

    /// The holding entries that the transition does not end.
    fn staying(&self, transition: &Transition) -> impl Iterator<Item = (AcquisitionId, &Entry)> {
        let Transition { name, expired, .. } = transition;
        self.entries_named(name).filter(|(id, e)| e.state != EntryState::Waiting && !expired.contains(id))
    }

    /// Gives the name to its next holders, and returns their grants.
    fn grant(&self, draft: &mut Draft<'_>) -> Option<Vec<Granted>> {
        let Transition { name, change, .. } = draft.transition;
        let Draft { row, prepared, .. } = draft;
        let now = draft.now;
        let waiting = |id: AcquisitionId| {
            let entry = self.entries.get(&(name.clone(), id)).filter(|entry| entry.state == EntryState::Waiting)?;
            (!self.is_entry_locked(name, id)).then_some(entry)
        };
        let mut granted = Vec::new();
        match change {
            HolderChange::None => {}
            HolderChange::Free => row.end(),
            HolderChange::Claim(claim) if claim.mode == Mode::Exclusive => granted.push(row.grant(claim, now)),
            HolderChange::Claim(claim) => {
                let (share, entry) = row.share(claim, now);
                granted.push(share);
                prepared.writes.push(Write::Entry(name.clone(), claim.id, Some(entry)));
            }
            HolderChange::Exclusive(grantee) => {
                let entry = waiting(grantee.id)?;
                granted.push(row.grant_to(grantee.id, entry.owner, entry.renewing_client(), grantee.ttl, now));
                prepared.writes.push(Write::Entry(name.clone(), grantee.id, None));
            }
            HolderChange::Shared(grantees) => {
                (row.holder, row.client, row.owner) = (Holder::Entries, None, None);
                for grantee in grantees {
                    let entry = waiting(grantee.id)?.clone();
                    row.token = row.next_token(now);
                    let state = EntryState::Holding(row.token);
                    granted.push(Granted { id: grantee.id, token: positive(row.token) });
                    let ttl = micros(grantee.ttl);
                    let holding = Entry { state, client: entry.renewing_client(), ttl, expires_at: now + ttl, ..entry };
                    let share = (!is_on(Mutation::DeleteShareOnGrant)).then_some(holding);
                    prepared.writes.push(Write::Entry(name.clone(), grantee.id, share));
                }
            }
        }
        Some(granted)
    }
}
