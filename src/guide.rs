//! Leases, row locks, versions, session locks, effects that are had once: which one when, what each costs, and all of them in one program.
//!
//! What becomes of them when a server is lost, and which cluster to choose: [`cluster`].
//!
//! # Which one?
//!
//! Ask for how long it must hold, and what happens to data meanwhile.
//!
//! | it must hold | take | because |
//! |---|---|---|
//! | for one statement | none: `UPDATE item SET stock = stock - 1 WHERE id = 7 AND stock > 0` | the statement itself is atomic; look at how many rows it has changed |
//! | for one transaction, on rows that exist | [`Locks::row_of`], [`Locks::rows_of`] | the database ends it with the transaction, whatever becomes of the process |
//! | for one transaction, on something that is no row | [`Locks::row`] | the same for a name |
//! | for one transaction, on whichever rows are free | [`Locks::rows_where`] with `skip_locked` | nobody waits, and what a worker that dies has taken is free again |
//! | while a user thinks | [`Versioned`] | nothing is held; who comes too late is told |
//! | for longer than a transaction | [`Locks::lease`] | it outlives connections, its holder knows when it is lost, and [`Lease::fence`] keeps the data safe if it was |
//! | for ever: it must not happen twice | [`Idempotency`] | claim, effect and result are one transaction, and whoever comes again is told the result |
//! | for some seconds, cheaply, and may break | [`Locks::session`] | nothing is written; it is gone with the connection |
//!
//! # What each costs
//!
//! | | statements | a connection | who waits | when its holder dies |
//! |---|---|---|---|---|
//! | conditional update | the one you send anyway | the transaction's | in the database, for the row | rolled back |
//! | row lock | 1 in the transaction; once a minute 1 of our own for a name; a wait that is bounded 3 on PostgreSQL | the transaction's | in the database, holding a connection each | rolled back at once, if the server notices |
//! | version | 1, and the read that you send anyway; 1 more when it fails | the transaction's, or any | nobody; who fails does it again | nothing was held |
//! | lease | 1 to acquire, 1 to release, 1 each third of the TTL to renew, however many are held | 2 for all leases of a client | in a line, first come, first served | free after the TTL at most |
//! | fence | 1, the first in its transaction | the transaction's | the next holder, until the transaction ends | rolled back |
//! | effect once | 2 in its transaction; MySQL and MariaDB 1 more of our own | the transaction's | nobody: a duplicate is told "in progress", or waits without a connection | rolled back, and the key is as good as new |
//! | session lock | 1 to take, 1 to give back, 1 a second for all | 1 for all of a client | by asking again | free when the server notices |
//!
//! A row lock is held by whoever has a connection, and a thousand who wait for one have a thousand. A line of a thousand waiters
//! for a lease has two for each process. On SQLite there is one write lock for everything: a row lock is that lock, and a
//! transaction that has it keeps leases in the same file from being renewed, so keep it shorter than the TTL.
//!
//! # All of them in one program
//!
//! Once a month one of many instances settles accounts. It takes hours, and transfers and edits go on meanwhile.
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
//! // One instance settles: a lease, for it takes longer than any transaction should.
//! let Some(lease) = locks.lease("settlement/2026-11").try_acquire().await? else {
//!     return Ok(()); // another one is at it
//! };
//! // Meanwhile, a clerk has opened account 1 and looks at it: a version, for nobody waits for clerks.
//! let accounts = Versioned::table("accounts");
//! let form = accounts.read::<_, (i64, i64, String, i64, i64)>(&pool, 1).await?.expect("it is there");
//!
//! // Each account is settled in a transaction of its own, which commits only while the lease is ours. The fence comes first.
//! for id in [1, 2] {
//!     Retry::new()
//!         .run(&pool, async |tx| {
//!             lease.fence(tx).await?;
//!             // A transfer may be at it: a row lock, for it must see what the other one leaves.
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
//! - *Read, then write* loses updates: two read 7, both write 8. Lock the row before reading it, or write by the version that was
//!   read. The example `flash_sale` oversells that way, and in four other ways does not.
//! - *Lock rows in any order* deadlocks: two transfers in opposite directions. [`Locks::rows_of`] has one order for all. The
//!   example `bank_transfer` counts the deadlocks.
//! - *Lock by a column without a unique index*: InnoDB locks every row it looks at. [`Locks::row_of`] refuses.
//! - *`SELECT … FOR UPDATE` of a row that is missing, then INSERT* deadlocks on InnoDB. [`Locks::row`] has its rows created
//!   outside of the transaction.
//! - *An advisory lock behind a pooler* is held by whoever is lent the session next. [`Locks::session`] refuses.
//! - *Checking a lease, then writing* is not a fence: the process may stand still in between. [`Lease::fence`] keeps the next
//!   holder out until the transaction has ended.
//!
//! - *Look whether it was done, do it, write down that it was* does it twice when two come at once, and leaves a key "in progress" for
//!   ever when the process dies in between. [`Idempotency`] inserts first, and all of it commits or nothing.
//!
//! # Isolation levels
//!
//! At READ COMMITTED whoever has waited for a row reads what the one before has written. At REPEATABLE READ and SERIALIZABLE
//! PostgreSQL reads as of the transaction's first statement, so a row that has changed during the wait is refused
//! ([`RowError::StaleSnapshot`]), and so is a write to anything else that has: [`Retry`] runs the transaction again. InnoDB's
//! snapshot begins with the first plain SELECT, so lock first, then read.
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

pub mod cluster;
