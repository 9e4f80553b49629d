//! Transitions: changes of the holder of a name.

use sqlx::MySqlConnection;

use super::acquire::grant_claim;
use super::script::{Script, Sending, filled, id_literal, name_literal, read_flag};
use super::store::token;
use crate::backend::micros;
use crate::backend::stored::holder_text;
use crate::protocol::{AcquisitionId, Granted, Grantee, Holder, HolderChange, Mode, Transition};

// Bind order: name, holder, token.
#[rustfmt::skip]
const LOCK_LEASE: &str = "
SELECT COUNT(*) INTO @sqlock_leases FROM sqlock_lease AS s WHERE s.name = ? AND s.id = ? AND s.token = ? FOR UPDATE SKIP LOCKED";

// The expired entries and the grantees. Bind order: name, ids.
#[rustfmt::skip]
const LOCK_ENTRIES: &str = "
SELECT COUNT(*) INTO @sqlock_entries FROM sqlock_entry AS s FORCE INDEX (PRIMARY) WHERE s.name = ? AND s.id IN (?) FOR UPDATE SKIP LOCKED";

/// The clients that lose a holding. Bind order: name, whether the holder of the row expires, name,
/// ids of expired entries.
#[rustfmt::skip]
macro_rules! losers {
    () => {
        "(SELECT t.client AS id FROM sqlock_lease AS t WHERE t.name = ? AND ? AND t.client <> ''
         UNION
        SELECT h.client FROM sqlock_entry AS h WHERE h.name = ? AND h.id IN (?) AND h.token > 0 AND h.client <> '') AS n"
    };
}

const LOCK_CLIENTS: &str = lock_clients!(losers!());

/// The conditions of a transition, each with its literals.
mod condition {
    // Every row is locked. Bind order: how many entries, losers.
    #[rustfmt::skip]
    pub(super) const IS_LOCKED: &str = concat!("
       @sqlock_leases = 1 AND @sqlock_entries = ?
       AND ", are_clients_locked!(losers!()));

    // Bind order: name.
    #[rustfmt::skip]
    pub(super) const HOLDER_HAS_EXPIRED: &str = concat!("
       EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = ? AND ", lease_until!("l"), " <= ", now!(), ")");

    // Bind order: name, ids, how many.
    #[rustfmt::skip]
    pub(super) const ENTRIES_HAVE_EXPIRED: &str = concat!("
       (SELECT COUNT(*) FROM sqlock_entry AS e WHERE e.name = ? AND e.id IN (?) AND ", entry_until!("e"), " <= ", now!(), ") = ?");

    // Bind order: name, ids, how many.
    #[rustfmt::skip]
    pub(super) const ENTRIES_WAIT: &str = "
       (SELECT COUNT(*) FROM sqlock_entry AS e WHERE e.name = ? AND e.id IN (?) AND e.token = 0) = ?";

    // An acquisition may have joined since the queue was read: joining does not raise the token.
    // Bind order: name, ids of expired entries.
    #[rustfmt::skip]
    pub(super) const NO_HOLDER: &str = "
       NOT EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = ? AND e.id NOT IN (?) AND e.token > 0)";
    #[rustfmt::skip]
    pub(super) const NO_EXCLUSIVE_HOLDER: &str = "
       NOT EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = ? AND e.id NOT IN (?) AND e.token > 0 AND e.units = 0)";
    #[rustfmt::skip]
    pub(super) const NO_WAITER: &str = "
       NOT EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = ? AND e.id NOT IN (?) AND e.token = 0)";
}

// Bind order: conditions, name, token.
#[rustfmt::skip]
const DECIDE: &str = concat!("
SELECT IF(?, ?, NULL), GREATEST(? + 1, ", now!(), ") INTO @sqlock_name, @sqlock_token");

// Bind order: losers.
const NOTICE: &str = notice!(losers!());

// A token shared by several acquisitions of one owner is lost with the last of them. Bind order:
// whether the holder of the row expires, ids of expired entries, the same.
#[rustfmt::skip]
const WRITE_LOSS: &str = "
UPDATE sqlock_lease AS l
   SET l.lost = GREATEST(l.lost, IF(?, l.token, 0),
                COALESCE((SELECT MAX(h.token) FROM sqlock_entry AS h
                           WHERE h.name = l.name AND h.id IN (?) AND h.token > 0 AND h.owner <> ''
                             AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS o
                                              WHERE o.name = h.name AND o.token = h.token AND o.id NOT IN (?))), 0))
 WHERE l.name = @sqlock_name";

#[rustfmt::skip]
const FREE: &str = "
UPDATE sqlock_lease SET id = '', owner = '', client = '', expires_at = 0, holder = '', label = '' WHERE name = @sqlock_name";

// Bind order: id, ttl, ttl.
#[rustfmt::skip]
const GRANT_ALONE: &str = concat!("
UPDATE sqlock_lease AS l STRAIGHT_JOIN sqlock_entry AS e ON e.name = l.name AND e.id = ?
   SET l.id = e.id, l.owner = e.owner, l.client = IF(e.is_renewed, e.client, ''), l.token = @sqlock_token, l.ttl = ?,
       l.expires_at = ", now!(), " + ?, l.acquired_at = ", now!(), ", l.holder = e.holder, l.label = e.label
 WHERE l.name = @sqlock_name");

// Bind order: the difference between the last and the first token, or NULL to leave the token.
#[rustfmt::skip]
const GRANT_SHARED: &str = "
UPDATE sqlock_lease
   SET id = 'entries', owner = '', client = '', token = COALESCE(@sqlock_token + ?, token), holder = '', label = ''
 WHERE name = @sqlock_name";

// Bind order: number, ttl, ttl, id.
#[rustfmt::skip]
const GRANT_SHARE: &str = concat!("
UPDATE sqlock_entry
   SET client = IF(is_renewed, client, ''), token = @sqlock_token + ?, ttl = ?, expires_at = ", now!(), " + ?, acquired_at = ", now!(), "
 WHERE name = @sqlock_name AND id = ?");

// The server could scan a small table for several rows, and would wait for locked ones: hence FORCE
// INDEX. Bind order: ids.
const DELETE: &str =
    "DELETE e FROM sqlock_entry AS e FORCE INDEX (PRIMARY) WHERE e.name = @sqlock_name AND e.id IN (?)";

/// How many entries one statement deletes. MariaDB would rewrite a list of 1000.
/// <https://mariadb.com/docs/server/ha-and-performance/optimization-and-tuning/query-optimizations/conversion-of-big-in-predicates-into-subqueries>
const MAX_DELETED: usize = 500;

const RESULT: &str = "SELECT CAST(@sqlock_name IS NOT NULL AS SIGNED), CAST(@sqlock_token AS UNSIGNED)";

pub(super) async fn transition(
    conn: &mut MySqlConnection,
    sending: Sending,
    transition: &Transition,
) -> Result<Option<Vec<Granted>>, sqlx::Error> {
    let Transition { seen, expired, change, is_last, .. } = transition;
    let ends_row = matches!(seen.holder, Holder::Lease(_) | Holder::Kept);
    // This store sets no marks, so no queue was read with one.
    if (*is_last && seen.waiting != 0) || (ends_row && matches!(change, HolderChange::None)) {
        return Ok(None);
    }
    let literals = Literals::new(transition);
    let Literals { name, gone, .. } = &literals;
    let losers = literals.losers();

    let mut script = Script::new(sending);
    script.add(LOCK_LEASE, &[name, &id_literal(holder_text(seen.holder)), &literals.token]);
    script.add(LOCK_ENTRIES, &[name, &literals.locked]);
    script.add(LOCK_CLIENTS, &losers);
    script.add(DECIDE, &[&conditions(transition, &literals), name, &literals.token]);
    script.add(NOTICE, &losers);
    script.add(WRITE_LOSS, &[literals.lease_expires, gone, gone]);
    for ids in expired.chunks(MAX_DELETED) {
        script.add(DELETE, &[&list_ids(ids.iter().copied())]);
    }
    add_change(&mut script, change);
    let row = script.run(conn, RESULT).await?;
    if !read_flag(&row, 0)? {
        return Ok(None);
    }
    let first: u64 = sqlx::Row::try_get(&row, 1)?;
    let grant = |(id, token_of): (AcquisitionId, u64)| Ok(Granted { id, token: token(token_of)? });
    change.granted_ids().into_iter().zip(first..).map(grant).collect::<Result<_, sqlx::Error>>().map(Some)
}

/// The literals that several statements of a transition share.
struct Literals {
    name: String,
    /// The token that was read.
    token: String,
    /// Whether the holder of the row expires: 1 or 0.
    lease_expires: &'static str,
    /// The ids of the expired entries.
    gone: String,
    /// The ids of the grantees.
    granted: String,
    /// The ids of both.
    locked: String,
}

impl Literals {
    fn new(transition: &Transition) -> Self {
        let Transition { name, seen, expired, change, .. } = transition;
        let lease_expires = transition.takes_over();
        let expired = || expired.iter().copied();
        let granted = || change.grantees().iter().map(|grantee| grantee.id);
        Self {
            name: name_literal(name),
            token: seen.token.to_string(),
            lease_expires: if lease_expires { "1" } else { "0" },
            gone: list_ids(expired()),
            granted: list_ids(granted()),
            locked: list_ids(expired().chain(granted())),
        }
    }

    /// Returns the literals of `losers!`.
    fn losers(&self) -> [&str; 4] {
        [&self.name, self.lease_expires, &self.name, &self.gone]
    }
}

/// Joins the conditions of a transition.
fn conditions(transition: &Transition, literals: &Literals) -> String {
    let Transition { seen, given_up, expired, change, .. } = transition;
    let Literals { name, gone, granted, .. } = literals;
    let [in_row, lease_expires, in_entries, ended] = literals.losers();
    let grantees = change.grantees().len();
    let locked = (expired.len() + grantees).to_string();

    let mut all = vec![filled(condition::IS_LOCKED, &[&locked, in_row, lease_expires, in_entries, ended])];
    let mut require = |sql: &str, literals: &[&str]| all.push(filled(sql, literals));
    match seen.holder {
        Holder::Lease(_) if given_up.is_some() => {}
        Holder::Lease(_) | Holder::Kept => require(condition::HOLDER_HAS_EXPIRED, &[name]),
        Holder::Nobody | Holder::Entries => {}
    }
    require(condition::ENTRIES_HAVE_EXPIRED, &[name, gone, &expired.len().to_string()]);
    require(condition::ENTRIES_WAIT, &[name, granted, &grantees.to_string()]);
    match change {
        HolderChange::None => {}
        HolderChange::Free | HolderChange::Exclusive(_) => require(condition::NO_HOLDER, &[name, gone]),
        HolderChange::Shared(_) => require(condition::NO_EXCLUSIVE_HOLDER, &[name, gone]),
        HolderChange::Claim(claim) => {
            let is_exclusive = claim.mode == Mode::Exclusive;
            let free = if is_exclusive { condition::NO_HOLDER } else { condition::NO_EXCLUSIVE_HOLDER };
            require(free, &[name, gone]);
            require(condition::NO_WAITER, &[name, gone]);
        }
    }
    all.join(" AND")
}

/// Adds the statements that write the new holder.
fn add_change(script: &mut Script, change: &HolderChange) {
    match change {
        HolderChange::None => {}
        HolderChange::Free => script.add(FREE, &[]),
        HolderChange::Exclusive(Grantee { id, ttl }) => {
            let ttl = &*micros(*ttl).to_string();
            script.add(GRANT_ALONE, &[&id_literal(id), ttl, ttl]);
            script.add(DELETE, &[&id_literal(id)]);
        }
        HolderChange::Shared(grantees) => {
            let above = grantees.len().checked_sub(1).map_or_else(|| "NULL".into(), |above| above.to_string());
            script.add(GRANT_SHARED, &[&above]);
            for (number, Grantee { id, ttl }) in grantees.iter().enumerate() {
                let ttl = &*micros(*ttl).to_string();
                script.add(GRANT_SHARE, &[&number.to_string(), ttl, ttl, &id_literal(id)]);
            }
        }
        HolderChange::Claim(claim) => grant_claim(script, claim),
    }
}

/// Joins ids as literals for IN. The list is never empty: it begins with an id that no row has.
fn list_ids(ids: impl Iterator<Item = AcquisitionId>) -> String {
    ids.fold(String::from("''"), |list, id| format!("{list}, '{id}'"))
}
