//! A capacity model: predicts the load that one database can carry, from constants that a run of
//! the bench has measured.
//!
//! ```text
//! scripts/bench --json run.json
//! cargo run --example capacity -- run.json
//! ```
//!
//! For each database of the run it prints the constants, the predicted values beside the measured
//! ones, and a table for growing numbers of clients and names, with the resource that limits them.
//!
//! The model has one queue, that of the server, and no noise. The bench runs on the machine of its
//! servers, so the server's time contains that of the clients.

mod model;
mod run;

use std::process::ExitCode;

use model::Constants;
use run::{LEASES, Row, Run};

const CLIENTS: [u32; 5] = [1, 10, 100, 1_000, 10_000];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file] = arguments.as_slice() else {
        eprintln!("usage: capacity RUN.json");
        return ExitCode::from(64);
    };
    let run = std::fs::read_to_string(file).map_err(|error| error.to_string());
    match run.and_then(|text| report(&text)) {
        Ok(report) => {
            print!("{report}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("error: {file}: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// The predicted value of a row.
struct Prediction {
    row: Row,
    value: f64,
    /// Whether a constant comes from this row, so that the model must agree with it.
    is_fitted: bool,
}

fn predictions(constants: &Constants) -> Vec<Prediction> {
    let mut all = Vec::new();
    let mut add = |row, value, is_fitted| all.push(Prediction { row, value, is_fitted });
    for tasks in [1, 64, 1024] {
        add(Row::new("B", format!("{tasks} tasks")), constants.cycles(1, tasks), tasks == 1024);
    }
    for tasks in [8, 64, 128] {
        add(Row::new("C", format!("{tasks} tasks")), 1e6 / constants.local_hand_over, tasks == 8);
    }
    for processes in [2, 8, 16] {
        let rate = constants.hand_overs(1.0, f64::from(processes));
        add(Row::new("G", format!("{processes} processes")), rate, processes != 8);
    }
    for leases in [1.0, 100.0, LEASES] {
        add(Row::heartbeat(leases), constants.heartbeat(leases), leases != 100.0);
    }
    all
}

/// Computes the percentage by which a prediction is above the measured value.
fn deviation(predicted: f64, measured: f64) -> f64 {
    (predicted / measured - 1.0) * 100.0
}

fn report(text: &str) -> Result<String, String> {
    use std::fmt::Write;

    let run = Run::parse(text)?;
    if run.list("databases").next().is_none() {
        return Err("no database was measured".into());
    }
    let mut report = format!("{}\n\n", run.origin());
    for database in run.list("databases") {
        let constants = run.constants(database)?;
        let title = database["title"].as_str().unwrap_or_default();
        let compared = compare(&run, title, &constants);
        let _ = writeln!(report, "{title}\n\n{constants}\n{compared}\n{}", growth(&constants));
    }
    Ok(report)
}

/// Lists the rows of the run for which the model has a prediction.
fn compare(run: &Run, database: &str, constants: &Constants) -> String {
    let mut table = format!("{:<40}{:>10}{:>11}{:>11}\n", "", "measured", "predicted", "deviation");
    for Prediction { row, value, is_fitted } in predictions(constants) {
        let Ok(measured) = run.number(database, &row, "value") else { continue };
        let unit = match row.metric {
            "B" => "cycles/s",
            "D" => "µs",
            _ => "hand-overs/s",
        };
        let name = format!("{} {}, {unit}", row.metric, row.what);
        let fitted = if is_fitted { "  a constant comes from here" } else { "" };
        let deviation = deviation(value, measured);
        table += &format!("{name:<40}{measured:>10.0}{value:>11.0}{deviation:>9.1} %{fitted}\n");
    }
    table
}

/// Lists the predictions for growing numbers of clients and names.
fn growth(constants: &Constants) -> String {
    let mut table = format!(
        "{:>7} {:>11} {:>10} {:>12} {:>11} {:>9}  scarcest resource\n",
        "clients", "names held", "cycles/s", "hand-overs/s", "heartbeats", "tables"
    );
    for clients in CLIENTS {
        let all = f64::from(clients);
        let names = all * LEASES;
        let (resource, used) = constants.bottleneck(all, LEASES);
        table += &format!(
            "{clients:>7} {names:>11} {:>10.0} {:>12.0} {:>9.2} % {:>6.1} MB  {resource} {:.0} %{}\n",
            constants.cycles(clients, 1),
            constants.hand_overs((all / 2.0).max(1.0), 2.0),
            constants.heartbeat_load(all, LEASES) * 100.0,
            constants.table_bytes(names) / 1e6,
            used * 100.0,
            if used > 1.0 { ": ends here" } else { "" },
        );
    }
    table
        + "Clients have one task each; two want the same name for a hand-over. Tables beyond the memory still work, slower.\n"
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::*;

    /// Made-up figures.
    const SAMPLE: &str = include_str!("../../../tests/bench/sample.json");

    #[test]
    fn constants_reproduce_the_rows_they_come_from() {
        let run = Run::parse(SAMPLE).expect("JSON");
        let mut count = 0;
        for database in run.list("databases") {
            let constants = run.constants(database).expect("every row");
            let title = database["title"].as_str().expect("a title");
            for Prediction { row, value, is_fitted } in predictions(&constants) {
                let measured = run.number(title, &row, "value").expect("a row");
                if is_fitted {
                    assert!(deviation(value, measured).abs() < 1e-9, "{value} is not {measured}");
                    count += 1;
                }
            }
        }
        assert_eq!(count, 12);
    }

    #[test]
    fn report_has_measured_and_predicted_side_by_side() {
        let report = report(SAMPLE).expect("a report");
        assert!(report.starts_with("SAMPLE, NOT MEASURED: a made-up processor, 2 cores, none; 2000-01-01T00:00:00Z"));
        let line = report.lines().find(|line| line.starts_with("B 1 tasks, cycles/s")).expect("a line");
        // 2 × (20 + 30 + 10) µs, next to 8000 cycles a second.
        assert_eq!(line.split_whitespace().collect::<Vec<_>>()[4..], ["8000", "8333", "4.2", "%"]);
        let line = report.lines().find(|line| line.trim_start().starts_with("10000 ")).expect("a line");
        assert!(line.contains("100000000") && line.ends_with("connections 10000 %: ends here"), "{line}");
    }

    #[test]
    fn missing_row_is_an_error_that_names_it() {
        let without = SAMPLE.replace("heartbeat with 1 leases", "something else");
        let error = report(&without).expect_err("an error");
        assert_eq!(error, r#"no value of sqlock in the row "D heartbeat with 1 leases" of Server 1.0, durable"#);
        assert_eq!(report("{}").expect_err("an error"), "no database was measured");
    }
}
