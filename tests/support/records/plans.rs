//! The plans of the statements on records: the texts of `src/backend/records`, with values instead
//! of parameters.

use sqlx::{AssertSqlSafe, Executor as _, Row as _};

use super::{BATCH, Operation};
use crate::Database;
use crate::fill::now_micros;

pub(super) struct Statement {
    pub(super) operation: Operation,
    pub(super) what: &'static str,
    pub(super) sql: String,
}

/// A line of a plan.
pub(super) struct PlanLine {
    pub(super) text: String,
    /// Whether this step reads all records or all their steps, by the table or by an index.
    pub(super) reads_all: bool,
}

const COLUMNS: &str = "id, namespace, principal, request_key, fingerprint, state, token, attempts, permanent, result, \
     created_at, expires_at";

/// The condition of `src/backend/records/purge.rs`.
const EXPIRED: &str = "state NOT IN ('started', 'unknown', 'expired') AND expires_at <=";

/// The condition of an orphaned step in a table, as in `src/backend/records/purge.rs`.
fn orphaned(steps: &str) -> String {
    format!(
        "NOT EXISTS (SELECT 1 FROM sqlock_idem AS r
                      WHERE r.id = {steps}.id AND r.created_at = {steps}.begun AND r.state <> 'expired')"
    )
}

/// Returns the statements with a search. An INSERT has none, because its primary key decides.
pub(super) fn statements(database: &Database, id: &str) -> Vec<Statement> {
    let (now, hint, lock) = match database {
        Database::Postgres(_) => {
            ("(extract(epoch FROM clock_timestamp()) * 1000000)::bigint", "", " FOR UPDATE SKIP LOCKED")
        }
        Database::MySql(_) => (
            "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)",
            " FORCE INDEX (sqlock_idem_by_expiry)",
            " FOR UPDATE SKIP LOCKED",
        ),
        Database::Sqlite(_) => ("CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)", "", ""),
    };
    let mut statements = Vec::new();
    let mut add = |operation, what, sql| statements.push(Statement { operation, what, sql });
    let (of_id, in_ids) = (format!("WHERE id = '{id}'"), format!("WHERE id IN ('{id}', 'b', 'c')"));
    let read = format!("SELECT {COLUMNS}, {now} FROM sqlock_idem {of_id}");
    let list = |state: &str, after: &str| {
        format!(
            "SELECT {COLUMNS}, {now} FROM sqlock_idem WHERE state = '{state}' {after} AND namespace = 'payments'
              ORDER BY created_at, id LIMIT 500"
        )
    };
    let store = format!("UPDATE sqlock_idem SET result = NULL, expires_at = {now} {of_id}");
    add(Operation::Claim, "store the result", format!("{store} AND state = 'done' AND token = 0 AND result IS NULL"));
    add(Operation::Replay, "read", read.clone());
    add(Operation::ListUnknown, "list", list("unknown", ""));
    add(
        Operation::ResumeOne,
        "list the next page",
        list("started", "AND created_at >= 17 AND (created_at > 17 OR id > 'a')"),
    );
    let start = format!("UPDATE sqlock_idem SET state = 'started', attempts = attempts + 1, token = 17 {of_id}");
    add(Operation::ResumeOne, "start", format!("{start} AND token < 17 AND state IN ('started', 'unknown')"));
    add(Operation::ResumeOne, "read", read);
    add(
        Operation::ResumeOne,
        "read the request",
        format!("SELECT request FROM sqlock_idem {of_id} AND created_at = 17"),
    );
    add(
        Operation::ResumeOne,
        "end",
        format!("UPDATE sqlock_idem SET state = 'done' {of_id} AND state = 'started' AND token = 17"),
    );
    // The client reads the clock before this statement, and passes a number.
    let clock = now_micros();
    let expired =
        format!("SELECT id FROM sqlock_idem{hint} WHERE {EXPIRED} {clock} ORDER BY expires_at LIMIT {BATCH}{lock}");
    add(Operation::PurgeBatch, "find expired records", expired);
    let refuse = format!("UPDATE sqlock_idem SET result = NULL, state = 'expired' {in_ids}");
    add(
        Operation::PurgeBatch,
        "refuse",
        format!("{refuse} AND state = 'done' AND permanent = 1 AND expires_at <= {now}"),
    );
    let free = match database {
        Database::Postgres(_) => format!("WHERE id = ANY (ARRAY(SELECT id FROM sqlock_idem {in_ids}{lock}))"),
        _ => in_ids.clone(),
    };
    let delete = format!("DELETE FROM sqlock_idem {free} AND permanent = 0 AND {EXPIRED} {now}");
    add(Operation::PurgeBatch, "delete", delete);
    let orphaned_of_ids = orphaned("sqlock_idem_step");
    add(Operation::PurgeBatch, "delete steps", format!("DELETE FROM sqlock_idem_step {in_ids} AND {orphaned_of_ids}"));
    let side = |name: &str, condition: &str, order: &str| {
        format!(
            "SELECT id, begun FROM (SELECT id, begun FROM sqlock_idem_step WHERE id {condition} '{id}'
                                     ORDER BY id{order} LIMIT {BATCH}) AS {name}"
        )
    };
    let (after, before, of_examined) =
        (side("after_it", ">=", ""), side("before_it", "<", " DESC"), orphaned("examined"));
    add(
        Operation::PurgeNothing,
        "find orphaned steps",
        format!("SELECT DISTINCT id FROM ({after} UNION ALL {before}) AS examined WHERE {of_examined}"),
    );
    statements
}

impl Database {
    /// Returns the plan of a statement, which is not run.
    pub(super) async fn plan(&self, sql: &str) -> Vec<PlanLine> {
        match self {
            Self::Postgres(pool) => {
                let rows = pool.fetch_all(AssertSqlSafe(format!("EXPLAIN {sql}"))).await.expect("a plan");
                let line = |text: String| PlanLine { reads_all: text.contains("Seq Scan on sqlock_idem"), text };
                rows.iter().map(|row| line(row.get(0))).collect()
            }
            Self::MySql(pool) => {
                // The format is explicit, because MySQL 9 draws a tree by default.
                let explain = sqlx::raw_sql(AssertSqlSafe(format!("EXPLAIN FORMAT=TRADITIONAL {sql}")));
                let rows = explain.fetch_all(pool).await.expect("a plan");
                rows.iter().map(plan_line_of_mysql).collect()
            }
            Self::Sqlite(pool) => {
                let rows = pool.fetch_all(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"))).await.expect("a plan");
                let line = |text: String| PlanLine { reads_all: text.starts_with("SCAN sqlock_idem"), text };
                rows.iter().map(|row| line(row.get("detail"))).collect()
            }
        }
    }
}

/// Reads the relevant columns, which are text in this protocol.
fn plan_line_of_mysql(row: &sqlx::mysql::MySqlRow) -> PlanLine {
    let column = |name: &str| row.try_get_unchecked::<Option<String>, _>(name).ok().flatten().unwrap_or_default();
    let [table, access, key, rows, extra] = ["table", "type", "key", "rows", "Extra"].map(column);
    PlanLine {
        reads_all: matches!(table.as_str(), "sqlock_idem" | "sqlock_idem_step" | "r")
            && matches!(access.as_str(), "ALL" | "index"),
        text: format!("{table}: {access}, key {key}, {rows} rows; {extra}"),
    }
}
