//! A semaphore: a limited number of permits on a name.

use std::fmt;

use super::handle::Lease;
use super::options::{LeaseOptions, queue_setters, request_setters};
use super::request::LeaseRequest;
use crate::error::{Error, Result};
use crate::name::LockName;

/// Limits how many permits are held at a time, by any number of processes. Made with
/// [`Locks::semaphore`](crate::Locks::semaphore).
///
/// Permits are [leases](Lease): each has its own expiry and token, is renewed, can be lost, and
/// ends when it is released or dropped. Waiters are served in the order of their arrival, so a
/// request for many permits succeeds: later requests for fewer permits do not overtake it.
///
/// Each request has the number of permits of the semaphore, and is granted when the held permits
/// and its own do not exceed that number. So the number can be changed at any time, with the next
/// request. A smaller number revokes no permits; it keeps new holders out until enough permits are
/// released.
///
/// An exclusive [lease](crate::Locks::lease) on the same name excludes all permits. Permits also
/// count for the same owner: a re-entering owner takes more permits, and the holder of an exclusive
/// lease that requests a permit waits for itself (or the other way round). Do not mix permits and
/// [shared](LeaseRequest::shared) leases of one name: each request counts all shared holders
/// against its own number, and a shared lease has none.
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
#[must_use = "a semaphore does nothing until a permit is requested"]
pub struct Semaphore {
    request: LeaseRequest,
    permits: u32,
}

request_setters!(Semaphore);
queue_setters!(Semaphore);

impl Semaphore {
    pub(crate) fn new(request: LeaseRequest, permits: u32) -> Self {
        Self { request, permits }
    }

    fn options_mut(&mut self) -> &mut LeaseOptions {
        self.request.options_mut()
    }

    fn request_mut(&mut self) -> &mut LeaseRequest {
        &mut self.request
    }

    /// Acquires a permit, and waits in the queue if necessary.
    ///
    /// # Errors
    ///
    /// The errors of [`LeaseRequest::acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`LeaseRequest::acquire`].
    pub async fn acquire(&self) -> Result<Lease> {
        self.acquire_many(1).await
    }

    /// Acquires several permits together, and waits in the queue if necessary.
    ///
    /// # Errors
    ///
    /// [`Error::Permits`] when the semaphore has fewer, and the errors of
    /// [`LeaseRequest::acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`LeaseRequest::acquire`].
    pub async fn acquire_many(&self, permits: u32) -> Result<Lease> {
        self.request(permits)?.acquire().await
    }

    /// Acquires a permit if one is free and no waiter is in the queue. Returns `None` otherwise.
    ///
    /// # Errors
    ///
    /// The errors of [`LeaseRequest::try_acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`LeaseRequest::try_acquire`].
    pub async fn try_acquire(&self) -> Result<Option<Lease>> {
        self.try_acquire_many(1).await
    }

    /// Acquires several permits together if they are free and no waiter is in the queue. Returns
    /// `None` otherwise.
    ///
    /// # Errors
    ///
    /// [`Error::Permits`] when the semaphore has fewer, and the errors of
    /// [`LeaseRequest::try_acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`LeaseRequest::try_acquire`].
    pub async fn try_acquire_many(&self, permits: u32) -> Result<Option<Lease>> {
        self.request(permits)?.try_acquire().await
    }

    /// Runs work with a permit, as [`LeaseRequest::run`].
    ///
    /// # Errors
    ///
    /// The errors of [`LeaseRequest::run`].
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

    /// Returns a request for several permits, with the options of a request for a lease.
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
    /// [`Error::Permits`] when the semaphore has fewer.
    pub fn request(&self, count: u32) -> Result<LeaseRequest> {
        let permits = self.permits;
        // A greater number of permits marks a shared lease.
        if count == 0 || count > permits || permits > i32::MAX as u32 {
            return Err(Error::Permits { name: LockName::new(self.request.name())?, asked: count, permits });
        }
        Ok(self.request.clone().permits(count, permits))
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
