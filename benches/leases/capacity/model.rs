//! The formulas of the capacity model: pure functions of the constants of a database.
//!
//! The connections of the clients and the server are a closed network of queues: a request waits
//! for the server, is served, and then spends the rest of its time elsewhere. Its rate is that of
//! mean value analysis (M. Reiser and S. S. Lavenberg, "Mean-Value Analysis of Closed Multichain
//! Queuing Networks", Journal of the ACM 27, 1980).

use std::fmt;

/// The heartbeats of a client in a second, with TTLs of 3 s or longer.
const HEARTBEATS: f64 = 1.0;

/// The constants of one database. Times are in microseconds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Constants {
    /// The round trip of a statement that reads and writes nothing.
    pub(crate) round_trip: f64,
    /// The part of a write and of the flush of its commit, on top of that.
    pub(crate) commit: f64,
    /// The client's own part, between the call and the statement.
    pub(crate) client: f64,
    /// The server's time for a statement that writes one row, when it is busy.
    pub(crate) statement: f64,
    /// The server's time for each further operation in the same statement.
    pub(crate) operation: f64,
    /// The server's time that each further lease adds to a heartbeat.
    pub(crate) heartbeat_lease: f64,
    /// The round trip of a heartbeat with one lease.
    pub(crate) heartbeat: f64,
    /// Between two holders in different processes.
    pub(crate) hand_over: f64,
    /// How much each further process that waits adds to a hand-over.
    pub(crate) waiting_process: f64,
    /// Between two tasks of a process.
    pub(crate) local_hand_over: f64,
    /// The statements of a hand-over between processes, where the server counts them.
    pub(crate) hand_over_statements: Option<f64>,
    /// The bytes of a name in the tables and their indexes.
    pub(crate) name_bytes: f64,
    pub(crate) limits: Limits,
}

/// Settings of the database, the machine and the client, which no row measures.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Limits {
    /// The connections of a client that carry operations; a file has one writer.
    pub(crate) workers: u32,
    /// The connections of a client, with that of its heartbeat.
    pub(crate) connections: f64,
    /// The operations in a batch, at most.
    pub(crate) batch: f64,
    /// The statements of a batch. A single operation has one.
    pub(crate) batch_statements: f64,
    /// The connections that the server allows. `None`: it is a file.
    pub(crate) max_connections: Option<f64>,
    pub(crate) memory_bytes: f64,
}

impl Constants {
    /// Computes the time of a batch with so many operations on an idle server.
    fn latency(&self, batch: f64) -> f64 {
        self.round_trip + self.commit + self.client + self.beyond_first(batch)
    }

    /// Computes the time of a busy server for such a batch.
    fn service(&self, batch: f64) -> f64 {
        self.statement + self.beyond_first(batch)
    }

    /// Computes the time of the server for what a batch has beyond a statement of one operation.
    fn beyond_first(&self, batch: f64) -> f64 {
        let further = if batch > 1.0 { self.limits.batch_statements - 1.0 } else { 0.0 };
        further * self.statement + (batch - 1.0) * self.operation
    }

    /// Predicts the cycles of acquire and release a second, by so many clients with so many tasks
    /// each, on distinct names. A statement acquires or releases, so the tasks of a connection are
    /// in two of them.
    pub(crate) fn cycles(&self, clients: u32, tasks: u32) -> f64 {
        let Limits { workers, batch, .. } = self.limits;
        let batch = (f64::from(tasks) / (2.0 * f64::from(workers))).clamp(1.0, batch);
        let (latency, service) = (self.latency(batch), self.service(batch));
        rate(clients * tasks.min(workers), service, (latency - service).max(0.0)) * batch / 2.0
    }

    /// Predicts the hand-overs between processes a second, of so many names that so many processes
    /// each take in turn.
    pub(crate) fn hand_overs(&self, names: f64, processes: f64) -> f64 {
        let each = self.hand_over + (processes - 2.0) * self.waiting_process;
        match self.hand_over_statements {
            Some(statements) => (names * 1e6 / each).min(1e6 / (statements * self.statement)),
            // A file has one writer, which all names share.
            None => 1e6 / each,
        }
    }

    /// Predicts the round trip of a heartbeat of a client with so many leases.
    pub(crate) fn heartbeat(&self, leases: f64) -> f64 {
        self.heartbeat + (leases - 1.0) * self.heartbeat_lease
    }

    /// Predicts the share of heartbeats in the time of the server. Above 1 they do not get through.
    pub(crate) fn heartbeat_load(&self, clients: f64, leases: f64) -> f64 {
        clients * HEARTBEATS * (self.statement + (leases - 1.0) * self.heartbeat_lease) / 1e6
    }

    /// Predicts the size of the tables with so many names.
    pub(crate) fn table_bytes(&self, names: f64) -> f64 {
        names * self.name_bytes
    }

    /// Finds the resource that is used the most, and its use. Above 1 it ends the growth.
    pub(crate) fn bottleneck(&self, clients: f64, leases: f64) -> (&'static str, f64) {
        let connections =
            self.limits.max_connections.map_or(0.0, |allowed| clients * self.limits.connections / allowed);
        [
            ("heartbeats", self.heartbeat_load(clients, leases)),
            ("connections", connections),
            ("memory", self.table_bytes(clients * leases) / self.limits.memory_bytes),
        ]
        .into_iter()
        .fold(("none", 0.0), |most, next| if next.1 > most.1 { next } else { most })
    }
}

/// Computes the statements a second of so many connections, each of which is served for `service`
/// and elsewhere for `elsewhere` microseconds.
fn rate(connections: u32, service: f64, elsewhere: f64) -> f64 {
    let (mut rate, mut queued) = (0.0, 0.0);
    for count in 1..=connections {
        let response = service * (1.0 + queued);
        rate = f64::from(count) / (elsewhere + response);
        queued = rate * response;
    }
    rate * 1e6
}

impl fmt::Display for Constants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { round_trip, commit, client, statement, operation, .. } = self;
        writeln!(f, "round trip {round_trip:.1} µs, write and commit {commit:.1} µs, client {client:.1} µs")?;
        writeln!(f, "busy server: {statement:.1} µs a statement, {operation:.2} µs each further operation in it")?;
        writeln!(f, "hand-over {:.0} µs, in a process {:.0} µs", self.hand_over, self.local_hand_over)?;
        writeln!(f, "each further process that waits: {:.0} µs of a hand-over", self.waiting_process)?;
        writeln!(f, "heartbeat {:.0} µs, each further lease {:.4} µs", self.heartbeat, self.heartbeat_lease)?;
        writeln!(f, "a name {:.0} bytes", self.name_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn constants() -> Constants {
        Constants {
            round_trip: 20.0,
            commit: 70.0,
            client: 10.0,
            statement: 50.0,
            operation: 2.0,
            heartbeat_lease: 0.01,
            heartbeat: 100.0,
            hand_over: 400.0,
            waiting_process: 0.0,
            local_hand_over: 200.0,
            hand_over_statements: Some(2.0),
            name_bytes: 200.0,
            limits: Limits {
                workers: 2,
                connections: 3.0,
                batch: 64.0,
                batch_statements: 1.0,
                max_connections: Some(300.0),
                memory_bytes: 8e9,
            },
        }
    }

    #[track_caller]
    fn assert_near(left: f64, right: f64) {
        assert!((left / right - 1.0).abs() < 1e-9, "{left} is not {right}");
    }

    #[test]
    fn cycles_grow_with_clients_up_to_the_server() {
        // Two statements of 100 µs each.
        assert_near(constants().cycles(1, 1), 5_000.0);
        // The other client has the server half of the time: 50 µs elsewhere, 75 µs at the server.
        assert_near(constants().cycles(2, 1), 8_000.0);
        // Two statements of 50 µs of the server each.
        assert_near(constants().cycles(10_000, 1), 10_000.0);
    }

    #[test]
    fn cycles_grow_with_tasks_up_to_the_batch() {
        // Both connections are in use, with a statement of one operation each.
        assert_near(constants().cycles(1, 2), 8_000.0);
        // 16 operations in each statement: 50 + 15 × 2 µs of the server, and 50 µs elsewhere. The
        // server is busy for 80 of 130 µs when the other connection asks.
        let response = 80.0 * (1.0 + 80.0 / 130.0);
        assert_near(constants().cycles(1, 64), 8.0 * 2e6 / (50.0 + response));
        // No statement has more than 64.
        assert_near(constants().cycles(1, 1_000_000), constants().cycles(1, 256));
    }

    #[test]
    fn one_writer_sends_one_statement_at_a_time() {
        let mut file = constants();
        file.limits.workers = 1;
        // 2 operations in the statement, which takes 102 µs.
        assert_near(file.cycles(1, 4), 1e6 / 102.0);
    }

    #[test]
    fn hand_overs_grow_with_names_up_to_the_server() {
        assert_near(constants().hand_overs(1.0, 2.0), 2_500.0);
        assert_near(constants().hand_overs(2.0, 2.0), 5_000.0);
        // Two statements of 50 µs of the server each.
        assert_near(constants().hand_overs(1_000.0, 2.0), 10_000.0);
        let file = Constants { hand_over_statements: None, waiting_process: 50.0, ..constants() };
        assert_near(file.hand_overs(1_000.0, 2.0), 2_500.0);
        assert_near(file.hand_overs(1_000.0, 4.0), 2_000.0);
    }

    #[test]
    fn heartbeats_load_the_server_by_client_and_lease() {
        assert_near(constants().heartbeat_load(1_000.0, 1.0), 0.05);
        assert_near(constants().heartbeat_load(1_000.0, 1_001.0), 0.06);
        assert_near(constants().heartbeat(1.0), 100.0);
        assert_near(constants().heartbeat(10_001.0), 200.0);
    }

    #[test]
    fn bottleneck_is_the_resource_used_most() {
        assert_eq!(constants().bottleneck(10.0, 1.0).0, "connections");
        assert_near(constants().bottleneck(200.0, 1.0).1, 2.0);
        let mut pooled = constants();
        pooled.limits.max_connections = Some(1e9);
        assert_eq!(pooled.bottleneck(200.0, 1.0).0, "heartbeats");
        assert_eq!(pooled.bottleneck(1.0, 1e6).0, "memory");
        assert_near(pooled.bottleneck(1.0, 4e7).1, 1.0);
    }
}
