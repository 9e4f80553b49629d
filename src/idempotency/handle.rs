//! The handle to requests that take effect once, and its settings.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Transaction;

use super::key::{Fingerprint, IdempotencyKey};
use super::pools::KnownPools;
use super::resume::ResumePolicy;
use super::seal::Seal;
use crate::backend::Database;
use crate::backend::dialect::LockFailure;
use crate::backend::records::{ClaimRequest, FullKey, RecordCommand, RecordResponse};
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
pub(super) const TABLE: &str = "sqlock_idem";

/// The operation in the error of a result that is not stored in a transaction of the caller.
pub(super) const STORE_RESULT: &str = "store the result of a request";

/// How long a result is kept, unless [`Idempotency::retention`] sets it.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// The shortest and the longest retention.
const RETENTION_RANGE: (Duration, Duration) = (Duration::from_millis(1), CENTURY);

/// The TTL of an attempt's lease, unless [`Idempotency::lease`] sets it.
const LEASE_TTL: Duration = Duration::from_secs(30);

/// The longest stored result, unless [`Idempotency::result_limit`] sets it.
pub(super) const RESULT_LIMIT: usize = 1 << 20;

/// The longest stored request, unless [`Idempotency::request_limit`] sets it.
pub(super) const REQUEST_LIMIT: usize = 1 << 20;

/// Makes requests take effect once, however often they are sent.
///
/// A client chooses a [key](IdempotencyKey) for a request, and sends the request again with the
/// same key if no answer came. The first request takes effect; each further request receives the
/// first result. The claim on the key, the effect and the result are written in one transaction of
/// the application's own database, so a crash leaves all of them or none.
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
///     let key = IdempotencyKey::new("alice", "order-17");      // the principal, and the client's key
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
/// - **In one transaction**: [`run`](Self::run), or [`begin`](Self::begin) in a transaction of your
///   own. For effects in this database. A crash cannot leave a key "in progress", because the
///   server rolls the claim back when it notices the lost connection (after a host is lost, see
///   [limits](crate::guide::limits)).
/// - **Under a lease**: [`attempt`](Self::attempt) and [`run_leased`](Self::run_leased), for
///   effects elsewhere, such as at a payment provider. The key is claimed by a lease, the provider
///   is called with a [key of its own](crate::idempotency::Attempt::provider_key), and an unknown
///   outcome is kept and reported.
///
/// Use one mode for a namespace, not both.
///
/// # Retention
///
/// A result is replayed for the [retention](Self::retention), 24 hours by default. After that **the
/// key counts as new, and the request would take effect again**: keep results for longer than any
/// client repeats a request, or [refuse](AfterRetention::Refuse) used keys. The
/// [sweeper](crate::sweeper::Sweeper) purges expired records. A record that has not ended does not
/// expire.
#[derive(Clone)]
#[must_use = "nothing is done until a request is run"]
pub struct Idempotency {
    pub(super) client: Arc<Client>,
    pub(super) namespace: String,
    pub(super) retention: Duration,
    pub(super) after_retention: AfterRetention,
    pub(super) lease_ttl: Duration,
    pub(super) wait: Duration,
    pub(super) result_limit: usize,
    pub(super) request_limit: usize,
    pub(super) seal: Seal,
    pub(super) retry: Retry,
    pub(super) resume_policy: ResumePolicy,
    pub(super) pools: Arc<KnownPools>,
}

/// The rule for a key after the [retention](Idempotency::retention).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AfterRetention {
    /// The key counts as new: the request would take effect again.
    #[default]
    Forget,
    /// Requests with the key receive [`Outcome::Expired`](crate::idempotency::Outcome::Expired),
    /// for ever. The sweeper purges the result and the steps, and keeps a row without them for each
    /// key.
    Refuse,
}

impl Idempotency {
    /// Uses the database of this client, and the namespace `default`.
    pub fn new(locks: &Locks) -> Self {
        Self {
            client: Arc::clone(locks.client()),
            namespace: "default".into(),
            retention: RETENTION,
            after_retention: AfterRetention::Forget,
            lease_ttl: LEASE_TTL,
            wait: Duration::ZERO,
            result_limit: RESULT_LIMIT,
            request_limit: REQUEST_LIMIT,
            seal: Seal::default(),
            retry: Retry::new(),
            resume_policy: ResumePolicy::new(),
            pools: Arc::default(),
        }
    }

    /// Sets the namespace: 1 to 255 bytes of UTF-8 without NUL. Keys of different namespaces are
    /// independent.
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.namespace = name.into();
        self
    }

    /// Sets how long a result is replayed: 24 hours by default; 1 millisecond to 100 years. The
    /// retention counts from the storing of the result, just before the commit. (Work that ends
    /// within one second, and within 1 % of the retention, counts from its claim.)
    pub fn retention(mut self, time: Duration) -> Self {
        self.retention = time;
        self
    }

    /// Sets the rule for a key after the [retention](Self::retention). The rule is recorded when
    /// the key is claimed.
    pub fn after_retention(mut self, rule: AfterRetention) -> Self {
        self.after_retention = rule;
        self
    }

    /// Sets the TTL of the lease of an [attempt](Self::attempt): 30 seconds by default. As
    /// [`LeaseRequest::ttl`].
    pub fn lease(mut self, ttl: Duration) -> Self {
        self.lease_ttl = ttl;
        self
    }

    /// Sets how long a request waits for another request in progress with the same key. By default
    /// the request does not wait and returns
    /// [`Outcome::InProgress`](crate::idempotency::Outcome::InProgress). A waiting request holds no
    /// connection.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = at_most;
        self
    }

    /// Limits the bytes of a stored result: 1 MiB by default.
    pub fn result_limit(mut self, bytes: usize) -> Self {
        self.result_limit = bytes;
        self
    }

    /// Limits the bytes of a [stored request](Fingerprint::with_request): 1 MiB by default. A
    /// longer request is refused with [`Error::RequestTooLarge`].
    pub fn request_limit(mut self, bytes: usize) -> Self {
        self.request_limit = bytes;
        self
    }

    /// Sets the begin statement of transactions of [`run`](Self::run), and how often they are run
    /// again after a concurrent change.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Sets the requests that [`resume`](Self::resume) continues, and how many at a time.
    pub fn resume_policy(mut self, policy: ResumePolicy) -> Self {
        self.resume_policy = policy;
        self
    }

    /// Issues a token to a principal, valid for one request within `ttl`: for a form that is sent
    /// once. The token is the [key](IdempotencyKey::issued) of that request, in either mode. A
    /// repeated request within the [retention](Self::retention) receives the result; a rollback
    /// makes the token valid again. A token that has expired, was issued to another principal, or
    /// was never issued returns [`Outcome::Expired`](crate::idempotency::Outcome::Expired).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::OutOfRange`] (1 millisecond to 100 years),
    /// [`Error::Unavailable`], [`Error::NotMigrated`].
    ///
    /// # Cancel safety
    ///
    /// A token that was not received expires.
    pub async fn issue(&self, principal: impl Into<String>, ttl: Duration) -> Result<String> {
        Error::check_range("the TTL of a token", ttl, RETENTION_RANGE.0, RETENTION_RANGE.1)?;
        let token = uuid::Uuid::new_v4().simple().to_string();
        let key = IdempotencyKey::issued(principal, token.as_str()).in_namespace(&self.namespace)?;
        self.send(RecordCommand::Issue { key, ttl }).await?;
        Ok(token)
    }

    pub(super) fn claim_request(&self, key: &IdempotencyKey, request: &Fingerprint) -> Result<ClaimRequest> {
        Error::check_range("a retention", self.retention, RETENTION_RANGE.0, RETENTION_RANGE.1)?;
        let full_key = key.in_namespace(&self.namespace)?;
        let stored = request.request.as_deref().map(|request| self.encode_request(&full_key.id, request));
        Ok(ClaimRequest {
            key: full_key,
            fingerprint: request.bytes(),
            request: stored.transpose()?,
            retention_micros: crate::backend::micros(self.retention),
            permanent: self.after_retention == AfterRetention::Refuse,
            issued: key.is_issued(),
            is_unknown_until_done: false,
        })
    }

    /// Makes the claim of a transaction. A claim that a statement of the transaction commits has no
    /// result, and would be replayed as null.
    pub(super) fn transaction_claim<DB: Database>(
        &self,
        key: &IdempotencyKey,
        request: &Fingerprint,
    ) -> Result<ClaimRequest> {
        let is_unknown_until_done = DB::COMMITS_IMPLICITLY;
        Ok(ClaimRequest { is_unknown_until_done, ..self.claim_request(key, request)? })
    }

    pub(super) fn check_transaction<DB: Database>(&self, tx: &Transaction<'_, DB>) -> Result<()> {
        check_transaction(&self.client, tx, &Table::new(TABLE)?)
    }

    pub(super) async fn send(&self, command: RecordCommand) -> Result<RecordResponse> {
        self.client.run(command).await
    }

    /// Requests the lease on a key. Its owner is new, so a duplicate in the same
    /// [scope](Owner::scope) does not re-enter.
    pub(super) fn lease_request(&self, key: &FullKey) -> LeaseRequest {
        LeaseRequest::new(Arc::clone(&self.client), lease_name(key)).owner(Owner::random()).ttl(self.lease_ttl)
    }
}

/// Returns the name of the lease on a key.
pub(super) fn lease_name(key: &FullKey) -> String {
    format!("sqlock-idem/{}", key.id)
}

impl fmt::Debug for Idempotency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("namespace", &self.namespace)
            .field("retention", &self.retention)
            .field("lease_ttl", &self.lease_ttl)
            .field("wait", &self.wait)
            .finish_non_exhaustive()
    }
}

/// Makes the errors of statements on the records in a transaction of the caller.
pub(super) fn record_error<DB: Database>(attempted: &'static str) -> impl Fn(sqlx::Error) -> Error + Copy {
    move |error| match DB::lock_failure(&error) {
        Some(LockFailure::StaleSnapshot) => stale_snapshot_error(),
        Some(LockFailure::Deferred) => Error::Row { table: TABLE.into(), cause: RowError::Deferred },
        _ => Error::from_sqlx(attempted, error),
    }
}

/// Makes the error of a transaction that does not see the latest records.
pub(super) fn stale_snapshot_error() -> Error {
    Error::Row { table: TABLE.into(), cause: RowError::StaleSnapshot }
}
