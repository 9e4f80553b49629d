//! `sqlock bench`: measures the cost of leases on the user's own database.

use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use sqlock::{Locks, Owner};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::database::Database;
use crate::exit::{Failure, Outcome};
use crate::global::Global;
use crate::pool::{LeaseFilter, Pool};
use crate::signals::Signals;
use crate::{duration, stderr, stdout};

/// Measure the cost of leases on your own database.
///
/// Takes about five times --time, on names that begin with "sqlock-bench/" and are deleted
/// afterwards, also after an interruption. The ratios compare with the least that any durable lock
/// must do: one committed UPDATE of one row by its primary key. They say more than the times, which
/// depend on the machine and its load.
#[derive(Args)]
pub struct Arguments {
    /// How long each measurement takes.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = parse_time)]
    time: Duration,
    /// The number of tasks in the measurements with many tasks.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    tasks: u16,
    /// As JSON: an array of objects with what, value, unit, ratio.
    #[arg(long)]
    json: bool,
}

/// How long the database may take to delete the names of the bench. It may be out of reach after an
/// interruption.
const DELETION_TIMEOUT: Duration = Duration::from_secs(10);

/// One measurement.
struct Measurement {
    what: String,
    value: f64,
    unit: &'static str,
    /// The ratio to the bare write.
    ratio: Option<f64>,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let db = Database::open(global, LeaseFilter::All).await?;
    if db.has_several_servers() {
        return Err(Failure::configuration("a bench measures one server: name the one that can be written"));
    }
    let mut signals = Signals::listen()?;
    let bench =
        Bench { prefix: format!("sqlock-bench/{}/", Owner::random()), time: args.time, locks: db.locks.clone() };
    // Creates the tables if they are missing, and the row that the bare write changes.
    let acquire = db.with_tables(async || db.locks.lease(bench.name("floor")).acquire().await);
    let measured = match signals.unless_terminated(acquire).await {
        Ok(lease) => {
            let lease = lease?;
            let measure = async {
                lease.release().await?;
                bench.measure(&db.pool, usize::from(args.tasks)).await
            };
            signals.unless_terminated(measure).await.and_then(|done| done)
        }
        // The row may have been written.
        Err(interrupted) => Err(interrupted),
    };
    let _ = timeout(Duration::from_secs(5), db.locks.shutdown()).await;
    let deleted = timeout(DELETION_TIMEOUT, db.pool.delete_names(&bench.prefix)).await;
    let deleted = deleted.map_err(|late| late.to_string()).and_then(|done| done.map_err(|error| error.to_string()));
    let deleted = deleted.map_err(|reason| format!("cannot delete the names of the bench: {reason}"));
    if let (Err(_), Err(reason)) = (&measured, &deleted) {
        stderr::print_warning(reason);
    }
    let lines = measured?;
    deleted.map_err(Failure::configuration)?;
    if args.json {
        stdout::print_json_pretty(&Value::from_iter(lines.iter().map(Measurement::json)))?;
    } else {
        stdout::print(&stdout::format_table(
            &["WHAT", "VALUE", "UNIT", "RATIO"],
            &lines.iter().map(Measurement::cells).collect::<Vec<_>>(),
        ))?;
    }
    Ok(0)
}

struct Bench {
    prefix: String,
    time: Duration,
    locks: Locks,
}

impl Bench {
    fn name(&self, rest: impl std::fmt::Display) -> String {
        format!("{}{rest}", self.prefix)
    }

    async fn measure(&self, pool: &Pool, tasks: usize) -> Result<Vec<Measurement>, Failure> {
        const STEPS: u64 = 5;
        let style = ProgressStyle::with_template("{bar:30} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
        let progress = if stderr::is_quiet() { ProgressBar::hidden() } else { ProgressBar::new(STEPS) };
        let progress = progress.with_style(style);
        let step = |doing: &'static str| {
            progress.set_message(doing);
            progress.tick();
        };
        let mut lines = Vec::new();

        step("bare writes");
        let baseline = self.bare_writes(pool).await?;
        progress.inc(1);
        lines.push(Measurement::time("a bare write, p50", percentile(&baseline, 50), None));
        lines.push(Measurement::time("a bare write, p99", percentile(&baseline, 99), None));
        let write = percentile(&baseline, 50);

        step("one task, one name");
        let (acquires, releases) = self.cycles().await?;
        progress.inc(1);
        lines.push(Measurement::time("acquire, p50", percentile(&acquires, 50), Some(write)));
        lines.push(Measurement::time("acquire, p99", percentile(&acquires, 99), Some(percentile(&baseline, 99))));
        lines.push(Measurement::time("release, p50", percentile(&releases, 50), Some(write)));

        step("many tasks, each with a name of its own");
        let rate = self.rate(tasks, |task| format!("own/{task}")).await?;
        progress.inc(1);
        lines.push(Measurement::rate(format!("{tasks} tasks, names of their own"), rate, "cycles/s", write));

        step("many tasks, one name");
        let rate = self.rate(tasks, |_| "one".into()).await?;
        progress.inc(1);
        lines.push(Measurement::rate(format!("{tasks} tasks, one name"), rate, "hand-overs/s", write));

        step("renewals");
        let rate = self.renewals().await?;
        progress.inc(1);
        lines.push(Measurement::rate("renewals of 1000 leases".into(), rate, "renewals/s", write));
        progress.finish_and_clear();
        Ok(lines)
    }

    async fn bare_writes(&self, pool: &Pool) -> Result<Vec<f64>, Failure> {
        let name = self.name("floor");
        let failed = |error: sqlx::Error| Failure::configuration(format!("the bare write failed: {error}"));
        // The first write connects.
        pool.update_row(&name).await.map_err(failed)?;
        let (mut times, start) = (Vec::new(), Instant::now());
        loop {
            let before = Instant::now();
            pool.update_row(&name).await.map_err(failed)?;
            times.push(before.elapsed().as_secs_f64());
            if start.elapsed() >= self.time {
                return Ok(times);
            }
        }
    }

    /// Measures the times of acquisitions and of releases.
    async fn cycles(&self) -> Result<(Vec<f64>, Vec<f64>), Failure> {
        let (mut acquires, mut releases, start) = (Vec::new(), Vec::new(), Instant::now());
        loop {
            let before = Instant::now();
            let lease = self.locks.lease(self.name("cycle")).acquire().await?;
            let acquired = Instant::now();
            lease.release().await?;
            acquires.push((acquired - before).as_secs_f64());
            releases.push(acquired.elapsed().as_secs_f64());
            if start.elapsed() >= self.time {
                return Ok((acquires, releases));
            }
        }
    }

    /// Measures how often in a second leases are acquired and released.
    async fn rate(&self, tasks: usize, name: impl Fn(usize) -> String) -> Result<f64, Failure> {
        let (start, mut running) = (Instant::now(), JoinSet::new());
        for task in 0..tasks {
            let (locks, name, time) = (self.locks.clone(), self.name(name(task)), self.time);
            running.spawn(async move {
                let mut cycles = 0;
                loop {
                    locks.lease(&name).acquire().await?.release().await?;
                    cycles += 1;
                    if start.elapsed() >= time {
                        return Ok::<u32, sqlock::Error>(cycles);
                    }
                }
            });
        }
        let mut cycles = 0;
        while let Some(ended) = running.join_next().await {
            cycles += ended.map_err(|error| Failure::system(error.to_string()))??;
        }
        Ok(f64::from(cycles) / start.elapsed().as_secs_f64())
    }

    async fn renewals(&self) -> Result<f64, Failure> {
        const HELD: usize = 1000;
        // Longer than a measurement takes. The names are deleted afterwards.
        let ttl = Duration::from_secs(600);
        let mut acquiring = JoinSet::new();
        for i in 0..HELD {
            acquiring.spawn(self.locks.lease(self.name(format_args!("held/{i}"))).ttl(ttl).renew(false).acquire());
        }
        let mut leases = Vec::new();
        while let Some(lease) = acquiring.join_next().await {
            leases.push(std::sync::Arc::new(lease.map_err(|error| Failure::system(error.to_string()))??));
        }
        let (start, mut renewed) = (Instant::now(), 0_u32);
        loop {
            let mut extending = JoinSet::new();
            for lease in &leases {
                let lease = std::sync::Arc::clone(lease);
                extending.spawn(async move { lease.extend(ttl).await });
            }
            while let Some(extended) = extending.join_next().await {
                extended.map_err(|error| Failure::system(error.to_string()))??;
                renewed += 1;
            }
            if start.elapsed() >= self.time {
                return Ok(f64::from(renewed) / start.elapsed().as_secs_f64());
            }
        }
    }
}

impl Pool {
    /// Commits an update of one row by its primary key, the least that a durable lock must do.
    async fn update_row(&self, name: &str) -> Result<(), sqlx::Error> {
        match self {
            #[cfg(feature = "postgres")]
            Self::Postgres(pool) => {
                sqlx::query("UPDATE sqlock_lease SET acquired_at = acquired_at + 1 WHERE name = $1")
                    .bind(name)
                    .execute(pool)
                    .await?;
            }
            #[cfg(feature = "mysql")]
            Self::MySql(pool) => {
                sqlx::query("UPDATE sqlock_lease SET acquired_at = acquired_at + 1 WHERE name = ?")
                    .bind(name.as_bytes())
                    .execute(pool)
                    .await?;
            }
            #[cfg(feature = "sqlite")]
            Self::Sqlite(pool) => {
                sqlx::query("UPDATE sqlock_lease SET acquired_at = acquired_at + 1 WHERE name = ?1")
                    .bind(name)
                    .execute(pool)
                    .await?;
            }
        }
        Ok(())
    }

    /// Deletes the rows of all names with a prefix, which contains no wildcards.
    async fn delete_names(&self, prefix: &str) -> Result<(), sqlx::Error> {
        let pattern = format!("{prefix}%");
        match self {
            #[cfg(feature = "postgres")]
            Self::Postgres(pool) => {
                sqlx::query("DELETE FROM sqlock_lease WHERE name LIKE $1").bind(&pattern).execute(pool).await?;
            }
            #[cfg(feature = "mysql")]
            Self::MySql(pool) => {
                // The server's default may be to commit nothing by itself.
                let mut tx = pool.begin().await?;
                let delete = sqlx::query("DELETE FROM sqlock_lease WHERE name LIKE ?").bind(pattern.as_bytes());
                delete.execute(&mut *tx).await?;
                tx.commit().await?;
            }
            #[cfg(feature = "sqlite")]
            Self::Sqlite(pool) => {
                sqlx::query("DELETE FROM sqlock_lease WHERE name LIKE ?1").bind(&pattern).execute(pool).await?;
            }
        }
        Ok(())
    }
}

impl Measurement {
    fn time(what: &str, seconds: f64, baseline: Option<f64>) -> Self {
        Self {
            what: what.into(), value: seconds * 1e6, unit: "µs", ratio: baseline.map(|baseline| seconds / baseline)
        }
    }

    /// Compares a rate with that of bare writes on one connection: two for a cycle, one for other
    /// measurements.
    fn rate(what: String, rate: f64, unit: &'static str, write: f64) -> Self {
        let writes = if unit == "cycles/s" { 2.0 } else { 1.0 };
        Self { what, value: rate, unit, ratio: Some(rate * writes * write) }
    }

    fn cells(&self) -> Vec<String> {
        let ratio = self.ratio.map_or(String::new(), |ratio| format!("{ratio:.2}"));
        vec![self.what.clone(), format!("{:.0}", self.value), self.unit.into(), ratio]
    }

    fn json(&self) -> Value {
        json!({ "what": self.what, "value": self.value, "unit": self.unit, "ratio": self.ratio })
    }
}

fn percentile(times: &[f64], percent: usize) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

fn parse_time(text: &str) -> Result<Duration, String> {
    let time = duration::parse(text)?;
    if (Duration::from_millis(100)..=Duration::from_secs(60)).contains(&time) {
        Ok(time)
    } else {
        Err("between 100ms and 60s".into())
    }
}
