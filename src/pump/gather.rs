//! Several names at once.

use super::Request;
use super::serve::NEXT;
use crate::backend::{Claim, Job, Session, Spot, Standing, Step, Ticket};
use crate::error::Result;
use crate::queue::Terms;
use crate::token::FencingToken;

/// Stands in the lines of several names, in each of them at the same moment: of two that want some of the same names, the
/// same one comes first in every line, so neither waits for the other to go first elsewhere.
pub(super) struct LineUp(pub(super) Vec<Ticket>);

impl Request for LineUp {
    type Outcome = ();

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, ()> {
        Box::pin(async move {
            session.enqueue(&self.0).await?;
            let spots: Vec<Spot> = self.0.iter().map(|ticket| ticket.claim.spot()).collect();
            session.align(&spots).await
        })
    }
}

/// Takes several names in one transaction, all or none. It never waits in the server for a name that is held.
pub(crate) struct Gather {
    /// In order of names.
    pub(crate) claims: Vec<Claim>,
    /// Whether they stand in line for each of them. Otherwise a name is taken only if nobody waits for it.
    pub(crate) in_line: bool,
    /// Whether names are entered again that their owner holds already.
    pub(crate) reenters: bool,
}

/// Why nothing was taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hindrance {
    /// Which claim.
    pub(crate) claim: usize,
    /// Somebody stands before it whose time has run out.
    pub(crate) dead: bool,
    /// Its own owner shares the name.
    pub(crate) shared: bool,
}

impl Request for Gather {
    type Outcome = Result<Vec<FencingToken>, Hindrance>;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, Self::Outcome> {
        Box::pin(async move {
            session.transact(Step::Begin).await?;
            let taken = self.take(session).await;
            if !matches!(taken, Ok(Ok(_))) {
                session.transact(Step::RollBack).await?;
                return taken;
            }
            if let Err(error) = session.transact(Step::Commit).await {
                // It may still be open: SQLite's is when somebody reads for too long.
                session.transact(Step::RollBack).await?;
                return Err(error);
            }
            taken
        })
    }
}

impl Gather {
    async fn take(&self, session: &mut dyn Session) -> Result<Result<Vec<FencingToken>, Hindrance>, sqlx::Error> {
        let mut tokens = vec![None; self.claims.len()];
        if self.reenters {
            tokens = session.join(&self.claims).await?;
        }
        let missing = |tokens: &[Option<FencingToken>]| tokens.iter().position(Option::is_none);
        if !self.in_line {
            let wanted =
                || self.claims.iter().zip(&tokens).filter(|(_, token)| token.is_none()).map(|(claim, _)| claim);
            let wanted: Vec<Claim> = wanted().cloned().collect();
            if !wanted.is_empty() {
                let mut granted = session.acquire(&wanted).await?.into_iter();
                tokens.iter_mut().filter(|token| token.is_none()).for_each(|token| *token = granted.next().flatten());
            }
        }
        while self.in_line
            && let Some(i) = missing(&tokens)
        {
            let claim = &self.claims[i];
            let mark = claim.hold.mark();
            let Some(mut queue) = session.queue(&claim.name, NEXT).await? else {
                break;
            };
            if queue.row.standing(claim.owner, claim.hold, None) == Standing::Held {
                // It has been granted before, and the reply was lost. From now on it is to last anew, if it still does.
                tokens[i] = session.join(std::slice::from_ref(claim)).await?.pop().flatten();
            } else if !queue.bury(&Terms::from([(mark.clone(), claim.ttl)])).is_empty() {
                return Ok(Err(Hindrance { claim: i, dead: true, shared: false }));
            } else if let Some(pass) = queue.next_to(&claim.name, &mark, claim.ttl) {
                let granted = session.pass(&pass).await?.unwrap_or_default();
                tokens[i] = granted.first().map(|granted| granted.token);
            }
            if tokens[i].is_none() {
                break;
            }
        }
        let Some(claim) = missing(&tokens) else {
            return Ok(Ok(tokens.into_iter().flatten().collect()));
        };
        let Claim { name, owner, .. } = &self.claims[claim];
        let queue = if self.reenters { session.queue(name, NEXT).await? } else { None };
        let shared = queue.is_some_and(|queue| queue.sharers().contains(owner));
        Ok(Err(Hindrance { claim, dead: false, shared }))
    }
}
