//! The waiting room: who waits for what in this process, and what is to be done next.
//!
//! Whoever wants a name for itself alone first asks for it, since it is mostly free. As long as nobody else wants it, those
//! who come later stand in a [`Line`] here, in the order in which they came, and one statement ends one holding and begins
//! the next. When the name turns out to be held or wanted elsewhere, all of them join the line that the database keeps
//! ([`Standing`]), as if they had come there when they came here; whoever gives the name back then passes it to the first in
//! that line. Who shares a name or wants permits stands there from the beginning.
//!
//! The room does no I/O. It is told what happened and answers with [`Errand`]s, which its caller runs once the room is
//! unlocked.

mod standing;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::backend::{self, CLAIM, Claim, Granted, HandOff, Holding, Mode, Release, Spot, Watched};
use crate::client::late;
use crate::clock::{Moment, reliance};
use crate::error::{Error, Result};
use crate::lease::{Lease, Terms};
use crate::name::LockName;
use crate::owner::{Hold, Owner};
use crate::pump::{Answer, Attended, NEXT, Served};
use crate::token::FencingToken;
pub(crate) use standing::{Grant, Standing};

/// How long to wait until a name is tried again that a fenced transaction keeps from being granted.
const FENCED: Duration = Duration::from_millis(50);

/// How often a try is repeated while the name is free and yet locked: by another try, which may find a lock in its own way,
/// or by the fence of a transaction that outlives its lease. Of those who try a free name together one shall get it.
const TRIES: u8 = 5;

/// How many names are remembered that were passed on to others.
const WANTED: usize = 256;

/// Which waiter of this process: it stays the same when the waiter asks anew under another hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaiterId(u64);

impl WaiterId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Somebody who wants a name.
pub(crate) struct Waiter {
    pub(crate) id: WaiterId,
    pub(crate) claim: Claim,
    pub(crate) terms: Terms,
    /// Whether to wait, or to be told at once that the name is taken.
    pub(crate) patience: Patience,
    /// Whether its owner was given: then it enters again where that owner is inside.
    pub(crate) reenters: bool,
    /// When it came.
    pub(crate) since: Moment,
    /// Whether it has asked, or is to be handed the name, and no answer has come.
    pub(crate) asks: bool,
    pub(crate) reply: oneshot::Sender<Result<Option<Lease>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// To be told at once when somebody holds the name. Asks so often more when nobody does.
    Try(u8),
    Wait,
}

impl Patience {
    pub(crate) const TRY: Self = Self::Try(TRIES);
}

/// What stands between the line and the name.
#[derive(Debug)]
enum Door {
    /// The first in line has asked the database, as this hold.
    Asking(Hold),
    /// The first in line was refused, and the database is being asked whether anybody holds it, for those who only try.
    Checking,
    /// An owner of this process holds the name, with these holds. `others`: somebody waits elsewhere, or did.
    Held { owner: Owner, holds: Vec<Hold>, others: bool },
    /// The last hold is being given back.
    Leaving,
}

struct Line {
    door: Door,
    waiters: VecDeque<Waiter>,
    /// Whether the database has answered anything yet.
    answered: bool,
}

/// Something to be done outside the room.
pub(crate) enum Errand {
    /// Ask the database for the name.
    Ask(Claim),
    /// Let the holder go and the waiter in, in one statement.
    HandOff(HandOff, Departure),
    /// Give the hold back. `tracked`: the line waits for it.
    Release { release: Release, departure: Departure, tracked: bool },
    /// Give the name to whoever is next in the database's line.
    Pass(Departure),
    /// Join that line, as if it had been then.
    Enqueue(Claim, Moment),
    /// Let those in whose turn it is.
    Serve(LockName),
    /// The same, when those have gone who were only trying.
    ServeSoon(LockName),
    /// Take a place out of the line, or give back what it was granted.
    Leave(Claim),
    /// The same, and tell its waiter that it did not get the name once nothing of it is left there.
    Dismiss(Waiter, Result<Option<Lease>>),
    /// Delete a place that nobody stands at, if there is one.
    Clear(Spot),
    /// Look after the places, not before then.
    Attend(Moment),
    /// Make a grant that another has made last for as long as was asked for.
    Confirm(Waiter, Grant),
    /// Tell a waiter that it got the name.
    Admit(Waiter, Grant),
    /// Let a waiter enter again: its owner has got the name since it stood in line.
    Join(Waiter),
    /// Tell a waiter that it did not.
    Refuse(Waiter, Result<Option<Lease>>),
}

/// Someone who gives a name back, and wants to know whether it was still theirs.
pub(crate) struct Departure {
    pub(crate) verdict: Option<oneshot::Sender<Result<()>>>,
    pub(crate) holding: Holding,
    pub(crate) deadline: Moment,
    /// A request for it may have taken effect although its reply never came.
    pub(crate) resent: bool,
    /// How often the database has left the holding as it was, for no reason that can be seen.
    pub(crate) ignored: u32,
}

/// The lines of one client, by name.
#[derive(Default)]
pub(crate) struct Room {
    lines: HashMap<LockName, Line>,
    standing: Standing,
    /// Names that were last seen wanted elsewhere, the latest at the end: whoever wants one of these need not ask first.
    wanted: VecDeque<LockName>,
    /// Names that are being served, and whether they must be served again when that is done.
    serving: HashMap<LockName, bool>,
    /// Who leaves when those who came while it held the name have joined the line: how many are still to join.
    departing: BTreeMap<LockName, (usize, Departure)>,
    /// Whether the places are being looked after at this moment.
    attending: bool,
    closed: bool,
    /// Whether a grant must last for as long as was asked for before its waiter is told.
    confirms_first: bool,
}

impl Room {
    pub(crate) fn new(confirms_first: bool) -> Self {
        Self { confirms_first, ..Self::default() }
    }

    /// Somebody wants a name.
    pub(crate) fn enter(&mut self, mut waiter: Waiter) -> Vec<Errand> {
        if self.closed {
            return vec![Errand::Refuse(waiter, Err(Error::Closed))];
        }
        // Its caller has dropped it while its owner was looked up: nobody would take it out of the line again.
        if !is_live(&waiter) {
            return Vec::new();
        }
        let name = waiter.claim.name.clone();
        let mut errands = Vec::new();
        if waiter.claim.mode != Mode::Exclusive {
            self.stand(waiter, &mut errands);
            return errands;
        }
        let stands = self.standing.waits_for(&name);
        let line = self.lines.get_mut(&name);
        let tries = waiter.patience != Patience::Wait;
        if tries && (stands || line.as_ref().is_some_and(|line| line.is_taken())) {
            return vec![Errand::Refuse(waiter, Ok(None))];
        }
        match line {
            _ if stands => self.stand(waiter, &mut errands),
            None if !tries && self.wanted.contains(&name) => self.stand(waiter, &mut errands),
            Some(line) if matches!(line.door, Door::Held { others: true, .. }) => self.stand(waiter, &mut errands),
            Some(line) => line.waiters.push_back(waiter),
            None => {
                errands.push(Errand::Ask(waiter.claim.clone()));
                waiter.asks = true;
                let door = Door::Asking(waiter.claim.hold);
                self.lines.insert(name, Line { waiters: VecDeque::from([waiter]), ..Line::behind(door) });
            }
        }
        errands
    }

    /// The database granted the name to a claim of this room, in time or `too_late`.
    pub(crate) fn granted(
        &mut self,
        claim: &Claim,
        token: FencingToken,
        sent_at: Moment,
        too_late: bool,
    ) -> Vec<Errand> {
        let holding =
            Holding { name: claim.name.clone(), owner: claim.owner, hold: claim.hold, mode: claim.mode, token };
        let is_asked = self.asks(claim);
        let Some(line) = self.lines.get_mut(&claim.name) else {
            return vec![Errand::release(&holding, Duration::ZERO, false)];
        };
        line.answered = true;
        // A second answer to a claim that is known by its hold: the lease is in use, and must not be given back.
        if matches!(&line.door, Door::Held { holds, .. } if holds.contains(&claim.hold)) {
            return Vec::new();
        }
        let waiter = line.take(claim.hold).filter(is_live);
        if waiter.is_none() && !is_asked {
            return vec![Errand::release(&holding, Duration::ZERO, false)];
        }
        let give_back = |line: &mut Line| {
            line.door = Door::Leaving;
            Errand::release(&holding, Duration::ZERO, true)
        };
        match waiter {
            // Nobody listens any more: the name goes back at once.
            None => vec![give_back(line)],
            // The reply took longer than the lease lasts. It must not be used, and a later try may do better.
            Some(waiter) if too_late => {
                let errand = give_back(line);
                if waiter.patience == Patience::Wait {
                    line.waiters.push_front(waiter.again());
                    return vec![errand];
                }
                vec![errand, Errand::Refuse(waiter, Err(late()))]
            }
            Some(waiter) => {
                line.door = Door::Held { owner: claim.owner, holds: vec![claim.hold], others: false };
                let grant = Grant { token, sent_at, lasts: claim.ttl, others: false };
                let mut errands = vec![Errand::Admit(waiter, grant)];
                line.let_in(claim.owner, &mut errands);
                line.turn_away(&mut errands);
                errands
            }
        }
    }

    /// The database refused the name: somebody holds it, or waits for it. On a database that skips locked rows it may also
    /// be free, and locked for a moment.
    pub(crate) fn refused(&mut self, claim: &Claim) -> Vec<Errand> {
        let is_asked = self.asks(claim);
        let Some(line) = self.lines.get_mut(&claim.name) else {
            return Vec::new();
        };
        line.answered = true;
        line.hears(claim.hold);
        if !is_asked {
            return Vec::new();
        }
        if line.waiters.iter().any(|w| matches!(w.patience, Patience::Try(1..)) && is_live(w)) {
            line.door = Door::Checking;
            return self.serve(&claim.name).into_iter().collect();
        }
        let mut errands = Vec::new();
        self.join_line(&claim.name, &mut errands);
        errands
    }

    /// Whether whoever made a claim will not wait.
    pub(crate) fn only_tries(&self, claim: &Claim) -> bool {
        let waiters = self.lines.get(&claim.name).map(|line| &line.waiters);
        waiters
            .is_some_and(|waiters| waiters.iter().any(|w| w.claim.hold == claim.hold && w.patience != Patience::Wait))
    }

    /// The database could not be asked, or refused for a reason of its own.
    pub(crate) fn failed(&mut self, claim: &Claim, error: Error) -> Vec<Errand> {
        let is_asked = self.asks(claim);
        let mut errands = Vec::new();
        if let Some(line) = self.lines.get_mut(&claim.name)
            && let Some(waiter) = line.take(claim.hold)
        {
            line.disappoint(&error, &mut errands);
            errands.push(Errand::Refuse(waiter, Err(error)));
        }
        if is_asked {
            self.next(&claim.name, &mut errands);
        }
        errands
    }

    /// Whether the line waits for the answer to this claim. An answer to another does not concern it: somebody of ours has been
    /// let in by the database's line meanwhile.
    fn asks(&self, claim: &Claim) -> bool {
        self.lines.get(&claim.name).is_some_and(|line| matches!(line.door, Door::Asking(hold) if hold == claim.hold))
    }

    /// An owner of this process re-entered, or took over an exported lease.
    pub(crate) fn entered(&mut self, holding: &Holding) {
        if holding.mode != Mode::Exclusive {
            return;
        }
        let held = Door::Held { owner: holding.owner, holds: Vec::new(), others: false };
        let line = self.lines.entry(holding.name.clone()).or_insert_with(|| Line::behind(held));
        // In any other state the line will find out by asking.
        if let Door::Held { owner, holds, .. } = &mut line.door
            && *owner == holding.owner
        {
            holds.push(holding.hold);
        }
    }

    /// A holder gives its hold back.
    pub(crate) fn leave(&mut self, departure: Departure, hold_at_least: Duration) -> Vec<Errand> {
        let holding = departure.holding.clone();
        let wanted = self.standing.waits_for(&holding.name) || self.wanted.contains(&holding.name);
        let Some(line) = self.lines.get_mut(&holding.name) else {
            return vec![Errand::departing(departure, hold_at_least, false)];
        };
        match line.strike(holding.hold) {
            Remaining::None(others) => {
                line.door = Door::Leaving;
                if !hold_at_least.is_zero() {
                    return vec![Errand::departing(departure, hold_at_least, true)];
                }
                // Who has asked already is not handed the name besides: the two answers would cross.
                if let Some(first) = line.first()
                    && !std::mem::replace(&mut first.asks, true)
                {
                    let to = first.claim.clone();
                    line.door = Door::Asking(to.hold);
                    return vec![Errand::HandOff(HandOff { from: holding, to }, departure)];
                }
                if others || wanted {
                    return vec![Errand::Pass(departure)];
                }
                vec![Errand::departing(departure, hold_at_least, true)]
            }
            Remaining::Some | Remaining::Elsewhere => vec![Errand::departing(departure, hold_at_least, false)],
        }
    }

    /// The last hold was given back, or has ended by itself. (The line may have gone on meanwhile: then somebody has asked.)
    pub(crate) fn left(&mut self, name: &LockName) -> Vec<Errand> {
        let mut errands = Vec::new();
        if self.lines.get(name).is_some_and(|line| matches!(line.door, Door::Leaving)) {
            self.next(name, &mut errands);
        }
        self.gone_on(name, &mut errands);
        errands
    }

    /// It is not known whether the name was handed to the first in line, who is to ask.
    pub(crate) fn hand_off_failed(&mut self, to: &Claim) -> Vec<Errand> {
        let is_asked = self.asks(to);
        let mut errands = Vec::new();
        if let Some(line) = self.lines.get_mut(&to.name) {
            line.hears(to.hold);
        }
        if is_asked {
            self.next(&to.name, &mut errands);
        }
        errands
    }

    /// The database would not pass the name on directly: somebody waits elsewhere, or has joined in. All join its line
    /// first, as those who came before, and then the holder goes.
    pub(crate) fn not_handed_off(&mut self, to: &Claim, departure: Departure) -> Vec<Errand> {
        let name = departure.holding.name.clone();
        let is_asked = self.asks(to);
        if let Some(line) = self.lines.get_mut(&name) {
            line.hears(to.hold);
            if is_asked {
                line.door = Door::Leaving;
            }
        }
        if !is_asked {
            return vec![Errand::Pass(departure)];
        }
        let mut errands = Vec::new();
        let joining = self.join_line(&name, &mut errands);
        if joining == 0 {
            errands.push(Errand::Pass(departure));
        } else {
            self.departing.insert(name, (joining, departure));
        }
        errands
    }

    /// A hold has ended without being given back: it was lost, or exported.
    pub(crate) fn vacate(&mut self, holding: &Holding) -> Vec<Errand> {
        let mut errands = Vec::new();
        if let Some(line) = self.lines.get_mut(&holding.name)
            && matches!(line.strike(holding.hold), Remaining::None(_))
        {
            self.next(&holding.name, &mut errands);
            self.gone_on(&holding.name, &mut errands);
        }
        errands
    }

    /// A waiter has gone. If it has asked, the answer will find it missing.
    pub(crate) fn forget(&mut self, name: &LockName, id: WaiterId) -> Vec<Errand> {
        if let Some(line) = self.lines.get_mut(name) {
            line.waiters.retain(|waiter| waiter.id != id);
            if line.waiters.is_empty() && matches!(line.door, Door::Checking) {
                self.lines.remove(name);
            }
        }
        let Some(hold) = self.standing.hold_of(name, id) else {
            return Vec::new();
        };
        let joined = self.standing.is_joined(hold);
        match self.standing.take(hold) {
            Some(waiter) if joined => vec![Errand::Leave(waiter.claim)],
            _ => Vec::new(),
        }
    }

    /// The patience of a waiter has run out. It is told once its place in the database's line is gone, if it has one.
    pub(crate) fn dismiss(&mut self, name: &LockName, id: WaiterId) -> Vec<Errand> {
        if let Some(waiter) = self.lines.get_mut(name).and_then(|line| line.take_if(|waiter| waiter.id == id)) {
            return vec![Errand::Refuse(waiter, Ok(None))];
        }
        match self.standing.hold_of(name, id).and_then(|hold| self.standing.dismiss(hold)) {
            Some(waiter) => vec![Errand::Dismiss(waiter, Ok(None))],
            None => Vec::new(),
        }
    }

    /// Whether the database has been asked about a name and has not said a word.
    pub(crate) fn is_unanswered(&self, name: &LockName) -> bool {
        match self.lines.get(name) {
            Some(line) => !line.answered,
            None => self.standing.waits_for(name) && !self.standing.is_heard_of(name),
        }
    }

    /// How many wait here before a waiter.
    pub(crate) fn ahead_of(&self, name: &LockName, id: WaiterId) -> usize {
        let waiters = self.lines.get(name).map(|line| &line.waiters);
        waiters.and_then(|waiters| waiters.iter().position(|w| w.id == id)).unwrap_or(0)
    }

    /// The hold of a waiter's place in the database's line, if it has one.
    pub(crate) fn hold_of(&self, name: &LockName, id: WaiterId) -> Option<Hold> {
        self.standing.hold_of(name, id)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Refuses everybody, from now on.
    pub(crate) fn close(&mut self) -> Vec<Errand> {
        self.closed = true;
        let mut errands = Vec::new();
        for waiter in self.lines.values_mut().flat_map(|line| line.waiters.drain(..)) {
            errands.push(Errand::Refuse(waiter, Err(Error::Closed)));
        }
        for waiter in self.standing.take_all() {
            errands.push(Errand::Leave(waiter.claim.clone()));
            errands.push(Errand::Refuse(waiter, Err(Error::Closed)));
        }
        for (_, (_, departure)) in std::mem::take(&mut self.departing) {
            errands.push(Errand::Pass(departure));
        }
        errands
    }

    // ---- in the database's line

    /// The terms of those of ours who wait for a name there.
    pub(crate) fn terms(&self, name: &LockName) -> crate::queue::Terms {
        self.standing.terms(name)
    }

    /// The owners of those of ours who want to share a name.
    pub(crate) fn readers(&self, name: &LockName) -> Vec<Owner> {
        self.standing.readers(name)
    }

    /// A claim has joined the line of a name, which another holds for so long, or could not.
    pub(crate) fn enqueued(&mut self, claim: &Claim, answer: Answer<Option<Duration>>) -> Vec<Errand> {
        let mut errands = Vec::new();
        let sent_at = answer.sent_at;
        let joined = |held_for| (held_for, self.standing.joined(claim.hold, sent_at, answer.resent));
        match answer.outcome.map(joined) {
            // Whoever holds it sees that somebody waits.
            Ok((Some(held_for), Ok(None))) => {
                let served = Served { held_for: Some(held_for), others: true, ..Served::default() };
                self.passed(&claim.name, sent_at, &served, &mut errands);
                self.standing.look_around(&claim.name);
            }
            Ok((None, Ok(None))) => errands.extend(self.serve(&claim.name)),
            Ok((_, Ok(Some(grant)))) => self.deliver(claim.hold, grant, &mut errands),
            // Nobody listens any more.
            Ok((_, Err(()))) => errands.push(Errand::Leave(claim.clone())),
            Err(error) => {
                errands.push(Errand::Leave(claim.clone()));
                if let Some(waiter) = self.standing.take(claim.hold) {
                    errands.push(Errand::Refuse(waiter, Err(error)));
                }
            }
        }
        if let Some((joining, _)) = self.departing.get_mut(&claim.name) {
            *joining -= 1;
            if *joining == 0
                && let Some((_, departure)) = self.departing.remove(&claim.name)
            {
                errands.push(Errand::Pass(departure));
            }
        }
        self.attend_when_due(&mut errands);
        errands
    }

    /// A name was served, by a request that was sent then.
    pub(crate) fn served(&mut self, name: &LockName, sent_at: Moment, served: Result<Served>) -> Vec<Errand> {
        let mut errands = Vec::new();
        if self.serving.remove(name) == Some(true) {
            errands.extend(self.serve(name));
        }
        let served = match served {
            Ok(served) => served,
            Err(error) => {
                let all =
                    self.standing.take_those(name, |w| error.for_another().is_some() || w.patience != Patience::Wait);
                self.turn_out(all, &error, &mut errands);
                // The others wait on: it may be otherwise the next time.
                self.standing.look_again_in(name, FENCED);
                self.attend_when_due(&mut errands);
                if let Some(line) = self.lines.get_mut(name)
                    && matches!(line.door, Door::Checking)
                {
                    if let Some(first) = line.waiters.pop_front() {
                        line.disappoint(&error, &mut errands);
                        errands.push(Errand::Refuse(first, Err(error)));
                    }
                    self.next(name, &mut errands);
                }
                return errands;
            }
        };
        self.passed(name, sent_at, &served, &mut errands);
        self.standing.look_around(name);
        if let Some(line) = self.lines.get_mut(name)
            && matches!(line.door, Door::Checking)
        {
            if served.held_for.is_some() || served.others {
                self.join_line(name, &mut errands);
            } else {
                for waiter in &mut line.waiters {
                    if let Patience::Try(left) = &mut waiter.patience {
                        *left = left.saturating_sub(1);
                    }
                }
                self.next(name, &mut errands);
            }
        }
        self.attend_when_due(&mut errands);
        errands
    }

    /// A name was given up to whoever is next.
    pub(crate) fn given_up(&mut self, name: &LockName, sent_at: Moment, served: &Served) -> Vec<Errand> {
        let mut errands = Vec::new();
        let stays = served.granted.iter().any(|granted| self.standing.by_mark(&granted.hold).is_some());
        self.passed(name, sent_at, served, &mut errands);
        if self.lines.get(name).is_some_and(|line| matches!(line.door, Door::Leaving)) {
            if self.wanted.contains(name) {
                self.join_line(name, &mut errands);
            }
            self.next(name, &mut errands);
        }
        if stays {
            self.attend_when_due(&mut errands);
        } else {
            self.gone_on(name, &mut errands);
        }
        errands
    }

    /// A name is to be served on account of something that happened.
    pub(crate) fn serve_again(&mut self, name: &LockName) -> Vec<Errand> {
        self.serve(name).into_iter().collect()
    }

    /// Tells waiters of an error that concerns them all.
    fn turn_out(&self, waiters: Vec<Waiter>, error: &Error, errands: &mut Vec<Errand>) {
        for waiter in waiters {
            errands.push(Errand::Leave(waiter.claim.clone()));
            let told = error.for_another().unwrap_or_else(|| Error::Unavailable {
                attempted: "wait",
                reason: error.to_string(),
                source: None,
            });
            errands.push(Errand::Refuse(waiter, Err(told)));
        }
    }

    /// What serving a name has changed for those of ours who wait for it.
    fn passed(&mut self, name: &LockName, sent_at: Moment, served: &Served, errands: &mut Vec<Errand>) {
        let is_ours = |granted: &Granted| self.standing.by_mark(&granted.hold).is_some();
        self.note(name, served.others || !served.granted.iter().all(is_ours));
        for held in &served.holding {
            self.heard(&held.hold, held.token, errands);
        }
        for granted in &served.granted {
            if let Some(hold) = self.standing.by_mark(&granted.hold) {
                // Whoever has come since the request was sent was granted a claim.
                let lasts = served.terms.get(&granted.hold).copied().unwrap_or(CLAIM);
                let grant = Grant { token: granted.token, sent_at, lasts, others: served.others };
                self.deliver(hold, grant, errands);
            }
        }
        self.let_in(name, served.owner, errands);
        let mut upgrades = self.standing.take_those(name, |w| {
            w.reenters && w.claim.mode == Mode::Exclusive && served.sharers.contains(&w.claim.owner)
        });
        if let Some(line) = self.lines.get_mut(name) {
            let upgrades_by = |w: &Waiter| w.reenters && served.sharers.contains(&w.claim.owner);
            let (own, stay) = line.waiters.drain(..).partition(upgrades_by);
            line.waiters = stay;
            upgrades.extend::<VecDeque<Waiter>>(own);
        }
        for waiter in upgrades {
            let reason = "its owner shares the name, and cannot have it alone before it has given that back";
            let error = Error::Conversion { name: name.clone(), reason };
            errands.push(Errand::Dismiss(waiter, Err(error)));
        }
        let (again, refused) = self.standing.tries(name, |mode| served.has_room_for(mode));
        for waiter in refused {
            errands.push(Errand::Dismiss(waiter, Ok(None)));
        }
        if again {
            errands.push(Errand::ServeSoon(name.clone()));
        }
        // More may be next than were looked at.
        if served.others && served.granted.len() >= NEXT as usize {
            errands.extend(self.serve(name));
        }
        if served.locked {
            self.standing.look_again_in(name, FENCED);
        } else if let Some(held_for) = served.held_for {
            self.standing.look_again_in(name, held_for);
        }
    }

    /// Somebody else says that it has granted the name to one of ours.
    pub(crate) fn told(&mut self, mark: &str, token: FencingToken) -> Vec<Errand> {
        let mut errands = Vec::new();
        self.heard(mark, token, &mut errands);
        self.attend_when_due(&mut errands);
        errands
    }

    /// Holds that have been granted the name by somebody else: one of them may be ours.
    fn heard(&mut self, holds: &str, token: FencingToken, errands: &mut Vec<Errand>) {
        if let Some(hold) = holds.split_inclusive(';').find_map(|mark| self.standing.by_mark(mark))
            && let Some(sent_at) = self.standing.ungranted_at(hold)
        {
            self.deliver(hold, Grant { token, sent_at, lasts: CLAIM, others: true }, errands);
        }
    }

    /// It may be time to look after the places: which need a sign of life, and which are to be looked at. Otherwise, when it
    /// will be.
    pub(crate) fn attend(&mut self) -> Result<(Vec<Spot>, Vec<Spot>), Option<Moment>> {
        // The answer that is awaited tells when to go on.
        if self.attending {
            return Err(None);
        }
        match self.standing.due() {
            Some(due) if due <= Moment::now() => {
                let (keep, watch) = self.standing.attend();
                if keep.is_empty() && watch.is_empty() {
                    return Err(self.standing.due());
                }
                self.attending = true;
                Ok((keep, watch))
            }
            due => Err(due),
        }
    }

    /// The places were looked after, by a request that was sent then.
    pub(crate) fn attended(&mut self, sent_at: Moment, slowly: bool, attended: Result<Attended>) -> Vec<Errand> {
        self.attending = false;
        let mut errands = Vec::new();
        match attended {
            // It may be otherwise the next time.
            Err(error) if error.is_conflict() || error.is_blocked() => {}
            Err(error) => {
                let all = self.standing.take_all();
                self.turn_out(all, &error, &mut errands);
            }
            Ok(Attended { kept, gone, watched }) => {
                self.standing.kept(&kept, sent_at);
                for (spot, watched) in watched {
                    let is_gone = gone.contains(&spot);
                    self.watched(&spot, is_gone, sent_at, slowly, watched, &mut errands);
                }
                errands.extend(self.standing.take_dead().into_iter().map(|waiter| Errand::Leave(waiter.claim)));
            }
        }
        self.attend_when_due(&mut errands);
        errands
    }

    fn watched(
        &mut self,
        spot: &Spot,
        is_gone: bool,
        sent_at: Moment,
        slowly: bool,
        watched: Option<Watched>,
        errands: &mut Vec<Errand>,
    ) {
        let Some(ungranted_at) = self.standing.ungranted_at(spot.hold) else {
            return;
        };
        let grant = |token, others| {
            let token = FencingToken::new(token)?;
            Some(Grant { token, sent_at: ungranted_at, lasts: CLAIM, others })
        };
        let granted = watched.as_ref().and_then(|w| {
            let others = w.row.waiting != 0;
            // Another hold of its owner may have entered beside it already.
            if w.row.holds.contains(&spot.hold.mark()) {
                return grant(w.row.token, others);
            }
            w.token.filter(|token| *token > 0).and_then(|token| grant(token, others))
        });
        match (granted, watched) {
            (Some(grant), _) => self.deliver(spot.hold, grant, errands),
            (None, Some(watched)) if watched.token == Some(0) && !is_gone => {
                // Another of ours may have been granted the name.
                if let Some(token) = FencingToken::new(watched.row.token) {
                    self.heard(&watched.row.holds, token, errands);
                }
                if self.standing.waits(spot, sent_at, &watched, slowly) {
                    errands.extend(self.serve(&spot.name));
                }
                // Its owner may have got the name elsewhere.
                let holder = watched.row.held_for().and_then(|_| watched.row.owner.parse().ok());
                self.let_in(&spot.name, holder, errands);
            }
            // The place has vanished: it was not kept alive in time, or its grant has run out.
            _ => {
                if let Some(waiter) = self.standing.take(spot.hold) {
                    errands.push(Errand::Leave(waiter.claim.clone()));
                    if is_live(&waiter) {
                        self.stand(waiter.again(), errands);
                    }
                }
            }
        }
    }

    /// A bell has been given to us, or taken away.
    pub(crate) fn is_told(&mut self, told: bool) {
        self.standing.is_told(told);
    }

    /// Whether anybody stands in line.
    pub(crate) fn stands(&self) -> bool {
        !self.standing.is_empty()
    }

    /// Whether anybody stands so near to its head that it wants to be told.
    pub(crate) fn is_near(&self) -> bool {
        self.standing.is_near()
    }

    /// Tells a waiter that it has been granted the name, unless it does not listen any more or it is too late.
    fn deliver(&mut self, hold: Hold, grant: Grant, errands: &mut Vec<Errand>) {
        let Some((waiter, twice)) = self.standing.granted(hold, grant) else {
            return;
        };
        // The place of one that shares the name, or has permits of it, is its holding.
        if twice && waiter.claim.mode == Mode::Exclusive {
            errands.push(Errand::Clear(waiter.claim.spot()));
        }
        let too_late = (grant.sent_at + reliance(grant.lasts)).is_past();
        // The first renewal makes a claim last, unless there is none, or it would come too late.
        let ttl = waiter.claim.ttl;
        let confirms_first = self.confirms_first || !waiter.terms.renew || ttl < CLAIM;
        if !is_live(&waiter) || too_late {
            self.too_late(waiter, errands);
        } else if grant.lasts != ttl && confirms_first {
            errands.push(Errand::Confirm(waiter, grant));
        } else {
            self.admit(waiter, grant, errands);
        }
    }

    /// A grant was confirmed, or could not be.
    pub(crate) fn confirmed(&mut self, waiter: Waiter, grant: Grant, answer: Answer<backend::Standing>) -> Vec<Errand> {
        let mut errands = Vec::new();
        let lasts = waiter.claim.ttl;
        let too_late = (answer.sent_at + reliance(lasts)).is_past();
        match answer.outcome {
            _ if self.closed => {
                errands.push(Errand::Leave(waiter.claim.clone()));
                errands.push(Errand::Refuse(waiter, Err(Error::Closed)));
            }
            Ok(backend::Standing::Held) if !too_late && is_live(&waiter) => {
                self.admit(waiter, Grant { sent_at: answer.sent_at, lasts, ..grant }, &mut errands);
            }
            // The claim had run out, and the name has gone on.
            Ok(_) => self.too_late(waiter, &mut errands),
            Err(error) => {
                errands.push(Errand::Leave(waiter.claim.clone()));
                errands.push(Errand::Refuse(waiter, Err(error)));
            }
        }
        self.attend_when_due(&mut errands);
        errands
    }

    /// A grant cannot be used any more: it goes back, and its waiter to its place in line.
    fn too_late(&mut self, waiter: Waiter, errands: &mut Vec<Errand>) {
        errands.push(Errand::Leave(waiter.claim.clone()));
        if is_live(&waiter) {
            match waiter.patience {
                Patience::Wait => self.stand(waiter.again(), errands),
                Patience::Try(_) => errands.push(Errand::Refuse(waiter, Err(late()))),
            }
        }
    }

    fn admit(&mut self, waiter: Waiter, grant: Grant, errands: &mut Vec<Errand>) {
        let claim = waiter.claim.clone();
        errands.push(Errand::Admit(waiter, grant));
        if claim.mode != Mode::Exclusive {
            return;
        }
        let door = Door::Held { owner: claim.owner, holds: vec![claim.hold], others: grant.others };
        let line = self.lines.entry(claim.name.clone()).or_insert_with(|| Line::behind(Door::Leaving));
        line.answered = true;
        line.door = door;
        line.let_in(claim.owner, errands);
        line.turn_away(errands);
        self.let_in(&claim.name, Some(claim.owner), errands);
    }

    /// Takes those out of the database's line whose owner has the name alone: they must not wait for themselves.
    fn let_in(&mut self, name: &LockName, holder: Option<Owner>, errands: &mut Vec<Errand>) {
        for own in self.standing.of_owner(name, |owner| holder == Some(owner)) {
            errands.push(Errand::Leave(own.claim.clone()));
            errands.push(Errand::Join(own.again()));
        }
    }

    /// Lets a waiter stand in the database's line.
    fn stand(&mut self, waiter: Waiter, errands: &mut Vec<Errand>) {
        errands.push(self.standing.enter(waiter));
    }

    /// Lets all who wait here stand in the database's line, and turns those away who would not wait. How many join. (Who has asked
    /// waits for the answer: as long as that is on its way, nothing else may grant it the name.)
    fn join_line(&mut self, name: &LockName, errands: &mut Vec<Errand>) -> usize {
        let Some(line) = self.lines.get_mut(name) else {
            return 0;
        };
        line.turn_away(errands);
        let (asking, waiters): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut line.waiters).into_iter().filter(is_live).partition(|waiter| waiter.asks);
        line.waiters = asking;
        if matches!(line.door, Door::Asking(_) | Door::Checking) {
            self.next(name, errands);
        }
        let joining = waiters.len();
        for waiter in waiters {
            self.stand(waiter, errands);
        }
        joining
    }

    /// Notes whether a name is wanted elsewhere.
    fn note(&mut self, name: &LockName, wanted: bool) {
        self.wanted.retain(|other| other != name);
        if wanted {
            self.wanted.push_back(name.clone());
            if self.wanted.len() > WANTED {
                self.wanted.pop_front();
            }
        }
    }

    /// Serves a name, once at a time.
    fn serve(&mut self, name: &LockName) -> Option<Errand> {
        if let Some(again) = self.serving.get_mut(name) {
            *again = true;
            return None;
        }
        self.serving.insert(name.clone(), false);
        Some(Errand::Serve(name.clone()))
    }

    /// A name is not ours any more. As long as it was, nobody looked where the next of ours stands: its turn may come soon.
    fn gone_on(&mut self, name: &LockName, errands: &mut Vec<Errand>) {
        self.standing.look_around(name);
        self.attend_when_due(errands);
    }

    fn attend_when_due(&mut self, errands: &mut Vec<Errand>) {
        if !self.attending
            && let Some(due) = self.standing.due()
        {
            errands.push(Errand::Attend(due));
        }
    }

    /// Lets the first in line ask, or removes the line when nobody is left.
    fn next(&mut self, name: &LockName, errands: &mut Vec<Errand>) {
        let Some(line) = self.lines.get_mut(name) else {
            return;
        };
        let Some(first) = line.first() else {
            self.lines.remove(name);
            return;
        };
        let (claim, asks) = (first.claim.clone(), std::mem::replace(&mut first.asks, true));
        line.door = Door::Asking(claim.hold);
        // Otherwise its answer is on its way.
        if !asks {
            errands.push(Errand::Ask(claim));
        }
    }
}

/// Which holds are left after one was struck off.
#[derive(PartialEq, Eq)]
enum Remaining {
    /// It was the last one of the line's holder. Whether somebody waits elsewhere.
    None(bool),
    /// Its owner has others.
    Some,
    /// The line does not know it.
    Elsewhere,
}

impl Line {
    /// Whether somebody stands before a newcomer for certain.
    fn is_taken(&self) -> bool {
        match self.door {
            Door::Held { .. } => true,
            // Whoever is in flight may be refused or gone in a moment: stand behind, and be told with it.
            Door::Asking(_) | Door::Checking | Door::Leaving => {
                self.waiters.iter().any(|w| w.patience == Patience::Wait && is_live(w))
            }
        }
    }

    /// The first in line who still listens.
    fn first(&mut self) -> Option<&mut Waiter> {
        while self.waiters.front().is_some_and(|first| !is_live(first)) {
            self.waiters.pop_front();
        }
        self.waiters.front_mut()
    }

    /// The answer to a claim has come.
    fn hears(&mut self, hold: Hold) {
        if let Some(waiter) = self.waiters.iter_mut().find(|w| w.claim.hold == hold) {
            waiter.asks = false;
        }
    }

    fn behind(door: Door) -> Self {
        let answered = matches!(door, Door::Held { .. });
        Self { door, waiters: VecDeque::new(), answered }
    }

    fn take(&mut self, hold: Hold) -> Option<Waiter> {
        self.take_if(|waiter| waiter.claim.hold == hold)
    }

    fn take_if(&mut self, is_meant: impl Fn(&Waiter) -> bool) -> Option<Waiter> {
        let i = self.waiters.iter().position(is_meant)?;
        self.waiters.remove(i)
    }

    fn strike(&mut self, hold: Hold) -> Remaining {
        let Door::Held { holds, others, .. } = &mut self.door else {
            return Remaining::Elsewhere;
        };
        let Some(i) = holds.iter().position(|h| *h == hold) else {
            return Remaining::Elsewhere;
        };
        holds.swap_remove(i);
        if holds.is_empty() { Remaining::None(*others) } else { Remaining::Some }
    }

    /// Takes those out of the line whose owner has the name: they must not wait for themselves.
    fn let_in(&mut self, owner: Owner, errands: &mut Vec<Errand>) {
        let is_own = |w: &Waiter| w.reenters && w.claim.owner == owner;
        if !self.waiters.iter().any(is_own) {
            return;
        }
        let (own, stay) = self.waiters.drain(..).partition(is_own);
        self.waiters = stay;
        let own: VecDeque<Waiter> = own;
        // The answer to one that has asked is on its way, and no concern of it any more.
        errands.extend(own.into_iter().map(|own| Errand::Join(if own.asks { own.again() } else { own })));
    }

    /// Tells everybody of an error that concerns them all, so that they need not find out one after the other.
    fn disappoint(&mut self, error: &Error, errands: &mut Vec<Errand>) {
        while let Some(error) = error.for_another()
            && let Some(waiter) = self.waiters.pop_front()
        {
            errands.push(Errand::Refuse(waiter, Err(error)));
        }
    }

    /// Tells those who will not wait that the name is taken.
    fn turn_away(&mut self, errands: &mut Vec<Errand>) {
        if self.waiters.iter().all(|w| w.patience == Patience::Wait) {
            return;
        }
        let (tries, stay) = self.waiters.drain(..).partition(|w| w.patience != Patience::Wait);
        self.waiters = stay;
        let tries: VecDeque<Waiter> = tries;
        errands.extend(tries.into_iter().map(|waiter| Errand::Refuse(waiter, Ok(None))));
    }
}

impl Waiter {
    /// The same waiter with a new hold, for another attempt whose traces do not mix with those of the last.
    pub(crate) fn again(mut self) -> Self {
        self.claim.hold = Hold::random();
        self.asks = false;
        self
    }
}

fn is_live(waiter: &Waiter) -> bool {
    !waiter.reply.is_closed()
}

impl Errand {
    fn departing(departure: Departure, hold_at_least: Duration, tracked: bool) -> Self {
        let h = &departure.holding;
        let release =
            Release { name: h.name.clone(), owner: h.owner, hold: h.hold, token: Some(h.token), hold_at_least };
        Self::Release { release, departure, tracked }
    }

    /// Gives back what nobody received.
    fn release(holding: &Holding, hold_at_least: Duration, tracked: bool) -> Self {
        let departure = Departure {
            verdict: None,
            holding: holding.clone(),
            deadline: Moment::from_nanos(0),
            resent: false,
            ignored: 0,
        };
        Self::departing(departure, hold_at_least, tracked)
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::*;

    fn waiter(patience: Patience) -> (Waiter, oneshot::Receiver<Result<Option<Lease>>>) {
        let claim = Claim {
            name: LockName::new("a").expect("a name"),
            owner: Owner::random(),
            hold: Hold::random(),
            mode: Mode::Exclusive,
            ttl: Duration::from_secs(30),
            holder: "".into(),
            label: "".into(),
        };
        let terms = Terms { renew: true, max_hold: None, hold_at_least: None };
        let (reply, answer) = oneshot::channel();
        let id = WaiterId::next();
        (Waiter { id, claim, terms, patience, reenters: false, since: Moment::now(), asks: false, reply }, answer)
    }

    fn token(value: i64) -> FencingToken {
        FencingToken::new(value).expect("positive")
    }

    /// The database knows a claim by its hold, and would grant it twice: the second time to nobody.
    #[test]
    fn a_lease_that_is_in_use_is_not_given_back_when_its_claim_is_answered_twice() {
        let mut room = Room::default();
        let (waiter, _answer) = waiter(Patience::Wait);
        let claim = waiter.claim.clone();
        assert!(matches!(room.enter(waiter)[..], [Errand::Ask(_)]));
        assert!(matches!(room.granted(&claim, token(1), Moment::now(), false)[..], [Errand::Admit(..)]));
        assert!(room.granted(&claim, token(1), Moment::now(), false).is_empty());
    }

    /// While the name was ours nobody looked at those of ours who come later, but for the sign of life once a second.
    #[test]
    fn who_waits_here_is_looked_at_once_the_name_has_gone_elsewhere() {
        let mut room = Room::default();
        let (first, _answer) = waiter(Patience::Wait);
        let (second, _other_answer) = waiter(Patience::Wait);
        let (one, other) = (first.claim.clone(), second.claim.clone());
        let name = one.name.clone();
        room.note(&name, true);
        let sent_at = Moment::now();
        let held_by_the_first = backend::Row {
            name: name.to_string(),
            owner: one.owner.to_string(),
            holds: one.hold.mark(),
            token: 1,
            holder: String::new(),
            label: String::new(),
            acquired_at: 0,
            expires_at: 30_000_000,
            waiting: 1,
            now: 0,
        };
        for waiter in [first, second] {
            let claim = waiter.claim.clone();
            assert!(matches!(room.enter(waiter)[..], [Errand::Enqueue(..)]));
            let held_for = Some(Duration::from_secs(30));
            room.enqueued(&claim, Answer { outcome: Ok(held_for), sent_at, resent: false });
        }
        let (_, watch) = loop {
            if let Ok(places) = room.attend() {
                break places;
            }
        };
        assert!(matches!(&watch[..], [spot] if spot.hold == one.hold));
        let seen = Watched { row: held_by_the_first, token: None, ahead: 0 };
        let kept = vec![one.hold, other.hold];
        let watched = watch.into_iter().map(|spot| (spot, Some(seen.clone()))).collect();
        let errands = room.attended(sent_at, true, Ok(Attended { kept, gone: Vec::new(), watched }));
        assert!(errands.iter().any(|errand| matches!(errand, Errand::Admit(..))));

        assert!(matches!(room.leave(departure(&one), Duration::ZERO)[..], [Errand::Pass(_)]));
        let to = Granted { hold: Hold::random().mark(), token: token(2) };
        let served = Served { granted: vec![to], held_for: Some(CLAIM), others: true, ..Served::default() };
        let errands = room.given_up(&name, sent_at, &served);
        let next = errands.iter().find_map(|errand| if let Errand::Attend(due) = errand { Some(*due) } else { None });
        assert!(next.expect("a look") <= Moment::now() + Duration::from_millis(1));
    }

    fn holding(claim: &Claim) -> Holding {
        let Claim { name, owner, hold, mode, .. } = claim.clone();
        Holding { name, owner, hold, mode, token: token(1) }
    }

    fn departure(claim: &Claim) -> Departure {
        Departure { verdict: None, holding: holding(claim), deadline: Moment::now(), resent: false, ignored: 0 }
    }

    /// One of ours has been granted the name by the database's line, and while that is being confirmed another asks.
    fn admit_while_another_asks(room: &mut Room, first: Waiter, second: Waiter) -> Vec<Errand> {
        let (claim, sent_at) = (first.claim.clone(), Moment::now());
        room.note(&claim.name, true);
        assert!(matches!(room.enter(first)[..], [Errand::Enqueue(..)]));
        room.enqueued(&claim, Answer { outcome: Ok(Some(CLAIM)), sent_at, resent: false });
        let confirm = room.told(&claim.hold.mark(), token(1)).into_iter().find_map(|errand| match errand {
            Errand::Confirm(waiter, grant) => Some((waiter, grant)),
            _ => None,
        });
        let (first, grant) = confirm.expect("a claim is confirmed first");
        room.note(&claim.name, false);
        assert!(matches!(room.enter(second)[..], [Errand::Ask(_)]));
        let held = Answer { outcome: Ok(backend::Standing::Held), sent_at, resent: false };
        room.confirmed(first, grant, held)
    }

    /// Were it handed the name as well, and refused what it asked for, it would stand in the database's line and hold the name.
    #[test]
    fn who_has_asked_is_not_handed_the_name_before_it_is_answered() {
        let mut room = Room::new(true);
        let ((first, _answer), (second, _other_answer)) = (waiter(Patience::Wait), waiter(Patience::Wait));
        let (one, other) = (first.claim.clone(), second.claim.clone());
        let name = one.name.clone();
        assert!(matches!(admit_while_another_asks(&mut room, first, second)[..], [Errand::Admit(..), ..]));
        assert!(matches!(room.leave(departure(&one), Duration::ZERO)[..], [Errand::Pass(_) | Errand::Release { .. }]));
        // Whichever answer comes first, it asks no second time before the first is answered, and then joins the line.
        assert!(room.left(&name).iter().all(|errand| !matches!(errand, Errand::Ask(_))));
        assert!(matches!(&room.refused(&other)[..], [Errand::Enqueue(claim, _)] if claim.hold == other.hold));
    }

    #[test]
    fn who_enters_beside_its_owner_does_not_wait_for_what_it_has_asked_before() {
        let mut room = Room::new(true);
        let ((first, _answer), (mut second, _other_answer)) = (waiter(Patience::Wait), waiter(Patience::Wait));
        (second.claim.owner, second.reenters) = (first.claim.owner, true);
        let asked = second.claim.clone();
        let errands = admit_while_another_asks(&mut room, first, second);
        let joins = |errand: &Errand| matches!(errand, Errand::Join(w) if !w.asks && w.claim.hold != asked.hold);
        assert!(errands.iter().any(joins));
        assert!(room.refused(&asked).is_empty());
    }

    /// The name was handed to it, and yet another of ours had been granted it by the database's line.
    #[test]
    fn an_answer_to_what_the_line_does_not_wait_for_leaves_it_as_it_is() {
        let mut room = Room::default();
        let ((first, answer), (second, _other_answer)) = (waiter(Patience::Wait), waiter(Patience::Wait));
        let (one, other) = (first.claim.clone(), second.claim.clone());
        let name = one.name.clone();
        assert!(matches!(room.enter(first)[..], [Errand::Ask(_)]));
        assert!(room.enter(second).is_empty());
        assert!(matches!(room.granted(&one, token(1), Moment::now(), false)[..], [Errand::Admit(..)]));
        assert!(matches!(room.leave(departure(&one), Duration::ZERO)[..], [Errand::HandOff(..)]));
        drop(answer);
        // Refused, or not known: it asks, and that is what the line waits for now.
        assert!(matches!(room.hand_off_failed(&other)[..], [Errand::Ask(_)]));
        assert!(room.hand_off_failed(&one).is_empty());
        assert!(room.refused(&one).is_empty());
        // Nobody listens to this one: it goes back, and nothing else happens.
        assert!(matches!(
            room.granted(&one, token(2), Moment::now(), false)[..],
            [Errand::Release { tracked: false, .. }]
        ));
        assert!(matches!(room.not_handed_off(&one, departure(&one))[..], [Errand::Pass(_)]));
        assert!(matches!(room.granted(&other, token(3), Moment::now(), false)[..], [Errand::Admit(..)]));
        assert!(matches!(room.leave(departure(&other), Duration::ZERO)[..], [Errand::Release { .. }]));
        assert!(room.left(&name).is_empty());
    }

    /// Otherwise whoever passes the name on would tell nobody until the next sign of life.
    #[test]
    fn place_that_joins_after_the_bell_has_changed_gives_the_new_one_at_once() {
        let mut room = Room::default();
        let (waiter, _answer) = waiter(Patience::Wait);
        let claim = Claim { mode: Mode::READ, ..waiter.claim.clone() };
        let waiter = Waiter { claim: claim.clone(), ..waiter };
        assert!(matches!(room.enter(waiter)[..], [Errand::Enqueue(..)]));
        room.is_told(true);
        assert!(room.attend().map_or(true, |(keep, _)| keep.is_empty()), "it has not joined");
        let errands = room.enqueued(&claim, Answer { outcome: Ok(Some(CLAIM)), sent_at: Moment::now(), resent: false });
        assert!(errands.iter().any(|errand| matches!(errand, Errand::Attend(due) if *due <= Moment::now())));
        let (keep, _) = room.attend().unwrap_or_default();
        assert!(matches!(&keep[..], [spot] if spot.hold == claim.hold));
    }

    #[test]
    fn the_end_of_a_hold_makes_nobody_ask_who_has_asked_already() {
        let mut room = Room::default();
        let (waiter, _answer) = waiter(Patience::Wait);
        let name = waiter.claim.name.clone();
        assert!(matches!(room.enter(waiter)[..], [Errand::Ask(_)]));
        assert!(room.left(&name).is_empty());
    }
}
