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
