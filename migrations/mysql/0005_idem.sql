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
    id          VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
    namespace   VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    principal   VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    request_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    fingerprint VARBINARY(33) NOT NULL,
    state       VARCHAR(8) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    token       BIGINT NOT NULL,
    attempts    BIGINT NOT NULL,
    issued_until BIGINT NOT NULL,
    permanent   BIGINT NOT NULL,
    result      LONGBLOB,
    request     LONGBLOB,
    created_at  BIGINT NOT NULL,
    expires_at  BIGINT NOT NULL,
    KEY sqlock_idem_by_expiry (expires_at),
    KEY sqlock_idem_by_state (state, created_at, id)
) ENGINE = InnoDB
