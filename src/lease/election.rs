//! Leader election: one instance leads, the others stand by, and each of them can read which one leads.
//!
//! [`Election`] has an example. Which one when: [the table of calls](crate#which-call).

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::handle::Lease;
use super::request::LeaseRequest;
use crate::client::Client;
use crate::error::Result;
use crate::inspect::{LeaseInfo, holders};

use crate::token::FencingToken;

/// An election, made with [`Locks::election`](crate::Locks::election). The leader is who holds the lease on its name.
///
/// ```
/// # async fn lead() {}
/// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
/// let election = locks.election("scheduler").label("node 1");
/// loop {
///     let leadership = election.campaign().await?;     // stands by until it is elected
///     tokio::select! {
///         () = lead() => break leadership.resign().await,
///         cause = leadership.lost() => println!("deposed: {cause}; standing again"),
///     }
/// }
/// # }
/// ```
///
/// A leader that dies is replaced after the TTL; one that resigns, at once. For what only the leader may write,
/// [`fence`](Lease::fence) the transaction: a leader that was paused does not know that it is none any more.
#[derive(Clone)]
#[must_use = "an election does nothing until campaign, leader or changes is called"]
pub struct Election {
    client: Arc<Client>,
    name: String,
    request: LeaseRequest,
}

impl Election {
    pub(crate) fn new(client: Arc<Client>, name: String, request: LeaseRequest) -> Self {
        Self { client, name, request }
    }

    /// How long a leader that has died is missed at most. 30 seconds by default; between 1 second and 24 hours.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.request = self.request.ttl(ttl);
        self
    }

    /// A note for people, and for those who want to know how to reach the leader. At most 255 bytes.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.request = self.request.label(label);
        self
    }

    /// Waits until it is elected. Two that campaign inside one [`Owner::scope`](crate::Owner::scope) are one candidate: both lead.
    ///
    /// # Errors
    ///
    /// Those of [`LeaseRequest::acquire`]. A candidate that outlasts an outage of the database calls it again.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future withdraws the candidacy; an election that is on its way is given up in the background.
    pub async fn campaign(&self) -> Result<Leadership> {
        self.request.clone().acquire().await.map(Leadership)
    }

    /// Who leads now, with the candidate's label. `None`: nobody.
    ///
    /// # Errors
    ///
    /// Those of [`Locks::inspect`](crate::Locks::inspect).
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn leader(&self) -> Result<Option<LeaseInfo>> {
        let held = holders(&self.client, &self.name).await?.into_iter().next();
        // A name that is kept by nobody has no leader.
        Ok(held.filter(|held| held.owner.is_some()))
    }

    /// The changes of leader, from now on; the present leader is the first.
    pub fn changes(&self) -> Changes {
        Changes { election: self.clone(), every: Duration::from_secs(1), known: None, looked: None }
    }
}

impl fmt::Debug for Election {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Election").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Being the leader: a [`Lease`] with another word for giving it back.
#[derive(Debug)]
#[must_use = "dropping it resigns"]
pub struct Leadership(Lease);

impl Leadership {
    /// Lets somebody else lead, and tells whether the leadership had lasted to the end.
    ///
    /// # Errors
    ///
    /// Those of [`Lease::release`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future after its first poll does not stop it.
    pub async fn resign(self) -> Result<()> {
        self.0.release().await
    }
}

impl Deref for Leadership {
    type Target = Lease;

    fn deref(&self) -> &Lease {
        &self.0
    }
}

/// The leaders of an [`Election`], one after the other. Made with [`Election::changes`].
#[derive(Debug)]
#[must_use = "it does nothing until next is awaited"]
pub struct Changes {
    election: Election,
    every: Duration,
    /// Whom the last answer named.
    known: Option<Option<FencingToken>>,
    looked: Option<Instant>,
}

impl Changes {
    /// How often to look. Every second by default: one `SELECT`. A leadership shorter than that can go unnoticed. (At most a
    /// day.)
    pub fn every(mut self, interval: Duration) -> Self {
        self.every = interval.min(Duration::from_secs(86_400));
        self
    }

    /// The next leader, or `None` when there is none any more. The first call tells the present one at once.
    ///
    /// # Errors
    ///
    /// Those of [`Locks::inspect`](crate::Locks::inspect). The next call goes on.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no change.
    pub async fn next(&mut self) -> Result<Option<LeaseInfo>> {
        loop {
            if let Some(looked) = self.looked {
                tokio::time::sleep_until(looked + self.every).await;
            }
            self.looked = Some(Instant::now());
            let leader = self.election.leader().await?;
            let token = leader.as_ref().map(|leader| leader.token);
            if self.known.replace(token) != Some(token) {
                return Ok(leader);
            }
        }
    }
}
