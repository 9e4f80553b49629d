//! Triggers and rules on the tables, which change or swallow what sqlock writes.

use super::probe::Rows;
use super::report::Check;

/// Checks that nothing intercepts statements on the tables. Rows: table, kind, name. The kind is
/// `rule`, or the time of a trigger, or `hiding` for a trigger that hides the results of statements
/// from the client.
pub fn check_hooks(mut check: Check, hooks: &Rows) -> Check {
    for row in hooks {
        let [table, kind, name] = &row[..] else { continue };
        check = match &*kind.to_lowercase() {
            "after" => {
                let advice = "Its errors and its waits affect every lease. Drop it if it is not needed.";
                check.warn(format!("{table} has the trigger {name}"), advice)
            }
            "rule" => {
                let advice = format!("DROP RULE {name} ON {table}: it changes what a statement does, or swallows it.");
                check.fail(format!("{table} has the rule {name}"), advice)
            }
            "hiding" => {
                let advice = format!("Drop the trigger {name}: requests fail, or losses of leases are not noticed.");
                check.fail(format!("{table} has the trigger {name}, which hides the results of writes"), advice)
            }
            time => {
                let advice = format!("Drop the trigger {name}: it can change or swallow what is written, a grant too.");
                check.fail(format!("{table} has the trigger {name}, which runs {time} each write"), advice)
            }
        };
    }
    check
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::doctor::report::Status;

    #[test]
    fn hook_that_swallows_or_hides_a_write_fails() {
        let status_of = |kind: &str| {
            let hook = vec!["sqlock_lease".to_owned(), kind.to_owned(), "h".to_owned()];
            check_hooks(Check::new("definitions"), &vec![hook]).status
        };
        assert_eq!(status_of("AFTER"), Status::Warn);
        for kind in ["BEFORE", "instead of", "rule", "hiding"] {
            assert_eq!(status_of(kind), Status::Fail, "{kind}");
        }
    }
}
