//! The options of `sqlock run`.

use std::ffi::OsString;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::Signal;
use sqlock::lease::LeaseOptions;

use crate::acquisition::LeaseArgs;
use crate::duration;
use crate::parse::parse_signal;

/// Hold the lease on a name while a command runs.
///
/// Waits for the lease, runs the command, and frees the name when the command and its process group
/// have ended: also the processes that it has left in the background, unless --no-wait is given.
/// stdin and stdout belong to the command; sqlock writes to stderr. It forwards the signals HUP,
/// INT, QUIT, TERM, USR1, USR2, ALRM, WINCH, TSTP and CONT. The command has SQLOCK_NAME,
/// SQLOCK_TOKEN, SQLOCK_OWNER and SQLOCK_EXPIRES_AT in its environment (the expiry by the clock of
/// this host, without the renewals that follow), and PGAPPNAME (sqlock:NAME) unless it is set. A
/// sqlock run of the same name inside the command enters at once. (A run that would wait for its
/// enclosing run is a usage error, 64: an exclusive run inside one with --shared or --permits,
/// --permits inside an exclusive run, and --quorum inside a run with --quorum. Inside of --permits,
/// --permits takes one more permit, and --shared shares the name; both may wait for ever.) When a
/// signal has ended the command, its process group has --kill-after to end as well; the name is
/// free only then.
///
/// SQL that the command has sent may run on in the server after the process was killed, and after
/// the name is free. On PostgreSQL 14 and later the server notices the loss within a second with
/// PGOPTIONS='-c client_connection_check_interval=1s' in the environment of the command; on any
/// server, let the command bound its statements (statement_timeout, max_execution_time,
/// max_statement_time).
///
/// The lease is renewed while the command runs. If that fails, --signal is sent to the process
/// group of the command --kill-after before the lease ends, and KILL to all its children before it
/// ends: no other process gets the name while any of them lives. If sqlock itself is killed, they
/// die with it. (sqlock cannot kill a process that changes its user, nor one that has left the
/// process group and cleared its environment.) After "sqlock unlock" the command is killed at the
/// next renewal.
#[derive(Args)]
#[command(
    after_help = "Exit code: the command's own, 128+N if signal N killed it; 75 not obtained; 79 lease lost, the \
                        command was stopped; 126, 127 not executable, not found. See sqlock --help."
)]
pub struct Arguments {
    #[command(flatten)]
    pub lease: LeaseArgs,
    /// Exit with 0 if the lease is not obtained.
    #[arg(long, conflicts_with = "conflict_exit_code")]
    pub skip_ok: bool,
    /// The command gets --signal this long before the end of a lease that cannot be renewed, but no
    /// earlier than a third of the TTL before it. KILL follows a tenth of the TTL before the end,
    /// at most 1s; with a shorter --kill-after, only KILL is sent. It is also the time that the
    /// process group has to end when a signal has ended the command, or sqlock was told to end.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse)]
    pub kill_after: Duration,
    /// The signal that asks the command to stop.
    #[arg(long, value_name = "SIGNAL", default_value = "TERM", value_parser = parse_signal)]
    pub signal: Signal,
    /// Keep the name taken for at least this long, also if the command ends earlier: for jobs that
    /// are shorter than the differences between the clocks that start them. A command that cannot
    /// be started keeps nothing.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub hold_at_least: Option<Duration>,
    /// Stop the command and free the name after this time. --signal comes --kill-after before that.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub max_hold: Option<Duration>,
    /// Send --signal to the command when "sqlock unlock --ask" asks for the name. A command that
    /// ignores the signal goes on, and the name stays held. Without this option, only a note is
    /// printed.
    #[arg(long, conflicts_with = "quorum")]
    pub release_on_request: bool,
    /// Acquire again when the lease was lost: of all processes that run this, at most one leads at
    /// a time. After the first lease, wait through outages of any length, unless --nonblock or
    /// --timeout, which bound each acquisition, say otherwise.
    #[arg(long, conflicts_with_all = ["shared", "permits"])]
    pub elect: bool,
    /// Hold the name on a majority of the databases that --database-url or DATABASE_URL names,
    /// URL,URL,URL, of any kinds and independent of each other. Goes on while any minority is down.
    /// Waiters have no order. Create the tables of each database first (sqlock migrate). A database
    /// votes when its tables are older than the TTL: one with younger tables may have lost its
    /// data.
    #[arg(long, conflicts_with_all = ["shared", "permits", "elect"])]
    pub quorum: bool,
    /// Free the name when the command itself has ended, although processes that it has started in
    /// the background still run.
    #[arg(long)]
    pub no_wait: bool,
    /// The command and its arguments, after "--".
    #[arg(last = true, required = true, value_name = "COMMAND", value_hint = clap::ValueHint::AnyPath)]
    pub command: Vec<OsString>,
}

impl Arguments {
    pub fn options(&self) -> LeaseOptions {
        let mut options = self.lease.options();
        if let Some(at_least) = self.hold_at_least {
            options = options.hold_at_least(at_least);
        }
        if let Some(at_most) = self.max_hold {
            options = options.max_hold(at_most);
        }
        options
    }

    /// Returns the exit code for a lease that was not obtained.
    pub fn exit_code_on_conflict(&self) -> u8 {
        if self.skip_ok { 0 } else { self.lease.exit_code_on_conflict() }
    }
}
