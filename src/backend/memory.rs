//! The model of a store: the reference semantics of every request.
//!
//! A request runs in the steps of a real server. It is [prepared](Memory::prepare): it reads the
//! committed rows and locks the rows that it will write. If another transaction has locked them, it
//! waits or gives up. Its writes are [committed](Memory::commit) later, or never. `now` is an
//! argument, in microseconds.

#![cfg_attr(not(test), allow(dead_code, reason = "strangers, fences and the checker belong to the simulation"))]

mod acquire;
mod change;
#[cfg(feature = "testing")]
pub(crate) mod connection;
mod heartbeat;
mod queue;
mod release;
mod row;
#[cfg(feature = "testing")]
pub(crate) mod server;
mod transition;

use std::collections::{BTreeMap, BTreeSet};

use self::row::remaining;
pub(crate) use self::row::{Client, Entry, Lease};
use super::micros;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{AcquisitionId, ClientId, CurrentHolder, EntryState, Holder, LeaseRow, Request, Response};
use crate::token::FencingToken;

/// Identifies a transaction.
pub(crate) type TransactionId = u64;

/// A row that can be locked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    Client(ClientId),
    Lease(LockName),
    Entry(LockName, AcquisitionId),
}

/// A write to a row. `None`: the row is deleted.
#[derive(Debug)]
enum Write {
    Client(ClientId, Client),
    Lease(LockName, Lease),
    Entry(LockName, AcquisitionId, Option<Entry>),
}

/// Why a holding ended, for the checker of the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Released,
    TakenOver,
    Evicted,
}

/// The writes and the response of a prepared request, until it is committed.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) response: Response,
    writes: Vec<Write>,
    ends: Vec<(LockName, i64, End)>,
    /// The response is the holder after the commit.
    reads_holder_after_commit: Option<LockName>,
}

/// The request waits for a row that another transaction has locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MustWait;

#[derive(Default)]
struct Lock {
    exclusive: Option<TransactionId>,
    shared: BTreeSet<TransactionId>,
}

/// The tables of a store and the locks on their rows.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) clients: BTreeMap<ClientId, Client>,
    pub(crate) leases: BTreeMap<LockName, Lease>,
    pub(crate) entries: BTreeMap<(LockName, AcquisitionId), Entry>,
    locks: BTreeMap<Key, Lock>,
    /// As on PostgreSQL: the row of a name has a mark for waiters, and a write that ends no holding
    /// passes fences.
    marks_waiting: bool,
    /// How and when each holding ended, by name and token.
    pub(crate) ends: BTreeMap<(LockName, i64), (End, i64)>,
}

/// The lock that a write needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Strength {
    /// The write ends a holding, and an open fence blocks it.
    Ending,
    /// The write leaves the holder unchanged.
    Plain,
}

impl Prepared {
    fn new(response: Response) -> Self {
        Self { response, writes: Vec::new(), ends: Vec::new(), reads_holder_after_commit: None }
    }

    fn write(mut self, write: Write) -> Self {
        self.writes.push(write);
        self
    }

    /// Returns whether the request takes the name over from the holder in `row`. For the checker of
    /// the simulation.
    pub(crate) fn takes_over(&self, row: &Lease) -> bool {
        self.ends.iter().any(|(_, token, end)| *token == row.token && *end == End::TakenOver)
    }

    /// Returns the rows that stay locked until the commit.
    fn keys(&self) -> impl Iterator<Item = Key> {
        self.writes.iter().map(|write| match write {
            Write::Client(id, _) => Key::Client(*id),
            Write::Lease(name, _) => Key::Lease(name.clone()),
            Write::Entry(name, id, _) => Key::Entry(name.clone(), *id),
        })
    }
}

impl Memory {
    /// Makes an empty store. `marks_waiting`: the row of a name has a mark for waiters, as on
    /// PostgreSQL.
    pub(crate) fn new(marks_waiting: bool) -> Self {
        Self { marks_waiting, ..Self::default() }
    }

    /// Copies the committed rows.
    pub(crate) fn copy(&self) -> Self {
        let Self { clients, leases, entries, marks_waiting, ends, .. } = self;
        let (clients, leases, entries, ends) = (clients.clone(), leases.clone(), entries.clone(), ends.clone());
        Self { clients, leases, entries, ends, locks: BTreeMap::new(), marks_waiting: *marks_waiting }
    }

    // ---- transactions

    /// Evaluates a request, and locks the rows that it will write.
    pub(crate) fn prepare(
        &mut self,
        transaction: TransactionId,
        now: i64,
        request: &Request,
    ) -> Result<Prepared, MustWait> {
        let prepared = match request {
            Request::Register { client } => self.register(*client, now),
            Request::Beat { client } => self.beat(*client, now),
            Request::Acquire(claim) => self.acquire(claim, now),
            Request::Join(claim) => Ok(self.join(claim, now)),
            Request::Enqueue(entries) => self.enqueue(entries, now),
            Request::Release(release) => Ok(self.release(release, now)),
            Request::Withdraw { name, id, except } => Ok(self.withdraw(name, *id, *except)),
            Request::Poll { name, ids } => Ok(Prepared::new(Response::Polled(self.poll(name, ids, now)))),
            Request::Read { name, limit } => Ok(Prepared::new(Response::Read(self.read(name, *limit, now)))),
            Request::Transition(transition) => Ok(self.transition(transition, now)),
            Request::Extend(extension) => Ok(self.extend(extension, now)),
            Request::Downgrade { name, id, token } => Ok(self.downgrade(name, *id, token.get())),
            Request::Raise { name, id, token, to } => Ok(self.raise(name, *id, token.get(), to.get())),
            Request::Evict { name, token } => Ok(self.evict(name, token.get(), now)),
            Request::Ask { name } => Ok(self.ask(name, now)),
        }?;
        // A write waits for another transaction that has written the row: a second insert of a key
        // waits for the first.
        let is_taken = |key: Key| self.locks.get(&key).is_some_and(|lock| lock.exclusive.is_some());
        if prepared.keys().any(is_taken) {
            return Err(MustWait);
        }
        self.lock_rows(transaction, &prepared);
        Ok(prepared)
    }

    fn lock_rows(&mut self, transaction: TransactionId, prepared: &Prepared) {
        for key in prepared.keys() {
            self.locks.entry(key).or_default().exclusive = Some(transaction);
        }
    }

    /// Makes the writes of a transaction visible, and returns its response.
    pub(crate) fn commit(&mut self, transaction: TransactionId, now: i64, prepared: Prepared) -> Response {
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
        self.unlock(transaction);
        match prepared.reads_holder_after_commit {
            Some(name) => Response::Enqueued(self.current_holder(&name, now)),
            None => prepared.response,
        }
    }

    /// Ends a transaction without its writes.
    pub(crate) fn unlock(&mut self, transaction: TransactionId) {
        for lock in self.locks.values_mut() {
            lock.shared.remove(&transaction);
            lock.exclusive = lock.exclusive.filter(|holder| *holder != transaction);
        }
        self.locks.retain(|_, lock| lock.exclusive.is_some() || !lock.shared.is_empty());
    }

    /// Locks a row for a transaction of the application. Returns `false` if the row is locked
    /// already.
    pub(crate) fn lock(&mut self, transaction: TransactionId, key: Key) -> bool {
        let lock = self.locks.entry(key).or_default();
        let is_free = lock.exclusive.is_none() && lock.shared.is_empty();
        if is_free {
            lock.exclusive = Some(transaction);
        }
        is_free
    }

    /// Begins a fenced transaction: the row of the holding stays unchanged until the transaction
    /// ends. Returns `false` if the holding has ended.
    pub(crate) fn fence(
        &mut self,
        transaction: TransactionId,
        name: &LockName,
        id: AcquisitionId,
        token: FencingToken,
    ) -> Result<bool, MustWait> {
        let alone =
            self.leases.get(name).is_some_and(|row| row.holder == Holder::Lease(id) && row.token == token.get());
        let shared = self.owned_entry(name, id).is_some_and(|e| e.state == EntryState::Holding(token.get()));
        let key = match (alone, shared) {
            (true, _) => Key::Lease(name.clone()),
            (false, true) => Key::Entry(name.clone(), id),
            (false, false) => return Ok(false),
        };
        let lock = self.locks.entry(key).or_default();
        if lock.exclusive.is_some() {
            return Err(MustWait);
        }
        lock.shared.insert(transaction);
        Ok(true)
    }

    fn is_locked(&self, key: &Key, strength: Strength) -> bool {
        let passes_fences = strength == Strength::Plain && self.marks_waiting;
        self.locks.get(key).is_some_and(|lock| lock.exclusive.is_some() || (!lock.shared.is_empty() && !passes_fences))
    }

    fn is_lease_locked(&self, name: &LockName, strength: Strength) -> bool {
        self.is_locked(&Key::Lease(name.clone()), strength)
    }

    fn is_entry_locked(&self, name: &LockName, id: AcquisitionId) -> bool {
        self.is_locked(&Key::Entry(name.clone(), id), Strength::Ending)
    }

    // ---- reads

    fn last_heartbeat(&self, client: Option<ClientId>) -> Option<i64> {
        self.clients.get(&client?).map(|client| client.beat_at)
    }

    /// Returns whether the row of a name has a valid holder. For the checker of the simulation.
    pub(crate) fn is_held(&self, name: &LockName, now: i64) -> bool {
        self.leases.get(name).is_some_and(|row| {
            matches!(row.holder, Holder::Lease(_)) && self.expiry_by_rows(row.expires_at, row.client, row.ttl) > now
        })
    }

    /// Returns how long ago a waiting entry expired, in microseconds. For the checker of the
    /// simulation.
    pub(crate) fn dead_for(&self, name: &LockName, id: AcquisitionId, now: i64) -> Option<i64> {
        let entry = self.entries.get(&(name.clone(), id))?;
        let until = self.expiry_by_rows(entry.expires_at, entry.client, micros(GRANT_TTL));
        (until < now).then_some(now - until)
    }

    /// Returns until when a holding or a waiting entry is valid: the later of its own expiry and
    /// its TTL after the heartbeat of its client.
    pub(crate) fn valid_until(&self, expires_at: i64, client: Option<ClientId>, ttl: i64) -> i64 {
        if is_on(Mutation::TakeOverByExpiryAlone) {
            return expires_at;
        }
        self.expiry_by_rows(expires_at, client, ttl)
    }

    fn expiry_by_rows(&self, expires_at: i64, client: Option<ClientId>, ttl: i64) -> i64 {
        self.last_heartbeat(client).map_or(expires_at, |beat_at| expires_at.max(beat_at + ttl))
    }

    /// Returns an entry that has an owner. A released entry that keeps the name unavailable has
    /// none.
    fn owned_entry(&self, name: &LockName, id: AcquisitionId) -> Option<&Entry> {
        self.entries.get(&(name.clone(), id)).filter(|entry| entry.owner.is_some())
    }

    fn entry_until(&self, entry: &Entry) -> i64 {
        let ttl = if entry.state == EntryState::Waiting { micros(GRANT_TTL) } else { entry.ttl };
        self.valid_until(entry.expires_at, entry.client, ttl)
    }

    fn entries_named(&self, name: &LockName) -> impl Iterator<Item = (AcquisitionId, &Entry)> {
        let range = (name.clone(), AcquisitionId::from_u128(0))..=(name.clone(), AcquisitionId::from_u128(u128::MAX));
        self.entries.range(range).map(|((_, id), entry)| (*id, entry))
    }

    fn is_awaited(&self, name: &LockName, row: &Lease) -> bool {
        if self.marks_waiting {
            row.waiting != 0
        } else {
            self.entries_named(name).any(|(_, e)| e.state == EntryState::Waiting)
        }
    }

    fn read_row(&self, row: &Lease, now: i64) -> LeaseRow {
        let until = self.valid_until(row.expires_at, row.client, row.ttl);
        let remaining = matches!(row.holder, Holder::Lease(_) | Holder::Kept).then(|| remaining(until, now)).flatten();
        let Lease { holder, owner, client, token, waiting, lost, asked, .. } = row.clone();
        LeaseRow { holder, owner, client, token, remaining, waiting, lost, asked }
    }

    fn current_holder(&self, name: &LockName, now: i64) -> CurrentHolder {
        match self.leases.get(name).map(|row| self.read_row(row, now)) {
            Some(LeaseRow { holder: Holder::Entries, .. }) => CurrentHolder::Unknown,
            Some(LeaseRow { remaining: Some(remaining), owner, .. }) => CurrentHolder::Valid { owner, remaining },
            _ => CurrentHolder::Vacant,
        }
    }
}
