//! An operation with its attempts so far.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{OperationAnswer, Receiver};
use crate::backend::{Store, StoreFuture};
use crate::backoff::Backoff;
use crate::clock::{Clock, Moment};
use crate::error::Error;
use crate::operation::Operation;
use crate::panics;
use crate::protocol::{Batch, Request, RequestId, Response};

/// Passes an answer on, at once or with the others of its batch.
type Reply<T> = Box<dyn FnOnce(OperationAnswer<T>, &mut Answers) + Send>;

/// The most answers that an engine handles in one go: its callers wait meanwhile.
const MOST_ANSWERS: usize = 32;

/// Answers to requests of one engine, which receives them together when this is dropped, or earlier
/// if they are many.
#[derive(Default)]
pub(super) struct Answers {
    receiver: Option<Arc<dyn Receiver>>,
    answers: Vec<(RequestId, OperationAnswer<Response>)>,
}

/// An operation in the queue, with its attempts so far.
pub(super) struct Task<O: Operation> {
    operation: O,
    output: Option<O::Output>,
    reply: Option<Reply<O::Output>>,
    attempts: TaskAttempts,
}

/// The attempts of one operation.
pub(super) struct TaskAttempts {
    pub(super) answer_timeout: Duration,
    pub(super) since: Instant,
    pub(super) sent_at: Moment,
    /// As in [`OperationAnswer`].
    pub(super) may_linger: bool,
    /// As in [`OperationAnswer`].
    pub(super) is_repeated: bool,
    pub(super) backoff: Backoff,
    pub(super) has_reconnected: bool,
    /// Whether the operation is sent before all others.
    pub(super) is_urgent: bool,
    /// Whether a batch has left the operation undone.
    pub(super) is_sent_alone: bool,
}

/// A [`Task`] of any operation.
pub(super) trait Pending: Send {
    fn attempts(&mut self) -> &mut TaskAttempts;

    fn attempted(&self) -> &'static str;

    /// Sends the operation once, and stores its output.
    fn send<'a>(&'a mut self, connection: &'a mut dyn Store) -> StoreFuture<'a, ()>;

    /// Joins a batch or begins one. `false`: the operation must be sent alone.
    fn join(&self, batch: &mut Option<Batch>) -> bool;

    /// Stores the operation's response from a batch.
    fn set_response(&mut self, response: Response);

    /// Passes the output on, or the error.
    fn finish(self: Box<Self>, error: Option<Error>, answers: &mut Answers);
}

impl Answers {
    pub(super) fn push(&mut self, request: RequestId, answer: OperationAnswer<Response>, receiver: Arc<dyn Receiver>) {
        self.answers.push((request, answer));
        self.receiver = Some(receiver);
        if self.answers.len() == MOST_ANSWERS {
            self.deliver();
        }
    }

    fn deliver(&mut self) {
        if let Some(receiver) = self.receiver.take() {
            // A panic of the receiver must neither end the worker nor keep later answers back.
            let _ = panics::caught(|| receiver.receive(std::mem::take(&mut self.answers)));
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.deliver();
    }
}

impl<O: Operation> Task<O> {
    pub(super) fn new(
        operation: O,
        answer_timeout: Duration,
        clock: Clock,
        reply: impl FnOnce(OperationAnswer<O::Output>) + Send + 'static,
    ) -> Self {
        Self::with_reply(operation, answer_timeout, clock, Box::new(|answer, _| reply(answer)))
    }

    fn with_reply(operation: O, answer_timeout: Duration, clock: Clock, reply: Reply<O::Output>) -> Self {
        let attempts = TaskAttempts {
            answer_timeout,
            since: Instant::now(),
            sent_at: clock.now(),
            may_linger: false,
            is_repeated: false,
            backoff: reconnecting(),
            has_reconnected: false,
            is_urgent: false,
            is_sent_alone: false,
        };
        Self { operation, output: None, reply: Some(reply), attempts }
    }

    /// Makes this an operation that is sent before all others.
    pub(super) fn urgent(mut self) -> Self {
        self.attempts.is_urgent = true;
        self
    }

    fn answer(&mut self, result: Result<O::Output, Error>, answers: &mut Answers) {
        if let Some(reply) = self.reply.take() {
            let TaskAttempts { sent_at, may_linger, is_repeated, .. } = self.attempts;
            // A panic of the receiver must not end the worker.
            let _ = panics::caught(|| reply(OperationAnswer { result, sent_at, may_linger, is_repeated }, answers));
        }
    }
}

impl Task<Arc<Request>> {
    /// Creates the task of a request of an engine, whose answer `receiver` receives.
    pub(super) fn of_engine(
        body: Arc<Request>,
        request: RequestId,
        answer_timeout: Duration,
        clock: Clock,
        receiver: Arc<dyn Receiver>,
    ) -> Self {
        let reply = move |answer, answers: &mut Answers| answers.push(request, answer, receiver);
        Self::with_reply(body, answer_timeout, clock, Box::new(reply))
    }
}

impl<O: Operation> Drop for Task<O> {
    fn drop(&mut self) {
        self.answer(Err(Error::Closed), &mut Answers::default());
    }
}

impl<O: Operation> Pending for Task<O> {
    fn attempts(&mut self) -> &mut TaskAttempts {
        &mut self.attempts
    }

    fn attempted(&self) -> &'static str {
        self.operation.attempted()
    }

    fn send<'a>(&'a mut self, connection: &'a mut dyn Store) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            self.output = Some(self.operation.run(connection).await?);
            Ok(())
        })
    }

    fn join(&self, batch: &mut Option<Batch>) -> bool {
        !self.attempts.is_sent_alone && self.operation.join(batch)
    }

    fn set_response(&mut self, response: Response) {
        self.output = O::output(response);
    }

    fn finish(mut self: Box<Self>, error: Option<Error>, answers: &mut Answers) {
        let result = match (error, self.output.take()) {
            (None, Some(output)) => Ok(output),
            (error, _) => Err(error.unwrap_or(Error::Closed)),
        };
        self.answer(result, answers);
    }
}

/// Returns the pauses between attempts after a lost connection or a conflict.
pub(super) fn reconnecting() -> Backoff {
    Backoff::between(Duration::from_millis(5), Duration::from_millis(250))
}
