//! SQLite against the model.

use std::path::Path;
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteRow, SqliteSynchronous};
use sqlx::{ConnectOptions as _, Connection as _, SqliteConnection};

use super::{batch, store};
use crate::backend::differential::{Database, Tables, compare, read_client, read_entry, read_lease};
use crate::backend::memory::Key;
use crate::backend::micros;
use crate::name::LockName;
use crate::protocol::{AcquisitionId, Batch, ClientId, Request, Response};
use crate::token::FencingToken;

const TABLES: &str = include_str!("../../../migrations/sqlite/0001_lease.sql");

/// Opens a connection to a file with the tables.
pub(super) async fn open(file: &Path) -> SqliteConnection {
    let options = SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Off)
        .busy_timeout(Duration::from_secs(5))
        .disable_statement_logging();
    let mut conn = options.connect().await.expect("a connection");
    sqlx::raw_sql(TABLES).execute(&mut conn).await.expect("the tables");
    conn
}

struct Sqlite {
    connections: [SqliteConnection; 3],
    /// For statements that are not requests.
    own: SqliteConnection,
}

impl Sqlite {
    async fn rows(&mut self, sql: &'static str, key: &str) -> Vec<SqliteRow> {
        sqlx::query(sql).bind(key).fetch_all(&mut self.own).await.expect("rows")
    }
}

impl Database for Sqlite {
    const MARKS: bool = false;
    const LOCKS_ROWS: bool = false;
    const TICK: Duration = Duration::from_millis(2);

    async fn execute(&mut self, connection: usize, request: &Request) -> Result<Response, sqlx::Error> {
        let connection_of = &mut self.connections[connection];
        // One of the connections carries requests out as batches.
        if connection == 0
            && let Some(batch) = Batch::from_request(request)
            && let Some(response) = batch::execute(connection_of, &batch).await?.remove(0)
        {
            return Ok(response);
        }
        store::execute(connection_of, request).await
    }

    async fn fence(&mut self, _: &LockName, _: AcquisitionId, _: FencingToken) -> bool {
        unreachable!("no row is locked")
    }

    async fn lock(&mut self, _: &Key) {
        unreachable!("no row is locked")
    }

    async fn unlock(&mut self) {}

    async fn move_back(&mut self, names: &[LockName], clients: &[ClientId], by: Duration) {
        const LEASE: &str = "
UPDATE sqlock_lease
   SET expires_at = expires_at - $2, acquired_at = acquired_at - $2, token = iif(token = 0, 0, token - $2),
       lost = iif(lost = 0, 0, lost - $2), asked = iif(asked = 0, 0, asked - $2)
 WHERE name = $1";
        const ENTRY: &str = "
UPDATE sqlock_entry
   SET expires_at = expires_at - $2, acquired_at = acquired_at - $2, arrived_at = arrived_at - $2,
       token = iif(token = 0, 0, token - $2)
 WHERE name = $1";
        const CLIENT: &str = "UPDATE sqlock_client SET beat_at = beat_at - $2 WHERE id = $1";
        let names = names.iter().flat_map(|name| [LEASE, ENTRY].map(|sql| (sql, name.to_string())));
        for (sql, key) in names.chain(clients.iter().map(|client| (CLIENT, client.to_string()))) {
            sqlx::query(sql).bind(key).bind(micros(by)).execute(&mut self.own).await.expect("rows move back");
        }
    }

    async fn tables(&mut self, names: &[LockName], clients: &[ClientId]) -> Tables {
        let mut tables = Tables::default();
        let read = "a readable row";
        for client in clients {
            for row in self.rows("SELECT * FROM sqlock_client WHERE id = $1", &client.to_string()).await {
                tables.clients.insert(*client, read_client(&row).expect(read));
            }
        }
        for name in names {
            for row in self.rows("SELECT * FROM sqlock_lease WHERE name = $1", name.as_str()).await {
                tables.leases.insert(name.clone(), read_lease(&row).expect(read));
            }
            for row in self.rows("SELECT * FROM sqlock_entry WHERE name = $1", name.as_str()).await {
                let (id, entry) = read_entry(&row, "is_renewed").expect(read);
                tables.entries.insert((name.clone(), id), entry);
            }
        }
        tables
    }
}

#[tokio::test]
async fn requests_answer_as_the_model_does() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("differential.db");
    let connections = [open(&file).await, open(&file).await, open(&file).await];
    let mut database = Sqlite { connections, own: open(&file).await };
    compare(&mut database).await;
    for conn in database.connections.into_iter().chain([database.own]) {
        conn.close().await.expect("closed");
    }
}
