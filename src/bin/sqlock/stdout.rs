//! Output on stdout for the subcommands that run no command.

use std::io::{self, IsTerminal, Write};

use serde_json::Value;

use crate::exit::Failure;
use crate::stderr;

/// Prints a text and flushes it.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(|error| Failure::output(&error))
}

/// Prints a text in a thread of its own. Dropping the future abandons a text without a reader.
pub async fn print_in_thread(text: String) -> Result<(), Failure> {
    let printed = tokio::task::spawn_blocking(move || print(&text)).await;
    printed.unwrap_or_else(|error| Err(Failure::system(format!("cannot write to stdout: {error}"))))
}

/// Prints JSON on one line.
pub fn print_json(value: &Value) -> Result<(), Failure> {
    print(&format_json(value))
}

/// Prints JSON on many lines.
pub fn print_json_pretty(value: &Value) -> Result<(), Failure> {
    print(&format_json_pretty(value))
}

/// Formats JSON as one line.
pub fn format_json(value: &Value) -> String {
    escape_json(&format!("{value}\n"))
}

/// Formats JSON as many lines.
pub fn format_json_pretty(value: &Value) -> String {
    escape_json(&format!("{value:#}\n"))
}

/// Escapes DEL, the C1 codes and format characters, which JSON allows but which control some
/// terminals.
fn escape_json(json: &str) -> String {
    let mut shown = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            c if stderr::acts_on_terminal(c) && c != '\n' => {
                let units = c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
                shown.push_str(&units);
            }
            c => shown.push(c),
        }
    }
    shown
}

/// The least width of a column that must break its words to fit the terminal.
const NARROWEST: usize = 6;

/// The spaces between two columns.
const GAP: usize = 2;

/// Formats a table for stdout: as wide as a terminal, or as wide as its cells anywhere else.
pub fn format_table(heading: &[&str], rows: &[Vec<String>]) -> String {
    let terminal = io::stdout().is_terminal().then(|| terminal_size::terminal_size_of(io::stdout())).flatten();
    // A terminal of unknown width counts as none.
    let width = terminal.map(|(width, _)| usize::from(width.0)).filter(|width| *width > 0);
    format_to_width(heading, rows, width.unwrap_or(usize::MAX))
}

/// Formats a table with a heading. If it is too wide, long cells continue on the next line. Numbers
/// stay whole, so that they can be copied.
fn format_to_width(heading: &[&str], rows: &[Vec<String>], width: usize) -> String {
    let cells = |column: usize| {
        let heading = heading.get(column).copied().into_iter();
        heading.chain(rows.iter().filter_map(move |row| row.get(column)).map(String::as_str))
    };
    let longest_word = |column: usize| longest(cells(column).flat_map(str::split_whitespace));
    let is_number = |column: usize| cells(column).skip(1).all(|cell| cell.chars().all(|c| c.is_ascii_digit()));
    let least_with_broken_words =
        |column: usize| if is_number(column) { longest_word(column) } else { longest_word(column).min(NARROWEST) };
    let columns = 0..heading.len();
    let mut widths: Vec<usize> = columns.clone().map(|column| longest(cells(column))).collect();
    let least: [Vec<usize>; 2] =
        [columns.clone().map(longest_word).collect(), columns.map(least_with_broken_words).collect()];
    for least in &least {
        shrink(&mut widths, least, width);
    }
    let heading = heading.iter().map(|h| (*h).to_owned()).collect();
    std::iter::once(&heading).chain(rows).map(|row| format_row(row, &widths)).collect()
}

/// Counts the characters of the longest text.
fn longest<'a>(texts: impl Iterator<Item = &'a str>) -> usize {
    texts.map(|text| text.chars().count()).max().unwrap_or(0)
}

/// Makes the widest columns narrower until the table fits, but none narrower than its least width.
fn shrink(widths: &mut [usize], least: &[usize], width: usize) {
    while widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1) > width {
        let wider = widths.iter_mut().zip(least).filter(|(width, least)| **width > **least);
        let Some((widest, _)) = wider.max_by_key(|(width, _)| **width) else {
            return;
        };
        *widest -= 1;
    }
}

/// Formats a row, on as many lines as its highest cell needs.
fn format_row(row: &[String], widths: &[usize]) -> String {
    let parts: Vec<Vec<String>> = row.iter().zip(widths).map(|(cell, width)| split_cell(cell, *width)).collect();
    let height = parts.iter().map(Vec::len).max().unwrap_or(0);
    let line = |i: usize| {
        let cells = parts.iter().zip(widths);
        let cells = cells.map(|(parts, width)| format!("{:<width$}", parts.get(i).map_or("", String::as_str)));
        format!("{}\n", cells.collect::<Vec<_>>().join(&" ".repeat(GAP)).trim_end())
    };
    (0..height).map(line).collect()
}

/// Splits a cell into lines of a width, between words where that is possible.
fn split_cell(cell: &str, width: usize) -> Vec<String> {
    let chars: Vec<char> = cell.chars().collect();
    let mut lines = Vec::new();
    let mut rest = &chars[..];
    while rest.len() > width.max(1) {
        let (line, next) = rest.split_at(width.max(1));
        // A space after the line is a good end, too.
        let space = rest[..=line.len()].iter().rposition(|c| *c == ' ').filter(|at| *at > 0);
        let (line, next) = space.map_or((line, next), |at| (&rest[..at], &rest[at + 1..]));
        lines.push(line.iter().collect());
        rest = next;
    }
    lines.push(rest.iter().collect());
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(cells: &[&[&str]]) -> Vec<Vec<String>> {
        cells.iter().map(|row| row.iter().map(|cell| (*cell).to_owned()).collect()).collect()
    }

    #[test]
    fn table_is_as_wide_as_its_cells() {
        let table = format_to_width(&["NAME", "TOKEN"], &rows(&[&["a", "17"], &["longer", "4"]]), usize::MAX);
        assert_eq!(table, "NAME    TOKEN\na       17\nlonger  4\n");
    }

    #[test]
    fn wide_cells_continue_on_the_next_line() {
        let cells: [&[&str]; 2] =
            [&["reports/nightly/of/2026", "1764123456789012", "what the night shift runs"], &["b", "1", ""]];
        let table = format_to_width(&["NAME", "TOKEN", "LABEL"], &rows(&cells), 44);
        assert!(table.lines().all(|line| line.chars().count() <= 44), "{table}");
        for word in ["1764123456789012", "night", "shift"] {
            assert!(table.split_whitespace().any(|part| part == word), "{word} was broken: {table}");
        }
        // No column gets narrower than the least width, however narrow the terminal is.
        let narrow = format_to_width(&["NAME", "LABEL"], &rows(&[&["reports/nightly", "what runs at night"]]), 3);
        assert!(narrow.lines().all(|line| line.chars().count() <= 2 * NARROWEST + 2), "{narrow}");
    }
}
