//! Macros for the parts that several statements share.

/// Microseconds since the epoch. `unixepoch('subsec')` would need SQLite 3.42. A statement that
/// writes reads the clock after it has the write lock. The clock has a resolution of milliseconds
/// and does not advance during a statement.
macro_rules! now {
    () => {
        "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)"
    };
}

/// [`GRANT_TTL`](crate::protocol::timing::GRANT_TTL) in microseconds.
macro_rules! grant {
    () => {
        "3000000"
    };
}

/// When a row of `sqlock_lease` expires: at its `expires_at`, or one TTL after the last heartbeat
/// of its client, whichever is later.
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

/// Whether an entry of a name waits.
macro_rules! is_awaited {
    ($name:literal) => {
        concat!("EXISTS (SELECT 1 FROM sqlock_entry AS w WHERE w.name = ", $name, " AND w.token = 0)")
    };
}

/// Whether the name has no holder, no waiter, and no entry of the claim itself.
#[rustfmt::skip]
macro_rules! is_vacant {
    ($name:literal, $id:literal) => {
        concat!("
       (l.id = '' AND NOT ", is_awaited!($name), "
        AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS o WHERE o.name = ", $name, " AND o.id = ", $id, "))")
    };
}

/// Frees a name.
macro_rules! set_free {
    () => {
        "SET id = '', owner = '', client = '', expires_at = 0"
    };
}

/// Grants names that are vacant or have no row. `$claims` are the new rows.
#[rustfmt::skip]
macro_rules! grant_vacant {
    ($claims:expr) => {
        concat!("
INSERT INTO sqlock_lease AS l (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)", $claims, "
    ON CONFLICT (name) DO UPDATE
   SET id = excluded.id, owner = excluded.owner, client = excluded.client, token = max(l.token + 1, excluded.token),
       ttl = excluded.ttl, expires_at = excluded.expires_at, acquired_at = excluded.acquired_at,
       holder = excluded.holder, label = excluded.label
 WHERE ", is_vacant!("l.name", "excluded.id"))
    };
}
