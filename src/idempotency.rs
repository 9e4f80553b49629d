//! Requests that take effect once, however often they are sent: claim, effect and result in one
//! transaction.
//!
//! [`Idempotency`] has an example. To choose, see [the table of calls](crate#which-call).

mod attempt;
mod claim;
mod handle;
#[cfg(feature = "axum")]
pub mod http;
pub(crate) mod in_flight;
mod inspect;
mod json;
mod key;
mod leased;
mod outcome;
mod pools;
mod request;
mod resolve;
mod resume;
mod run;
mod seal;

pub use crate::backend::records::RecordState;
pub use attempt::Attempt;
pub use claim::Claim;
pub use handle::{AfterRetention, Idempotency};
pub use inspect::RecordInfo;
pub use key::{Fingerprint, IdempotencyKey};
pub use outcome::{Outcome, Stored};
pub use resolve::{Resolution, ResolutionInfo};
pub use resume::{ResumePolicy, Resumed};
