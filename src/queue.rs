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

    /// Takes out those whose time has run out, and tells which.
    pub(crate) fn bury(&mut self) -> Vec<String> {
        let now = self.row.now;
        let (live, dead): (Vec<Place>, Vec<Place>) = self.places.drain(..).partition(|place| place.expires_at > now);
        self.places = live;
        self.limit = self.limit.saturating_sub(dead.iter().filter(|place| place.token == 0).count() as u32);
        dead.into_iter().map(|place| place.hold).collect()
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
        let place = self.places.iter().find(|place| place.hold == granted.hold && !place.bell.is_empty())?;
        Some((place.bell.clone(), format!("{}{}", granted.hold, granted.token)))
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

    /// The hold of whoever holds the name alone.
    pub(crate) fn held(&self) -> Option<Granted> {
        self.row.held_for()?;
        Some(Granted { hold: self.row.holds.clone(), token: token(self.row.token)? })
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
        let mut taken: u64 = self.sharing().map(|place| units(place.mode)).sum();
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
        Mode::Exclusive => 0,
        Mode::Shared { units, .. } => units.into(),
    }
}

fn lasts(place: &Place, terms: &Terms) -> Duration {
    terms.get(&place.hold).copied().unwrap_or(CLAIM)
}
