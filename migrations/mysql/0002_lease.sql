-- One row per name that was ever locked and not yet swept. A fenced transaction locks this row.
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
    name        VARBINARY(255) NOT NULL PRIMARY KEY,
    id          VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    owner       VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    client      VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    token       BIGINT NOT NULL,
    ttl         BIGINT NOT NULL,
    expires_at  BIGINT NOT NULL,
    lost        BIGINT NOT NULL DEFAULT 0,
    asked       BIGINT NOT NULL DEFAULT 0,
    acquired_at BIGINT NOT NULL,
    holder      VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    label       VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL
) ENGINE = InnoDB;

-- What holders note about their work: one row for each holding that has a note. The row stays after the holding, until a later holder
-- writes a note or the sweeper finds a newer token of the name.
--
-- token        the fencing token of the holding.
CREATE TABLE IF NOT EXISTS sqlock_note (
    name       VARBINARY(255) NOT NULL,
    token      BIGINT NOT NULL,
    note       VARCHAR(4096) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    written_at BIGINT NOT NULL,
    PRIMARY KEY (name, token)
) ENGINE = InnoDB
