//! The holdings of this client, as far as it knows without the store.

use std::collections::VecDeque;
use std::time::Duration;

use super::GrantTerms;
use super::action::{Amendment, HoldTime, LeaseId, Verdict};
use super::heartbeat::{Epoch, Heartbeat};
use super::lifetime::Lifetime;
use super::looks::Looks;
use super::withdrawal::FIRST_PAUSE;
use crate::clock::Moment;
use crate::error::LossCause;
use crate::mutation::{Mutation, is_on};
use crate::protocol::{AcquisitionId, Claim, Mode};
use crate::token::FencingToken;

/// How long after a grant by another client the engine extends the lease to its requested TTL, or
/// checks a grant of which it was only notified. A lease that is released earlier needs no such
/// statement.
pub(super) const EXTEND_AFTER: Duration = Duration::from_millis(200);

/// How soon the engine repeats a release that meets a row lock, for the first time.
const LOCKED_PAUSE: Duration = Duration::from_millis(10);

/// How often the engine repeats a release that has no effect in the store.
const MAX_INEFFECTIVE_RELEASES: u32 = 16;

/// A lease that shares a holding.
#[derive(Clone, Debug)]
pub(super) struct LocalLease {
    pub(super) id: LeaseId,
    /// When the `max_hold` of the lease is over.
    pub(super) ends: Option<Moment>,
    /// The name stays taken until this moment, even if the lease ends earlier in this client.
    pub(super) keeps_until: Moment,
}

impl LocalLease {
    pub(super) fn new(id: LeaseId, now: Moment, HoldTime { at_least, at_most }: HoldTime) -> Self {
        Self { id, ends: at_most.map(|at_most| now + at_most), keeps_until: now + at_least }
    }
}

/// A change that a lease waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Amending {
    pub(super) lease: LeaseId,
    pub(super) amendment: Amendment,
    pub(super) state: AmendmentState,
    /// Since when it meets a row lock.
    pub(super) locked_since: Option<Moment>,
    /// An earlier attempt of the request, which converts the holding, may take effect late.
    pub(super) lingers: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AmendmentState {
    Pending,
    /// The store refused the change. The engine must look up whether the holding still exists.
    Refused,
    /// The look-up after the refusal is in flight.
    LookingUp,
}

#[derive(Clone, Debug)]
pub(super) enum HoldingState {
    /// Held by these leases of one owner.
    Held(Vec<LocalLease>),
    /// The last lease is being released.
    Releasing {
        /// The lease whose holder waits for the verdict.
        lease: Option<LeaseId>,
        /// Until when the name stays taken after the release.
        keeps_until: Moment,
        /// Entries wait, and the next holder must be decided from the queue as read.
        by_transition: bool,
        /// Since when it meets a row lock.
        locked_since: Option<Moment>,
    },
}

/// A holding of this client. Its identity in the store is that of its claim.
#[derive(Clone, Debug)]
pub(super) struct Holding {
    pub(super) claim: Claim,
    pub(super) token: FencingToken,
    /// The tokens of the holding before each raise.
    pub(super) former_tokens: Vec<FencingToken>,
    /// Its release was requested, and its leases were notified.
    pub(super) is_release_requested: bool,
    /// The holding was taken over unchanged from another process.
    pub(super) is_adopted: bool,
    /// The holding was added to a holding of the owner elsewhere, so it is stored as an entry of
    /// the name.
    pub(super) is_joined: bool,
    pub(super) state: HoldingState,
    pub(super) lifetime: Lifetime,
    pub(super) looks: Looks,
    /// When to raise its TTL in the store to the requested TTL.
    pub(super) extend_at: Option<Moment>,
    /// When to repeat a statement that changes the holding.
    pub(super) retry_at: Moment,
    pub(super) pause: Duration,
    /// How often a release has had no effect and the store gave no reason.
    pub(super) ineffective_releases: u32,
    /// A request about the holding may take effect late.
    pub(super) lingers: bool,
    /// A request that ends the holding may have taken effect without an answer.
    pub(super) may_have_ended: bool,
    /// The queue was read since, and no entry in it needs time for a heartbeat first.
    pub(super) is_queue_checked: bool,
    /// Requested changes, in order.
    pub(super) amendments: VecDeque<Amending>,
}

impl Holding {
    pub(super) fn id(&self) -> AcquisitionId {
        self.claim.id
    }

    /// Creates the holding of a claim that was granted, without its leases.
    pub(super) fn from_terms(now: Moment, claim: Claim, terms: &GrantTerms) -> Self {
        let GrantTerms { token, ttl, may_linger, is_joined, .. } = *terms;
        let mode = if is_joined { Mode::Exclusive } else { claim.mode };
        Self {
            token,
            former_tokens: Vec::new(),
            is_release_requested: false,
            is_adopted: false,
            is_joined,
            state: HoldingState::Held(Vec::new()),
            lifetime: Lifetime::new(claim.is_renewed, terms),
            looks: Looks::default(),
            extend_at: (ttl < claim.ttl && !is_on(Mutation::KeepShortTtl)).then(|| now + EXTEND_AFTER),
            retry_at: now,
            pause: FIRST_PAUSE,
            ineffective_releases: 0,
            lingers: may_linger,
            may_have_ended: false,
            is_queue_checked: false,
            amendments: VecDeque::new(),
            claim: Claim { mode, ..claim },
        }
    }

    /// Takes the leases whose holders wait for the verdict of their release.
    pub(super) fn take_leaving(&mut self) -> Vec<LeaseId> {
        let mut leaving = self.looks.take_all();
        if let HoldingState::Releasing { lease, .. } = &mut self.state {
            leaving.extend(lease.take());
        }
        leaving
    }

    /// Begins the release of a holding, whose last leases were `last`. The holder of `lease` waits
    /// for the verdict. Without `honours_hold_time`, the name is free at once.
    pub(super) fn begin_release(
        &mut self,
        now: Moment,
        last: &[LocalLease],
        lease: Option<LeaseId>,
        honours_hold_time: bool,
    ) {
        let hold_times = last.iter().filter(|_| honours_hold_time).map(|lease| lease.keeps_until);
        let keeps_until = hold_times.max().unwrap_or(now);
        self.state = HoldingState::Releasing { lease, keeps_until, by_transition: false, locked_since: None };
        (self.retry_at, self.pause) = (now, FIRST_PAUSE);
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(self.state, HoldingState::Held(_))
    }

    /// Returns whether the name stays taken after the release of the holding.
    pub(super) fn keeps_name(&self, now: Moment) -> bool {
        self.kept_until(now).is_some()
    }

    /// Returns until when the name stays taken after the release of the holding, if it does.
    pub(super) fn kept_until(&self, now: Moment) -> Option<Moment> {
        match self.state {
            HoldingState::Releasing { keeps_until, .. } if keeps_until > now => Some(keeps_until),
            _ => None,
        }
    }

    /// Returns whether the holding may have ended before its release: no heartbeat renews it.
    pub(super) fn may_have_been_replaced(&self, now: Moment) -> bool {
        !self.is_held() && self.lifetime.ends_alone_by(now)
    }

    /// Raises the TTL of the holding in the store, and has the heartbeat renew it, if another lease
    /// of it asks for that.
    pub(super) fn raise_ttl(&mut self, now: Moment, ttl: Duration, is_renewed: bool) {
        if ttl > self.claim.ttl || (is_renewed && !self.claim.is_renewed) {
            self.claim.ttl = self.claim.ttl.max(ttl);
            self.claim.is_renewed |= is_renewed;
            self.extend_at = Some(now);
        }
    }

    /// Returns whether a lease of the holding asked for more than the store has.
    pub(super) fn wants_more(&self) -> bool {
        self.claim.ttl > self.lifetime.ttl || (self.claim.is_renewed && !self.lifetime.is_renewed)
    }

    /// Judges how a holding ended that the store no longer has. `lost` is the last token of the
    /// name that was taken away, `latest` the last that was granted.
    pub(super) fn judge_end(&self, lost: i64, latest: i64) -> Verdict {
        let token = self.token.get();
        if is_on(Mutation::DoubtEveryEnd) {
            return Verdict::Unknown;
        }
        if is_on(Mutation::TrustRelease) || (lost < token && latest >= token) {
            Verdict::Held
        } else if !self.may_have_ended || lost == token {
            // No request of this client can have ended the holding.
            Verdict::Lost(LossCause::Superseded)
        } else {
            // The store knows only the last of several holdings that were taken away, and nothing
            // of a swept name.
            Verdict::Unknown
        }
    }

    /// Has a look decide whether the holding still exists. Until then, no heartbeat counts.
    pub(super) fn suspect(&mut self, heartbeat: &Heartbeat) {
        self.lifetime.doubt(heartbeat);
        self.looks.suspect();
    }

    /// Records that a look at the holding is in flight.
    pub(super) fn begin_look(&mut self) {
        self.looks.begin();
        if let Some(first) = self.amendments.front_mut().filter(|first| first.state == AmendmentState::Refused) {
            first.state = AmendmentState::LookingUp;
        }
    }

    /// Returns whether the engine must ask the store if the holding still exists: after a notice, a
    /// refused change or a possible loss, or for the verdict of a release.
    pub(super) fn needs_look(&self, epoch: Epoch) -> bool {
        let is_refused = self.amendments.front().is_some_and(|first| first.state != AmendmentState::Pending);
        let is_in_doubt = self.lifetime.is_doubted(epoch) || self.looks.is_suspected();
        self.is_held() && !self.looks.is_in_flight() && (is_in_doubt || is_refused || self.looks.has_leaving())
    }

    /// Returns whether a look may have found the holding with this token: its own, a token it is
    /// being raised to, or a former token.
    pub(super) fn has_token(&self, token: FencingToken) -> bool {
        let raised = self.amendments.iter().any(|other| other.amendment == Amendment::Raise(token));
        token == self.token || raised || self.former_tokens.contains(&token)
    }

    /// Returns the token with which the holding was granted.
    pub(super) fn first_token(&self) -> FencingToken {
        self.former_tokens.first().copied().unwrap_or(self.token)
    }

    /// Returns the next change to request from the store.
    pub(super) fn next_amendment(&self) -> Option<Amendment> {
        let first = self.amendments.front().filter(|first| self.is_held() && first.state == AmendmentState::Pending);
        first.map(|first| first.amendment)
    }

    /// Returns whether the holding is being changed to shared mode or given another token.
    pub(super) fn is_converting(&self) -> bool {
        self.amendments.iter().any(|other| other.amendment.is_conversion())
    }

    /// Returns whether the release of the holding may pass over entries that were not read.
    pub(super) fn may_pass_over_entries(&self) -> bool {
        self.claim.mode == Mode::Exclusive && !self.is_joined && !self.is_queue_checked
    }

    /// Returns whether another lease of its owner may share the holding, whatever that lease asks
    /// for.
    pub(super) fn can_be_entered(&self) -> bool {
        self.is_held() && self.claim.mode == Mode::Exclusive && !self.is_converting()
    }

    pub(super) fn is_being_raised_to(&self, latest: i64) -> bool {
        let raises_to_latest = |other: &Amending| matches!(other.amendment, Amendment::Raise(to) if to.get() == latest);
        self.token.get() != latest && self.amendments.iter().any(raises_to_latest)
    }

    /// Counts a release without effect. Returns `true` after too many.
    pub(super) fn count_ineffective_release(&mut self) -> bool {
        self.ineffective_releases += 1;
        self.ineffective_releases > MAX_INEFFECTIVE_RELEASES
    }

    /// Sets whether the release is a transition decided from the queue as read, instead of a plain
    /// statement.
    pub(super) fn release_by_transition(&mut self, is_by_transition: bool) {
        if let HoldingState::Releasing { by_transition, .. } = &mut self.state {
            *by_transition = is_by_transition;
        }
    }

    /// Puts off a release that meets a row lock. Returns for how long it has met one.
    pub(super) fn put_off_release(&mut self, now: Moment) -> Duration {
        let HoldingState::Releasing { locked_since, .. } = &mut self.state else {
            return Duration::ZERO;
        };
        if locked_since.is_none() {
            self.pause = LOCKED_PAUSE;
        }
        let since = *locked_since.get_or_insert(now);
        self.put_off(now);
        now.since(since)
    }

    /// Puts off the next statement about the holding, longer each time.
    pub(super) fn put_off(&mut self, now: Moment) {
        self.retry_after(now, if is_on(Mutation::RepeatAtOnce) { Duration::ZERO } else { self.pause });
        self.pause = (self.pause * 2).min(Duration::from_secs(1));
    }

    /// Sets when the next statement about the holding is sent. Without a heartbeat that keeps the
    /// holding, several statements come before its deadline.
    pub(super) fn retry_after(&mut self, now: Moment, pause: Duration) {
        let soon = self.lifetime.lasts_alone(now).map(|left| (left / 4).max(Duration::from_millis(5)));
        self.retry_at = now + soon.map_or(pause, |soon| pause.min(soon));
    }
}
