//! The handle to the task that owns the connection of all session locks.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::message::Message;
use super::task::SessionTask;
use crate::backend::Backend;
use crate::error::{Error, Result};

/// Starts the session task for the first request, and stops it at shutdown.
#[derive(Default)]
pub(crate) struct SessionManager {
    state: Mutex<State>,
}

#[derive(Default)]
enum State {
    #[default]
    Idle,
    Running(UnboundedSender<Message>),
    Closed,
}

impl SessionManager {
    /// Returns the channel to the task. The first call starts the task on the current runtime.
    pub(super) fn start(&self, backend: &Arc<dyn Backend>) -> Result<UnboundedSender<Message>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &*state {
            State::Running(messages) => Ok(messages.clone()),
            State::Closed => Err(Error::Closed),
            State::Idle => {
                // Outside of a runtime this panics before any change.
                let runtime = tokio::runtime::Handle::current();
                let (messages, inbox) = unbounded_channel();
                runtime.spawn(SessionTask::new(Arc::clone(backend), messages.downgrade()).run(inbox));
                *state = State::Running(messages.clone());
                Ok(messages)
            }
        }
    }

    /// Ends all waits at once, and refuses every request from now on. The future completes when no
    /// lock is held.
    pub(crate) fn drain(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (done, drained) = oneshot::channel();
        match &*state {
            State::Running(messages) => drop(messages.send(Message::Drain(done))),
            State::Idle => *state = State::Closed,
            State::Closed => {}
        }
        async move {
            let _ = drained.await;
        }
    }

    /// Ends all locks and all waits at once. The future completes when the server has confirmed the
    /// end, or after some 20 seconds at most: a statement in flight has the time of the session, and
    /// the end another 4 seconds.
    pub(crate) fn close(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (done, closed) = oneshot::channel();
        if let State::Running(messages) = std::mem::replace(&mut *state, State::Closed) {
            let _ = messages.send(Message::Shutdown(done));
        }
        async move {
            let _ = closed.await;
        }
    }
}
