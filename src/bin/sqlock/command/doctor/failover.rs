//! Checks that the servers of a list are those of one database.

use super::report::{Check, Report};
use crate::url::Kind;

/// Checks that at most one server of a list can be written, unless the servers are one cluster.
/// Adds a check to each other report.
pub fn check_writable(kinds: impl Iterator<Item = Kind>, databases: &mut [Vec<Report>]) {
    let reports = databases.iter_mut().filter_map(|reports| reports.first_mut()).zip(kinds);
    let mut writable =
        reports.filter(|(report, kind)| *kind != Kind::Sqlite && report.is_reachable() && !report.is_standby);
    let Some((first, first_kind)) = writable.next() else {
        return;
    };
    for (report, kind) in writable {
        if kind != first_kind || report.shares_server(first) || report.shares_cluster(first) {
            continue;
        }
        let check = Check::new("failover");
        let found = format!("this server accepts writes, and so does {}", first.database);
        let advice = "Name the servers of one database only: sqlock uses the first that can be written, so two clients could hold \
                      a name on two of them.";
        report.checks.push(match kind {
            Kind::Postgres => check.fail(found, format!("{advice} For independent databases, give --quorum.")),
            // They may replicate each other, or this one lacks the setting.
            _ => check
                .warn(found, format!("{advice} Set read_only on a replica. For independent databases, give --quorum.")),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::doctor::report::Status;

    /// Returns the status of the check of the second of two servers.
    fn status_of(kind: Kind, change: impl Fn(&mut Report)) -> Option<Status> {
        let report = |i: usize| {
            let mut report = Report::new(format!("db{i}"));
            report.add_server(&format!("server {i}"));
            vec![report]
        };
        let mut databases = [report(0), report(1)];
        databases.iter_mut().flatten().for_each(change);
        check_writable([kind; 2].into_iter(), &mut databases);
        databases[1][0].checks.iter().find(|check| check.name == "failover").map(|check| check.status)
    }

    #[test]
    fn two_writable_servers_are_not_one_database() {
        assert_eq!(status_of(Kind::Postgres, |_| {}), Some(Status::Fail));
        assert_eq!(status_of(Kind::Mysql, |_| {}), Some(Status::Warn));
        assert_eq!(status_of(Kind::Sqlite, |_| {}), None);
        assert_eq!(status_of(Kind::Mysql, |report| report.cluster = "c".into()), None);
        assert_eq!(status_of(Kind::Postgres, |report| report.is_standby = report.database == "db1"), None);
        assert_eq!(status_of(Kind::Postgres, |report| report.add_server("the same")), None);
    }
}
