//! PostgreSQL: one statement for each request, in autocommit, at READ COMMITTED, by the clock that goes on.
//!
//! No session state is set anywhere, so all of it works behind a pooler that changes the server between transactions.

mod admin;
mod batch;
#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, reason = "tests")]
mod differential;
mod fence;
mod heartbeat;
mod lease;
mod queue;
mod records;
mod rows;
mod session;
mod settings;
mod store;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions, Connection, PgConnection, PgPool, Postgres};

use self::settings::Settings;
use super::sealed::{Check, Fence, Verdict};
use super::{Anchoring, Backend, Job, Kind, Listed, NOTED, Names, Session, SweepRange, Swept, Waiter, micros};
use crate::error::Result;
use crate::name::LockName;
use crate::protocol::{Batch, Request, Response};
use crate::schema;

/// The backend on connections made like those of the caller's pool.
pub(crate) struct PostgresBackend {
    options: Arc<PgConnectOptions>,
    /// Nothing counts that only one server has.
    synchronous: bool,
}

impl PostgresBackend {
    pub(crate) fn new(pool: &PgPool) -> Self {
        Self { options: pool.connect_options(), synchronous: false }
    }

    pub(crate) fn with(options: PgConnectOptions) -> Self {
        Self { options: Arc::new(options), synchronous: false }
    }
}

impl Backend for PostgresBackend {
    fn place(&self) -> String {
        format!("{}:{}", self.options.get_host(), self.options.get_port())
    }

    fn synchronous(&mut self) -> bool {
        self.synchronous = true;
        true
    }

    fn connect(&self) -> Job<'_, Box<dyn Session>> {
        Box::pin(async move {
            let mut conn = (*self.options).clone().disable_statement_logging().connect().await?;
            let settings = Settings::read(&mut conn, &self.place(), self.synchronous).await?;
            Ok(Box::new(PostgresSession { conn, settings }) as Box<dyn Session>)
        })
    }

    fn useful_connections(&self) -> usize {
        usize::MAX
    }

    fn longest_batch(&self) -> usize {
        64
    }

    fn migrate(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(async move {
            let one = PgPoolOptions::new()
                .max_connections(1)
                .connect_with((*self.options).clone())
                .await
                .map_err(schema::unconnected)?;
            let migrated = schema::migrate(&one, schema::POSTGRES).await;
            one.close().await;
            migrated
        })
    }

    fn anchor(&self) -> Anchoring<'_> {
        Box::pin(session::open(&self.options))
    }
}

struct PostgresSession {
    conn: PgConnection,
    settings: Settings,
}

impl PostgresSession {
    fn store(&mut self) -> store::Session<'_> {
        store::Session { connection: &mut self.conn, settings: self.settings }
    }
}

const UPTIME: &str = "
SELECT (extract(epoch FROM clock_timestamp() - pg_postmaster_start_time()) * 1000000)::bigint";

// $1 name, $2 how old the note may get. The statement waits for no row and, most of the time, writes none.
#[rustfmt::skip]
const ENSURE: &str = concat!("
WITH noted AS MATERIALIZED (
    SELECT name FROM sqlock_row WHERE name = $1 AND seen_at < ", store::now!(), " - $2 FOR UPDATE SKIP LOCKED),
note AS (
    UPDATE sqlock_row AS r SET seen_at = ", store::now!(), " FROM noted WHERE r.name = noted.name)
INSERT INTO sqlock_row (name, seen_at)
SELECT $1, ", store::now!(), " WHERE NOT EXISTS (SELECT 1 FROM sqlock_row WHERE name = $1)
    ON CONFLICT (name) DO NOTHING");

impl Session for PostgresSession {
    fn execute<'a>(&'a mut self, request: &'a Request) -> Job<'a, Response> {
        Box::pin(async move { store::execute(&mut self.store(), request).await })
    }

    fn execute_batch<'a>(&'a mut self, batch: &'a Batch) -> Job<'a, Vec<Option<Response>>> {
        Box::pin(async move { batch::execute(&mut self.store(), batch).await })
    }

    fn list<'a>(&'a mut self, names: &'a Names) -> Job<'a, Vec<Listed>> {
        Box::pin(async move { admin::list(&mut self.store(), names).await })
    }

    fn waiters<'a>(&'a mut self, name: &'a LockName) -> Job<'a, Vec<Waiter>> {
        Box::pin(async move { admin::waiters(&mut self.store(), name).await })
    }

    fn sweep<'a>(&'a mut self, range: &'a SweepRange) -> Job<'a, Swept> {
        Box::pin(async move { admin::sweep(&mut self.store(), range).await })
    }

    fn uptime(&mut self) -> Job<'_, Option<Duration>> {
        Box::pin(async move {
            let up: i64 = sqlx::query_scalar(UPTIME).fetch_one(&mut self.conn).await?;
            Ok(u64::try_from(up).ok().map(Duration::from_micros))
        })
    }

    fn ensure<'a>(&'a mut self, name: &'a LockName) -> Job<'a, ()> {
        Box::pin(async move {
            self.store().rows(sqlx::query(ENSURE).bind(name.as_str()).bind(micros(NOTED))).await?;
            Ok(())
        })
    }

    fn record<'a>(&'a mut self, errand: &'a super::records::Errand) -> Job<'a, super::records::Findings> {
        Box::pin(self.carry(errand))
    }

    fn close(self: Box<Self>) -> Job<'static, ()> {
        Box::pin(self.conn.close())
    }
}

impl super::Database for Postgres {}

impl Fence for Postgres {
    const KIND: Kind = Kind::Postgres;

    fn fence<'a>(
        conn: &'a mut PgConnection,
        check: &'a Check,
    ) -> Pin<Box<dyn Future<Output = Result<Verdict, sqlx::Error>> + Send + 'a>> {
        Box::pin(fence::fence(conn, check))
    }
}
