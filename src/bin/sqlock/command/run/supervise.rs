//! Supervises the command while the lease is held, from its start to its end.

use std::time::Duration;

use sqlock::{Error, LossCause};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::arguments::Arguments;
use super::child::{self, Child, ChildEvent};
use super::reaper::Reaper;
use super::schedule::{KillSchedule, KillTerms};
use super::terminal::Terminal;
use super::watchdog::{Intervention, Watchdog};
use crate::duration;
use crate::environment;
use crate::exit::{self, Failure, Outcome};
use crate::lease::HeldLease;
use crate::process_list;
use crate::signals::{self, Signals, Suspension};
use crate::stderr::{self, quote};
use nix::sys::signal::Signal;

/// Runs the command under the lease and releases the lease. Frees the name by `evict` if the
/// command could not be started, unless an enclosing run holds the name.
pub async fn supervise<T>(
    args: &Arguments,
    lease: HeldLease,
    evict: impl Future<Output = sqlock::Result<T>>,
    signals: &mut Signals,
    reaper: &mut Reaper,
) -> Result<Completion, Failure> {
    let started = start(args, &lease, signals, reaper);
    // After a loss, the token may still hold the name: sqlock was paused until shortly before the
    // end of the lease.
    let never_started = started.is_err();
    // An eviction by the token would end the lease of the enclosing run, too.
    let can_evict = !environment::is_enclosing(lease.owner());
    let mut ended = match started {
        Ok(supervisor) => supervisor.run_to_end(&lease, signals).await,
        Err(failure) if failure.code == exit::LOST => Ok(Completion::stopped(failure.message)),
        Err(failure) => Err(failure),
    };
    let name = quote(lease.name().as_str());
    if never_started && can_evict {
        free_after_failed_start(args, signals, evict).await;
    }
    // The release is repeated while the database does not answer, and the lease may expire
    // meanwhile.
    let was_held = lease.is_held();
    let released = tokio::select! {
        released = lease.release() => released,
        // A signal ends the release: the name is free after the TTL.
        _ = signals.next_termination() => {
            if let Ok(completion) = &mut ended {
                completion.is_interrupted = true;
            }
            Ok(())
        }
    };
    match (ended, released) {
        (Ok(completion @ Completion { stopped: None, .. }), Err(error)) if error.is_lost() => {
            if !was_held || matches!(error, Error::Lost { cause: LossCause::Superseded, .. }) {
                return Err(Failure::new(exit::LOST, format!("{}, before the command ended", error.report())));
            }
            stderr::print_warning(&format!("cannot release the lease on {name}: no answer came before it ended"));
            Ok(completion)
        }
        (ended, Err(error)) if !error.is_lost() => {
            let left = duration::format_exact(args.lease.ttl);
            let error = error.report();
            stderr::print_warning(&format!("cannot release the lease on {name}: {error}; it ends in {left} at most"));
            ended
        }
        (ended, _) => ended,
    }
}

/// Frees the name by `evict`: --hold-at-least keeps it for a command that has run. The lease is
/// evicted before its release, after which no owner leads to all leases of a majority.
async fn free_after_failed_start<T>(
    args: &Arguments,
    signals: &mut Signals,
    evict: impl Future<Output = sqlock::Result<T>>,
) {
    if let Some(at_least) = args.hold_at_least
        && let Ok(Err(error)) = signals.unless_terminated(evict).await
    {
        let (name, hold_time) = (quote(&args.lease.name), duration::format_exact(at_least));
        stderr::print_warning(&format!("cannot free {name}, which stays taken for {hold_time}: {}", error.report()));
    }
}

/// Starts the watchdog and the command.
fn start<'a>(
    args: &Arguments,
    lease: &HeldLease,
    signals: &mut Signals,
    reaper: &'a mut Reaper,
) -> Result<Supervisor<'a>, Failure> {
    signals.listen_to_forwarded()?;
    reaper.forget_changes();
    let ttl = args.lease.ttl.min(args.max_hold.unwrap_or(Duration::MAX));
    let terms = KillTerms::new(ttl, args.kill_after, args.signal);
    // --max-hold counts from the grant. The time that has passed since is at most what the lease has
    // lost of its TTL. The clock is read first: a pause in between must not move the end beyond that
    // of the lease.
    let now = Instant::now();
    let elapsed = ttl.saturating_sub(lease.remaining());
    let max_hold_end = args.max_hold.map(|at_most| now + at_most.saturating_sub(elapsed));
    let terminal = Terminal::open();
    child::adopt_orphans();
    let watchdog = Watchdog::start(reaper)?;
    match Child::start(&args.command, lease, reaper, &watchdog, &terms) {
        Ok(child) => Ok(Supervisor {
            no_wait: args.no_wait,
            ends_on_request: args.release_on_request,
            terms,
            max_hold_end,
            terminal,
            is_hung_up: false,
            was_suspended: false,
            reaper,
            watchdog,
            watchdog_started: Instant::now(),
            short_lived: 0,
            child,
            period: ttl / 30,
        }),
        Err(failure) => {
            watchdog.stop();
            Err(failure)
        }
    }
}

/// The pause between two checks of the process group, at first and at most.
const SHORT_PAUSE: Duration = Duration::from_millis(10);
const LONG_PAUSE: Duration = Duration::from_millis(320);

/// How long the process group may outlive its command before a note says so.
const NOTE_AFTER: Duration = Duration::from_secs(2);

/// How many watchdogs in a row may die within a second of their start.
const MAX_SHORT_LIVED: u32 = 10;

/// The end of the command, while processes of its group may still run.
struct Ended {
    code: u8,
    since: Instant,
    /// When the group is killed, after it or the command was signaled.
    kill_at: Option<Instant>,
    next_look: Instant,
    pause: Duration,
    is_noted: bool,
}

/// Returns when to look next whether the process group has ended.
fn next_look(ended: &Option<Ended>) -> Instant {
    ended.as_ref().map_or_else(Instant::now, |ended| ended.next_look)
}

impl Ended {
    /// Looks again soon, and then at growing intervals: each check may read all of /proc.
    fn look_soon(&mut self) {
        (self.next_look, self.pause) = (Instant::now() + SHORT_PAUSE, SHORT_PAUSE);
    }

    /// Kills the group if it is time, or prints a note that sqlock waits for it.
    fn act_if_due(&mut self, child: &Child, lease: &HeldLease) {
        self.next_look = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(LONG_PAUSE);
        if self.kill_at.is_some_and(|at| Instant::now() >= at) {
            child.kill();
        } else if self.kill_at.is_none() && !self.is_noted && self.since.elapsed() >= NOTE_AFTER {
            self.is_noted = true;
            let name = quote(lease.name().as_str());
            stderr::print_note(&format!(
                "the command has ended; {name} stays held until its background processes have ended (see --no-wait)"
            ));
        }
    }
}

/// A running command, its lease and its watchdog.
struct Supervisor<'a> {
    /// Whether to release the lease when the command has ended, whatever its group does.
    no_wait: bool,
    /// Whether to end the command when the release is requested.
    ends_on_request: bool,
    terms: KillTerms,
    /// The end of `--max-hold`.
    max_hold_end: Option<Instant>,
    terminal: Terminal,
    /// Whether the command was hung up, because no shell can give it the terminal.
    is_hung_up: bool,
    /// Whether a stop of the command has stopped sqlock, too.
    was_suspended: bool,
    reaper: &'a mut Reaper,
    watchdog: Watchdog,
    watchdog_started: Instant,
    /// How many watchdogs in a row have died soon after their start.
    short_lived: u32,
    child: Child,
    /// How often the watchdog receives the deadline: often enough that it never acts on the
    /// deadline before a renewal.
    period: Duration,
}

/// What has happened to the command and its lease so far.
#[derive(Default)]
struct Progress {
    /// Set when the command has ended. Its children may still work under the lease.
    ended: Option<Ended>,
    lost: Option<LossCause>,
    /// Why the command cannot be supervised any longer.
    failure: Option<Failure>,
    /// Whether changes of children are no longer reported.
    has_reaper_ended: bool,
    /// Whether the command was told to end.
    is_terminating: bool,
    /// Whether a signal told sqlock to end.
    is_interrupted: bool,
    /// Whether the release of the lease was requested.
    is_requested: bool,
    /// Whether the warning before the end of the lease was printed.
    is_warned: bool,
    /// Whether `--max-hold` was about to end when the command had to be told to end.
    is_at_max_hold: Option<bool>,
    /// Whether the time to kill the command has passed.
    is_overdue: bool,
}

/// The result of a run.
pub struct Completion {
    /// The exit code of the command, or the code for a lease that was not obtained.
    pub code: u8,
    /// Why the command was stopped, if at all.
    pub stopped: Option<String>,
    /// Whether a signal told sqlock to end.
    pub is_interrupted: bool,
}

impl Completion {
    /// Makes the result of a run without a lease.
    pub fn not_obtained(args: &Arguments) -> Self {
        Self { code: args.exit_code_on_conflict(), stopped: None, is_interrupted: false }
    }

    /// Makes the result of a run whose lease ended.
    fn stopped(reason: String) -> Self {
        Self { code: exit::LOST, stopped: Some(reason), is_interrupted: false }
    }

    pub fn outcome(self) -> Outcome {
        match self.stopped {
            Some(reason) => Err(Failure::new(exit::LOST, reason)),
            None => Ok(self.code),
        }
    }
}

impl Supervisor<'_> {
    async fn run_to_end(mut self, lease: &HeldLease, signals: &mut Signals) -> Result<Completion, Failure> {
        let mut tick = interval(self.period.clamp(Duration::from_millis(10), Duration::from_secs(1)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut progress = Progress::default();
        let code = loop {
            tokio::select! {
                change = self.reaper.next_change(), if !progress.has_reaper_ended => {
                    let event = self.child.event(change);
                    if let Some(code) = self.handle_child(event, lease, &mut progress) {
                        break code;
                    }
                    // The command was continued.
                    if std::mem::take(&mut self.was_suspended) {
                        signals.discard_continue().await;
                    }
                }
                () = sleep_until(next_look(&progress.ended)), if progress.ended.is_some() => {
                    let Some(ended) = &mut progress.ended else { continue };
                    if !self.child.has_group() {
                        break ended.code;
                    }
                    ended.act_if_due(&self.child, lease);
                }
                signal = signals.next() => self.handle_signal(signal, lease, &mut progress),
                () = lease.revoke_requested(), if !progress.is_requested => self.handle_request(lease, &mut progress),
                _ = tick.tick(), if progress.lost.is_none() => self.pass_deadline(lease, &mut progress),
                cause = lease.lost(), if progress.lost.is_none() => {
                    progress.lost = Some(cause);
                    self.child.kill();
                }
            }
        };
        self.complete(code, lease, progress)
    }

    /// Handles a change of a child. Returns the exit code if nothing more is waited for.
    fn handle_child(&mut self, event: ChildEvent, lease: &HeldLease, progress: &mut Progress) -> Option<u8> {
        match event {
            ChildEvent::Exited(code) if self.no_wait && !progress.is_terminating => return Some(code),
            ChildEvent::Exited(code) => progress.ended = Some(self.wait_for_group(code, progress.is_terminating)),
            ChildEvent::Killed(signal) => {
                if self.terminal.reclaim(self.child.group()) {
                    self.terminal.restore_modes();
                }
                progress.ended = Some(self.wait_for_group(exit::from_signal(signal), true));
            }
            ChildEvent::Stopped(signal) => self.follow_stop(signal, lease),
            ChildEvent::OtherExited(pid) if pid == self.watchdog.pid() => {
                if let Err(error) = self.restart_watchdog(lease) {
                    // The lease is released when the killed command is dead.
                    (progress.is_terminating, progress.failure) = (true, Some(error));
                }
            }
            // An orphan of the command ended, which may have been the last of the group.
            ChildEvent::OtherExited(_) => {
                if let Some(ended) = &mut progress.ended {
                    ended.look_soon();
                }
            }
            ChildEvent::OtherStopped => {}
            // The exit code of the command will not be known.
            ChildEvent::ReaperEnded => {
                progress.has_reaper_ended = true;
                progress.ended.get_or_insert_with(|| self.wait_for_group(exit::SYSTEM, progress.is_terminating));
            }
        }
        None
    }

    /// Handles a signal to sqlock.
    fn handle_signal(&self, signal: Signal, lease: &HeldLease, progress: &mut Progress) {
        // A command may take HUP for "reload" and QUIT for "report".
        if !matches!(signal, Signal::SIGINT | Signal::SIGTERM) {
            return self.forward(signal, lease);
        }
        (progress.is_terminating, progress.is_interrupted) = (true, true);
        self.terminate(signal, lease, progress);
    }

    /// Handles a request to release the lease.
    fn handle_request(&self, lease: &HeldLease, progress: &mut Progress) {
        progress.is_requested = true;
        let name = quote(lease.name().as_str());
        if self.ends_on_request {
            stderr::print_note(&format!("release requested: {name}; stopping the command"));
            progress.is_terminating = true;
            self.terminate(self.terms.signal, lease, progress);
        } else {
            stderr::print_note(&format!("release requested: {name}; the command goes on (see --release-on-request)"));
        }
    }

    /// Passes the deadline of the lease to the watchdog, and kills the command after it.
    fn pass_deadline(&mut self, lease: &HeldLease, progress: &mut Progress) {
        let schedule = KillSchedule::for_lease(lease, &self.terms);
        self.watchdog.update(self.child.process_tree(), &schedule);
        if schedule.is_kill_due() {
            // The watchdog has already killed the command, unless the watchdog was stopped.
            self.child.kill();
            progress.is_overdue = true;
        }
        if schedule.is_signal_due() {
            progress.is_at_max_hold.get_or_insert_with(|| self.is_near_max_hold());
        }
        if schedule.is_signal_due() && lease.is_held() && !progress.is_warned {
            progress.is_warned = true;
            self.warn_before_signal(lease);
        }
    }

    /// Stops the watchdog and makes the result.
    fn complete(self, code: u8, lease: &HeldLease, progress: Progress) -> Result<Completion, Failure> {
        self.terminal.reclaim(self.child.group());
        let at_max_hold = progress.is_at_max_hold.unwrap_or_else(|| self.is_near_max_hold());
        let intervention = self.watchdog.stop().or(progress.is_overdue.then_some(Intervention::Killed));
        let reason = match (progress.lost, intervention) {
            (None, None) => None,
            (Some(LossCause::MaxHold), _) | (None, Some(_)) if at_max_hold => Some(LossCause::MaxHold.to_string()),
            (None, Some(Intervention::Signaled | Intervention::Killed)) => Some("it could not be renewed".into()),
            (Some(LossCause::Superseded), _) => Some("it was taken away with \"sqlock unlock\", or taken over".into()),
            (Some(cause), _) => Some(cause.to_string()),
        };
        if reason.is_some() {
            // The command may have obeyed the signal while its children did not.
            self.child.kill();
        }
        if let Some(failure) = progress.failure {
            return Err(failure);
        }
        let name = quote(lease.name().as_str());
        Ok(Completion {
            code,
            stopped: reason.map(|reason| {
                let end = if self.child.is_out_of_reach() { "could not be stopped" } else { "was stopped" };
                format!("the lease on {name} ended: {reason}; the command {end}")
            }),
            is_interrupted: progress.is_interrupted,
        })
    }

    /// Waits for the process group from now on, with a limit if the group was signaled.
    fn wait_for_group(&self, code: u8, is_terminating: bool) -> Ended {
        // Ctrl-C must reach sqlock, because no background process reads the terminal.
        self.terminal.reclaim(self.child.group());
        let now = Instant::now();
        let kill_at = is_terminating.then(|| now + self.terms.kill_after);
        Ended { code, since: now, kill_at, next_look: now, pause: SHORT_PAUSE, is_noted: false }
    }

    /// Returns whether `--max-hold` stops the command.
    fn is_near_max_hold(&self) -> bool {
        self.max_hold_end.is_some_and(|end| Instant::now() + self.terms.signal_lead >= end)
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

    /// Replaces a watchdog that has died. Kills the command if there is no new one.
    fn restart_watchdog(&mut self, lease: &HeldLease) -> Result<(), Failure> {
        let is_short = self.watchdog_started.elapsed() < Duration::from_secs(1);
        self.short_lived = if is_short { self.short_lived + 1 } else { 0 };
        let started = if self.short_lived < MAX_SHORT_LIVED {
            Watchdog::start(self.reaper)
        } else {
            Err(Failure::system(format!(
                "the watchdog has died {MAX_SHORT_LIVED} times within a second of its start: look for a process that \
                 kills it"
            )))
        };
        self.watchdog_started = Instant::now();
        match started {
            Ok(watchdog) => self.watchdog = watchdog,
            Err(failure) => {
                self.child.kill();
                return Err(failure);
            }
        }
        self.watchdog.update(self.child.process_tree(), &KillSchedule::for_lease(lease, &self.terms));
        Ok(())
    }

    /// Sends a signal that should end the command, and limits the time of its process group after
    /// the end of the command.
    fn terminate(&self, signal: Signal, lease: &HeldLease, progress: &mut Progress) {
        if let Some(ended) = &mut progress.ended {
            ended.kill_at.get_or_insert(Instant::now() + self.terms.kill_after);
        }
        self.forward(signal, lease);
        if self.child.is_stopped() {
            // Otherwise the signal would wait with it.
            self.forward(Signal::SIGCONT, lease);
        }
    }

    /// Sends a signal to the command. A terminal signals the foreground group only, either sqlock's
    /// or the command's, so no signal arrives twice.
    fn forward(&self, signal: Signal, lease: &HeldLease) {
        if signal != Signal::SIGCONT || lease.is_held() {
            self.child.signal(signal);
        }
    }

    /// Handles a stop of the command. Stops sqlock too if a terminal stopped the command, as a
    /// shell expects of its job. Continues the command only if the lease is still held afterwards.
    fn follow_stop(&mut self, signal: i32, lease: &HeldLease) {
        let Ok(signal) = Signal::try_from(signal) else { return };
        if !self.child.is_stopped() {
            // It was continued before sqlock learned of the stop, for example by a forwarded
            // SIGCONT.
            return;
        }
        match signal {
            // The command reads from or configures the terminal, which needs the foreground.
            Signal::SIGTTIN | Signal::SIGTTOU if self.terminal.is_foreground() => {
                self.terminal.save_modes();
                self.terminal.set_foreground(self.child.group());
            }
            // The signal was sent before the command got the foreground.
            Signal::SIGTTIN if self.terminal.has_foreground(self.child.group()) => {}
            Signal::SIGTSTP | Signal::SIGTTIN | Signal::SIGTTOU if self.terminal.is_available() => {
                let had_it = self.terminal.reclaim(self.child.group());
                if signal != Signal::SIGTSTP && process_list::is_own_group_orphaned() {
                    // No shell can give the terminal to this job. The kernel sends SIGHUP to a
                    // stopped job whose shell ends.
                    if std::mem::replace(&mut self.is_hung_up, true) {
                        return self.child.kill();
                    }
                    self.child.signal(Signal::SIGHUP);
                } else if self.child.is_stopped() {
                    // A nested run sends SIGTTOU to its group, which has the foreground, after
                    // Ctrl-Z.
                    let stops_job = signal == Signal::SIGTSTP || had_it;
                    signals::suspend(if stops_job { Suspension::Job } else { Suspension::UntilForeground });
                    self.was_suspended = true;
                }
                if had_it && lease.is_held() && self.terminal.is_foreground() {
                    self.terminal.set_foreground(self.child.group());
                }
            }
            // A signal from elsewhere stopped the command; its sender continues it.
            _ => return,
        }
        if lease.is_held() {
            self.child.signal(Signal::SIGCONT);
        } else {
            self.child.kill();
        }
    }
}
