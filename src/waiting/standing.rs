//! Those of this process who stand in the line that the database keeps.
//!
//! A place is known by its hold. It joins the line, is kept alive and watched, and ends in one of four ways: it is granted the
//! name, its waiter goes, its waiter is told why not, or it has vanished from the table and joins again, as if it had come
//! when it first did.

use std::collections::HashMap;
use std::time::Duration;

use super::{Errand, Patience, Waiter, WaiterId, is_live};
use crate::backend::{CLAIM, Mode, SHARED, Spot, Watched};
use crate::clock::Moment;
use crate::name::LockName;
use crate::owner::{Hold, Owner};
use crate::queue::Terms;
use crate::token::FencingToken;

/// How often places give a sign of life.
const KEEP: Duration = CLAIM.checked_div(3).expect("not zero");

/// How soon and how late the first in line looks whether its turn has come, when nobody tells it.
const SOONEST: Duration = Duration::from_millis(1);
const LATEST: Duration = Duration::from_millis(100);

/// How late those further back look while the name changes hands, up to the 64th: all before them may be of one process,
/// which serves them fast.
const SELDOM: Duration = Duration::from_millis(250);

/// A bell is asked for from this place in line on. Every bell of a PostgreSQL server wakes all that listen.
const EARSHOT: i64 = 8;

/// A grant, as this process learned of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) token: FencingToken,
    /// The grant was made after this.
    pub(crate) sent_at: Moment,
    /// How long it lasts from when it was made.
    pub(crate) lasts: Duration,
    /// Somebody goes on waiting.
    pub(crate) others: bool,
}

struct Stander {
    waiter: Waiter,
    /// Whether the database has confirmed the place.
    joined: bool,
    /// A grant that was heard of before that.
    early: Option<Grant>,
    /// It may have joined twice, the second time after it had been granted the name.
    twice: bool,
    /// Until then, at least, it had not been granted the name.
    ungranted_at: Moment,
    /// When the database last said that the place is there.
    heard_at: Moment,
    /// Which bell its request to join named: see [`Standing::bells`].
    bell: u64,
}

/// What is known of a name that somebody waits for.
struct Watch {
    /// Those of ours who wait for it, in the order in which they came.
    holds: Vec<Hold>,
    /// The token that was seen last, and since when.
    token: i64,
    since: Moment,
    /// How many stand before the first of ours, and when that was seen.
    ahead: Option<(i64, Moment)>,
    /// How long the name stays with each of those before it, as far as was seen.
    pace: Duration,
    /// When to look again.
    due: Moment,
}

/// The places of one client.
#[derive(Default)]
pub(crate) struct Standing {
    standers: HashMap<Hold, Stander>,
    watches: HashMap<LockName, Watch>,
    kept: Option<Moment>,
    /// Whether the database tells us of grants.
    told: bool,
    /// How often that has changed.
    bells: u64,
}

impl Standing {
    pub(crate) fn is_empty(&self) -> bool {
        self.standers.is_empty()
    }

    /// Whether somebody here stands in line for a name.
    pub(crate) fn waits_for(&self, name: &LockName) -> bool {
        self.watches.contains_key(name)
    }

    /// Whether the database has confirmed of late that somebody stands in line.
    pub(crate) fn is_heard_of(&self, name: &LockName) -> bool {
        self.of(name).any(|stander| stander.joined && !(stander.heard_at + CLAIM).is_past())
    }

    /// Somebody goes and stands in line.
    pub(crate) fn enter(&mut self, waiter: Waiter) -> Errand {
        let now = Moment::now();
        let (claim, since) = (waiter.claim.clone(), waiter.since);
        let fresh =
            || Watch { holds: Vec::new(), token: 0, since: now, ahead: None, pace: Duration::ZERO, due: now + KEEP };
        let holds = &mut self.watches.entry(claim.name.clone()).or_insert_with(fresh).holds;
        // Whoever joins anew stands where it stood.
        let earlier = |hold: &Hold| self.standers.get(hold).is_some_and(|other| other.waiter.since <= since);
        let before = holds.iter().rposition(earlier).map_or(0, |last| last + 1);
        holds.insert(before, claim.hold);
        let (ungranted_at, heard_at, bell) = (now, now, self.bells);
        let stander = Stander { waiter, joined: false, early: None, twice: false, ungranted_at, heard_at, bell };
        self.standers.insert(claim.hold, stander);
        Errand::Enqueue(claim, since)
    }

    /// The place is in the table since a request that was sent then, or, if it was sent `twice`, maybe since an earlier one.
    /// `Err`: nobody waits there any more.
    pub(crate) fn joined(&mut self, hold: Hold, sent_at: Moment, twice: bool) -> Result<Option<Grant>, ()> {
        let stander = self.standers.get_mut(&hold).ok_or(())?;
        stander.joined = true;
        stander.twice = twice;
        stander.heard_at = sent_at;
        if !twice {
            stander.ungranted_at = sent_at;
        }
        let early = stander.early.take();
        // Those that had joined when the bell changed have given the new one already.
        if stander.bell != self.bells {
            let name = stander.waiter.claim.name.clone();
            self.kept = None;
            self.look_again_in(&name, Duration::ZERO);
        }
        Ok(early)
    }

    /// Ends the wait of a place that was granted the name, and tells whether it may have left another behind. `None`: it is not
    /// one of ours, or not yet confirmed.
    pub(crate) fn granted(&mut self, hold: Hold, grant: Grant) -> Option<(Waiter, bool)> {
        let stander = self.standers.get_mut(&hold)?;
        if !stander.joined {
            stander.early = Some(grant);
            return None;
        }
        let twice = stander.twice;
        Some((self.take(hold)?, twice))
    }

    /// Until when it is known that a place had not been granted the name.
    pub(crate) fn ungranted_at(&self, hold: Hold) -> Option<Moment> {
        self.standers.get(&hold).map(|stander| stander.ungranted_at)
    }

    /// Where a waiter stands.
    pub(crate) fn hold_of(&self, name: &LockName, id: WaiterId) -> Option<Hold> {
        self.of(name).find(|stander| stander.waiter.id == id).map(|stander| stander.waiter.claim.hold)
    }

    /// Ends the wait of confirmed places whose waiters do not listen any more.
    pub(crate) fn take_dead(&mut self) -> Vec<Waiter> {
        let dead = |stander: &&Stander| stander.joined && !is_live(&stander.waiter);
        let holds: Vec<Hold> = self.standers.values().filter(dead).map(|stander| stander.waiter.claim.hold).collect();
        holds.into_iter().filter_map(|hold| self.take(hold)).collect()
    }

    /// Whether a place was confirmed.
    pub(crate) fn is_joined(&self, hold: Hold) -> bool {
        self.standers.get(&hold).is_some_and(|stander| stander.joined)
    }

    /// Ends the wait of a place.
    pub(crate) fn take(&mut self, hold: Hold) -> Option<Waiter> {
        let waiter = self.standers.remove(&hold)?.waiter;
        let name = &waiter.claim.name;
        if let Some(watch) = self.watches.get_mut(name) {
            watch.holds.retain(|other| *other != hold);
            if watch.holds.is_empty() {
                self.watches.remove(name);
            }
        }
        Some(waiter)
    }

    /// Ends the wait of a place that is confirmed. Another becomes a mere try, which ends once it is.
    pub(crate) fn dismiss(&mut self, hold: Hold) -> Option<Waiter> {
        let stander = self.standers.get_mut(&hold)?;
        stander.waiter.patience = Patience::Try(0);
        if stander.joined { self.take(hold) } else { None }
    }

    /// Ends the wait of all those of a name that `leaves` says.
    pub(crate) fn take_those(&mut self, name: &LockName, leaves: impl Fn(&Waiter) -> bool) -> Vec<Waiter> {
        let holds: Vec<Hold> = self.of(name).map(|s| &s.waiter).filter(|w| leaves(w)).map(|w| w.claim.hold).collect();
        holds.into_iter().filter_map(|hold| self.take(hold)).collect()
    }

    /// Those whose place was confirmed, and who only try, unless there is room for them: these try some times more, since
    /// who stands before them may be only trying as well. Whether there are such.
    pub(crate) fn tries(&mut self, name: &LockName, has_room: impl Fn(Mode) -> bool) -> (bool, Vec<Waiter>) {
        let (mut again, mut refused) = (false, Vec::new());
        let holds = self.watches.get(name).map_or_else(Vec::new, |watch| watch.holds.clone());
        for hold in holds {
            let Some(stander) = self.standers.get_mut(&hold).filter(|stander| stander.joined) else {
                continue;
            };
            match &mut stander.waiter.patience {
                Patience::Wait => {}
                Patience::Try(left @ 1..) if has_room(stander.waiter.claim.mode) => {
                    *left -= 1;
                    again = true;
                }
                Patience::Try(_) => refused.extend(self.take(hold)),
            }
        }
        (again, refused)
    }

    /// Those who would wait for themselves.
    pub(crate) fn of_owner(&mut self, name: &LockName, is: impl Fn(Owner) -> bool) -> Vec<Waiter> {
        self.take_those(name, |w| w.reenters && is(w.claim.owner))
    }

    /// The owners of those who want to share a name.
    pub(crate) fn readers(&self, name: &LockName) -> Vec<Owner> {
        self.of(name).map(|s| &s.waiter.claim).filter(|c| c.mode == Mode::READ).map(|c| c.owner).collect()
    }

    /// Everybody.
    pub(crate) fn take_all(&mut self) -> Vec<Waiter> {
        self.watches.clear();
        self.standers.drain().map(|(_, stander)| stander.waiter).collect()
    }

    /// What the waiters for a name asked for: a grant by ourselves need not be confirmed.
    pub(crate) fn terms(&self, name: &LockName) -> Terms {
        self.of(name).map(|s| (s.waiter.claim.hold.mark(), s.waiter.claim.ttl)).collect()
    }

    /// The place with this mark, if it is one of ours.
    pub(crate) fn by_mark(&self, mark: &str) -> Option<Hold> {
        let hold = mark.trim_end_matches(';').parse().ok()?;
        self.standers.contains_key(&hold).then_some(hold)
    }

    // ---- watching

    /// When to attend to the places next. `None`: there are none.
    pub(crate) fn due(&self) -> Option<Moment> {
        let next = self.watches.values().map(|watch| watch.due).min()?;
        Some(next.min(self.kept.map_or(next, |kept| kept + KEEP)))
    }

    /// A bell has been given to us, or taken away. The places do not say so yet, and what was told before was not heard: they
    /// are to give a sign of life and to look, at once.
    pub(crate) fn is_told(&mut self, told: bool) {
        self.told = told;
        self.bells += 1;
        self.kept = None;
        let now = Moment::now();
        self.watches.values_mut().for_each(|look| look.due = now);
    }

    /// Which places need a sign of life, and which are to be looked at.
    pub(crate) fn attend(&mut self) -> (Vec<Spot>, Vec<Spot>) {
        let now = Moment::now();
        let joined = |s: &&Stander| s.joined;
        let keep = if self.kept.is_none_or(|kept| now >= kept + KEEP) {
            self.kept = Some(now);
            self.standers.values().filter(joined).map(|s| s.waiter.claim.spot()).collect()
        } else {
            Vec::new()
        };
        let all = !keep.is_empty();
        let mut watch = Vec::new();
        for look in self.watches.values_mut() {
            if now < look.due && !all {
                continue;
            }
            look.due = now + KEEP;
            // One that wants the name for itself alone is next only when all before it have gone; of those who share,
            // several may have been let in together.
            let mut alone = false;
            for stander in look.holds.iter().filter_map(|hold| self.standers.get(hold)).filter(joined) {
                if stander.waiter.claim.mode != Mode::Exclusive || !std::mem::replace(&mut alone, true) {
                    watch.push(stander.waiter.claim.spot());
                }
            }
        }
        (keep, watch)
    }

    /// Places gave a sign of life, by a request that was sent then, and waited.
    pub(crate) fn kept(&mut self, holds: &[Hold], sent_at: Moment) {
        for hold in holds {
            if let Some(stander) = self.standers.get_mut(hold) {
                stander.heard_at = stander.heard_at.max(sent_at);
                // A place that was made twice says nothing about the name.
                if !stander.twice {
                    stander.ungranted_at = stander.ungranted_at.max(sent_at);
                }
            }
        }
    }

    /// A place still waits, as an answer to a request tells that was sent then. Says whether its turn may have come.
    /// `slowly`: this is asked once in a while only.
    pub(crate) fn waits(&mut self, spot: &Spot, sent_at: Moment, watched: &Watched, slowly: bool) -> bool {
        if let Some(stander) = self.standers.get_mut(&spot.hold) {
            stander.heard_at = stander.heard_at.max(sent_at);
            stander.ungranted_at = stander.ungranted_at.max(sent_at);
        }
        let Some(look) = self.watches.get_mut(&spot.name) else {
            return false;
        };
        let now = Moment::now();
        let row = &watched.row;
        if look.token != row.token {
            (look.token, look.since) = (row.token, now);
        }
        if let Some((before, at)) = look.ahead.replace((watched.ahead, now))
            && let Ok(served @ 1..) = u32::try_from(before - watched.ahead)
        {
            look.pace = now.since(at) / served;
        }
        // The longer it has been held, the longer it will be, as far as one can know: an eighth of that is not much. Who is
        // further back looks when a quarter of those before it should have been served, at the pace that was seen.
        let ahead = u32::try_from(watched.ahead).unwrap_or(0).min(1000);
        let by_hold = (now.since(look.since) / 8).clamp(SOONEST, LATEST) * (ahead + 1);
        let by_pace = (look.pace / 4 * ahead).min((SELDOM / 64 * ahead).max(SELDOM));
        let told = self.told && watched.ahead < EARSHOT;
        let pause = if told { KEEP } else { by_hold.max(by_pace).min(KEEP) };
        let held_for = row.held_for();
        look.due = look.due.min(now + held_for.map_or(pause, |held| pause.min(held)));
        // The last of those who share passes the name on, unless it has died.
        let may_be_free = held_for.is_none() && (row.holds != SHARED || slowly);
        // Those before it may be ours as well: they stand there in the order of the database's clock, and here in ours. If
        // they are all ours, nobody else serves the name.
        ((watched.ahead == 0 || slowly) && may_be_free) || row.waiting == 0
    }

    /// The name cannot be granted for a while.
    pub(crate) fn look_again_in(&mut self, name: &LockName, pause: Duration) {
        if let Some(look) = self.watches.get_mut(name) {
            look.due = look.due.min(Moment::now() + pause);
        }
    }

    /// Somebody has come: where it stands is to be found out, unless we are told when its turn comes.
    pub(crate) fn look_around(&mut self, name: &LockName) {
        if !self.told {
            self.look_again_in(name, SOONEST);
        }
    }

    /// Whether anybody stands so near that it wants to be told.
    pub(crate) fn is_near(&self) -> bool {
        self.watches.values().any(|look| look.ahead.is_some_and(|(ahead, _)| ahead < EARSHOT))
    }

    fn of(&self, name: &LockName) -> impl Iterator<Item = &Stander> {
        let holds = self.watches.get(name).map_or(&[][..], |watch| &watch.holds);
        holds.iter().filter_map(|hold| self.standers.get(hold))
    }
}
