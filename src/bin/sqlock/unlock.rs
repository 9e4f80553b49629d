//! `sqlock unlock`: the operator's release.

use clap::Args;
use sqlock::{FencingToken, LeaseInfo};

use crate::database::Database;
use crate::exit::{self, Failure, Outcome};
use crate::hold;
use crate::options::Global;
use crate::say::{self, quoted};

/// Take a name away from its holder: for one that is gone for good, or hangs.
///
/// The token, which "sqlock show" tells, says which holding is meant: a newer one is never ended by mistake (exit code 79).
/// The name is free at once. A "sqlock run" that holds it kills its command when it learns of this, at its next renewal
/// after a third of its TTL: until then, two may be at work.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    holding: Holding,
}

/// Which holding is meant.
#[derive(Args)]
pub struct Holding {
    /// The name that is held.
    pub name: String,
    /// The token of the holding, as printed by acquire, ls and show.
    #[arg(short, long, value_name = "N", value_parser = parse_token)]
    pub token: FencingToken,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    end(global, &args.holding).await?;
    say::note(&format!("{} is free", quoted(&args.holding.name)));
    Ok(0)
}

/// Ends a holding, or fails with 79.
pub async fn end(global: &Global, holding: &Holding) -> Result<(), Failure> {
    let db = Database::open_to_read(global)?;
    let Holding { name, token } = holding;
    let ended = db.read(async || db.locks.evict(name, *token).await).await?;
    let held = if ended { None } else { db.read(async || db.locks.inspect(name).await).await? };
    let _ = db.locks.shutdown().await;
    if ended { Ok(()) } else { Err(not_held(holding, held.as_ref())) }
}

/// What to say when the token does not hold the name.
pub fn not_held(holding: &Holding, held: Option<&LeaseInfo>) -> Failure {
    let Holding { name, token } = holding;
    let now = match held {
        None => "it is free".into(),
        Some(held) => format!("it is {} (token {})", hold::describe(held), held.token),
    };
    Failure::new(exit::LOST, format!("token {token} does not hold {}: {now}", quoted(name)))
}

fn parse_token(text: &str) -> Result<FencingToken, String> {
    let token = text.parse().ok().and_then(FencingToken::new);
    token.ok_or_else(|| "a token is a positive number".into())
}
