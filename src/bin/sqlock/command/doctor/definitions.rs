//! Compares the tables of a database with those that sqlock needs.

use std::collections::BTreeSet;

use sqlx::SqlStr;
use sqlx::migrate::{Migration, MigrationType};

use super::report::{Check, Status};
#[cfg(any(feature = "postgres", feature = "mysql"))]
use super::table::HISTORY;
use super::table::{Catalog, Table, parse_bool};
use crate::migrations;
use crate::url::Kind;

/// The consequence of missing tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingTables {
    /// The first use creates them.
    Created,
    /// --no-migrate forbids creating them.
    Forbidden,
    /// A quorum does not create them, because the database may have lost its data.
    NoVote,
}

/// Adds that this user may not read the record of the migrations.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub fn report_unreadable_history(check: Check, missing_tables: MissingTables) -> Check {
    let found = format!("no SELECT on {HISTORY}");
    let advice =
        format!("GRANT SELECT ON {HISTORY} to this user: the votes of a quorum and \"sqlock migrate\" read it.");
    match missing_tables {
        MissingTables::NoVote => check.fail(found, advice),
        MissingTables::Created | MissingTables::Forbidden => check.warn(found, advice),
    }
}

/// Checks that the tables exist, and that the migrations are applied.
pub fn check_presence(kind: Kind, expected: &[Table], found: &Catalog, missing_tables: MissingTables) -> Check {
    let check = Check::new("tables");
    let exists = |table: &&Table| found.tables.iter().any(|actual| actual.name == table.name);
    let missing: Vec<&str> = expected.iter().filter(|table| !exists(table)).map(|table| &*table.name).collect();
    let history = found.history.as_deref().unwrap_or_default();
    if missing.len() == expected.len() && history.is_empty() {
        let found = format!("there are none {}", found.place);
        return match missing_tables {
            MissingTables::Created => check.warn(
                found,
                "They are created on first use; or run \"sqlock migrate\", or the SQL that \"sqlock schema\" prints.",
            ),
            MissingTables::Forbidden => check.fail(
                found,
                "Run \"sqlock migrate\", or the SQL that \"sqlock schema\" prints: with --no-migrate, other subcommands do not create them.",
            ),
            MissingTables::NoVote => check.fail(found, "Run \"sqlock migrate\" with its URL: without tables it does not vote."),
        };
    }
    let mut check = check;
    if !missing.is_empty() {
        let advice = if history.is_empty() {
            "Run \"sqlock migrate\", or the SQL that \"sqlock schema\" prints: it keeps existing tables."
        } else {
            "Run \"sqlock migrate\". If it says that they were dropped, run the SQL that \"sqlock schema\" prints."
        };
        check = check.fail(format!("missing {}: {}", found.place, missing.join(", ")), advice);
    }
    if !found.has_view {
        let advice = "Run the SQL that \"sqlock schema\" prints: it keeps existing tables. Only people and dashboards read the view.";
        check = check.warn("the view sqlock_holders is missing, or hidden from this user", advice);
    }
    if found.history.is_some() {
        check = check_migrations(check, kind, history);
    }
    check.or_ok(match found.history {
        Some(_) => format!("{} {}, up to date", expected.len(), found.place),
        None => format!("{} {}, made without \"sqlock migrate\"", expected.len(), found.place),
    })
}

/// Compares the record of migrations with the migrations of this program.
fn check_migrations(mut check: Check, kind: Kind, history: &[Vec<String>]) -> Check {
    let known: Vec<String> = migrations::list(kind).iter().map(|sql| hex_checksum(sql)).collect();
    let mut applied = BTreeSet::new();
    for row in history {
        let [version, success, checksum, ..] = &row[..] else { continue };
        let version: usize = version.parse().unwrap_or(0);
        applied.insert(version);
        match version.checked_sub(1).and_then(|index| known.get(index)) {
            // Of a later program that runs beside this one.
            None if (1..=migrations::LAST_COMPATIBLE_VERSION).contains(&version) => {
                check = check.ok(format!("migration {version} is newer than this program, and compatible"));
            }
            None => {
                let advice = "A newer sqlock has created these tables: update this one.";
                check = check.fail(format!("migration {version} is newer than this program"), advice);
            }
            Some(_) if !parse_bool(success) => {
                let advice = match kind {
                    Kind::Mysql => "Run \"sqlock migrate\": it continues the interrupted migration.",
                    // A migration is one transaction, so something else has changed the record.
                    _ => {
                        "\"sqlock migrate\" refuses it. If no other process is migrating, delete the row of this migration from \
                         _sqlock_migrations and run \"sqlock migrate\": it keeps existing tables."
                    }
                };
                check = check.fail(format!("migration {version} was interrupted"), advice);
            }
            Some(known) if !known.eq_ignore_ascii_case(checksum) => {
                let advice = "Another version of sqlock has created these tables, or the record was changed: compare them with the \
                              SQL that \"sqlock schema\" prints.";
                check = check.fail(format!("migration {version} differs from the one in this program"), advice);
            }
            Some(_) => {}
        }
    }
    let missing: Vec<String> = (1..=known.len()).filter(|v| !applied.contains(v)).map(|v| v.to_string()).collect();
    if !missing.is_empty() {
        let what = if missing.len() == 1 { "migration" } else { "migrations" };
        let advice = "Run \"sqlock migrate\", with the right to create tables.";
        check = check.fail(format!("{what} {} not applied", missing.join(", ")), advice);
    }
    check
}

/// Computes the checksum that sqlx records, in hex.
fn hex_checksum(sql: &'static str) -> String {
    let migration = Migration::new(0, "".into(), MigrationType::Simple, SqlStr::from_static(sql), false);
    migration.checksum.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Checks the definitions of existing tables, which may have been created by hand. Adds its
/// findings to `check`.
pub fn check_definitions(kind: Kind, expected: &[Table], found: &[Table], check: Check) -> Check {
    let advice = "Change it to the definition that \"sqlock schema\" prints.";
    let mut check = check;
    let mut compared = 0;
    for wanted in expected {
        let Some(found) = found.iter().find(|table| table.name == wanted.name) else { continue };
        compared += 1;
        let name = &wanted.name;
        for column in &wanted.columns {
            let what = format!("{name}.{}", column.name);
            let Some(actual) = found.column(&column.name) else {
                check = check.fail(format!("{what} is missing"), advice);
                continue;
            };
            if !is_compatible(&actual.kind, &column.kind) {
                check = check.fail(format!("{what} is {} and should be {}", actual.kind, column.kind), advice);
            } else if let Some((status, how)) =
                check_collation(kind, &column.collation, &actual.collation, wanted.is_key(&column.name))
            {
                check = check.add(status, format!("{what} {how}"), advice);
            }
            if column.has_default && !actual.has_default {
                check = check.fail(format!("{what} has no default"), advice);
            }
        }
        let unknown = found.columns.iter().filter(|actual| wanted.column(&actual.name).is_none());
        for unknown in unknown.filter(|column| column.not_null && !column.has_default) {
            let advice = "Give it a default, or drop it.";
            check = check.fail(format!("{name}.{} is not a column of sqlock and needs a value", unknown.name), advice);
        }
        for index in &wanted.indexes {
            let columns = index.columns.join(", ");
            match index.unique {
                true if !found.has_key(&index.columns) => {
                    check = check.fail(format!("{name} has no primary key on ({columns})"), advice);
                }
                false if !found.has_index(&index.columns) => {
                    check = check.fail(format!("{name} has no index on ({columns})"), advice);
                }
                _ => {}
            }
        }
    }
    match compared {
        0 => check.unknown("there are no tables", ""),
        _ => check.or_ok("columns, keys and indexes are as they should be"),
    }
}

/// Adds the rights that a user lacks on a table. Without those that leases need, nothing works;
/// others are for single tasks.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub fn report_denied(mut check: Check, table: &str, denied: &[&str]) -> Check {
    let is_for_leases = |right: &str| match table {
        "sqlock_client" | "sqlock_lease" => right != "DELETE",
        "sqlock_entry" | "sqlock_note" => true,
        _ => false,
    };
    let (needed, other): (Vec<&str>, Vec<&str>) = denied.iter().partition(|right| is_for_leases(right));
    if !needed.is_empty() {
        let advice = "GRANT SELECT, INSERT, UPDATE, DELETE on the tables of sqlock to this user.";
        check = check.fail(format!("no {} on {table}", needed.join(", ")), advice);
    }
    if !other.is_empty() {
        let advice = "The rights that leases do not need are for other tasks: the guide lists them for each task.";
        check = check.warn(format!("no {} on {table}, which leases do not need", other.join(", ")), advice);
    }
    check
}

/// Returns whether a column of one type can replace another: the same type, or the same for longer
/// values.
fn is_compatible(actual: &str, wanted: &str) -> bool {
    let parts = |kind: &str| -> (String, String, Option<u32>) {
        let (base, rest) = kind.split_once('(').unwrap_or((kind, ""));
        let (length, attributes) = rest.split_once(')').unwrap_or_default();
        // PostgreSQL has two names for text. The number behind bigint is a display width.
        let base = if base == "character varying" && length.is_empty() { "text" } else { base.trim() };
        (base.into(), attributes.trim().into(), length.parse().ok().filter(|_| base != "bigint"))
    };
    let (actual, wanted) = (parts(actual), parts(wanted));
    (actual.0, actual.1) == (wanted.0, wanted.1) && actual.2.unwrap_or(u32::MAX) >= wanted.2.unwrap_or(0)
}

/// Checks the collation of a column.
fn check_collation(kind: Kind, wanted: &str, actual: &str, is_key: bool) -> Option<(Status, String)> {
    if wanted.is_empty() || actual.is_empty() || wanted.eq_ignore_ascii_case(actual) {
        return None;
    }
    match kind {
        // The query marks collations that treat different texts as equal.
        Kind::Postgres if actual.starts_with('!') => {
            Some((Status::Fail, format!("treats different names as equal (collation {})", &actual[1..])))
        }
        Kind::Postgres if matches!(actual, "POSIX" | "ucs_basic") => None,
        Kind::Postgres => Some((
            Status::Warn,
            format!(
                "has the collation {actual} and should have {wanted}: an update of the system's library can corrupt its index"
            ),
        )),
        Kind::Mysql if actual.ends_with("_bin") || actual == "binary" => None,
        Kind::Mysql if is_key => {
            Some((Status::Fail, format!("treats different names as equal (collation {actual}, should be {wanted})")))
        }
        Kind::Mysql => Some((Status::Warn, format!("has the collation {actual} and should have {wanted}"))),
        Kind::Sqlite => Some((Status::Fail, format!("treats different names as equal (collation {actual})"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::doctor::table::expected_tables;

    const KINDS: [Kind; 3] = [Kind::Postgres, Kind::Mysql, Kind::Sqlite];

    #[test]
    fn missing_table_fails_and_complete_tables_pass() {
        for kind in KINDS {
            let tables = expected_tables(kind);
            assert_eq!(
                check_definitions(kind, &tables, &expected_tables(kind), Check::new("definitions")).status,
                Status::Ok
            );
            let mut found =
                Catalog { tables: expected_tables(kind), history: None, has_view: true, place: "here".into() };
            assert_eq!(check_presence(kind, &tables, &found, MissingTables::Forbidden).status, Status::Ok);
            let dropped = found.tables.pop().map(|table| table.name).unwrap_or_default();
            let check = check_presence(kind, &tables, &found, MissingTables::Created);
            assert_eq!((check.status, check.found()), (Status::Fail, format!("missing here: {dropped}")));
            found.tables.push(expected_tables(kind).pop().unwrap_or_default());
            found.has_view = false;
            assert_eq!(check_presence(kind, &tables, &found, MissingTables::Created).status, Status::Warn);
            found.tables.clear();
            assert_eq!(check_presence(kind, &tables, &found, MissingTables::Created).status, Status::Warn);
            assert_eq!(check_presence(kind, &tables, &found, MissingTables::Forbidden).status, Status::Fail);
        }
    }

    #[test]
    fn type_may_be_longer_but_not_another() {
        assert!(is_compatible("bigint(20)", "bigint") && is_compatible("varchar(64)", "varchar(32)"));
        assert!(is_compatible("character varying", "text"));
        assert!(!is_compatible("varchar(16)", "varchar(32)") && !is_compatible("character varying(20)", "text"));
        assert!(!is_compatible("varchar(255)", "varbinary(255)") && !is_compatible("integer", "bigint"));
        assert!(!is_compatible("bigint(20) unsigned", "bigint") && !is_compatible("bigint unsigned", "bigint"));
    }

    #[test]
    fn collations_that_fold_names_fail() {
        let status_of =
            |kind, wanted, actual, is_key| check_collation(kind, wanted, actual, is_key).map(|(status, _)| status);
        assert_eq!(status_of(Kind::Postgres, "C", "C", true), None);
        assert_eq!(status_of(Kind::Postgres, "C", "default", true), Some(Status::Warn));
        assert_eq!(status_of(Kind::Postgres, "C", "!ignore_case", true), Some(Status::Fail));
        assert_eq!(status_of(Kind::Mysql, "ascii_bin", "utf8mb4_bin", true), None);
        assert_eq!(status_of(Kind::Mysql, "ascii_bin", "utf8mb4_general_ci", true), Some(Status::Fail));
        assert_eq!(status_of(Kind::Mysql, "utf8mb4_bin", "utf8mb4_general_ci", false), Some(Status::Warn));
        assert_eq!(status_of(Kind::Sqlite, "BINARY", "NOCASE", true), Some(Status::Fail));
    }
}
