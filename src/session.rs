//! Locks that live on a connection and end with it: advisory locks, `GET_LOCK`, locks on files.
//!
//! [`SessionLock`] has an example. To choose, see [the table of calls](crate#which-call).

mod connection;
mod liveness;
mod lock;
pub(crate) mod manager;
mod message;
mod name;
mod request;
mod task;

pub use crate::backend::session::SessionHolder;
pub use lock::SessionLock;
pub use request::SessionRequest;
