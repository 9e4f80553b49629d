//! `sqlock ls`: lists the held names.

mod screen;
mod source;
mod state;
mod view;

use std::time::Duration;

use clap::Args;
use tokio::time::sleep;

use self::source::{List, Source};
use crate::exit::{self, Failure, Outcome};
use crate::global::Global;
use crate::signals::Signals;
use crate::{stderr, stdout};

/// List the names that are held.
///
/// Prints one line for each holder, with its mode (exclusive, shared, permits) and the number of
/// waiters for the name. (A waiter counts once it has found the name taken.) With --json an
/// array of objects with name, mode ("exclusive", "shared", "permits"), permits (how many; null in
/// other modes), holder, owner, token, acquired_at, expires_at, waiters, label and note (what the
/// holder notes about its work; null without any).
///
/// With --watch on a terminal, a screen shows the list, with the age of the latest heartbeat of
/// each holder, and refreshes it every second. Keys: s sorts by name, time held, age of the
/// heartbeat or waiters; / edits the prefix (Enter keeps it, Esc restores the old one); up and down
/// select a holder; u unlocks the selected holder by its token, after a question that shows both; q
/// quits. If the database is lost, a line says so and the last list stays. With --quorum, a line
/// names a database that does not answer, and u unlocks the holder on a majority.
#[derive(Args)]
pub struct Arguments {
    /// List only names that begin with this.
    #[arg(default_value = "", hide_default_value = true)]
    prefix: String,
    /// Print JSON; with --watch, one line each time.
    #[arg(long)]
    json: bool,
    /// Show the list on a screen, until q is pressed. Where there is no terminal, or with --json,
    /// print it again every second, until interrupted.
    #[arg(long)]
    watch: bool,
    /// List the holders on all of the databases that --database-url or DATABASE_URL names, as one
    /// list: on how many of them each holds its name, and when its majority expires. Names the
    /// databases that do not answer; fails with exit code 69 if less than a majority answers. With
    /// --json, the objects have two more members: databases (how many) and has_majority.
    #[arg(long)]
    quorum: bool,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let source = Source::open(global, args.quorum).await?;
    let mut signals = Signals::listen()?;
    let mut list = signals.unless_terminated(source.list(&args.prefix)).await??;
    if args.watch && !args.json && screen::is_available() {
        return screen::watch(&source, &mut signals, &args.prefix, &list).await;
    }
    let mut gap = "";
    loop {
        // A signal ends a wait for the reader, too.
        tokio::select! {
            printed = print(&list, &args, gap) => printed?,
            signal = signals.next_termination() => return Ok(exit::from_signal(signal as i32)),
        }
        if !args.watch {
            source.shutdown().await;
            return Ok(0);
        }
        gap = if args.json { "" } else { "\n" };
        let again = async {
            sleep(Duration::from_secs(1)).await;
            source.list(&args.prefix).await
        };
        let again = tokio::select! {
            again = again => again,
            signal = signals.next_termination() => return Ok(exit::from_signal(signal as i32)),
        };
        match again {
            Ok(now) => list = now,
            Err(failure) => stderr::print_warning(&format!("{}; showing the last list", failure.message)),
        }
    }
}

/// Prints a list, and warns about the databases that are missing in it.
async fn print(list: &List, args: &Arguments, gap: &str) -> Result<(), Failure> {
    for reason in list.missing() {
        stderr::print_warning(reason);
    }
    let text = match (args.json, args.watch) {
        (true, true) => stdout::format_json(&list.to_json()),
        (true, false) => stdout::format_json_pretty(&list.to_json()),
        _ => format!("{gap}{}", list.to_table()),
    };
    stdout::print_in_thread(text).await
}
