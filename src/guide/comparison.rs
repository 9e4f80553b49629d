//! sqlock beside other kinds of locks.
//!
//! | | freed when its holder dies | waits in a queue | fencing token | another system to run | note |
//! |---|---|---|---|---|---|
//! | **sqlock** | after the TTL | yes | yes, and fenced commits | no | a lease costs a durable write |
//! | advisory locks, `GET_LOCK` | at once, with the connection | yes | no | no | the fastest on SQL, and the right choice for short work at one server; a connection per lock; not behind a transaction pooler; lost at failover. [Session locks](crate::Locks::session) avoid their traps |
//! | `SELECT … FOR UPDATE` | at once, with the connection | yes | not needed: the lock is the transaction | no | ideal inside one transaction; a connection and an open transaction for as long as it is held |
//! | Redis (`SET NX PX`, Redisson, RedLock) | after the TTL | Redisson: yes | not built in, or not checked by your database | Redis | lower latency than a durable database write when Redis does not fsync; a failover can lose the lock |
//! | ZooKeeper, etcd | after the session's timeout | yes | revision or zxid, which you must check | a cluster of 3 or 5 | consensus: survives the loss of a minority; the choice if you run one anyway and lock much |
//! | lock tables (ShedLock and others) | after a fixed time | no, they skip | no | no | made for scheduled jobs; usually no renewal, and clients' clocks in some set-ups |
//!
//! Only a lock in the same database as the data can make the commit itself depend on it. A
//! [fence](crate::Lease::fence) does that. In return a lease is as available as that database, and
//! no more.
