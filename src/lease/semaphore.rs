//! A semaphore: at most so many at a time.

use std::fmt;
use std::time::Duration;

use super::handle::Lease;
use super::request::LeaseRequest;
use crate::error::{Error, Result};
use crate::inspect::Waiting;
use crate::name::LockName;

/// At most so many permits are held at a time, by any number of processes. Made with
/// [`Locks::semaphore`](crate::Locks::semaphore).
///
/// Permits are [leases](Lease): each has its own expiry and token, is renewed, can be lost, and is given back by being
/// released or dropped. Those who wait are served in the order in which they came, so one that wants many permits gets them:
/// those who come later and want fewer do not overtake it.
///
/// How many permits there are is said by whoever asks: a request is granted when those that are held, and its own, are no more
/// than *it* was told that there are. So the number can be changed at any time, by asking with another one. A smaller number
/// takes nothing from those who hold; it keeps others out until enough have given back.
///
/// An exclusive [lease](crate::Locks::lease) on the same name excludes all holders of permits. Permits are counted whoever
/// takes them: an owner that enters again takes more, and one that holds the name alone waits for itself when it asks for a
/// permit (or the other way round). Do not mix permits and [shared](LeaseRequest::shared) leases of one name: each request
/// counts all who share it against the number that it was told, and a shared lease was told none.
///
/// ```
/// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
/// let imports = locks.semaphore("imports", 3);
/// let permit = imports.acquire().await?;
/// permit.release().await?;
/// let two = imports.acquire_many(2).await?;
/// # two.release().await
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a semaphore does nothing until a permit is asked for"]
pub struct Semaphore {
    request: LeaseRequest,
    permits: u32,
}

impl Semaphore {
    pub(crate) fn new(request: LeaseRequest, permits: u32) -> Self {
        Self { request, permits }
    }

    /// As [`LeaseRequest::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.request = self.request.ttl(ttl);
        self
    }

    /// As [`LeaseRequest::wait`].
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.request = self.request.wait(at_most);
        self
    }

    /// As [`LeaseRequest::max_hold`].
    pub fn max_hold(mut self, at_most: Duration) -> Self {
        self.request = self.request.max_hold(at_most);
        self
    }

    /// As [`LeaseRequest::hold_at_least`].
    pub fn hold_at_least(mut self, at_least: Duration) -> Self {
        self.request = self.request.hold_at_least(at_least);
        self
    }

    /// As [`LeaseRequest::label`].
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.request = self.request.label(label);
        self
    }

    /// As [`LeaseRequest::while_waiting`].
    pub fn while_waiting(mut self, tell: impl Fn(&Waiting) + Send + Sync + 'static) -> Self {
        self.request = self.request.while_waiting(tell);
        self
    }

    /// Waits for its turn and takes a permit.
    ///
    /// # Errors
    ///
    /// Those of [`LeaseRequest::acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`LeaseRequest::acquire`].
    pub async fn acquire(&self) -> Result<Lease> {
        self.acquire_many(1).await
    }

    /// Waits for its turn and takes that many permits, together.
    ///
    /// # Errors
    ///
    /// [`Error::Permits`] when there are not so many, and those of [`LeaseRequest::acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`LeaseRequest::acquire`].
    pub async fn acquire_many(&self, permits: u32) -> Result<Lease> {
        self.request(permits)?.acquire().await
    }

    /// Takes a permit if one is free and nobody waits. `Ok(None)`: it is not so.
    ///
    /// # Errors
    ///
    /// Those of [`LeaseRequest::try_acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`LeaseRequest::try_acquire`].
    pub async fn try_acquire(&self) -> Result<Option<Lease>> {
        self.try_acquire_many(1).await
    }

    /// The same for that many permits.
    ///
    /// # Errors
    ///
    /// [`Error::Permits`] when there are not so many, and those of [`LeaseRequest::try_acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`LeaseRequest::try_acquire`].
    pub async fn try_acquire_many(&self, permits: u32) -> Result<Option<Lease>> {
        self.request(permits)?.try_acquire().await
    }

    /// As [`LeaseRequest::run`], with a permit.
    ///
    /// # Errors
    ///
    /// Those of [`LeaseRequest::run`].
    ///
    /// # Cancel safety
    ///
    /// As [`LeaseRequest::run`].
    pub async fn run<F, T>(&self, work: F) -> Result<T>
    where
        F: AsyncFnOnce(&Lease) -> T,
    {
        self.request(1)?.run(work).await
    }

    /// The request for that many permits, with all that can be asked of a lease: an owner, say, or that it is not renewed.
    ///
    /// ```
    /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
    /// let permit = locks.semaphore("imports", 3).request(1)?.renew(false).acquire().await?;
    /// # permit.release().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Permits`] when there are not so many.
    pub fn request(&self, asked: u32) -> Result<LeaseRequest> {
        let permits = self.permits;
        // What is more than that stands for "any number", in a shared lease.
        if asked == 0 || asked > permits || permits > i32::MAX as u32 {
            return Err(Error::Permits { name: LockName::new(self.request.name())?, asked, permits });
        }
        Ok(self.request.clone().permits(asked, permits))
    }
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Semaphore")
            .field("name", &self.request.name())
            .field("permits", &self.permits)
            .finish_non_exhaustive()
    }
}
