//! The invariants of a run.

use std::time::Duration;

use crate::backend::memory::End;
use crate::engine::Verdict;
use crate::error::LossCause;
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{AcquisitionId, Mode};
use crate::token::FencingToken;

/// A lease that a caller believes in.
#[derive(Clone, Debug)]
pub(super) struct Belief {
    pub(super) client: usize,
    pub(super) name: LockName,
    /// The acquisition, which other leases of the owner may share.
    pub(super) id: AcquisitionId,
    pub(super) owner: Owner,
    pub(super) mode: Mode,
    /// The requested TTL.
    pub(super) ttl: Duration,
    pub(super) token: FencingToken,
    /// The token of an unanswered raise, which the lease may have.
    pub(super) may_have: Option<FencingToken>,
    /// Whether a heartbeat renews the lease.
    pub(super) is_renewed: bool,
    /// Until when the caller believes in the lease, in virtual time.
    pub(super) until: u64,
    /// Until when the name stays taken even if the lease is released.
    pub(super) keeps_until: u64,
}

/// Checks that no two beliefs in one name exclude each other, and that no semaphore has too many
/// held permits.
pub(super) fn exclusion<'a>(now: u64, beliefs: impl Iterator<Item = &'a Belief>) -> Result<(), String> {
    let held: Vec<&Belief> = beliefs.filter(|belief| belief.until > now).collect();
    for (i, a) in held.iter().enumerate() {
        for b in &held[i + 1..] {
            if a.name != b.name || a.owner == b.owner {
                continue;
            }
            if a.mode == Mode::Exclusive || b.mode == Mode::Exclusive {
                return Err(format!(
                    "two holders of {}: client {} (token {}) and client {} (token {})",
                    a.name, a.client, a.token, b.client, b.token
                ));
            }
        }
        if let Mode::Shared { permits, .. } = a.mode {
            let taken: u64 = held.iter().filter(|b| b.name == a.name).map(|b| b.mode.units()).sum();
            if taken > u64::from(permits) {
                return Err(format!("{taken} units of {} held, of {permits}", a.name));
            }
        }
    }
    Ok(())
}

/// Compares the verdict of a release with how and when the holding ended in the store. `asked_at`:
/// when the caller released the lease.
pub(super) fn verdict(
    name: &LockName,
    token: FencingToken,
    verdict: &Verdict,
    end: Option<(End, i64)>,
    asked_at: i64,
) -> Result<(), String> {
    let taken_at = end.filter(|(end, _)| *end != End::Released).map(|(_, at)| at);
    match verdict {
        Verdict::Held if taken_at.is_some_and(|at| at < asked_at) => {
            Err(format!("the release of {name}, token {token}, ended with Ok, although it was {end:?}"))
        }
        Verdict::Lost(LossCause::Superseded) if taken_at.is_none() => {
            Err(format!("the release of {name}, token {token}, ended with Lost, although it was {end:?}"))
        }
        _ => Ok(()),
    }
}
