//! The holders of names on several independent databases, counted.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde_json::{Value, json};
use sqlock::inspect::LeaseInfo;
use sqlock::{FencingToken, LockName, Owner};

/// An owner of a name, with its leases on some of the databases.
pub struct Holder {
    /// The leases on the databases that grant it the name, the longest first.
    leases: Vec<LeaseInfo>,
}

/// Merges the leases that the databases list: one owner of a name is one holder. The holders of a
/// name follow each other, the holder on the most databases first.
pub fn merge(leases: impl IntoIterator<Item = LeaseInfo>) -> Vec<Holder> {
    let mut leases_by_holder: HashMap<(LockName, Option<Owner>), Vec<LeaseInfo>> = HashMap::new();
    for held in leases {
        leases_by_holder.entry((held.name.clone(), held.owner)).or_default().push(held);
    }
    let mut holders: Vec<Holder> = leases_by_holder.into_values().map(|leases| Holder { leases }).collect();
    for holder in &mut holders {
        holder.leases.sort_by_key(|held| Reverse(held.remaining));
    }
    holders.sort_by_cached_key(|holder| {
        let lease = &holder.leases[0];
        let owner = lease.owner.map(|owner| owner.to_string());
        (lease.name.clone(), Reverse(holder.votes()), lease.acquired_at, owner)
    });
    holders
}

impl Holder {
    /// Returns the number of databases on which the owner holds the name.
    pub fn votes(&self) -> usize {
        self.leases.len()
    }

    /// Returns the lease with which the majority ends: the shortest of the longest leases that make
    /// a majority. Without a majority, the longest lease.
    pub fn decisive(&self, needed: usize) -> &LeaseInfo {
        self.leases.get(needed - 1).unwrap_or(&self.leases[0])
    }

    /// Returns the token by which the other subcommands find the holding.
    pub fn token(&self, needed: usize) -> FencingToken {
        let tokens = self.leases.iter().map(|held| held.token).collect();
        token_of_majority(tokens, needed).unwrap_or(self.leases[0].token)
    }

    pub fn to_json(&self, needed: usize) -> Value {
        let mut shown = json!(self.decisive(needed));
        shown["token"] = json!(self.token(needed).get());
        shown["databases"] = json!(self.votes());
        shown["has_majority"] = json!(self.votes() >= needed);
        shown
    }
}

/// Returns the highest token that a majority has or exceeds: a database that voted late may have a
/// higher token. Without a majority, the highest token.
fn token_of_majority(mut tokens: Vec<FencingToken>, needed: usize) -> Option<FencingToken> {
    tokens.sort_unstable_by(|a, b| b.cmp(a));
    tokens.get(needed - 1).or(tokens.first()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_vote_does_not_change_the_token() {
        let find = |tokens: &[i64]| {
            let tokens = tokens.iter().filter_map(|token| FencingToken::new(*token)).collect();
            token_of_majority(tokens, 2).map(FencingToken::get)
        };
        assert_eq!(find(&[7, 7, 9]), Some(7));
        assert_eq!(find(&[9, 7]), Some(7));
        assert_eq!(find(&[7, 7, 5]), Some(7));
        assert_eq!(find(&[7]), Some(7));
    }
}
