//! The signals that arrive, as a stream.

use std::future::poll_fn;
use std::task::Poll;

use nix::sys::signal::Signal;
use tokio::signal::unix::{self, SignalKind};

use crate::exit::Failure;
use crate::run::terminal::suspend;

/// Those that sqlock passes on to the command, or ends with while it waits.
const ENDING: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];

/// Those that mean something to the command only.
const OTHERS: [Signal; 6] =
    [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGALRM, Signal::SIGWINCH, Signal::SIGTSTP, Signal::SIGCONT];

/// The signals sent to this process, one after the other.
///
/// One that was ignored when sqlock started (nohup, a shell's background job) stays ignored, here and in the command.
pub struct Signals {
    arriving: Vec<(Signal, unix::Signal)>,
}

impl Signals {
    /// Those that end a wait.
    pub fn that_end() -> Result<Self, Failure> {
        let mut signals = Self { arriving: Vec::new() };
        signals.listen_for(&ENDING)?;
        Ok(signals)
    }

    /// From here on also those that mean something to the command only.
    pub fn and_others(&mut self) -> Result<(), Failure> {
        self.listen_for(&OTHERS)
    }

    fn listen_for(&mut self, wanted: &[Signal]) -> Result<(), Failure> {
        let ignored = ignored();
        for &signal in wanted.iter().filter(|signal| !ignored.contains(signal)) {
            let arrivals = unix::signal(SignalKind::from_raw(signal as i32))
                .map_err(|error| Failure::system(format!("cannot handle {signal}: {error}")))?;
            self.arriving.push((signal, arrivals));
        }
        Ok(())
    }

    /// The next signal that asks for an end, while there is no command to pass the others on to. A terminal's stop is obeyed.
    pub async fn next_that_ends(&mut self) -> Signal {
        loop {
            match self.next().await {
                Signal::SIGTSTP => suspend(),
                signal if ENDING.contains(&signal) => return signal,
                _ => {}
            }
        }
    }

    /// The next signal. Dropping the future loses none.
    pub async fn next(&mut self) -> Signal {
        poll_fn(|cx| {
            for (signal, arrivals) in &mut self.arriving {
                if arrivals.poll_recv(cx).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// The signals that this process was started with ignored. Only Linux tells; elsewhere none is taken to be.
fn ignored() -> Vec<Signal> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    Signal::iterator().filter(|&signal| mask & (1 << (signal as i32 - 1)) != 0).collect()
}
