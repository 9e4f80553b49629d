//! J. An effect that takes place once, next to the same transaction without idempotency.

use std::time::{Duration, Instant};

use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey};
use sqlock::{Error, Locks};
use sqlx::{MySqlPool, PgPool, SqlitePool};

use crate::measure::{Line, Pace, median, percentile};
use crate::place::{Place, Pool};

/// The two take turns after this many cycles, so that they meet the same noise.
const TURN: usize = 10;

const TABLE: &str = "CREATE TABLE bench_payment (id BIGINT NOT NULL PRIMARY KEY, total BIGINT NOT NULL)";
const ROW: &str = "INSERT INTO bench_payment VALUES (1, 0)";
const EFFECT: &str = "UPDATE bench_payment SET total = total + 1 WHERE id = 1";

#[derive(Default)]
struct Round {
    bare: Vec<f64>,
    once: Vec<f64>,
    replay: Vec<f64>,
}

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let rounds = match place.pool() {
        Pool::Postgres(pool) => postgres::rounds(pool, pace).await,
        Pool::MySql(pool) => mysql::rounds(pool, pace).await,
        Pool::Sqlite(pool) => sqlite::rounds(pool, pace).await,
    };
    let line = |what: &str, pick: fn(&Round) -> &Vec<f64>, percent| {
        let ours: Vec<f64> = rounds.iter().map(|round| percentile(pick(round), percent)).collect();
        let floor: Vec<f64> = rounds.iter().map(|round| percentile(&round.bare, percent)).collect();
        Line {
            database: place.title.clone(),
            metric: 'J',
            what: what.into(),
            unit: "µs",
            ours: median(&ours),
            floor: Some(median(&floor)),
            ratios: ours.iter().zip(&floor).map(|(ours, floor)| ours / floor).collect(),
            ..Line::default()
        }
    };
    vec![
        line("once: begin to commit, p50", |round| &round.once, 50),
        line("once: begin to commit, p95", |round| &round.once, 95),
        line("once: a replay, p50", |round| &round.replay, 50),
    ]
}

/// The same for each database.
macro_rules! on {
    ($module:ident, $pool:ty, $begin:literal) => {
        mod $module {
            use super::*;

            pub(super) async fn rounds(pool: $pool, pace: &Pace) -> Vec<Round> {
                let locks = Locks::new(pool.clone());
                sqlx::query(TABLE).execute(&pool).await.expect("a table");
                sqlx::query(ROW).execute(&pool).await.expect("a row");
                let mut bench = PaymentBench { payments: Idempotency::new(&locks).namespace("bench"), pool, served: 0 };
                let (rounds, turn) = (pace.rounds, pace.turn);
                // The cycles run in a task, as in an application, because the main thread is no
                // worker of the runtime.
                let measured = tokio::spawn(async move {
                    bench.round(Duration::from_millis(400)).await;
                    let mut measured = Vec::new();
                    for _ in 0..rounds {
                        measured.push(bench.round(turn * 4).await);
                    }
                    sqlx::query("DROP TABLE bench_payment").execute(&bench.pool).await.expect("drop");
                    locks.shutdown().await.expect("shutdown");
                    bench.pool.close().await;
                    measured
                });
                measured.await.expect("no panic")
            }

            struct PaymentBench {
                pool: $pool,
                payments: Idempotency,
                served: u64,
            }

            impl PaymentBench {
                async fn round(&mut self, time: Duration) -> Round {
                    let start = Instant::now();
                    let mut round = Round::default();
                    while start.elapsed() < time {
                        for _ in 0..TURN {
                            round.bare.push(self.bare().await);
                        }
                        for _ in 0..TURN {
                            self.served += 1;
                            round.once.push(self.once().await);
                        }
                        for _ in 0..TURN {
                            round.replay.push(self.once().await);
                        }
                    }
                    round
                }

                async fn bare(&self) -> f64 {
                    let start = Instant::now();
                    let mut tx = self.pool.begin_with($begin).await.expect("begin");
                    sqlx::query(EFFECT).execute(&mut *tx).await.expect("an effect");
                    tx.commit().await.expect("commit");
                    micros(start)
                }

                async fn once(&self) -> f64 {
                    let start = Instant::now();
                    let key = IdempotencyKey::new("alice", self.served.to_string());
                    let request = Fingerprint::of(["pay"]);
                    let done = self.payments.run(&self.pool, &key, &request, async |tx| {
                        sqlx::query(EFFECT).execute(&mut **tx).await?;
                        Ok::<_, Error>("a receipt".to_owned())
                    });
                    let done = done.await.expect("run").into_value();
                    assert!(done.is_some(), "nobody else is there");
                    micros(start)
                }
            }
        }
    };
}

on!(postgres, PgPool, "BEGIN");
on!(mysql, MySqlPool, "BEGIN");
on!(sqlite, SqlitePool, "BEGIN IMMEDIATE");

fn micros(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}
