//! Functions of the caller that encrypt stored results and requests.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use super::handle::Idempotency;
use crate::error::{Error, Result};
use crate::panics;

/// The first byte of a sealed column. No JSON text begins with this byte.
const SEALED: u8 = 0;

type BoxError = Box<dyn StdError + Send + Sync>;
type Function = dyn Fn(&[u8], &[u8]) -> Result<Vec<u8>, BoxError> + Send + Sync;

/// The caller's pair of functions.
#[derive(Clone)]
struct Functions {
    seal: Arc<Function>,
    open: Arc<Function>,
}

/// The functions, if the caller has set any.
#[derive(Clone, Default)]
pub(super) struct Seal(Option<Functions>);

/// The content of a sealed column.
#[derive(Clone, Copy)]
pub(super) enum Content<'c> {
    Request,
    Result,
    /// The result of the step of this name.
    Step(&'c str),
}

impl Content<'_> {
    fn context(self, id: &str) -> Vec<u8> {
        match self {
            Self::Request => format!("sqlock-idem/1/request/{id}"),
            Self::Result => format!("sqlock-idem/1/result/{id}"),
            Self::Step(name) => format!("sqlock-idem/1/step/{id}/{name}"),
        }
        .into_bytes()
    }

    fn name(self) -> &'static str {
        match self {
            Self::Request => "the stored request",
            Self::Result => "the stored result",
            Self::Step(_) => "the stored result of a step",
        }
    }

    fn error(self, attempted: &'static str) -> impl FnOnce(BoxError) -> Error {
        move |source| Error::Sealed { attempted, what: self.name(), source }
    }
}

impl Idempotency {
    /// Encrypts the contents of records, by two functions of the caller: results, results of
    /// [steps](crate::idempotency::Attempt::step), and
    /// [requests](crate::idempotency::Fingerprint::with_request). Keys, principals and fingerprints
    /// are not encrypted.
    ///
    /// Both functions receive a context and the bytes. The context names the record and the kind of
    /// content: authenticate the context as associated data, so that content cannot be moved to
    /// another key. `open` reverses `seal`. To support a change of the encryption key, let `seal`
    /// write the identity of the key. The limits count before `seal`.
    ///
    /// When a function fails or panics, the call returns [`Error::Sealed`]. When `open` fails, the
    /// handler is not run again: the key replays its result as soon as it can be opened. When
    /// `seal` fails, a transaction is rolled back and the key stays free; under a lease, a result
    /// that cannot be sealed leaves the outcome unknown, and a request that cannot be sealed claims
    /// nothing. Content stored without `seal`, earlier or by `sqlock idem resolve`, is replayed
    /// unchanged.
    ///
    /// ```
    /// # fn encrypt(_: &[u8], bytes: &[u8]) -> Result<Vec<u8>, std::io::Error> { Ok(bytes.to_vec()) }
    /// # fn decrypt(_: &[u8], bytes: &[u8]) -> Result<Vec<u8>, std::io::Error> { Ok(bytes.to_vec()) }
    /// # fn example(locks: &sqlock::Locks) {
    /// use sqlock::idempotency::Idempotency;
    ///
    /// let payments = Idempotency::new(locks)
    ///     .seal(|context, bytes| encrypt(context, bytes), |context, sealed| decrypt(context, sealed));
    /// # }
    /// ```
    pub fn seal<S, O>(
        mut self,
        seal: impl Fn(&[u8], &[u8]) -> Result<Vec<u8>, S> + Send + Sync + 'static,
        open: impl Fn(&[u8], &[u8]) -> Result<Vec<u8>, O> + Send + Sync + 'static,
    ) -> Self
    where
        S: Into<Box<dyn StdError + Send + Sync>>,
        O: Into<Box<dyn StdError + Send + Sync>>,
    {
        self.seal = Seal(Some(Functions {
            seal: Arc::new(move |context, bytes| run(|| seal(context, bytes))),
            open: Arc::new(move |context, sealed| run(|| open(context, sealed))),
        }));
        self
    }
}

/// Runs a function of the caller. A panic is an error, so that it ends one request only.
fn run<E: Into<BoxError>>(function: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Vec<u8>, BoxError> {
    match panics::caught(function) {
        Ok(bytes) => bytes.map_err(Into::into),
        Err(panic) => Err(format!("the function panicked: {panic}").into()),
    }
}

impl Seal {
    /// Returns whether functions are set.
    pub(super) fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the bytes for a column.
    pub(super) fn seal(&self, content: Content<'_>, id: &str, bytes: Vec<u8>) -> Result<Vec<u8>> {
        let Some(functions) = &self.0 else {
            return Ok(bytes);
        };
        let mut column = (functions.seal)(&content.context(id), &bytes).map_err(content.error("seal"))?;
        column.insert(0, SEALED);
        Ok(column)
    }

    /// Returns the bytes in a column.
    pub(super) fn open(&self, content: Content<'_>, id: &str, column: Vec<u8>) -> Result<Vec<u8>> {
        let Some((&SEALED, sealed)) = column.split_first() else {
            return Ok(column);
        };
        let Some(functions) = &self.0 else {
            return Err(content.error("open")("it is sealed, and Idempotency::seal is not set".into()));
        };
        (functions.open)(&content.context(id), sealed).map_err(content.error("open"))
    }
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Seal").field(&self.is_set()).finish()
    }
}
