//! A comparison of sqlock with other kinds of locks.
//!
//! # Systems
//!
//! | | freed when its holder dies | waits in a queue | fencing token | another system to run | note |
//! |---|---|---|---|---|---|
//! | **sqlock** | after the TTL | yes | yes, and fenced commits | no | a lease costs a durable write |
//! | advisory locks, `GET_LOCK` | at once, with the connection | yes | no | no | the fastest on SQL, and the right choice for short work at one server; a connection per lock; not behind a transaction pooler; lost at failover. [Session locks](crate::Locks::session) avoid their traps |
//! | `SELECT … FOR UPDATE` | at once, with the connection | yes | not needed: the lock is the transaction | no | ideal inside one transaction; a connection and an open transaction for as long as it is held |
//! | Redis (`SET NX PX`, Redlock) | after the TTL | no, clients ask again | no | Redis | lower latency than a durable database write when Redis does not fsync; a failover can lose the lock |
//! | Redisson, Java | after the TTL, renewed by a watchdog | its fair lock | its fenced lock; your database must check it | Redis or Valkey | the richest set of locks there is; a failover can lose a lock that was not replicated |
//! | ZooKeeper 3.8, etcd 3.4 | after the session's timeout | yes | zxid or revision, which you must check | a cluster of 3 or 5 | consensus: survives the loss of a minority; the choice if you run one anyway and lock much |
//! | ShedLock 7.6, Java | after a fixed time | no, it skips | no | no | made for scheduled jobs: simple and proven; no renewal unless the job asks; since 7.0 all its SQL providers can use the database's clock |
//!
//! Only a lock in the same database as the data can make the commit itself depend on it. A
//! [fence](crate::Lease::fence) does that. In return a lease is as available as that database, and
//! no more.
//!
//! # Rust crates
//!
//! As of November 2026, by their own documentation:
//!
//! | crate | what it is | take it if |
//! |---|---|---|
//! | `sqlx` 0.9, `PgAdvisoryLock` | an advisory lock of PostgreSQL, with a guard | you need one lock at one server and have it already; a connection per lock |
//! | `distributed-lock` 0.2 | one interface over PostgreSQL, MySQL, Redis, MongoDB and files: exclusive locks, readers and writers, semaphores, with detection of a lost handle | you want to change the backend later; on PostgreSQL it locks by advisory locks |
//! | `rslock` 0.10, `redlock` 2.0 | Redlock on one or several Redis servers; asynchronous, blocking | you run Redis and a lost lock does no harm |
//! | `etcd-client` 0.21 | a client of etcd, with its locks and elections | you run etcd |
//! | `zookeeper-client` 0.11 | a client of ZooKeeper, with the lock recipe | you run ZooKeeper |
//! | `axum-idempotent` 0.6 | a layer that replays stored responses | repeated requests must get the stored response, and two at the same moment do no harm; [`idempotency`](crate::idempotency) claims the key in the transaction of the effect |
//!
//! Compared with these crates, sqlock has no backends other than SQL databases, no blocking calls,
//! and no years of production use.
