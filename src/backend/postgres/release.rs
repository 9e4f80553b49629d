//! Ends holdings: by release, withdrawal or eviction.

use sqlx::Row as _;

use super::acquire::{bind_holder, token};
use super::change::amended;
use super::store::{Connection, TRIES, commit_lazily, grant, notice, notify, now};
use crate::backend::micros;
use crate::backend::stored::{TableRow as _, parse_id};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, ChangeOutcome, Granted, Release, ReleaseOutcome, WithdrawalOutcome};
use crate::token::FencingToken;

// ---- release

/// Ends a holding. $1 name, $2 id, $3 token. If the row cannot be locked at once, the statement
/// changes nothing and returns no row. If entries wait and none can get the name, it changes nothing
/// either.
///
/// - `$next`: a statement `next` for the waiting entry that gets the name, or nothing.
/// - `$ended`: the update of the locked row `held`, which returns the new `id, token, waiting`.
/// - `$share`: the beginning of the statement that ends the entry `e` if `held` has no row.
/// - `$durable`: a condition of `ended`, or nothing.
/// - `$unchanged`: the result for a row that was locked and not changed, of `held`.
/// - `$lazily`: a condition of that result, or nothing.
///
/// An entry is written by its `ctid` after it is locked: only the locked version of the snapshot is
/// written.
macro_rules! release {
    ($next:expr, $ended:expr, $share:expr, $durable:expr, $unchanged:expr, $lazily:expr) => {
        concat!("
WITH held AS MATERIALIZED (
    SELECT l.name, l.client, l.waiting, greatest(l.token + 1, ", now!(), ") AS token, l.xmin AS version
      FROM sqlock_lease AS l
     WHERE l.name = $1 AND l.id = $2 AND l.token = $3
       FOR UPDATE SKIP LOCKED),", $next, "
ended AS (
    UPDATE sqlock_lease AS l", $ended, "),
share AS (
    ", $share, "
     WHERE e.ctid = (SELECT s.ctid
                       FROM sqlock_entry AS s
                      WHERE s.name = $1 AND s.id = $2 AND s.token = $3 AND s.owner <> '' AND NOT EXISTS (SELECT FROM held)
                        FOR UPDATE SKIP LOCKED)
    RETURNING e.name)
SELECT true AS is_alone, id, token, waiting FROM ended", $durable, "
 UNION ALL
SELECT false, '', 0, l.waiting FROM share JOIN sqlock_lease AS l ON l.name = share.name
 UNION ALL
SELECT true, ", $unchanged, ", 0, waiting FROM held WHERE NOT EXISTS (SELECT FROM ended)", $lazily)
    };
}

// The row stays marked when its last entry is granted the name. `unqueued` has a row if the name has
// no entry any more: an entry that the snapshot lacks has changed the row. Such a name is freed.
//
// $4 whether a release that grants nothing need not wait for the disk. If a crash of the server
// undoes it, the client releases again: it reads the names of its last releases when its heartbeat
// was interrupted.
#[rustfmt::skip]
const RELEASE: &str = release!(concat!("
next AS (
    DELETE FROM sqlock_entry AS e
     WHERE e.ctid = (
           SELECT n.ctid
             FROM sqlock_entry AS n
            WHERE n.name = $1 AND n.token = 0 AND n.id = (
                  SELECT CASE w.units WHEN 0 THEN w.id END
                    FROM (SELECT * FROM sqlock_entry
                           WHERE name = $1 AND token = 0 AND (SELECT waiting FROM held) <> 0
                           ORDER BY arrived_at, id LIMIT 64) AS w
                    LEFT JOIN sqlock_client AS c ON c.id = w.client
                   WHERE greatest(w.expires_at, c.beat_at + ", grant!(), ") > ", now!(), "
                   ORDER BY w.arrived_at, w.id LIMIT 1)
              FOR UPDATE SKIP LOCKED)
    RETURNING e.id, e.owner, e.client, e.is_renewed, least(e.ttl, ", grant!(), ") AS ttl, e.holder, e.label),
unqueued AS MATERIALIZED (
    SELECT FROM held
     WHERE waiting <> 0 AND version = (SELECT xmin FROM sqlock_lease WHERE name = $1)
       AND NOT EXISTS (SELECT FROM sqlock_entry WHERE name = $1)),"), concat!("
       SET id = coalesce(next.id, ''), owner = coalesce(next.owner, ''),
           client = CASE WHEN next.is_renewed THEN next.client ELSE '' END,
           token = CASE WHEN next.id IS NULL THEN l.token ELSE held.token END, ttl = coalesce(next.ttl, l.ttl),
           expires_at = coalesce(", now!(), " + next.ttl, 0),
           acquired_at = CASE WHEN next.id IS NULL THEN l.acquired_at ELSE ", now!(), " END,
           holder = coalesce(next.holder, l.holder), label = coalesce(next.label, l.label),
           waiting = CASE WHEN EXISTS (SELECT FROM unqueued) THEN 0 ELSE l.waiting END
      FROM held LEFT JOIN next ON true
     WHERE l.name = held.name AND (held.waiting = 0 OR next.id IS NOT NULL OR EXISTS (SELECT FROM unqueued))
    RETURNING l.id, l.token, l.waiting, ", notify!("l", "next.client", "held.client"), " AS notified"), "
    DELETE FROM sqlock_entry AS e", concat!("
 WHERE CASE WHEN id = '' THEN ", commit_lazily!("$4"), " ELSE true END"), "
CASE WHEN waiting = 0 THEN 'undone'
     WHEN version = (SELECT xmin FROM sqlock_lease WHERE name = $1) THEN 'awaited'
     ELSE 'again' END", concat!(" AND ", commit_lazily!("$4")));

// $4 keep_for
#[rustfmt::skip]
const RELEASE_AND_KEEP: &str = release!("", concat!("
       SET id = 'kept', owner = '', client = '', expires_at = ", now!(), " + $4
      FROM held
     WHERE l.name = held.name
    RETURNING l.id, l.token, l.waiting"), concat!("
    UPDATE sqlock_entry AS e SET owner = '', client = '', expires_at = ", now!(), " + $4"), "", "'undone'", "");

// The next holder: $4 id, $5 owner, $6 client, $7 ttl, $8 holder, $9 label.
#[rustfmt::skip]
const RELEASE_TO_NEXT: &str = release!("", concat!("
       SET id = $4, owner = $5, client = $6, token = held.token, ttl = $7, expires_at = ", now!(), " + $7,
           acquired_at = ", now!(), ", holder = $8, label = $9
      FROM held
     WHERE l.name = held.name AND held.waiting = 0
    RETURNING l.id, l.token, l.waiting"), "
    DELETE FROM sqlock_entry AS e", "", "CASE waiting WHEN 0 THEN 'undone' ELSE 'awaited' END", "");

// Finds out why a release changed nothing. $1 name, $2 id, $3 token. Only a fence permits FOR NO
// KEY UPDATE but not FOR UPDATE. Every other lock of this crate is short.
#[rustfmt::skip]
const FIND_OBSTACLE: &str = "
WITH held AS MATERIALIZED (
    SELECT l.name FROM sqlock_lease AS l WHERE l.name = $1 AND l.id = $2 AND l.token = $3 FOR UPDATE SKIP LOCKED),
fenced AS MATERIALIZED (
    SELECT l.name
      FROM sqlock_lease AS l
     WHERE l.name = $1 AND l.id = $2 AND l.token = $3 AND NOT EXISTS (SELECT FROM held)
       FOR NO KEY UPDATE SKIP LOCKED),
share AS MATERIALIZED (
    SELECT e.name
      FROM sqlock_entry AS e
     WHERE e.name = $1 AND e.id = $2 AND e.token = $3 AND e.owner <> ''
       FOR UPDATE SKIP LOCKED)
SELECT CASE WHEN EXISTS (SELECT FROM fenced) THEN 'locked'
            WHEN EXISTS (SELECT FROM held) OR EXISTS (SELECT FROM share) OR l.id = $2 AND l.token = $3 THEN 'again'
            WHEN EXISTS (SELECT FROM sqlock_entry AS e WHERE e.name = $1 AND e.id = $2 AND e.token = $3 AND e.owner <> '')
            THEN 'locked'
            ELSE 'not held' END AS obstacle,
       l.token, l.lost
  FROM sqlock_lease AS l
 WHERE l.name = $1";

/// The result for a row that a release locked but did not change, because a trigger of the
/// application reverted the change.
const UNDONE: &str = "undone";

/// The result for a row that a release locked but did not change, because entries wait of which
/// none can get the name.
const AWAITED: &str = "awaited";

/// The result for a row that was changed after the statement began, by an entry that began to wait.
/// The statement has not seen the entry.
const AGAIN: &str = "again";

/// Ends a holding. Grants the name to the first live entry, or to the given claim if no entry
/// waits, or frees it.
pub(super) async fn release(conn: &mut Connection<'_>, release: &Release) -> Result<ReleaseOutcome, sqlx::Error> {
    let Release { name, id, token: held, keep_for, next } = release;
    let stays_reserved = !keep_for.is_zero();
    // An entry that begins to wait locks the row for the time of one statement: at first the
    // release is just repeated.
    for tried in 0..TRIES {
        let sql = match next {
            _ if stays_reserved => RELEASE_AND_KEEP,
            Some(_) => RELEASE_TO_NEXT,
            None => RELEASE,
        };
        let query = sqlx::query(sql).bind(name.as_str()).bind(id.to_string()).bind(held.get());
        let query = match next {
            _ if stays_reserved => query.bind(micros(*keep_for)),
            Some(next) => bind_holder(query, next),
            None => query.bind(conn.settings.may_commit_lazily()),
        };
        if let Some(row) = conn.row(query).await? {
            let holder = row.text("id")?;
            if holder == UNDONE {
                return Err(sqlx::Error::Decode("a trigger has undone the change of a row that was locked".into()));
            }
            if holder == AGAIN && tried + 1 < TRIES {
                continue;
            }
            if holder == AGAIN || holder == AWAITED {
                return Ok(ReleaseOutcome::Awaited);
            }
            let awaited = row.number("waiting")? != 0;
            if stays_reserved || !row.try_get::<bool, _>("is_alone")? {
                return Ok(ReleaseOutcome::Ended { awaited });
            }
            return Ok(match (parse_id(&holder)?, next) {
                (None, _) => ReleaseOutcome::Ended { awaited },
                (Some(_), Some(_)) => ReleaseOutcome::ToNext(token(&row, "token")?),
                (Some(id), None) => ReleaseOutcome::ToEntry(Granted { id, token: token(&row, "token")? }),
            });
        }
        if tried == 0 {
            continue;
        }
        let query = sqlx::query(FIND_OBSTACLE).bind(name.as_str()).bind(id.to_string()).bind(held.get());
        let Some(row) = conn.row(query).await? else {
            return Ok(ReleaseOutcome::NotHeld { lost: 0, token: 0 });
        };
        match &*row.text("obstacle")? {
            "locked" => return Ok(ReleaseOutcome::Locked),
            "not held" => {
                return Ok(ReleaseOutcome::NotHeld { lost: row.number("lost")?, token: row.number("token")? });
            }
            _ => {}
        }
    }
    Ok(ReleaseOutcome::Locked)
}

// ---- withdraw

// $1 name, $2 id, $3 the token whose holding stays, or 0.
#[rustfmt::skip]
const WITHDRAW: &str = "
WITH held AS MATERIALIZED (
    SELECT l.name, l.waiting
      FROM sqlock_lease AS l
     WHERE l.name = $1 AND l.id = $2 AND l.token <> $3
       FOR UPDATE SKIP LOCKED),
entry AS MATERIALIZED (
    SELECT e.name, e.id
      FROM sqlock_entry AS e
     WHERE e.name = $1 AND e.id = $2 AND e.owner <> '' AND (e.token = 0 OR e.token <> $3)
       FOR UPDATE SKIP LOCKED),
seen AS MATERIALIZED (
    SELECT (SELECT count(*) FROM held)
               = (SELECT count(*) FROM sqlock_lease AS l WHERE l.name = $1 AND l.id = $2 AND l.token <> $3)
           AND (SELECT count(*) FROM entry)
               = (SELECT count(*) FROM sqlock_entry AS e
                   WHERE e.name = $1 AND e.id = $2 AND e.owner <> '' AND (e.token = 0 OR e.token <> $3)) AS all_locked),
gone AS (
    DELETE FROM sqlock_entry AS e USING entry, seen WHERE seen.all_locked AND e.name = entry.name AND e.id = entry.id),
ended AS (
    UPDATE sqlock_lease AS l SET id = '', owner = '', client = '', expires_at = 0
      FROM held, seen WHERE seen.all_locked AND l.name = held.name)
SELECT all_locked,
       coalesce((SELECT waiting FROM held), (SELECT waiting FROM sqlock_lease WHERE name = $1), 0) <> 0
       OR EXISTS (SELECT FROM sqlock_entry AS e WHERE e.name = $1 AND e.token = 0 AND e.id <> $2) AS awaited
  FROM seen";

/// Deletes the entry of an acquisition and ends its holding, unless that has the token `except`.
pub(super) async fn withdraw(
    conn: &mut Connection<'_>,
    name: &LockName,
    id: AcquisitionId,
    except: Option<FencingToken>,
) -> Result<WithdrawalOutcome, sqlx::Error> {
    let query =
        sqlx::query(WITHDRAW).bind(name.as_str()).bind(id.to_string()).bind(except.map_or(0, FencingToken::get));
    let row = conn.row(query).await?.ok_or(sqlx::Error::RowNotFound)?;
    if row.try_get("all_locked")? {
        return Ok(WithdrawalOutcome::Gone { awaited: row.try_get("awaited")? });
    }
    Ok(WithdrawalOutcome::Locked)
}

// ---- evict

// $1 name, $2 token. A released holding that keeps the name unavailable is not counted as lost.
// Nothing is written unless the row, the entries and the losing clients are all locked.
#[rustfmt::skip]
const EVICT: &str = concat!("
WITH meant AS MATERIALIZED (
    SELECT e.name, e.id, e.owner, e.client FROM sqlock_entry AS e WHERE e.name = $1 AND e.token = $2),
seen AS MATERIALIZED (
    SELECT l.name, l.xmin AS version, l.client,
           l.token = $2 AND l.id NOT IN ('', 'entries') AS is_alone,
           l.token = $2 AND l.id NOT IN ('', 'kept', 'entries') OR EXISTS (SELECT FROM meant WHERE owner <> '') AS is_owned
      FROM sqlock_lease AS l
     WHERE l.name = $1
       AND (l.token = $2 AND l.id NOT IN ('', 'entries') OR EXISTS (SELECT FROM meant))),
held AS MATERIALIZED (
    SELECT l.name, seen.client, seen.is_alone, seen.is_owned
      FROM seen JOIN sqlock_lease AS l ON l.name = seen.name
     WHERE l.xmin = seen.version
       FOR UPDATE OF l SKIP LOCKED),
share AS MATERIALIZED (
    SELECT e.name, e.id, e.client
      FROM held JOIN meant ON meant.name = held.name JOIN sqlock_entry AS e ON e.name = meant.name AND e.id = meant.id
     WHERE e.token = $2
       FOR UPDATE OF e SKIP LOCKED),
loser AS MATERIALIZED (
    SELECT client FROM held WHERE is_alone AND client <> ''
     UNION
    SELECT share.client FROM held, share WHERE NOT held.is_alone AND share.client <> ''),
client AS MATERIALIZED (
    SELECT c.id FROM loser JOIN sqlock_client AS c ON c.id = loser.client FOR UPDATE OF c SKIP LOCKED),
all_locked AS MATERIALIZED (
    SELECT held.*
      FROM held
     WHERE (SELECT count(*) FROM share) = (SELECT count(*) FROM meant)
       AND (SELECT count(*) FROM client)
           = (SELECT count(*) FROM loser WHERE EXISTS (SELECT FROM sqlock_client AS c WHERE c.id = loser.client))),
notice AS (", notice!(), "),
gone AS (
    DELETE FROM sqlock_entry AS e USING share, all_locked WHERE e.name = share.name AND e.id = share.id),
evicted AS (
    UPDATE sqlock_lease AS l
       SET id = CASE WHEN a.is_alone THEN '' ELSE l.id END, owner = CASE WHEN a.is_alone THEN '' ELSE l.owner END,
           client = CASE WHEN a.is_alone THEN '' ELSE l.client END,
           expires_at = CASE WHEN a.is_alone THEN 0 ELSE l.expires_at END,
           lost = CASE WHEN a.is_owned THEN greatest(l.lost, $2) ELSE l.lost END
      FROM all_locked AS a
     WHERE l.name = a.name
    RETURNING l.name)
SELECT CASE WHEN EXISTS (SELECT FROM evicted) THEN 'done' ELSE 'locked' END AS outcome FROM seen");

/// Ends the holding with a token, and gives its clients a notice.
pub(super) async fn evict(
    conn: &mut Connection<'_>,
    name: &LockName,
    token: FencingToken,
) -> Result<ChangeOutcome, sqlx::Error> {
    amended(conn.row(sqlx::query(EVICT).bind(name.as_str()).bind(token.get())).await?)
}
