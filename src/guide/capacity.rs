//! How much one database carries, which resource ends first, and what to split then.
//!
//! | what grows | it uses | it ends with |
//! |---|---|---|
//! | clients | 3 connections each at most (SQLite: 2 on the file), and 1 heartbeat a second | the server's `max_connections`; then its processor |
//! | leases of a client | 1 row each, and some 2 kB of the client's memory; no statement | the memory of the client |
//! | acquisitions and releases | 1 commit for each batch of requests that a client makes at the same time | the flush of the disk for few tasks, the processors of the server and the clients for many |
//! | hand-overs of one name | 1 commit, 1 message to the next holder, and its answer | the time of a hand-over: names do not wait for each other, the holders of one name do |
//! | waiters for a name | 1 row, and 4 to 10 polls a second, for each client that waits; some 2.5 kB of the client's memory for each waiter | the server's processor, with thousands of clients that wait |
//! | names ever used | 1 row each, until the sweeper purges it | the disk; a name that is used finds its row by key |
//!
//! [`costs`](super::costs) has the statements of each call.
//!
//! # A model
//!
//! `scripts/bench --capacity FILE` predicts rates from a run of the bench: it takes the time of a
//! statement, of a further request in the same statement, of a hand-over, of a heartbeat and of a
//! further lease in it, and the bytes of a name. A rate is limited either by how long requests take
//! or by how long the server works on them. The model has no queues and no noise. Run it on your
//! own servers:
//!
//! ```text
//! scripts/bench --json run.json --only A,B,C,D,G,H
//! scripts/bench --capacity run.json
//! ```
//!
//! Measured and predicted, on 2 cores of an AMD EPYC, with the servers on the same machine and
//! durable settings. Rows in which the two must agree, because a constant comes from them, are left
//! out:
//!
//! | | PostgreSQL 15 | MySQL 9.7 | MariaDB 10.11 | SQLite 3.51 FULL | SQLite 3.51 NORMAL |
//! |---|---|---|---|---|---|
//! | cycles/s, 1 task | 1 906, 1 530 | 1 100, 1 123 | 1 212, 1 334 | 2 059, 1 864 | 7 630, 6 926 |
//! | cycles/s, 64 tasks | 28 608, 31 318 | 8 499, 8 320 | 14 055, 15 410 | 32 249, 34 647 | 52 182, 43 247 |
//! | hand-overs/s, 64 tasks of a process | 3 229, 3 092 | 2 265, 2 089 | 2 390, 2 586 | 3 444, 3 560 | 12 631, 14 280 |
//! | hand-overs/s, 128 tasks of a process | 3 083, 3 092 | 2 363, 2 089 | 2 634, 2 586 | 4 142, 3 560 | 13 890, 14 280 |
//! | hand-overs/s, 8 processes | 976, 908 | 332, 324 | 423, 433 | 479, 378 | 677, 672 |
//! | heartbeat with 100 leases, µs | 1 129, 1 442 | 1 067, 1 209 | 1 213, 1 348 | 808, 786 | 393, 300 |
//!
//! # Beyond one machine's figures
//!
//! The same model for more clients, each with 10 000 leases and one busy task: cycles of acquire and
//! release a second; the part of the server's time that heartbeats take; the size of the tables.
//!
//! | clients, leases in all | PostgreSQL 15 | MySQL 9.7 | MariaDB 10.11 | SQLite 3.51 FULL |
//! |---|---|---|---|---|
//! | 1, 10 000 | 1 530; 0.01 %; 0.0049 GB | 1 123; 0.01 %; 0.0047 GB | 1 334; 0.01 %; 0.0047 GB | 1 864; 0.03 %; 0.0018 GB |
//! | 10, 100 000 | 8 920; 0.06 %; 0.049 GB | 4 969; 0.10 %; 0.047 GB | 8 802; 0.05 %; 0.047 GB | 2 703; 0.29 %; 0.018 GB |
//! | 100, 1 000 000 | 9 076; 0.55 %; 0.49 GB | 4 979; 1.0 %; 0.47 GB | 9 162; 0.55 %; 0.47 GB | 2 703; 2.9 %; 0.18 GB |
//! | 1 000, 10 000 000 | 9 076; 5.5 %; 4.9 GB | 4 979; 10 %; 4.7 GB | 9 162; 5.5 %; 4.7 GB | 2 703; 29 %; 1.8 GB |
//! | 10 000, 100 000 000 | 9 076; 55 %; 49 GB | 4 979; 100 %; 47 GB | 9 162; 55 %; 47 GB | 2 703; 287 %; 18 GB |
//!
//! Above 100 % heartbeats do not get through in time, and leases are lost. Connections end first:
//! with 3 for each client, 100 clients fill a server with `max_connections = 300`.
//! [`connections(1)`](crate::LocksBuilder::connections) saves one for each client. A pooler in front of
//! the server multiplies the clients; on PostgreSQL, a client behind a transaction pooler is not
//! notified and polls.
//!
//! # What to split, and when
//!
//! - **One busy name.** No server helps: hand-overs of a name follow each other. Split the name
//!   (`stock/7/0` to `stock/7/9`), take it for longer and do more under it, or use
//!   [permits](crate::Locks::semaphore).
//! - **More than some hundred clients.** Share one [`Locks`](crate::Locks) in each process first: a
//!   clone is the same client. Then put a pooler in front, or give each region its own database.
//! - **More acquisitions than one server commits.** Put names on several databases, chosen by a
//!   hash of the name: `locks[hash(name) % locks.len()]`. Names of one
//!   [`lease_all`](crate::Locks::lease_all) must be on one database. Changing the number of databases
//!   moves names: release everything first, or move them while nobody holds them.
//! - **Tenants.** A schema (MySQL, MariaDB: a database) for each tenant, set by the connection's
//!   options, keeps their names, sweeps and rights apart. They share the server's connections and
//!   processor.
//! - **Fences stay with their data.** A [fence](crate::Lease::fence) works only in the database that
//!   has the lease, so shard leases the way their data is sharded.
//! - **Names that are used once**, such as one for each order, leave a row until the sweeper purges
//!   it, an hour later by default. Run a [sweeper](crate::Locks::sweeper); [`costs`](super::costs#growth) has
//!   the time of a sweep.
