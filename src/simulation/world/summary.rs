//! The statistics of runs.

use std::fmt;

/// Counts of events, summed over runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(super) grants: u64,
    pub(super) lost: u64,
    pub(super) refused: u64,
    pub(super) timeouts: u64,
    pub(super) failed: u64,
    pub(super) released: u64,
    pub(super) unknown: u64,
    pub(super) fenced: u64,
    pub(super) statements: u64,
    pub(super) evicted: u64,
    pub(super) asked: u64,
}

impl Summary {
    pub(in crate::simulation) fn add(&mut self, other: &Self) {
        self.grants += other.grants;
        self.lost += other.lost;
        self.refused += other.refused;
        self.timeouts += other.timeouts;
        self.failed += other.failed;
        self.released += other.released;
        self.unknown += other.unknown;
        self.fenced += other.fenced;
        self.statements += other.statements;
        self.evicted += other.evicted;
        self.asked += other.asked;
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { grants, lost, refused, timeouts, failed, released, unknown, fenced, statements, evicted, asked } =
            self;
        write!(
            f,
            "{grants} grants, {released} releases ({unknown} unknown), {lost} lost, {evicted} evicted, {asked} asked, {refused} refused, \
             {timeouts} timed out, {failed} failed, {fenced} fenced transactions, {statements} statements"
        )
    }
}
