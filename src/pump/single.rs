//! Requests that travel alone.

use std::sync::Arc;
use std::time::Duration;

use super::{BATCH, Request};
use crate::backend::records::{Errand, Findings};
use crate::backend::sealed::Column;
use crate::backend::{Holding, Job, LastEviction, Listed, Names, Place, Session, Spot, Standing, Ticket, Watched};
use crate::backoff::Backoff;
use crate::name::LockName;
use crate::owner::Hold;
use crate::queue::Terms;
use crate::token::FencingToken;

/// Takes nothing but a connection.
pub(super) struct Reach;

impl Request for Reach {
    type Outcome = ();

    fn send<'a>(&'a self, _session: &'a mut dyn Session) -> Job<'a, ()> {
        Box::pin(async { Ok(()) })
    }
}

pub(super) struct List(pub(super) Names);

impl Request for List {
    type Outcome = Vec<Listed>;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, Vec<Listed>> {
        session.list(&self.0)
    }
}

pub(super) struct Waiters(pub(super) LockName);

impl Request for Waiters {
    type Outcome = Vec<Place>;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, Vec<Place>> {
        Box::pin(async move {
            let queue = session.queue(&self.0, u32::MAX).await?;
            Ok(queue.map_or_else(Vec::new, |mut queue| {
                queue.bury(&Terms::new());
                queue.waiting().cloned().collect()
            }))
        })
    }
}

pub(super) struct Downgrade {
    pub(super) from: Holding,
    pub(super) to: Ticket,
}

impl Request for Downgrade {
    type Outcome = bool;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, bool> {
        session.downgrade(&self.from, &self.to)
    }
}

pub(super) struct Copy {
    pub(super) from: Holding,
    pub(super) to: Hold,
    pub(super) ttl: Duration,
}

impl Request for Copy {
    type Outcome = bool;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, bool> {
        session.copy(&self.from, self.to, self.ttl)
    }
}

/// Looks after the places of a client.
pub(crate) struct Attend {
    /// All places, when they need a sign of life.
    pub(crate) keep: Vec<Spot>,
    pub(crate) bell: Arc<str>,
    /// Those whose turn may have come.
    pub(crate) watch: Vec<Spot>,
}

pub(crate) struct Attended {
    /// Those that still waited when they gave their sign of life.
    pub(crate) kept: Vec<Hold>,
    /// Those that did not.
    pub(crate) gone: Vec<Spot>,
    pub(crate) watched: Vec<(Spot, Option<Watched>)>,
}

impl Request for Attend {
    type Outcome = Attended;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, Attended> {
        Box::pin(async move {
            let (mut kept, mut gone) = (Vec::new(), Vec::new());
            for places in self.keep.chunks(BATCH) {
                for (spot, is_kept) in places.iter().zip(session.keep(places, &self.bell).await?) {
                    if is_kept { kept.push(spot.hold) } else { gone.push(spot.clone()) }
                }
            }
            // What is gone may have been granted the name: that is told by looking.
            let watch: Vec<Spot> =
                self.watch.iter().chain(gone.iter().filter(|spot| !self.watch.contains(spot))).cloned().collect();
            let mut watched = Vec::with_capacity(watch.len());
            for places in watch.chunks(BATCH) {
                watched.extend(places.iter().cloned().zip(session.watch(places).await?));
            }
            Ok(Attended { kept, gone, watched })
        })
    }
}

pub(super) struct Raise {
    pub(super) holding: Holding,
    pub(super) to: FencingToken,
}

/// How often a raise is repeated when others, who will not get the name, have its rows locked at that moment.
const RAISES: u32 = 8;

impl Request for Raise {
    type Outcome = bool;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, bool> {
        Box::pin(async move {
            let h = &self.holding;
            let mut backoff = Backoff::between(Duration::from_millis(1), Duration::from_millis(20));
            for _ in 0..RAISES {
                if session.raise(h, self.to).await? {
                    return Ok(true);
                }
                let rows = session.look(std::slice::from_ref(&h.name)).await?;
                let standing = rows.first().map(|row| row.standing(h.owner, h.hold, Some(h.token)));
                if standing != Some(Standing::Held) {
                    break;
                }
                tokio::time::sleep(backoff.step()).await;
            }
            Ok(false)
        })
    }
}

pub(super) struct Uptime;

impl Request for Uptime {
    type Outcome = Option<Duration>;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, Option<Duration>> {
        session.uptime()
    }
}

pub(super) struct Evict(pub(super) LockName, pub(super) FencingToken);

impl Request for Evict {
    type Outcome = bool;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, bool> {
        session.evict(&self.0, self.1)
    }
}

pub(super) struct Evicted(pub(super) LockName);

impl Request for Evicted {
    type Outcome = Option<LastEviction>;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, Option<LastEviction>> {
        session.last_eviction(&self.0)
    }
}

pub(super) struct Extend {
    pub(super) name: LockName,
    pub(super) token: FencingToken,
    pub(super) ttl: Duration,
}

impl Request for Extend {
    type Outcome = bool;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, bool> {
        session.extend(&self.name, self.token, self.ttl)
    }
}

pub(super) struct Ensure(pub(super) LockName);

impl Request for Ensure {
    type Outcome = ();

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, ()> {
        session.ensure(&self.0)
    }
}

pub(super) struct ColumnOf(pub(super) (String, String, String));

impl Request for ColumnOf {
    type Outcome = Option<Column>;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, Option<Column>> {
        session.column(&self.0)
    }
}

impl Request for Errand {
    type Outcome = Findings;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, Findings> {
        session.record(self)
    }
}

pub(super) struct Sweep {
    pub(super) retention: Duration,
    pub(super) limit: u32,
}

impl Request for Sweep {
    type Outcome = u64;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, u64> {
        session.sweep(self.retention, self.limit)
    }
}
