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
    let db = Database::open(global)?;
    let held = db.with_tables(async || db.locks.inspect(&args.name).await).await?;
    let _ = db.locks.shutdown().await;
    if args.json {
        output::text(&format!("{:#}\n", held.as_ref().map_or(Value::Null, hold::json)))?;
        return Ok(0);
    }
    let Some(held) = held else {
        output::text(&format!("{} is free\n", quoted(&args.name)))?;
        return Ok(0);
    };
    let owner = match held.owner {
        Some(owner) if held.holds > 1 => format!("{owner}, entered {} times", held.holds),
        Some(owner) => owner.to_string(),
        None => "given back, and kept taken as its holder asked".into(),
    };
    let ago = durations::show(hold::age(&held));
    let left = durations::show(held.remaining);
    output::text(&format!(
        "name         {}\n\
         holder       {}\n\
         label        {}\n\
         owner        {owner}\n\
         token        {}\n\
         acquired at  {} ({ago} ago)\n\
         expires at   {} (in {left}, unless it is renewed)\n",
        printable_line(held.name.as_str()),
        printable_line(&held.holder),
        printable_line(&held.label),
        held.token,
        hold::time(held.acquired_at),
        hold::time(held.expires_at),
    ))?;
    Ok(0)
}
