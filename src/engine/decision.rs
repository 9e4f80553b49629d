//! Which entry is next: the transition of a name, given its holder and its queue.
//!
//! The decision is a pure function of the rows read. The store applies it only if the name is still
//! as it was read, so it does not matter which client decides, nor how many decide at once.
//!
//! The queue is served strictly in the order of arrival, with one exception: an owner that shares a
//! name may share it again, because it would otherwise wait for itself behind a waiting writer.

use std::time::Duration;

use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{
    Claim, ClientId, EntryRow, GivenUp, Grantee, Holder, HolderChange, Mode, Queue, Seen, Transition,
};

/// The decision about a name.
#[derive(Debug)]
pub(crate) enum Decision {
    /// Grants nothing. Contains the time until the name may become free by itself, if known.
    Wait(Option<Duration>),
    Apply(Transition),
}

/// Decides the next transition of a name.
///
/// - `own`: the client that decides. Its waiting entries count as alive, and its grants last for
///   the requested TTL.
/// - `given_up`: a holding that its holder gives up.
/// - `claim`: a claim that gets the name if no entry waits for it.
pub(crate) fn decide(
    name: &LockName,
    queue: &Queue,
    own: ClientId,
    given_up: Option<GivenUp>,
    claim: Option<&Claim>,
) -> Decision {
    decide_with(name, queue, own, given_up, claim, sharing(queue))
}

/// Decides the next transition of a name whose expired holding entries cannot be ended, because
/// transactions that they fence keep them locked: they share the name as if they had not expired.
/// Returns `None` if no entry can be granted the name beside them.
pub(super) fn decide_beside_expired(
    name: &LockName,
    queue: &Queue,
    own: ClientId,
    given_up: Option<GivenUp>,
    claim: Option<&Claim>,
) -> Option<Decision> {
    let decision = decide_with(name, queue, own, given_up, claim, queue.holding().collect());
    let grants = |change: &HolderChange| !matches!(change, HolderChange::None | HolderChange::Free);
    Some(decision).filter(|decision| matches!(decision, Decision::Apply(transition) if grants(&transition.change)))
}

fn decide_with(
    name: &LockName,
    queue: &Queue,
    own: ClientId,
    given_up: Option<GivenUp>,
    claim: Option<&Claim>,
    sharing: Vec<&EntryRow>,
) -> Decision {
    let row = &queue.row;
    let given_up = given_up.filter(|given| row.holder == Holder::Lease(given.id) && row.token == given.token.get());
    let row_names_holder = matches!(row.holder, Holder::Lease(_) | Holder::Kept);
    if row_names_holder && given_up.is_none() && row.remaining.is_some() {
        return Decision::Wait(row.remaining);
    }
    let is_live =
        |entry: &&EntryRow| entry.remaining.is_some() || entry.client == Some(own) || is_on(Mutation::GrantToTheDead);
    let waiting: Vec<&EntryRow> = queue.waiting().filter(is_live).collect();
    let expired: Vec<_> = queue
        .entries
        .iter()
        .filter(|entry| !sharing.iter().chain(&waiting).any(|live| live.id == entry.id))
        .map(|entry| entry.id)
        .collect();
    let next = successors(&sharing, &waiting);
    let grantee = |entry: &&EntryRow| Grantee {
        id: entry.id,
        ttl: if entry.client == Some(own) || is_on(Mutation::GrantForLong) {
            entry.ttl
        } else {
            entry.ttl.min(GRANT_TTL)
        },
    };
    let may_be_free = sharing.is_empty() && row.holder != Holder::Nobody;
    let claim = claim.filter(|claim| waiting.is_empty() && !queue.is_cut_off && fits(claim.mode, &sharing));
    let change = match (next.first(), claim) {
        (Some(first), _) if first.mode == Mode::Exclusive => HolderChange::Exclusive(grantee(first)),
        (Some(_), _) => HolderChange::Shared(next.iter().map(grantee).collect()),
        (None, Some(claim)) => HolderChange::Claim(Box::new(claim.clone())),
        (None, None) if may_be_free => HolderChange::Free,
        (None, None) => HolderChange::None,
    };
    let is_last = next.len() == waiting.len() && !queue.is_cut_off;
    let mark_is_right = (row.waiting == 0) == is_last;
    if matches!(change, HolderChange::None) && expired.is_empty() && (mark_is_right || !is_last) {
        return Decision::Wait(sharing.iter().filter_map(|entry| entry.remaining).min());
    }
    let seen = Seen { holder: row.holder, token: row.token, waiting: row.waiting };
    Decision::Apply(Transition { name: name.clone(), seen, given_up, expired, change, is_last })
}

/// Returns whether a claim could hold the name beside the holders that share it.
fn fits(mode: Mode, sharing: &[&EntryRow]) -> bool {
    match mode {
        Mode::Exclusive => sharing.is_empty(),
        Mode::Shared { units, permits } => {
            let is_shared = sharing.iter().all(|entry| entry.mode != Mode::Exclusive);
            let taken: u64 = sharing.iter().map(|entry| entry.mode.units()).sum();
            is_shared && taken + u64::from(units) <= u64::from(permits)
        }
    }
}

/// Returns whether the owner of a claim shares the name already, and may share it again past
/// waiting entries.
pub(super) fn shares_again(claim: &Claim, queue: &Queue) -> bool {
    goes_past(claim.mode, Some(claim.owner), &sharing(queue))
}

/// Returns the entries that hold the name and have not expired.
fn sharing(queue: &Queue) -> Vec<&EntryRow> {
    queue.holding().filter(|entry| entry.remaining.is_some()).collect()
}

fn goes_past(mode: Mode, owner: Option<Owner>, sharing: &[&EntryRow]) -> bool {
    let is_own = |other: &&EntryRow| other.mode == Mode::READ && other.owner == owner;
    mode == Mode::READ && owner.is_some() && sharing.iter().any(is_own)
}

/// Returns the waiting entries that get a name without an exclusive holder.
fn successors<'a>(sharing: &[&EntryRow], waiting: &[&'a EntryRow]) -> Vec<&'a EntryRow> {
    let mut holding = sharing.to_vec();
    let mut next = Vec::new();
    let mut is_open = true;
    for entry in waiting {
        if !is_open && !goes_past(entry.mode, entry.owner, sharing) {
            continue;
        }
        if !fits(entry.mode, &holding) {
            is_open = false;
            continue;
        }
        next.push(*entry);
        if entry.mode == Mode::Exclusive {
            break;
        }
        holding.push(entry);
    }
    next
}
