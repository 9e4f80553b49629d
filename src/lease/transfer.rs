//! Hands a held lease to another process.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::handle::{Lease, LeaseDetails};
use super::refusal::{ENTERED_AGAIN, refusal_error};
use super::request::TRY_TIMEOUT;
use crate::client::Client;
use crate::engine::{Exported, HoldTime, LeaseSpec, Refusal, WaitMode};
use crate::error::{Error, LossCause, Result};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{AcquisitionId, Mode};
use crate::token::FencingToken;

/// A held lease as a text, which another process can [resume](crate::Locks::resume) within its TTL.
///
/// Made by [`Lease::export`](crate::Lease::export). Any process that has the text can resume the
/// lease: treat it like the lease. A lease that is resumed twice is held twice by the same owner,
/// and the name is free after both releases. (A [shared](crate::LeaseRequest::shared) lease, or a
/// permit, can be resumed once.)
///
/// ```
/// # async fn example(locks: sqlock::Locks, lease: sqlock::Lease) -> sqlock::Result<()> {
/// let text = lease.export()?.to_string();
/// // … in another process:
/// let lease = locks.resume(text.parse()?).await?;
/// # lease.release().await
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "an exported lease is held until its TTL unless it is resumed"]
pub struct ExportedLease {
    name: LockName,
    owner: Owner,
    exported: Exported,
    mode: Mode,
    ttl: Duration,
}

impl ExportedLease {
    /// Returns the held name.
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// Returns the fencing token, which stays the same when the lease is resumed.
    pub fn token(&self) -> FencingToken {
        self.exported.token
    }
}

/// The first word of the text of an exclusive lease. The name comes last, because it may contain
/// any character.
const FORMAT: &str = "sqlock1";

/// The first word for a shared lease or permits: units and permits come before the name.
const FORMAT_OF_SHARED: &str = "sqlock1s";

impl fmt::Display for ExportedLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, owner, exported: Exported { id, token, .. }, mode, ttl } = self;
        let ttl = ttl.as_millis();
        match mode {
            Mode::Exclusive => write!(f, "{FORMAT}:{owner}:{id}:{token}:{ttl}:{name}"),
            Mode::Shared { units, permits } => {
                write!(f, "{FORMAT_OF_SHARED}:{owner}:{id}:{token}:{ttl}:{units}:{permits}:{name}")
            }
        }
    }
}

impl FromStr for ExportedLease {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = |reason| Error::InvalidExport { reason };
        let shared = text.split(':').next() == Some(FORMAT_OF_SHARED);
        let mut words = text.splitn(if shared { 8 } else { 6 }, ':');
        let mut word = || words.next().ok_or(invalid("it is cut off"));
        if ![FORMAT, FORMAT_OF_SHARED].contains(&word()?) {
            return Err(invalid("it does not begin with sqlock1"));
        }
        let owner: Owner = word()?.parse().map_err(|_| invalid("its owner is not 32 hexadecimal digits"))?;
        let id: AcquisitionId = word()?.parse().map_err(|_| invalid("its lease id is not 32 hexadecimal digits"))?;
        let token =
            word()?.parse().ok().and_then(FencingToken::new).ok_or(invalid("its token is not a positive number"))?;
        let ttl = word()?.parse().map(Duration::from_millis).map_err(|_| invalid("its TTL is not a number"))?;
        let mode = if shared {
            let mut number = || word()?.parse().ok().filter(|n| *n > 0).ok_or(invalid("its permits are not a number"));
            Mode::Shared { units: number()?, permits: number()? }
        } else {
            Mode::Exclusive
        };
        let name = LockName::new(word()?)?;
        Ok(Self { name, owner, exported: Exported { id, token }, mode, ttl })
    }
}

impl Lease {
    /// Exports the lease as a text that another process can [resume](crate::Locks::resume). Does no
    /// I/O. This process no longer renews the lease: resume it within the
    /// [remaining](Self::remaining) time, and [`extend`](Self::extend) it before the export if that
    /// time may be too short. Only the TTL of the request's options is kept: a resumed lease is
    /// renewed, and has no [`max_hold`](crate::LeaseRequest::max_hold) and no
    /// [`hold_at_least`](crate::LeaseRequest::hold_at_least).
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the lease has ended; [`Error::Conversion`] when its owner has acquired
    /// the name more than once. In both cases the lease is dropped, which releases it.
    pub fn export(self) -> Result<ExportedLease> {
        self.held()?;
        let mut lease = self;
        let Some(held) = lease.held.take() else {
            return Err(Error::Closed);
        };
        match held.export() {
            Ok(exported) => {
                let LeaseDetails { name, owner, mode, ttl, .. } = lease.details.clone();
                Ok(ExportedLease { name, owner, exported, mode, ttl })
            }
            Err(held) => {
                lease.held = Some(*held);
                lease.held()?;
                Err(Error::Conversion { attempted: "export", name: lease.name().clone(), reason: ENTERED_AGAIN })
            }
        }
    }

    /// Takes over an exported lease.
    pub(crate) async fn resume(client: &Arc<Client>, exported: ExportedLease) -> Result<Self> {
        let ExportedLease { name, owner, exported, mode, ttl } = exported;
        if !client.settings.is_null {
            client.settings.check_ttl("the TTL of an exported lease", ttl)?;
        }
        let spec = LeaseSpec {
            name: name.clone(),
            owner,
            reenters: true,
            mode,
            ttl,
            is_renewed: true,
            hold_time: HoldTime::default(),
            label: "".into(),
            wait_mode: WaitMode::Try(client.now() + TRY_TIMEOUT),
        };
        let start = Instant::now();
        match client.coordinator.resume(spec, exported).await {
            Ok(mut held) => {
                // Until this call, the text can be resumed again.
                held.deliver();
                Ok(Self::new(Arc::clone(client), held, ttl, HoldTime::default()))
            }
            Err(Refusal::Lost) => Err(Error::Lost { name, token: exported.token, cause: LossCause::Superseded }),
            Err(refusal) => Err(refusal_error(client, refusal, name, start)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exported_lease_round_trips_as_text() -> Result<()> {
        for mode in [Mode::Exclusive, Mode::READ, Mode::Shared { units: 2, permits: 3 }] {
            let name = LockName::new("odd: name:\u{e1}\n")?;
            let token = FencingToken::new(7).ok_or(Error::InvalidOwner)?;
            let exported = Exported { id: AcquisitionId::from_u128(9), token };
            let exported =
                ExportedLease { name, owner: Owner::random(), exported, mode, ttl: Duration::from_millis(1500) };
            let read: ExportedLease = exported.to_string().parse()?;
            assert_eq!(read.to_string(), exported.to_string());
            assert_eq!((read.name(), read.mode), (exported.name(), mode));
        }
        Ok(())
    }

    #[test]
    fn truncated_text_is_refused() {
        for text in ["", "sqlock1", "sqlock1:x:y:1:1000:a", "sqlock2:::::", "plain"] {
            assert!(text.parse::<ExportedLease>().is_err(), "{text}");
        }
    }
}
