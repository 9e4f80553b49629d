-- One row per client: one set of locks with one heartbeat.
--
-- beat_at      its latest heartbeat. It renews everything whose `client` it is.
-- notice       rises with everything that is taken away from the client, or that it is asked to release.
--
-- All moments, here and below, are microseconds since the Unix epoch, by this database's clock; durations are microseconds.
CREATE TABLE IF NOT EXISTS sqlock_client (
    id      VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
    beat_at BIGINT NOT NULL,
    notice  BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB
