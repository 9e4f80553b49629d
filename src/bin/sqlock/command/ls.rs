//! `sqlock ls`: lists the names that are held.

mod quorum;
mod screen;
mod state;
mod view;

use std::time::Duration;

use clap::Args;
use serde_json::json;
use sqlock::inspect::LeaseInfo;
use tokio::time::sleep;

use crate::database::Database;
use crate::exit::{self, Failure, Outcome};
use crate::global::Global;
use crate::signals::Signals;
use crate::stderr::{self, escape_line};
use crate::{describe, duration, stdout};

/// List the names that are held.
///
/// Prints one line for each holder, with its mode (exclusive, shared, permits) and the number of
/// waiters for the name. (A waiter counts from when it has found the name taken.) With --json an
/// array of objects with name, mode ("exclusive", "shared", "permits"), permits (how many; null in
/// other modes), holder, owner, token, acquired_at, expires_at, waiters, label and note (what the
/// holder notes about its work; null without any).
///
/// With --watch on a terminal, a screen shows the list, with the age of the latest heartbeat of each
/// holder, and refreshes it every second. Keys: s sorts by name, time held, age of the heartbeat or
/// waiters; / edits the prefix (Enter keeps it, Esc restores the old one); up and down select a
/// holder; u unlocks the selected holder by its token, after a question that shows both; q quits. If
/// the database is lost, a line says so and the last list stays.
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
    #[arg(long, conflicts_with = "watch")]
    quorum: bool,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    if args.quorum {
        return quorum::run(global, &args.prefix, args.json).await;
    }
    let mut signals = Signals::listen()?;
    let db = Database::open_existing(global).await?;
    let mut held = signals.unless_terminated(db.read(async || db.locks.list(&args.prefix).await)).await??;
    if args.watch && !args.json && screen::is_available() {
        return screen::watch(&db, &mut signals, &args.prefix, &held).await;
    }
    let mut gap = "";
    loop {
        let all = || json!(held);
        match (args.json, args.watch) {
            (true, true) => stdout::print_json(&all())?,
            (true, false) => stdout::print_json_pretty(&all())?,
            _ => stdout::print(&format!("{gap}{}", table(&held)))?,
        }
        if !args.watch {
            let _ = db.locks.shutdown().await;
            return Ok(0);
        }
        gap = if args.json { "" } else { "\n" };
        let again = async {
            sleep(Duration::from_secs(1)).await;
            db.read(async || db.locks.list(&args.prefix).await).await
        };
        let again = tokio::select! {
            again = again => again,
            signal = signals.next_termination() => return Ok(exit::from_signal(signal)),
        };
        match again {
            Ok(now) => held = now,
            Err(error) => stderr::print_warning(&format!("{}; showing the last list", Failure::from(error).message)),
        }
    }
}

fn table(held: &[LeaseInfo]) -> String {
    let rows: Vec<Vec<String>> = held
        .iter()
        .map(|held| {
            vec![
                escape_line(held.name.as_str()),
                escape_line(&held.holder),
                describe::format_mode(held.mode),
                held.waiters.to_string(),
                duration::format(describe::held_for(held)),
                duration::format(held.remaining),
                held.token.to_string(),
                escape_line(&held.label),
            ]
        })
        .collect();
    stdout::format_table(&["NAME", "HOLDER", "MODE", "WAITERS", "HELD FOR", "EXPIRES IN", "TOKEN", "LABEL"], &rows)
}
