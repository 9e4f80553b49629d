//! The SQL that creates the tables.

use crate::url::Kind;

/// The migrations, in their order: the first has version 1.
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

pub fn list(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::Postgres => POSTGRES,
        Kind::Mysql => MYSQL,
        Kind::Sqlite => SQLITE,
    }
}
