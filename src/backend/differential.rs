//! Compares a database with the model: random requests must give equal responses and equal tables.
//!
//! Both sides run on the clock of this host, and the model takes over the tables of the database
//! after each request, so moments differ by the time between two statements at most. Time passes by
//! moving all moments of both sides back, by multiples of five seconds, while every expiry is two
//! or three seconds away from such a multiple. So no answer depends on the speed of this machine.

mod comparison;
mod requests;
mod rows;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant, SystemTime};

use self::comparison::{difference, granted, holds, is_alike, token_of};
pub(crate) use self::rows::{read_client, read_entry, read_lease};
use crate::backend::memory::{Client, Entry, Key, Lease, Memory};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{AcquisitionId, ClientId, Request, Response};
use crate::random::Random;
use crate::token::FencingToken;

/// How far two equal times may differ.
const TOLERANCE: i64 = 1_500_000;

/// The longest sequence that is still compared.
const SEQUENCE: Duration = Duration::from_secs(1);

/// The requests of one sequence.
const REQUESTS: u64 = 40;

/// The rows of some names and clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tables {
    pub(crate) clients: BTreeMap<ClientId, Client>,
    pub(crate) leases: BTreeMap<LockName, Lease>,
    pub(crate) entries: BTreeMap<(LockName, AcquisitionId), Entry>,
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
    async fn fence(&mut self, name: &LockName, id: AcquisitionId, token: FencingToken) -> bool;

    /// Locks a row exclusively, in a transaction on a connection of its own.
    async fn lock(&mut self, key: &Key);

    /// Ends the transactions of [`fence`](Self::fence) and [`lock`](Self::lock).
    async fn unlock(&mut self);

    /// Moves all moments in these rows back: `beat_at`, `expires_at`, `arrived_at`, `acquired_at`,
    /// and `token`, `waiting`, `lost` and `asked` where they are not zero.
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
    ids: Vec<AcquisitionId>,
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
        if let (Request::Register { client }, Response::Registered(notice)) = (&request, &response)
            && tables.clients.get(client).is_none_or(|client| client.notice != *notice)
        {
            return Err(format!("the answer has notice {notice}, and the tables say otherwise: {tables:#?}"));
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
}
