//! Known mistakes, activated on demand: the simulation must find each of them.

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
    /// A heartbeat extends leases although its answer has a new notice.
    IgnoreNotice,
    /// An eviction gives the client no notice.
    EvictInSilence,
    /// A request for a release gives the clients no notice.
    AskInSilence,
    /// The engine does not look for requests for a release.
    ForgetAsked,
    /// The engine does not look for requests for a release from before it learned of the grant.
    ForgetAskedGrant,
    /// A lease that enters a holding is not informed that its release was requested.
    TellFirstOnly,
    /// A takeover ignores the heartbeat of the holder.
    TakeOverByExpiryAlone,
    /// A takeover does not check the rows again after locking them.
    TakeOverUnchecked,
    /// A plain acquire takes an expired name.
    AcquireExpired,
    /// A plain acquire ignores waiting entries.
    OvertakeQueue,
    /// A release does not compare the token and the identity.
    ReleaseUnchecked,
    /// A release passes an open fence.
    ReleaseThroughFence,
    /// A transition passes an open fence.
    TransitThroughFence,
    /// A grant of a share deletes its entry, as for an exclusive grant.
    DeleteShareOnGrant,
    /// A release reports success although the lease was taken away.
    TrustRelease,
    /// A cancelled wait leaves its entry.
    LeaveEntry,
    /// A grant without a waiter is kept.
    KeepUnwanted,
    /// A request with an unknown outcome is not withdrawn.
    ForgetUnknown,
    /// A withdrawal is not repeated until the store has confirmed it.
    WithdrawOnce,
    /// A lost lease is not withdrawn.
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
    /// Dead waiting entries get the name.
    GrantToTheDead,
    /// Tokens start again when a free name is acquired.
    RestartTokens,
    /// A holder relies on its lease for longer than the TTL.
    NoMargin,
    /// A grant by another client counts from the moment at which the client learned of it.
    CountFromNews,
    /// An extension of a released holding takes the name again.
    ExtendReleased,
    /// The heartbeat waits for other statements of its client.
    BeatBehindOthers,
    /// A client polls only the first of its entries.
    PollFirstOnly,
    /// A withdrawal leaves a granted holding.
    WithdrawEntryOnly,
    /// The heartbeat still renews an exported lease.
    KeepExported,
    /// After an interruption, the engine assumes that the store is still the same.
    TrustAnyStore,
    /// Answers look for the first waiters only, tries included, and a claim that is being withdrawn
    /// is granted.
    SeeFirstOnly,
    /// Names with an acquisition that ended shortly before an interruption are not read after it.
    ForgetEnded,
    /// A failed or repeated heartbeat discards the earlier ones.
    DiscardBeats,
    /// A grant to another client lasts for the requested TTL, although that client may be dead.
    GrantForLong,
    /// A lease that another client granted keeps the short TTL of its grant.
    KeepShortTtl,
    /// A waiter with an entry does not learn that its owner has got the name, and waits for itself.
    WaitForOneself,
    /// A release that finds its holding ended always has an unknown outcome.
    DoubtEveryEnd,
    /// A try is refused although the holder of the name has expired.
    RefuseExpired,
    /// An expired lease ends without a report to its caller.
    ExpireInSilence,
    /// The wait of a caller is reported with each answer.
    ReportWaitsAgain,
    /// A client that evicts its own lease keeps it until its next heartbeat.
    KeepEvicted,
    /// The notices of a client whose row was swept start again.
    RestartNotices,
    /// Grants in the same microsecond have the same token.
    RepeatTokens,
    /// The wait of a caller is not reported.
    WaitInSilence,
    /// A release frees a name before the end of its hold time.
    ForgetHoldTime,
    /// A statement about a holding is repeated without a pause.
    RepeatAtOnce,
    /// A repeated acquisition does not prolong the holding that the first attempt acquired.
    RepeatKeepsExpiry,
}

#[cfg(test)]
thread_local! {
    static ACTIVE: Cell<Option<Mutation>> = const { Cell::new(None) };
}

/// Activates a mistake in this thread, or none.
#[cfg(test)]
pub(crate) fn activate(mutation: Option<Mutation>) {
    ACTIVE.set(mutation);
}

/// Returns `false`: mistakes are active only in tests.
#[cfg(not(test))]
pub(crate) const fn is_on(_: Mutation) -> bool {
    false
}

/// Returns whether a mistake is active.
#[cfg(test)]
pub(crate) fn is_on(mutation: Mutation) -> bool {
    ACTIVE.get() == Some(mutation)
}
