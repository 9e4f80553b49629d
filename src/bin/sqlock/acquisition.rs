//! Takes a lease: the options that `run` and `acquire` share, the wait, and the messages about the
//! wait.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use sqlock::inspect::{LeaseInfo, Mode, Waiting};
use sqlock::lease::LeaseOptions;
use sqlock::{Error, Lease, LeaseRequest, Owner};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::database::Database;
use crate::describe;
use crate::duration;
use crate::environment;
use crate::exit::{self, Failure, NOT_OBTAINED};
use crate::signals::Signals;
use crate::stderr::{self, quote};

/// How much longer than --timeout an attempt may take if the database does not answer.
const ANSWER_GRACE: Duration = Duration::from_secs(3);

/// How long a database may take to list the holders after a lease was not obtained.
const HOLDERS_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a wait without --timeout lasts through an outage.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum OutageLimit {
    /// The wait lasts for the TTL after the database was reachable.
    Ttl,
    /// The wait has no limit. The database counts as reachable at the start.
    Unlimited,
}

/// The options that `run` and `acquire` share.
#[derive(Args)]
pub struct LeaseArgs {
    /// The name to hold: 1 to 255 bytes. acquire takes a name that begins with "-" after "--"; run
    /// takes no such name.
    pub name: String,
    /// Do not wait: exit with 75 if the lease is not granted at once.
    #[arg(short, long, conflicts_with = "timeout")]
    pub nonblock: bool,
    /// Wait at most this long, then exit with 75. The wait includes outages of the database; if it
    /// cannot be reached at the end, exit with 69. Without this option, wait for the name for as
    /// long as it takes; exit with 69 if the database (with --quorum, a majority) cannot be reached
    /// at the start, or for longer than --ttl during the wait.
    #[arg(short = 'w', long, visible_alias = "wait", value_name = "DURATION", value_parser = duration::parse)]
    pub timeout: Option<Duration>,
    /// Share the name with other shared holders: many readers or one writer. Readers and writers
    /// wait in one queue, so that a waiting writer keeps later readers out.
    #[arg(short, long, conflicts_with = "permits")]
    pub shared: bool,
    /// Take one of N permits of the name: wait until fewer than N are held. Each holder gives its
    /// own N.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(i32::MAX)))]
    pub permits: Option<u32>,
    /// The exit code, instead of 75, when the lease is not obtained.
    #[arg(short = 'E', long, value_name = "N")]
    pub conflict_exit_code: Option<u8>,
    /// How long the lease lasts after its last renewal: the longest time that a crashed holder
    /// blocks others.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse)]
    pub ttl: Duration,
    /// A text that ls and show print.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub label: String,
}

impl LeaseArgs {
    pub fn request(&self, db: &Database) -> Result<LeaseRequest, Failure> {
        Ok(match self.permits {
            Some(permits) => db.locks.semaphore(&self.name, permits).request(1)?,
            None if self.shared => db.locks.lease(&self.name).shared(),
            None => db.locks.lease(&self.name),
        })
    }

    pub fn options(&self) -> LeaseOptions {
        LeaseOptions::new().ttl(self.ttl).label(&self.label)
    }

    /// Returns the exit code for a lease that was not obtained.
    pub fn exit_code_on_conflict(&self) -> u8 {
        self.conflict_exit_code.unwrap_or(NOT_OBTAINED)
    }

    /// Takes the lease, or gives up at --timeout or at a signal. `None`: not obtained, and a note
    /// has said so.
    ///
    /// With --timeout, the wait includes outages until the time has run out. Without, `outages`
    /// limits the wait for a database that was reachable before. The wait counts from `start`.
    ///
    /// The caller shuts the client down in any case: this leaves the queue, and releases a lease
    /// that was granted at the last moment.
    pub async fn acquire(
        &self,
        db: &Database,
        request: LeaseRequest,
        signals: &mut Signals,
        outages: OutageLimit,
        start: Instant,
    ) -> Result<Option<Lease>, Failure> {
        let wait_limit = if self.nonblock { Some(Duration::ZERO) } else { self.timeout };
        let reached = Cell::new((outages == OutageLimit::Unlimited).then(Instant::now));
        let progress = Progress::default();
        let request = if stderr::is_quiet() { request } else { request.while_waiting(progress.callback()) };
        let outcome = tokio::select! {
            outcome = self.wait_for_lease(db, request, wait_limit, outages, &reached, start) => outcome,
            () = report_holders(db, &self.name, &reached, &progress), if wait_limit.is_none_or(|limit| !limit.is_zero()) => Ok(None),
            signal = signals.next_termination() => Err(Failure::interrupted(signal)),
        };
        stderr::clear_live_line();
        match outcome {
            Ok(Some(lease)) => {
                if progress.is_reported.get() {
                    let waited = duration::format(start.elapsed());
                    stderr::print_note(&format!("{} obtained after {waited}", quote(&self.name)));
                }
                return Ok(Some(lease));
            }
            Ok(None) => {}
            Err(failure) => return Err(failure),
        }
        let waited = wait_limit.filter(|wait_limit| !wait_limit.is_zero());
        let holders = match timeout(HOLDERS_TIMEOUT, db.locks.holders(&self.name)).await {
            Ok(Ok(holders)) => describe::describe_holders(&holders),
            // The database became unreachable during the wait.
            Ok(Err(error @ Error::Unavailable { .. })) if waited.is_some() => return Err(error.into()),
            Err(_) if waited.is_some() => return Err(no_answer_failure(HOLDERS_TIMEOUT)),
            _ => None,
        };
        let holders = holders.unwrap_or_else(|| "another process held it".into());
        let within = waited.map(|waited| format!(" within {}", duration::format_exact(waited))).unwrap_or_default();
        stderr::print_note(&format!("{} not obtained{within}: {holders}", quote(&self.name)));
        Ok(None)
    }

    async fn wait_for_lease(
        &self,
        db: &Database,
        request: LeaseRequest,
        wait_limit: Option<Duration>,
        outages: OutageLimit,
        reached: &Cell<Option<Instant>>,
        start: Instant,
    ) -> Result<Option<Lease>, Failure> {
        let left = || wait_limit.map(|wait_limit| wait_limit.saturating_sub(start.elapsed()));
        let mut outage = Outage::default();
        loop {
            let attempt = self.try_once(db, request.clone(), left());
            let attempt = match left().filter(|_| wait_limit != Some(Duration::ZERO)) {
                // A database that does not answer must not prolong the wait.
                Some(left) => match timeout(left + ANSWER_GRACE, attempt).await {
                    Ok(attempt) => attempt,
                    Err(_) => return Err(no_answer_failure(start.elapsed())),
                },
                None => attempt.await,
            };
            let failure = match attempt {
                Ok(lease) => return Ok(lease),
                Err(failure) => failure,
            };
            match failure.code {
                NOT_OBTAINED => return Ok(None),
                // The lease was lost before it was used: try again.
                exit::LOST => {}
                exit::UNREACHABLE if self.can_retry(left(), reached.get(), outages) => {
                    outage.wait_for_retry(failure, left()).await?;
                }
                _ => return Err(failure),
            }
        }
    }

    /// Acquires once, waiting in the queue for the time that is left.
    async fn try_once(
        &self,
        db: &Database,
        request: LeaseRequest,
        left: Option<Duration>,
    ) -> Result<Option<Lease>, Failure> {
        let request = match self.find_enclosing_owner(db).await? {
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
            // A lease from a hand-over is short at first: shorter than the time to stop a command.
            if let Some(lease) = lease.as_ref().filter(|lease| lease.remaining() < self.ttl / 2)
                && let Err(error) = lease.extend(self.ttl).await
            {
                let _ = free_unused(db, lease).await;
                return Err(error);
            }
            Ok(lease)
        });
        Ok(lease.await?)
    }

    /// Returns whether to wait for a database that cannot be reached.
    fn can_retry(&self, left: Option<Duration>, reached: Option<Instant>, outages: OutageLimit) -> bool {
        match left {
            Some(left) => !left.is_zero(),
            None => match outages {
                OutageLimit::Ttl => reached.is_some_and(|at| at.elapsed() < self.ttl),
                OutageLimit::Unlimited => reached.is_some(),
            },
        }
    }

    /// Finds the owner of an enclosing `sqlock run` that holds this name, which the nested run
    /// enters again. Two commands inside a run that holds another name get owners of their own,
    /// because they must exclude each other.
    async fn find_enclosing_owner(&self, db: &Database) -> Result<Option<Owner>, Failure> {
        let owners = environment::enclosing_owners();
        if owners.is_empty() {
            return Ok(None);
        }
        let holders = db.read(async || db.locks.holders(&self.name).await).await?;
        let enclosing = holders.iter().find(|held| environment::is_owned_by(&owners, held));
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
        let name = quote(&self.name);
        Err(Failure::usage(format!("{name}: the enclosing sqlock run {has}; this one would wait for ever to {wanted}")))
    }
}

/// How long a process that is about to end tries to free a name.
pub const FREE_TIMEOUT: Duration = Duration::from_secs(2);

/// Ends a lease under which no command has run. Unlike a release or a drop, this frees the name at
/// once, also with --hold-at-least. A lease that enters the lease of an enclosing run has the same
/// token, and is left to its drop.
pub async fn free_unused(db: &Database, lease: &Lease) -> sqlock::Result<()> {
    if !environment::is_enclosing(lease.owner()) {
        db.locks.evict(lease.name().as_str(), lease.token()).await?;
    }
    Ok(())
}

/// The wait for a database that cannot be reached.
#[derive(Default)]
pub struct Outage {
    /// The last warning.
    last_message: String,
}

impl Outage {
    /// Prints a new failure as a warning, and waits until the next attempt. Fails if no time is
    /// left for one.
    pub async fn wait_for_retry(&mut self, failure: Failure, left: Option<Duration>) -> Result<(), Failure> {
        const RETRY_INTERVAL: Duration = Duration::from_secs(1);
        if let Some(left) = left.filter(|left| *left <= RETRY_INTERVAL) {
            sleep(left).await;
            return Err(failure);
        }
        if self.last_message != failure.message {
            stderr::print_warning(&format!("{}; still waiting", failure.message));
            self.last_message = failure.message;
        }
        sleep(RETRY_INTERVAL).await;
        Ok(())
    }
}

fn no_answer_failure(within: Duration) -> Failure {
    let within = duration::format(within);
    Failure::new(exit::UNREACHABLE, format!("{}: no answer came within {within}", exit::describe_unreachable()))
}

/// The latest progress of the wait, as the library reports it.
#[derive(Default)]
struct Progress {
    latest: Arc<Mutex<Option<Waiting>>>,
    /// Whether a note about the wait was printed.
    is_reported: Cell<bool>,
}

impl Progress {
    fn callback(&self) -> impl Fn(&Waiting) + Send + Sync + 'static {
        let latest = Arc::clone(&self.latest);
        move |waiting| *latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(waiting.clone())
    }

    fn latest(&self) -> Option<Waiting> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// How often the holders are looked up.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// How often a note about the wait is repeated without a terminal.
const NOTE_INTERVAL: Duration = Duration::from_secs(60);

/// Prints the holders and the position in the queue: after half a second, and when they change. In
/// between, a terminal shows a line with the time; elsewhere the note is repeated once a minute.
async fn report_holders(db: &Database, name: &str, reached: &Cell<Option<Instant>>, progress: &Progress) {
    let enclosing_owners = environment::enclosing_owners();
    let start = Instant::now();
    let is_live = stderr::is_terminal() && !stderr::is_quiet();
    let mut reported = None;
    let mut last_note = Instant::now();
    sleep(Duration::from_millis(500)).await;
    loop {
        let inspected = db.locks.holders(name).await;
        if inspected.is_ok() {
            reached.set(Some(Instant::now()));
        }
        let holders = inspected.unwrap_or_default();
        let mut live_line = None;
        if let (Some(held), Some(waiting)) = (describe::describe_holders(&holders), progress.latest()) {
            let now = Some((waiting.ahead, waiting.holder.map(|holder| holder.token)));
            let ahead = match waiting.ahead {
                0 => "next in the queue".into(),
                ahead => format!("{ahead} ahead in the queue"),
            };
            if now != reported || (!is_live && last_note.elapsed() >= NOTE_INTERVAL) {
                let hint =
                    if reported.is_none() { format_hint(db, name, &holders, &enclosing_owners) } else { String::new() };
                stderr::print_note(&format!("waiting for {}, {ahead}, {held}{hint}", quote(name)));
                progress.is_reported.set(true);
                (last_note, reported) = (Instant::now(), now);
            }
            live_line = is_live.then(|| format!("{ahead}, {held}"));
        }
        // The library may not have reported the position yet.
        let soon = reported.is_none() && !holders.is_empty() && !stderr::is_quiet();
        let next_look = Instant::now() + if soon { Duration::from_millis(250) } else { LOOK_INTERVAL };
        while let Some(line) = &live_line
            && Instant::now() + LIVE_INTERVAL <= next_look
        {
            stderr::show_live_line(&format!(
                "waiting for {}: {line}",
                duration::format_exact(Duration::from_secs(start.elapsed().as_secs()))
            ));
            sleep(LIVE_INTERVAL).await;
        }
        sleep_until(next_look).await;
    }
}

/// How often the line on a terminal is updated.
const LIVE_INTERVAL: Duration = Duration::from_secs(1);

/// Describes how to end the wait.
fn format_hint(db: &Database, name: &str, holders: &[LeaseInfo], enclosing_owners: &[Owner]) -> String {
    let is_enclosing = |held: &LeaseInfo| environment::is_owned_by(enclosing_owners, held);
    // The hint does not repeat the URL, which may contain a password.
    let database = if db.is_named_by_option { " (with the same -D)" } else { "" };
    let advice = match holders {
        _ if holders.iter().any(is_enclosing) => {
            " The enclosing sqlock run is one of the holders: if this one waits for it, it waits for ever.".into()
        }
        [held] if held.owner.is_some() => {
            let name = quote_for_shell(name);
            format!(" If that holder hangs: sqlock unlock --token {} {name}{database}", held.token)
        }
        [_, _, ..] => {
            let name = quote_for_shell(name);
            format!(" If one of the holders hangs: sqlock show {name}, and sqlock unlock{database}")
        }
        _ => return String::new(),
    };
    format!("\nGive up with Ctrl-C, or bound the wait with --timeout.{advice}")
}

/// Quotes a name for a shell, as the last argument of sqlock.
fn quote_for_shell(name: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/_.:@%+-".contains(c);
    let quoted = if name.chars().all(plain) { name.into() } else { format!("'{}'", name.replace('\'', "'\\''")) };
    // Without the "--", the name would be an option.
    if name.starts_with('-') { format!("-- {quoted}") } else { quoted }
}
