//! A lease on a majority that one process acquires and others extend and end.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::Quorum;
use super::lease::QuorumLease;
use super::majority::remaining_of_majority;
use crate::error::{Error, LossCause, Result};
use crate::lease::handle::Lease;
use crate::locks::Locks;
use crate::owner::Owner;
use crate::token::FencingToken;

/// How much longer than the majority the other databases may take to answer.
const LATE_ANSWERS: Duration = Duration::from_millis(250);

/// A lease on a majority that no process renews.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DetachedLease {
    /// The fencing token, by which [`Quorum::extend`] and [`Quorum::evict`] find the lease.
    pub token: FencingToken,
    /// How much longer the majority is safe.
    pub remaining: Duration,
}

impl QuorumLease {
    /// Detaches the lease, which stays held until it expires: for a lease that one step of a script
    /// acquires and others [extend](Quorum::extend) and [end](Quorum::evict).
    ///
    /// The returned token is [`token`](Self::token) or higher: a majority of the databases must
    /// have the same token, so lower tokens are raised to the token of a database that answered
    /// late. This process no longer renews the lease, and adds no databases to it.
    /// [`max_hold`](crate::quorum::QuorumRequest::max_hold) and
    /// [`hold_at_least`](crate::quorum::QuorumRequest::hold_at_least) no longer apply.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the lease has ended; single databases may keep their part of it for its
    /// TTL. [`Error::Unavailable`] when too few databases
    /// could be reached to raise their tokens: the lease is then released.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases the lease.
    pub async fn detach(self) -> Result<DetachedLease> {
        self.wait_for_late_votes().await;
        self.majority.check()?;
        let leases = self.majority.take_leases()?;
        let token = leases.iter().map(Lease::token).fold(self.token(), Ord::max);
        let databases = leases.len();
        let mut raises = JoinSet::new();
        for lease in leases {
            let within = self.node_timeout;
            raises.spawn(async move {
                if lease.token() == token {
                    return Some(lease);
                }
                timeout(within, lease.raise_token(token)).await.ok()?.ok()?
            });
        }
        let raised: Vec<Lease> = raises.join_all().await.into_iter().flatten().collect();
        let needed = self.majority.needed;
        if raised.len() < needed {
            let reason = format!("{} of {databases} databases have its token, and {needed} must", raised.len());
            return Err(Error::Unavailable { attempted: "detach a lease", reason, source: None });
        }
        if raised.iter().filter(|lease| lease.is_held()).count() < needed {
            return Err(self.loss_error(LossCause::Expired));
        }
        let mut remaining = Vec::new();
        for lease in raised {
            let left = lease.remaining();
            if lease.export().is_ok() {
                remaining.push(left);
            }
        }
        match remaining_of_majority(remaining, needed) {
            Some(remaining) => Ok(DetachedLease { token, remaining }),
            None => Err(self.loss_error(LossCause::Expired)),
        }
    }
}

impl QuorumLease {
    /// Waits a moment for databases that are a little slower than the majority, so that the lease
    /// survives the loss of any minority.
    async fn wait_for_late_votes(&self) {
        let until = Instant::now() + LATE_ANSWERS;
        while self.is_held() && !self.majority.has_all_votes() && Instant::now() < until {
            sleep(LATE_ANSWERS / 25).await;
        }
    }
}

impl Quorum {
    /// Makes the lease with this token last at least `ttl` from now on a majority, in any process:
    /// for a [detached](QuorumLease::detach) lease. Returns `false` when the token no longer holds
    /// the name on a majority; what is left of the lease elsewhere may then last for `ttl`, unless
    /// [`evict`](Self::evict) ends it. See [`Locks::extend`].
    ///
    /// A `ttl` above that of the requests for the name needs [`rejoin_after`](Self::rejoin_after)
    /// in all of its clients: a database that has lost its data votes again after their TTL.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] when too few databases have answered: the lease may be longer on some
    /// of them. [`Error::Unsupported`], and those of [`Locks::extend`].
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the lease may be extended. The call can be repeated.
    pub async fn extend(&self, name: &str, token: FencingToken, ttl: Duration) -> Result<bool> {
        self.nodes.check()?;
        let name = name.to_owned();
        self.ask_majority("extend a lease", |locks| {
            let name = name.clone();
            async move { locks.extend(&name, token, ttl).await }
        })
        .await
    }

    /// Ends the lease with this token on all reachable databases, in any process. Returns `false`
    /// when no lease on a majority has the token. See [`Locks::evict`].
    ///
    /// On a database that joined the lease later, the lease has another token, and ends as well,
    /// unless it was released before and
    /// [`hold_at_least`](crate::quorum::QuorumRequest::hold_at_least) keeps the name taken.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] when too few databases have answered: the name is free after the TTL
    /// at the latest. [`Error::Unsupported`], and those of [`Locks::evict`].
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the lease may have ended. The call can be repeated.
    pub async fn evict(&self, name: &str, token: FencingToken) -> Result<bool> {
        self.nodes.check()?;
        let name = name.to_owned();
        let owner = self.find_owner(&name, token).await;
        self.ask_majority("evict", |locks| {
            let name = name.clone();
            async move {
                let token = match owner {
                    Some(owner) => find_token(&locks, &name, owner).await?.unwrap_or(token),
                    None => token,
                };
                locks.evict(&name, token).await
            }
        })
        .await
    }

    /// Returns the owner of a lease, which is the same on all databases, from the first database
    /// that has a lease with the token. After the answers of a majority, the others have a moment
    /// more.
    async fn find_owner(&self, name: &str, token: FencingToken) -> Option<Owner> {
        let mut lookups = JoinSet::new();
        for locks in &self.nodes.locks {
            let (locks, name) = (locks.clone(), name.to_owned());
            lookups.spawn(async move { locks.holders(&name).await });
        }
        let mut answered = 0;
        loop {
            let within = if answered < self.nodes.needed { Duration::MAX } else { LATE_ANSWERS };
            let Ok(Some(found)) = timeout(within, lookups.join_next()).await else {
                return None;
            };
            let Ok(Ok(holders)) = found else { continue };
            answered += 1;
            if let Some(held) = holders.iter().find(|held| held.token == token) {
                return held.owner;
            }
        }
    }

    /// Asks all databases until the answers of a majority agree. Gives the others a moment more,
    /// because the process may end afterwards.
    async fn ask_majority<F>(&self, attempted: &'static str, ask: impl Fn(Locks) -> F) -> Result<bool>
    where
        F: Future<Output = Result<bool>> + Send + 'static,
    {
        let mut answers = JoinSet::new();
        for (node, locks) in self.nodes.locks.iter().enumerate() {
            let answer = ask(locks.clone());
            answers.spawn(async move { (node, answer.await) });
        }
        let (all, needed) = (self.nodes.locks.len(), self.nodes.needed);
        let (mut confirmed, mut refused, mut errors) = (0, 0, Vec::new());
        while let Some(answer) = answers.join_next().await {
            match answer {
                Ok((_, Ok(true))) => confirmed += 1,
                Ok((_, Ok(false))) => refused += 1,
                Ok((node, Err(error))) => errors.push((node, error)),
                // The runtime is about to end.
                Err(_) => {}
            }
            if confirmed == needed || refused > all - needed {
                let _ = timeout(LATE_ANSWERS, async { while answers.join_next().await.is_some() {} }).await;
                answers.detach_all();
                return Ok(confirmed == needed);
            }
        }
        Err(self.nodes.no_majority(attempted, confirmed + refused, errors))
    }
}

/// Returns the token of an owner's lease on one database.
async fn find_token(locks: &Locks, name: &str, owner: Owner) -> Result<Option<FencingToken>> {
    let holders = locks.holders(name).await?;
    Ok(holders.iter().find(|held| held.owner == Some(owner)).map(|held| held.token))
}
