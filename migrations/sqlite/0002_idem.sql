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
    id          TEXT    NOT NULL PRIMARY KEY COLLATE BINARY,
    namespace   TEXT    NOT NULL,
    principal   TEXT    NOT NULL,
    request_key TEXT    NOT NULL,
    fingerprint BLOB    NOT NULL,
    state       TEXT    NOT NULL,
    token       INTEGER NOT NULL,
    attempts    INTEGER NOT NULL,
    issued_until INTEGER NOT NULL,
    permanent   INTEGER NOT NULL,
    result      BLOB,
    request     BLOB,
    created_at  INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL
);

CREATE INDEX IF NOT EXISTS sqlock_idem_by_expiry ON sqlock_idem (expires_at);

CREATE INDEX IF NOT EXISTS sqlock_idem_by_state ON sqlock_idem (state, created_at, id);

-- What a request in sqlock_idem has done on its way, so that it is not done again by the attempt that takes it up.
--
-- begun        created_at of the request: a key that is used anew begins anew.
CREATE TABLE IF NOT EXISTS sqlock_idem_step (
    id     TEXT    NOT NULL COLLATE BINARY,
    begun  INTEGER NOT NULL,
    step   TEXT    NOT NULL COLLATE BINARY,
    result BLOB    NOT NULL,
    PRIMARY KEY (id, begun, step)
) WITHOUT ROWID;

-- What operators have found out about requests of sqlock_idem whose outcome was unknown. A row stays also when the request's is gone.
--
-- token        of the attempt whose outcome was unknown.
-- outcome      'done' or 'failed': nothing took effect.
-- resolved_by, note   who has found that out, and how: in the operator's words.
-- resolved_at  microseconds since the Unix epoch, by this database's clock.
CREATE TABLE IF NOT EXISTS sqlock_idem_resolution (
    id          TEXT    NOT NULL COLLATE BINARY,
    resolved_at INTEGER NOT NULL,
    token       INTEGER NOT NULL,
    outcome     TEXT    NOT NULL,
    resolved_by TEXT    NOT NULL,
    note        TEXT    NOT NULL,
    PRIMARY KEY (id, resolved_at, token)
) WITHOUT ROWID;
