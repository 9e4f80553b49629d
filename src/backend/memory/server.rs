//! A server over the model: a clock, and faults on demand.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::{Entry, Lease, Memory, TransactionId};
use crate::backend::{Note, micros};
use crate::clock::CENTURY;
use crate::engine::decision::{Decision, decide};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{
    AcquisitionId, ChangeOutcome, Claim, ClientId, EntryState, Extension, Holder, HolderChange, Mode, Request, Response,
};
use crate::token::FencingToken;

/// The clock when the server starts: microseconds since the Unix epoch.
const EPOCH: i64 = 1_700_000_000_000_000;

/// The holder in lists of a refused name.
const STRANGER: &str = "a stranger";

/// See the [module](self). Its clock is that of tokio.
pub(crate) struct MemoryServer {
    pub(super) started_at: Instant,
    state: Mutex<State>,
}

pub(super) struct State {
    pub(super) model: Memory,
    transactions: TransactionId,
    /// The holder and the label of acquisitions, for lists.
    pub(super) texts: HashMap<AcquisitionId, (Arc<str>, Arc<str>)>,
    /// The notes of holders, by name and token.
    pub(super) notes: BTreeMap<(LockName, i64), String>,
    /// The refused names, with the tokens of their holder.
    refused: BTreeMap<LockName, FencingToken>,
    pub(super) is_away: bool,
    /// The number of outages. Earlier connections are dead.
    pub(super) outages: u64,
    /// The number of requests that will fail.
    pub(super) failing: u32,
    pub(super) delay: Duration,
    /// The moments until which the heartbeats of clients are not answered.
    pub(super) cut_off: HashMap<ClientId, Instant>,
    /// The moments until which holdings are not extended, by name and token.
    expiring: HashMap<(LockName, i64), Instant>,
}

impl MemoryServer {
    pub(crate) fn new() -> Arc<Self> {
        let state = State {
            model: Memory::new(false),
            transactions: 0,
            texts: HashMap::new(),
            notes: BTreeMap::new(),
            refused: BTreeMap::new(),
            is_away: false,
            outages: 0,
            failing: 0,
            delay: Duration::ZERO,
            cut_off: HashMap::new(),
            expiring: HashMap::new(),
        };
        Arc::new(Self { started_at: Instant::now(), state: Mutex::new(state) })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn now(&self) -> i64 {
        EPOCH + micros(self.started_at.elapsed())
    }

    // ---- faults

    /// Makes another owner hold a name. Returns `false` if a client holds the name or waits for it.
    pub(crate) fn refuse(&self, name: &LockName) -> bool {
        let (random, now) = (Owner::random(), self.now());
        let claim = Claim {
            name: name.clone(),
            id: AcquisitionId::from_u128(uuid::Uuid::new_v4().as_u128()),
            owner: random,
            client: ClientId::from_u128(uuid::Uuid::new_v4().as_u128()),
            is_renewed: false,
            mode: Mode::Exclusive,
            ttl: CENTURY,
            holder: STRANGER.into(),
            label: "".into(),
        };
        let mut state = self.state();
        let mut granted = match state.execute(now, &Request::Acquire(claim.clone())) {
            Some(Response::Acquired(granted)) => granted.ok(),
            _ => None,
        };
        // The holder may be dead, and the waiters, too.
        if granted.is_none()
            && let Some(Response::Read(Some(queue))) =
                state.execute(now, &Request::Read { name: name.clone(), limit: u32::MAX })
            && let Decision::Apply(transition) = decide(name, &queue, claim.client, None, Some(&claim))
            && matches!(transition.change, HolderChange::Claim(_))
            && let Some(Response::Transitioned(Some(grants))) = state.execute(now, &Request::Transition(transition))
        {
            granted = grants.first().map(|grant| grant.token);
        }
        match granted {
            Some(token) => {
                state.refused.insert(name.clone(), token);
                true
            }
            // The stranger may have been evicted.
            None => state.refused.get(name).is_some_and(|token| state.model.tokens(name).contains(token)),
        }
    }

    /// Releases a refused name.
    pub(crate) fn allow(&self, name: &LockName) {
        let (now, mut state) = (self.now(), self.state());
        if let Some(token) = state.refused.remove(name) {
            state.execute(now, &Request::Evict { name: name.clone(), token });
        }
    }

    /// Evicts every holder of a name, as an operator does with the tokens of the list. Returns the
    /// number of tokens.
    pub(crate) fn evict(&self, name: &LockName) -> usize {
        let (now, mut state) = (self.now(), self.state());
        let tokens = state.model.listed_tokens(name, now);
        for token in &tokens {
            state.execute(now, &Request::Evict { name: name.clone(), token: *token });
        }
        tokens.len()
    }

    /// Leaves the heartbeats of the clients that hold a name unanswered until their leases have
    /// expired, and extends none of these leases. Returns the number of these clients.
    pub(crate) fn expire(&self, name: &LockName) -> usize {
        let (now, mut state) = (self.now(), self.state());
        let holdings = state.model.renewed(name);
        for (client, token, until) in &holdings {
            let left = u64::try_from(until - now).unwrap_or(0);
            let until = Instant::now() + Duration::from_micros(left + 1);
            let cut_off = state.cut_off.entry(*client).or_insert(until);
            *cut_off = until.max(*cut_off);
            state.expiring.insert((name.clone(), *token), until);
        }
        holdings.into_iter().map(|(client, ..)| client).collect::<HashSet<_>>().len()
    }

    pub(crate) fn delay(&self, delay: Duration) {
        self.state().delay = delay;
    }

    pub(crate) fn fail(&self, requests: u32) {
        self.state().failing = requests;
    }

    pub(crate) fn go_away(&self) {
        let mut state = self.state();
        state.is_away = true;
        state.outages += 1;
    }

    pub(crate) fn come_back(&self) {
        self.state().is_away = false;
    }
}

impl State {
    /// Returns whether a request would extend a holding that is to expire.
    fn is_expiring(&self, request: &Request) -> bool {
        let Request::Extend(Extension { name, token, .. }) = request else { return false };
        self.expiring.get(&(name.clone(), token.get())).is_some_and(|until| Instant::now() < *until)
    }

    /// Executes a request in one transaction. `None`: a row is locked, which no transaction does
    /// here.
    pub(super) fn execute(&mut self, now: i64, request: &Request) -> Option<Response> {
        for claim in claims(request) {
            self.texts.insert(claim.id, (Arc::clone(&claim.holder), Arc::clone(&claim.label)));
        }
        if self.is_expiring(request) {
            return Some(Response::Extended(ChangeOutcome::Locked));
        }
        self.transactions += 1;
        let prepared = self.model.prepare(self.transactions, now, request).ok()?;
        Some(self.model.commit(self.transactions, now, prepared))
    }
}

impl Memory {
    /// Returns whether an acquisition holds a name with this token, and has not expired.
    pub(super) fn is_valid(&self, Note { name, id, token, .. }: &Note, now: i64) -> bool {
        let alone = self.exclusive_holding(name, *id, token.get());
        let alone = alone.is_some_and(|row| self.valid_until(row.expires_at, row.client, row.ttl) > now);
        let holds = |entry: &Entry| entry.state == EntryState::Holding(token.get()) && self.entry_until(entry) > now;
        alone || self.owned_entry(name, *id).is_some_and(holds)
    }

    /// Returns the tokens of all holdings of a name.
    pub(super) fn tokens(&self, name: &LockName) -> Vec<FencingToken> {
        let alone = self.leases.get(name).filter(|row| matches!(row.holder, Holder::Lease(_))).map(|row| row.token);
        let shared = self.entries_named(name).filter_map(|(_, entry)| match entry.state {
            EntryState::Holding(token) => Some(token),
            EntryState::Waiting => None,
        });
        alone.into_iter().chain(shared).filter_map(FencingToken::new).collect()
    }

    /// Returns the tokens of the holdings of a name that have not expired, also of those that were
    /// released and keep the name unavailable.
    fn listed_tokens(&self, name: &LockName, now: i64) -> BTreeSet<FencingToken> {
        let alone = self.leases.get(name).filter(|row| {
            matches!(row.holder, Holder::Lease(_) | Holder::Kept)
                && self.valid_until(row.expires_at, row.client, row.ttl) > now
        });
        let shared = self.entries_named(name).filter_map(|(_, entry)| match entry.state {
            EntryState::Holding(token) => (self.entry_until(entry) > now).then_some(token),
            EntryState::Waiting => None,
        });
        alone.map(|row| row.token).into_iter().chain(shared).filter_map(FencingToken::new).collect()
    }

    /// Returns the holdings of a name that heartbeats renew: the client, the token and the expiry
    /// of each.
    fn renewed(&self, name: &LockName) -> Vec<(ClientId, i64, i64)> {
        let row = self.leases.get(name).filter(|row| matches!(row.holder, Holder::Lease(_)));
        let until = |row: &Lease| self.valid_until(row.expires_at, row.client, row.ttl);
        let alone = row.and_then(|row| Some((row.client?, row.token, until(row))));
        let shared = self.entries_named(name).filter_map(|(_, entry)| match entry.state {
            EntryState::Holding(token) => Some((entry.client?, token, self.entry_until(entry))),
            EntryState::Waiting => None,
        });
        alone.into_iter().chain(shared).collect()
    }
}

/// Returns the claims that a request may turn into holdings or entries.
fn claims(request: &Request) -> Vec<&Claim> {
    match request {
        Request::Acquire(claim) | Request::Join(claim) => vec![claim],
        Request::Enqueue(entries) => entries.iter().map(|entry| &entry.claim).collect(),
        Request::Release(release) => release.next.iter().collect(),
        Request::Transition(transition) => match &transition.change {
            HolderChange::Claim(claim) => vec![claim],
            _ => Vec::new(),
        },
        _ => Vec::new(),
    }
}
