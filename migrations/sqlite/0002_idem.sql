-- The records of idempotent requests: one row for each key.
--
-- id           SHA-256 over the namespace, the principal and the key, 64 digits, so that every
--              database compares keys byte for byte.
-- principal    the owner of the key. Empty: the key is global.
-- fingerprint  the fingerprint of the request: a format byte, then SHA-256. Empty: a token that is
--              not used yet.
-- state        'issued': a token that is not used yet. 'started': an attempt is in progress, or has
--              died. 'unknown': an attempt has ended, and its effect is unknown. 'done': the request
--              took effect. 'expired': it was done, its result is deleted, and its key is refused.
-- token        the fencing token of the latest attempt. 0: the request ran in one transaction.
-- attempts     the number of attempts under a lease.
-- issued_until the expiry of an issued token. 0: the key is not an issued token.
-- permanent    1: the key is refused after its expiry. 0: it is new again.
-- result       the result that later requests with the key receive.
-- request      the stored request, for an attempt that resumes it: a format byte, then bytes. It is
--              deleted when the request has ended.
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

-- The results of the steps of requests in sqlock_idem: a later attempt does not repeat these steps.
--
-- begun        created_at of the record. A key that is used again has new steps.
CREATE TABLE IF NOT EXISTS sqlock_idem_step (
    id     TEXT    NOT NULL COLLATE BINARY,
    begun  INTEGER NOT NULL,
    step   TEXT    NOT NULL COLLATE BINARY,
    result BLOB    NOT NULL,
    PRIMARY KEY (id, begun, step)
) WITHOUT ROWID;

-- How operators have resolved unknown outcomes in sqlock_idem. A resolution stays when the record is
-- deleted.
--
-- token        the token of the attempt whose outcome was unknown.
-- outcome      'done': the request took effect. 'failed': it did not.
-- resolved_by, note   the operator, and how the outcome was found out.
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
