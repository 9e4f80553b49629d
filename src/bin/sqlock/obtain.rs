//! Getting a lease: the options that `run` and `acquire` share, and what is said while it takes time.

use std::cell::Cell;
use std::time::Duration;

use clap::Args;
use sqlock::{Error, Lease, LeaseInfo, LeaseRequest, Owner};
use tokio::time::{Instant, sleep, timeout};

use crate::database::Database;
use crate::durations;
use crate::exit::{self, Failure, NOT_OBTAINED};
use crate::hold;
use crate::run::child;
use crate::say::{self, quoted};
use crate::signals::Signals;

#[derive(Args)]
pub struct Terms {
    /// The name to hold: 1 to 255 bytes.
    pub name: String,
    /// Do not wait: exit with 75 if somebody else holds the name.
    #[arg(short, long, conflicts_with = "timeout")]
    pub nonblock: bool,
    /// Wait at most this long, then exit with 75. Without it, wait for as long as it takes.
    #[arg(short = 'w', long, visible_alias = "wait", value_name = "DURATION", value_parser = durations::parse)]
    pub timeout: Option<Duration>,
    /// The exit code, instead of 75, when the lease is not obtained.
    #[arg(short = 'E', long, value_name = "N")]
    pub conflict_exit_code: Option<u8>,
    /// How long the lease outlives its last renewal: the longest time for which a crashed holder blocks others.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = durations::parse)]
    pub ttl: Duration,
    /// A note for people, shown by ls and show.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub label: String,
}

impl Terms {
    pub fn request(&self, db: &Database) -> LeaseRequest {
        db.locks.lease(&self.name).ttl(self.ttl).label(&self.label)
    }

    /// How it ends when somebody else has the name.
    pub fn refused(&self) -> u8 {
        self.conflict_exit_code.unwrap_or(NOT_OBTAINED)
    }

    /// Gets the lease, for as long as was asked for, or until a signal. `None`: not obtained, which has been said.
    ///
    /// Through an outage of a database that has been there it waits for as long as the TTL, or on and on if it is `patient`.
    pub async fn obtain(
        &self,
        db: &Database,
        request: LeaseRequest,
        signals: &mut Signals,
        patient: bool,
    ) -> Result<Option<Lease>, Failure> {
        let for_database = if patient { Duration::MAX } else { self.ttl };
        let patience = if self.nonblock { Some(Duration::ZERO) } else { self.timeout };
        let reached = Cell::new(patient.then(Instant::now));
        let outcome = tokio::select! {
            outcome = self.wait(db, request, patience, for_database, &reached) => outcome?,
            () = tell_who_holds(db, &self.name, &reached), if patience.is_none_or(|p| !p.is_zero()) => None,
            signal = signals.next_that_ends() => {
                // The place in line is given up, and what was granted in the last moment goes back.
                let _ = timeout(Duration::from_secs(1), db.locks.shutdown()).await;
                return Err(Failure::interrupted(signal));
            }
        };
        if outcome.is_none() {
            let held = timeout(Duration::from_secs(2), db.locks.inspect(&self.name)).await;
            let by = held.ok().and_then(Result::ok).flatten().map(|held| hold::describe(&held));
            let by = by.unwrap_or_else(|| "somebody else was at it".into());
            let waited = match patience {
                Some(patience) if !patience.is_zero() => format!(" within {}", durations::show_exactly(patience)),
                _ => String::new(),
            };
            say::note(&format!("{} not obtained{waited}: {by}", quoted(&self.name)));
        }
        Ok(outcome)
    }

    async fn wait(
        &self,
        db: &Database,
        request: LeaseRequest,
        patience: Option<Duration>,
        for_database: Duration,
        reached: &Cell<Option<Instant>>,
    ) -> Result<Option<Lease>, Failure> {
        let start = Instant::now();
        let request = &match enclosing_owner(db, &self.name).await? {
            Some(owner) => request.owner(owner),
            None => request,
        };
        loop {
            let left = patience.map(|patience| patience.saturating_sub(start.elapsed()));
            let attempt = db.with_tables(async || {
                let request = request.clone();
                match left {
                    Some(Duration::ZERO) => request.try_acquire().await,
                    Some(left) => request.wait(left).acquire().await.map(Some),
                    None => request.acquire().await.map(Some),
                }
            });
            match attempt.await {
                Ok(lease) => return Ok(lease),
                Err(Error::Timeout { .. }) => return Ok(None),
                Err(error @ Error::Unavailable { .. }) => {
                    let failure = Failure::from(error);
                    let may_return = reached.get().is_some_and(|at| at.elapsed() < for_database);
                    if !may_return || failure.code != exit::UNREACHABLE {
                        return Err(failure);
                    }
                    say::warning(&format!("{}; still waiting", failure.message));
                    sleep(Duration::from_secs(1)).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The owner of an enclosing `sqlock run` that holds this name: the nested one enters again instead of waiting for ever.
/// An enclosing run that holds another name is no reason to share an owner, for two commands inside it must exclude each
/// other.
async fn enclosing_owner(db: &Database, name: &str) -> Result<Option<Owner>, Failure> {
    let owners = child::enclosing_owners();
    if owners.is_empty() {
        return Ok(None);
    }
    let held = db.read(async || db.locks.inspect(name).await).await?;
    Ok(held.and_then(|held| held.owner).filter(|owner| owners.contains(owner)))
}

/// Says who holds the name, once the wait is long enough to be noticed; again when the holder changes, and now and then.
async fn tell_who_holds(db: &Database, name: &str, reached: &Cell<Option<Instant>>) {
    let mut said: Option<LeaseInfo> = None;
    let mut again = Instant::now();
    let mut pause = Duration::from_secs(60);
    sleep(Duration::from_millis(500)).await;
    loop {
        let seen = db.locks.inspect(name).await;
        if seen.is_ok() {
            reached.set(Some(Instant::now()));
        }
        if let Ok(Some(held)) = seen {
            let changed = said.as_ref().is_none_or(|said| said.token != held.token);
            if changed || Instant::now() >= again {
                let hint = match said {
                    None if held.owner.is_some() => format!(
                        "\nGive up with Ctrl-C, or bound the wait with --timeout. If that holder hangs: \
                         sqlock unlock {} --token {}",
                        shell_word(name),
                        held.token
                    ),
                    _ => String::new(),
                };
                say::note(&format!("waiting for {}, {}{hint}", quoted(name), hold::describe(&held)));
                again = Instant::now() + pause;
                pause = (pause * 2).min(Duration::from_secs(600));
                said = Some(held);
            }
        }
        sleep(Duration::from_secs(2)).await;
    }
}

/// The name as a shell takes it.
fn shell_word(name: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/_.:@%+-".contains(c);
    if name.chars().all(plain) && !name.starts_with('-') {
        name.into()
    } else {
        format!("'{}'", name.replace('\'', "'\\''"))
    }
}
