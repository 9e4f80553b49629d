//! Exit codes and failures: the codes of sysexits.h where one fits, and a shell's codes for the
//! command.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use clap::error::ErrorKind as UsageError;
use nix::sys::signal::Signal;
use sqlock::database::AccessError;
use sqlx::migrate::MigrateError;

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

    /// Makes the failure of an operation that the operating system refused.
    pub fn system(message: impl Into<String>) -> Self {
        Self::new(SYSTEM, message)
    }

    /// Makes the failure of a write to stdout.
    pub fn output(error: &std::io::Error) -> Self {
        match error.kind() {
            // The reader has ended: `sqlock ls | head -1`.
            ErrorKind::BrokenPipe => Self::new(from_signal(Signal::SIGPIPE as i32), ""),
            _ => Self::new(OUTPUT, format!("cannot write to stdout: {error}")),
        }
    }

    pub fn interrupted(signal: Signal) -> Self {
        Self::new(from_signal(signal as i32), format!("interrupted by {signal}"))
    }

    pub fn report(self) -> ExitCode {
        if !self.message.is_empty() {
            stderr::print_error(&self.message);
        }
        ExitCode::from(self.code)
    }
}

/// The location of the database, for messages.
static LOCATION: RwLock<Option<String>> = RwLock::new(None);

fn location() -> String {
    let location = LOCATION.read().unwrap_or_else(PoisonError::into_inner);
    location.clone().unwrap_or_else(|| "the database".into())
}

/// Returns the message that the database cannot be reached, with its location.
pub fn describe_unreachable() -> String {
    format!("cannot reach {}", location())
}

/// Sets the location of the database that messages name.
pub fn set_location(location: &str) {
    *LOCATION.write().unwrap_or_else(PoisonError::into_inner) = Some(location.to_owned());
}

/// Returns the exit code of a shell for a command that the signal with this number killed.
pub fn from_signal(signal: i32) -> u8 {
    128_u8.saturating_add(u8::try_from(signal).unwrap_or(u8::MAX))
}

/// Prints help or the version, or reports a usage error.
pub fn report_usage_error(error: &clap::Error) -> ExitCode {
    if let UsageError::DisplayHelp | UsageError::DisplayVersion = error.kind() {
        return match error.print().and_then(|()| std::io::stdout().flush()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => Failure::output(&error).report(),
        };
    }
    // clap repeats the arguments: control characters in them are escaped, together with clap's own
    // colours.
    let has_control = std::env::args_os().any(|argument| argument.to_string_lossy().contains(stderr::acts_on_terminal));
    let rendered = error.render();
    let text = if has_control { stderr::escape_control(&rendered.to_string()) } else { rendered.ansi().to_string() };
    let text = redact_passwords(&text, std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()));
    let _ = write!(anstream::stderr(), "{text}");
    ExitCode::from(USAGE)
}

/// Hides the passwords of arguments in a text, because clap repeats misplaced arguments, which may
/// be URLs.
fn redact_passwords(text: &str, arguments: impl Iterator<Item = String>) -> String {
    let mut text = text.to_owned();
    for (secret, hidden) in arguments.flat_map(|argument| passwords_in(&argument)) {
        // clap removes the control characters.
        let shown = stderr::escape_control(&anstream::adapter::strip_str(&secret).to_string());
        text = text.replace(&shown, hidden);
    }
    text
}

/// Finds possible passwords in an argument, each with its replacement: from the colon after the
/// user to the last @, and the value of a parameter.
fn passwords_in(argument: &str) -> Vec<(String, &'static str)> {
    let after_scheme = match argument.split_once("://") {
        Some((scheme, rest)) if !scheme.contains(':') => rest,
        _ => argument,
    };
    let before_host = after_scheme.rfind('@').map_or("", |at| &after_scheme[..=at]);
    let of_user = before_host.find(':').map(|colon| (before_host[colon..].to_owned(), ":…@"));
    let parameters = after_scheme.split(['&', '?', ' ']).filter_map(|parameter| parameter.split_once("password="));
    let of_parameters = parameters.filter(|(_, value)| !value.is_empty()).map(|(_, value)| (format!("={value}"), "=…"));
    of_user.into_iter().chain(of_parameters).collect()
}

impl From<sqlock::Error> for Failure {
    fn from(error: sqlock::Error) -> Self {
        use sqlock::Error as E;
        let code = match &error {
            E::Timeout { .. } => NOT_OBTAINED,
            E::Lost { .. } => LOST,
            E::Unavailable { source: Some(source), .. } if is_permanent(source) => CONFIGURATION,
            // For example a table that stays locked: it may pass like an outage.
            E::Database { .. } if error.is_retryable() => UNREACHABLE,
            E::NotMigrated { .. }
            | E::Migrate { .. }
            | E::NewerSchema { .. }
            | E::Database { .. }
            | E::Access { .. }
            | E::Unsupported { .. }
            | E::InvalidUrl { .. } => CONFIGURATION,
            E::InvalidName { .. }
            | E::InvalidOwner
            | E::InvalidExport { .. }
            | E::OutOfRange { .. }
            | E::LabelTooLong { .. }
            | E::NulInLabel
            | E::NoteTooLong { .. }
            | E::NulInNote
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
            // A change of the holder waits for nothing else.
            E::Timeout { name, .. } => {
                let name = stderr::quote(name.as_str());
                format!("{name}: a transaction that the holder has fenced is open; end it first")
            }
            E::Migrate { source } => describe_migration(source),
            E::Access { cause, source, .. } => describe_access(*cause, source),
            E::Unavailable { reason, .. } => {
                let reason = reason.trim_start_matches("error communicating with database: ");
                format!("{}: {reason}", describe_unreachable())
            }
            E::OutOfRange { what, given, min, max } => {
                // The names of the options replace the library's names.
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

/// Describes why the tables could not be created or brought up to date.
fn describe_migration(cause: &MigrateError) -> String {
    match cause {
        MigrateError::VersionMismatch(version) => format!(
            "migration {version} of the sqlock tables in this database differs from the one in this program: another \
             version of sqlock has created the tables, or the record in _sqlock_migrations was changed. Compare the \
             tables with \"sqlock doctor\"."
        ),
        MigrateError::Dirty(version) => format!(
            "migration {version} of the sqlock tables was interrupted. If no other process is migrating, repair the table \
             and delete its row from _sqlock_migrations."
        ),
        cause => format!(
            "the sqlock tables are missing or old, and cannot be created: {cause}\nRun \"sqlock migrate\" once as a user with \
             the right to create tables, or add what \"sqlock schema\" prints to your migrations."
        ),
    }
}

/// Describes a database that refuses this user or cannot be used, with advice.
fn describe_access(cause: AccessError, source: &sqlx::Error) -> String {
    let location = location();
    let reason = match source {
        sqlx::Error::Database(error) => error.message().to_owned(),
        sqlx::Error::Configuration(error) => error.to_string(),
        error => error.to_string(),
    };
    let advice = match cause {
        AccessError::Credentials => "Check the user and the password of the URL.",
        AccessError::NoDatabase if is_of_sqlite(source) => {
            "Check the path, and that this user may create files in its directory: SQLite needs some beside the database."
        }
        AccessError::NoDatabase => "Check the name of the database in the URL, or create it.",
        AccessError::MissingPrivilege => "\"sqlock doctor\" names the rights that this user needs.",
        AccessError::Tls => {
            "Check the host in the URL, the certificate of the server, and sslrootcert (MySQL: ssl-ca) in the URL."
        }
        AccessError::Pooler => {
            "PgBouncer: ignore_startup_parameters = extra_float_digits, and max_prepared_statements above 0 (since 1.21) or \
             pool_mode = session. Do not ignore \"options\": a search_path in the URL would be ignored with it. Set it by \
             ALTER ROLE ... SET search_path instead."
        }
        _ => return format!("{location}: {reason}"),
    };
    format!("{location}: {cause}: {reason}\n{advice}")
}

fn is_of_sqlite(source: &sqlx::Error) -> bool {
    #[cfg(feature = "sqlite")]
    if let sqlx::Error::Database(error) = source {
        return error.try_downcast_ref::<sqlx::sqlite::SqliteError>().is_some();
    }
    let _ = source;
    false
}

/// Returns whether a retry cannot succeed, because the certificate is not accepted.
fn is_permanent(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Configuration(_) | sqlx::Error::Tls(_) => true,
        // The error of rustls for a certificate that it does not accept.
        sqlx::Error::Io(error) => error.kind() == ErrorKind::InvalidData,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use sqlock::LockName;

    use super::*;

    #[test]
    fn change_blocked_by_a_fence_exits_75() -> Result<(), Failure> {
        let error = sqlock::Error::Timeout { name: LockName::new("job")?, waited: Duration::from_secs(10) };
        let failure = Failure::from(error);
        assert_eq!(failure.code, NOT_OBTAINED);
        assert!(failure.message.contains("\"job\": a transaction that the holder has fenced"), "{}", failure.message);
        Ok(())
    }

    #[test]
    fn password_of_argument_is_redacted() {
        for (argument, shown) in [
            ("postgres://u:s3cret@h/d", "postgres://u:…@h/d"),
            ("postgres://u:s3c://r@et@h/d", "postgres://u:…@h/d"),
            ("postgres://:s3cret@h,mysql://u:s3cret@h", "postgres://:…@h"),
            ("--url=postgres:u:s3cret@h", "--url=postgres:…@h"),
            ("u:s3c://ret@h", "u:…@h"),
            ("postgres://h/d?user=u&password=s3cret&x=y", "postgres://h/d?user=u&password=…&x=y"),
            ("postgres://u@h:1/d", "postgres://u@h:1/d"),
            ("sqlite://a.db", "sqlite://a.db"),
        ] {
            let redacted = redact_passwords(&format!("error: '{argument}'"), std::iter::once(argument.to_owned()));
            assert_eq!(redacted, format!("error: '{shown}'"));
        }
    }
}
