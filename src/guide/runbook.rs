//! What to do when an alert fires, or a job did not run.
//!
//! Each entry has a sign, its meaning, and the commands to type, which find their database in
//! `DATABASE_URL` or `-D`. Begin with `sqlock doctor`: it checks the server, its clock, the tables
//! and the rights, and says what to change. On a quorum, `doctor`, `ls`, `show` and `unlock` take
//! `--quorum`, and the URLs of all its databases.
//!
//! Each alert of `examples/observability/alerts.yml` names its entry.
//!
//! | | sign | go to |
//! |---|---|---|
//! | 1 | `health().is_ok()` is false, `sqlock_heartbeat_late_total` or `sqlock_heartbeat_failed_total` rises | [late heartbeats](#late-heartbeats) |
//! | 2 | `lost a lease` with `it expired before it was renewed` | [expired leases](#expired-leases) |
//! | 3 | `lost a lease` with `it was taken over or evicted` | [leases taken away](#leases-taken-away) |
//! | 4 | a name is held, and nobody seems to work | [a holder that hangs](#a-holder-that-hangs) |
//! | 5 | `sqlock_waiting` grows, callers time out | [a long queue](#a-long-queue) |
//! | 6 | a nightly job did not run, or `sqlock run` failed | [a job that did not run](#a-job-that-did-not-run) |
//! | 7 | an application does not start: [`Error::Access`], [`Error::NotMigrated`] | [a database that refuses](#a-database-that-refuses) |
//! | 8 | the database failed over | [a failover](#a-failover) |
//! | 9 | a customer asks whether a payment went through | [an unknown outcome](#an-unknown-outcome) |
//! | 10 | the tables grow | [tables that grow](#tables-that-grow) |
//! | 11 | a release is to be rolled out | [a deployment](#a-deployment) |
//! | 12 | `took a name over from a dead holder`, `sqlock_taken_over_total` rises | [dead holders](#dead-holders) |
//! | 13 | a later sqlock is to be rolled out, or [`Error::NewerSchema`] | [an upgrade](#an-upgrade) |
//! | 14 | the database is to be restored from a copy | [a restore](#a-restore) |
//! | 15 | sqlock is no longer used | [a removal](#a-removal) |
//!
//! # Late heartbeats
//!
//! A heartbeat had no answer for a second, or failed. Every lease of that client is lost when its
//! TTL has passed without an answer. The database is overloaded or away, or the process gets no
//! processor time. Or the database refuses heartbeats at once, for instance because a right or the
//! table `sqlock_client` is missing: the line `a heartbeat failed` has the reason.
//!
//! ```sh
//! sqlock doctor                 # is the database reachable, and how long does it take to answer?
//! ```
//!
//! If one process reports late heartbeats, look at that process: a runtime that is blocked by work
//! without an await point sends no heartbeats. If all processes report them, look at the database
//! and the network. Do not restart the processes: a restart drops their leases and lets them all
//! connect at once.
//!
//! # Expired leases
//!
//! The client did not reach the database for a whole TTL: an outage, a paused process, a machine
//! that slept. Or a lease without renewal was not extended within its TTL. The holder knew before another client could be granted the name, and fenced
//! transactions of the old holder cannot commit. Work without a fence may have been done twice:
//! check the work that was running at that moment. A TTL as long as the usual pauses and failovers
//! avoids most of these losses; a crash then blocks the name for as long.
//!
//! # Leases taken away
//!
//! Another client owns the name by now, or an operator has evicted the holder. First look for
//! `sqlock unlock` in the shell histories. If it was not run, the database was restored from an
//! older copy, or rows were deleted by hand.
//!
//! # Dead holders
//!
//! A lease expired, and its name went to another client: its process was killed, or crashed, or is
//! stopped (it says `lost a lease` when it runs again), or the database was away when it ended.
//! Nobody held the name until the TTL was over. Look for out-of-memory kills and for deployments
//! that kill before [`Locks::drain`] has ended. The new holder must expect work that is half done.
//! A name that begins with `sqlock-idem/` is an attempt at a request with a key:
//! [`RecordInfo::lease`](crate::idempotency::RecordInfo::lease) of its record is this name.
//!
//! # A holder that hangs
//!
//! ```sh
//! sqlock show deploy            # the holder, since when, the token, and the waiters
//! sqlock unlock deploy --token 1795257707293005
//! ```
//!
//! An application that watches [`Lease::revoke_requested`](crate::Lease::revoke_requested), or a
//! `sqlock run --release-on-request`, can be asked before: `sqlock unlock deploy --ask`. The holder
//! learns of it within a second and releases the name when its work allows that.
//!
//! `show` names host and process of the holder. A dead holder needs no action: the name is free
//! after the TTL. An `expires at` that moves on means that the client lives and renews. `unlock`
//! takes the name away; the token protects a newer holder. The old holder learns of the loss with
//! its next heartbeat, within a second, and until then two holders may work: a fence protects the
//! data. Exit code 75 of `unlock` (on SQLite 69): a fenced transaction of the holder has blocked it
//! for ten seconds; end that transaction in the database first. [`max_hold`] ends such a lease
//! automatically.
//!
//! # A long queue
//!
//! ```sh
//! sqlock ls invoice/            # holders under a prefix, how long they hold, how many wait
//! sqlock show invoice/42        # who waits, in order
//! sqlock ls --watch invoice/    # the same, live: sort with s, unlock with u
//! ```
//!
//! One name with many waiters: its holders work for too long, or the name covers too much; split
//! it. Many names with few waiters each: the database is slow; `sqlock bench` compares a lease with
//! a bare write on the same connection.
//!
//! # A job that did not run
//!
//! The exit code of `sqlock run` says why; `sqlock --help` lists them all. What to do:
//!
//! - **75**: nothing, if the process that held the name did the job; `--skip-ok` makes that a
//!   success.
//! - **69**: run the job again; with `-w 10m` it waits for the database as well.
//! - **78**: read the message, and run `sqlock doctor`.
//! - **79**: look at the database, then run the job again.
//! - **64, 126, 127**: correct the command line.
//! - **71, 74**: read the message, which names the error of the system.
//! - **130, 143**: nothing; Ctrl-C or TERM has ended the wait or the command.
//!
//! # A database that refuses
//!
//! [`Error::Access`] does not go away by itself: the password, the database, a right, the pooler or
//! the server's role is wrong. [`Error::NotMigrated`]: `sqlock migrate`, with a user that may
//! create tables (on SQLite `sqlock --same-file migrate`: without it, the command creates the
//! tables for its own leases, in another file), or the statements of `sqlock schema` among your own
//! migrations.
//!
//! # A failover
//!
//! Clients reconnect by themselves and look their leases up. An asynchronous replica may lack the
//! last grants: these leases are lost, their holders are informed, and tokens still rise. See
//! [`cluster`](super::cluster).
//!
//! Read the log for `lost a lease`, and look in `sqlock ls` for names that nobody works under: a
//! release that the replica missed can keep a name until its client ends or `sqlock unlock` frees
//! it. Results of requests with a key that the replica missed are gone: a repeated request runs
//! again, and under a lease it calls the provider with the same key.
//!
//! # An unknown outcome
//!
//! A handler ended after it may have called the provider. The key stays `unknown`, and the request
//! is not run again, until its outcome is recorded. If the handler's lease was lost, or its process
//! died, the key is `started` (`--state started`), and the next request with the key runs the
//! handler again: resolve the key before you charge or refund by hand.
//!
//! ```sh
//! sqlock idem ls --state unknown --namespace payments
//! sqlock idem show order-17 --principal alice --namespace payments    # the token, the steps
//! sqlock idem resolve order-17 --principal alice --namespace payments --token 1795257707293005 \
//!     --done --result '"receipt 17"'
//! ```
//!
//! A `sqlock_idempotency_oldest_unknown_seconds` that grows without end shows such a key, or a key
//! whose process died during an attempt (`--state started`). `resolve` ends both, but no attempt
//! that still holds its lease.
//!
//! Ask the provider first. `--done` replays the result of `--result` from then on: it must be what
//! the application reads. `--failed` makes the key new. In the application, [`resume`] settles the
//! unknown attempts of its namespace, as often as its policy allows; a transaction that ended early
//! needs `resolve`.
//!
//! # Tables that grow
//!
//! Free names and ended requests stay until a sweeper purges them: [`Locks::sweeper`], or `sqlock
//! sweep` from cron. A sweep deletes in small batches and blocks nobody.
//!
//! # An upgrade
//!
//! A later release may need more tables. Create them before its first program starts:
//!
//! ```sh
//! sqlock migrate                 # of the later release
//! sqlock schema --from VERSION   # or its statements since a version, for your own migrations
//! ```
//!
//! The VERSION is in the last comment of what you have pasted before. Programs of the earlier
//! release go on, and can be started again: migrations only add. [`Error::NewerSchema`] is the
//! exception: a release that earlier ones cannot work with has migrated the database. Update the
//! program that reports it. Only [`Locks::migrate`], `sqlock migrate` and `sqlock doctor` compare
//! the record of migrations with the program. Running programs, and programs whose own migrations
//! have the statements, do not notice: stop all programs of earlier releases before such a
//! migration.
//!
//! # A restore
//!
//! Stop all clients before you restore the database, its tables, or a SQLite file from a copy, and
//! start them after it. Clients that go on during a restore may not notice it: leases granted since
//! the copy was made are gone, and their holders rely on them. Leases released since then are back,
//! until their TTL has passed without a heartbeat. When you replace a SQLite file, also delete the
//! files `-wal`, `-shm` and `-journal` beside the old file.
//!
//! Tokens still rise after a restore or a point-in-time recovery, unless the clock of the server is
//! behind the latest token that was granted before: a token is the clock, or one more than the last
//! token in the row if that is greater. Records of requests with a key are lost if they are later
//! than the copy: a repeated request runs again.
//!
//! Keep the restored database of a [`Quorum`](crate::quorum::Quorum) out of reach of its clients
//! until all leases that it may have lost have expired. [`Quorum::rejoin_after`] does this only if
//! the server was started after the restore, and not on SQLite; the command does not set it.
//!
//! In a copy for tests, empty `sqlock_idem` first: [`resume`] there would call the provider.
//!
//! # A removal
//!
//! Stop all clients. Then drop the view and the tables:
//!
//! ```sql
//! DROP VIEW IF EXISTS sqlock_holders;
//! DROP TABLE IF EXISTS sqlock_client;
//! DROP TABLE IF EXISTS sqlock_lease;
//! DROP TABLE IF EXISTS sqlock_entry;
//! DROP TABLE IF EXISTS sqlock_note;
//! DROP TABLE IF EXISTS sqlock_row;              -- not on SQLite
//! DROP TABLE IF EXISTS sqlock_idem;
//! DROP TABLE IF EXISTS sqlock_idem_step;
//! DROP TABLE IF EXISTS sqlock_idem_resolution;
//! DROP TABLE IF EXISTS _sqlock_migrations;      -- the record of Locks::migrate and sqlock migrate
//! ```
//!
//! Without `sqlock_idem`, used keys count as new. On SQLite, also delete the file `FILE-sqlock`, in
//! which the command keeps leases, with its `-wal` and `-shm`, and the directory
//! `FILE-sqlock-session` of session locks. The command's own SQLite file is in
//! `$XDG_STATE_HOME/sqlock` (by default `~/.local/state/sqlock`).
//!
//! # A deployment
//!
//! [`Locks::drain`] refuses new requests, gives the holders some time to finish, and shuts down. A
//! process that is killed instead blocks its names for their TTL. Behind a load balancer, wait some
//! seconds before the signal (`preStop` in Kubernetes), until no requests come any more: health
//! does not show a drain, and a server that ends gracefully closes its listener at once.
//!
//! [`Error::Access`]: crate::Error::Access
//! [`Error::NewerSchema`]: crate::Error::NewerSchema
//! [`Error::NotMigrated`]: crate::Error::NotMigrated
//! [`Locks::drain`]: crate::Locks::drain
//! [`Locks::migrate`]: crate::Locks::migrate
//! [`Locks::sweeper`]: crate::Locks::sweeper
//! [`Quorum::rejoin_after`]: crate::quorum::Quorum::rejoin_after
//! [`max_hold`]: crate::LeaseRequest::max_hold
//! [`resume`]: crate::idempotency::Idempotency::resume
