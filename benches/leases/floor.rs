//! The floor: the simplest correct SQL for a lease, one row a statement, on a bare connection.
//!
//! A row is kept and updated in place; a lease is free when it has expired; tokens rise. There are
//! no waiters, no re-entrance, no labels, no recovery of lost replies.

use sqlx::mysql::MySqlConnection;
use sqlx::postgres::{PgConnection, PgListener, PgPool};
use sqlx::sqlite::SqliteConnection;
use sqlx::{AssertSqlSafe, Connection, Executor, Row};

/// A TTL that outlasts every measurement, in microseconds.
pub(crate) const TTL: i64 = 3_600_000_000;

pub(crate) enum Bare {
    Postgres(PgConnection),
    MySql(MySqlConnection),
    Sqlite(SqliteConnection),
}

/// A held lease of the floor, for its renewal and release.
#[derive(Clone)]
pub(crate) struct Held {
    pub(crate) name: String,
    pub(crate) owner: String,
    pub(crate) token: i64,
}

macro_rules! pg_now {
    () => {
        "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    };
}

macro_rules! mysql_now {
    () => {
        "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)"
    };
}

macro_rules! sqlite_now {
    () => {
        "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)"
    };
}

pub(crate) use {mysql_now, pg_now, sqlite_now};

mod postgres {
    pub(super) const TABLE: &str = r#"
CREATE TABLE floor_lease (name text COLLATE "C" PRIMARY KEY, owner text NOT NULL, token bigint NOT NULL,
                          expires_at bigint NOT NULL) WITH (fillfactor = 50)"#;
    // $1 name, $2 owner, $3 ttl
    pub(super) const ACQUIRE: &str = concat!(
        "INSERT INTO floor_lease AS l VALUES ($1, $2, ",
        pg_now!(),
        ", ",
        pg_now!(),
        " + $3)
             ON CONFLICT (name) DO UPDATE
            SET owner = excluded.owner, token = greatest(l.token + 1, ",
        pg_now!(),
        "), expires_at = ",
        pg_now!(),
        " + $3
          WHERE l.expires_at <= ",
        pg_now!(),
        " RETURNING token"
    );
    // $1 name, $2 owner, $3 token, $4 ttl
    pub(super) const RENEW: &str = concat!(
        "UPDATE floor_lease SET expires_at = ",
        pg_now!(),
        " + $4 WHERE name = $1 AND owner = $2 AND token = $3"
    );
    // $1 name, $2 owner, $3 token, $4 owner', $5 ttl
    pub(super) const HAND_OFF: &str = concat!(
        "UPDATE floor_lease SET owner = $4, token = greatest(token + 1, ",
        pg_now!(),
        "), expires_at = ",
        pg_now!(),
        " + $5
          WHERE name = $1 AND owner = $2 AND token = $3 RETURNING token"
    );
}

mod mysql {
    pub(super) const TABLE: &str = "
CREATE TABLE floor_lease (name VARBINARY(255) PRIMARY KEY, owner VARCHAR(32) CHARACTER SET ascii NOT NULL,
                          token BIGINT NOT NULL, expires_at BIGINT NOT NULL) ENGINE = InnoDB";
    // owner, ttl, name
    pub(super) const ACQUIRE: &str = concat!(
        "UPDATE floor_lease SET owner = ?, token = LAST_INSERT_ID(GREATEST(token + 1, ",
        mysql_now!(),
        ")), expires_at = ",
        mysql_now!(),
        " + ? WHERE name = ? AND expires_at <= ",
        mysql_now!()
    );
    // name
    pub(super) const CREATE: &str = "INSERT IGNORE INTO floor_lease VALUES (?, '', 0, 0)";
    // ttl, name, owner, token
    pub(super) const RENEW: &str = concat!(
        "UPDATE floor_lease SET expires_at = ",
        mysql_now!(),
        " + ? WHERE name = ? AND owner = ? AND token = ?"
    );
    // owner', ttl, name, owner, token. Assignments run from left to right, WHERE sees the old row.
    pub(super) const HAND_OFF: &str = concat!(
        "UPDATE floor_lease SET owner = ?, token = LAST_INSERT_ID(GREATEST(token + 1, ",
        mysql_now!(),
        ")), expires_at = ",
        mysql_now!(),
        " + ? WHERE name = ? AND owner = ? AND token = ?"
    );
}

mod sqlite {
    pub(super) const TABLE: &str = "
CREATE TABLE floor_lease (name TEXT PRIMARY KEY NOT NULL, owner TEXT NOT NULL, token INTEGER NOT NULL,
                          expires_at INTEGER NOT NULL) WITHOUT ROWID";
    // ?1 name, ?2 owner, ?3 ttl
    pub(super) const ACQUIRE: &str = concat!(
        "INSERT INTO floor_lease AS l VALUES (?1, ?2, ",
        sqlite_now!(),
        ", ",
        sqlite_now!(),
        " + ?3)
             ON CONFLICT (name) DO UPDATE
            SET owner = excluded.owner, token = max(l.token + 1, excluded.token), expires_at = excluded.expires_at
          WHERE l.expires_at <= ",
        sqlite_now!(),
        " RETURNING token"
    );
    // ?1 name, ?2 owner, ?3 token, ?4 ttl
    pub(super) const RENEW: &str = concat!(
        "UPDATE floor_lease SET expires_at = ",
        sqlite_now!(),
        " + ?4 WHERE name = ?1 AND owner = ?2 AND token = ?3"
    );
    // ?1 name, ?2 owner, ?3 token, ?4 owner', ?5 ttl
    pub(super) const HAND_OFF: &str = concat!(
        "UPDATE floor_lease SET owner = ?4, token = max(token + 1, ",
        sqlite_now!(),
        "), expires_at = ",
        sqlite_now!(),
        " + ?5
          WHERE name = ?1 AND owner = ?2 AND token = ?3 RETURNING token"
    );
}

/// A connection that receives notifications.
pub(crate) struct NotificationListener(PgListener);

impl NotificationListener {
    pub(crate) async fn on(pool: &PgPool, channel: &str) -> Self {
        let mut listener = PgListener::connect_with(pool).await.expect("connect");
        listener.listen(channel).await.expect("LISTEN");
        Self(listener)
    }

    /// Waits for the next notified token.
    pub(crate) async fn receive(&mut self) -> i64 {
        self.0.recv().await.expect("receive").payload().parse().expect("a token")
    }
}

impl Bare {
    /// Takes a name, which is free at each call.
    pub(crate) async fn acquire(&mut self, name: &str, owner: &str) -> Held {
        let token = match self {
            Self::Postgres(conn) => {
                let query = sqlx::query(postgres::ACQUIRE).bind(name).bind(owner).bind(TTL);
                query.fetch_one(conn).await.expect("acquire").get(0)
            }
            Self::MySql(conn) => loop {
                let query = sqlx::query(mysql::ACQUIRE).bind(owner).bind(TTL).bind(name.as_bytes());
                let done = query.execute(&mut *conn).await.expect("acquire");
                if done.rows_affected() > 0 {
                    break done.last_insert_id().cast_signed();
                }
                let query = sqlx::query(mysql::CREATE).bind(name.as_bytes());
                assert_eq!(query.execute(&mut *conn).await.expect("create").rows_affected(), 1, "{name} is held");
            },
            Self::Sqlite(conn) => {
                let query = sqlx::query(sqlite::ACQUIRE).bind(name).bind(owner).bind(TTL);
                // Fetches all rows, because the commit comes with the end of the statement.
                query.fetch_all(conn).await.expect("acquire")[0].get(0)
            }
        };
        Held { name: name.into(), owner: owner.into(), token }
    }

    /// Takes a name on SQLite, if it is free.
    pub(crate) async fn try_acquire(&mut self, name: &str, owner: &str) -> Option<Held> {
        let Self::Sqlite(conn) = self else {
            panic!("other databases have better queues");
        };
        let query = sqlx::query(sqlite::ACQUIRE).bind(name).bind(owner).bind(TTL);
        let rows = query.fetch_all(conn).await.expect("acquire");
        rows.first().map(|row| Held { name: name.into(), owner: owner.into(), token: row.get(0) })
    }

    /// Moves the expiry of a held lease.
    pub(crate) async fn renew(&mut self, held: &Held) {
        self.expire_in(held, TTL).await;
    }

    pub(crate) async fn release(&mut self, held: &Held) {
        self.expire_in(held, 0).await;
    }

    async fn expire_in(&mut self, held: &Held, ttl: i64) {
        let Held { name, owner, token } = held;
        let affected = match self {
            Self::Postgres(conn) => {
                let query = sqlx::query(postgres::RENEW).bind(name).bind(owner).bind(token).bind(ttl);
                query.execute(conn).await.expect("renew").rows_affected()
            }
            Self::MySql(conn) => {
                let query = sqlx::query(mysql::RENEW).bind(ttl).bind(name.as_bytes()).bind(owner).bind(token);
                query.execute(conn).await.expect("renew").rows_affected()
            }
            Self::Sqlite(conn) => {
                let query = sqlx::query(sqlite::RENEW).bind(name).bind(owner).bind(token).bind(ttl);
                query.execute(conn).await.expect("renew").rows_affected()
            }
        };
        assert_eq!(affected, 1, "{name} is not held");
    }

    /// Passes a lease on to the next owner.
    pub(crate) async fn hand_over(&mut self, held: Held, to: &str) -> Held {
        let Held { name, owner, token } = held;
        let token = match self {
            Self::Postgres(conn) => {
                let query = sqlx::query(postgres::HAND_OFF).bind(&name).bind(owner).bind(token).bind(to).bind(TTL);
                query.fetch_one(conn).await.expect("hand over").get(0)
            }
            Self::MySql(conn) => {
                let query =
                    sqlx::query(mysql::HAND_OFF).bind(to).bind(TTL).bind(name.as_bytes()).bind(owner).bind(token);
                let done = query.execute(conn).await.expect("hand over");
                assert_eq!(done.rows_affected(), 1, "{name} is not held");
                done.last_insert_id().cast_signed()
            }
            Self::Sqlite(conn) => {
                let query = sqlx::query(sqlite::HAND_OFF).bind(&name).bind(owner).bind(token).bind(to).bind(TTL);
                query.fetch_all(conn).await.expect("hand over")[0].get(0)
            }
        };
        Held { name, owner: to.into(), token }
    }

    /// Returns the token of a lease if it belongs to this owner.
    pub(crate) async fn look(&mut self, name: &str, owner: &str) -> Option<i64> {
        let sql = "SELECT token FROM floor_lease WHERE name = ? AND owner = ?";
        match self {
            Self::Postgres(_) => unreachable!("PostgreSQL notifies"),
            Self::MySql(conn) => {
                let query = sqlx::query_scalar(sql).bind(name.as_bytes()).bind(owner);
                query.fetch_optional(conn).await.expect("look")
            }
            Self::Sqlite(conn) => {
                sqlx::query_scalar(sql).bind(name).bind(owner).fetch_optional(conn).await.expect("look")
            }
        }
    }

    /// Notifies a channel of a token.
    pub(crate) async fn say(&mut self, channel: &str, token: i64) {
        if let Self::Postgres(conn) = self {
            let query = sqlx::query("SELECT pg_notify($1, $2)").bind(channel).bind(token.to_string());
            query.execute(conn).await.expect("notify");
        }
    }

    pub(crate) async fn create_table(&mut self) {
        let table = match self {
            Self::Postgres(_) => postgres::TABLE,
            Self::MySql(_) => mysql::TABLE,
            Self::Sqlite(_) => sqlite::TABLE,
        };
        self.run(AssertSqlSafe(table.into())).await;
    }

    /// Runs a statement without an answer.
    pub(crate) async fn run(&mut self, sql: AssertSqlSafe<String>) {
        let sql = sqlx::raw_sql(sql);
        match self {
            Self::Postgres(conn) => drop(conn.execute(sql).await.expect("a statement")),
            Self::MySql(conn) => drop(conn.execute(sql).await.expect("a statement")),
            Self::Sqlite(conn) => drop(conn.execute(sql).await.expect("a statement")),
        }
    }

    /// Returns the server, its version, and the setting for the durability of commits.
    pub(crate) async fn version(&mut self) -> String {
        match self {
            Self::Postgres(conn) => {
                let sql = "SELECT format('PostgreSQL %s, fsync %s, synchronous_commit %s',
                                         split_part(current_setting('server_version'), ' ', 1),
                                         current_setting('fsync'), current_setting('synchronous_commit'))";
                sqlx::query_scalar(sql).fetch_one(conn).await.expect("the version")
            }
            Self::MySql(conn) => {
                let sql = "SELECT CAST(CONCAT(IF(VERSION() LIKE '%Maria%', 'MariaDB ', 'MySQL '),
                                              SUBSTRING_INDEX(VERSION(), '-', 1), ', flush_log_at_trx_commit ',
                                              @@innodb_flush_log_at_trx_commit) AS CHAR)";
                sqlx::query_scalar(sql).fetch_one(conn).await.expect("the version")
            }
            Self::Sqlite(conn) => {
                let sql = "SELECT 'SQLite ' || sqlite_version() || ', WAL,'";
                sqlx::query_scalar(sql).fetch_one(conn).await.expect("the version")
            }
        }
    }

    /// Returns the number of connections that the server allows. `None`: a file, which has no
    /// limit.
    pub(crate) async fn max_connections(&mut self) -> Option<i64> {
        match self {
            Self::Postgres(conn) => {
                let sql = "SELECT current_setting('max_connections')::bigint";
                Some(sqlx::query_scalar(sql).fetch_one(conn).await.expect("the setting"))
            }
            Self::MySql(conn) => {
                let sql = "SELECT CAST(@@max_connections AS SIGNED)";
                Some(sqlx::query_scalar(sql).fetch_one(conn).await.expect("the setting"))
            }
            Self::Sqlite(_) => None,
        }
    }

    /// Returns the number of statements that the server has carried out for all clients: on
    /// PostgreSQL statements that wrote. `None` if the database does not count.
    pub(crate) async fn statements(&mut self) -> Option<i64> {
        match self {
            Self::Postgres(conn) => {
                let sql = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint";
                Some(sqlx::query_scalar(sql).fetch_one(conn).await.expect("the transaction ids"))
            }
            Self::MySql(conn) => {
                let row = sqlx::raw_sql("SHOW GLOBAL STATUS LIKE 'Com_stmt_execute'").fetch_one(conn).await;
                let count: String = row.expect("the status").get(1);
                Some(count.parse().expect("a number"))
            }
            Self::Sqlite(_) => None,
        }
    }

    /// Returns the number of statements that the server has carried out: on PostgreSQL in one
    /// database, including reads, for connections that have ended; on the others, for all clients.
    pub(crate) async fn total(&mut self, database: &str) -> i64 {
        let Self::Postgres(conn) = self else {
            return self.statements().await.expect("servers count");
        };
        loop {
            let sql =
                "SELECT numbackends, (xact_commit + xact_rollback)::bigint FROM pg_stat_database WHERE datname = $1";
            let (connections, count): (i32, i64) =
                sqlx::query_as(sql).bind(database).fetch_one(&mut *conn).await.expect("the count");
            if connections == 0 {
                return count;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }

    /// Returns the server's file that has the number of its process in its first line.
    pub(crate) async fn process_file(&mut self) -> Option<String> {
        match self {
            Self::Postgres(conn) => {
                let directory: String = sqlx::query_scalar("SHOW data_directory").fetch_one(conn).await.ok()?;
                Some(format!("{directory}/postmaster.pid"))
            }
            Self::MySql(conn) => sqlx::query_scalar("SELECT @@pid_file").fetch_one(conn).await.ok(),
            Self::Sqlite(_) => None,
        }
    }

    /// Empties sqlock's tables and frees their pages.
    pub(crate) async fn clear(&mut self) {
        let statements: &[&str] = match self {
            Self::Postgres(_) => &["TRUNCATE sqlock_lease, sqlock_entry"],
            Self::MySql(_) => &["TRUNCATE TABLE sqlock_lease", "TRUNCATE TABLE sqlock_entry"],
            Self::Sqlite(_) => &["DELETE FROM sqlock_lease", "DELETE FROM floor_lease", "VACUUM"],
        };
        for sql in statements {
            self.run(AssertSqlSafe((*sql).into())).await;
        }
    }

    /// Returns the bytes of sqlock's tables and their indexes; on SQLite, of the file.
    pub(crate) async fn size(&mut self) -> i64 {
        match self {
            Self::Postgres(conn) => {
                let sql =
                    "SELECT (pg_total_relation_size('sqlock_lease') + pg_total_relation_size('sqlock_entry'))::bigint";
                sqlx::query_scalar(sql).fetch_one(conn).await.expect("the size")
            }
            Self::MySql(conn) => {
                conn.execute("ANALYZE TABLE sqlock_lease, sqlock_entry").await.expect("ANALYZE");
                // By default MySQL shows sizes of up to a day ago; MariaDB does not have the
                // setting.
                let _ = conn.execute("SET SESSION information_schema_stats_expiry = 0").await;
                let sql = "SELECT CAST(SUM(data_length + index_length) AS SIGNED) FROM information_schema.tables
                            WHERE table_schema = DATABASE() AND table_name IN ('sqlock_lease', 'sqlock_entry')";
                sqlx::query_scalar(sql).fetch_one(conn).await.expect("the size")
            }
            Self::Sqlite(conn) => {
                let sql = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size";
                sqlx::query_scalar(sql).fetch_one(conn).await.expect("the size")
            }
        }
    }

    pub(crate) async fn close(self) {
        let _ = match self {
            Self::Postgres(conn) => conn.close().await,
            Self::MySql(conn) => conn.close().await,
            Self::Sqlite(conn) => conn.close().await,
        };
    }
}
