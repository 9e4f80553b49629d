-- The queue of a name: one row for each acquisition that waits, and for each that shares the name or has permits of it.
--
-- owner        ''  the acquisition was released, and only keeps the name from others until expires_at.
-- client       of those that wait, who asked; of those that hold, whose heartbeat renews it. '': nobody's.
-- is_renewed   the heartbeat of the client is to renew what the acquisition is granted.
-- units, permits    how many permits it takes, of how many. 0 units: it wants the name for itself alone.
-- token        0: it waits. Otherwise its fencing token: it holds.
-- arrived_at   the order in which entries wait.
CREATE TABLE IF NOT EXISTS sqlock_entry (
    name        VARBINARY(255) NOT NULL,
    id          VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    owner       VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    client      VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    is_renewed  TINYINT(1) NOT NULL,
    units       BIGINT  NOT NULL,
    permits     BIGINT  NOT NULL,
    token       BIGINT  NOT NULL,
    ttl         BIGINT  NOT NULL,
    arrived_at  BIGINT  NOT NULL,
    expires_at  BIGINT  NOT NULL,
    acquired_at BIGINT  NOT NULL,
    holder      VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    label       VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    PRIMARY KEY (name, id),
    KEY sqlock_entry_in_order (name, token, arrived_at, id)
) ENGINE = InnoDB
