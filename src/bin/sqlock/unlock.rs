//! `sqlock unlock`: the operator's release.

use clap::Args;
use sqlock::FencingToken;
use sqlock::inspect::LeaseInfo;

use crate::database::Database;
use crate::exit::{self, Failure, Outcome};
use crate::hold;
use crate::options::Global;
use crate::say::{self, quoted};

/// Take a name away from its holder: for one that is gone for good, or hangs.
///
/// The token, which "sqlock show" tells, says which holding is meant: a newer one is never ended by mistake (exit code 79).
/// The name, or its part of a name that is shared, is free at once. A "sqlock run" that holds it kills its command when it learns of this, at its next renewal
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
    let left = end(global, &args.holding).await?;
    let Holding { name, token } = &args.holding;
    say::note(&match hold::describe(&left) {
        None => format!("{} is free", quoted(name)),
        Some(now) => format!("token {token} does not hold {} any more: it is {now}", quoted(name)),
    });
    Ok(0)
}

/// Ends a holding, or fails with 79. Who holds the name now.
pub async fn end(global: &Global, holding: &Holding) -> Result<Vec<LeaseInfo>, Failure> {
    let db = Database::open_to_read(global).await?;
    let Holding { name, token } = holding;
    let ended = db.read(async || db.locks.evict(name, *token).await).await?;
    let holders = db.read(async || db.locks.holders(name).await).await;
    let _ = db.locks.shutdown().await;
    // It was ended, whether or not one can see what came of that.
    if ended { Ok(holders.unwrap_or_default()) } else { Err(not_held(holding, &holders?)) }
}

/// What to say when the token does not hold the name.
pub fn not_held(holding: &Holding, holders: &[LeaseInfo]) -> Failure {
    let Holding { name, token } = holding;
    let now = match (hold::describe(holders), holders) {
        (Some(now), [held]) => format!("it is {now} (token {})", held.token),
        (Some(now), _) => format!("it is {now} (\"sqlock show\" tells the tokens)"),
        (None, _) => "it is free".into(),
    };
    Failure::new(exit::LOST, format!("token {token} does not hold {}: {now}", quoted(name)))
}

pub fn parse_token(text: &str) -> Result<FencingToken, String> {
    let token = text.parse().ok().and_then(FencingToken::new);
    token.ok_or_else(|| "a token is a positive number".into())
}
