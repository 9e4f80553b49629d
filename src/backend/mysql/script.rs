//! Transactions of several statements.

use std::fmt;

use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _};

use crate::backend::hex;
use crate::name::LockName;
use crate::protocol::ChangeOutcome;

/// How a server receives the statements of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sending {
    /// As one text: the server does not wait for the client while rows are locked.
    OneText,
    /// One by one, on Galera. When another node's commit aborts a transaction between two
    /// statements of one text, the server may not report it, and commits other statements of the
    /// transaction by themselves.
    OneByOne,
}

/// The statements of one request or batch, most of them a transaction.
///
/// A transaction about one name locks rows, most of them with SKIP LOCKED, counts them, checks the
/// conditions, and sets `@sqlock_name` to the name, or to NULL if it must not continue. The writing
/// statements look rows up by this variable, so they lock nothing when it is NULL. A variable keeps
/// its value from the previous script, unless the SELECT that sets it returns exactly one row.
pub(super) struct Script {
    sending: Sending,
    is_transaction: bool,
    statements: Vec<String>,
}

impl Script {
    /// Begins a transaction.
    pub(super) fn new(sending: Sending) -> Self {
        Self { sending, is_transaction: true, statements: vec!["START TRANSACTION".into()] }
    }

    /// Begins statements that commit one by one.
    pub(super) fn in_autocommit(sending: Sending) -> Self {
        Self { sending, is_transaction: false, statements: Vec::new() }
    }

    /// Adds a statement, with literals instead of its question marks.
    pub(super) fn add(&mut self, sql: &str, literals: &[&str]) {
        self.statements.push(filled(sql, literals));
    }

    /// Commits, and returns the row of the SELECT `answer`, which runs after the commit.
    pub(super) async fn run(mut self, conn: &mut MySqlConnection, answer: &str) -> Result<MySqlRow, sqlx::Error> {
        self.add("COMMIT", &[]);
        self.add(answer, &[]);
        self.send(conn).await?.pop().ok_or(sqlx::Error::RowNotFound)
    }

    /// Commits, and returns the rows of all statements.
    pub(super) async fn rows(mut self, conn: &mut MySqlConnection) -> Result<Vec<MySqlRow>, sqlx::Error> {
        if self.is_transaction {
            self.add("COMMIT", &[]);
        }
        self.send(conn).await
    }

    async fn send(self, conn: &mut MySqlConnection) -> Result<Vec<MySqlRow>, sqlx::Error> {
        let texts = match self.sending {
            Sending::OneText => vec![self.statements.join(";\n")],
            Sending::OneByOne => self.statements,
        };
        let mut rows = Vec::new();
        for text in texts {
            match sqlx::raw_sql(AssertSqlSafe(text)).fetch_all(&mut *conn).await {
                Ok(read) => rows.extend(read),
                Err(error @ sqlx::Error::Database(_)) => {
                    // The server carried out nothing after the statement that failed.
                    sqlx::raw_sql("ROLLBACK").execute(conn).await?;
                    return Err(error);
                }
                // The server rolls back when the connection is closed.
                Err(error) => return Err(error),
            }
        }
        Ok(rows)
    }
}

/// Replaces the question marks of a statement by literals.
pub(super) fn filled(sql: &str, literals: &[&str]) -> String {
    let mut literals = literals.iter();
    let mut parts = sql.split('?');
    let mut text = String::from(parts.next().unwrap_or_default());
    for part in parts {
        text.push_str(literals.next().copied().unwrap_or("NULL"));
        text.push_str(part);
    }
    text
}

/// Joins literals for IN.
pub(super) fn list<T>(of: &[T], literal: fn(&T) -> String) -> String {
    of.iter().map(literal).collect::<Vec<_>>().join(", ")
}

/// A name as a literal: its characters if none of them needs an escape, or its bytes.
pub(super) fn name_literal(name: &LockName) -> String {
    match name.as_str() {
        plain if plain.bytes().all(is_plain) => format!("'{plain}'"),
        other => format!("X'{}'", hex(other.as_bytes())),
    }
}

/// A text as a literal: its characters if none of them needs an escape, or its bytes.
pub(super) fn text_literal(text: &str) -> String {
    match text {
        plain if plain.bytes().all(|byte| byte == b' ' || is_plain(byte)) => format!("'{plain}'"),
        other => format!("CONVERT(X'{}' USING utf8mb4)", hex(other.as_bytes())),
    }
}

/// Returns whether a literal has this byte of a text as it is.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_.:/@".contains(&byte)
}

/// An identity as a literal: hexadecimal digits, or nothing.
pub(super) fn id_literal(id: impl fmt::Display) -> String {
    format!("'{id}'")
}

/// Reads a flag or a count of a script.
pub(super) fn read_flag(row: &MySqlRow, column: usize) -> Result<bool, sqlx::Error> {
    row.try_get::<i64, _>(column).map(|number| number != 0)
}

#[rustfmt::skip]
pub(super) const AMENDED: &str = "SELECT CAST(@sqlock_held AS SIGNED), CAST(@sqlock_name IS NOT NULL AS SIGNED)";

/// Reads the answer of [`AMENDED`].
pub(super) fn amended(row: &MySqlRow) -> Result<ChangeOutcome, sqlx::Error> {
    Ok(match (read_flag(row, 0)?, read_flag(row, 1)?) {
        (_, true) => ChangeOutcome::Done,
        (true, false) => ChangeOutcome::Locked,
        (false, false) => ChangeOutcome::NotHeld,
    })
}

/// Overwrites an existing entry with the inserted values.
#[rustfmt::skip]
macro_rules! overwrite {
    () => {
        "ON DUPLICATE KEY UPDATE
       owner = VALUES(owner), client = VALUES(client), is_renewed = VALUES(is_renewed), units = VALUES(units), permits = VALUES(permits),
       token = VALUES(token), ttl = VALUES(ttl), arrived_at = VALUES(arrived_at), expires_at = VALUES(expires_at),
       acquired_at = VALUES(acquired_at), holder = VALUES(holder), label = VALUES(label)"
    };
}

/// Locks the row of a name. Bind order: name.
#[rustfmt::skip]
pub(super) const LOCK_NAME: &str = "SELECT COUNT(*) INTO @sqlock_leases FROM sqlock_lease AS s WHERE s.name = ? FOR UPDATE SKIP LOCKED";

/// Locks the rows of clients, which the argument selects as `n`. Bind order: those of the argument.
#[rustfmt::skip]
macro_rules! lock_clients {
    ($($clients:tt)*) => {
        concat!("
SELECT COUNT(*) INTO @sqlock_clients FROM ", $($clients)*, " STRAIGHT_JOIN sqlock_client AS c ON c.id = n.id
   FOR UPDATE SKIP LOCKED")
    };
}

/// Whether [`lock_clients`] has locked every row.
#[rustfmt::skip]
macro_rules! are_clients_locked {
    ($($clients:tt)*) => {
        concat!("@sqlock_clients = (SELECT COUNT(*) FROM ", $($clients)*, " STRAIGHT_JOIN sqlock_client AS c ON c.id = n.id)")
    };
}

/// Gives clients a notice if the script continues. A client without a row gets one: a registration
/// under way must wait for this transaction and read the notice. Its notices start at the clock, so
/// that they differ from those of an earlier row, which the sweeper has deleted.
#[rustfmt::skip]
macro_rules! notice {
    ($($clients:tt)*) => {
        concat!("
INSERT INTO sqlock_client (id, beat_at, notice)
SELECT n.id, 0, ", now!(), " FROM ", $($clients)*, " WHERE @sqlock_name IS NOT NULL ORDER BY n.id
    ON DUPLICATE KEY UPDATE notice = sqlock_client.notice + 1")
    };
}
