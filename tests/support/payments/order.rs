//! The orders of the storm. The name of an order is its idempotency key, and the body of its
//! requests.

/// The place at which an order is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Mode {
    /// In this database, in the transaction of the claim.
    Transaction,
    /// At the provider, under a lease.
    Lease,
}

impl Mode {
    pub(super) const BOTH: [Self; 2] = [Self::Transaction, Self::Lease];

    /// Returns the namespace of its keys, which is also its name in the ledger.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Transaction => "transaction",
            Self::Lease => "lease",
        }
    }

    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Transaction => "/transaction",
            Self::Lease => "/lease",
        }
    }
}

/// The treatment of an order by the provider, apart from faults of single calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProviderBehaviour {
    Charged,
    /// Always refused, and never charged.
    Refused,
    /// Charged, without a confirmation.
    Unconfirmed,
    /// Never charged, and never refused either.
    Uncharged,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Order {
    pub(super) mode: Mode,
    pub(super) name: String,
}

impl Order {
    /// Returns the order with this number. Of a hundred orders under a lease, two are refused, two
    /// are charged without a confirmation, and one is not charged. The outcomes of the last three
    /// stay unknown until the end of the storm, so there are few: every server lists them
    /// repeatedly.
    pub(super) fn numbered(number: usize) -> Self {
        let (mode, fate) = match number % 200 {
            1 | 101 => (Mode::Lease, "refused"),
            11 | 111 => (Mode::Lease, "unconfirmed"),
            21 => (Mode::Lease, "uncharged"),
            odd if odd % 2 == 1 => (Mode::Lease, "charged"),
            _ => (Mode::Transaction, "charged"),
        };
        Self { mode, name: format!("{fate}/{number}") }
    }

    pub(super) fn provider_behaviour(name: &str) -> ProviderBehaviour {
        match name.split('/').next() {
            Some("refused") => ProviderBehaviour::Refused,
            Some("unconfirmed") => ProviderBehaviour::Unconfirmed,
            Some("uncharged") => ProviderBehaviour::Uncharged,
            _ => ProviderBehaviour::Charged,
        }
    }
}
