//! Comparisons of responses and tables, within a tolerance of times.

use std::time::Duration;

use super::{TOLERANCE, Tables};
use crate::backend::memory::Entry;
use crate::backend::micros;
use crate::protocol::{
    AcquisitionId, CurrentHolder, EntryState, Granted, Holder, JoinOutcome, LeaseRow, Presence, Release,
    ReleaseOutcome, Request, Response,
};
use crate::token::FencingToken;

pub(super) fn is_near(a: i64, b: i64) -> bool {
    (a - b).abs() < TOLERANCE
}

pub(super) fn is_near_time(a: Duration, b: Duration) -> bool {
    is_near(micros(a), micros(b))
}

pub(super) fn is_near_remaining(a: Option<Duration>, b: Option<Duration>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => is_near_time(a, b),
        (a, b) => a == b,
    }
}

pub(super) fn is_near_token(a: FencingToken, b: FencingToken) -> bool {
    is_near(a.get(), b.get())
}

pub(super) fn is_same_row(a: &LeaseRow, b: &LeaseRow) -> bool {
    is_near_remaining(a.remaining, b.remaining) && LeaseRow { remaining: a.remaining, ..b.clone() } == *a
}

pub(super) fn is_same_presence(a: &Presence, b: &Presence) -> bool {
    match (a, b) {
        (Presence::Holding { token: a, remaining: c }, Presence::Holding { token: b, remaining: d }) => {
            a == b && is_near_remaining(*c, *d)
        }
        (a, b) => a == b,
    }
}

pub(super) fn is_alike(model: &Response, database: &Response) -> bool {
    use Response as R;
    let same_holder = |a: &CurrentHolder, b: &CurrentHolder| match (a, b) {
        (CurrentHolder::Valid { owner: a, remaining: c }, CurrentHolder::Valid { owner: b, remaining: d }) => {
            // The owner may be left out where it does not matter.
            (a == b || b.is_none()) && is_near_time(*c, *d)
        }
        (a, b) => a == b,
    };
    let same_grant = |a: &Granted, b: &Granted| a.id == b.id && is_near_token(a.token, b.token);
    match (model, database) {
        (R::Registered(a), R::Registered(b)) => is_near(*a, *b),
        (R::Acquired(Ok(a)), R::Acquired(Ok(b))) => is_near_token(*a, *b),
        (R::Acquired(Err(a)), R::Acquired(Err(b))) | (R::Enqueued(a), R::Enqueued(b)) => same_holder(a, b),
        (R::Joined(JoinOutcome::Done(a)), R::Joined(JoinOutcome::Done(b))) => a == b,
        (R::Released(ReleaseOutcome::ToNext(a)), R::Released(ReleaseOutcome::ToNext(b))) => is_near_token(*a, *b),
        (R::Released(ReleaseOutcome::ToEntry(a)), R::Released(ReleaseOutcome::ToEntry(b))) => same_grant(a, b),
        (R::Polled(Some(a)), R::Polled(Some(b))) => {
            is_same_row(&a.row, &b.row)
                && a.presences.len() == b.presences.len()
                && a.presences.iter().zip(&b.presences).all(|(a, b)| is_same_presence(a, b))
        }
        (R::Read(Some(a)), R::Read(Some(b))) => {
            let pairs = || a.entries.iter().zip(&b.entries);
            is_same_row(&a.row, &b.row)
                && a.is_cut_off == b.is_cut_off
                && a.entries.len() == b.entries.len()
                && pairs().all(|(a, b)| {
                    let mut b = b.clone();
                    let is_near = is_near_remaining(a.remaining, b.remaining);
                    b.remaining = a.remaining;
                    is_near && *a == b
                })
        }
        (R::Transitioned(Some(a)), R::Transitioned(Some(b))) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_grant(a, b))
        }
        (a, b) => a == b,
    }
}

/// Returns the grants in a response.
pub(super) fn granted(request: &Request, response: &Response) -> Vec<(AcquisitionId, i64)> {
    let of = |grant: &Granted| (grant.id, grant.token.get());
    match (request, response) {
        (Request::Acquire(claim), Response::Acquired(Ok(token))) => vec![(claim.id, token.get())],
        (Request::Release(Release { next: Some(next), .. }), Response::Released(ReleaseOutcome::ToNext(token))) => {
            vec![(next.id, token.get())]
        }
        (_, Response::Released(ReleaseOutcome::ToEntry(grant))) => vec![of(grant)],
        (_, Response::Transitioned(Some(grants))) => grants.iter().map(of).collect(),
        _ => Vec::new(),
    }
}

pub(super) fn token_of(tables: &Tables, id: AcquisitionId) -> i64 {
    let entry = tables.entries.iter().find_map(|((_, i), entry)| match entry.state {
        EntryState::Holding(token) if *i == id => Some(token),
        _ => None,
    });
    let row = tables.leases.values().find(|row| row.holder == Holder::Lease(id)).map(|row| row.token);
    entry.or(row).unwrap_or(0)
}

/// One id may be in use for several names, with another token in each.
pub(super) fn holds(tables: &Tables, id: AcquisitionId, token: i64) -> bool {
    let entries = tables.entries.iter().filter(|((_, i), _)| *i == id);
    let rows = tables.leases.values().filter(|row| row.holder == Holder::Lease(id));
    let mut tokens = entries.map(|(_, entry)| entry.state).chain(rows.map(|row| EntryState::Holding(row.token)));
    token != 0 && tokens.any(|state| state == EntryState::Holding(token))
}

/// Compares a time with its expected value: unchanged, or changed to about the same.
pub(super) fn is_moved(before: Option<i64>, model: i64, database: i64) -> bool {
    if before == Some(model) { database == model } else { is_near(model, database) && before != Some(database) }
}

pub(super) fn difference(before: &Tables, model: &Tables, database: &Tables) -> Option<String> {
    let differs = |what: String, model: &dyn std::fmt::Debug, database: &dyn std::fmt::Debug| {
        Some(format!("{what} differs\n    expected: {model:?}\n    found:    {database:?}"))
    };
    if model.clients.keys().ne(database.clients.keys()) {
        return differs("which clients are there".into(), &model.clients.keys(), &database.clients.keys());
    }
    for (id, m) in &model.clients {
        let (d, b) = (&database.clients[id], before.clients.get(id));
        // The notices of a new row start at the clock.
        let same_notice = if b.is_some() { m.notice == d.notice } else { is_near(m.notice, d.notice) };
        if !same_notice || !is_moved(b.map(|b| b.beat_at), m.beat_at, d.beat_at) {
            return differs(format!("client {id}"), m, d);
        }
    }
    if model.leases.keys().ne(database.leases.keys()) {
        return differs("which names are there".into(), &model.leases.keys(), &database.leases.keys());
    }
    for (name, m) in &model.leases {
        let (d, b) = (&database.leases[name], before.leases.get(name));
        let ends = matches!(m.holder, Holder::Lease(_) | Holder::Kept);
        let is_same = (m.holder, m.owner, m.client) == (d.holder, d.owner, d.client)
            && (!matches!(m.holder, Holder::Lease(_)) || m.ttl == d.ttl)
            && (!ends || is_moved(b.map(|b| b.expires_at), m.expires_at, d.expires_at))
            && is_moved(b.map(|b| b.token), m.token, d.token)
            && is_moved(b.map(|b| b.waiting), m.waiting, d.waiting)
            && is_moved(b.map(|b| b.lost), m.lost, d.lost)
            && is_moved(b.map(|b| b.asked), m.asked, d.asked);
        if !is_same {
            return differs(format!("the row of {name}"), m, d);
        }
    }
    if model.entries.keys().ne(database.entries.keys()) {
        return differs("which entries are there".into(), &model.entries.keys(), &database.entries.keys());
    }
    for (key, m) in &model.entries {
        let (d, b) = (&database.entries[key], before.entries.get(key));
        let token = |entry: &Entry| if let EntryState::Holding(token) = entry.state { token } else { 0 };
        let is_same = (m.owner, m.client, m.is_renewed, m.mode, m.ttl)
            == (d.owner, d.client, d.is_renewed, d.mode, d.ttl)
            && is_moved(b.map(token), token(m), token(d))
            && is_moved(b.map(|b| b.arrived), m.arrived, d.arrived)
            && is_moved(b.map(|b| b.expires_at), m.expires_at, d.expires_at);
        if !is_same {
            return differs(format!("entry {key:?}"), m, d);
        }
    }
    None
}
