//! Turning a held lease into another one: a higher token, or shared.

use super::handle::Lease;
use crate::engine::{Amendment, NotAmended};
use crate::error::{Error, Result};
use crate::protocol::Mode;
use crate::token::FencingToken;

impl Lease {
    /// Raises the token of an exclusive lease that has been entered once. `Ok(None)`: it could not be raised, and is given back.
    /// When the future is dropped the lease goes back.
    pub(crate) async fn raise_token(mut self, to: FencingToken) -> Result<Option<Self>> {
        match self.held()?.amend(Amendment::Raise(to)).await {
            Ok(()) => {
                self.details.token = to;
                Ok(Some(self))
            }
            Err(NotAmended::Failed(failure)) => Err(failure.into_error()),
            Err(NotAmended::Lost(_) | NotAmended::EnteredAgain) => Ok(None),
        }
    }

    /// Turns the lease into a [shared](crate::LeaseRequest::shared) one, without a gap in which a writer could come in. Readers that
    /// wait next in line come in at once. The token stays the same.
    ///
    /// There is no way back: two readers that both wait to become writers would wait for ever. Release it and acquire again.
    ///
    /// # Errors
    ///
    /// [`Error::Conversion`] when its owner has entered more than once, or it is one of several permits: nothing has changed.
    /// [`Error::Lost`] when it has ended. After any other error the lease is lost, for it is not known what it was turned into.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future after its first poll loses the lease.
    pub async fn downgrade(&mut self) -> Result<()> {
        let name = self.name().clone();
        let held = self.held()?;
        match self.details.mode {
            Mode::READ => return Ok(()),
            Mode::Exclusive => {}
            Mode::Shared { .. } => {
                return Err(Error::Conversion { name, reason: "permits of a semaphore are shared already" });
            }
        }
        match held.amend(Amendment::Downgrade).await {
            Ok(()) => {
                self.details.mode = Mode::READ;
                Ok(())
            }
            Err(NotAmended::EnteredAgain) => {
                let reason = "its owner has entered more than once; give the other holds back first";
                Err(Error::Conversion { name, reason })
            }
            Err(NotAmended::Lost(cause)) => Err(self.loss_error(cause)),
            Err(NotAmended::Failed(failure)) => Err(failure.into_error()),
        }
    }
}
