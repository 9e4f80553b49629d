//! The checks of PostgreSQL. They use views and functions that every user may read, except for the
//! state of standbys.

mod catalog;
mod pooler;
mod replication;
mod settings;

use sqlx::postgres::{PgConnectOptions, PgSslMode};
use sqlx::{ConnectOptions, Connection, Error, PgConnection, Postgres};
use tokio::time::timeout;

use super::clocks::{check_future, longest_ttl};
use super::definitions::{self, MissingTables};
use super::hooks::check_hooks;
use super::probe::{
    CLOSE_TIMEOUT, SERVER_ADVICE, check_version, connect, first_cell, format_brief, measure_round_trips, query,
    run_with_timeout,
};
use super::report::{Check, REACHABLE, Report, Status};
use super::table::{self, parse_bool};
use super::transport::{TlsMode, Transport, check_tls};
use crate::pool::postgres_address;
use crate::url::Kind;
use catalog::{
    check_rights, check_schemas, check_table_kinds, query_hooks, query_namesakes, query_tables, read_catalog,
};
use pooler::check_pooler;
use replication::check_replication;
use settings::{Settings, check_settings};

/// The statements, formatted for readability.
#[rustfmt::skip]
mod sql {
pub(super) const CLOCK: &str = "SELECT extract(epoch FROM clock_timestamp())";

// https://www.postgresql.org/docs/current/monitoring-stats.html#MONITORING-PG-STAT-SSL-VIEW
pub(super) const TLS: &str = "SELECT coalesce(version, '') FROM pg_stat_ssl WHERE pid = pg_backend_pid()";

// The number of leases ahead of the clock by more than the time of a statement, by how many
// seconds, and the longest TTL.
pub(super) const LEASES: &str = "
SELECT count(*), max(a.at - now.us) / 1000000.0, (SELECT max(ttl) / 1000000.0 FROM sqlock_lease)
  FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS us) AS now,
       (SELECT acquired_at AS at FROM sqlock_lease WHERE owner <> '' UNION ALL SELECT beat_at FROM sqlock_client) AS a
 WHERE a.at > now.us + 10000000";

// Two servers do not start in the same microsecond. A system identifier is the same in copies.
pub(super) const STARTED: &str = "SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint";

pub(super) const SERVER: &str = "SELECT current_setting('server_version'), version()";

// https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-RECOVERY-CONTROL
pub(super) const ROLE: &str = "
SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only')";

// Name, value and unit. A server leaves out settings that it does not have.
pub(super) const SETTINGS: &str = "
SELECT name, setting, coalesce(unit, '') FROM pg_settings
 WHERE name IN ('fsync', 'synchronous_commit', 'full_page_writes', 'synchronous_standby_names',
                'default_transaction_isolation', 'statement_timeout', 'transaction_timeout',
                'idle_in_transaction_session_timeout', 'idle_session_timeout')";

}

pub async fn examine(options: &PgConnectOptions, missing_tables: MissingTables) -> Report {
    let options = options.clone().disable_statement_logging();
    let place = postgres_address(&options);
    let database = options.get_database().map(|name| format!(", database {name}")).unwrap_or_default();
    let mut report = Report::new(format!("PostgreSQL at {place}{database}"));
    report.add_server(&format!("PostgreSQL {place}"));
    let mut conn = match connect(options.connect(), SERVER_ADVICE).await {
        Ok(conn) => conn,
        Err(check) => {
            report.checks.push(check);
            return report;
        }
    };
    run_with_timeout(&mut report, async |report| run_checks(&mut conn, &options, missing_tables, report).await).await;
    let _ = timeout(CLOSE_TIMEOUT, conn.close()).await;
    report
}

async fn run_checks(
    conn: &mut PgConnection,
    options: &PgConnectOptions,
    missing_tables: MissingTables,
    report: &mut Report,
) -> Result<(), Error> {
    let (trip, clock) = measure_round_trips(report, async || query::<Postgres>(&mut *conn, sql::CLOCK).await).await?;
    report.add("reachable", Ok(Check::new(REACHABLE).ok(format!("yes, a round trip takes {}", format_brief(trip)))))?;
    let started = query::<Postgres>(conn, sql::STARTED).await?;
    report.add_server(first_cell(&started));
    let settings = Settings(query::<Postgres>(conn, sql::SETTINGS).await.unwrap_or_default());
    report.add("server", check_server(conn).await)?;
    let role = query::<Postgres>(conn, sql::ROLE).await?;
    report.is_standby = parse_bool(first_cell(&role));
    let read_only = role.first().and_then(|row| row.get(1)).is_some_and(|setting| parse_bool(setting));
    report.add("role", Ok(check_role(report.is_standby, read_only)))?;
    report.add("replication", check_replication(conn, &settings, report.is_standby).await)?;
    report.add("durability", Ok(check_durability(&settings)))?;
    let pooler = check_pooler(conn, options, report.is_standby).await;
    let is_direct = pooler.as_ref().is_ok_and(|check| check.status == Status::Ok);
    report.add("tls", check_transport(conn, options, is_direct).await)?;
    report.add("pooler", pooler)?;
    let expected = table::expected_tables(Kind::Postgres);
    let table_rows = query_tables(conn, &expected).await?;
    let missing = expected.iter().any(|table| !table_rows.iter().any(|row| row[0] == table.name));
    let may_read = |table: &str| table_rows.iter().any(|row| row[0] == table && parse_bool(&row[4]));
    let clock = match may_read("sqlock_lease") && may_read("sqlock_client") {
        true => match query::<Postgres>(conn, sql::LEASES).await {
            Ok(leases) => {
                report.longest_ttl = longest_ttl(&leases);
                check_future(clock, &leases)
            }
            // A column is missing, which the check of the definitions reports.
            Err(Error::Database(_)) => clock,
            Err(error) => return Err(error),
        },
        false => clock,
    };
    report.add("clock", Ok(clock))?;
    let place = catalog::query_schema(conn).await?;
    match read_catalog(conn, &expected, &table_rows, first_cell(&place)).await {
        Ok(found) => {
            report.record = found.record(Kind::Postgres);
            let mut presence = definitions::check_presence(Kind::Postgres, &expected, &found, missing_tables);
            if missing && read_only && !report.is_standby {
                let advice = "Run \"sqlock migrate\" as a user whose transactions may write by default.";
                presence = presence.fail("and cannot be created: default_transaction_read_only is on", advice);
            }
            report.add("tables", Ok(presence))?;
            let check = check_table_kinds(&table_rows, Check::new("definitions"));
            let check = check_schemas(&table_rows, &query_namesakes(conn, &expected).await?, check);
            let check = check_hooks(check, &query_hooks(conn, &expected).await?);
            report.add(
                "definitions",
                Ok(definitions::check_definitions(Kind::Postgres, &expected, &found.tables, check)),
            )?;
        }
        Err(error) => report.add("tables", Err(error))?,
    }
    report.add("rights", Ok(check_rights(&table_rows, missing, missing_tables, &place)))?;
    report.add("settings", Ok(check_settings(&settings)))
}

async fn check_transport(conn: &mut PgConnection, options: &PgConnectOptions, is_direct: bool) -> Result<Check, Error> {
    let protocol = query::<Postgres>(conn, sql::TLS).await?;
    Ok(check_tls(&Transport {
        host: options.get_host(),
        has_socket: options.get_socket().is_some(),
        mode: match options.get_ssl_mode() {
            PgSslMode::Disable => TlsMode::Never,
            PgSslMode::Allow | PgSslMode::Prefer => TlsMode::Optional,
            PgSslMode::Require | PgSslMode::VerifyCa => TlsMode::Required,
            PgSslMode::VerifyFull => TlsMode::Verified,
        },
        protocol: first_cell(&protocol),
        is_direct,
    }))
}

async fn check_server(conn: &mut PgConnection) -> Result<Check, Error> {
    let rows = query::<Postgres>(conn, sql::SERVER).await?;
    let check = check_version("PostgreSQL", first_cell(&rows), (13, 0));
    let whole = rows.first().and_then(|row| row.get(1)).map_or("", String::as_str);
    Ok(match whole.starts_with("PostgreSQL") {
        true => check,
        false => check.warn(format!("it calls itself {whole}"), "sqlock is tested with PostgreSQL itself."),
    })
}

fn check_role(is_standby: bool, read_only: bool) -> Check {
    let check = Check::new("role");
    if is_standby {
        let advice = "Connect to the primary: a standby cannot be written to until it is promoted.";
        return check.fail("a standby, which is read-only", advice);
    }
    if read_only {
        // Each operation starts a transaction that may write.
        let advice = "sqlock writes nevertheless, with two more round trips for each operation. If this server must not be \
                      written to, connect to the primary.";
        return check.warn("a primary, with default_transaction_read_only on", advice);
    }
    check.ok("a primary")
}

fn check_durability(settings: &Settings) -> Check {
    let check = Check::new("durability");
    if settings.0.is_empty() {
        return check.unknown("the server does not return its settings", "");
    }
    let mut check = check;
    for (name, harm) in
        [("fsync", "ruin the database, or lose grants"), ("full_page_writes", "leave pages half-written")]
    {
        if settings.text(name) == "off" {
            check = check.warn(format!("{name} is off"), format!("Set {name} to on: a crash of the host can {harm}."));
        }
    }
    match settings.text("synchronous_commit") {
        "off" => check.ok("synchronous_commit is off; sqlock sets it for each grant, with two more round trips"),
        commit => check.or_ok(format!("fsync and full_page_writes on, synchronous_commit {commit}")),
    }
}
