//! Checks of the whole world, after each event and at the end.

use super::super::checker::Belief;
use super::{
    Actor, ActorState, ENTERED_WITHIN, FAULTS_END, Fenced, IDLE_FOR, Kept, MILLISECOND, NAMES, OUTDATED_AFTER,
    REPORTED_WITHIN, REQUESTS_PER_SECOND, SECOND, SERVED_WITHIN, Wait, World,
};
use crate::backend::memory::{End, Entry, Prepared};
use crate::backend::micros;
use crate::engine::LeaseId;
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{ClientId, EntryState, Holder, Mode, Request, Response, Transition};
use crate::token::FencingToken;

/// Returns whether a caller waits for a name that its own owner holds alone.
fn can_enter(wait: &Wait, belief: &Belief) -> bool {
    let is_own = wait.reenters && wait.owner == belief.owner && wait.name == belief.name;
    is_own && wait.resumes.is_none() && belief.mode == Mode::Exclusive
}

impl World {
    /// Checks that no other owner is granted a name while a transaction is open that its holder has
    /// fenced.
    pub(super) fn check_fences(&mut self) {
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

    /// Checks that no other owner is granted a name that its released lease keeps taken. An eviction
    /// or the end of the lease's TTL, after which no heartbeat of its client renews it, frees the
    /// name earlier.
    pub(super) fn check_kept(&mut self, client: usize, name: &LockName, owner: Owner, mode: Mode) {
        self.kept.retain(|kept| kept.until > self.now);
        let excludes = |kept: &&Kept| {
            kept.name == *name
                && kept.owner != owner
                && (mode == Mode::Exclusive || kept.mode == Mode::Exclusive)
                && self.store.ends.get(&(name.clone(), kept.token.get())).is_none_or(|(end, _)| *end == End::Released)
        };
        if let Some(kept) = self.kept.iter().find(excludes).filter(|_| !self.profile.may_expire()) {
            let violation = format!("client {client} got {name}, which token {} keeps taken", kept.token);
            self.violate(violation);
        }
    }

    /// Checks that a name is taken over only from an expired holder, and granted to live clients.
    pub(super) fn check_takeover(&mut self, client: usize, body: &Request, prepared: &Prepared, clock: i64) {
        let Request::Transition(transition) = body else {
            return;
        };
        let name = &transition.name;
        let takes_over = self.store.leases.get(name).is_some_and(|row| prepared.takes_over(row));
        if takes_over && self.store.is_held(name, clock) {
            return self.violate(format!("{name} was taken over from a valid holder"));
        }
        // Without late requests, and if the deciding client was not delayed, a client that has been
        // dead for long is skipped. (The deciding client is alive.)
        let grantees = transition.change.grantees();
        let is_other =
            |id| self.store.entries.get(&(name.clone(), id)).is_some_and(|e| e.client != Some(self.clients[client].id));
        let is_dead = |id| is_other(id) && self.store.dead_for(name, id, clock).is_some_and(|us| us > 3_000_000);
        let grants = !matches!(prepared.response, Response::Transitioned(None));
        let is_prompt = self.profile.late_requests == 0 && self.clients[client].disturbed_at + SECOND < self.now;
        if is_prompt && grants && grantees.iter().any(|grantee| is_dead(grantee.id)) {
            self.violate(format!("{name} was granted to a client that is dead"));
        }
    }

    /// Checks that a client grants a name to the entry of another client for a short time only: the
    /// other client may be dead.
    pub(super) fn check_grant_time(&mut self, client: usize, life: u32, body: &Request, prepared: &Prepared) {
        let Request::Transition(Transition { name, change, .. }) = body else {
            return;
        };
        // The entries of an earlier life have another client.
        if self.clients[client].life != life || matches!(prepared.response, Response::Transitioned(None)) {
            return;
        }
        let own = Some(self.clients[client].id);
        let is_other = |id| self.store.entries.get(&(name.clone(), id)).is_some_and(|entry| entry.client != own);
        if change.grantees().iter().any(|grantee| grantee.ttl > GRANT_TTL && is_other(grantee.id)) {
            self.violate(format!("client {client} grants {name} to another client for more than {GRANT_TTL:?}"));
        }
    }

    /// Checks that a client does not send requests in a loop. Counts a request that it sends now.
    pub(super) fn check_rate(&mut self, client: usize) {
        let (second, count) = self.clients[client].sent;
        let now = self.now / SECOND;
        let count = if now == second { count + 1 } else { 1 };
        self.clients[client].sent = (now, count);
        if count > REQUESTS_PER_SECOND {
            self.violate(format!("client {client} sends more than {REQUESTS_PER_SECOND} requests in a second"));
        }
    }

    /// Checks that the wait of a caller is reported.
    pub(super) fn check_reported_waits(&mut self) {
        let is_late = |client, wait: &Wait| {
            let is_overdue = !wait.is_try && !wait.is_reported && self.now > wait.since + REPORTED_WITHIN;
            is_overdue && !self.was_delayed_since(client, &wait.name, wait.since)
        };
        let missed = self.actors.iter().find_map(|actor| match &actor.state {
            ActorState::Waiting(wait) if is_late(actor.client, wait) => Some((actor.client, wait.waiter)),
            _ => None,
        });
        if let Some((client, waiter)) = missed {
            self.violate(format!("client {client}: the wait of {waiter:?} is not reported"));
        }
    }

    /// Returns whether a name has a valid holder, or an entry or a caller that waits for it.
    fn is_contended(&self, name: &str) -> bool {
        let clock = self.store_clock();
        let is_valid = |expires_at, client, ttl| self.store.valid_until(expires_at, client, ttl) > clock;
        let mut rows = self.store.leases.iter().filter(|(other, _)| other.as_str() == name).map(|(_, row)| row);
        let mut entries = self.store.entries.iter().filter(|((other, _), _)| other.as_str() == name);
        let entry_ttl = |entry: &Entry| if entry.state == EntryState::Waiting { micros(GRANT_TTL) } else { entry.ttl };
        rows.any(|row| row.holder != Holder::Nobody && is_valid(row.expires_at, row.client, row.ttl))
            || entries.any(|(_, entry)| is_valid(entry.expires_at, entry.client, entry_ttl(entry)))
            || self.beliefs.values().any(|belief| belief.name.as_str() == name && belief.until > self.now)
            || self.actors.iter().any(
                |actor| matches!(&actor.state, ActorState::Waiting(wait) if !wait.is_try && wait.name.as_str() == name),
            )
    }

    pub(super) fn note_contention(&mut self) {
        for name in NAMES {
            if self.is_contended(name) {
                self.contended_at.insert(name, self.now);
            }
        }
    }

    /// Checks that a try is refused only if another caller has held the name or waited for it.
    pub(super) fn check_refused_try(&mut self, client: usize, wait: &Wait) {
        let earliest = wait.since.saturating_sub(OUTDATED_AFTER);
        let name = wait.name.as_str();
        let is_held = self.is_contended(name) || self.contended_at.get(name).is_some_and(|at| *at >= earliest);
        if !is_held && !self.was_delayed_since(client, &wait.name, earliest) {
            self.violate(format!(
                "client {client}: {:?} tries {name} and is refused, although it is free",
                wait.waiter
            ));
        }
    }

    /// Checks that no caller waits for long while its own owner holds the name: it would wait for
    /// itself.
    pub(super) fn check_reentry(&mut self) {
        for actor in 0..self.actors.len() {
            let Actor { client, state, waits_for_others_at, .. } = &self.actors[actor];
            let ActorState::Waiting(wait) = state else {
                continue;
            };
            let may_enter = |(key, belief): &(&(usize, LeaseId), &Belief)| {
                can_enter(wait, belief) && belief.until > self.now && self.is_undisputed(key)
            };
            let Some((_, held)) = self.beliefs.iter().find(may_enter) else {
                self.actors[actor].waits_for_others_at = self.now;
                continue;
            };
            let since = (*waits_for_others_at).max(wait.since);
            let is_delayed =
                [*client, held.client].iter().any(|client| self.was_delayed_since(*client, &wait.name, since));
            if self.now > since + ENTERED_WITHIN && !is_delayed {
                let violation =
                    format!("client {client}: {:?} waits for {}, which its owner holds", wait.waiter, wait.name);
                self.violate(violation);
            }
        }
    }

    /// Returns whether a caller of another client waits for an exclusive lease of its own owner.
    pub(super) fn is_awaited_by_owner(&self, client: usize, lease: LeaseId) -> bool {
        let Some(belief) = self.beliefs.get(&(client, lease)) else {
            return false;
        };
        let mut others = self.actors.iter().filter(|actor| actor.client != client);
        others.any(|actor| matches!(&actor.state, ActorState::Waiting(wait) if can_enter(wait, belief)))
    }

    /// Checks that a lease which was granted at `at` has the requested TTL in the store.
    pub(super) fn check_ttl(&mut self, client: usize, life: u32, lease: LeaseId, at: u64) {
        let key = (client, lease);
        let Some(Belief { name, id, ttl, .. }) = self.beliefs.get(&key).filter(|belief| belief.until > self.now) else {
            return;
        };
        let is_delayed = self.was_delayed_since(client, name, at) || self.clients[client].life != life;
        let row = self.store.leases.get(name).filter(|row| row.holder == Holder::Lease(*id)).map(|row| row.ttl);
        let stored = row.or(self.store.entries.get(&(name.clone(), *id)).map(|entry| entry.ttl));
        if !is_delayed && self.is_undisputed(&key) && stored.is_some_and(|stored| stored < micros(*ttl)) {
            let violation = format!("client {client}: {lease:?} of {name} does not get its TTL");
            self.violate(violation);
        }
    }

    /// Returns whether a fault or a fence may have delayed a client's work on a name since a moment.
    pub(super) fn was_delayed_since(&self, client: usize, name: &LockName, at: u64) -> bool {
        self.clients[client].disturbed_at >= at
            || self.store_is_away_until >= at
            || self.fenced_until.get(name).is_some_and(|until| *until >= at)
    }

    /// Checks that no lease has ended without a report to its caller.
    pub(super) fn check_losses(&mut self) {
        let has_ended = |(client, lease): &&(usize, LeaseId)| {
            self.clients[*client].engine.as_ref().is_some_and(|engine| engine.deadline(*lease).is_none())
        };
        if let Some((client, lease)) = self.beliefs.keys().find(has_ended) {
            let violation = format!("client {client}: {lease:?} has ended without a report");
            self.violate(violation);
        }
    }

    /// Checks that no name stays free while a caller waits for it, except for the time of its last
    /// holder, its fence and one dead grantee.
    pub(super) fn check_idle(&mut self) {
        for name in NAMES {
            let is_held = self.beliefs.values().any(|belief| belief.name.as_str() == name && belief.until > self.now);
            let waits = |actor: &Actor| matches!(&actor.state, ActorState::Waiting(wait) if wait.is_unlimited && wait.name.as_str() == name);
            let since = self.idle_since.entry(name).or_insert(0);
            if is_held || !self.actors.iter().any(waits) || self.now < FAULTS_END {
                *since = self.now;
            } else if self.now > *since + IDLE_FOR {
                let violation = format!("{name} was free for {} s while a caller waited", IDLE_FOR / SECOND);
                self.violate(violation);
                return;
            }
        }
    }

    /// Checks that no caller waits for ever.
    pub(super) fn check_waits(&mut self) {
        let late = |since: u64| self.now > since.max(FAULTS_END) + SERVED_WITHIN;
        let stuck = self.actors.iter().find_map(|actor| match &actor.state {
            ActorState::Waiting(Wait { waiter, since, name, .. }) if late(*since) => {
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

    /// Checks that, without faults, names are granted in the order of arrival, except to waiters
    /// that may have timed out. (An owner of the caller's may re-enter a name that it holds.)
    pub(super) fn check_order(&mut self, client: usize, name: &LockName, mode: Mode, since: u64) {
        if !self.profile.is_quick() || self.profile.given_owners > 0 {
            return;
        }
        let earlier = self.actors.iter().find_map(|actor| match &actor.state {
            ActorState::Waiting(Wait { waiter, name: n, mode: m, since: s, is_unlimited: true, .. })
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

    /// Checks that the token of a grant is greater than those of all holders before. Holders that
    /// share a name may hear of their grants in another order, but their tokens differ.
    pub(super) fn check_token(&mut self, name: &LockName, owner: Owner, mode: Mode, token: FencingToken) {
        let Some(tokens) = self.tokens.get(name) else {
            return;
        };
        let before = if mode == Mode::Exclusive { tokens.newest } else { tokens.newest_exclusive };
        let is_again = token.get() == tokens.newest && tokens.owner == Some(owner);
        let is_same = |belief: &Belief| belief.name == *name && belief.token == token && belief.owner != owner;
        if (token.get() <= before && !is_again) || self.beliefs.values().any(is_same) {
            self.violate(format!("token {token} of {name} is not greater than those before"));
        }
    }

    /// Checks that live clients leave no rows at the end.
    pub(super) fn check_residue(&mut self) {
        let lives =
            |id: Option<ClientId>| self.clients.iter().find(|client| client.engine.is_some() && Some(client.id) == id);
        // A row that a failover brings back stays until it expires, unless a heartbeat renews it.
        let is_left = |client| lives(client).is_some() && !self.failover.has_happened();
        let row =
            self.store.leases.iter().find(|(_, row)| matches!(row.holder, Holder::Lease(_)) && is_left(row.client));
        let entry = self.store.entries.iter().find(|(_, entry)| is_left(entry.client));
        let left = match (row, entry) {
            (Some((name, row)), _) => Some(format!("{name} is held without a lease: {row:?}")),
            (None, Some((key, entry))) => Some(format!("an entry without a caller is left: {key:?} {entry:?}")),
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
