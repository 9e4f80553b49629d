//! The scheduled events of a run.

use std::sync::Arc;

use crate::backend::memory::TransactionId;
use crate::engine::LeaseId;
use crate::name::LockName;
use crate::protocol::{Notification, Request, RequestId, Response};
use crate::token::FencingToken;

/// An event of a run.
#[derive(Debug)]
pub(super) enum WorldEvent {
    /// A request arrives at the store.
    Arrive {
        client: usize,
        life: u32,
        request: RequestId,
        attempt: u32,
        body: Arc<Request>,
        since: u64,
    },
    Commit {
        transaction: TransactionId,
    },
    /// `Err`: the request has waited for a locked row for too long.
    Reply {
        client: usize,
        life: u32,
        request: RequestId,
        attempt: u32,
        response: Result<Response, ()>,
    },
    /// An attempt was not answered in time.
    Overdue {
        client: usize,
        life: u32,
        request: RequestId,
        attempt: u32,
    },
    Wake {
        client: usize,
        life: u32,
    },
    Actor {
        actor: usize,
        turn: u32,
    },
    /// A client receives a notification, which may be for another client, unless it has another
    /// connection now.
    Notify {
        client: usize,
        life: u32,
        connection: u32,
        notification: Notification,
    },
    /// An operator evicts the holder of a token.
    Evict {
        name: LockName,
        token: FencingToken,
    },
    /// A caller asks the holders of a name to release it.
    Ask {
        name: LockName,
    },
    EndFence {
        transaction: TransactionId,
    },
    Unlock {
        transaction: TransactionId,
    },
    Restart {
        client: usize,
    },
    CheckEvicted {
        client: usize,
        life: u32,
        lease: LeaseId,
        at: u64,
    },
    CheckInformed {
        client: usize,
        life: u32,
        lease: LeaseId,
        at: u64,
    },
    CheckTtl {
        client: usize,
        life: u32,
        lease: LeaseId,
        at: u64,
    },
    CheckForgotten {
        client: usize,
        life: u32,
        at: u64,
    },
    Fault,
    Sweep,
}

/// An event with its moment, by which it is ordered.
pub(super) struct Scheduled {
    pub(super) at: u64,
    pub(super) order: u64,
    pub(super) event: WorldEvent,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}
