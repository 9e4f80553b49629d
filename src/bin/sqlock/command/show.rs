//! `sqlock show`: shows the holders and waiters of a name.

mod quorum;

use clap::Args;
use sqlock::inspect::{LeaseInfo, WaiterInfo};

use crate::database::Database;
use crate::exit::Outcome;
use crate::global::Global;
use crate::pool::LeaseFilter;
use crate::stderr::{escape_line, quote};
use crate::{describe, duration, stdout};

/// Show the holders of a name, and the waiters for it.
///
/// Prints all holders in the order in which they came, and all waiters in the order in which they
/// are served. Of a free name, prints the note that its last holder has left.
///
/// With --json the object that ls prints for the first holder, with two more arrays: other_holders,
/// objects for the other holders, and queue, objects of the waiters with position (1 is next),
/// mode, permits, holder, since and label. The object of a free name has only name, note and these
/// arrays; its holder, owner and token are null.
#[derive(Args)]
pub struct Arguments {
    /// The name.
    name: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Show the holders on each of the databases that --database-url or DATABASE_URL names, with
    /// their tokens. The first line says whether a majority holds the name, with which token and
    /// owner, or that it is free, or split: held without a majority. Names the databases that do
    /// not answer; fails with exit code 69 if less than a majority answers. With --json an object
    /// with name, state ("held", "split", "free", or "unknown": a database that does not answer
    /// decides), majority (the object that ls --quorum prints for its holder, or null) and
    /// databases: an array of objects with database and holders (an array of the objects that ls
    /// prints; null without an answer).
    #[arg(long)]
    quorum: bool,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    if args.quorum {
        return quorum::run(global, &args.name, args.json).await;
    }
    let db = Database::open_existing(global, LeaseFilter::Name(&args.name)).await?;
    let holders = db.read(async || db.locks.holders(&args.name).await).await?;
    let queue = db.read(async || db.locks.waiters(&args.name).await).await?;
    // After a release, the note of the latest holder is left for the next holder.
    let left = if holders.is_empty() { db.read(async || db.locks.last_note(&args.name).await).await? } else { None };
    let _ = db.locks.shutdown().await;
    if args.json {
        stdout::print_json_pretty(&describe::name_to_json(&args.name, &holders, &queue, left.as_deref()))?;
        return Ok(0);
    }
    let mut blocks: Vec<String> = holders.iter().map(holder).collect();
    if blocks.is_empty() {
        let note = left.map(|note| format!("last note    {}\n", escape_line(&note))).unwrap_or_default();
        blocks.push(format!("{} is free\n{note}", quote(&args.name)));
    }
    if !queue.is_empty() {
        blocks.push(waiters(&queue));
    }
    stdout::print(&blocks.join("\n"))?;
    Ok(0)
}

fn holder(held: &LeaseInfo) -> String {
    let ago = duration::format(describe::held_for(held));
    let left = duration::format(held.remaining);
    let mut lines = vec![
        ("name", escape_line(held.name.as_str())),
        ("mode", describe::format_mode(held.mode)),
        ("holder", escape_line(&held.holder)),
        ("label", escape_line(&held.label)),
        ("note", held.note.as_deref().map(escape_line).unwrap_or_default()),
    ];
    match held.owner {
        Some(owner) if held.holds > 1 => lines.push(("owner", format!("{owner}, entered {} times", held.holds))),
        Some(owner) => lines.push(("owner", owner.to_string())),
        None => lines.push(("state", "released; the name stays taken as its holder asked".into())),
    }
    let unless = if held.owner.is_some() { ", unless it is renewed" } else { "" };
    lines.push(("token", held.token.to_string()));
    lines.push(("acquired at", format!("{} ({ago} ago)", describe::format_time(held.acquired_at))));
    lines.push(("expires at", format!("{} (in {left}{unless})", describe::format_time(held.expires_at))));
    let lines = lines.iter().filter(|(_, value)| !value.is_empty());
    lines.map(|(what, value)| format!("{what:<11}  {value}\n")).collect()
}

fn waiters(queue: &[WaiterInfo]) -> String {
    let rows: Vec<Vec<String>> = queue
        .iter()
        .map(|waiter| {
            vec![
                (waiter.ahead + 1).to_string(),
                escape_line(&waiter.holder),
                describe::format_mode(waiter.mode),
                describe::format_time(waiter.since),
                escape_line(&waiter.label),
            ]
        })
        .collect();
    stdout::format_table(&["POSITION", "WAITER", "MODE", "SINCE", "LABEL"], &rows)
}
