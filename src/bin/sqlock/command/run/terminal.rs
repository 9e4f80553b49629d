//! The terminal, shared with the command as a shell shares it with its jobs.
//!
//! The command is in a process group of its own and so in the terminal's background. That does no harm until it reads
//! from the terminal: then the kernel stops it, and it is made the foreground. Until then Ctrl-C comes to sqlock alone,
//! and from then on to the command alone; a pipeline that sqlock is part of keeps its terminal for as long as possible.

use std::fs::{File, OpenOptions};

use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// The controlling terminal, if there is one.
pub struct Terminal(Option<File>);

impl Terminal {
    pub fn open() -> Self {
        Self(OpenOptions::new().read(true).write(true).open("/dev/tty").ok())
    }

    pub fn is_available(&self) -> bool {
        self.0.is_some()
    }

    /// Whether our process group is the foreground.
    pub fn is_foreground(&self) -> bool {
        self.foreground_group() == Some(getpgrp())
    }

    /// Makes another group the foreground.
    pub fn set_foreground(&self, group: Pid) {
        let Some(terminal) = &self.0 else {
            return;
        };
        // Done from the background, it would stop us.
        let mut background_output = SigSet::empty();
        background_output.add(Signal::SIGTTOU);
        let _ = background_output.thread_block();
        let _ = tcsetpgrp(terminal, group);
        let _ = background_output.thread_unblock();
    }

    /// Makes our group the foreground if `group` is; tells whether it was.
    pub fn reclaim(&self, group: Pid) -> bool {
        let had_it = self.foreground_group() == Some(group);
        if had_it {
            self.set_foreground(getpgrp());
        }
        had_it
    }

    fn foreground_group(&self) -> Option<Pid> {
        tcgetpgrp(self.0.as_ref()?).ok()
    }
}
