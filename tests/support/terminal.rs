//! A program in a terminal.

use std::fs::File;
use std::io::Write;
use std::process::Stdio;

use nix::unistd::Pid;
use tokio::process::{Child, Command};

use super::captured_output::CapturedOutput;
use super::process_table::pid_of;
use super::soon;

/// A terminal with its own session.
pub struct Terminal {
    keyboard: File,
    pub screen: CapturedOutput,
    session: Child,
}

impl Terminal {
    /// Starts a program as the leader of the session, in the foreground.
    pub fn start(program: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        use nix::fcntl::OFlag;
        use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};
        // Programs that other tests start do not inherit the terminal.
        let master = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC).expect("a terminal");
        grantpt(&master).and_then(|()| unlockpt(&master)).expect("the terminal is unlocked");
        let path = ptsname_r(&master).expect("the name of the terminal");
        let slave = || Stdio::from(File::options().read(true).write(true).open(&path).expect("the terminal opens"));
        let session = Command::new("setsid")
            .arg("--ctty")
            .arg(program)
            .args(arguments)
            .envs(environment.iter().copied())
            .stdin(slave())
            .stdout(slave())
            .stderr(slave())
            .kill_on_drop(true)
            .spawn()
            .expect("setsid of util-linux");
        let keyboard = File::from(std::os::fd::OwnedFd::from(master));
        let screen = CapturedOutput::of_terminal(keyboard.try_clone().expect("a second handle"));
        Self { keyboard, screen, session }
    }

    pub fn pid(&self) -> Pid {
        pid_of(&self.session)
    }

    pub fn keys(&self, keys: &str) {
        (&self.keyboard).write_all(keys.as_bytes()).expect("the terminal takes keys");
    }

    pub async fn end(mut self) -> std::process::ExitStatus {
        soon("the end of the session", self.session.wait()).await.expect("the status of the session")
    }
}

/// The screen of a failed test says what happened.
impl Drop for Terminal {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the terminal shows:\n{}", self.screen.text());
        }
    }
}
