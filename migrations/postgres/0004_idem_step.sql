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

-- What operators have found out about requests of sqlock_idem whose outcome was unknown. A row stays also when the request's is gone.
--
-- token        of the attempt whose outcome was unknown.
-- outcome      'done' or 'failed': nothing took effect.
-- resolved_by, note   who has found that out, and how: in the operator's words.
-- resolved_at  microseconds since the Unix epoch, by this database's clock.
CREATE TABLE IF NOT EXISTS sqlock_idem_resolution (
    id          text COLLATE "C" NOT NULL,
    resolved_at bigint NOT NULL,
    token       bigint NOT NULL,
    outcome     text   NOT NULL,
    resolved_by text   NOT NULL,
    note        text   NOT NULL,
    PRIMARY KEY (id, resolved_at, token)
);
