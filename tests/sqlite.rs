//! The conformance suite on Sqlite.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic)]

#[path = "conformance/mod.rs"]
mod conformance;
#[path = "sqlite/file.rs"]
mod file;
#[path = "support/mod.rs"]
mod support;

/// The sqlx driver under test.
type Sql = sqlx::Sqlite;

/// The database under test.
const DATABASE: support::Database = support::Database::Sqlite;
