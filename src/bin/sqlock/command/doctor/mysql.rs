//! The checks of MySQL and MariaDB. Their variables have different names, and not every user may
//! read all of them.

mod catalog;
mod replication;
mod settings;

use sqlx::mysql::{MySqlConnectOptions, MySqlSslMode};
use sqlx::{ConnectOptions, Connection, Error, MySql, MySqlConnection};
use tokio::time::timeout;

use super::clocks::{check_future, longest_ttl};
use super::definitions::{self, MissingTables};
use super::hooks::check_hooks;
use super::probe::{
    CLOSE_TIMEOUT, POOLER_ROUNDS, Rows, SERVER_ADVICE, check_version, connect, first_cell, format_brief,
    measure_round_trips, query, run_with_timeout,
};
use super::report::{Check, REACHABLE, Report, Status};
use super::table;
use super::transport::{TlsMode, Transport, check_tls};
use crate::pool::mysql_address;
use crate::url::Kind;
use catalog::{check_rights, check_table_kinds, query_hooks, query_tables, read_catalog};
use replication::{check_cluster, check_replication, count_replicas};
use settings::{Variables, check_settings};

/// The statements, formatted for readability.
#[rustfmt::skip]
mod sql {
pub(super) const CLOCK: &str = "SELECT UNIX_TIMESTAMP(SYSDATE(6))";

pub(super) const TLS: &str = "SHOW SESSION STATUS LIKE 'Ssl_version'";

// The number of leases ahead of the clock by more than the time of a statement, by how many
// seconds, and the longest TTL.
pub(super) const LEASES: &str = "
SELECT COUNT(*), MAX(a.at - n.us) / 1000000, (SELECT MAX(ttl) / 1000000 FROM sqlock_lease)
  FROM (SELECT CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED) AS us) AS n,
       (SELECT acquired_at AS at FROM sqlock_lease WHERE owner <> '' UNION ALL SELECT beat_at FROM sqlock_client) AS a
 WHERE a.at > n.us + 10000000";

pub(super) const SERVER: &str = "SELECT VERSION(), @@version_comment";

// A server leaves out variables that it does not have.
pub(super) const VARIABLES: &str = "
SHOW GLOBAL VARIABLES WHERE Variable_name IN
    ('read_only', 'super_read_only', 'log_bin', 'binlog_format', 'sync_binlog', 'innodb_flush_log_at_trx_commit',
     'innodb_doublewrite', 'innodb_lock_wait_timeout', 'innodb_rollback_on_timeout', 'innodb_snapshot_isolation',
     'innodb_read_only', 'wait_timeout', 'max_statement_time',
     'rpl_semi_sync_master_wait_point', 'rpl_semi_sync_source_wait_point',
     'rpl_semi_sync_master_timeout', 'rpl_semi_sync_source_timeout',
     'group_replication_group_name', 'group_replication_single_primary_mode',
     'wsrep_on', 'wsrep_provider', 'server_uuid')";

// https://galeracluster.com/library/documentation/galera-status-variables.html
// https://dev.mysql.com/doc/refman/8.4/en/replication-semisync-monitoring.html
pub(super) const STATUS: &str = "
SHOW GLOBAL STATUS WHERE Variable_name IN
    ('wsrep_cluster_state_uuid', 'wsrep_cluster_status', 'wsrep_cluster_size', 'wsrep_local_state_comment',
     'wsrep_ready', 'wsrep_connected',
     'Rpl_semi_sync_master_status', 'Rpl_semi_sync_source_status',
     'Rpl_semi_sync_master_clients', 'Rpl_semi_sync_source_clients')";

// Empty if the plugin is missing or the performance schema is off.
// https://dev.mysql.com/doc/refman/8.4/en/performance-schema-replication-group-members-table.html
pub(super) const MEMBERS: &str = "
SELECT member_id, member_state, member_role FROM performance_schema.replication_group_members WHERE member_state <> ''";

// With the server's option sysdate-is-now, SYSDATE() stands still during a statement.
// https://dev.mysql.com/doc/refman/8.4/en/server-options.html#option_mysqld_sysdate-is-now
pub(super) const TICKS: &str = "SELECT SYSDATE(6) AS before_it, SLEEP(0.005), SYSDATE(6) AS after_it";

// ProxySQL answers the bare function itself, always alike for one client.
pub(super) const ID: &str = "SELECT CAST(CONNECTION_ID() AS SIGNED)";

}

pub async fn examine(options: &MySqlConnectOptions, missing_tables: MissingTables) -> Report {
    let options = options.clone().disable_statement_logging();
    let place = mysql_address(&options);
    let database = options.get_database().map(|name| format!(", database {name}")).unwrap_or_default();
    // The answer of the server replaces the two names.
    let mut report = Report::new(format!("MySQL or MariaDB at {place}{database}"));
    report.add_server(&format!("MySQL {place}"));
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
    conn: &mut MySqlConnection,
    options: &MySqlConnectOptions,
    missing_tables: MissingTables,
    report: &mut Report,
) -> Result<(), Error> {
    let (trip, clock) = measure_round_trips(report, async || query::<MySql>(&mut *conn, sql::CLOCK).await).await?;
    report.add("reachable", Ok(Check::new(REACHABLE).ok(format!("yes, a round trip takes {}", format_brief(trip)))))?;
    let rows = query::<MySql>(conn, sql::SERVER).await?;
    let server = first_cell(&rows).to_owned();
    let comment = rows.first().and_then(|row| row.get(1)).cloned().unwrap_or_default();
    let name = if server.contains("MariaDB") { "MariaDB" } else { "MySQL" };
    report.database = report.database.replacen("MySQL or MariaDB", name, 1);
    report.add("server", Ok(check_server(name, &server)))?;
    let variables = Variables(query::<MySql>(conn, sql::VARIABLES).await?);
    // A MariaDB server has no identity of its own.
    if name == "MySQL" {
        report.add_server(variables.text("server_uuid"));
    }
    let status = Variables(query::<MySql>(conn, sql::STATUS).await?);
    let members = match query::<MySql>(conn, sql::MEMBERS).await {
        Ok(members) => members,
        // The table does not exist, or this user may not read it.
        Err(Error::Database(_)) => Rows::new(),
        Err(error) => return Err(error),
    };
    report.is_standby = read_only_variable(&variables).is_some();
    report.add("role", Ok(check_role(&variables)))?;
    let replicas = count_replicas(conn).await?;
    report.add("replication", Ok(check_replication(&variables, &status, &members, replicas)))?;
    let (galera, group) = (status.text("wsrep_cluster_state_uuid"), variables.text("group_replication_group_name"));
    report.cluster = if variables.is_galera() { galera } else { group }.to_owned();
    report.add("cluster", Ok(check_cluster(&variables, &status, &members)))?;
    report.add("durability", Ok(check_durability(&variables)))?;
    let pooler = check_pooler(conn, options, &comment).await;
    let is_direct = pooler.as_ref().is_ok_and(|check| check.status == Status::Ok);
    report.add("tls", check_transport(conn, options, is_direct).await)?;
    report.add("pooler", pooler)?;
    let clock = check_sysdate(conn, clock).await?;

    let expected = table::expected_tables(Kind::Mysql);
    let table_rows = match query_tables(conn, &expected).await {
        Ok(table_rows) => table_rows,
        Err(error) => {
            report.add("clock", Ok(clock))?;
            report.add("tables", Err(error))?;
            return report.add("settings", Ok(check_settings(&variables)));
        }
    };
    let clock = match query::<MySql>(conn, sql::LEASES).await {
        Ok(leases) => {
            report.longest_ttl = longest_ttl(&leases);
            check_future(clock, &leases)
        }
        // The tables do not exist, or this user may not read them.
        Err(Error::Database(_)) => clock,
        Err(error) => return Err(error),
    };
    report.add("clock", Ok(clock))?;
    let missing = expected.iter().any(|table| !table_rows.iter().any(|row| row[0] == table.name));
    match read_catalog(conn, &expected, &table_rows, options.get_database()).await {
        Ok(found) => {
            report.record = found.record(Kind::Mysql);
            let mut presence = definitions::check_presence(Kind::Mysql, &expected, &found, missing_tables);
            if options.get_database().is_none() {
                presence =
                    presence.fail("nor can there be any", "Name the database in the URL: mysql://HOST/DATABASE.");
            }
            report.add("tables", Ok(presence))?;
            let check = check_table_kinds(&table_rows, Check::new("definitions"));
            let check = check_hooks(check, &query_hooks(conn, &expected).await?);
            report
                .add("definitions", Ok(definitions::check_definitions(Kind::Mysql, &expected, &found.tables, check)))?;
            report.add("rights", check_rights(conn, &found.tables, missing, missing_tables).await)?;
        }
        Err(error) => report.add("tables", Err(error))?,
    }
    report.add("settings", Ok(check_settings(&variables)))
}

fn check_server(name: &str, version: &str) -> Check {
    let least = if name == "MariaDB" { (10, 6) } else { (8, 0) };
    let check = check_version(name, version, least);
    match ["TiDB", "Vitess", "PlanetScale"].iter().find(|other| version.contains(**other)) {
        Some(other @ &"TiDB") => check.fail(
            format!("it is {other}, which accepts FOR UPDATE SKIP LOCKED and locks nothing"),
            format!("sqlock refuses it: two clients could hold one name. Use {name} itself."),
        ),
        Some(other) => check.warn(format!("it is {other}"), format!("sqlock is tested with {name} itself.")),
        None => check,
    }
}

/// Returns the name of a variable that makes the server read-only, as a replica is. `None`: none
/// does.
fn read_only_variable(variables: &Variables) -> Option<&'static str> {
    ["innodb_read_only", "super_read_only", "read_only"].into_iter().find(|name| variables.is_on(name))
}

fn check_role(variables: &Variables) -> Check {
    let check = Check::new("role");
    match read_only_variable(variables) {
        Some(name) => {
            let advice = "Connect to the primary. Leases granted here would not exclude those granted there.";
            check.fail(format!("read-only, as a replica is: {name} is {}", variables.text(name)), advice)
        }
        None => check.ok("may be written to"),
    }
}

fn check_durability(variables: &Variables) -> Check {
    let mut check = Check::new("durability");
    let flush = variables.text("innodb_flush_log_at_trx_commit");
    if matches!(flush, "0" | "2") {
        let crashed = if flush == "0" { "the server" } else { "the host" };
        let advice = format!(
            "Set innodb_flush_log_at_trx_commit to 1: a crash of {crashed} loses the grants of the last second, and others can \
             be granted those names while their holders live."
        );
        check = check.warn(format!("innodb_flush_log_at_trx_commit is {flush}"), advice);
    }
    if matches!(variables.text("innodb_doublewrite"), "OFF" | "0" | "DETECT_ONLY") {
        let advice = "Set innodb_doublewrite to ON, unless the storage writes whole pages atomically: a crash of the host can tear \
                      pages.";
        check = check.warn(format!("innodb_doublewrite is {}", variables.text("innodb_doublewrite")), advice);
    }
    if variables.is_on("log_bin") && variables.text("sync_binlog") != "1" {
        let advice = "Set sync_binlog to 1: after a crash of the host, replicas and this server may not agree on the last grants.";
        check = check.warn(format!("sync_binlog is {}", variables.text("sync_binlog")), advice);
    }
    check.or_ok(format!("innodb_flush_log_at_trx_commit {flush}"))
}

/// Checks for a pooler: while another connection keeps its session in a transaction, this one must
/// have its own.
async fn check_pooler(
    conn: &mut MySqlConnection,
    options: &MySqlConnectOptions,
    comment: &str,
) -> Result<Check, Error> {
    let check = Check::new("pooler");
    let advice = "Leases need one session of the server for each connection, and no reads from replicas. Session locks need a direct connection to the server: \
                  bypass the proxy for them.";
    if let Some(proxy) = ["ProxySQL", "MaxScale"].iter().find(|proxy| comment.contains(**proxy)) {
        return Ok(check.warn(format!("it calls itself {proxy}"), advice));
    }
    let id = query::<MySql>(conn, sql::ID).await?;
    let mut other = options.connect().await?;
    let mut is_direct = true;
    for _ in 0..POOLER_ROUNDS {
        query::<MySql>(&mut other, "BEGIN").await?;
        let other_id = query::<MySql>(&mut other, sql::ID).await?;
        let own_id = query::<MySql>(conn, sql::ID).await;
        query::<MySql>(&mut other, "ROLLBACK").await?;
        let own_id = own_id?;
        is_direct = is_direct && first_cell(&own_id) == first_cell(&id) && first_cell(&other_id) != first_cell(&id);
    }
    let _ = timeout(CLOSE_TIMEOUT, other.close()).await;
    Ok(match is_direct {
        true => check.ok("none"),
        false => check.warn("a transaction pooler: each transaction runs in any free session of the server", advice),
    })
}

async fn check_transport(
    conn: &mut MySqlConnection,
    options: &MySqlConnectOptions,
    is_direct: bool,
) -> Result<Check, Error> {
    let protocol = query::<MySql>(conn, sql::TLS).await?;
    Ok(check_tls(&Transport {
        host: options.get_host(),
        has_socket: options.get_socket().is_some(),
        mode: match options.get_ssl_mode() {
            MySqlSslMode::Disabled => TlsMode::Never,
            MySqlSslMode::Preferred => TlsMode::Optional,
            MySqlSslMode::Required | MySqlSslMode::VerifyCa => TlsMode::Required,
            MySqlSslMode::VerifyIdentity => TlsMode::Verified,
        },
        protocol: protocol.first().and_then(|row| row.get(1)).map_or("", String::as_str),
        is_direct,
    }))
}

async fn check_sysdate(conn: &mut MySqlConnection, clock: Check) -> Result<Check, Error> {
    let rows = query::<MySql>(conn, sql::TICKS).await?;
    let stands = rows.first().is_some_and(|row| row[0] == row[2]);
    let advice = "Start the server without sysdate-is-now: the time of a lease would count from the start of a statement that \
                  waited, and so end early.";
    Ok(if stands { clock.warn("the clock stands still during a statement (sysdate-is-now)", advice) } else { clock })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(pairs: &[(&str, &str)]) -> Variables {
        Variables(pairs.iter().map(|(name, value)| vec![(*name).to_owned(), (*value).to_owned()]).collect())
    }

    #[test]
    fn server_that_ignores_row_locks_fails() {
        assert_eq!(check_server("MySQL", "8.0.11-TiDB-v8.5.6").status, Status::Fail);
        assert_eq!(check_server("MySQL", "8.0.30-Vitess").status, Status::Warn);
        assert_eq!(check_server("MySQL", "9.7.4-2").status, Status::Ok);
    }

    #[test]
    fn role_check_fails_unless_read_only_is_off() {
        assert_eq!(check_role(&values(&[("read_only", "NO_LOCK")])).status, Status::Fail);
        let aurora_reader = values(&[("read_only", "OFF"), ("innodb_read_only", "ON")]);
        assert_eq!(check_role(&aurora_reader).status, Status::Fail);
        assert_eq!(check_role(&values(&[("read_only", "OFF"), ("super_read_only", "OFF")])).status, Status::Ok);
    }
}
