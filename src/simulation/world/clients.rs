//! Clients: the inputs and the actions of their engines.

use super::super::checker::{self, Belief};
use super::{
    Actor, ActorState, Delivery, MICROSECOND, PendingRequest, Releasing, Resumable, World, WorldEvent, describe,
};
use crate::engine::{Action, Engine, Grant, Input, LeaseId};
use crate::error::LossCause;
use crate::protocol::{AcquisitionId, ClientId, Mode, Request};

impl World {
    pub(super) fn start(&mut self, client: usize) {
        let (first, life) = (u128::from(self.random.next()) << 64, self.clients[client].life + 1);
        let state = &mut self.clients[client];
        (state.life, state.wake_at) = (life, None);
        state.id = ClientId::from_u128((first >> 32) + client as u128);
        let mut engine = Engine::new(state.id, "simulated".into(), AcquisitionId::from_u128(first));
        engine.set_can_notify(self.profile.marks);
        state.engine = Some(engine);
        for actor in 0..self.actors.len() {
            if self.actors[actor].client == client {
                self.rest(actor);
            }
        }
    }

    pub(super) fn feed(&mut self, client: usize, life: u32, input: Input) {
        if self.clients[client].life != life {
            return;
        }
        let now = self.clients[client].local(self.now);
        let Some(engine) = &mut self.clients[client].engine else {
            return;
        };
        let actions = engine.handle(now, input);
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
        self.check_entries();
        let state = &self.clients[client];
        if let Some(at) = wakes_at.map(|moment| state.global(moment).max(self.now) + 1_000)
            && state.wake_at.is_none_or(|before| before > at || before <= self.now)
        {
            self.clients[client].wake_at = Some(at);
            self.at(at, WorldEvent::Wake { client, life });
        }
        self.believe(client);
        while let Some(delivery) = self.deliveries.pop() {
            self.deliver(delivery);
        }
        while let Some((client, lease)) = self.unwanted.pop() {
            let life = self.clients[client].life;
            self.feed(client, life, Input::Discard { lease });
        }
    }

    /// Delivers a resumed lease to its caller, or releases it if the caller has left.
    pub(super) fn deliver(&mut self, Delivery { client, lease, exported }: Delivery) {
        let life = self.clients[client].life;
        if !self.random.permille(150) {
            self.exported_at.remove(&exported.id);
            return self.feed(client, life, Input::Delivered { lease, exported });
        }
        let holds = |actor: &Actor| {
            actor.client == client && matches!(actor.state, ActorState::Holding { lease: l, .. } if l == lease)
        };
        let Some(actor) = self.actors.iter().position(holds) else {
            return;
        };
        self.tell(|| format!("client {client} returns {lease:?}: no caller waits for it"));
        self.evicted.remove(&(client, lease));
        let Some(belief) = self.beliefs.remove(&(client, lease)) else {
            return;
        };
        let Belief { name, owner, mode, token, .. } = belief;
        self.exported.push(Resumable { exported, name: name.clone(), owner, mode });
        if mode == Mode::Exclusive {
            let asked_at = self.now;
            self.releasing.insert((client, lease), Releasing { name, token, actor, asked_at });
        }
        self.handed_back.insert((client, lease));
        self.rest(actor);
        self.feed(client, life, Input::HandBack { lease, exported });
    }

    /// Updates the deadlines of a client's leases, and checks that they do not go back, and that no
    /// two holders believe in one name.
    pub(super) fn believe(&mut self, client: usize) {
        let Some(engine) = &self.clients[client].engine else {
            return;
        };
        let leases: Vec<LeaseId> = self
            .beliefs
            .range((client, LeaseId(0))..=(client, LeaseId(u64::MAX)))
            .map(|((_, lease), _)| *lease)
            .collect();
        let mut shortened = None;
        for lease in leases {
            let until = engine.deadline(lease).map_or(0, |deadline| self.clients[client].global(deadline));
            if let Some(belief) = self.beliefs.get_mut(&(client, lease)) {
                if until > 0 && until < belief.until {
                    shortened = Some(lease);
                }
                belief.until = until;
            }
        }
        if let Some(lease) = shortened {
            self.violate(format!("client {client}: the deadline of {lease:?} goes back"));
        }
        let beliefs = self.beliefs.iter().filter(|(key, _)| self.is_undisputed(key)).map(|(_, belief)| belief);
        if let Err(violation) = checker::exclusion(self.now, beliefs) {
            self.violate(violation);
        }
    }

    /// Returns whether no eviction and no failover has ended a lease without its holder's
    /// knowledge.
    pub(super) fn is_undisputed(&self, key: &(usize, LeaseId)) -> bool {
        !self.evicted.contains_key(key) && !self.failover.may_overlap(key, self.now)
    }

    pub(super) fn act_for(&mut self, client: usize, action: Action) {
        match action {
            Action::Send { request, body, .. } => {
                let life = self.clients[client].life;
                self.tell(|| format!("client {client} sends {}: {}", request.0, describe(&body)));
                let sent_at = self.clients[client].local(self.now);
                let is_beat = matches!(*body, Request::Register { .. } | Request::Beat { .. });
                let found_connection_dead = is_beat && std::mem::take(&mut self.clients[client].is_cut);
                self.clients[client].connection += u32::from(found_connection_dead);
                let pending = PendingRequest { body, sent_at, attempts: 0, life, found_connection_dead };
                self.clients[client].requests.insert(request, pending);
                self.check_rate(client);
                self.attempt(client, request);
            }
            Action::Waits { waiter } => {
                self.tell(|| format!("client {client} lets {waiter:?} wait"));
                self.wait_reported(client, waiter);
            }
            Action::Granted { waiter, grant } => {
                self.tell(|| format!("client {client} grants {waiter:?}: {:?}, token {}", grant.lease, grant.token));
                self.granted(client, waiter, &grant);
            }
            Action::Refused { waiter, refusal } => {
                self.tell(|| format!("client {client} refuses {waiter:?}: {refusal:?}"));
                self.refused(client, waiter, &refusal);
            }
            Action::TakenOver { name } => self.tell(|| format!("client {client} has taken {name} over")),
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
                let belief = self.beliefs.remove(&(client, lease));
                let has_time = belief.as_ref().is_some_and(|belief| belief.until > self.now + MICROSECOND);
                if cause == LossCause::Expired && has_time {
                    self.violate(format!("client {client} lost {lease:?} as expired before its deadline"));
                }
                let was_renewed = belief.is_some_and(|belief| belief.is_renewed);
                if self.profile.is_calm() && was_renewed && cause != LossCause::MaxHold {
                    self.violate(format!("client {client} lost a lease without a reason: {cause:?}"));
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
            Action::ReleaseRequested { lease } => {
                self.tell(|| format!("client {client} hears that it is asked to release {lease:?}"));
                self.release_requested(client, lease);
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
            Action::Closed { .. } => {
                self.tell(|| format!("client {client} has shut down"));
                self.stop(client);
            }
        }
    }
}
