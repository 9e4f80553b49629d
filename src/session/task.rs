//! Where session locks are asked for and given back: one task per client, which owns the connection and sends every statement.
//!
//! So a future that is dropped abandons nothing. And since a session is granted again what it holds already, exclusion among
//! the tasks of one client is decided here: the server is asked for a name once, when nobody here has it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, WeakUnboundedSender};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};

use super::connection::{Failure, Line};
use super::liveness::Bond;
use super::lock::SessionLock;
use super::message::{Message, Wanted};
use super::name::{Held, Spot, Turn};
use crate::backend::Backend;
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::error::{Error, LossCause, Result};
use crate::name::LockName;

/// The most that opening a connection may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(4);

/// For how long those who wait for a name wait for the database.
const PATIENCE: Duration = Duration::from_secs(3);

/// Between two tries for a name that somebody elsewhere has.
const BETWEEN_TRIES: Backoff = Backoff::between(Duration::from_millis(1), Duration::from_millis(50));

/// The task. It ends when nobody is left who could want anything of it: neither a client nor a lock.
pub(super) struct Clerk {
    backend: Arc<dyn Backend>,
    desk: WeakUnboundedSender<Message>,
    spots: HashMap<LockName, Spot>,
    /// When to ask for which name again.
    agenda: BTreeSet<(Instant, LockName)>,
    line: Option<Line>,
}

impl Clerk {
    pub(super) fn new(backend: Arc<dyn Backend>, desk: WeakUnboundedSender<Message>) -> Self {
        Self { backend, desk, spots: HashMap::new(), agenda: BTreeSet::new(), line: None }
    }

    pub(super) async fn work(mut self, mut messages: UnboundedReceiver<Message>) {
        loop {
            let message = match self.next_due() {
                Some(due) => match timeout_at(due, messages.recv()).await {
                    Ok(message) => message,
                    Err(_) => {
                        self.see_to_what_is_due().await;
                        continue;
                    }
                },
                None => messages.recv().await,
            };
            match message {
                Some(Message::Want(name, wanted)) => self.want(name, wanted).await,
                Some(Message::Look(name)) => {
                    if let Some(spot) = self.spots.get_mut(&name) {
                        spot.waiting.retain(|wanted| !wanted.reply.is_closed());
                    }
                    self.serve(&name).await;
                }
                Some(Message::Return { name, bond, verdict }) => self.take_back(name, &bond, verdict).await,
                Some(Message::Close(done)) => {
                    self.close(LossCause::Shutdown).await;
                    let _ = done.send(());
                    return;
                }
                None => return self.close(LossCause::Disconnected).await,
            }
            // A queue of messages must not keep it from what is due.
            if self.next_due().is_some_and(|due| due <= Instant::now()) {
                self.see_to_what_is_due().await;
            }
        }
    }

    fn next_due(&self) -> Option<Instant> {
        let ask = self.agenda.first().map(|(due, _)| *due);
        let line = self.line.as_ref().and_then(Line::due);
        [ask, line].into_iter().flatten().min()
    }

    async fn see_to_what_is_due(&mut self) {
        if self.line.as_ref().and_then(Line::due).is_some_and(|due| due <= Instant::now()) {
            self.look_after_the_line().await;
        }
        // As many as there are now: whoever is asked for again in the meantime is asked for in the next round.
        let now = Instant::now();
        let due: Vec<LockName> =
            self.agenda.iter().take_while(|(due, _)| *due <= now).map(|(_, n)| n.clone()).collect();
        for name in due {
            self.serve(&name).await;
        }
    }

    async fn want(&mut self, name: LockName, wanted: Wanted) {
        let spot = self.spots.entry(name.clone()).or_default();
        while spot.waiting.front().is_some_and(|first| first.reply.is_closed()) {
            spot.waiting.pop_front();
        }
        if let Some(first) = spot.waiting.front() {
            if !wanted.patient {
                let _ = wanted.reply.send(Ok(None));
                return;
            }
            // What is known to the first is known to all.
            wanted.taken.fetch_or(first.taken.load(Ordering::Acquire), Ordering::AcqRel);
            spot.waiting.push_back(wanted);
            return;
        }
        spot.waiting.push_back(wanted);
        self.serve(&name).await;
    }

    /// Lets in whoever stands first and may come in, and then the next.
    async fn serve(&mut self, name: &LockName) {
        self.forget_a_lost_line();
        loop {
            self.plan(name, None);
            let Some(spot) = self.spots.get_mut(name) else {
                return;
            };
            while spot.waiting.front().is_some_and(|wanted| wanted.reply.is_closed()) {
                spot.waiting.pop_front();
            }
            let Some(first) = spot.waiting.front() else {
                spot.pause = None;
                if spot.held == Held::No {
                    self.spots.remove(name);
                }
                return;
            };
            let shared = first.shared;
            let granted = match spot.held.turn(shared) {
                Turn::Join => true,
                Turn::Wait => false,
                Turn::Ask => match self.ask(name, shared).await {
                    Ok(granted) => granted,
                    Err(error) => match self.bear(name, error) {
                        Some(due) => return self.plan(name, Some(due)),
                        None => continue,
                    },
                },
            };
            if !granted {
                return self.refuse(name);
            }
            self.admit(name, shared);
        }
    }

    /// The first in line has the name.
    fn admit(&mut self, name: &LockName, shared: bool) {
        let (Some(spot), Some(line)) = (self.spots.get_mut(name), &mut self.line) else {
            return;
        };
        if spot.held == Held::No {
            line.locked += 1;
        }
        spot.held = spot.held.with_one_more(shared);
        spot.pause = None;
        let bond = Arc::clone(&line.bond.0);
        let (Some(first), Some(desk)) = (spot.waiting.pop_front(), self.desk.upgrade()) else {
            return;
        };
        // When nobody listens any more, the lock comes back by being dropped here.
        let _ = first.reply.send(Ok(Some(SessionLock { name: name.clone(), shared, bond, desk, returned: false })));
    }

    /// The first in line cannot have the name now.
    fn refuse(&mut self, name: &LockName) {
        let Some(spot) = self.spots.get_mut(name) else {
            return;
        };
        if spot.waiting.front().is_some_and(|first| !first.patient) {
            let first = spot.waiting.pop_front();
            let _ = first.map(|first| first.reply.send(Ok(None)));
        }
        for wanted in &spot.waiting {
            wanted.taken.store(true, Ordering::Release);
        }
        if spot.held != Held::No {
            // Its holder is here, and will come by.
            return;
        }
        if spot.waiting.is_empty() {
            self.spots.remove(name);
            return;
        }
        let due = Instant::now() + spot.pause.get_or_insert(BETWEEN_TRIES).step();
        self.plan(name, Some(due));
    }

    /// When to ask again after an error; `None`: those whom it concerns have been told.
    fn bear(&mut self, name: &LockName, error: Error) -> Option<Instant> {
        let spot = self.spots.get_mut(name)?;
        let first = spot.waiting.pop_front()?;
        if first.patient {
            let since = *spot.trouble.get_or_insert_with(Instant::now);
            if matches!(error, Error::Unavailable { .. }) && since.elapsed() < PATIENCE {
                spot.waiting.push_front(first);
                return Some(Instant::now() + spot.pause.get_or_insert(BETWEEN_TRIES).step());
            }
            // What concerns all, the others would learn one after the other.
            let names = self.spots.values_mut().filter(|_| error.concerns_all());
            for wanted in names.flat_map(|spot| spot.waiting.drain(..)) {
                let _ = wanted.reply.send(Err(error.repeated()));
            }
        }
        let _ = first.reply.send(Err(error));
        None
    }

    /// Asks the server for a name that nobody here has.
    async fn ask(&mut self, name: &LockName, shared: bool) -> Result<bool> {
        let mut known = self.line.is_some();
        loop {
            let line = self.connected().await?;
            match line.send(|anchor| anchor.take(name, shared)).await {
                Ok(granted) => {
                    self.spots.entry(name.clone()).or_default().trouble = None;
                    return Ok(granted);
                }
                Err(Failure::Refused(error)) => return Err(Error::from_sqlx("acquire a session lock", error)),
                // That a connection was lost says nothing about the next one.
                Err(Failure::Lost(_)) if known => self.hang_up(),
                Err(Failure::Lost(reason)) => {
                    self.hang_up();
                    return Err(Error::Unavailable { attempted: "acquire a session lock", reason, source: None });
                }
            }
            known = false;
        }
    }

    async fn connected(&mut self) -> Result<&mut Line> {
        let line = match self.line.take() {
            Some(line) => line,
            None => {
                let unconnected = || Error::Unavailable {
                    attempted: "open a connection for session locks",
                    reason: format!("there was none within {CONNECT_WITHIN:?}"),
                    source: None,
                };
                let asked = Moment::now();
                let anchor = timeout(CONNECT_WITHIN, self.backend.anchor()).await.map_err(|_| unconnected())??;
                Line::new(anchor, asked)
            }
        };
        Ok(self.line.insert(line))
    }

    async fn take_back(
        &mut self,
        name: LockName,
        bond: &Arc<Bond>,
        verdict: Option<oneshot::Sender<Result<(), LossCause>>>,
    ) {
        self.forget_a_lost_line();
        let outcome = match self.line.as_mut().filter(|line| Arc::ptr_eq(&line.bond.0, bond)) {
            None => Err(bond.loss().unwrap_or(LossCause::Disconnected)),
            Some(line) => {
                let held = self.spots.get(&name).map_or(Held::No, |spot| spot.held);
                let (answer, left) = match held {
                    Held::By(others @ 2..) => {
                        (line.send(|anchor| anchor.prove()).await.map(|()| true), Held::By(others - 1))
                    }
                    _ => (line.send(|anchor| anchor.give_back(&name, held != Held::Alone)).await, Held::No),
                };
                match answer {
                    Ok(true) => {
                        if left == Held::No {
                            line.locked = line.locked.saturating_sub(1);
                            line.idle_since = Instant::now();
                        }
                        if let Some(spot) = self.spots.get_mut(&name) {
                            spot.held = left;
                        }
                        Ok(())
                    }
                    // It is not known what this connection holds: nobody is to have it after us.
                    _ => {
                        self.hang_up();
                        Err(bond.loss().unwrap_or(LossCause::Disconnected))
                    }
                }
            }
        };
        if let Some(verdict) = verdict {
            let _ = verdict.send(outcome);
        }
        self.serve(&name).await;
    }

    /// Asks whether the connection is still there, or closes it when it is not needed any more.
    async fn look_after_the_line(&mut self) {
        self.forget_a_lost_line();
        let (waited_for, now) = (!self.agenda.is_empty(), Instant::now());
        match self.line.take() {
            Some(line) if line.locked == 0 && !waited_for => line.close(LossCause::Disconnected).await,
            Some(line) if line.locked == 0 => self.line = Some(Line { idle_since: now, ..line }),
            Some(line) => {
                let line = self.line.insert(line);
                if line.send(|anchor| anchor.prove()).await.is_err() {
                    self.hang_up();
                }
            }
            None => {}
        }
    }

    /// After the process stood still, the server may have given us up.
    fn forget_a_lost_line(&mut self) {
        if self.line.as_ref().is_some_and(|line| line.bond.0.loss().is_some()) {
            self.hang_up();
        }
    }

    /// Drops the connection, and with it all that hangs on it. Never in order: that would wait for an answer that did not come.
    fn hang_up(&mut self) {
        let Some(line) = self.line.take() else {
            return;
        };
        if line.locked > 0 {
            tracing::warn!(locks = line.locked, "lost the connection that session locks live on");
        }
        drop(line);
        // Whoever waits for one of ours may have it now, if another process is not quicker.
        let names: Vec<LockName> = self.spots.keys().cloned().collect();
        for name in names {
            if let Some(spot) = self.spots.get_mut(&name) {
                spot.held = Held::No;
            }
            self.plan(&name, Some(Instant::now()));
        }
    }

    /// Has a name asked for at that moment, and not before.
    fn plan(&mut self, name: &LockName, due: Option<Instant>) {
        let Some(spot) = self.spots.get_mut(name) else {
            return;
        };
        if let Some(planned) = std::mem::replace(&mut spot.due, due) {
            self.agenda.remove(&(planned, name.clone()));
        }
        if let Some(due) = due {
            self.agenda.insert((due, name.clone()));
        }
    }

    async fn close(&mut self, cause: LossCause) {
        for wanted in self.spots.drain().flat_map(|(_, spot)| spot.waiting) {
            let _ = wanted.reply.send(Err(Error::Closed));
        }
        self.agenda.clear();
        if let Some(line) = self.line.take() {
            line.close(cause).await;
        }
    }
}
