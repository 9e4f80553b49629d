-- One row per name that was ever locked and not yet swept. The row is updated in place for its whole life.
--
-- holds        the holds of the present owner, each 32 hex digits and a ';'. Empty: free. '-': kept for nobody
--              until expires_at (a holding that asked to be held at least so long). '+': shared by those whose rows in
--              sqlock_place have a token; expires_at then says nothing.
-- token        the fencing token of the present or last holding. It only rises.
-- waiting      0 when nobody stands in line. Otherwise rises whenever somebody joins the line: what was read is then stale.
-- evicted      token of the holding that was evicted last. 0: none was.
-- acquired_at, expires_at    microseconds since the Unix epoch, by this host's clock.
CREATE TABLE IF NOT EXISTS sqlock_lease (
    name        TEXT    NOT NULL PRIMARY KEY COLLATE BINARY,
    owner       TEXT    NOT NULL,
    holds       TEXT    NOT NULL,
    token       INTEGER NOT NULL,
    holder      TEXT    NOT NULL,
    label       TEXT    NOT NULL,
    acquired_at INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL,
    waiting     INTEGER NOT NULL DEFAULT 0,
    evicted     INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
