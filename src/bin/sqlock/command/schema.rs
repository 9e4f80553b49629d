//! `sqlock schema`: prints the SQL of the tables.

use clap::Args;

use crate::exit::{Failure, Outcome};
use crate::global::Global;
use crate::url::{Kind, Url};
use crate::{migrations, stderr, stdout};

/// Print the SQL that creates the tables, to paste into your own migrations.
///
/// With it, only your own migrations need the right to create tables. Nothing is sent to a
/// database. A comment before each part has the version of the tables: with --from VERSION, a later
/// release of sqlock prints only what was added after that version. (A SQLite file with these
/// tables also has the leases of this command, which are in FILE-sqlock otherwise.)
#[derive(Args)]
pub struct Arguments {
    /// The kind of database. By default that of the configured database.
    #[arg(long, value_name = "DATABASE")]
    db: Option<Kind>,
    /// Print only what brings tables of this version up to date. The version is in the last comment
    /// of the printed SQL, and in _sqlock_migrations if sqlock itself has migrated the database.
    #[arg(long, value_name = "VERSION", default_value_t = 0, hide_default_value = true)]
    from: usize,
}

pub fn run(global: &Global, args: Arguments) -> Outcome {
    let kind = match args.db {
        Some(kind) => kind,
        None => Url::find(global)?.kind(),
    };
    let migrations = migrations::list_after(kind, args.from).map_err(|error| Failure::usage(error.to_string()))?;
    if migrations.is_empty() {
        stderr::print_note(&format!("version {} is the latest: there is nothing to print", args.from));
    }
    // On MySQL the last statement of a migration has no semicolon.
    let format = |(version, sql): &(usize, &str)| {
        format!("-- sqlock schema version {version}\n{};\n", sql.trim_end().trim_end_matches(';'))
    };
    let statements: Vec<String> = migrations.iter().map(format).collect();
    stdout::print(&statements.join("\n"))?;
    Ok(0)
}
