-- Rows that stand for names, to be locked with SELECT … FOR UPDATE in an application's own transactions. Locking writes
-- nothing in them.
--
-- seen_at      microseconds since the Unix epoch, by this database's clock: when somebody last made sure, give or take some
--              minutes, that the row is there. What nobody has asked for in a long time is purged.
CREATE TABLE IF NOT EXISTS sqlock_row (
    name    text COLLATE "C" NOT NULL PRIMARY KEY,
    seen_at bigint NOT NULL
);
