//! The signals sent to this process, as a stream.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::getpgrp;
use tokio::signal::unix::{self, SignalKind};
use tokio::time::timeout;

use crate::exit::Failure;

/// The signals that end a wait, and that sqlock forwards to the command.
const TERMINATION: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];

/// The signals that sqlock only forwards.
const FORWARDED: [Signal; 6] =
    [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGALRM, Signal::SIGWINCH, Signal::SIGTSTP, Signal::SIGCONT];

/// Returns whether the signal asks the process to end.
pub fn is_termination(signal: Signal) -> bool {
    TERMINATION.contains(&signal)
}

/// The signals sent to this process, one after the other.
///
/// A signal that was ignored when sqlock started (nohup, a shell's background job) stays ignored,
/// here and in the command.
pub struct Signals {
    streams: Vec<(Signal, unix::Signal)>,
    /// Handles SIGCHLD, which some supervisors ignore: the kernel keeps no exit status for a parent
    /// that ignores the signal.
    _child_exits: unix::Signal,
}

impl Signals {
    /// Listens for the signals that end a wait.
    pub fn listen() -> Result<Self, Failure> {
        let mut signals = Self { streams: Vec::new(), _child_exits: open_stream(Signal::SIGCHLD)? };
        signals.listen_for(&TERMINATION)?;
        Ok(signals)
    }

    /// Listens for the signals that are only forwarded as well.
    pub fn listen_to_forwarded(&mut self) -> Result<(), Failure> {
        self.listen_for(&FORWARDED)
    }

    fn listen_for(&mut self, wanted: &[Signal]) -> Result<(), Failure> {
        let ignored = read_ignored_signals();
        for &signal in wanted {
            if !ignored.contains(&signal) && self.streams.iter().all(|(known, _)| *known != signal) {
                self.streams.push((signal, open_stream(signal)?));
            }
        }
        Ok(())
    }

    /// Waits for the next signal that asks for an end, while no command runs. Obeys a stop of the
    /// terminal.
    pub async fn next_termination(&mut self) -> Signal {
        loop {
            match self.next().await {
                Signal::SIGTSTP => suspend(Suspension::Job),
                signal if is_termination(signal) => return signal,
                _ => {}
            }
        }
    }

    /// Runs a future, unless a signal asks for an end first.
    pub async fn unless_terminated<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::select! {
            done = work => Ok(done),
            signal = self.next_termination() => Err(Failure::interrupted(signal)),
        }
    }

    /// Removes the SIGCONT that ended a suspension: forwarded later, it would undo the next stop of
    /// the command. There is none if the kernel has ignored the suspension.
    pub async fn discard_continue(&mut self) {
        /// The signal has arrived already. One turn of the runtime passes it on.
        const TURN: Duration = Duration::from_millis(10);
        if let Some((_, stream)) = self.streams.iter_mut().find(|(signal, _)| *signal == Signal::SIGCONT) {
            let _ = timeout(TURN, stream.recv()).await;
        }
    }

    /// Waits for the next signal. Dropping the future loses no signal.
    pub async fn next(&mut self) -> Signal {
        poll_fn(|cx| {
            for (signal, stream) in &mut self.streams {
                if stream.poll_recv(cx).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// What a stop of this process's group asks of the shell, or of the outer run.
pub enum Suspension {
    /// To stop the whole job, as Ctrl-Z does.
    Job,
    /// To put the group into the foreground and to continue it.
    UntilForeground,
}

/// Stops the group of this process, as a terminal would: a shell waits until all processes of its
/// job are stopped. One call stops them all, because the shell may continue the job as soon as one
/// of them is stopped. The kernel ignores both signals, unlike SIGSTOP, if no shell could continue
/// the group. The stop takes effect before the call returns: the kernel prefers the main thread,
/// which calls this.
pub fn suspend(suspension: Suspension) {
    let signal = match suspension {
        // sqlock catches SIGTSTP.
        Suspension::Job => Signal::SIGTTOU,
        Suspension::UntilForeground => Signal::SIGTTIN,
    };
    let _ = killpg(getpgrp(), signal);
}

fn open_stream(signal: Signal) -> Result<unix::Signal, Failure> {
    unix::signal(SignalKind::from_raw(signal as i32))
        .map_err(|error| Failure::system(format!("cannot handle {signal}: {error}")))
}

/// Reads which signals were ignored when this process started. Only Linux shows them; elsewhere the
/// list is empty.
fn read_ignored_signals() -> Vec<Signal> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    Signal::iterator().filter(|&signal| mask & (1 << (signal as i32 - 1)) != 0).collect()
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use nix::sys::signal::raise;

    use super::*;

    #[tokio::test]
    async fn discarded_continue_is_not_forwarded() -> Result<(), Failure> {
        let mut signals = Signals::listen()?;
        signals.listen_to_forwarded()?;
        assert_eq!(raise(Signal::SIGCONT), Ok(()));
        signals.discard_continue().await;
        tokio::task::yield_now().await;
        let is_pending = poll_fn(|cx| Poll::Ready(pin!(signals.next()).poll(cx).is_pending())).await;
        assert!(is_pending);
        Ok(())
    }

    #[tokio::test]
    async fn signal_listened_for_twice_arrives_once() -> Result<(), Failure> {
        let mut signals = Signals::listen()?;
        signals.listen_to_forwarded()?;
        let once = signals.streams.len();
        signals.listen_to_forwarded()?;
        assert_eq!(signals.streams.len(), once);
        Ok(())
    }
}
