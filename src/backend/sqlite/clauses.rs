//! Macros for the parts that several statements share.

/// Microseconds since the epoch. `unixepoch('subsec')` would need SQLite 3.42. A statement that
/// writes reads the clock after it has the write lock. The clock has a resolution of milliseconds
/// and does not advance during a statement.
macro_rules! now {
    () => {
        "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)"
    };
}

/// [`GRANT`](crate::protocol::timing::GRANT) in microseconds.
macro_rules! grant {
    () => {
        "3000000"
    };
}

/// The time until which a row of `sqlock_lease` is valid: the later of its own expiry and the one
/// by the heartbeat of its client.
macro_rules! lease_until {
    ($row:literal) => {
        concat!("max(", $row, ".expires_at, coalesce((SELECT c.beat_at + ", $row, ".ttl
                     FROM sqlock_client AS c WHERE c.id = ", $row, ".client), 0))")
    };
}

/// The same for a row of `sqlock_entry`.
macro_rules! entry_until {
    ($row:literal) => {
        concat!("max(", $row, ".expires_at, coalesce((SELECT c.beat_at + CASE ", $row, ".token WHEN 0 THEN ",
                grant!(), " ELSE ", $row, ".ttl END
                     FROM sqlock_client AS c WHERE c.id = ", $row, ".client), 0))")
    };
}

/// The columns of [`read_lease`](crate::backend::stored::read_lease). SQLite reads the waiting
/// entries instead of a mark.
macro_rules! lease_columns {
    () => {
        concat!("l.id, l.owner, l.client, l.token, ", lease_until!("l"), " - ",
                now!(), " AS remaining, 0 AS waiting, l.lost, l.asked")
    };
}

/// Whether an entry of the name `$1` waits.
macro_rules! is_awaited {
    () => {
        "EXISTS (SELECT 1 FROM sqlock_entry AS w WHERE w.name = $1 AND w.token = 0)"
    };
}

/// Whether the name has no holder, no waiter, and no entry of the claim itself.
#[rustfmt::skip]
macro_rules! is_vacant {
    () => {
        concat!("
       (l.id = '' AND NOT ", is_awaited!(), "
        AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS o WHERE o.name = $1 AND o.id = $2))")
    };
}

/// Frees a name that is held exclusively and has no waiter. $1 name, $2 id, $3 token.
#[rustfmt::skip]
macro_rules! free_unawaited {
    () => {
        concat!("
UPDATE sqlock_lease SET id = '', owner = '', client = '', expires_at = 0
 WHERE name = $1 AND id = $2 AND token = $3 AND NOT ", is_awaited!())
    };
}

/// Grants a name that is vacant or has no row. $1 name, $2 id, $3 owner, $4 client, $5 ttl, $6
/// holder, $7 label.
#[rustfmt::skip]
macro_rules! grant_vacant {
    () => {
        concat!("
INSERT INTO sqlock_lease AS l (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)
VALUES ($1, $2, $3, $4, ", now!(), ", $5, ", now!(), " + $5, ", now!(), ", $6, $7)
    ON CONFLICT (name) DO UPDATE
   SET id = excluded.id, owner = excluded.owner, client = excluded.client, token = max(l.token + 1, excluded.token),
       ttl = excluded.ttl, expires_at = excluded.expires_at, acquired_at = excluded.acquired_at,
       holder = excluded.holder, label = excluded.label
 WHERE ", is_vacant!())
    };
}
