//! Requests in transit: lost, late, answered and repeated ones.

use super::{ATTEMPT, ATTEMPTS, LOCK_WAIT, MILLISECOND, SECOND, Transaction, World, WorldEvent};
use crate::backend::memory::TransactionId;
use crate::engine::{Answer, Input, RequestId, SharedError};
use crate::protocol::{ReleaseOutcome, Request, Response};

impl World {
    pub(super) fn attempt(&mut self, client: usize, request: RequestId) {
        let life = self.clients[client].life;
        let Some(pending) = self.clients[client].requests.get_mut(&request) else {
            return;
        };
        pending.attempts += 1;
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
        let is_repeated = may_linger || pending.is_repeated;
        let answer = Answer { sent_at: pending.sent_at, may_linger, is_repeated, result };
        self.feed(client, life, Input::Answer { request, answer });
    }

    pub(super) fn arrive(
        &mut self,
        client: usize,
        life: u32,
        request: RequestId,
        attempt: u32,
        body: Request,
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
                self.after(delay, WorldEvent::Reply { client, life, request, response: Err(()) });
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
                let prepared = Transaction { prepared, client, life, request, is_rolled_back };
                self.transactions.insert(transaction, prepared);
                self.after(takes, WorldEvent::Commit { transaction });
            }
        }
    }

    pub(super) fn commit(&mut self, transaction: TransactionId) {
        let Some(prepared) = self.transactions.remove(&transaction) else {
            return;
        };
        let Transaction { prepared, client, life, request, is_rolled_back } = prepared;
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
        self.after(delay, WorldEvent::Reply { client, life, request, response: Ok(response) });
    }

    /// Notifies clients of a grant, which may be for another client. Some notifications are lost.
    pub(super) fn notify(&mut self, body: &Request, response: &Response) {
        let name = match (body, response) {
            (Request::Release(release), Response::Released(ReleaseOutcome::ToEntry(_))) => &release.name,
            (Request::Transition(transition), Response::Transitioned(Some(_))) => &transition.name,
            _ => return,
        };
        // The new holder may be asked before it has heard of its grant.
        if self.random.permille(self.profile.asks) {
            let delay = self.random.below(50 * MILLISECOND);
            self.after(delay, WorldEvent::Ask { name: name.clone() });
        }
        for client in 0..self.clients.len() {
            if self.random.permille(300) {
                let (life, delay) = (self.clients[client].life, self.delay());
                let name = (!self.random.permille(300)).then(|| name.clone());
                self.after(delay, WorldEvent::Notify { client, life, name });
            }
        }
    }

    pub(super) fn reply(&mut self, client: usize, life: u32, request: RequestId, response: Result<Response, ()>) {
        if self.clients[client].requests.get(&request).is_none_or(|pending| pending.life != life) {
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
