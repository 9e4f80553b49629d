//! Claims of keys: the transaction has the write lock, so there is no rival.

use sqlx::{Connection as _, QueryBuilder, Row as _, Sqlite, SqliteConnection};

use super::SqliteStore;
use crate::backend::StoreFuture;
use crate::backend::records::{
    ClaimOutcome, ClaimRequest, INTO, RecordCommand, RecordDialect, RecordResponse, execute_command,
    push_replace_expired, push_use_token, push_values, text_and_bytes,
};

impl RecordDialect for Sqlite {
    const NOW: &'static str = now!();
    const INSERT_NEW: (&'static str, &'static str) = ("INSERT OR IGNORE INTO ", "");
    const SELECT_IDENTITY: &'static str = "SELECT file FROM pragma_database_list WHERE name = 'main'";
    const STEP_COLUMN: &'static str = "step";
    const CLAIM_MAY_WAIT: bool = false;

    /// A file may have several paths. A database in memory has none.
    fn parse_identity(path: String) -> Option<String> {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt as _;
            let file = std::fs::metadata(path).ok()?;
            Some(format!("{}/{}", file.dev(), file.ino()))
        }
        #[cfg(not(unix))]
        Some(std::fs::canonicalize(path).ok()?.display().to_string())
    }

    text_and_bytes!();

    fn claim<'a>(conn: &'a mut SqliteConnection, claim: &'a ClaimRequest) -> StoreFuture<'a, ClaimOutcome> {
        Box::pin(async move {
            let state = claim.open_state();
            let mut query = QueryBuilder::new("");
            if claim.issued {
                push_use_token::<Self>(&mut query, claim, state, 0);
            } else {
                query.push("INSERT INTO ").push(INTO).push(" VALUES (");
                push_values::<Self>(&mut query, claim, state, 0);
                query.push(")");
                push_replace_expired::<Self>(&mut query);
            }
            let claimed = query.build().execute(conn).await?.rows_affected();
            Ok(if claimed > 0 { ClaimOutcome::Claimed } else { ClaimOutcome::RecordExists })
        })
    }
}

impl SqliteStore {
    pub(super) async fn execute_command(&mut self, command: &RecordCommand) -> Result<RecordResponse, sqlx::Error> {
        let mut conn = self.conn().await?;
        if !matches!(command, RecordCommand::Resolve(_)) {
            return execute_command::<Sqlite>(&mut conn, command).await;
        }
        // The record and its resolution are written together.
        let mut tx = conn.begin_with("BEGIN IMMEDIATE").await?;
        let found = execute_command::<Sqlite>(&mut tx, command).await?;
        tx.commit().await?;
        Ok(found)
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use sqlx::Executor as _;

    use super::super::differential::open;
    use super::super::{DatabaseFile, StoreConnection};
    use super::*;
    use crate::backend::records::ResolveRequest;

    const TABLES: &str = include_str!("../../../migrations/sqlite/0002_idem.sql");

    const RECORD: &str = "
INSERT INTO sqlock_idem VALUES ('id', '', '', 'key', x'', 'unknown', 7, 1, 0, 0, NULL, NULL, 0, 0)";

    /// The trigger ends the transaction as a full disk does.
    const REJECT: &str = "
CREATE TRIGGER reject BEFORE UPDATE ON sqlock_idem BEGIN SELECT RAISE(ROLLBACK, 'rejected'); END";

    #[tokio::test]
    async fn resolve_succeeds_after_sqlite_ended_its_transaction() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("store.db");
        let mut conn = open(&path).await;
        for sql in [TABLES, RECORD, REJECT] {
            sqlx::raw_sql(sql).execute(&mut conn).await.expect("a record and a trigger");
        }
        let connection = StoreConnection::Dedicated(conn, DatabaseFile::named(&path));
        let mut store = SqliteStore { connection, listener: None };
        let (id, by, note) = ("id".into(), "operator".into(), String::new());
        let command = RecordCommand::Resolve(ResolveRequest { id, token: 7, result: Some(Vec::new()), by, note });
        assert!(store.execute_command(&command).await.is_err(), "rejected");
        let mut conn = store.conn().await.expect("the connection");
        conn.execute("DROP TRIGGER reject").await.expect("no trigger");
        drop(conn);
        assert_eq!(store.execute_command(&command).await.expect("resolved").changed, 1);
    }
}
