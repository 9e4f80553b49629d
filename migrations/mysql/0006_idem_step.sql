-- What a request in sqlock_idem has done on its way, so that it is not done again by the attempt that takes it up.
--
-- begun        created_at of the request: a key that is used anew begins anew.
CREATE TABLE IF NOT EXISTS sqlock_idem_step (
    id     VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    begun  BIGINT NOT NULL,
    step   VARBINARY(255) NOT NULL,
    result LONGBLOB NOT NULL,
    PRIMARY KEY (id, begun, step)
) ENGINE = InnoDB
