//! The constants of a database, from the file that a run of the bench has written.

use serde_json::Value;

use crate::model::{Constants, Limits};

/// The most leases that a client holds in the rows of the bench.
pub(crate) const LEASES: f64 = 10_000.0;

/// A run of the bench.
pub(crate) struct Run(Value);

impl Run {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map(Self).map_err(|error| error.to_string())
    }

    pub(crate) fn list(&self, key: &str) -> impl Iterator<Item = &Value> {
        self.0[key].as_array().into_iter().flatten()
    }

    /// Describes the machine and the build of the run.
    pub(crate) fn origin(&self) -> String {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), Into::into);
        let [cpu, cores, kernel] = ["cpu", "cores", "kernel"].map(|key| text(&self.0["machine"][key]));
        let [date, version, commit, build, pace] =
            ["date", "version", "commit", "build", "pace"].map(|key| text(&self.0[key]));
        let sample = if self.0["sample"] == true { "SAMPLE, NOT MEASURED: " } else { "" };
        format!("{sample}{cpu}, {cores} cores, {kernel}; {date}, sqlock {version}, {commit}, {build} build, {pace} run")
    }

    /// Reads a member of the row whose description begins so.
    pub(crate) fn number(&self, database: &str, row: &Row, member: &str) -> Result<f64, String> {
        let Row { metric, what, contender } = row;
        let found = self.list("rows").find(|row| {
            row["database"] == database
                && row["metric"] == *metric
                && row["contender"] == *contender
                && row["what"].as_str().is_some_and(|text| text.starts_with(what))
        });
        let number = found.and_then(|row| row[member].as_f64());
        number.ok_or_else(|| format!("no {member} of {contender} in the row \"{metric} {what}\" of {database}"))
    }

    /// Derives the constants of a database from its rows.
    pub(crate) fn constants(&self, database: &Value) -> Result<Constants, String> {
        let title = database["title"].as_str().ok_or("a database has no title")?;
        let value = |row: Row| self.number(title, &row, "value");
        let floor = |row: Row| self.number(title, &row, "floor");
        let limits = self.limits(database, title)?;

        let round_trip = value(Row { contender: "SELECT 1", ..Row::new("A", "a statement, p50") })?;
        let write = floor(Row::new("A", "acquire, p50"))?;
        let cycle = value(Row::new("A", "acquire + release, p50"))?;
        let statement = 1e6 / (2.0 * floor(Row::new("B", "1024 tasks"))?);
        let (two, sixteen) = (value(Row::new("G", "2 processes"))?, value(Row::new("G", "16 processes"))?);
        let (one, all) = (value(Row::heartbeat(1.0))?, value(Row::heartbeat(LEASES))?);
        let mut constants = Constants {
            round_trip,
            commit: (write - round_trip).max(0.0),
            client: (cycle / 2.0 - write.max(round_trip)).max(0.0),
            statement,
            operation: 0.0,
            heartbeat: one,
            heartbeat_lease: ((all - one) / (LEASES - 1.0)).max(0.0),
            hand_over: 1e6 / two,
            waiting_process: (1e6 / sixteen - 1e6 / two) / 14.0,
            local_hand_over: 1e6 / value(Row::new("C", "8 tasks"))?,
            hand_over_statements: value(Row::new("H", "2 processes of 1")).ok(),
            name_bytes: value(Row::new("D", "size of"))?,
            limits,
        };
        // The time with which the model predicts the measured rate. A longer one makes it lower.
        let cycles = value(Row::new("B", "1024 tasks"))?;
        let (mut low, mut high) = (0.0, 1e6 / cycles);
        for _ in 0..64 {
            constants.operation = f64::midpoint(low, high);
            let is_short = constants.cycles(1, 1024) > cycles;
            *(if is_short { &mut low } else { &mut high }) = constants.operation;
        }
        Ok(constants)
    }

    fn limits(&self, database: &Value, title: &str) -> Result<Limits, String> {
        let memory = self.0["machine"]["memory"].as_str().and_then(|text| text.strip_suffix(" kB"));
        let memory: f64 = memory.and_then(|text| text.parse().ok()).ok_or("the memory of the machine is unknown")?;
        let max_connections = database["max_connections"].as_f64();
        // MySQL with TLS, the others without.
        let (batch, batch_statements) = match title.split(' ').next() {
            Some("MySQL") => (40.0, 6.0),
            Some("MariaDB") => (128.0, 4.0),
            _ => (256.0, 1.0),
        };
        let workers = if max_connections.is_some() { 2 } else { 1 };
        Ok(Limits {
            workers,
            connections: f64::from(workers + 1),
            batch,
            batch_statements,
            max_connections,
            memory_bytes: memory * 1024.0,
        })
    }
}

/// The key of a row of a database.
pub(crate) struct Row {
    pub(crate) metric: &'static str,
    /// How its description begins.
    pub(crate) what: String,
    pub(crate) contender: &'static str,
}

impl Row {
    pub(crate) fn new(metric: &'static str, what: impl Into<String>) -> Self {
        Self { metric, what: what.into(), contender: "sqlock" }
    }

    pub(crate) fn heartbeat(leases: f64) -> Self {
        Self::new("D", format!("heartbeat with {leases} leases"))
    }
}
