//! Known mistakes, put back on demand: the simulation must find each of them.

#[cfg(test)]
use std::cell::Cell;

macro_rules! mutations {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        #[cfg_attr(not(test), allow(dead_code, reason = "made by tests"))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Mutation { $($(#[$doc])* $name,)* }

        #[cfg(test)]
        pub(crate) const ALL: &[Mutation] = &[$(Mutation::$name,)*];
    };
}

mutations! {
    /// A grant whose answer came too late is used.
    UseLateGrant,
    /// The deadline of a lease is counted from the answer, not from the request.
    CountFromAnswer,
    /// A heartbeat that was sent after a lease had ended brings it back.
    ReviveLost,
    /// A heartbeat counts although it tells of a loss.
    IgnoreNotice,
    /// An eviction does not tell the client.
    EvictInSilence,
    /// A request for a release does not tell the clients.
    AskInSilence,
    /// The engine does not look whether a release was asked for.
    ForgetAsked,
    /// The engine does not look whether a release was asked for before it heard of the grant.
    ForgetAskedGrant,
    /// A lease that enters a holding is not told that its release was asked for.
    TellFirstOnly,
    /// A takeover does not look at the heartbeat of the holder.
    TakeOverByExpiryAlone,
    /// A takeover does not look again once the rows are locked.
    TakeOverUnchecked,
    /// A plain acquire takes what has expired.
    AcquireExpired,
    /// A plain acquire does not look for waiting entries.
    OvertakeQueue,
    /// A release does not compare the token and the identity.
    ReleaseUnchecked,
    /// A release passes an open fence.
    ReleaseThroughFence,
    /// A transition passes an open fence.
    TransitThroughFence,
    /// A share is deleted with the waiting entry that it was.
    DeleteShareOnGrant,
    /// A release is called Ok although the lease was taken away.
    TrustRelease,
    /// A cancelled wait leaves its entry.
    LeaveEntry,
    /// A grant without a waiter is kept.
    KeepUnwanted,
    /// A request whose outcome is not known is not withdrawn.
    ForgetUnknown,
    /// A withdrawal is not repeated until the store has confirmed it.
    WithdrawOnce,
    /// A lost lease is not given back.
    ForgetLost,
    /// The queue is served from its end.
    ServeLast,
    /// A joining entry does not keep the time of its arrival.
    ForgetArrival,
    /// Readers pass a waiting writer.
    ReadersOvertake,
    /// Permits are not added up.
    IgnorePermits,
    /// A waiting client never looks at its entry.
    NeverPoll,
    /// Dead waiting entries are granted the name.
    GrantToTheDead,
    /// Tokens start again when a free name is acquired.
    RestartTokens,
    /// A holder believes in its lease for the whole TTL.
    NoMargin,
    /// A grant by another client counts from when it was heard of.
    CountFromNews,
    /// Extending a holding that was released holds the name again.
    ExtendReleased,
    /// The heartbeat waits for other statements of its client.
    BeatBehindOthers,
    /// A client looks only how the first of its entries stands.
    PollFirstOnly,
    /// A withdrawal leaves what was granted.
    WithdrawEntryOnly,
    /// The heartbeat goes on keeping a lease that was exported.
    KeepExported,
    /// After an interruption the store is taken for the one that it was.
    TrustAnyStore,
    /// What ended shortly before an interruption is not looked for after it.
    ForgetEnded,
}

#[cfg(test)]
thread_local! {
    static ACTIVE: Cell<Option<Mutation>> = const { Cell::new(None) };
}

/// Puts a mistake back, in this thread, or takes it out again.
#[cfg(test)]
pub(crate) fn activate(mutation: Option<Mutation>) {
    ACTIVE.set(mutation);
}

/// Returns whether a mistake is to be made: never but in tests.
#[cfg(not(test))]
pub(crate) const fn is_on(_: Mutation) -> bool {
    false
}

/// Returns whether a mistake is to be made.
#[cfg(test)]
pub(crate) fn is_on(mutation: Mutation) -> bool {
    ACTIVE.get() == Some(mutation)
}
