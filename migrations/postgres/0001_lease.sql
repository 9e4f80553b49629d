-- sqlock_lease: one row per name that was ever locked and not yet swept. It is updated in place for its whole life.
--
-- holds        the holds of the present owner, each 32 hex digits and a ';'. Empty: free. '-': kept for nobody
--              until expires_at (a holding that asked to be held at least so long). '+': shared by those whose rows in
--              sqlock_place have a token; expires_at then says nothing.
-- token        the fencing token of the present or last holding. It only rises.
-- waiting      0 when nobody stands in line. Otherwise rises whenever somebody joins the line: what was read is then stale.
-- evicted      token of the holding that was evicted last. 0: none was.
-- acquired_at, expires_at    microseconds since the Unix epoch, by this database's clock.
--
-- No column that changes is indexed, so every update is a HOT update and a hot name keeps its size.
CREATE TABLE IF NOT EXISTS sqlock_lease (
    name        text COLLATE "C" NOT NULL PRIMARY KEY,
    owner       text   NOT NULL,
    holds       text   NOT NULL,
    token       bigint NOT NULL,
    holder      text   NOT NULL,
    label       text   NOT NULL,
    acquired_at bigint NOT NULL,
    expires_at  bigint NOT NULL,
    waiting     bigint NOT NULL DEFAULT 0,
    evicted     bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- sqlock_fence: the row that a fenced transaction locks. A fence shares it, a takeover must have it alone, a renewal
-- never touches it.
CREATE TABLE IF NOT EXISTS sqlock_fence (
    name  text COLLATE "C" NOT NULL PRIMARY KEY,
    token bigint NOT NULL
) WITH (fillfactor = 50);
