//! A server over the model: connections, a clock, and faults on demand.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use super::{Entry, Memory, TransactionId};
use crate::backend::records::{Errand, Findings};
use crate::backend::store::{AdminStore, LeaseStore, RecordStore, RowStore};
use crate::backend::{
    Backend, BoxFuture, ListedHolder, ListedWaiter, Names, SessionHolder, SessionLocks, Store, StoreFuture, SweepRange,
    Swept, micros,
};
use crate::clock::{CENTURY, Clock};
use crate::error::{Error, Result};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{Claim, ClientId, EntryState, Holder, HolderChange, LeaseId, Mode, Request, Response};
use crate::token::FencingToken;

/// What the clock shows when the server starts: microseconds since the Unix epoch.
const EPOCH: i64 = 1_700_000_000_000_000;

/// The stranger, for people.
const STRANGER: &str = "a stranger";

/// See the [module](self). Its clock is that of tokio.
pub(crate) struct MemoryServer {
    started_at: Instant,
    state: Mutex<State>,
}

struct State {
    model: Memory,
    transactions: TransactionId,
    /// What people read about acquisitions: the holder and the label.
    texts: HashMap<LeaseId, (Arc<str>, Arc<str>)>,
    /// The names that a stranger holds, and with which token.
    strangers: BTreeMap<LockName, FencingToken>,
    is_away: bool,
    /// How often it has gone away. Connections from before are dead.
    outages: u64,
    /// How many requests fail from now on.
    failing: u32,
    delay: Duration,
    /// Until when the heartbeats of a client are not answered.
    cut_off: HashMap<ClientId, Instant>,
}

/// A backend whose connections lead to a [`MemoryServer`].
pub(crate) struct MemoryBackend(pub(crate) Arc<MemoryServer>);

struct MemorySession {
    server: Arc<MemoryServer>,
    /// How often the server had gone away when it was opened.
    outages: u64,
}

impl MemoryServer {
    pub(crate) fn new() -> Arc<Self> {
        let state = State {
            model: Memory::new(false),
            transactions: 0,
            texts: HashMap::new(),
            strangers: BTreeMap::new(),
            is_away: false,
            outages: 0,
            failing: 0,
            delay: Duration::ZERO,
            cut_off: HashMap::new(),
        };
        Arc::new(Self { started_at: Instant::now(), state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> i64 {
        EPOCH + micros(self.started_at.elapsed())
    }

    // ---- faults

    /// Lets a stranger hold a name. `false`: another holds it or waits for it.
    pub(crate) fn refuse(&self, name: &LockName) -> bool {
        let (random, now) = (Owner::random(), self.now());
        let claim = Claim {
            name: name.clone(),
            id: LeaseId::from_u128(uuid::Uuid::new_v4().as_u128()),
            owner: random,
            client: ClientId::from_u128(uuid::Uuid::new_v4().as_u128()),
            is_kept: false,
            mode: Mode::Exclusive,
            ttl: CENTURY,
            holder: STRANGER.into(),
            label: "".into(),
        };
        let mut state = self.state();
        match state.execute(now, &Request::Acquire(claim)) {
            Some(Response::Acquired(Ok(token))) => {
                state.strangers.insert(name.clone(), token);
                true
            }
            _ => state.strangers.contains_key(name),
        }
    }

    /// Lets the stranger give the name up.
    pub(crate) fn allow(&self, name: &LockName) {
        let (now, mut state) = (self.now(), self.state());
        if let Some(token) = state.strangers.remove(name) {
            state.execute(now, &Request::Evict { name: name.clone(), token });
        }
    }

    /// Evicts every holder of a name. Returns how many holdings have ended.
    pub(crate) fn evict(&self, name: &LockName) -> usize {
        let (now, mut state) = (self.now(), self.state());
        let tokens = state.model.tokens(name);
        for token in &tokens {
            state.execute(now, &Request::Evict { name: name.clone(), token: *token });
        }
        tokens.len()
    }

    /// Leaves the heartbeats of every client that holds a name unanswered until its lease has expired. Returns how many clients
    /// these are.
    pub(crate) fn expire(&self, name: &LockName) -> usize {
        let (now, mut state) = (self.now(), self.state());
        let keepers = state.model.keepers(name);
        for (client, until) in &keepers {
            let left = u64::try_from(until - now).unwrap_or(0);
            state.cut_off.insert(*client, Instant::now() + Duration::from_micros(left + 1));
        }
        keepers.len()
    }

    pub(crate) fn delay(&self, delay: Duration) {
        self.state().delay = delay;
    }

    pub(crate) fn fail(&self, requests: u32) {
        self.state().failing = requests;
    }

    pub(crate) fn go_away(&self) {
        let mut state = self.state();
        state.is_away = true;
        state.outages += 1;
    }

    pub(crate) fn come_back(&self) {
        self.state().is_away = false;
    }
}

impl State {
    /// Carries out a request in one transaction. `None`: it would wait for another, of which there are none.
    fn execute(&mut self, now: i64, request: &Request) -> Option<Response> {
        for claim in claims(request) {
            self.texts.insert(claim.id, (Arc::clone(&claim.holder), Arc::clone(&claim.label)));
        }
        self.transactions += 1;
        let prepared = self.model.prepare(self.transactions, now, request).ok()?;
        Some(self.model.commit(self.transactions, now, prepared))
    }

    fn text(&self, id: LeaseId) -> (String, String) {
        self.texts.get(&id).map(|(holder, label)| (holder.to_string(), label.to_string())).unwrap_or_default()
    }

    fn waiting<'s>(&'s self, name: &'s LockName, now: i64) -> impl Iterator<Item = (LeaseId, &'s Entry)> {
        let is_live = move |entry: &Entry| self.model.entry_until(entry) > now;
        self.model.entries_named(name).filter(move |(_, e)| e.state == EntryState::Waiting && is_live(e))
    }

    /// The holders of a name.
    fn list(&self, name: &LockName, now: i64) -> Vec<ListedHolder> {
        let waiters = i64::try_from(self.waiting(name, now).count()).unwrap_or(i64::MAX);
        let listed = |id, mode, owner, token: i64, expires_at| {
            let (holder, label) = self.text(id);
            let (name, acquired_at) = (name.as_str().to_owned(), token.min(now));
            ListedHolder {
                name,
                mode,
                owner,
                acquisitions: 1,
                token,
                holder,
                label,
                acquired_at,
                expires_at,
                now,
                waiters,
            }
        };
        let row = self.model.leases.get(name);
        let alone = row.and_then(|row| {
            let id = match row.holder {
                Holder::Lease(id) => id,
                Holder::Kept => LeaseId::from_u128(0),
                Holder::Nobody | Holder::Entries => return None,
            };
            let until = self.model.valid_until(row.expires_at, row.client, row.ttl);
            Some(listed(id, Mode::Exclusive, row.owner, row.token, until))
        });
        let mut by_token: BTreeMap<i64, ListedHolder> = BTreeMap::new();
        for (id, entry) in self.model.entries_named(name) {
            if let EntryState::Holding(token) = entry.state {
                let until = self.model.entry_until(entry);
                let one = listed(id, entry.mode, entry.owner, token, until);
                by_token
                    .entry(token)
                    .and_modify(|other| {
                        other.acquisitions += 1;
                        other.expires_at = other.expires_at.max(until);
                    })
                    .or_insert(one);
            }
        }
        alone.into_iter().chain(by_token.into_values()).filter(|listed| listed.expires_at > now).collect()
    }
}

impl Memory {
    /// The tokens of all holdings of a name.
    fn tokens(&self, name: &LockName) -> Vec<FencingToken> {
        let alone = self.leases.get(name).filter(|row| matches!(row.holder, Holder::Lease(_))).map(|row| row.token);
        let shared = self.entries_named(name).filter_map(|(_, entry)| match entry.state {
            EntryState::Holding(token) => Some(token),
            EntryState::Waiting => None,
        });
        alone.into_iter().chain(shared).filter_map(FencingToken::new).collect()
    }

    /// The clients whose heartbeats keep holdings of a name, and until when those last without another.
    fn keepers(&self, name: &LockName) -> Vec<(ClientId, i64)> {
        let row = self.leases.get(name).filter(|row| matches!(row.holder, Holder::Lease(_)));
        let alone = row.and_then(|row| Some((row.client?, self.valid_until(row.expires_at, row.client, row.ttl))));
        let shared = self.entries_named(name).filter(|(_, entry)| entry.state != EntryState::Waiting);
        let shared = shared.filter_map(|(_, entry)| Some((entry.client?, self.entry_until(entry))));
        alone.into_iter().chain(shared).collect()
    }
}

/// The claims that a request may turn into holdings or entries.
fn claims(request: &Request) -> Vec<&Claim> {
    match request {
        Request::Acquire(claim) | Request::Join(claim) => vec![claim],
        Request::Enqueue(entries) => entries.iter().map(|entry| &entry.claim).collect(),
        Request::Release(release) => release.next.iter().collect(),
        Request::Transition(transition) => match &transition.change {
            HolderChange::Claim(claim) => vec![claim],
            _ => Vec::new(),
        },
        _ => Vec::new(),
    }
}

/// An error that another attempt would not cure.
fn refused(reason: &'static str) -> sqlx::Error {
    sqlx::Error::Configuration(reason.into())
}

impl Backend for MemoryBackend {
    fn connect(&self) -> StoreFuture<'_, Box<dyn Store>> {
        Box::pin(async move {
            let state = self.0.state();
            if state.is_away {
                return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionRefused.into()));
            }
            let session = MemorySession { server: Arc::clone(&self.0), outages: state.outages };
            Ok(Box::new(session) as Box<dyn Store>)
        })
    }

    fn clock(&self) -> Clock {
        Clock::Tokio(self.0.started_at)
    }

    fn max_connections_used(&self) -> usize {
        2
    }

    fn max_batch_len(&self) -> usize {
        1
    }

    fn address(&self) -> String {
        "memory".into()
    }

    fn migrate(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn open_session_locks(&self) -> BoxFuture<'_, Result<Box<dyn SessionLocks>>> {
        let reason = "it is a model of leases; test session locks on a database";
        Box::pin(async move { Err(Error::Unsupported { what: "a session lock in testing::Memory", reason }) })
    }

    fn session_holders<'a>(&'a self, _: &'a LockName) -> BoxFuture<'a, Result<Vec<SessionHolder>>> {
        Box::pin(async { Ok(Vec::new()) })
    }
}

impl MemorySession {
    /// Lets the time pass that an answer takes, and fails if it is to fail.
    async fn reach(&self) -> Result<(), sqlx::Error> {
        self.check()?;
        let delay = self.server.state().delay;
        if !delay.is_zero() {
            sleep(delay).await;
        }
        self.check()?;
        let mut state = self.server.state();
        if state.failing > 0 {
            state.failing -= 1;
            return Err(refused("a failure on demand"));
        }
        Ok(())
    }

    fn check(&self) -> Result<(), sqlx::Error> {
        let state = self.server.state();
        if state.is_away || state.outages != self.outages {
            return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into()));
        }
        Ok(())
    }

    /// Waits for as long as a client is cut off.
    async fn cut_off(&self, client: ClientId) {
        let until = self.server.state().cut_off.get(&client).copied();
        if let Some(until) = until {
            sleep_until(until).await;
        }
    }
}

impl LeaseStore for MemorySession {
    fn execute<'a>(&'a mut self, request: &'a Request) -> StoreFuture<'a, Response> {
        Box::pin(async move {
            if let Request::Register { client } | Request::Beat { client } = request {
                self.cut_off(*client).await;
            }
            self.reach().await?;
            let now = self.server.now();
            let response = self.server.state().execute(now, request);
            response.ok_or_else(|| refused("a row is locked"))
        })
    }
}

impl AdminStore for MemorySession {
    fn list<'a>(&'a mut self, names: &'a Names) -> StoreFuture<'a, Vec<ListedHolder>> {
        Box::pin(async move {
            self.reach().await?;
            let (now, state) = (self.server.now(), self.server.state());
            let is_meant = |name: &&LockName| match names {
                Names::WithPrefix(prefix) => name.as_str().starts_with(prefix.as_str()),
                Names::One(other) => *name == other,
            };
            Ok(state.model.leases.keys().filter(is_meant).flat_map(|name| state.list(name, now)).collect())
        })
    }

    fn waiters<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, Vec<ListedWaiter>> {
        Box::pin(async move {
            self.reach().await?;
            let (now, state) = (self.server.now(), self.server.state());
            let mut waiting: Vec<_> = state.waiting(name, now).collect();
            waiting.sort_by_key(|(id, entry)| (entry.arrived, *id));
            let waiter = |(id, entry): (LeaseId, &Entry)| {
                let (holder, label) = state.text(id);
                ListedWaiter { id, mode: entry.mode, holder, label, arrived_at: entry.arrived }
            };
            Ok(waiting.into_iter().map(waiter).collect())
        })
    }

    fn sweep<'a>(&'a mut self, _: &'a SweepRange) -> StoreFuture<'a, Swept> {
        Box::pin(async move {
            self.reach().await?;
            Ok(Swept { purged: 0, last: None })
        })
    }
}

impl RowStore for MemorySession {}

impl RecordStore for MemorySession {
    fn record<'a>(&'a mut self, errand: &'a Errand) -> StoreFuture<'a, Findings> {
        Box::pin(async move {
            self.reach().await?;
            match errand {
                Errand::Purge { .. } | Errand::List(_) => Ok(Findings::default()),
                _ => Err(refused("testing::Memory has no records of requests")),
            }
        })
    }
}

impl Store for MemorySession {
    fn close(self: Box<Self>) -> StoreFuture<'static, ()> {
        Box::pin(async { Ok(()) })
    }
}
