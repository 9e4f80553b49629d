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
    name        VARBINARY(255) NOT NULL,
    hold        VARCHAR(33) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    owner       VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    client      VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    bell        VARCHAR(63) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    units       BIGINT NOT NULL,
    permits     BIGINT NOT NULL,
    place       BIGINT NOT NULL,
    token       BIGINT NOT NULL,
    holder      VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    label       VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    acquired_at BIGINT NOT NULL,
    expires_at  BIGINT NOT NULL,
    PRIMARY KEY (name, hold),
    KEY sqlock_place_in_order (name, token, place)
) ENGINE = InnoDB
