//! Checks the databases of a quorum together: how many of them vote, and whether they are
//! independent.

use std::time::Duration;

use super::report::{Check, Report, Status};
use crate::duration;
use crate::majority::{count_majority, describe_node};

/// The TTL of requests that set none.
const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// Checks databases as one quorum, and numbers them. The first report of each is about the database
/// that votes. If a majority can vote, the outage of another database becomes a warning.
pub fn examine(databases: &mut [Vec<Report>]) -> Report {
    let count = databases.len();
    for (node, reports) in databases.iter_mut().enumerate() {
        for report in reports {
            report.database = describe_node(node, count, &report.database);
        }
    }
    let members: Vec<&Report> = databases.iter().filter_map(|reports| reports.first()).collect();
    let age_limit = AgeLimit::find(&members);
    let majority = check_majority(&members, age_limit);
    let has_majority = majority.status != Status::Fail;
    let checks = vec![majority, check_servers(&members), check_age(&members, age_limit), check_versions(&members)];
    if has_majority {
        databases.iter_mut().filter_map(|reports| reports.first_mut()).for_each(Report::accept_outage);
    }
    let mut report = Report::new(format!("a majority of {count} databases"));
    report.checks = checks;
    report
}

/// The age at which tables begin to vote: until then, the database may have replaced one that has
/// granted names.
#[derive(Clone, Copy)]
struct AgeLimit {
    ttl: Duration,
    /// Whether there are leases with this TTL. Otherwise the TTL is the default.
    is_used: bool,
}

impl AgeLimit {
    fn find(members: &[&Report]) -> Self {
        let longest = members.iter().filter_map(|member| member.longest_ttl).max();
        Self { ttl: longest.unwrap_or(DEFAULT_TTL), is_used: longest.is_some() }
    }

    fn describe(self) -> String {
        let which = if self.is_used { "the longest TTL in use" } else { "the default TTL" };
        format!("{which}, {}", duration::format_exact(self.ttl))
    }

    /// Returns the age of tables that are too young to vote.
    fn too_young(self, member: &Report) -> Option<Duration> {
        member.record.as_ref().map(|record| record.age).filter(|age| *age < self.ttl)
    }
}

/// Compares how many databases can vote with how many must.
fn check_majority(members: &[&Report], age_limit: AgeLimit) -> Check {
    let (count, needed) = (members.len(), count_majority(members.len()));
    let answering = members.iter().filter(|member| member.is_reachable()).count();
    let reasons: Vec<String> = members.iter().filter_map(|member| find_reason(member, age_limit)).collect();
    let voting = count - reasons.len();
    let found = format!("{answering} of {count} databases answer, {voting} can vote, and {needed} make a majority");
    let check = Check::new("majority");
    let check = match voting {
        _ if voting < needed => {
            check.fail(found, "Until a majority can vote, no lease can be acquired: see the other checks.")
        }
        _ if voting < count => check.warn(found, "Repair the others: without them the quorum survives fewer outages."),
        _ => check.ok(found),
    };
    let status = check.status;
    reasons.into_iter().fold(check, |check, reason| check.add(status, reason, ""))
}

/// Finds out why a database cannot vote.
fn find_reason(member: &Report, age_limit: AgeLimit) -> Option<String> {
    let database = &member.database;
    if !member.is_reachable() {
        return Some(format!("{database} is out of reach"));
    }
    let failed: Vec<&str> = member.checks.iter().filter(|check| check.status == Status::Fail).map(|c| c.name).collect();
    if !failed.is_empty() {
        return Some(format!("{database} has failed checks: {}", failed.join(", ")));
    }
    age_limit.too_young(member).map(|_| format!("{database} has tables that are too young"))
}

/// Checks that no server votes twice: the library refuses such a quorum.
fn check_servers(members: &[&Report]) -> Check {
    let mut check = Check::new("servers");
    for (i, one) in members.iter().enumerate() {
        for other in &members[i + 1..] {
            if one.shares_server(other) {
                let found = format!("{} and {} are on one server", one.database, other.database);
                let advice = "Use independent servers: one server would vote twice, and sqlock refuses such a quorum.";
                check = check.fail(found, advice);
            }
        }
    }
    check.or_ok("no two databases are on one server")
}

/// Checks that no tables are too young to vote.
fn check_age(members: &[&Report], age_limit: AgeLimit) -> Check {
    let mut check = Check::new("age");
    for member in members {
        if let Some(age) = age_limit.too_young(member) {
            let (database, age, limit) = (&member.database, duration::format(age), age_limit.describe());
            check = check.warn(
                format!("the tables of {database} are {age} old, less than {limit}"),
                "It votes when they are older. If it is not a new database, it has lost its data.",
            );
        }
    }
    check.or_ok(format!("no tables are younger than {}", age_limit.describe()))
}

/// Compares the versions of the tables.
fn check_versions(members: &[&Report]) -> Check {
    let check = Check::new("versions");
    let known = members.iter().filter_map(|member| Some((&member.database, member.record.as_ref()?)));
    let known: Vec<_> = known.collect();
    // The kinds of databases count their migrations apart, so the distance from the latest counts.
    let Some(newest) = known.iter().map(|(_, record)| record.distance()).max() else {
        return check.unknown("no tables have a record of their migrations", "");
    };
    let older = known.iter().filter(|(_, record)| record.distance() < newest);
    let check = older.fold(check, |check, (database, record)| {
        check.warn(
            format!("{database} has version {} of the tables, older than that of others", record.version),
            "Run \"sqlock migrate\" with its URL.",
        )
    });
    check.or_ok("all tables have the same version")
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::super::report::Record;
    use super::*;

    const OLD: Duration = Duration::from_secs(86_400);

    /// Makes the reports of healthy databases.
    fn databases(count: usize) -> Vec<Vec<Report>> {
        let healthy = |i| {
            let mut report = Report::new(format!("db{i}"));
            report.checks = ["reachable", "definitions"].map(|name| Check::new(name).ok("yes")).into();
            report.add_server(&format!("server {i}"));
            report.record = Some(Record { age: OLD, version: 5, latest: 5 });
            report
        };
        (0..count).map(|i| vec![healthy(i)]).collect()
    }

    fn fail(database: &mut [Report], name: &'static str) {
        database[0].checks.push(Check::new(name).fail("no", "Repair it."));
    }

    /// Returns the status of a check, and whether all reports are free of failures.
    fn judge(databases: &mut [Vec<Report>], name: &str) -> (Status, bool) {
        let quorum = examine(databases);
        let status = quorum.checks.iter().find(|check| check.name == name).expect("the check").status;
        (status, quorum.is_ok() && databases.iter().flatten().all(Report::is_ok))
    }

    #[test]
    fn outage_of_a_minority_is_a_warning() {
        assert_eq!(judge(&mut databases(3), "majority"), (Status::Ok, true));
        for outage in ["reachable", "answers", "role", "tables"] {
            let mut all = databases(3);
            fail(&mut all[1], outage);
            assert_eq!(judge(&mut all, "majority"), (Status::Warn, true), "{outage}");
            let mut all = databases(3);
            fail(&mut all[1], outage);
            fail(&mut all[2], outage);
            assert_eq!(judge(&mut all, "majority"), (Status::Fail, false), "{outage}");
            assert!(!all[1][0].is_ok(), "a failure stays one");
        }
    }

    #[test]
    fn wrong_definitions_of_a_minority_stay_a_failure() {
        let mut all = databases(3);
        fail(&mut all[1], "definitions");
        assert_eq!(judge(&mut all, "majority"), (Status::Warn, false));
    }

    #[test]
    fn half_of_the_databases_is_no_majority() {
        let mut all = databases(4);
        fail(&mut all[0], "reachable");
        assert_eq!(judge(&mut all, "majority"), (Status::Warn, true));
        let mut all = databases(4);
        fail(&mut all[0], "reachable");
        fail(&mut all[3], "reachable");
        assert_eq!(judge(&mut all, "majority"), (Status::Fail, false));
    }

    #[test]
    fn databases_with_a_server_in_common_fail() {
        let mut all = databases(3);
        all[2][0].add_server("server 0");
        assert_eq!(judge(&mut all, "servers"), (Status::Fail, false));
    }

    #[test]
    fn tables_younger_than_longest_ttl_do_not_vote() {
        let young = |age: u64, ttl: Option<u64>| {
            let mut all = databases(3);
            all[0][0].record = Some(Record { age: Duration::from_secs(age), version: 5, latest: 5 });
            all[1][0].longest_ttl = ttl.map(Duration::from_secs);
            judge(&mut all, "age").0
        };
        assert_eq!((young(29, None), young(30, None)), (Status::Warn, Status::Ok));
        assert_eq!((young(599, Some(600)), young(600, Some(600))), (Status::Warn, Status::Ok));
        assert_eq!(young(9, Some(5)), Status::Ok);

        let mut all = databases(3);
        for database in &mut all[..2] {
            database[0].record = Some(Record { age: Duration::ZERO, version: 5, latest: 5 });
        }
        assert_eq!(judge(&mut all, "majority"), (Status::Fail, false));
    }

    #[test]
    fn versions_are_compared_across_kinds() {
        let versions = |of_first: (usize, usize)| {
            let mut all = databases(3);
            all[0][0].record = Some(Record { age: OLD, version: of_first.0, latest: of_first.1 });
            judge(&mut all, "versions").0
        };
        assert_eq!(versions((7, 7)), Status::Ok);
        assert_eq!(versions((6, 7)), Status::Warn);
        assert_eq!(versions((4, 5)), Status::Warn);
    }
}
