//! What sqlock does not promise, and how to live with it.
//!
//! - **A pause longer than the TTL, without a fence.** A process that is frozen between
//!   [`is_held`](crate::Lease::is_held) and its write still writes when it wakes. Only a
//!   [fence](crate::Lease::fence) prevents the harm, for data in this database.
//! - **A virtual machine that its host pauses**, for a snapshot or a migration, may not count the
//!   pause: QEMU stops the clock of the guest meanwhile. After a pause longer than the TTL,
//!   [`is_held`](crate::Lease::is_held) is true until the next heartbeat is answered, or until the
//!   rest of the TTL has passed by that clock. Use a fence here, too.
//! - **Effects elsewhere.** An e-mail or a call to a payment provider cannot be fenced. Send the
//!   [token](crate::Lease::token) along. The receiver must *first* record it as the highest one and
//!   refuse a lower one, *then* read, then write only if the record is unchanged. A receiver that
//!   compares tokens only when it writes loses updates.
//! - **A key after its retention**, 24 hours by default, counts as new, and the request takes
//!   effect again. Set a [retention](crate::idempotency::Idempotency::retention) longer than any
//!   client repeats a request, or [refuse](crate::idempotency::AfterRetention::Refuse) used keys.
//! - **A late repetition of a call to a provider.** An attempt under a lease whose process has died
//!   is continued by any request that repeats the key, at any age and after any number of attempts.
//!   The provider recognizes the repeated call only while it keeps its own keys (Stripe: 24 hours).
//!   Look for records that stay `started`: [an unknown outcome](super::runbook#an-unknown-outcome).
//! - **Several names at once** are acquired in the order of their bytes. The request holds the
//!   earlier ones idle while it waits for a later one.
//! - **Asynchronous replicas.** After a failover to a replica that missed the last grants, the old
//!   and a new holder can both rely on the name until the old holder's next heartbeat. Behind a
//!   proxy that changes servers without an error, as PgBouncer, RDS Proxy and ProxySQL can, no
//!   heartbeat fails and no lease is looked up: both rely on the name until the old holder releases
//!   it or fences a transaction. Tokens still rise. Use synchronous replication or a fence, and
//!   connect past the proxy; [`cluster`](super::cluster) has the details.
//! - **A transaction pooler is shared.** While other clients use all connections of a pool to the
//!   server, heartbeats wait, and after the TTL all leases of the client are lost. PgBouncer has a
//!   pool for each user and database: give sqlock [a user of its own](super::faq), or connect past
//!   the pooler.
//! - **A network that is slow for the TTL.** Before the first renewal counts, a client acquires the
//!   lease, registers itself and looks the lease up: eight round trips to the database with new
//!   connections. Use a TTL of ten round trips or more; one of two seconds suffices where the database
//!   answers in 200 milliseconds. A lost connection takes four round trips or more to be replaced: to
//!   outlive that, use twice as much.
//! - **Jumps of the database host's clock.** A jump forwards ends a lease without renewal
//!   ([`renew(false)`](crate::LeaseRequest::renew), `sqlock acquire`, [an
//!   export](crate::Lease::export)) early, by the length of the jump. It ends a renewed lease if it
//!   is longer than the TTL less the age of the last heartbeat, which is about a second at most. A
//!   jump backwards lets a lease outlast a crash by the length of the jump. Holders measure with a
//!   clock that does not jump: they may be wrong about the database, but fenced transactions are
//!   not. Slew the clock of the host, with chrony for instance, instead of stepping it.
//! - **A database that is restored under running clients.** A copy that is restored in place has
//!   the rows of the clients as they were, so the heartbeats show no change: a client relies on a
//!   lease that the copy lacks, and another client can acquire the name. A lease that was released
//!   since the copy was made can be back. [Stop all clients before a
//!   restore](super::runbook#a-restore). When another SQLite file is moved to the path, clients
//!   find out with their next heartbeat, and look their leases up there; until then, within a
//!   second, a name can have two holders.
//! - **SQLite has one writer.** While any write transaction is open, no name in the same file can be
//!   acquired, renewed or released: keep transactions there far shorter than the TTL. All processes
//!   must run on one host, and the file must not be on a network file system. A database in memory
//!   is reached through the caller's pool; a long write transaction there delays heartbeats.
//! - **SQLite has no server.** Its clock is that of the process that runs the statement, so all
//!   processes must have one clock.
//! - **A client lives on the tokio runtime that used it first**, as a pool does. When that runtime
//!   has ended, calls fail with [`Error::Closed`](crate::Error::Closed).
//! - **Hooks of the caller's pool are not applied.** The client's connections are made from the
//!   pool's connect options; `after_connect` does not run on them. Put a `search_path` into the
//!   options.
//! - **A transaction that was ended by hand**, by `COMMIT` as text or by DDL on MySQL, still counts
//!   as open for sqlx. A fence asks the database, except on a Galera cluster, and is refused. A row
//!   lock does not ask: it ends with its own statement.
//! - **A host that vanishes in a transaction**, without closing its connections, keeps the locks of
//!   the transaction until the server notices: row locks, and keys that
//!   [`run`](crate::idempotency::Idempotency::run) has claimed. That takes hours with the defaults.
//!   PostgreSQL: set `tcp_keepalives_idle` or `idle_in_transaction_session_timeout`; MariaDB:
//!   `idle_transaction_timeout`; MySQL: `wait_timeout`. Leases are free after their TTL, except
//!   one that such a transaction fences.
//! - **Locks of other programs on the tables of sqlock.** The database ends a statement that waits
//!   for such a lock after 1 second. The client repeats it for 10 seconds; then the call fails with
//!   a retryable [`Error::Database`](crate::Error::Database), and cannot take effect later. Behind a
//!   pooler, PostgreSQL ends the wait only if `lock_timeout` is set for the user.
//! - **Old versions of rows on PostgreSQL** stay while a transaction is open for hours, or a
//!   replication slot has an old `xmin`, as that of a standby with `hot_standby_feedback`. Names
//!   that change hands often get slower then.
//! - **Logical replication.** Leave the tables of sqlock out of publications: each client writes a
//!   heartbeat at least every second while it holds or waits.
//! - **Servers that speak the protocol of another one** are not tested. TiDB is refused, because it
//!   accepts `FOR UPDATE SKIP LOCKED` and locks nothing.
//! - **Triggers on the tables of sqlock** can suppress writes; `sqlock doctor` finds them. On
//!   MySQL and MariaDB, a trigger on inserts or updates of `sqlock_lease` or `sqlock_entry` hides
//!   the token of a grant, so that the request fails. One on `sqlock_client` hides from a client
//!   that another client or an operator has taken a lease away.
//! - **The unique index of a table is checked once a minute.** A client with one schema for each
//!   tenant must name the schema in [`row_of`](crate::Locks::row_of): `tenant.accounts`. The result
//!   for a name without a schema is used for all schemas.
//! - **READ UNCOMMITTED on MySQL and MariaDB** shows versions that may never be committed, so a
//!   [versioned](crate::version::Versioned) update can overwrite the change of another writer. Use
//!   READ COMMITTED or stricter.
//! - **MySQL and MariaDB with `binlog_format=STATEMENT`** are not supported: the client works at
//!   READ COMMITTED, which the server refuses to log that way. Galera needs its cluster settings to
//!   be visible. A Group Replication member is used while it is ONLINE and its group has one
//!   primary; a group in multi-primary mode is refused with
//!   [`AccessError::Setup`](crate::database::AccessError::Setup), because its members do not see
//!   each other's row locks.
//! - **The order of a queue** is that of the database's clock: after a jump backwards, newcomers
//!   precede waiting entries. While a process holds a name that no other process wants, its own
//!   waiters queue inside it; they join the queue in the database, each at the place of its
//!   arrival, as soon as another process waits.
//! - **A shared lease or a permit costs more** than an exclusive lease: it always has an entry of
//!   its own.
//! - **A waiter or new holder that has died** is noticed after 3 seconds. So a lease that the
//!   release of another client granted lasts 3 seconds at first; 0.2 seconds later its holder
//!   extends it to its TTL. A client that has just begun, or has asked the database nothing for 2
//!   seconds, passes over a dead waiter one second after its first answer at the earliest: the
//!   database may have stood still, and the waiter may be alive.
