-- One row per client: one set of locks with one heartbeat.
--
-- beat_at      its latest heartbeat. It renews everything whose `client` it is.
-- notice       rises with everything that is taken away from the client, or that it is asked to release.
--
-- All moments, here and below, are microseconds since the Unix epoch, by this host's clock; durations are microseconds.
CREATE TABLE IF NOT EXISTS sqlock_client (
    id      TEXT NOT NULL PRIMARY KEY,
    beat_at INTEGER NOT NULL,
    notice  INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;

-- One row per name that was ever locked and not yet swept. A fenced transaction writes this row.
--
-- id           the lease that holds the name, 32 hexadecimal digits. '': nobody holds it. 'kept': released, and kept from others until
--              expires_at. 'entries': those rows of sqlock_entry hold it that have a token.
-- owner        who holds. '': nobody, or the entries tell.
-- client       whose heartbeat renews the lease. '': nobody's, and the lease ends at expires_at.
-- token        the fencing token of the latest holding. It only rises.
-- ttl          how long the lease lasts after a heartbeat.
-- lost         the highest token whose holding was taken away: expired and taken over, or evicted.
-- asked        the holders of tokens up to this one were asked to release the name.
-- holder       the client in words, for people.
CREATE TABLE IF NOT EXISTS sqlock_lease (
    name        TEXT NOT NULL PRIMARY KEY COLLATE BINARY,
    id          TEXT   NOT NULL,
    owner       TEXT   NOT NULL,
    client      TEXT   NOT NULL,
    token       INTEGER NOT NULL,
    ttl         INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL,
    lost        INTEGER NOT NULL DEFAULT 0,
    asked       INTEGER NOT NULL DEFAULT 0,
    acquired_at INTEGER NOT NULL,
    holder      TEXT   NOT NULL,
    label       TEXT   NOT NULL
) WITHOUT ROWID;

-- What holders note about their work: one row for each holding that has a note. The row stays after the holding, until a later holder
-- writes a note or the sweeper finds a newer token of the name.
--
-- token        the fencing token of the holding.
CREATE TABLE IF NOT EXISTS sqlock_note (
    name       TEXT NOT NULL COLLATE BINARY,
    token      INTEGER NOT NULL,
    note       TEXT NOT NULL,
    written_at INTEGER NOT NULL,
    PRIMARY KEY (name, token)
) WITHOUT ROWID;

-- The queue of a name: one row for each acquisition that waits, and for each that shares the name or has permits of it.
--
-- owner        ''  the acquisition was released, and only keeps the name from others until expires_at.
-- client       of those that wait, who asked; of those that hold, whose heartbeat renews it. '': nobody's.
-- is_renewed   the heartbeat of the client is to renew what the acquisition is granted.
-- units, permits    how many permits it takes, of how many. 0 units: it wants the name for itself alone.
-- token        0: it waits. Otherwise its fencing token: it holds.
-- arrived_at   the order in which entries wait.
CREATE TABLE IF NOT EXISTS sqlock_entry (
    name        TEXT NOT NULL COLLATE BINARY,
    id          TEXT NOT NULL,
    owner       TEXT    NOT NULL,
    client      TEXT    NOT NULL,
    is_renewed  INTEGER NOT NULL,
    units       INTEGER  NOT NULL,
    permits     INTEGER  NOT NULL,
    token       INTEGER  NOT NULL,
    ttl         INTEGER  NOT NULL,
    arrived_at  INTEGER  NOT NULL,
    expires_at  INTEGER  NOT NULL,
    acquired_at INTEGER  NOT NULL,
    holder      TEXT    NOT NULL,
    label       TEXT    NOT NULL,
    PRIMARY KEY (name, id)
) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS sqlock_entry_in_order ON sqlock_entry (name, token, arrived_at, id);
