//! MySQL and MariaDB against the model.

use std::time::Duration;

use sqlx::mysql::{MySqlConnectOptions, MySqlRow};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, MySqlConnection};

use super::batch;
use super::configure;
use super::fence::fence;
use super::script::Sending;
use super::store::{self, Flavor};
use crate::backend::differential::{Database, Tables, compare, read_client, read_entry, read_lease};
use crate::backend::fence::{FenceCheck, FenceOutcome};
use crate::backend::memory::Key;
use crate::backend::micros;
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{AcquisitionId, Batch, Claim, ClientId, Mode, Release, ReleaseOutcome, Request, Response};
use crate::token::FencingToken;

const TABLES: [&str; 3] = [
    include_str!("../../../migrations/mysql/0001_client.sql"),
    include_str!("../../../migrations/mysql/0002_lease.sql"),
    include_str!("../../../migrations/mysql/0003_entry.sql"),
];

/// A server under test, with a database of its own on it.
struct Server {
    options: MySqlConnectOptions,
    flavor: Flavor,
    connections: [MySqlConnection; 3],
    /// For everything but requests.
    own: MySqlConnection,
    /// Connections with open transactions.
    open: Vec<MySqlConnection>,
}

/// Settings that a server may have by default, and that must not change what a store does.
const ODD_SETTINGS: &str = "
SET SESSION sql_mode = /*M! 'EMPTY_STRING_IS_NULL,SIMULTANEOUS_ASSIGNMENT,' */ 'ANSI,NO_BACKSLASH_ESCAPES',
            sql_safe_updates = 1, sql_select_limit = 2, sql_auto_is_null = 1, completion_type = 1, time_zone = '-03:00',
            innodb_lock_wait_timeout = 50, autocommit = 0;
SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ ONLY";

async fn connect(options: &MySqlConnectOptions) -> (MySqlConnection, Flavor) {
    let mut conn = options.connect().await.expect("a connection");
    sqlx::raw_sql(ODD_SETTINGS).execute(&mut conn).await.expect("other settings");
    let flavor = configure(&mut conn).await.expect("a settled session").flavor;
    (conn, flavor)
}

impl Server {
    async fn new(options: &MySqlConnectOptions, database: &str) -> Self {
        let (mut own, flavor) = connect(options).await;
        let tables = TABLES.join(";\n");
        let create =
            format!("DROP DATABASE IF EXISTS {database}; CREATE DATABASE {database}; USE {database}; {tables}");
        sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut own).await.expect("the tables");
        let options = options.clone().database(database);
        let connections = [connect(&options).await.0, connect(&options).await.0, connect(&options).await.0];
        Self { options, flavor, connections, own, open: Vec::new() }
    }

    async fn begin(&mut self) -> &mut MySqlConnection {
        let (mut conn, _) = connect(&self.options).await;
        sqlx::raw_sql("START TRANSACTION").execute(&mut conn).await.expect("a transaction");
        self.open.push(conn);
        self.open.last_mut().expect("the new one")
    }

    async fn rows(&mut self, sql: &'static str, key: &[u8]) -> Vec<MySqlRow> {
        sqlx::query(sql).bind(key).fetch_all(&mut self.own).await.expect("rows")
    }
}

impl Database for Server {
    const MARKS: bool = false;
    const LOCKS_ROWS: bool = true;
    const TICK: Duration = Duration::ZERO;

    async fn execute(&mut self, connection: usize, request: &Request) -> Result<Response, sqlx::Error> {
        let connection_of = &mut self.connections[connection];
        // One of the connections carries requests out as batches.
        if connection == 0
            && let Some(batch) = Batch::from_request(request)
            && let Some(response) =
                batch::execute(connection_of, self.flavor, Sending::OneText, &batch).await?.remove(0)
        {
            return Ok(response);
        }
        store::execute(connection_of, self.flavor, Sending::OneText, request).await
    }

    async fn fence(&mut self, name: &LockName, id: AcquisitionId, token: FencingToken) -> bool {
        let check =
            FenceCheck { name: name.to_string(), id: id.to_string(), token: token.get(), is_multi_primary: false };
        fence(self.begin().await, &check).await.expect("an answer") == FenceOutcome::Fenced
    }

    async fn lock(&mut self, key: &Key) {
        let (sql, name, id) = match key {
            Key::Client(id) => ("SELECT 1 FROM sqlock_client WHERE id = ? FOR UPDATE", id.to_string(), None),
            Key::Lease(name) => ("SELECT 1 FROM sqlock_lease WHERE name = ? FOR UPDATE", name.to_string(), None),
            Key::Entry(name, id) => (
                "SELECT 1 FROM sqlock_entry WHERE name = ? AND id = ? FOR UPDATE",
                name.to_string(),
                Some(id.to_string()),
            ),
        };
        let query = id.into_iter().fold(sqlx::query(sql).bind(name), |query, id| query.bind(id));
        query.fetch_one(self.begin().await).await.expect("a locked row");
    }

    async fn unlock(&mut self) {
        for mut conn in self.open.drain(..) {
            sqlx::raw_sql("ROLLBACK").execute(&mut conn).await.expect("an end");
            conn.close().await.expect("closed");
        }
    }

    async fn move_back(&mut self, names: &[LockName], clients: &[ClientId], by: Duration) {
        const LEASE: &str = "
UPDATE sqlock_lease
   SET expires_at = expires_at - ?, acquired_at = acquired_at - ?, token = token - IF(token = 0, 0, ?),
       lost = lost - IF(lost = 0, 0, ?), asked = asked - IF(asked = 0, 0, ?)
 WHERE name = ?";
        const ENTRY: &str = "
UPDATE sqlock_entry
   SET expires_at = expires_at - ?, acquired_at = acquired_at - ?, arrived_at = arrived_at - ?, token = token - IF(token = 0, 0, ?)
 WHERE name = ?";
        const CLIENT: &str = "UPDATE sqlock_client SET beat_at = beat_at - ? WHERE id = ?";
        let by = micros(by);
        for name in names {
            for (sql, moments) in [(LEASE, 5), (ENTRY, 4)] {
                let query = (0..moments).fold(sqlx::query(sql), |query, _| query.bind(by));
                query.bind(name.as_str().as_bytes()).execute(&mut self.own).await.expect("rows move back");
            }
        }
        for client in clients {
            let query = sqlx::query(CLIENT).bind(by).bind(client.to_string());
            query.execute(&mut self.own).await.expect("rows move back");
        }
    }

    async fn tables(&mut self, names: &[LockName], clients: &[ClientId]) -> Tables {
        let mut tables = Tables::default();
        let read = "a readable row";
        for client in clients {
            let id = client.to_string();
            for row in self.rows("SELECT * FROM sqlock_client WHERE id = ?", id.as_bytes()).await {
                tables.clients.insert(*client, read_client(&row).expect(read));
            }
        }
        for name in names {
            for row in self.rows("SELECT * FROM sqlock_lease WHERE name = ?", name.as_str().as_bytes()).await {
                tables.leases.insert(name.clone(), read_lease(&row).expect(read));
            }
            for row in self
                .rows(
                    "SELECT *, CAST(is_renewed AS SIGNED) AS keeps FROM sqlock_entry WHERE name = ?",
                    name.as_str().as_bytes(),
                )
                .await
            {
                let (id, entry) = read_entry(&row, "keeps").expect(read);
                tables.entries.insert((name.clone(), id), entry);
            }
        }
        tables
    }
}

/// Runs a test on a server with a database of its own.
async fn on_a_server(variable: &str, test: impl AsyncFnOnce(&mut Server)) {
    let url = std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set: run the tests by scripts/test, which starts the servers"));
    let options: MySqlConnectOptions = url.parse().expect("a URL");
    let options = options.disable_statement_logging();
    let database = format!("sqlock_differential_{}", uuid::Uuid::new_v4().simple());
    let mut server = Server::new(&options, &database).await;
    test(&mut server).await;
    let drop = format!("DROP DATABASE {database}");
    sqlx::raw_sql(AssertSqlSafe(drop)).execute(&mut server.own).await.expect("dropped");
}

#[tokio::test]
async fn requests_answer_as_the_model_does_on_mysql() {
    on_a_server("SQLOCK_TEST_MYSQL_URL", compare).await;
}

#[tokio::test]
async fn requests_answer_as_the_model_does_on_mariadb() {
    on_a_server("SQLOCK_TEST_MARIADB_URL", compare).await;
}

/// A batch reads the rows after its UPDATE, on MariaDB without their locks: another client may have
/// acquired and lost a released name meanwhile, as a trigger does here.
#[tokio::test]
async fn release_of_a_batch_is_known_although_the_name_was_lost_again() {
    const LOSE: &str = "
CREATE TRIGGER lose BEFORE UPDATE ON sqlock_lease FOR EACH ROW
   SET NEW.token = IF(NEW.id = '', OLD.token + 1, NEW.token), NEW.lost = IF(NEW.id = '', OLD.token + 1, NEW.lost)";
    on_a_server("SQLOCK_TEST_MARIADB_URL", async |server| {
        let mut releases = Vec::new();
        for name in ["a", "b"] {
            let claim = Claim {
                name: LockName::new(name).expect("a name"),
                id: AcquisitionId::from_u128(1),
                owner: Owner::random(),
                client: ClientId::from_u128(1),
                is_renewed: false,
                mode: Mode::Exclusive,
                ttl: Duration::from_secs(600),
                holder: "test/1".into(),
                label: "".into(),
            };
            let (name, id) = (claim.name.clone(), claim.id);
            let Response::Acquired(Ok(token)) = server.execute(1, &Request::Acquire(claim)).await.expect("an answer")
            else {
                panic!("the name is free");
            };
            releases.push(Release { name, id, token, keep_for: Duration::ZERO, next: None });
        }
        sqlx::raw_sql(LOSE).execute(&mut server.own).await.expect("a trigger");
        let (conn, batch) = (&mut server.connections[0], Batch::Release(releases));
        let responses = batch::execute(conn, server.flavor, Sending::OneText, &batch).await.expect("an answer");
        let is_ended = |response: &Option<Response>| {
            matches!(response, Some(Response::Released(ReleaseOutcome::Ended { awaited: false })))
        };
        assert!(responses.iter().all(is_ended), "{responses:?}");
    })
    .await;
}
