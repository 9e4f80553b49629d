//! `sqlock show`: all about one name.

use clap::Args;
use sqlock::inspect::{LeaseInfo, WaiterInfo};

use crate::database::Database;
use crate::exit::Outcome;
use crate::options::Global;
use crate::say::{printable_line, quoted};
use crate::{durations, hold, output};

/// Show who holds a name, and who waits for it.
///
/// All holders, in the order in which they came, and all who wait in line, with who is next first.
///
/// With --json the object that ls has for the first holder, or null when nobody holds the name. It has two arrays more:
/// other_holders, such objects for the others, and waiters_in_line, objects with position (1 is next), mode, permits, holder,
/// since and label.
#[derive(Args)]
pub struct Arguments {
    /// The name.
    name: String,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let db = Database::open_to_read(global).await?;
    let holders = db.read(async || db.locks.holders(&args.name).await).await?;
    let line = db.read(async || db.locks.waiters(&args.name).await).await?;
    let _ = db.locks.shutdown().await;
    if args.json {
        output::json_on_many_lines(&hold::json_with_line(&holders, &line))?;
        return Ok(0);
    }
    let mut blocks: Vec<String> = holders.iter().map(holder).collect();
    if blocks.is_empty() {
        blocks.push(format!("{} is free\n", quoted(&args.name)));
    }
    if !line.is_empty() {
        blocks.push(waiters(&line));
    }
    output::text(&blocks.join("\n"))?;
    Ok(0)
}

fn holder(held: &LeaseInfo) -> String {
    let ago = durations::show(hold::age(held));
    let left = durations::show(held.remaining);
    let mut lines = vec![
        ("name", printable_line(held.name.as_str())),
        ("mode", hold::mode(held.mode)),
        ("holder", printable_line(&held.holder)),
        ("label", printable_line(&held.label)),
    ];
    match held.owner {
        Some(owner) if held.holds > 1 => lines.push(("owner", format!("{owner}, entered {} times", held.holds))),
        Some(owner) => lines.push(("owner", owner.to_string())),
        None => lines.push(("state", "given back, and kept taken as its holder asked".into())),
    }
    let unless = if held.owner.is_some() { ", unless it is renewed" } else { "" };
    lines.push(("token", held.token.to_string()));
    lines.push(("acquired at", format!("{} ({ago} ago)", hold::time(held.acquired_at))));
    lines.push(("expires at", format!("{} (in {left}{unless})", hold::time(held.expires_at))));
    let lines = lines.iter().filter(|(_, value)| !value.is_empty());
    lines.map(|(what, value)| format!("{what:<11}  {value}\n")).collect()
}

fn waiters(line: &[WaiterInfo]) -> String {
    let rows: Vec<Vec<String>> = line
        .iter()
        .map(|waiter| {
            vec![
                (waiter.ahead + 1).to_string(),
                printable_line(&waiter.holder),
                hold::mode(waiter.mode),
                hold::time(waiter.since),
                printable_line(&waiter.label),
            ]
        })
        .collect();
    output::table(&["IN LINE", "WHO", "WANTS IT", "SINCE", "LABEL"], &rows)
}
