//! What the task is told by requests and locks.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::oneshot;

use super::liveness::Bond;
use super::lock::SessionLock;
use crate::error::{LossCause, Result};
use crate::name::LockName;

pub(super) enum Message {
    /// Somebody wants a name.
    Want(LockName, Wanted),
    /// Somebody who wanted a name may have gone.
    Look(LockName),
    /// Somebody gives a lock back.
    Return { name: LockName, bond: Arc<Bond>, verdict: Option<oneshot::Sender<Result<(), LossCause>>> },
    /// All is over.
    Close(oneshot::Sender<()>),
}

/// What somebody wants of a name.
pub(super) struct Wanted {
    pub(super) shared: bool,
    /// Otherwise it is a try.
    pub(super) patient: bool,
    /// Set when it is known that somebody has the name.
    pub(super) taken: Arc<AtomicBool>,
    pub(super) reply: oneshot::Sender<Result<Option<SessionLock>>>,
}
