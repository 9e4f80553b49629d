//! Messages on stderr: stdout and stdin belong to the command.

use std::io::{IsTerminal, Write};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::SigSet;

static HIDES_NOTES: AtomicBool = AtomicBool::new(false);
static DISCARDS_MESSAGES: AtomicBool = AtomicBool::new(false);

pub fn set_quiet(quiet: bool) {
    HIDES_NOTES.store(quiet, Ordering::Relaxed);
}

pub fn is_quiet() -> bool {
    HIDES_NOTES.load(Ordering::Relaxed)
}

/// Discards all messages from now on, except the live line: a completion must not write into the
/// line that is edited.
pub fn discard_messages() {
    DISCARDS_MESSAGES.store(true, Ordering::Relaxed);
}

/// Prints a note, unless --quiet is given.
pub fn print_note(message: &str) {
    if !is_quiet() {
        print("\x1b[2m", message);
    }
}

/// Prints a note even with --quiet.
pub fn print_note_always(message: &str) {
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

/// Whether a live line is on the terminal, which the next message replaces.
static LIVE: AtomicBool = AtomicBool::new(false);

/// Moves to the beginning of the live line, and removes it.
const ERASE: &str = "\r\x1b[K";

/// Returns whether a live line can be shown.
pub fn is_terminal() -> bool {
    obeys_escape_codes(&std::io::stderr())
}

/// Returns whether a stream is a terminal that obeys escape codes.
pub fn obeys_escape_codes(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Shows a line on the terminal, cut to its width, replacing the last one. A background job shows
/// none, because the terminal shows the prompt of its shell.
pub fn show_live_line(message: &str) {
    let foreground = nix::unistd::tcgetpgrp(std::io::stderr());
    if is_quiet() || foreground.is_ok_and(|group| group != nix::unistd::getpgrp()) {
        clear_live_line();
        return;
    }
    let width = terminal_size::terminal_size_of(std::io::stderr()).map(|(width, _)| usize::from(width.0));
    // The last column stays empty: some terminals begin a new line there.
    let width = width.filter(|width| *width > 0).unwrap_or(80) - 1;
    let line: String = format!("sqlock: {}", escape_line(message)).chars().take(width).collect();
    LIVE.store(true, Ordering::Relaxed);
    write(Text::Raw(format!("{ERASE}{line}")));
}

/// Removes the live line, if any.
pub fn clear_live_line() {
    if LIVE.swap(false, Ordering::Relaxed) {
        write(Text::Raw(ERASE.into()));
    }
}

/// Prints each line with a prefix, in colour if anstream finds a terminal and no NO_COLOR. A closed
/// stderr loses the lines.
fn print(colour: &str, message: &str) {
    if DISCARDS_MESSAGES.load(Ordering::Relaxed) {
        return;
    }
    clear_live_line();
    let lines: String =
        escape_control(message).lines().map(|line| format!("{colour}sqlock:\x1b[0m {line}\n")).collect();
    write(Text::Styled(lines));
}

enum Text {
    /// Written as it is.
    Raw(String),
    /// Written without its colours if stderr is no terminal.
    Styled(String),
}

impl Text {
    fn write(&self) {
        let _ = match self {
            Self::Raw(text) => std::io::stderr().write_all(text.as_bytes()),
            Self::Styled(text) => anstream::stderr().write_all(text.as_bytes()),
        };
    }
}

/// How long a message delays its sender.
const WRITE_TIMEOUT: Duration = Duration::from_millis(250);

/// How long the end of the process waits for messages to be written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// How many messages may wait to be written. Further messages are lost.
const MAX_PENDING: usize = 64;

static PENDING: AtomicUsize = AtomicUsize::new(0);

/// A text, and where to report that it is written.
type Message = (Text, SyncSender<()>);

/// The thread that writes, or `None` if the system allows no further thread.
static WRITER: LazyLock<Option<SyncSender<Message>>> = LazyLock::new(|| {
    let (sender, messages) = mpsc::sync_channel::<Message>(MAX_PENDING);
    let write_all = move || {
        // Signals are for the other threads; and where SIGTTOU is blocked, a terminal with `stty
        // tostop` lets a background job write.
        let _ = SigSet::all().thread_block();
        for (text, written) in messages {
            text.write();
            PENDING.fetch_sub(1, Ordering::SeqCst);
            let _ = written.try_send(());
        }
    };
    thread::Builder::new().name("stderr".into()).spawn(write_all).ok().map(|_| sender)
});

/// Writes a text in a thread of its own: a full pipe or a stopped terminal must not stop this
/// process, which renews the lease. Returns when the text is written or after [`WRITE_TIMEOUT`],
/// and at once if an earlier text is still being written.
fn write(text: Text) {
    let Some(writer) = &*WRITER else { return text.write() };
    let (written, is_written) = mpsc::sync_channel(1);
    let timeout = if PENDING.fetch_add(1, Ordering::SeqCst) == 0 { WRITE_TIMEOUT } else { Duration::ZERO };
    if writer.try_send((text, written)).is_ok() {
        let _ = is_written.recv_timeout(timeout);
    } else {
        PENDING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Waits until all messages are written, for [`FLUSH_TIMEOUT`] at most: signals no longer end the
/// process, and stderr may have no reader.
pub fn flush() {
    let deadline = Instant::now() + FLUSH_TIMEOUT;
    while PENDING.load(Ordering::SeqCst) > 0 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
}

/// Returns whether a terminal acts on a character instead of showing it: a control character, a
/// format character such as U+202E, which reverses the text after it, or a separator of lines.
pub fn acts_on_terminal(c: char) -> bool {
    // The category Cf of Unicode 16, with U+2028 and U+2029.
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}'..='\u{891}' | '\u{8e2}'
            | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0001}' | '\u{e0020}'..='\u{e007f}')
}

/// Escapes control and format characters except newlines, because a name or a label must not
/// control the terminal.
pub fn escape_control(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => shown.push(c),
            c if acts_on_terminal(c) => shown.extend(c.escape_default()),
            c => shown.push(c),
        }
    }
    shown
}

/// Escapes control and format characters and newlines, for cells of a table and values in a text.
pub fn escape_line(text: &str) -> String {
    escape_control(text).replace('\n', "\\n")
}

/// Puts a name in quotes.
pub fn quote(name: &str) -> String {
    format!("\"{}\"", escape_line(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_characters_are_escaped() {
        assert_eq!(escape_line("a\u{202e}b\u{200b}c\n\u{7f}"), "a\\u{202e}b\\u{200b}c\\n\\u{7f}");
        assert_eq!(escape_line("naïve 名前 🙂"), "naïve 名前 🙂");
    }
}
