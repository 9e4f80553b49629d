//! `sqlock unlock`: ends a holding, or asks the holders to end it, for an operator.

use clap::{ArgGroup, Args};
use sqlock::FencingToken;
use sqlock::inspect::LeaseInfo;

use crate::database::Database;
use crate::describe;
use crate::exit::{self, Failure, Outcome};
use crate::global::Global;
use crate::holding::{self, HoldingArgs};
use crate::parse::parse_token;
use crate::pool::LeaseFilter;
use crate::stderr::{self, quote};

/// Take a name away from a holder that is gone for good, or hangs.
///
/// The token, which "sqlock show" prints, names the holding: a newer holding is never ended by
/// mistake (exit code 79). The name, or the holder's part of a shared name, is free at once. A
/// "sqlock run" that holds the name kills its command at its next heartbeat, within about a second:
/// until then, two commands may run.
///
/// With --ask, all holders of the name are asked to release it instead, and keep it until they do.
/// A "sqlock run --release-on-request" ends its command; another one prints a note. The holder of a
/// lease that is not renewed, such as one of "sqlock acquire", does not learn of it. Exit code 79:
/// the name has no holder.
///
/// Exit code 75: a fenced transaction of the holder has blocked the change for ten seconds (on
/// SQLite 69, after a few seconds).
#[derive(Args)]
#[command(group(ArgGroup::new("means").required(true).args(["token", "ask"])))]
pub struct Arguments {
    /// The name that is held.
    name: String,
    /// The token of the holding, as printed by acquire, ls and show.
    #[arg(short, long, value_name = "N", value_parser = parse_token)]
    token: Option<FencingToken>,
    /// Ask the holders to release the name, and take nothing away.
    #[arg(long, conflicts_with = "quorum")]
    ask: bool,
    /// The holding is on a majority of the databases that --database-url or DATABASE_URL names:
    /// those of the "sqlock acquire --quorum" or "sqlock run --quorum" that holds it.
    #[arg(long)]
    quorum: bool,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let Arguments { name, token: Some(token), quorum, .. } = args else {
        return ask(global, &args.name).await;
    };
    let holding = HoldingArgs { name, token, quorum };
    let left = holding::evict(global, &holding).await?;
    let name = &holding.name;
    stderr::print_note(&match describe::describe_holders(&left) {
        None => format!("{} is free", quote(name)),
        Some(now) => format!("token {token} does not hold {} any more: it is {now}", quote(name)),
    });
    Ok(0)
}

/// Asks the holders of a name to release it.
async fn ask(global: &Global, name: &str) -> Outcome {
    let db = Database::open_existing(global, LeaseFilter::Name(name)).await?;
    let asked = db.read(async || db.locks.ask_to_release(name).await).await?;
    let left = db.read(async || db.locks.holders(name).await).await;
    let _ = db.locks.shutdown().await;
    let holders = match asked {
        0 => {
            let now = describe::describe_holders(&left?).unwrap_or_else(|| "free".into());
            return Err(Failure::new(exit::LOST, format!("{} has no holder: it is {now}", quote(name))));
        }
        1 => "1 holder".into(),
        asked => format!("{asked} holders"),
    };
    let unaware = describe_unaware(asked, &left.unwrap_or_default());
    stderr::print_note(&format!("asked {holders} to release {}{unaware}", quote(name)));
    Ok(0)
}

/// Describes how many of the asked holders may never learn of the request, because the answer to a
/// heartbeat carries it.
fn describe_unaware(asked: usize, holders: &[LeaseInfo]) -> String {
    let unaware = holders.iter().filter(|held| held.owner.is_some() && held.heartbeat_age.is_none()).count();
    let unaware = match unaware {
        0 => return String::new(),
        _ if asked == 1 => "it".into(),
        unaware => format!("{unaware} of them"),
    };
    format!("; {unaware} may not learn of it without a heartbeat: a lease of \"sqlock acquire\" sends none")
}
