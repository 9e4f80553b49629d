-- The results of the steps of requests in sqlock_idem: a later attempt does not repeat these steps.
--
-- begun        created_at of the record. A key that is used again has new steps.
CREATE TABLE IF NOT EXISTS sqlock_idem_step (
    id     text COLLATE "C" NOT NULL,
    begun  bigint NOT NULL,
    step   text COLLATE "C" NOT NULL,
    result bytea  NOT NULL,
    PRIMARY KEY (id, begun, step)
);

-- How operators have resolved unknown outcomes in sqlock_idem. A resolution stays when the record is
-- deleted.
--
-- token        the token of the attempt whose outcome was unknown.
-- outcome      'done': the request took effect. 'failed': it did not.
-- resolved_by, note   the operator, and how the outcome was found out.
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
