//! The replication of MySQL and MariaDB, which decides what a failover loses: replicas, Galera,
//! Group Replication.

use sqlx::mysql::MySqlRow;
use sqlx::{Error, MySql, MySqlConnection, Row as _};

use super::settings::Variables;
use crate::command::doctor::probe::{Rows, query};
use crate::command::doctor::report::Check;
use crate::command::doctor::table::parse_bool;

/// The statements, formatted for readability.
#[rustfmt::skip]
mod sql {
// The readers of the binary log. Each server knows one of the two names. A replica that does not
// report its host may be missing in the list, but its connection is not.
// https://dev.mysql.com/doc/refman/8.4/en/show-replicas.html
// https://mariadb.com/kb/en/show-replica-hosts/
pub(super) const REPLICAS: [&str; 2] = ["SHOW REPLICAS", "SHOW REPLICA HOSTS"];
// information_schema fails when a running statement is not UTF-8. The fifth column is the command
// of a connection.
pub(super) const SESSIONS: &str = "SHOW PROCESSLIST";
}

/// Counts the connected replicas, or returns why the server refuses to list them.
pub async fn count_replicas(conn: &mut MySqlConnection) -> Result<Result<usize, String>, Error> {
    let mut refusal = String::new();
    for sql in sql::REPLICAS {
        match query::<MySql>(conn, sql).await {
            Ok(listed) => {
                let sessions = sqlx::raw_sql(sql::SESSIONS).fetch_all(&mut *conn).await?;
                let does = |row: &MySqlRow| row.try_get_unchecked::<String, _>(4).unwrap_or_default();
                let readers = sessions.iter().filter(|row| does(row).starts_with("Binlog Dump")).count();
                return Ok(Ok(listed.len().max(readers)));
            }
            // A refusal of this user counts more than a statement that the server does not know.
            Err(Error::Database(error)) if refusal.is_empty() || error.message().contains("denied") => {
                refusal = error.message().to_owned();
            }
            Err(Error::Database(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Err(refusal))
}

/// Checks what a failover from this server loses.
pub fn check_replication(
    variables: &Variables,
    status: &Variables,
    members: &Rows,
    replicas: Result<usize, String>,
) -> Check {
    let check = Check::new("replication");
    if variables.is_galera() || !members.is_empty() {
        return check.ok("that of the cluster");
    }
    if !variables.is_on("log_bin") {
        return check.ok("none: there is no binary log");
    }
    let either = |values: &Variables, name: &str| {
        [values.text(&name.replace('?', "source")), values.text(&name.replace('?', "master"))].concat()
    };
    if !parse_bool(&either(status, "Rpl_semi_sync_?_status")) {
        // Without a replica there is no failover.
        return match replicas {
            Ok(0) => check.ok("none: no replica is connected"),
            Ok(replicas) => check.warn(
                format!("asynchronous, replicas: {replicas}"),
                "Install and enable semi-synchronous replication. Until then a failover loses the grants that had not arrived: two \
                 may hold a name until the next renewal. Fenced transactions and tokens protect the data.",
            ),
            Err(refusal) => check.unknown(
                format!("not semi-synchronous; cannot list replicas: {refusal}"),
                "GRANT REPLICATION SLAVE (MySQL) or REPLICATION MASTER ADMIN (MariaDB) to this user to check it.",
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

/// Checks the node of Galera or Group Replication.
pub fn check_cluster(variables: &Variables, status: &Variables, members: &Rows) -> Check {
    let check = Check::new("cluster");
    if variables.is_galera() {
        return check_galera(check, status);
    }
    if variables.text("group_replication_group_name").is_empty() && members.is_empty() {
        return check.ok("none");
    }
    check_group(check, variables, members)
}

fn check_galera(check: Check, status: &Variables) -> Check {
    let (component, state) = (status.text("wsrep_cluster_status"), status.text("wsrep_local_state_comment"));
    let size: u32 = status.text("wsrep_cluster_size").parse().unwrap_or(0);
    let found = format!("Galera, {size} nodes, component {component}, this node {state}");
    if component != "Primary" {
        let advice = "This node has lost the majority and refuses statements. Bring the others back, or connect to the majority.";
        return check.fail(found, advice);
    }
    if !status.is_on("wsrep_ready") || !status.is_on("wsrep_connected") {
        return check.fail(
            found,
            "This node does not accept statements yet: wait until it is Synced, or connect to another one.",
        );
    }
    let check = match state {
        "Synced" => check.ok(found),
        _ => check.warn(found, "This node lags behind the others and is slow to commit: prefer another one."),
    };
    match size {
        1 => check.warn("it is the only node", "With three the cluster survives the loss of one."),
        2 => check.warn("neither node survives the other's crash", "Add a third node, or an arbitrator (garbd)."),
        _ => check,
    }
}

fn check_group(check: Check, variables: &Variables, members: &Rows) -> Check {
    let online = members.iter().filter(|row| row[1] == "ONLINE").count();
    let single = variables.is_on("group_replication_single_primary_mode");
    let mode = if single { "one primary" } else { "several primaries" };
    if members.is_empty() {
        let advice = "GRANT SELECT ON performance_schema.replication_group_members to this user.";
        return check.unknown(format!("a replication group with {mode}; this user may not see its members"), advice);
    }
    let found = format!("a replication group with {mode}, {online} of {} members online", members.len());
    let own_id = variables.text("server_uuid");
    let state = members.iter().find(|row| row[0] == own_id).map_or("not a member", |row| &row[1]);
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
        let advice = "Switch the group to single-primary mode: sqlock refuses a member of several writers, which do not see each \
                      other's locks.";
        return check.fail(found, advice);
    }
    check.ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::doctor::report::Status;

    fn values(pairs: &[(&str, &str)]) -> Variables {
        Variables(pairs.iter().map(|(name, value)| vec![(*name).to_owned(), (*value).to_owned()]).collect())
    }

    #[test]
    fn galera_status_depends_on_node_and_cluster() {
        let status_of = |component, ready, state, size| {
            let status = values(&[
                ("wsrep_cluster_status", component),
                ("wsrep_ready", ready),
                ("wsrep_connected", "ON"),
                ("wsrep_local_state_comment", state),
                ("wsrep_cluster_size", size),
            ]);
            let variables = values(&[("wsrep_on", "ON"), ("wsrep_provider", "/usr/lib/galera/libgalera_smm.so")]);
            check_cluster(&variables, &status, &Rows::new()).status
        };
        assert_eq!(status_of("Primary", "ON", "Synced", "3"), Status::Ok);
        assert_eq!(status_of("Primary", "ON", "Donor/Desynced", "3"), Status::Warn);
        assert_eq!(status_of("Primary", "ON", "Synced", "2"), Status::Warn);
        assert_eq!(status_of("Primary", "OFF", "Joining", "3"), Status::Fail);
        assert_eq!(status_of("non-Primary", "OFF", "Initialized", "1"), Status::Fail);
        let off = values(&[("wsrep_on", "OFF"), ("wsrep_provider", "none")]);
        assert_eq!(check_cluster(&off, &values(&[]), &Rows::new()).found(), "none");
    }

    #[test]
    fn group_without_majority_fails() {
        let status_of = |single, states: &[&str]| {
            let variables = values(&[
                ("group_replication_group_name", "g"),
                ("group_replication_single_primary_mode", single),
                ("server_uuid", "0"),
            ]);
            let members =
                states.iter().enumerate().map(|(i, s)| vec![i.to_string(), (*s).to_owned(), "PRIMARY".into()]);
            check_cluster(&variables, &values(&[]), &members.collect()).status
        };
        assert_eq!(status_of("ON", &["ONLINE", "ONLINE", "ONLINE"]), Status::Ok);
        assert_eq!(status_of("ON", &["ONLINE", "ONLINE", "UNREACHABLE"]), Status::Ok);
        assert_eq!(status_of("ON", &["ONLINE", "UNREACHABLE", "UNREACHABLE"]), Status::Fail);
        assert_eq!(status_of("ON", &["RECOVERING", "ONLINE", "ONLINE"]), Status::Fail);
        assert_eq!(status_of("OFF", &["ONLINE", "ONLINE", "ONLINE"]), Status::Fail);
        assert_eq!(status_of("ON", &[]), Status::NotApplicable);
    }

    #[test]
    fn semi_synchronous_replication_is_found_by_both_names() {
        let log = [("log_bin", "ON"), ("rpl_semi_sync_master_timeout", "10000")];
        for name in ["master", "source"] {
            let status = values(&[
                (&format!("Rpl_semi_sync_{name}_status"), "ON"),
                (&format!("Rpl_semi_sync_{name}_clients"), "2"),
            ]);
            let found = check_replication(&values(&log), &status, &Rows::new(), Ok(2)).found();
            assert!(found.starts_with("semi-synchronous, replicas: 2"), "{found}");
        }
        let status_of = |replicas| check_replication(&values(&log), &values(&[]), &Rows::new(), replicas).status;
        assert_eq!(status_of(Ok(0)), Status::Ok);
        assert_eq!(status_of(Ok(1)), Status::Warn);
        assert_eq!(status_of(Err("denied".into())), Status::NotApplicable);
        let off = check_replication(&values(&[("log_bin", "OFF")]), &values(&[]), &Rows::new(), Err("denied".into()));
        assert_eq!(off.status, Status::Ok);
    }
}
