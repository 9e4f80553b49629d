-- One row per client: one set of locks with one heartbeat.
--
-- beat_at      its latest heartbeat. It renews everything whose `client` it is.
-- notice       rises with everything that is taken away from the client, or that it is asked to release.
-- listens      the client is notified on the channel sqlock_<id> when it is granted a name.
--
-- All moments, here and below, are microseconds since the Unix epoch, by this database's clock; durations are microseconds.
-- A statement writes columns in this order, and reads the clock for each: a lease lasts for its ttl at least.
-- No column that changes often is indexed, so an update is a HOT update and a row that is busy keeps its size.
CREATE TABLE IF NOT EXISTS sqlock_client (
    id      text COLLATE "C" NOT NULL PRIMARY KEY,
    beat_at bigint NOT NULL,
    notice  bigint NOT NULL DEFAULT 0,
    listens boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);

-- One row per name that was ever locked and not yet swept. A fenced transaction locks this row.
--
-- id           the lease that holds the name, 32 hexadecimal digits. '': nobody holds it. 'kept': released, and kept from others until
--              expires_at. 'entries': those rows of sqlock_entry hold it that have a token.
-- owner        who holds. '': nobody, or the entries tell.
-- client       whose heartbeat renews the lease. '': nobody's, and the lease ends at expires_at.
-- token        the fencing token of the latest holding. It only rises.
-- ttl          how long the lease lasts after a heartbeat.
-- waiting      rises when an entry begins to wait. 0: none waits.
-- lost         the highest token whose holding was taken away: expired and taken over, or evicted.
-- asked        the holders of tokens up to this one were asked to release the name.
-- holder       the client in words, for people.
CREATE TABLE IF NOT EXISTS sqlock_lease (
    name        text COLLATE "C" NOT NULL PRIMARY KEY,
    id          text   NOT NULL,
    owner       text   NOT NULL,
    client      text   NOT NULL,
    token       bigint NOT NULL,
    ttl         bigint NOT NULL,
    acquired_at bigint NOT NULL,
    expires_at  bigint NOT NULL,
    waiting     bigint NOT NULL DEFAULT 0,
    lost        bigint NOT NULL DEFAULT 0,
    asked       bigint NOT NULL DEFAULT 0,
    holder      text   NOT NULL,
    label       text   NOT NULL
) WITH (fillfactor = 50);

-- What holders note about their work: one row for each holding that has a note. The row stays after the holding, until a later holder
-- writes a note or the sweeper finds a newer token of the name.
--
-- token        the fencing token of the holding.
CREATE TABLE IF NOT EXISTS sqlock_note (
    name       text COLLATE "C" NOT NULL,
    token      bigint NOT NULL,
    note       text   NOT NULL,
    written_at bigint NOT NULL,
    PRIMARY KEY (name, token)
) WITH (fillfactor = 50);

-- The queue of a name: one row for each acquisition that waits, and for each that shares the name or has permits of it.
--
-- owner        ''  the acquisition was released, and only keeps the name from others until expires_at.
-- client       of those that wait, who asked; of those that hold, whose heartbeat renews it. '': nobody's.
-- is_renewed   the heartbeat of the client is to renew what the acquisition is granted.
-- units, permits    how many permits it takes, of how many. 0 units: it wants the name for itself alone.
-- token        0: it waits. Otherwise its fencing token: it holds.
-- arrived_at   the order in which entries wait.
CREATE TABLE IF NOT EXISTS sqlock_entry (
    name        text COLLATE "C" NOT NULL,
    id          text COLLATE "C" NOT NULL,
    owner       text    NOT NULL,
    client      text    NOT NULL,
    is_renewed  boolean NOT NULL,
    units       bigint  NOT NULL,
    permits     bigint  NOT NULL,
    token       bigint  NOT NULL,
    ttl         bigint  NOT NULL,
    arrived_at  bigint  NOT NULL,
    acquired_at bigint  NOT NULL,
    expires_at  bigint  NOT NULL,
    holder      text    NOT NULL,
    label       text    NOT NULL,
    PRIMARY KEY (name, id)
) WITH (fillfactor = 50);

CREATE INDEX IF NOT EXISTS sqlock_entry_in_order ON sqlock_entry (name, token, arrived_at, id);
