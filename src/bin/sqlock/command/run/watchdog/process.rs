//! The guard's side: it waits for the clock, and for sqlock's orders.

use std::io;
use std::process::ExitCode;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{SigSet, Signal, killpg};

use super::alarm::Alarm;
use super::message::{CALL, Orders};

/// The guard's life, if this process was started to be one.
pub fn main_if_asked() -> Option<ExitCode> {
    if std::env::args_os().nth(1)? != CALL {
        return None;
    }
    // Nothing but KILL and STOP reaches it.
    let _ = SigSet::all().thread_block();
    let _ = fcntl(io::stdin(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK));
    // The name that `pkill` knows it by is not that of sqlock, so that one command does not hit both.
    #[cfg(target_os = "linux")]
    let _ = nix::sys::prctl::set_name(c"lease-guard");
    Watch::default().until_the_end();
    Some(ExitCode::SUCCESS)
}

#[derive(Default)]
struct Watch {
    received: Vec<u8>,
    orders: Option<Orders>,
    told: bool,
    killed: bool,
}

/// What the socket says.
enum Message {
    Goodbye,
    /// sqlock has died.
    Closed,
    Orders,
}

impl Watch {
    fn until_the_end(mut self) {
        let alarm = Alarm::new();
        loop {
            // First all that has come: after a pause, what was read last would be out of date.
            match self.receive() {
                Message::Orders => {}
                Message::Goodbye => return,
                Message::Closed => {
                    if let Some(orders) = &self.orders {
                        orders.quarry.kill();
                    }
                    return;
                }
            }
            alarm.wait(self.act());
        }
    }

    /// Does what is due, and tells when to look again.
    fn act(&mut self) -> Option<u64> {
        let Orders { quarry, schedule } = self.orders.as_ref().filter(|_| !self.killed)?;
        if schedule.is_over() {
            self.killed = true;
            report(b'K');
            quarry.kill();
            return None;
        }
        if schedule.is_ending() && !self.told {
            self.told = true;
            report(b'T');
            if let Ok(signal) = Signal::try_from(schedule.signal) {
                let _ = killpg(quarry.group, signal);
            }
        }
        Some(if self.told { schedule.kill_at } else { schedule.tell_at })
    }

    /// Reads all that has come.
    fn receive(&mut self) -> Message {
        let mut buffer = [0; 64 * Orders::BYTES];
        loop {
            match nix::unistd::read(io::stdin(), &mut buffer) {
                Ok(0) => return Message::Closed,
                Ok(n) => self.received.extend(buffer.iter().take(n)),
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => return Message::Orders,
                Err(_) => return Message::Closed,
            }
            let whole = self.received.len() / Orders::BYTES * Orders::BYTES;
            for message in self.received.drain(..whole).collect::<Vec<_>>().chunks_exact(Orders::BYTES) {
                match Orders::from_bytes(message) {
                    None => return Message::Goodbye,
                    // Once the command has been told to stop, a renewal that came late does not save it.
                    Some(_) if self.told => {}
                    Some(orders) => self.orders = Some(orders),
                }
            }
        }
    }
}

fn report(what: u8) {
    let _ = nix::unistd::write(io::stdin(), &[what]);
}
