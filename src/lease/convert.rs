//! Converts a held lease: to a higher token, or to a shared lease.

use super::handle::Lease;
use super::refusal::ENTERED_AGAIN;
use crate::engine::{Amendment, NotAmended};
use crate::error::{Error, Result};
use crate::protocol::Mode;
use crate::token::FencingToken;

impl Lease {
    /// Raises the token of an exclusive lease that was acquired once. Returns `None`, and releases
    /// the lease, when the token cannot be raised. Dropping the future releases the lease.
    pub(crate) async fn raise_token(mut self, to: FencingToken) -> Result<Option<Self>> {
        let Ok(held) = self.held() else {
            return Ok(None);
        };
        match held.amend(Amendment::Raise(to)).await {
            Ok(()) => {
                self.details.token = to;
                Ok(Some(self))
            }
            Err(NotAmended::Failed(failure)) => Err(failure.into_error()),
            Err(NotAmended::Lost(_) | NotAmended::EnteredAgain | NotAmended::Locked) => Ok(None),
        }
    }

    /// Converts the lease to a [shared](crate::LeaseRequest::shared) one, without a gap for a
    /// writer. Readers at the head of the queue are granted the name at once. The token stays the
    /// same.
    ///
    /// There is no upgrade: two readers that both wait to become writers would wait for ever.
    /// Release the lease and acquire again.
    ///
    /// # Errors
    ///
    /// [`Error::Conversion`] when its owner has acquired it more than once, it is a permit, or a
    /// transaction that it [fences](Self::fence) has kept it locked for ten seconds: nothing has
    /// changed. [`Error::Lost`] when it has ended. After any other error the lease is
    /// lost, because its state is unknown.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future after its first poll loses the lease.
    pub async fn downgrade(&mut self) -> Result<()> {
        let name = self.name().clone();
        let refused = |reason| Err(Error::Conversion { attempted: "downgrade", name, reason });
        self.held()?;
        match self.details.mode {
            Mode::READ => return Ok(()),
            Mode::Exclusive => {}
            Mode::Shared { .. } => {
                return refused("permits of a semaphore are shared already");
            }
        }
        // A dropped future drops the handle, which releases the lease: its mode is not known then.
        let Some(held) = self.held.take() else {
            return Err(Error::Closed);
        };
        let amended = held.amend(Amendment::Downgrade).await;
        self.held = Some(held);
        match amended {
            Ok(()) => {
                self.details.mode = Mode::READ;
                Ok(())
            }
            Err(NotAmended::EnteredAgain) => refused(ENTERED_AGAIN),
            Err(NotAmended::Locked) => {
                refused("a transaction that it fences keeps it locked; end the transaction first")
            }
            Err(NotAmended::Lost(cause)) => Err(self.loss_error(cause)),
            Err(NotAmended::Failed(failure)) => Err(failure.into_error()),
        }
    }
}
