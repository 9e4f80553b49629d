//! The way to requests that take effect once, with its settings.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Transaction;

use super::key::{Fingerprint, IdempotencyKey};
use crate::backend::Database;
use crate::backend::records::{Claiming, Errand, Findings, FullKey};
use crate::backend::sealed::Refusal;
use crate::backend::table::Table;
use crate::client::Client;
use crate::clock::CENTURY;
use crate::error::{Error, Result, RowError};
use crate::lease::request::LeaseRequest;
use crate::locks::Locks;
use crate::owner::Owner;
use crate::transaction::retry::Retry;
use crate::transaction::target::check_transaction;

/// The table of the records.
const TABLE: &str = "sqlock_idem";

/// For how long a result is kept unless [`Idempotency::retention`] says otherwise.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// For how long records may be kept: the longest for ever, as far as anybody lives.
const RETENTION_RANGE: (Duration, Duration) = (Duration::from_millis(1), CENTURY);

/// For how long an attempt is claimed unless [`Idempotency::lease`] says otherwise.
const LEASE_TTL: Duration = Duration::from_secs(30);

/// How long a result may be unless [`Idempotency::result_limit`] says otherwise.
const RESULT_LIMIT: usize = 1 << 20;

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
///   provider say. The key is claimed by a lease, the provider is called with a [key of its own](crate::idempotency::Attempt::provider_key), and
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
    pub(super) client: Arc<Client>,
    pub(super) namespace: String,
    pub(super) retention: Duration,
    pub(super) lease: Duration,
    pub(super) wait: Duration,
    pub(super) limit: usize,
    pub(super) retry: Retry,
}

impl Idempotency {
    /// Records in the database of this client, in the namespace `default`.
    pub fn new(locks: &Locks) -> Self {
        Self {
            client: Arc::clone(locks.client()),
            namespace: "default".into(),
            retention: RETENTION,
            lease: LEASE_TTL,
            wait: Duration::ZERO,
            limit: RESULT_LIMIT,
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
    /// [`Outcome::InProgress`](crate::idempotency::Outcome::InProgress). Who waits holds no connection meanwhile.
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

    /// Makes a token for a principal that is good for one request within `ttl`: for a form that is to be sent once. It is
    /// used as the [key](IdempotencyKey::issued) of that request, in either mode. Who sends it again, within the
    /// [retention](Self::retention), is told the result; when the transaction is rolled back, it is as good as before. Who
    /// sends one that has expired, or that was issued to somebody else, or never, is told [`Outcome::Expired`](crate::idempotency::Outcome::Expired).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::OutOfRange`] (1 millisecond to 100 years), [`Error::Unavailable`], [`Error::NotMigrated`].
    ///
    /// # Cancel safety
    ///
    /// A token of which nobody learns expires.
    pub async fn issue(&self, principal: impl Into<String>, ttl: Duration) -> Result<String> {
        Error::check_range("the TTL of a token", ttl, RETENTION_RANGE.0, RETENTION_RANGE.1)?;
        let token = uuid::Uuid::new_v4().simple().to_string();
        let key = IdempotencyKey::issued(principal, token.as_str()).within(&self.namespace)?;
        self.send(Errand::Issue { key, ttl }).await?;
        Ok(token)
    }

    pub(super) fn claim_request(&self, key: &IdempotencyKey, request: &Fingerprint) -> Result<Claiming> {
        Error::check_range("a retention", self.retention, RETENTION_RANGE.0, RETENTION_RANGE.1)?;
        Ok(Claiming {
            key: key.within(&self.namespace)?,
            fingerprint: request.bytes(),
            keep: crate::backend::micros(self.retention),
            issued: key.is_issued(),
        })
    }

    pub(super) fn check_transaction<DB: Database>(&self, tx: &Transaction<'_, DB>) -> Result<()> {
        check_transaction(&self.client, tx, &Table::new(TABLE)?)
    }

    pub(super) async fn send(&self, command: Errand) -> Result<Findings> {
        self.client.run(command).await
    }

    /// Whoever is at work is an owner of its own, so that a duplicate in the same [scope](Owner::scope) does not enter again.
    pub(super) fn lease_request(&self, key: &FullKey) -> LeaseRequest {
        LeaseRequest::new(Arc::clone(&self.client), lease_name(key)).owner(Owner::random()).ttl(self.lease)
    }
}

/// The name of the lease on a key.
pub(super) fn lease_name(key: &FullKey) -> String {
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

pub(super) fn claim_error<DB: Database>(error: sqlx::Error) -> Error {
    let cause = match DB::refusal(&error) {
        Some(Refusal::Stale) => RowError::StaleSnapshot,
        Some(Refusal::Deferred) => RowError::Deferred,
        _ => return Error::from_sqlx("claim a key", error),
    };
    Error::Row { table: TABLE.into(), cause }
}
