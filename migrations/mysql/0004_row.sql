-- Rows for names, which applications lock with SELECT … FOR UPDATE in their own transactions. A lock
-- writes nothing.
--
-- seen_at      microseconds since the Unix epoch, by this database's clock: the last use of the row,
--              exact to some minutes. Rows without use are purged.
CREATE TABLE IF NOT EXISTS sqlock_row (
    name    VARBINARY(255) NOT NULL PRIMARY KEY,
    seen_at BIGINT NOT NULL
) ENGINE = InnoDB
