//! What stands behind a [`Locks`](crate::Locks) handle: the wiring between waiting room, pump and keeper.
//!
//! Requests go down (room → pump → backend), answers come back in the reply that a verb carries. Nothing below calls up.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::sleep;
use uuid::Uuid;

use crate::backend::{Backend, Claim, Holding, Kind, LastEviction, Mode, Release, Renewal, Row, Standing, Ticket};
use crate::clock::{Moment, reliance};
use crate::error::{Error, LossCause, Result};
use crate::idempotency::Duplicates;
use crate::lease::Lease;
use crate::lease::renewal::{Keeper, Tenure};
use crate::multi::Gatherings;
use crate::name::LockName;
use crate::owner::{Hold, Owner};
use crate::pump::{Answer, Attend, Attended, Pump, Reply, Serve, Served, Verb};
use crate::row::Rows;
use crate::session::Desk;
use crate::token::FencingToken;
use crate::waiting::{Departure, Errand, Grant, Patience, Room, Waiter, WaiterId};
use crate::wakeup::Bell;

/// The time between two tries for a share that is free, while somebody stands before it who may be only trying.
const BETWEEN_TRIES: Duration = Duration::from_millis(5);

/// How often a release is repeated that the database leaves without effect. One repetition is needed when the holding's owner
/// enters the name again meanwhile.
const IGNORED: u32 = 8;

/// By how much the pause between two such releases grows.
const BETWEEN_RELEASES: Duration = Duration::from_millis(10);

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
    /// For session locks.
    pub(crate) desk: Desk,
    /// Whose places in line are ours.
    pub(crate) id: Arc<str>,
    pub(crate) bell: Bell,
    pub(crate) rows: Rows,
    pub(crate) duplicates: Duplicates,
    pub(crate) gatherings: Gatherings,
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
            desk: Desk::default(),
            id: Uuid::new_v4().simple().to_string().into(),
            bell: Bell::default(),
            rows: Rows::default(),
            duplicates: Duplicates::default(),
            gatherings: Gatherings::default(),
            // On SQLite nothing can be renewed while somebody writes, and this one might.
            room: Mutex::new(Room::new(kind == Kind::Sqlite)),
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
                let grant = Grant { token, sent_at: answer.sent_at, lasts: waiter.claim.ttl, others: false };
                // Who holds it alone may as well share it.
                let lease = client.begin(&waiter, Mode::Exclusive, grant);
                client.room().entered(lease.holding());
                if lease.is_held() {
                    // When nobody listens any more, the lease goes back by being dropped here.
                    let _ = waiter.reply.send(Ok(Some(lease)));
                } else if waiter.patience == Patience::Wait {
                    client.enter(waiter.again());
                } else {
                    let _ = waiter.reply.send(Err(late()));
                }
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
        let (holding, deadline) = (tenure.holding.clone(), tenure.deadline());
        let departure = Departure { verdict, holding, deadline, resent: false, ignored: 0 };
        if tenure.holding.mode == Mode::Exclusive {
            let errands = self.room().leave(departure, tenure.unserved());
            return self.run(errands);
        }
        let client = Arc::clone(self);
        let left = move |answer: Answer<Standing>| {
            let name = departure.holding.name.clone();
            client.conclude(departure, answer);
            let errands = client.room().serve_again(&name);
            client.run(errands);
        };
        match tenure.still_to_serve() {
            Some(ttl) => {
                let renewal = Renewal { given_back: true, ..Renewal::new(tenure.holding.clone(), ttl) };
                let kept = |standing| if standing == Standing::Held { Standing::Released } else { standing };
                self.pump.send(Verb::Renew(renewal, Reply::to(move |answer| left(answer.map(kept)))));
            }
            None => {
                let gone = |was_there| if was_there { Standing::Released } else { Standing::Superseded };
                let spot = tenure.holding.spot();
                self.pump.send(Verb::Leave(spot, Reply::to(move |answer| left(answer.map(gone)))));
            }
        }
    }

    /// A hold has ended without being given back.
    pub(crate) fn vacate(self: &Arc<Self>, holding: &Holding) {
        let errands = self.room().vacate(holding);
        self.run(errands);
    }

    /// A waiter waits no longer, and wants to be told when it has left the line.
    pub(crate) fn dismiss(self: &Arc<Self>, name: &LockName, id: WaiterId) {
        let errands = self.room().dismiss(name, id);
        self.run(errands);
    }

    /// A waiter has gone.
    pub(crate) fn forget(self: &Arc<Self>, name: &LockName, id: WaiterId) {
        let errands = self.room().forget(name, id);
        self.run(errands);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.room().is_closed()
    }

    /// Whether the database has been asked about a name and has not said a word.
    pub(crate) fn is_unanswered(&self, name: &LockName) -> bool {
        self.room().is_unanswered(name)
    }

    /// It may be time to look after the places in line.
    pub(crate) fn attend(self: &Arc<Self>) {
        let (due, near) = {
            let mut room = self.room();
            (room.attend(), room.is_near())
        };
        if near {
            self.bell.tend(self);
        }
        let (keep, watch) = match due {
            Ok(places) => places,
            Err(due) => return due.into_iter().for_each(|due| self.keeper.attend_at(due)),
        };
        let slowly = !keep.is_empty();
        let client = Arc::clone(self);
        let reply = Reply::to(move |answer: Answer<Attended>| {
            let errands = client.room().attended(answer.sent_at, slowly, answer.outcome);
            client.run(errands);
        });
        self.pump.send(Verb::Attend(Attend { keep, bell: self.bell.channel(&self.id), watch }, reply));
    }

    /// How many of ours wait before a waiter, as long as they have not joined the database's line.
    pub(crate) fn ahead_of(&self, name: &LockName, id: WaiterId) -> usize {
        self.room().ahead_of(name, id)
    }

    /// The mark of a waiter's place in the database's line, if it has one.
    pub(crate) fn mark_of(&self, name: &LockName, id: WaiterId) -> Option<String> {
        self.room().hold_of(name, id).map(Hold::mark)
    }

    /// Somebody says that it has granted a name to one of ours.
    pub(crate) fn told(self: &Arc<Self>, mark: &str, token: FencingToken) {
        let errands = self.room().told(mark, token);
        self.run(errands);
    }

    /// Whether grants are told from now on. Then all is looked at once, for what was told before was not heard.
    pub(crate) fn is_told(self: &Arc<Self>, told: bool) {
        self.room().is_told(told);
        self.keeper.attend_at(Moment::now());
        self.gatherings.call_all();
    }

    /// Whether anybody stands in line.
    pub(crate) fn stands(&self) -> bool {
        self.room().stands() || self.gatherings.stand()
    }

    /// A name may be somebody's turn now.
    pub(crate) fn serve(self: &Arc<Self>, name: &LockName) {
        let errands = self.room().serve_again(name);
        self.run(errands);
    }

    /// A holding that this process takes over from another.
    pub(crate) fn adopt(&self, holding: &Holding) {
        self.room().entered(holding);
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
        self.bell.silence();
        let sessions = self.desk.close();
        self.gatherings.close().await;
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
            // What was in flight may have been granted meanwhile: look again. Whoever left a line may have been let in just
            // then, and what that took back goes to the next: three steps.
            for _ in 0..3 {
                self.pump.flush().await;
            }
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
        sessions.await;
        outcome
    }

    // ---- answers

    fn asked(self: &Arc<Self>, claim: &Claim, answer: Answer<Option<FencingToken>>) {
        let errands = match answer.outcome {
            Ok(Some(token)) => {
                let too_late = (answer.sent_at + reliance(claim.ttl)).is_past();
                self.room().granted(claim, token, answer.sent_at, too_late)
            }
            // Whoever waits in line will see.
            Ok(None) if answer.resent && self.room().only_tries(claim) => return self.doubt(claim),
            Ok(None) => self.room().refused(claim),
            Err(error) => {
                self.withdraw(&claim.name, claim.owner, claim.hold, None);
                self.room().failed(claim, error)
            }
        };
        self.run(errands);
    }

    /// A claim was refused that had been sent before without an answer. That one may stand in its own way: it holds the row while
    /// it waits for the disk, or for a standby. Then the name looks as free as before, and nothing is known.
    fn doubt(self: &Arc<Self>, claim: &Claim) {
        let (client, claim) = (Arc::clone(self), claim.clone());
        let name = claim.name.clone();
        let reply = Reply::to(move |answer: Answer<Option<Row>>| {
            let free = match &answer.outcome {
                Ok(row) => row.as_ref().is_none_or(Row::is_free),
                Err(_) => true,
            };
            let errands = if free {
                client.withdraw(&claim.name, claim.owner, claim.hold, None);
                let reason = "a request was not answered, and what it asked for is not done yet".into();
                client.room().failed(&claim, Error::Unavailable { attempted: "acquire", reason, source: None })
            } else {
                client.room().refused(&claim)
            };
            client.run(errands);
        });
        self.pump.send(Verb::Look(name, reply));
    }

    /// Ends what may still stand in the row although nobody counts on it: a request that may have taken effect although
    /// it failed, or a lease that ran out. Should this fail too, the TTL ends it.
    pub(crate) fn withdraw(self: &Arc<Self>, name: &LockName, owner: Owner, hold: Hold, token: Option<FencingToken>) {
        let release = Release { name: name.clone(), owner, hold, token, hold_at_least: Duration::ZERO };
        let client = Arc::clone(self);
        let again = release.clone();
        let reply = Reply::to(move |answer: Answer<Standing>| match answer.outcome {
            Ok(Standing::Awaited) => {
                let name = again.name.clone();
                client.send_serve(name.clone(), Some(again), move |client, answer| {
                    let Ok(served) = answer.outcome else {
                        return;
                    };
                    let errands = client.room().given_up(&name, answer.sent_at, &served);
                    client.run(errands);
                });
            }
            // Until now a transaction of its holder may have kept the name from whoever is next.
            Ok(Standing::Superseded | Standing::Overtaken) => client.serve(&again.name),
            _ => {}
        });
        self.pump.send(Verb::Release(release, reply));
    }

    /// The same for a holding that has ended.
    pub(crate) fn abandon(self: &Arc<Self>, h: &Holding) {
        if h.mode == Mode::Exclusive {
            return self.withdraw(&h.name, h.owner, h.hold, Some(h.token));
        }
        let (client, name) = (Arc::clone(self), h.name.clone());
        self.pump.send(Verb::Leave(h.spot(), Reply::to(move |_| client.serve(&name))));
    }

    fn begin(self: &Arc<Self>, waiter: &Waiter, mode: Mode, grant: Grant) -> Lease {
        let Claim { name, owner, hold, ttl, .. } = &waiter.claim;
        let holding = Holding { name: name.clone(), owner: *owner, hold: *hold, mode, token: grant.token };
        let tenure = Tenure::begin(holding, *ttl, waiter.terms, grant.sent_at, grant.lasts);
        Lease::begin(Arc::clone(self), tenure, grant.lasts < *ttl)
    }

    /// Lets those in whose turn it is, and tells what came of it once our own have been told.
    fn send_serve(
        self: &Arc<Self>,
        name: LockName,
        from: Option<Release>,
        then: impl FnOnce(&Arc<Self>, Answer<Served>) + Send + 'static,
    ) {
        let (terms, readers) = {
            let room = self.room();
            (room.terms(&name), room.readers(&name))
        };
        let client = Arc::clone(self);
        let reply = Reply::to(move |answer: Answer<Served>| {
            if let Ok(Served { turn: Some(mark), .. }) = &answer.outcome {
                client.gatherings.call(mark);
            }
            then(&client, answer);
        });
        let bell = self.bell.channel(&self.id);
        self.pump.send(Verb::Serve(Serve { name, from, terms, readers, bell }, reply));
    }

    /// Takes a place out of the line, or gives back what it was granted.
    pub(crate) fn send_leave(self: &Arc<Self>, claim: Claim, then: impl FnOnce() + Send + 'static) {
        let client = Arc::clone(self);
        let spot = claim.spot();
        let reply = Reply::to(move |answer: Answer<bool>| {
            if claim.mode == Mode::Exclusive && !matches!(answer.outcome, Ok(true)) {
                client.withdraw(&claim.name, claim.owner, claim.hold, None);
            }
            if answer.outcome.is_ok() {
                client.serve(&claim.name);
            }
            then();
        });
        self.pump.send(Verb::Leave(spot, reply));
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
                            let errands = client.room().not_handed_off(&claim, departure.sent(answer.resent));
                            client.run(errands);
                        }
                        // The waiter asks, and so finds out whether the name changed hands: a claim is known by its hold.
                        Err(error) => {
                            let error = departure.unknown_if(answer.resent, error);
                            departure.tell(Err(error));
                            let errands = client.room().hand_off_failed(&claim);
                            client.run(errands);
                        }
                    });
                    self.pump.send(Verb::HandOff(hand_off, reply));
                }
                Errand::Release { release, departure, tracked } => {
                    let name = release.name.clone();
                    let reply = Reply::to(move |answer: Answer<Standing>| {
                        if matches!(answer.outcome, Ok(Standing::Awaited)) {
                            return client.run(vec![Errand::Pass(departure.sent(answer.resent))]);
                        }
                        let ended = matches!(answer.outcome, Ok(Standing::Superseded | Standing::Overtaken));
                        if tracked {
                            let errands = client.room().left(&name);
                            client.run(errands);
                        }
                        if ended {
                            // Until now a transaction of its holder may have kept the name from whoever is next.
                            client.serve(&name);
                        }
                        client.conclude(departure, answer);
                    });
                    self.pump.send(Verb::Release(release, reply));
                }
                Errand::Pass(departure) => {
                    let Holding { name, owner, hold, token, .. } = departure.holding.clone();
                    let hold_at_least = Duration::ZERO;
                    let from = Release { name: name.clone(), owner, hold, token: Some(token), hold_at_least };
                    self.send_serve(name.clone(), Some(from.clone()), move |client, answer| {
                        let (sent_at, resent) = (answer.sent_at, answer.resent);
                        match answer.outcome {
                            // Its owner has entered again elsewhere: this hold goes, and the name stays.
                            Ok(Served { standing: Some(Standing::Unsettled), .. }) => {
                                let mut departure = departure.sent(resent);
                                departure.ignored += 1;
                                client.release_again(from, departure);
                            }
                            Ok(served) => {
                                let standing = served.standing.unwrap_or(Standing::Superseded);
                                let errands = client.room().given_up(&name, sent_at, &served);
                                client.run(errands);
                                if standing == Standing::Superseded {
                                    client.serve(&name);
                                }
                                client.conclude(departure, Answer { outcome: Ok(standing), sent_at, resent });
                            }
                            Err(error) => {
                                let error = departure.unknown_if(resent, error);
                                departure.tell(Err(error));
                                let errands = client.room().left(&name);
                                client.run(errands);
                            }
                        }
                    });
                }
                Errand::Enqueue(claim, since) => {
                    let ticket = Ticket {
                        claim: claim.clone(),
                        client: Arc::clone(&self.id),
                        bell: self.bell.channel(&self.id),
                        since,
                    };
                    let reply = Reply::to(move |answer: Answer<Option<Duration>>| {
                        let errands = client.room().enqueued(&claim, answer);
                        client.run(errands);
                    });
                    self.pump.send(Verb::Enqueue(ticket, reply));
                }
                Errand::Serve(name) => {
                    self.send_serve(name.clone(), None, move |client, answer| {
                        let errands = client.room().served(&name, answer.sent_at, answer.outcome);
                        client.run(errands);
                    });
                }
                Errand::ServeSoon(name) => {
                    tokio::spawn(async move {
                        sleep(BETWEEN_TRIES).await;
                        client.serve(&name);
                    });
                }
                Errand::Leave(claim) => self.send_leave(claim, || {}),
                Errand::Dismiss(waiter, answer) => self.send_leave(waiter.claim.clone(), || {
                    let _ = waiter.reply.send(answer);
                }),
                Errand::Clear(spot) => self.pump.send(Verb::Leave(spot, Reply::to(|_| {}))),
                Errand::Attend(due) => self.keeper.attend_at(due),
                Errand::Confirm(waiter, grant) => {
                    let Claim { name, owner, hold, mode, ttl, .. } = waiter.claim.clone();
                    let holding = Holding { name, owner, hold, mode, token: grant.token };
                    let reply = Reply::to(move |answer: Answer<Standing>| {
                        let errands = client.room().confirmed(waiter, grant, answer);
                        client.run(errands);
                    });
                    self.pump.send(Verb::Renew(Renewal::new(holding, ttl), reply));
                }
                Errand::Admit(waiter, grant) => {
                    let lease = self.begin(&waiter, waiter.claim.mode, grant);
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

    /// Repeats a release that had no effect: at once the first time, then after growing pauses. After too many repetitions the release
    /// ends with an error, since something in the database undoes the statement.
    fn release_again(self: &Arc<Self>, release: Release, departure: Departure) {
        let client = Arc::clone(self);
        if departure.ignored > IGNORED {
            let reason =
                "the release had no effect: a trigger, a rule or a row-level policy on the sqlock tables undoes it";
            let source = sqlx::Error::Protocol(reason.into());
            departure.tell(Err(Error::Database { attempted: "release", source }));
            let errands = client.room().left(&release.name);
            return client.run(errands);
        }
        let pause = BETWEEN_RELEASES * (departure.ignored - 1);
        tokio::spawn(async move {
            sleep(pause).await;
            client.run(vec![Errand::Release { release, departure, tracked: true }]);
        });
    }

    /// Tells the holder whether the name was still its own when it was given back.
    fn conclude(self: &Arc<Self>, departure: Departure, answer: Answer<Standing>) {
        let departure = departure.sent(answer.resent);
        if departure.verdict.is_none() {
            return;
        }
        if !departure.is_doubtful(&answer) {
            let verdict = departure.judge(answer);
            return departure.tell(verdict);
        }
        // A request of ours may have ended the holding. Before its deadline only an eviction could have done so as well.
        let name = departure.holding.name.clone();
        let reply = Reply::to(move |answer: Answer<Option<LastEviction>>| {
            let verdict = match answer.outcome {
                Ok(row) => departure.judge_by(row),
                Err(_) => Err(departure.unknown()),
            };
            departure.tell(verdict);
        });
        self.pump.send(Verb::LastEviction(name, reply));
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
    /// A request for it was answered, at the first attempt or not.
    fn sent(self, resent: bool) -> Self {
        Self { resent: self.resent || resent, ..self }
    }

    /// Whether the holding has ended before its deadline, and it is not known whether by a request of ours.
    fn is_doubtful(&self, answer: &Answer<Standing>) -> bool {
        let by_us = match answer.outcome {
            Ok(Standing::Overtaken) => true,
            Ok(Standing::Superseded) => self.resent,
            _ => false,
        };
        by_us && !self.deadline.is_past()
    }

    /// The same as [`judge`](Self::judge) for what is [doubtful](Self::is_doubtful), by what the row of the name tells.
    fn judge_by(&self, row: Option<LastEviction>) -> Result<()> {
        let token = self.holding.token.get();
        match row {
            Some(row) if row.evicted == token => Err(self.lost()),
            // The database has forgotten the holding, as one does that stands in for another.
            Some(row) if row.token < token => Err(self.lost()),
            Some(row) if row.evicted < token => Ok(()),
            // It was given back in one statement with others, and the row has been swept since.
            None if !self.resent => Ok(()),
            _ => Err(self.unknown()),
        }
    }

    fn lost(&self) -> Error {
        let Holding { name, token, .. } = &self.holding;
        Error::Lost { name: name.clone(), token: *token, cause: LossCause::Superseded }
    }

    /// Whether the name was still the holder's when it was given back.
    fn judge(&self, answer: Answer<Standing>) -> Result<()> {
        match answer.outcome {
            Ok(Standing::Released) => Ok(()),
            Ok(Standing::Superseded) => Err(self.unknown_if(answer.resent, self.lost())),
            Ok(Standing::Held | Standing::Awaited | Standing::Unsettled | Standing::Overtaken) => Err(self.unknown()),
            Err(error) => Err(self.unknown_if(answer.resent, error)),
        }
    }

    /// The error of a release, unless an earlier request may have carried it out unnoticed.
    fn unknown_if(&self, resent: bool, error: Error) -> Error {
        if self.may_have_ended(resent) { self.unknown() } else { error }
    }

    fn unknown(&self) -> Error {
        Error::Unknown { attempted: "release", name: self.holding.name.clone() }
    }

    /// Whether an earlier request may have carried it out.
    fn may_have_ended(&self, resent: bool) -> bool {
        self.resent || resent
    }

    fn tell(self, verdict: Result<()>) {
        if let Some(receiver) = self.verdict {
            let _ = receiver.send(verdict);
        }
    }
}
