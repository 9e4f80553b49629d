//! Continues requests under a lease whose process has died, or whose outcome is unknown.

use std::collections::VecDeque;
use std::fmt::Display;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::attempt::Attempt;
use super::handle::Idempotency;
use super::outcome::Outcome;
use crate::backend::micros;
use crate::backend::records::{ClaimRequest, Position, Record, Selection};
use crate::error::{Error, Result};
use crate::panics;

/// The number of requests resumed at the same time, unless [`ResumePolicy::parallel`] sets it.
const PARALLEL: NonZeroUsize = NonZeroUsize::MIN.saturating_add(3);

/// The number of records in one read.
const PAGE: u32 = 500;

/// The requests that [`Idempotency::resume`] continues, and how many at a time.
#[derive(Clone, Copy, Debug)]
#[must_use = "a policy is set with Idempotency::resume_policy"]
pub struct ResumePolicy {
    parallel: NonZeroUsize,
    min_age: Duration,
    pub(super) max_attempts: u32,
}

impl ResumePolicy {
    /// Resumes requests of any age, after any number of attempts, 4 at a time.
    pub fn new() -> Self {
        Self { parallel: PARALLEL, min_age: Duration::ZERO, max_attempts: u32::MAX }
    }

    /// Sets how many requests are resumed at the same time: 4 by default, at least 1. Each request
    /// holds a lease, and the connections of its work.
    pub fn parallel(mut self, requests: usize) -> Self {
        self.parallel = NonZeroUsize::new(requests).unwrap_or(NonZeroUsize::MIN);
        self
    }

    /// Sets the minimum age of a resumed request, counted from its first attempt by the database's
    /// clock. By default, requests of any age are resumed. Set it above the time that a
    /// handler takes: otherwise each call tries the attempts in progress, too, and counts them as
    /// [in progress](Resumed::in_progress), and as `sqlock_acquire_total{outcome="held"}`.
    pub fn min_age(mut self, age: Duration) -> Self {
        self.min_age = age;
        self
    }

    /// Sets the number of attempts after which a request is no longer resumed, but
    /// [listed](Idempotency::dead_letters) as a dead letter: at least 1, and unlimited by default.
    /// An attempt that panics, or whose process dies, counts too. The limit does not apply to
    /// clients: a repeated request continues an attempt that has died, after any number of
    /// attempts.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts.max(1);
        self
    }
}

impl Default for ResumePolicy {
    fn default() -> Self {
        Self::new()
    }
}

/// The result of [`Idempotency::resume`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Resumed {
    /// The number of completed requests.
    pub done: u64,
    /// The number of failed requests.
    pub failed: u64,
    /// The number of requests in progress elsewhere.
    pub in_progress: u64,
    /// The number of requests skipped because of their number of attempts.
    pub dead_letters: u64,
}

/// The outcome of one resumed request.
enum End {
    Done,
    Failed,
    InProgress,
    /// Another process has ended the request in the meantime.
    EndedElsewhere,
}

impl Resumed {
    fn count(&mut self, end: End) {
        match end {
            End::Done => self.done += 1,
            End::Failed => self.failed += 1,
            End::InProgress => self.in_progress += 1,
            End::EndedElsewhere => {}
        }
    }
}

impl Idempotency {
    /// Continues the requests of this namespace that have not ended, or whose outcome is unknown,
    /// and that are not in progress, the oldest first: call it regularly from a background task.
    /// The [policy](Self::resume_policy) limits their age, their attempts and how many run at a
    /// time.
    ///
    /// A request of [`run`](Self::run) whose outcome is unknown, because a statement of its work ended
    /// the transaction, is left to [`resolve`](Self::resolve): a part of it has taken effect, and
    /// another attempt would repeat that.
    ///
    /// The [key](Attempt::key) identifies the request, and the attempt has its
    /// [stored](Attempt::request) part; finished steps are not repeated, and the [key for the
    /// provider](Attempt::provider_key) is that of the earlier attempts.
    ///
    /// A request that fails or panics does not stop the others. After a panic the attempt counts as
    /// dead, and the next call resumes it. `IdempotencyLayer::resume` resumes requests that came
    /// over HTTP; its work makes responses.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::Unavailable`], [`Error::NotMigrated`] and similar errors,
    /// which concern every request: no further request is begun, and the begun ones have ended.
    /// [`Error::Closed`] when the client is drained: a loop that also waits for
    /// [`Locks::closed`](crate::Locks::closed) ends then. Other errors, and errors of the work, are
    /// counted and logged.
    ///
    /// # Cancel safety
    ///
    /// As [`run_leased`](Self::run_leased).
    pub async fn resume<T, E, F>(&self, work: F) -> Result<Resumed>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error> + Display,
        F: AsyncFnOnce(&Attempt) -> Result<T, E> + Clone,
    {
        let ResumePolicy { parallel, max_attempts, .. } = self.resume_policy;
        let (mut resumed, mut unavailable) = (Resumed::default(), None);
        let (mut unfinished, mut running) = (Unfinished::default(), Running::new());
        loop {
            while unavailable.is_none() && running.futures.len() < parallel.get() {
                match running.poll_during(unfinished.next(self)).await {
                    Ok(Some(record)) if record.attempts >= i64::from(max_attempts) => resumed.dead_letters += 1,
                    Ok(Some(record)) => running.futures.push(Box::pin(self.resume_one(record, work.clone()))),
                    Ok(None) => break,
                    Err(error) => unavailable = Some(error),
                }
            }
            match running.next().await {
                Some(Ok(end)) => resumed.count(end),
                Some(Err(error)) => unavailable = unavailable.or(Some(error)),
                None => return unavailable.map_or(Ok(resumed), Err),
            }
        }
    }

    /// Resumes one request. A returned error concerns every request.
    async fn resume_one<T, E, F>(&self, record: Record, work: F) -> Result<End>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error> + Display,
        F: AsyncFnOnce(&Attempt) -> Result<T, E>,
    {
        let attempt = match self.attempt_again(record).await {
            Ok(Ok(attempt)) => attempt,
            Ok(Err(end)) => return Ok(end),
            Err(error) if error.concerns_all() => return Err(error),
            Err(error) => return Ok(failed(error.report())),
        };
        Ok(match panics::caught_in(attempt.run_work(work)).await {
            Ok(Ok(_)) => End::Done,
            Ok(Err(error)) => failed(error),
            Err(panic) => failed(format_args!("the work panicked: {panic}")),
        })
    }

    /// Begins another attempt, unless the request is in progress or has ended.
    async fn attempt_again(&self, record: Record) -> Result<Result<Attempt, End>> {
        let Some(lease) = self.lease_request(&record.key).try_acquire().await? else {
            return Ok(Err(End::InProgress));
        };
        Ok(match self.start(ClaimRequest::for_key(record.key), lease, true).await? {
            Outcome::New(attempt) => Ok(attempt),
            _ => Err(End::EndedElsewhere),
        })
    }
}

fn failed(error: impl Display) -> End {
    // The alternate form of anyhow includes the sources.
    tracing::warn!(error = format!("{error:#}"), "a request that was resumed failed");
    End::Failed
}

/// The records to resume, read page by page.
#[derive(Default)]
struct Unfinished {
    page: VecDeque<Record>,
    after: Option<Position>,
    /// The latest creation time of a record to resume: later records are left out.
    until: Option<i64>,
    is_last: bool,
}

impl Unfinished {
    async fn next(&mut self, idempotency: &Idempotency) -> Result<Option<Record>> {
        if self.page.is_empty() && !self.is_last {
            let (states, after) = (Selection::UNFINISHED.into(), self.after.take());
            let selection = Selection { states, min_attempts: 1, after, limit: PAGE, ..Selection::default() };
            let found = idempotency.select(selection).await?;
            self.is_last = found.len() < PAGE as usize;
            self.after = found.last().map(Record::position);
            self.page = found.into();
        }
        let Some(record) = self.page.pop_front() else {
            return Ok(None);
        };
        let min_age = micros(idempotency.resume_policy.min_age);
        let until = *self.until.get_or_insert(record.now.saturating_sub(min_age));
        if record.created_at > until {
            self.page.clear();
            self.is_last = true;
            return Ok(None);
        }
        Ok(Some(record))
    }
}

/// The futures in progress, and the outputs of those that have ended.
struct Running<F: Future> {
    futures: Vec<Pin<Box<F>>>,
    ended: VecDeque<F::Output>,
}

impl<F: Future> Running<F> {
    fn new() -> Self {
        Self { futures: Vec::new(), ended: VecDeque::new() }
    }

    /// Waits for another future. The futures in progress go on meanwhile.
    async fn poll_during<T>(&mut self, other: impl Future<Output = T>) -> T {
        let mut other = std::pin::pin!(other);
        std::future::poll_fn(|cx| {
            self.poll_all(cx);
            other.as_mut().poll(cx)
        })
        .await
    }

    /// Waits for the end of one future. Returns `None` if there is none.
    async fn next(&mut self) -> Option<F::Output> {
        std::future::poll_fn(|cx| {
            self.poll_all(cx);
            match self.ended.pop_front() {
                None if !self.futures.is_empty() => Poll::Pending,
                ended => Poll::Ready(ended),
            }
        })
        .await
    }

    fn poll_all(&mut self, cx: &mut Context<'_>) {
        let ended = &mut self.ended;
        self.futures.retain_mut(|future| match future.as_mut().poll(cx) {
            Poll::Ready(output) => {
                ended.push_back(output);
                false
            }
            Poll::Pending => true,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The other future, such as the read of a page, ends only after the one in progress.
    #[tokio::test]
    async fn futures_in_progress_go_on_during_another() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let mut running = Running::new();
        running.futures.push(Box::pin(async { sender.send(7) }));
        assert_eq!(running.poll_during(receiver).await, Ok(7));
        assert_eq!(running.next().await, Some(Ok(())));
        assert_eq!(running.next().await, None);
    }
}
