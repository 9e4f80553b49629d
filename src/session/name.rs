//! One name, as far as a client is concerned: who has it and who waits for it.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::message::Wanted;
use crate::backoff::Backoff;

/// One name, as far as this client is concerned.
#[derive(Default)]
pub(super) struct Spot {
    pub(super) held: Held,
    pub(super) waiting: VecDeque<Wanted>,
    pub(super) pause: Option<Backoff>,
    pub(super) due: Option<Instant>,
    /// Since when the database has not been to be asked.
    pub(super) trouble: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Held {
    #[default]
    No,
    Alone,
    By(usize),
}

/// What becomes of the first in line.
pub(super) enum Turn {
    /// Those who have the name share it, and so may this one.
    Join,
    /// The server must be asked.
    Ask,
    /// Somebody here has it.
    Wait,
}

impl Held {
    pub(super) fn turn(self, shared: bool) -> Turn {
        match self {
            Self::No => Turn::Ask,
            Self::By(_) if shared => Turn::Join,
            Self::Alone | Self::By(_) => Turn::Wait,
        }
    }

    pub(super) fn with_one_more(self, shared: bool) -> Self {
        match self {
            Self::By(others) if shared => Self::By(others + 1),
            _ if shared => Self::By(1),
            _ => Self::Alone,
        }
    }
}
