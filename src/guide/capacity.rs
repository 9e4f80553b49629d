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
//! | cycles/s, 1 task | 1 993, 1 723 | 1 041, 1 029 | 1 334, 1 376 | 1 591, 1 586 | 4 622, 5 131 |
//! | cycles/s, 64 tasks | 27 704, 30 149 | 7 679, 9 434 | 14 226, 15 887 | 27 895, 24 381 | 30 785, 39 361 |
//! | hand-overs/s, 64 tasks of a process | 2 767, 3 100 | 2 248, 2 074 | 2 884, 2 754 | 3 257, 3 478 | 15 111, 15 800 |
//! | hand-overs/s, 128 tasks of a process | 2 839, 3 100 | 2 313, 2 074 | 2 658, 2 754 | 3 436, 3 478 | 13 055, 15 800 |
//! | hand-overs/s, 8 processes | 995, 1 068 | 264, 292 | 352, 373 | 501, 498 | 671, 747 |
//! | heartbeat with 100 leases, µs | 912, 1 164 | 1 007, 1 262 | 1 054, 727 | 773, 760 | 269, 336 |
//!
//! # Beyond one machine's figures
//!
//! The same model for more clients, each with 10 000 leases and one busy task: cycles of acquire and
//! release a second; the part of the server's time that heartbeats take; the size of the tables.
//!
//! | clients, leases in all | PostgreSQL 15 | MySQL 9.7 | MariaDB 10.11 | SQLite 3.51 FULL |
//! |---|---|---|---|---|
//! | 1, 10 000 | 1 723; 0.01 %; 0.0048 GB | 1 029; 0.01 %; 0.0037 GB | 1 376; 0.01 %; 0.0047 GB | 1 586; 0.03 %; 0.0018 GB |
//! | 10, 100 000 | 8 098; 0.06 %; 0.048 GB | 3 970; 0.13 %; 0.037 GB | 9 247; 0.07 %; 0.047 GB | 2 436; 0.28 %; 0.018 GB |
//! | 100, 1 000 000 | 8 126; 0.62 %; 0.48 GB | 3 973; 1.3 %; 0.37 GB | 9 673; 0.73 %; 0.47 GB | 2 436; 2.8 %; 0.18 GB |
//! | 1 000, 10 000 000 | 8 126; 6.2 %; 4.8 GB | 3 973; 13 %; 3.7 GB | 9 673; 7.3 %; 4.7 GB | 2 436; 28 %; 1.8 GB |
//! | 10 000, 100 000 000 | 8 126; 62 %; 48 GB | 3 973; 126 %; 37 GB | 9 673; 73 %; 47 GB | 2 436; 280 %; 18 GB |
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
