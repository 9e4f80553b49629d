//! How sqlock ends: the exit codes of sysexits.h where one fits, those of a shell for the command.

use std::process::ExitCode;

use clap::error::ErrorKind;
use nix::sys::signal::Signal;

use crate::say;

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

/// Why sqlock could not do what it was asked for: said once, on stderr, by `main`.
#[derive(Debug)]
pub struct Failure {
    pub code: u8,
    /// Empty: there is nobody to say it to.
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

    /// The operating system refused something it never should.
    pub fn system(message: impl Into<String>) -> Self {
        Self::new(SYSTEM, message)
    }

    pub fn interrupted(signal: Signal) -> Self {
        Self::new(of_signal(signal), format!("interrupted by {signal}"))
    }

    pub fn report(self) -> ExitCode {
        if !self.message.is_empty() {
            say::error(&self.message);
        }
        ExitCode::from(self.code)
    }
}

/// What a shell makes of a command that a signal killed.
pub fn of_signal(signal: Signal) -> u8 {
    128_u8.saturating_add(u8::try_from(signal as i32).unwrap_or(u8::MAX))
}

/// Help and version are answers; the rest is a mistake on the command line.
pub fn of_usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => ExitCode::from(USAGE),
    }
}

impl From<sqlock::Error> for Failure {
    fn from(error: sqlock::Error) -> Self {
        use sqlock::Error as E;
        let code = match &error {
            E::Timeout { .. } => NOT_OBTAINED,
            E::Lost { .. } => LOST,
            // It answered, and wants another password, another user or another database.
            E::Unavailable { source: Some(sqlx::Error::Database(_)), .. } if is_for_good(&error) => CONFIGURATION,
            E::Unavailable { source: Some(sqlx::Error::Configuration(_)), .. } => CONFIGURATION,
            E::NotMigrated { .. } | E::Migrate(_) | E::Database { .. } => CONFIGURATION,
            E::InvalidName { .. }
            | E::InvalidOwner
            | E::InvalidExport { .. }
            | E::OutOfRange { .. }
            | E::LabelTooLong { .. }
            | E::NulInLabel => USAGE,
            _ => UNREACHABLE,
        };
        let message = match &error {
            E::NotMigrated { .. } => {
                "the sqlock tables are missing: run \"sqlock migrate\" once, or add what \"sqlock schema\" prints to \
                 your migrations"
                    .into()
            }
            E::Migrate(cause) => format!(
                "the sqlock tables are missing and cannot be created: {cause}\nLet somebody who may create tables run \
                 \"sqlock migrate\" once, or add what \"sqlock schema\" prints to your migrations."
            ),
            E::OutOfRange { what, given, min, max } => {
                use crate::durations::show_exactly as show;
                format!("{what} of {} is out of range: between {} and {}", show(*given), show(*min), show(*max))
            }
            error => error.to_string(),
        };
        Self { code, message }
    }
}

/// Whether trying again cannot help, as with a wrong password; a server that starts or stops, or is full, may be different soon.
fn is_for_good(error: &sqlock::Error) -> bool {
    let sqlock::Error::Unavailable { source: Some(sqlx::Error::Database(error)), .. } = error else {
        return false;
    };
    let code = error.code().unwrap_or_default();
    // SQLite: CANTOPEN with all its kinds. Its codes are numbers, the others' SQLSTATEs of five characters.
    if code.len() < 5 && code.parse::<u32>().is_ok_and(|code| code & 0xff == 14) {
        return true;
    }
    // PostgreSQL: invalid_authorization, invalid_catalog_name, insufficient privilege. MySQL's SQLSTATEs (28000, 42000)
    // for the same are of the same classes.
    code.starts_with("28") || code.starts_with("3D") || code.starts_with("42")
}
