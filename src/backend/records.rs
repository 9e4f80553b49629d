//! The records of requests that must take effect once: statements that all databases take alike, in
//! the caller's transactions and on connections of our own. What one of them has of its own is in
//! `records.rs` under its name.

mod list;
mod request;
mod resolution;

use std::time::Duration;

use sqlx::QueryBuilder;

use super::dialect::Dialect;
use super::{StoreFuture, hex, micros};

pub(crate) use list::{Place, Selection};
pub(crate) use resolution::{Resolved, Resolving};

/// The part of [`Database`](super::Database) that knows of records. Nobody's business outside.
pub trait Records: Dialect {
    /// This moment, by the database's clock, in microseconds.
    const NOW: &'static str;
    /// What makes an INSERT leave alone what is there already: what stands before and what behind.
    const INSERT_NEW: (&'static str, &'static str);
    /// What makes a SELECT lock what it finds, and pass over what others have locked.
    const SKIPPING: &'static str = "";
    /// Whether a DELETE may have such a SELECT in it. Otherwise one goes before it, in a
    /// transaction.
    const SKIPS_IN_DELETE: bool = false;
    /// What makes a SELECT from the records use the index by expiry, and lock nothing else.
    const BY_EXPIRY: &'static str = "";
    /// The name of a step, to be read as text.
    const STEP: &'static str;
    /// Whether a claim may wait for one that is not committed yet, so that another connection looks
    /// for that first.
    const PEEKS: bool;

    /// Selects a text that differs between databases, as far as the servers can tell: not between
    /// nodes of one cluster.
    const IDENTITY: &'static str;

    /// What that text stands for. `None`: for nothing that could be compared.
    fn identify(text: String) -> Option<String> {
        Some(text)
    }

    /// Binds a text.
    fn push_text(query: &mut QueryBuilder<Self>, text: &str);

    /// Binds the name of a step.
    fn push_step(query: &mut QueryBuilder<Self>, name: &str) {
        Self::push_text(query, name);
    }

    /// Binds bytes.
    fn push_bytes(query: &mut QueryBuilder<Self>, bytes: &[u8]);

    /// Reads a text.
    fn text(row: &Self::Row, column: usize) -> Result<String, sqlx::Error>;

    /// Reads bytes.
    fn bytes(row: &Self::Row, column: usize) -> Result<Option<Vec<u8>>, sqlx::Error>;

    /// Claims a key in the caller's transaction. Does not wait for a rival, as far as the database
    /// can do that.
    fn claim<'a>(conn: &'a mut Self::Connection, claim: &'a Claiming) -> StoreFuture<'a, Claimed>;

    /// Who has claimed a key in a transaction that is still open, where that is not told by reading
    /// the record.
    fn rival<'a>(conn: &'a mut Self::Connection, claim: &'a Claiming) -> StoreFuture<'a, Option<Rival>> {
        let _ = (conn, claim);
        Box::pin(async { Ok(None) })
    }
}

/// How a text and bytes are bound and read: the same words for each database, whose types are its
/// own.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
macro_rules! as_usual {
    () => {
        fn push_text(query: &mut QueryBuilder<Self>, text: &str) {
            query.push_bind(text.to_owned());
        }

        fn push_bytes(query: &mut QueryBuilder<Self>, bytes: &[u8]) {
            query.push_bind(bytes.to_vec());
        }

        fn text(row: &Self::Row, column: usize) -> Result<String, sqlx::Error> {
            row.try_get(column)
        }

        fn bytes(row: &Self::Row, column: usize) -> Result<Option<Vec<u8>>, sqlx::Error> {
            row.try_get(column)
        }
    };
}
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub(super) use as_usual;

/// The longest text that a column of the records takes, in bytes.
pub(crate) const MAX_BYTES: usize = 255;

/// A key with all that makes it one of its own.
#[derive(Clone)]
pub struct FullKey {
    pub namespace: String,
    /// Empty: everybody's.
    pub principal: String,
    /// This and the principal: their digests, where they are too long for their columns.
    pub key: String,
    /// SHA-256 of these.
    pub id: String,
}

impl FullKey {
    pub(crate) fn new(namespace: String, principal: String, key: String) -> Self {
        Self::of_columns(namespace, Column::of(principal), Column::of(key))
    }

    /// The key whose principal and key stand in their columns like this, if one of them looks like
    /// a digest: for an operator, who knows a long text by its digest only. A client never gets at
    /// a long key by its digest.
    pub(crate) fn of_digests(namespace: String, principal: String, key: String) -> Option<Self> {
        let (principal, key) = (Column::as_shown(principal), Column::as_shown(key));
        let is_digest = matches!(principal, Column::Digest(_)) || matches!(key, Column::Digest(_));
        is_digest.then(|| Self::of_columns(namespace, principal, key))
    }

    fn of_columns(namespace: String, principal: Column, key: Column) -> Self {
        let id = {
            let (of_principal, principal) = principal.part();
            let (of_key, key) = key.part();
            let domain = [&b"sqlock/idem/1"[..], b"/principal", of_principal, b"/key", of_key].concat();
            hex(&digest(&domain, [namespace.as_bytes(), principal.as_bytes(), key.as_bytes()]))
        };
        Self { namespace, principal: principal.into_text(), key: key.into_text(), id }
    }
}

/// What stands in a column for a text of any length.
enum Column {
    Text(String),
    /// Of a text that is too long.
    Digest(String),
}

impl Column {
    const DIGEST: &str = "sha256:";

    fn of(text: String) -> Self {
        use sha2::{Digest, Sha256};
        if text.len() <= MAX_BYTES {
            return Self::Text(text);
        }
        Self::Digest(format!("{}{}", Self::DIGEST, hex(&Sha256::digest(text))))
    }

    fn as_shown(text: String) -> Self {
        let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
        match text.strip_prefix(Self::DIGEST) {
            Some(digits) if digits.len() == 64 && digits.bytes().all(is_digit) => Self::Digest(text),
            _ => Self::of(text),
        }
    }

    /// What tells a text from a digest, and either.
    fn part(&self) -> (&'static [u8], &str) {
        match self {
            Self::Text(text) => (b"", text),
            Self::Digest(text) => (b"/digest", text),
        }
    }

    fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Digest(text) => text,
        }
    }
}

/// SHA-256 over parts with their lengths, so that no two lists of parts are alike.
pub(crate) fn digest<'a>(domain: &[u8], parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    hash.update(domain);
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// What is to be claimed.
pub struct Claiming {
    pub key: FullKey,
    pub fingerprint: Vec<u8>,
    /// What an attempt stores with its record, for those that take it up.
    pub request: Option<Vec<u8>>,
    /// For how long the record is to be kept, in microseconds.
    pub keep: i64,
    /// The key is refused afterwards.
    pub permanent: bool,
    /// The key is a token that must have been issued.
    pub issued: bool,
}

impl Claiming {
    /// What is to be claimed under a key, of which nothing else is known.
    pub(crate) fn of(key: FullKey) -> Self {
        Self { key, fingerprint: Vec::new(), request: None, keep: 0, permanent: false, issued: false }
    }
}

/// What came of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claimed {
    /// It is this transaction's.
    Ours,
    /// There is a record, or somebody is about to write one.
    Not,
    /// Somebody else's transaction is in the way.
    Taken,
}

/// Another transaction that has claimed the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rival {
    /// Which one, as the database calls it.
    pub who: i64,
    /// Whether it is about the same request.
    pub same: bool,
}

/// A record as it stands in its table.
#[derive(Clone)]
pub(crate) struct Record {
    pub(crate) key: FullKey,
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) state: State,
    pub(crate) token: i64,
    pub(crate) attempts: i64,
    pub(crate) permanent: bool,
    pub(crate) result: Option<Vec<u8>>,
    /// Microseconds since the Unix epoch, as `expires_at` and `now`: all by the database's clock.
    pub(crate) created_at: i64,
    pub(crate) expires_at: i64,
    pub(crate) now: i64,
}

impl Record {
    pub(crate) fn is_expired(&self) -> bool {
        self.expires_at <= self.now
    }

    /// Whether the key is new again.
    pub(crate) fn is_forgotten(&self) -> bool {
        self.state == State::Done && self.is_expired() && !self.permanent
    }
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Issued,
    Started,
    Unknown,
    Done,
    Expired,
}

impl State {
    pub(crate) const ALL: [Self; 5] = [Self::Issued, Self::Started, Self::Unknown, Self::Done, Self::Expired];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Issued => "issued",
            Self::Started => "started",
            Self::Unknown => "unknown",
            Self::Done => "done",
            Self::Expired => "expired",
        }
    }

    pub(crate) fn parse(text: &str) -> Result<Self, sqlx::Error> {
        Self::ALL
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| sqlx::Error::Decode(format!("{text:?} is no state of a record").into()))
    }
}

/// What is to be done about records, on a connection of our own. Each may be sent again.
pub(crate) enum Errand {
    /// Reads a record.
    Read(FullKey),
    /// Reads a record, and what of it a transaction has not committed yet.
    Peek(FullKey),
    /// Makes an attempt, under a lease with this token, the latest one of a record. `resume`: also
    /// of one whose outcome is not known.
    Start { claim: Claiming, token: i64, resume: bool },
    /// Writes how the attempt with this token has ended, if it is still the latest and has not
    /// ended.
    End { id: String, token: i64, ending: Ending },
    /// Deletes the record of the attempt with this token, if it is still the latest and has not
    /// ended well.
    Forget { id: String, token: i64 },
    /// Stores the result of a step of the attempt with this token, if it is still the latest.
    Step { step: Step, token: i64, result: Vec<u8> },
    /// Reads the result of a step.
    Recall(Step),
    /// Writes down a token that has been made.
    Issue { key: FullKey, ttl: Duration },
    /// Reads records in order of their creation.
    List(Selection),
    /// Reads the stored request of a record.
    Request { id: String, begun: i64 },
    /// Reads the names of the steps of a record.
    Steps { id: String, begun: i64 },
    /// Ends a record whose outcome is unknown, if the attempt with this token is the latest, and
    /// keeps who says so.
    Resolve(Resolving),
    /// Reads how the outcomes of a key were resolved.
    Resolutions { id: String },
    /// Tells which database the records are in.
    Identity,
    /// Deletes a record whose time has run out.
    Bury(FullKey),
    /// Deletes so many records whose time has run out.
    Purge { limit: u32 },
}

impl Errand {
    /// In words.
    pub(crate) fn attempted(&self) -> &'static str {
        match self {
            Self::Read(_) | Self::Peek(_) | Self::Request { .. } => "look a request up",
            Self::Start { .. } => "record an attempt",
            Self::End { .. } | Self::Forget { .. } => "record how an attempt ended",
            Self::Step { .. } => "record a step",
            Self::Recall(_) | Self::Steps { .. } => "look steps up",
            Self::Resolve(_) => "resolve an unknown outcome",
            Self::Resolutions { .. } => "look resolutions up",
            Self::Issue { .. } => "issue a token",
            Self::List(_) => "list requests",
            Self::Identity => "identify the database",
            Self::Bury(_) | Self::Purge { .. } => "purge requests",
        }
    }
}

/// Where the result of a step is kept.
#[derive(Clone)]
pub(crate) struct Step {
    pub(crate) id: String,
    pub(crate) begun: i64,
    pub(crate) name: String,
}

/// What came of an [`Errand`].
#[derive(Default)]
pub(crate) struct Findings {
    pub(crate) records: Vec<Record>,
    /// A transaction has the record that is not committed yet; with what fingerprint, if it can be
    /// seen that it has claimed it.
    pub(crate) busy: bool,
    pub(crate) fingerprint: Option<Vec<u8>>,
    /// How many rows were changed.
    pub(crate) changed: u64,
    pub(crate) result: Option<Vec<u8>>,
    pub(crate) steps: Vec<String>,
    pub(crate) resolutions: Vec<Resolved>,
    pub(crate) identity: Option<String>,
}

/// Carries an errand out.
pub(crate) async fn carry<DB: Records>(conn: &mut DB::Connection, errand: &Errand) -> Result<Findings, sqlx::Error> {
    match errand {
        Errand::Read(key) | Errand::Peek(key) => {
            let records = read::<DB>(conn, &key.id, "").await?.into_iter().collect();
            Ok(Findings { records, ..Findings::default() })
        }
        Errand::Start { claim, token, resume } => {
            let records = start::<DB>(conn, claim, *token, *resume).await?.into_iter().collect();
            Ok(Findings { records, ..Findings::default() })
        }
        Errand::End { id, token, ending } => end::<DB>(conn, id, *token, ending).await.map(changed),
        Errand::Forget { id, token } => {
            forget::<DB>(conn, id, &[State::Started, State::Unknown], *token).await.map(changed)
        }
        Errand::Step { step, token, result } => put_step::<DB>(conn, step, *token, result).await.map(changed),
        Errand::Recall(step) => Ok(Findings { result: recall::<DB>(conn, step).await?, ..Findings::default() }),
        Errand::Issue { key, ttl } => issue::<DB>(conn, key, micros(*ttl)).await.map(changed),
        Errand::List(selection) => {
            Ok(Findings { records: list::list::<DB>(conn, selection).await?, ..Findings::default() })
        }
        Errand::Request { id, begun } => {
            Ok(Findings { result: request::read::<DB>(conn, id, *begun).await?, ..Findings::default() })
        }
        Errand::Steps { id, begun } => {
            Ok(Findings { steps: steps::<DB>(conn, id, *begun).await?, ..Findings::default() })
        }
        Errand::Resolve(resolving) => resolution::resolve::<DB>(conn, resolving).await.map(changed),
        Errand::Resolutions { id } => {
            Ok(Findings { resolutions: resolution::list::<DB>(conn, id).await?, ..Findings::default() })
        }
        Errand::Identity => Ok(Findings { identity: identity::<DB>(conn).await?, ..Findings::default() }),
        Errand::Bury(key) => bury::<DB>(conn, std::slice::from_ref(&key.id)).await.map(changed),
        Errand::Purge { limit } => purge::<DB>(conn, *limit).await.map(changed),
    }
}

fn changed(rows: u64) -> Findings {
    Findings { changed: rows, ..Findings::default() }
}

const COLUMNS: &str = "id, namespace, principal, request_key, fingerprint, state, token, attempts, permanent, result, created_at, \
     expires_at, ";

/// Up to the values.
pub(crate) const INTO: &str = "sqlock_idem (id, namespace, principal, request_key, fingerprint, state, token, attempts, \
     permanent, request, issued_until, created_at, expires_at)";

/// What has been done may be done anew once its time has run out: then the key counts as never
/// used. An attempt that has not ended, or nobody knows how, has no such time. (NOT IN, so that no
/// database looks it up in the index that begins with the state.)
const EXPIRED: &str = "state NOT IN ('started', 'unknown', 'expired') AND expires_at <= ";

const MICROS_PER_SECOND: i64 = 1_000_000;

/// When a key that is refused for ever expires: the last moment of the year 9999. So the index by
/// expiry does not lead to it.
const NEVER: i64 = 253_402_300_799_999_999;

/// The values of a new record.
pub(crate) fn push_values<DB: Records>(query: &mut QueryBuilder<DB>, claim: &Claiming, state: State, token: i64) {
    let FullKey { namespace, principal, key, id } = &claim.key;
    for text in [id, namespace, principal, key] {
        DB::push_text(query, text);
        query.push(", ");
    }
    DB::push_bytes(query, &claim.fingerprint);
    query.push(", '").push(state.as_str()).push("', ");
    DB::push_integer(query, token);
    let attempts = i64::from(state == State::Started);
    query.push(", ").push(attempts).push(", ").push(i64::from(claim.permanent)).push(", ");
    request::push(query, claim, state);
    query.push(", ");
    if state == State::Issued {
        query.push(DB::NOW).push(" + ");
        DB::push_integer(query, claim.keep);
    } else {
        query.push("0");
    }
    query.push(", ").push(DB::NOW).push(", ").push(DB::NOW).push(" + ");
    DB::push_integer(query, claim.keep);
}

/// Behind the insertion of a new record: one whose time has run out becomes it.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn push_or_anew<DB: Records>(query: &mut QueryBuilder<DB>) {
    query
        .push(
            " ON CONFLICT (id) DO UPDATE SET fingerprint = excluded.fingerprint, token = excluded.token,
                attempts = excluded.attempts, permanent = excluded.permanent, result = NULL,
                created_at = excluded.created_at, expires_at = excluded.expires_at
              WHERE sqlock_idem.state = 'done' AND sqlock_idem.permanent = 0 AND sqlock_idem.expires_at <= ",
        )
        .push(DB::NOW);
}

/// Uses a token up, up to conditions of a database's own.
pub(crate) fn push_consume<DB: Records>(query: &mut QueryBuilder<DB>, claim: &Claiming, state: State, token: i64) {
    query.push("UPDATE sqlock_idem SET fingerprint = ");
    DB::push_bytes(query, &claim.fingerprint);
    query.push(", token = ");
    DB::push_integer(query, token);
    let attempts = i64::from(state == State::Started);
    query.push(", attempts = ").push(attempts).push(", permanent = ").push(i64::from(claim.permanent));
    query.push(", request = ");
    request::push(query, claim, state);
    query.push(", created_at = ").push(DB::NOW);
    query.push(", expires_at = CASE WHEN state = 'issued' THEN ").push(DB::NOW).push(" + ");
    DB::push_integer(query, claim.keep);
    // MySQL assigns from left to right.
    query.push(" ELSE expires_at END, state = '").push(state.as_str()).push("' WHERE id = ");
    DB::push_text(query, &claim.key.id);
    query.push(" AND state = 'issued' AND expires_at > ").push(DB::NOW);
}

/// Reads a record; `present`: as it is now, not as it was when the transaction began to read.
pub(crate) async fn read<DB: Records>(
    conn: &mut DB::Connection,
    id: &str,
    present: &str,
) -> Result<Option<Record>, sqlx::Error> {
    let mut query = QueryBuilder::new("SELECT ");
    query.push(COLUMNS).push(DB::NOW).push(" FROM sqlock_idem WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(present);
    DB::fetch(conn, &mut query).await?.first().map(record::<DB>).transpose()
}

fn record<DB: Records>(row: &DB::Row) -> Result<Record, sqlx::Error> {
    Ok(Record {
        key: FullKey {
            id: DB::text(row, 0)?,
            namespace: DB::text(row, 1)?,
            principal: DB::text(row, 2)?,
            key: DB::text(row, 3)?,
        },
        fingerprint: DB::bytes(row, 4)?.unwrap_or_default(),
        state: State::parse(&DB::text(row, 5)?)?,
        token: DB::integer(row, 6)?,
        attempts: DB::integer(row, 7)?,
        permanent: DB::integer(row, 8)? != 0,
        result: DB::bytes(row, 9)?,
        created_at: DB::integer(row, 10)?,
        expires_at: DB::integer(row, 11)?,
        now: DB::integer(row, 12)?,
    })
}

/// Stores the result of what was claimed in this transaction, and for how long it is to be kept
/// from now on, in microseconds.
pub(crate) async fn complete<DB: Records>(
    conn: &mut DB::Connection,
    id: &str,
    result: &[u8],
    keep: i64,
) -> Result<bool, sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET result = ");
    DB::push_bytes(&mut query, result);
    // After short work the time of the claim is good enough: to change it costs an entry in each
    // index.
    query.push(", expires_at = CASE WHEN ").push(DB::NOW).push(" - created_at > ");
    query.push((keep / 100).min(MICROS_PER_SECOND)).push(" THEN ").push(DB::NOW).push(" + ");
    DB::push_integer(&mut query, keep);
    query.push(" ELSE expires_at END WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(" AND state = 'done' AND token = 0 AND result IS NULL");
    Ok(DB::execute(conn, &mut query).await? > 0)
}

/// Of what was claimed in a transaction that committed without a result, nobody knows how far it
/// came. The token is there for an operator to name, and lower than that of any attempt.
pub(crate) async fn mark_unknown<DB: Records>(conn: &mut DB::Connection, id: &str) -> Result<(), sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET state = 'unknown', token = 1 WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(" AND state = 'done' AND token = 0 AND result IS NULL");
    DB::execute(conn, &mut query).await.map(|_| ())
}

async fn start<DB: Records>(
    conn: &mut DB::Connection,
    claim: &Claiming,
    token: i64,
    resume: bool,
) -> Result<Option<Record>, sqlx::Error> {
    let id = std::slice::from_ref(&claim.key.id);
    let changed = if claim.issued {
        let mut query = QueryBuilder::new("");
        push_consume::<DB>(&mut query, claim, State::Started, token);
        DB::execute(conn, &mut query).await?
    } else if resume {
        0
    } else {
        bury::<DB>(conn, id).await?;
        let mut query = QueryBuilder::new(DB::INSERT_NEW.0);
        query.push(INTO).push(" VALUES (");
        push_values::<DB>(&mut query, claim, State::Started, token);
        query.push(")").push(DB::INSERT_NEW.1);
        DB::execute(conn, &mut query).await?
    };
    if changed == 0 {
        let mut query =
            QueryBuilder::new("UPDATE sqlock_idem SET state = 'started', attempts = attempts + 1, token = ");
        DB::push_integer(&mut query, token);
        query.push(" WHERE id = ");
        DB::push_text(&mut query, &claim.key.id);
        query.push(" AND token < ");
        DB::push_integer(&mut query, token);
        if resume {
            query.push(" AND state IN ('started', 'unknown')");
        } else {
            query.push(" AND state = 'started' AND fingerprint = ");
            DB::push_bytes(&mut query, &claim.fingerprint);
        }
        DB::execute(conn, &mut query).await?;
    }
    read::<DB>(conn, &claim.key.id, "").await
}

/// How an attempt has ended.
#[derive(Clone)]
pub(crate) enum Ending {
    /// The result, and for how long it is to be kept from now on, in microseconds: how long the
    /// attempt took does not count.
    Done {
        result: Vec<u8>,
        keep: i64,
    },
    Unknown,
}

/// Writes how the attempt with this token has ended, if it is still the latest and has not ended.
pub(crate) async fn end<DB: Records>(
    conn: &mut DB::Connection,
    id: &str,
    token: i64,
    ending: &Ending,
) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET ");
    let state = match ending {
        Ending::Done { result, keep } => {
            query.push("request = NULL, result = ");
            DB::push_bytes(&mut query, result);
            query.push(", expires_at = ").push(DB::NOW).push(" + ");
            DB::push_integer(&mut query, *keep);
            query.push(", ");
            State::Done
        }
        Ending::Unknown => State::Unknown,
    };
    query.push("state = '").push(state.as_str()).push("' WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(" AND state = 'started' AND token = ");
    DB::push_integer(&mut query, token);
    DB::execute(conn, &mut query).await
}

/// Deletes the record of the attempt with this token, if it is in one of these states.
async fn forget<DB: Records>(
    conn: &mut DB::Connection,
    id: &str,
    states: &[State],
    token: i64,
) -> Result<u64, sqlx::Error> {
    let push_latest = |query: &mut QueryBuilder<DB>| {
        query.push(" WHERE id = ");
        DB::push_text(query, id);
        query.push(" AND state IN (");
        let mut list = query.separated(", ");
        for state in states {
            list.push(format_args!("'{}'", state.as_str()));
        }
        query.push(") AND token = ");
        DB::push_integer(query, token);
    };
    // A token that was issued is as good as before.
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET state = 'issued', fingerprint = ");
    DB::push_bytes(&mut query, &[]);
    query.push(", attempts = 0, permanent = 0, request = NULL, expires_at = issued_until");
    push_latest(&mut query);
    query.push(" AND issued_until > ").push(DB::NOW);
    let mut forgotten = DB::execute(conn, &mut query).await?;
    if forgotten == 0 {
        let mut query = QueryBuilder::new("DELETE FROM sqlock_idem");
        push_latest(&mut query);
        forgotten = DB::execute(conn, &mut query).await?;
    }
    bury_steps::<DB>(conn, &[id.to_owned()]).await?;
    Ok(forgotten)
}

/// Keeps any other attempt from being made until this transaction has ended, if the attempt with
/// this token is the latest.
pub(crate) async fn hold_up<DB: Records>(conn: &mut DB::Connection, id: &str, token: i64) -> Result<bool, sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET token = token WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(" AND state = 'started' AND token = ");
    DB::push_integer(&mut query, token);
    Ok(DB::execute(conn, &mut query).await? > 0)
}

/// Stores the result of a step, if the attempt with this token is still the latest. A step that is
/// stored stays as it is.
pub(crate) async fn put_step<DB: Records>(
    conn: &mut DB::Connection,
    step: &Step,
    token: i64,
    result: &[u8],
) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new(DB::INSERT_NEW.0);
    query.push("sqlock_idem_step (id, begun, step, result) SELECT id, created_at, ");
    DB::push_step(&mut query, &step.name);
    query.push(", ");
    DB::push_bytes(&mut query, result);
    query.push(" FROM sqlock_idem WHERE id = ");
    DB::push_text(&mut query, &step.id);
    query.push(" AND state = 'started' AND token = ");
    DB::push_integer(&mut query, token);
    query.push(" AND created_at = ");
    DB::push_integer(&mut query, step.begun);
    query.push(DB::INSERT_NEW.1);
    DB::execute(conn, &mut query).await
}

/// Reads the result of a step.
pub(crate) async fn recall<DB: Records>(
    conn: &mut DB::Connection,
    step: &Step,
) -> Result<Option<Vec<u8>>, sqlx::Error> {
    let mut query = QueryBuilder::new("SELECT result FROM sqlock_idem_step WHERE id = ");
    DB::push_text(&mut query, &step.id);
    query.push(" AND begun = ");
    DB::push_integer(&mut query, step.begun);
    query.push(" AND step = ");
    DB::push_step(&mut query, &step.name);
    let rows = DB::fetch(conn, &mut query).await?;
    rows.first().map_or(Ok(None), |row| DB::bytes(row, 0))
}

async fn issue<DB: Records>(conn: &mut DB::Connection, key: &FullKey, ttl: i64) -> Result<u64, sqlx::Error> {
    let claim = Claiming { keep: ttl, issued: true, ..Claiming::of(key.clone()) };
    let mut query = QueryBuilder::new(DB::INSERT_NEW.0);
    query.push(INTO).push(" VALUES (");
    push_values::<DB>(&mut query, &claim, State::Issued, 0);
    query.push(")").push(DB::INSERT_NEW.1);
    DB::execute(conn, &mut query).await
}

/// Tells which database the records are in. `None`: that cannot be said.
pub(crate) async fn identity<DB: Records>(conn: &mut DB::Connection) -> Result<Option<String>, sqlx::Error> {
    let found = texts::<DB>(conn, &mut QueryBuilder::new(DB::IDENTITY)).await?;
    Ok(found.into_iter().next().and_then(DB::identify))
}

async fn steps<DB: Records>(conn: &mut DB::Connection, id: &str, begun: i64) -> Result<Vec<String>, sqlx::Error> {
    let mut query = QueryBuilder::new("SELECT ");
    query.push(DB::STEP).push(" FROM sqlock_idem_step WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(" AND begun = ");
    DB::push_integer(&mut query, begun);
    query.push(" ORDER BY step");
    texts::<DB>(conn, &mut query).await
}

/// Forgets the results, and the steps, of those of these records whose time has run out and whose
/// keys are refused from then on.
async fn entomb<DB: Records>(conn: &mut DB::Connection, ids: &[String]) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET result = NULL, state = 'expired', expires_at = ");
    query.push(NEVER).push(" WHERE ");
    push_ids::<DB>(&mut query, ids);
    query.push(" AND state = 'done' AND permanent = 1 AND expires_at <= ").push(DB::NOW);
    DB::execute(conn, &mut query).await
}

/// Deletes those of these records whose time has run out, with their steps. One that is being used,
/// or used anew, is passed over: its transaction may take its time.
async fn bury<DB: Records>(conn: &mut DB::Connection, ids: &[String]) -> Result<u64, sqlx::Error> {
    let mut free = QueryBuilder::new("SELECT id FROM sqlock_idem WHERE ");
    push_ids::<DB>(&mut free, ids);
    free.push(" AND permanent = 0 AND ").push(EXPIRED).push(DB::NOW).push(DB::SKIPPING);
    let ids = if DB::SKIPS_IN_DELETE { ids.to_vec() } else { texts::<DB>(conn, &mut free).await? };
    if ids.is_empty() {
        return Ok(0);
    }
    let mut query = QueryBuilder::new("DELETE FROM sqlock_idem WHERE ");
    push_ids::<DB>(&mut query, &ids);
    if DB::SKIPS_IN_DELETE {
        query.push(" AND id IN (SELECT id FROM sqlock_idem WHERE ");
        push_ids::<DB>(&mut query, &ids);
        query.push(DB::SKIPPING).push(")");
    }
    // Again: somebody may have used the key anew since it was looked up.
    query.push(" AND permanent = 0 AND ").push(EXPIRED).push(DB::NOW);
    let buried = DB::execute(conn, &mut query).await?;
    if buried > 0 {
        bury_steps::<DB>(conn, &ids).await?;
    }
    Ok(buried)
}

/// The texts in the first column.
async fn texts<DB: Records>(
    conn: &mut DB::Connection,
    query: &mut QueryBuilder<DB>,
) -> Result<Vec<String>, sqlx::Error> {
    DB::fetch(conn, query).await?.iter().map(|row| DB::text(row, 0)).collect()
}

/// Deletes the steps of records that are not there any more, or whose results are forgotten.
async fn bury_steps<DB: Records>(conn: &mut DB::Connection, ids: &[String]) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new("DELETE FROM sqlock_idem_step WHERE ");
    push_ids::<DB>(&mut query, ids);
    query.push(
        " AND NOT EXISTS (SELECT 1 FROM sqlock_idem AS r
                           WHERE r.id = sqlock_idem_step.id AND r.created_at = sqlock_idem_step.begun
                             AND r.state <> 'expired')",
    );
    DB::execute(conn, &mut query).await
}

fn push_ids<DB: Records>(query: &mut QueryBuilder<DB>, ids: &[String]) {
    query.push("id IN (");
    for (i, id) in ids.iter().enumerate() {
        if i > 0 {
            query.push(", ");
        }
        DB::push_text(query, id);
    }
    query.push(")");
}

async fn purge<DB: Records>(conn: &mut DB::Connection, limit: u32) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new("SELECT id FROM sqlock_idem");
    query
        .push(DB::BY_EXPIRY)
        .push(" WHERE ")
        .push(EXPIRED)
        .push(DB::NOW)
        .push(" ORDER BY expires_at LIMIT ")
        .push(limit)
        .push(DB::SKIPPING);
    let ids = texts::<DB>(conn, &mut query).await?;
    if !ids.is_empty() {
        let entombed = entomb::<DB>(conn, &ids).await?;
        if entombed > 0 {
            bury_steps::<DB>(conn, &ids).await?;
        }
        return Ok(entombed + bury::<DB>(conn, &ids).await?);
    }
    // What a process has left that died between the deletion of a record and that of its steps.
    let mut query = QueryBuilder::new(
        "SELECT DISTINCT id FROM sqlock_idem_step
          WHERE NOT EXISTS (SELECT 1 FROM sqlock_idem AS r
                             WHERE r.id = sqlock_idem_step.id AND r.created_at = sqlock_idem_step.begun
                             AND r.state <> 'expired')
          LIMIT ",
    );
    query.push(limit);
    let orphaned = texts::<DB>(conn, &mut query).await?;
    if !orphaned.is_empty() {
        bury_steps::<DB>(conn, &orphaned).await?;
    }
    Ok(0)
}
