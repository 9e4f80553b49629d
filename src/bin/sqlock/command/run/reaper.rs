//! Starts the children of this process and reaps them: the command, its orphans, and the watchdog.

use std::io;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

use nix::unistd::Pid;
use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions, WaitOptions, WaitStatus, wait, waitid};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::exit::Failure;

/// A child, and how its state changed.
pub type Change = (Pid, WaitStatus);

/// The thread that reaps all children. A process has one, also for commands that run one after the
/// other: a second thread could reap a child that the first one waits for.
pub struct Reaper {
    /// Locked while a child starts, because `Command::spawn` reaps a child whose program it cannot
    /// execute.
    starting: Arc<Mutex<()>>,
    thread: Thread,
    changes: UnboundedReceiver<Change>,
}

impl Reaper {
    pub fn start() -> Result<Self, Failure> {
        let (sender, changes) = unbounded_channel();
        let starting = Arc::new(Mutex::new(()));
        let reaper = thread::Builder::new().name("reaper".into());
        let thread = reaper.spawn({
            let starting = Arc::clone(&starting);
            move || reap_children(&starting, &sender)
        });
        let thread = thread.map_err(|error| Failure::system(format!("cannot start a thread: {error}")))?;
        Ok(Self { starting, thread: thread.thread().clone(), changes })
    }

    /// Starts a child, which only this reaper may wait for.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Pid> {
        let _starting = lock(&self.starting);
        let child = command.spawn()?;
        self.thread.unpark();
        Ok(Pid::from_raw(child.id().cast_signed()))
    }

    /// Forgets the changes of children so far, whose PIDs new children may get.
    pub fn forget_changes(&mut self) {
        while self.changes.try_recv().is_ok() {}
    }

    /// Waits for the next change of a child. `None`: children can no longer be reaped. Dropping the
    /// future loses no change.
    pub async fn next_change(&mut self) -> Option<Change> {
        self.changes.recv().await
    }
}

/// The pause between two looks for children while there are none. The kernel does not report that
/// the first process of a container has inherited an orphan.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Reaps all children, including orphans of the command, and reports their changes.
fn reap_children(starting: &Mutex<()>, changes: &UnboundedSender<Change>) {
    loop {
        match waitid(WaitId::All, WaitIdOptions::EXITED | WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT) {
            Ok(_) => {}
            // There are no children: `spawn` ends the pause.
            Err(Errno::CHILD) => {
                thread::park_timeout(LOOK_INTERVAL);
                continue;
            }
            Err(Errno::INTR) => continue,
            Err(_) => return,
        }
        let _starting = lock(starting);
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            if changes.send((Pid::from_raw(pid.as_raw_nonzero().get()), status)).is_err() {
                return;
            }
        }
    }
}

fn lock(starting: &Mutex<()>) -> MutexGuard<'_, ()> {
    starting.lock().unwrap_or_else(PoisonError::into_inner)
}
