//! Messages on stderr: stdout and stdin belong to the command.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

static QUIET: AtomicBool = AtomicBool::new(false);

pub fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Prints a note, unless --quiet is given.
pub fn print_note(message: &str) {
    if !is_quiet() {
        print("\x1b[2m", message);
    }
}

/// Prints a note, also with --quiet.
pub fn print_notice(message: &str) {
    print("\x1b[2m", message);
}

/// Prints a warning, unless --quiet is given.
pub fn print_warning(message: &str) {
    if !is_quiet() {
        print("\x1b[33m", message);
    }
}

/// Prints the reason of a failure.
pub fn print_error(message: &str) {
    print("\x1b[31m", message);
}

/// Prints each line with a prefix, in colour where anstream finds a terminal and no NO_COLOR. A
/// closed stderr loses the lines.
fn print(colour: &str, message: &str) {
    let lines: String =
        escape_control(message).lines().map(|line| format!("{colour}sqlock:\x1b[0m {line}\n")).collect();
    let _ = anstream::stderr().write_all(lines.as_bytes());
}

/// Escapes control characters but newlines: a name or a label must not control the terminal.
pub fn escape_control(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => shown.push(c),
            c if c.is_control() => shown.extend(c.escape_default()),
            c => shown.push(c),
        }
    }
    shown
}

/// Escapes control characters and newlines, for cells of a table and values in a text.
pub fn escape_line(text: &str) -> String {
    escape_control(text).replace('\n', "\\n")
}

/// Puts a name in quotes.
pub fn quote(name: &str) -> String {
    format!("\"{}\"", escape_line(name))
}
