//! PostgreSQL against the model.

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Executor as _, PgConnection, Row as _};

use super::batch;
use super::fence::fence;
use super::settings::Settings;
use super::store::{Connection, execute};
use crate::backend::differential::{Database, Tables, compare};
use crate::backend::fence::{FenceCheck, FenceOutcome};
use crate::backend::memory::{Client, Entry, Key, Lease};
use crate::backend::micros;
use crate::backend::stored::{TableRow as _, holder, parse_id};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, Batch, ClientId, EntryState, Mode, Request, Response};
use crate::token::FencingToken;

const VARIABLE: &str = "SQLOCK_TEST_POSTGRES_URL";

/// A schema of its own on a server, and connections to it.
struct PostgresDatabase {
    options: PgConnectOptions,
    schema: String,
    settings: Settings,
    connections: Vec<PgConnection>,
    open: Vec<PgConnection>,
    idle: Vec<PgConnection>,
}

impl PostgresDatabase {
    async fn create() -> Self {
        let url = std::env::var(VARIABLE);
        let url = url
            .unwrap_or_else(|_| panic!("{VARIABLE} is not set: run the tests with scripts/test, which starts servers"));
        let options: PgConnectOptions = url.parse().expect("a URL");
        let options = options.disable_statement_logging();
        let schema = format!("differential_{:032x}", rand());
        let mut connection = options.connect().await.expect("a connection");
        connection.execute(AssertSqlSafe(format!("CREATE SCHEMA {schema}"))).await.expect("a schema");
        // A wait for a row is a difference as well: the model says when a request must wait, and
        // then it is not compared.
        let options = options.options([("search_path", &*schema), ("lock_timeout", "5s")]);
        let mut connections = Vec::new();
        for _ in 0..3 {
            connections.push(options.connect().await.expect("a connection"));
        }
        sqlx::raw_sql(include_str!("../../../migrations/postgres/0001_lease.sql"))
            .execute(&mut connections[0])
            .await
            .expect("the tables");
        let settings = Settings::read(&mut connections[0], "the server", false).await.expect("settings");
        Self { options, schema, settings, connections, open: Vec::new(), idle: Vec::new() }
    }

    async fn drop(mut self) {
        let sql = format!("DROP SCHEMA {} CASCADE", self.schema);
        self.connections[0].execute(AssertSqlSafe(sql)).await.expect("no schema");
    }

    async fn begin(&mut self) -> PgConnection {
        let mut connection = match self.idle.pop() {
            Some(connection) => connection,
            None => self.options.connect().await.expect("a connection"),
        };
        connection.execute("BEGIN").await.expect("a transaction");
        connection
    }

    async fn rows(&mut self, sql: &'static str, keys: &[String]) -> Vec<PgRow> {
        sqlx::query(sql).bind(keys).fetch_all(&mut self.connections[0]).await.expect("rows")
    }
}

fn rand() -> u128 {
    uuid::Uuid::new_v4().as_u128()
}

fn text(row: &PgRow, column: &str) -> String {
    row.text(column).expect("a text")
}

fn number(row: &PgRow, column: &str) -> i64 {
    row.number(column).expect("a number")
}

fn known<T: std::str::FromStr>(row: &PgRow, column: &str) -> Option<T>
where
    T::Err: std::error::Error + Send + Sync + 'static,
{
    parse_id(&text(row, column)).expect("an identity")
}

fn client(row: &PgRow) -> (ClientId, Client) {
    let id = known(row, "id").expect("an id");
    (id, Client { beat_at: number(row, "beat_at"), notice: number(row, "notice") })
}

fn lease(row: &PgRow) -> (LockName, Lease) {
    let lease = Lease {
        holder: holder(&text(row, "id")).expect("a holder"),
        owner: known(row, "owner"),
        client: known(row, "client"),
        token: number(row, "token"),
        ttl: number(row, "ttl"),
        expires_at: number(row, "expires_at"),
        waiting: number(row, "waiting"),
        lost: number(row, "lost"),
        asked: number(row, "asked"),
    };
    (LockName::new(text(row, "name")).expect("a name"), lease)
}

fn entry(row: &PgRow) -> ((LockName, AcquisitionId), Entry) {
    let state = EntryState::from_token(number(row, "token"));
    // The label is copied along with everything that is granted.
    assert_eq!(text(row, "label"), "a label");
    assert_eq!(number(row, "acquired_at") == 0, state == EntryState::Waiting, "the moment of the grant");
    let entry = Entry {
        client: known(row, "client"),
        owner: known(row, "owner"),
        is_renewed: row.try_get("is_renewed").expect("a flag"),
        mode: Mode::from_stored(number(row, "units"), number(row, "permits")),
        state,
        arrived: number(row, "arrived_at"),
        ttl: number(row, "ttl"),
        expires_at: number(row, "expires_at"),
    };
    ((LockName::new(text(row, "name")).expect("a name"), known(row, "id").expect("an id")), entry)
}

const MOVE_BACK: [&str; 3] = [
    "UPDATE sqlock_client SET beat_at = beat_at - $2 WHERE id = ANY ($1)",
    "UPDATE sqlock_lease
        SET expires_at = expires_at - $2, acquired_at = acquired_at - $2,
            token = CASE token WHEN 0 THEN 0 ELSE token - $2 END, lost = CASE lost WHEN 0 THEN 0 ELSE lost - $2 END,
            asked = CASE asked WHEN 0 THEN 0 ELSE asked - $2 END, waiting = CASE waiting WHEN 0 THEN 0 ELSE waiting - $2 END
      WHERE name = ANY ($1)",
    "UPDATE sqlock_entry
        SET expires_at = expires_at - $2, arrived_at = arrived_at - $2,
            acquired_at = CASE acquired_at WHEN 0 THEN 0 ELSE acquired_at - $2 END,
            token = CASE token WHEN 0 THEN 0 ELSE token - $2 END
      WHERE name = ANY ($1)",
];

impl Database for PostgresDatabase {
    const MARKS: bool = true;
    const LOCKS_ROWS: bool = true;
    const TICK: Duration = Duration::ZERO;

    async fn execute(&mut self, connection: usize, request: &Request) -> Result<Response, sqlx::Error> {
        let mut conn =
            Connection { connection: &mut self.connections[connection], settings: self.settings, mark: None };
        // One of the connections carries requests out as batches.
        if connection == 0
            && let Some(batch) = Batch::from_request(request)
            && let Some(response) = batch::execute(&mut conn, &batch).await?.remove(0)
        {
            return Ok(response);
        }
        execute(&mut conn, request).await
    }

    async fn fence(&mut self, name: &LockName, id: AcquisitionId, token: FencingToken) -> bool {
        let mut connection = self.begin().await;
        let check =
            FenceCheck { name: name.to_string(), id: id.to_string(), token: token.get(), is_multi_primary: false };
        let verdict = fence(&mut connection, &check).await.expect("an answer");
        self.open.push(connection);
        verdict == FenceOutcome::Fenced
    }

    async fn lock(&mut self, key: &Key) {
        let mut connection = self.begin().await;
        let (sql, name, id) = match key {
            Key::Client(id) => {
                ("SELECT 1 FROM sqlock_client WHERE id = $1 AND $2 = '' FOR UPDATE", id.to_string(), None)
            }
            Key::Lease(name) => {
                ("SELECT 1 FROM sqlock_lease WHERE name = $1 AND $2 = '' FOR UPDATE", name.to_string(), None)
            }
            Key::Entry(name, id) => {
                ("SELECT 1 FROM sqlock_entry WHERE name = $1 AND id = $2 FOR UPDATE", name.to_string(), Some(id))
            }
        };
        let id = id.map_or_else(String::new, AcquisitionId::to_string);
        sqlx::query(sql).bind(name).bind(id).fetch_one(&mut connection).await.expect("the row");
        self.open.push(connection);
    }

    async fn unlock(&mut self) {
        for mut connection in self.open.drain(..) {
            connection.execute("ROLLBACK").await.expect("the end");
            self.idle.push(connection);
        }
    }

    async fn move_back(&mut self, names: &[LockName], clients: &[ClientId], by: Duration) {
        let names: Vec<String> = names.iter().map(LockName::to_string).collect();
        let clients: Vec<String> = clients.iter().map(ClientId::to_string).collect();
        for (sql, keys) in MOVE_BACK.into_iter().zip([&clients, &names, &names]) {
            let query = sqlx::query(sql).bind(keys).bind(micros(by));
            query.execute(&mut self.connections[0]).await.expect("done");
        }
    }

    async fn tables(&mut self, names: &[LockName], clients: &[ClientId]) -> Tables {
        let names: Vec<String> = names.iter().map(LockName::to_string).collect();
        let ids: Vec<String> = clients.iter().map(ClientId::to_string).collect();
        let clients = self.rows("SELECT * FROM sqlock_client WHERE id = ANY ($1)", &ids).await;
        let leases = self.rows("SELECT * FROM sqlock_lease WHERE name = ANY ($1)", &names).await;
        let entries = self.rows("SELECT * FROM sqlock_entry WHERE name = ANY ($1)", &names).await;
        Tables {
            clients: clients.iter().map(client).collect::<BTreeMap<_, _>>(),
            leases: leases.iter().map(lease).collect(),
            entries: entries.iter().map(entry).collect(),
        }
    }
}

#[tokio::test]
async fn requests_answer_as_the_model_does() {
    let mut database = PostgresDatabase::create().await;
    compare(&mut database).await;
    database.drop().await;
}
