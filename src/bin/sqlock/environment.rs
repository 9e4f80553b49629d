//! What a command finds in its environment: the runs that it is inside of.

use sqlock::Owner;

/// Who holds, for a `sqlock run` of the same name inside the command.
pub const OWNER_VARIABLE: &str = "SQLOCK_OWNER";

/// The owners of the runs around that one, if there are any.
pub const OUTER_OWNERS_VARIABLE: &str = "SQLOCK_OUTER_OWNERS";

/// The owners of the runs that this process is inside of.
pub fn enclosing_owners() -> Vec<Owner> {
    let outer = [OWNER_VARIABLE, OUTER_OWNERS_VARIABLE].map(|variable| std::env::var(variable).unwrap_or_default());
    outer.iter().flat_map(|owners| owners.split(',')).filter_map(|owner| owner.parse().ok()).collect()
}
