//! Checks a lock by the recorded observations of its users.
//!
//! Every process of a test writes one line per finished call with a [`Recorder`]; the test merges
//! the lines, adds the state of the guarded database, and calls [`History::check`]. Times are taken
//! just before and just after a call, which took effect in between: two calls are ordered only if
//! one returned before the other was invoked; otherwise no violation is reported. For exclusive
//! leases; O(n log n).
//!
//! | op            | `ok` means                   | otherwise                                          |
//! |---------------|------------------------------|----------------------------------------------------|
//! | acquire       | the caller has the lease     | `late`: given back, its deadline had passed        |
//! | renew         | it was still held            | `refused`: lost                                    |
//! | release       | it was held to the end       | `refused`: lost; `unknown`: the guard was dropped  |
//! | fenced_begin  | the fence let us in          | `refused`: it did not                              |
//! | fenced_commit | committed; one for each begin that was ok | `refused`: rolled back                |
//! | lost          | the holder noticed the loss  |                                                    |
//! | held          | `is_held()` said yes         | `refused`: it said no                              |
//!
//! `unknown` is any call without a reply. Renewals in the background leave no record, so a
//! long-lived holder sometimes records `held`, with its deadline at that time.
#![allow(dead_code, unreachable_pub, reason = "several tests include this file, each uses a part")]
#![allow(clippy::expect_used, clippy::panic, reason = "a broken record must fail the test")]

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// The merged record, and the final state of the guarded resource.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub events: Vec<Event>,
    pub audit: Vec<Audit>,
    /// By name, the final value of a counter that each fenced transaction reads and writes back.
    pub counters: BTreeMap<String, u64>,
    pub residue: Residue,
}

/// The rules that hold with the injected faults.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Off if a client may sleep past its deadline or the database's clock may jump: two clients
    /// can then believe at the same time that they hold, and only the fence separates them.
    pub client_exclusion: bool,
    /// How long a name may be free while a caller waits for it. If processes are killed or replies
    /// are lost, this includes the TTL, because the last grant may not be recorded.
    pub liveness: Option<Duration>,
}

/// One finished call. The deadline is the holder's own after the call, on the clock of [`boot_ns`].
///
/// Owner and token name a holding. If several processes share an owner, a loss that one of them
/// noticed counts for all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Event {
    pub proc: String,
    pub invoke_ns: u64,
    pub return_ns: u64,
    pub op: Op,
    pub name: String,
    pub owner: String,
    pub token: Option<u64>,
    pub deadline_ns: Option<u64>,
    pub outcome: Outcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    Acquire,
    Renew,
    Release,
    FencedBegin,
    FencedCommit,
    Lost,
    Held,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Ok,
    Refused,
    Unknown,
    Late,
}

/// The row that a fenced transaction appends in addition to its other writes; `seq` is the order of
/// commits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audit {
    pub seq: i64,
    pub name: String,
    pub token: u64,
    pub proc: String,
}

/// The rows that remain at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residue {
    pub live_leases: u64,
    pub open_transactions: u64,
}

/// One broken promise, with the evidence in the order of time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error("incomplete record, which would escape the other checks:\n    {0}")]
    Incomplete(Event),
    #[error("a later grant has a smaller token:\n    {0}\n    {1}")]
    TokenWentBack(Event, Event),
    #[error("one token was granted to two owners:\n    {0}\n    {1}")]
    TokenOfTwoOwners(Event, Event),
    #[error("a token was granted again after its last release:\n    {0}\n    {1}")]
    TokenReused(Event, Event),
    #[error("a newer token was granted, and the older one still honoured:\n    {0}\n    {1}")]
    SuccessAfterTakeover(Event, Event),
    #[error("a newer token had written, and the older one still could:\n    {0}\n    {1}")]
    StaleWrite(Audit, Audit),
    #[error("the second was granted while the first could believe that it held:\n    {0}\n    {1}")]
    Overlap(Event, Event),
    #[error("lost update: {0:?} counts {1}, and {2} commits are certain")]
    LostUpdate(String, u64, u64),
    #[error("phantom update: {0:?} counts {1}, and only {2} commits are possible")]
    PhantomUpdate(String, u64, u64),
    #[error("starved while the name lay free for {1:?}:\n    {0}")]
    Starved(Event, Duration),
    #[error("handed over after its own deadline:\n    {0}")]
    LateGrant(Event),
    #[error("the holder noticed a loss, and then none:\n    {0}\n    {1}")]
    SuccessAfterLost(Event, Event),
    #[error("said to be held, although the deadline {1:?} had passed:\n    {0}")]
    HeldPastDeadline(Event, Duration),
    #[error("left behind: {0:?}")]
    LeftBehind(Residue),
}

use Outcome::{Late, Refused, Unknown};
use Violation::*;
type Found = Vec<Violation>;
const GRANTED: &[Outcome] = &[Outcome::Ok, Late];
const SUCCESS: &[Outcome] = &[Outcome::Ok];
const ANY: &[Outcome] = &[Outcome::Ok, Refused, Unknown, Late];

impl History {
    /// Returns all violations in this history; none if the lock kept its promises.
    pub fn check(&self, rules: &Rules) -> Vec<Violation> {
        let incomplete = self.events.iter().filter(|e| e.is_incomplete());
        let mut found: Vec<_> = incomplete.cloned().map(Incomplete).collect();
        let mut names: BTreeMap<&str, Vec<&Event>> = BTreeMap::new();
        for event in &self.events {
            names.entry(&event.name).or_default().push(event);
        }
        for events in names.values_mut() {
            events.sort_by_key(|e| e.invoke_ns);
            let holdings = holdings(events);
            token_order(events, &mut found);
            for holding in &holdings {
                reuse(holding, &mut found);
                honesty(holding, &mut found);
            }
            if rules.client_exclusion {
                let late = events.iter().filter(|e| e.is_late());
                found.extend(late.map(|&e| LateGrant(e.clone())));
                client_exclusion(&holdings, &mut found);
            }
            if let Some(bound) = rules.liveness {
                liveness(events, &holdings, bound, &mut found);
            }
        }
        self.order_of_writes(&mut found);
        for (name, counter) in &self.counters {
            let events = names.get(name.as_str()).map_or(&[][..], Vec::as_slice);
            self.updates(name, *counter, events, &mut found);
        }
        if self.residue != Residue::default() {
            found.push(LeftBehind(self.residue));
        }
        found
    }

    /// Panics with a list of all violations, or if nothing was ever granted.
    #[track_caller]
    pub fn assert_clean(&self, rules: &Rules) {
        let granted = self.events.iter().any(|e| e.is(Op::Acquire, GRANTED));
        assert!(granted, "a history without a grant proves nothing");
        let found = self.check(rules);
        let list: String = found.iter().map(|v| format!("\n- {v}")).collect();
        assert!(found.is_empty(), "{} violations:{list}", found.len());
    }

    /// Checks that no older token writes after a newer one.
    fn order_of_writes(&self, found: &mut Found) {
        let mut rows: Vec<&Audit> = self.audit.iter().collect();
        rows.sort_by_key(|row| row.seq);
        let mut newest: HashMap<&str, &Audit> = HashMap::new();
        for row in rows {
            let newer = newest.entry(&row.name).or_insert(row);
            if row.token < newer.token {
                found.push(StaleWrite((*newer).clone(), row.clone()));
            } else {
                *newer = row;
            }
        }
    }

    /// Checks that every commit counts once. Commits with an unknown end may count, and so may
    /// commits of killed processes, of which only the begin is recorded.
    fn updates(&self, name: &str, counter: u64, events: &[&Event], found: &mut Found) {
        let count = |op, outcomes| select(events, op, outcomes).len() as u64;
        let audited = self.audit.iter().filter(|row| row.name == name).count() as u64;
        let certain = audited.max(count(Op::FencedCommit, SUCCESS));
        let begun = count(Op::FencedBegin, &[Outcome::Ok, Unknown, Late]);
        let ended = count(Op::FencedCommit, ANY);
        let possible = begun.max(ended) - count(Op::FencedCommit, &[Refused]);
        if counter < certain {
            found.push(LostUpdate(name.into(), counter, certain));
        } else if counter > possible {
            found.push(PhantomUpdate(name.into(), counter, possible));
        }
    }
}

/// Checks that tokens rise from grant to grant, have one owner, and have no effect after a newer
/// grant.
fn token_order(events: &[&Event], found: &mut Found) {
    let mut grants = select(events, Op::Acquire, GRANTED);
    grants.sort_by_key(|grant| grant.return_ns);
    let mut returned = grants.into_iter().peekable();
    let mut newest: Option<(Option<u64>, &Event)> = None;
    let mut first_with: HashMap<Option<u64>, &Event> = HashMap::new();
    for &event in events.iter().filter(|e| e.token.is_some()) {
        while let Some(grant) = returned.next_if(|grant| grant.before(event)) {
            newest = newest.max(Some((grant.token, grant)));
        }
        let granted = event.is(Op::Acquire, GRANTED);
        let overtaken = newest.filter(|(token, _)| *token > event.token);
        match overtaken.map(|(_, newest)| (newest.clone(), event.clone())) {
            Some((newest, event)) if granted => found.push(TokenWentBack(newest, event)),
            Some((newest, event)) if event.was_compared() => {
                found.push(SuccessAfterTakeover(newest, event));
            }
            _ => {}
        }
        if granted {
            let first = *first_with.entry(event.token).or_insert(event);
            if first.owner != event.owner {
                found.push(TokenOfTwoOwners(first.clone(), event.clone()));
            }
        }
    }
}

/// All events of one token of one owner: several grants, if it is re-entrant.
type Holding<'a> = Vec<&'a Event>;

fn holdings<'a>(events: &[&'a Event]) -> Vec<Holding<'a>> {
    let mut holdings: BTreeMap<(u64, &str), Holding<'a>> = BTreeMap::new();
    for &event in events {
        if let Some(token) = event.token {
            let key = (token, event.owner.as_str());
            holdings.entry(key).or_default().push(event);
        }
    }
    holdings.into_values().collect()
}

/// Checks that a token is granted again only while an earlier grant of it is not released.
fn reuse(holding: &Holding<'_>, found: &mut Found) {
    let mut releases = select(holding, Op::Release, SUCCESS);
    releases.sort_by_key(|release| release.return_ns);
    let grants = select(holding, Op::Acquire, GRANTED);
    for (earlier, again) in grants.into_iter().enumerate().skip(1) {
        let released = releases.partition_point(|release| release.before(again));
        if released >= earlier {
            found.push(TokenReused(releases[released - 1].clone(), again.clone()));
        }
    }
}

/// Checks that no call succeeds after the holder noticed its loss, unless it acquired again or
/// commits a transaction that it had fenced before; and a lease is not held past its deadline.
fn honesty(holding: &Holding<'_>, found: &mut Found) {
    let mut noticed: Option<&Event> = None;
    let mut fenced = 0_u64;
    let mut deadline = 0;
    let matters = |e: &&&Event| e.outcome == Outcome::Ok || e.op == Op::FencedCommit;
    for event in holding.iter().filter(matters) {
        let lost = noticed.filter(|lost| lost.before(event));
        match (event.op, lost) {
            (Op::Lost, _) => noticed = noticed.or(Some(event)),
            (Op::Acquire, Some(_)) => noticed = None,
            (Op::FencedBegin, None) => fenced += 1,
            (Op::FencedCommit, _) if fenced > 0 => fenced -= 1,
            (_, Some(lost)) if event.outcome == Outcome::Ok => {
                found.push(SuccessAfterLost(lost.clone(), (*event).clone()));
            }
            _ => {}
        }
        deadline = deadline.max(event.deadline_ns.unwrap_or(0));
        if event.op == Op::Held && event.invoke_ns >= deadline {
            let deadline = Duration::from_nanos(deadline);
            found.push(HeldPastDeadline((*event).clone(), deadline));
        }
    }
}

/// Checks that no two owners believe at the same time that they hold.
fn client_exclusion(holdings: &[Holding<'_>], found: &mut Found) {
    let mut claims: Vec<_> = holdings.iter().filter_map(|h| claim(h)).collect();
    claims.sort_by_key(|(grant, _)| grant.return_ns);
    let mut longest: Option<(u64, &Event)> = None;
    for (grant, end) in claims {
        let other = longest.filter(|(_, first)| grant.owner != first.owner);
        let held = other.filter(|(end, _)| grant.return_ns < *end);
        found.extend(held.map(|(_, first)| Overlap(first.clone(), grant.clone())));
        longest = longest.max(Some((end, grant)));
    }
}

/// Returns the first grant, after whose return the holder may act, and the moment at which it
/// stops: when it asks for the last release, notices the loss, or reaches its deadline.
fn claim<'a>(holding: &[&'a Event]) -> Option<(&'a Event, u64)> {
    let grants = select(holding, Op::Acquire, SUCCESS);
    let start = *grants.iter().min_by_key(|grant| grant.return_ns)?;
    let releases = select(holding, Op::Release, ANY);
    let release = releases.get(grants.len() - 1).map(|e| e.invoke_ns);
    let noticed = select(holding, Op::Lost, ANY);
    let noticed = noticed.iter().map(|e| e.return_ns).min();
    let successes = holding.iter().filter(|e| e.outcome == Outcome::Ok);
    let deadline = successes.filter_map(|e| e.deadline_ns).max();
    let end = [release, noticed, deadline].into_iter().flatten().min()?;
    (start.return_ns < end).then_some((start, end))
}

/// Checks that no caller waits for longer than the bound while the name is free.
fn liveness(events: &[&Event], holdings: &[Holding<'_>], bound: Duration, found: &mut Found) {
    let unknown = select(events, Op::Acquire, &[Unknown]);
    let mut busy: Vec<_> = holdings.iter().filter_map(|h| occupied(h)).collect();
    busy.extend(unknown.into_iter().filter_map(|e| occupied(&[e])));
    busy.push((u64::MAX, u64::MAX));
    busy.sort_unstable();
    let mut free_since = 0;
    let mut gaps = Vec::new();
    for (start, end) in busy {
        if start > free_since && Duration::from_nanos(start - free_since) > bound {
            gaps.push((free_since, start));
        }
        free_since = free_since.max(end);
    }
    for waiter in select(events, Op::Acquire, ANY) {
        // A wait can shorten only the first and the last gap that it overlaps, so `find` ends soon.
        let first = gaps.partition_point(|(_, end)| *end <= waiter.invoke_ns);
        let met = gaps[first..].iter().take_while(|(start, _)| *start < waiter.return_ns);
        let mut free = met.map(|(start, end)| {
            let until = waiter.return_ns.min(*end);
            Duration::from_nanos(until - waiter.invoke_ns.max(*start))
        });
        if let Some(free) = free.find(|free| *free > bound) {
            found.push(Starved(waiter.clone(), free));
        }
    }
}

/// Returns the period in which others may have found the name taken: until the last release
/// returned; without a release, until the deadline, and as long as a fenced transaction excludes
/// others.
fn occupied(holding: &[&Event]) -> Option<(u64, u64)> {
    let grants = select(holding, Op::Acquire, &[Outcome::Ok, Late, Unknown]);
    let earliest = |e: &&Event| match e.outcome {
        Outcome::Ok => e.return_ns,
        _ => e.invoke_ns,
    };
    let start = grants.iter().map(earliest).min()?;
    let releases = select(holding, Op::Release, SUCCESS);
    if releases.len() >= grants.len() {
        return Some((start, releases.iter().map(|e| e.return_ns).max()?));
    }
    let alive = |e: &&&Event| e.op == Op::FencedCommit || e.outcome != Refused;
    let signs = holding.iter().filter(alive).filter(|e| e.op != Op::Lost);
    let last = signs.map(|e| e.return_ns.max(e.deadline_ns.unwrap_or(0)));
    Some((start, last.max()?))
}

fn select<'a>(events: &[&'a Event], op: Op, outcomes: &[Outcome]) -> Vec<&'a Event> {
    let all = events.iter().copied();
    all.filter(|e| e.is(op, outcomes)).collect()
}

impl Event {
    /// Returns whether this call certainly took effect before the other.
    pub fn before(&self, other: &Event) -> bool {
        self.return_ns < other.invoke_ns
    }

    fn is(&self, op: Op, outcomes: &[Outcome]) -> bool {
        self.op == op && outcomes.contains(&self.outcome)
    }

    /// Returns whether the database compared owner and token, and both matched.
    fn was_compared(&self) -> bool {
        !matches!(self.op, Op::Acquire | Op::Lost | Op::Held) && self.outcome == Outcome::Ok
    }

    /// Returns whether the call succeeded although no time was left.
    fn is_late(&self) -> bool {
        let given = self.is(Op::Acquire, SUCCESS) || self.is(Op::Renew, SUCCESS);
        given && self.deadline_ns.is_some_and(|deadline| deadline <= self.return_ns)
    }

    fn is_incomplete(&self) -> bool {
        let has_deadline = matches!(self.op, Op::Acquire | Op::Renew | Op::Held);
        let missing = self.token.is_none() || has_deadline && self.deadline_ns.is_none();
        self.return_ns < self.invoke_ns || self.outcome == Outcome::Ok && missing
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [from, to] = [self.invoke_ns, self.return_ns].map(Duration::from_nanos);
        let token = self.token.map_or("no token".into(), |token| format!("token {token}"));
        write!(f, "{from:?} .. {to:?} {}: {:?} {:?} ", self.proc, self.op, self.name)?;
        write!(f, "by {}, {token}: {:?}", self.owner, self.outcome)?;
        let until = self.deadline_ns.map(Duration::from_nanos);
        until.map_or(Ok(()), |until| write!(f, " until {until:?}"))
    }
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "commit {} of {:?} ", self.seq, self.name)?;
        write!(f, "by {} under token {}", self.proc, self.token)
    }
}

/// Appends the events of one process to its own file and flushes each, so that `kill -9` tears the
/// last line at most.
pub struct Recorder(Mutex<BufWriter<File>>);

impl Recorder {
    pub fn create(dir: &Path, proc: &str) -> Self {
        let path = dir.join(format!("{proc}.jsonl"));
        let file = File::create_new(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Recorder(Mutex::new(BufWriter::new(file)))
    }

    pub fn record(&self, event: &Event) {
        let mut line = serde_json::to_vec(event).expect("an event is plain data");
        line.push(b'\n');
        let mut file = self.0.lock().expect("nobody panicked while recording");
        let written = file.write_all(&line).and_then(|()| file.flush());
        written.expect("the record can be written");
    }
}

/// Reads the events of all processes. A torn last line is left out, as if its call had never
/// returned.
pub fn read_dir(dir: &Path) -> Vec<Event> {
    let mut events = Vec::new();
    for entry in fs::read_dir(dir).expect("the directory of the record can be listed") {
        let path = entry.expect("the directory of the record can be listed").path();
        let bytes = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            match serde_json::from_slice(line) {
                Ok(event) => events.push(event),
                Err(_) if !line.ends_with(b"\n") => {}
                Err(e) => panic!("{}: {e}: {}", path.display(), String::from_utf8_lossy(line)),
            }
        }
    }
    events
}

/// Returns the nanoseconds since this host was started, suspend included; comparable between its
/// processes.
pub fn boot_ns() -> u64 {
    let now = Duration::try_from(clock_gettime(ClockId::Boottime)).expect("time since the start");
    u64::try_from(now.as_nanos()).expect("fewer than 584 years")
}
