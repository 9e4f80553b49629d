//! `sqlock run`: hold the lease, run the command, and have it dead before anyone else can hold.
//!
//! Three processes. This one holds the lease and starts the *command* in a process group of its own (`run/child.rs`), and
//! beside it a *guard* (`run/watchdog.rs`), which knows the deadline and kills the command should this process be stopped,
//! killed, or held up by a database. A terminal is shared with the command as a shell would do it (`run/terminal.rs`).

pub mod child;
mod quorum;
pub mod terminal;
pub mod watchdog;

use std::ffi::OsString;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::Signal;
use sqlock::LossCause;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::acquisition::Terms;
use crate::database::Database;
use crate::duration;
use crate::exit::{self, Failure, Outcome};
use crate::global::Global;
use crate::lease::Held;
use crate::parse::parse_signal;
use crate::signals::{self, Signals};
use crate::stderr::{self, quoted};
use child::{Change, Child};
use terminal::Terminal;
use watchdog::{Guard, Report, Schedule};

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
    terms: Terms,
    /// Exit with 0 when the lease is not obtained: somebody else is doing it.
    #[arg(long, conflicts_with = "conflict_exit_code")]
    skip_ok: bool,
    /// How long before the end of a lease that cannot be renewed the command is told to stop. At most a third of the TTL:
    /// what is longer is shortened.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse)]
    kill_after: Duration,
    /// The signal that tells it to stop.
    #[arg(long, value_name = "SIGNAL", default_value = "TERM", value_parser = parse_signal)]
    signal: Signal,
    /// Keep the name taken for at least this long, also when the command ends earlier: for jobs that are shorter than the
    /// differences between the clocks that start them.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    hold_at_least: Option<Duration>,
    /// Stop the command and free the name after this time. --signal comes --kill-after before that.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    max_hold: Option<Duration>,
    /// Stand again when the lease was lost: of all who run this, one leads at any time. After the first time the database
    /// may be away for any time.
    #[arg(long, conflicts_with_all = ["shared", "permits"])]
    elect: bool,
    /// The databases that --database-url or DATABASE_URL names, URL,URL,URL, of any kinds, are independent of each other: hold
    /// the name on a majority of them, and go on while any minority is down. Between processes that wait there is no order.
    /// Each needs its tables before: one without them may have lost its data, and is refused (78) until sqlock migrate.
    #[arg(long, conflicts_with_all = ["shared", "permits", "hold_at_least", "max_hold", "elect"])]
    quorum: bool,
    /// The command and its arguments, after "--".
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let mut signals = Signals::that_end()?;
    if args.quorum {
        return quorum::run(global, &args, &mut signals).await;
    }
    let db = Database::open(global).await?;
    let mut has_led = false;
    let outcome = loop {
        match hold(&args, &db, &mut signals, has_led).await {
            Ok(Ended { stopped: Some(why), .. }) if args.elect => {
                stderr::warning(&format!("{why}; standing again"));
                has_led = true;
            }
            ended => break ended.and_then(Ended::outcome),
        }
    };
    let _ = timeout(Duration::from_secs(1), db.locks.shutdown()).await;
    outcome
}

/// Gets the lease, runs the command, and gives the lease back.
async fn hold(args: &Arguments, db: &Database, signals: &mut Signals, has_led: bool) -> Result<Ended, Failure> {
    let mut request = args.terms.request(db)?;
    if let Some(at_least) = args.hold_at_least {
        request = request.hold_at_least(at_least);
    }
    if let Some(at_most) = args.max_hold {
        request = request.max_hold(at_most);
    }
    match args.terms.obtain(db, request, signals, has_led).await? {
        Some(lease) => work(args, Held::One(Box::new(lease)), signals).await,
        None => Ok(args.refused()),
    }
}

/// Runs the command under the lease, and gives that back.
async fn work(args: &Arguments, lease: Held, signals: &mut Signals) -> Result<Ended, Failure> {
    let ended = match start(args, &lease, signals) {
        Ok(holding) => holding.until_the_end(&lease, signals).await,
        Err(failure) => Err(failure),
    };
    let name = quoted(lease.name().as_str());
    let released = tokio::select! {
        released = lease.release() => released,
        // Somebody is in a hurry. The name is free after the TTL.
        _ = signals.next_that_ends() => Ok(()),
    };
    match (ended, released) {
        (Ok(Ended { stopped: None, .. }), Err(error)) if error.is_lost() => {
            Err(Failure::new(exit::LOST, format!("{error}, before the command ended")))
        }
        (ended, Err(error)) if !error.is_lost() => {
            let left = duration::show_exactly(args.terms.ttl);
            stderr::warning(&format!("{name} could not be given back: {error}; it is free in {left} at most"));
            ended
        }
        (ended, _) => ended,
    }
}

/// Starts the guard and the command.
fn start(args: &Arguments, lease: &Held, signals: &mut Signals) -> Result<Holding, Failure> {
    signals.and_others()?;
    let ttl = args.terms.ttl.min(args.max_hold.unwrap_or(Duration::MAX));
    let terms = watchdog::Terms::new(ttl, args.kill_after, args.signal);
    // It counts from when the lease was asked for: what is gone of that by now is gone of --max-hold.
    let gone = ttl.saturating_sub(lease.remaining());
    let ends = args.max_hold.map(|at_most| Instant::now() + at_most.saturating_sub(gone));
    let terminal = Terminal::open();
    child::adopt_orphans();
    let guard = Guard::start()?;
    match Child::start(&args.command, lease, &guard, &terms) {
        Ok(child) => Ok(Holding { terms, ends, terminal, guard, child, period: ttl / 30 }),
        Err(failure) => {
            guard.end();
            Err(failure)
        }
    }
}

/// A command at work under a lease.
struct Holding {
    terms: watchdog::Terms,
    /// When `--max-hold` is over.
    ends: Option<Instant>,
    terminal: Terminal,
    guard: Guard,
    child: Child,
    /// How often the guard is told of renewals: often enough never to take a lease that was renewed for one that was not.
    period: Duration,
}

/// How it ended.
struct Ended {
    /// The command's exit code, or that for not having obtained the lease.
    code: u8,
    /// Why it was stopped, if it was.
    stopped: Option<String>,
}

impl Arguments {
    /// How it ends when somebody else has the name.
    fn refused(&self) -> Ended {
        Ended { code: if self.skip_ok { 0 } else { self.terms.refused() }, stopped: None }
    }
}

impl Ended {
    fn outcome(self) -> Outcome {
        match self.stopped {
            Some(reason) => Err(Failure::new(exit::LOST, reason)),
            None => Ok(self.code),
        }
    }
}

impl Holding {
    async fn until_the_end(mut self, lease: &Held, signals: &mut Signals) -> Result<Ended, Failure> {
        let mut tick = interval(self.period.clamp(Duration::from_millis(10), Duration::from_secs(1)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut lost: Option<LossCause> = None;
        let mut warned = false;
        // Once it has ended by a signal, or after one: its children got the same, and may need a while to end, too. They
        // still work under the lease.
        let mut ended: Option<(u8, Instant)> = None;
        let mut pause = Duration::from_millis(10);
        let mut asked_to_end = false;
        let code = loop {
            tokio::select! {
                change = self.child.change(), if ended.is_none() => match change {
                    Change::Exited(code) if !asked_to_end => break code,
                    Change::Exited(code) => ended = Some((code, Instant::now() + self.terms.kill_after)),
                    Change::Killed(signal) => {
                        ended = Some((exit::of_signal(signal), Instant::now() + self.terms.kill_after));
                    }
                    Change::Stopped(signal) => self.follow(signal, lease),
                    Change::OfAnother(pid) if pid == self.guard.pid() => self.replace_guard(lease)?,
                    Change::OfAnother(_) => {}
                },
                () = sleep(pause), if ended.is_some() => match ended {
                    Some((code, _)) if !self.child.has_group() => break code,
                    Some((_, until)) if Instant::now() >= until => self.child.kill(),
                    // To look at the group may mean to read all of /proc.
                    _ => pause = (pause * 2).min(Duration::from_millis(160)),
                },
                signal = signals.next() => {
                    asked_to_end |= signals::asks_for_end(signal);
                    self.pass_on(signal, lease);
                }
                _ = tick.tick(), if lost.is_none() => {
                    let schedule = Schedule::until(lease, &self.terms);
                    self.guard.tell(&self.child, &schedule);
                    if schedule.is_over() {
                        // The guard has done it, unless somebody has stopped the guard.
                        self.child.kill();
                    }
                    if schedule.is_ending() && lease.is_held() && !warned {
                        warned = true;
                        self.warn(lease);
                    }
                }
                cause = lease.lost(), if lost.is_none() => {
                    lost = Some(cause);
                    self.child.kill();
                }
            }
        };
        self.terminal.take_back(self.child.group());
        let at_max_hold = self.is_at_max_hold();
        let why = match (lost, self.guard.end()) {
            (None, None) => None,
            (Some(LossCause::MaxHold), _) | (None, Some(_)) if at_max_hold => Some(LossCause::MaxHold.to_string()),
            (None, Some(Report::Told | Report::Killed)) => Some("it could not be renewed".into()),
            (Some(LossCause::Superseded), _) => Some("it was taken away with \"sqlock unlock\", or taken over".into()),
            (Some(cause), _) => Some(cause.to_string()),
        };
        if why.is_some() {
            // It may have obeyed, and its children not.
            self.child.kill();
        }
        let name = quoted(lease.name().as_str());
        Ok(Ended { code, stopped: why.map(|why| format!("the lease on {name} ended: {why}; the command was stopped")) })
    }

    /// Whether `--max-hold` is what stops it.
    fn is_at_max_hold(&self) -> bool {
        self.ends.is_some_and(|ends| Instant::now() + self.terms.notice() >= ends)
    }

    fn warn(&self, lease: &Held) {
        let name = quoted(lease.name().as_str());
        let left = duration::show(lease.remaining());
        stderr::warning(&if self.is_at_max_hold() {
            format!("the lease on {name} reaches its --max-hold in {left}: stopping the command")
        } else {
            format!("the lease on {name} could not be renewed and ends in {left}: stopping the command")
        });
    }

    /// Without a guard the promise cannot be kept.
    fn replace_guard(&mut self, lease: &Held) -> Result<(), Failure> {
        match Guard::start() {
            Ok(guard) => self.guard = guard,
            Err(failure) => {
                self.child.kill();
                return Err(failure);
            }
        }
        self.guard.tell(&self.child, &Schedule::until(lease, &self.terms));
        Ok(())
    }

    /// A signal for the command. A terminal sends its own to our process group only, never to the command's as well,
    /// unless the command has the terminal: then only to that. So none arrives twice.
    fn pass_on(&self, signal: Signal, lease: &Held) {
        if signal != Signal::SIGCONT || lease.is_held() {
            self.child.signal(signal);
        }
    }

    /// The command was stopped. When a terminal did it, stop too, as a shell expects of the job it has started; and let
    /// the command go on only if the lease is still held afterwards.
    fn follow(&self, signal: Signal, lease: &Held) {
        match signal {
            // It reads from the terminal (or sets it), which only a foreground group may: make it the foreground.
            Signal::SIGTTIN | Signal::SIGTTOU if self.terminal.is_ours() => self.terminal.give(self.child.group()),
            Signal::SIGTSTP | Signal::SIGTTIN | Signal::SIGTTOU if self.terminal.is_there() => {
                let had_it = self.terminal.take_back(self.child.group());
                signals::suspend();
                if had_it && lease.is_held() && self.terminal.is_ours() {
                    self.terminal.give(self.child.group());
                }
            }
            // Somebody has stopped the command itself, and will continue it.
            _ => return,
        }
        if lease.is_held() {
            self.child.signal(Signal::SIGCONT);
        } else {
            self.child.kill();
        }
    }
}
