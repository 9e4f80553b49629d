-- One row per name that was ever locked and not yet swept. The row is updated in place for its whole life.
--
-- name         bytes, so that neither case nor accent nor trailing space is folded by a collation.
-- holds        the holds of the present owner, each 32 hex digits and a ';'. Empty: free. '-': kept for nobody
--              until expires_at (a holding that asked to be held at least so long). '+': shared by those whose rows in
--              sqlock_place have a token; expires_at then says nothing.
-- token        the fencing token of the present or last holding. It only rises.
-- waiting      0 when nobody stands in line. Otherwise rises whenever somebody joins the line: what was read is then stale.
-- evicted      token of the holding that was evicted last. 0: none was.
-- acquired_at, expires_at    microseconds since the Unix epoch, by this database's clock: no TIMESTAMP, no time zone.
CREATE TABLE IF NOT EXISTS sqlock_lease (
    name        VARBINARY(255) NOT NULL PRIMARY KEY,
    owner       VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    holds       MEDIUMTEXT CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    token       BIGINT NOT NULL,
    holder      VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    label       VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    acquired_at BIGINT NOT NULL,
    expires_at  BIGINT NOT NULL,
    waiting     BIGINT NOT NULL DEFAULT 0,
    evicted     BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB
