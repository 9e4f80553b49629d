//! Compares a database with the model: random requests must give equal responses and equal tables.
//!
//! Both sides run on the clock of this host, and the model takes over the tables of the database
//! after each request, so moments differ by the time between two statements at most. Time passes by
//! moving all moments of both sides back, by multiples of five seconds, while everything ends two
//! or three seconds beside such a multiple. So no answer depends on how fast this machine is.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant, SystemTime};

use super::memory::{Client, Entry, Key, Lease, Memory};
use super::micros;
use crate::engine::policy::{Decision, decide};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{
    Claim, ClientId, Enqueue, EntryState, Extension, GivenUp, Granted, Grantee, Holder, HolderChange, HolderNow,
    Joined, Keeper, LeaseId, LeaseRow, Mode, Presence, Release, Released, Request, Response, Transition,
};
use crate::random::Random;
use crate::token::FencingToken;

/// How far two equal times may differ.
const TOLERANCE: i64 = 1_500_000;

/// A longer sequence is not compared any more.
const SEQUENCE: Duration = Duration::from_secs(1);

/// The requests of one sequence.
const REQUESTS: u64 = 40;

/// The rows of some names and clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tables {
    pub(crate) clients: BTreeMap<ClientId, Client>,
    pub(crate) leases: BTreeMap<LockName, Lease>,
    pub(crate) entries: BTreeMap<(LockName, LeaseId), Entry>,
}

/// A real database under test.
pub(crate) trait Database {
    /// Whether the row of a name has a mark for waiters.
    const MARKS: bool;
    /// Whether the database locks single rows.
    const LOCKS_ROWS: bool;
    /// The resolution of its clock.
    const TICK: Duration;

    /// Carries out a request, on one of several connections.
    async fn execute(&mut self, connection: usize, request: &Request) -> Result<Response, sqlx::Error>;

    /// Begins a fenced transaction on a connection of its own. Returns `false` if the holding has
    /// ended.
    async fn fence(&mut self, name: &LockName, id: LeaseId, token: FencingToken) -> bool;

    /// Locks a row exclusively, in a transaction on a connection of its own.
    async fn lock(&mut self, key: &Key);

    /// Ends the transactions of [`fence`](Self::fence) and [`lock`](Self::lock).
    async fn unlock(&mut self);

    /// Moves all moments in these rows back: `beat_at`, `expires_at`, `arrived_at`, `acquired_at`,
    /// and `token`, `waiting` and `lost` where they are not zero.
    async fn move_back(&mut self, names: &[LockName], clients: &[ClientId], by: Duration);

    async fn tables(&mut self, names: &[LockName], clients: &[ClientId]) -> Tables;
}

/// Compares a database with the model over `SQLOCK_REQUESTS` requests.
pub(crate) async fn compare<D: Database>(database: &mut D) {
    let number = |variable: &str| std::env::var(variable).ok()?.parse::<u64>().ok();
    let wanted = number("SQLOCK_REQUESTS").unwrap_or(4_000);
    let mut seed = number("SQLOCK_SEED").unwrap_or(1);
    let (mut compared, mut cut_short) = (BTreeMap::new(), 0);
    let started = Instant::now();
    while compared.values().sum::<u64>() < wanted {
        let mut sequence = Sequence::new(seed, D::MARKS);
        if let Err(difference) = sequence.run(database).await {
            panic!("seed {seed}: {difference}\n{}", sequence.story);
        }
        for verb in sequence.verbs {
            *compared.entry(verb).or_insert(0) += 1;
        }
        cut_short += u64::from(sequence.is_cut_short);
        seed += 1;
    }
    let total: u64 = compared.values().sum();
    println!("{total} requests alike in {:?} ({cut_short} sequences cut short): {compared:?}", started.elapsed());
}

struct Sequence {
    random: Random,
    model: Memory,
    names: Vec<LockName>,
    clients: Vec<ClientId>,
    owners: Vec<Owner>,
    /// Every identity so far.
    ids: Vec<LeaseId>,
    next_id: u128,
    transaction: u64,
    verbs: Vec<String>,
    story: String,
    is_cut_short: bool,
}

/// Microseconds since the Unix epoch.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    i64::try_from(since.as_micros()).expect("before the year 200000")
}

impl Sequence {
    fn new(seed: u64, marks: bool) -> Self {
        // The names and ids differ from those of earlier runs.
        let run = now() as u128;
        let owner = |n: u64| format!("{:032x}", u128::from(seed) << 32 | u128::from(n)).parse().expect("an owner");
        let name = |letter: char| LockName::new(format!("{run:x}/{seed}/{letter}")).expect("a name");
        Self {
            random: Random::new(seed),
            model: Memory::new(marks),
            names: ['a', 'b'].map(name).to_vec(),
            clients: (1..=3).map(|n| ClientId::from_u128(run << 64 | u128::from(seed) << 8 | n)).collect(),
            owners: (1..=3).map(owner).collect(),
            ids: Vec::new(),
            next_id: run << 64 | u128::from(seed) << 20,
            transaction: 0,
            verbs: Vec::new(),
            story: String::new(),
            is_cut_short: false,
        }
    }

    async fn run<D: Database>(&mut self, database: &mut D) -> Result<(), String> {
        let started = Instant::now();
        for _ in 0..REQUESTS {
            let result = self.step(database).await;
            if started.elapsed() > SEQUENCE {
                self.is_cut_short = true;
                break;
            }
            result?;
        }
        database.unlock().await;
        Ok(())
    }

    async fn step<D: Database>(&mut self, database: &mut D) -> Result<(), String> {
        match self.random.below(100) {
            0..8 => self.move_back(database).await,
            8..14 if D::LOCKS_ROWS => self.lock(database).await,
            14..18 if D::LOCKS_ROWS => {
                database.unlock().await;
                (1..=self.transaction).for_each(|transaction| self.model.unlock(transaction));
                writeln!(self.story, "all transactions end").expect("a text");
                Ok(())
            }
            _ => self.request(database).await,
        }
    }

    async fn move_back<D: Database>(&mut self, database: &mut D) -> Result<(), String> {
        // A locked row cannot be written.
        database.unlock().await;
        (1..=self.transaction).for_each(|transaction| self.model.unlock(transaction));
        let by = Duration::from_secs(5 * (1 + self.random.below(4)));
        database.move_back(&self.names, &self.clients, by).await;
        writeln!(self.story, "{by:?} pass").expect("a text");
        self.take_over(database.tables(&self.names, &self.clients).await);
        Ok(())
    }

    async fn lock<D: Database>(&mut self, database: &mut D) -> Result<(), String> {
        self.transaction += 1;
        let name = self.name();
        if self.random.permille(700) {
            let Some((id, token)) = self.holding(&name) else {
                return Ok(());
            };
            let Ok(is_fenced) = self.model.fence(self.transaction, &name, id, token) else {
                return Ok(());
            };
            writeln!(self.story, "a transaction is fenced by {id} of {name}: {is_fenced}").expect("a text");
            let really = database.fence(&name, id, token).await;
            return if really == is_fenced { Ok(()) } else { Err(format!("the fence: {really}")) };
        }
        let mut keys: Vec<Key> = self.model.clients.keys().copied().map(Key::Client).collect();
        keys.extend(self.model.leases.keys().cloned().map(Key::Lease));
        keys.extend(self.model.entries.keys().cloned().map(|(name, id)| Key::Entry(name, id)));
        if keys.is_empty() {
            return Ok(());
        }
        let key = keys.swap_remove(self.random.below(keys.len() as u64) as usize);
        if self.model.lock(self.transaction, key.clone()) {
            writeln!(self.story, "a transaction locks {key:?}").expect("a text");
            database.lock(&key).await;
        }
        Ok(())
    }

    async fn request<D: Database>(&mut self, database: &mut D) -> Result<(), String> {
        let request = self.any_request();
        self.transaction += 1;
        tokio::time::sleep(D::TICK).await;
        let before = self.tables();
        let at = now();
        let Ok(prepared) = self.model.prepare(self.transaction, at, &request) else {
            return Ok(());
        };
        let expected = self.model.commit(self.transaction, at, prepared);
        writeln!(self.story, "{request:?}\n    expected: {expected:?}").expect("a text");
        let connection = self.random.below(3) as usize;
        let response = database.execute(connection, &request).await.map_err(|error| format!("{error}"))?;
        writeln!(self.story, "    answered: {response:?}").expect("a text");
        let tables = database.tables(&self.names, &self.clients).await;
        let changed = self.tables();
        if !is_alike(&expected, &response) {
            return Err(format!("the answer differs; tables before: {before:#?}"));
        }
        if let Some((id, token)) = granted(&request, &response)
            .into_iter()
            .find(|(id, token)| !holds(&tables, *id, *token) && holds(&changed, *id, token_of(&changed, *id)))
        {
            return Err(format!("{id} was granted {token}, and the tables say otherwise: {tables:#?}"));
        }
        if let Some(difference) = difference(&before, &changed, &tables) {
            return Err(format!("{difference}\ntables before: {before:#?}"));
        }
        let verb = format!("{request:?}");
        self.verbs.push(verb.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned());
        self.take_over(tables);
        Ok(())
    }

    fn tables(&self) -> Tables {
        let Memory { clients, leases, entries, .. } = &self.model;
        Tables { clients: clients.clone(), leases: leases.clone(), entries: entries.clone() }
    }

    fn take_over(&mut self, tables: Tables) {
        (self.model.clients, self.model.leases, self.model.entries) = (tables.clients, tables.leases, tables.entries);
    }

    // ---- the requests

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.random.below(from.len() as u64) as usize].clone()
    }

    fn name(&mut self) -> LockName {
        self.pick(&self.names.clone())
    }

    fn client(&mut self) -> ClientId {
        self.pick(&self.clients.clone())
    }

    fn ttl(&mut self) -> Duration {
        Duration::from_millis(self.pick(&[7_500, 12_500, 32_500]))
    }

    fn new_id(&mut self) -> LeaseId {
        self.next_id += 1;
        let id = LeaseId::from_u128(self.next_id);
        self.ids.push(id);
        id
    }

    /// Returns a new id, or rarely one that was used before.
    fn id(&mut self) -> LeaseId {
        if self.ids.is_empty() || self.random.permille(850) { self.new_id() } else { self.pick(&self.ids.clone()) }
    }

    fn claim(&mut self, name: &LockName) -> Claim {
        let mode = match self.random.below(20) {
            0..11 => Mode::Exclusive,
            11..17 => Mode::READ,
            _ => Mode::Shared { units: 1 + self.random.below(2) as u32, permits: 3 },
        };
        Claim {
            name: name.clone(),
            id: self.id(),
            owner: self.pick(&self.owners.clone()),
            client: self.client(),
            is_kept: self.random.permille(750),
            mode,
            ttl: self.ttl(),
            holder: "differential/1".into(),
            label: "a label".into(),
        }
    }

    /// Returns a holding of the name.
    fn holding(&mut self, name: &LockName) -> Option<(LeaseId, FencingToken)> {
        let row = self.model.leases.get(name)?;
        let mut all: Vec<(LeaseId, i64)> = self
            .model
            .entries
            .iter()
            .filter(|((n, _), _)| n == name)
            .filter_map(|((_, id), entry)| match entry.state {
                EntryState::Holding(token) => Some((*id, token)),
                EntryState::Waiting => None,
            })
            .collect();
        if let Holder::Lease(id) = row.holder {
            all.push((id, row.token));
        }
        if all.is_empty() {
            return None;
        }
        let (id, token) = self.pick(&all);
        Some((id, FencingToken::new(token)?))
    }

    /// Returns a holding of the name, or rarely one that has ended.
    fn holding_or_none(&mut self, name: &LockName) -> (LeaseId, FencingToken) {
        let held = self.holding(name);
        let row = self.model.leases.get(name).map_or(1, |row| row.token.max(1));
        let (id, token) = held.unwrap_or_else(|| (LeaseId::from_u128(7), FencingToken::new(row).expect("positive")));
        match self.random.below(20) {
            0 => (self.id(), token),
            1 => (id, FencingToken::new((token.get() - 1).max(1)).expect("positive")),
            _ => (id, token),
        }
    }

    /// Returns an id that is in use for the name, or rarely another one.
    fn standing(&mut self, name: &LockName) -> LeaseId {
        let mut all: Vec<LeaseId> = self.model.entries.keys().filter(|(n, _)| n == name).map(|(_, id)| *id).collect();
        if let Some(Holder::Lease(id)) = self.model.leases.get(name).map(|row| row.holder) {
            all.push(id);
        }
        if all.is_empty() || self.random.permille(100) { self.id() } else { self.pick(&all) }
    }

    fn any_request(&mut self) -> Request {
        let name = self.name();
        match self.random.below(120) {
            0..4 => Request::Register { client: self.client() },
            4..10 => Request::Beat { client: self.client() },
            10..26 => Request::Acquire(self.claim(&name)),
            26..34 => {
                let mut claim = self.claim(&name);
                if let Some(owner) = self.model.leases.get(&name).and_then(|row| row.owner)
                    && self.random.permille(800)
                {
                    claim.owner = owner;
                }
                Request::Join(claim)
            }
            34..50 => {
                let count = 1 + self.random.below(3);
                let client = self.client();
                let mut entries: Vec<Enqueue> = (0..count)
                    .map(|i| {
                        let claim = Claim { client, ..self.claim(&name) };
                        Enqueue { claim, age: Duration::from_secs(5 * (count - i - 1)) }
                    })
                    .collect();
                let mut seen = Vec::new();
                entries.retain(|entry| {
                    !seen.contains(&entry.claim.id) && {
                        seen.push(entry.claim.id);
                        true
                    }
                });
                Request::Enqueue(entries)
            }
            50..66 => {
                let (id, token) = self.holding_or_none(&name);
                let keep_for = if self.random.permille(800) { Duration::ZERO } else { self.ttl() };
                let next = (keep_for.is_zero() && self.random.permille(400)).then(|| {
                    // A client hands a name over only to an exclusive claim.
                    let id = self.new_id();
                    Claim { mode: Mode::Exclusive, id, ..self.claim(&name) }
                });
                Request::Release(Release { name, id, token, keep_for, next })
            }
            66..74 => {
                let except = if self.random.permille(300) { self.holding(&name) } else { None };
                Request::Withdraw { id: self.standing(&name), name, except: except.map(|(_, token)| token) }
            }
            74..79 => {
                let mut ids: Vec<LeaseId> = (0..=self.random.below(3)).map(|_| self.standing(&name)).collect();
                ids.sort();
                ids.dedup();
                Request::Poll { name, ids }
            }
            79..84 => Request::Read { name, limit: self.pick(&[1, 2, 32]) },
            84..104 => self.transition(&name).map_or(Request::Read { name, limit: 32 }, Request::Transition),
            104..111 => {
                let (id, token) = self.holding_or_none(&name);
                let (ttl, client) = (self.ttl(), self.client());
                let keeper = self.pick(&[Keeper::Same, Keeper::Client(client), Keeper::NotThisClient(client)]);
                // Acquisitions of one owner share a token, and only one of them can be renamed.
                let renamed = if self.random.permille(200) { Some(self.new_id()) } else { None };
                let id = (renamed.is_some() || !self.random.permille(200)).then_some(id);
                let lasts = self.ttl();
                let ttl = self.random.permille(700).then_some(ttl);
                Request::Extend(Extension { name, id, renamed, token, lasts, ttl, keeper })
            }
            111..114 => {
                let (id, token) = self.holding_or_none(&name);
                Request::Downgrade { name, id, token }
            }
            114..116 => {
                let (id, token) = self.holding_or_none(&name);
                let to = FencingToken::new(token.get() + self.pick(&[20_000_000, 20_000_000, -1, 0])).unwrap_or(token);
                Request::Raise { name, id, token, to }
            }
            _ => {
                let (_, token) = self.holding_or_none(&name);
                Request::Evict { name, token }
            }
        }
    }

    /// Returns a transition as a client decides it, or rarely with a change in the row or in the
    /// transition.
    fn transition(&mut self, name: &LockName) -> Option<Transition> {
        let transaction = self.transaction;
        let read = Request::Read { name: name.clone(), limit: self.pick(&[2, 32]) };
        let prepared = self.model.prepare(transaction, now(), &read).ok()?;
        let Response::Read(Some(queue)) = prepared.response else {
            return None;
        };
        let given_up = if self.random.permille(500) { self.holding(name) } else { None };
        let given_up = given_up.map(|(id, token)| GivenUp { id, token });
        let claim = if self.random.permille(400) { Some(self.claim(name)) } else { None };
        let client = self.client();
        let mut transition = match decide(name, &queue, client, given_up, claim.as_ref()) {
            Decision::Apply(transition) => transition,
            Decision::Wait(_) => {
                let row = &queue.row;
                let waiting: Vec<Grantee> =
                    queue.waiting().map(|entry| Grantee { id: entry.id, ttl: entry.ttl }).collect();
                let mut changes = vec![HolderChange::None, HolderChange::Free];
                changes.extend(claim.map(|claim| HolderChange::Claim(Box::new(claim))));
                changes.extend(waiting.first().map(|first| HolderChange::Exclusive(*first)));
                changes.extend((!waiting.is_empty()).then_some(HolderChange::Shared(waiting)));
                Transition {
                    name: name.clone(),
                    seen: crate::protocol::Seen { holder: row.holder, token: row.token, waiting: row.waiting },
                    given_up: None,
                    expired: Vec::new(),
                    change: self.pick(&changes),
                    is_last: self.random.permille(300),
                }
            }
        };
        match self.random.below(30) {
            0 => transition.seen.token -= 1,
            1 => transition.seen.waiting += 1,
            2 => transition.seen.holder = Holder::Entries,
            3 => transition.is_last = !transition.is_last,
            4 if matches!(transition.change, HolderChange::None | HolderChange::Free) => {
                transition.expired.extend(queue.entries.first().map(|entry| entry.id));
            }
            5 => transition.expired.clear(),
            6 => transition.given_up = None,
            _ => {}
        }
        transition.expired.sort();
        transition.expired.dedup();
        Some(transition)
    }
}

// ---- the comparison

fn is_near(a: i64, b: i64) -> bool {
    (a - b).abs() < TOLERANCE
}

fn is_near_time(a: Duration, b: Duration) -> bool {
    is_near(micros(a), micros(b))
}

fn is_near_remaining(a: Option<Duration>, b: Option<Duration>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => is_near_time(a, b),
        (a, b) => a == b,
    }
}

fn is_near_token(a: FencingToken, b: FencingToken) -> bool {
    is_near(a.get(), b.get())
}

fn is_same_row(a: &LeaseRow, b: &LeaseRow) -> bool {
    is_near_remaining(a.remaining, b.remaining) && LeaseRow { remaining: a.remaining, ..b.clone() } == *a
}

fn is_same_presence(a: &Presence, b: &Presence) -> bool {
    match (a, b) {
        (Presence::Holding { token: a, remaining: c }, Presence::Holding { token: b, remaining: d }) => {
            a == b && is_near_remaining(*c, *d)
        }
        (a, b) => a == b,
    }
}

fn is_alike(model: &Response, database: &Response) -> bool {
    use Response as R;
    let same_holder = |a: &HolderNow, b: &HolderNow| match (a, b) {
        (HolderNow::Valid { owner: a, remaining: c }, HolderNow::Valid { owner: b, remaining: d }) => {
            // The owner may be left out where it does not matter.
            (a == b || b.is_none()) && is_near_time(*c, *d)
        }
        (a, b) => a == b,
    };
    let same_grant = |a: &Granted, b: &Granted| a.id == b.id && is_near_token(a.token, b.token);
    match (model, database) {
        (R::Acquired(Ok(a)), R::Acquired(Ok(b))) => is_near_token(*a, *b),
        (R::Acquired(Err(a)), R::Acquired(Err(b))) | (R::Enqueued(a), R::Enqueued(b)) => same_holder(a, b),
        (R::Joined(Joined::Done(a)), R::Joined(Joined::Done(b))) => a == b,
        (R::Released(Released::ToNext(a)), R::Released(Released::ToNext(b))) => is_near_token(*a, *b),
        (R::Released(Released::ToEntry(a)), R::Released(Released::ToEntry(b))) => same_grant(a, b),
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
fn granted(request: &Request, response: &Response) -> Vec<(LeaseId, i64)> {
    let of = |grant: &Granted| (grant.id, grant.token.get());
    match (request, response) {
        (Request::Acquire(claim), Response::Acquired(Ok(token))) => vec![(claim.id, token.get())],
        (Request::Release(Release { next: Some(next), .. }), Response::Released(Released::ToNext(token))) => {
            vec![(next.id, token.get())]
        }
        (_, Response::Released(Released::ToEntry(grant))) => vec![of(grant)],
        (_, Response::Transitioned(Some(grants))) => grants.iter().map(of).collect(),
        _ => Vec::new(),
    }
}

fn token_of(tables: &Tables, id: LeaseId) -> i64 {
    let entry = tables.entries.iter().find_map(|((_, i), entry)| match entry.state {
        EntryState::Holding(token) if *i == id => Some(token),
        _ => None,
    });
    let row = tables.leases.values().find(|row| row.holder == Holder::Lease(id)).map(|row| row.token);
    entry.or(row).unwrap_or(0)
}

/// One id may be in use for several names, with another token in each.
fn holds(tables: &Tables, id: LeaseId, token: i64) -> bool {
    let entries = tables.entries.iter().filter(|((_, i), _)| *i == id);
    let rows = tables.leases.values().filter(|row| row.holder == Holder::Lease(id));
    let mut tokens = entries.map(|(_, entry)| entry.state).chain(rows.map(|row| EntryState::Holding(row.token)));
    token != 0 && tokens.any(|state| state == EntryState::Holding(token))
}

/// Compares a time with its expected value: unchanged, or changed to about the same.
fn is_moved(before: Option<i64>, model: i64, database: i64) -> bool {
    if before == Some(model) { database == model } else { is_near(model, database) && before != Some(database) }
}

fn difference(before: &Tables, model: &Tables, database: &Tables) -> Option<String> {
    let differs = |what: String, model: &dyn std::fmt::Debug, database: &dyn std::fmt::Debug| {
        Some(format!("{what} differs\n    expected: {model:?}\n    found:    {database:?}"))
    };
    if model.clients.keys().ne(database.clients.keys()) {
        return differs("which clients are there".into(), &model.clients.keys(), &database.clients.keys());
    }
    for (id, m) in &model.clients {
        let (d, b) = (&database.clients[id], before.clients.get(id));
        if m.notice != d.notice || !is_moved(b.map(|b| b.beat_at), m.beat_at, d.beat_at) {
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
            && is_moved(b.map(|b| b.lost), m.lost, d.lost);
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
        let is_same = (m.owner, m.client, m.is_kept, m.mode, m.ttl) == (d.owner, d.client, d.is_kept, d.mode, d.ttl)
            && is_moved(b.map(token), token(m), token(d))
            && is_moved(b.map(|b| b.arrived), m.arrived, d.arrived)
            && is_moved(b.map(|b| b.expires_at), m.expires_at, d.expires_at);
        if !is_same {
            return differs(format!("entry {key:?}"), m, d);
        }
    }
    None
}
