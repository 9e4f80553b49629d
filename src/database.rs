//! The bounds for the caller's transactions and pools, and why a database cannot be used.
//!
//! [`DatabasePool`] is the bound of [`Locks::new`](crate::Locks::new).
//!
//! [`Database`] is the bound of every method that takes a transaction of the caller:
//! [`Lease::fence`](crate::Lease::fence), the locks of [`row`](crate::row),
//! [`Versioned`](crate::version::Versioned), [`Retry`](crate::retry::Retry) and
//! [`Idempotency`](crate::idempotency::Idempotency).
//!
//! ```
//! use sqlock::database::Database;
//! use sqlock::{Lease, Result};
//!
//! // Written once, for PostgreSQL, MySQL, MariaDB and SQLite.
//! async fn fenced<DB: Database>(lease: &Lease, tx: &mut sqlx::Transaction<'_, DB>) -> Result<()> {
//!     lease.fence(tx).await
//! }
//! ```

pub use crate::backend::{Database, DatabasePool};
pub use crate::error::AccessError;
