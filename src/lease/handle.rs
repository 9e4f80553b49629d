//! The handle of a held lease.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::options::bounded_ttl;
use crate::client::Client;
use crate::clock::Moment;
use crate::coordinator::HeldLease;
use crate::engine::{Amendment, HoldTime, NotAmended, Verdict};
use crate::error::{Error, LossCause, Result};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::Mode;
use crate::token::FencingToken;

/// A held lease: proof that no other owner was granted the name while [`is_held`](Self::is_held)
/// returns `true`. After an [`evict`](crate::Locks::evict), `is_held` turns `false` at the next
/// heartbeat. A lease [without renewal](crate::LeaseRequest::renew) sends no heartbeats, so its
/// `is_held` turns `false` only when an extension, a note or a fence finds the eviction.
///
/// The lease is renewed in the background. [`release`](Self::release) says whether it was held to
/// the end; dropping the lease releases it in the background. If the process dies, the name is free
/// after the TTL.
#[doc(alias = "guard")]
#[must_use = "a lease that is dropped is released at once"]
pub struct Lease {
    pub(super) client: Arc<Client>,
    /// `None` while the lease is being released, and after a dropped conversion.
    pub(super) held: Option<HeldLease>,
    pub(super) details: LeaseDetails,
}

/// The facts of a held lease.
#[derive(Clone, Debug)]
pub(super) struct LeaseDetails {
    pub(super) name: LockName,
    pub(super) owner: Owner,
    pub(super) token: FencingToken,
    pub(super) mode: Mode,
    pub(super) ttl: Duration,
    pub(super) hold_time: HoldTime,
    pub(super) acquired_at: Moment,
}

impl Lease {
    pub(super) fn new(client: Arc<Client>, held: HeldLease, ttl: Duration, hold_time: HoldTime) -> Self {
        let (name, owner, token, mode) = (held.name().clone(), held.owner(), held.token(), held.mode());
        let details = LeaseDetails { name, owner, token, mode, ttl, hold_time, acquired_at: client.now() };
        Self { client, held: Some(held), details }
    }

    /// Returns the held name.
    pub fn name(&self) -> &LockName {
        &self.details.name
    }

    /// Returns the fencing token: greater than that of every earlier holding of the name. Leases of
    /// an owner that has [entered again](crate::LeaseRequest::owner) have one token.
    pub fn token(&self) -> FencingToken {
        self.details.token
    }

    /// Returns the owner, for [re-entering](crate::LeaseRequest::owner) from elsewhere.
    pub fn owner(&self) -> Owner {
        self.details.owner
    }

    /// Returns whether the lease is certainly still held. Reads a clock and does no I/O.
    ///
    /// The result turns `false` before the database could grant the name to another owner, even if
    /// this process was stopped or the machine slept in between, and never turns `true` again. (A
    /// virtual machine that its host pauses [may not count the pause](crate::guide::limits).) Time
    /// may pass between this check and the next action: use [`fence`](Self::fence) for data in this
    /// database.
    pub fn is_held(&self) -> bool {
        self.held.as_ref().is_some_and(HeldLease::is_held)
    }

    /// Returns how much longer the lease is safe without a heartbeat. Zero when the lease is lost.
    /// A lease that the release of another client granted is first safe for at most 3 seconds.
    /// About 0.2 seconds later it is safe for its TTL.
    pub fn remaining(&self) -> Duration {
        self.held.as_ref().map_or(Duration::ZERO, HeldLease::remaining)
    }

    /// Waits until the lease is lost, and returns the cause. Pending for ever while the lease is
    /// held.
    ///
    /// # Cancel safety
    ///
    /// It may be dropped and called again; no loss is missed.
    pub async fn lost(&self) -> LossCause {
        self.loss_future().await
    }

    /// Waits until the holder is [asked to release](crate::Locks::ask_to_release) the lease.
    /// Completes at once after an earlier request; pending for ever without a request.
    ///
    /// The lease stays held: the holder decides when to release it.
    ///
    /// ```
    /// # async fn work(_: &sqlock::Lease) {}
    /// # async fn example(lease: sqlock::Lease) -> sqlock::Result<()> {
    /// tokio::select! {
    ///     () = work(&lease) => {}
    ///     () = lease.revoke_requested() => println!("another wants it: stopping after this item"),
    /// }
    /// lease.release().await
    /// # }
    /// ```
    ///
    /// A request reaches the holder with its next heartbeat, within about a second. So it does not
    /// reach a lease [without renewal](crate::LeaseRequest::renew), nor one that is
    /// [resumed](crate::Locks::resume) or re-entered by another client after the request, until the
    /// request is repeated.
    ///
    /// # Cancel safety
    ///
    /// It may be dropped and called again; no request is missed.
    pub async fn revoke_requested(&self) {
        self.revoke_request().await;
    }

    /// Returns the future of [`revoke_requested`](Self::revoke_requested). It does not borrow the
    /// lease.
    pub(crate) fn revoke_request(&self) -> impl Future<Output = ()> + Send + use<> {
        let requested = self.held.as_ref().map(HeldLease::release_requested);
        async move {
            match requested {
                Some(requested) => requested.await,
                None => std::future::pending().await,
            }
        }
    }

    /// Makes the lease last at least `ttl` from now, even without a heartbeat. If this process
    /// dies, the name is blocked for as long. [`max_hold`](crate::LeaseRequest::max_hold) still
    /// ends the lease.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the lease has ended, [`Error::OutOfRange`], [`Error::Closed`],
    /// [`Error::Access`], or [`Error::Unavailable`] and [`Error::Database`], after which the
    /// extension may still take place. Within a transaction that the lease [fences](Self::fence),
    /// only PostgreSQL extends it: the others fail after ten seconds, and the lease stays as it is.
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the extension may take place.
    pub async fn extend(&self, ttl: Duration) -> Result<()> {
        self.start_extension(ttl)?.await
    }

    /// Starts an extension. The future does not borrow the lease.
    pub(crate) fn start_extension(&self, ttl: Duration) -> Result<impl Future<Output = Result<()>> + Send + use<>> {
        self.client.settings.check_ttl("an extension", ttl)?;
        let held_for = self.client.now().since(self.details.acquired_at);
        let lasts = bounded_ttl(ttl, self.details.hold_time.at_most, held_for);
        let extended = self.held()?.amend(Amendment::Extend(lasts));
        let (name, token) = (self.name().clone(), self.token());
        Ok(async move {
            extended.await.map_err(|reason| match reason {
                NotAmended::Lost(cause) => Error::Lost { name, token, cause },
                NotAmended::Failed(failure) => failure.into_error(),
                NotAmended::EnteredAgain => Error::Closed,
                NotAmended::Locked => {
                    let reason = format!("a transaction that fences {:?} keeps it locked", name.as_str());
                    Error::Unavailable { attempted: "extend", reason, source: None }
                }
            })
        })
    }

    /// Sets the hold time of the lease, counted from now on.
    pub(crate) fn start_hold_time(&mut self, hold_time: HoldTime) {
        self.details.acquired_at = self.client.now();
        self.details.hold_time = hold_time;
        if let Some(held) = &self.held {
            held.start_hold_time(hold_time);
        }
    }

    /// Returns the coordinator's handle, or an error if the lease has ended.
    pub(super) fn held(&self) -> Result<&HeldLease> {
        let held = self.held.as_ref().filter(|held| held.is_held());
        held.ok_or_else(|| self.loss_error(self.loss_cause()))
    }

    /// Returns why the lease has ended.
    pub(crate) fn loss_cause(&self) -> LossCause {
        self.loss_reader()()
    }

    /// Returns a function that returns why the lease has ended. It reports the loss, so the caller
    /// must hold no lock that a subscriber of the application may need.
    pub(crate) fn loss_reader(&self) -> impl FnOnce() -> LossCause + use<> {
        let loss = self.held.as_ref().map(HeldLease::loss_reader);
        let max_hold =
            self.details.hold_time.at_most.filter(|max| self.details.acquired_at + *max <= self.client.now());
        let without_cause = if max_hold.is_some() { LossCause::MaxHold } else { LossCause::Expired };
        move || loss.map_or(LossCause::Superseded, |loss| loss().unwrap_or(without_cause))
    }

    /// Returns a future that completes when the lease is lost. It does not borrow the lease.
    pub(crate) fn loss_future(&self) -> impl Future<Output = LossCause> + Send + use<> {
        let loss_future = self.held.as_ref().map(HeldLease::loss_future);
        async move {
            match loss_future {
                Some(loss_future) => loss_future.await,
                None => LossCause::Superseded,
            }
        }
    }

    /// Releases the lease, and returns an error if it was not held to the end.
    ///
    /// While a transaction is open that the lease fences, the name cannot become free. The method
    /// returns within half a second then, and the release goes on in the background. (On SQLite, it
    /// waits for the end of the transaction, as any write does.)
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the lease had already ended. [`Error::Unavailable`], [`Error::Access`],
    /// [`Error::Database`] or [`Error::Unknown`]: the release failed, or its effect is not known;
    /// the name is free after the TTL at the latest.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop the release.
    #[doc(alias = "unlock")]
    pub async fn release(self) -> Result<()> {
        self.start_release().await
    }

    /// Starts the release at once. Releases that start together share a statement.
    pub(crate) fn start_release(self) -> impl Future<Output = Result<()>> {
        let (name, token) = (self.name().clone(), self.token());
        let was_held = self.held().map(|_| ());
        let mut lease = self;
        let verdict = lease.held.take().map(|held| held.release());
        async move {
            was_held?;
            let Some(verdict) = verdict else {
                return Err(Error::Closed);
            };
            match verdict.await {
                Verdict::Held => Ok(()),
                Verdict::Lost(cause) => Err(Error::Lost { name, token, cause }),
                Verdict::Unknown => Err(Error::Unknown { attempted: "release", name }),
                Verdict::Failed(failure) => Err(failure.into_error()),
            }
        }
    }

    /// Ends the lease in the background, and does not keep the name.
    pub(crate) fn discard(mut self) {
        drop(self.held.take());
    }

    pub(crate) fn loss_error(&self, cause: LossCause) -> Error {
        Error::Lost { name: self.name().clone(), token: self.token(), cause }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            drop(held.release());
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("name", self.name())
            .field("token", &self.token())
            .field("is_held", &self.is_held())
            .finish_non_exhaustive()
    }
}
