//! The options of `sqlock run`.

use std::ffi::OsString;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::Signal;

use crate::acquisition::LeaseArgs;
use crate::duration;
use crate::parse::parse_signal;

/// Hold the lease on a name while a command runs.
///
/// Waits for its turn, runs the command, and frees the name when the command has ended. stdin and stdout are the
/// command's; sqlock speaks on stderr. Signals sent to sqlock go on to the command. The command finds SQLOCK_NAME,
/// SQLOCK_TOKEN, SQLOCK_OWNER and SQLOCK_EXPIRES_AT in its environment; a sqlock run of the same name inside it enters at
/// once. (But what could only wait for itself is a mistake, 64: to hold alone inside of --shared or --permits, and --permits
/// inside of a run that holds alone. Permits inside of permits are more permits, and wait until there are some.) When a signal has ended the command, its process group has --kill-after to end as well; only then is the name free.
///
/// The lease is renewed for as long as the command runs. Should that fail, --signal is sent to the command and all its
/// children --kill-after before the lease ends, and KILL before it ends: nobody else can hold the name while any of them
/// lives. If sqlock itself is killed, they die with it. (A process that changes its user cannot be killed, nor one that has
/// left the process group and cleared its environment.) After "sqlock unlock" the command is killed as soon as sqlock
/// learns of it, at the next renewal.
#[derive(Args)]
#[command(
    after_help = "Exit code: the command's own, 128+N if signal N killed it; 75 not obtained; 79 lease lost, the \
                        command was stopped; 126, 127 not executable, not found. See sqlock --help."
)]
pub struct Arguments {
    #[command(flatten)]
    pub lease: LeaseArgs,
    /// Exit with 0 when the lease is not obtained: somebody else is doing it.
    #[arg(long, conflicts_with = "conflict_exit_code")]
    pub skip_ok: bool,
    /// How long before the end of a lease that cannot be renewed the command is told to stop. At most a third of the TTL:
    /// what is longer is shortened.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse)]
    pub kill_after: Duration,
    /// The signal that tells it to stop.
    #[arg(long, value_name = "SIGNAL", default_value = "TERM", value_parser = parse_signal)]
    pub signal: Signal,
    /// Keep the name taken for at least this long, also when the command ends earlier: for jobs that are shorter than the
    /// differences between the clocks that start them.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub hold_at_least: Option<Duration>,
    /// Stop the command and free the name after this time. --signal comes --kill-after before that.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub max_hold: Option<Duration>,
    /// Stand again when the lease was lost: of all who run this, one leads at any time. After the first time the database
    /// may be away for any time.
    #[arg(long, conflicts_with_all = ["shared", "permits"])]
    pub elect: bool,
    /// The databases that --database-url or DATABASE_URL names, URL,URL,URL, of any kinds, are independent of each other: hold
    /// the name on a majority of them, and go on while any minority is down. Between processes that wait there is no order.
    /// Each needs its tables before: one without them may have lost its data, and is refused (78) until sqlock migrate.
    #[arg(long, conflicts_with_all = ["shared", "permits", "hold_at_least", "max_hold", "elect"])]
    pub quorum: bool,
    /// The command and its arguments, after "--".
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

impl Arguments {
    /// How it ends when somebody else has the name.
    pub fn exit_code_on_conflict(&self) -> u8 {
        if self.skip_ok { 0 } else { self.lease.exit_code_on_conflict() }
    }
}
