//! Leader election: one instance leads, the others stand by, and every instance can read the
//! leader.
//!
//! [`Election`] has an example. To choose, see [the table of calls](crate#which-call).

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::handle::Lease;
use super::options::{LeaseOptions, queue_setters, request_setters};
use super::request::LeaseRequest;
use crate::client::Client;
use crate::error::Result;
use crate::inspect::{LeaseInfo, holders};
use crate::token::FencingToken;

/// An election, made with [`Locks::election`](crate::Locks::election). The leader is the holder of
/// the lease on the name of the election.
///
/// ```
/// # async fn lead() {}
/// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
/// let election = locks.election("scheduler").label("node 1");
/// loop {
///     let leadership = election.campaign().await?;     // waits until it is elected
///     tokio::select! {
///         () = lead() => break leadership.resign().await,
///         cause = leadership.lost() => println!("lost: {cause}; campaigning again"),
///     }
/// }
/// # }
/// ```
///
/// A leader that dies is replaced after the [TTL](Self::ttl); a leader that resigns, at once. The
/// [label](Self::label) can hold the leader's address. [`fence`](Lease::fence) transactions that
/// only the leader may commit: a leader that is paused after it has checked that it leads, and
/// before its effect, does not know that it has lost the election.
#[derive(Clone)]
#[doc(alias = "leader")]
#[must_use = "an election does nothing until campaign, try_campaign, leader or changes is called"]
pub struct Election {
    client: Arc<Client>,
    name: String,
    request: LeaseRequest,
}

request_setters!(Election);
queue_setters!(Election);

impl Election {
    pub(crate) fn new(client: Arc<Client>, name: String, request: LeaseRequest) -> Self {
        Self { client, name, request }
    }

    fn options_mut(&mut self) -> &mut LeaseOptions {
        self.request.options_mut()
    }

    fn request_mut(&mut self) -> &mut LeaseRequest {
        &mut self.request
    }

    /// Waits until this candidate is elected. Two campaigns inside one
    /// [`Owner::scope`](crate::Owner::scope) are one candidate: both lead.
    ///
    /// # Errors
    ///
    /// The errors of [`LeaseRequest::acquire`]. After an outage of the database, call `campaign`
    /// again.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future withdraws the candidate; leadership that is granted later is released in
    /// the background.
    pub async fn campaign(&self) -> Result<Leadership> {
        self.request.clone().acquire().await.map(Leadership)
    }

    /// Elects this candidate if there is no leader and no other candidate waits. Returns `None`
    /// otherwise.
    ///
    /// # Errors
    ///
    /// The errors of [`LeaseRequest::try_acquire`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: leadership that is granted later is released in
    /// the background.
    pub async fn try_campaign(&self) -> Result<Option<Leadership>> {
        Ok(self.request.clone().try_acquire().await?.map(Leadership))
    }

    /// Returns the current leader with its label, if any.
    ///
    /// # Errors
    ///
    /// The errors of [`Locks::inspect`](crate::Locks::inspect).
    ///
    /// # Cancel safety
    ///
    /// The call only reads.
    pub async fn leader(&self) -> Result<Option<LeaseInfo>> {
        let held = holders(&self.client, &self.name).await?.into_iter().next();
        // A name that stays taken after a release has no leader.
        Ok(held.filter(|held| held.owner.is_some()))
    }

    /// Returns the changes of leader from now on, beginning with the current leader.
    pub fn changes(&self) -> Changes {
        Changes { election: self.clone(), every: Duration::from_secs(1), known: None, polled_at: None }
    }
}

impl fmt::Debug for Election {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Election").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The leadership: a [`Lease`] that is resigned instead of released.
#[derive(Debug)]
#[must_use = "dropping it resigns"]
pub struct Leadership(Lease);

impl Leadership {
    /// Resigns, and returns an error if the leadership was lost before.
    ///
    /// # Errors
    ///
    /// The errors of [`Lease::release`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop the resignation.
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
    /// The leader that the last call returned.
    known: Option<Option<FencingToken>>,
    polled_at: Option<Instant>,
}

impl Changes {
    /// Sets how often to poll: every second by default, every 10 milliseconds at most, once a day
    /// at least. A poll is one `SELECT`. A shorter leadership can go unnoticed.
    pub fn every(mut self, interval: Duration) -> Self {
        self.every = interval.clamp(Duration::from_millis(10), Duration::from_secs(86_400));
        self
    }

    /// Waits for the next change of the leader, and returns the new leader, or `None` if there is
    /// none. The first call returns the current leader, or `None`, at once.
    ///
    /// # Errors
    ///
    /// The errors of [`Locks::inspect`](crate::Locks::inspect). The next call goes on.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no change.
    pub async fn next(&mut self) -> Result<Option<LeaseInfo>> {
        loop {
            if let Some(polled_at) = self.polled_at {
                tokio::time::sleep_until(polled_at + self.every).await;
            }
            self.polled_at = Some(Instant::now());
            let leader = self.election.leader().await?;
            let token = leader.as_ref().map(|leader| leader.token);
            if self.known.replace(token) != Some(token) {
                return Ok(leader);
            }
        }
    }
}
