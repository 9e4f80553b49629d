//! The waiting room: who waits for what in this process, and what is to be done next.
//!
//! Waiters of one name stand in a line in the order in which they came, and only the first asks the database. When a
//! holder of this process gives the name back and somebody waits, one statement ends the one holding and begins the next.
//! When somebody elsewhere holds it, the line rests until that holder's expiry or a jittered back-off, whichever is
//! sooner, and then looks before it asks.
//!
//! The room does no I/O and reads no clock. It is told what happened and answers with [`Errand`]s, which its caller runs
//! once the room is unlocked. So every transition is a plain function of the line's [`Door`].

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::backend::{Claim, HandOff, Holding, Release};
use crate::backoff::Backoff;
use crate::client::late;
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::lease::{Lease, Terms};
use crate::name::LockName;
use crate::owner::{Hold, Owner};
use crate::token::FencingToken;

/// The shortest and longest pause of a line whose name is held elsewhere.
const REST: Backoff = Backoff::between(Duration::from_millis(4), Duration::from_millis(250));

/// How often a try is repeated while the name is free and yet locked: by another try, which may find a lock in its own way,
/// or by the fence of a transaction that outlives its lease. Of those who try a free name together one shall get it.
const TRIES: u8 = 5;

/// Somebody who wants a name.
pub(crate) struct Waiter {
    pub(crate) claim: Claim,
    pub(crate) terms: Terms,
    /// Whether to wait, or to be told at once that the name is taken.
    pub(crate) patience: Patience,
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
    /// The first in line has asked the database.
    Asking,
    /// Somebody elsewhere holds the name; a timer runs.
    Resting,
    /// The timer has run out, and the database is being asked who holds it.
    Looking,
    /// The first in line was refused, and the database is being asked whether anybody holds it, for those who only try.
    Checking,
    /// An owner of this process holds the name, with these holds.
    Held { owner: Owner, holds: Vec<Hold> },
    /// The last hold is being given back.
    Leaving,
}

struct Line {
    door: Door,
    waiters: VecDeque<Waiter>,
    rest: Backoff,
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
    /// Set the timer of a resting line.
    Rest(LockName, Duration),
    /// Ask the database who holds the name.
    Look(LockName),
    /// Tell a waiter that it got the name.
    Admit { waiter: Waiter, token: FencingToken, sent_at: Moment },
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
}

/// The lines of one client, by name.
#[derive(Default)]
pub(crate) struct Room {
    lines: HashMap<LockName, Line>,
    closed: bool,
}

impl Room {
    /// Somebody wants a name.
    pub(crate) fn enter(&mut self, waiter: Waiter) -> Vec<Errand> {
        if self.closed {
            return vec![Errand::Refuse(waiter, Err(Error::Closed))];
        }
        let Some(line) = self.lines.get_mut(&waiter.claim.name) else {
            let claim = waiter.claim.clone();
            let line = Line { waiters: VecDeque::from([waiter]), ..Line::behind(Door::Asking) };
            self.lines.insert(claim.name.clone(), line);
            return vec![Errand::Ask(claim)];
        };
        if waiter.patience != Patience::Wait && line.is_taken() {
            return vec![Errand::Refuse(waiter, Ok(None))];
        }
        line.waiters.push_back(waiter);
        Vec::new()
    }

    /// The database granted the name to a claim of this room, in time or `too_late`.
    pub(crate) fn granted(
        &mut self,
        claim: &Claim,
        token: FencingToken,
        sent_at: Moment,
        too_late: bool,
    ) -> Vec<Errand> {
        let line = self.line(&claim.name);
        line.answered = true;
        let waiter = line.take(claim.hold).filter(is_live);
        let holding = Holding { name: claim.name.clone(), owner: claim.owner, hold: claim.hold, token };
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
                line.door = Door::Held { owner: claim.owner, holds: vec![claim.hold] };
                line.rest = REST;
                let mut errands = vec![Errand::Admit { waiter, token, sent_at }];
                line.let_in(claim.owner, &mut errands);
                line.turn_away(&mut errands);
                errands
            }
        }
    }

    /// The database refused the name: somebody elsewhere holds it. On a database that skips `locked` rows it may also be
    /// free, and locked for a moment.
    pub(crate) fn refused(&mut self, claim: &Claim, locked: bool) -> Vec<Errand> {
        let line = self.line(&claim.name);
        line.answered = true;
        if locked && line.waiters.iter().any(|w| matches!(w.patience, Patience::Try(1..)) && is_live(w)) {
            line.door = Door::Checking;
            return vec![Errand::Look(claim.name.clone())];
        }
        let mut errands = Vec::new();
        line.turn_away(&mut errands);
        self.rest(&claim.name, None, &mut errands);
        errands
    }

    /// The database could not be asked, or refused for a reason of its own.
    pub(crate) fn failed(&mut self, claim: &Claim, error: Error) -> Vec<Errand> {
        let line = self.line(&claim.name);
        let mut errands = Vec::new();
        if let Some(waiter) = line.take(claim.hold) {
            line.disappoint(&error, &mut errands);
            errands.push(Errand::Refuse(waiter, Err(error)));
        }
        self.next(&claim.name, &mut errands);
        errands
    }

    /// The timer of a line has run out.
    pub(crate) fn knock(&mut self, name: &LockName) -> Vec<Errand> {
        let Some(line) = self.lines.get_mut(name) else {
            return Vec::new();
        };
        if !matches!(line.door, Door::Resting) {
            return Vec::new();
        }
        if line.first().is_none() {
            self.lines.remove(name);
            return Vec::new();
        }
        line.door = Door::Looking;
        vec![Errand::Look(name.clone())]
    }

    /// The database told for how long the name is still held, and by whom: `None` when it is free.
    pub(crate) fn looked(&mut self, name: &LockName, held: Result<Option<(Duration, Option<Owner>)>>) -> Vec<Errand> {
        let mut errands = Vec::new();
        let Some(line) = self.lines.get_mut(name) else {
            return errands;
        };
        if !matches!(line.door, Door::Looking | Door::Checking) {
            return errands;
        }
        match held {
            Ok(Some((held_for, owner))) => {
                if let Some(owner) = owner {
                    line.let_in(owner, &mut errands);
                }
                line.turn_away(&mut errands);
                self.rest(name, Some(held_for), &mut errands);
            }
            Ok(None) if matches!(line.door, Door::Checking) => {
                for waiter in &mut line.waiters {
                    if let Patience::Try(left) = &mut waiter.patience {
                        *left = left.saturating_sub(1);
                    }
                }
                self.rest(name, None, &mut errands);
            }
            Ok(None) => self.next(name, &mut errands),
            Err(error) => {
                if let Some(first) = line.waiters.pop_front() {
                    line.disappoint(&error, &mut errands);
                    errands.push(Errand::Refuse(first, Err(error)));
                }
                self.next(name, &mut errands);
            }
        }
        errands
    }

    /// An owner of this process re-entered, or took over an exported lease.
    pub(crate) fn joined(&mut self, holding: &Holding) {
        let line = self
            .lines
            .entry(holding.name.clone())
            .or_insert_with(|| Line::behind(Door::Held { owner: holding.owner, holds: Vec::new() }));
        // In any other state the line will find out by asking.
        if let Door::Held { owner, holds } = &mut line.door
            && *owner == holding.owner
        {
            holds.push(holding.hold);
        }
    }

    /// A holder gives its hold back.
    pub(crate) fn leave(&mut self, departure: Departure, hold_at_least: Duration) -> Vec<Errand> {
        let holding = departure.holding.clone();
        let Some(line) = self.lines.get_mut(&holding.name) else {
            return vec![Errand::departing(departure, hold_at_least, false)];
        };
        match line.strike(holding.hold) {
            Remaining::None => {
                let next = line.first().map(|first| first.claim.clone());
                if let Some(to) = next
                    && hold_at_least.is_zero()
                {
                    line.door = Door::Asking;
                    let hand_off = HandOff { from: holding, to };
                    return vec![Errand::HandOff(hand_off, departure)];
                }
                line.door = Door::Leaving;
                vec![Errand::departing(departure, hold_at_least, true)]
            }
            Remaining::Some | Remaining::Elsewhere => vec![Errand::departing(departure, hold_at_least, false)],
        }
    }

    /// A hold was given back that the line did not wait for. It may have been the last one all the same.
    pub(crate) fn left_untracked(&mut self, name: &LockName) -> Vec<Errand> {
        self.knock(name)
    }

    /// The last hold was given back, or has ended by itself.
    pub(crate) fn left(&mut self, name: &LockName) -> Vec<Errand> {
        let mut errands = Vec::new();
        self.next(name, &mut errands);
        errands
    }

    /// The database would not pass the name on directly: let the holder go first.
    pub(crate) fn not_handed_off(&mut self, departure: Departure) -> Vec<Errand> {
        let line = self.line(&departure.holding.name);
        line.door = Door::Leaving;
        vec![Errand::departing(departure, Duration::ZERO, true)]
    }

    /// A hold has ended without being given back: it was lost, or exported.
    pub(crate) fn vacate(&mut self, holding: &Holding) -> Vec<Errand> {
        let mut errands = Vec::new();
        if let Some(line) = self.lines.get_mut(&holding.name)
            && line.strike(holding.hold) == Remaining::None
        {
            self.next(&holding.name, &mut errands);
        }
        errands
    }

    /// A waiter has gone. If it has asked, the answer will find it missing.
    pub(crate) fn forget(&mut self, name: &LockName, hold: Hold) {
        let Some(line) = self.lines.get_mut(name) else {
            return;
        };
        line.take(hold);
        if line.waiters.is_empty() && matches!(line.door, Door::Resting | Door::Looking | Door::Checking) {
            self.lines.remove(name);
        }
    }

    /// Whether the database has been asked about a name and has not said a word.
    pub(crate) fn is_unanswered(&self, name: &LockName) -> bool {
        self.lines.get(name).is_some_and(|line| !line.answered)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Refuses everybody, from now on.
    pub(crate) fn close(&mut self) -> Vec<Errand> {
        self.closed = true;
        self.lines
            .values_mut()
            .flat_map(|line| line.waiters.drain(..))
            .map(|waiter| Errand::Refuse(waiter, Err(Error::Closed)))
            .collect()
    }

    /// Lets the first in line ask, or removes the line when nobody is left.
    fn next(&mut self, name: &LockName, errands: &mut Vec<Errand>) {
        let Some(line) = self.lines.get_mut(name) else {
            return;
        };
        let Some(claim) = line.first().map(|first| first.claim.clone()) else {
            self.lines.remove(name);
            return;
        };
        line.door = Door::Asking;
        errands.push(Errand::Ask(claim));
    }

    /// Lets the line rest until the holder's expiry or for its back-off, whichever is sooner.
    fn rest(&mut self, name: &LockName, held_for: Option<Duration>, errands: &mut Vec<Errand>) {
        let line = self.line(name);
        if line.first().is_none() {
            self.lines.remove(name);
            return;
        }
        line.door = Door::Resting;
        let step = line.rest.step();
        errands.push(Errand::Rest(name.clone(), held_for.map_or(step, |held| held.min(step))));
    }

    /// The line of a name that has asked. It is there: only an answer takes it away.
    fn line(&mut self, name: &LockName) -> &mut Line {
        self.lines.entry(name.clone()).or_insert_with(|| Line::behind(Door::Asking))
    }
}

/// Which holds are left after one was struck off.
#[derive(PartialEq, Eq)]
enum Remaining {
    /// It was the last one of the line's holder.
    None,
    /// Its owner has others.
    Some,
    /// The line does not know it.
    Elsewhere,
}

impl Line {
    /// Whether somebody stands before a newcomer for certain.
    fn is_taken(&self) -> bool {
        match self.door {
            Door::Held { .. } | Door::Resting | Door::Looking => true,
            // Whoever is in flight may be refused or gone in a moment: stand behind, and be told with it.
            Door::Asking | Door::Checking | Door::Leaving => {
                self.waiters.iter().any(|w| w.patience == Patience::Wait && is_live(w))
            }
        }
    }

    /// The first in line who still listens.
    fn first(&mut self) -> Option<&Waiter> {
        while self.waiters.front().is_some_and(|first| !is_live(first)) {
            self.waiters.pop_front();
        }
        self.waiters.front()
    }

    fn behind(door: Door) -> Self {
        let answered = matches!(door, Door::Held { .. });
        Self { door, waiters: VecDeque::new(), rest: REST, answered }
    }

    fn take(&mut self, hold: Hold) -> Option<Waiter> {
        let i = self.waiters.iter().position(|w| w.claim.hold == hold)?;
        self.waiters.remove(i)
    }

    fn strike(&mut self, hold: Hold) -> Remaining {
        let Door::Held { holds, .. } = &mut self.door else {
            return Remaining::Elsewhere;
        };
        let Some(i) = holds.iter().position(|h| *h == hold) else {
            return Remaining::Elsewhere;
        };
        holds.swap_remove(i);
        if holds.is_empty() { Remaining::None } else { Remaining::Some }
    }

    /// Takes those out of the line whose owner has the name: they must not wait for themselves.
    fn let_in(&mut self, owner: Owner, errands: &mut Vec<Errand>) {
        if self.waiters.iter().all(|w| w.claim.owner != owner) {
            return;
        }
        let (own, stay) = self.waiters.drain(..).partition(|w| w.claim.owner == owner);
        self.waiters = stay;
        let own: VecDeque<Waiter> = own;
        errands.extend(own.into_iter().map(Errand::Join));
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
    fn again(mut self) -> Self {
        self.claim.hold = Hold::random();
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
        let departure = Departure { verdict: None, holding: holding.clone(), deadline: Moment::from_nanos(0) };
        Self::departing(departure, hold_at_least, tracked)
    }
}
