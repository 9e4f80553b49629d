//! The metrics of the facade `metrics`.
#![allow(clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder};
use metrics::{SharedString, Unit};
use sqlock::Locks;
use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome, Resolution};
use sqlock::testing::Memory;

/// Every value by its metric and labels: `name{label=value}`.
#[derive(Clone, Default)]
struct Figures {
    values: Arc<Mutex<BTreeMap<String, f64>>>,
    described: Arc<Mutex<Vec<String>>>,
}

struct Figure {
    key: String,
    figures: Figures,
}

impl Figures {
    fn figure(&self, key: &Key) -> Arc<Figure> {
        let labels: Vec<_> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        Arc::new(Figure { key: format!("{}{{{}}}", key.name(), labels.join(",")), figures: self.clone() })
    }

    /// The value of a counter or gauge, or the number of values in a histogram.
    fn value(&self, key: &str) -> f64 {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).get(key).copied().unwrap_or_default()
    }

    fn keys(&self) -> Vec<String> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    fn describe(&self, name: &KeyName) {
        self.described.lock().unwrap_or_else(PoisonError::into_inner).push(name.as_str().to_owned());
    }
}

impl Figure {
    fn add(&self, value: f64) {
        let mut values = self.figures.values.lock().unwrap_or_else(PoisonError::into_inner);
        *values.entry(self.key.clone()).or_default() += value;
    }
}

impl CounterFn for Figure {
    fn increment(&self, value: u64) {
        self.add(value as f64);
    }

    fn absolute(&self, _: u64) {}
}

impl GaugeFn for Figure {
    fn increment(&self, value: f64) {
        self.add(value);
    }

    fn decrement(&self, value: f64) {
        self.add(-value);
    }

    fn set(&self, value: f64) {
        self.figures.values.lock().unwrap_or_else(PoisonError::into_inner).insert(self.key.clone(), value);
    }
}

impl HistogramFn for Figure {
    fn record(&self, _: f64) {
        self.add(1.0);
    }
}

impl Recorder for Figures {
    fn describe_counter(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.describe(&name);
    }

    fn describe_gauge(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.describe(&name);
    }

    fn describe_histogram(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.describe(&name);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.figure(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.figure(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.figure(key))
    }
}

/// The rate of a count that appears with its first increment does not show that increment.
#[tokio::test(start_paused = true)]
async fn counts_for_alerts_begin_at_zero() {
    let figures = Figures::default();
    let _guard = metrics::set_default_local_recorder(&figures);
    let lease = Memory::new().locks().lease("a").acquire().await.expect("acquire");
    let keys = figures.keys();
    for key in [
        "sqlock_lost_total{cause=expired}",
        "sqlock_lost_total{cause=superseded}",
        "sqlock_taken_over_total{}",
        "sqlock_acquire_total{kind=exclusive,outcome=unavailable}",
        "sqlock_heartbeat_late_total{}",
        "sqlock_heartbeat_failed_total{}",
        "sqlock_idempotency_total{outcome=unknown}",
    ] {
        assert!(keys.iter().any(|known| known == key) && figures.value(key) == 0.0, "{key}: {keys:?}");
    }
    lease.release().await.expect("held to the end");
}

#[tokio::test(start_paused = true)]
async fn takeovers_from_dead_holders_are_counted() {
    let figures = Figures::default();
    let _guard = metrics::set_default_local_recorder(&figures);
    let memory = Memory::new();
    let (here, there) = (memory.locks(), memory.locks());
    // Its client sends no heartbeat, so it does not learn of the end and withdraws nothing.
    let lease = here.lease("a").ttl(Duration::from_secs(3600)).renew(false).acquire().await.expect("acquire");
    memory.expire("a").expect("a name");
    let next = there.lease("a").acquire().await.expect("acquire");
    assert!(next.token() > lease.token());
    assert_eq!(figures.value("sqlock_taken_over_total{}"), 1.0);
}

#[tokio::test(start_paused = true)]
async fn heartbeats_refused_at_once_are_counted() {
    let figures = Figures::default();
    let _guard = metrics::set_default_local_recorder(&figures);
    let memory = Memory::new();
    let locks = memory.locks();
    let lease = locks.lease("a").ttl(Duration::from_secs(60)).acquire().await.expect("acquire");
    tokio::time::sleep(Duration::from_secs(2)).await;
    memory.fail(2);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(figures.value("sqlock_heartbeat_failed_total{}"), 2.0);
    assert_eq!(figures.value("sqlock_heartbeat_late_total{}"), 0.0);
    lease.release().await.expect("held to the end");
}

#[tokio::test(start_paused = true)]
async fn metrics_count_what_happens_and_name_no_lock() {
    let figures = Figures::default();
    let _guard = metrics::set_default_local_recorder(&figures);
    let memory = Memory::new();
    let locks = memory.locks();

    let lease = locks.lease("secret").acquire().await.expect("acquire");
    let permit = locks.semaphore("s", 2).acquire().await.expect("acquire");
    assert!(locks.lease("secret").try_acquire().await.expect("try").is_none());
    let waiter = tokio::spawn(locks.lease("secret").shared().acquire());
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!((figures.value("sqlock_held{}"), figures.value("sqlock_waiting{}")), (2.0, 1.0));
    waiter.abort();
    waiter.await.expect_err("it was cancelled");
    memory.evict("s").expect("a name");
    permit.lost().await;
    memory.go_away();
    tokio::time::sleep(Duration::from_secs(10)).await;
    memory.come_back();
    lease.release().await.expect("held to the end");
    locks.shutdown().await.expect("shutdown");

    for (key, value) in [
        ("sqlock_acquire_total{kind=exclusive,outcome=acquired}", 1.0),
        ("sqlock_acquire_total{kind=permits,outcome=acquired}", 1.0),
        ("sqlock_acquire_total{kind=exclusive,outcome=held}", 1.0),
        ("sqlock_acquire_total{kind=shared,outcome=cancelled}", 1.0),
        ("sqlock_wait_seconds{kind=exclusive}", 1.0),
        ("sqlock_hold_seconds{}", 2.0),
        ("sqlock_held{}", 0.0),
        ("sqlock_waiting{}", 0.0),
        ("sqlock_lost_total{cause=superseded}", 1.0),
    ] {
        assert_eq!(figures.value(key), value, "{key}");
    }
    for key in [
        "sqlock_heartbeat_seconds{}",
        "sqlock_heartbeat_late_total{}",
        "sqlock_statements_total{verb=acquire}",
        "sqlock_statements_total{verb=send a heartbeat}",
        "sqlock_batch_size{}",
    ] {
        assert!(figures.value(key) >= 1.0, "{key}");
    }
    assert!(figures.keys().iter().all(|key| !key.contains("secret")), "{:?}", figures.keys());
    let described = figures.described.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for key in figures.keys() {
        let name = key.split('{').next().expect("a name");
        assert!(described.iter().any(|other| other == name), "{name} is not described");
    }
}

/// Locks in a file that is deleted with the directory.
async fn locks_of_a_file() -> (tempfile::TempDir, sqlx::SqlitePool, Locks) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let url = format!("sqlite://{}?mode=rwc", directory.path().join("test.db").display());
    let pool = sqlx::SqlitePool::connect(&url).await.expect("a file");
    let locks = Locks::new(pool.clone());
    locks.migrate().await.expect("migrate");
    (directory, pool, locks)
}

#[tokio::test]
async fn outcomes_of_keys_are_counted() {
    let figures = Figures::default();
    let _guard = metrics::set_default_local_recorder(&figures);
    let (_directory, pool, locks) = locks_of_a_file().await;
    let payments = Idempotency::new(&locks);
    let key = IdempotencyKey::new("alice", "order-17");
    for (request, expected) in
        [("charge", Outcome::New(1)), ("charge", Outcome::Replay(1)), ("refund", Outcome::Mismatch)]
    {
        let request = Fingerprint::of([request]);
        let outcome =
            payments.run(&pool, &key, &request, async |_| Ok::<_, sqlock::Error>(1)).await.expect("an outcome");
        assert_eq!(outcome, expected);
    }
    let attempt = payments.attempt(&key, &Fingerprint::of(["refund"])).await.expect("an outcome");
    assert!(matches!(attempt, Outcome::Mismatch));
    for (outcome, count) in [("new", 1.0), ("replay", 1.0), ("mismatch", 2.0)] {
        assert_eq!(figures.value(&format!("sqlock_idempotency_total{{outcome={outcome}}}")), count, "{outcome}");
    }
}

#[cfg(feature = "axum")]
#[tokio::test]
async fn outcomes_of_http_requests_are_counted_once() {
    use axum::body::Body;
    use axum::extract::{Path, State};
    use axum::http::{Request, StatusCode};
    use axum::response::Response;
    use axum::{Router, routing::post};
    use sqlock::idempotency::http::{IdempotencyLayer, Idempotent};
    use sqlx::SqlitePool;
    use tower_service::Service as _;

    async fn handler(State(pool): State<SqlitePool>, Path(status): Path<u16>, idempotent: Idempotent) -> Response {
        let status = StatusCode::from_u16(status).expect("a status");
        idempotent.run(&pool, async |_| Ok::<_, sqlock::Error>(status)).await
    }

    let figures = Figures::default();
    let _guard = metrics::set_default_local_recorder(&figures);
    let (_directory, pool, locks) = locks_of_a_file().await;
    let layer = IdempotencyLayer::global(Idempotency::new(&locks)).store_if(|status| status != StatusCode::CONFLICT);
    let mut router = Router::new().route("/{status}", post(handler)).layer(layer).with_state(pool);
    // The failure 402 is stored in a second transaction. 409 is not stored: it has no outcome.
    for (path, key) in [("/200", "a"), ("/200", "a"), ("/201", "a"), ("/402", "b"), ("/402", "b"), ("/409", "c")] {
        let request = Request::post(path).header("Idempotency-Key", key).body(Body::empty()).expect("a request");
        router.call(request).await.expect("a response");
    }
    for (outcome, count) in [("new", 2.0), ("replay", 2.0), ("mismatch", 1.0), ("in_progress", 0.0)] {
        assert_eq!(figures.value(&format!("sqlock_idempotency_total{{outcome={outcome}}}")), count, "{outcome}");
    }
}

#[tokio::test(start_paused = true)]
async fn label_of_the_application_maps_names_to_few() {
    let figures = Figures::default();
    let _guard = metrics::set_default_local_recorder(&figures);
    let memory = Memory::new();
    let label = |name: &str| match name.split_once('/') {
        Some(("invoice", _)) => "invoice",
        Some(("mistake", _)) => panic!("a mistake of the application"),
        _ => "other",
    };
    let (locks, rest) = (memory.builder().metrics_label(label).build(), memory.locks());

    let leases = ["invoice/1", "invoice/2", "report", "mistake/1"];
    let mut held = Vec::new();
    for name in leases {
        held.push(locks.lease(name).acquire().await.expect("acquire"));
    }
    let unlabelled = rest.lease("x").acquire().await.expect("acquire");
    assert!(locks.lease("invoice/1").wait(Duration::from_secs(1)).acquire().await.is_err());
    for (key, value) in [
        ("sqlock_held{name=invoice}", 2.0),
        ("sqlock_held{name=other}", 1.0),
        ("sqlock_held{}", 1.0),
        ("sqlock_waiting{name=invoice}", 0.0),
        ("sqlock_acquire_total{kind=exclusive,outcome=acquired,name=invoice}", 2.0),
        ("sqlock_acquire_total{kind=exclusive,outcome=timed_out,name=invoice}", 1.0),
        ("sqlock_acquire_total{kind=exclusive,outcome=acquired,name=other}", 1.0),
        ("sqlock_wait_seconds{kind=exclusive,name=invoice}", 2.0),
    ] {
        assert_eq!(figures.value(key), value, "{key}");
    }
    memory.evict("report").expect("a name");
    held[2].lost().await;
    drop(unlabelled);
    for lease in held {
        let _ = lease.release().await;
    }
    for (key, value) in [
        ("sqlock_held{name=invoice}", 0.0),
        ("sqlock_held{name=other}", 0.0),
        ("sqlock_hold_seconds{name=invoice}", 2.0),
        ("sqlock_lost_total{cause=superseded,name=other}", 1.0),
    ] {
        assert_eq!(figures.value(key), value, "{key}");
    }
    assert!(figures.keys().iter().all(|key| !leases.iter().any(|name| key.contains(&format!("={name}}}")))));
}

#[tokio::test]
async fn sweep_measures_age_of_oldest_unknown_outcome() {
    const AGE: &str = "sqlock_idempotency_oldest_unknown_seconds{}";
    let figures = Figures::default();
    let _guard = metrics::set_default_local_recorder(&figures);
    let (_directory, pool, locks) = locks_of_a_file().await;
    locks.sweeper().sweep().await.expect("sweep");
    assert!(figures.keys().contains(&AGE.to_owned()), "it is measured without records");
    assert_eq!(figures.value(AGE), 0.0);

    let request = Fingerprint::of(["charge"]);
    for (namespace, text, age) in [("payments", "old", 7200), ("refunds", "young", 60), ("payments", "done", 9000)] {
        let store = Idempotency::new(&locks).namespace(namespace);
        let key = IdempotencyKey::new("alice", text);
        let Ok(Outcome::New(attempt)) = store.attempt(&key, &request).await else { panic!("the key is new") };
        if age == 9000 {
            attempt.complete(&1).await.expect("complete");
        } else {
            attempt.unknown().await.expect("unknown");
        }
        sqlx::query("UPDATE sqlock_idem SET created_at = created_at - ? WHERE request_key = ?")
            .bind(age * 1_000_000_i64)
            .bind(text)
            .execute(&pool)
            .await
            .expect("age");
    }
    locks.sweeper().sweep().await.expect("sweep");
    assert_eq!((figures.value(AGE) / 60.0).round(), 120.0);

    let old = IdempotencyKey::new("alice", "old");
    let payments = Idempotency::new(&locks).namespace("payments");
    let token = payments.inspect(&old).await.expect("inspect").and_then(|record| record.token).expect("a token");
    assert!(payments.resolve(&old, token, Resolution::failed().by("ann")).await.expect("resolve"));
    locks.sweeper().sweep().await.expect("sweep");
    assert_eq!((figures.value(AGE) / 60.0).round(), 1.0, "that of another namespace");
}

#[tokio::test(start_paused = true)]
async fn dashboard_and_alerts_name_existing_metrics() {
    let figures = Figures::default();
    let _guard = metrics::set_default_local_recorder(&figures);
    let _lease = Memory::new().locks().lease("a").acquire().await.expect("acquire");
    let described = figures.described.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let dashboard = include_str!("../examples/observability/grafana.json");
    serde_json::from_str::<serde_json::Value>(dashboard).expect("JSON");
    let alerts = include_str!("../examples/observability/alerts.yml");
    let metric = regex::Regex::new(r"sqlock_[a-z_]+").expect("a pattern");
    for name in [dashboard, alerts].into_iter().flat_map(|text| metric.find_iter(text)) {
        let name = name.as_str();
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
        assert!(described.iter().any(|other| other == base), "there is no metric {name}");
    }
    for name in described {
        assert!(dashboard.contains(&name), "the dashboard does not show {name}");
    }
    let runbook = include_str!("../src/guide/runbook.rs");
    for entry in alerts.lines().filter_map(|line| line.trim().strip_prefix("runbook: ")) {
        assert!(runbook.contains(&format!("(#{entry})")), "the runbook has no entry {entry}");
    }
}
