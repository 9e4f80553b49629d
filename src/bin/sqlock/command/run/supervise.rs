//! The command at work under a lease, from its start to its end.

use std::time::Duration;

use sqlock::LossCause;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use super::arguments::Arguments;
use super::child::{self, Child, ChildEvent};
use super::schedule::{KillSchedule, KillTerms};
use super::terminal::Terminal;
use super::watchdog::{Intervention, Watchdog};
use crate::duration;
use crate::exit::{self, Failure, Outcome};
use crate::lease::HeldLease;
use crate::signals::{self, Signals};
use crate::stderr::{self, quote};
use nix::sys::signal::Signal;

/// Runs the command under the lease, and gives that back.
pub async fn supervise(args: &Arguments, lease: HeldLease, signals: &mut Signals) -> Result<Completion, Failure> {
    let ended = match start(args, &lease, signals) {
        Ok(holding) => holding.run_to_end(&lease, signals).await,
        Err(failure) => Err(failure),
    };
    let name = quote(lease.name().as_str());
    let released = tokio::select! {
        released = lease.release() => released,
        // Somebody is in a hurry. The name is free after the TTL.
        _ = signals.next_termination() => Ok(()),
    };
    match (ended, released) {
        (Ok(Completion { stopped: None, .. }), Err(error)) if error.is_lost() => {
            Err(Failure::new(exit::LOST, format!("{error}, before the command ended")))
        }
        (ended, Err(error)) if !error.is_lost() => {
            let left = duration::format_exact(args.lease.ttl);
            stderr::print_warning(&format!("{name} could not be given back: {error}; it is free in {left} at most"));
            ended
        }
        (ended, _) => ended,
    }
}

/// Starts the watchdog and the command.
fn start(args: &Arguments, lease: &HeldLease, signals: &mut Signals) -> Result<Supervisor, Failure> {
    signals.listen_to_forwarded()?;
    let ttl = args.lease.ttl.min(args.max_hold.unwrap_or(Duration::MAX));
    let terms = KillTerms::new(ttl, args.kill_after, args.signal);
    // It counts from when the lease was asked for: what is gone of that by now is gone of --max-hold.
    let gone = ttl.saturating_sub(lease.remaining());
    let max_hold_end = args.max_hold.map(|at_most| Instant::now() + at_most.saturating_sub(gone));
    let terminal = Terminal::open();
    child::adopt_orphans();
    let watchdog = Watchdog::start()?;
    match Child::start(&args.command, lease, &watchdog, &terms) {
        Ok(child) => Ok(Supervisor { terms, max_hold_end, terminal, watchdog, child, period: ttl / 30 }),
        Err(failure) => {
            watchdog.stop();
            Err(failure)
        }
    }
}

/// A command at work under a lease.
struct Supervisor {
    terms: KillTerms,
    /// When `--max-hold` is over.
    max_hold_end: Option<Instant>,
    terminal: Terminal,
    watchdog: Watchdog,
    child: Child,
    /// How often the watchdog is told of renewals: often enough never to take a lease that was renewed for one that was not.
    period: Duration,
}

/// How it ended.
pub struct Completion {
    /// The command's exit code, or that for not having obtained the lease.
    pub code: u8,
    /// Why it was stopped, if it was.
    pub stopped: Option<String>,
}

impl Completion {
    /// The lease was not obtained.
    pub fn not_obtained(args: &Arguments) -> Self {
        Self { code: args.exit_code_on_conflict(), stopped: None }
    }

    pub fn outcome(self) -> Outcome {
        match self.stopped {
            Some(reason) => Err(Failure::new(exit::LOST, reason)),
            None => Ok(self.code),
        }
    }
}

impl Supervisor {
    async fn run_to_end(mut self, lease: &HeldLease, signals: &mut Signals) -> Result<Completion, Failure> {
        let mut tick = interval(self.period.clamp(Duration::from_millis(10), Duration::from_secs(1)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut lost: Option<LossCause> = None;
        let mut is_warned = false;
        // Once it has ended by a signal, or after one: its children got the same, and may need a while to end, too. They
        // still work under the lease.
        let mut ended: Option<(u8, Instant)> = None;
        let mut pause = Duration::from_millis(10);
        let mut is_terminating = false;
        let code = loop {
            tokio::select! {
                change = self.child.next_event(), if ended.is_none() => match change {
                    ChildEvent::Exited(code) if !is_terminating => break code,
                    ChildEvent::Exited(code) => ended = Some((code, Instant::now() + self.terms.kill_after)),
                    ChildEvent::Killed(signal) => {
                        ended = Some((exit::from_signal(signal), Instant::now() + self.terms.kill_after));
                    }
                    ChildEvent::Stopped(signal) => self.follow_stop(signal, lease),
                    ChildEvent::OtherExited(pid) if pid == self.watchdog.pid() => self.restart_watchdog(lease)?,
                    ChildEvent::OtherExited(_) => {}
                },
                () = sleep(pause), if ended.is_some() => match ended {
                    Some((code, _)) if !self.child.has_group() => break code,
                    Some((_, until)) if Instant::now() >= until => self.child.kill(),
                    // To look at the group may mean to read all of /proc.
                    _ => pause = (pause * 2).min(Duration::from_millis(160)),
                },
                signal = signals.next() => {
                    is_terminating |= signals::is_termination(signal);
                    self.forward(signal, lease);
                }
                _ = tick.tick(), if lost.is_none() => {
                    let schedule = KillSchedule::for_lease(lease, &self.terms);
                    self.watchdog.update(self.child.process_tree(), &schedule);
                    if schedule.is_kill_due() {
                        // The watchdog has done it, unless somebody has stopped the watchdog.
                        self.child.kill();
                    }
                    if schedule.is_signal_due() && lease.is_held() && !is_warned {
                        is_warned = true;
                        self.warn_before_signal(lease);
                    }
                }
                cause = lease.lost(), if lost.is_none() => {
                    lost = Some(cause);
                    self.child.kill();
                }
            }
        };
        self.terminal.reclaim(self.child.group());
        let at_max_hold = self.is_near_max_hold();
        let why = match (lost, self.watchdog.stop()) {
            (None, None) => None,
            (Some(LossCause::MaxHold), _) | (None, Some(_)) if at_max_hold => Some(LossCause::MaxHold.to_string()),
            (None, Some(Intervention::Signaled | Intervention::Killed)) => Some("it could not be renewed".into()),
            (Some(LossCause::Superseded), _) => Some("it was taken away with \"sqlock unlock\", or taken over".into()),
            (Some(cause), _) => Some(cause.to_string()),
        };
        if why.is_some() {
            // It may have obeyed, and its children not.
            self.child.kill();
        }
        let name = quote(lease.name().as_str());
        Ok(Completion {
            code,
            stopped: why.map(|why| format!("the lease on {name} ended: {why}; the command was stopped")),
        })
    }

    /// Whether `--max-hold` is what stops it.
    fn is_near_max_hold(&self) -> bool {
        self.max_hold_end.is_some_and(|ends| Instant::now() + self.terms.signal_lead() >= ends)
    }

    fn warn_before_signal(&self, lease: &HeldLease) {
        let name = quote(lease.name().as_str());
        let left = duration::format(lease.remaining());
        stderr::print_warning(&if self.is_near_max_hold() {
            format!("the lease on {name} reaches its --max-hold in {left}: stopping the command")
        } else {
            format!("the lease on {name} could not be renewed and ends in {left}: stopping the command")
        });
    }

    /// Without a watchdog the promise cannot be kept.
    fn restart_watchdog(&mut self, lease: &HeldLease) -> Result<(), Failure> {
        match Watchdog::start() {
            Ok(watchdog) => self.watchdog = watchdog,
            Err(failure) => {
                self.child.kill();
                return Err(failure);
            }
        }
        self.watchdog.update(self.child.process_tree(), &KillSchedule::for_lease(lease, &self.terms));
        Ok(())
    }

    /// A signal for the command. A terminal sends its own to our process group only, never to the command's as well,
    /// unless the command has the terminal: then only to that. So none arrives twice.
    fn forward(&self, signal: Signal, lease: &HeldLease) {
        if signal != Signal::SIGCONT || lease.is_held() {
            self.child.signal(signal);
        }
    }

    /// The command was stopped. When a terminal did it, stop too, as a shell expects of the job it has started; and let
    /// the command go on only if the lease is still held afterwards.
    fn follow_stop(&self, signal: Signal, lease: &HeldLease) {
        match signal {
            // It reads from the terminal (or sets it), which only a foreground group may: make it the foreground.
            Signal::SIGTTIN | Signal::SIGTTOU if self.terminal.is_foreground() => {
                self.terminal.set_foreground(self.child.group())
            }
            Signal::SIGTSTP | Signal::SIGTTIN | Signal::SIGTTOU if self.terminal.is_available() => {
                let had_it = self.terminal.reclaim(self.child.group());
                signals::suspend();
                if had_it && lease.is_held() && self.terminal.is_foreground() {
                    self.terminal.set_foreground(self.child.group());
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
