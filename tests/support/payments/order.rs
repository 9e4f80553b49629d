//! The orders of the storm. The name of an order is its idempotency key, and the body of its
//! requests.

/// Where the charge of an order is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Mode {
    /// In this database, in the transaction of the claim.
    Transaction,
    /// At the provider, under a lease.
    Lease,
}

impl Mode {
    pub(super) const BOTH: [Self; 2] = [Self::Transaction, Self::Lease];

    /// The namespace of its keys, and its name in the ledger.
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

/// How the provider treats an order, apart from the faults that hit one call or another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Charged,
    /// Always refused, and never charged.
    Refused,
    /// Charged, which no answer confirms.
    Unconfirmed,
    /// Never charged, which no answer says.
    Uncharged,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Order {
    pub(super) mode: Mode,
    pub(super) name: String,
}

impl Order {
    /// Of fifty orders under a lease, two are refused, four are charged without a confirmation, and
    /// two are not charged.
    pub(super) fn numbered(number: usize) -> Self {
        let (mode, fate) = match number % 100 {
            1 | 51 => (Mode::Lease, "refused"),
            11 | 31 | 61 | 81 => (Mode::Lease, "unconfirmed"),
            21 | 71 => (Mode::Lease, "uncharged"),
            odd if odd % 2 == 1 => (Mode::Lease, "charged"),
            _ => (Mode::Transaction, "charged"),
        };
        Self { mode, name: format!("{fate}/{number}") }
    }

    pub(super) fn fate_of(name: &str) -> Fate {
        match name.split('/').next() {
            Some("refused") => Fate::Refused,
            Some("unconfirmed") => Fate::Unconfirmed,
            Some("uncharged") => Fate::Uncharged,
            _ => Fate::Charged,
        }
    }
}
