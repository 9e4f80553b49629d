-- What a request in sqlock_idem has done on its way, so that it is not done again by the attempt that takes it up.
--
-- begun        created_at of the request: a key that is used anew begins anew.
CREATE TABLE IF NOT EXISTS sqlock_idem_step (
    id     text COLLATE "C" NOT NULL,
    begun  bigint NOT NULL,
    step   text COLLATE "C" NOT NULL,
    result bytea  NOT NULL,
    PRIMARY KEY (id, begun, step)
);
