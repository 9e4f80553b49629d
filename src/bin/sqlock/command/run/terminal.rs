//! The terminal, which sqlock and the command share like a shell and its jobs.
//!
//! The command has a process group of its own, in the background of the terminal. When it reads
//! from the terminal, the kernel stops it, and sqlock puts it into the foreground. Ctrl-C reaches
//! sqlock alone before that and the command alone afterwards. A pipeline that sqlock is part of
//! keeps the terminal for as long as possible.

use std::fs::{File, OpenOptions};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// The controlling terminal, if there is one.
pub struct Terminal {
    file: Option<File>,
    /// The modes before the command had the terminal: echo, line by line, …
    modes: Option<Termios>,
}

impl Terminal {
    pub fn open() -> Self {
        Self { file: OpenOptions::new().read(true).write(true).open("/dev/tty").ok(), modes: None }
    }

    pub fn is_available(&self) -> bool {
        self.file.is_some()
    }

    /// Returns whether sqlock's process group is in the foreground.
    pub fn is_foreground(&self) -> bool {
        self.has_foreground(getpgrp())
    }

    /// Returns whether a group is in the foreground.
    pub fn has_foreground(&self, group: Pid) -> bool {
        self.file.as_ref().is_some_and(|terminal| tcgetpgrp(terminal) == Ok(group))
    }

    /// Puts a group into the foreground.
    pub fn set_foreground(&self, group: Pid) {
        let Some(terminal) = &self.file else {
            return;
        };
        // The kernel sends SIGTTOU to a background process that does this.
        let mut background_output = SigSet::empty();
        background_output.add(Signal::SIGTTOU);
        let _ = background_output.thread_block();
        let _ = tcsetpgrp(terminal, group);
        let _ = background_output.thread_unblock();
    }

    /// Puts sqlock into the foreground if `group` is there, and returns whether it was.
    pub fn reclaim(&self, group: Pid) -> bool {
        let had_it = self.has_foreground(group);
        if had_it {
            self.set_foreground(getpgrp());
        }
        had_it
    }

    /// Saves the modes of the terminal. In the background they are those of the shell's prompt.
    pub fn save_modes(&mut self) {
        self.modes = self.file.as_ref().and_then(|file| tcgetattr(file).ok());
    }

    /// Sets the modes that were saved, as a shell does after a job that a signal has killed: an
    /// editor or a password prompt could not restore them.
    pub fn restore_modes(&self) {
        if let (Some(terminal), Some(modes)) = (&self.file, &self.modes) {
            let _ = tcsetattr(terminal, SetArg::TCSANOW, modes);
        }
    }
}
