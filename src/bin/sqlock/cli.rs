//! The command line. The options of each subcommand are in its own file.

use clap::Parser;

use crate::command::{
    acquire, bench, completions, doctor, idem, ls, man, release, renew, run, schema, show, sweep, unlock,
};
use crate::global::Global;

/// Hold a lease on a name, in the SQL database you already run, while a command runs.
///
/// Of all processes on all hosts that use one database, one at a time holds a name (or several, if
/// they share it). If the holder dies, the name is free after the TTL of its lease. If the lease is
/// lost, the command is killed before the name is free.
#[derive(Parser)]
#[command(
    name = "sqlock",
    version = version(),
    max_term_width = 100,
    subcommand_required = true,
    after_help = "Try: sqlock run hello -- sh -c 'echo holding; sleep 5'   and meanwhile: sqlock ls",
    after_long_help = LONG_HELP,
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub subcommand: Subcommand,
}

const LONG_HELP: &str = "\
Examples:
  sqlock run migrate -- sqlx migrate run         one migration at a time, the others wait their turn
  sqlock run -n nightly -- ./report.sh           exit with 75 instead of waiting
  sqlock run -w 5m deploy -- make deploy         wait for 5 minutes at most
  sqlock run --permits 3 import -- ./import.sh   at most three at a time
  sqlock run --shared index -- ./search.sh       many readers, or one writer without --shared
  sqlock ls                                      list the names that are held
  sqlock show deploy                             show the holders of a name, and the waiters
  sqlock doctor                                  check the set-up of the database

The database is the first of these: --database-url, SQLOCK_DATABASE_URL, DATABASE_URL, one of the
two in a file .env in this directory. Without any, it is an embedded SQLite file, one for each user
and host, which excludes other commands of this user on this host only: sqlock prints a note, and
fails with --require-database. Other users of this host can see passwords on a command line: prefer
a variable, or -D @FILE.

A SQLite file with sqlock's tables, which programs with the library create, has the leases of this
command too. Otherwise the leases are in FILE-sqlock, where a long transaction in the file does not
delay them. --same-file and --sidecar choose.

Exit codes:
  the command's own; 128+N if signal N killed it
  1                  doctor: a check has failed
  64  usage          69  database unreachable       75  not obtained: -n, or -w ran out
  78  configuration  79  lease lost, or not yours   126, 127  command not executable, not found
  128+N              interrupted by signal N (130, 143); 141: stdout was closed
  71, 74             error of the system; stdout cannot be written";

#[derive(clap::Subcommand)]
pub enum Subcommand {
    Run(run::arguments::Arguments),
    Acquire(acquire::Arguments),
    Renew(renew::Arguments),
    Release(release::Arguments),
    #[command(visible_alias = "list")]
    Ls(ls::Arguments),
    Show(show::Arguments),
    Unlock(unlock::Arguments),
    /// Create the tables, or bring them up to date.
    ///
    /// Any number of processes may do this at once. "run", "acquire" and "bench" do it when the
    /// tables are missing, unless --no-migrate is given; with --quorum, no subcommand does. On SQLite
    /// the tables are in a file of their own, FILE-sqlock, unless FILE has them already or
    /// --same-file is given.
    Migrate,
    Schema(schema::Arguments),
    Sweep(sweep::Arguments),
    Idem(idem::Arguments),
    Doctor(doctor::Arguments),
    Bench(bench::Arguments),
    Completions(completions::Arguments),
    Man(man::Arguments),
}

/// Returns the version and the databases: `0.1.0, built for PostgreSQL, SQLite`.
fn version() -> String {
    let databases = [
        ("PostgreSQL", cfg!(feature = "postgres")),
        ("MySQL and MariaDB", cfg!(feature = "mysql")),
        ("SQLite", cfg!(feature = "sqlite")),
    ];
    let databases: Vec<&str> = databases.iter().filter(|(_, built)| *built).map(|(name, _)| *name).collect();
    let databases = if databases.is_empty() { "no database".into() } else { databases.join(", ") };
    format!("{}, built for {databases}", env!("CARGO_PKG_VERSION"))
}
