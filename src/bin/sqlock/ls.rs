//! `sqlock ls`: who holds what.

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use serde_json::Value;
use sqlock::inspect::LeaseInfo;
use tokio::time::sleep;

use crate::database::Database;
use crate::exit::{self, Failure, Outcome};
use crate::options::Global;
use crate::say::{self, printable_line};
use crate::signals::Signals;
use crate::{durations, hold, output};

/// List the names that are held.
///
/// One line for each holder, with how it holds: exclusive, shared, or with permits; and how many wait in line for the name.
/// (A waiter stands there from when it has found the name taken.) With --json an array of objects with name, mode
/// ("exclusive", "shared", "permits"), permits (how many; null in the other modes), holder, owner, token, acquired_at,
/// expires_at, waiters and label.
#[derive(Args)]
pub struct Arguments {
    /// Only names that begin with this.
    #[arg(default_value = "", hide_default_value = true)]
    prefix: String,
    /// As JSON; with --watch, one line each time.
    #[arg(long)]
    json: bool,
    /// Show it again every second, until interrupted.
    #[arg(long)]
    watch: bool,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let mut signals = Signals::that_end()?;
    let db = Database::open_to_read(global).await?;
    let mut held = signals.unless_ended(db.read(async || db.locks.list(&args.prefix).await)).await??;
    let mut clear = if args.watch && !args.json && std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
    loop {
        let all = || Value::from_iter(held.iter().map(hold::json));
        match (args.json, args.watch) {
            (true, true) => output::json(&all())?,
            (true, false) => output::json_on_many_lines(&all())?,
            _ => output::text(&format!("{clear}{}", table(&held)))?,
        }
        if !args.watch {
            let _ = db.locks.shutdown().await;
            return Ok(0);
        }
        if clear.is_empty() && !args.json {
            clear = "\n";
        }
        let again = async {
            sleep(Duration::from_secs(1)).await;
            db.read(async || db.locks.list(&args.prefix).await).await
        };
        let again = tokio::select! {
            again = again => again,
            signal = signals.next_that_ends() => return Ok(exit::of_signal(signal)),
        };
        match again {
            Ok(now) => held = now,
            Err(error) => say::warning(&format!("{}; showing what was", Failure::from(error).message)),
        }
    }
}

fn table(held: &[LeaseInfo]) -> String {
    let rows: Vec<Vec<String>> = held
        .iter()
        .map(|held| {
            vec![
                printable_line(held.name.as_str()),
                printable_line(&held.holder),
                hold::mode(held.mode),
                held.waiters.to_string(),
                durations::show(hold::age(held)),
                durations::show(held.remaining),
                held.token.to_string(),
                printable_line(&held.label),
            ]
        })
        .collect();
    output::table(&["NAME", "HOLDER", "MODE", "WAITERS", "HELD FOR", "EXPIRES IN", "TOKEN", "LABEL"], &rows)
}
