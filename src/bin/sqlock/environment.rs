//! The environment of the command: the owners of the runs that enclose this process.

use sqlock::Owner;
use sqlock::inspect::LeaseInfo;

/// The name of the lease.
pub const NAME_VARIABLE: &str = "SQLOCK_NAME";

/// The owner of the lease, for a `sqlock run` of the same name inside the command.
pub const OWNER_VARIABLE: &str = "SQLOCK_OWNER";

/// The owners of the runs that enclose the innermost run, separated by commas.
pub const OUTER_OWNERS_VARIABLE: &str = "SQLOCK_OUTER_OWNERS";

/// Returns the owners of all runs that enclose this process. Owners that cannot be read are left out.
pub fn enclosing_owners() -> Vec<Owner> {
    let outer = [OWNER_VARIABLE, OUTER_OWNERS_VARIABLE].map(|variable| std::env::var(variable).unwrap_or_default());
    outer.iter().flat_map(|owners| owners.split(',')).filter_map(|owner| owner.parse().ok()).collect()
}

/// Returns whether one of the runs that enclose this process has this owner. A lease that enters
/// the lease of that run has the same token.
pub fn is_enclosing(owner: Owner) -> bool {
    enclosing_owners().contains(&owner)
}

/// Returns whether one of these owners has the lease.
pub fn is_owned_by(owners: &[Owner], lease: &LeaseInfo) -> bool {
    lease.owner.is_some_and(|owner| owners.contains(&owner))
}
