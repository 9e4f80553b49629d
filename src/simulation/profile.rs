//! The faults of a seed.

/// Chances in a thousand, per request or per step of the world.
#[derive(Clone, Copy, Debug)]
pub(super) struct Profile {
    pub(super) clients: u64,
    pub(super) names: u64,
    /// The store marks names with waiting entries (PostgreSQL).
    pub(super) marks: bool,
    pub(super) lost_requests: u64,
    pub(super) lost_replies: u64,
    /// Statements that take effect long after their client stopped waiting.
    pub(super) late_requests: u64,
    pub(super) slow_commits: u64,
    pub(super) rollbacks: u64,
    pub(super) pauses: u64,
    pub(super) crashes: u64,
    pub(super) foreign_locks: u64,
    pub(super) evictions: u64,
    pub(super) fences: u64,
    /// Held leases that are extended, downgraded, given a higher token, or exported.
    pub(super) changes: u64,
    /// Holders that are asked to release a name by a client that wants it.
    pub(super) asks: u64,
    pub(super) outages: u64,
    /// The store is replaced by an older copy of itself.
    pub(super) failovers: u64,
    /// Clients that shut down.
    pub(super) closes: u64,
    pub(super) given_owners: u64,
    pub(super) shared: u64,
    /// The sweeper deletes unused rows long after the faults, and the callers go on.
    pub(super) sweeps: bool,
    /// Waits behind many tries of the same client, of which the first is cancelled.
    pub(super) crowds: u64,
    /// The greatest difference between the rates of two clocks, in thousandths.
    pub(super) drift: u64,
}

impl Profile {
    /// Chooses the faults of a seed: a sixth of the seeds has delays only, a sixth has only foreign
    /// transactions that lock rows, and a sixth has failovers.
    pub(super) fn from_seed(seed: u64) -> Self {
        let calm = Self {
            clients: 1 + seed % 3,
            names: 1 + (seed / 3) % 2,
            marks: (seed / 6).is_multiple_of(2),
            lost_requests: 0,
            lost_replies: 0,
            late_requests: 0,
            slow_commits: 0,
            rollbacks: 0,
            pauses: 0,
            crashes: 0,
            foreign_locks: 0,
            evictions: 0,
            fences: 100,
            changes: 100,
            asks: 100,
            outages: 0,
            failovers: 0,
            closes: 0,
            given_owners: 150,
            shared: 300,
            sweeps: seed % 5 == 4,
            crowds: if seed % 7 == 6 { 100 } else { 0 },
            drift: 2,
        };
        match (seed / 24) % 6 {
            0 => Self { given_owners: 150 * ((seed / 144) % 2), ..calm },
            1 => Self { lost_requests: 30, lost_replies: 40, late_requests: 20, rollbacks: 10, ..calm },
            2 => Self { pauses: 8, crashes: 4, evictions: 10, outages: 3, closes: 4, foreign_locks: 10, ..calm },
            3 => Self { foreign_locks: 60, fences: 300, given_owners: 600 * ((seed / 144) % 2), ..calm },
            4 => Self { failovers: 6, lost_replies: 10, fences: 200, given_owners: 150 * ((seed / 144) % 2), ..calm },
            _ => Self {
                lost_requests: 20,
                lost_replies: 30,
                late_requests: 20,
                slow_commits: 20,
                rollbacks: 10,
                pauses: 6,
                crashes: 3,
                foreign_locks: 8,
                evictions: 8,
                outages: 2,
                closes: 3,
                given_owners: if (seed / 144).is_multiple_of(2) { 100 } else { 700 },
                ..calm
            },
        }
    }

    /// Returns whether nothing fails, so that no lease may be lost.
    pub(super) fn is_calm(&self) -> bool {
        self.lost_requests
            + self.lost_replies
            + self.pauses
            + self.crashes
            + self.evictions
            + self.outages
            + self.failovers
            + self.slow_commits
            == 0
    }

    /// Returns whether a lease may expire although its client goes on.
    pub(super) fn may_expire(&self) -> bool {
        self.pauses + self.crashes + self.outages + self.failovers + self.slow_commits > 0
    }

    /// Returns whether no statement is delayed either, so that the order of arrival is exact, and
    /// every request succeeds.
    pub(super) fn is_quick(&self) -> bool {
        self.is_calm() && self.foreign_locks == 0
    }
}
