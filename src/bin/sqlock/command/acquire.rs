//! `sqlock acquire`: takes a lease and leaves it held, for the steps of a script.

use std::time::Duration;

use clap::Args;
use tokio::time::timeout;

use crate::acquisition::{LeaseArgs, OutageLimit};
use crate::database::Database;
use crate::describe;
use crate::exit::{self, Failure, Outcome};
use crate::global::Global;
use crate::signals::Signals;
use crate::stderr::quote;
use crate::stdout;

/// Acquire a lease and leave it held, for the steps of a CI job or a script.
///
/// Prints the lease as JSON: name, token, owner, expires_at. The lease is not renewed by itself:
/// give a --ttl that covers the step, renew with "sqlock renew NAME --token N", and release with
/// "sqlock release NAME --token N". Prefer "sqlock run" for a single command: it renews the lease,
/// and stops the command when the lease is lost.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    lease: LeaseArgs,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let mut signals = Signals::listen()?;
    let db = Database::open(global).await?;
    let request = args.lease.request(&db)?.renew(false);
    let Some(lease) = args.lease.acquire(&db, request, &mut signals, OutageLimit::Ttl).await? else {
        return Ok(args.lease.exit_code_on_conflict());
    };
    let printed = match db.locks.holders(lease.name().as_str()).await {
        Ok(holders) => match holders.iter().find(|held| held.token == lease.token()) {
            Some(held) => stdout::print_json(&describe::grant_to_json(held)),
            None => {
                Err(Failure::new(exit::LOST, format!("the lease on {} has ended already", quote(&args.lease.name))))
            }
        },
        Err(error) => Err(error.into()),
    };
    let kept = match printed {
        // The script owns the lease now.
        Ok(()) => lease.export().map(|_| ()).map_err(Failure::from),
        // The token was not printed, so the script could not release the lease.
        Err(failure) => {
            let _ = lease.release().await;
            Err(failure)
        }
    };
    let _ = timeout(Duration::from_secs(2), db.locks.shutdown()).await;
    kept.map(|()| 0)
}
