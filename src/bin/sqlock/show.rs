//! `sqlock show`: all about one name.

use clap::Args;
use serde_json::Value;

use crate::database::Database;
use crate::exit::Outcome;
use crate::options::Global;
use crate::say::{printable_line, quoted};
use crate::{durations, hold, output};

/// Show who holds a name.
///
/// With --json the object that ls has for it, or null when the name is free.
#[derive(Args)]
pub struct Arguments {
    /// The name.
    name: String,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let db = Database::open_to_read(global)?;
    let held = db.read(async || db.locks.inspect(&args.name).await).await?;
    let _ = db.locks.shutdown().await;
    if args.json {
        output::json_on_many_lines(&held.as_ref().map_or(Value::Null, hold::json))?;
        return Ok(0);
    }
    let Some(held) = held else {
        output::text(&format!("{} is free\n", quoted(&args.name)))?;
        return Ok(0);
    };
    let ago = durations::show(hold::age(&held));
    let left = durations::show(held.remaining);
    let mut lines = vec![
        ("name", printable_line(held.name.as_str())),
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
    output::text(&lines.map(|(what, value)| format!("{what:<11}  {value}\n")).collect::<String>())?;
    Ok(0)
}
