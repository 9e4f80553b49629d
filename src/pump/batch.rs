//! Requests that travel together: one statement for all of a kind.

use std::time::Duration;

use super::Request;
use crate::backend::{Claim, HandOff, Job, Release, Renewal, Row, Session, Spot, Standing, Ticket, in_doubt};
use crate::name::LockName;
use crate::owner::{Hold, Owner};
use crate::token::FencingToken;

/// A batch on its way.
pub(super) struct Together<'b, B: Batch>(pub(super) &'b [B::Item]);

impl<B: Batch> Request for Together<'_, B> {
    type Outcome = Vec<B::Outcome>;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, Vec<B::Outcome>> {
        B::send(session, self.0)
    }
}

/// A kind of verb that travels in batches.
pub(super) trait Batch {
    type Item: Send + Sync;
    type Outcome: Send;
    const ATTEMPTED: &'static str;

    fn name(item: &Self::Item) -> &LockName;
    fn send<'a>(session: &'a mut dyn Session, batch: &'a [Self::Item]) -> Job<'a, Vec<Self::Outcome>>;
}

pub(super) struct Acquires;

impl Batch for Acquires {
    type Item = Claim;
    type Outcome = Option<FencingToken>;
    const ATTEMPTED: &'static str = "acquire";

    fn name(claim: &Claim) -> &LockName {
        &claim.name
    }

    fn send<'a>(session: &'a mut dyn Session, batch: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        session.acquire(batch)
    }
}

pub(super) struct Joins;

impl Batch for Joins {
    type Item = Claim;
    type Outcome = Option<FencingToken>;
    const ATTEMPTED: &'static str = "re-enter";

    fn name(claim: &Claim) -> &LockName {
        &claim.name
    }

    fn send<'a>(session: &'a mut dyn Session, batch: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        session.join(batch)
    }
}

pub(super) struct HandOffs;

impl Batch for HandOffs {
    type Item = HandOff;
    type Outcome = Option<FencingToken>;
    const ATTEMPTED: &'static str = "hand over";

    fn name(hand_off: &HandOff) -> &LockName {
        &hand_off.from.name
    }

    fn send<'a>(session: &'a mut dyn Session, batch: &'a [HandOff]) -> Job<'a, Vec<Option<FencingToken>>> {
        session.hand_off(batch)
    }
}

pub(super) struct Releases;

impl Batch for Releases {
    type Item = Release;
    type Outcome = Standing;
    const ATTEMPTED: &'static str = "release";

    fn name(release: &Release) -> &LockName {
        &release.name
    }

    fn send<'a>(session: &'a mut dyn Session, batch: &'a [Release]) -> Job<'a, Vec<Standing>> {
        Box::pin(async move {
            let done = session.release(batch).await?;
            let looked =
                standings(session, batch, &done, Standing::Released, |r| (&r.name, r.owner, r.hold, r.token)).await;
            if done.contains(&Some(true)) { looked.map_err(in_doubt) } else { looked }
        })
    }
}

pub(super) struct Renewals;

impl Batch for Renewals {
    type Item = Renewal;
    type Outcome = Standing;
    const ATTEMPTED: &'static str = "renew";

    fn name(renewal: &Renewal) -> &LockName {
        &renewal.holding.name
    }

    fn send<'a>(session: &'a mut dyn Session, batch: &'a [Renewal]) -> Job<'a, Vec<Standing>> {
        Box::pin(async move {
            let done: Vec<_> = session.renew(batch).await?.into_iter().map(Some).collect();
            standings(session, batch, &done, Standing::Held, |Renewal { holding: h, .. }| {
                (&h.name, h.owner, h.hold, Some(h.token))
            })
            .await
        })
    }
}

pub(super) struct ShareRenewals;

impl Batch for ShareRenewals {
    type Item = Renewal;
    type Outcome = Standing;
    const ATTEMPTED: &'static str = "renew";

    fn name(renewal: &Renewal) -> &LockName {
        &renewal.holding.name
    }

    fn send<'a>(session: &'a mut dyn Session, batch: &'a [Renewal]) -> Job<'a, Vec<Standing>> {
        Box::pin(async move {
            let renewed = session.renew_shares(batch).await?;
            Ok(renewed.into_iter().map(|done| if done { Standing::Held } else { Standing::Superseded }).collect())
        })
    }
}

pub(super) struct Leaves;

impl Batch for Leaves {
    type Item = Spot;
    type Outcome = bool;
    const ATTEMPTED: &'static str = "leave";

    fn name(spot: &Spot) -> &LockName {
        &spot.name
    }

    fn send<'a>(session: &'a mut dyn Session, batch: &'a [Spot]) -> Job<'a, Vec<bool>> {
        session.leave(batch)
    }
}

pub(super) struct Enqueues;

impl Batch for Enqueues {
    type Item = Ticket;
    type Outcome = Option<Duration>;
    const ATTEMPTED: &'static str = "wait";

    fn name(ticket: &Ticket) -> &LockName {
        &ticket.claim.name
    }

    fn send<'a>(session: &'a mut dyn Session, batch: &'a [Ticket]) -> Job<'a, Vec<Option<Duration>>> {
        session.enqueue(batch)
    }
}

pub(super) struct Looks;

impl Batch for Looks {
    type Item = LockName;
    type Outcome = Option<Row>;
    const ATTEMPTED: &'static str = "look at";

    fn name(name: &LockName) -> &LockName {
        name
    }

    fn send<'a>(session: &'a mut dyn Session, batch: &'a [LockName]) -> Job<'a, Vec<Option<Row>>> {
        Box::pin(async move {
            let mut rows = session.look(batch).await?;
            Ok(batch
                .iter()
                .map(|name| {
                    let i = rows.iter().position(|row| row.name == name.as_str())?;
                    Some(rows.swap_remove(i))
                })
                .collect())
        })
    }
}

/// What became of holdings: `done` where the update matched, what the row tells where it did not.
pub(super) async fn standings<T>(
    session: &mut dyn Session,
    batch: &[T],
    matched: &[Option<bool>],
    done: Standing,
    holding: impl Fn(&T) -> (&LockName, Owner, Hold, Option<FencingToken>),
) -> Result<Vec<Standing>, sqlx::Error> {
    let missed = batch.iter().zip(matched).filter(|(_, matched)| **matched == Some(false));
    let missed: Vec<LockName> = missed.map(|(item, _)| holding(item).0.clone()).collect();
    let rows = if missed.is_empty() { Vec::new() } else { session.look(&missed).await? };
    Ok(batch
        .iter()
        .zip(matched)
        .map(|(item, matched)| {
            match matched {
                Some(true) => return done,
                Some(false) => {}
                None => return Standing::Overtaken,
            }
            let (name, owner, hold, token) = holding(item);
            let row = rows.iter().find(|row| row.name == name.as_str());
            match row.map(|row| row.standing(owner, hold, token)) {
                Some(Standing::Held) if done == Standing::Released => Standing::Awaited,
                Some(Standing::Held) => Standing::Unsettled,
                Some(standing) => standing,
                None => Standing::Superseded,
            }
        })
        .collect())
}
