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

/// Identifies a lease in the hands of a caller. Leases of one owner on one name may share a holding.
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
    pub(crate) max_hold: Option<Duration>,
    pub(crate) label: Arc<str>,
    pub(crate) patience: Patience,
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
    /// The caller does not wait any more.
    Cancel {
        waiter: WaiterId,
    },
    /// The caller gives a lease back. The name stays kept from others for `keep_for`.
    Release {
        lease: LeaseKey,
        keep_for: Duration,
    },
    Answer {
        request: RequestId,
        answer: Answer,
    },
    /// The store told that a name may concern this client.
    Notified {
        name: LockName,
    },
    /// Time has passed.
    Tick,
    /// Nothing more is granted, and everything is given back.
    Close,
}

/// What came of a request.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// A moment before the request was sent.
    pub(crate) sent_at: Moment,
    /// An attempt to send it was not answered: it may take effect later.
    pub(crate) may_linger: bool,
    pub(crate) result: Result<Response, Failure>,
}

/// A request was not answered, or refused for a reason that concerns no single name. Whether it took effect is not known.
#[derive(Clone, Debug)]
pub(crate) struct Failure(pub(crate) Arc<Error>);

/// Something to be done.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    Send {
        request: RequestId,
        body: Request,
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
    /// Everything is given back.
    Closed,
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
    /// The time ran out, waiting for this name.
    Timeout {
        name: LockName,
    },
    /// The store did not answer in time.
    NoAnswer,
    /// The owner shares the name, and cannot hold it alone as well.
    Conversion {
        name: LockName,
    },
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
