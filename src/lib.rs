//! Distributed locks, leases and fenced transactions on the SQL database you already run: PostgreSQL, MySQL, MariaDB, and
//! SQLite as the embedded default.
#![forbid(unsafe_code)]
// Without a database there is nothing to construct, and much that nobody calls.
#![cfg_attr(not(any(feature = "postgres", feature = "mysql", feature = "sqlite")), allow(dead_code, unused))]

mod backend;
mod backoff;
mod client;
mod clock;
mod error;
mod inspect;
mod lease;
mod locks;
mod name;
mod owner;
mod pump;
mod schema;
mod sweeper;
mod token;
mod waiting;

pub use backend::Database;
pub use error::{Error, FenceError, LossCause, Result};
pub use inspect::LeaseInfo;
pub use lease::export::ExportedLease;
pub use lease::{Lease, LeaseRequest};
pub use locks::{Locks, LocksBuilder};
pub use name::LockName;
pub use owner::Owner;
pub use sweeper::{Sweeper, Sweeping};
pub use token::FencingToken;
