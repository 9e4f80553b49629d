//! The watchdog's side: it waits for the clock, and for sqlock's instructions.

use std::io;
use std::process::ExitCode;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{SigSet, Signal, killpg};

use super::alarm::Alarm;
use super::message::{ARGUMENT, Instructions, KILLED, SIGNALED};

/// The watchdog's life, if this process was started to be one.
pub fn run_if_requested() -> Option<ExitCode> {
    if std::env::args_os().nth(1)? != ARGUMENT {
        return None;
    }
    // Nothing but KILL and STOP reaches it.
    let _ = SigSet::all().thread_block();
    let _ = fcntl(io::stdin(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK));
    // The name that `pkill` knows it by is not that of sqlock, so that one command does not hit both.
    #[cfg(target_os = "linux")]
    let _ = nix::sys::prctl::set_name(c"lease-guard");
    WatchdogProcess::default().run();
    Some(ExitCode::SUCCESS)
}

#[derive(Default)]
struct WatchdogProcess {
    received: Vec<u8>,
    instructions: Option<Instructions>,
    is_signaled: bool,
    is_killed: bool,
}

/// What the socket says.
enum Received {
    Shutdown,
    /// sqlock has died.
    Disconnected,
    Instructions,
}

impl WatchdogProcess {
    fn run(mut self) {
        let alarm = Alarm::new();
        loop {
            // First all that has come: after a pause, what was read last would be out of date.
            match self.receive() {
                Received::Instructions => {}
                Received::Shutdown => return,
                Received::Disconnected => {
                    if let Some(instructions) = &self.instructions {
                        instructions.process_tree.kill();
                    }
                    return;
                }
            }
            alarm.wait(self.act_if_due());
        }
    }

    /// Does what is due, and tells when to look again.
    fn act_if_due(&mut self) -> Option<u64> {
        let Instructions { process_tree, schedule } = self.instructions.as_ref().filter(|_| !self.is_killed)?;
        if schedule.is_kill_due() {
            self.is_killed = true;
            report(KILLED);
            process_tree.kill();
            return None;
        }
        if schedule.is_signal_due() && !self.is_signaled {
            self.is_signaled = true;
            report(SIGNALED);
            if let Ok(signal) = Signal::try_from(schedule.signal) {
                let _ = killpg(process_tree.group, signal);
            }
        }
        Some(if self.is_signaled { schedule.kill_at } else { schedule.signal_at })
    }

    /// Reads all that has come.
    fn receive(&mut self) -> Received {
        let mut buffer = [0; 64 * Instructions::BYTES];
        loop {
            match nix::unistd::read(io::stdin(), &mut buffer) {
                Ok(0) => return Received::Disconnected,
                Ok(n) => self.received.extend(buffer.iter().take(n)),
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => return Received::Instructions,
                Err(_) => return Received::Disconnected,
            }
            let whole = self.received.len() / Instructions::BYTES * Instructions::BYTES;
            for message in self.received.drain(..whole).collect::<Vec<_>>().chunks_exact(Instructions::BYTES) {
                match Instructions::from_bytes(message) {
                    None => return Received::Shutdown,
                    // Once the command has been told to stop, a renewal that came late does not save it.
                    Some(_) if self.is_signaled => {}
                    Some(instructions) => self.instructions = Some(instructions),
                }
            }
        }
    }
}

fn report(intervention: u8) {
    let _ = nix::unistd::write(io::stdin(), &[intervention]);
}
