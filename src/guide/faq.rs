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
//! well. [Session locks](crate::session::SessionLock) refuse. ProxySQL and MaxScale are not tested;
//! let them send no statement of sqlock to a replica, whose answer could be out of date.
//!
//! **How many names may I use?** As many as you like: a name is one small row, which the
//! [sweeper](crate::Locks::sweeper) deletes when it has been free for an hour. 100 000 held leases
//! cost one statement a second. See [`costs`](super::costs).
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
