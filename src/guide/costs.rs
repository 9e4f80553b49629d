//! What each call costs: the statements that the database receives, each a transaction of its own.
//!
//! | call | statements |
//! |---|---|
//! | acquire a free name | 1; the first time a name is ever used: SQLite 1, PostgreSQL, MySQL and MariaDB 2 |
//! | try a name that is held | 1, which writes nothing |
//! | wait | after the try 1, for an entry in the queue; then [polls](#waiting) |
//! | hand over to a waiter of another process | PostgreSQL 1, SQLite 2, MariaDB 3, MySQL 4. The number of waiters does not change it. The new holder sends 1 more, which sets its TTL: after 0.2 s, if it still holds the lease; for a lease that is not renewed, before `acquire` returns |
//! | hand over to the next waiter in this process | 1, instead of a release and an acquire |
//! | renew everything that a client holds or waits for | 1 a heartbeat, at a third of the shortest TTL, at least once a second |
//! | release | 1; on PostgreSQL it does not wait for the disk unless it hands the name over, or a synchronous standby is required: if the server crashes within a second, the next heartbeat of its client repeats it; a client that neither holds nor waits sends none, and the name is free after its TTL |
//! | acquire, extend or release many names at once in one process | PostgreSQL and SQLite 1 for up to 256 of them (PostgreSQL 64 with TLS), MariaDB 3 or 4 and MySQL 6 or 7 in one round trip for up to 128 (40 with TLS) |
//! | enter again, in the same client | 0 |
//! | [`fence`](crate::Lease::fence) | 1, in the caller's transaction, and on PostgreSQL and SQLite 1 that checks that it is open; on Galera 2, or 3 for a shared lease |
//! | a request that takes effect once | 2, in its transaction: the claim and the result; MySQL and MariaDB 1 more on a connection of the client. A repetition: 2, there 1 |
//! | [`set_note`](crate::Lease::set_note), [`last_note`](crate::Locks::last_note) | 1; MySQL, MariaDB: the first `set_note` of a holding 2, or 3 where it deletes the note of a former holder |
//! | [`ask_to_release`](crate::Locks::ask_to_release) | 1; each client that is asked looks its leases up, 1 for each |
//! | `is_held`, `lost`, `revoke_requested`, `token` | 0 |
//!
//! PostgreSQL adds two round trips to each call when commits are asynchronous, and behind a pooler
//! also when the default isolation level is not READ COMMITTED. On Galera, each statement of a
//! transaction is a round trip: about ten for a call that writes several rows.
//!
//! # Waiting
//!
//! A client polls once for each name that it waits for, whatever the number of its waiters: every
//! 100 ms while its waiter is the first in the queue, else every 250 ms. On top of that:
//!
//! | database | a waiter learns of its grant |
//! |---|---|
//! | PostgreSQL | from a notification, which needs no statement; if the heartbeat is late, or a lease was taken away from the client meanwhile, the client polls first |
//! | SQLite | by a poll after a commit of another connection, at most once a millisecond. The client reads the count of commits, without a lock, after an eighth of the time since the last one, at least every 50 ms |
//! | MySQL, MariaDB | by a poll after 1 ms, and then each time after an eighth of the time for which a holder has the name: the mean since the wait began, or that of the present holder, whichever is longer. A place further back multiplies it, up to 250 ms |
//!
//! On PostgreSQL the entry in the queue does not wait for the disk. If a crash undoes it, the client
//! adds it again.
//!
//! # TLS
//!
//! sqlx 0.9.0 [does not set `TCP_NODELAY`](https://github.com/transact-rs/sqlx/issues/4335): TCP may
//! keep a small packet back until the server acknowledges the one before, which takes Linux 40 ms.
//! A batch on an encrypted connection fits into one packet of TLS, with names of up to 100
//! characters (MySQL 40), so leases do not wait for that. Opening such a connection to MySQL does:
//! `sqlock run` takes 60 ms there, and 17 ms without TLS.
//!
//! # Rows
//!
//! A name costs one small row, updated in place, and one for each waiter. The
//! [sweeper](crate::Locks::sweeper) purges names that have long been free, and records of requests
//! whose retention has passed.
//!
//! 100 000 leases of one client, held for two minutes on PostgreSQL 15 (`scripts/soak held`): 1.1
//! statements and 5.5 kB of WAL a second, and none was lost.
//!
//! # Measured
//!
//! One run of `scripts/bench --json FILE --only A,C,D,G` with durable settings, drawn by
//! `scripts/bench --plot`. The floor is the least SQL that any correct lease needs, on bare
//! connections in the same run. Another machine repeats the ratio to the floor, not the times. More
//! waiters in other processes slow a hand-over on MySQL and MariaDB, where each client looks at the
//! row. A heartbeat renews any number of leases for the cost of one; its floor renews them one by
//! one.
//!
#![doc = include_str!("charts/cycle.svg")]
//!
#![doc = include_str!("charts/handover.svg")]
//!
#![doc = include_str!("charts/heartbeat.svg")]
//!
//! Next to a lock on a Redis 7.0 that writes to the same disk before it answers (`appendfsync
//! always`; `SET NX PX`, and a script that deletes), leases on PostgreSQL 15 reach 0.74 of its cycles
//! per second with one task, 0.60 with 64 tasks and 0.50 with 1 024, 61 000 cycles/s
//! (`scripts/bench --only B`).
//!
//! Next to the lock of ZooKeeper's recipes, on one ZooKeeper 3.8 with the same disk, a cycle of a lease
//! on PostgreSQL 15 takes 0.33 of the time, and a hand-over between two processes 0.73. Of the
//! hand-overs per second of 8 clients, 8 processes and 16 processes that want one name, leases reach
//! 0.85, 0.80 and 0.72 (`scripts/bench --quick --only A,F,L`).
//!
//! # Growth
//!
//! `scripts/soak growth` with durable settings, one run of each database. A cycle acquires and
//! releases a name that has a row; milliseconds, median and 99th percentile:
//!
//! | rows in the table | PostgreSQL 15 | MySQL 9.7 | MariaDB 10.11 | SQLite 3.51 |
//! |---|---|---|---|---|
//! | none | 0.7, 1.1 | 1.3, 2.7 | 1.2, 2.7 | 0.5, 0.8 |
//! | 1 000 000 free names | 0.7, 0.9 | 1.1, 2.4 | 1.0, 1.7 | 0.6, 0.8 |
//! | 1 000 000 held names | 0.7, 1.1 | 1.2, 3.3 | 1.0, 1.5 | 0.7, 1.2 |
//! | 1 000 000 expired names | 0.6, 0.9 | 1.0, 2.6 | 1.1, 1.7 | 0.6, 0.9 |
//! | while 1 000 000 free names are swept | 0.7, 4.4, at most 9 | 1.1, 8.4, at most 140 | 1.0, 6.4, at most 68 | 0.6, 24.0, at most 631 |
//! | while 1 000 000 held names are looked through | 0.8, 2.2, at most 8 | 1.4, 4.0, at most 134 | 1.4, 2.9, at most 10 | 0.7, 4.4, at most 55 |
//! | the sweep of 1 000 000 free names, of as many held ones | 13 s, 6 s | 28 s, 16 s | 20 s, 7 s | 4 s, 7 s |
//! | 10 000 000 free names | 0.8, 1.3 | 1.3, 4.6 | 0.8, 3.7 | 0.6, 0.9 |
//! | 10 000 000 held names | 0.7, 1.0 | 1.1, 3.5 | 0.8, 2.1 | 0.7, 1.1 |
//! | 10 000 000 expired names | 0.7, 2.9 | 1.1, 3.4 | 0.9, 2.0 | 0.6, 0.9 |
//! | while 10 000 000 free names are swept | 0.7, 4.8, at most 334 | 1.3, 9.4, at most 515 | 1.0, 10.1, at most 144 | 0.6, 54.6, at most 1234 |
//! | while 10 000 000 held names are looked through | 0.6, 1.9, at most 17 | 1.2, 3.3, at most 125 | 1.7, 9.2, at most 64 | 0.6, 3.8, at most 105 |
//! | the sweep of 10 000 000 free names, of as many held ones | 132 s, 51 s | 314 s, 136 s | 200 s, 65 s | 43 s, 60 s |
//!
//! A sweep that finds nothing to purge still reads every name, in batches. Builds ran beside the ten
//! million names of MariaDB.
//!
#![doc = include_str!("charts/names.svg")]
//!
//! Waiters for one name in four clients, hand-overs per second with 10, 100, 1 000 and 10 000 of
//! them: PostgreSQL 68, 207, 430, 400; MySQL 155, 172, 126, 123; MariaDB 307, 351, 298, 343; SQLite 780, 1 109, 995, 971. Each
//! waiter takes some 2.5 kB of memory.
//!
#![doc = include_str!("charts/waiters.svg")]
