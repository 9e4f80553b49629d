//! The command as a process: its environment, its signals, and its death before the end of the
//! lease; then the same in a terminal.

mod loss;
mod signals;
mod terminal;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use rustix::process::geteuid;
use sqlock::Locks;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

use crate::support::command::{Running, beside, end, held, program, run, sqlock, start};
use crate::support::command_fixture::{CommandFixture, Report, Row, now};
use crate::support::process_table::{children, group, name, poll_for, poll_until, shell_of, state};
use crate::support::terminal::Terminal;
use crate::support::{empty, soon};

/// A command that reports its start, and ends on an order.
const OBEDIENT: &str = r#"echo up >&3; read go <"$ORDERS"; echo "$go" >&3"#;

/// A command with children and grandchildren, one of which has left its process group. None of them
/// ends by itself.
const FAMILY: &str = r#"
trap '' TERM
sleep 1000 &
sh -c 'sleep 1000 & wait' &
setsid sh -c 'sleep 1000 & wait' &
echo up >&3
while :; do sleep 1000; done
"#;

/// A command that reports its signals, and ends at QUIT.
const LISTENER: &str = r#"
for signal in HUP INT TERM USR1 USR2 ALRM WINCH; do trap "echo $signal >&3" $signal; done
trap 'echo QUIT >&3; exit 7' QUIT
echo up >&3
while :; do sleep 0.05; done
"#;

/// A command that counts until it is ordered to end. (A shell that starts a program with vfork
/// cannot be stopped while the child, stopped too, has not begun: hence the parentheses.)
const COUNTER: &str = r#"
trap 'exit 0' USR1
echo up >&3
while :; do echo >>"$COUNT"; (sleep 0.05); done
"#;

// ---- while the lease is held

#[tokio::test]
async fn command_has_its_own_process_group() {
    let fixture = CommandFixture::new().await;
    let holder = fixture.start(&["a"], OBEDIENT).up().await;
    let command = holder.command().await;
    assert_eq!(group(command), Some(command));
    assert_ne!(group(holder.pid()), Some(command));
    holder.order("go");
    holder.end().await.expect(0);
}

// ---- the end of a lease

/// Cuts off the holder of "a", and returns the end of its lease in the database.
async fn cut_off(fixture: &mut CommandFixture) -> i64 {
    fixture.cut().await;
    // A renewal may be in flight.
    tokio::time::sleep(Duration::from_millis(500)).await;
    fixture.row("a").await.expires_at
}

#[tokio::test]
async fn command_gets_requested_signal_and_notice_before_deadline() {
    let script =
        "trap 'echo TERM >&3' TERM; trap 'date +%s%6N >&3; exit 0' INT; echo up >&3; while :; do sleep 0.02; done";
    let mut fixture = CommandFixture::with_proxy().await;
    let options = ["--ttl", "12", "--signal", "INT", "--kill-after", "4s", "a"];
    let mut holder = fixture.start(&options, script).up().await;
    fixture.renewed("a").await;
    let end = cut_off(&mut fixture).await;
    let (_, lines) = holder.report.gone().await;
    let [reported] = &lines[..] else { panic!("{lines:?}") };
    let late = reported.parse::<i64>().expect("a time") - end;
    assert!(late <= 0, "{late} µs late");
    let ended = holder.end().await.expect(79);
    assert!(ended.stderr.contains("could not be renewed"), "{}", ended.stderr);
}

#[tokio::test]
async fn notice_longer_than_ttl_waits_for_failed_renewal() {
    let script = "trap 'date +%s%6N >&3; exit 0' TERM; echo up >&3; while :; do sleep 0.02; done";
    let mut fixture = CommandFixture::with_proxy().await;
    let mut holder = fixture.start(&["--ttl", "6", "--kill-after", "10m", "a"], script).up().await;
    // The command gets no signal as long as renewals succeed.
    for _ in 0..3 {
        fixture.renewed("a").await;
    }
    assert_eq!(holder.report.so_far(), [""; 0]);
    let end = cut_off(&mut fixture).await;
    let (_, lines) = holder.report.gone().await;
    let [reported] = &lines[..] else { panic!("{lines:?}") };
    let late = reported.parse::<i64>().expect("a time") - end;
    assert!(late <= 0, "{late} µs late");
    holder.end().await.expect(79);
}

#[tokio::test]
async fn max_hold_stops_the_command() {
    let fixture = CommandFixture::new().await;
    // The processes are killed a tenth of it before its end, at most 1 s.
    let mut holder = fixture.start(&["--max-hold", "10", "a"], FAMILY).up().await;
    let row = fixture.row("a").await;
    let (died, _) = holder.report.gone().await;
    let end = row.acquired_at + 10_000_000;
    assert!(died <= end, "{} µs late", died - end);
    let ended = holder.end().await.expect(79);
    assert!(ended.stderr.contains("max-hold") || ended.stderr.contains("max_hold"), "{}", ended.stderr);
    // The lease was released, not left to its TTL of 30 s.
    let waiter = fixture.start(&["a"], OBEDIENT).up().await;
    assert!(fixture.row("a").await.acquired_at < row.acquired_at + 30_000_000);
    waiter.order("go");
    waiter.end().await.expect(0);
}

#[tokio::test]
async fn hold_at_least_keeps_name_taken_after_release() {
    let fixture = CommandFixture::new().await;
    run(&fixture.db, &["run", "--hold-at-least", "4", "a", "--", "true"]).await.expect(0);
    let kept = fixture.row("a").await;
    let kept_until = kept.acquired_at + 4_000_000;
    assert!(kept.expires_at >= kept_until, "{} µs early", kept_until - kept.expires_at);
    assert_eq!(kept.id, "kept");
    let waiter = fixture.start(&["a"], OBEDIENT).up().await;
    let next = fixture.row("a").await;
    assert!(next.acquired_at >= kept_until, "{} µs early", kept_until - next.acquired_at);
    waiter.order("go");
    waiter.end().await.expect(0);
}

// ---- arguments, environment, input

#[tokio::test]
async fn signal_ignored_at_start_stays_ignored_by_command() {
    let fixture = CommandFixture::new().await;
    // nohup, and a shell that starts background jobs of a script, ignore signals in the same way.
    let mut command = Command::new("sh");
    command
        .args(["-c", "trap '' HUP INT; exec \"$@\"", "sh", program(), "run", "a"])
        .env("DATABASE_URL", &fixture.db.url)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let mut holder = fixture.start_as(command, LISTENER).up().await;
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", holder.command().await)).expect("the command is up");
    let ignored = mask(&status, "SigIgn");
    for signal in [Signal::SIGHUP, Signal::SIGINT] {
        assert_ne!(ignored & bit(signal), 0, "{signal} is not ignored");
        holder.signal(signal);
    }
    holder.signal(Signal::SIGQUIT);
    let (_, lines) = holder.report.gone().await;
    assert_eq!(lines, ["QUIT"]);
    holder.end().await.expect(7);
}

#[tokio::test]
async fn command_inherits_no_extra_signal_masks_or_files() {
    let db = empty().await;
    let script = "cat /proc/self/status; echo; ls /proc/self/fd";
    let inside = run(&db, &["run", "a", "--", "sh", "-c", script]).await.expect(0).stdout;
    let mut alone = Command::new("sh");
    alone.args(["-c", script]).stdin(Stdio::null());
    let alone = end(alone).await.expect(0).stdout;
    assert_eq!(mask(&inside, "SigBlk"), 0);
    // Signals above 31 belong to the C library.
    let ignored = |status: &str| mask(status, "SigIgn") & (bit(Signal::SIGSYS) * 2 - 1);
    assert_eq!(ignored(&inside), ignored(&alone));
    assert_eq!(inside.split_once("\n\n").map(|(_, files)| files), alone.split_once("\n\n").map(|(_, files)| files));
}

#[tokio::test]
async fn stdin_and_stdout_pass_byte_for_byte() {
    let db = empty().await;
    let mut bytes = vec![0; 1 << 20];
    let mut random = tokio::fs::File::open("/dev/urandom").await.expect("there is randomness");
    random.read_exact(&mut bytes).await.expect("there is randomness");
    let mut command = sqlock(&db, &["run", "a", "--", "cat"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("sqlock can be started");
    let mut stdin = child.stdin.take().expect("a pipe was asked for");
    let sent = bytes.clone();
    tokio::spawn(async move { stdin.write_all(&sent).await });
    let output = soon("the end of cat", child.wait_with_output()).await.expect("sqlock is ours to wait for");
    assert!(output.status.success());
    assert!(output.stdout == bytes, "{} bytes, not the same", output.stdout.len());
}

#[tokio::test]
async fn unread_stdin_is_left_to_later_readers() {
    let db = empty().await;
    let mut command = Command::new("sh");
    command
        .args(["-c", "printf 'one\\ntwo\\n' | { \"$0\" run a -- sh -c 'read x; echo $x'; cat; }", program()])
        .env("DATABASE_URL", &db.url)
        .stdin(Stdio::null());
    let ended = end(command).await.expect(0);
    assert_eq!(ended.stdout, "one\ntwo\n");
}

#[tokio::test]
async fn command_finds_the_lease_in_its_environment() {
    let fixture = CommandFixture::new().await;
    let script = format!(r#"for v in NAME TOKEN OWNER EXPIRES_AT; do eval "echo \$SQLOCK_$v" >&3; done; {OBEDIENT}"#);
    let mut holder = fixture.start(&["a b"], &script);
    assert_eq!(holder.report.line().await, "a b");
    let token: i64 = holder.report.line().await.parse().expect("a number");
    let owner = holder.report.line().await;
    let expires_at = holder.report.line().await;
    let row = fixture.row("a b").await;
    assert_eq!((token, owner), (row.token, row.owner));
    let expires_at = humantime::parse_rfc3339(&expires_at).expect("a time");
    let expires_at = expires_at.duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_micros();
    let early = row.acquired_at + 30_000_000 - i64::try_from(expires_at).expect("a time of this era");
    assert!((0..5_000_000).contains(&early), "{early} µs before the end in the row");
    let holder = holder.up().await;
    holder.order("go");
    holder.end().await.expect(0);
}

#[tokio::test]
async fn command_names_its_database_sessions_after_the_lease() {
    let db = empty().await;
    let script = r#"echo "$PGAPPNAME"; exec "$0" run inner -- sh -c 'echo "$PGAPPNAME"'"#;
    let arguments = ["run", "nightly report", "--", "sh", "-c", script, program()];
    let mut command = sqlock(&db, &arguments);
    command.env_remove("PGAPPNAME");
    assert_eq!(end(command).await.expect(0).stdout, "sqlock:nightly report\nsqlock:inner\n");
    let mut command = sqlock(&db, &arguments);
    command.env("PGAPPNAME", "mine");
    assert_eq!(end(command).await.expect(0).stdout, "mine\nmine\n");
}

// ---- runs inside of runs

#[tokio::test]
async fn nested_run_of_same_name_enters_without_freeing() {
    let fixture = CommandFixture::new().await;
    let script = format!(r#""$SQLOCK" run -n a -- "$SQLOCK" run -n a -- true && {OBEDIENT}"#);
    let holder = fixture.start_as(nesting(&fixture, &["run", "a"]), &script).up().await;
    assert!(!fixture.is_free("a").await);
    holder.order("go");
    holder.end().await.expect(0);
    assert!(fixture.is_free("a").await);
}

#[tokio::test]
async fn nested_run_enters_name_of_any_outer_run() {
    let fixture = CommandFixture::new().await;
    let script = format!(r#""$SQLOCK" run -n b -- "$SQLOCK" run -n a -- "$SQLOCK" run -n b -- true && {OBEDIENT}"#);
    let holder = fixture.start_as(nesting(&fixture, &["run", "a"]), &script).up().await;
    assert!(fixture.is_free("b").await);
    assert!(!fixture.is_free("a").await);
    holder.order("go");
    holder.end().await.expect(0);
}

#[tokio::test]
async fn siblings_inside_run_exclude_on_another_name() {
    let fixture = CommandFixture::new().await;
    let script = r#"
        "$SQLOCK" run b -- sh -c 'echo up >&3; read go <"$ORDERS"' &
        read go <"$SECOND"
        "$SQLOCK" run -n b -- true
        echo "$?" >&3
        wait
        "$SQLOCK" run -n b -- true
        echo "$?" >&3
    "#;
    let second = fixture.fifo("second");
    let mut command = nesting(&fixture, &["run", "a"]);
    command.env("SECOND", &second);
    let mut holder = fixture.start_as(command, script).up().await;
    soon("the second", tokio::fs::write(&second, "go\n")).await.expect("a FIFO can be written");
    assert_eq!(holder.report.line().await, "75");
    holder.order("go");
    assert_eq!(holder.report.line().await, "0");
    holder.end().await.expect(0);
}

fn nesting(fixture: &CommandFixture, arguments: &[&str]) -> Command {
    let mut command = fixture.sqlock(arguments);
    command.env("SQLOCK", program());
    command
}

// ---- helpers

/// Evicts the holder of "a".
async fn take_away(locks: &Locks) {
    let token = held(locks, "a").await.expect("held").token;
    assert!(locks.evict("a", token).await.expect("evicted"));
}

async fn evict(fixture: &CommandFixture, name: &str) -> bool {
    let token = u64::try_from(fixture.row(name).await.token).expect("tokens are positive");
    run(&fixture.db, &["unlock", name, "--token", &token.to_string()]).await.code() == 0
}

/// One of the sets of signals in a `/proc/PID/status`.
fn mask(status: &str, which: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix(which)?.strip_prefix(':'));
    u64::from_str_radix(mask.expect("the mask of signals").trim(), 16).expect("a number")
}

fn bit(signal: Signal) -> u64 {
    1 << (signal as i32 - 1)
}
