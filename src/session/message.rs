//! The messages that requests and locks send to the session task.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::liveness::Liveness;
use crate::error::{LossCause, Result};
use crate::name::LockName;

pub(super) enum Message {
    /// A caller requests a name.
    Acquire(LockName, SessionWaiter),
    /// A caller has stopped waiting for a name.
    Cancel(LockName),
    /// A holder releases a lock.
    Release { name: LockName, liveness: Arc<Liveness>, outcome: Option<oneshot::Sender<Result<(), LossCause>>> },
    /// The client takes no more requests. The sender is used when no lock is held.
    Drain(oneshot::Sender<()>),
    /// The client shuts down.
    Shutdown(oneshot::Sender<()>),
}

/// A caller that waits for a name, or tries it once.
pub(super) struct SessionWaiter {
    pub(super) shared: bool,
    /// Whether the caller tries once and does not wait.
    pub(super) is_try: bool,
    /// Set when another holder of the name is known.
    pub(super) is_contended: Arc<AtomicBool>,
    pub(super) reply: oneshot::Sender<Result<Option<SessionGrant>>>,
}

/// A granted lock. Dropping it releases the lock.
pub(super) struct SessionGrant {
    pub(super) name: LockName,
    pub(super) shared: bool,
    pub(super) liveness: Arc<Liveness>,
    pub(super) messages: UnboundedSender<Message>,
    pub(super) is_released: bool,
}

impl SessionGrant {
    /// Sends the lock back, once. `outcome` receives whether the lock was held to the end.
    pub(super) fn send_release(&mut self, outcome: Option<oneshot::Sender<Result<(), LossCause>>>) {
        if std::mem::replace(&mut self.is_released, true) {
            return;
        }
        match (self.liveness.loss(), outcome) {
            (Some(cause), Some(outcome)) => {
                let _ = outcome.send(Err(cause));
            }
            (Some(_), None) => {}
            (None, outcome) => {
                let liveness = Arc::clone(&self.liveness);
                let _ = self.messages.send(Message::Release { name: self.name.clone(), liveness, outcome });
            }
        }
    }
}

impl Drop for SessionGrant {
    fn drop(&mut self) {
        self.send_release(None);
    }
}
