//! Counts of connections and transactions as the database reports them, read on a separate
//! connection.

use std::path::PathBuf;

use sqlx::{AssertSqlSafe, Pool, Row};

use crate::support::{Database, SOON, TestDatabase, connect, query_processes};
use crate::{DATABASE, Sql};

/// Watches the connections that are made with the URL of one test's database.
pub(super) struct ConnectionCounter {
    pool: Pool<Sql>,
    /// The mark of the test's connections on the server: application name, or database.
    mark: String,
    file: PathBuf,
}

impl ConnectionCounter {
    /// Marks the connections that will be opened to this database.
    pub(super) async fn of(db: &mut TestDatabase) -> Self {
        let pool = connect(&db.url, 1).await;
        let (mark, file) = match DATABASE {
            Database::Postgres => {
                let schema: String =
                    sqlx::query_scalar("SELECT current_schema()").fetch_one(&pool).await.expect("the schema");
                db.url = format!("{}&application_name={schema}", db.url);
                (schema, PathBuf::new())
            }
            Database::MySql | Database::MariaDb => {
                let name = sqlx::query_scalar("SELECT DATABASE()").fetch_one(&pool).await.expect("the database");
                (name, PathBuf::new())
            }
            Database::Sqlite => (String::new(), file_of(&db.url)),
        };
        Self { pool, mark, file }
    }

    /// Counts the open connections. On SQLite: how many times this process has the file open; the
    /// counter's own connection is not counted.
    pub(super) async fn connections(&self) -> i64 {
        let mark = &self.mark;
        match DATABASE {
            Database::Postgres => {
                self.count(format!("SELECT count(*) FROM pg_stat_activity WHERE application_name = '{mark}'")).await
            }
            Database::MySql | Database::MariaDb => {
                self.count(format!(
                    "SELECT count(*) FROM information_schema.processlist WHERE db = '{mark}' AND id <> CONNECTION_ID()"
                ))
                .await
            }
            Database::Sqlite => {
                let own = i64::from(self.pool.size());
                let open = std::fs::read_dir("/proc/self/fd")
                    .expect("the open files")
                    .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
                    .filter(|target| *target == self.file)
                    .count();
                i64::try_from(open).expect("a small number") - own
            }
        }
    }

    /// Waits until no connection is in a transaction. A rollback is sent when a connection goes
    /// back to its pool, so it may come a moment after the transaction was dropped.
    pub(super) async fn no_transactions(&self) {
        let mark = &self.mark;
        match DATABASE {
            Database::Postgres => {
                self.wait_until_zero(format!(
                    "SELECT count(*) FROM pg_stat_activity
                      WHERE application_name = '{mark}' AND state LIKE 'idle in transaction%'"
                ))
                .await;
            }
            Database::MySql | Database::MariaDb => {
                let until = tokio::time::Instant::now() + SOON;
                while let open @ 1.. = self.open_in_innodb().await {
                    assert!(tokio::time::Instant::now() < until, "{open} connections are still in a transaction");
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
            }
            // There can be no other write transaction when this one begins.
            Database::Sqlite => {
                let mut writer = self.pool.acquire().await.expect("a connection");
                let until = tokio::time::Instant::now() + SOON;
                while let Err(error) = sqlx::query("BEGIN IMMEDIATE").execute(&mut *writer).await {
                    assert!(tokio::time::Instant::now() < until, "a transaction is open: {error}");
                }
                sqlx::query("ROLLBACK").execute(&mut *writer).await.expect("rollback");
            }
        }
    }

    /// Counts the user-level locks in this database, such as those of sqlx's own migrator.
    pub(super) async fn advisory_locks(&self) -> i64 {
        let mark = &self.mark;
        match DATABASE {
            Database::Postgres => {
                self.count(format!(
                    "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
                      WHERE locktype = 'advisory' AND application_name = '{mark}'"
                ))
                .await
            }
            // The lock name that sqlx derives from the name of the database.
            Database::MySql | Database::MariaDb => {
                let lock = "LOWER(HEX(CAST(0x3d32ad9e AS UNSIGNED) * CRC32(DATABASE())))";
                self.count(format!("SELECT IF(IS_USED_LOCK({lock}) IS NULL, 0, 1)")).await
            }
            // SQLite's locks belong to transactions.
            Database::Sqlite => {
                self.no_transactions().await;
                0
            }
        }
    }

    /// Returns the number of connections to this database that InnoDB sees in a transaction. Not
    /// from information_schema.innodb_trx: that copy is refreshed only after a tenth of a second
    /// without reads, and several concurrent tests read it continually.
    /// <https://dev.mysql.com/doc/refman/8.4/en/innodb-information-schema-internal-data.html>
    async fn open_in_innodb(&self) -> usize {
        let mark = &self.mark;
        let ours = format!("SELECT CAST(id AS SIGNED) FROM information_schema.processlist WHERE db = '{mark}'");
        let ours = query_processes(async || {
            sqlx::query_scalar::<Sql, i64>(AssertSqlSafe(ours.clone())).fetch_all(&self.pool).await
        })
        .await;
        let status = sqlx::raw_sql("SHOW ENGINE INNODB STATUS").fetch_one(&self.pool).await.expect("the status");
        let status: String = status.get(2);
        status
            .split("---TRANSACTION ")
            .skip(1)
            .filter(|transaction| transaction.lines().next().is_some_and(|first| first.contains("ACTIVE")))
            .filter_map(|transaction| transaction.split_once(" thread id ")?.1.split(',').next()?.parse().ok())
            .filter(|thread: &i64| ours.contains(thread))
            .count()
    }

    async fn wait_until_zero(&self, count: String) {
        let until = tokio::time::Instant::now() + SOON;
        loop {
            let open = self.count(count.clone()).await;
            if open == 0 {
                return;
            }
            assert!(tokio::time::Instant::now() < until, "{open} connections are still in a transaction");
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    async fn count(&self, sql: String) -> i64 {
        query_processes(async || sqlx::query_scalar::<Sql, i64>(AssertSqlSafe(sql.clone())).fetch_one(&self.pool).await)
            .await
    }
}

/// Returns the canonical path of the file of a SQLite URL.
fn file_of(url: &str) -> PathBuf {
    let path = url.trim_start_matches("sqlite://");
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    std::fs::canonicalize(path).unwrap_or_else(|_| path.into())
}
