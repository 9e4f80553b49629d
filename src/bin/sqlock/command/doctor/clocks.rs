//! The clock of a database compared with its own past, and the clocks of several databases with
//! each other.

use std::time::Duration;

use super::probe::{Rows, format_brief};
use super::report::{Check, Report};

/// The clock difference above which two databases disagree about the end of a lease.
const MAX_DIFFERENCE: f64 = 1.0;

/// Adds a warning if holders are ahead of the clock of their database, because it was set back.
/// Rows: the number of holders, the greatest lead in seconds, and the longest TTL in seconds.
pub fn check_future(check: Check, leases: &Rows) -> Check {
    let Some([count, seconds, _]) = leases.first().map(|row| &row[..]) else {
        return check;
    };
    let seconds: f64 = seconds.parse().unwrap_or(0.0);
    if count == "0" || seconds <= 0.0 {
        return check;
    }
    let by = format_brief(Duration::try_from_secs_f64(seconds).unwrap_or_default());
    check.warn(
        format!("{count} leases or heartbeats are up to {by} ahead of it: it was set back"),
        "Names whose holders are dead stay held for that much longer: find them with \"sqlock ls\", and free them with \
         \"sqlock unlock\".",
    )
}

/// Returns the longest TTL, from the same rows.
pub fn longest_ttl(leases: &Rows) -> Option<Duration> {
    Duration::try_from_secs_f64(leases.first()?.get(2)?.parse().ok()?).ok()
}

/// Compares the clocks of several databases with the first one that is known, and adds a check to
/// each other report.
pub fn compare(reports: &mut [Report]) {
    let mut known = reports.iter_mut().filter_map(|report| report.skew.map(|skew| (report, skew)));
    let Some((first, (first_skew, first_margin))) = known.next() else {
        return;
    };
    for (report, (skew, margin)) in known {
        // Only the clock of this host has no margin: all SQLite files have it.
        if first_margin + margin > 0.0 {
            report.checks.push(check_difference(skew - first_skew, first_margin + margin, &first.database));
        }
    }
}

fn check_difference(difference: f64, margin: f64, first: &str) -> Check {
    let check = Check::new("clocks");
    let Ok(off) = Duration::try_from_secs_f64(difference.abs()) else {
        return check.unknown("a server does not return its time", "");
    };
    let side = if difference > 0.0 { "ahead of" } else { "behind" };
    let margin_text = format_brief(Duration::try_from_secs_f64(margin).unwrap_or_default());
    let found = format!("{} {side} {first}, give or take {margin_text}", format_brief(off));
    if difference.abs() - margin <= MAX_DIFFERENCE {
        return check.ok(found);
    }
    check.warn(
        found,
        "Correct one of the clocks: after a failover a lease lasts longer or shorter by that much, and the tokens of a quorum \
         follow the clock that is ahead.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::doctor::report::Status;

    #[test]
    fn lease_from_the_future_is_a_warning() {
        let rows = |count: &str, seconds: &str| vec![vec![count.to_owned(), seconds.to_owned(), "30.0".to_owned()]];
        let check = || Check::new("clock").ok("that of this host");
        assert_eq!(check_future(check(), &rows("0", "")).status, Status::Ok);
        let check = check_future(check(), &rows("2", "3600.5"));
        assert_eq!(check.status, Status::Warn);
        assert!(check.found().contains("2 leases or heartbeats are up to 3600.5 s ahead"), "{}", check.found());
    }

    #[test]
    fn databases_with_different_clocks_are_a_warning() {
        let mut reports: Vec<Report> =
            ["lost", "a", "b", "c", "d"].into_iter().map(|name| Report::new(name.into())).collect();
        for (report, skew) in reports.iter_mut().zip([None, Some(10.0), Some(10.4), Some(-3590.0), None]) {
            report.skew = skew.map(|skew| (skew, 0.01));
        }
        compare(&mut reports);
        let of = |i: usize| reports[i].checks.iter().map(|check| check.status).collect::<Vec<_>>();
        assert_eq!((of(0), of(1), of(4)), (vec![], vec![], vec![]));
        assert_eq!((of(2), of(3)), (vec![Status::Ok], vec![Status::Warn]));
        assert!(reports[3].checks[0].found().starts_with("3600.0 s behind a"), "{}", reports[3].checks[0].found());
    }
}
