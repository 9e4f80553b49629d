//! Claims of keys in the caller's transactions, and their results.

use sqlx::QueryBuilder;

use super::key::FullKey;
use super::record::State;
use super::{Records, request};

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

/// Up to the values.
pub(crate) const INTO: &str = "sqlock_idem (id, namespace, principal, request_key, fingerprint, state, token, attempts, \
     permanent, request, issued_until, created_at, expires_at)";

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

const MICROS_PER_SECOND: i64 = 1_000_000;

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

pub(super) async fn issue<DB: Records>(conn: &mut DB::Connection, key: &FullKey, ttl: i64) -> Result<u64, sqlx::Error> {
    let claim = Claiming { keep: ttl, issued: true, ..Claiming::of(key.clone()) };
    let mut query = QueryBuilder::new(DB::INSERT_NEW.0);
    query.push(INTO).push(" VALUES (");
    push_values::<DB>(&mut query, &claim, State::Issued, 0);
    query.push(")").push(DB::INSERT_NEW.1);
    DB::execute(conn, &mut query).await
}
