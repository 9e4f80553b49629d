//! The replication of PostgreSQL, which decides what a failover loses.

use sqlx::{Error, PgConnection, Postgres};

use super::settings::Settings;
use crate::command::doctor::probe::{Rows, query};
use crate::command::doctor::report::Check;

/// The statements, formatted for readability.
#[rustfmt::skip]
mod sql {
// A user without the right to read all statistics sees that there is a standby, but not its state.
// https://www.postgresql.org/docs/current/monitoring-stats.html#MONITORING-PG-STAT-REPLICATION-VIEW
// The consumer of a logical slot gets the state "logical": it cannot be promoted.
// https://www.postgresql.org/docs/current/view-pg-replication-slots.html
pub(super) const STANDBYS: &str = "
SELECT coalesce(nullif(r.application_name, ''), 'a standby'),
       CASE WHEN EXISTS (SELECT 1 FROM pg_replication_slots AS s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')
            THEN 'logical' ELSE coalesce(r.state, '') END,
       coalesce(r.sync_state, '')
  FROM pg_stat_replication AS r
 WHERE r.state IS NULL OR r.state <> 'backup'
 ORDER BY 1";
}

pub async fn check_replication(conn: &mut PgConnection, settings: &Settings, is_standby: bool) -> Result<Check, Error> {
    let check = Check::new("replication");
    if is_standby {
        return Ok(check.unknown("this is a standby: ask the primary", ""));
    }
    let standbys = query::<Postgres>(conn, sql::STANDBYS).await?;
    Ok(check_standbys(
        check,
        &standbys,
        settings.text("synchronous_standby_names"),
        settings.text("synchronous_commit"),
    ))
}

/// Checks what a failover from this server loses. `standbys`: name, state, sync_state.
fn check_standbys(check: Check, standbys: &Rows, wanted: &str, commit: &str) -> Check {
    let named = |standbys: &[&Vec<String>]| standbys.iter().map(|row| row[0].clone()).collect::<Vec<_>>().join(", ");
    let (logical, all): (Vec<&Vec<String>>, Vec<&Vec<String>>) = standbys.iter().partition(|row| row[1] == "logical");
    if wanted.is_empty() {
        if all.is_empty() {
            return check.ok("none");
        }
        let found = match all.iter().all(|row| row[2].is_empty()) {
            true => format!("asynchronous; standbys: {}", all.len()),
            false => format!("asynchronous: {}", named(&all)),
        };
        let advice = "Set synchronous_standby_names. Until then a failover loses the grants that had not arrived: two may hold a \
                      name until the next renewal. Fenced transactions and tokens protect the data.";
        return check.warn(found, advice);
    }
    let synchronous: Vec<&Vec<String>> =
        standbys.iter().filter(|row| row[1] == "streaming" && matches!(&*row[2], "sync" | "quorum")).collect();
    if synchronous.is_empty() && all.iter().any(|row| row[2].is_empty()) {
        let found =
            format!("synchronous_standby_names is {wanted}; this user may not see which of {} standbys are", all.len());
        return check.unknown(found, "GRANT pg_read_all_stats to this user to check it.");
    }
    let needed = count_needed(wanted);
    let confirming: Vec<&Vec<String>> =
        logical.into_iter().filter(|row| matches!(&*row[2], "sync" | "quorum")).collect();
    if confirming.len() >= needed {
        let found = format!("consumers of logical replication may confirm commits alone: {}", named(&confirming));
        let advice = "Name the standbys in synchronous_standby_names: a failover loses the grants that no standby has confirmed.";
        return check.warn(found, advice);
    }
    // sqlock raises "off" to "on" for each grant.
    if synchronous.len() + confirming.len() < needed && commit != "local" {
        let found = match &*named(&synchronous) {
            "" => format!("synchronous, and no standby of synchronous_standby_names ({wanted}) is connected"),
            few => format!("synchronous, and of synchronous_standby_names ({wanted}) only {few} is connected"),
        };
        let advice = "Every commit waits for a standby: start one, or change synchronous_standby_names.";
        return check.fail(found, advice);
    }
    match commit {
        "local" => check.warn(
            format!("synchronous: {}; but synchronous_commit is local", named(&synchronous)),
            "Set synchronous_commit to on for this user: grants do not wait for the standby, and a failover loses some.",
        ),
        "remote_write" => check.ok(format!("synchronous: {}; written there, not flushed (remote_write)", named(&synchronous))),
        _ => check.ok(format!("synchronous: {}", named(&synchronous))),
    }
}

/// Returns how many standbys must confirm a commit: `FIRST 2 (a, b)`, `ANY 2 (a, b)`, `2 (a, b)`, or
/// one in `a, b`.
/// <https://www.postgresql.org/docs/current/runtime-config-replication.html#GUC-SYNCHRONOUS-STANDBY-NAMES>
fn count_needed(wanted: &str) -> usize {
    let number = wanted.split_once('(').and_then(|(method, _)| method.split_whitespace().last()?.parse().ok());
    number.unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::doctor::report::Status;

    #[test]
    fn replication_check_finds_what_a_failover_loses() {
        let check = |standbys: &[[&str; 3]], wanted: &str, commit: &str| {
            let rows: Rows = standbys.iter().map(|row| row.iter().map(|cell| cell.to_string()).collect()).collect();
            let check = check_standbys(Check::new("replication"), &rows, wanted, commit);
            (check.status, check.found())
        };
        let sync = ["b", "streaming", "sync"];
        assert_eq!(check(&[], "", "on"), (Status::Ok, "none".into()));
        assert_eq!(check(&[sync], "FIRST 1 (b)", "on"), (Status::Ok, "synchronous: b".into()));
        assert_eq!(check(&[["b", "streaming", "async"]], "", "on"), (Status::Warn, "asynchronous: b".into()));
        assert_eq!(check(&[["a standby", "", ""]], "", "on"), (Status::Warn, "asynchronous; standbys: 1".into()));
        assert_eq!(check(&[sync], "b", "local").0, Status::Warn);
        // A failover promotes no consumer of logical replication.
        assert_eq!(check(&[["sub", "logical", "async"]], "", "on"), (Status::Ok, "none".into()));
        assert_eq!(check(&[["sub", "logical", ""]], "", "on"), (Status::Ok, "none".into()));
        let subscriber = ["sub", "logical", "sync"];
        assert_eq!(check(&[subscriber, ["b", "streaming", "potential"]], "*", "on").0, Status::Warn);
        assert_eq!(check(&[subscriber, sync], "FIRST 2 (*)", "on"), (Status::Ok, "synchronous: b".into()));
        let quorum = [["sub", "logical", "quorum"], ["b", "streaming", "quorum"]];
        assert_eq!(check(&quorum, "ANY 1 (*)", "on").0, Status::Warn);
        assert_eq!(check(&quorum[1..], "ANY 1 (*)", "on"), (Status::Ok, "synchronous: b".into()));
        assert_eq!(
            check(&[["sub", "logical", "quorum"], ["b", "streaming", "quorum"]], "ANY 2 (*)", "on").0,
            Status::Ok
        );
        // Every grant waits.
        assert_eq!(check(&[sync], "FIRST 2 (b, c)", "on").0, Status::Fail);
        assert_eq!(check(&[["b", "streaming", "quorum"]], "any 2 (b, c)", "on").0, Status::Fail);
        assert_eq!(check(&[], "b", "on").0, Status::Fail);
        assert_eq!(check(&[], "b", "off").0, Status::Fail);
        assert_eq!(check(&[sync], "b", "off").0, Status::Ok);
        assert_eq!(check(&[["b", "catchup", "sync"]], "b", "on").0, Status::Fail);
        assert_eq!(check(&[["a standby", "", ""]], "b", "on").0, Status::NotApplicable);
    }
}
