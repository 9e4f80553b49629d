-- The line before a name: one row for each that waits, and one for each that shares the name or has permits of it.
-- (A single holder stands in sqlock_lease.)
--
-- hold         as in sqlock_lease, with its ';'.
-- client, bell whose it is, and the channel on which to tell it; empty: it looks by itself.
-- units, permits    how many permits it takes, of how many. 0 units: it wants the name for itself alone.
-- place        the order in the line: the moment at which it came, in microseconds by this database's clock.
-- token        0: it waits. Otherwise its fencing token: it holds.
-- expires_at   of those who wait and of those who hold, each its own. What has expired counts as gone.
CREATE TABLE IF NOT EXISTS sqlock_place (
    name        TEXT    NOT NULL COLLATE BINARY,
    hold        TEXT    NOT NULL,
    owner       TEXT    NOT NULL,
    client      TEXT    NOT NULL,
    bell        TEXT    NOT NULL,
    units       INTEGER NOT NULL,
    permits     INTEGER NOT NULL,
    place       INTEGER NOT NULL,
    token       INTEGER NOT NULL,
    holder      TEXT    NOT NULL,
    label       TEXT    NOT NULL,
    acquired_at INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL,
    PRIMARY KEY (name, hold)
) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS sqlock_place_in_order ON sqlock_place (name, token, place);
