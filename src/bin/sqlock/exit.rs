//! Exit codes and failures: the codes of sysexits.h where one fits, those of a shell for the
//! command.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Duration;

use clap::error::ErrorKind as UsageError;
use nix::sys::signal::Signal;

use crate::duration::format_exact;
use crate::stderr;

pub const USAGE: u8 = 64;
pub const UNREACHABLE: u8 = 69;
pub const SYSTEM: u8 = 71;
pub const OUTPUT: u8 = 74;
pub const NOT_OBTAINED: u8 = 75;
pub const CONFIGURATION: u8 = 78;
pub const LOST: u8 = 79;
pub const NOT_EXECUTABLE: u8 = 126;
pub const NOT_FOUND: u8 = 127;

/// An exit code, or the reason for one.
pub type Outcome = Result<u8, Failure>;

/// The exit code and the reason of a failure, which `main` prints.
#[derive(Debug)]
pub struct Failure {
    pub code: u8,
    /// Empty: nothing is printed.
    pub message: String,
}

impl Failure {
    pub fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(USAGE, message)
    }

    pub fn configuration(message: impl Into<String>) -> Self {
        Self::new(CONFIGURATION, message)
    }

    /// The operating system refused something.
    pub fn system(message: impl Into<String>) -> Self {
        Self::new(SYSTEM, message)
    }

    pub fn interrupted(signal: Signal) -> Self {
        Self::new(from_signal(signal), format!("interrupted by {signal}"))
    }

    pub fn report(self) -> ExitCode {
        if !self.message.is_empty() {
            stderr::print_error(&self.message);
        }
        ExitCode::from(self.code)
    }
}

/// The location of the database, for messages.
static LOCATION: OnceLock<String> = OnceLock::new();

/// Says that the database cannot be reached, with its location.
pub fn describe_unreachable() -> String {
    format!("cannot reach {}", LOCATION.get().map_or("the database", String::as_str))
}

/// Sets the location of the database that messages name.
pub fn set_location(location: &str) {
    let _ = LOCATION.set(location.to_owned());
}

/// Returns the exit code of a shell for a command that a signal killed.
pub fn from_signal(signal: Signal) -> u8 {
    128_u8.saturating_add(u8::try_from(signal as i32).unwrap_or(u8::MAX))
}

/// Prints help or the version, or reports a usage error.
pub fn report_usage_error(error: &clap::Error) -> ExitCode {
    if let UsageError::DisplayHelp | UsageError::DisplayVersion = error.kind() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    // clap repeats the arguments: control characters in them are escaped, together with clap's own
    // colours.
    let has_control = std::env::args_os().any(|argument| argument.to_string_lossy().contains(char::is_control));
    let rendered = error.render();
    let text = if has_control { stderr::escape_control(&rendered.to_string()) } else { rendered.ansi().to_string() };
    let text = redact_passwords(&text);
    let _ = write!(anstream::stderr(), "{text}");
    ExitCode::from(USAGE)
}

/// Removes passwords: clap repeats misplaced arguments, which may be URLs.
fn redact_passwords(text: &str) -> String {
    let mut parts = text.split("://");
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        // The last @ of the line, since a password may contain others.
        let line = part.find('\n').unwrap_or(part.len());
        let host = part[..line].rfind('@').unwrap_or(0);
        let user = if host > 0 { "…" } else { "" };
        shown.extend(["://", user, &part[host..]]);
    }
    shown
}

impl From<sqlock::Error> for Failure {
    fn from(error: sqlock::Error) -> Self {
        use sqlock::Error as E;
        let code = match &error {
            E::Timeout { .. } => NOT_OBTAINED,
            E::Lost { .. } => LOST,
            E::Unavailable { source: Some(source), .. } if is_permanent(source) => CONFIGURATION,
            E::NotMigrated { .. } | E::Migrate(_) | E::Database { .. } => CONFIGURATION,
            E::InvalidName { .. }
            | E::InvalidOwner
            | E::InvalidExport { .. }
            | E::OutOfRange { .. }
            | E::LabelTooLong { .. }
            | E::NulInLabel
            | E::InvalidKey { .. }
            | E::Permits { .. }
            | E::Conversion { .. } => USAGE,
            _ => UNREACHABLE,
        };
        let message = match &error {
            E::NotMigrated { .. } => {
                "the sqlock tables are missing: run \"sqlock migrate\" once, or add what \"sqlock schema\" prints to \
                 your migrations"
                    .into()
            }
            E::Migrate(cause) => format!(
                "the sqlock tables are missing and cannot be created: {cause}\nRun \"sqlock migrate\" once as a user with the \
                 right to create tables, or add what \"sqlock schema\" prints to your migrations."
            ),
            E::Unavailable { reason, .. } => {
                let reason = reason.trim_start_matches("error communicating with database: ");
                format!("{}: {reason}", describe_unreachable())
            }
            E::OutOfRange { what, given, min, max } => {
                // The names of the options instead of the library's.
                let what = match *what {
                    "max_hold" => "--max-hold",
                    "hold_at_least" => "--hold-at-least",
                    what => what,
                };
                let (given, min) = (format_exact(*given), format_exact(*min));
                match *max {
                    Duration::MAX => format!("{what} of {given} is out of range: at least {min}"),
                    max => format!("{what} of {given} is out of range: between {min} and {}", format_exact(max)),
                }
            }
            // A name in the message may contain a line that looks like a message of sqlock.
            error => stderr::escape_line(&error.report().to_string()),
        };
        Self { code, message }
    }
}

/// Whether a retry cannot help: a wrong password, a certificate that is not accepted, a file of
/// another program. A server that starts, stops or is full may answer soon.
fn is_permanent(error: &sqlx::Error) -> bool {
    let error = match error {
        sqlx::Error::Configuration(_) | sqlx::Error::Tls(_) => return true,
        // The error of rustls for a certificate that it does not accept.
        sqlx::Error::Io(error) => return error.kind() == ErrorKind::InvalidData,
        sqlx::Error::Database(error) => error,
        _ => return false,
    };
    let code = error.code().unwrap_or_default();
    #[cfg(feature = "sqlite")]
    if error.try_downcast_ref::<sqlx::sqlite::SqliteError>().is_some() {
        // CANTOPEN and NOTADB.
        return matches!(code.parse::<u32>().map(|code| code & 0xff), Ok(14 | 26));
    }
    // PostgreSQL: invalid_authorization, invalid_catalog_name, insufficient_privilege. MySQL has
    // SQLSTATEs of the same classes for them (28000, 42000).
    code.starts_with("28") || code.starts_with("3D") || code.starts_with("42")
}
