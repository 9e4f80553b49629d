//! The heartbeats and the notices of clients.

use super::{Client, Key, Memory, MustWait, Prepared, Strength, Write};
use crate::mutation::{Mutation, is_on};
use crate::protocol::{ClientId, Response};

impl Memory {
    pub(super) fn register(&self, id: ClientId, now: i64) -> Result<Prepared, MustWait> {
        if self.is_locked(&Key::Client(id), Strength::Ending) {
            return Err(MustWait);
        }
        let notice = self.clients.get(&id).map_or(first_notice(now), |client| client.notice);
        Ok(Prepared::new(Response::Registered(notice)).write(Write::Client(id, Client { beat_at: now, notice })))
    }

    pub(super) fn beat(&self, id: ClientId, now: i64) -> Result<Prepared, MustWait> {
        let Some(client) = self.clients.get(&id) else {
            return Ok(Prepared::new(Response::Beat(None)));
        };
        if self.is_locked(&Key::Client(id), Strength::Ending) {
            return Err(MustWait);
        }
        let written = Client { beat_at: now, ..client.clone() };
        Ok(Prepared::new(Response::Beat(Some(client.notice))).write(Write::Client(id, written)))
    }

    /// Adds a notice to the clients that lose a holding. `None`: one of their rows is locked.
    pub(super) fn notices(&self, losers: &[ClientId], now: i64) -> Option<Vec<Write>> {
        let mut losers = losers.to_vec();
        losers.sort();
        losers.dedup();
        // A client without a row gets one: a registration under way must wait for this transaction
        // and read the notice.
        let write = |id: ClientId| {
            let next = |client: &Client| Client { notice: client.notice + 1, ..client.clone() };
            Write::Client(id, self.clients.get(&id).map_or(Client { beat_at: 0, notice: first_notice(now) }, next))
        };
        if losers.iter().any(|id| self.is_locked(&Key::Client(*id), Strength::Ending)) {
            return None;
        }
        Some(losers.into_iter().map(write).collect())
    }
}

/// Returns the first notice of a row: the time, so that it differs from the notices of an earlier
/// row, which the sweeper has deleted.
fn first_notice(now: i64) -> i64 {
    if is_on(Mutation::RestartNotices) { 1 } else { now }
}
