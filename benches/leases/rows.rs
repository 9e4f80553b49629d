//! I. Locks and versions in the caller's own transactions, next to the same SQL written by hand.
//!
//! Both sides use the same pool, the same rows, and prepared statements. One difference remains: on
//! SQLite, the hand-written side locks a row by BEGIN IMMEDIATE alone, and the statement with which
//! sqlock verifies the lock counts as a cost of sqlock.

use std::time::{Duration, Instant};

use sqlock::Locks;
use sqlock::version::Versioned;
use sqlx::{MySqlPool, PgPool, QueryBuilder, SqlitePool};

use crate::measure::{Aim, Line, Pace, median, percentile};
use crate::place::{Place, Pool};

/// Contender and hand-written SQL take turns after this many cycles, so that they meet the same
/// noise.
const TURN: usize = 10;

const NAME: &str = "rows";
const KEY: i64 = 7;

const TABLE: &str =
    "CREATE TABLE bench_account (id BIGINT NOT NULL PRIMARY KEY, version BIGINT NOT NULL, balance BIGINT NOT NULL)";

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let rounds = match place.pool() {
        Pool::Postgres(pool) => postgres::rounds(pool, pace).await,
        Pool::MySql(pool) => mysql::rounds(pool, pace).await,
        Pool::Sqlite(pool) => sqlite::rounds(pool, pace).await,
    };
    let line = |what: &str, pick: Pick, of: fn(&Cycle) -> Duration, percent, aim| {
        let of_round = |cycles: &Vec<Cycle>| percentile(&times(cycles, of), percent);
        let ours: Vec<f64> = rounds.iter().map(|round| of_round(&pick(round).ours)).collect();
        let floor: Vec<f64> = rounds.iter().map(|round| of_round(&pick(round).by_hand)).collect();
        Line {
            database: place.title.clone(),
            metric: 'I',
            what: what.into(),
            unit: "µs",
            ours: median(&ours),
            floor: Some(median(&floor)),
            ratios: ours.iter().zip(&floor).map(|(ours, floor)| ours / floor).collect(),
            aim,
            ..Line::default()
        }
    };
    let aim = Some(Aim::AtMost(1.1));
    type Of = fn(&Cycle) -> Duration;
    let (all, statement): (Of, Of) = (Cycle::all, Cycle::statement);
    vec![
        line("row by name: begin to commit, p50", |round| &round.named, all, 50, aim),
        line("row by name: the lock alone, p50", |round| &round.named, statement, 50, None),
        line("row by key: begin to commit, p50", |round| &round.keyed, all, 50, aim),
        line("row by key: the lock alone, p50", |round| &round.keyed, statement, 50, None),
        line("version: update on the pool, p50", |round| &round.updated, all, 50, aim),
        line("version: begin to commit, p50", |round| &round.transacted, all, 50, aim),
        line("version: the update alone, p50", |round| &round.transacted, statement, 50, None),
    ]
}

type Pick = fn(&Round) -> &Sides;

/// The measurements of one round.
#[derive(Default)]
struct Round {
    named: Sides,
    keyed: Sides,
    updated: Sides,
    transacted: Sides,
}

#[derive(Default)]
struct Sides {
    ours: Vec<Cycle>,
    by_hand: Vec<Cycle>,
}

/// The times of a transaction. A statement outside of a transaction has no BEGIN and COMMIT.
struct Cycle {
    begin: Duration,
    statement: Duration,
    commit: Duration,
}

impl Cycle {
    fn of(statement: Duration) -> Self {
        Self { begin: Duration::ZERO, statement, commit: Duration::ZERO }
    }

    fn all(&self) -> Duration {
        self.begin + self.statement + self.commit
    }

    fn statement(&self) -> Duration {
        self.statement
    }
}

fn times(cycles: &[Cycle], of: fn(&Cycle) -> Duration) -> Vec<f64> {
    cycles.iter().map(|cycle| of(cycle).as_secs_f64() * 1e6).collect()
}

/// Times a transaction around some work.
macro_rules! in_transaction {
    ($bench:ident, $begin:literal, |$tx:ident| $work:block) => {{
        let start = Instant::now();
        let mut $tx = $bench.pool.begin_with($begin).await.expect("begin");
        let begun = Instant::now();
        $work
        let locked = Instant::now();
        $tx.commit().await.expect("commit");
        Cycle { begin: begun - start, statement: locked - begun, commit: locked.elapsed() }
    }};
}

/// The same for each database: its types and its SQL.
macro_rules! on {
    ($module:ident, $pool:ty, $db:ty, $begin:literal, name: $name:expr, named: $named:expr, keyed: $keyed:literal, update: $update:literal) => {
        mod $module {
            use super::*;

            pub(super) async fn rounds(pool: $pool, pace: &Pace) -> Vec<Round> {
                let locks = Locks::new(pool.clone());
                let accounts = Versioned::table("bench_account");
                sqlx::query(TABLE).execute(&pool).await.expect("a table");
                let insert = accounts.insert(&pool, KEY, &["balance"], |row| _ = row.push_bind(0_i64));
                insert.await.expect("a row");
                let mut bench = Bench { pool, locks, accounts, version: 1 };
                let (rounds, turn) = (pace.rounds, pace.turn);
                // The cycles run in a task, as in an application, because the main thread is no
                // worker of the runtime.
                let measured = tokio::spawn(async move {
                    bench.round(Duration::from_millis(400)).await;
                    let mut measured = Vec::new();
                    for _ in 0..rounds {
                        measured.push(bench.round(turn * 6).await);
                    }
                    sqlx::query("DROP TABLE bench_account").execute(&bench.pool).await.expect("drop");
                    bench.locks.shutdown().await.expect("shutdown");
                    bench.pool.close().await;
                    measured
                });
                measured.await.expect("no panic")
            }

            struct Bench {
                pool: $pool,
                locks: Locks,
                accounts: Versioned,
                /// The version of the row, as written last.
                version: i64,
            }

            impl Bench {
                async fn round(&mut self, time: Duration) -> Round {
                    let start = Instant::now();
                    let mut round = Round::default();
                    while start.elapsed() < time {
                        for _ in 0..TURN {
                            round.named.ours.push(self.named().await);
                        }
                        for _ in 0..TURN {
                            round.named.by_hand.push(self.named_by_hand().await);
                        }
                        for _ in 0..TURN {
                            round.keyed.ours.push(self.keyed().await);
                        }
                        for _ in 0..TURN {
                            round.keyed.by_hand.push(self.keyed_by_hand().await);
                        }
                        for _ in 0..TURN {
                            round.updated.ours.push(self.updated().await);
                        }
                        for _ in 0..TURN {
                            round.updated.by_hand.push(self.updated_by_hand().await);
                        }
                        for _ in 0..TURN {
                            round.transacted.ours.push(self.transacted().await);
                        }
                        for _ in 0..TURN {
                            round.transacted.by_hand.push(self.transacted_by_hand().await);
                        }
                    }
                    round
                }

                async fn named(&self) -> Cycle {
                    in_transaction!(self, $begin, |tx| {
                        self.locks.row(NAME).lock(&mut tx).await.expect("lock");
                    })
                }

                async fn named_by_hand(&self) -> Cycle {
                    in_transaction!(self, $begin, |tx| {
                        let sql: Option<&'static str> = $named;
                        if let Some(sql) = sql {
                            let found = sqlx::query(sql).bind($name).fetch_all(&mut *tx).await.expect("lock");
                            assert_eq!(found.len(), 1, "the row");
                        }
                    })
                }

                async fn keyed(&self) -> Cycle {
                    in_transaction!(self, $begin, |tx| {
                        self.locks.row_of("bench_account", "id", KEY).lock(&mut tx).await.expect("lock");
                    })
                }

                async fn keyed_by_hand(&self) -> Cycle {
                    in_transaction!(self, $begin, |tx| {
                        let found = sqlx::query($keyed).bind(KEY).fetch_all(&mut *tx).await.expect("lock");
                        assert_eq!(found.len(), 1, "the row");
                    })
                }

                async fn updated(&mut self) -> Cycle {
                    let start = Instant::now();
                    let balance = self.version * 3;
                    let set = |set: &mut QueryBuilder<$db>| _ = set.push("balance = ").push_bind(balance);
                    let update = self.accounts.update(&self.pool, KEY, self.version, set);
                    self.version = update.await.expect("update");
                    Cycle::of(start.elapsed())
                }

                async fn updated_by_hand(&mut self) -> Cycle {
                    let start = Instant::now();
                    let balance = self.version * 3;
                    let update = sqlx::query($update).bind(balance).bind(KEY).bind(self.version);
                    let updated = update.execute(&self.pool).await.expect("update");
                    assert_eq!(updated.rows_affected(), 1, "the row");
                    self.version += 1;
                    Cycle::of(start.elapsed())
                }

                async fn transacted(&mut self) -> Cycle {
                    in_transaction!(self, $begin, |tx| {
                        let balance = self.version * 3;
                        let set = |set: &mut QueryBuilder<$db>| _ = set.push("balance = ").push_bind(balance);
                        let update = self.accounts.update(&mut tx, KEY, self.version, set);
                        self.version = update.await.expect("update");
                    })
                }

                async fn transacted_by_hand(&mut self) -> Cycle {
                    in_transaction!(self, $begin, |tx| {
                        let balance = self.version * 3;
                        let update = sqlx::query($update).bind(balance).bind(KEY).bind(self.version);
                        let updated = update.execute(&mut *tx).await.expect("update");
                        assert_eq!(updated.rows_affected(), 1, "the row");
                        self.version += 1;
                    })
                }
            }
        }
    };
}

on!(postgres, PgPool, sqlx::Postgres, "BEGIN",
    name: NAME,
    named: Some("SELECT 1 FROM sqlock_row WHERE name = $1 FOR NO KEY UPDATE"),
    keyed: "SELECT id FROM bench_account WHERE id = $1 FOR NO KEY UPDATE",
    update: "UPDATE bench_account SET balance = $1, version = version + 1 WHERE id = $2 AND version = $3");

on!(mysql, MySqlPool, sqlx::MySql, "BEGIN",
    name: NAME.as_bytes(),
    named: Some("SELECT 1 FROM sqlock_row WHERE name = ? FOR UPDATE"),
    keyed: "SELECT id FROM bench_account WHERE id = ? FOR UPDATE",
    update: "UPDATE bench_account SET balance = ?, version = version + 1 WHERE id = ? AND version = ?");

// SQLite needs no further lock, and has no rows for names.
on!(sqlite, SqlitePool, sqlx::Sqlite, "BEGIN IMMEDIATE",
    name: NAME,
    named: None,
    keyed: "SELECT id FROM bench_account WHERE id = ?",
    update: "UPDATE bench_account SET balance = ?, version = version + 1 WHERE id = ? AND version = ?");
