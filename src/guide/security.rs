//! Security: rights for each task, TLS, and what a user with rights on the tables can do.
//!
//! # Rights
//!
//! Only [`Locks::migrate`] creates tables, and only when some are missing. `sqlock schema` prints
//! the statements for your own migrations. From then on these rights suffice; a test grants exactly
//! them on PostgreSQL, MySQL and MariaDB, and runs each task. `sqlock doctor` names the missing
//! ones.
//!
//! | task | tables | rights |
//! |---|---|---|
//! | leases: acquire, wait, renew, release, fence, evict | `sqlock_client`, `sqlock_lease` | SELECT, INSERT, UPDATE |
//! | leases | `sqlock_entry` | SELECT, INSERT, UPDATE, DELETE |
//! | leases: notes | `sqlock_note` | SELECT, INSERT, UPDATE, DELETE |
//! | row locks by name | `sqlock_row` | SELECT, INSERT, UPDATE |
//! | idempotency, with the rights for leases | `sqlock_idem`, `sqlock_idem_step` | SELECT, INSERT, UPDATE, DELETE |
//! | idempotency: resolving unknown outcomes | `sqlock_idem_resolution` | SELECT, INSERT |
//! | inspection: `list`, `sqlock ls`, `sqlock show` | `sqlock_client`, `sqlock_lease`, `sqlock_entry`, `sqlock_note` | SELECT |
//! | sweeping | `sqlock_client`, `sqlock_lease`, `sqlock_entry`, `sqlock_note`, `sqlock_row`, `sqlock_idem`, `sqlock_idem_step` | SELECT, UPDATE, DELETE |
//! | `sqlock bench`, with the rights for leases | `sqlock_lease` | DELETE |
//! | reading the view `sqlock_holders` | `sqlock_holders` (MySQL, MariaDB: and the tables of inspection) | SELECT |
//! | migrating tables that are up to date, and votes of a quorum | `_sqlock_migrations` | SELECT |
//!
//! [Session locks](crate::session::SessionLock) need no right on tables. Row locks on your own
//! tables need the rights of the statements that you send to them.
//!
//! # A user with these rights
//!
//! The rights on the tables are the rights to *all* locks in them: there are no rights for single
//! names. A user who can write the rows can
//!
//! - take any name, free any name, or keep a name for ever, by writing its row;
//! - let two owners work at once: the old holder learns of it at its next heartbeat. A
//!   [fence](crate::Lease::fence) compares the row, which such a user can write as well;
//! - lock rows, so that renewals of their names wait until the leases expire;
//! - forge holders and labels, and read and change stored results of
//!   [requests](crate::idempotency).
//!   [`Idempotency::seal`] encrypts them with your
//!   functions, which can detect changes of what is sealed. Content without a seal is accepted, so
//!   such a user can still replace it.
//!
//! On PostgreSQL, a user who can only read `sqlock_client` and `sqlock_entry` can forge the
//! notification of a grant, because NOTIFY needs no right: a waiter relies on the lease until its
//! first extension, 0.2 s later, is refused. A fence fails at once.
//!
//! Such users cannot
//!
//! - make a holder rely on a lease for longer than the holder's own deadline, which is taken from
//!   the holder's clock before each renewal;
//! - run SQL in other sessions: names, labels, holders and keys are parameters of prepared
//!   statements or escaped literals;
//! - stop other clients with rows that cannot be read: they leave such rows out, with a warning;
//! - act on an operator's terminal: see below.
//!
//! So applications that do not trust each other need separate tables, each in a schema or database
//! of its own with its own user.
//!
//! # Terminals
//!
//! Names, labels, holders and notes come from others. The command escapes control characters,
//! format characters such as U+202E, which reverses text, and newlines in all of its output:
//! tables, messages, the screen of `sqlock ls --watch`, and JSON, where nothing is lost by it. The
//! library writes names with quotes and escapes in errors and logs.
//!
//! # TLS
//!
//! The URL decides. By default PostgreSQL and MySQL clients use TLS if the server offers it, and
//! trust any certificate: this protects against eavesdropping, not against a server that
//! impersonates yours.
//!
//! | | verify the server |
//! |---|---|
//! | PostgreSQL | `?sslmode=verify-full&sslrootcert=/etc/ssl/db.pem` |
//! | MySQL, MariaDB | `?ssl-mode=VERIFY_IDENTITY&ssl-ca=/etc/ssl/db.pem` |
//!
//! A certificate of another authority, or for another host name, is refused with
//! [`AccessError::Tls`] before a password is sent. The library uses the TLS that your `sqlx` has;
//! the command brings rustls with the certificates that the system trusts. `sqlock doctor` reports
//! a connection without TLS, or one that does not verify the server.
//!
//! # Passwords
//!
//! - Other users of a host see command lines: pass the URL in a variable, or as `-D @FILE` from a
//!   file that only its owner can read.
//! - No message contains a password: errors name host and port, not the URL, and usage errors mask
//!   URLs.
//! - `sqlock run` passes its environment on to the command, and with it `DATABASE_URL`, as every
//!   shell does. Start it with `-D @FILE` if the command must not know the URL.
//!
//! [`AccessError::Tls`]: crate::database::AccessError::Tls
//! [`Idempotency::seal`]: crate::idempotency::Idempotency::seal
//! [`Locks::migrate`]: crate::Locks::migrate
