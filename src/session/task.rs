//! The task that owns the connection of all session locks of a client and sends every statement.
//!
//! A dropped future therefore abandons no statement. A server grants a session a lock again that
//! the session already holds, so the task decides exclusion among the callers of one client: it
//! asks the server for a name only when no caller of this client holds the name.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, WeakUnboundedSender};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};

use super::connection::{SessionConnection, StatementError};
use super::liveness::Liveness;
use super::message::{Message, SessionGrant, SessionWaiter};
use super::name::{Admission, Holders, SessionNameState};
use crate::backend::Backend;
use crate::backoff::{Backoff, OUTAGE_TOLERANCE};
use crate::clock::Moment;
use crate::error::{Error, LossCause, Result};
use crate::name::LockName;
use crate::panics;
use crate::protocol::timing::CONNECT_TIMEOUT;

/// The pauses between two requests for a name that another client holds.
const RETRY_BACKOFF: Backoff = Backoff::between(Duration::from_millis(1), Duration::from_millis(50));

/// A time in which requests were not answered.
#[derive(Clone, Copy)]
struct Outage {
    /// When the first of these requests was begun.
    since: Instant,
    /// When the latest of them failed.
    failed_at: Instant,
}

/// The task ends when every client and every lock has been dropped.
pub(super) struct SessionTask {
    backend: Arc<dyn Backend>,
    messages: WeakUnboundedSender<Message>,
    names: HashMap<LockName, SessionNameState>,
    /// When to ask the server again, for each name that a caller waits for.
    schedule: BTreeSet<(Instant, LockName)>,
    connection: Option<SessionConnection>,
    /// `None`: the last request was answered.
    outage: Option<Outage>,
    /// Every request is refused.
    is_draining: bool,
    /// Notified when no lock is held.
    drains: Vec<oneshot::Sender<()>>,
}

impl SessionTask {
    pub(super) fn new(backend: Arc<dyn Backend>, messages: WeakUnboundedSender<Message>) -> Self {
        let (names, schedule, drains) = (HashMap::new(), BTreeSet::new(), Vec::new());
        Self { backend, messages, names, schedule, connection: None, outage: None, is_draining: false, drains }
    }

    pub(super) async fn run(mut self, mut inbox: UnboundedReceiver<Message>) {
        loop {
            if !self.drains.is_empty() && self.names.values().all(|state| state.holders == Holders::None) {
                for drained in self.drains.drain(..) {
                    let _ = drained.send(());
                }
            }
            let message = match self.next_due() {
                Some(due) => match timeout_at(due, inbox.recv()).await {
                    Ok(message) => message,
                    Err(_) => {
                        self.run_due().await;
                        continue;
                    }
                },
                None => inbox.recv().await,
            };
            match message {
                Some(Message::Acquire(name, waiter)) => self.enqueue(name, waiter).await,
                Some(Message::Cancel(name)) => {
                    if let Some(state) = self.names.get_mut(&name) {
                        state.waiters.retain(|waiter| !waiter.reply.is_closed());
                    }
                    self.grant_or_schedule(&name).await;
                }
                Some(Message::Release { name, liveness, outcome }) => self.release(name, &liveness, outcome).await,
                Some(Message::Drain(done)) => {
                    self.is_draining = true;
                    self.refuse_waiters();
                    self.drains.push(done);
                }
                Some(Message::Shutdown(done)) => {
                    self.close(LossCause::Shutdown).await;
                    let _ = done.send(());
                    return;
                }
                None => return self.close(LossCause::Disconnected).await,
            }
            // A full inbox must not delay due names, nor the proof that the connection is alive. One
            // name follows each message: many contended names must not delay messages either.
            // During an outage without a connection, an attempt for a name takes seconds and a
            // message almost no time, so messages come first.
            let may_run = self.outage.is_none() || self.connection.is_some() || inbox.is_empty();
            if may_run && self.next_due().is_some_and(|due| due <= Instant::now()) {
                self.run_due().await;
            }
        }
    }

    fn next_due(&self) -> Option<Instant> {
        let name = self.schedule.first().map(|(due, _)| *due);
        let connection = self.connection.as_ref().map(SessionConnection::due);
        [name, connection].into_iter().flatten().min()
    }

    /// Proves that the connection is alive if that is due, and asks for the name that is due first.
    async fn run_due(&mut self) {
        if self.connection.as_ref().is_some_and(|connection| connection.due() <= Instant::now()) {
            self.maintain_connection().await;
        }
        if let Some((due, name)) = self.schedule.first().cloned()
            && due <= Instant::now()
        {
            self.grant_waiters(&name).await;
        }
    }

    async fn enqueue(&mut self, name: LockName, waiter: SessionWaiter) {
        if self.is_draining {
            let _ = waiter.reply.send(Err(Error::Closed));
            return;
        }
        let state = self.names.entry(name.clone()).or_default();
        while state.waiters.front().is_some_and(|first| first.reply.is_closed()) {
            state.waiters.pop_front();
        }
        if let Some(first) = state.waiters.front() {
            // In an outage, nobody knows whether the waiters ahead have to wait.
            if waiter.is_try && self.outage.is_none() {
                let _ = waiter.reply.send(Ok(None));
                return;
            }
            waiter.is_contended.fetch_or(first.is_contended.load(Ordering::Acquire), Ordering::AcqRel);
            state.waiters.push_back(waiter);
            return;
        }
        state.waiters.push_back(waiter);
        self.grant_or_schedule(&name).await;
    }

    /// Grants a name to its waiters: now or, in an outage, after the messages that have arrived.
    async fn grant_or_schedule(&mut self, name: &LockName) {
        match self.outage {
            None => self.grant_waiters(name).await,
            Some(_) => self.schedule_name(name, Some(Instant::now())),
        }
    }

    /// Grants a name to its waiters in order, until one of them has to wait.
    async fn grant_waiters(&mut self, name: &LockName) {
        self.drop_lost_connection();
        loop {
            self.schedule_name(name, None);
            let Some(state) = self.names.get_mut(name) else {
                return;
            };
            while state.waiters.front().is_some_and(|waiter| waiter.reply.is_closed()) {
                state.waiters.pop_front();
            }
            let Some(first) = state.waiters.front() else {
                state.backoff = None;
                if state.holders == Holders::None {
                    self.forget(name);
                }
                return;
            };
            let shared = first.shared;
            let is_granted = match state.holders.admission(shared) {
                Admission::Join => true,
                Admission::Wait => false,
                Admission::AskServer => match self.request(name, shared).await {
                    Ok(is_granted) => is_granted,
                    Err(error) => match self.fail_first(name, error) {
                        Some(due) => return self.schedule_name(name, Some(due)),
                        None => continue,
                    },
                },
            };
            if !is_granted {
                return self.refuse_tries(name);
            }
            self.grant_first(name, shared);
        }
    }

    fn grant_first(&mut self, name: &LockName, shared: bool) {
        let (Some(state), Some(connection)) = (self.names.get_mut(name), &mut self.connection) else {
            return;
        };
        if state.holders == Holders::None {
            connection.add_lock();
        }
        state.holders = state.holders.with_one_more(shared);
        state.backoff = None;
        let liveness = Arc::clone(connection.liveness());
        let (Some(first), Some(messages)) = (state.waiters.pop_front(), self.messages.upgrade()) else {
            return;
        };
        // A grant that nobody receives is dropped here, which releases the lock.
        let grant = SessionGrant { name: name.clone(), shared, liveness, messages, is_released: false };
        let _ = first.reply.send(Ok(Some(grant)));
    }

    /// Refuses the waiters that try once, and lets the others wait.
    fn refuse_tries(&mut self, name: &LockName) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let (tries, waiters) = std::mem::take(&mut state.waiters).into_iter().partition(|waiter| waiter.is_try);
        state.waiters = waiters;
        for SessionWaiter { reply, .. } in tries {
            let _ = reply.send(Ok(None));
        }
        for waiter in &state.waiters {
            waiter.is_contended.store(true, Ordering::Release);
        }
        if state.holders != Holders::None {
            // The holder's release grants the name.
            return;
        }
        if state.waiters.is_empty() {
            return self.forget(name);
        }
        let due = Instant::now() + state.backoff.get_or_insert(RETRY_BACKOFF).step();
        self.schedule_name(name, Some(due));
    }

    /// Handles an error, and returns when to ask again. `None`: the callers have received the
    /// error.
    fn fail_first(&mut self, name: &LockName, error: Error) -> Option<Instant> {
        let state = self.names.get_mut(name)?;
        let first = state.waiters.pop_front()?;
        let may_pass = self.outage.is_some_and(|outage| outage.since.elapsed() < OUTAGE_TOLERANCE);
        if may_pass && !first.is_try {
            state.waiters.push_front(first);
            return Some(Instant::now() + state.backoff.get_or_insert(RETRY_BACKOFF).step());
        }
        if !may_pass {
            // Without this, each waiter would meet the same error, one after the other. A refusal
            // on an open connection concerns this name only.
            let concerns_all = self.connection.is_none() && error.concerns_all();
            let names = self.names.values_mut().filter(|_| concerns_all);
            for waiter in names.flat_map(|state| state.waiters.drain(..)) {
                let _ = waiter.reply.send(Err(error.repeated()));
            }
        }
        let _ = first.reply.send(Err(error));
        None
    }

    /// Asks the server for a name that no caller of this client holds.
    async fn request(&mut self, name: &LockName, shared: bool) -> Result<bool> {
        let begun_at = Instant::now();
        let answer = self.try_lock(name, shared).await;
        let earlier = self.outage.filter(|outage| begun_at - outage.failed_at < OUTAGE_TOLERANCE);
        self.outage = matches!(answer, Err(Error::Unavailable { .. }))
            .then(|| Outage { since: earlier.map_or(begun_at, |outage| outage.since), failed_at: Instant::now() });
        answer
    }

    async fn try_lock(&mut self, name: &LockName, shared: bool) -> Result<bool> {
        let mut is_reused = self.connection.is_some();
        loop {
            let connection = self.connect().await?;
            match connection.try_lock(name, shared).await {
                Ok(is_granted) => return Ok(is_granted),
                Err(StatementError::Refused(error)) => return Err(Error::from_sqlx("acquire a session lock", error)),
                // The loss of an old connection says nothing about a new one.
                Err(StatementError::Lost(_)) if is_reused => self.disconnect(),
                Err(StatementError::Lost(reason)) => {
                    self.disconnect();
                    return Err(Error::Unavailable { attempted: "acquire a session lock", reason, source: None });
                }
            }
            is_reused = false;
        }
    }

    /// Returns the connection, and opens it first if necessary.
    async fn connect(&mut self) -> Result<&mut SessionConnection> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                let no_connection = |reason| Error::Unavailable {
                    attempted: "open a connection for session locks",
                    reason,
                    source: None,
                };
                let requested_at = Moment::now();
                let opening = panics::caught_in(self.backend.open_session_locks());
                let locks = match timeout(CONNECT_TIMEOUT, opening).await {
                    Ok(Ok(opened)) => opened?,
                    Ok(Err(panic)) => return Err(no_connection(panics::reason(&panic))),
                    Err(_) => return Err(no_connection(format!("there was none within {CONNECT_TIMEOUT:?}"))),
                };
                SessionConnection::new(locks, requested_at)
            }
        };
        Ok(self.connection.insert(connection))
    }

    async fn release(
        &mut self,
        name: LockName,
        liveness: &Arc<Liveness>,
        reply: Option<oneshot::Sender<Result<(), LossCause>>>,
    ) {
        self.drop_lost_connection();
        let outcome = match self.connection.as_mut().filter(|open| Arc::ptr_eq(open.liveness(), liveness)) {
            None => Err(liveness.loss().unwrap_or(LossCause::Disconnected)),
            Some(connection) => {
                let holders = self.names.get(&name).map_or(Holders::None, |state| state.holders);
                let (answer, remaining) = match holders {
                    Holders::Shared(count @ 2..) => {
                        let is_alive = connection.ping().await;
                        (is_alive.map(|()| true), Holders::Shared(count - 1))
                    }
                    _ => {
                        let shared = holders != Holders::Exclusive;
                        (connection.unlock(&name, shared).await, Holders::None)
                    }
                };
                match answer {
                    Ok(true) => {
                        if remaining == Holders::None {
                            connection.remove_lock();
                        }
                        if let Some(state) = self.names.get_mut(&name) {
                            state.holders = remaining;
                        }
                        Ok(())
                    }
                    // The locks of this connection are unknown now, so it must not grant any.
                    _ => {
                        self.disconnect();
                        Err(liveness.loss().unwrap_or(LossCause::Disconnected))
                    }
                }
            }
        };
        if let Some(reply) = reply {
            let _ = reply.send(outcome);
        }
        self.grant_or_schedule(&name).await;
    }

    /// Proves that the connection is alive, or closes it when no caller needs it.
    async fn maintain_connection(&mut self) {
        self.drop_lost_connection();
        let (has_waiters, now) = (!self.schedule.is_empty(), Instant::now());
        match self.connection.take() {
            Some(connection) if connection.locked() == 0 && !has_waiters => {
                connection.close(LossCause::Disconnected).await;
            }
            Some(mut connection) if connection.locked() == 0 => {
                connection.reset_idle(now);
                self.connection = Some(connection);
            }
            Some(connection) => {
                let connection = self.connection.insert(connection);
                if connection.ping().await.is_err() {
                    self.disconnect();
                }
            }
            None => {}
        }
    }

    /// Drops the connection if the server may have ended its session, as after a pause of the
    /// process.
    fn drop_lost_connection(&mut self) {
        if self.connection.as_ref().is_some_and(SessionConnection::is_lost) {
            self.disconnect();
        }
    }

    /// Drops the connection and loses its locks. An orderly close would wait for an answer that did
    /// not come.
    fn disconnect(&mut self) {
        let Some(connection) = self.connection.take() else {
            return;
        };
        if connection.locked() > 0 {
            let _ = panics::caught(|| {
                tracing::warn!(locks = connection.locked(), "lost the connection that session locks live on");
            });
        }
        drop(connection);
        // Waiters of this client ask for the lost names at once, in competition with other clients.
        let names: Vec<LockName> = self.names.keys().cloned().collect();
        for name in names {
            if let Some(state) = self.names.get_mut(&name) {
                state.holders = Holders::None;
            }
            self.schedule_name(&name, Some(Instant::now()));
        }
    }

    /// Sets when the server is asked for a name again.
    fn schedule_name(&mut self, name: &LockName, due: Option<Instant>) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        if let Some(earlier) = std::mem::replace(&mut state.retry_at, due) {
            self.schedule.remove(&(earlier, name.clone()));
        }
        if let Some(due) = due {
            self.schedule.insert((due, name.clone()));
        }
    }

    /// Removes a name that has no holder and no waiter. The loss of the connection may have
    /// scheduled it.
    fn forget(&mut self, name: &LockName) {
        self.schedule_name(name, None);
        self.names.remove(name);
    }

    /// Refuses every waiter.
    fn refuse_waiters(&mut self) {
        for waiter in self.names.values_mut().flat_map(|state| state.waiters.drain(..)) {
            let _ = waiter.reply.send(Err(Error::Closed));
        }
        self.schedule.clear();
        self.names.values_mut().for_each(|state| state.retry_at = None);
    }

    async fn close(&mut self, cause: LossCause) {
        self.refuse_waiters();
        self.names.clear();
        if let Some(connection) = self.connection.take() {
            connection.close(cause).await;
        }
    }
}
