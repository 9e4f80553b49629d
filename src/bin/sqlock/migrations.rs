//! The SQL that creates the tables, and its versions.

use std::fmt;

use crate::url::Kind;

/// The migrations in order. The first has version 1.
const POSTGRES: &[&str] = &[
    include_str!("../../../migrations/postgres/0001_lease.sql"),
    include_str!("../../../migrations/postgres/0002_row.sql"),
    include_str!("../../../migrations/postgres/0003_idem.sql"),
    include_str!("../../../migrations/postgres/0004_idem_step.sql"),
    include_str!("../../../migrations/postgres/0005_holders.sql"),
];
const MYSQL: &[&str] = &[
    include_str!("../../../migrations/mysql/0001_client.sql"),
    include_str!("../../../migrations/mysql/0002_lease.sql"),
    include_str!("../../../migrations/mysql/0003_entry.sql"),
    include_str!("../../../migrations/mysql/0004_row.sql"),
    include_str!("../../../migrations/mysql/0005_idem.sql"),
    include_str!("../../../migrations/mysql/0006_idem_step.sql"),
    include_str!("../../../migrations/mysql/0007_holders.sql"),
];
const SQLITE: &[&str] = &[
    include_str!("../../../migrations/sqlite/0001_lease.sql"),
    include_str!("../../../migrations/sqlite/0002_idem.sql"),
    include_str!("../../../migrations/sqlite/0003_holders.sql"),
];

/// A version of the tables that this program does not know.
#[derive(Debug, PartialEq, Eq)]
pub struct UnknownVersion {
    kind: Kind,
    given: usize,
}

impl fmt::Display for UnknownVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, given } = self;
        let kind = format!("{kind:?}").to_lowercase();
        let latest = latest_version(self.kind);
        write!(
            f,
            "version {given} of the tables is not known: for {kind}, this sqlock knows the versions 0 (no tables) to {latest}; a \
             later version needs a later sqlock"
        )
    }
}

/// Returns the migrations after a version, each with its own version. 0: all of them.
pub fn list_after(kind: Kind, version: usize) -> Result<Vec<(usize, &'static str)>, UnknownVersion> {
    if version > latest_version(kind) {
        return Err(UnknownVersion { kind, given: version });
    }
    Ok((1..).zip(list(kind).iter().copied()).skip(version).collect())
}

/// The last version that this program can work with, even if it does not know it: the end of the
/// generation of its own versions, as for the library (`GENERATION` in src/schema.rs).
pub const LAST_COMPATIBLE_VERSION: usize = 999;

fn latest_version(kind: Kind) -> usize {
    list(kind).len()
}

pub fn list(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::Postgres => POSTGRES,
        Kind::Mysql => MYSQL,
        Kind::Sqlite => SQLITE,
    }
}

/// Returns the names of the tables.
pub fn table_names(kind: Kind) -> impl Iterator<Item = &'static str> {
    let definitions = list(kind).iter().flat_map(|sql| sql.split("CREATE TABLE IF NOT EXISTS ").skip(1));
    definitions.filter_map(|definition| definition.split_whitespace().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_after_a_version_have_later_versions() {
        for kind in [Kind::Postgres, Kind::Mysql, Kind::Sqlite] {
            let latest = latest_version(kind);
            for from in 0..=latest {
                let versions = list_after(kind, from).map(|after| after.iter().map(|(version, _)| *version).collect());
                assert_eq!(versions, Ok((from + 1..=latest).collect::<Vec<_>>()));
            }
            let unknown = list_after(kind, latest + 1);
            assert!(unknown.is_err_and(|error| error.to_string().contains("a later sqlock")));
        }
    }
}
