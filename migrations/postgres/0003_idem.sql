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
