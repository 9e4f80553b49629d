//! What sqlock says: on stderr only, since stdout and stdin are the command's.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

static QUIET: AtomicBool = AtomicBool::new(false);

pub fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Something worth knowing.
pub fn print_note(message: &str) {
    if !is_quiet() {
        print("\x1b[2m", message);
    }
}

/// Something that nobody may miss, also with --quiet.
pub fn print_notice(message: &str) {
    print("\x1b[2m", message);
}

/// Something that needs attention, but does not end anything.
pub fn print_warning(message: &str) {
    if !is_quiet() {
        print("\x1b[33m", message);
    }
}

/// The reason why it ends.
pub fn print_error(message: &str) {
    print("\x1b[31m", message);
}

/// In colour on a terminal unless NO_COLOR is set; anstream sees to that. A stderr that is closed loses the line, no more.
fn print(colour: &str, message: &str) {
    let lines: String =
        escape_control(message).lines().map(|line| format!("{colour}sqlock:\x1b[0m {line}\n")).collect();
    let _ = anstream::stderr().write_all(lines.as_bytes());
}

/// Control characters shown rather than sent: a name or a label must not paint on, or retitle, somebody's terminal.
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

/// The same on one line, for cells of a table and values in a text.
pub fn escape_line(text: &str) -> String {
    escape_control(text).replace('\n', "\\n")
}

/// A name in quotes.
pub fn quote(name: &str) -> String {
    format!("\"{}\"", escape_line(name))
}
