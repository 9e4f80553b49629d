//! Requests that take effect once, however often they are sent: claim, effect and result in one transaction.
//!
//! [`Idempotency`] has an example. Which one when: [the table of calls](crate#which-call).

mod attempt;
pub(crate) mod duplicates;
#[cfg(feature = "axum")]
pub mod http;
mod key;

use std::convert::Infallible;
use std::error::Error as StdError;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{Pool, Transaction};
use tokio::time::Instant;

pub use attempt::{Attempt, Resumed};
pub use key::{Fingerprint, IdempotencyKey};

use duplicates::Duplicate;

use crate::backend::Database;
use crate::backend::records::{self, Claimed, Claiming, Errand, Findings, FullKey, Record, State};
use crate::backend::sealed::Refusal;
use crate::backend::table::Table;
use crate::backoff::Backoff;
use crate::client::Client;
use crate::clock::CENTURY;
use crate::error::{Error, Result, RowError};
use crate::lease::request::LeaseRequest;
use crate::locks::Locks;
use crate::owner::Owner;
use crate::transaction::retry::{Ended, Retry, RetryError};
use crate::transaction::target::admit;

/// The table of the records.
const TABLE: &str = "sqlock_idem";

/// For how long a result is kept unless [`Idempotency::retention`] says otherwise.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// For how long records may be kept: the longest for ever, as far as anybody lives.
const KEPT: (Duration, Duration) = (Duration::from_millis(1), CENTURY);

/// For how long an attempt is claimed unless [`Idempotency::lease`] says otherwise.
const LEASE: Duration = Duration::from_secs(30);

/// How long a result may be unless [`Idempotency::result_limit`] says otherwise.
const LIMIT: usize = 1 << 20;

/// The pauses of one who waits for a duplicate.
const PAUSE: Backoff = Backoff::between(Duration::from_millis(5), Duration::from_millis(100));

/// How often a claim is looked at that stands one way now and another way then.
const LOOKS: u32 = 10;

/// Requests that take effect once, however often they are sent.
///
/// Whoever sends a request chooses a [key](IdempotencyKey) for it and sends it again under the same key when no answer came. The
/// first one takes effect; each further one is told the result of that. The claim on the key, the effect and the result are
/// written in one transaction of the application's own database: either all of it is there or nothing, whatever crashes when.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let url = format!("sqlite://{}?mode=rwc", directory.path().join("app.db").display());
/// # let pool = sqlx::SqlitePool::connect(&url).await?;
/// # sqlx::query("CREATE TABLE charge (customer TEXT, cents INTEGER)").execute(&pool).await?;
/// use sqlock::Locks;
/// use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome};
///
/// let locks = Locks::new(pool.clone());
/// locks.migrate().await?;
/// let payments = Idempotency::new(&locks).namespace("payments");
///
/// for _ in 0..2 {                                              // a double click
///     let key = IdempotencyKey::new("alice", "order-17");      // whose it is, and what the client sent
///     let request = Fingerprint::of(["charge", "500"]);
///     let outcome = payments
///         .run(&pool, &key, &request, async |tx| {
///             sqlx::query("INSERT INTO charge VALUES ('alice', 500)").execute(&mut **tx).await?;
///             Ok::<_, sqlock::Error>("receipt 1".to_owned())
///         })
///         .await?;
///     assert_eq!(outcome.into_value().as_deref(), Some("receipt 1"));
/// }
/// let charges: i64 = sqlx::query_scalar("SELECT count(*) FROM charge").fetch_one(&pool).await?;
/// assert_eq!(charges, 1);
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "sqlite"))]
/// # fn main() {}
/// ```
///
/// # Two modes
///
/// - **In one transaction**: [`run`](Self::run), or [`begin`](Self::begin) in a transaction of your own. For effects in this
///   database. A key cannot be left "in progress": what was not committed did not happen.
/// - **Under a lease**: [`attempt`](Self::attempt) and [`run_leased`](Self::run_leased), for effects elsewhere, at a payment
///   provider say. The key is claimed by a lease, the provider is called with a [key of its own](Attempt::provider_key), and
///   what is not known to have succeeded or failed is kept and told.
///
/// Use one of them for a namespace, not both.
///
/// # How long
///
/// A result is told for the [retention](Self::retention), 24 hours by default, whether or not it has been purged by then. After
/// that **the key counts as new, and the request would take effect again**: keep results for longer than any client goes on
/// sending. The [sweeper](crate::sweeper::Sweeper) purges. What was not ended has no expiry: it stays until it is.
#[derive(Clone)]
#[must_use = "nothing is done until a request is run"]
pub struct Idempotency {
    client: Arc<Client>,
    namespace: String,
    retention: Duration,
    lease: Duration,
    wait: Duration,
    limit: usize,
    retry: Retry,
}

impl Idempotency {
    /// Records in the database of this client, in the namespace `default`.
    pub fn new(locks: &Locks) -> Self {
        Self {
            client: Arc::clone(locks.client()),
            namespace: "default".into(),
            retention: RETENTION,
            lease: LEASE,
            wait: Duration::ZERO,
            limit: LIMIT,
            retry: Retry::new(),
        }
    }

    /// Keys of different namespaces have nothing to do with each other: 1 to 255 bytes of UTF-8 without NUL.
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.namespace = name.into();
        self
    }

    /// For how long a result is told: 24 hours by default; 1 millisecond to 100 years. Counted from the claim, under a lease from the
    /// result.
    pub fn retention(mut self, time: Duration) -> Self {
        self.retention = time;
        self
    }

    /// For how long an attempt [under a lease](Self::attempt) is claimed when nothing is heard of its process: 30 seconds by
    /// default. As the TTL of a [lease](LeaseRequest::ttl).
    pub fn lease(mut self, ttl: Duration) -> Self {
        self.lease = ttl;
        self
    }

    /// For how long one waits for another with the same key that is at work: not at all by default, which is told as
    /// [`Outcome::InProgress`]. Who waits holds no connection meanwhile.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = at_most;
        self
    }

    /// How many bytes a result may have as it is stored: 1 MiB by default.
    pub fn result_limit(mut self, bytes: usize) -> Self {
        self.limit = bytes;
        self
    }

    /// How transactions of [`run`](Self::run) begin, and how often they are run again when they meet a concurrent change.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Does the work in a transaction of its own, once, and tells everybody who comes with this key what came of it.
    ///
    /// A claim on the key is the transaction's first statement, the work's own follow, then its result is stored as JSON, and the
    /// transaction commits. When the work fails, all of it is rolled back and the key is as good as new. When the
    /// transaction meets a concurrent change, or its connection is lost while it commits, it is run again from the claim, which
    /// tells whether there is anything left to do ([`retry`](Self::retry) bounds that; what a closure must keep to is
    /// told [there](Retry)).
    ///
    /// It costs two statements: the claim and the result. On MySQL and MariaDB another connection looks first whether
    /// somebody is at it, since a claim would wait there (a rival of the same moment is waited for on MySQL). On SQLite
    /// whoever writes waits for whoever writes, and gives up when that takes longer than the busy timeout; within one process a
    /// duplicate is told at once.
    ///
    /// # Errors
    ///
    /// [`RetryError::Failed`] with the work's own error, or with one of this crate: [`Error::Unavailable`] and its like,
    /// [`Error::InvalidKey`], [`Error::OutOfRange`], [`Error::ResultTooLarge`], [`Error::Json`] when the result could not be read
    /// again, [`Error::NotClaimed`] when a deadlock whose error the work ignored has rolled the claim back. Nothing took effect.
    /// (Also [`Error::Json`] when a stored result is not of the type asked for: that did.) [`RetryError::Exhausted`]; [`RetryError::CommitUnknown`] when it could not be found out in time: ask
    /// again with the same key.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rolls back what was not committed. It may have been: ask again with the same key.
    ///
    /// # Panics
    ///
    /// When the closure does; the transaction is rolled back then.
    pub async fn run<DB, T, E, F>(
        &self,
        pool: &Pool<DB>,
        key: &IdempotencyKey,
        request: &Fingerprint,
        work: F,
    ) -> Result<Outcome<T>, RetryError<E>>
    where
        DB: Database,
        T: Serialize + DeserializeOwned,
        E: From<sqlx::Error> + From<Error> + StdError + 'static,
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<T, E> + Clone,
    {
        let claim = self.claiming(key, request).map_err(refused)?;
        let start = Instant::now();
        let (mut pauses, doubt) = (PAUSE, Doubt::default());
        loop {
            let outcome = match self.client.duplicates.enter(&claim) {
                Err(Duplicate { same: true }) => match self.look(&claim).await {
                    Ok(found) => told(found.unwrap_or(Outcome::InProgress)),
                    Err(error) => Err(error),
                }
                .map_err(refused),
                // One that asks for something else may itself be the one that is refused: the database knows.
                _entered => self.until_decided(pool, &claim, &work, &doubt).await,
            };
            let outcome = outcome.map_err(|error| doubt.or(error))?;
            let pause = pauses.step();
            if !matches!(outcome, Outcome::InProgress) || start.elapsed() + pause > self.wait {
                return Ok(outcome);
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Runs the transaction until it has committed, or something else was decided.
    async fn until_decided<DB, T, E, F>(
        &self,
        pool: &Pool<DB>,
        claim: &Claiming,
        work: &F,
        doubt: &Doubt,
    ) -> Result<Outcome<T>, RetryError<E>>
    where
        DB: Database,
        T: Serialize + DeserializeOwned,
        E: From<sqlx::Error> + From<Error> + StdError + 'static,
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<T, E> + Clone,
    {
        if DB::PEEKS
            && let Some(outcome) = self.peek(claim).await.map_err(refused)?
        {
            return told(outcome).map_err(refused);
        }
        let mut attempts = self.retry.attempts_of();
        loop {
            let work = work.clone();
            let within = async |tx: &mut Transaction<'_, DB>| self.within(tx, claim, work, doubt).await;
            match self.retry.attempt(pool, within, false).await {
                Ok(outcome) => return Ok(outcome),
                Err(Ended::ByOthers(last)) => attempts.another(last).await.map_err(Side::out)?,
                // The next attempt reads the claim and so settles the doubt. Without a next attempt the caller gets the doubt.
                Err(Ended::Before(source)) => {
                    doubt.raise(source, true);
                    attempts.another(Side::Ours(Error::NotClaimed)).await.map_err(Side::out)?;
                }
                Err(Ended::ForGood(RetryError::CommitUnknown { source })) => {
                    doubt.raise(source, false);
                    attempts.another(Side::Ours(Error::NotClaimed)).await.map_err(Side::out)?;
                }
                Err(Ended::ForGood(error)) if doubt.is_open() => {
                    if !attempts.may_go_on(&error.to_string()).await {
                        return Err(Side::out(error));
                    }
                }
                Err(Ended::ForGood(error)) => return Err(Side::out(error)),
            }
        }
    }

    /// What happens in the transaction.
    async fn within<DB, T, E, F>(
        &self,
        tx: &mut Transaction<'_, DB>,
        claim: &Claiming,
        work: F,
        doubt: &Doubt,
    ) -> Result<Outcome<T>, Side<E>>
    where
        DB: Database,
        T: Serialize + DeserializeOwned,
        E: StdError + 'static,
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<T, E>,
    {
        let outcome = self.decide(tx, claim).await.map_err(Side::Ours)?;
        match &outcome {
            // It may be the commit that is in doubt.
            Outcome::InProgress => {}
            // The claim of this call's own, which a statement of the work has committed, with what the work had done by then.
            Outcome::Replay(Stored { bytes: None }) if doubt.is_by_the_work() => {
                records::mark_unknown::<DB>(tx, &claim.key.id).await.map_err(failed::<DB>).map_err(Side::Ours)?;
                return Ok(Outcome::Unknown);
            }
            _ => doubt.settle(),
        }
        match outcome {
            Outcome::New(claim) => {
                let value = work(tx).await.map_err(Side::Theirs)?;
                let result = encode_legibly(&value, self.limit).map_err(Side::Ours)?;
                claim.store(tx, &result).await.map_err(Side::Ours)?;
                Ok(Outcome::New(value))
            }
            known => told(known.never_new()).map_err(Side::Ours),
        }
    }

    /// Claims a key in a transaction of the caller's own. `New` is to be followed by the effect, by
    /// [`complete`](Claim::complete) and by the commit; after anything else, nothing is to be done in this transaction.
    ///
    /// ```
    /// # use sqlock::Error;
    /// # use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome};
    /// # async fn charge(tx: &mut sqlx::Transaction<'_, sqlx::Sqlite>) -> Result<String, Error> { Ok(String::new()) }
    /// # async fn example(pool: sqlx::SqlitePool, payments: Idempotency) -> Result<(), Box<dyn std::error::Error>> {
    /// let key = IdempotencyKey::new("alice", "order-17");
    /// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;      // on SQLite; elsewhere pool.begin()
    /// let receipt: String = match payments.begin(&mut tx, &key, &Fingerprint::of(["500"])).await? {
    ///     Outcome::New(claim) => {
    ///         let receipt = charge(&mut tx).await?;
    ///         claim.complete(&mut tx, &receipt).await?;
    ///         tx.commit().await?;
    ///         receipt
    ///     }
    ///     Outcome::Replay(stored) => stored.get()?,
    ///     other => return Err(format!("refused: {other:?}").into()),
    /// };
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Call it once in a transaction: a second time, before the result is stored, is told in-progress or null. It may be called at
    /// any time in the transaction, but what was done before it is done again by a duplicate. A rival that is at work is told at
    /// once, [except as said](Self::run); [`wait`](Self::wait) has no meaning here.
    ///
    /// At REPEATABLE READ and SERIALIZABLE a rival that has committed since this transaction began to read is told by
    /// [`RowError::StaleSnapshot`] on PostgreSQL (and on MariaDB with `innodb_snapshot_isolation`): run the transaction again.
    ///
    /// # Errors
    ///
    /// [`Error::Row`] when this transaction cannot be used for it, or reads from before; [`Error::InvalidKey`],
    /// [`Error::OutOfRange`]; [`Error::Database`], [`Error::Unavailable`], [`Error::NotMigrated`]. Roll back after any.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the transaction as undecided as dropping any of its statements: roll back.
    pub async fn begin<DB: Database>(
        &self,
        tx: &mut Transaction<'_, DB>,
        key: &IdempotencyKey,
        request: &Fingerprint,
    ) -> Result<Outcome<Claim, Stored>> {
        let claim = self.claiming(key, request)?;
        if DB::PEEKS
            && let Some(outcome) = self.peek(&claim).await?
        {
            return Ok(outcome.never_new());
        }
        self.decide(tx, &claim).await
    }

    async fn decide<DB: Database>(
        &self,
        tx: &mut Transaction<'_, DB>,
        claim: &Claiming,
    ) -> Result<Outcome<Claim, Stored>> {
        self.admit(tx)?;
        let mut rival = None;
        for look in 0..LOOKS {
            if look > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let claimed = DB::claim(tx, claim).await.map_err(failed::<DB>)?;
            if claimed == Claimed::Ours {
                return Ok(Outcome::New(Claim { id: claim.key.id.clone(), limit: self.limit }));
            }
            if claimed == Claimed::Not {
                let record = records::read::<DB>(tx, &claim.key.id, DB::PRESENT).await.map_err(failed::<DB>)?;
                if let Some(record) = record {
                    if let Some(known) = known(claim, record) {
                        return Ok(known);
                    }
                } else if claim.issued {
                    return Ok(Outcome::Expired);
                }
                let before = rival;
                rival = DB::rival(tx, claim).await.map_err(failed::<DB>)?;
                match rival {
                    Some(found) if found.same => return Ok(Outcome::InProgress),
                    // One that is ending may have let go of one lock and not of the other.
                    found if found.is_some() && found == before => return Ok(Outcome::Mismatch),
                    _ => {}
                }
            }
            if DB::PEEKS
                && let Some(outcome) = self.peek(claim).await?
            {
                return Ok(outcome.never_new());
            }
        }
        Ok(Outcome::InProgress)
    }

    /// What another connection sees before the key is claimed. `None`: nothing stands in the way.
    async fn peek(&self, claim: &Claiming) -> Result<Option<Outcome<Infallible, Stored>>> {
        let mut found = self.send(Errand::Peek(claim.key.clone())).await?;
        // Who has the record locked, and has not claimed it as one can see, is at it for a moment: the sweeper, say.
        let mut looks = 1;
        while found.busy && found.fingerprint.is_none() && looks < LOOKS {
            tokio::time::sleep(Duration::from_millis(5)).await;
            found = self.send(Errand::Peek(claim.key.clone())).await?;
            looks += 1;
        }
        if found.busy {
            let same = found.fingerprint.is_none_or(|fingerprint| fingerprint == claim.fingerprint);
            return Ok(Some(if same { Outcome::InProgress } else { Outcome::Mismatch }));
        }
        match found.records.into_iter().next() {
            None if claim.issued => Ok(Some(Outcome::Expired)),
            None => Ok(None),
            Some(record) if record.is_expired() && record.state == State::Done && !claim.issued => {
                self.send(Errand::Bury(claim.key.clone())).await?;
                Ok(None)
            }
            Some(record) => Ok(known(claim, record)),
        }
    }

    /// Makes a token for a principal that is good for one request within `ttl`: for a form that is to be sent once. It is
    /// used as the [key](IdempotencyKey::issued) of that request, in either mode. Who sends it again, within the
    /// [retention](Self::retention), is told the result; when the transaction is rolled back, it is as good as before. Who
    /// sends one that has expired, or that was issued to somebody else, or never, is told [`Outcome::Expired`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::OutOfRange`] (1 millisecond to 100 years), [`Error::Unavailable`], [`Error::NotMigrated`].
    ///
    /// # Cancel safety
    ///
    /// A token of which nobody learns expires.
    pub async fn issue(&self, principal: impl Into<String>, ttl: Duration) -> Result<String> {
        Error::check_range("the TTL of a token", ttl, KEPT.0, KEPT.1)?;
        let token = uuid::Uuid::new_v4().simple().to_string();
        let key = IdempotencyKey::issued(principal, token.as_str()).within(&self.namespace)?;
        self.send(Errand::Issue { key, ttl }).await?;
        Ok(token)
    }

    /// What has not ended, or of which nobody knows how it has, in order of creation, at most `limit`: attempts
    /// [under a lease](Self::attempt), those at work included.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], [`Error::NotMigrated`].
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn unfinished(&self, limit: u32) -> Result<Vec<RecordInfo>> {
        let mut all = self.list(Some(State::Started), limit).await?;
        all.extend(self.list(Some(State::Unknown), limit).await?);
        all.sort_by_key(|record| record.created_at);
        all.truncate(limit as usize);
        Ok(all)
    }

    /// The records of this namespace, in order of creation, at most `limit`.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], [`Error::NotMigrated`].
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn records(&self, limit: u32) -> Result<Vec<RecordInfo>> {
        self.list(None, limit).await
    }

    /// For those who look after all of them: the records of some namespace, or of all, in some [state](RecordInfo::state), or
    /// in any, in order of creation, at most `limit`. In a state that there is not, there are none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::Unavailable`], [`Error::NotMigrated`].
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn records_in(
        &self,
        namespace: Option<&str>,
        state: Option<&str>,
        limit: u32,
    ) -> Result<Vec<RecordInfo>> {
        if let Some(namespace) = namespace {
            key::check("a namespace", namespace)?;
        }
        let Ok(state) = state.map(State::parse).transpose() else {
            return Ok(Vec::new());
        };
        let found = self.send(Errand::List { namespace: namespace.map(str::to_owned), state, limit }).await?;
        Ok(found.records.into_iter().map(RecordInfo::of).collect())
    }

    async fn list(&self, state: Option<State>, limit: u32) -> Result<Vec<RecordInfo>> {
        self.records_in(Some(&self.namespace), state.map(State::as_str), limit).await
    }

    /// Deletes the records of all namespaces whose time has run out, in batches, and tells how many: results that are not told
    /// any more, and tokens that are not good any more. What has not ended has no such time. The [sweeper](crate::sweeper::Sweeper)
    /// does it as well.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], [`Error::NotMigrated`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends it after the batch under way.
    pub async fn purge(&self) -> Result<u64> {
        crate::sweeper::purge_records(&self.client, crate::sweeper::BATCH).await
    }

    /// What stands under a key. `None`: nothing, or nothing that has been committed.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::Unavailable`], [`Error::NotMigrated`].
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn inspect(&self, key: &IdempotencyKey) -> Result<Option<RecordInfo>> {
        let found = self.send(Errand::Read(key.within(&self.namespace)?)).await?;
        let Some(record) = found.records.into_iter().next() else {
            return Ok(None);
        };
        let steps = self.send(Errand::Steps { id: record.key.id.clone(), begun: record.created_at }).await?.steps;
        Ok(Some(RecordInfo { steps, ..RecordInfo::of(record) }))
    }

    /// Deletes the record of an attempt that has not ended well, so that the key is as good as new (a token that was issued, as
    /// good as before): for an operator who has
    /// found out that nothing took effect. The token says which attempt is meant: `false` when it is not the latest, or the
    /// request is done.
    ///
    /// One that is at work is not stopped, but it cannot store its result any more.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::Unavailable`], [`Error::NotMigrated`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves open whether it is deleted. It can be repeated.
    pub async fn forget(&self, key: &IdempotencyKey, token: crate::FencingToken) -> Result<bool> {
        let key = key.within(&self.namespace)?;
        let errand = Errand::Forget { id: key.id.clone(), token: token.get() };
        let answer = self.client.ask(errand).await;
        // Sent again after a reply that was lost, it finds nothing any more.
        let gone = answer.may_linger && self.send(Errand::Read(key)).await?.records.is_empty();
        Ok(answer.result?.changed > 0 || gone)
    }

    fn claiming(&self, key: &IdempotencyKey, request: &Fingerprint) -> Result<Claiming> {
        Error::check_range("a retention", self.retention, KEPT.0, KEPT.1)?;
        Ok(Claiming {
            key: key.within(&self.namespace)?,
            fingerprint: request.bytes(),
            keep: crate::backend::micros(self.retention),
            issued: key.is_issued(),
        })
    }

    fn admit<DB: Database>(&self, tx: &Transaction<'_, DB>) -> Result<()> {
        admit(&self.client, tx, &Table::new(TABLE)?)
    }

    async fn send(&self, errand: Errand) -> Result<Findings> {
        self.client.run(errand).await
    }

    /// Whoever is at work is an owner of its own, so that a duplicate in the same [scope](Owner::scope) does not enter again.
    fn lease_on(&self, key: &FullKey) -> LeaseRequest {
        LeaseRequest::new(Arc::clone(&self.client), lease_of(key)).owner(Owner::random()).ttl(self.lease)
    }
}

/// The name of the lease on a key.
fn lease_of(key: &FullKey) -> String {
    format!("sqlock-idem/{}", key.id)
}

impl fmt::Debug for Idempotency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("namespace", &self.namespace)
            .field("retention", &self.retention)
            .field("lease", &self.lease)
            .field("wait", &self.wait)
            .finish_non_exhaustive()
    }
}

/// What a record says to one who comes with a key. `None`: it says nothing, the key can be claimed.
fn known<N>(claim: &Claiming, record: Record) -> Option<Outcome<N, Stored>> {
    let expired = record.is_expired();
    match record.state {
        // Whether it has expired, or was never claimed, or is not meant to be claimed like this.
        State::Issued if claim.issued && !expired => None,
        State::Issued => Some(Outcome::Expired),
        State::Done if expired && claim.issued => Some(Outcome::Expired),
        State::Done if expired => None,
        _ if record.fingerprint != claim.fingerprint => Some(Outcome::Mismatch),
        State::Done => Some(Outcome::Replay(Stored { bytes: record.result })),
        State::Started => Some(Outcome::InProgress),
        State::Unknown => Some(Outcome::Unknown),
    }
}

fn failed<DB: Database>(error: sqlx::Error) -> Error {
    let cause = match DB::refusal(&error) {
        Some(Refusal::Stale) => RowError::StaleSnapshot,
        Some(Refusal::Deferred) => RowError::Deferred,
        _ => return Error::from_sqlx("claim a key", error),
    };
    Error::Row { table: TABLE.into(), cause }
}

fn refused<E: From<Error> + StdError + 'static>(error: Error) -> RetryError<E> {
    RetryError::Failed(error.into())
}

/// Whose error ended a transaction.
#[derive(Debug, thiserror::Error)]
enum Side<E: StdError + 'static> {
    #[error(transparent)]
    Ours(Error),
    #[error(transparent)]
    Theirs(E),
}

impl<E: StdError + 'static> From<sqlx::Error> for Side<E> {
    fn from(error: sqlx::Error) -> Self {
        Self::Ours(error.into())
    }
}

impl<E: From<Error> + StdError + 'static> Side<E> {
    fn into_theirs(self) -> E {
        match self {
            Self::Ours(error) => error.into(),
            Self::Theirs(error) => error,
        }
    }

    fn out(error: RetryError<Self>) -> RetryError<E> {
        match error {
            RetryError::Failed(error) => RetryError::Failed(error.into_theirs()),
            RetryError::Exhausted { attempts, elapsed, last } => {
                RetryError::Exhausted { attempts, elapsed, last: last.into_theirs() }
            }
            RetryError::CommitUnknown { source } => RetryError::CommitUnknown { source },
        }
    }
}

/// A commit of one call, of which it is not known whether it took effect: the first one, until a later attempt has read the claim.
#[derive(Default)]
struct Doubt(Mutex<Option<Doubtful>>);

struct Doubtful {
    source: sqlx::Error,
    /// A statement of the work has ended the transaction.
    by_the_work: bool,
}

impl Doubt {
    fn raise(&self, source: sqlx::Error, by_the_work: bool) {
        self.lock().get_or_insert(Doubtful { source, by_the_work });
    }

    fn settle(&self) {
        *self.lock() = None;
    }

    fn is_open(&self) -> bool {
        self.lock().is_some()
    }

    fn is_by_the_work(&self) -> bool {
        self.lock().as_ref().is_some_and(|doubtful| doubtful.by_the_work)
    }

    /// Replaces an error that says that nothing took effect while the doubt is open.
    fn or<E: StdError + 'static>(&self, error: RetryError<E>) -> RetryError<E> {
        self.lock().take().map_or(error, |Doubtful { source, .. }| RetryError::CommitUnknown { source })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Doubtful>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What becomes of a request that comes with a key. `N`: what there is when it is the first one; `R`: what is told to others.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "whether the request took effect, now or before, is told by this"]
#[non_exhaustive]
pub enum Outcome<N, R = N> {
    /// It was the first one with this key.
    New(N),
    /// Another one with this key has taken effect before; this is its result.
    Replay(R),
    /// Another one with this key is at work.
    InProgress,
    /// Another one with this key, at work or done, asked for something else. Whoever sent it uses keys wrongly.
    Mismatch,
    /// It came with a token that is not good: expired, or issued to somebody else, or never.
    Expired,
    /// Another one with this key has ended, and nobody knows whether it took effect. It will have to be
    /// [resumed](Idempotency::resume), or [forgotten](Idempotency::forget).
    Unknown,
}

impl<T> Outcome<T> {
    /// The result, of this request or of the first one. `None`: there is none.
    pub fn into_value(self) -> Option<T> {
        match self {
            Self::New(value) | Self::Replay(value) => Some(value),
            _ => None,
        }
    }
}

impl<N, R> Outcome<N, R> {
    /// Whether the result is that of a request that came before.
    pub fn is_replay(&self) -> bool {
        matches!(self, Self::Replay(_))
    }

    /// The same for whoever could have got something else for a new one. (A new one is not; it would be told as in progress.)
    fn never_new<M>(self) -> Outcome<M, R> {
        match self {
            Self::New(_) | Self::InProgress => Outcome::InProgress,
            Self::Replay(known) => Outcome::Replay(known),
            Self::Mismatch => Outcome::Mismatch,
            Self::Expired => Outcome::Expired,
            Self::Unknown => Outcome::Unknown,
        }
    }
}

/// What is told of a request that was not the first one.
fn told<T: DeserializeOwned>(known: Outcome<Infallible, Stored>) -> Result<Outcome<T>> {
    Ok(match known {
        Outcome::New(never) => match never {},
        Outcome::Replay(stored) => Outcome::Replay(stored.get()?),
        Outcome::InProgress => Outcome::InProgress,
        Outcome::Mismatch => Outcome::Mismatch,
        Outcome::Expired => Outcome::Expired,
        Outcome::Unknown => Outcome::Unknown,
    })
}

/// A key that a transaction has claimed. Made by [`Idempotency::begin`].
#[derive(Debug)]
#[must_use = "a claim that is committed without its result is replayed as null"]
pub struct Claim {
    id: String,
    limit: usize,
}

impl Claim {
    /// Stores the result, as JSON, for those who come again. Then commit.
    ///
    /// # Errors
    ///
    /// [`Error::NotClaimed`] in another transaction; [`Error::ResultTooLarge`], [`Error::Json`]; those of any statement.
    ///
    /// # Cancel safety
    ///
    /// As any statement of a transaction.
    pub async fn complete<DB: Database, T: Serialize + ?Sized>(
        self,
        tx: &mut Transaction<'_, DB>,
        result: &T,
    ) -> Result<()> {
        let result = encode(result, self.limit)?;
        self.store(tx, &result).await
    }

    async fn store<DB: Database>(self, tx: &mut Transaction<'_, DB>, result: &[u8]) -> Result<()> {
        if records::complete::<DB>(tx, &self.id, result).await.map_err(failed::<DB>)? {
            return Ok(());
        }
        Err(Error::NotClaimed)
    }
}

/// The stored result of a request that has taken effect.
#[derive(Clone, PartialEq, Eq)]
pub struct Stored {
    bytes: Option<Vec<u8>>,
}

impl Stored {
    /// The result. Where a claim was committed without one, it is null.
    ///
    /// # Errors
    ///
    /// [`Error::Json`]: it is not of this type.
    pub fn get<T: DeserializeOwned>(&self) -> Result<T> {
        decode(self.bytes.as_deref())
    }
}

impl fmt::Debug for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stored").field("bytes", &self.bytes.as_ref().map_or(0, Vec::len)).finish()
    }
}

fn encode<T: Serialize + ?Sized>(result: &T, limit: usize) -> Result<Vec<u8>> {
    let bytes = serde_json::to_vec(result).map_err(|source| Error::Json { what: "the result", source })?;
    if bytes.len() > limit {
        return Err(Error::ResultTooLarge { bytes: bytes.len(), limit });
    }
    Ok(bytes)
}

/// What cannot be read again as what it was (no number, too deeply nested) is not stored.
fn encode_legibly<T: Serialize + DeserializeOwned>(result: &T, limit: usize) -> Result<Vec<u8>> {
    let bytes = encode(result, limit)?;
    decode::<T>(Some(&bytes))?;
    Ok(bytes)
}

fn decode<T: DeserializeOwned>(bytes: Option<&[u8]>) -> Result<T> {
    serde_json::from_slice(bytes.unwrap_or(b"null")).map_err(|source| Error::Json { what: "the stored result", source })
}

/// What stands under a key, as [`Idempotency::inspect`] tells it.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordInfo {
    /// The namespace that it is in.
    pub namespace: String,
    /// Whose key it is. `None`: everybody's.
    pub principal: Option<String>,
    /// The key.
    pub key: String,
    /// How far it has come: `issued`, `started`, `unknown` or `done`.
    pub state: &'static str,
    /// The token of the latest attempt. `None`: it was done in one transaction.
    pub token: Option<crate::FencingToken>,
    /// How many attempts were made under a lease.
    pub attempts: u32,
    /// Under what name its attempts hold their lease: `sqlock-idem/` and a digest of the key. While it is
    /// [held](Locks::inspect), somebody is at work.
    pub lease: String,
    /// How many bytes the stored result has. `None`: there is none, or it was not asked for.
    pub result_bytes: Option<usize>,
    /// The names of the steps that are done. Empty in a list.
    pub steps: Vec<String>,
    /// When it was made, by the database's clock.
    pub created_at: chrono::DateTime<chrono::Utc>,
    /// Until when the result is told, or the token is good, by the database's clock. What has not ended has no such time:
    /// it is that which it would have if it were done.
    pub expires_at: chrono::DateTime<chrono::Utc>,
}

impl RecordInfo {
    fn of(record: Record) -> Self {
        let at = |micros| chrono::DateTime::from_timestamp_micros(micros).unwrap_or_default();
        Self {
            lease: lease_of(&record.key),
            namespace: record.key.namespace,
            principal: Some(record.key.principal).filter(|principal| !principal.is_empty()),
            key: record.key.key,
            state: record.state.as_str(),
            token: crate::backend::token(record.token),
            attempts: u32::try_from(record.attempts).unwrap_or(0),
            result_bytes: record.result.map(|result| result.len()),
            steps: Vec::new(),
            created_at: at(record.created_at),
            expires_at: at(record.expires_at),
        }
    }
}

/// Without the key, which is nobody else's business.
impl fmt::Debug for RecordInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordInfo")
            .field("namespace", &self.namespace)
            .field("state", &self.state)
            .field("token", &self.token)
            .field("attempts", &self.attempts)
            .finish_non_exhaustive()
    }
}
