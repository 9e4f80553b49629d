-- The holders of names and the waiters for them, for people and dashboards. No statement of this crate reads this view.
--
-- state        'held', 'kept' (released, and kept from others until expires_at) or 'waiting'.
-- position     of a waiter: 1 is next.
-- mode         'exclusive', 'shared' or 'permits'; permits: how many.
-- expires_at   unless the client renews it; of a waiter, unless its client lives.
-- note         what the holder notes about its work.
CREATE VIEW IF NOT EXISTS sqlock_holders AS
WITH lease AS (
    SELECT l.*, max(l.expires_at, coalesce((SELECT c.beat_at + l.ttl FROM sqlock_client AS c WHERE c.id = l.client), 0)) AS lives_until
      FROM sqlock_lease AS l
     WHERE l.id NOT IN ('', 'entries')),
entry AS (
    SELECT e.*, max(e.expires_at, coalesce((SELECT c.beat_at + CASE e.token WHEN 0 THEN 3000000 ELSE e.ttl END
                                              FROM sqlock_client AS c WHERE c.id = e.client), 0)) AS lives_until
      FROM sqlock_entry AS e),
alive AS (
    SELECT * FROM entry WHERE lives_until > CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)),
listed AS (
    SELECT name, owner, NULL AS position, 0 AS units, 0 AS permits, holder, token, label, acquired_at, NULL AS waiting_since, lives_until
      FROM lease
     WHERE lives_until > CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)
     UNION ALL
    SELECT name, max(owner), NULL, units, permits, holder, token, label, min(acquired_at), NULL, max(lives_until)
      FROM alive
     WHERE token > 0
     GROUP BY name, token
     UNION ALL
    SELECT name, owner, row_number() OVER (PARTITION BY name ORDER BY arrived_at, id), units, permits, holder, NULL, label, NULL,
           arrived_at, lives_until
      FROM alive
     WHERE token = 0)
SELECT name, CASE WHEN position IS NOT NULL THEN 'waiting' WHEN owner = '' THEN 'kept' ELSE 'held' END AS state, position,
       CASE WHEN units = 0 THEN 'exclusive' WHEN permits = 4294967295 THEN 'shared' ELSE 'permits' END AS mode,
       CASE WHEN units > 0 AND permits < 4294967295 THEN units END AS permits, holder, nullif(owner, '') AS owner, token, label,
       strftime('%Y-%m-%dT%H:%M:%fZ', acquired_at / 1000000.0, 'unixepoch') AS acquired_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', waiting_since / 1000000.0, 'unixepoch') AS waiting_since,
       strftime('%Y-%m-%dT%H:%M:%fZ', lives_until / 1000000.0, 'unixepoch') AS expires_at,
       (SELECT n.note FROM sqlock_note AS n WHERE n.name = listed.name AND n.token = listed.token) AS note
  FROM listed;
