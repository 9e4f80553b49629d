//! Letting those in whose turn it is.

use std::sync::Arc;
use std::time::Duration;

use super::Request;
use crate::backend::{CLAIM, GRACE, Granted, Job, Mode, PassedOn, Release, Session, Standing, To};
use crate::name::LockName;
use crate::owner::Owner;
use crate::queue::Terms;

/// How many of those who wait are read to find out who is next.
pub(crate) const NEXT: u32 = 32;

/// How often a decision is made anew when the name has changed meanwhile.
const DECISIONS: u32 = 16;

/// Lets those in whose turn it is.
pub(crate) struct Serve {
    pub(crate) name: LockName,
    /// A holding that its holder gives up, to whoever is next.
    pub(crate) from: Option<Release>,
    /// What the waiters of this client asked for.
    pub(crate) terms: Terms,
    /// The owners of those among them who want to share it.
    pub(crate) readers: Vec<Owner>,
    /// Our own bell, which needs not be rung.
    pub(crate) bell: Arc<str>,
}

/// How a name stands after it was served.
#[derive(Clone, Debug, Default)]
pub(crate) struct Served {
    pub(crate) granted: Vec<Granted>,
    /// How long those grants last that are not mere claims.
    pub(crate) terms: Terms,
    /// `None`: nobody holds it.
    pub(crate) held_for: Option<Duration>,
    /// Whether it could not be granted to those who wait, for a transaction that an earlier holder has fenced is open.
    pub(crate) locked: bool,
    /// Who held it alone and who shared it, with which holds, and how many units were taken, before anybody was let in.
    pub(crate) owner: Option<Owner>,
    pub(crate) sharers: Vec<Owner>,
    pub(crate) holding: Vec<Granted>,
    pub(crate) taken: u64,
    /// Somebody goes on waiting.
    pub(crate) others: bool,
    /// How the holding stood that was given up.
    pub(crate) standing: Option<Standing>,
    /// The mark of whoever is to take it by itself now.
    pub(crate) turn: Option<String>,
    /// Whom to tell: bells, and what to say.
    pub(crate) bells: Vec<(String, String)>,
}

impl Served {
    /// Whether somebody who wants it like this could be let in, but for those who stand before.
    pub(crate) fn has_room_for(&self, mode: Mode) -> bool {
        let granted = self.granted.len() as u64;
        let held_alone = self.held_for.is_some() && self.taken + granted == 0;
        match mode {
            Mode::Exclusive | Mode::Joint => false,
            Mode::Shared { units, permits } => {
                !held_alone && self.taken + granted + u64::from(units) <= u64::from(permits)
            }
        }
    }
}

impl Request for Serve {
    type Outcome = Served;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, Served> {
        Box::pin(async move {
            if let Some(from) = &self.from
                && let Some(PassedOn { to, bell, others }) = session.pass_on(from).await?
            {
                let bells = if bell.is_empty() { Vec::new() } else { vec![(bell, to.message())] };
                return Ok(Served {
                    granted: vec![to],
                    held_for: Some(CLAIM),
                    others,
                    standing: Some(Standing::Released),
                    bells,
                    ..Served::default()
                });
            }
            let mut waited = false;
            let mut locked = false;
            let mut before = None;
            let mut limit = NEXT;
            for _ in 0..DECISIONS {
                let Some(mut queue) = session.queue(&self.name, limit).await? else {
                    return Ok(Served { standing: Some(Standing::Superseded), ..Served::default() });
                };
                let dead = queue.bury(&self.terms);
                if !dead.is_empty() {
                    // Those who wait may be alive, and the database may have stood still for all of us until now.
                    if dead.iter().any(|place| place.token == 0) && !std::mem::replace(&mut waited, true) {
                        tokio::time::sleep(GRACE).await;
                        continue;
                    }
                    let dead: Vec<String> = dead.into_iter().map(|place| place.hold).collect();
                    session.bury(&self.name, &dead).await?;
                    if queue.waiting().next().is_none() {
                        continue;
                    }
                }
                // Whoever shares the name goes past all who wait, wherever it stands.
                if limit == NEXT && queue.is_cut_off() && queue.sharers().iter().any(|own| self.readers.contains(own)) {
                    limit = u32::MAX;
                    continue;
                }
                // Nobody has touched the name, and yet it would not change hands: a fence is in the way.
                let row = &queue.row;
                let first = queue.waiting().next().map(|place| place.hold.clone());
                let now = (row.token, row.holds.clone(), row.waiting, first);
                locked |= before.replace(now.clone()) == Some(now);
                let standing = self.from.as_ref().map(|from| queue.standing(from));
                let served = Served {
                    standing,
                    owner: queue.owner(),
                    sharers: queue.sharers(),
                    holding: queue.holding(),
                    taken: queue.taken(),
                    locked,
                    ..Served::default()
                };
                let pass = queue.next(&self.name, self.from.as_ref(), &self.terms, locked);
                let granted = match &pass {
                    None => Vec::new(),
                    Some(pass) => match session.pass(pass).await? {
                        Some(granted) => granted,
                        None => continue,
                    },
                };
                let freed = pass.as_ref().is_some_and(|pass| matches!(pass.to, To::Free));
                let turn = if granted.is_empty() { queue.turn(freed) } else { None };
                let called = turn.and_then(|place| place.bell(place.hold.clone()));
                let held_for = if granted.is_empty() { queue.held_for() } else { Some(CLAIM) };
                let held_for = held_for.filter(|_| standing != Some(Standing::Released) || !granted.is_empty());
                return Ok(Served {
                    terms: self.terms.clone(),
                    held_for,
                    others: pass.map_or_else(|| queue.waiting().next().is_some(), |pass| !pass.last),
                    turn: turn.map(|place| place.hold.clone()),
                    bells: granted.iter().filter_map(|granted| queue.bell(granted)).chain(called).collect(),
                    granted,
                    ..served
                });
            }
            Ok(Served {
                locked: true,
                others: true,
                standing: self.from.as_ref().map(|_| Standing::Unsettled),
                ..Served::default()
            })
        })
    }
}
