-- Requests that must take effect once: one row for each key under which one was made.
--
-- id           SHA-256 of namespace, principal and key, in 64 digits: so these are compared byte for byte on every database.
-- principal    whose key it is. Empty: it is the same for everybody.
-- fingerprint  of the request: one byte for how it was made, then SHA-256. Empty: there was no request yet.
-- state        'issued': a token that nobody has used so far. 'started': an attempt is at work, or has died. 'unknown': an attempt
--              has ended, and nobody knows whether it took effect. 'done'. 'expired': it was done, its result is forgotten, and its
--              key is refused.
-- token        the fencing token of the latest attempt. 0: there was none, it was done in one transaction.
-- attempts     how many there were.
-- issued_until 0: it is no token that was issued. Otherwise how long that is good.
-- permanent    1: once its time has run out, the key is refused instead of being new.
-- result       what is told to those who ask again.
-- request      what the attempt that takes an unfinished one up needs of it, if the application stores that: a format byte, then bytes.
--              It is deleted once the request has ended.
-- issued_until, created_at, expires_at   microseconds since the Unix epoch, by this database's clock.
CREATE TABLE IF NOT EXISTS sqlock_idem (
    id          text COLLATE "C" NOT NULL PRIMARY KEY,
    namespace   text COLLATE "C" NOT NULL,
    principal   text COLLATE "C" NOT NULL,
    request_key text COLLATE "C" NOT NULL,
    fingerprint bytea  NOT NULL,
    state       text   NOT NULL,
    token       bigint NOT NULL,
    attempts    bigint NOT NULL,
    issued_until bigint NOT NULL,
    permanent   bigint NOT NULL,
    result      bytea,
    request     bytea,
    created_at  bigint NOT NULL,
    expires_at  bigint NOT NULL
) WITH (fillfactor = 70);

CREATE INDEX IF NOT EXISTS sqlock_idem_by_expiry ON sqlock_idem (expires_at);

CREATE INDEX IF NOT EXISTS sqlock_idem_by_state ON sqlock_idem (state, created_at, id);
