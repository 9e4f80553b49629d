//! The durations that several layers must agree on.

use std::time::Duration;

/// How long a grant to another client, or a waiting entry, lasts without a heartbeat of its client.
///
/// Both are the same: when the grant to a client that has died runs out, its other waiting entries
/// have run out as well.
pub(crate) const GRANT_TTL: Duration = Duration::from_secs(3);

/// The longest interval between two heartbeats of a client with leases or waiting entries.
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// How long an answer may take. An operation waits for a locked row for one second at most (on
/// SQLite two; on PostgreSQL behind a pooler without a limit), so otherwise only a frozen server or
/// a broken network takes longer. Also the limit of a statement about session locks while the
/// connection holds none.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);

/// How long a connection may take to be opened or closed.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
