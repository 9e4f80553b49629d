//! Getting a lease: the options that `run` and `acquire` share, and what is said while it takes time.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use sqlock::inspect::{LeaseInfo, Mode, Waiting};
use sqlock::{Error, Lease, LeaseRequest, Owner};
use tokio::time::{Instant, sleep, timeout};

use crate::database::{self, Database};
use crate::durations;
use crate::exit::{self, Failure, NOT_OBTAINED};
use crate::hold;
use crate::run::child;
use crate::say::{self, quoted};
use crate::signals::Signals;

/// How much longer than --timeout an attempt may take that a database does not answer.
const GRACE: Duration = Duration::from_secs(3);

/// How long a database may take to tell who holds the name that was not obtained.
const LAST_LOOK: Duration = Duration::from_secs(3);

#[derive(Args)]
pub struct Terms {
    /// The name to hold: 1 to 255 bytes.
    pub name: String,
    /// Do not wait: exit with 75 if somebody else holds the name.
    #[arg(short, long, conflicts_with = "timeout")]
    pub nonblock: bool,
    /// Wait at most this long, then exit with 75. A database that cannot be reached is waited for as well; if it cannot be
    /// reached at the end, exit with 69. Without this option, wait for the name for as long as it takes.
    #[arg(short = 'w', long, visible_alias = "wait", value_name = "DURATION", value_parser = durations::parse)]
    pub timeout: Option<Duration>,
    /// Share the name with others who share it: many readers or one writer. All stand in one line, so that a writer who waits
    /// keeps later readers out.
    #[arg(short, long, conflicts_with = "permits")]
    pub shared: bool,
    /// Let at most this many hold the name at a time. It counts for this one: it comes in when fewer hold than it says.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(i32::MAX)))]
    pub permits: Option<u32>,
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
    pub fn request(&self, db: &Database) -> Result<LeaseRequest, Failure> {
        let request = match self.permits {
            Some(permits) => db.locks.semaphore(&self.name, permits).request(1)?,
            None if self.shared => db.locks.lease(&self.name).shared(),
            None => db.locks.lease(&self.name),
        };
        Ok(request.ttl(self.ttl).label(&self.label))
    }

    /// How it ends when somebody else has the name.
    pub fn refused(&self) -> u8 {
        self.conflict_exit_code.unwrap_or(NOT_OBTAINED)
    }

    /// Gets the lease, for as long as was asked for, or until a signal. `None`: not obtained, which has been said.
    ///
    /// Without --timeout, it waits through an outage of a database that has been there for as long as the TTL, or on and on if
    /// it is `patient`. With --timeout, it waits through any outage until that has run out.
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
        let progress = Progress::default();
        let request = if say::is_quiet() { request } else { request.while_waiting(progress.listener()) };
        let outcome = tokio::select! {
            outcome = self.wait(db, request, patience, for_database, &reached) => outcome,
            () = tell_who_holds(db, &self.name, &reached, &progress), if patience.is_none_or(|p| !p.is_zero()) => Ok(None),
            signal = signals.next_that_ends() => Err(Failure::interrupted(signal)),
        };
        match outcome {
            Ok(Some(lease)) => return Ok(Some(lease)),
            Ok(None) => {}
            Err(failure) => {
                // The place in line is given up, and what was granted in the last moment goes back.
                let _ = timeout(Duration::from_secs(1), db.locks.shutdown()).await;
                return Err(failure);
            }
        }
        let waited = patience.filter(|patience| !patience.is_zero());
        let by = match timeout(LAST_LOOK, db.locks.holders(&self.name)).await {
            Ok(Ok(holders)) => hold::describe(&holders),
            // The database has gone away while the name was waited for.
            Ok(Err(error @ Error::Unavailable { .. })) if waited.is_some() => return Err(error.into()),
            Err(_) if waited.is_some() => return Err(no_answer(LAST_LOOK)),
            _ => None,
        };
        let by = by.unwrap_or_else(|| "somebody else was at it".into());
        let within = waited.map(|waited| format!(" within {}", durations::show_exactly(waited))).unwrap_or_default();
        say::note(&format!("{} not obtained{within}: {by}", quoted(&self.name)));
        Ok(None)
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
        let left = || patience.map(|patience| patience.saturating_sub(start.elapsed()));
        let mut outage = Outage::default();
        loop {
            let attempt = self.attempt(db, request.clone(), left());
            let attempt = match left().filter(|_| patience != Some(Duration::ZERO)) {
                // A database that does not answer does not prolong the wait.
                Some(left) => match timeout(left + GRACE, attempt).await {
                    Ok(attempt) => attempt,
                    Err(_) => return Err(no_answer(start.elapsed())),
                },
                None => attempt.await,
            };
            let failure = match attempt {
                Ok(lease) => return Ok(lease),
                Err(failure) => failure,
            };
            match failure.code {
                NOT_OBTAINED => return Ok(None),
                // It had passed already to somebody else.
                exit::LOST => {}
                exit::UNREACHABLE if self.may_return(left(), reached.get(), for_database) => {
                    outage.pause(failure, left()).await?;
                }
                _ => return Err(failure),
            }
        }
    }

    /// Asks once, and waits in line.
    async fn attempt(
        &self,
        db: &Database,
        request: LeaseRequest,
        left: Option<Duration>,
    ) -> Result<Option<Lease>, Failure> {
        let request = match self.enclosing_owner(db).await? {
            Some(owner) => request.owner(owner),
            None => request,
        };
        let lease = db.with_tables(async || {
            let request = request.clone();
            let lease = match left {
                Some(Duration::ZERO) => request.try_acquire().await?,
                Some(left) => Some(request.wait(left).acquire().await?),
                None => Some(request.acquire().await?),
            };
            // What was handed over lasts for a moment at first: less than it may take to stop a command.
            if let Some(lease) = lease.as_ref().filter(|lease| lease.remaining() < self.ttl / 2) {
                lease.extend(self.ttl).await?;
            }
            Ok(lease)
        });
        Ok(lease.await?)
    }

    /// Whether a database that cannot be reached is waited for.
    fn may_return(&self, left: Option<Duration>, reached: Option<Instant>, for_database: Duration) -> bool {
        match left {
            Some(left) => !left.is_zero(),
            None => reached.is_some_and(|at| at.elapsed() < for_database),
        }
    }

    /// The owner of an enclosing `sqlock run` that holds this name: the nested one enters again instead of waiting for ever.
    /// An enclosing run that holds another name is no reason to share an owner, for two commands inside it must exclude each
    /// other.
    async fn enclosing_owner(&self, db: &Database) -> Result<Option<Owner>, Failure> {
        let owners = child::enclosing_owners();
        if owners.is_empty() {
            return Ok(None);
        }
        let holders = db.read(async || db.locks.holders(&self.name).await).await?;
        let enclosing = holders.iter().find(|held| held.owner.is_some_and(|owner| owners.contains(&owner)));
        let Some(enclosing) = enclosing else {
            return Ok(None);
        };
        let alone = !self.shared && self.permits.is_none();
        let (has, wanted) = match enclosing.mode {
            Mode::Exclusive if self.permits.is_some() => ("holds it alone", "take a permit"),
            Mode::Shared if alone => ("shares it", "hold it alone"),
            Mode::Permits(_) if alone => ("has a permit of it", "hold it alone"),
            _ => return Ok(enclosing.owner),
        };
        let name = quoted(&self.name);
        Err(Failure::usage(format!(
            "{name}: the sqlock run around this one {has}; to {wanted} in here, it would wait for ever"
        )))
    }
}

/// A database that cannot be reached, and is waited for.
#[derive(Default)]
pub struct Outage {
    /// What was said last.
    said: String,
}

impl Outage {
    /// Says what is wrong, unless it was said before, and waits until the next attempt. It fails when no time is left for one.
    pub async fn pause(&mut self, failure: Failure, left: Option<Duration>) -> Result<(), Failure> {
        const PAUSE: Duration = Duration::from_secs(1);
        if let Some(left) = left.filter(|left| *left <= PAUSE) {
            sleep(left).await;
            return Err(failure);
        }
        if self.said != failure.message {
            say::warning(&format!("{}; still waiting", failure.message));
            self.said = failure.message;
        }
        sleep(PAUSE).await;
        Ok(())
    }
}

fn no_answer(within: Duration) -> Failure {
    let within = durations::show(within);
    Failure::new(exit::UNREACHABLE, format!("{}: no answer came within {within}", database::unreachable()))
}

/// How far the wait has come, as the library tells it.
#[derive(Default)]
struct Progress(Arc<Mutex<Option<Waiting>>>);

impl Progress {
    fn listener(&self) -> impl Fn(&Waiting) + Send + Sync + 'static {
        let latest = Arc::clone(&self.0);
        move |waiting| *latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(waiting.clone())
    }

    fn latest(&self) -> Option<Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Says who holds the name and how many are ahead, once the wait is long enough to be noticed; again when that changes, and
/// now and then.
async fn tell_who_holds(db: &Database, name: &str, reached: &Cell<Option<Instant>>, progress: &Progress) {
    let around = child::enclosing_owners();
    let mut said = None;
    let mut again = Instant::now();
    let mut pause = Duration::from_secs(60);
    sleep(Duration::from_millis(500)).await;
    loop {
        let seen = db.locks.holders(name).await;
        if seen.is_ok() {
            reached.set(Some(Instant::now()));
        }
        let holders = seen.unwrap_or_default();
        if let (Some(held), Some(waiting)) = (hold::describe(&holders), progress.latest()) {
            let now = Some((waiting.ahead, waiting.holder.map(|holder| holder.token)));
            if now != said || Instant::now() >= again {
                let ahead = match waiting.ahead {
                    0 => "next in line".into(),
                    ahead => format!("{ahead} ahead in line"),
                };
                let hint = if said.is_none() { hint(name, &holders, &around) } else { String::new() };
                say::note(&format!("waiting for {}, {ahead}, {held}{hint}", quoted(name)));
                again = Instant::now() + pause;
                pause = (pause * 2).min(Duration::from_secs(600));
                said = now;
            }
        }
        // How many are ahead may not have been told yet.
        let soon = said.is_none() && !holders.is_empty() && !say::is_quiet();
        sleep(Duration::from_millis(if soon { 250 } else { 2000 })).await;
    }
}

/// What can be done about it: said once.
fn hint(name: &str, holders: &[LeaseInfo], around: &[Owner]) -> String {
    let is_around = |held: &LeaseInfo| held.owner.is_some_and(|owner| around.contains(&owner));
    let hangs = match holders {
        _ if holders.iter().any(is_around) => {
            " The sqlock run around this one holds a part itself: if this must have that, it waits for ever.".into()
        }
        [held] if held.owner.is_some() => {
            format!(" If that holder hangs: sqlock unlock {} --token {}", shell_word(name), held.token)
        }
        [_, _, ..] => format!(" If one of the holders hangs: sqlock show {}, and sqlock unlock", shell_word(name)),
        _ => return String::new(),
    };
    format!("\nGive up with Ctrl-C, or bound the wait with --timeout.{hangs}")
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
