//! What is asked of MySQL and MariaDB, whose variables have different names, and not all of which every user may ask.

use std::time::Duration;

use sqlx::mysql::{MySqlConnectOptions, MySqlRow};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Error, MySql, MySqlConnection, Row as _};
use tokio::time::timeout;

use super::report::{Check, Report};
use super::tables::{self, Found, HISTORY, Table, is_true};
use super::{Rows, ask, brief, connect, first, in_time, round_trips, version};
use crate::url::Kind;

/// The statements, laid out to be read.
#[rustfmt::skip]
mod sql {
pub(super) const CLOCK: &str = "SELECT UNIX_TIMESTAMP(SYSDATE(6))";

pub(super) const SERVER: &str = "SELECT VERSION(), @@version_comment";

// Those that a server does not have are not among the rows.
pub(super) const VARIABLES: &str = "
SHOW GLOBAL VARIABLES WHERE Variable_name IN
    ('read_only', 'super_read_only', 'log_bin', 'binlog_format', 'sync_binlog', 'innodb_flush_log_at_trx_commit',
     'innodb_doublewrite', 'innodb_lock_wait_timeout', 'innodb_rollback_on_timeout', 'innodb_snapshot_isolation',
     'innodb_autoinc_lock_mode', 'innodb_read_only', 'wait_timeout', 'max_statement_time',
     'rpl_semi_sync_master_wait_point', 'rpl_semi_sync_source_wait_point',
     'rpl_semi_sync_master_timeout', 'rpl_semi_sync_source_timeout',
     'group_replication_group_name', 'group_replication_single_primary_mode', 'group_replication_consistency',
     'wsrep_on', 'wsrep_provider', 'server_uuid')";

// https://galeracluster.com/library/documentation/galera-status-variables.html
// https://dev.mysql.com/doc/refman/8.4/en/replication-semisync-monitoring.html
pub(super) const STATUS: &str = "
SHOW GLOBAL STATUS WHERE Variable_name IN
    ('wsrep_cluster_status', 'wsrep_cluster_size', 'wsrep_local_state_comment', 'wsrep_ready', 'wsrep_connected',
     'Rpl_semi_sync_master_status', 'Rpl_semi_sync_source_status',
     'Rpl_semi_sync_master_clients', 'Rpl_semi_sync_source_clients')";

// Empty where the plugin is not there, or the performance schema is off.
// https://dev.mysql.com/doc/refman/8.4/en/performance-schema-replication-group-members-table.html
pub(super) const MEMBERS: &str = "
SELECT member_id, member_state, member_role FROM performance_schema.replication_group_members WHERE member_state <> ''";

// With the server's option sysdate-is-now, SYSDATE() stands still during a statement.
// https://dev.mysql.com/doc/refman/8.4/en/server-options.html#option_mysqld_sysdate-is-now
pub(super) const TICKS: &str = "SELECT SYSDATE(6) AS before_it, SLEEP(0.005), SYSDATE(6) AS after_it";

// Who reads the binary log. One server knows the one name of it, the other knows the other; and a replica that does not report
// its host may not be listed, but its connection is.
// https://dev.mysql.com/doc/refman/8.4/en/show-replicas.html
// https://mariadb.com/kb/en/show-replica-hosts/
pub(super) const REPLICAS: [&str; 2] = ["SHOW REPLICAS", "SHOW REPLICA HOSTS"];
// (Not from information_schema, which fails when anybody's statement is not UTF-8. What each does is the fifth column.)
pub(super) const SESSIONS: &str = "SHOW PROCESSLIST";

pub(super) const ID: &str = "SELECT CONNECTION_ID()";

pub(super) const TABLES: &str = "
SELECT TABLE_NAME, TABLE_TYPE, COALESCE(ENGINE, '') FROM information_schema.TABLES
 WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({names})
 ORDER BY 1";

pub(super) const COLUMNS: &str = "
SELECT TABLE_NAME, COLUMN_NAME, LOWER(COLUMN_TYPE), COALESCE(COLLATION_NAME, ''), IS_NULLABLE = 'NO',
       COLUMN_DEFAULT IS NOT NULL OR EXTRA LIKE '%auto_increment%' OR EXTRA LIKE '%GENERATED%'
  FROM information_schema.COLUMNS
 WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({names})";

// A part of a column is not the column.
pub(super) const INDEXES: &str = "
SELECT TABLE_NAME, NON_UNIQUE = 0,
       GROUP_CONCAT(CONCAT(COLUMN_NAME, IF(SUB_PART IS NULL, '', CONCAT('(', SUB_PART, ')'))) ORDER BY SEQ_IN_INDEX)
  FROM information_schema.STATISTICS
 WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({names})
 GROUP BY TABLE_NAME, INDEX_NAME, 2";

pub(super) const HISTORY: &str = "SELECT version, success, HEX(checksum) FROM _sqlock_migrations ORDER BY version";

// EXPLAIN asks for the rights of the statement, and does nothing of it. SHOW GRANTS would have to be read with its roles
// and wildcards; a statement that is rolled back would be refused for other reasons too, on a server that only reads.
// https://dev.mysql.com/doc/refman/8.4/en/explain.html
pub(super) const RIGHTS: [(&str, &str); 4] = [
    ("SELECT", "EXPLAIN SELECT * FROM {table} WHERE FALSE"),
    ("INSERT", "EXPLAIN INSERT INTO {table} ({column}) VALUES ('')"),
    ("UPDATE", "EXPLAIN UPDATE {table} SET {column} = '' WHERE FALSE"),
    ("DELETE", "EXPLAIN DELETE FROM {table} WHERE FALSE"),
];

// Nothing can be explained for CREATE. Rights that come with a role are not listed here.
// The name of a database may be a pattern in a grant.
pub(super) const MAY_CREATE: &str = "
SELECT COUNT(*) FROM (
    SELECT GRANTEE, PRIVILEGE_TYPE FROM information_schema.USER_PRIVILEGES
     UNION ALL
    SELECT GRANTEE, PRIVILEGE_TYPE FROM information_schema.SCHEMA_PRIVILEGES WHERE DATABASE() LIKE TABLE_SCHEMA) AS p
 WHERE PRIVILEGE_TYPE = 'CREATE'
   AND GRANTEE = CONCAT('''', LEFT(CURRENT_USER(), CHAR_LENGTH(CURRENT_USER())
                                                   - CHAR_LENGTH(SUBSTRING_INDEX(CURRENT_USER(), '@', -1)) - 1),
                        '''@''', SUBSTRING_INDEX(CURRENT_USER(), '@', -1), '''')";
pub(super) const ROLE: &str = "SELECT COALESCE(CURRENT_ROLE(), 'NONE')";
}

/// How many times two connections may meet in one session before it is believed that they do not.
const ROUNDS: usize = 3;

const SHORT: Duration = Duration::from_secs(1);

pub async fn examine(options: &MySqlConnectOptions, may_migrate: bool) -> Report {
    let options = options.clone().disable_statement_logging();
    let place = options.get_socket().map_or_else(
        || format!("{}:{}", options.get_host(), options.get_port()),
        |socket| socket.display().to_string(),
    );
    let database = options.get_database().map(|name| format!(", database {name}")).unwrap_or_default();
    // Which of the two it is, the server tells.
    let mut report = Report::of(format!("MySQL or MariaDB at {place}{database}"));
    let mut conn = match connect(options.connect()).await {
        Ok(conn) => conn,
        Err(check) => {
            report.checks.push(check);
            return report;
        }
    };
    in_time(&mut report, async |report| checks(&mut conn, &options, may_migrate, report).await).await;
    let _ = timeout(SHORT, conn.close()).await;
    report
}

async fn checks(
    conn: &mut MySqlConnection,
    options: &MySqlConnectOptions,
    may_migrate: bool,
    report: &mut Report,
) -> Result<(), Error> {
    let (trip, clock) = round_trips(async || ask::<MySql>(&mut *conn, sql::CLOCK).await).await?;
    report.add("reachable", Ok(Check::new("reachable").ok(format!("yes, a round trip takes {}", brief(trip)))))?;
    let told = ask::<MySql>(conn, sql::SERVER).await?;
    let server = first(&told).to_owned();
    let comment = told.first().and_then(|row| row.get(1)).cloned().unwrap_or_default();
    let name = if server.contains("MariaDB") { "MariaDB" } else { "MySQL" };
    report.database = report.database.replacen("MySQL or MariaDB", name, 1);
    report.add("server", Ok(self::server(name, &server)))?;
    let variables = Values(ask::<MySql>(conn, sql::VARIABLES).await?);
    let status = Values(ask::<MySql>(conn, sql::STATUS).await?);
    let members = match ask::<MySql>(conn, sql::MEMBERS).await {
        Ok(members) => members,
        // There is no such table, or it is none of this user's business.
        Err(Error::Database(_)) => Rows::new(),
        Err(error) => return Err(error),
    };
    report.is_standby = variables.is_on("read_only") || variables.is_on("super_read_only");
    report.add("role", Ok(role(&variables)))?;
    let replicas = replicas(conn).await?;
    report.add("replication", Ok(replication(&variables, &status, &members, replicas)))?;
    report.add("cluster", Ok(cluster(&variables, &status, &members)))?;
    report.add("durability", Ok(durability(&variables)))?;
    report.add("pooler", pooler(conn, options, &comment).await)?;
    report.add("clock", ticks(conn, clock).await)?;

    let expected = tables::expected(Kind::Mysql);
    let about = match ask::<MySql>(conn, ours(sql::TABLES, &expected)).await {
        Ok(about) => about,
        Err(error) => {
            report.add("tables", Err(error))?;
            return report.add("settings", Ok(settings(&variables)));
        }
    };
    let missing = expected.iter().any(|table| !about.iter().any(|row| row[0] == table.name));
    match find(conn, &expected, &about, options.get_database()).await {
        Ok(found) => {
            report.add("tables", Ok(tables::presence(Kind::Mysql, &expected, &found, may_migrate)))?;
            let check = kinds(&about, Check::new("definitions"));
            report.add("definitions", Ok(tables::definitions(Kind::Mysql, &expected, &found.tables, check)))?;
            report.add("rights", rights(conn, &found.tables, missing).await)?;
        }
        Err(error) => report.add("tables", Err(error))?,
    }
    report.add("settings", Ok(settings(&variables)))
}

fn server(name: &str, told: &str) -> Check {
    let least = if name == "MariaDB" { (10, 6) } else { (8, 0) };
    let check = version(name, told, least);
    match ["TiDB", "Vitess", "PlanetScale"].iter().find(|other| told.contains(**other)) {
        Some(other) => check.warn(format!("it is {other}"), format!("sqlock is tested with {name} itself.")),
        None => check,
    }
}

fn role(variables: &Values) -> Check {
    let check = Check::new("role");
    for name in ["innodb_read_only", "super_read_only", "read_only"] {
        if variables.is_on(name) {
            let advice = "Connect to the server that is written to. Grants made here would not be those of the others.";
            return check.fail(format!("only reads, as a replica does: {name} is {}", variables.text(name)), advice);
        }
    }
    check.ok("may be written to")
}

/// How many replicas are connected, or why that is not told.
async fn replicas(conn: &mut MySqlConnection) -> Result<Result<usize, String>, Error> {
    let mut why = String::new();
    for sql in sql::REPLICAS {
        match ask::<MySql>(conn, sql).await {
            Ok(listed) => {
                let sessions = sqlx::raw_sql(sql::SESSIONS).fetch_all(&mut *conn).await?;
                let does = |row: &MySqlRow| row.try_get_unchecked::<String, _>(4).unwrap_or_default();
                let readers = sessions.iter().filter(|row| does(row).starts_with("Binlog Dump")).count();
                return Ok(Ok(listed.len().max(readers)));
            }
            // Of a server that does not know the statement, and of one that does not answer this user, the latter counts.
            Err(Error::Database(error)) if why.is_empty() || error.message().contains("denied") => {
                why = error.message().to_owned();
            }
            Err(Error::Database(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Err(why))
}

/// What becomes of grants when this server is lost.
fn replication(variables: &Values, status: &Values, members: &Rows, replicas: Result<usize, String>) -> Check {
    let check = Check::new("replication");
    if variables.is_galera() || !members.is_empty() {
        return check.ok("that of the cluster");
    }
    if !variables.is_on("log_bin") {
        return check.ok("none: there is no binary log");
    }
    let either = |values: &Values, name: &str| {
        [values.text(&name.replace('?', "source")), values.text(&name.replace('?', "master"))].concat()
    };
    if !is_true(&either(status, "Rpl_semi_sync_?_status")) {
        // A failover is what somebody does with a replica.
        return match replicas {
            Ok(0) => check.ok("none: no replica is connected"),
            Ok(replicas) => check.warn(
                format!("asynchronous, replicas: {replicas}"),
                "Install and enable semi-synchronous replication. Until then a failover loses the grants that had not arrived: two \
                 may hold a name until the next renewal. Fenced transactions and tokens protect the data.",
            ),
            Err(why) => check.unknown(
                format!("not semi-synchronous; whether there are replicas is not told: {why}"),
                "GRANT REPLICATION SLAVE (MySQL) or REPLICATION MASTER ADMIN (MariaDB) to this user to have it checked.",
            ),
        };
    }
    let replicas = either(status, "Rpl_semi_sync_?_clients");
    let timeout = either(variables, "rpl_semi_sync_?_timeout");
    let found = format!("semi-synchronous, replicas: {replicas}; asynchronous when none answers for {timeout} ms");
    if either(variables, "rpl_semi_sync_?_wait_point") == "AFTER_COMMIT" {
        let advice = "Set the wait point to AFTER_SYNC: with AFTER_COMMIT others see a grant that a failover loses.";
        return check.warn(found, advice);
    }
    check.ok(found)
}

/// Galera or Group Replication.
fn cluster(variables: &Values, status: &Values, members: &Rows) -> Check {
    let check = Check::new("cluster");
    if variables.is_galera() {
        return galera(check, status);
    }
    if variables.text("group_replication_group_name").is_empty() && members.is_empty() {
        return check.ok("none");
    }
    group(check, variables, members)
}

fn galera(check: Check, status: &Values) -> Check {
    let (component, state) = (status.text("wsrep_cluster_status"), status.text("wsrep_local_state_comment"));
    let size: u32 = status.text("wsrep_cluster_size").parse().unwrap_or(0);
    let found = format!("Galera, {size} nodes, component {component}, this node {state}");
    if component != "Primary" {
        let advice = "This node has lost the majority and refuses to work. Bring the others back, or connect to those that go on.";
        return check.fail(found, advice);
    }
    if !status.is_on("wsrep_ready") || !status.is_on("wsrep_connected") {
        return check.fail(
            found,
            "This node does not take statements yet: wait until it is Synced, or connect to another one.",
        );
    }
    let check = match state {
        "Synced" => check.ok(found),
        _ => check
            .warn(found, "This node lags behind the others, and is slow to commit: another one is the better choice."),
    };
    match size {
        1 => check.warn("it is the only node", "With three the cluster survives the loss of one."),
        2 => check.warn("neither survives the other's crash", "Add a third node, or an arbitrator (garbd)."),
        _ => check,
    }
}

fn group(check: Check, variables: &Values, members: &Rows) -> Check {
    let online = members.iter().filter(|row| row[1] == "ONLINE").count();
    let single = variables.is_on("group_replication_single_primary_mode");
    let mode = if single { "one primary" } else { "several primaries" };
    if members.is_empty() {
        let advice = "GRANT SELECT ON performance_schema.replication_group_members to this user.";
        return check.unknown(format!("a replication group with {mode}, whose members this user may not see"), advice);
    }
    let found = format!("a replication group with {mode}, {online} of {} members online", members.len());
    let own = variables.text("server_uuid");
    let state = members.iter().find(|row| row[0] == own).map_or("not a member", |row| &row[1]);
    if state != "ONLINE" {
        return check.fail(
            format!("{found}; this server is {state}"),
            "Connect to a member that is ONLINE, or start the group.",
        );
    }
    if online * 2 <= members.len() {
        return check.fail(found, "The majority is lost: commits wait. Bring the other members back.");
    }
    if !single {
        let advice = "Write to one member only: what two write at once is undone at commit.";
        return check.warn(found, advice);
    }
    check.ok(found)
}

fn durability(variables: &Values) -> Check {
    let mut check = Check::new("durability");
    let flush = variables.text("innodb_flush_log_at_trx_commit");
    if matches!(flush, "0" | "2") {
        let of = if flush == "0" { "the server" } else { "the host" };
        let advice = format!(
            "Set innodb_flush_log_at_trx_commit to 1: a crash of {of} loses the grants of the last second, and others can be \
             granted those names while their holders live."
        );
        check = check.warn(format!("innodb_flush_log_at_trx_commit is {flush}"), advice);
    }
    if matches!(variables.text("innodb_doublewrite"), "OFF" | "0") {
        let advice = "Set innodb_doublewrite to ON: a crash of the host can tear pages.";
        check = check.warn("innodb_doublewrite is off", advice);
    }
    if variables.is_on("log_bin") && variables.text("sync_binlog") != "1" {
        let advice = "Set sync_binlog to 1: after a crash of the host, replicas and this server may not agree on the last grants.";
        check = check.warn(format!("sync_binlog is {}", variables.text("sync_binlog")), advice);
    }
    check.or_ok(format!("innodb_flush_log_at_trx_commit {flush}"))
}

/// Another connection keeps its session while ours is asked which one it is in.
async fn pooler(conn: &mut MySqlConnection, options: &MySqlConnectOptions, comment: &str) -> Result<Check, Error> {
    let check = Check::new("pooler");
    let advice =
        "Leases work. Session locks need a connection of their own to the server: connect past the proxy for those.";
    if let Some(proxy) = ["ProxySQL", "MaxScale"].iter().find(|proxy| comment.contains(**proxy)) {
        return Ok(check.warn(format!("it calls itself {proxy}"), advice));
    }
    let id = ask::<MySql>(conn, sql::ID).await?;
    let mut other = options.connect().await?;
    let mut is_direct = true;
    for _ in 0..ROUNDS {
        ask::<MySql>(&mut other, "BEGIN").await?;
        let its = ask::<MySql>(&mut other, sql::ID).await?;
        let ours = ask::<MySql>(conn, sql::ID).await;
        ask::<MySql>(&mut other, "ROLLBACK").await?;
        let ours = ours?;
        is_direct = is_direct && first(&ours) == first(&id) && first(&its) != first(&id);
    }
    let _ = timeout(SHORT, other.close()).await;
    Ok(match is_direct {
        true => check.ok("none"),
        false => check.warn("one for transactions: each runs in whichever session of the server is free", advice),
    })
}

async fn ticks(conn: &mut MySqlConnection, clock: Check) -> Result<Check, Error> {
    let told = ask::<MySql>(conn, sql::TICKS).await?;
    let stands = told.first().is_some_and(|row| row[0] == row[2]);
    let advice = "Start the server without sysdate-is-now: a lease would last from the beginning of a statement that waited, and so \
                  end early.";
    Ok(if stands { clock.warn("it stands still during a statement (sysdate-is-now)", advice) } else { clock })
}

fn ours(sql: &str, expected: &[Table]) -> AssertSqlSafe<String> {
    AssertSqlSafe(sql.replace("{names}", &format!("{}, '{HISTORY}'", tables::quoted(expected))))
}

async fn find(
    conn: &mut MySqlConnection,
    expected: &[Table],
    about: &Rows,
    database: Option<&str>,
) -> Result<Found, Error> {
    let mut tables = tables::of_rows(about);
    tables::add_columns(&mut tables, &ask::<MySql>(conn, ours(sql::COLUMNS, expected)).await?);
    tables::add_indexes(&mut tables, &ask::<MySql>(conn, ours(sql::INDEXES, expected)).await?);
    let history = match about.iter().any(|row| row[0] == HISTORY) {
        true => match ask::<MySql>(conn, sql::HISTORY).await {
            Ok(rows) => Some(rows),
            // Without the right to read it, what the tables are like has to do.
            Err(Error::Database(_)) => None,
            Err(error) => return Err(error),
        },
        false => None,
    };
    let place = match database {
        Some(name) => format!("in the database {name}"),
        None => "here: the URL names no database".into(),
    };
    Ok(Found { tables, history, place })
}

/// What can be wrong with a table of MySQL as a whole.
fn kinds(about: &Rows, mut check: Check) -> Check {
    for row in about {
        let (name, kind, engine) = (&row[0], &row[1], &row[2]);
        if kind != "BASE TABLE" {
            check = check.fail(format!("{name} is not a table"), "Rename it, or keep sqlock in a database of its own.");
        } else if !engine.eq_ignore_ascii_case("InnoDB") {
            let advice = format!("ALTER TABLE {name} ENGINE = InnoDB: others lock no rows, and undo nothing.");
            check = check.fail(format!("{name} is kept by {engine}"), advice);
        }
    }
    check
}

async fn rights(conn: &mut MySqlConnection, found: &[Table], missing: bool) -> Result<Check, Error> {
    let mut check = Check::new("rights");
    for table in found {
        let Some(column) = table.columns.first() else { continue };
        let mut denied = Vec::new();
        for (right, sql) in sql::RIGHTS {
            let sql = sql.replace("{table}", &table.name).replace("{column}", &column.name);
            match ask::<MySql>(conn, AssertSqlSafe(sql)).await {
                Ok(_) => {}
                Err(Error::Database(error)) if error.message().contains("denied") => denied.push(right),
                Err(Error::Database(error)) => {
                    check = check.unknown(format!("{right} on {}: {}", table.name, error.message()), "");
                }
                Err(error) => return Err(error),
            }
        }
        if table.name == HISTORY {
            if denied.contains(&"SELECT") {
                let advice = format!(
                    "GRANT SELECT ON {HISTORY} to this user: \"sqlock migrate\" reads it, and nothing else does."
                );
                check = check.warn(format!("no SELECT on {HISTORY}"), advice);
            }
        } else if !denied.is_empty() {
            let advice = "GRANT SELECT, INSERT, UPDATE, DELETE on the tables of sqlock to this user.";
            check = check.fail(format!("no {} on {}", denied.join(", "), table.name), advice);
        }
    }
    if missing && first(&ask::<MySql>(conn, sql::MAY_CREATE).await?) == "0" {
        check = match first(&ask::<MySql>(conn, sql::ROLE).await?) {
            "NONE" => {
                let advice = "GRANT CREATE on the database, or let somebody who has it run \"sqlock migrate\".";
                check.fail("no CREATE, and tables are missing", advice)
            }
            role => check.unknown(format!("whether tables may be created is up to the role {role}"), ""),
        };
    }
    Ok(check.or_ok(if missing { "tables can be created" } else { "all that is needed on every table" }))
}

fn settings(variables: &Values) -> Check {
    let mut check = Check::new("settings");
    if variables.is_on("log_bin") && variables.text("binlog_format") == "STATEMENT" {
        let advice =
            "Set binlog_format to ROW or MIXED: the server refuses to log sqlock's transactions as statements.";
        check = check.fail("binlog_format is STATEMENT", advice);
    }
    // In seconds, with decimals, on MariaDB. That of MySQL is for SELECT alone.
    let limit: f64 = variables.text("max_statement_time").parse().unwrap_or(0.0);
    if limit > 0.0 && limit < SHORT.as_secs_f64() {
        let advice = "Set it to 0 or to 1 at least: a renewal that a busy server answers late is cancelled, and the lease may be lost.";
        check = check.warn(format!("max_statement_time is {limit} s"), advice);
    }
    let silence: u64 = variables.text("wait_timeout").parse().unwrap_or(u64::MAX);
    if silence < 10 {
        let advice = "Set it to 10 at least: connections that sqlock keeps are ended, and made anew with each use.";
        check = check.warn(format!("wait_timeout is {silence} s"), advice);
    }
    // sqlock sets its own. They matter to transactions of the application's in which a lease is fenced, or rows are locked.
    let told = ["innodb_lock_wait_timeout", "innodb_rollback_on_timeout", "innodb_snapshot_isolation"];
    let told: Vec<String> = told
        .iter()
        .filter(|name| !variables.text(name).is_empty())
        .map(|name| format!("{name} {}", variables.text(name)))
        .collect();
    check.ok(told.join(", "))
}

/// Name, value.
struct Values(Rows);

impl Values {
    fn text(&self, name: &str) -> &str {
        self.0.iter().find(|row| row[0].eq_ignore_ascii_case(name)).map_or("", |row| &row[1])
    }

    /// From MariaDB 12 on, read_only has more values than two.
    /// <https://mariadb.com/kb/en/server-system-variables/#read_only>
    fn is_on(&self, name: &str) -> bool {
        !matches!(self.text(name), "" | "OFF" | "0")
    }

    /// A provider, and switched on.
    fn is_galera(&self) -> bool {
        self.is_on("wsrep_on") && !matches!(self.text("wsrep_provider"), "" | "none")
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Status;
    use super::*;

    fn values(pairs: &[(&str, &str)]) -> Values {
        Values(pairs.iter().map(|(name, value)| vec![(*name).to_owned(), (*value).to_owned()]).collect())
    }

    #[test]
    fn a_node_of_galera_is_as_good_as_its_cluster() {
        let told = |component, ready, state, size| {
            let status = values(&[
                ("wsrep_cluster_status", component),
                ("wsrep_ready", ready),
                ("wsrep_connected", "ON"),
                ("wsrep_local_state_comment", state),
                ("wsrep_cluster_size", size),
            ]);
            let variables = values(&[("wsrep_on", "ON"), ("wsrep_provider", "/usr/lib/galera/libgalera_smm.so")]);
            cluster(&variables, &status, &Rows::new()).status
        };
        assert_eq!(told("Primary", "ON", "Synced", "3"), Status::Ok);
        assert_eq!(told("Primary", "ON", "Donor/Desynced", "3"), Status::Warn);
        assert_eq!(told("Primary", "ON", "Synced", "2"), Status::Warn);
        assert_eq!(told("Primary", "OFF", "Joining", "3"), Status::Fail);
        assert_eq!(told("non-Primary", "OFF", "Initialized", "1"), Status::Fail);
        let off = values(&[("wsrep_on", "OFF"), ("wsrep_provider", "none")]);
        assert_eq!(cluster(&off, &values(&[]), &Rows::new()).found(), "none");
    }

    #[test]
    fn a_group_needs_its_majority() {
        let told = |single, states: &[&str]| {
            let variables = values(&[
                ("group_replication_group_name", "g"),
                ("group_replication_single_primary_mode", single),
                ("server_uuid", "0"),
            ]);
            let members =
                states.iter().enumerate().map(|(i, s)| vec![i.to_string(), (*s).to_owned(), "PRIMARY".into()]);
            cluster(&variables, &values(&[]), &members.collect()).status
        };
        assert_eq!(told("ON", &["ONLINE", "ONLINE", "ONLINE"]), Status::Ok);
        assert_eq!(told("ON", &["ONLINE", "ONLINE", "UNREACHABLE"]), Status::Ok);
        assert_eq!(told("ON", &["ONLINE", "UNREACHABLE", "UNREACHABLE"]), Status::Fail);
        assert_eq!(told("ON", &["RECOVERING", "ONLINE", "ONLINE"]), Status::Fail);
        assert_eq!(told("OFF", &["ONLINE", "ONLINE", "ONLINE"]), Status::Warn);
        assert_eq!(told("ON", &[]), Status::NotApplicable);
    }

    #[test]
    fn semi_synchronous_replication_is_known_by_both_of_its_names() {
        let log = [("log_bin", "ON"), ("rpl_semi_sync_master_timeout", "10000")];
        for name in ["master", "source"] {
            let status = values(&[
                (&format!("Rpl_semi_sync_{name}_status"), "ON"),
                (&format!("Rpl_semi_sync_{name}_clients"), "2"),
            ]);
            let found = replication(&values(&log), &status, &Rows::new(), Ok(2)).found();
            assert!(found.starts_with("semi-synchronous, replicas: 2"), "{found}");
        }
        let told = |replicas| replication(&values(&log), &values(&[]), &Rows::new(), replicas).status;
        assert_eq!(told(Ok(0)), Status::Ok);
        assert_eq!(told(Ok(1)), Status::Warn);
        assert_eq!(told(Err("denied".into())), Status::NotApplicable);
        let off = replication(&values(&[("log_bin", "OFF")]), &values(&[]), &Rows::new(), Err("denied".into()));
        assert_eq!(off.status, Status::Ok);
    }

    #[test]
    fn every_value_of_read_only_but_off_counts() {
        assert_eq!(role(&values(&[("read_only", "NO_LOCK")])).status, Status::Fail);
        assert_eq!(role(&values(&[("read_only", "OFF"), ("super_read_only", "OFF")])).status, Status::Ok);
    }
}
