//! Which faults a seed may meet.

/// Chances in a thousand, per request or per step of the world.
#[derive(Clone, Copy, Debug)]
pub(super) struct Profile {
    pub(super) clients: u64,
    pub(super) names: u64,
    /// The store marks names with waiting entries (PostgreSQL).
    pub(super) marks: bool,
    pub(super) lost_requests: u64,
    pub(super) lost_replies: u64,
    /// Statements that take effect long after their client gave up.
    pub(super) late_requests: u64,
    pub(super) slow_commits: u64,
    pub(super) rollbacks: u64,
    pub(super) pauses: u64,
    pub(super) crashes: u64,
    pub(super) strangers: u64,
    pub(super) evictions: u64,
    pub(super) fences: u64,
    /// Leases that are extended, shared, given a higher token, or handed to another process, while
    /// they are held.
    pub(super) changes: u64,
    /// Holders that are asked to release a name by a client that wants it.
    pub(super) asks: u64,
    pub(super) outages: u64,
    /// The store is replaced by an older copy of itself.
    pub(super) failovers: u64,
    /// Clients that shut down in order.
    pub(super) closes: u64,
    pub(super) given_owners: u64,
    pub(super) shared: u64,
    /// Clocks run at rates that differ by up to so many thousandths.
    pub(super) drift: u64,
}

impl Profile {
    /// A sixth of the seeds meets no fault but delay, a sixth only strangers who lock the rows of
    /// names, and a sixth failovers.
    pub(super) fn of(seed: u64) -> Self {
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
            strangers: 0,
            evictions: 0,
            fences: 100,
            changes: 100,
            asks: 100,
            outages: 0,
            failovers: 0,
            closes: 0,
            given_owners: 150,
            shared: 300,
            drift: 2,
        };
        match (seed / 24) % 6 {
            0 => Self { given_owners: 150 * ((seed / 144) % 2), ..calm },
            1 => Self { lost_requests: 30, lost_replies: 40, late_requests: 20, rollbacks: 10, ..calm },
            2 => Self { pauses: 8, crashes: 4, evictions: 10, outages: 3, closes: 4, strangers: 10, ..calm },
            3 => Self { strangers: 60, fences: 300, given_owners: 600 * ((seed / 144) % 2), ..calm },
            4 => Self { failovers: 6, lost_replies: 10, fences: 200, given_owners: 150 * ((seed / 144) % 2), ..calm },
            _ => Self {
                lost_requests: 20,
                lost_replies: 30,
                late_requests: 20,
                slow_commits: 20,
                rollbacks: 10,
                pauses: 6,
                crashes: 3,
                strangers: 8,
                evictions: 8,
                outages: 2,
                closes: 3,
                given_owners: if (seed / 144).is_multiple_of(2) { 100 } else { 700 },
                ..calm
            },
        }
    }

    /// Nothing fails: no lease may be lost.
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

    /// Nothing delays a statement either: the order of arrival is exact, and every request
    /// succeeds.
    pub(super) fn is_quick(&self) -> bool {
        self.is_calm() && self.strangers == 0
    }
}
