-- The row that a fenced transaction locks. It stands apart from the lease row because InnoDB has no lock that stops a
-- takeover and lets a renewal pass: a fence shares this row, a takeover must have it exclusively, a renewal never touches it.
CREATE TABLE IF NOT EXISTS sqlock_fence (
    name  VARBINARY(255) NOT NULL PRIMARY KEY,
    token BIGINT NOT NULL
) ENGINE = InnoDB
