//! `sqlock renew`: a lease from `acquire` lasts longer.

use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::database::Database;
use crate::exit::{Failure, Outcome};
use crate::options::Global;
use crate::unlock::{Holding, not_held};
use crate::{durations, hold, output};

/// Make a lease from "sqlock acquire" last longer.
///
/// It lasts at least --ttl from now; it is never shortened. Exit code 79: that token does not hold the name any more, and
/// what the script does next is not protected. Prints the lease as JSON.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    holding: Holding,
    /// How long from now.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = durations::parse)]
    ttl: Duration,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let db = Database::open(global)?;
    let Holding { name, token } = &args.holding;
    let extended = db.with_tables(async || db.locks.extend(name, *token, args.ttl).await).await?;
    let held = db.locks.inspect(name).await?.filter(|held| held.token == *token);
    let _ = db.locks.shutdown().await;
    match held {
        Some(held) if extended => output::json(&json!({
            "name": held.name.as_str(),
            "token": held.token.get(),
            "owner": held.owner.map(|owner| owner.to_string()),
            "expires_at": hold::time(held.expires_at),
        }))
        .map(|()| 0),
        held => Err::<u8, Failure>(not_held(&args.holding, held.as_ref())),
    }
}
