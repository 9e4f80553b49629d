//! What stands behind a [`Locks`](crate::Locks) handle: the wiring between waiting room, pump and keeper.
//!
//! Requests go down (room → pump → backend), answers come back in the reply that a verb carries. Nothing below calls up.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::backend::{Backend, Claim, Holding, Kind, Release, Standing};
use crate::clock::Moment;
use crate::error::{Error, LossCause, Result};
use crate::lease::Lease;
use crate::lease::renewal::{Keeper, Tenure, margin};
use crate::name::LockName;
use crate::owner::{Hold, Owner};
use crate::pump::{Answer, Pump, Reply, Verb};
use crate::token::FencingToken;
use crate::waiting::{Departure, Errand, Room, Waiter};

/// What the builder decides.
pub(crate) struct Settings {
    pub(crate) min_ttl: Duration,
    pub(crate) max_ttl: Duration,
    pub(crate) holder: Arc<str>,
}

impl Settings {
    /// Refuses a TTL that is out of range.
    pub(crate) fn check_ttl(&self, what: &'static str, ttl: Duration) -> Result<()> {
        Error::check_range(what, ttl, self.min_ttl, self.max_ttl)
    }
}

pub(crate) struct Client {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) kind: Kind,
    pub(crate) settings: Settings,
    pub(crate) pump: Pump,
    pub(crate) keeper: Keeper,
    room: Mutex<Room>,
}

impl Client {
    pub(crate) fn new(backend: Arc<dyn Backend>, kind: Kind, settings: Settings, connections: usize) -> Arc<Self> {
        Arc::new(Self {
            pump: Pump::new(&backend, connections),
            backend,
            kind,
            settings,
            keeper: Keeper::default(),
            room: Mutex::default(),
        })
    }

    /// Starts the tasks on the present runtime, the first time.
    pub(crate) fn start(self: &Arc<Self>) {
        self.pump.start();
        self.keeper.start(self);
    }

    // ---- requests

    /// Somebody wants a name.
    pub(crate) fn enter(self: &Arc<Self>, waiter: Waiter) {
        let errands = self.room().enter(waiter);
        self.run(errands);
    }

    /// Somebody wants a name that its owner may hold already: re-enter if so, stand in line if not.
    pub(crate) fn join(self: &Arc<Self>, waiter: Waiter) {
        if self.room().is_closed() {
            let _ = waiter.reply.send(Err(Error::Closed));
            return;
        }
        let claim = waiter.claim.clone();
        let client = Arc::clone(self);
        let reply = Reply::to(move |answer: Answer<Option<FencingToken>>| match answer.outcome {
            Ok(Some(_)) if client.room().is_closed() => {
                let c = &waiter.claim;
                client.withdraw(&c.name, c.owner, c.hold, None);
                let _ = waiter.reply.send(Err(Error::Closed));
            }
            Ok(Some(token)) => {
                let lease = client.begin(&waiter, token, answer.sent_at);
                client.room().joined(lease.holding());
                let answer = if lease.is_held() { Ok(Some(lease)) } else { Err(late()) };
                // When nobody listens any more, the lease goes back by being dropped here.
                let _ = waiter.reply.send(answer);
            }
            Ok(None) => client.enter(waiter),
            Err(error) => {
                let c = &waiter.claim;
                client.withdraw(&c.name, c.owner, c.hold, None);
                let _ = waiter.reply.send(Err(error));
            }
        });
        self.pump.send(Verb::Join(claim, reply));
    }

    /// A holder gives its hold back.
    pub(crate) fn leave(self: &Arc<Self>, tenure: &Tenure, verdict: Option<oneshot::Sender<Result<()>>>) {
        let departure = Departure { verdict, holding: tenure.holding.clone(), deadline: tenure.deadline() };
        let errands = self.room().leave(departure, tenure.unserved());
        self.run(errands);
    }

    /// A hold has ended without being given back.
    pub(crate) fn vacate(self: &Arc<Self>, holding: &Holding) {
        let errands = self.room().vacate(holding);
        self.run(errands);
    }

    /// A waiter has gone.
    pub(crate) fn forget(&self, claim: &Claim) {
        self.room().forget(&claim.name, claim.hold);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.room().is_closed()
    }

    /// Whether the database has been asked about a name and has not said a word.
    pub(crate) fn is_unanswered(&self, name: &LockName) -> bool {
        self.room().is_unanswered(name)
    }

    /// The timer of a resting line has run out.
    pub(crate) fn knock(self: &Arc<Self>, name: &LockName) {
        let errands = self.room().knock(name);
        self.run(errands);
    }

    /// A holding that this process takes over from another.
    pub(crate) fn adopt(&self, holding: &Holding) {
        self.room().joined(holding);
    }

    /// Makes a holding of this owner last at least `ttl` from now, by entering once more and leaving at once: unlike a
    /// renewal, that never takes anything from what its holder was promised. `false`: it has ended.
    pub(crate) async fn touch(
        self: &Arc<Self>,
        name: LockName,
        owner: Owner,
        token: FencingToken,
        ttl: Duration,
    ) -> Result<bool> {
        let holder = Arc::clone(&self.settings.holder);
        let claim = Claim { name, owner, hold: Hold::random(), ttl, holder, label: "".into() };
        let entered = claim.clone();
        let client = Arc::clone(self);
        let (touched, answered) = oneshot::channel();
        // In the reply, so that nothing is left behind when this future is dropped.
        let reply = Reply::to(move |answer: Answer<Option<FencingToken>>| {
            if !matches!(answer.outcome, Ok(None)) {
                client.withdraw(&entered.name, entered.owner, entered.hold, None);
            }
            let _ = touched.send(answer.outcome);
        });
        self.pump.send(Verb::Join(claim, reply));
        Ok(answered.await.unwrap_or(Err(Error::Closed))? == Some(token))
    }

    /// Sends a verb and waits for its answer.
    pub(crate) async fn ask<T: Send + 'static>(self: &Arc<Self>, verb: impl FnOnce(Reply<T>) -> Verb) -> Answer<T> {
        self.start();
        let (answer, answered) = oneshot::channel();
        self.pump.send(verb(Reply::to(move |a| {
            let _ = answer.send(a);
        })));
        answered.await.unwrap_or_else(|_| Answer { outcome: Err(Error::Closed), sent_at: Moment::now(), resent: false })
    }

    /// Ends every holding and every wait, gives back what was held, and closes the connections.
    pub(crate) async fn shutdown(self: &Arc<Self>) -> Result<()> {
        self.start();
        let refused = self.room().close();
        self.run(refused);
        let mut returned = Vec::new();
        loop {
            let before = returned.len();
            for tenure in self.keeper.tenures() {
                if tenure.lose(LossCause::Shutdown) {
                    let (verdict, receiver) = oneshot::channel();
                    self.leave(&tenure, Some(verdict));
                    returned.push(receiver);
                }
            }
            // What was in flight may have been granted meanwhile: look again.
            self.pump.flush().await;
            if returned.len() == before {
                break;
            }
        }
        let mut outcome = Ok(());
        for verdict in returned {
            match verdict.await {
                Ok(Err(error)) if !error.is_lost() => outcome = Err(error),
                _ => {}
            }
        }
        self.pump.close().await;
        outcome
    }

    // ---- answers

    fn asked(self: &Arc<Self>, claim: &Claim, answer: Answer<Option<FencingToken>>) {
        let errands = match answer.outcome {
            Ok(Some(token)) => {
                let too_late = (answer.sent_at + claim.ttl.saturating_sub(margin(claim.ttl))).is_past();
                self.room().granted(claim, token, answer.sent_at, too_late)
            }
            Ok(None) => self.room().refused(claim, self.backend.skips_locked_rows()),
            Err(error) => {
                self.withdraw(&claim.name, claim.owner, claim.hold, None);
                self.room().failed(claim, error)
            }
        };
        self.run(errands);
    }

    /// Ends what may still stand in the row although nobody counts on it: a request that may have taken effect although
    /// it failed, or a lease that ran out. Should this fail too, the TTL ends it.
    pub(crate) fn withdraw(&self, name: &LockName, owner: Owner, hold: Hold, token: Option<FencingToken>) {
        let release = Release { name: name.clone(), owner, hold, token, hold_at_least: Duration::ZERO };
        self.pump.send(Verb::Release(release, Reply::to(|_| {})));
    }

    fn begin(self: &Arc<Self>, waiter: &Waiter, token: FencingToken, sent_at: Moment) -> Lease {
        let holding =
            Holding { name: waiter.claim.name.clone(), owner: waiter.claim.owner, hold: waiter.claim.hold, token };
        let tenure = Tenure::begin(holding, waiter.claim.ttl, waiter.terms, sent_at);
        Lease::begin(Arc::clone(self), tenure)
    }

    fn run(self: &Arc<Self>, errands: Vec<Errand>) {
        for errand in errands {
            let client = Arc::clone(self);
            match errand {
                Errand::Ask(claim) => {
                    let asked = claim.clone();
                    let reply = Reply::to(move |answer| client.asked(&asked, answer));
                    self.pump.send(Verb::Acquire(claim, reply));
                }
                Errand::HandOff(hand_off, departure) => {
                    let claim = hand_off.to.clone();
                    let reply = Reply::to(move |answer: Answer<Option<FencingToken>>| match answer.outcome {
                        Ok(Some(_)) => {
                            departure.tell(Ok(()));
                            client.asked(&claim, answer);
                        }
                        Ok(None) => {
                            let errands = client.room().not_handed_off(departure);
                            client.run(errands);
                        }
                        // The waiter asks, and so finds out whether the name changed hands: a claim is known by its hold.
                        Err(error) => {
                            let error = departure.unknown_if(answer.resent, error);
                            departure.tell(Err(error));
                            let errands = client.room().left(&claim.name);
                            client.run(errands);
                        }
                    });
                    self.pump.send(Verb::HandOff(hand_off, reply));
                }
                Errand::Release { release, departure, tracked } => {
                    let name = release.name.clone();
                    let reply = Reply::to(move |answer: Answer<Standing>| {
                        let verdict = departure.judge(answer);
                        let errands =
                            if tracked { client.room().left(&name) } else { client.room().left_untracked(&name) };
                        client.run(errands);
                        departure.tell(verdict);
                    });
                    self.pump.send(Verb::Release(release, reply));
                }
                Errand::Rest(name, pause) => self.keeper.knock_in(pause, name),
                Errand::Look(name) => {
                    let looked = name.clone();
                    let reply = Reply::to(move |answer: Answer<Option<crate::backend::Row>>| {
                        let held = answer.outcome.map(|row| {
                            let row = row?;
                            Some((row.held_for()?, row.owner.parse().ok()))
                        });
                        let errands = client.room().looked(&looked, held);
                        client.run(errands);
                    });
                    self.pump.send(Verb::Look(name, reply));
                }
                Errand::Admit { waiter, token, sent_at } => {
                    let lease = self.begin(&waiter, token, sent_at);
                    // When nobody listens any more, the lease goes back by being dropped here.
                    let _ = waiter.reply.send(Ok(Some(lease)));
                }
                Errand::Join(waiter) => self.join(waiter),
                Errand::Refuse(waiter, answer) => {
                    let _ = waiter.reply.send(answer);
                }
            }
        }
    }

    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.keeper.stop();
    }
}

/// The error of a grant that came too late to be used.
pub(crate) fn late() -> Error {
    Error::Unavailable {
        attempted: "acquire",
        reason: "the grant arrived after the lease had ended".into(),
        source: None,
    }
}

impl Departure {
    /// Whether the name was still the holder's when it was given back.
    fn judge(&self, answer: Answer<Standing>) -> Result<()> {
        let Holding { name, token, .. } = &self.holding;
        match answer.outcome {
            Ok(Standing::Released) => Ok(()),
            // Our own first request has ended it, for before the deadline nobody else could have.
            Ok(Standing::Superseded) if answer.resent && !self.deadline.is_past() => Ok(()),
            Ok(Standing::Superseded) => {
                let lost = Error::Lost { name: name.clone(), token: *token, cause: LossCause::Superseded };
                Err(self.unknown_if(answer.resent, lost))
            }
            Ok(Standing::Held | Standing::Unsettled) => Err(self.unknown_if(true, Error::Closed)),
            Err(error) => Err(self.unknown_if(answer.resent, error)),
        }
    }

    /// The error of a release, unless an earlier request may have carried it out unnoticed.
    fn unknown_if(&self, resent: bool, error: Error) -> Error {
        if resent { Error::Unknown { attempted: "release", name: self.holding.name.clone() } } else { error }
    }

    fn tell(self, verdict: Result<()>) {
        if let Some(receiver) = self.verdict {
            let _ = receiver.send(verdict);
        }
    }
}
