//! `sqlock schema`: prints the SQL of the tables.

use clap::Args;

use crate::exit::Outcome;
use crate::global::Global;
use crate::migrations;
use crate::stdout;
use crate::url::{Kind, Url};

/// Print the SQL that creates the tables, to paste into your own migrations.
///
/// With it, only your own migrations need the right to create tables. Nothing is sent to a
/// database. (A SQLite file with these tables also has the leases of this command, which are in
/// FILE-sqlock otherwise.)
#[derive(Args)]
pub struct Arguments {
    /// The kind of database. By default that of the configured database.
    #[arg(long, value_name = "DATABASE")]
    db: Option<Kind>,
}

pub fn run(global: &Global, args: Arguments) -> Outcome {
    let kind = match args.db {
        Some(kind) => kind,
        None => Url::find(global)?.kind(),
    };
    // On MySQL the last statement of a migration has no semicolon.
    let statements: Vec<String> =
        migrations::list(kind).iter().map(|file| format!("{};\n", file.trim_end().trim_end_matches(';'))).collect();
    stdout::print(&statements.join("\n"))?;
    Ok(0)
}
