//! Output on stdout, of the subcommands that run no command.

use std::io::{self, Write};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::exit::{self, Failure};

/// Prints a text and flushes it.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(|error| match error.kind() {
        // The reader has ended: `sqlock ls | head -1`.
        io::ErrorKind::BrokenPipe => Failure::new(exit::from_signal(Signal::SIGPIPE), ""),
        _ => Failure::new(exit::OUTPUT, format!("cannot write to stdout: {error}")),
    })
}

/// Prints JSON on one line.
pub fn print_json(value: &Value) -> Result<(), Failure> {
    print(&escape_json(&format!("{value}\n")))
}

/// Prints JSON on many lines.
pub fn print_json_pretty(value: &Value) -> Result<(), Failure> {
    print(&escape_json(&format!("{value:#}\n")))
}

/// Escapes DEL and the C1 codes, which JSON allows and some terminals act on.
fn escape_json(json: &str) -> String {
    let mut shown = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            c if c.is_control() && c != '\n' => shown.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => shown.push(c),
        }
    }
    shown
}

/// Formats a table with a heading and columns of the least width.
pub fn format_table(heading: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(heading.get(column).map(|h| h.chars().count())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heading.len()).map(width).collect();
    let heading = heading.iter().map(|h| (*h).to_owned()).collect();
    let lines = std::iter::once(&heading).chain(rows).map(|row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    });
    lines.collect()
}
