//! How a key is claimed: the transaction has the write lock, so there is no rival.

use sqlx::{Connection as _, QueryBuilder, Row as _, Sqlite, SqliteConnection};

use super::SqliteStore;
use crate::backend::StoreFuture;
use crate::backend::records::{
    Claimed, Claiming, Errand, Findings, INTO, Records, State, as_usual, carry, push_consume, push_or_anew, push_values,
};

impl Records for Sqlite {
    const NOW: &'static str = now!();
    const INSERT_NEW: (&'static str, &'static str) = ("INSERT OR IGNORE INTO ", "");
    const IDENTITY: &'static str = "SELECT file FROM pragma_database_list WHERE name = 'main'";
    const STEP: &'static str = "step";
    const PEEKS: bool = false;

    /// A file may have several paths. A database in memory has none.
    fn identify(path: String) -> Option<String> {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt as _;
            let file = std::fs::metadata(path).ok()?;
            Some(format!("{}/{}", file.dev(), file.ino()))
        }
        #[cfg(not(unix))]
        Some(std::fs::canonicalize(path).ok()?.display().to_string())
    }

    as_usual!();

    fn claim<'a>(conn: &'a mut SqliteConnection, claim: &'a Claiming) -> StoreFuture<'a, Claimed> {
        Box::pin(async move {
            let mut query = QueryBuilder::new("");
            if claim.issued {
                push_consume::<Self>(&mut query, claim, State::Done, 0);
            } else {
                query.push("INSERT INTO ").push(INTO).push(" VALUES (");
                push_values::<Self>(&mut query, claim, State::Done, 0);
                query.push(")");
                push_or_anew::<Self>(&mut query);
            }
            let claimed = query.build().execute(conn).await?.rows_affected();
            Ok(if claimed > 0 { Claimed::Ours } else { Claimed::Not })
        })
    }
}

impl SqliteStore {
    pub(super) async fn carry(&mut self, errand: &Errand) -> Result<Findings, sqlx::Error> {
        let mut conn = self.conn().await?;
        if !matches!(errand, Errand::Resolve(_)) {
            return carry::<Sqlite>(&mut conn, errand).await;
        }
        // Several statements, of which none may be left out.
        let mut tx = conn.begin_with("BEGIN IMMEDIATE").await?;
        let found = carry::<Sqlite>(&mut tx, errand).await?;
        tx.commit().await?;
        Ok(found)
    }
}
