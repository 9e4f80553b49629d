//! What goes into the engine, and what comes out of it.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, LossCause};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{LeaseId, Mode, Request, Response};
use crate::token::FencingToken;

/// Identifies a caller that wants a name, from its request until it is granted or refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct WaiterId(pub(crate) u64);

/// Identifies a lease in the hands of a caller. Leases of one owner on one name may share a
/// holding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct LeaseKey(pub(crate) u64);

/// Identifies a request on its way to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RequestId(pub(crate) u64);

/// What a caller wants.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    /// The owner was given: it enters again where it holds already.
    pub(crate) reenters: bool,
    pub(crate) mode: Mode,
    pub(crate) ttl: Duration,
    /// The heartbeat keeps the lease.
    pub(crate) is_kept: bool,
    pub(crate) hold_time: HoldTime,
    pub(crate) label: Arc<str>,
    pub(crate) patience: Patience,
}

/// For how long the name is taken after the grant.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HoldTime {
    /// Also when the lease ends here before.
    pub(crate) at_least: Duration,
    /// The lease ends then.
    pub(crate) at_most: Option<Duration>,
}

impl HoldTime {
    /// Returns what is left of it.
    pub(crate) fn after(self, held_for: Duration) -> Self {
        let left = |time: Duration| time.saturating_sub(held_for);
        Self { at_least: left(self.at_least), at_most: self.at_most.map(left) }
    }
}

/// How long a caller waits for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Not at all for its holder. The store must have answered until then.
    Try(Moment),
    /// Until then. `None`: for as long as it takes.
    Wait(Option<Moment>),
}

/// Something that happened.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Acquire {
        waiter: WaiterId,
        wish: Wish,
    },
    /// The caller takes over a lease that was exported.
    Resume {
        waiter: WaiterId,
        wish: Wish,
        exported: Exported,
    },
    /// The caller does not wait any more.
    Cancel {
        waiter: WaiterId,
    },
    /// The caller gives a lease back.
    Release {
        lease: LeaseKey,
    },
    /// The caller never got a lease: the name is free at once.
    Discard {
        lease: LeaseKey,
    },
    /// The caller changes a lease.
    Amend {
        lease: LeaseKey,
        amendment: Amendment,
    },
    /// A lease gets these limits, which count from now on.
    StartHoldTime {
        lease: LeaseKey,
        hold_time: HoldTime,
    },
    /// The caller gives a lease to another process. The answer is among the actions that follow at
    /// once.
    Export {
        lease: LeaseKey,
    },
    /// The caller has got the lease that it resumes.
    Delivered {
        lease: LeaseKey,
        exported: Exported,
    },
    /// The caller never got the lease that it resumes, and another may resume it.
    HandBack {
        lease: LeaseKey,
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
    /// What this client holds of a name may have been taken away.
    Doubted {
        name: LockName,
    },
    /// Another client has granted this one a name. `None`: one of those for which it waits.
    Notified {
        name: Option<LockName>,
    },
    /// Time has passed.
    Tick,
    /// Nothing more is granted, and everything is given back.
    Close,
}

/// A change of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Amendment {
    /// It lasts at least so long from now on.
    Extend(Duration),
    /// It is shared from now on.
    Downgrade,
    /// It has this token from now on.
    Raise(FencingToken),
}

impl Amendment {
    /// Whether it changes what the lease is, so that after a failure this is not known.
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
    /// Its owner has entered more than once.
    EnteredAgain,
    Failed(Failure),
}

/// A lease between two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exported {
    pub(crate) id: LeaseId,
    pub(crate) token: FencingToken,
}

/// What came of a request.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// A moment before the request was sent.
    pub(crate) sent_at: Moment,
    /// An attempt to send it was not answered: it may take effect later.
    pub(crate) may_linger: bool,
    /// An earlier attempt failed, and it is not known for certain that it did nothing.
    pub(crate) is_repeated: bool,
    pub(crate) result: Result<Response, Failure>,
}

/// A request was not answered, or refused for a reason that concerns no single name. Whether it
/// took effect is not known.
#[derive(Clone, Debug)]
pub(crate) struct Failure(pub(crate) Arc<Error>);

impl Failure {
    /// The store answers again and again that the lease stands as before.
    pub(super) fn no_effect() -> Self {
        let reason =
            "the release had no effect: a trigger, a rule or a row-level policy on the sqlock tables undoes it";
        Self(Arc::new(Error::Database { attempted: "release", source: sqlx::Error::Protocol(reason.into()) }))
    }

    /// A lock on the row, as that of a fence, kept the release out.
    pub(super) fn locked(name: &LockName) -> Self {
        let reason = format!("a transaction that the holder has fenced holds {name}, which ends with its TTL");
        Self(Arc::new(Error::Unavailable { attempted: "release", reason, source: None }))
    }

    /// The error itself, or its like when another caller gets it as well.
    pub(crate) fn into_error(self) -> Error {
        Arc::try_unwrap(self.0).unwrap_or_else(|error| error.repeated())
    }
}

/// Something to be done.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    /// Send a request. An urgent one is sent before others: a lease may end before its answer.
    Send {
        request: RequestId,
        body: Request,
        is_urgent: bool,
    },
    /// The caller waits: another holds the name or is before it. At most once for each caller.
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
    Released {
        lease: LeaseKey,
        verdict: Verdict,
    },
    Lost {
        lease: LeaseKey,
        cause: LossCause,
    },
    /// The holder is asked to release the lease. Once for each lease.
    ReleaseRequested {
        lease: LeaseKey,
    },
    Amended {
        lease: LeaseKey,
        result: Result<(), NotAmended>,
    },
    /// `None`: the lease is not held, or its owner has entered more than once. Nothing has changed
    /// then.
    Exported {
        lease: LeaseKey,
        exported: Option<Exported>,
    },
    /// Everything is given back, or ends with its TTL.
    Closed {
        /// Why the last release failed, if one has.
        failure: Option<Failure>,
    },
}

/// A lease that a caller has got.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) lease: LeaseKey,
    pub(crate) name: LockName,
    pub(crate) id: LeaseId,
    pub(crate) token: FencingToken,
}

/// Why a caller did not get a name.
#[derive(Clone, Debug)]
pub(crate) enum Refusal {
    /// Another holds the name, or waits for it.
    Held,
    /// The time ran out.
    Timeout,
    /// The store did not answer in time.
    NoAnswer,
    /// The store granted the name, and the answer came after the lease had ended.
    TooLate,
    /// The owner shares the name, and cannot hold it alone as well.
    Conversion {
        name: LockName,
    },
    /// The lease that was to be resumed has ended.
    Lost,
    Closed,
    Failed(Failure),
}

/// Whether a lease was the caller's until it was given back.
#[derive(Clone, Debug)]
pub(crate) enum Verdict {
    Kept,
    Lost(LossCause),
    /// The store cannot tell any more.
    Unknown,
    Failed(Failure),
}
