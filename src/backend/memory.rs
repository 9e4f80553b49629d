//! The model of a store: every request as the few lines that say what it means.
//!
//! A request runs in the steps of a real server. It is [prepared](Memory::prepare): it reads what is committed, needs the locks of the
//! rows that it will write, and waits or gives up where another transaction has them. Its writes are [committed](Memory::commit) later,
//! or never. `now` is an argument, in microseconds.

#![cfg_attr(not(test), allow(dead_code, reason = "strangers, fences and the checker belong to the simulation"))]

#[cfg(feature = "testing")]
pub(crate) mod server;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::micros;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::timing::GRANT;
use crate::protocol::{
    Amended, Claim, ClientId, Enqueue, EntryRow, EntryState, Extension, Granted, Holder, HolderChange, HolderNow,
    Joined, Keeper, LeaseId, LeaseRow, Mode, Polled, Presence, Queue, Release, Released, Request, Response, Transition,
    Withdrawn,
};
use crate::token::FencingToken;

/// Identifies a transaction.
pub(crate) type TransactionId = u64;

/// A row of `sqlock_client`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Client {
    pub(crate) beat_at: i64,
    pub(crate) notice: i64,
}

/// A row of `sqlock_lease`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) holder: Holder,
    pub(crate) owner: Option<Owner>,
    pub(crate) client: Option<ClientId>,
    pub(crate) token: i64,
    pub(crate) ttl: i64,
    pub(crate) expires_at: i64,
    pub(crate) waiting: i64,
    pub(crate) lost: i64,
}

/// A row of `sqlock_entry`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) client: Option<ClientId>,
    pub(crate) owner: Option<Owner>,
    pub(crate) is_kept: bool,
    pub(crate) mode: Mode,
    pub(crate) state: EntryState,
    pub(crate) arrived: i64,
    pub(crate) ttl: i64,
    pub(crate) expires_at: i64,
}

/// A row that can be locked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    Client(ClientId),
    Lease(LockName),
    Entry(LockName, LeaseId),
}

/// A row as it will be. `None`: deleted.
#[derive(Debug)]
enum Write {
    Client(ClientId, Client),
    Lease(LockName, Lease),
    Entry(LockName, LeaseId, Option<Entry>),
}

/// Why a holding ended, for the checker of the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Released,
    TakenOver,
    Evicted,
}

/// What a prepared request will write and answer when it is committed.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) response: Response,
    writes: Vec<Write>,
    ends: Vec<(LockName, i64, End)>,
    /// The answer tells of the holder as it is after the commit.
    looks_afterwards: Option<LockName>,
}

/// A request that needs a row that another transaction has locked, and waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MustWait;

#[derive(Default)]
struct Lock {
    exclusive: Option<TransactionId>,
    shared: BTreeSet<TransactionId>,
}

/// The tables of a store, and who has locked which rows.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) clients: BTreeMap<ClientId, Client>,
    pub(crate) leases: BTreeMap<LockName, Lease>,
    pub(crate) entries: BTreeMap<(LockName, LeaseId), Entry>,
    locks: BTreeMap<Key, Lock>,
    /// Marks in the row of a name that somebody waits, and lets fenced rows be updated by what ends no holding (PostgreSQL).
    marks: bool,
    /// How and when each holding ended, by name and token.
    pub(crate) ends: BTreeMap<(LockName, i64), (End, i64)>,
}

/// How a write needs its row.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Strength {
    /// An open fence stands against it.
    Ending,
    /// It leaves the holder as it is.
    Plain,
}

fn left(until: i64, now: i64) -> Option<Duration> {
    u64::try_from(until - now).ok().filter(|us| *us > 0).map(Duration::from_micros)
}

impl Lease {
    fn free() -> Self {
        let (holder, owner, client) = (Holder::Nobody, None, None);
        Self { holder, owner, client, token: 0, ttl: 0, expires_at: 0, waiting: 0, lost: 0 }
    }

    fn next_token(&self, now: i64) -> i64 {
        if is_on(Mutation::RestartTokens) && self.holder == Holder::Nobody {
            return 1;
        }
        now.max(self.token + 1)
    }

    /// Grants a claim that has no entry.
    fn grant(&mut self, claim: &Claim, now: i64) -> Granted {
        self.grant_to(claim.id, Some(claim.owner), claim.is_kept.then_some(claim.client), claim.ttl, now)
    }

    fn grant_to(
        &mut self,
        id: LeaseId,
        owner: Option<Owner>,
        client: Option<ClientId>,
        ttl: Duration,
        now: i64,
    ) -> Granted {
        self.token = self.next_token(now);
        self.holder = Holder::Lease(id);
        (self.owner, self.client) = (owner, client);
        self.ttl = micros(ttl);
        self.expires_at = now + self.ttl;
        Granted { id, token: positive(self.token) }
    }

    /// Lets a claim that has no entry share the name, and returns its entry.
    fn share(&mut self, claim: &Claim, now: i64) -> (Granted, Entry) {
        self.token = self.next_token(now);
        (self.holder, self.client, self.owner) = (Holder::Entries, None, None);
        let client = claim.is_kept.then_some(claim.client);
        let entry = Entry::new(claim, EntryState::Holding(self.token), client, 0, now + micros(claim.ttl));
        (Granted { id: claim.id, token: positive(self.token) }, entry)
    }

    fn end(&mut self) {
        (self.holder, self.owner, self.client, self.expires_at) = (Holder::Nobody, None, None, 0);
    }
}

/// Every token is positive: it is at least the database's clock.
fn positive(token: i64) -> FencingToken {
    FencingToken::new(token.max(1)).unwrap_or_else(|| unreachable!("positive"))
}

impl Entry {
    fn new(claim: &Claim, state: EntryState, client: Option<ClientId>, arrived: i64, expires_at: i64) -> Self {
        let Claim { owner, is_kept, mode, ttl, .. } = *claim;
        Self { client, owner: Some(owner), is_kept, mode, state, arrived, ttl: micros(ttl), expires_at }
    }

    /// The client whose heartbeat keeps what the entry is granted.
    fn keeper(&self) -> Option<ClientId> {
        self.client.filter(|_| self.is_kept)
    }
}

impl Prepared {
    fn answer(response: Response) -> Self {
        Self { response, writes: Vec::new(), ends: Vec::new(), looks_afterwards: None }
    }

    fn write(mut self, write: Write) -> Self {
        self.writes.push(write);
        self
    }

    /// Whether it takes the name from the holder of its row, for the checker of the simulation.
    pub(crate) fn takes_over(&self, row: &Lease) -> bool {
        self.ends.iter().any(|(_, token, end)| *token == row.token && *end == End::TakenOver)
    }

    /// The rows that stay locked until the commit.
    fn keys(&self) -> impl Iterator<Item = Key> {
        self.writes.iter().map(|write| match write {
            Write::Client(id, _) => Key::Client(*id),
            Write::Lease(name, _) => Key::Lease(name.clone()),
            Write::Entry(name, id, _) => Key::Entry(name.clone(), *id),
        })
    }
}

impl Memory {
    /// An empty store. `marks`: it marks in the row of a name that somebody waits, as PostgreSQL does.
    pub(crate) fn new(marks: bool) -> Self {
        Self { marks, ..Self::default() }
    }

    /// A copy of what is committed.
    pub(crate) fn copy(&self) -> Self {
        let Self { clients, leases, entries, marks, ends, .. } = self;
        let (clients, leases, entries, ends) = (clients.clone(), leases.clone(), entries.clone(), ends.clone());
        Self { clients, leases, entries, ends, locks: BTreeMap::new(), marks: *marks }
    }

    // ---- transactions

    /// Reads and decides, and locks the rows that it will write.
    pub(crate) fn prepare(&mut self, by: TransactionId, now: i64, request: &Request) -> Result<Prepared, MustWait> {
        let prepared = match request {
            Request::Register { client } => self.register(*client, now),
            Request::Beat { client } => self.beat(*client, now),
            Request::Acquire(claim) => self.acquire(claim, now),
            Request::Join(claim) => Ok(self.join(claim, now)),
            Request::Enqueue(entries) => self.enqueue(entries, now),
            Request::Release(release) => Ok(self.release(release, now)),
            Request::Withdraw { name, id, except } => Ok(self.withdraw(name, *id, *except)),
            Request::Poll { name, ids } => Ok(Prepared::answer(Response::Polled(self.poll(name, ids, now)))),
            Request::Read { name, limit } => Ok(Prepared::answer(Response::Read(self.read(name, *limit, now)))),
            Request::Transition(transition) => Ok(self.transit(transition, now)),
            Request::Extend(extension) => Ok(self.extend(extension, now)),
            Request::Downgrade { name, id, token } => Ok(self.downgrade(name, *id, token.get())),
            Request::Raise { name, id, token, to } => Ok(self.raise(name, *id, token.get(), to.get())),
            Request::Evict { name, token } => Ok(self.evict(name, token.get())),
        }?;
        // A write waits for another transaction that has written the row: a second insert of a key waits for the first.
        let is_taken = |key: Key| self.locks.get(&key).is_some_and(|lock| lock.exclusive.is_some());
        if prepared.keys().any(is_taken) {
            return Err(MustWait);
        }
        self.lock_rows(by, &prepared);
        Ok(prepared)
    }

    fn lock_rows(&mut self, by: TransactionId, prepared: &Prepared) {
        for key in prepared.keys() {
            self.locks.entry(key).or_default().exclusive = Some(by);
        }
    }

    /// Makes the writes of a transaction visible, and returns its answer.
    pub(crate) fn commit(&mut self, by: TransactionId, now: i64, prepared: Prepared) -> Response {
        for write in prepared.writes {
            match write {
                Write::Client(id, client) => drop(self.clients.insert(id, client)),
                Write::Lease(name, lease) => drop(self.leases.insert(name, lease)),
                Write::Entry(name, id, Some(entry)) => drop(self.entries.insert((name, id), entry)),
                Write::Entry(name, id, None) => drop(self.entries.remove(&(name, id))),
            }
        }
        for (name, token, end) in prepared.ends {
            self.ends.insert((name, token), (end, now));
        }
        self.unlock(by);
        match prepared.looks_afterwards {
            Some(name) => Response::Enqueued(self.holder_now(&name, now)),
            None => prepared.response,
        }
    }

    /// Ends a transaction without its writes.
    pub(crate) fn unlock(&mut self, by: TransactionId) {
        for lock in self.locks.values_mut() {
            lock.shared.remove(&by);
            lock.exclusive = lock.exclusive.filter(|holder| *holder != by);
        }
        self.locks.retain(|_, lock| lock.exclusive.is_some() || !lock.shared.is_empty());
    }

    /// Locks a row for a stranger. `false`: another has it.
    pub(crate) fn lock(&mut self, by: TransactionId, key: Key) -> bool {
        let lock = self.locks.entry(key).or_default();
        let is_free = lock.exclusive.is_none() && lock.shared.is_empty();
        if is_free {
            lock.exclusive = Some(by);
        }
        is_free
    }

    /// Begins a fenced transaction: the row that says who holds stays as it is until the transaction ends. `false`: the holding has
    /// ended.
    pub(crate) fn fence(
        &mut self,
        by: TransactionId,
        name: &LockName,
        id: LeaseId,
        token: FencingToken,
    ) -> Result<bool, MustWait> {
        let alone =
            self.leases.get(name).is_some_and(|row| row.holder == Holder::Lease(id) && row.token == token.get());
        let shared = self.owned(name, id).is_some_and(|e| e.state == EntryState::Holding(token.get()));
        let key = match (alone, shared) {
            (true, _) => Key::Lease(name.clone()),
            (false, true) => Key::Entry(name.clone(), id),
            (false, false) => return Ok(false),
        };
        let lock = self.locks.entry(key).or_default();
        if lock.exclusive.is_some() {
            return Err(MustWait);
        }
        lock.shared.insert(by);
        Ok(true)
    }

    fn is_locked(&self, key: &Key, strength: Strength) -> bool {
        let passes_fences = strength == Strength::Plain && self.marks;
        self.locks.get(key).is_some_and(|lock| lock.exclusive.is_some() || (!lock.shared.is_empty() && !passes_fences))
    }

    fn is_lease_locked(&self, name: &LockName, strength: Strength) -> bool {
        self.is_locked(&Key::Lease(name.clone()), strength)
    }

    fn is_entry_locked(&self, name: &LockName, id: LeaseId) -> bool {
        self.is_locked(&Key::Entry(name.clone(), id), Strength::Ending)
    }

    // ---- what the rows say

    fn beat_of(&self, client: Option<ClientId>) -> Option<i64> {
        self.clients.get(&client?).map(|client| client.beat_at)
    }

    /// Whether the row of a name has a valid holder, for the checker of the simulation.
    pub(crate) fn is_held(&self, name: &LockName, now: i64) -> bool {
        self.leases.get(name).is_some_and(|row| {
            matches!(row.holder, Holder::Lease(_)) && self.kept_until(row.expires_at, row.client, row.ttl) > now
        })
    }

    /// How long ago a waiting entry expired, in microseconds, for the checker of the simulation.
    pub(crate) fn dead_for(&self, name: &LockName, id: LeaseId, now: i64) -> Option<i64> {
        let entry = self.entries.get(&(name.clone(), id))?;
        let until = self.kept_until(entry.expires_at, entry.client, micros(GRANT));
        (until < now).then_some(now - until)
    }

    /// A holding or a waiting entry is valid until its own expiry, and for its TTL after the heartbeat of its client.
    pub(crate) fn valid_until(&self, expires_at: i64, client: Option<ClientId>, ttl: i64) -> i64 {
        if is_on(Mutation::TakeOverByExpiryAlone) {
            return expires_at;
        }
        self.kept_until(expires_at, client, ttl)
    }

    fn kept_until(&self, expires_at: i64, client: Option<ClientId>, ttl: i64) -> i64 {
        self.beat_of(client).map_or(expires_at, |beat_at| expires_at.max(beat_at + ttl))
    }

    /// An entry that was released, and only keeps the name from others, belongs to nobody.
    fn owned(&self, name: &LockName, id: LeaseId) -> Option<&Entry> {
        self.entries.get(&(name.clone(), id)).filter(|entry| entry.owner.is_some())
    }

    fn entry_until(&self, entry: &Entry) -> i64 {
        let ttl = if entry.state == EntryState::Waiting { micros(GRANT) } else { entry.ttl };
        self.valid_until(entry.expires_at, entry.client, ttl)
    }

    fn entries_of(&self, name: &LockName) -> impl Iterator<Item = (LeaseId, &Entry)> {
        let range = (name.clone(), LeaseId::from_u128(0))..=(name.clone(), LeaseId::from_u128(u128::MAX));
        self.entries.range(range).map(|((_, id), entry)| (*id, entry))
    }

    fn is_awaited(&self, name: &LockName, row: &Lease) -> bool {
        if self.marks { row.waiting != 0 } else { self.entries_of(name).any(|(_, e)| e.state == EntryState::Waiting) }
    }

    fn row_of(&self, row: &Lease, now: i64) -> LeaseRow {
        let until = self.valid_until(row.expires_at, row.client, row.ttl);
        let remaining = matches!(row.holder, Holder::Lease(_) | Holder::Kept).then(|| left(until, now)).flatten();
        let Lease { holder, owner, client, token, waiting, lost, .. } = row.clone();
        LeaseRow { holder, owner, client, token, remaining, waiting, lost }
    }

    fn holder_now(&self, name: &LockName, now: i64) -> HolderNow {
        match self.leases.get(name).map(|row| self.row_of(row, now)) {
            Some(LeaseRow { holder: Holder::Entries, .. }) => HolderNow::Unknown,
            Some(LeaseRow { remaining: Some(remaining), owner, .. }) => HolderNow::Valid { owner, remaining },
            _ => HolderNow::Vacant,
        }
    }

    fn poll(&self, name: &LockName, ids: &[LeaseId], now: i64) -> Option<Polled> {
        let row = self.row_of(self.leases.get(name)?, now);
        let presence = |id: &LeaseId| {
            let entry = self.entries.get(&(name.clone(), *id));
            let is_ahead = |other: &Entry, of: &Entry, other_id| {
                let is_live = left(self.entry_until(other), now).is_some();
                is_live && other.state == EntryState::Waiting && (other.arrived, other_id) < (of.arrived, *id)
            };
            let ahead = entry.map_or(0, |own| self.entries_of(name).filter(|(i, e)| is_ahead(e, own, *i)).count());
            let state = entry.map(|entry| (entry.state, left(self.entry_until(entry), now)));
            Presence::of(*id, &row, state, u32::try_from(ahead).unwrap_or(u32::MAX))
        };
        let presences = ids.iter().map(presence).collect();
        Some(Polled { row, presences })
    }

    fn read(&self, name: &LockName, limit: u32, now: i64) -> Option<Queue> {
        let row = self.row_of(self.leases.get(name)?, now);
        let mut entries: Vec<EntryRow> = self
            .entries_of(name)
            .map(|(id, entry)| EntryRow {
                id,
                client: entry.client,
                owner: entry.owner,
                is_kept: entry.is_kept,
                mode: entry.mode,
                state: entry.state,
                ttl: Duration::from_micros(u64::try_from(entry.ttl).unwrap_or(0)),
                arrived: entry.arrived,
                remaining: left(self.entry_until(entry), now),
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

    // ---- clients

    fn register(&self, id: ClientId, now: i64) -> Result<Prepared, MustWait> {
        if self.is_locked(&Key::Client(id), Strength::Ending) {
            return Err(MustWait);
        }
        let notice = self.clients.get(&id).map_or(0, |client| client.notice);
        Ok(Prepared::answer(Response::Registered(notice)).write(Write::Client(id, Client { beat_at: now, notice })))
    }

    fn beat(&self, id: ClientId, now: i64) -> Result<Prepared, MustWait> {
        let Some(client) = self.clients.get(&id) else {
            return Ok(Prepared::answer(Response::Beat(None)));
        };
        if self.is_locked(&Key::Client(id), Strength::Ending) {
            return Err(MustWait);
        }
        let written = Client { beat_at: now, ..client.clone() };
        Ok(Prepared::answer(Response::Beat(Some(client.notice))).write(Write::Client(id, written)))
    }

    /// Adds a notice to the clients that lose something. `None`: one of their rows is locked.
    fn notices(&self, losers: &[ClientId]) -> Option<Vec<Write>> {
        let mut losers = losers.to_vec();
        losers.sort();
        losers.dedup();
        // A client without a row gets one: it may be about to register, and must then wait for this and hear of it.
        let write = |id: ClientId| {
            let client = self.clients.get(&id).cloned().unwrap_or(Client { beat_at: 0, notice: 0 });
            Write::Client(id, Client { notice: client.notice + 1, ..client })
        };
        if losers.iter().any(|id| self.is_locked(&Key::Client(*id), Strength::Ending)) {
            return None;
        }
        Some(losers.into_iter().map(write).collect())
    }

    // ---- acquiring

    fn acquire(&self, claim: &Claim, now: i64) -> Result<Prepared, MustWait> {
        let name = &claim.name;
        let granted = |token| Prepared::answer(Response::Acquired(Ok(token)));
        let refused = || Ok(Prepared::answer(Response::Acquired(Err(self.holder_now(name, now)))));
        let mut row = self.leases.get(name).cloned().unwrap_or_else(Lease::free);
        // A claim that was granted before, by a request whose answer was lost, lasts anew. The same request may also come long after
        // the holding was extended: so nothing gets shorter.
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
            self.entries_of(name).filter(|(_, e)| e.state != EntryState::Waiting).map(|(_, e)| e).collect();
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

    fn join(&self, claim: &Claim, now: i64) -> Prepared {
        let name = &claim.name;
        let answer = |joined| Prepared::answer(Response::Joined(joined));
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
        if let Some(before) = self.owned(name, claim.id).filter(|before| before.state == own.state) {
            own.client = before.client.or(own.client);
            (own.ttl, own.expires_at) = (own.ttl.max(before.ttl), own.expires_at.max(before.expires_at));
        }
        let is_live = |(_, e): &(LeaseId, &Entry)| {
            e.state == EntryState::Holding(row.token)
                && e.mode == Mode::Exclusive
                && e.owner == Some(claim.owner)
                && left(self.entry_until(e), now).is_some()
        };
        let mut writes = match row.holder {
            Holder::Lease(id) if row.owner == Some(claim.owner) && self.row_of(&row, now).remaining.is_some() => {
                if id == claim.id {
                    return answer(Joined::NotHeld);
                }
                let first = holding(row.client, row.ttl, row.expires_at);
                vec![Write::Entry(name.clone(), id, Some(first))]
            }
            Holder::Entries if row.owner == Some(claim.owner) && self.entries_of(name).any(|e| is_live(&e)) => {
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

    fn enqueue(&self, entries: &[Enqueue], now: i64) -> Result<Prepared, MustWait> {
        let Some(first) = entries.first() else {
            return Ok(Prepared::answer(Response::Enqueued(HolderNow::Unknown)));
        };
        let name = &first.claim.name;
        let known = self.leases.get(name);
        let mut row = known.cloned().unwrap_or_else(Lease::free);
        let is_new = |entry: &&Enqueue| {
            !self.entries.contains_key(&(name.clone(), entry.claim.id)) && row.holder != Holder::Lease(entry.claim.id)
        };
        let added: Vec<&Enqueue> = entries.iter().filter(is_new).collect();
        let writes_row = known.is_none() || (self.marks && !added.is_empty());
        if writes_row && self.is_lease_locked(name, Strength::Plain) {
            return Err(MustWait);
        }
        let mut prepared = Prepared::answer(Response::Enqueued(HolderNow::Unknown));
        prepared.looks_afterwards = Some(name.clone());
        for Enqueue { claim, age } in added {
            let age = if is_on(Mutation::ForgetArrival) { 0 } else { micros(*age) };
            let entry = Entry::new(claim, EntryState::Waiting, Some(claim.client), now - age, now + micros(GRANT));
            prepared = prepared.write(Write::Entry(name.clone(), claim.id, Some(entry)));
        }
        if writes_row {
            row.waiting = if self.marks { now.max(row.waiting + 1) } else { 0 };
            prepared = prepared.write(Write::Lease(name.clone(), row));
        }
        Ok(prepared)
    }

    // ---- ending

    fn release(&self, release: &Release, now: i64) -> Prepared {
        let (name, token) = (&release.name, release.token.get());
        let answer = |released| Prepared::answer(Response::Released(released));
        let Some(mut row) = self.leases.get(name).cloned() else {
            return answer(Released::NotHeld { lost: 0, token: 0 });
        };
        if let Some(entry) = self.owned(name, release.id).filter(|entry| entry.state == EntryState::Holding(token)) {
            if self.is_entry_locked(name, release.id) && !is_on(Mutation::ReleaseThroughFence) {
                return answer(Released::Locked);
            }
            let kept = (!release.keep_for.is_zero()).then(|| Entry {
                client: None,
                owner: None,
                expires_at: now + micros(release.keep_for),
                ..entry.clone()
            });
            let awaited = self.is_awaited(name, &row);
            let mut prepared = answer(Released::Ended { awaited });
            let is_shared = |(id, e): (LeaseId, &Entry)| e.state == entry.state && id != release.id;
            if !self.entries_of(name).any(is_shared) {
                prepared.ends.push((name.clone(), token, End::Released));
            }
            return prepared.write(Write::Entry(name.clone(), release.id, kept));
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

    fn withdraw(&self, name: &LockName, id: LeaseId, except: Option<FencingToken>) -> Prepared {
        let answer = |withdrawn| Prepared::answer(Response::Withdrawn(withdrawn));
        let row = self.leases.get(name).cloned();
        let stays = |token: i64| except.is_some_and(|except| except.get() == token);
        let holds = row.as_ref().is_some_and(|row| row.holder == Holder::Lease(id) && !stays(row.token));
        let entry = self.owned(name, id).filter(|e| !matches!(e.state, EntryState::Holding(token) if stays(token)));
        let entry_is_locked = entry.is_some() && self.is_entry_locked(name, id);
        if entry_is_locked || (holds && self.is_lease_locked(name, Strength::Ending)) {
            return answer(Withdrawn::Locked);
        }
        let awaited = row.as_ref().is_some_and(|row| {
            let others = self.entries_of(name).any(|(i, e)| i != id && e.state == EntryState::Waiting);
            others || (self.marks && row.waiting != 0)
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

    fn evict(&self, name: &LockName, token: i64) -> Prepared {
        let answer = |evicted| Prepared::answer(Response::Evicted(evicted));
        let Some(mut row) = self.leases.get(name).cloned() else {
            return answer(Amended::NotHeld);
        };
        // Acquisitions of one owner from several clients share a token, and end together.
        let ended: Vec<(LeaseId, Option<ClientId>)> = self
            .entries_of(name)
            .filter(|(_, entry)| entry.state == EntryState::Holding(token))
            .map(|(id, entry)| (id, entry.client))
            .collect();
        // What was released, and is kept from others, is taken away from nobody.
        let is_owned = |(_, e): (LeaseId, &Entry)| e.state == EntryState::Holding(token) && e.owner.is_some();
        let is_lost = self.entries_of(name).any(is_owned) || matches!(row.holder, Holder::Lease(_));
        let is_alone = matches!(row.holder, Holder::Lease(_) | Holder::Kept) && row.token == token;
        if !is_alone && ended.is_empty() {
            return answer(Amended::NotHeld);
        }
        let losers: Vec<ClientId> = if is_alone {
            row.client.into_iter().collect()
        } else {
            ended.iter().filter_map(|(_, client)| *client).collect()
        };
        let notices = if is_on(Mutation::EvictInSilence) { Some(Vec::new()) } else { self.notices(&losers) };
        let is_locked =
            self.is_lease_locked(name, Strength::Ending) || ended.iter().any(|(id, _)| self.is_entry_locked(name, *id));
        let Some(notices) = notices.filter(|_| !is_locked) else {
            return answer(Amended::Locked);
        };
        let mut prepared = answer(Amended::Done);
        prepared.writes = notices;
        if is_alone {
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

    fn transit(&self, transition: &Transition, now: i64) -> Prepared {
        let changed = self.changed(transition, now);
        changed.unwrap_or_else(|| Prepared::answer(Response::Transitioned(None)))
    }

    fn changed(&self, transition: &Transition, now: i64) -> Option<Prepared> {
        let Transition { name, seen, given_up, expired, change, is_last } = transition;
        let mut row = self.leases.get(name)?.clone();
        let is_same = row.holder == seen.holder && row.token == seen.token;
        if !is_same || (*is_last && row.waiting != seen.waiting) {
            return None;
        }
        let mut prepared = Prepared::answer(Response::Transitioned(Some(Vec::new())));
        let mut losers = Vec::new();
        let ends_row = match row.holder {
            Holder::Lease(_) if given_up.is_some() => {
                prepared.ends.push((name.clone(), row.token, End::Released));
                true
            }
            Holder::Lease(_) | Holder::Kept => {
                let has_expired = self.row_of(&row, now).remaining.is_none() || is_on(Mutation::TakeOverUnchecked);
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
            let has_expired = left(self.entry_until(entry), now).is_none() || is_on(Mutation::TakeOverUnchecked);
            if !has_expired || self.is_entry_locked(name, *id) {
                return None;
            }
            if let EntryState::Holding(token) = entry.state {
                // An entry without an owner was released before, and only kept the name from others. Where acquisitions of one
                // owner share a token, the last of them counts.
                let is_shared = |(other, e): (LeaseId, &Entry)| e.state == entry.state && !expired.contains(&other);
                losers.extend(entry.client);
                if entry.owner.is_some() && !self.entries_of(name).any(is_shared) {
                    row.lost = row.lost.max(token);
                    prepared.ends.push((name.clone(), token, End::TakenOver));
                }
            }
            prepared = prepared.write(Write::Entry(name.clone(), *id, None));
        }
        let sharers_stay = row.holder == Holder::Entries
            && self
                .entries_of(name)
                .any(|(id, e)| e.state != EntryState::Waiting && e.mode != Mode::Exclusive && !expired.contains(&id));
        let is_plain = sharers_stay && matches!(change, HolderChange::Shared(_) | HolderChange::None);
        let strength = if is_plain { Strength::Plain } else { Strength::Ending };
        if self.is_lease_locked(name, strength) && !is_on(Mutation::TransitThroughFence) {
            return None;
        }
        // An acquisition that has joined since raises no token.
        let mut staying =
            self.entries_of(name).filter(|(id, e)| e.state != EntryState::Waiting && !expired.contains(id));
        let stands_against = match change {
            HolderChange::None => false,
            HolderChange::Shared(_) => staying.any(|(_, entry)| entry.mode == Mode::Exclusive),
            HolderChange::Claim(claim) if claim.mode != Mode::Exclusive => {
                staying.any(|(_, entry)| entry.mode == Mode::Exclusive)
            }
            HolderChange::Free | HolderChange::Exclusive(_) | HolderChange::Claim(_) => staying.next().is_some(),
        };
        if stands_against {
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
                if self.entries_of(name).any(|(id, e)| e.state == EntryState::Waiting && !expired.contains(&id)) =>
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

    fn extend(&self, extension: &Extension, now: i64) -> Prepared {
        let Extension { name, id, renamed, token, lasts, ttl, keeper } = extension;
        let answer = |extended| Prepared::answer(Response::Extended(extended));
        let (ttl, expires_at) = (ttl.map_or(0, micros), now + micros(*lasts));
        let kept_by = |client: Option<ClientId>| match keeper {
            Keeper::Same => client,
            Keeper::Client(client) => Some(*client),
            Keeper::NotThisClient(other) => client.filter(|client| client != other),
        };
        // What this client keeps may seem to have expired: its next heartbeat would move the end.
        let counts = |until, client: Option<ClientId>| {
            let is_let_go = matches!(keeper, Keeper::NotThisClient(other) if client == Some(*other));
            is_let_go || left(until, now).is_some()
        };
        let is_named = |other: LeaseId| id.is_none_or(|id| id == other || *renamed == Some(other));
        // Acquisitions of one owner from several clients share a token.
        let is_meant = |(other, e): &(LeaseId, &Entry)| {
            is_named(*other) && e.state == EntryState::Holding(token.get()) && e.owner.is_some()
        };
        let mut meant = self.entries_of(name).filter(is_meant).peekable();
        if meant.peek().is_some() {
            let valid: Vec<(LeaseId, &Entry)> = meant.filter(|(_, e)| counts(self.entry_until(e), e.client)).collect();
            if valid.is_empty() {
                return answer(Amended::NotHeld);
            }
            // The identity is a part of the key of an entry, which a fence keeps as it is.
            let strength = |id| if renamed.is_some_and(|to| to != id) { Strength::Ending } else { Strength::Plain };
            if valid.iter().any(|(id, _)| self.is_locked(&Key::Entry(name.clone(), *id), strength(*id))) {
                return answer(Amended::Locked);
            }
            return valid.into_iter().fold(answer(Amended::Done), |prepared, (id, entry)| {
                let (ttl, expires_at) = (entry.ttl.max(ttl), entry.expires_at.max(expires_at));
                let longer = Entry { client: kept_by(entry.client), ttl, expires_at, ..entry.clone() };
                let id_now = renamed.unwrap_or(id);
                let gone = (id_now != id).then(|| Write::Entry(name.clone(), id, None));
                let prepared = gone.into_iter().fold(prepared, Prepared::write);
                prepared.write(Write::Entry(name.clone(), id_now, Some(longer)))
            });
        }
        let held_as_meant = |holder| matches!(holder, Holder::Lease(other) if is_named(other));
        let row = self.leases.get(name).filter(|row| held_as_meant(row.holder) && row.token == token.get());
        match (row, id) {
            (None, Some(id)) if is_on(Mutation::ExtendReleased) => match self.leases.get(name) {
                Some(row) if row.token == token.get() && row.holder == Holder::Nobody => {
                    let client = kept_by(None);
                    let again = Lease { holder: Holder::Lease(*id), client, ttl, expires_at, ..row.clone() };
                    answer(Amended::Done).write(Write::Lease(name.clone(), again))
                }
                _ => answer(Amended::NotHeld),
            },
            (Some(row), _) if counts(self.valid_until(row.expires_at, row.client, row.ttl), row.client) => {
                if self.is_lease_locked(name, Strength::Plain) {
                    return answer(Amended::Locked);
                }
                let (ttl, expires_at) = (row.ttl.max(ttl), row.expires_at.max(expires_at));
                let holder = renamed.map_or(row.holder, Holder::Lease);
                let longer = Lease { holder, client: kept_by(row.client), ttl, expires_at, ..row.clone() };
                answer(Amended::Done).write(Write::Lease(name.clone(), longer))
            }
            _ => answer(Amended::NotHeld),
        }
    }

    fn downgrade(&self, name: &LockName, id: LeaseId, token: i64) -> Prepared {
        let answer = |downgraded| Prepared::answer(Response::Downgraded(downgraded));
        let shares = |entry: &Entry| entry.state == EntryState::Holding(token) && entry.mode == Mode::READ;
        if self.owned(name, id).is_some_and(shares) {
            return answer(Amended::Done);
        }
        // Its owner has entered more than once, and this acquisition is the only one left.
        let only = self.owned(name, id).filter(|entry| {
            let others =
                self.entries_of(name).filter(|(other, entry)| *other != id && entry.state != EntryState::Waiting);
            entry.state == EntryState::Holding(token) && entry.mode == Mode::Exclusive && others.count() == 0
        });
        if let (Some(entry), Some(row)) = (only, self.leases.get(name)) {
            if self.is_lease_locked(name, Strength::Ending) || self.is_entry_locked(name, id) {
                return answer(Amended::Locked);
            }
            let entry = Entry { mode: Mode::READ, ..entry.clone() };
            let row = Lease { owner: None, ..row.clone() };
            return answer(Amended::Done)
                .write(Write::Entry(name.clone(), id, Some(entry)))
                .write(Write::Lease(name.clone(), row));
        }
        let Some(mut row) = self.held_alone(name, id, token) else {
            return answer(Amended::NotHeld);
        };
        if self.is_lease_locked(name, Strength::Ending) {
            return answer(Amended::Locked);
        }
        let entry = Entry {
            client: row.client,
            owner: row.owner,
            is_kept: row.client.is_some(),
            mode: Mode::READ,
            state: EntryState::Holding(token),
            arrived: 0,
            ttl: row.ttl,
            expires_at: row.expires_at,
        };
        (row.holder, row.client, row.owner) = (Holder::Entries, None, None);
        answer(Amended::Done).write(Write::Entry(name.clone(), id, Some(entry))).write(Write::Lease(name.clone(), row))
    }

    fn raise(&self, name: &LockName, id: LeaseId, token: i64, to: i64) -> Prepared {
        let answer = |raised| Prepared::answer(Response::Raised(raised));
        if self.held_alone(name, id, to).is_some() {
            return answer(Amended::Done);
        }
        match self.held_alone(name, id, token) {
            Some(_) if self.is_lease_locked(name, Strength::Ending) => answer(Amended::Locked),
            Some(row) if to > token => {
                answer(Amended::Done).write(Write::Lease(name.clone(), Lease { token: to, ..row }))
            }
            _ => answer(Amended::NotHeld),
        }
    }

    /// The row of a name that one lease holds with this token.
    fn held_alone(&self, name: &LockName, id: LeaseId, token: i64) -> Option<Lease> {
        self.leases.get(name).filter(|row| row.holder == Holder::Lease(id) && row.token == token).cloned()
    }
}
