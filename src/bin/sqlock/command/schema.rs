//! `sqlock schema`: the tables as SQL.

use clap::Args;

use crate::exit::Outcome;
use crate::global::Global;
use crate::migrations;
use crate::stdout;
use crate::url::{Kind, Url};

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

pub fn run(global: &Global, args: Arguments) -> Outcome {
    let kind = match args.db {
        Some(kind) => kind,
        None => Url::find(global)?.kind(),
    };
    // On MySQL a migration is one statement, and ends without a semicolon.
    let statements: Vec<String> =
        migrations::list(kind).iter().map(|file| format!("{};\n", file.trim_end().trim_end_matches(';'))).collect();
    stdout::print(&statements.join("\n"))?;
    Ok(0)
}
