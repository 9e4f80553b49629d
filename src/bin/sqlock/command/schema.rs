//! `sqlock schema`: the tables as SQL.

use clap::Args;

use crate::cli::Global;
use crate::database::{Kind, Url};
use crate::exit::Outcome;
use crate::stdout;

/// Print the SQL that creates the tables, to paste into your own migrations.
///
/// Then nobody needs the right to create tables but your own migrations. Nothing is sent to a database. (A SQLite file with
/// these tables also has the leases of this command, which otherwise keeps them in FILE-sqlock.)
#[derive(Args)]
pub struct Arguments {
    /// For which database. By default the one that is configured.
    #[arg(long, value_name = "DATABASE")]
    db: Option<Kind>,
}

/// The migrations, in their order: the first has version 1.
const POSTGRES: &[&str] = &[
    include_str!("../../../../migrations/postgres/0001_lease.sql"),
    include_str!("../../../../migrations/postgres/0002_row.sql"),
    include_str!("../../../../migrations/postgres/0003_idem.sql"),
    include_str!("../../../../migrations/postgres/0004_idem_step.sql"),
];
const MYSQL: &[&str] = &[
    include_str!("../../../../migrations/mysql/0001_client.sql"),
    include_str!("../../../../migrations/mysql/0002_lease.sql"),
    include_str!("../../../../migrations/mysql/0003_entry.sql"),
    include_str!("../../../../migrations/mysql/0004_row.sql"),
    include_str!("../../../../migrations/mysql/0005_idem.sql"),
    include_str!("../../../../migrations/mysql/0006_idem_step.sql"),
];
const SQLITE: &[&str] = &[
    include_str!("../../../../migrations/sqlite/0001_lease.sql"),
    include_str!("../../../../migrations/sqlite/0002_idem.sql"),
];

pub fn migrations(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::Postgres => POSTGRES,
        Kind::Mysql => MYSQL,
        Kind::Sqlite => SQLITE,
    }
}

pub fn run(global: &Global, args: Arguments) -> Outcome {
    let kind = match args.db {
        Some(kind) => kind,
        None => Url::find(global)?.kind(),
    };
    // On MySQL a migration is one statement, and ends without a semicolon.
    let statements: Vec<String> =
        migrations(kind).iter().map(|file| format!("{};\n", file.trim_end().trim_end_matches(';'))).collect();
    stdout::text(&statements.join("\n"))?;
    Ok(0)
}
