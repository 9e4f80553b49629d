//! The command line: what can be asked for. The options of each subcommand stand in its own file.

use clap::Parser;

use crate::command::{acquire, bench, completions, doctor, idem, ls, release, renew, run, schema, show, sweep, unlock};
use crate::global::Global;

/// Hold a lease on a name, in the SQL database you already run, while a command runs.
///
/// Of all the processes on all hosts that use one database, one at a time holds a name (or several, if they share it). If the holder dies, the name is
/// free after the TTL of its lease; if the lease is lost, the command is dead before anyone else can hold it.
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
  sqlock run -n nightly -- ./report.sh           somebody else is at it: exit with 75
  sqlock run -w 5m deploy -- make deploy         wait for 5 minutes at most
  sqlock run --permits 3 import -- ./import.sh   at most three at a time
  sqlock run --shared index -- ./search.sh       with others who share; who does not share is alone
  sqlock ls                                      who holds what
  sqlock show deploy                             who holds this, since when, until when; who waits
  sqlock doctor                                  whether the database is set up as it should be

The database is the first of these: --database-url, SQLOCK_DATABASE_URL, DATABASE_URL, one of the
two in a file .env in this directory. Without any, it is an embedded SQLite file, one for each user
and host, which excludes other commands of this user on this host only: sqlock says so, and refuses
with --require-database. Passwords on a command line can be seen by others on this host: prefer a
variable, or -D @FILE.

A SQLite file that has sqlock's tables, because programs use the library on it, has the leases of
this command too. Otherwise they are kept in FILE-sqlock, so that a long transaction in the file
does not hold them up. --same-file and --sidecar choose.

Exit codes:
  the command's own; 128+N if signal N killed it
  64  usage          69  database unreachable       75  not obtained: -n, or -w ran out
  78  configuration  79  lease lost, or not yours   126, 127  command not executable, not found
  130, 143           interrupted while waiting
  71, 74             the system refused something; stdout cannot be written";

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
    /// Any number of processes may do this at once. The other subcommands do it when they find no tables, unless
    /// --no-migrate forbids it.
    Migrate,
    Schema(schema::Arguments),
    Sweep(sweep::Arguments),
    Idem(idem::Arguments),
    Doctor(doctor::Arguments),
    Bench(bench::Arguments),
    Completions(completions::Completions),
    /// Print the manual page, in roff: sqlock man | man -l -
    Man,
}

/// `0.1.0, for PostgreSQL, SQLite`.
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
