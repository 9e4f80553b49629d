//! Millions of rows that the database generates itself.

use std::time::{SystemTime, UNIX_EPOCH};

use sqlx::Row as _;

use super::Database;

/// The rows of one statement.
const CHUNK: usize = 100_000;

/// The columns of a record, in the order of the values below.
const COLUMNS: &str = "id, namespace, principal, request_key, fingerprint, state, token, attempts, issued_until, \
     permanent, result, created_at, expires_at";

const HOUR: i64 = 3_600_000_000;

/// The digits of a generated name.
pub(super) const DIGITS: usize = 8;

/// A state of a name.
#[derive(Clone, Copy, Debug)]
pub(super) enum NameState {
    Free,
    Held,
    Expired,
}

/// The names of functions that differ.
struct Dialect {
    /// A table `n` with the numbers `i` from one to another.
    numbers: fn(usize, usize) -> String,
    /// The number with zeros before it, as many digits as asked for.
    digits: fn(usize) -> String,
    /// Makes the 64 digits of an id from a number and the distance of two ids. Ids rise with the
    /// number, so that the index is filled in order.
    id: fn(u64) -> String,
    fingerprint: &'static str,
    result: &'static str,
    concat: fn(&str) -> String,
}

fn digits_table() -> String {
    let digit = "(SELECT 0 AS d UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 \
                  UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9)";
    let number = "a.d + 10 * b.d + 100 * c.d + 1000 * e.d + 10000 * f.d";
    let tables = ["a", "b", "c", "e", "f"].map(|name| format!("{digit} AS {name}")).join(" CROSS JOIN ");
    format!("SELECT {number} AS i FROM {tables}")
}

const POSTGRES: Dialect = Dialect {
    numbers: |from, to| format!("generate_series({from}::bigint, {to}::bigint) AS n (i)"),
    digits: |digits| format!("lpad(i::text, {digits}, '0')"),
    id: |step| format!("lpad(to_hex(i * {step}), 15, '0') || substr(encode(sha256(i::text::bytea), 'hex'), 1, 49)"),
    fingerprint: "decode('01', 'hex') || sha256(i::text::bytea)",
    result: "convert_to('{\"receipt\":\"' || repeat('r', 80) || '\"}', 'UTF8')",
    concat: |text| format!("'{text}' || i"),
};

const MYSQL: Dialect = Dialect {
    numbers: |from, to| {
        format!("(SELECT i + {from} AS i FROM ({}) AS d WHERE i + {from} <= {to}) AS n", digits_table())
    },
    digits: |digits| format!("LPAD(i, {digits}, '0')"),
    id: |step| format!("CONCAT(LPAD(LOWER(HEX(i * {step})), 15, '0'), LEFT(SHA2(i, 256), 49))"),
    fingerprint: "CONCAT(UNHEX('01'), UNHEX(SHA2(i, 256)))",
    result: "CONCAT('{\"receipt\":\"', REPEAT('r', 80), '\"}')",
    concat: |text| format!("CONCAT('{text}', i)"),
};

const SQLITE: Dialect = Dialect {
    numbers: |from, to| {
        format!(
            "(WITH RECURSIVE n (i) AS (SELECT {from} UNION ALL SELECT i + 1 FROM n WHERE i < {to}) SELECT i FROM n) AS n"
        )
    },
    digits: |digits| format!("printf('%0{digits}d', i)"),
    id: |step| format!("printf('%015x', i * {step}) || substr(lower(hex(randomblob(25))), 1, 49)"),
    fingerprint: "randomblob(33)",
    result: "CAST('{\"receipt\":\"' || hex(randomblob(40)) || '\"}' AS BLOB)",
    concat: |text| format!("'{text}' || i"),
};

pub(super) fn now_micros() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is right");
    i64::try_from(now.as_micros()).expect("this century")
}

impl Database {
    fn dialect(&self) -> &'static Dialect {
        match self {
            Self::Postgres(_) => &POSTGRES,
            Self::MySql(_) => &MYSQL,
            Self::Sqlite(_) => &SQLITE,
        }
    }

    /// Replaces all names by names of [`DIGITS`] digits in one state. Then the database analyzes
    /// the table.
    pub(super) async fn fill_names(&self, count: usize, state: NameState) {
        let empty = if matches!(self, Self::Sqlite(_)) { "DELETE FROM" } else { "TRUNCATE TABLE" };
        self.run(format!("{empty} sqlock_lease")).await;
        let (dialect, now) = (self.dialect(), now_micros());
        let name = (dialect.digits)(DIGITS);
        let (id, expires_at) = match state {
            NameState::Free => ("''".to_owned(), now - 2 * HOUR),
            NameState::Held => ((dialect.digits)(32), now + 12 * HOUR),
            NameState::Expired => ((dialect.digits)(32), now - 2 * HOUR),
        };
        let acquired_at = now - 3 * HOUR;
        for from in (0..count).step_by(CHUNK) {
            let numbers = (dialect.numbers)(from, count.min(from + CHUNK) - 1);
            self.run(format!(
                "INSERT INTO sqlock_lease
                        (name, id, owner, client, token, ttl, acquired_at, expires_at, holder, label)
                 SELECT {name}, {id}, {id}, '', {acquired_at}, {HOUR}, {acquired_at}, {expires_at}, 'web-17', ''
                   FROM {numbers}"
            ))
            .await;
        }
        self.analyze("sqlock_lease").await;
    }

    async fn analyze(&self, table: &str) {
        let analyze = if matches!(self, Self::MySql(_)) { "ANALYZE TABLE" } else { "ANALYZE" };
        self.run(format!("{analyze} {table}")).await;
    }

    /// Stores finished records, whose retention ends in some hours, and a step of every tenth, as
    /// attempts under a lease have. Then the database analyzes the tables.
    pub(super) async fn fill_records(&self, count: usize) {
        let dialect = self.dialect();
        // 15 digits.
        let (step, now) = ((1 << 60) / count.max(1) as u64, now_micros());
        for from in (0..count).step_by(CHUNK) {
            let to = count.min(from + CHUNK) - 1;
            let numbers = (dialect.numbers)(from, to);
            let id = (dialect.id)(step);
            let (principal, key) = ((dialect.concat)("customer-"), (dialect.concat)("order-"));
            let created = format!("{} + i * {}", now - 12 * HOUR, 12 * HOUR / count as i64);
            self.run(format!(
                "INSERT INTO sqlock_idem ({COLUMNS})
                 SELECT {id}, 'payments', {principal}, {key}, {}, 'done', 0, 0, 0, 0, {}, {created}, {created} + {}
                   FROM {numbers}",
                dialect.fingerprint,
                dialect.result,
                24 * HOUR
            ))
            .await;
        }
        let of_step = if matches!(self, Self::MySql(_)) { "CAST('charge' AS BINARY)" } else { "'charge'" };
        self.run(format!(
            "INSERT INTO sqlock_idem_step (id, begun, step, result)
             SELECT id, created_at, {of_step}, result FROM sqlock_idem
              WHERE namespace = 'payments' AND state = 'done' AND request_key LIKE '%0'"
        ))
        .await;
        for table in ["sqlock_idem", "sqlock_idem_step"] {
            self.analyze(table).await;
        }
    }

    /// Stores records whose retention has ended.
    pub(super) async fn insert_expired(&self, mark: &str, count: usize) {
        let dialect = self.dialect();
        let numbers = (dialect.numbers)(0, count - 1);
        let (id, key) = ((dialect.concat)(&format!("{mark}/")), (dialect.concat)("order-"));
        let created = now_micros() - 48 * HOUR;
        self.run(format!(
            "INSERT INTO sqlock_idem ({COLUMNS})
             SELECT {id}, 'payments', 'alice', {key}, {}, 'done', 0, 0, 0, 0, {}, {created}, {created} + {}
               FROM {numbers}",
            dialect.fingerprint,
            dialect.result,
            24 * HOUR
        ))
        .await;
    }

    /// Reads the id of a finished record.
    pub(super) async fn id_of_a_record(&self) -> String {
        const ID: &str = "SELECT id FROM sqlock_idem WHERE state = 'done' ORDER BY id LIMIT 1";
        let id = match self {
            Self::Postgres(pool) => sqlx::query(ID).fetch_one(pool).await.map(|row| row.get(0)),
            Self::MySql(pool) => sqlx::query(ID).fetch_one(pool).await.map(|row| row.get(0)),
            Self::Sqlite(pool) => sqlx::query(ID).fetch_one(pool).await.map(|row| row.get(0)),
        };
        id.expect("a record")
    }
}
