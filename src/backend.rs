//! The seam between the locks and the databases: what a database must be able to do.
//!
//! A [`Backend`] opens [`Session`]s; a session is one connection. Whatever is asked of it may be asked again when the answer was lost.

pub(crate) mod admin;
pub(crate) mod dialect;
#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, clippy::print_stdout, dead_code, reason = "tests")]
pub(crate) mod differential;
pub(crate) mod failover;
pub(crate) mod fence;
#[cfg(test)]
pub(crate) mod memory;
#[cfg(feature = "mysql")]
pub(crate) mod mysql;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
pub(crate) mod records;
pub(crate) mod session;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;
pub(crate) mod store;
pub(crate) mod stored;
pub(crate) mod table;

use std::pin::Pin;

pub(crate) use self::admin::{Listed, Names, SweepRange, Swept, Waiter};
pub(crate) use self::session::{Anchor, Anchoring};
pub(crate) use self::store::{Job, Session};
pub(crate) use self::stored::{hex, micros, token};
use crate::error::Result;

/// A database that leases can be kept in.
pub(crate) trait Backend: Send + Sync {
    /// Opens a connection of its own, ready for the verbs.
    fn connect(&self) -> Job<'_, Box<dyn Session>>;

    /// How many connections at most do any good. SQLite has one writer.
    fn useful_connections(&self) -> usize;

    /// Whether connections for heartbeats hear of grants by other clients, as far as is known.
    fn can_notify(&self) -> bool {
        false
    }

    /// Opens a connection for heartbeats, which hears of grants by other clients where the database can tell.
    fn connect_for_heartbeats(&self) -> Job<'_, Box<dyn Session>> {
        self.connect()
    }

    /// How many requests its connections carry out together, in a [`Batch`].
    fn longest_batch(&self) -> usize;

    /// Where it is, for people: never with a credential.
    fn place(&self) -> String;

    /// Makes all connections wait until a second server has what the first has done. `false`: here is no such thing.
    fn synchronous(&mut self) -> bool {
        false
    }

    /// Whether other servers take writes as well, and know nothing of the locks of transactions here.
    fn is_one_of_many_writers(&self) -> bool {
        false
    }

    /// Creates the tables or brings them up to date.
    fn migrate(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>>;

    /// Opens what session locks live on, or says why they would be a lie here.
    fn anchor(&self) -> Anchoring<'_>;
}

/// The databases whose transactions can be fenced: [`sqlx::Postgres`], [`sqlx::MySql`] (also MariaDB), [`sqlx::Sqlite`].
///
/// Sealed: nobody else can implement it.
pub trait Database: sqlx::Database + fence::Fence + dialect::Dialect + records::Records {}

/// The kinds of database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Kind {
    Postgres,
    MySql,
    Sqlite,
}
