-- One row per name that was ever locked and not yet swept. The row is updated in place for its whole life.
--
-- holds        the holds of the present owner, each 32 hex digits and a ';'. Empty: free. '-': kept for nobody
--              until expires_at (a holding that asked to be held at least so long).
-- token        the fencing token of the present or last holding. It only rises.
-- acquired_at, expires_at    microseconds since the Unix epoch, by this database's clock.
--
-- UNIQUE (name, token) makes a change of token a key update, so FOR KEY SHARE (the fence) blocks a takeover and lets
-- renewals pass. There is no index on expires_at: it would end HOT updates, and with them the fixed size of a hot row.
CREATE TABLE IF NOT EXISTS sqlock_lease (
    name        text COLLATE "C" NOT NULL PRIMARY KEY,
    owner       text   NOT NULL,
    holds       text   NOT NULL,
    token       bigint NOT NULL,
    holder      text   NOT NULL,
    label       text   NOT NULL,
    acquired_at bigint NOT NULL,
    expires_at  bigint NOT NULL,
    UNIQUE (name, token)
) WITH (fillfactor = 50);
