//! Takes a lease in the SQLite file in which it counts, which may be another file after the wait.

use sqlock::Lease;
use sqlock::lease::LeaseOptions;
use tokio::time::{Instant, timeout};

use crate::acquisition::{FREE_TIMEOUT, LeaseArgs, OutageLimit, free_unused};
use crate::database::Database;
use crate::exit::{self, Failure};
use crate::global::Global;
use crate::pool::FileRole;
use crate::signals::Signals;
use crate::stderr::{self, quote};

/// Takes the lease as [`LeaseArgs::acquire`] does. Ends a lease that does not count, and waits on
/// in the next file, which replaces `db`.
pub async fn acquire(
    global: &Global,
    db: &mut Database,
    args: &LeaseArgs,
    options: LeaseOptions,
    signals: &mut Signals,
    outages: OutageLimit,
) -> Result<Option<Lease>, Failure> {
    let start = Instant::now();
    loop {
        let request = match db.role {
            FileRole::Draining => db.locks.lease(&args.name),
            FileRole::Final | FileRole::Provisional => args.request(db)?,
        };
        let acquired = args.acquire(db, request.options(options.clone()), signals, outages, start).await?;
        let Some(lease) = acquired else { return Ok(None) };
        match signals.unless_terminated(open_next(global, db, &lease)).await {
            Ok(next) => match next? {
                None => return Ok(Some(lease)),
                Some(next) => *db = next,
            },
            Err(interrupted) => {
                let _ = timeout(FREE_TIMEOUT, free_unused(db, &lease)).await;
                return Err(interrupted);
            }
        }
        exit::set_location(&db.location);
    }
}

/// Opens the file in which the lease belongs, and ends the lease. `None`: the lease counts.
async fn open_next(global: &Global, db: &Database, lease: &Lease) -> Result<Option<Database>, Failure> {
    let name = lease.name().as_str();
    let Some(next) = db.open_next(global, name).await.transpose() else {
        return Ok(None);
    };
    let freed = free_unused(db, lease).await;
    let next = next?;
    freed?;
    db.shutdown().await;
    if next.role == FileRole::Final {
        stderr::print_note(&format!("{} has the sqlock tables: acquiring {} there", next.location, quote(name)));
    }
    Ok(Some(next))
}
