//! Who is next: what is to become of a name, given who holds it and who stands in line.
//!
//! A pure function of what was read. The answer is carried out only if the name still stands as it was read, so it does not
//! matter who decides, nor how many decide at once.
//!
//! The line is served strictly in order, with one exception: whoever shares a name already may share it once more, since it
//! would otherwise wait for itself behind a waiting writer.

use std::collections::HashMap;
use std::time::Duration;

use crate::backend::{CLAIM, Granted, Mode, Pass, Place, Queue, Release, SHARED, Seen, Standing, To, token};
use crate::name::LockName;
use crate::owner::Owner;

/// How long a grant lasts, by the mark of its hold, for those who learn of it at once. Others get a [`CLAIM`].
pub(crate) type Terms = HashMap<String, Duration>;

impl Queue {
    /// What is to be done now, if anything. `from`: a holding that its holder gives up. `locked`: the name cannot be
    /// granted at present, since a fenced transaction of an earlier holder is still open.
    pub(crate) fn next(&self, name: &LockName, from: Option<&Release>, terms: &Terms, locked: bool) -> Option<Pass> {
        let given_up = from.is_some_and(|from| self.is_last_hold(from));
        let frees = given_up || (self.row.holds == SHARED && self.sharing().next().is_none());
        let (to, last) = if self.row.held_for().is_some() && !given_up {
            (To::Nobody, self.waiting().next().is_none())
        } else {
            let next = if locked { Vec::new() } else { self.successors() };
            let last = next.len() == self.waiting().count() && !self.is_cut_off();
            let grants = || next.iter().map(|place| (place.hold.clone(), lasts(place, terms))).collect();
            let to = match next.first() {
                None if frees => To::Free,
                None => To::Nobody,
                Some(alone) if alone.mode == Mode::Exclusive => To::One(alone.hold.clone(), lasts(alone, terms)),
                Some(_) if self.sharing().next().is_some() => To::More(grants()),
                Some(_) => To::Several(grants()),
            };
            (to, last)
        };
        if matches!(to, To::Nobody) && last == (self.row.waiting == 0) {
            return None;
        }
        let row = &self.row;
        // A holding that is given up, or shared, has no expiry of its own that could have moved.
        let expires_at = (!given_up && row.holds != SHARED).then_some(row.expires_at);
        let seen = Seen { token: row.token, holds: row.holds.clone(), expires_at, waiting: row.waiting };
        Some(Pass { name: name.clone(), seen, to, last })
    }

    /// Gives the name to this place, which wants others as well, if it is its turn.
    pub(crate) fn next_to(&self, name: &LockName, mark: &str, lasts: Duration) -> Option<Pass> {
        let row = &self.row;
        let free = row.held_for().is_none() && self.sharing().next().is_none();
        if !free || self.waiting().next().is_none_or(|first| first.hold != mark) {
            return None;
        }
        let expires_at = (row.holds != SHARED).then_some(row.expires_at);
        let seen = Seen { token: row.token, holds: row.holds.clone(), expires_at, waiting: row.waiting };
        let last = self.waiting().count() == 1 && !self.is_cut_off();
        Some(Pass { name: name.clone(), seen, to: To::One(mark.to_owned(), lasts), last })
    }

    /// Takes out those whose time has run out, but for our own that wait (for those we are there), and returns them.
    pub(crate) fn bury(&mut self, ours: &Terms) -> Vec<Place> {
        let now = self.row.now;
        let lives = |place: &Place| place.expires_at > now || (place.token == 0 && ours.contains_key(&place.hold));
        let (live, dead): (Vec<Place>, Vec<Place>) = self.places.drain(..).partition(lives);
        self.places = live;
        self.limit = self.limit.saturating_sub(dead.iter().filter(|place| place.token == 0).count() as u32);
        dead
    }

    /// How a holding stands, that its holder wants to give up: the last hold counts as given back.
    pub(crate) fn standing(&self, from: &Release) -> Standing {
        match self.row.standing(from.owner, from.hold, from.token) {
            Standing::Held if self.is_last_hold(from) => Standing::Released,
            Standing::Held => Standing::Unsettled,
            standing => standing,
        }
    }

    /// How to tell somebody of a grant: the bell, and what to say.
    pub(crate) fn bell(&self, granted: &Granted) -> Option<(String, String)> {
        self.places.iter().find(|place| place.hold == granted.hold)?.bell(granted.message())
    }

    /// Whose turn it is to take the name by itself. `freed`: it has just become free.
    pub(crate) fn turn(&self, freed: bool) -> Option<&Place> {
        let free = freed || (self.row.held_for().is_none() && self.sharing().next().is_none());
        self.waiting().next().filter(|first| free && first.mode == Mode::Joint)
    }

    /// For how long nobody can be let in, as far as is known.
    pub(crate) fn held_for(&self) -> Option<Duration> {
        let of_sharer = |place: &Place| {
            let left = u64::try_from(place.expires_at - self.row.now).unwrap_or(0);
            Duration::from_micros(left)
        };
        self.row.held_for().or_else(|| self.sharing().map(of_sharer).min())
    }

    /// Who holds the name alone.
    pub(crate) fn owner(&self) -> Option<Owner> {
        self.row.held_for().and_then(|_| self.row.owner.parse().ok())
    }

    /// The holds of those who have the name, alone or together.
    pub(crate) fn holding(&self) -> Vec<Granted> {
        let granted = |hold: &str, value| Some(Granted { hold: hold.to_owned(), token: token(value)? });
        let alone = self.row.held_for().and_then(|_| granted(&self.row.holds, self.row.token));
        alone.into_iter().chain(self.sharing().filter_map(|place| granted(&place.hold, place.token))).collect()
    }

    /// How many units are taken of a name that is shared.
    pub(crate) fn taken(&self) -> u64 {
        self.sharing().map(|place| units(place.mode)).sum()
    }

    /// Who shares the name, as a lease. (Permits are counted, whoever has them.)
    pub(crate) fn sharers(&self) -> Vec<Owner> {
        self.sharing().filter(|place| place.mode == Mode::READ).filter_map(|place| place.owner.parse().ok()).collect()
    }

    /// Those who share the name. When it is held by one alone, nobody does.
    fn sharing(&self) -> impl Iterator<Item = &Place> {
        let shared = self.row.holds == SHARED;
        self.places.iter().filter(move |place| shared && place.token > 0)
    }

    pub(crate) fn waiting(&self) -> impl Iterator<Item = &Place> {
        // A grant that was just made may not have taken the place away yet.
        self.places.iter().filter(|place| place.token == 0 && !self.row.holds.contains(&place.hold))
    }

    /// Whether more may wait than were read.
    pub(crate) fn is_cut_off(&self) -> bool {
        self.waiting().count() >= self.limit as usize
    }

    /// Whether this is the hold whose end frees the name.
    fn is_last_hold(&self, from: &Release) -> bool {
        self.row.standing(from.owner, from.hold, from.token) == Standing::Held && self.row.holds == from.hold.mark()
    }

    /// Who comes in next, when nobody holds the name alone.
    fn successors(&self) -> Vec<&Place> {
        let mut taken = self.taken();
        let mut empty = taken == 0;
        let mut next = Vec::new();
        let mut open = true;
        for place in self.waiting() {
            match place.mode {
                Mode::Exclusive => {
                    if open && empty {
                        return vec![place];
                    }
                    open = false;
                }
                // It takes the name by itself, when it can have all that it wants.
                Mode::Joint => open = false,
                Mode::Shared { units, permits } => {
                    let fits = taken + u64::from(units) <= u64::from(permits);
                    if fits && (open || (place.mode == Mode::READ && self.sharing().any(|s| s.owner == place.owner))) {
                        taken += u64::from(units);
                        empty = false;
                        next.push(place);
                    } else {
                        open = false;
                    }
                }
            }
        }
        next
    }
}

fn units(mode: Mode) -> u64 {
    match mode {
        Mode::Exclusive | Mode::Joint => 0,
        Mode::Shared { units, .. } => units.into(),
    }
}

fn lasts(place: &Place, terms: &Terms) -> Duration {
    terms.get(&place.hold).copied().unwrap_or(CLAIM)
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::backend::Row;
    use crate::owner::Hold;
    use crate::token::FencingToken;

    const SECOND: i64 = 1_000_000;
    const TTL: i64 = 30 * SECOND;

    fn name() -> LockName {
        LockName::new("a").expect("a name")
    }

    fn owner(n: u64) -> Owner {
        format!("{n:032x}").parse().expect("an owner")
    }

    fn hold(n: u64) -> Hold {
        format!("{n:032x}").parse().expect("a hold")
    }

    fn permits(units: u32, permits: u32) -> Mode {
        Mode::Shared { units, permits }
    }

    /// A place of an owner of its own, that came at this moment.
    fn place(n: u64, mode: Mode, token: i64, expires_at: i64) -> Place {
        Place {
            hold: hold(n).mark(),
            owner: owner(n).to_string(),
            bell: String::new(),
            mode,
            place: i64::try_from(n).expect("a moment"),
            token,
            holder: String::new(),
            label: String::new(),
            expires_at,
        }
    }

    fn waits(n: u64, mode: Mode) -> Place {
        place(n, mode, 0, 100 * SECOND)
    }

    fn shares(n: u64, mode: Mode) -> Place {
        place(n, mode, 10, 100 * SECOND)
    }

    fn free() -> Row {
        Row {
            name: "a".into(),
            owner: String::new(),
            holds: String::new(),
            token: 10,
            holder: String::new(),
            label: String::new(),
            acquired_at: 0,
            expires_at: 0,
            waiting: 1,
            now: 50 * SECOND,
        }
    }

    fn shared() -> Row {
        Row { holds: SHARED.into(), expires_at: i64::MAX, ..free() }
    }

    fn held_by(n: u64) -> Row {
        Row { owner: owner(n).to_string(), holds: hold(n).mark(), expires_at: 100 * SECOND, ..free() }
    }

    fn from(n: u64) -> Release {
        let token = FencingToken::new(10);
        Release { name: name(), owner: owner(n), hold: hold(n), token, hold_at_least: Duration::ZERO }
    }

    fn queue(row: Row, places: Vec<Place>) -> Queue {
        Queue::of(row, places.into_iter(), 32)
    }

    /// Who comes in, and whether nobody is left.
    fn next(row: Row, places: Vec<Place>) -> Option<(Vec<u64>, bool)> {
        queue(row, places).next(&name(), None, &Terms::new(), false).map(|pass| (lets_in(&pass.to), pass.last))
    }

    fn lets_in(to: &To) -> Vec<u64> {
        match to {
            To::Nobody | To::Free => Vec::new(),
            To::One(mark, _) => vec![number(mark)],
            To::More(next) | To::Several(next) => next.iter().map(|(mark, _)| number(mark)).collect(),
        }
    }

    fn number(mark: &str) -> u64 {
        u64::from_str_radix(mark.trim_end_matches(';'), 16).expect("one of ours")
    }

    const ALONE: Mode = Mode::Exclusive;
    const READ: Mode = Mode::READ;

    #[test]
    fn who_came_first_gets_a_free_name() {
        assert_eq!(next(free(), vec![waits(2, ALONE), waits(1, ALONE)]), Some((vec![1], false)));
        assert_eq!(next(free(), vec![waits(1, ALONE)]), Some((vec![1], true)));
        assert_eq!(next(free(), vec![waits(1, ALONE), waits(2, READ)]), Some((vec![1], false)));
    }

    #[test]
    fn nobody_gets_what_is_held() {
        assert_eq!(next(held_by(9), vec![waits(1, ALONE)]), None);
        assert_eq!(next(held_by(9), vec![waits(1, READ)]), None);
        assert_eq!(next(shared(), vec![shares(1, READ), waits(2, ALONE)]), None);
        // All that is left to do is to note down that nobody waits any more.
        assert_eq!(next(held_by(9), vec![]), Some((vec![], true)));
        assert_eq!(next(Row { waiting: 0, ..held_by(9) }, vec![]), None);
        // Or that somebody does.
        assert_eq!(next(Row { waiting: 0, ..held_by(9) }, vec![waits(1, ALONE)]), Some((vec![], false)));
    }

    #[test]
    fn what_its_holder_gives_up_goes_to_the_first() {
        let given_up = |places| {
            let pass = queue(held_by(9), places).next(&name(), Some(&from(9)), &Terms::new(), false).expect("a change");
            // It may have been renewed since it was read.
            assert_eq!(pass.seen.expires_at, None);
            pass.to
        };
        assert!(matches!(given_up(vec![]), To::Free));
        assert!(matches!(given_up(vec![waits(2, READ), waits(1, ALONE)]), To::One(mark, _) if number(&mark) == 1));
        assert!(matches!(given_up(vec![waits(1, READ), waits(2, READ)]), To::Several(next) if next.len() == 2));
        // Only by its last holder.
        let places = vec![waits(1, ALONE)];
        assert!(queue(held_by(9), places).next(&name(), Some(&from(8)), &Terms::new(), false).is_none());
        let mut entered_twice = held_by(9);
        entered_twice.holds.push_str(&hold(7).mark());
        let twice = queue(entered_twice, vec![waits(1, ALONE)]);
        assert_eq!(twice.standing(&from(9)), Standing::Unsettled);
        assert!(twice.next(&name(), Some(&from(9)), &Terms::new(), false).is_none());
    }

    #[test]
    fn readers_side_by_side_come_in_together_up_to_the_next_writer() {
        let line = vec![waits(1, READ), waits(2, READ), waits(3, ALONE), waits(4, READ)];
        assert_eq!(next(free(), line.clone()), Some((vec![1, 2], false)));
        let line = [vec![shares(9, READ)], line].concat();
        assert_eq!(next(shared(), line), Some((vec![1, 2], false)));
        assert_eq!(next(shared(), vec![shares(9, READ), waits(1, READ), waits(2, READ)]), Some((vec![1, 2], true)));
    }

    #[test]
    fn a_waiting_writer_keeps_later_readers_out_until_the_last_reader_has_gone() {
        let line = [waits(1, ALONE), waits(2, READ)];
        assert_eq!(next(shared(), vec![shares(8, READ), line[0].clone(), line[1].clone()]), None);
        assert_eq!(next(shared(), line.to_vec()), Some((vec![1], false)));
    }

    #[test]
    fn an_owner_that_shares_goes_past_a_waiting_writer() {
        let mut again = waits(3, READ);
        again.owner = owner(8).to_string();
        let line = vec![shares(8, READ), waits(1, ALONE), waits(2, READ), again.clone()];
        assert_eq!(next(shared(), line), Some((vec![3], false)));
        // Permits are counted, whoever has them: there it waits like everybody else.
        again.mode = permits(1, 5);
        assert_eq!(next(shared(), vec![shares(8, permits(1, 5)), waits(1, ALONE), again]), None);
    }

    #[test]
    fn permits_are_counted_and_a_large_request_is_not_overtaken() {
        let three = |units| permits(units, 3);
        let line = vec![shares(9, three(1)), waits(1, three(1)), waits(2, three(2)), waits(3, three(1))];
        assert_eq!(next(shared(), line), Some((vec![1], false)));
        let line = vec![shares(9, three(2)), waits(1, three(3)), waits(2, three(1))];
        assert_eq!(next(shared(), line), None);
        assert_eq!(next(shared(), vec![waits(1, three(3)), waits(2, three(1))]), Some((vec![1], false)));
        assert_eq!(next(free(), (1..=5).map(|n| waits(n, three(1))).collect()), Some((vec![1, 2, 3], false)));
    }

    #[test]
    fn each_request_counts_with_the_number_of_permits_that_it_was_told() {
        let holders = || [shares(8, permits(1, 3)), shares(9, permits(1, 3))];
        assert_eq!(next(shared(), [&holders()[..], &[waits(1, permits(1, 2))]].concat()), None);
        assert_eq!(next(shared(), [&holders()[..], &[waits(1, permits(1, 3))]].concat()), Some((vec![1], true)));
        assert_eq!(next(shared(), [&holders()[..], &[waits(1, permits(3, 5))]].concat()), Some((vec![1], true)));
        let both = [waits(1, permits(1, 2)), waits(2, permits(1, 9))];
        assert_eq!(next(shared(), [&holders()[..], &both].concat()), None);
    }

    #[test]
    fn what_nobody_shares_any_more_is_free() {
        let pass = queue(shared(), vec![]).next(&name(), None, &Terms::new(), false).expect("a change");
        assert!(matches!(pass.to, To::Free) && pass.last);
    }

    #[test]
    fn who_takes_the_name_by_itself_is_called_when_it_is_first_and_the_name_free() {
        let turn = |row, places, freed| queue(row, places).turn(freed).map(|place| number(&place.hold));
        let line = || vec![waits(1, Mode::Joint), waits(2, ALONE)];
        assert_eq!(turn(free(), line(), false), Some(1));
        assert_eq!(turn(held_by(9), line(), false), None);
        assert_eq!(turn(held_by(9), line(), true), Some(1));
        assert_eq!(turn(shared(), vec![shares(9, READ), waits(1, Mode::Joint)], false), None);
        assert_eq!(turn(free(), vec![waits(1, ALONE), waits(2, Mode::Joint)], false), None);
        assert_eq!(next(free(), line()), None);
    }

    #[test]
    fn what_is_locked_is_granted_to_nobody_and_can_still_be_given_up() {
        let locked = |row, places, from: Option<&Release>| queue(row, places).next(&name(), from, &Terms::new(), true);
        assert!(locked(free(), vec![waits(1, ALONE)], None).is_none());
        let pass = locked(held_by(9), vec![waits(1, ALONE)], Some(&from(9))).expect("a change");
        assert!(matches!(pass.to, To::Free) && !pass.last);
    }

    #[test]
    fn as_long_as_more_may_wait_than_were_read_it_is_not_said_that_nobody_does() {
        let mut queue = Queue::of(free(), vec![waits(1, READ), waits(2, READ)].into_iter(), 2);
        assert!(!queue.next(&name(), None, &Terms::new(), false).expect("a change").last);
        // Nor when one of those who were read was dead.
        queue.places.remove(0);
        queue.places.insert(0, place(1, READ, 0, SECOND));
        assert_eq!(buried(&mut queue, &Terms::new()), [1]);
        assert!(!queue.next(&name(), None, &Terms::new(), false).expect("a change").last);
    }

    #[test]
    fn who_has_died_is_buried_and_does_not_count() {
        let mut queue =
            queue(shared(), vec![place(1, READ, 10, 50 * SECOND), place(2, ALONE, 0, SECOND), waits(3, ALONE)]);
        assert_eq!(buried(&mut queue, &Terms::new()), [1, 2]);
        let pass = queue.next(&name(), None, &Terms::new(), false).expect("a change");
        assert_eq!(lets_in(&pass.to), [3]);
    }

    #[test]
    fn nobody_takes_its_own_waiters_for_dead() {
        let ours = Terms::from([2, 3].map(|n| (hold(n).mark(), Duration::from_secs(30))));
        let late = vec![place(1, ALONE, 0, SECOND), place(2, ALONE, 0, SECOND)];
        let mut queue = queue(shared(), [late, vec![place(3, READ, 10, SECOND)]].concat());
        // A share that has run out has run out, whoever had it.
        assert_eq!(buried(&mut queue, &ours), [3, 1]);
        let pass = queue.next(&name(), None, &ours, false).expect("a change");
        assert_eq!(lets_in(&pass.to), [2]);
    }

    fn buried(queue: &mut Queue, ours: &Terms) -> Vec<u64> {
        queue.bury(ours).iter().map(|place| number(&place.hold)).collect()
    }

    #[test]
    fn a_grant_lasts_as_long_as_was_asked_for_here_and_for_the_time_to_confirm_it_elsewhere() {
        let terms = Terms::from([(hold(1).mark(), Duration::from_secs(30))]);
        let pass = queue(free(), vec![waits(1, READ), waits(2, READ)]).next(&name(), None, &terms, false);
        let To::Several(next) = pass.expect("a change").to else {
            unreachable!("both come in");
        };
        assert_eq!(next, [(hold(1).mark(), Duration::from_secs(30)), (hold(2).mark(), CLAIM)]);
    }

    // ---- a simulation

    /// A small random number generator, so that a run can be repeated.
    struct Dice(u64);

    impl Dice {
        fn below(&mut self, n: u64) -> u64 {
            // Constants of Knuth's MMIX; the high bits are the random ones.
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) % n
        }
    }

    /// One name in a database of the mind, and what all who want it do.
    struct World {
        dice: Dice,
        row: Row,
        places: Vec<Place>,
        /// Those whose process lives: it renews what they hold and keeps their places.
        alive: Vec<u64>,
        arrived: u64,
        granted: u64,
        limit: u32,
    }

    impl World {
        fn new(seed: u64) -> Self {
            let row = Row { waiting: 0, token: 1, now: SECOND, ..free() };
            let limit = [2, 4, 32][seed as usize % 3];
            Self { dice: Dice(seed), row, places: Vec::new(), alive: Vec::new(), arrived: 0, granted: 0, limit }
        }

        fn is_alive(&self, mark: &str) -> bool {
            self.alive.contains(&number(mark))
        }

        fn sharers(&self) -> Vec<Place> {
            let is_shared = self.row.holds == SHARED;
            let now = self.row.now;
            self.places.iter().filter(|p| is_shared && p.token > 0 && p.expires_at > now).cloned().collect()
        }

        /// In order.
        fn waiters(&self) -> Vec<Place> {
            let now = self.row.now;
            let waits = |p: &&Place| p.token == 0 && p.expires_at > now;
            let mut waiters: Vec<Place> = self.places.iter().filter(waits).cloned().collect();
            waiters.sort_by_key(|p| p.place);
            waiters
        }

        fn holder(&self) -> Option<u64> {
            self.row.held_for().map(|_| number(&self.row.holds))
        }

        // ---- what happens

        fn arrive(&mut self) {
            self.arrived += 1;
            let n = self.arrived;
            self.alive.push(n);
            let mode = match self.dice.below(10) {
                0..4 => ALONE,
                4..8 => READ,
                _ => permits(1 + self.dice.below(3) as u32, 3),
            };
            let is_free = self.row.holds.is_empty() || self.row.expires_at <= self.row.now;
            if mode == ALONE && is_free && self.row.waiting == 0 {
                // The one statement that does not look at the line.
                assert!(self.waiters().is_empty(), "somebody waits, and the name says that nobody does");
                self.row.token += 1;
                self.give_to(n);
                return;
            }
            let mut place = place(n, mode, 0, self.row.now + 3 * SECOND);
            place.place = self.row.now;
            // Sometimes one that shares already.
            if mode == READ
                && self.dice.below(4) == 0
                && let Some(first) = self.sharers().iter().find(|p| p.mode == READ)
            {
                place.owner.clone_from(&first.owner);
            }
            self.places.push(place);
            self.row.waiting = (self.row.waiting + 1).max(self.row.now);
        }

        fn give_to(&mut self, n: u64) {
            assert!(self.sharers().is_empty() && self.holder().is_none(), "two hold it");
            self.row.owner = owner(n).to_string();
            self.row.holds = hold(n).mark();
            self.row.expires_at = self.row.now + TTL;
            self.granted += 1;
        }

        /// Somebody who lives and holds gives it back.
        fn release(&mut self) {
            if let Some(n) = self.holder().filter(|n| self.alive.contains(n)) {
                let from = Release { token: FencingToken::new(self.row.token), ..from(n) };
                return self.serve(Some(&from));
            }
            let living: Vec<String> =
                self.sharers().into_iter().map(|p| p.hold).filter(|mark| self.is_alive(mark)).collect();
            if !living.is_empty() {
                let mark = &living[self.dice.below(living.len() as u64) as usize];
                self.places.retain(|p| p.hold != *mark);
                self.serve(None);
            }
        }

        /// A waiter gives up.
        fn give_up(&mut self) {
            let waiters = self.waiters();
            if !waiters.is_empty() {
                let mark = &waiters[self.dice.below(waiters.len() as u64) as usize].hold;
                self.places.retain(|p| p.hold != *mark);
                self.serve(None);
            }
        }

        /// A process dies, whatever it does at the moment.
        fn die(&mut self) {
            if !self.alive.is_empty() {
                let i = self.dice.below(self.alive.len() as u64) as usize;
                self.alive.swap_remove(i);
            }
        }

        /// A second goes by: those who live keep what they have, and the first in line looks around.
        fn tick(&mut self) {
            self.row.now += SECOND;
            let alive = self.alive.clone();
            let now = self.row.now;
            for p in self.places.iter_mut().filter(|p| p.expires_at > now && alive.contains(&number(&p.hold))) {
                p.expires_at = now + if p.token == 0 { 3 * SECOND } else { TTL };
            }
            if self.holder().is_some_and(|n| alive.contains(&n)) {
                self.row.expires_at = now + TTL;
            }
            self.serve(None);
        }

        // ---- what is done about it, as the pump and the database do it

        fn serve(&mut self, from: Option<&Release>) {
            for _ in 0..32 {
                let mut waiting: Vec<Place> = self.places.iter().filter(|p| p.token == 0).cloned().collect();
                waiting.sort_by_key(|p| p.place);
                waiting.truncate(self.limit as usize);
                let sharing = self.places.iter().filter(|p| p.token > 0).cloned();
                let mut queue = Queue::of(self.row.clone(), sharing.chain(waiting), self.limit);
                let dead: Vec<String> = queue.bury(&Terms::new()).into_iter().map(|place| place.hold).collect();
                self.places.retain(|p| !dead.contains(&p.hold));
                if !dead.is_empty() && queue.waiting().next().is_none() {
                    continue;
                }
                let Some(pass) = queue.next(&name(), from, &Terms::new(), false) else {
                    return;
                };
                self.carry_out(&pass);
                if from.is_some() {
                    return;
                }
            }
            unreachable!("it never comes to rest");
        }

        fn carry_out(&mut self, pass: &Pass) {
            let seen = &pass.seen;
            assert!(seen.token == self.row.token && seen.holds == self.row.holds && seen.waiting == self.row.waiting);
            self.is_fair(&lets_in(&pass.to));
            self.row.waiting = match (pass.last, self.row.waiting) {
                (true, _) => 0,
                (false, 0) => self.row.now,
                (false, waiting) => waiting,
            };
            match &pass.to {
                To::Nobody => {}
                To::Free => (self.row.holds, self.row.expires_at) = (String::new(), self.row.now),
                To::One(mark, _) => {
                    // Whoever gives it up is gone.
                    self.row.holds.clear();
                    self.places.retain(|p| p.hold != *mark);
                    self.row.token += 1;
                    self.give_to(number(mark));
                }
                To::More(next) | To::Several(next) => {
                    assert_eq!(matches!(pass.to, To::More(_)), !self.sharers().is_empty());
                    for (mark, _) in next {
                        self.row.token += 1;
                        self.granted += 1;
                        let place = self.places.iter_mut().find(|p| p.hold == *mark).expect("it waits");
                        (place.token, place.expires_at) = (self.row.token, self.row.now + TTL);
                    }
                    (self.row.holds, self.row.expires_at) = (SHARED.into(), i64::MAX);
                }
            }
            self.is_lawful();
        }

        // ---- what must always be so

        /// Nobody who lives is passed over, but for an owner that shares the name already.
        fn is_fair(&self, next: &[u64]) {
            let waiters = self.waiters();
            let sharing: Vec<String> = self.sharers().into_iter().map(|p| p.owner).collect();
            let is_next = |p: &Place| next.contains(&number(&p.hold));
            for (i, place) in waiters.iter().enumerate().filter(|(_, p)| is_next(p)) {
                let enters_again = place.mode == READ && sharing.contains(&place.owner);
                let passed_over = waiters[..i].iter().find(|p| !is_next(p));
                assert!(enters_again || passed_over.is_none(), "{place:?} before {passed_over:?}");
            }
        }

        fn is_lawful(&self) {
            let sharers = self.sharers();
            assert!(self.holder().is_none() || sharers.is_empty(), "one alone, and others");
            let taken: u32 = sharers.iter().map(|p| units(p.mode) as u32).sum();
            // Each was let in when there was room for it, and nobody who came later may have taken that away.
            if let Some(last) = sharers.iter().max_by_key(|p| p.token)
                && let Mode::Shared { permits, .. } = last.mode
            {
                assert!(taken <= permits, "{taken} of {permits}");
            }
            let mut tokens: Vec<i64> = sharers.iter().map(|p| p.token).collect();
            tokens.sort_unstable();
            assert!(tokens.windows(2).all(|two| two[0] < two[1]), "a token twice: {tokens:?}");
        }

        /// Whoever could come in has come in.
        fn nobody_waits_in_vain(&self) {
            if self.holder().is_none() && self.sharers().is_empty() {
                assert!(self.waiters().is_empty(), "the name is free, and somebody waits");
            }
            assert!(self.row.waiting != 0 || self.waiters().is_empty());
        }
    }

    #[test]
    fn in_a_world_of_arrivals_releases_and_deaths_all_is_lawful_and_everybody_has_its_turn() {
        let mut granted = 0;
        for seed in 0..90 {
            let mut world = World::new(seed);
            for _ in 0..300 {
                match world.dice.below(20) {
                    0..8 => {
                        world.arrive();
                        world.serve(None);
                    }
                    8..15 => world.release(),
                    15 => world.give_up(),
                    16 => world.die(),
                    _ => world.tick(),
                }
                world.is_lawful();
                world.nobody_waits_in_vain();
            }
            // From here on nobody comes any more. The dead run out of time, and every living waiter has its turn.
            let living = |world: &World| world.waiters().iter().filter(|p| world.is_alive(&p.hold)).count();
            let mut turns = 0;
            while living(&world) > 0 {
                world.release();
                world.tick();
                turns += 1;
                assert!(turns < 1000, "seed {seed}: {} still wait", living(&world));
            }
            while !world.sharers().is_empty() || world.holder().is_some() {
                world.release();
                world.tick();
            }
            world.tick();
            assert!(world.row.holds.is_empty() || world.row.expires_at <= world.row.now);
            assert!(world.row.waiting == 0 && world.places.is_empty(), "seed {seed}: {:?}", world.places);
            granted += world.granted;
        }
        assert!(granted > 4_000, "too quiet a world: {granted} grants");
    }
}
