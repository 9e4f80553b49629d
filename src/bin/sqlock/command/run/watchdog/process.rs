//! The watchdog's side: waits for the clock and for instructions.

use std::io;
use std::process::ExitCode;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::unistd::getppid;

use super::alarm::Alarm;
use super::message::{ARGUMENT, Instructions, KILLED, SIGNALED};

/// Runs the watchdog if this process was started as one.
pub fn run_if_requested() -> Option<ExitCode> {
    if std::env::args_os().nth(1)? != ARGUMENT {
        return None;
    }
    // Only KILL and STOP reach the watchdog.
    let _ = SigSet::all().thread_block();
    let _ = fcntl(io::stdin(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK));
    #[cfg(target_os = "linux")]
    let _ = std::ffi::CString::new(super::PROCESS_NAME).map(|name| nix::sys::prctl::set_name(&name));
    WatchdogProcess::default().run();
    Some(ExitCode::SUCCESS)
}

#[derive(Default)]
struct WatchdogProcess {
    received: Vec<u8>,
    instructions: Option<Instructions>,
    stage: Stage,
}

/// The stage of stopping the command.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Running,
    Signaled,
    Killed,
}

/// The result of reading the socket.
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
            // After a pause of the machine or this process, the instructions may be out of date:
            // read new ones first.
            match self.receive() {
                Received::Instructions => {}
                Received::Shutdown => return,
                Received::Disconnected => {
                    if let Some(instructions) = &self.instructions {
                        instructions.process_tree.kill(getppid());
                    }
                    return;
                }
            }
            alarm.wait(self.act_if_due());
        }
    }

    /// Signals or kills the command if due. Returns when to check again.
    fn act_if_due(&mut self) -> Option<u64> {
        let Instructions { process_tree, schedule } =
            self.instructions.as_ref().filter(|_| self.stage != Stage::Killed)?;
        if schedule.is_kill_due() {
            self.stage = Stage::Killed;
            report(KILLED);
            process_tree.kill(getppid());
            return None;
        }
        if schedule.is_signal_due() && self.stage == Stage::Running {
            self.stage = Stage::Signaled;
            report(SIGNALED);
            if let Ok(signal) = Signal::try_from(schedule.signal) {
                let _ = killpg(process_tree.group, signal);
            }
        }
        Some(if self.stage == Stage::Signaled { schedule.kill_at } else { schedule.signal_at })
    }

    /// Reads all messages that have arrived.
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
                    // A late renewal does not save a command that has received the signal.
                    Some(_) if self.stage != Stage::Running => {}
                    Some(instructions) => self.instructions = Some(instructions),
                }
            }
        }
    }
}

/// Reports the watchdog's action to sqlock.
fn report(intervention: u8) {
    let _ = nix::unistd::write(io::stdin(), &[intervention]);
}
