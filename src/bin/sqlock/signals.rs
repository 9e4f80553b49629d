//! The signals that arrive, as a stream.

use std::future::poll_fn;
use std::task::Poll;

use nix::sys::signal::{Signal, raise};
use tokio::signal::unix::{self, SignalKind};

use crate::exit::Failure;

/// Those that sqlock passes on to the command, or ends with while it waits.
const TERMINATION: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];

/// Those that mean something to the command only.
const FORWARDED: [Signal; 6] =
    [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGALRM, Signal::SIGWINCH, Signal::SIGTSTP, Signal::SIGCONT];

/// Whether whoever sent it wants an end.
pub fn is_termination(signal: Signal) -> bool {
    TERMINATION.contains(&signal)
}

/// The signals sent to this process, one after the other.
///
/// One that was ignored when sqlock started (nohup, a shell's background job) stays ignored, here and in the command.
pub struct Signals {
    streams: Vec<(Signal, unix::Signal)>,
    /// Handled, and so not ignored, as it is by some supervisors: ignored, it would leave no child to wait for.
    _child_exits: unix::Signal,
}

impl Signals {
    /// Those that end a wait.
    pub fn listen() -> Result<Self, Failure> {
        let mut signals = Self { streams: Vec::new(), _child_exits: open_stream(Signal::SIGCHLD)? };
        signals.listen_for(&TERMINATION)?;
        Ok(signals)
    }

    /// From here on also those that mean something to the command only.
    pub fn listen_to_forwarded(&mut self) -> Result<(), Failure> {
        self.listen_for(&FORWARDED)
    }

    fn listen_for(&mut self, wanted: &[Signal]) -> Result<(), Failure> {
        let ignored = read_ignored();
        for &signal in wanted {
            if !ignored.contains(&signal) && self.streams.iter().all(|(known, _)| *known != signal) {
                self.streams.push((signal, open_stream(signal)?));
            }
        }
        Ok(())
    }

    /// The next signal that asks for an end, while there is no command to pass the others on to. A terminal's stop is obeyed.
    pub async fn next_termination(&mut self) -> Signal {
        loop {
            match self.next().await {
                Signal::SIGTSTP => suspend(),
                signal if is_termination(signal) => return signal,
                _ => {}
            }
        }
    }

    /// Does something unless a signal asks for an end first.
    pub async fn unless_terminated<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::select! {
            done = work => Ok(done),
            signal = self.next_termination() => Err(Failure::interrupted(signal)),
        }
    }

    /// The next signal. Dropping the future loses none.
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

/// Stops this process until somebody continues it, as a terminal would. With SIGTTIN, not with SIGSTOP: where there is
/// no shell that could continue it, the kernel ignores it. It takes effect before `raise` returns.
pub fn suspend() {
    let _ = raise(Signal::SIGTTIN);
}

fn open_stream(signal: Signal) -> Result<unix::Signal, Failure> {
    unix::signal(SignalKind::from_raw(signal as i32))
        .map_err(|error| Failure::system(format!("cannot handle {signal}: {error}")))
}

/// The signals that this process was started with ignored. Only Linux tells; elsewhere none is taken to be.
fn read_ignored() -> Vec<Signal> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    Signal::iterator().filter(|&signal| mask & (1 << (signal as i32 - 1)) != 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_signal_that_is_listened_for_again_is_heard_once() -> Result<(), Failure> {
        let mut signals = Signals::listen()?;
        signals.listen_to_forwarded()?;
        let once = signals.streams.len();
        signals.listen_to_forwarded()?;
        assert_eq!(signals.streams.len(), once);
        Ok(())
    }
}
