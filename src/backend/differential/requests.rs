//! Random requests on the state of the model.

use std::time::Duration;

use super::{Sequence, now};
use crate::engine::decision::{Decision, decide};
use crate::name::LockName;
use crate::protocol::{
    AcquisitionId, Claim, ClientChange, ClientId, Enqueue, EntryState, Extension, GivenUp, Grantee, Holder,
    HolderChange, Mode, Release, Request, Response, Transition,
};
use crate::token::FencingToken;

impl Sequence {
    pub(super) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.random.below(from.len() as u64) as usize].clone()
    }

    pub(super) fn name(&mut self) -> LockName {
        self.pick(&self.names.clone())
    }

    pub(super) fn client(&mut self) -> ClientId {
        self.pick(&self.clients.clone())
    }

    pub(super) fn ttl(&mut self) -> Duration {
        Duration::from_millis(self.pick(&[7_500, 12_500, 32_500]))
    }

    pub(super) fn new_id(&mut self) -> AcquisitionId {
        self.next_id += 1;
        let id = AcquisitionId::from_u128(self.next_id);
        self.ids.push(id);
        id
    }

    /// Returns a new id, or rarely one that was used before.
    pub(super) fn id(&mut self) -> AcquisitionId {
        if self.ids.is_empty() || self.random.permille(850) { self.new_id() } else { self.pick(&self.ids.clone()) }
    }

    pub(super) fn claim(&mut self, name: &LockName) -> Claim {
        let mode = match self.random.below(20) {
            0..11 => Mode::Exclusive,
            11..17 => Mode::READ,
            _ => Mode::Shared { units: 1 + self.random.below(2) as u32, permits: 3 },
        };
        Claim {
            name: name.clone(),
            id: self.id(),
            owner: self.pick(&self.owners.clone()),
            client: self.client(),
            is_renewed: self.random.permille(750),
            mode,
            ttl: self.ttl(),
            holder: "differential/1".into(),
            label: "a label".into(),
        }
    }

    /// Returns a holding of the name.
    pub(super) fn holding(&mut self, name: &LockName) -> Option<(AcquisitionId, FencingToken)> {
        let row = self.model.leases.get(name)?;
        let mut all: Vec<(AcquisitionId, i64)> = self
            .model
            .entries
            .iter()
            .filter(|((n, _), _)| n == name)
            .filter_map(|((_, id), entry)| match entry.state {
                EntryState::Holding(token) => Some((*id, token)),
                EntryState::Waiting => None,
            })
            .collect();
        if let Holder::Lease(id) = row.holder {
            all.push((id, row.token));
        }
        if all.is_empty() {
            return None;
        }
        let (id, token) = self.pick(&all);
        Some((id, FencingToken::new(token)?))
    }

    /// Returns a holding of the name, or rarely one that has ended.
    pub(super) fn holding_or_none(&mut self, name: &LockName) -> (AcquisitionId, FencingToken) {
        let held = self.holding(name);
        let row = self.model.leases.get(name).map_or(1, |row| row.token.max(1));
        let (id, token) =
            held.unwrap_or_else(|| (AcquisitionId::from_u128(7), FencingToken::new(row).expect("positive")));
        match self.random.below(20) {
            0 => (self.id(), token),
            1 => (id, FencingToken::new((token.get() - 1).max(1)).expect("positive")),
            _ => (id, token),
        }
    }

    /// Returns an id that is in use for the name, or rarely another one.
    pub(super) fn used_id(&mut self, name: &LockName) -> AcquisitionId {
        let mut all: Vec<AcquisitionId> =
            self.model.entries.keys().filter(|(n, _)| n == name).map(|(_, id)| *id).collect();
        if let Some(Holder::Lease(id)) = self.model.leases.get(name).map(|row| row.holder) {
            all.push(id);
        }
        if all.is_empty() || self.random.permille(100) { self.id() } else { self.pick(&all) }
    }

    pub(super) fn any_request(&mut self) -> Request {
        let name = self.name();
        match self.random.below(125) {
            0..4 => Request::Register { client: self.client() },
            4..10 => Request::Beat { client: self.client() },
            10..26 => Request::Acquire(self.claim(&name)),
            26..34 => {
                let mut claim = self.claim(&name);
                if let Some(owner) = self.model.leases.get(&name).and_then(|row| row.owner)
                    && self.random.permille(800)
                {
                    claim.owner = owner;
                }
                Request::Join(claim)
            }
            34..50 => {
                let count = 1 + self.random.below(3);
                let client = self.client();
                let mut entries: Vec<Enqueue> = (0..count)
                    .map(|i| {
                        let claim = Claim { client, ..self.claim(&name) };
                        Enqueue { claim, age: Duration::from_secs(5 * (count - i - 1)) }
                    })
                    .collect();
                let mut seen = Vec::new();
                entries.retain(|entry| {
                    !seen.contains(&entry.claim.id) && {
                        seen.push(entry.claim.id);
                        true
                    }
                });
                Request::Enqueue(entries)
            }
            50..66 => {
                let (id, token) = self.holding_or_none(&name);
                let keep_for = if self.random.permille(800) { Duration::ZERO } else { self.ttl() };
                let next = (keep_for.is_zero() && self.random.permille(400)).then(|| {
                    // A client hands a name over only to an exclusive claim.
                    let id = self.new_id();
                    Claim { mode: Mode::Exclusive, id, ..self.claim(&name) }
                });
                Request::Release(Release { name, id, token, keep_for, next })
            }
            66..74 => {
                let except = if self.random.permille(300) { self.holding(&name) } else { None };
                Request::Withdraw { id: self.used_id(&name), name, except: except.map(|(_, token)| token) }
            }
            74..79 => {
                let mut ids: Vec<AcquisitionId> = (0..=self.random.below(3)).map(|_| self.used_id(&name)).collect();
                ids.sort();
                ids.dedup();
                Request::Poll { name, ids }
            }
            79..84 => Request::Read { name, limit: self.pick(&[1, 2, 32]) },
            84..104 => self.transition(&name).map_or(Request::Read { name, limit: 32 }, Request::Transition),
            104..111 => {
                let (id, token) = self.holding_or_none(&name);
                let lasts = self.ttl();
                if self.random.permille(300) {
                    // Stores carry these out in batches.
                    let (id, client_change) = (Some(id), ClientChange::None);
                    return Request::Extend(Extension {
                        name,
                        id,
                        renamed: None,
                        token,
                        lasts,
                        ttl: None,
                        client_change,
                    });
                }
                let (ttl, client) = (self.ttl(), self.client());
                let client_change =
                    self.pick(&[ClientChange::None, ClientChange::Set(client), ClientChange::Remove(client)]);
                // Acquisitions of one owner share a token, and only one of them can be renamed.
                let renamed = if self.random.permille(200) { Some(self.new_id()) } else { None };
                let id = (renamed.is_some() || !self.random.permille(200)).then_some(id);
                let ttl = self.random.permille(700).then_some(ttl);
                Request::Extend(Extension { name, id, renamed, token, lasts, ttl, client_change })
            }
            111..114 => {
                let (id, token) = self.holding_or_none(&name);
                Request::Downgrade { name, id, token }
            }
            114..116 => {
                let (id, token) = self.holding_or_none(&name);
                let to = FencingToken::new(token.get() + self.pick(&[20_000_000, 20_000_000, -1, 0])).unwrap_or(token);
                Request::Raise { name, id, token, to }
            }
            116..120 => {
                let (_, token) = self.holding_or_none(&name);
                Request::Evict { name, token }
            }
            _ => Request::Ask { name },
        }
    }

    /// Returns a transition as a client decides it, or rarely with a change in the row or in the
    /// transition.
    pub(super) fn transition(&mut self, name: &LockName) -> Option<Transition> {
        let transaction = self.transaction;
        let read = Request::Read { name: name.clone(), limit: self.pick(&[2, 32]) };
        let prepared = self.model.prepare(transaction, now(), &read).ok()?;
        let Response::Read(Some(queue)) = prepared.response else {
            return None;
        };
        let given_up = if self.random.permille(500) { self.holding(name) } else { None };
        let given_up = given_up.map(|(id, token)| GivenUp { id, token });
        let claim = if self.random.permille(400) { Some(self.claim(name)) } else { None };
        let client = self.client();
        let mut transition = match decide(name, &queue, client, given_up, claim.as_ref()) {
            Decision::Apply(transition) => transition,
            Decision::Wait(_) => {
                let row = &queue.row;
                let waiting: Vec<Grantee> =
                    queue.waiting().map(|entry| Grantee { id: entry.id, ttl: entry.ttl }).collect();
                let mut changes = vec![HolderChange::None, HolderChange::Free];
                changes.extend(claim.map(|claim| HolderChange::Claim(Box::new(claim))));
                changes.extend(waiting.first().map(|first| HolderChange::Exclusive(*first)));
                changes.extend((!waiting.is_empty()).then_some(HolderChange::Shared(waiting)));
                Transition {
                    name: name.clone(),
                    seen: crate::protocol::Seen { holder: row.holder, token: row.token, waiting: row.waiting },
                    given_up: None,
                    expired: Vec::new(),
                    change: self.pick(&changes),
                    is_last: self.random.permille(300),
                }
            }
        };
        match self.random.below(30) {
            0 => transition.seen.token -= 1,
            1 => transition.seen.waiting += 1,
            2 => transition.seen.holder = Holder::Entries,
            3 => transition.is_last = !transition.is_last,
            4 if matches!(transition.change, HolderChange::None | HolderChange::Free) => {
                transition.expired.extend(queue.entries.first().map(|entry| entry.id));
            }
            5 => transition.expired.clear(),
            6 => transition.given_up = None,
            _ => {}
        }
        transition.expired.sort();
        transition.expired.dedup();
        Some(transition)
    }
}
