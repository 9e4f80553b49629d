//! The rows of the tables.

use std::time::Duration;

use crate::backend::micros;
use crate::mutation::{Mutation, is_on};
use crate::owner::Owner;
use crate::protocol::{AcquisitionId, Claim, ClientId, EntryState, Granted, Holder, Mode};
use crate::token::FencingToken;

/// A row of `sqlock_client`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Client {
    pub(crate) beat_at: i64,
    pub(crate) notice: i64,
}

/// A row of `sqlock_lease`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) holder: Holder,
    pub(crate) owner: Option<Owner>,
    pub(crate) client: Option<ClientId>,
    pub(crate) token: i64,
    pub(crate) ttl: i64,
    pub(crate) expires_at: i64,
    pub(crate) waiting: i64,
    pub(crate) lost: i64,
    pub(crate) asked: i64,
}

/// A row of `sqlock_entry`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) client: Option<ClientId>,
    pub(crate) owner: Option<Owner>,
    pub(crate) is_renewed: bool,
    pub(crate) mode: Mode,
    pub(crate) state: EntryState,
    pub(crate) arrived: i64,
    pub(crate) ttl: i64,
    pub(crate) expires_at: i64,
}

pub(super) fn remaining(until: i64, now: i64) -> Option<Duration> {
    u64::try_from(until - now).ok().filter(|us| *us > 0).map(Duration::from_micros)
}

impl Lease {
    pub(super) fn free() -> Self {
        let (holder, owner, client) = (Holder::Nobody, None, None);
        Self { holder, owner, client, token: 0, ttl: 0, expires_at: 0, waiting: 0, lost: 0, asked: 0 }
    }

    pub(super) fn next_token(&self, now: i64) -> i64 {
        if is_on(Mutation::RestartTokens) && self.holder == Holder::Nobody {
            return 1;
        }
        let next = if is_on(Mutation::RepeatTokens) { self.token } else { self.token + 1 };
        now.max(next)
    }

    /// Grants a claim that has no entry.
    pub(super) fn grant(&mut self, claim: &Claim, now: i64) -> Granted {
        self.grant_to(claim.id, Some(claim.owner), claim.is_renewed.then_some(claim.client), claim.ttl, now)
    }

    pub(super) fn grant_to(
        &mut self,
        id: AcquisitionId,
        owner: Option<Owner>,
        client: Option<ClientId>,
        ttl: Duration,
        now: i64,
    ) -> Granted {
        self.token = self.next_token(now);
        self.holder = Holder::Lease(id);
        (self.owner, self.client) = (owner, client);
        self.ttl = micros(ttl);
        self.expires_at = now + self.ttl;
        Granted { id, token: positive(self.token) }
    }

    /// Grants a share to a claim that has no entry. Returns the grant and the entry.
    pub(super) fn share(&mut self, claim: &Claim, now: i64) -> (Granted, Entry) {
        self.token = self.next_token(now);
        (self.holder, self.client, self.owner) = (Holder::Entries, None, None);
        let client = claim.is_renewed.then_some(claim.client);
        let entry = Entry::new(claim, EntryState::Holding(self.token), client, 0, now + micros(claim.ttl));
        (Granted { id: claim.id, token: positive(self.token) }, entry)
    }

    pub(super) fn end(&mut self) {
        (self.holder, self.owner, self.client, self.expires_at) = (Holder::Nobody, None, None, 0);
    }
}

/// Every token is positive: it is at least the database's clock.
pub(super) fn positive(token: i64) -> FencingToken {
    FencingToken::new(token.max(1)).unwrap_or_else(|| unreachable!("positive"))
}

impl Entry {
    pub(super) fn new(
        claim: &Claim,
        state: EntryState,
        client: Option<ClientId>,
        arrived: i64,
        expires_at: i64,
    ) -> Self {
        let Claim { owner, is_renewed, mode, ttl, .. } = *claim;
        Self { client, owner: Some(owner), is_renewed, mode, state, arrived, ttl: micros(ttl), expires_at }
    }

    /// Returns the client whose heartbeat will renew the holding of the entry.
    pub(super) fn renewing_client(&self) -> Option<ClientId> {
        self.client.filter(|_| self.is_renewed)
    }
}
