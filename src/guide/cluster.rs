//! From one server to a cluster: what fails over, what is lost, and which cluster to choose.
//!
//! A lease is as durable as the commit that grants it. On one server that commit survives a crash
//! of the server, but not the loss of its disk: while the server is away, nothing is granted and
//! nothing is lost, and holders know when their leases expire. Going on without that server needs a
//! second one, which may lack the latest commits of the first.
//!
//! | setup | when a server is lost | lost with it | locks that two owners can hold at once |
//! |---|---|---|---|
//! | one server | nothing is granted until it is back | nothing, on a durable disk | none |
//! | PostgreSQL, a synchronous standby, and [`synchronous`] | the standby is promoted; leases go on there | no acknowledged commit | none |
//! | PostgreSQL, an asynchronous standby | likewise | the last grants before the loss | those |
//! | MySQL or MariaDB, a replica | likewise | likewise, and more if it lags | those |
//! | MariaDB Galera | the others go on, after some seconds | no acknowledged commit | none [while the clocks agree](#galera); no [session locks](crate::session::SessionLock) |
//! | several independent servers, [`Quorum`](crate::quorum::Quorum) | a minority may be lost | nothing | none |
//!
//! **Choose** one server until you cannot wait for its return; then the cluster that has your data
//! already, because a [fence](crate::Lease::fence) needs the lease in the same database as the
//! data. A synchronous standby costs a round trip for each request, and protects leases as it
//! protects data. [`Quorum`](crate::quorum::Quorum) is for effects outside of any database, or
//! where no single system may decide; it cannot fence a transaction.
//!
//! # Guarantees after a lost grant
//!
//! Where a grant can be lost, two clients can hold the name for a while: the new holder, and the
//! old holder, whose grant the new primary does not have, until the new primary answers its
//! heartbeat and the lease is looked up.
//!
//! Behind a proxy that changes servers without an error, as PgBouncer, RDS Proxy and ProxySQL can,
//! no heartbeat fails and no lease is looked up: both clients rely on the name until the old holder
//! releases it or fences a transaction. Use a fence, or connect past the proxy with [several
//! URLs](#several-urls).
//!
//! Still guaranteed:
//!
//! - *Tokens rise.* A token is the database's clock if that is ahead of the last token, so the new
//!   primary grants greater tokens than the old primary even without knowing them, as long as its
//!   clock is behind by less than the failover took. A receiver that checks tokens refuses the old
//!   holder.
//! - *The fence holds.* It compares owner and token in the transaction, in the database that is
//!   written: the old holder's lease is not there, so its transaction cannot commit. Its commits on
//!   the old primary are lost with the grant.
//!
//! A release can be lost as well: the new primary still has the lease, and the heartbeat of its
//! client would keep it. The client notices that its heartbeat was interrupted, and reads each name
//! that it has released since 10 seconds before the interruption. A lease stays until its client
//! ends, or [`Locks::evict`](crate::Locks::evict) ends it, if the new primary lags by more, if the
//! client had not sent its first heartbeat, or if a proxy changes servers without an error.
//!
//! # Several URLs
//!
//! [`Locks::connect`] takes a list and uses the first writable server: it skips a standby, a
//! read-only server, and a Galera node without a cluster. When the connection is lost, or the
//! server becomes read-only, all servers are tried again, beginning with the last one that accepted
//! writes. A request ends in [`Error::Unavailable`], which names each server and its error, after
//! three seconds of refused connections; with servers that do not answer at all, after some twelve.
//! Held leases are renewed on the new primary: the TTL must be longer than a failover takes, or
//! they end first. The cluster's own management decides which server is promoted, and must stop or
//! isolate the old primary. Two servers that both take writes are two databases.
//!
//! ```no_run
//! # #[cfg(feature = "postgres")]
//! # async fn example() -> sqlock::Result<()> {
//! use sqlock::LocksBuilder;
//!
//! let locks = LocksBuilder::from_urls("postgres://app@db1/app,postgres://app@db2/app")?
//!     .synchronous()?                // a commit counts only once a standby has it
//!     .connect()
//!     .await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Independent servers
//!
//! A [`Quorum`](crate::quorum::Quorum) takes the name on a majority of databases that do not share
//! anything. There is no failover to wait for: while one of three is down, the other two go
//! on. It costs two to five statements on each, there is no queue between processes, and a fence
//! on one of them does not help, because the others may grant the name meanwhile: the receiver of
//! the effects must check [`QuorumLease::token`](crate::quorum::QuorumLease::token).
//!
//! A database that has lost its data, and whose tables were created again, has no vote until they
//! are older than the TTL: it may have granted a name that is still held. So a new quorum grants
//! its first leases a TTL after its tables were created. Two databases on one server are refused
//! (MariaDB has no identity, so there only equal addresses are recognized).
//!
//! `sqlock doctor --quorum -D URL,URL,URL` checks the databases one by one and together: how many
//! can vote, whether two are on one server, and how their clocks and tables differ. `sqlock ls
//! --quorum` and `sqlock show --quorum NAME` list the holders on all of them.
//!
//! # PostgreSQL
//!
//! A standby is synchronous if `synchronous_standby_names` names it. With [`synchronous`], a server
//! without a connected synchronous standby is refused, also after its promotion: configure a
//! standby for it as well. Without it, any primary is used. `synchronous_commit = remote_apply` is
//! kept; weaker settings are raised to `on`. A consumer of logical replication is no standby: name
//! the standbys instead of `*`, so that it does not confirm commits in their place.
//!
//! Every request checks whether the server still waits for a standby, which costs a round trip.
//! Some cluster managers remove a lost standby from the configuration and go on without it: then
//! requests end in [`Error::Unavailable`]. (A commit at the moment of that change may be
//! acknowledged by one server alone; use the manager's strict mode.)
//!
//! While the standby is away, commits wait. Requests end in [`Error::Unavailable`] then and are
//! never cancelled: PostgreSQL would report success for a commit on one server only. When the
//! standby is back, the request may be granted without a holder; then the name is free after the
//! TTL.
//!
//! # MySQL and MariaDB with replicas
//!
//! Replicas must be `read_only`, or `innodb_read_only` as the readers of Amazon Aurora are: a
//! writable replica looks like a primary. A user with the right to write nevertheless (`SUPER`,
//! `CONNECTION_ADMIN`, `READ_ONLY ADMIN`) is not refused on a connection that is open when a server
//! becomes read-only: use a user without that right, or `super_read_only`. Semi-synchronous
//! replication loses less, and is not checked by this crate.
//!
//! # Galera
//!
//! All nodes accept writes. Of two clients that acquire a name on two nodes at the same
//! time, one fails to commit and asks again by itself; so contention between nodes is slow, and all
//! clients should use one node and fail over to the others. Fences are writes there (nodes do not
//! see each other's locks), with three consequences below.
//!
//! Each node compares the expiry of a lease with its own clock. A holder that is cut off counts its
//! lease as ended earlier than its node does: by 310 ms for a TTL of 30 seconds, by 60 ms for one of
//! 5 seconds. If the clocks of two nodes differ by more, a client on the other node can acquire the
//! name before. Keep the clocks together, with chrony for instance. The consequences of fences:
//!
//! - A new holder does not wait for the old holder's fenced transaction on another node; that
//!   transaction can no longer commit.
//! - Of two transactions that are fenced with one name at the same time, by one holder or by
//!   several shared holders, one fails with a conflict. Run them with
//!   [`Retry`](crate::retry::Retry).
//! - A fence on a node that has not received the lease yet fails with
//!   [`FenceError::StaleSnapshot`], likewise a conflict.
//!
//! In your own transactions, send one statement at a time: when several are sent as one text
//! (`sqlx::raw_sql`) and another node's commit aborts the transaction between two of them, MariaDB
//! (seen with 10.11) may not report it, and commits some of the others separately.
//!
//! Row locks ([`Locks::row`]) are local to one node. Session locks are refused. When a node is
//! killed, the others pause until they notice (`evs.suspect_timeout`, 5 seconds by default): take
//! this pause into account with short TTLs.
//!
//! [`Error::Unavailable`]: crate::Error::Unavailable
//! [`FenceError::StaleSnapshot`]: crate::lease::FenceError::StaleSnapshot
//! [`Locks::connect`]: crate::Locks::connect
//! [`Locks::row`]: crate::Locks::row
//! [`synchronous`]: crate::LocksBuilder::synchronous
