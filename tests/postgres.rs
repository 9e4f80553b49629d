//! The conformance suite on Postgres.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic)]

#[path = "conformance/mod.rs"]
mod conformance;
#[path = "postgres/notification.rs"]
mod notification;
#[path = "postgres/plan.rs"]
mod plan;
#[path = "postgres/row.rs"]
mod row;
#[path = "postgres/settings.rs"]
mod settings;
#[path = "support/mod.rs"]
mod support;

/// The sqlx driver under test.
type Sql = sqlx::Postgres;

/// The database under test.
const DATABASE: support::Database = support::Database::Postgres;
