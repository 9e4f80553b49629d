//! A lease: owner and expiry in a row of the database, renewed by the heartbeat of its client until
//! it is released.
//!
//! This module has the types around a [`Lease`](crate::Lease): [`LeaseOptions`] are the options of
//! each kind of request, [`LeaseAllRequest`] requests several leases at once, [`ExportedLease`]
//! hands a lease to another process, and [`FenceError`] says why a transaction cannot be fenced.
//! To choose, see [the table of calls](crate#which-call).

pub(crate) mod all;
mod convert;
pub mod election;
mod fence;
pub(crate) mod handle;
mod note;
pub(crate) mod options;
mod refusal;
pub(crate) mod request;
pub(crate) mod run;
pub(crate) mod semaphore;
mod transfer;

pub use crate::error::FenceError;
pub use all::LeaseAllRequest;
pub use options::LeaseOptions;
pub use transfer::ExportedLease;
