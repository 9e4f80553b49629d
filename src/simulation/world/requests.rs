//! Requests in transit: lost, late, answered and repeated ones.

use std::slice;
use std::sync::Arc;

use super::{
    ATTEMPT, ATTEMPTS, Client, LOCK_WAIT, MILLISECOND, PendingRequest, SECOND, Transaction, World, WorldEvent,
};
use crate::backend::memory::TransactionId;
use crate::engine::{Answer, Input, SharedError};
use crate::protocol::{ClientId, Granted, Notification, ReleaseOutcome, Request, RequestId, Response};

impl World {
    pub(super) fn attempt(&mut self, client: usize, request: RequestId) {
        let (life, sent_at) = (self.clients[client].life, self.clients[client].local(self.now));
        let Some(pending) = self.clients[client].requests.get_mut(&request) else {
            return;
        };
        pending.attempts += 1;
        pending.sent_at = sent_at;
        let (attempt, body) = (pending.attempts, pending.body.clone());
        self.after(ATTEMPT, WorldEvent::Overdue { client, life, request, attempt });
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
        self.after(delay, WorldEvent::Arrive { client, life, request, attempt, body, since });
    }

    pub(super) fn overdue(&mut self, client: usize, life: u32, request: RequestId, attempt: u32) {
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
        self.answer(client, life, request, Err(self.unanswered.clone()));
    }

    pub(super) fn answer(
        &mut self,
        client: usize,
        life: u32,
        request: RequestId,
        result: Result<Response, SharedError>,
    ) {
        let Some(pending) = self.clients[client].requests.remove(&request) else {
            return;
        };
        let may_linger = pending.attempts > 1;
        let is_repeated = may_linger || pending.found_connection_dead;
        let answer = Answer { sent_at: pending.sent_at, may_linger, is_repeated, result };
        self.feed(client, life, Input::Answer { request, answer });
    }

    pub(super) fn arrive(
        &mut self,
        client: usize,
        life: u32,
        request: RequestId,
        attempt: u32,
        body: Arc<Request>,
        since: u64,
    ) {
        if self.now < self.store_is_away_until {
            return;
        }
        let transaction = self.next_transaction();
        self.summary.statements += 1;
        let clock = self.store_clock();
        match self.store.prepare(transaction, clock, &body) {
            Err(_) if self.now - since < LOCK_WAIT => {
                let pause = self.random.range(MILLISECOND..10 * MILLISECOND);
                self.after(pause, WorldEvent::Arrive { client, life, request, attempt, body, since });
            }
            Err(_) => {
                self.disturb(client, self.now);
                self.tell(|| format!("  {} waits for a locked row too long", request.0));
                let delay = self.delay();
                self.after(delay, WorldEvent::Reply { client, life, request, attempt, response: Err(()) });
            }
            Ok(prepared) => {
                self.check_takeover(client, &body, &prepared, clock);
                self.check_grant_time(client, life, &body, &prepared);
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
                let notifications = self.notifications(&body, &prepared.response);
                let prepared = Transaction { prepared, notifications, client, life, request, attempt, is_rolled_back };
                self.transactions.insert(transaction, prepared);
                self.after(takes, WorldEvent::Commit { transaction });
            }
        }
    }

    pub(super) fn commit(&mut self, transaction: TransactionId) {
        let Some(prepared) = self.transactions.remove(&transaction) else {
            return;
        };
        let Transaction { prepared, notifications, client, life, request, attempt, is_rolled_back } = prepared;
        if is_rolled_back {
            self.tell(|| format!("  {} is rolled back, without a reply", request.0));
            return self.store.unlock(transaction);
        }
        let clock = self.store_clock();
        let response = self.store.commit(transaction, clock, prepared);
        self.check_fences();
        self.notify(notifications);
        if self.chance(self.profile.lost_replies) {
            self.disturb(client, self.now);
            return self.tell(|| format!("  the reply to {} is lost", request.0));
        }
        let delay = self.delay();
        self.after(delay, WorldEvent::Reply { client, life, request, attempt, response: Ok(response) });
    }

    /// Returns the notifications of a response that grants a name to entries, and whom they are for.
    fn notifications(&self, body: &Request, response: &Response) -> Vec<(ClientId, Notification)> {
        let (name, granted) = match (body, response) {
            (Request::Release(release), Response::Released(ReleaseOutcome::ToEntry(granted))) => {
                (&release.name, slice::from_ref(granted))
            }
            (Request::Transition(transition), Response::Transitioned(Some(granted))) => {
                (&transition.name, &granted[..])
            }
            _ => return Vec::new(),
        };
        let of = |granted: &Granted| {
            let client = self.store.entries.get(&(name.clone(), granted.id))?.client?;
            let notice = self.store.clients.get(&client)?.notice;
            Some((client, Notification::Granted { name: name.clone(), granted: *granted, notice }))
        };
        granted.iter().filter_map(of).collect()
    }

    /// Notifies clients of grants. Some notifications are lost, late, without a name, or for another
    /// client.
    fn notify(&mut self, notifications: Vec<(ClientId, Notification)>) {
        for (meant, notification) in notifications {
            // The new holder may be asked, or evicted, before it has heard of its grant.
            if let Notification::Granted { name, granted, .. } = &notification {
                let delay = self.random.below(50 * MILLISECOND);
                if self.random.permille(self.profile.asks) {
                    self.after(delay, WorldEvent::Ask { name: name.clone() });
                }
                if self.chance(10 * self.profile.evictions) {
                    self.after(delay, WorldEvent::Evict { name: name.clone(), token: granted.token });
                }
            }
            for client in 0..self.clients.len() {
                let is_meant = self.clients[client].id == meant;
                if !self.random.permille(if is_meant { 700 } else { 100 }) {
                    continue;
                }
                let has_name = self.profile.marks && self.random.permille(800);
                let notification = if has_name { notification.clone() } else { Notification::AnyName };
                let mut delay = self.delay();
                if self.chance(10 * self.profile.evictions.max(self.profile.late_requests)) {
                    delay += self.random.below(5 * SECOND);
                }
                let Client { life, connection, paused_until, .. } = self.clients[client];
                // A client may read the answer to a heartbeat first.
                if paused_until > self.now && self.random.permille(500) {
                    delay += paused_until - self.now + self.random.below(2 * SECOND);
                }
                self.after(delay, WorldEvent::Notify { client, life, connection, notification });
            }
        }
    }

    /// Passes a reply on. Without an answer in time, an attempt is followed by another one on a new
    /// connection, and a reply to the first is not read.
    pub(super) fn reply(
        &mut self,
        client: usize,
        life: u32,
        request: RequestId,
        attempt: u32,
        response: Result<Response, ()>,
    ) {
        let is_awaited = |pending: &PendingRequest| pending.life == life && pending.attempts == attempt;
        if !self.clients[client].requests.get(&request).is_some_and(is_awaited) {
            return;
        }
        let blocked = self.blocked.clone();
        self.answer(client, life, request, response.map_err(|()| blocked));
    }

    pub(super) fn next_transaction(&mut self) -> TransactionId {
        self.next_transaction += 1;
        self.next_transaction
    }
}
