//! The `sqlock` command: holds a lease while a command runs, and shows, takes and releases leases.
//!
//! `command/` has one file per subcommand, `cli.rs` the command line, `database.rs` the client,
//! `exit.rs` the exit codes. The files of `command/run/` kill the command before its lease ends.
#![deny(unsafe_code)]
#![allow(unreachable_pub, reason = "no other crate uses the command")]

#[cfg(not(unix))]
compile_error!("the sqlock command needs process groups and signals, which only Unix systems have");

#[cfg(not(any(feature = "postgres", feature = "mysql", feature = "sqlite")))]
compile_error!("the sqlock command needs a database: enable postgres, mysql or sqlite beside cli");

// Layers, the highest first. A file imports only files of lower lines, not of its own line or a
// higher one. `scripts/layers` checks this.
//
//   cli - the command line: its options and the list of subcommands
//   command/run - waits for the lease, runs the command, releases the lease
//   command/run/quorum - the same on a majority of databases
//   command/run/supervise - the command under its lease, from start to end
//   command/run/child - the process of the command
//   command/run/terminal - the terminal that sqlock and the command share
//   command/run/watchdog/process - the process that kills the command in time
//   command/run/watchdog - the handle of that process
//   command/run/watchdog/alarm command/run/watchdog/message - how it waits, what it is sent
//   command/run/reaper - starts and reaps the children
//   command/run/process_tree - the processes that are killed
//   command/run/schedule - when they are killed
//   command/run/arguments - the options of run
//   command/doctor - checks each database and prints the reports
//   command/doctor/mysql command/doctor/postgres command/doctor/sqlite - the checks of one kind of database
//   command/doctor/mysql/catalog command/doctor/mysql/replication - the tables of a server, and its replicas
//   command/doctor/postgres/catalog command/doctor/postgres/pooler command/doctor/postgres/replication - the same
//   command/doctor/mysql/settings command/doctor/postgres/settings - the settings of a server
//   command/doctor/definitions - compares the tables with what sqlock needs
//   command/doctor/clocks command/doctor/failover command/doctor/hooks command/doctor/quorum command/doctor/transport - clocks, several servers, triggers and rules, a quorum, TLS
//   command/doctor/table - tables, columns, indexes
//   command/doctor/probe - connections and queries
//   command/doctor/report - the results of checks
//   command/acquire command/release command/renew command/unlock command/ls command/show - one lease, or all of them
//   command/ls/screen command/show/quorum - the screen of ls --watch, a name on a majority
//   command/ls/source - lists of one database and of a majority
//   command/ls/view - its lines
//   command/ls/state - its state
//   command/bench command/completions command/idem command/man command/migrate command/schema command/sweep - the other subcommands
//   command/idem/describe - records as text and JSON
//   holding - ends a holding
//   majority - leases on a majority of databases
//   relocation - takes a lease in the SQLite file in which it counts
//   acquisition - takes a lease
//   describe majority_holders lease - leases as text and JSON, on several databases, and in one type
//   database - the client of a database
//   pool - the pool of a URL
//   migrations - the SQL of the tables
//   url - where the database is
//   sqlite_file - the file that leases are kept in
//   signals - the signals that arrive
//   process_list - all processes of the system
//   stdout - what is printed
//   exit - exit codes and failures
//   duration environment global parse stderr - values that know nothing of leases

mod acquisition;
mod cli;
mod command {
    pub mod acquire;
    pub mod bench;
    pub mod completions;
    pub mod doctor;
    pub mod idem;
    pub mod ls;
    pub mod man;
    pub mod migrate;
    pub mod release;
    pub mod renew;
    pub mod run;
    pub mod schema;
    pub mod show;
    pub mod sweep;
    pub mod unlock;
}
mod database;
mod describe;
mod duration;
mod environment;
mod exit;
mod global;
mod holding;
mod lease;
mod majority;
mod majority_holders;
mod migrations;
mod parse;
mod pool;
mod process_list;
mod relocation;
mod signals;
mod sqlite_file;
mod stderr;
mod stdout;
mod url;

use std::fs::File;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser};

use cli::{Cli, Subcommand};
use command::{
    acquire, bench, completions, doctor, idem, ls, man, migrate, release, renew, run, schema, show, sweep, unlock,
};
use exit::{Failure, Outcome};

fn main() -> ExitCode {
    if let Some(code) = run::watchdog::process::run_if_requested() {
        return code;
    }
    match completions::answer_if_requested(Cli::command) {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => {}
        Err(error) => return exit::report_usage_error(&error),
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return exit::report_usage_error(&error),
    };
    stderr::set_quiet(cli.global.quiet);
    if let Err(failure) = check_file_limit() {
        return failure.report();
    }
    // The command must be started by a thread that lives as long as this process: the kernel sends
    // the parent-death signal when the starting *thread* ends. One thread is enough for all.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Failure::system(format!("cannot start the runtime: {error}")).report(),
    };
    let outcome = runtime.block_on(dispatch(cli));
    // A hanging connection must not keep the process alive.
    runtime.shutdown_timeout(Duration::from_millis(100));
    let code = match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => failure.report(),
    };
    stderr::flush();
    code
}

/// Checks that this process may open as many files as it needs, because libraries panic at the
/// limit.
fn check_file_limit() -> Result<(), Failure> {
    const FILES: usize = 24;
    let opened: std::io::Result<Vec<File>> = (0..FILES).map(|_| File::open("/dev/null")).collect();
    opened.map(drop).map_err(|error| {
        Failure::system(format!("cannot open {FILES} files: {error} (for this shell, \"ulimit -n\" prints the limit)"))
    })
}

async fn dispatch(cli: Cli) -> Outcome {
    let Cli { global, subcommand } = cli;
    match subcommand {
        Subcommand::Run(args) => run::run(&global, args).await,
        Subcommand::Acquire(args) => acquire::run(&global, args).await,
        Subcommand::Renew(args) => renew::run(&global, args).await,
        Subcommand::Release(args) => release::run(&global, args).await,
        Subcommand::Ls(args) => ls::run(&global, args).await,
        Subcommand::Show(args) => show::run(&global, args).await,
        Subcommand::Unlock(args) => unlock::run(&global, args).await,
        Subcommand::Migrate => migrate::run(&global).await,
        Subcommand::Schema(args) => schema::run(&global, args),
        Subcommand::Sweep(args) => sweep::run(&global, args).await,
        Subcommand::Idem(args) => idem::run(&global, args).await,
        Subcommand::Doctor(args) => doctor::run(&global, args).await,
        Subcommand::Bench(args) => bench::run(&global, args).await,
        Subcommand::Completions(args) => completions::run(&args),
        Subcommand::Man(args) => man::run(&args, Cli::command()),
    }
}
