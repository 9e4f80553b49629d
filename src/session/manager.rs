//! The way to the task that owns the connection of all session locks.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::message::Message;
use super::task::Clerk;
use crate::backend::Backend;
use crate::error::{Error, Result};

/// The way to the task, which is started when it is first needed.
#[derive(Default)]
pub(crate) struct Desk {
    state: Mutex<State>,
}

#[derive(Default)]
enum State {
    #[default]
    Idle,
    Open(UnboundedSender<Message>),
    Closed,
}

impl Desk {
    /// The way to the task, on the present runtime the first time.
    pub(super) fn open(&self, backend: &Arc<dyn Backend>) -> Result<UnboundedSender<Message>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &*state {
            State::Open(desk) => Ok(desk.clone()),
            State::Closed => Err(Error::Closed),
            State::Idle => {
                // Panics outside of a runtime, and then nothing has happened yet.
                let runtime = tokio::runtime::Handle::current();
                let (desk, messages) = unbounded_channel();
                runtime.spawn(Clerk::new(Arc::clone(backend), desk.downgrade()).work(messages));
                *state = State::Open(desk.clone());
                Ok(desk)
            }
        }
    }

    /// Ends all locks and all waits at once; when the future completes, the server knows.
    pub(crate) fn close(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (done, closed) = oneshot::channel();
        if let State::Open(desk) = std::mem::replace(&mut *state, State::Closed) {
            let _ = desk.send(Message::Close(done));
        }
        async move {
            let _ = closed.await;
        }
    }
}
