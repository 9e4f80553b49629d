-- The results of the steps of requests in sqlock_idem: a later attempt does not repeat these steps.
--
-- begun        created_at of the record. A key that is used again has new steps.
CREATE TABLE IF NOT EXISTS sqlock_idem_step (
    id     VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    begun  BIGINT NOT NULL,
    step   VARBINARY(255) NOT NULL,
    result LONGBLOB NOT NULL,
    PRIMARY KEY (id, begun, step)
) ENGINE = InnoDB;

-- How operators have resolved unknown outcomes in sqlock_idem. A resolution stays when the record is
-- deleted.
--
-- token        the token of the attempt whose outcome was unknown.
-- outcome      'done': the request took effect. 'failed': it did not.
-- resolved_by, note   the operator, and how the outcome was found out.
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
