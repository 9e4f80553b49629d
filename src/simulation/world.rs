//! Several engines, one store, callers and faults, in virtual time.

mod failover;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::checker::{self, Belief};
use super::profile::Profile;
use crate::backend::memory::{End, Key, Memory, Prepared, TransactionId};
use crate::clock::Moment;
use crate::engine::{
    Action, Amendment, Answer, Engine, Event, Exported, Failure, Grant, LeaseKey, NotAmended, Patience, Refusal,
    RequestId, Verdict, WaiterId, Wish,
};
use crate::error::{Error, LossCause};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{
    Amended, ClientId, EntryState, Holder, HolderChange, LeaseId, Mode, Released, Request, Response,
};
use crate::random::Random;
use crate::token::FencingToken;
use failover::Failover;

const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MILLISECOND;

/// The faults of a run end then.
const FAULTS_END: u64 = 10 * SECOND;
/// Every wait without a deadline ends so long after the last fault.
const SERVED_WITHIN: u64 = 40 * SECOND;
/// A run ends so long after the last caller has.
const FLUSH: u64 = 100 * SECOND;
const LONGEST_RUN: u64 = 400 * SECOND;
/// The store's clock at the beginning, in microseconds.
const EPOCH: i64 = 1_700_000_000_000_000;
/// How long an attempt to send a request waits for its answer, and how many attempts there are.
const ATTEMPT: u64 = 400 * MILLISECOND;
const ATTEMPTS: u32 = 3;
/// The longest TTL, fence and `keep_for` of the callers, a grant to a client that has died, and an entry that joins late.
const IDLE_FOR: u64 = 5 * SECOND + 3 * SECOND + 1_500 * MILLISECOND + 2 * 3 * SECOND + SECOND;
/// How long a statement waits for a locked row.
const LOCK_WAIT: u64 = SECOND;
/// An eviction is told to its holder within this time, if nothing disturbs its client.
const TOLD_WITHIN: u64 = 2_500 * MILLISECOND;

/// What came of runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    grants: u64,
    lost: u64,
    refused: u64,
    timeouts: u64,
    failed: u64,
    released: u64,
    unknown: u64,
    fenced: u64,
    statements: u64,
    evicted: u64,
}

impl Summary {
    pub(super) fn add(&mut self, other: &Self) {
        self.grants += other.grants;
        self.lost += other.lost;
        self.refused += other.refused;
        self.timeouts += other.timeouts;
        self.failed += other.failed;
        self.released += other.released;
        self.unknown += other.unknown;
        self.fenced += other.fenced;
        self.statements += other.statements;
        self.evicted += other.evicted;
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { grants, lost, refused, timeouts, failed, released, unknown, fenced, statements, evicted } = self;
        write!(
            f,
            "{grants} grants, {released} releases ({unknown} unknown), {lost} lost, {evicted} evicted, {refused} refused, {timeouts} timed \
             out, {failed} failed, {fenced} fenced transactions, {statements} statements"
        )
    }
}

/// Something that happens at a moment.
#[derive(Debug)]
enum Happening {
    /// A request arrives at the store.
    Arrive {
        client: usize,
        life: u32,
        request: RequestId,
        attempt: u32,
        body: Request,
        since: u64,
    },
    Commit {
        transaction: TransactionId,
    },
    Reply {
        client: usize,
        life: u32,
        request: RequestId,
        response: Result<Response, ()>,
    },
    /// An attempt was not answered in time.
    Overdue {
        client: usize,
        life: u32,
        request: RequestId,
        attempt: u32,
    },
    Wake {
        client: usize,
        life: u32,
    },
    Actor {
        actor: usize,
        turn: u32,
    },
    /// A client hears that it may have been granted a name.
    Notify {
        client: usize,
        life: u32,
        name: LockName,
    },
    EndFence {
        transaction: TransactionId,
    },
    Unlock {
        transaction: TransactionId,
    },
    Restart {
        client: usize,
    },
    CheckEvicted {
        client: usize,
        life: u32,
        lease: LeaseKey,
        at: u64,
    },
    CheckForgotten {
        client: usize,
        life: u32,
        at: u64,
    },
    Fault,
}

struct Scheduled {
    at: u64,
    order: u64,
    happening: Happening,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

struct Pending {
    body: Request,
    sent_at: Moment,
    attempts: u32,
    life: u32,
    /// Its connection was found dead before it was sent.
    is_repeated: bool,
}

struct Client {
    engine: Option<Engine>,
    id: ClientId,
    life: u32,
    paused_until: u64,
    /// The latest moment at which something may have delayed it.
    disturbed_at: u64,
    offset: u64,
    /// By how many millionths its clock is fast.
    drift: i64,
    requests: BTreeMap<RequestId, Pending>,
    /// The connection of its heartbeat is dead.
    is_cut: bool,
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

#[derive(Debug)]
enum ActorState {
    Idle,
    Waiting {
        waiter: WaiterId,
        name: LockName,
        owner: Owner,
        mode: Mode,
        is_kept: bool,
        since: u64,
        is_try: bool,
        patient: bool,
        /// The exported lease that it resumes.
        resumes: Option<Exported>,
    },
    /// It waits for a change of its lease.
    Changing {
        lease: LeaseKey,
        amendment: Amendment,
    },
    Holding {
        lease: LeaseKey,
        id: LeaseId,
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
    happenings: BinaryHeap<Reverse<Scheduled>>,
    store: Memory,
    transactions: BTreeMap<TransactionId, (Prepared, usize, u32, RequestId, bool)>,
    next_transaction: TransactionId,
    store_is_away_until: u64,
    failover: Failover,
    clients: Vec<Client>,
    actors: Vec<Actor>,
    next_waiter: u64,
    beliefs: BTreeMap<(usize, LeaseKey), Belief>,
    evicted: BTreeMap<(usize, LeaseKey), u64>,
    exported: Vec<(Exported, LockName, Owner, Mode)>,
    /// Exported leases that nobody has taken over, and when they were exported.
    resumable: BTreeMap<LeaseId, u64>,
    handed_back: std::collections::BTreeSet<(usize, LeaseKey)>,
    /// Resumed leases that their callers are about to get.
    delivered: Vec<(usize, LeaseKey, Exported)>,
    releasing: BTreeMap<(usize, LeaseKey), (LockName, FencingToken, usize, i64)>,
    fenced: BTreeMap<TransactionId, Fenced>,
    newest: BTreeMap<LockName, i64>,
    idle_since: BTreeMap<&'static str, u64>,
    owners: Vec<Owner>,
    failure: Failure,
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
            happenings: BinaryHeap::new(),
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
            exported: Vec::new(),
            resumable: BTreeMap::new(),
            delivered: Vec::new(),
            handed_back: std::collections::BTreeSet::new(),
            releasing: BTreeMap::new(),
            fenced: BTreeMap::new(),
            newest: BTreeMap::new(),
            idle_since: BTreeMap::new(),
            owners: (1..=2).map(|n| owner(seed.wrapping_mul(7) + n)).collect(),
            failure: Failure(Arc::new(Error::Closed)),
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
                wake_at: None,
            });
            world.start(client);
            for _ in 0..=world.random.below(3) {
                let left = 2 + world.random.below(4) as u32;
                let actor = world.actors.len();
                world.actors.push(Actor { client, state: ActorState::Idle, turn: 0, left });
                let at = world.random.below(2 * SECOND);
                world.at(at, Happening::Actor { actor, turn: 0 });
            }
        }
        if !profile.is_quick() {
            world.at(50 * MILLISECOND, Happening::Fault);
        }
        world
    }

    /// Runs until everything is quiet. `Err`: what was violated.
    pub(super) fn run(mut self) -> Result<Summary, String> {
        let mut quiet_since = None;
        while let Some(Reverse(Scheduled { at, happening, .. })) = self.happenings.pop() {
            self.now = at;
            let is_done = self.actors.iter().all(|actor| actor.left == 0 && matches!(actor.state, ActorState::Idle));
            let is_quiet = is_done && self.now > FAULTS_END;
            quiet_since = if is_quiet { quiet_since.or(Some(self.now)) } else { None };
            if quiet_since.is_some_and(|since| self.now > since + FLUSH) {
                break;
            }
            self.happen(happening);
            self.check_waits();
            self.check_idle();
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

    fn at(&mut self, at: u64, happening: Happening) {
        self.order += 1;
        let at = at.max(self.now);
        self.happenings.push(Reverse(Scheduled { at, order: self.order, happening }));
    }

    fn after(&mut self, delay: u64, happening: Happening) {
        self.at(self.now + delay, happening);
    }

    /// How long a message is under way.
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
        EPOCH + (self.now / 1000) as i64
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

    // ---- what happens

    /// Notes that something may delay a client until then.
    fn disturb(&mut self, client: usize, until: u64) {
        let disturbed_at = &mut self.clients[client].disturbed_at;
        *disturbed_at = until.max(*disturbed_at);
    }

    fn disturb_all(&mut self, until: u64) {
        (0..self.clients.len()).for_each(|client| self.disturb(client, until));
    }

    fn happen(&mut self, happening: Happening) {
        let client = match &happening {
            Happening::Reply { client, .. }
            | Happening::Overdue { client, .. }
            | Happening::Wake { client, .. }
            | Happening::Notify { client, .. } => Some(*client),
            Happening::Actor { actor, .. } => Some(self.actors[*actor].client),
            _ => None,
        };
        if let Some(paused_until) =
            client.map(|client| self.clients[client].paused_until).filter(|until| *until > self.now)
        {
            return self.at(paused_until, happening);
        }
        match happening {
            Happening::Arrive { client, life, request, attempt, body, since } => {
                self.arrive(client, life, request, attempt, body, since)
            }
            Happening::Commit { transaction } => self.commit(transaction),
            Happening::Reply { client, life, request, response } => self.reply(client, life, request, response),
            Happening::Overdue { client, life, request, attempt } => self.overdue(client, life, request, attempt),
            Happening::Wake { client, life } => {
                if self.clients[client].life == life && self.clients[client].wake_at == Some(self.now) {
                    self.clients[client].wake_at = None;
                }
                self.event(client, life, Event::Tick);
            }
            Happening::Actor { actor, turn } => self.act(actor, turn),
            Happening::Notify { client, life, name } => self.event(client, life, Event::Notified { name }),
            Happening::EndFence { transaction } => self.end_fence(transaction),
            Happening::Unlock { transaction } => self.store.unlock(transaction),
            Happening::Restart { client } => self.start(client),
            Happening::CheckEvicted { client, life, lease, at } => {
                let believes =
                    self.beliefs.get(&(client, lease)).is_some_and(|belief| belief.is_kept && belief.until > self.now);
                let is_told = self.clients[client].life != life || !believes;
                if !is_told && self.clients[client].disturbed_at < at && self.store_is_away_until < at {
                    self.violate(format!(
                        "client {client} was not told of an eviction within {} ms",
                        TOLD_WITHIN / MILLISECOND
                    ));
                }
            }
            Happening::CheckForgotten { client, life, at } => self.check_forgotten(client, life, at),
            Happening::Fault => self.fault(),
        }
    }

    fn start(&mut self, client: usize) {
        let (first, life) = (u128::from(self.random.next()) << 64, self.clients[client].life + 1);
        let state = &mut self.clients[client];
        (state.life, state.wake_at) = (life, None);
        state.id = ClientId::from_u128((first >> 32) + client as u128);
        state.engine = Some(Engine::new(state.id, "simulated".into(), LeaseId::from_u128(first), self.profile.marks));
        for actor in 0..self.actors.len() {
            if self.actors[actor].client == client {
                self.rest(actor);
            }
        }
    }

    fn event(&mut self, client: usize, life: u32, event: Event) {
        if self.clients[client].life != life {
            return;
        }
        let now = self.clients[client].local(self.now);
        let Some(engine) = &mut self.clients[client].engine else {
            return;
        };
        let actions = engine.handle(now, event);
        let wakes_at = engine.wakes_at();
        let is_over = |grant: &Grant| engine.deadline(grant.lease).is_some_and(|deadline| deadline <= now);
        let late = actions.iter().find_map(|action| match action {
            Action::Granted { grant, .. } if is_over(grant) => Some(format!("{:?} of {}", grant.lease, grant.name)),
            _ => None,
        });
        if let Some(late) = late {
            self.violate(format!("client {client} is granted {late}, which has ended already"));
        }
        for action in actions {
            self.act_for(client, action);
        }
        let state = &self.clients[client];
        if let Some(at) = wakes_at.map(|moment| state.global(moment).max(self.now) + 1_000)
            && state.wake_at.is_none_or(|before| before > at || before <= self.now)
        {
            self.clients[client].wake_at = Some(at);
            self.at(at, Happening::Wake { client, life });
        }
        self.believe(client);
        while let Some((client, lease, exported)) = self.delivered.pop() {
            self.deliver(client, lease, exported);
        }
    }

    /// A caller gets a lease that it resumes, or has gone.
    fn deliver(&mut self, client: usize, lease: LeaseKey, exported: Exported) {
        let life = self.clients[client].life;
        if !self.random.permille(150) {
            self.resumable.remove(&exported.id);
            return self.event(client, life, Event::Delivered { lease, exported });
        }
        let holds = |actor: &Actor| {
            actor.client == client && matches!(actor.state, ActorState::Holding { lease: l, .. } if l == lease)
        };
        let Some(actor) = self.actors.iter().position(holds) else {
            return;
        };
        self.tell(|| format!("client {client} hands {lease:?} back: nobody waits for it"));
        self.evicted.remove(&(client, lease));
        let Some(belief) = self.beliefs.remove(&(client, lease)) else {
            return;
        };
        let is_alone = belief.mode == Mode::Exclusive;
        self.exported.push((exported, belief.name.clone(), belief.owner, belief.mode));
        if is_alone {
            let asked_at = self.store_clock();
            self.releasing.insert((client, lease), (belief.name, belief.token, actor, asked_at));
        }
        self.handed_back.insert((client, lease));
        self.rest(actor);
        self.event(client, life, Event::HandBack { lease, exported });
    }

    /// Takes in how far the leases of a client reach now, and checks that no two holders believe in one name.
    fn believe(&mut self, client: usize) {
        let Some(engine) = &self.clients[client].engine else {
            return;
        };
        let leases: Vec<LeaseKey> = self
            .beliefs
            .range((client, LeaseKey(0))..=(client, LeaseKey(u64::MAX)))
            .map(|((_, lease), _)| *lease)
            .collect();
        for lease in leases {
            let until = engine.deadline(lease).map_or(0, |deadline| self.clients[client].global(deadline));
            if let Some(belief) = self.beliefs.get_mut(&(client, lease)) {
                belief.until = until;
            }
        }
        let beliefs = self.beliefs.iter().filter(|(key, _)| self.is_undisputed(key)).map(|(_, belief)| belief);
        if let Err(violation) = checker::exclusion(self.now, beliefs) {
            self.violate(violation);
        }
    }

    /// Whether nothing has taken a lease from its holder that the holder hears of later: an eviction or a failover.
    fn is_undisputed(&self, key: &(usize, LeaseKey)) -> bool {
        !self.evicted.contains_key(key) && !self.failover.may_overlap(key, self.now)
    }

    fn act_for(&mut self, client: usize, action: Action) {
        match action {
            Action::Send { request, body } => {
                let life = self.clients[client].life;
                self.tell(|| format!("client {client} sends {}: {}", request.0, describe(&body)));
                let sent_at = self.clients[client].local(self.now);
                let is_beat = matches!(body, Request::Register { .. } | Request::Beat { .. });
                let is_repeated = is_beat && std::mem::take(&mut self.clients[client].is_cut);
                let pending = Pending { body, sent_at, attempts: 0, life, is_repeated };
                self.clients[client].requests.insert(request, pending);
                self.attempt(client, request);
            }
            Action::Waits { waiter } => self.tell(|| format!("client {client} lets {waiter:?} wait")),
            Action::Granted { waiter, grant } => {
                self.tell(|| format!("client {client} grants {waiter:?}: {:?}, token {}", grant.lease, grant.token));
                self.granted(client, waiter, &grant);
            }
            Action::Refused { waiter, refusal } => {
                self.tell(|| format!("client {client} refuses {waiter:?}: {refusal:?}"));
                self.refused(client, waiter, &refusal);
            }
            Action::Released { lease, verdict } if self.handed_back.remove(&(client, lease)) => {
                self.tell(|| format!("client {client} has handed {lease:?} back: {verdict:?}"));
                self.releasing.remove(&(client, lease));
            }
            Action::Released { lease, verdict } => {
                self.tell(|| format!("client {client} released {lease:?}: {verdict:?}"));
                self.released(client, lease, &verdict);
            }
            Action::Lost { lease, cause } => {
                self.tell(|| format!("client {client} lost {lease:?}: {cause:?}"));
                self.summary.lost += 1;
                self.evicted.remove(&(client, lease));
                let was_kept = self.beliefs.remove(&(client, lease)).is_some_and(|belief| belief.is_kept);
                if self.profile.is_calm() && was_kept && cause != LossCause::MaxHold {
                    self.violate(format!("client {client} lost a lease for nothing: {cause:?}"));
                }
                let holder = |actor: &Actor| {
                    let held = match actor.state {
                        ActorState::Holding { lease, .. } | ActorState::Changing { lease, .. } => Some(lease),
                        _ => None,
                    };
                    actor.client == client && held == Some(lease)
                };
                if let Some(actor) = self.actors.iter().position(holder) {
                    self.rest(actor);
                }
            }
            Action::Amended { lease, result } => {
                self.tell(|| format!("client {client} has changed {lease:?}: {result:?}"));
                self.amended(client, lease, &result);
            }
            Action::Exported { lease, .. } if self.handed_back.remove(&(client, lease)) => {}
            Action::Exported { lease, exported } => {
                self.tell(|| format!("client {client} exports {lease:?}: {exported:?}"));
                self.was_exported(client, lease, exported);
            }
            Action::Closed => {
                self.tell(|| format!("client {client} has shut down"));
                self.stop(client);
            }
        }
    }

    // ---- requests

    fn attempt(&mut self, client: usize, request: RequestId) {
        let life = self.clients[client].life;
        let Some(pending) = self.clients[client].requests.get_mut(&request) else {
            return;
        };
        pending.attempts += 1;
        let (attempt, body) = (pending.attempts, pending.body.clone());
        self.after(ATTEMPT, Happening::Overdue { client, life, request, attempt });
        if self.chance(self.profile.lost_requests) {
            self.disturb(client, self.now);
            return self.tell(|| format!("  the request {} is lost", request.0));
        }
        let mut delay = self.delay();
        if self.chance(self.profile.late_requests) {
            delay += self.random.below(15 * SECOND);
            self.disturb(client, self.now + delay);
        }
        let since = self.now + delay;
        self.after(delay, Happening::Arrive { client, life, request, attempt, body, since });
    }

    fn overdue(&mut self, client: usize, life: u32, request: RequestId, attempt: u32) {
        let Some(pending) =
            self.clients[client].requests.get(&request).filter(|p| p.life == life && p.attempts == attempt)
        else {
            return;
        };
        let is_last = pending.attempts >= ATTEMPTS;
        self.disturb(client, self.now);
        if !is_last {
            return self.attempt(client, request);
        }
        self.answer(client, life, request, Err(self.failure.clone()));
    }

    fn answer(&mut self, client: usize, life: u32, request: RequestId, result: Result<Response, Failure>) {
        let Some(pending) = self.clients[client].requests.remove(&request) else {
            return;
        };
        let may_linger = pending.attempts > 1;
        let is_repeated = may_linger || pending.is_repeated;
        let answer = Answer { sent_at: pending.sent_at, may_linger, is_repeated, result };
        self.event(client, life, Event::Answer { request, answer });
    }

    fn arrive(&mut self, client: usize, life: u32, request: RequestId, attempt: u32, body: Request, since: u64) {
        if self.now < self.store_is_away_until {
            return;
        }
        let transaction = self.next_transaction();
        self.summary.statements += 1;
        let clock = self.store_clock();
        match self.store.prepare(transaction, clock, &body) {
            Err(_) if self.now - since < LOCK_WAIT => {
                let pause = self.random.range(MILLISECOND..10 * MILLISECOND);
                self.after(pause, Happening::Arrive { client, life, request, attempt, body, since });
            }
            Err(_) => {
                self.disturb(client, self.now);
                self.tell(|| format!("  {} waits for a locked row too long", request.0));
                let delay = self.delay();
                self.after(delay, Happening::Reply { client, life, request, response: Err(()) });
            }
            Ok(prepared) => {
                self.check_takeover(client, &body, &prepared, clock);
                self.tell(|| format!("  {} takes effect: {:?}", request.0, prepared.response));
                let is_rolled_back = self.chance(self.profile.rollbacks);
                let takes = if self.chance(self.profile.slow_commits) {
                    self.random.below(6 * SECOND)
                } else {
                    self.random.below(300_000)
                };
                if is_rolled_back || takes > MILLISECOND {
                    self.disturb_all(self.now + takes);
                }
                self.transactions.insert(transaction, (prepared, client, life, request, is_rolled_back));
                self.after(takes, Happening::Commit { transaction });
            }
        }
    }

    fn commit(&mut self, transaction: TransactionId) {
        let Some((prepared, client, life, request, is_rolled_back)) = self.transactions.remove(&transaction) else {
            return;
        };
        if is_rolled_back {
            self.tell(|| format!("  {} is rolled back, without a reply", request.0));
            return self.store.unlock(transaction);
        }
        let clock = self.store_clock();
        let response = self.store.commit(transaction, clock, prepared);
        self.check_fences();
        if let Some(pending) = self.clients[client].requests.get(&request) {
            self.notify(&pending.body.clone(), &response);
        }
        if self.chance(self.profile.lost_replies) {
            self.disturb(client, self.now);
            return self.tell(|| format!("  the reply to {} is lost", request.0));
        }
        let delay = self.delay();
        self.after(delay, Happening::Reply { client, life, request, response: Ok(response) });
    }

    /// Tells clients of a grant, whether it was to them or not. Some notifications are lost.
    fn notify(&mut self, body: &Request, response: &Response) {
        let name = match (body, response) {
            (Request::Release(release), Response::Released(Released::ToEntry(_))) => &release.name,
            (Request::Transition(transition), Response::Transitioned(Some(_))) => &transition.name,
            _ => return,
        };
        for client in 0..self.clients.len() {
            if self.random.permille(300) {
                let (life, delay) = (self.clients[client].life, self.delay());
                self.after(delay, Happening::Notify { client, life, name: name.clone() });
            }
        }
    }

    fn reply(&mut self, client: usize, life: u32, request: RequestId, response: Result<Response, ()>) {
        if self.clients[client].requests.get(&request).is_none_or(|pending| pending.life != life) {
            return;
        }
        let failure = self.failure.clone();
        self.answer(client, life, request, response.map_err(|()| failure));
    }

    fn next_transaction(&mut self) -> TransactionId {
        self.next_transaction += 1;
        self.next_transaction
    }

    // ---- callers

    fn act(&mut self, actor: usize, turn: u32) {
        if self.actors[actor].turn != turn {
            return;
        }
        let client = self.actors[actor].client;
        let life = self.clients[client].life;
        match self.actors[actor].state {
            ActorState::Idle => self.wish(actor),
            // It gives up.
            ActorState::Waiting { waiter, .. } => {
                self.tell(|| format!("client {client} cancels {waiter:?}"));
                self.rest(actor);
                self.event(client, life, Event::Cancel { waiter });
            }
            ActorState::Holding { lease, id, releases_at, fences } => {
                if fences {
                    self.fence(actor, lease, id, releases_at);
                } else if self.chance_of_change() {
                    self.change(actor, lease);
                } else {
                    self.release(actor, lease);
                }
            }
            ActorState::Releasing | ActorState::Changing { .. } => {}
        }
    }

    fn wish(&mut self, actor: usize) {
        let client = self.actors[actor].client;
        if self.actors[actor].left == 0 || self.clients[client].engine.is_none() {
            return;
        }
        self.actors[actor].left -= 1;
        if !self.exported.is_empty() && self.random.permille(700) {
            return self.resume(actor);
        }
        let number = self.random.below(self.profile.names);
        let name = LockName::new(["a", "b"][number as usize]).expect("a name");
        let reenters = self.random.permille(self.profile.given_owners);
        let owner = if reenters { self.owners[self.random.below(2) as usize] } else { owner(self.random.next()) };
        // Permits and shared leases of one name do not know of each other's limits, and permits are not entered again.
        let mode = if self.random.permille(self.profile.shared) && !(number == 1 && reenters) {
            let units = 1 + self.random.below(2) as u32;
            if number == 0 { Mode::READ } else { Mode::Shared { units, permits: 3 } }
        } else {
            Mode::Exclusive
        };
        let ttl = [1_000, 2_000, 5_000][self.random.below(3) as usize];
        let now = self.clients[client].local(self.now);
        let kind = self.random.below(10);
        let patience = match kind {
            0..3 => Patience::Try(now + Duration::from_secs(5)),
            3 => Patience::Wait(Some(now + Duration::from_millis(self.random.range(20..2_000)))),
            _ => Patience::Wait(None),
        };
        self.next_waiter += 1;
        let waiter = WaiterId(self.next_waiter);
        let is_kept = self.random.permille(850);
        let wish = Wish {
            name: name.clone(),
            owner,
            reenters,
            mode,
            ttl: Duration::from_millis(ttl),
            is_kept,
            max_hold: self.random.permille(100).then(|| Duration::from_millis(1_500)),
            label: "".into(),
            patience,
        };
        let text = format!("{name} {mode:?} ttl {ttl} {patience:?} kept {} reenters {reenters}", wish.is_kept);
        self.tell(|| format!("client {client} wants {waiter:?}: {text}"));
        let patient = patience == Patience::Wait(None);
        let (is_try, since) = (kind < 3, self.now);
        let resumes = None;
        self.actors[actor].state =
            ActorState::Waiting { waiter, name, owner, mode, is_kept, since, is_try, patient, resumes };
        self.actors[actor].turn += 1;
        if patient && self.random.permille(200) && self.now < FAULTS_END {
            let (turn, delay) = (self.actors[actor].turn, self.random.below(3 * SECOND));
            self.after(delay, Happening::Actor { actor, turn });
        }
        let life = self.clients[client].life;
        self.event(client, life, Event::Acquire { waiter, wish });
    }

    /// The actor has a pause before it wants something again.
    fn rest(&mut self, actor: usize) {
        self.actors[actor].state = ActorState::Idle;
        self.actors[actor].turn += 1;
        let (turn, pause) = (self.actors[actor].turn, self.random.below(1_500 * MILLISECOND));
        self.after(pause, Happening::Actor { actor, turn });
    }

    fn waiting(&self, client: usize, waiter: WaiterId) -> Option<usize> {
        let waits = |actor: &Actor| {
            actor.client == client && matches!(actor.state, ActorState::Waiting { waiter: w, .. } if w == waiter)
        };
        self.actors.iter().position(waits)
    }

    fn granted(&mut self, client: usize, waiter: WaiterId, grant: &Grant) {
        let Some(actor) = self.waiting(client, waiter) else {
            return self.violate(format!("client {client}: {waiter:?} is granted a name and does not wait"));
        };
        let ActorState::Waiting { name, owner, mode, is_kept, since, resumes, .. } = &self.actors[actor].state else {
            return;
        };
        let (name, owner, mode, is_kept, since, resumes) = (name.clone(), *owner, *mode, *is_kept, *since, *resumes);
        self.summary.grants += 1;
        match resumes {
            Some(exported) if exported.token != grant.token => {
                self.violate(format!("client {client} resumes {exported:?} of {name} and gets {}", grant.token));
            }
            Some(exported) => self.delivered.push((client, grant.lease, exported)),
            None => self.check_order(client, &name, mode, since),
        }
        // An owner may enter a holding that a failover has brought back.
        let is_back = self.failover.has_happened() && (resumes.is_some() || self.owners.contains(&owner));
        // A lease that enters a holding shares its eviction.
        let end = self.store.ends.get(&(name.clone(), grant.token.get()));
        let is_evicted = end.is_some_and(|(end, _)| *end == End::Evicted);
        let is_held_already =
            is_back || is_evicted || self.beliefs.values().any(|b| b.name == name && b.owner == owner);
        let newest = self.newest.entry(name.clone()).or_insert(0);
        if mode == Mode::Exclusive && !is_held_already && grant.token.get() < *newest {
            let newest = *newest;
            self.violate(format!("token {} of {name} is not greater than {newest}", grant.token));
        } else {
            *newest = (*newest).max(grant.token.get());
        }
        if is_evicted {
            self.evicted.insert((client, grant.lease), self.now);
        }
        // A lease that enters a holding without a heartbeat may end with it.
        let is_kept = is_kept && !self.owners.contains(&owner);
        let belief = Belief { client, name, owner, mode, token: grant.token, is_kept, until: 0 };
        self.beliefs.insert((client, grant.lease), belief);
        self.note_if_lost((client, grant.lease));
        let fences = self.random.permille(self.profile.fences);
        let held = self.random.below(2_500 * MILLISECOND);
        let held = match self.random.below(20) {
            0 => held * 3,
            1..6 => held,
            _ => held / 20,
        };
        let releases_at = self.now + held;
        self.actors[actor].state = ActorState::Holding { lease: grant.lease, id: grant.id, releases_at, fences };
        self.actors[actor].turn += 1;
        let (turn, at) = (self.actors[actor].turn, if fences { self.now + held / 2 } else { releases_at });
        self.at(at, Happening::Actor { actor, turn });
    }

    fn refused(&mut self, client: usize, waiter: WaiterId, refusal: &Refusal) {
        let Some(actor) = self.waiting(client, waiter) else {
            return self.violate(format!("client {client}: {waiter:?} is refused and does not wait"));
        };
        let ActorState::Waiting { is_try, patient, resumes, .. } = self.actors[actor].state else {
            return;
        };
        let exported_at = resumes.and_then(|exported| self.resumable.remove(&exported.id));
        match refusal {
            Refusal::Lost if exported_at.is_some_and(|at| self.now < at + SECOND) => {
                self.violate(format!("client {client}: {waiter:?} resumes {resumes:?}: refused as lost"));
            }
            Refusal::Held if !is_try => {
                self.violate(format!("client {client}: {waiter:?} waits, and is told that the name is held"))
            }
            Refusal::Timeout if patient => {
                self.violate(format!("client {client}: {waiter:?} would wait for ever, and timed out"))
            }
            Refusal::Failed(_) | Refusal::NoAnswer if self.profile.is_quick() => {
                self.violate(format!("client {client}: {waiter:?} fails for nothing: {refusal:?}"));
            }
            Refusal::Held => self.summary.refused += 1,
            Refusal::Timeout => self.summary.timeouts += 1,
            _ => self.summary.failed += 1,
        }
        self.rest(actor);
    }

    fn chance_of_change(&mut self) -> bool {
        self.random.permille(self.profile.changes)
    }

    /// The holder changes its lease instead of giving it back.
    fn change(&mut self, actor: usize, lease: LeaseKey) {
        let client = self.actors[actor].client;
        let life = self.clients[client].life;
        let Some(belief) = self.beliefs.get_mut(&(client, lease)) else {
            return self.rest(actor);
        };
        let lasts = Duration::from_millis(self.random.range(1_000..5_000));
        let to = FencingToken::new(belief.token.get() + 1_000).expect("positive");
        let amendment = match self.random.below(6) {
            0 => Amendment::Extend(lasts),
            1 if belief.mode == Mode::Exclusive && belief.name.as_str() == "a" => {
                // The store may let others share the name before the holder hears of it.
                belief.mode = Mode::READ;
                Amendment::Downgrade
            }
            2 if belief.mode == Mode::Exclusive => Amendment::Raise(to),
            _ => {
                self.tell(|| format!("client {client} is to export {lease:?}"));
                return self.event(client, life, Event::Export { lease });
            }
        };
        self.tell(|| format!("client {client} changes {lease:?}: {amendment:?}"));
        self.actors[actor].state = ActorState::Changing { lease, amendment };
        self.actors[actor].turn += 1;
        self.event(client, life, Event::Amend { lease, amendment });
    }

    fn amended(&mut self, client: usize, lease: LeaseKey, result: &Result<(), NotAmended>) {
        let changes = |actor: &Actor| {
            actor.client == client && matches!(actor.state, ActorState::Changing { lease: l, .. } if l == lease)
        };
        let Some(actor) = self.actors.iter().position(changes) else {
            return;
        };
        let ActorState::Changing { amendment, .. } = self.actors[actor].state else {
            return;
        };
        if let (Ok(()), Amendment::Raise(to), Some(belief)) =
            (result, amendment, self.beliefs.get_mut(&(client, lease)))
        {
            belief.token = to;
            let newest = self.newest.entry(belief.name.clone()).or_insert(0);
            *newest = (*newest).max(to.get());
            self.note_if_lost((client, lease));
        }
        if self.profile.is_quick() && matches!(result, Err(NotAmended::Failed(_))) {
            self.violate(format!("client {client}: {lease:?} is not changed: {result:?}"));
        }
        let id = LeaseId::from_u128(0);
        let releases_at = self.now + self.random.below(SECOND);
        self.actors[actor].state = ActorState::Holding { lease, id, releases_at, fences: false };
        self.actors[actor].turn += 1;
        let turn = self.actors[actor].turn;
        self.at(releases_at, Happening::Actor { actor, turn });
    }

    fn was_exported(&mut self, client: usize, lease: LeaseKey, exported: Option<Exported>) {
        let holds = |actor: &Actor| {
            actor.client == client && matches!(actor.state, ActorState::Holding { lease: l, .. } if l == lease)
        };
        let (actor, exported) = match (self.actors.iter().position(holds), exported) {
            (Some(actor), Some(exported)) => (actor, exported),
            (Some(actor), None) => return self.release(actor, lease),
            // It has just been lost.
            (None, None) => return,
            (None, Some(_)) => {
                return self.violate(format!("client {client}: {lease:?} is exported, and nobody has asked for that"));
            }
        };
        self.evicted.remove(&(client, lease));
        if let Some(belief) = self.beliefs.remove(&(client, lease)) {
            if belief.is_kept && self.profile.is_calm() {
                self.resumable.insert(exported.id, self.now);
            }
            self.exported.push((exported, belief.name, belief.owner, belief.mode));
        }
        self.rest(actor);
    }

    /// The actor takes over an exported lease. Seldom it can be resumed once more after that.
    fn resume(&mut self, actor: usize) {
        let client = self.actors[actor].client;
        let chosen = self.random.below(self.exported.len() as u64) as usize;
        let (exported, name, owner, mode) = if self.random.permille(100) {
            let again = self.exported[chosen].clone();
            self.resumable.remove(&again.0.id);
            again
        } else {
            self.exported.swap_remove(chosen)
        };
        self.next_waiter += 1;
        let waiter = WaiterId(self.next_waiter);
        let now = self.clients[client].local(self.now);
        let wish = Wish {
            name: name.clone(),
            owner,
            reenters: true,
            mode,
            ttl: Duration::from_millis(2_000),
            is_kept: true,
            max_hold: None,
            label: "".into(),
            patience: Patience::Try(now + Duration::from_secs(5)),
        };
        self.tell(|| format!("client {client} resumes {exported:?} of {name}, {mode:?}, as {waiter:?}"));
        let (since, resumes) = (self.now, Some(exported));
        let (is_kept, is_try, patient) = (false, true, false);
        self.actors[actor].state =
            ActorState::Waiting { waiter, name, owner, mode, is_kept, since, is_try, patient, resumes };
        self.actors[actor].turn += 1;
        let life = self.clients[client].life;
        self.event(client, life, Event::Resume { waiter, wish, exported });
    }

    fn release(&mut self, actor: usize, lease: LeaseKey) {
        let client = self.actors[actor].client;
        let life = self.clients[client].life;
        self.actors[actor].state = ActorState::Releasing;
        let Some(belief) = self.beliefs.remove(&(client, lease)) else {
            return self.rest(actor);
        };
        self.evicted.remove(&(client, lease));
        let asked_at = self.store_clock();
        self.releasing.insert((client, lease), (belief.name, belief.token, actor, asked_at));
        let keep_for = Duration::from_millis(if self.random.permille(100) { self.random.below(1_500) } else { 0 });
        self.tell(|| format!("client {client} gives {lease:?} back, kept for {keep_for:?}"));
        self.event(client, life, Event::Release { lease, keep_for });
    }

    fn released(&mut self, client: usize, lease: LeaseKey, verdict: &Verdict) {
        let Some((name, token, actor, asked_at)) = self.releasing.remove(&(client, lease)) else {
            return self.violate(format!("client {client}: {lease:?} was not being released"));
        };
        self.summary.released += 1;
        if matches!(verdict, Verdict::Unknown) {
            self.summary.unknown += 1;
        }
        let end = self.store.ends.get(&(name.clone(), token.get())).copied();
        let is_forgotten = self.failover.has_happened() && end.is_none();
        if let Err(violation) = checker::verdict(&name, token, verdict, end, asked_at)
            && !is_forgotten
        {
            self.violate(violation);
        }
        if self.profile.is_quick() && !matches!(verdict, Verdict::Kept | Verdict::Lost(LossCause::Expired)) {
            self.violate(format!("client {client}: the release of {name} is told {verdict:?}"));
        }
        self.rest(actor);
    }

    /// A caller begins a fenced transaction.
    fn fence(&mut self, actor: usize, lease: LeaseKey, id: LeaseId, releases_at: u64) {
        let client = self.actors[actor].client;
        self.actors[actor].state = ActorState::Holding { lease, id, releases_at, fences: false };
        let turn = self.actors[actor].turn;
        self.at(releases_at, Happening::Actor { actor, turn });
        let Some(Belief { name, owner, mode, token, until, .. }) = self.beliefs.get(&(client, lease)).cloned() else {
            return;
        };
        let transaction = self.next_transaction();
        match self.store.fence(transaction, &name, id, token) {
            Ok(true) => {
                self.summary.fenced += 1;
                self.tell(|| format!("client {client} begins a transaction fenced by token {token}"));
                self.fenced.insert(transaction, Fenced { name, owner, mode, token, client });
                let longest = if self.random.permille(200) { 3 * SECOND } else { 30 * MILLISECOND };
                let takes = self.random.below(longest);
                self.after(takes, Happening::EndFence { transaction });
            }
            Ok(false) if until > self.now && self.is_undisputed(&(client, lease)) => {
                self.violate(format!(
                    "client {client} believes in {name}, token {token}, and the store knows nothing of it"
                ));
            }
            Ok(false) | Err(_) => {}
        }
    }

    fn end_fence(&mut self, transaction: TransactionId) {
        self.store.unlock(transaction);
        if let Some(fenced) = self.fenced.remove(&transaction) {
            self.tell(|| format!("client {} ends a transaction fenced by token {}", fenced.client, fenced.token));
        }
    }

    // ---- faults

    fn fault(&mut self) {
        if self.now >= FAULTS_END {
            return;
        }
        self.after(50 * MILLISECOND, Happening::Fault);
        let client = self.random.below(self.profile.clients) as usize;
        if self.random.permille(self.profile.pauses) {
            let pause = self.random.range(200 * MILLISECOND..6 * SECOND);
            self.tell(|| format!("client {client} is paused for {} ms", pause / MILLISECOND));
            let until = self.clients[client].paused_until.max(self.now + pause);
            self.clients[client].paused_until = until;
            self.disturb(client, until);
        }
        if self.random.permille(self.profile.crashes) && self.clients[client].engine.is_some() {
            self.crash(client);
        }
        if self.random.permille(self.profile.closes) {
            self.tell(|| format!("client {client} shuts down"));
            let life = self.clients[client].life;
            self.event(client, life, Event::Close);
        }
        if self.random.permille(self.profile.outages) {
            let lasts = self.random.range(200 * MILLISECOND..4 * SECOND);
            self.tell(|| format!("the store is away for {} ms", lasts / MILLISECOND));
            self.store_is_away_until = self.now + lasts;
            let open: Vec<TransactionId> = self.transactions.keys().copied().collect();
            for transaction in open {
                if self.random.permille(500) {
                    self.transactions.remove(&transaction);
                    self.store.unlock(transaction);
                }
            }
        }
        self.may_fail_over();
        if self.random.permille(self.profile.strangers) {
            self.stranger(client);
        }
        if self.random.permille(self.profile.evictions) {
            self.evict();
        }
    }

    fn crash(&mut self, client: usize) {
        self.tell(|| format!("client {client} crashes"));
        self.stop(client);
    }

    /// Nothing is left of a client in its own process, and another takes its place.
    fn stop(&mut self, client: usize) {
        let state = &mut self.clients[client];
        state.engine = None;
        state.life += 1;
        state.requests.clear();
        self.beliefs.retain(|(c, _), _| *c != client);
        self.evicted.retain(|(c, _), _| *c != client);
        self.releasing.retain(|(c, _), _| *c != client);
        for actor in self.actors.iter_mut().filter(|actor| actor.client == client) {
            actor.state = ActorState::Idle;
            actor.turn += 1;
        }
        let pause = self.random.below(2 * SECOND);
        self.after(pause, Happening::Restart { client });
    }

    /// Somebody else locks a row for a while.
    fn stranger(&mut self, client: usize) {
        let names: Vec<LockName> = self.store.leases.keys().cloned().collect();
        let key = match self.random.below(3) {
            0 if !self.profile.is_calm() && self.store.clients.contains_key(&self.clients[client].id) => {
                Key::Client(self.clients[client].id)
            }
            _ if names.is_empty() => return,
            _ => Key::Lease(names[self.random.below(names.len() as u64) as usize].clone()),
        };
        let transaction = self.next_transaction();
        if self.store.lock(transaction, key.clone()) {
            let lasts = self.random.range(50 * MILLISECOND..1_500 * MILLISECOND);
            self.tell(|| format!("a stranger locks {key:?} for {} ms", lasts / MILLISECOND));
            self.disturb_all(self.now + lasts);
            self.after(lasts, Happening::Unlock { transaction });
        }
    }

    fn evict(&mut self) {
        if self.beliefs.is_empty() || self.now < self.store_is_away_until {
            return;
        }
        let chosen = self.random.below(self.beliefs.len() as u64) as usize;
        let Some(belief) = self.beliefs.values().nth(chosen).cloned() else {
            return;
        };
        let transaction = self.next_transaction();
        let clock = self.store_clock();
        let evict = Request::Evict { name: belief.name.clone(), token: belief.token };
        let Ok(prepared) = self.store.prepare(transaction, clock, &evict) else {
            return;
        };
        if prepared.response != Response::Evicted(Amended::Done) {
            return;
        }
        self.tell(|| format!("an operator evicts token {} of {}", belief.token, belief.name));
        self.summary.evicted += 1;
        self.store.commit(transaction, clock, prepared);
        let ended: Vec<(usize, LeaseKey)> = self
            .beliefs
            .iter()
            .filter(|(_, b)| b.name == belief.name && b.token == belief.token)
            .map(|(key, _)| *key)
            .collect();
        for (client, lease) in ended {
            self.evicted.insert((client, lease), self.now);
            let life = self.clients[client].life;
            self.after(TOLD_WITHIN, Happening::CheckEvicted { client, life, lease, at: self.now });
        }
        self.check_fences();
    }

    // ---- checks

    /// No other owner is granted a name while a transaction is open that its holder has fenced.
    fn check_fences(&mut self) {
        let excludes = |fenced: &Fenced, owner: Option<Owner>, mode: Mode| {
            owner.is_some_and(|owner| owner != fenced.owner)
                && (mode == Mode::Exclusive || fenced.mode == Mode::Exclusive)
        };
        let is_broken = |fenced: &&Fenced| {
            let row = self.store.leases.get(&fenced.name).filter(|row| matches!(row.holder, Holder::Lease(_)));
            let mut entries =
                self.store.entries.iter().filter(|((name, _), _)| *name == fenced.name).map(|(_, entry)| entry);
            row.is_some_and(|row| excludes(fenced, row.owner, Mode::Exclusive))
                || entries.any(|entry| entry.state != EntryState::Waiting && excludes(fenced, entry.owner, entry.mode))
        };
        if let Some(Fenced { name, token, .. }) = self.fenced.values().find(is_broken) {
            let violation = format!("{name} was taken from token {token} under an open fence");
            self.violate(violation);
        }
    }

    /// A name is taken over only from a holder that is not valid any more, and granted to those who live.
    fn check_takeover(&mut self, client: usize, body: &Request, prepared: &Prepared, clock: i64) {
        let Request::Transition(transition) = body else {
            return;
        };
        let name = &transition.name;
        let takes_over = self.store.leases.get(name).is_some_and(|row| prepared.takes_over(row));
        if takes_over && self.store.is_held(name, clock) {
            return self.violate(format!("{name} was taken over from a valid holder"));
        }
        // Where neither a request comes late nor the client that decides has been held up, a client that has been dead for long is
        // passed over. (The one that decides lives.)
        let grantees = match &transition.change {
            HolderChange::Exclusive(grantee) => std::slice::from_ref(grantee),
            HolderChange::Shared(grantees) => grantees,
            _ => &[],
        };
        let is_other =
            |id| self.store.entries.get(&(name.clone(), id)).is_some_and(|e| e.client != Some(self.clients[client].id));
        let is_dead = |id| is_other(id) && self.store.dead_for(name, id, clock).is_some_and(|us| us > 3_000_000);
        let grants = !matches!(prepared.response, Response::Transitioned(None));
        let is_prompt = self.profile.late_requests == 0 && self.clients[client].disturbed_at + SECOND < self.now;
        if is_prompt && grants && grantees.iter().any(|grantee| is_dead(grantee.id)) {
            self.violate(format!("{name} was granted to a client that is dead"));
        }
    }

    /// No name stands idle while somebody waits for it, but for the time that its last holder, its fence and one dead grantee may
    /// take.
    fn check_idle(&mut self) {
        for name in ["a", "b"] {
            let is_held = self.beliefs.values().any(|belief| belief.name.as_str() == name && belief.until > self.now);
            let waits = |actor: &Actor| matches!(&actor.state, ActorState::Waiting { name: n, patient: true, .. } if n.as_str() == name);
            let since = self.idle_since.entry(name).or_insert(0);
            if is_held || !self.actors.iter().any(waits) || self.now < FAULTS_END {
                *since = self.now;
            } else if self.now > *since + IDLE_FOR {
                let violation = format!("{name} has stood idle for {} s while somebody waits", IDLE_FOR / SECOND);
                self.violate(violation);
                return;
            }
        }
    }

    /// Nobody waits for ever.
    fn check_waits(&mut self) {
        let late = |since: u64| self.now > since.max(FAULTS_END) + SERVED_WITHIN;
        let stuck = self.actors.iter().find_map(|actor| match &actor.state {
            ActorState::Waiting { waiter, since, name, .. } if late(*since) => {
                Some((actor.client, *waiter, name.clone()))
            }
            _ => None,
        });
        if let Some((client, waiter, name)) = stuck {
            self.violate(format!(
                "client {client}: {waiter:?} was not served {name} within {} s",
                SERVED_WITHIN / SECOND
            ));
        }
    }

    /// Without faults, the order of arrival is exact, but for waiters whose time may have run out. (An owner that is given may enter where it holds already.)
    fn check_order(&mut self, client: usize, name: &LockName, mode: Mode, since: u64) {
        if !self.profile.is_quick() || self.profile.given_owners > 0 {
            return;
        }
        let earlier = self.actors.iter().find_map(|actor| match &actor.state {
            ActorState::Waiting { waiter, name: n, mode: m, since: s, patient: true, .. }
                if n == name && s + 50 * MILLISECOND < since && (mode == Mode::Exclusive || *m == Mode::Exclusive) =>
            {
                Some((actor.client, *waiter))
            }
            _ => None,
        });
        if let Some((other, waiter)) = earlier {
            self.violate(format!("client {client} got {name} before client {other}'s {waiter:?}, which came earlier"));
        }
    }

    /// At the end nothing is left of clients that live.
    fn check_residue(&mut self) {
        let lives =
            |id: Option<ClientId>| self.clients.iter().find(|client| client.engine.is_some() && Some(client.id) == id);
        // What a failover brings back stays until it is overtaken, unless a heartbeat keeps it.
        let is_left = |client| lives(client).is_some() && !self.failover.has_happened();
        let row =
            self.store.leases.iter().find(|(_, row)| matches!(row.holder, Holder::Lease(_)) && is_left(row.client));
        let entry = self.store.entries.iter().find(|(_, entry)| is_left(entry.client));
        let left = match (row, entry) {
            (Some((name, row)), _) => Some(format!("{name} is held by nobody: {row:?}")),
            (None, Some((key, entry))) => Some(format!("an entry of nobody is left: {key:?} {entry:?}")),
            _ => None,
        };
        let busy =
            self.clients.iter().position(|client| client.engine.as_ref().is_some_and(|engine| !engine.is_idle()));
        let left = left.or(busy.map(|client| format!("client {client} is not at rest")));
        if let Some(left) = left {
            self.violate(left);
        }
    }
}

fn owner(n: u64) -> Owner {
    format!("{n:032x}").parse().expect("an owner")
}

/// A request in a few words.
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
