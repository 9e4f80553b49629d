-- The holders of names and the waiters for them, for people and dashboards. No statement of this crate reads this view.
--
-- state        'held', 'kept' (released, and kept from others until expires_at) or 'waiting'.
-- position     of a waiter: 1 is next.
-- mode         'exclusive', 'shared' or 'permits'; permits: how many.
-- expires_at   unless the client renews it; of a waiter, unless its client lives.
-- note         what the holder notes about its work.
CREATE OR REPLACE VIEW sqlock_holders AS
WITH clock AS (
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now),
lease AS (
    SELECT l.name, 0::bigint AS units, 0::bigint AS permits, l.holder, l.owner, l.token, l.label, l.acquired_at,
           greatest(l.expires_at, c.beat_at + l.ttl) AS expires_at
      FROM sqlock_lease AS l LEFT JOIN sqlock_client AS c ON c.id = l.client
     WHERE l.id NOT IN ('', 'entries')),
entry AS (
    SELECT e.*, greatest(e.expires_at, c.beat_at + CASE e.token WHEN 0 THEN 3000000 ELSE e.ttl END) AS lives_until
      FROM sqlock_entry AS e LEFT JOIN sqlock_client AS c ON c.id = e.client),
holder AS (
    SELECT * FROM lease
     UNION ALL
    SELECT e.name, max(e.units), max(e.permits), (array_agg(e.holder ORDER BY e.acquired_at, e.id))[1], max(e.owner), e.token,
           (array_agg(e.label ORDER BY e.acquired_at, e.id))[1], min(e.acquired_at), max(e.lives_until)
      FROM entry AS e CROSS JOIN clock
     WHERE e.token > 0 AND e.lives_until > clock.now
     GROUP BY e.name, e.token),
listed AS (
    SELECT h.name, CASE h.owner WHEN '' THEN 'kept' ELSE 'held' END AS state, NULL::bigint AS position, h.units, h.permits,
           h.holder, nullif(h.owner, '') AS owner, h.token, h.label, h.acquired_at, NULL::bigint AS waiting_since, h.expires_at
      FROM holder AS h
     UNION ALL
    SELECT e.name, 'waiting', row_number() OVER (PARTITION BY e.name ORDER BY e.arrived_at, e.id), e.units, e.permits,
           e.holder, nullif(e.owner, ''), NULL, e.label, NULL, e.arrived_at, e.lives_until
      FROM entry AS e CROSS JOIN clock
     WHERE e.token = 0 AND e.lives_until > clock.now)
SELECT l.name, l.state, l.position, CASE WHEN l.units = 0 THEN 'exclusive' WHEN l.permits = 4294967295 THEN 'shared' ELSE 'permits' END AS mode,
       CASE WHEN l.units > 0 AND l.permits < 4294967295 THEN l.units END AS permits, l.holder, l.owner, l.token, l.label,
       timestamptz 'epoch' + l.acquired_at * interval '1 microsecond' AS acquired_at,
       timestamptz 'epoch' + l.waiting_since * interval '1 microsecond' AS waiting_since,
       timestamptz 'epoch' + l.expires_at * interval '1 microsecond' AS expires_at,
       (SELECT n.note FROM sqlock_note AS n WHERE n.name = l.name AND n.token = l.token) AS note
  FROM listed AS l CROSS JOIN clock
 WHERE l.expires_at > clock.now;
