-- What a request in sqlock_idem has done on its way, so that it is not done again by the attempt that takes it up.
--
-- begun        created_at of the request: a key that is used anew begins anew.
CREATE TABLE IF NOT EXISTS sqlock_idem_step (
    id     VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    begun  BIGINT NOT NULL,
    step   VARBINARY(255) NOT NULL,
    result LONGBLOB NOT NULL,
    PRIMARY KEY (id, begun, step)
) ENGINE = InnoDB;

-- What operators have found out about requests of sqlock_idem whose outcome was unknown. A row stays also when the request's is gone.
--
-- token        of the attempt whose outcome was unknown.
-- outcome      'done' or 'failed': nothing took effect.
-- resolved_by, note   who has found that out, and how: in the operator's words.
-- resolved_at  microseconds since the Unix epoch, by this database's clock.
CREATE TABLE IF NOT EXISTS sqlock_idem_resolution (
    id          VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    resolved_at BIGINT NOT NULL,
    token       BIGINT NOT NULL,
    outcome     VARCHAR(8) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    resolved_by VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    note        VARCHAR(1000) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    PRIMARY KEY (id, resolved_at, token)
) ENGINE = InnoDB
