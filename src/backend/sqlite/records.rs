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
