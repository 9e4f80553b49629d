//! From one server to a cluster: what fails over, what is lost, and which to choose.
//!
//! A lease is as durable as the commit that grants it. On one server that commit survives the server's crash, not its disk: while
//! it is away, nothing is granted and nothing is lost, and holders know when their time is up. Whoever wants to go on without
//! that server needs a second one, and the question is what the second one knows when the first is gone.
//!
//! | you have | when a server is lost | lost with it | locks that two can hold at once |
//! |---|---|---|---|
//! | one server | nothing is granted until it is back | nothing, on a durable disk | none |
//! | PostgreSQL, a synchronous standby, and [`synchronous`] | the standby is promoted; leases go on there | nothing that was acknowledged | none |
//! | PostgreSQL, an asynchronous standby | likewise | the last grants before the loss | those |
//! | MySQL or MariaDB, a replica | likewise | likewise, and more if it lags | those |
//! | MariaDB Galera | the others go on, after some seconds | nothing that was acknowledged | none; no [session locks](crate::session::SessionLock) |
//! | several independent servers, [`Quorum`](crate::quorum::Quorum) | a minority may be lost | nothing | none |
//!
//! **Choose** one server until you cannot wait for its return; then the cluster that your data is in already, since a
//! [fence](crate::Lease::fence) needs the lease in the same database as the data. A synchronous standby costs the way to it and
//! back for each request, and protects exactly what it protects your data from. [`Quorum`](crate::quorum::Quorum) is for effects outside of any database,
//! or where no single system may decide; it cannot fence a transaction.
//!
//! # What is not lost even then
//!
//! Where a grant can be lost, two can believe for a while that they hold the name: the old holder, whose grant the new primary
//! never heard of, until the new primary answers its heartbeat and looks the lease up, and the new one. What holds all the same:
//!
//! - *Tokens rise.* A token is the database's clock where that is ahead of the last token, so the new primary gives greater ones
//!   than the old, although it does not know of those, as long as its clock is behind by less than the failover took.
//!   Whoever checks them refuses the old holder.
//! - *The fence holds.* It compares owner and token in the transaction, in the database that is written: the old holder's is
//!   not there, so its transaction cannot commit. What it has committed on the old primary is lost with the grant.
//!
//! A release can be lost as well. The new primary has the lease still, and the heartbeat of its client keeps it: the name stays taken
//! until that client ends, or [`Locks::evict`](crate::Locks::evict) takes it away.
//!
//! # Several URLs
//!
//! [`Locks::connect`] takes a list and uses the first server that can be written: one that says it is a standby, or read-only, or a
//! Galera node without a cluster, is passed by. When the connection is lost, or the server refuses to be written, all are asked
//! again, beginning with the one that was written last, for three seconds; then requests end in [`Error::Unavailable`], which
//! names each server and what it said. Leases that are held are renewed wherever the database is by then: the TTL must be longer than a
//! failover takes, or they end first. Who is promoted, and that the old primary is not written any more (it is stopped, or
//! cannot be reached), is decided by whoever runs the cluster, never here. Two servers that both take writes are two databases.
//!
//! ```no_run
//! # #[cfg(feature = "postgres")]
//! # async fn example() -> sqlock::Result<()> {
//! use sqlock::LocksBuilder;
//!
//! let locks = LocksBuilder::from_urls("postgres://app@db1/app,postgres://app@db2/app")?
//!     .synchronous()?                // nothing counts that a single server has
//!     .connect()
//!     .await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Independent servers
//!
//! A [`Quorum`](crate::quorum::Quorum) takes the name on a majority of databases that know nothing of each other. There is no failover to
//! wait for: while one of three is down, the other two go on. It costs two rounds of statements on each, there is no line between
//! processes, and a fence on one of them does not help, since the others may grant the name meanwhile: whoever receives the effects
//! has to check [`QuorumLease::token`](crate::quorum::QuorumLease::token).
//!
//! # PostgreSQL
//!
//! A standby is synchronous if `synchronous_standby_names` names it. With [`synchronous`] a server is refused that has none
//! connected, also one that was promoted and has none yet: name one there as well, that follows. Without it, any primary
//! is used. `synchronous_commit = remote_apply` stays as it is; what waits for less is raised to `on`.
//!
//! Whether the server still waits for a standby is asked with every request, which costs a round trip. Some cluster managers take a
//! standby that is lost out of the configuration and go on without it: then requests end in [`Error::Unavailable`]. (Only what
//! commits in the very moment of that change may be acknowledged by one server alone; use their strict mode.)
//!
//! While the standby is away, commits wait. Requests end in [`Error::Unavailable`] then and are never cancelled: PostgreSQL
//! would report success for what only one server has. What was asked for is granted, perhaps, when the standby is back, to nobody;
//! then the name is free after the TTL.
//!
//! # MySQL and MariaDB with replicas
//!
//! Replicas have to be `read_only`: one that is not looks like a primary. A user who may write all the same (`SUPER`,
//! `CONNECTION_ADMIN`, `READ_ONLY ADMIN`) is not refused on a connection that it has open when a server becomes read-only: use one
//! who may not, or `super_read_only`. Semi-synchronous replication loses less, and is not
//! checked here.
//!
//! # Galera
//!
//! All nodes can be written at once. Of two that take a name at the same time one fails to commit, and asks again by itself; so it is
//! slower the more nodes want the same name, and best with all clients on one node and the others to fail over to. Fences
//! are writes there (locks are not seen by other nodes), with three consequences:
//!
//! - Who takes over a name does not wait for the old holder's fenced transaction on another node; that one cannot commit any more.
//! - Two transactions that are fenced at once with one name, by a holder or by several who share it, are in each other's way:
//!   one fails with a conflict. Run them with [`Retry`](crate::retry::Retry).
//! - A fence on a node that has not been told of the lease yet fails with [`FenceError::StaleSnapshot`], likewise a conflict.
//!
//! Row locks ([`Locks::row`]) are those of one node. Session locks are refused. When a node is killed, the others stand still until
//! they have noticed (`evs.suspect_timeout`, 5 seconds by default): mind that with short TTLs.
//!
//! [`Error::Unavailable`]: crate::Error::Unavailable
//! [`FenceError::StaleSnapshot`]: crate::lease::FenceError::StaleSnapshot
//! [`Locks::connect`]: crate::Locks::connect
//! [`Locks::row`]: crate::Locks::row
//! [`synchronous`]: crate::LocksBuilder::synchronous
