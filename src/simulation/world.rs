//! Several engines, one store, callers and faults, in virtual time.

mod asks;
mod callers;
mod checks;
mod clients;
mod failover;
mod faults;
mod requests;
mod schedule;
mod summary;
mod sweep;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

use super::checker::Belief;
use super::profile::Profile;
use crate::backend::memory::{Memory, Prepared, TransactionId};
use crate::clock::Moment;
use crate::engine::{Amendment, Engine, Exported, Input, LeaseId, LeaseSpec, SharedError, WaitMode, WaiterId};
use crate::error::Error;
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{AcquisitionId, ClientId, Mode, Notification, Request, RequestId};
use crate::random::Random;
use crate::token::FencingToken;
use failover::Failover;
use schedule::{Scheduled, WorldEvent};
pub(crate) use summary::Summary;

/// The names of a run.
const NAMES: [&str; 2] = ["a", "b"];
const MICROSECOND: u64 = 1_000;
const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MILLISECOND;

/// When the faults of a run end.
const FAULTS_END: u64 = 10 * SECOND;
/// How long after the last fault every wait without a limit must have ended.
const SERVED_WITHIN: u64 = 40 * SECOND;
/// How long a run goes on after its last caller.
const FLUSH: u64 = 100 * SECOND;
/// When the sweeper runs: no request takes effect so long after the last fault, and the run still
/// goes on.
const SWEEP_AT: u64 = 90 * SECOND;
const LONGEST_RUN: u64 = 400 * SECOND;
/// The store's clock at the beginning, in microseconds.
const EPOCH: i64 = 1_700_000_000_000_000;
/// How long an attempt to send a request waits for its answer, and how many attempts there are.
const ATTEMPT: u64 = 400 * MILLISECOND;
const ATTEMPTS: u32 = 3;
/// How long a fenced transaction may be open.
const LONGEST_FENCE: u64 = 8 * SECOND;
/// How long a name may be free while a caller waits: the longest TTL, fence and `hold_at_least` of
/// the callers, a grant to a dead client, and an entry that is added late.
const IDLE_FOR: u64 = 5 * SECOND + LONGEST_FENCE + 2_500 * MILLISECOND + 2 * 3 * SECOND + SECOND;
/// How long before a try its client may have learned that the name was held.
const OUTDATED_AFTER: u64 = 2 * SECOND;
/// How long a statement waits for a locked row.
const LOCK_WAIT: u64 = SECOND;
/// How long the client of an evicted holder may take to notice, without faults.
const NOTICED_WITHIN: u64 = 2_500 * MILLISECOND;
/// How long a caller may wait without a report, without faults.
const REPORTED_WITHIN: u64 = 2_500 * MILLISECOND;
/// How long a caller may wait for a lease of its own owner, without faults.
const ENTERED_WITHIN: u64 = 2 * SECOND;
/// How many requests a client may send within a second: two for each caller of a crowd, and its polls.
/// More would be a loop without a pause.
const REQUESTS_PER_SECOND: u32 = 200;
/// How long a grant by another client may have less than its requested TTL in the store, without
/// faults.
const EXTENDED_WITHIN: u64 = 1_500 * MILLISECOND;

struct PendingRequest {
    body: Arc<Request>,
    /// When the last attempt was sent.
    sent_at: Moment,
    attempts: u32,
    life: u32,
    /// Whether the first attempt found its connection dead.
    found_connection_dead: bool,
}

struct Client {
    engine: Option<Engine>,
    id: ClientId,
    life: u32,
    paused_until: u64,
    /// The latest moment at which a fault may have delayed it.
    disturbed_at: u64,
    offset: u64,
    /// The rate of its clock, in millionths above that of the store.
    drift: i64,
    requests: BTreeMap<RequestId, PendingRequest>,
    /// Whether the connection of its heartbeat is dead.
    is_cut: bool,
    /// The second in which it has sent its latest request, and how many since its begin.
    sent: (u64, u32),
    /// Counts the connections of its heartbeat.
    connection: u32,
    wake_at: Option<u64>,
}

impl Client {
    fn local(&self, now: u64) -> Moment {
        let drift = (i128::from(now) * i128::from(self.drift) / 1_000_000) as i64;
        Moment::from_nanos((now + self.offset).saturating_add_signed(drift))
    }

    fn global(&self, moment: Moment) -> u64 {
        let local = i128::from(moment.nanos().saturating_sub(self.offset));
        (local * 1_000_000 / (1_000_000 + i128::from(self.drift))) as u64
    }
}

/// A caller's wait for a name.
#[derive(Clone, Debug)]
struct Wait {
    waiter: WaiterId,
    name: LockName,
    owner: Owner,
    /// The caller named the owner.
    reenters: bool,
    mode: Mode,
    ttl: Duration,
    hold_at_least: Duration,
    is_renewed: bool,
    since: u64,
    is_try: bool,
    is_unlimited: bool,
    /// The engine has reported the wait.
    is_reported: bool,
    /// The exported lease that the caller resumes.
    resumes: Option<Exported>,
}

impl Wait {
    fn new(waiter: WaiterId, since: u64, spec: &LeaseSpec) -> Self {
        Self {
            waiter,
            name: spec.name.clone(),
            owner: spec.owner,
            reenters: spec.reenters,
            mode: spec.mode,
            ttl: spec.ttl,
            hold_at_least: spec.hold_time.at_least,
            is_renewed: spec.is_renewed,
            since,
            is_try: matches!(spec.wait_mode, WaitMode::Try(_)),
            is_unlimited: spec.wait_mode == WaitMode::Wait(None),
            is_reported: false,
            resumes: None,
        }
    }
}

#[derive(Debug)]
enum ActorState {
    Idle,
    Waiting(Wait),
    /// The caller waits for a change of its lease.
    Changing {
        lease: LeaseId,
        amendment: Amendment,
    },
    Holding {
        lease: LeaseId,
        id: AcquisitionId,
        releases_at: u64,
        fences: bool,
    },
    Releasing,
}

struct Actor {
    client: usize,
    state: ActorState,
    turn: u32,
    left: u32,
    /// When the actor last waited for no lease of its own owner.
    waits_for_others_at: u64,
}

/// A request that the store has prepared but not committed.
struct Transaction {
    prepared: Prepared,
    notifications: Vec<(ClientId, Notification)>,
    client: usize,
    life: u32,
    request: RequestId,
    attempt: u32,
    is_rolled_back: bool,
}

/// An exported lease that a caller may resume.
#[derive(Clone)]
struct Resumable {
    exported: Exported,
    name: LockName,
    owner: Owner,
    mode: Mode,
}

/// A resumed lease that its caller has not received yet.
struct Delivery {
    client: usize,
    lease: LeaseId,
    exported: Exported,
}

/// A name that stays taken after the release of its lease.
struct Kept {
    name: LockName,
    owner: Owner,
    mode: Mode,
    token: FencingToken,
    until: u64,
}

/// A lease whose caller waits for the verdict of its release.
struct Releasing {
    name: LockName,
    token: FencingToken,
    actor: usize,
    /// When the caller released the lease.
    asked_at: u64,
}

/// The tokens of the grants of a name so far.
#[derive(Default)]
struct Tokens {
    newest: i64,
    /// The owner with the newest token, which gets the same token if it enters again.
    owner: Option<Owner>,
    newest_exclusive: i64,
}

impl Tokens {
    fn add(&mut self, token: FencingToken, owner: Owner, mode: Mode) {
        if token.get() >= self.newest {
            (self.newest, self.owner) = (token.get(), Some(owner));
        }
        if mode == Mode::Exclusive {
            self.newest_exclusive = self.newest_exclusive.max(token.get());
        }
    }
}

/// A transaction that a caller has fenced.
struct Fenced {
    name: LockName,
    owner: Owner,
    mode: Mode,
    token: FencingToken,
    client: usize,
}

pub(super) struct World {
    random: Random,
    profile: Profile,
    now: u64,
    order: u64,
    schedule: BinaryHeap<Reverse<Scheduled>>,
    store: Memory,
    transactions: BTreeMap<TransactionId, Transaction>,
    next_transaction: TransactionId,
    store_is_away_until: u64,
    failover: Failover,
    clients: Vec<Client>,
    actors: Vec<Actor>,
    next_waiter: u64,
    beliefs: BTreeMap<(usize, LeaseId), Belief>,
    evicted: BTreeMap<(usize, LeaseId), u64>,
    /// The highest token of each name whose holder was asked to release it.
    asked: BTreeMap<LockName, i64>,
    /// The leases whose holders know that their release was asked for.
    informed: BTreeSet<(usize, LeaseId)>,
    /// Leases that have entered a holding of an informed holder.
    must_be_informed: Vec<(usize, LeaseId)>,
    exported: Vec<Resumable>,
    /// When leases were exported that no client has resumed.
    exported_at: BTreeMap<AcquisitionId, u64>,
    handed_back: BTreeSet<(usize, LeaseId)>,
    /// The tries of a crowd.
    crowd: BTreeSet<WaiterId>,
    /// Leases of a crowd that are to be released at once.
    unwanted: Vec<(usize, LeaseId)>,
    deliveries: Vec<Delivery>,
    releasing: BTreeMap<(usize, LeaseId), Releasing>,
    kept: Vec<Kept>,
    fenced: BTreeMap<TransactionId, Fenced>,
    /// When the last fenced transaction on a name ends.
    fenced_until: BTreeMap<LockName, u64>,
    tokens: BTreeMap<LockName, Tokens>,
    idle_since: BTreeMap<&'static str, u64>,
    /// When a name was last held, or wanted by a caller that waits.
    contended_at: BTreeMap<&'static str, u64>,
    owners: Vec<Owner>,
    /// The error of a request that was not answered.
    unanswered: SharedError,
    /// The error of a request that waited for a locked row, which concerns one name only.
    blocked: SharedError,
    summary: Summary,
    violation: Option<String>,
    tells: bool,
}

impl World {
    pub(super) fn new(seed: u64, profile: Profile, tells: bool) -> Self {
        let mut random = Random::new(seed);
        let mut world = Self {
            profile,
            now: 0,
            order: 0,
            schedule: BinaryHeap::new(),
            store: Memory::new(profile.marks),
            transactions: BTreeMap::new(),
            next_transaction: 1,
            store_is_away_until: 0,
            failover: Failover::default(),
            clients: Vec::new(),
            actors: Vec::new(),
            next_waiter: 0,
            beliefs: BTreeMap::new(),
            evicted: BTreeMap::new(),
            asked: BTreeMap::new(),
            informed: BTreeSet::new(),
            must_be_informed: Vec::new(),
            exported: Vec::new(),
            exported_at: BTreeMap::new(),
            deliveries: Vec::new(),
            handed_back: BTreeSet::new(),
            crowd: BTreeSet::new(),
            unwanted: Vec::new(),
            releasing: BTreeMap::new(),
            kept: Vec::new(),
            fenced: BTreeMap::new(),
            fenced_until: BTreeMap::new(),
            tokens: BTreeMap::new(),
            idle_since: BTreeMap::new(),
            contended_at: BTreeMap::new(),
            owners: (1..=2).map(|n| owner(seed.wrapping_mul(7) + n)).collect(),
            unanswered: SharedError(Arc::new(Error::Closed)),
            blocked: SharedError(Arc::new(Error::Database {
                attempted: "wait for a row",
                source: sqlx::Error::Protocol("the row is locked".into()),
            })),
            summary: Summary::default(),
            violation: None,
            tells,
            random: Random::new(random.next()),
        };
        for client in 0..profile.clients as usize {
            let drift = random.below(profile.drift * 2_000 + 1) as i64 - profile.drift as i64 * 1_000;
            let offset = SECOND + random.below(1_000 * SECOND);
            let id = ClientId::from_u128(u128::from(seed) << 64 | (client as u128 + 1) << 32);
            world.clients.push(Client {
                engine: None,
                id,
                life: 0,
                paused_until: 0,
                disturbed_at: 0,
                offset,
                drift,
                requests: BTreeMap::new(),
                is_cut: false,
                sent: (0, 0),
                connection: 0,
                wake_at: None,
            });
            world.start(client);
            for _ in 0..=world.random.below(3) {
                let left = 2 + world.random.below(4) as u32;
                let actor = world.actors.len();
                world.actors.push(Actor { client, state: ActorState::Idle, turn: 0, left, waits_for_others_at: 0 });
                let at = world.random.below(2 * SECOND);
                world.at(at, WorldEvent::Actor { actor, turn: 0 });
            }
        }
        if !profile.is_quick() {
            world.at(50 * MILLISECOND, WorldEvent::Fault);
        }
        if profile.sweeps {
            world.at(SWEEP_AT, WorldEvent::Sweep);
        }
        world
    }

    /// Runs until no caller is left. `Err`: the violated invariant.
    pub(super) fn run(mut self) -> Result<Summary, String> {
        let mut quiet_since = None;
        while let Some(Reverse(Scheduled { at, event, .. })) = self.schedule.pop() {
            self.now = at;
            let is_done = self.actors.iter().all(|actor| actor.left == 0 && matches!(actor.state, ActorState::Idle));
            let is_quiet = is_done && self.now > FAULTS_END;
            quiet_since = if is_quiet { quiet_since.or(Some(self.now)) } else { None };
            if quiet_since.is_some_and(|since| self.now > since + FLUSH) {
                break;
            }
            self.dispatch(event);
            self.check_waits();
            self.check_losses();
            self.check_idle();
            self.note_contention();
            self.check_reentry();
            self.check_reported_waits();
            if self.now > LONGEST_RUN {
                self.violate("the run does not come to an end".into());
            }
            if let Some(violation) = self.violation {
                return Err(violation);
            }
        }
        self.check_residue();
        self.violation.map_or(Ok(self.summary), Err)
    }

    // ---- time

    fn at(&mut self, at: u64, event: WorldEvent) {
        self.order += 1;
        let at = at.max(self.now);
        self.schedule.push(Reverse(Scheduled { at, order: self.order, event }));
    }

    fn after(&mut self, delay: u64, event: WorldEvent) {
        self.at(self.now + delay, event);
    }

    /// Chooses how long a message is in transit.
    fn delay(&mut self) -> u64 {
        let usual = self.random.range(100_000..3 * MILLISECOND);
        if self.faults() && self.random.permille(10) { usual + self.random.below(600 * MILLISECOND) } else { usual }
    }

    fn faults(&self) -> bool {
        !self.profile.is_calm() && self.now < FAULTS_END
    }

    fn chance(&mut self, permille: u64) -> bool {
        self.now < FAULTS_END && self.random.permille(permille)
    }

    fn store_clock(&self) -> i64 {
        store_clock_at(self.now)
    }

    fn tell(&self, what: impl FnOnce() -> String) {
        if self.tells {
            println!("{:>10.3} ms  {}", self.now as f64 / 1e6, what());
        }
    }

    fn violate(&mut self, what: String) {
        self.tell(|| format!("VIOLATION: {what}"));
        self.violation.get_or_insert(format!("at {:.3} s: {what}", self.now as f64 / 1e9));
    }

    // ---- events

    /// Records that a fault may delay a client until `until`.
    fn disturb(&mut self, client: usize, until: u64) {
        let disturbed_at = &mut self.clients[client].disturbed_at;
        *disturbed_at = until.max(*disturbed_at);
    }

    fn disturb_all(&mut self, until: u64) {
        (0..self.clients.len()).for_each(|client| self.disturb(client, until));
    }

    fn dispatch(&mut self, event: WorldEvent) {
        let client = match &event {
            WorldEvent::Reply { client, .. }
            | WorldEvent::Overdue { client, .. }
            | WorldEvent::Wake { client, .. }
            | WorldEvent::Notify { client, .. } => Some(*client),
            WorldEvent::Actor { actor, .. } => Some(self.actors[*actor].client),
            _ => None,
        };
        if let Some(paused_until) =
            client.map(|client| self.clients[client].paused_until).filter(|until| *until > self.now)
        {
            return self.at(paused_until, event);
        }
        match event {
            WorldEvent::Arrive { client, life, request, attempt, body, since } => {
                self.arrive(client, life, request, attempt, body, since)
            }
            WorldEvent::Commit { transaction } => self.commit(transaction),
            WorldEvent::Reply { client, life, request, attempt, response } => {
                self.reply(client, life, request, attempt, response)
            }
            WorldEvent::Overdue { client, life, request, attempt } => self.overdue(client, life, request, attempt),
            WorldEvent::Wake { client, life } => {
                if self.clients[client].life == life && self.clients[client].wake_at == Some(self.now) {
                    self.clients[client].wake_at = None;
                }
                self.feed(client, life, Input::Tick);
            }
            WorldEvent::Actor { actor, turn } => self.act(actor, turn),
            WorldEvent::Notify { client, life, connection, notification } => {
                if self.clients[client].connection == connection {
                    self.feed(client, life, Input::Notified(notification));
                }
            }
            WorldEvent::Evict { name, token } => drop(self.evict_token(&name, token)),
            WorldEvent::Ask { name } => self.ask(&name),
            WorldEvent::EndFence { transaction } => self.end_fence(transaction),
            WorldEvent::Unlock { transaction } => self.store.unlock(transaction),
            WorldEvent::Restart { client } => self.start(client),
            WorldEvent::CheckEvicted { client, life, lease, at } => {
                let believes = self
                    .beliefs
                    .get(&(client, lease))
                    .is_some_and(|belief| belief.is_renewed && belief.until > self.now);
                let is_told = self.clients[client].life != life || !believes;
                if !is_told && self.clients[client].disturbed_at < at && self.store_is_away_until < at {
                    self.violate(format!(
                        "client {client} did not notice an eviction within {} ms",
                        NOTICED_WITHIN / MILLISECOND
                    ));
                }
            }
            WorldEvent::CheckInformed { client, life, lease, at } => self.check_informed(client, life, lease, at),
            WorldEvent::CheckTtl { client, life, lease, at } => self.check_ttl(client, life, lease, at),
            WorldEvent::CheckForgotten { client, life, at } => self.check_forgotten(client, life, at),
            WorldEvent::Fault => self.fault(),
            WorldEvent::Sweep => self.sweep(),
        }
    }
}

/// Returns the store's clock at a moment, in microseconds.
fn store_clock_at(moment: u64) -> i64 {
    EPOCH + (moment / MICROSECOND) as i64
}

fn owner(n: u64) -> Owner {
    format!("{n:032x}").parse().expect("an owner")
}

/// Describes a request in a few words.
fn describe(body: &Request) -> String {
    match body {
        Request::Acquire(claim) => format!("acquire {} as {}", claim.name, claim.id),
        Request::Enqueue(entries) => {
            let of = |entry: &crate::protocol::Enqueue| {
                format!(" {} as {} aged {:?}", entry.claim.name, entry.claim.id, entry.age)
            };
            format!("enqueue{}", entries.iter().map(of).collect::<String>())
        }
        other => format!("{other:?}"),
    }
}
