-- The line before a name: one row for each that waits, and one for each that shares the name or has permits of it.
-- (A single holder stands in sqlock_lease.)
--
-- hold         as in sqlock_lease, with its ';'.
-- client, bell whose it is, and the channel on which to tell it; empty: it looks by itself.
-- units, permits    how many permits it takes, of how many. 0 units: it wants the name for itself alone.
-- place        the order in the line: the moment at which it came, in microseconds by this database's clock.
-- token        0: it waits. Otherwise its fencing token: it holds.
-- expires_at   of those who wait and of those who hold, each its own. What has expired counts as gone.
--
-- Renewals change expires_at alone, which is not indexed: they are HOT updates.
CREATE TABLE IF NOT EXISTS sqlock_place (
    name        text COLLATE "C" NOT NULL,
    hold        text   NOT NULL,
    owner       text   NOT NULL,
    client      text   NOT NULL,
    bell        text   NOT NULL,
    units       bigint NOT NULL,
    permits     bigint NOT NULL,
    place       bigint NOT NULL,
    token       bigint NOT NULL,
    holder      text   NOT NULL,
    label       text   NOT NULL,
    acquired_at bigint NOT NULL,
    expires_at  bigint NOT NULL,
    PRIMARY KEY (name, hold)
) WITH (fillfactor = 50);

CREATE INDEX IF NOT EXISTS sqlock_place_in_order ON sqlock_place (name, token, place);
