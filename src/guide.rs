//! A comparison of leases, row locks, versions, session locks and idempotency: what each protects
//! and costs, and all of them in one program.
//!
//! [The table of calls](crate#which-call) lists the call for each task. [`cluster`] describes the
//! loss of a server and the choice of a cluster; [`limits`] lists what is not promised; [`costs`]
//! counts the statements of each call; [`capacity`] says how much one database carries;
//! [`comparison`] compares other systems. [`observability`] lists what an operator sees, [`runbook`]
//! the steps after an alert, [`security`] rights, TLS and what a hostile user can do; the chapter
//! `testing` (with that feature) shows how to test an application that locks. [`migrating`] replaces
//! other locks, [`recipes`] has set-ups for frameworks, and [`faq`] answers questions.
//!
//! # How a lease lives
//!
//! A lease is a row with an owner, a token and an expiry by the database's clock. One heartbeat of
//! the client renews all its leases.
//!
#![doc = include_str!("guide/pictures/lease.svg")]
//!
//! A release hands the name over to the next waiter; the others keep waiting. [`costs`] counts the
//! statements.
//!
#![doc = include_str!("guide/pictures/handover.svg")]
//!
//! # How long must it hold?
//!
//! | it must hold | take | because |
//! |---|---|---|
//! | for one statement | none: `UPDATE item SET stock = stock - 1 WHERE id = 7 AND stock > 0` | the statement itself is atomic; check how many rows it changed |
//! | for one transaction, on rows that exist | [`Locks::row_of`], [`Locks::rows_of`] | the database ends it with the transaction, also when the process dies |
//! | for one transaction, and an operator must see who holds it and who waits | [`Locks::lease`] and [`Lease::fence`] | row locks have no queue of their own, no events and no metrics, and a drain does not wait for them |
//! | for one transaction, on something that is not a row | [`Locks::row`] | the same for a name |
//! | for one transaction, on whichever rows are free | [`Locks::rows_where`] with `skip_locked` | no worker waits, and the rows of a dead worker are free again |
//! | while a user edits a form | [`Versioned`] | nothing is held; a late write fails |
//! | for longer than a transaction | [`Locks::lease`] | it outlives connections, its holder learns of its loss, and [`Lease::fence`] then protects the data |
//! | for ever: it must not happen twice | [`Idempotency`], with [used keys refused](crate::idempotency::AfterRetention::Refuse) or with a retention longer than any client repeats a request | claim, effect and result are one transaction, and a repeated request receives the result. After the retention, 24 hours by default, a key counts as new |
//! | for some seconds, cheaply, and may be lost | [`Locks::session`] | nothing is written; it ends with the connection |
//!
//! # What each costs
//!
//! | | statements | connections | waiting | when its holder dies |
//! |---|---|---|---|---|
//! | conditional update | your own | the transaction's | in the database, for the row | rolled back |
//! | row lock | 1 in the transaction; once a minute 1 more, by the client for a name and in the transaction for the index of a table; 3 for a limited wait on PostgreSQL | the transaction's | in the database, with a connection each | rolled back at once, if the server notices |
//! | version | 1, and your own read; 1 more when it fails | the transaction's, or any | none; a failed write is repeated | nothing was held |
//! | lease | 1 to acquire (several if it is shared, except on PostgreSQL), 1 to release, 1 each third of the shortest TTL, at least 1 a second, to renew, however many are held | 3 at most for all leases of a client (SQLite: 2) | in a queue, first come, first served | free after the TTL at most |
//! | fence | 1, the first in its transaction | the transaction's | the next holder, until the transaction ends | rolled back |
//! | idempotency | 2 in its transaction; MySQL and MariaDB 1 more of the client | the transaction's | a duplicate receives "in progress", or waits without a connection | rolled back, and the key is free, once the server notices |
//! | session lock | 1 to acquire, 1 to release, 1 a second for all | 1 for all of a client | by asking again | free when the server notices |
//!
//! Every waiter of a row lock has a connection, so a thousand waiters have a thousand connections.
//! A thousand waiters for a lease have three connections for each process. SQLite has one write
//! lock for everything: a row lock is that lock, and a transaction that holds it keeps leases in
//! the same file from being renewed, so keep it shorter than the TTL.
//!
//! # All of them in one program
//!
//! Once a month one of many instances settles accounts. It takes hours, and transfers and edits go
//! on meanwhile.
//!
//! ```
//! # #[cfg(feature = "sqlite")]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use sqlock::retry::Retry;
//! use sqlock::version::Versioned;
//! use sqlock::{Error, Locks};
//!
//! # let directory = tempfile::tempdir()?;
//! # let url = format!("sqlite://{}?mode=rwc", directory.path().join("bank.db").display());
//! let pool = sqlx::SqlitePool::connect(&url).await?;
//! let locks = Locks::new(pool.clone());
//! locks.migrate().await?;
//! # for sql in [
//! #     "CREATE TABLE accounts (
//! #          id INTEGER PRIMARY KEY, version INTEGER NOT NULL, owner TEXT NOT NULL, balance INTEGER NOT NULL,
//! #          settled INTEGER NOT NULL DEFAULT 0)",
//! #     "INSERT INTO accounts (id, version, owner, balance) VALUES (1, 1, 'ann', 100), (2, 1, 'bob', 100)",
//! # ] {
//! #     sqlx::query(sql).execute(&pool).await?;
//! # }
//!
//! // One instance settles: a lease, because it takes longer than any transaction should.
//! let Some(lease) = locks.lease("settlement/2026-11").try_acquire().await? else {
//!     return Ok(()); // another instance settles
//! };
//! // Meanwhile, a clerk has opened account 1: a version, so that nobody waits for the clerk.
//! let accounts = Versioned::table("accounts");
//! let form = accounts.read::<_, (i64, i64, String, i64, i64)>(&pool, 1).await?.expect("it is there");
//!
//! // Each account is settled in a transaction of its own, which cannot commit if another owner got the lease. The fence comes first.
//! for id in [1, 2] {
//!     Retry::new()
//!         .run(&pool, async |tx| {
//!             lease.fence(tx).await?;
//!             // A transfer may be in progress: a row lock, to read its result.
//!             locks.row_of("accounts", "id", id).lock(tx).await?;
//!             sqlx::query("UPDATE accounts SET settled = balance, version = version + 1 WHERE id = ? AND settled = 0")
//!                 .bind(id)
//!                 .execute(&mut **tx)
//!                 .await?;
//!             Ok::<_, Error>(())
//!         })
//!         .await?;
//! }
//! lease.release().await?;
//!
//! // Elsewhere, a transfer: both rows, in the order of their keys, so that one in the other direction does not deadlock.
//! let (from, to, amount) = (2, 1, 30);
//! let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?; // on SQLite; elsewhere pool.begin()
//! locks.rows_of("accounts", "id", [from, to]).lock(&mut tx).await?;
//! let paid = sqlx::query("UPDATE accounts SET balance = balance - ?, version = version + 1 WHERE id = ? AND balance >= ?")
//!     .bind(amount).bind(from).bind(amount)
//!     .execute(&mut *tx)
//!     .await?;
//! assert_eq!(paid.rows_affected(), 1);
//! sqlx::query("UPDATE accounts SET balance = balance + ?, version = version + 1 WHERE id = ?")
//!     .bind(amount).bind(to)
//!     .execute(&mut *tx)
//!     .await?;
//! tx.commit().await?;
//!
//! // The clerk saves the form, and learns that the account is not what was on the screen.
//! let saved = accounts.update(&pool, 1, form.version, |set| {
//!     set.push("owner = ").push_bind("ann, as the clerk saw her");
//! }).await;
//! assert!(matches!(saved, Err(Error::Conflict { expected: Some(1), found: Some(3), .. })));
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "sqlite"))]
//! # fn main() {}
//! ```
//!
//! # What goes wrong without them
//!
//! - *Read, then write* loses updates: two read 7, both write 8. Lock the row before reading it, or
//!   write by the version that was read. The example `flash_sale` oversells this way, and does not
//!   in four other ways.
//! - *Lock rows in any order* deadlocks: two transfers in opposite directions. [`Locks::rows_of`]
//!   has one order for all. The example `bank_transfer` counts the deadlocks.
//! - *Lock by a column without a unique index*: InnoDB locks every row it examines.
//!   [`Locks::row_of`] refuses such a column.
//! - *`SELECT … FOR UPDATE` of a row that is missing, then INSERT* deadlocks on InnoDB.
//!   [`Locks::row`] creates its rows outside of the transaction.
//! - *An advisory lock behind a pooler* is held by the next client of the session.
//!   [`Locks::session`] refuses to lock behind one.
//! - *Checking a lease, then writing* is not a fence: the process may pause in between.
//!   [`Lease::fence`] keeps the next holder out until the transaction has ended.
//! - *Check the record, have the effect, write the record* has the effect twice when two requests
//!   come at once, and leaves a key "in progress" for ever when the process dies in between.
//!   [`Idempotency`] inserts first, and commits everything or nothing.
//!
//! # Isolation levels
//!
//! At READ COMMITTED a transaction that waited for a row reads the latest version. At REPEATABLE
//! READ and SERIALIZABLE PostgreSQL reads as of the transaction's first statement, so a row that
//! has changed during the wait is refused ([`RowError::StaleSnapshot`]), and so is a write to any
//! other changed row: [`Retry`] runs the transaction again. InnoDB's snapshot begins with the first
//! plain SELECT, so lock first, then read.
//!
//! [`Idempotency`]: crate::idempotency::Idempotency
//! [`Lease::fence`]: crate::Lease::fence
//! [`Locks::lease`]: crate::Locks::lease
//! [`Locks::row`]: crate::Locks::row
//! [`Locks::row_of`]: crate::Locks::row_of
//! [`Locks::rows_of`]: crate::Locks::rows_of
//! [`Locks::rows_where`]: crate::Locks::rows_where
//! [`Locks::session`]: crate::Locks::session
//! [`Retry`]: crate::retry::Retry
//! [`RowError::StaleSnapshot`]: crate::row::RowError::StaleSnapshot
//! [`Versioned`]: crate::version::Versioned

pub mod capacity;
pub mod cluster;
pub mod comparison;
pub mod costs;
pub mod faq;
pub mod limits;
pub mod migrating;
pub mod observability;
pub mod recipes;
pub mod runbook;
pub mod security;
#[cfg(feature = "testing")]
pub mod testing;
