//! The guard: a process beside sqlock that kills the command in time, whatever becomes of sqlock.
//!
//! sqlock may be stopped (`kill -STOP`), killed, or busy with a database that does not answer; the guard has nothing to do
//! but to wait for a clock. It is told the deadline anew after each renewal, over a socket. When the deadline comes near,
//! it stops the command; when the socket closes without a goodbye, sqlock has died, and it kills the command at once.
//!
//! The clock is CLOCK_BOOTTIME, which goes on while the machine sleeps, and so does the timer.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, getpid};
use sqlock::Owner;

use crate::exit::Failure;
use crate::lease::Held;

/// The first argument that makes this program a guard.
const CALL: &str = "__guard";

// ---- when

/// How a command is stopped.
#[derive(Clone, Copy)]
pub struct Terms {
    /// So long before the deadline it is told to stop,
    pub kill_after: Duration,
    /// and so long before the deadline it is killed: time for the kernel to do it, on a busy machine.
    reserve: Duration,
    signal: Signal,
}

impl Terms {
    pub fn new(ttl: Duration, kill_after: Duration, signal: Signal) -> Self {
        // Renewals go out at a third of the TTL, the first one at 5/12 at the latest: more than another third would stop
        // commands whose lease is about to be renewed.
        Self { kill_after: kill_after.min(ttl / 3), reserve: (ttl / 10).min(Duration::from_secs(1)), signal }
    }

    /// How long before the deadline the command learns of it.
    pub fn notice(&self) -> Duration {
        self.kill_after.max(self.reserve)
    }
}

/// What the guard does, and when: nanoseconds of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    signal: i32,
    tell_at: u64,
    kill_at: u64,
}

impl Schedule {
    pub fn until(lease: &Held, terms: &Terms) -> Self {
        // First the clock, then what remains: a pause in between only makes it earlier.
        let now = now();
        Self::before(now.saturating_add(nanos(lease.remaining())), terms)
    }

    fn before(deadline: u64, terms: &Terms) -> Self {
        let at = |before| deadline.saturating_sub(nanos(before));
        Self { signal: terms.signal as i32, tell_at: at(terms.notice()), kill_at: at(terms.reserve) }
    }

    /// The command has been told to stop, or will be at once.
    pub fn is_ending(&self) -> bool {
        now() >= self.tell_at
    }

    /// The command should be dead.
    pub fn is_over(&self) -> bool {
        now() >= self.kill_at
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(target_os = "linux")]
const CLOCK: ClockId = ClockId::CLOCK_BOOTTIME;
#[cfg(not(target_os = "linux"))]
const CLOCK: ClockId = ClockId::CLOCK_MONOTONIC;

fn now() -> u64 {
    // This clock exists wherever it is compiled in; without it nothing could be promised, so everything is overdue.
    clock_gettime(CLOCK).map_or(u64::MAX, |t| t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64)
}

// ---- whom

/// The command and what it has started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarry {
    pub group: Pid,
    /// In the environment of each of them, also of one that has left the process group.
    pub mark: String,
}

impl Quarry {
    /// The variable that has the marks.
    pub const MARK: &str = "SQLOCK_RUN";

    pub fn new_mark() -> String {
        Owner::random().to_string()
    }

    /// With those of the runs around this one, which must find its processes too.
    pub fn marks_with(mark: &str) -> String {
        std::env::var(Self::MARK).map_or_else(|_| mark.to_owned(), |outer| format!("{outer},{mark}"))
    }

    /// Kills all of them.
    pub fn kill(&self) {
        let _ = killpg(self.group, Signal::SIGKILL);
        // Those that made themselves a session of their own. They may be starting others just now: until none is seen
        // twice in a row, but not for ever.
        let (mut unseen, give_up) = (0, now().saturating_add(nanos(Duration::from_secs(5))));
        while unseen < 2 && now() < give_up {
            let strays = self.strays();
            unseen = if strays.is_empty() { unseen + 1 } else { 0 };
            for stray in strays {
                let _ = kill(stray, Signal::SIGKILL);
            }
        }
    }

    /// Whether the group has processes and all of them are zombies. `false` where that cannot be known.
    #[cfg(target_os = "linux")]
    pub fn is_of_zombies(&self) -> bool {
        // A process that ends after it has started another may hide the new one from a single look.
        knows_our_pids() && self.all_are_zombies() && self.all_are_zombies()
    }

    #[cfg(target_os = "linux")]
    fn all_are_zombies(&self) -> bool {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let stats = processes.filter_map(|process| std::fs::read_to_string(process.path().join("stat")).ok());
        // Whether each process of the group is a zombie. After the name, in parentheses, come the state, the parent and the group; the
        // eighteenth is the number of threads. A process whose first thread has ended looks like a zombie, but others may go on.
        let mut zombies = stats.filter_map(|stat| {
            let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
            let is_zombie = matches!(*fields.first()?, "Z" | "X") && matches!(*fields.get(17)?, "0" | "1");
            (fields.get(2)?.parse() == Ok(self.group.as_raw())).then_some(is_zombie)
        });
        zombies.next() == Some(true) && zombies.all(|is_zombie| is_zombie)
    }

    #[cfg(not(target_os = "linux"))]
    pub fn is_of_zombies(&self) -> bool {
        false
    }

    /// Living processes with the mark that are not in the group.
    #[cfg(target_os = "linux")]
    fn strays(&self) -> Vec<Pid> {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let marked = processes.filter_map(|process| {
            let pid = Pid::from_raw(process.file_name().to_str()?.parse().ok()?);
            let environment = std::fs::read(process.path().join("environ")).ok()?;
            let has_mark = environment.split(|byte| *byte == 0).any(|variable| {
                let marks = variable.strip_prefix(Self::MARK.as_bytes()).and_then(|value| value.strip_prefix(b"="));
                marks.is_some_and(|marks| marks.split(|byte| *byte == b',').any(|mark| mark == self.mark.as_bytes()))
            });
            (has_mark && nix::unistd::getpgid(Some(pid)) != Ok(self.group)).then_some(pid)
        });
        marked.collect()
    }

    #[cfg(not(target_os = "linux"))]
    fn strays(&self) -> Vec<Pid> {
        Vec::new()
    }
}

/// Whether `/proc` has all processes of this PID namespace: a container may have been given that of another one, and it may hide
/// the processes of other users.
#[cfg(target_os = "linux")]
fn knows_our_pids() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    ids.is_some_and(|ids| ids.trim() == getpid().to_string()) && std::fs::metadata("/proc/1/stat").is_ok()
}

// ---- sqlock's side

/// The guard, as sqlock sees it.
pub struct Guard {
    pid: Pid,
    socket: UnixStream,
}

/// What the guard has done to the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    Told,
    Killed,
}

impl Guard {
    pub fn start() -> Result<Self, Failure> {
        Self::spawn().map_err(|error| Failure::system(format!("the guard does not start: {error}")))
    }

    fn spawn() -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        // Should the guard be stopped, what it is told would pile up; it is not waited for.
        socket.set_nonblocking(true)?;
        // On Linux also after this program was replaced by a newer one.
        let program = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
        let guard = Command::new(program)
            .arg0(format!("lease-guard of {}", getpid()))
            .arg(CALL)
            // It needs nothing of that, and must not have the mark of an enclosing run: it dies after its command, not before.
            .env_clear()
            // Out of reach of the terminal's signals, and of those sent to our group.
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { pid: Pid::from_raw(guard.id().cast_signed()), socket })
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// For the command to tell the guard of itself.
    pub fn announcement(&self, mark: &str, schedule: Schedule) -> io::Result<Announcement> {
        let quarry = Quarry { group: Pid::from_raw(0), mark: mark.into() };
        Ok(Announcement { socket: self.socket.try_clone()?, bytes: Orders { quarry, schedule }.to_bytes() })
    }

    /// What is to be done from now on. A guard that was told to stop the command already goes on with that.
    pub fn tell(&mut self, child: &super::child::Child, schedule: &Schedule) {
        let orders = Orders { quarry: child.quarry().clone(), schedule: *schedule };
        match self.socket.write_all(&orders.to_bytes()) {
            // It was stopped so long ago that there is no room for more: a new one is better.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let _ = kill(self.pid, Signal::SIGKILL);
            }
            // When it has died, we learn of it as of any child.
            _ => {}
        }
    }

    /// Sends it home, and tells what it has done.
    pub fn end(mut self) -> Option<Report> {
        let _ = self.socket.write_all(&[Orders::GOODBYE; Orders::BYTES]);
        let _ = self.socket.shutdown(Shutdown::Write);
        let mut reports = Vec::new();
        let _ = self.socket.set_nonblocking(false);
        let _ = self.socket.set_read_timeout(Some(Duration::from_millis(500)));
        if self.socket.read_to_end(&mut reports).is_err() {
            // It was stopped, and would have nothing to do any more.
            let _ = kill(self.pid, Signal::SIGKILL);
        }
        match reports.last() {
            Some(b'K') => Some(Report::Killed),
            Some(b'T') => Some(Report::Told),
            _ => None,
        }
    }
}

/// The first orders, but for the process group, which is known only when the process is there.
pub struct Announcement {
    socket: UnixStream,
    bytes: Vec<u8>,
}

impl Announcement {
    /// Sends it as the leader of a process group. It allocates nothing.
    pub fn send(&mut self) -> io::Result<()> {
        let group = getpid().as_raw().to_le_bytes();
        for (byte, group) in self.bytes.iter_mut().zip(group) {
            *byte = group;
        }
        self.socket.write_all(&self.bytes)
    }
}

// ---- between them

#[derive(Clone, Debug, PartialEq, Eq)]
struct Orders {
    quarry: Quarry,
    schedule: Schedule,
}

impl Orders {
    const MARK_BYTES: usize = 32;
    const BYTES: usize = 4 + 4 + 8 + 8 + Self::MARK_BYTES;

    /// Fills a message that says goodbye: no process group has such a number.
    const GOODBYE: u8 = 0xff;

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend(self.quarry.group.as_raw().to_le_bytes());
        bytes.extend(self.schedule.signal.to_le_bytes());
        bytes.extend(self.schedule.tell_at.to_le_bytes());
        bytes.extend(self.schedule.kill_at.to_le_bytes());
        bytes.extend(self.quarry.mark.as_bytes());
        bytes
    }

    /// `None`: goodbye.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (group, bytes) = bytes.split_first_chunk()?;
        let (signal, bytes) = bytes.split_first_chunk()?;
        let (tell_at, bytes) = bytes.split_first_chunk()?;
        let (kill_at, mark) = bytes.split_first_chunk()?;
        let group = i32::from_le_bytes(*group);
        let schedule = Schedule {
            signal: i32::from_le_bytes(*signal),
            tell_at: u64::from_le_bytes(*tell_at),
            kill_at: u64::from_le_bytes(*kill_at),
        };
        let mark = String::from_utf8(mark.to_vec()).ok()?;
        (group > 0).then(|| Self { quarry: Quarry { group: Pid::from_raw(group), mark }, schedule })
    }
}

// ---- the guard's side

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

#[cfg(target_os = "linux")]
use alarm_by_timer::Alarm;

/// A timer that goes on while the machine sleeps.
#[cfg(target_os = "linux")]
mod alarm_by_timer {
    use std::io;
    use std::os::fd::AsFd;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use nix::sys::time::TimeSpec;
    use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

    pub(super) struct Alarm(Option<TimerFd>);

    impl Alarm {
        pub(super) fn new() -> Self {
            Self(TimerFd::new(ClockId::CLOCK_BOOTTIME, TimerFlags::TFD_CLOEXEC).ok())
        }

        /// Returns at that time, or when something has come; also now and then without a reason.
        pub(super) fn wait(&self, until: Option<u64>) {
            let stdin = io::stdin();
            let mut wanted = vec![PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
            // Without a timer, look often.
            let mut timeout = PollTimeout::from(20_u8);
            if let (Some(timer), Some(until)) = (&self.0, until) {
                let at = TimeSpec::new((until / 1_000_000_000) as i64, (until % 1_000_000_000) as i64);
                if timer.set(Expiration::OneShot(at), TimerSetTimeFlags::TFD_TIMER_ABSTIME).is_ok() {
                    wanted.push(PollFd::new(timer.as_fd(), PollFlags::POLLIN));
                    timeout = PollTimeout::NONE;
                }
            } else if until.is_none() {
                timeout = PollTimeout::NONE;
            }
            let _ = poll(&mut wanted, timeout);
        }
    }
}

/// Without such a timer, a look at the clock now and then.
#[cfg(not(target_os = "linux"))]
struct Alarm;

#[cfg(not(target_os = "linux"))]
impl Alarm {
    fn new() -> Self {
        Self
    }

    fn wait(&self, until: Option<u64>) {
        use std::os::fd::AsFd;

        use nix::poll::{PollFd, PollFlags, poll};

        let stdin = io::stdin();
        let mut wanted = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
        let left = until.map_or(100, |until| (until.saturating_sub(now()) / 1_000_000).min(100)) as u8;
        let _ = poll(&mut wanted, left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn the_command_is_told_and_then_killed_before_the_deadline() {
        let terms = Terms::new(Duration::from_secs(30), Duration::from_secs(10), Signal::SIGTERM);
        let schedule = Schedule::before(100 * SECOND, &terms);
        assert_eq!((schedule.tell_at, schedule.kill_at), (90 * SECOND, 99 * SECOND));
    }

    #[test]
    fn a_kill_after_that_is_longer_than_a_third_of_the_ttl_is_shortened() {
        let terms = Terms::new(Duration::from_secs(3), Duration::from_secs(10), Signal::SIGTERM);
        let schedule = Schedule::before(100 * SECOND, &terms);
        assert_eq!((schedule.tell_at, schedule.kill_at), (99 * SECOND, 99 * SECOND + 700_000_000));
    }

    #[test]
    fn without_kill_after_it_is_killed_without_being_told() {
        let terms = Terms::new(Duration::from_secs(30), Duration::ZERO, Signal::SIGTERM);
        let schedule = Schedule::before(100 * SECOND, &terms);
        assert_eq!(schedule.tell_at, schedule.kill_at);
    }

    #[test]
    fn orders_survive_the_socket() {
        let schedule = Schedule { signal: 15, tell_at: 7, kill_at: 8 };
        let orders = Orders { quarry: Quarry { group: Pid::from_raw(42), mark: Quarry::new_mark() }, schedule };
        let bytes = orders.to_bytes();
        assert_eq!(bytes.len(), Orders::BYTES);
        assert_eq!(Orders::from_bytes(&bytes), Some(orders));
        assert_eq!(Orders::from_bytes(&[Orders::GOODBYE; Orders::BYTES]), None);
    }
}
