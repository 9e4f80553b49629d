//! Inspection of names, and changes of leases of any client.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Locks;
use crate::backend::Names;
use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::inspect::{self, LeaseInfo, WaiterInfo};
use crate::name::LockName;
use crate::operation::{ListHolders, ListWaiters, ReadNote};
use crate::protocol::{AskOutcome, ChangeOutcome, ClientChange, Extension, Request, Response};
use crate::token::FencingToken;

/// How long a change by an operator waits for fenced transactions of the holder.
const FENCED_TIMEOUT: Duration = Duration::from_secs(10);

impl Locks {
    /// Lists all leases on names that begin with `prefix`, in order of names, one for each holder.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable), [`Error::Access`](crate::Error::Access),
    /// [`Error::NotMigrated`](crate::Error::NotMigrated),
    /// [`Error::Database`](crate::Error::Database), [`Error::Closed`](crate::Error::Closed).
    ///
    /// # Cancel safety
    ///
    /// The call only reads.
    pub async fn list(&self, prefix: &str) -> Result<Vec<LeaseInfo>> {
        if prefix.contains('\0') {
            // No name contains NUL, and PostgreSQL would refuse the text.
            return Ok(Vec::new());
        }
        let names = Names::WithPrefix(prefix.to_owned());
        let rows = self.client.run(ListHolders(names)).await?;
        Ok(rows.into_iter().filter_map(LeaseInfo::from_listed).collect())
    }

    /// Returns the holder of a name, if any, or the first of several: see
    /// [`holders`](Self::holders).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`](crate::Error::InvalidName), and the errors of [`list`](Self::list).
    ///
    /// # Cancel safety
    ///
    /// The call only reads.
    pub async fn inspect(&self, name: &str) -> Result<Option<LeaseInfo>> {
        Ok(self.holders(name).await?.into_iter().next())
    }

    /// Returns all holders of a name, in the order in which they acquired it.
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// The call only reads.
    pub async fn holders(&self, name: &str) -> Result<Vec<LeaseInfo>> {
        inspect::holders(&self.client, name).await
    }

    /// Returns the [note](crate::Lease::set_note) of the latest holder of a name, also after its
    /// release, until the name has another holder.
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// The call only reads.
    pub async fn last_note(&self, name: &str) -> Result<Option<String>> {
        self.client.run(ReadNote(LockName::new(name)?)).await
    }

    /// Returns the waiters of a name, in order. The list has those waiters of each client that may
    /// be next: up to the first exclusive one. The others wait within their process, as do all
    /// waiters of the holder's client until another client waits as well.
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// The call only reads.
    pub async fn waiters(&self, name: &str) -> Result<Vec<WaiterInfo>> {
        let name = LockName::new(name)?;
        let places = self.client.run(ListWaiters(name)).await?;
        Ok(places.into_iter().enumerate().filter_map(|(ahead, place)| WaiterInfo::from_entry(ahead, place)).collect())
    }

    /// Evicts the holder of a name, for operators. The token names the lease, so a newer lease is
    /// never ended by mistake. Returns `false` when that token no longer holds the name.
    ///
    /// The evicted holder learns of the eviction at its next heartbeat (a holder of this client, at
    /// once; a lease [without renewal](crate::LeaseRequest::renew), from its next call), and a
    /// transaction that it fences from now on cannot commit. The eviction waits while a fenced
    /// transaction of the holder is open; after ten seconds it fails with
    /// [`Error::Timeout`](crate::Error::Timeout) (on SQLite, where the whole file is locked, with
    /// [`Error::Unavailable`](crate::Error::Unavailable)) and changes nothing: end that transaction
    /// first.
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect), and [`Error::Unknown`](crate::Error::Unknown) when a reply of
    /// the database was lost: the token no longer holds the name, and this call may have ended the
    /// lease.
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the eviction may take place. The call can be repeated.
    pub async fn evict(&self, name: &str, token: FencingToken) -> Result<bool> {
        let name = LockName::new(name)?;
        let eviction = self.client.coordinator.begin_eviction(name.clone(), token);
        let (response, may_have_ended) =
            self.until_unlocked(&name, Request::Evict { name: name.clone(), token }).await?;
        match response {
            Response::Evicted(ChangeOutcome::Done) => {
                eviction.confirm();
                Ok(true)
            }
            // An earlier attempt, whose answer was lost, may have ended the lease.
            _ if may_have_ended => {
                self.client.coordinator.look_up(name.clone());
                Err(Error::Unknown { attempted: "evict", name })
            }
            _ => Ok(false),
        }
    }

    /// Asks every holder of a name to release it, and returns how many holders were asked. Zero:
    /// the name has no holder. A holder [without renewal](crate::LeaseRequest::renew) counts as
    /// well, but has no heartbeat by which to learn of the request: the
    /// [age](crate::inspect::LeaseInfo::heartbeat_age) of its heartbeat is `None`.
    ///
    /// Each holder learns of the request at its next heartbeat, within about a second, by
    /// [`Lease::revoke_requested`](crate::Lease::revoke_requested), and decides: the lease stays
    /// held until it is released. The request concerns the current holders alone.
    /// [`evict`](Self::evict) ends a lease of a holder that does not answer.
    ///
    /// ```
    /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
    /// use std::time::Duration;
    ///
    /// if locks.ask_to_release("reindex").await? > 0 {
    ///     let lease = locks.lease("reindex").wait(Duration::from_secs(60)).acquire().await?;
    /// #   lease.release().await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// On MySQL and SQLite, the call waits while a fenced transaction of the holder is open, as
    /// [`evict`](Self::evict) does.
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect), and [`Error::Timeout`](crate::Error::Timeout) when a fenced
    /// transaction of the holder is still open after ten seconds (on SQLite
    /// [`Error::Unavailable`](crate::Error::Unavailable), earlier): end that transaction first.
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the holders may be asked. The call can be repeated.
    pub async fn ask_to_release(&self, name: &str) -> Result<usize> {
        let name = LockName::new(name)?;
        match self.until_unlocked(&name, Request::Ask { name: name.clone() }).await?.0 {
            Response::Asked(AskOutcome::Holders(holders)) => Ok(usize::try_from(holders).unwrap_or(usize::MAX)),
            _ => Ok(0),
        }
    }

    /// Sends a request about the holder of a name until no fenced transaction blocks it. Returns
    /// whether an attempt without an answer may have taken effect, too.
    async fn until_unlocked(&self, name: &LockName, request: Request) -> Result<(Response, bool)> {
        let mut backoff = Backoff::between(Duration::from_millis(10), Duration::from_millis(200));
        let (start, request) = (Instant::now(), Arc::new(request));
        let mut may_linger = false;
        loop {
            let answer = self.client.run_with_answer(Arc::clone(&request)).await;
            may_linger |= answer.may_linger;
            match answer.result? {
                Response::Evicted(ChangeOutcome::Locked)
                | Response::Extended(ChangeOutcome::Locked)
                | Response::Asked(AskOutcome::Locked) => {}
                response => return Ok((response, may_linger)),
            }
            if start.elapsed() > FENCED_TIMEOUT {
                return Err(Error::Timeout { name: name.clone(), waited: start.elapsed() });
            }
            tokio::time::sleep(backoff.step()).await;
        }
    }

    /// Makes the lease with this token last at least `ttl` from now, in any process: for a lease
    /// that one step of a script acquires and others hold. Returns `false` when that token no
    /// longer holds the name. The call never shortens a lease. (A holder that renews the lease
    /// keeps its own TTL.)
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`](crate::Error::OutOfRange), and as
    /// [`ask_to_release`](Self::ask_to_release).
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the lease may be extended. The call can be repeated.
    pub async fn extend(&self, name: &str, token: FencingToken, ttl: Duration) -> Result<bool> {
        self.client.settings.check_ttl("a TTL", ttl)?;
        let name = LockName::new(name)?;
        let (id, renamed, ttl_stays) = (None, None, None);
        let (extended, client_change) = (name.clone(), ClientChange::None);
        let extension = Extension { name: extended, id, renamed, token, lasts: ttl, ttl: ttl_stays, client_change };
        let (response, _) = self.until_unlocked(&name, Request::Extend(extension)).await?;
        Ok(matches!(response, Response::Extended(ChangeOutcome::Done)))
    }
}
