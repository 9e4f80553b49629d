//! Questions that users ask.
//!
//! **Which TTL?** The default, 30 seconds, unless a crash must free the name sooner. It limits
//! neither the work nor the wait. It should be longer than a pause of the process and a failover of
//! the database: an interruption shorter than the TTL loses no lease. (The command stops its child
//! `--kill-after` before the end of the lease.)
//!
//! **Must I check `is_held` all the time?** No. [`run`](crate::LeaseRequest::run) drops the work
//! when the lease is lost; a [fence](crate::Lease::fence) protects the data even if the process was
//! stopped in between. Check before an effect outside of the database.
//!
//! **Do I need a lease for one transaction?** No: [`Locks::row`](crate::Locks::row) costs one
//! statement and ends with the transaction. [The guide](super) has a table.
//!
//! **How long does a hand-over take?** Waiters of one process hand over to each other at once. On
//! PostgreSQL and SQLite, the release wakes a waiter of another process. On MySQL, on MariaDB and
//! behind a pooler that shares the sessions of PostgreSQL, the waiter polls: it notices its grant
//! within 2 to 100 ms; the longer the name is held, the longer its interval. A waiter that was not
//! the first at its last poll may be late by 250 ms. [`costs`](super::costs) has the details.
//!
//! **Does it work behind PgBouncer?** Leases, row locks and idempotency do, in transaction mode as
//! well. [Session locks](crate::session::SessionLock) refuse. Set `max_prepared_statements` above 0
//! (since PgBouncer 1.21), and `ignore_startup_parameters = extra_float_digits`. Give sqlock a user
//! of its own, for which PgBouncer has [a pool of its own](super::limits):
//! [`Locks::connect`](crate::Locks::connect) takes a URL with that user. The pooler refuses or
//! drops the settings of sqlock's sessions, so set them for the user:
//!
//! ```sql
//! ALTER ROLE app_locks SET lock_timeout = '1s';
//! ALTER ROLE app_locks SET enable_seqscan = off;
//! ALTER ROLE app_locks SET jit = off;
//! ```
//!
//! The user of your own pool keeps its [rights on the tables](super::security#rights): fences and
//! requests with a key are statements in your transactions.
//!
//! **Does it work behind a proxy for MySQL or MariaDB?** The proxy must keep one session of the
//! server for each connection, without multiplexing: sqlock sets session variables and user
//! variables there. It must send no statement of sqlock to a replica, whose answer could be out of
//! date. ProxySQL and MaxScale are not tested.
//!
//! **How many names may I use?** As many as you like: a name is one small row, which the
//! [sweeper](crate::Locks::sweeper) deletes when it has been free for an hour. 100 000 held leases
//! cost one statement a second. See [`costs`](super::costs).
//!
//! **How many connections does it need?** At most three for each client (on SQLite two) beside your
//! pool, one more with session locks (two while PostgreSQL opens it), one for each list of the
//! holders of a session lock, and one while a process migrates.
//! [`LocksBuilder::connections(1)`](crate::LocksBuilder::connections) saves one, but not on SQLite.
//! Each `sqlock run` has up to three while it waits or holds. Each database of a quorum counts
//! alone. The server's `max_connections` must have room for the sum.
//!
//! **May the database user be read-only?** No: a lease is written. [`security`](super::security)
//! lists the rights for each task; only [`migrate`](crate::Locks::migrate) creates tables.
//!
//! **Why are the tables "missing" although I migrated?** The client opens connections of its own
//! with the pool's connect options. A `search_path` that `after_connect` sets does not apply to
//! them: put it into the options. See [`recipes`](super::recipes#search_path).
//!
//! **Can several applications share one database?** Yes. Names are shared by all of them, so begin
//! them with the application's name, or give each application a schema (PostgreSQL) or a database.
//!
//! **What happens while the database is away?** Nothing is granted; held leases stay until their
//! TTL has passed, and their holders know when. Requests fail with
//! [`Error::Unavailable`](crate::Error::Unavailable) after some seconds, in which the client
//! reconnects. A client never grants a lease by itself.
//!
//! **Which errors may I retry?** Those of which
//! [`Error::is_retryable`](crate::Error::is_retryable) is true: `Timeout`, `Unavailable`,
//! `PoolExhausted`, conflicts, and lock waits that timed out. After the last two, run your
//! transaction again from its beginning. After `Unavailable` a write may have taken effect: read
//! before you repeat a call that is no acquisition. It is false for all others: after `Lost`,
//! acquire again; after `Unknown` and `CommitUnknown`, read first; after `Closed`, a new client is
//! needed.
//!
//! **Is it exactly once?** For effects in this database, yes: claim, effect and result are one
//! transaction of [`Idempotency`](crate::idempotency::Idempotency). For effects elsewhere no system
//! can promise that; [`run_leased`](crate::idempotency::Idempotency::run_leased) keeps an unknown
//! outcome as unknown until it is resolved or resumed, and continues an attempt that has died with
//! the same key for the provider.
//!
//! **How do I test code that locks?** With [`testing::Memory`](crate#features), whose faults
//! come on demand, in virtual time.
//!
//! **How do I turn locks off for a demonstration?** `testing::null_locks()` returns locks that
//! exclude nobody.
//!
//! **Who holds it?** `sqlock show NAME`, [`Locks::holders`](crate::Locks::holders), or the view
//! `sqlock_holders`. Of a session lock:
//! [`SessionRequest::holders`](crate::session::SessionRequest::holders).
