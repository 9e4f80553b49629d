//! The state of one name within a client: its holders and its waiters.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::message::SessionWaiter;
use crate::backoff::Backoff;

#[derive(Default)]
pub(super) struct SessionNameState {
    pub(super) holders: Holders,
    pub(super) waiters: VecDeque<SessionWaiter>,
    pub(super) backoff: Option<Backoff>,
    /// When the server is asked for the name again.
    pub(super) retry_at: Option<Instant>,
}

/// The holders of a name within this client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Holders {
    #[default]
    None,
    Exclusive,
    Shared(usize),
}

/// What the first waiter of a name needs next.
pub(super) enum Admission {
    /// The waiter joins the holders of this client, which share the name.
    Join,
    /// The server must be asked.
    AskServer,
    /// A holder of this client must release the name first.
    Wait,
}

impl Holders {
    pub(super) fn admission(self, shared: bool) -> Admission {
        match self {
            Self::None => Admission::AskServer,
            Self::Shared(_) if shared => Admission::Join,
            Self::Exclusive | Self::Shared(_) => Admission::Wait,
        }
    }

    pub(super) fn with_one_more(self, shared: bool) -> Self {
        match self {
            Self::Shared(others) if shared => Self::Shared(others + 1),
            _ if shared => Self::Shared(1),
            _ => Self::Exclusive,
        }
    }
}
