-- The holders of names and the waiters for them, for people and dashboards. No statement of this crate reads this view.
--
-- state        'held', 'kept' (released, and kept from others until expires_at) or 'waiting'.
-- position     of a waiter: 1 is next.
-- mode         'exclusive', 'shared' or 'permits'; permits: how many.
-- expires_at   unless the client renews it; of a waiter, unless its client lives.
-- note         what the holder notes about its work.
--
-- Times are in the time zone of the session. The reader needs SELECT on the tables as well.
CREATE OR REPLACE SQL SECURITY INVOKER VIEW sqlock_holders AS
WITH lease AS (
    SELECT l.*, GREATEST(l.expires_at, COALESCE((SELECT c.beat_at FROM sqlock_client AS c WHERE c.id = l.client) + l.ttl, 0)) AS lives_until
      FROM sqlock_lease AS l
     WHERE l.id NOT IN ('', 'entries')),
entry AS (
    SELECT e.*, GREATEST(e.expires_at, COALESCE((SELECT c.beat_at FROM sqlock_client AS c WHERE c.id = e.client)
                                                + IF(e.token = 0, 3000000, e.ttl), 0)) AS lives_until
      FROM sqlock_entry AS e),
alive AS (
    SELECT * FROM entry WHERE lives_until > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))),
listed AS (
    SELECT name, owner, NULL AS position, 0 AS units, 0 AS permits, holder, token, label, acquired_at, NULL AS waiting_since, lives_until
      FROM lease
     WHERE lives_until > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
     UNION ALL
    SELECT name, MAX(owner), NULL, MAX(units), MAX(permits), MIN(holder), token, MIN(label), MIN(acquired_at), NULL, MAX(lives_until)
      FROM alive
     WHERE token > 0
     GROUP BY name, token
     UNION ALL
    SELECT name, owner, CAST(ROW_NUMBER() OVER (PARTITION BY name ORDER BY arrived_at, id) AS SIGNED), units, permits, holder, NULL, label, NULL,
           arrived_at, lives_until
      FROM alive
     WHERE token = 0)
SELECT CONVERT(name USING utf8mb4) AS name,
       CASE WHEN position IS NOT NULL THEN 'waiting' WHEN owner = '' THEN 'kept' ELSE 'held' END AS state, position,
       CASE WHEN units = 0 THEN 'exclusive' WHEN permits = 4294967295 THEN 'shared' ELSE 'permits' END AS mode,
       CASE WHEN units > 0 AND permits < 4294967295 THEN units END AS permits, holder, NULLIF(owner, '') AS owner, token, label,
       FROM_UNIXTIME(acquired_at * 0.000001) AS acquired_at, FROM_UNIXTIME(waiting_since * 0.000001) AS waiting_since,
       FROM_UNIXTIME(lives_until * 0.000001) AS expires_at,
       (SELECT n.note FROM sqlock_note AS n WHERE n.name = listed.name AND n.token = listed.token) AS note
  FROM listed
