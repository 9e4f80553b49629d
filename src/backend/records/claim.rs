//! Claims of keys in the caller's transactions, and their results.

use sqlx::QueryBuilder;

use super::key::FullKey;
use super::record::RecordState;
use super::{RecordDialect, request};

/// A request to claim a key.
#[derive(Clone)]
pub struct ClaimRequest {
    pub key: FullKey,
    pub fingerprint: Vec<u8>,
    /// The request that an attempt stores with its record, for attempts that resume it.
    pub request: Option<Vec<u8>>,
    /// The retention of the record, in microseconds.
    pub retention_micros: i64,
    /// Whether the key is refused after the retention.
    pub permanent: bool,
    /// Whether the key is a token that must have been issued.
    pub issued: bool,
    /// Whether a claim that gets committed without its result counts as unknown. Otherwise it
    /// counts as done, with null.
    pub is_unknown_until_done: bool,
}

impl ClaimRequest {
    /// Makes a request for a key, without its fingerprint and retention.
    pub(crate) fn for_key(key: FullKey) -> Self {
        Self {
            key,
            fingerprint: Vec::new(),
            request: None,
            retention_micros: 0,
            permanent: false,
            issued: false,
            is_unknown_until_done: false,
        }
    }

    /// Returns the state of the claim until its result is stored.
    pub(crate) fn open_state(&self) -> RecordState {
        if self.is_unknown_until_done { RecordState::Unknown } else { RecordState::Done }
    }
}

/// The outcome of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// This transaction has claimed the key.
    Claimed,
    /// The key has a record, or another transaction is about to commit one.
    RecordExists,
    /// Another transaction has locked the record.
    Locked,
}

/// Another transaction that has claimed the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rival {
    /// The number of its server process.
    pub process_id: i64,
    /// Whether its request has the same fingerprint.
    pub is_same_request: bool,
}

/// The table and the columns of an INSERT, up to the values.
pub(crate) const INTO: &str = "sqlock_idem (id, namespace, principal, request_key, fingerprint, state, token, attempts, \
     permanent, request, issued_until, created_at, expires_at)";

/// Adds the token of a record: that of an attempt, or 0. Operators resolve an unknown outcome by
/// its token, so each claim with an unknown outcome has a token of its own: it is lower than the
/// token of every lease that is granted from now on.
fn push_token<DB: RecordDialect>(query: &mut QueryBuilder<DB>, state: RecordState, token: i64) {
    if state == RecordState::Unknown {
        query.push(DB::NOW).push(" - 1");
    } else {
        DB::push_integer(query, token);
    }
}

/// Adds the values of a new record. `token`: that of the attempt, or 0.
pub(crate) fn push_values<DB: RecordDialect>(
    query: &mut QueryBuilder<DB>,
    claim: &ClaimRequest,
    state: RecordState,
    token: i64,
) {
    let FullKey { namespace, principal, key, id } = &claim.key;
    for text in [id, namespace, principal, key] {
        DB::push_text(query, text);
        query.push(", ");
    }
    DB::push_bytes(query, &claim.fingerprint);
    query.push(", '").push(state.as_str()).push("', ");
    push_token(query, state, token);
    let attempts = i64::from(state == RecordState::Started);
    query.push(", ").push(attempts).push(", ").push(i64::from(claim.permanent)).push(", ");
    request::push(query, claim, state);
    query.push(", ");
    if state == RecordState::Issued {
        query.push(DB::NOW).push(" + ");
        DB::push_integer(query, claim.retention_micros);
    } else {
        query.push("0");
    }
    query.push(", ").push(DB::NOW).push(", ").push(DB::NOW).push(" + ");
    DB::push_integer(query, claim.retention_micros);
}

/// Adds the clause with which the INSERT of a new record replaces an expired one.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn push_replace_expired<DB: RecordDialect>(query: &mut QueryBuilder<DB>) {
    query
        .push(
            " ON CONFLICT (id) DO UPDATE SET fingerprint = excluded.fingerprint, state = excluded.state,
                token = excluded.token, attempts = excluded.attempts, permanent = excluded.permanent,
                request = excluded.request, issued_until = excluded.issued_until, result = NULL,
                created_at = excluded.created_at, expires_at = excluded.expires_at
              WHERE sqlock_idem.state = 'done' AND sqlock_idem.permanent = 0 AND sqlock_idem.expires_at <= ",
        )
        .push(DB::NOW);
}

/// Adds the statement that uses an issued token. `token`: that of the attempt, or 0. The caller may
/// add conditions of its database.
pub(crate) fn push_use_token<DB: RecordDialect>(
    query: &mut QueryBuilder<DB>,
    claim: &ClaimRequest,
    state: RecordState,
    token: i64,
) {
    query.push("UPDATE sqlock_idem SET fingerprint = ");
    DB::push_bytes(query, &claim.fingerprint);
    query.push(", token = ");
    push_token(query, state, token);
    let attempts = i64::from(state == RecordState::Started);
    query.push(", attempts = ").push(attempts).push(", permanent = ").push(i64::from(claim.permanent));
    query.push(", request = ");
    request::push(query, claim, state);
    query.push(", created_at = ").push(DB::NOW);
    query.push(", expires_at = CASE WHEN state = 'issued' THEN ").push(DB::NOW).push(" + ");
    DB::push_integer(query, claim.retention_micros);
    // MySQL assigns from left to right.
    query.push(" ELSE expires_at END, state = '").push(state.as_str()).push("' WHERE id = ");
    DB::push_text(query, &claim.key.id);
    query.push(" AND state = 'issued' AND expires_at > ").push(DB::NOW);
}

const MICROS_PER_SECOND: i64 = 1_000_000;

/// Stores the result of the claim of this transaction, which is in this state, and the retention
/// from now on, in microseconds. Returns `false` if this transaction has no open claim.
pub(crate) async fn complete<DB: RecordDialect>(
    conn: &mut DB::Connection,
    id: &str,
    state: RecordState,
    result: &[u8],
    retention_micros: i64,
) -> Result<bool, sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET result = ");
    DB::push_bytes(&mut query, result);
    if state != RecordState::Done {
        query.push(", state = 'done', token = 0");
    }
    // After short work the expiry of the claim stays: a change would cost an entry in each index.
    query.push(", expires_at = CASE WHEN ").push(DB::NOW).push(" - created_at > ");
    query.push((retention_micros / 100).min(MICROS_PER_SECOND)).push(" THEN ").push(DB::NOW).push(" + ");
    DB::push_integer(&mut query, retention_micros);
    query.push(" ELSE expires_at END WHERE id = ");
    DB::push_text(&mut query, id);
    // An attempt under a lease has not written the record.
    query.push(" AND state = '").push(state.as_str()).push("' AND attempts = 0 AND result IS NULL");
    Ok(DB::execute(conn, &mut query).await? > 0)
}

/// Stores a token that a client may use once.
pub(super) async fn issue<DB: RecordDialect>(
    conn: &mut DB::Connection,
    key: &FullKey,
    ttl: i64,
) -> Result<u64, sqlx::Error> {
    let claim = ClaimRequest { retention_micros: ttl, issued: true, ..ClaimRequest::for_key(key.clone()) };
    let mut query = QueryBuilder::new(DB::INSERT_NEW.0);
    query.push(INTO).push(" VALUES (");
    push_values::<DB>(&mut query, &claim, RecordState::Issued, 0);
    query.push(")").push(DB::INSERT_NEW.1);
    DB::execute(conn, &mut query).await
}
