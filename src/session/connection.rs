//! The connection that session locks live on.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::liveness::Bond;
use crate::backend::Anchor;
use crate::clock::Moment;
use crate::error::{Fault, LossCause};

/// How often the server is asked whether the session is still there, or the directory whether the files are.
const KEEP_ALIVE: Duration = Duration::from_secs(1);

/// How long the connection is kept when nothing is locked any more: whoever has locked often locks again soon.
const LINGER: Duration = Duration::from_secs(5);

/// The most that a statement may take while no lock hangs on the answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(4);

/// The connection.
pub(super) struct Line {
    pub(super) anchor: Box<dyn Anchor>,
    pub(super) bond: Tie,
    /// When the last statement was sent that was answered.
    pub(super) heard: Instant,
    /// How many names are locked, and since when none.
    pub(super) locked: usize,
    pub(super) idle_since: Instant,
}

/// Why a statement did not do what it should.
pub(super) enum Failure {
    /// It was refused, and the connection goes on.
    Refused(sqlx::Error),
    /// Nothing is known of the connection any more.
    Lost(String),
}

impl Line {
    /// A connection that was asked for at that moment.
    pub(super) fn new(anchor: Box<dyn Anchor>, asked: Moment) -> Self {
        let now = Instant::now();
        let bond = Tie(Bond::new(anchor.outlives_silence(), asked));
        Self { anchor, bond, heard: now, locked: 0, idle_since: now }
    }

    /// When to look after it.
    pub(super) fn due(&self) -> Option<Instant> {
        if self.locked == 0 {
            return Some(self.idle_since + LINGER);
        }
        Some(self.heard + KEEP_ALIVE)
    }

    /// Sends a statement. Whatever it is, its answer proves that the session is there.
    pub(super) async fn send<'a, T>(
        &'a mut self,
        statement: impl FnOnce(&'a mut dyn Anchor) -> crate::backend::Job<'a, T>,
    ) -> Result<T, Failure> {
        // Giving up sooner would cost the locks that the server may still be keeping for us.
        let bond = &self.bond.0;
        let patience = if self.locked == 0 { ANSWER_WITHIN } else { bond.remaining() };
        let (sent_at, sent) = (Moment::now(), Instant::now());
        let mortal = self.anchor.outlives_silence().is_some();
        let answer = timeout(patience, statement(&mut *self.anchor)).await;
        match answer {
            Ok(Ok(answer)) => {
                bond.confirm(sent_at);
                self.heard = sent;
                match bond.loss() {
                    None => Ok(answer),
                    Some(_) => Err(Failure::Lost("the answer came too late".into())),
                }
            }
            Ok(Err(error)) if !mortal => Err(Failure::Refused(error)),
            Ok(Err(error @ sqlx::Error::Database(_))) if Fault::of(&error) != Fault::Severed => {
                self.heard = sent;
                Err(Failure::Refused(error))
            }
            Ok(Err(error)) => Err(Failure::Lost(error.to_string())),
            Err(_) => Err(Failure::Lost(format!("no answer came within {patience:?}"))),
        }
    }

    /// Gives all locks back and ends.
    pub(super) async fn close(self, cause: LossCause) {
        self.bond.0.sever(cause);
        let _ = timeout(ANSWER_WITHIN, self.anchor.close()).await;
    }
}

/// Whatever becomes of the connection, the runtime's end included: with it go the locks.
pub(super) struct Tie(pub(super) Arc<Bond>);

impl Drop for Tie {
    fn drop(&mut self) {
        self.0.sever(LossCause::Disconnected);
    }
}
