//! Leases on a majority of independent databases: takes them, prolongs them, ends them.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use sqlock::inspect::LeaseInfo;
use sqlock::lease::LeaseOptions;
use sqlock::quorum::{Quorum, QuorumLease, QuorumRequest};
use sqlock::{Error, FencingToken, LockName, Locks, Owner};
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::acquisition::{LeaseArgs, Outage};
use crate::database::Database;
use crate::describe;
use crate::duration;
use crate::environment;
use crate::exit::{self, Failure};
use crate::global::Global;
use crate::majority_holders;
use crate::pool::LeaseFilter;
use crate::stderr::{self, quote};

/// The result of inspecting a database: its description, and the holder.
type Inspected = (String, Result<sqlock::Result<Option<LeaseInfo>>, Elapsed>);

/// How long a database, which may be down, may take to return the holder of the name.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(4);

/// The least inspection time if --timeout is shorter: a running database answers in this time.
const MIN_INSPECT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a majority of the databases may take to list the holders.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the other databases may take after the majority.
const LATE_TIMEOUT: Duration = Duration::from_millis(1_500);

/// An attempt that took longer has reached a majority: without one, the library gives up after 3
/// seconds.
const MAX_UNREACHED_ATTEMPT: Duration = Duration::from_secs(6);

/// The databases that vote.
pub struct Majority {
    pub databases: Vec<Arc<Database>>,
    pub quorum: Quorum,
}

impl Majority {
    /// Opens the databases that the command line or the environment names, to take a lease on a
    /// name. Sends nothing to a server.
    pub async fn open(global: &Global, name: &str) -> Result<Self, Failure> {
        Self::open_with(global, true, LeaseFilter::Name(name)).await
    }

    /// Opens the databases without creating missing SQLite files.
    pub async fn open_existing(global: &Global, filter: LeaseFilter<'_>) -> Result<Self, Failure> {
        Self::open_with(global, false, filter).await
    }

    async fn open_with(global: &Global, create: bool, filter: LeaseFilter<'_>) -> Result<Self, Failure> {
        let databases: Vec<_> = Database::open_each(global, create, filter).await?.into_iter().map(Arc::new).collect();
        let quorum = Quorum::new(databases.iter().map(|db| db.locks.clone()));
        Ok(Self { databases, quorum })
    }

    /// Names a database in messages.
    pub fn describe(&self, node: usize) -> String {
        describe_node(node, self.databases.len(), &self.databases[node].location)
    }

    /// Returns the number of databases that make a majority.
    pub fn needed(&self) -> usize {
        count_majority(self.databases.len())
    }

    /// Asks each database for holders. A database without tables has none. A database that does not
    /// answer has a text with the reason instead of a list. Fails if less than a majority answers.
    pub async fn list_holders<F>(
        &self,
        list: impl Fn(Locks) -> F,
    ) -> Result<Vec<Result<Vec<LeaseInfo>, String>>, Failure>
    where
        F: Future<Output = sqlock::Result<Vec<LeaseInfo>>> + Send + 'static,
    {
        let (count, needed) = (self.databases.len(), self.needed());
        let mut requests = JoinSet::new();
        for (node, db) in self.databases.iter().enumerate() {
            let list = list(db.locks.clone());
            requests.spawn(async move { (node, list.await) });
        }
        let mut lists: Vec<_> = (0..count).map(|node| Err(format!("{}: no answer", self.describe(node)))).collect();
        let mut deadline = Instant::now() + LIST_TIMEOUT;
        let mut code = exit::UNREACHABLE;
        while let Ok(Some(done)) = timeout_at(deadline, requests.join_next()).await {
            let Ok((node, listed)) = done else { continue };
            lists[node] = match listed {
                Ok(list) => Ok(list),
                Err(Error::NotMigrated { .. }) if self.databases[node].has_no_tables().await => Ok(Vec::new()),
                Err(error) => {
                    let reason = format!("{}: {}", self.describe(node), error.report());
                    // A reason that another attempt would not resolve decides the exit code.
                    if !error.is_retryable() {
                        code = Failure::from(error).code;
                    }
                    Err(reason)
                }
            };
            if lists.iter().flatten().count() >= needed {
                deadline = deadline.min(Instant::now() + LATE_TIMEOUT);
            }
        }
        let missing: Vec<&str> = lists.iter().filter_map(|list| list.as_ref().err()).map(String::as_str).collect();
        let answered = count - missing.len();
        if answered < needed {
            let reasons = missing.join("; ");
            let message = format!("{answered} of {count} databases answered, and {needed} must: {reasons}");
            return Err(Failure::new(code, message));
        }
        Ok(lists)
    }

    /// Reads the owner of a holding from the first database that knows it.
    pub async fn find_owner(&self, name: &str, token: FencingToken) -> Option<Owner> {
        let mut lookups = JoinSet::new();
        for db in self.databases.iter().cloned() {
            let name = name.to_owned();
            lookups.spawn(async move { timeout(INSPECT_TIMEOUT, db.locks.holders(&name)).await });
        }
        while let Some(found) = lookups.join_next().await {
            if let Ok(Ok(Ok(holders))) = found
                && let Some(held) = holders.iter().find(|held| held.token == token)
            {
                return held.owner;
            }
        }
        None
    }

    /// Ends the clients and their remaining leases.
    pub async fn shutdown(self) {
        let mut shutdowns = JoinSet::new();
        for db in self.databases {
            shutdowns.spawn(async move { db.shutdown().await });
        }
        shutdowns.join_all().await;
    }

    /// Takes the lease on a majority, or gives up at --timeout. `None`: not obtained, and a note
    /// has said so.
    ///
    /// With --timeout, the wait includes outages until the time has run out. Without, it lasts
    /// through outages shorter than the TTL, unless no majority could be reached at first.
    ///
    /// A lease that does not count on one of the databases, by the role of its file, counts as not
    /// obtained.
    pub async fn acquire(
        &self,
        global: &Global,
        args: &LeaseArgs,
        options: LeaseOptions,
    ) -> Result<Option<QuorumLease>, Failure> {
        let name = LockName::new(args.name.as_str())?;
        let start = Instant::now();
        let was_reachable = inspect_majority(args, &self.databases).await?;
        let request = self.quorum.lease(name.as_str()).options(options);
        let acquired = tokio::select! {
            acquired = self.wait_for_lease(args, request, start, was_reachable) => acquired?,
            never = self.report_holders(&name), if !args.nonblock => match never {},
        };
        let within = match (&acquired, args.timeout) {
            (Ok(Some(lease)), _) => {
                return Ok(if self.check_files(global, lease).await? { acquired? } else { None });
            }
            (Ok(None), _) => String::new(),
            (Err(error), Some(at_most)) if error.is_timeout() => format!(" within {}", duration::format_exact(at_most)),
            _ => return Ok(acquired?),
        };
        let name = quote(name.as_str());
        stderr::print_note(&format!("{name} not obtained{within}: another process held or requested it"));
        Ok(None)
    }

    /// Returns whether the lease counts on all databases. Otherwise ends it and prints a note.
    async fn check_files(&self, global: &Global, lease: &QuorumLease) -> Result<bool, Failure> {
        let name = lease.name().as_str();
        for (node, db) in self.databases.iter().enumerate() {
            if let Some(next) = db.open_next(global, name).await.transpose() {
                // Unlike a release, this frees the name at once, also with --hold-at-least.
                let evicted = self.quorum.evict(name, lease.token()).await;
                next?;
                evicted?;
                let (node, name) = (self.describe(node), quote(name));
                stderr::print_note(&format!(
                    "{name} not obtained: a lease in {node} does not count, because the application's file has the sqlock \
                     tables: start again"
                ));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Acquires until the lease is granted or refused, or an outage has lasted for too long.
    async fn wait_for_lease(
        &self,
        args: &LeaseArgs,
        request: QuorumRequest,
        start: Instant,
        mut was_reachable: bool,
    ) -> Result<sqlock::Result<Option<QuorumLease>>, Failure> {
        let left = || args.timeout.map(|at_most| at_most.saturating_sub(start.elapsed()));
        let mut outage = Outage::default();
        let mut outage_start = None;
        loop {
            let begun_at = Instant::now();
            let acquired = match left() {
                _ if args.nonblock => request.clone().try_acquire().await,
                Some(left) => request.clone().wait(left).acquire().await.map(Some),
                None => request.clone().acquire().await.map(Some),
            };
            let failure = match acquired {
                Err(error @ Error::Unavailable { .. }) => Failure::from(error),
                acquired => return Ok(acquired),
            };
            if begun_at.elapsed() > MAX_UNREACHED_ATTEMPT {
                (was_reachable, outage_start) = (true, None);
            }
            let outage_start = *outage_start.get_or_insert_with(Instant::now);
            let can_retry = match left() {
                Some(left) => !left.is_zero(),
                None => was_reachable && !args.nonblock && outage_start.elapsed() < args.ttl,
            };
            if failure.code != exit::UNREACHABLE || !can_retry {
                return Err(failure);
            }
            outage.wait_for_retry(failure, left()).await?;
        }
    }

    /// Prints the holders of a name after half a second, and once a minute.
    async fn report_holders(&self, name: &LockName) -> Infallible {
        sleep(Duration::from_millis(500)).await;
        loop {
            let lists = self.list_holders(|locks| {
                let name = name.clone();
                async move { locks.holders(name.as_str()).await }
            });
            let lists = lists.await.unwrap_or_default();
            let answered = lists.iter().filter(|list| list.is_ok()).count();
            let holders = majority_holders::merge(lists.into_iter().flatten().flatten());
            let holder = holders.first().filter(|holder| holder.votes() >= self.needed());
            let held = holder.map(|holder| holder.decisive(self.needed()).clone());
            // A database that did not answer may have a vote of the holder.
            let is_complete = answered == self.databases.len();
            let no_holder = || is_complete.then(|| "which no process holds on a majority".to_owned());
            let state = describe::describe_holders(held.as_slice()).or_else(no_holder);
            let state = state.map_or(String::new(), |state| format!(", {state}"));
            stderr::print_note(&format!("waiting for {}{state}", quote(name.as_str())));
            sleep(Duration::from_secs(60)).await;
        }
    }
}

/// Names one of several databases in messages.
pub fn describe_node(node: usize, count: usize, location: &str) -> String {
    format!("database {} of {count} ({location})", node + 1)
}

/// Returns the number of `count` databases that make a majority.
pub fn count_majority(count: usize) -> usize {
    count / 2 + 1
}

/// Asks all databases for the holder of the name, until a majority has answered, and returns
/// whether one has. Warns about each database that cannot vote, even later. Fails if too few can
/// vote, or if an enclosing run holds the name.
async fn inspect_majority(args: &LeaseArgs, databases: &[Arc<Database>]) -> Result<bool, Failure> {
    let timeout_of_each =
        args.timeout.map_or(INSPECT_TIMEOUT, |at_most| at_most.clamp(MIN_INSPECT_TIMEOUT, INSPECT_TIMEOUT));
    let (count, needed) = (databases.len(), count_majority(databases.len()));
    let mut inspections: JoinSet<Inspected> = JoinSet::new();
    for (i, db) in databases.iter().cloned().enumerate() {
        let name = args.name.clone();
        let node = describe_node(i, count, &db.location);
        inspections.spawn(async move { (node, timeout(timeout_of_each, db.locks.inspect(&name)).await) });
    }
    let enclosing_owners = environment::enclosing_owners();
    let (mut answered, mut unusable) = (0, 0);
    while answered < needed
        && let Some(inspected) = inspections.join_next().await
    {
        match inspected {
            Ok((_, Ok(Ok(Some(held))))) if environment::is_owned_by(&enclosing_owners, &held) => {
                return Err(Failure::usage(format!(
                    "{} is held by the enclosing sqlock run: this one would wait for ever",
                    quote(&args.name)
                )));
            }
            Ok((_, Ok(Ok(_)))) => answered += 1,
            Ok((node, Ok(Err(error)))) => {
                if let Some(failure) = describe_unusable(&node, error) {
                    unusable += 1;
                    if count - unusable < needed {
                        return Err(failure);
                    }
                    stderr::print_warning(&failure.message);
                }
            }
            // The database did not answer. A minority may be down.
            _ => {}
        }
    }
    // The command does not wait for a minority that is down.
    tokio::spawn(async move {
        while let Some(inspected) = inspections.join_next().await {
            if let Ok((node, Ok(Err(error)))) = inspected
                && let Some(failure) = describe_unusable(&node, error)
            {
                stderr::print_warning(&failure.message);
            }
        }
    });
    Ok(answered >= needed)
}

/// Describes a database that cannot vote until an operator changes it. `None`: the database is out
/// of reach.
fn describe_unusable(node: &str, error: Error) -> Option<Failure> {
    match error {
        Error::Unavailable { .. } => None,
        // The database may have lost its data, so the tables are not created implicitly.
        Error::NotMigrated { .. } => Some(Failure::configuration(format!(
            "{node} has no sqlock tables and does not vote: run \"sqlock migrate\" with its URL. It votes when its tables are \
             older than the TTL"
        ))),
        error => {
            let message = format!("{node} does not vote: {}", error.report());
            Some(Failure::new(Failure::from(error).code, message))
        }
    }
}
