//! The inputs of the engine, and its outputs: actions.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, LossCause};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{AcquisitionId, Mode, Notification, Request, RequestId, Response};
use crate::token::FencingToken;

/// Identifies a caller that wants a name, from its request until it is granted or refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct WaiterId(pub(crate) u64);

/// Identifies a lease that a caller holds. Leases of one owner on one name may share a holding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct LeaseId(pub(crate) u64);

/// A caller's request for a name.
#[derive(Clone, Debug)]
pub(crate) struct LeaseSpec {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    /// The caller named the owner: an owner that already holds the name enters again.
    pub(crate) reenters: bool,
    pub(crate) mode: Mode,
    pub(crate) ttl: Duration,
    /// The heartbeat renews the lease.
    pub(crate) is_renewed: bool,
    pub(crate) hold_time: HoldTime,
    pub(crate) label: Arc<str>,
    pub(crate) wait_mode: WaitMode,
}

/// For how long the name is taken after the grant.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HoldTime {
    /// Applies also to a lease that ends earlier in this client.
    pub(crate) at_least: Duration,
    /// The lease ends after this time.
    pub(crate) at_most: Option<Duration>,
}

impl HoldTime {
    /// Returns the remaining times after `held_for`.
    pub(crate) fn after(self, held_for: Duration) -> Self {
        let left = |time: Duration| time.saturating_sub(held_for);
        Self { at_least: left(self.at_least), at_most: self.at_most.map(left) }
    }
}

/// How long a caller waits for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitMode {
    /// Does not wait for the holder. The store must answer by this moment.
    Try(Moment),
    /// Waits until this moment. `None`: for as long as it takes.
    Wait(Option<Moment>),
}

/// An input of the engine.
#[derive(Clone, Debug)]
pub(crate) enum Input {
    Acquire {
        waiter: WaiterId,
        spec: LeaseSpec,
    },
    /// The caller takes over a lease that was exported.
    Resume {
        waiter: WaiterId,
        spec: LeaseSpec,
        exported: Exported,
    },
    /// The caller stops waiting.
    Cancel {
        waiter: WaiterId,
    },
    /// The caller releases a lease.
    Release {
        lease: LeaseId,
    },
    /// The lease never reached its caller: the name becomes free at once.
    Discard {
        lease: LeaseId,
    },
    /// The caller changes a lease.
    Amend {
        lease: LeaseId,
        amendment: Amendment,
    },
    /// Sets the hold time of a lease, counted from now on.
    StartHoldTime {
        lease: LeaseId,
        hold_time: HoldTime,
    },
    /// The caller exports a lease to another process. The answer is among the returned actions.
    Export {
        lease: LeaseId,
    },
    /// The caller has received the lease that it resumes.
    Delivered {
        lease: LeaseId,
        exported: Exported,
    },
    /// The resumed lease never reached its caller, and another process may resume it.
    HandBack {
        lease: LeaseId,
        exported: Exported,
    },
    Answer {
        request: RequestId,
        answer: Answer,
    },
    /// The store has evicted the holding with this token.
    Evicted {
        name: LockName,
        token: FencingToken,
    },
    /// The holdings of this client on a name may have been taken away.
    LookUp {
        name: LockName,
    },
    /// A name was granted to this client, or may have been.
    Notified(Notification),
    /// Time has passed.
    Tick,
    /// Refuses all waiters and releases all holdings.
    Close,
}

/// A change of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Amendment {
    /// The lease lasts at least this long from now on.
    Extend(Duration),
    /// The lease is shared from now on.
    Downgrade,
    /// The lease has this token from now on.
    Raise(FencingToken),
}

impl Amendment {
    /// Returns whether the amendment changes the mode or token, which are unknown after a failure.
    pub(super) fn is_conversion(self) -> bool {
        match self {
            Self::Extend(_) => false,
            Self::Downgrade | Self::Raise(_) => true,
        }
    }
}

/// Why a lease was not changed.
#[derive(Clone, Debug)]
pub(crate) enum NotAmended {
    Lost(LossCause),
    /// The owner has entered more than once.
    EnteredAgain,
    /// A row lock, such as that of a transaction which the lease fences, prevented the change for
    /// too long.
    Locked,
    Failed(SharedError),
}

/// A lease in transit between two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exported {
    pub(crate) id: AcquisitionId,
    pub(crate) token: FencingToken,
}

/// The outcome of a request.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// A moment before the request was sent.
    pub(crate) sent_at: Moment,
    /// An attempt to send the request was not answered: the request may take effect later.
    pub(crate) may_linger: bool,
    /// An earlier attempt failed and may have taken effect.
    pub(crate) is_repeated: bool,
    pub(crate) result: Result<Response, SharedError>,
}

/// The error of a request, shared by the callers that it ends. The request may have taken effect.
#[derive(Clone, Debug)]
pub(crate) struct SharedError(pub(crate) Arc<Error>);

impl SharedError {
    /// Returns the error of a release that the store repeatedly left without effect.
    pub(super) fn no_effect() -> Self {
        let reason = "the release had no effect: a trigger, a rule or a row-level policy on the sqlock tables undoes it, or another \
             transaction keeps the rows of its waiters locked";
        Self(Arc::new(Error::Database { attempted: "release", source: sqlx::Error::Protocol(reason.into()) }))
    }

    /// Returns the error of a release that was blocked by a row lock, such as a fence's.
    pub(super) fn locked(name: &LockName) -> Self {
        let name = name.as_str();
        let reason = format!("a transaction fenced by the holder keeps {name:?} locked; the lease ends after its TTL");
        Self(Arc::new(Error::Unavailable { attempted: "release", reason, source: None }))
    }

    /// Returns the error, or a copy of it if another caller gets it as well.
    pub(crate) fn into_error(self) -> Error {
        Arc::try_unwrap(self.0).unwrap_or_else(|error| error.repeated())
    }
}

/// An output of the engine, which its caller carries out.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    /// Send a request. An urgent one is sent before others: a lease may end before its answer.
    Send {
        request: RequestId,
        body: Arc<Request>,
        is_urgent: bool,
    },
    /// The caller waits behind another holder or waiter. Sent at most once for each caller.
    Waits {
        waiter: WaiterId,
    },
    Granted {
        waiter: WaiterId,
        grant: Grant,
    },
    Refused {
        waiter: WaiterId,
        refusal: Refusal,
    },
    /// A name was taken over from an expired holder.
    TakenOver {
        name: LockName,
    },
    Released {
        lease: LeaseId,
        verdict: Verdict,
    },
    Lost {
        lease: LeaseId,
        cause: LossCause,
    },
    /// The holder is asked to release the lease. Sent once for each lease.
    ReleaseRequested {
        lease: LeaseId,
    },
    Amended {
        lease: LeaseId,
        result: Result<(), NotAmended>,
    },
    /// `None`: the lease is not held, or its owner has entered more than once; nothing has changed.
    Exported {
        lease: LeaseId,
        exported: Option<Exported>,
    },
    /// Every lease is released or ends with its TTL.
    Closed {
        /// Why the last failed release failed, if any did.
        error: Option<SharedError>,
    },
}

/// A lease granted to a caller.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) lease: LeaseId,
    pub(crate) name: LockName,
    pub(crate) id: AcquisitionId,
    pub(crate) token: FencingToken,
    /// The mode of the holding, which a shared acquisition of an exclusive owner joins.
    pub(crate) mode: Mode,
}

/// Why a caller did not get a name.
#[derive(Clone, Debug)]
pub(crate) enum Refusal {
    /// Another caller holds the name or waits for it.
    Taken,
    /// The time ran out.
    Timeout,
    /// The store did not answer in time.
    NoAnswer,
    /// The store granted the name, but the answer came after the lease had ended.
    TooLate,
    /// The owner shares the name, and cannot hold it alone as well.
    Conversion {
        name: LockName,
    },
    /// The lease that was to be resumed has ended.
    Lost,
    Closed,
    Failed(SharedError),
}

/// Whether a lease was the caller's until its release.
#[derive(Clone, Debug)]
pub(crate) enum Verdict {
    /// The lease was held until its release.
    Held,
    Lost(LossCause),
    /// The store no longer knows.
    Unknown,
    Failed(SharedError),
}
