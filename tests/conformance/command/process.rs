//! The command as a process: its environment, its signals, and its death before the end of the
//! lease; then the same in a terminal.

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
use crate::support::command_fixture::{
    CommandFixture, Report, Row, Terminal, children, group, name, now, poll_for, poll_until, shell_of, state,
};
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

// ---- after its loss

#[tokio::test]
async fn process_tree_dies_when_lease_is_lost() {
    let fixture = CommandFixture::new().await;
    let mut holder = fixture.start(&["a"], FAMILY).up().await;
    assert!(evict(&fixture, "a").await);
    holder.report.gone().await;
    let ended = holder.end().await.expect(79);
    assert!(ended.stderr.contains("\"a\""), "{}", ended.stderr);
    assert!(fixture.is_free("a").await);
}

#[tokio::test]
async fn process_tree_dies_when_sqlock_is_killed() {
    let fixture = CommandFixture::new().await;
    let mut holder = fixture.start(&["--ttl", "1000", "a"], FAMILY).up().await;
    holder.signal(Signal::SIGKILL);
    holder.report.gone().await;
    // The lease was not released: the name becomes free after the TTL.
    assert!(!fixture.is_free("a").await);
}

#[tokio::test]
async fn nested_run_dies_with_the_outer_run() {
    let nested = format!("inner=$(cat <<'END'\n{FAMILY}\nEND\n)\n{} run --ttl 1000 b -- sh -c \"$inner\"\n", program());
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let fixture = CommandFixture::new().await;
        let mut holder = fixture.start(&["--ttl", "9", "a"], &nested).up().await;
        holder.signal(signal);
        holder.report.gone().await;
    }
}

/// Neither sqlock nor the watchdog is left to kill the command.
#[tokio::test]
async fn command_dies_when_sqlock_and_watchdog_are_killed() {
    let fixture = CommandFixture::new().await;
    let mut holder = fixture.start(&["--ttl", "1000", "a"], "echo up >&3; exec sleep 1000").up().await;
    let watchdog = holder.watchdog().await;
    holder.stop().await;
    kill(watchdog, Signal::SIGSTOP).expect("the watchdog can be stopped");
    poll_until("the watchdog stops", || state(watchdog) == Some('T')).await;
    kill(watchdog, Signal::SIGKILL).expect("the watchdog can be killed");
    holder.signal(Signal::SIGKILL);
    holder.report.gone().await;
}

#[tokio::test]
async fn killed_watchdog_is_replaced_and_command_stays_protected() {
    const TTL: Duration = Duration::from_secs(10);
    let fixture = CommandFixture::new().await;
    let mut holder = fixture.start(&["--ttl", "10", "a"], FAMILY).up().await;
    for _ in 0..3 {
        let first = holder.watchdog().await;
        kill(first, Signal::SIGKILL).expect("the watchdog can be killed");
        holder.watchdog_after(Some(first)).await;
    }
    fixture.renewed("a").await;
    fixture.renewed("a").await;
    // sqlock cannot kill it now, and the last renewal counts.
    holder.stop().await;
    tokio::time::sleep(TTL / 10).await;
    let row = fixture.row("a").await;
    let (died, _) = holder.report.gone().await;
    assert!(died <= row.expires_at, "{} µs late", died - row.expires_at);
    holder.signal(Signal::SIGCONT);
    holder.end().await.expect(79);
}

/// The command has run, although sqlock fails.
#[tokio::test]
async fn irreplaceable_watchdog_ends_command_and_keeps_hold_time() {
    let fixture = CommandFixture::new().await;
    let script = "echo up >&3; exec sleep 1000";
    let holder = fixture.start(&["--hold-at-least", "10m", "a"], script).up().await;
    let sqlock = holder.pid();
    let kill_watchdogs = async {
        let mut killed = None;
        loop {
            let is_next = |child: &Pid| name(*child) == "lease-watchdog" && Some(*child) != killed;
            let next = poll_for("a watchdog", || children(sqlock).into_iter().find(is_next)).await;
            // It may have ended together with sqlock.
            let _ = kill(next, Signal::SIGKILL);
            killed = Some(next);
        }
    };
    let ended = tokio::select! {
        () = kill_watchdogs => unreachable!("it has no end"),
        ended = holder.end() => ended.expect(71),
    };
    assert!(ended.stderr.contains("the watchdog has died"), "{}", ended.stderr);
    assert!(!fixture.is_free("a").await);
}

#[tokio::test]
async fn sqlock_kills_command_while_watchdog_is_stopped() {
    let mut fixture = CommandFixture::wired().await;
    let mut holder = fixture.start(&["--ttl", "10", "a"], FAMILY).up().await;
    let watchdog = holder.watchdog().await;
    kill(watchdog, Signal::SIGSTOP).expect("the watchdog can be stopped");
    fixture.renewed("a").await;
    fixture.cut().await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let row = fixture.row("a").await;
    let (died, _) = holder.report.gone().await;
    assert!(died <= row.expires_at, "{} µs late", died - row.expires_at);
    holder.end().await.expect(79);
    poll_until("the watchdog is gone", || state(watchdog).is_none_or(|state| state == 'Z')).await;
}

#[tokio::test]
async fn no_process_remains_after_the_end() {
    let fixture = CommandFixture::new().await;
    let holder = fixture.start(&["a"], OBEDIENT).up().await;
    let family = [holder.watchdog().await, holder.command().await];
    holder.order("go");
    holder.end().await.expect(0);
    for pid in family {
        poll_until("the end of both", || state(pid).is_none()).await;
    }
}

/// The first process of a container inherits every orphan.
#[tokio::test]
async fn sqlock_reaps_orphans_as_first_process() {
    let fixture = CommandFixture::new().await;
    let script = r#"
        echo "$(cat /proc/1/comm)" >&3
        orphan=$(sh -c 'sleep 0.1 >/dev/null 3>&- & echo $!')
        while [ -e "/proc/$orphan" ]; do sleep 0.05; done
        echo reaped >&3
        exit 5
    "#;
    let mut holder = fixture.start_as(first_process(&fixture), script);
    assert_eq!(holder.report.line().await, "sqlock");
    assert_eq!(holder.report.line().await, "reaped");
    holder.end().await.expect(5);
}

/// A probe of the container leaves an orphan while sqlock has no child.
#[tokio::test]
async fn waiting_first_process_reaps_orphans() {
    let fixture = CommandFixture::new().await;
    let _holder = fixture.start(&["a"], OBEDIENT).up().await;
    let waiter = fixture.start_as(first_process(&fixture), OBEDIENT);
    waiter.stderr.shows("waiting for").await;
    let sqlock = poll_for("sqlock", || children(waiter.pid()).into_iter().find(|child| name(*child) == "sqlock")).await;
    let mut probe = Command::new("nsenter");
    if !geteuid().is_root() {
        probe.args(["--user", "--preserve-credentials"]);
    }
    probe.args(["--pid", "--target", &sqlock.to_string(), "sh", "-c", "sleep 1000 &"]).stdin(Stdio::null());
    let status = soon("the end of the probe", probe.status()).await.expect("nsenter of util-linux");
    assert!(status.success(), "{status}");
    let orphan = poll_for("the orphan", || children(sqlock).into_iter().find(|child| name(*child) == "sleep")).await;
    kill(orphan, Signal::SIGKILL).expect("the orphan can be killed");
    poll_until("the orphan is reaped", || state(orphan).is_none()).await;
}

/// Returns `sqlock run a` as the first process of a PID namespace.
fn first_process(fixture: &CommandFixture) -> Command {
    let mut command = Command::new("unshare");
    // An unprivileged user must become root.
    if !geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command
        .args(["--fork", "--kill-child", "--pid", "--mount-proc", program(), "run", "a"])
        .env("DATABASE_URL", &fixture.db.url)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

#[tokio::test]
async fn unstartable_command_leaves_the_name_free() {
    let db = empty().await;
    run(&db, &["run", "--ttl", "1000", "a", "--", "/nonexistent/command"]).await.expect(127);
    run(&db, &["run", "--ttl", "1000", "a", "--", "/"]).await.expect(126);
    run(&db, &["run", "--hold-at-least", "10m", "a", "--", "/nonexistent/command"]).await.expect(127);
    run(&db, &["run", "-n", "a", "--", "true"]).await.expect(0);
}

/// A process of the command fills stderr, which nobody reads, before sqlock prints a note.
#[tokio::test]
async fn full_stderr_costs_no_lease() {
    let db = empty().await;
    let locks = beside(&db).await;
    // A busy machine may delay heartbeats by seconds.
    let mut holder = start(sqlock(&db, &["run", "--ttl", "6s", "a", "--", "sh", "-c", "yes >&2 & exit 0"]));
    let expiry = async || held(&locks, "a").await.map(|lease| lease.expires_at);
    crate::support::until("the grant", async || expiry().await.is_some()).await;
    let granted = expiry().await.expect("held");
    let later = granted + Duration::from_secs(8);
    crate::support::until("renewals", async || expiry().await.expect("held") > later).await;
    drop(holder.stderr.take());
    let status = soon("the end of sqlock", holder.wait()).await.expect("it can be waited for");
    assert!(status.success(), "{status}");
}

/// sqlock has a message to write after its work.
#[tokio::test]
async fn full_stderr_does_not_keep_sqlock_alive() {
    let db = empty().await;
    let (_reader, mut writer) = UnixStream::pair().expect("a pair of sockets");
    writer.set_nonblocking(true).expect("the socket is ours");
    while writer.write(&[b'x'; 1024]).is_ok() {}
    writer.set_nonblocking(false).expect("the socket is ours");
    let mut command = sqlock(&db, &["run", "a", "--", "/nonexistent/command"]);
    command.stderr(OwnedFd::from(writer));
    let status = soon("the end of sqlock", command.status()).await.expect("sqlock can be started");
    assert_eq!(status.code(), Some(127));
}

// ---- signals

#[tokio::test]
async fn every_signal_reaches_the_command_exactly_once() {
    let fixture = CommandFixture::new().await;
    let mut holder = fixture.start(&["a"], LISTENER).up().await;
    for (signal, name) in FORWARDED {
        holder.signal(signal);
        assert_eq!(holder.report.line().await, name);
    }
    holder.signal(Signal::SIGQUIT);
    let (_, lines) = holder.report.gone().await;
    assert_eq!(lines, ["QUIT"]);
    holder.end().await.expect(7);
}

/// A shell signals its jobs by process group.
#[tokio::test]
async fn signal_to_process_group_reaches_command_once() {
    let fixture = CommandFixture::new().await;
    let mut command = fixture.sqlock(&["run", "a"]);
    command.process_group(0);
    let mut holder = fixture.start_as(command, LISTENER).up().await;
    for (signal, name) in FORWARDED {
        killpg(holder.pid(), signal).expect("the group can be signalled");
        assert_eq!(holder.report.line().await, name);
    }
    killpg(holder.pid(), Signal::SIGQUIT).expect("the group can be signalled");
    let (_, lines) = holder.report.gone().await;
    assert_eq!(lines, ["QUIT"]);
    holder.end().await.expect(7);
}

const FORWARDED: [(Signal, &str); 7] = [
    (Signal::SIGHUP, "HUP"),
    (Signal::SIGINT, "INT"),
    (Signal::SIGTERM, "TERM"),
    (Signal::SIGUSR1, "USR1"),
    (Signal::SIGUSR2, "USR2"),
    (Signal::SIGALRM, "ALRM"),
    (Signal::SIGWINCH, "WINCH"),
];

#[tokio::test]
async fn fatal_signal_gives_exit_code_128_plus_number() {
    let fixture = CommandFixture::new().await;
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGUSR1] {
        let holder = fixture.start(&["a"], "echo up >&3; exec sleep 1000").up().await;
        holder.signal(signal);
        holder.end().await.expect(128 + signal as i32);
    }
    const REAL_TIME: i32 = 35;
    for signal in [Signal::SIGKILL as i32, Signal::SIGSEGV as i32, REAL_TIME] {
        let script = format!("kill -{signal} $$; sleep 1000");
        run(&fixture.db, &["run", "a", "--", "sh", "-c", &script]).await.expect(128 + signal);
    }
    assert!(fixture.is_free("a").await);
}

#[tokio::test]
async fn command_ignoring_term_keeps_lease_until_its_end() {
    let fixture = CommandFixture::new().await;
    let script = "trap 'echo TERM >&3' TERM; echo up >&3; until read go <\"$ORDERS\"; do :; done; exit 4";
    let mut holder = fixture.start(&["--ttl", "9", "a"], script).up().await;
    let before = fixture.row("a").await;
    holder.signal(Signal::SIGTERM);
    assert_eq!(holder.report.line().await, "TERM");
    // The lease is still renewed, past its former expiry.
    let beyond = |row: &Row| now() > before.expires_at && row.expires_at > now();
    let after = fixture.row_when("the end it had", "a", beyond).await;
    assert_eq!(after.token, before.token);
    assert!(!fixture.is_free("a").await);
    holder.order("go");
    holder.end().await.expect(4);
    assert!(fixture.is_free("a").await);
}

/// A stopped service may be a script: the shell ends at once, and its children still have work to
/// finish.
#[tokio::test]
async fn lease_is_kept_while_children_finish_after_term() {
    let fixture = CommandFixture::new().await;
    let child = "trap 'echo TERM >&3' TERM; echo up >&3; until read go <\"$ORDERS\"; do :; done; echo done >&3";
    let script = format!("sh -c '{}' & wait", child.replace('\'', "'\\''"));
    let mut holder = fixture.start(&["a"], &script).up().await;
    let command = holder.command().await;
    holder.signal(Signal::SIGTERM);
    assert_eq!(holder.report.line().await, "TERM");
    poll_until("the shell ends", || state(command).is_none()).await;
    assert!(!fixture.is_free("a").await);
    holder.order("go");
    assert_eq!(holder.report.line().await, "done");
    holder.end().await.expect(143);
    assert!(fixture.is_free("a").await);
}

#[tokio::test]
async fn stubborn_children_are_killed_before_the_release() {
    let fixture = CommandFixture::new().await;
    let mut holder = fixture.start(&["--kill-after", "1", "a"], &format!("({FAMILY}) & wait")).up().await;
    holder.signal(Signal::SIGTERM);
    holder.report.gone().await;
    holder.end().await.expect(143);
    assert!(fixture.is_free("a").await);
}

/// The command exits by itself, and its child still works.
const BACKGROUND: &str = r#"
sh -c 'trap "echo TERM >&3; exit" TERM; echo up >&3; until read go <"$ORDERS"; do :; done; echo done >&3' &
exit 3
"#;

#[tokio::test]
async fn name_stays_held_until_process_group_ends() {
    let fixture = CommandFixture::new().await;
    let mut holder = fixture.start(&["--kill-after", "1", "--ttl", "9", "a"], BACKGROUND).up().await;
    holder.stderr.shows("stays held until its background processes have ended").await;
    // The lease is renewed after the command has ended.
    fixture.renewed("a").await;
    assert!(!fixture.is_free("a").await);
    holder.order("go");
    assert_eq!(holder.report.line().await, "done");
    holder.end().await.expect(3);
    assert!(fixture.is_free("a").await);
}

#[tokio::test]
async fn signal_ends_background_processes_of_ended_command() {
    let fixture = CommandFixture::new().await;
    let mut holder = fixture.start(&["--kill-after", "1", "a"], BACKGROUND).up().await;
    holder.stderr.shows("stays held until its background processes have ended").await;
    holder.signal(Signal::SIGTERM);
    assert_eq!(holder.report.line().await, "TERM");
    holder.end().await.expect(3);

    let stubborn = "(trap '' TERM; echo up >&3; while :; do sleep 1000; done) & exit 4";
    let mut holder = fixture.start(&["--kill-after", "1", "a"], stubborn).up().await;
    holder.stderr.shows("stays held until its background processes have ended").await;
    holder.signal(Signal::SIGTERM);
    holder.report.gone().await;
    holder.end().await.expect(4);
    assert!(fixture.is_free("a").await);
}

#[tokio::test]
async fn lost_lease_kills_background_processes() {
    let fixture = CommandFixture::new().await;
    let mut holder = fixture.start(&["a"], BACKGROUND).up().await;
    holder.stderr.shows("stays held until its background processes have ended").await;
    assert!(evict(&fixture, "a").await);
    holder.report.gone().await;
    holder.end().await.expect(79);
}

#[tokio::test]
async fn no_wait_releases_lease_with_the_command() {
    let fixture = CommandFixture::new().await;
    let script = "echo up >&3; sleep 60 >/dev/null 2>&1 3>&- & exit 200";
    let options = ["--no-wait", "--kill-after", "1000", "--ttl", "3000", "a"];
    let holder = fixture.start(&options, script).up().await;
    holder.end().await.expect(200);
    assert!(fixture.is_free("a").await);
}

/// Some supervisors ignore SIGCHLD, and the processes they start inherit that.
#[tokio::test]
async fn parent_ignoring_sigchld_does_not_break_sqlock() {
    let db = empty().await;
    let mut command = Command::new("python3");
    let ignoring =
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])";
    command
        .args(["-c", ignoring, program(), "run", "a", "--", "sh", "-c", "exit 5"])
        .env("DATABASE_URL", &db.url)
        .stdin(Stdio::null());
    end(command).await.expect(5);
    run(&db, &["run", "-n", "a", "--", "true"]).await.expect(0);
}

#[tokio::test]
async fn paused_watchdog_does_not_kill_after_resuming() {
    let fixture = CommandFixture::new().await;
    let holder = fixture.start(&["--ttl", "6", "--kill-after", "0", "a"], OBEDIENT).up().await;
    let watchdog = holder.watchdog().await;
    kill(watchdog, Signal::SIGSTOP).expect("the watchdog can be stopped");
    poll_until("the watchdog stops", || state(watchdog) == Some('T')).await;
    let before = fixture.row("a").await;
    // Longer than any deadline that the watchdog knew.
    fixture.row_when("a renewal after that", "a", |row| now() > before.expires_at && row.expires_at > now()).await;
    kill(watchdog, Signal::SIGCONT).expect("the watchdog can be continued");
    poll_until("the watchdog is up to date", || state(watchdog) == Some('S')).await;
    fixture.renewed("a").await;
    holder.order("go");
    holder.end().await.expect(0);
}

#[tokio::test]
async fn signals_do_not_end_a_standby_candidate() {
    let db = empty().await;
    // A signal to a candidate that is elected at that moment reaches its command.
    let script = "trap '' USR1; trap 'exit 7' QUIT; echo up; while :; do sleep 0.05; done";
    let mut candidate = Running::start(sqlock(&db, &["run", "--elect", "a", "--", "sh", "-c", script]));
    candidate.prints("up").await;
    let locks = beside(&db).await;
    let next = tokio::spawn(locks.lease("a").acquire());
    take_away(&locks).await;
    let next = soon("the turn of the next", next).await.expect("no panic").expect("acquired");
    candidate.says("acquiring again").await;
    candidate.says("waiting for").await;
    for signal in [rustix::process::Signal::WINCH, rustix::process::Signal::USR1, rustix::process::Signal::CONT] {
        candidate.signal(signal);
    }
    next.release().await.expect("ours to the end");
    candidate.prints("up").await;
    candidate.signal(rustix::process::Signal::QUIT);
    candidate.end().await.expect(7);
}

#[tokio::test]
async fn candidate_told_to_end_does_not_acquire_again() {
    let db = empty().await;
    let script = "trap 'echo told' TERM; echo up; while :; do sleep 0.05; done";
    let mut candidate = Running::start(sqlock(&db, &["run", "--elect", "a", "--", "sh", "-c", script]));
    candidate.prints("up").await;
    candidate.signal(rustix::process::Signal::TERM);
    candidate.prints("told").await;
    let locks = beside(&db).await;
    take_away(&locks).await;
    candidate.end().await.expect(79);
}

#[tokio::test]
async fn candidate_that_survives_a_hangup_acquires_again() {
    let db = empty().await;
    let script = "trap 'echo reloaded' HUP; echo up; while :; do sleep 0.05; done";
    let mut candidate = Running::start(sqlock(&db, &["run", "--elect", "a", "--", "sh", "-c", script]));
    candidate.prints("up").await;
    candidate.signal(rustix::process::Signal::HUP);
    candidate.prints("reloaded").await;
    let locks = beside(&db).await;
    take_away(&locks).await;
    candidate.prints("up").await;
    candidate.signal(rustix::process::Signal::TERM);
    candidate.end().await.expect(143);
}

#[tokio::test]
async fn candidate_ended_during_release_does_not_acquire_again() {
    let mut fixture = CommandFixture::wired().await;
    let mut candidate =
        fixture.start(&["--elect", "--ttl", "6", "--kill-after", "2", "a"], "echo up >&3; exec sleep 1000").up().await;
    fixture.cut().await;
    // The command ends before its lease, whose release is not answered.
    candidate.report.gone().await;
    candidate.signal(Signal::SIGTERM);
    let ended = candidate.end().await;
    assert!([79, 143].contains(&ended.code()), "{}: {}", ended.code(), ended.stderr);
}

/// Each command leaves a process that the loss of its lease does not kill, and that sqlock adopts.
#[tokio::test]
async fn candidate_reports_end_of_command_beside_earlier_orphans() {
    let db = empty().await;
    let orphan = "env -i setsid sleep 60 </dev/null >/dev/null 2>&1 &";
    let script = format!("{orphan} trap 'exit 7' QUIT; echo up; while :; do sleep 0.05; done");
    let mut candidate = Running::start(sqlock(&db, &["run", "--elect", "a", "--", "sh", "-c", &script]));
    candidate.prints("up").await;
    let locks = beside(&db).await;
    for _ in 0..4 {
        take_away(&locks).await;
        candidate.prints("up").await;
    }
    candidate.signal(rustix::process::Signal::QUIT);
    candidate.end().await.expect(7);
}

#[tokio::test]
async fn stopped_command_continues_when_sqlock_gets_sigcont() {
    let fixture = CommandFixture::new().await;
    let holder = fixture.start(&["a"], OBEDIENT).up().await;
    let command = holder.command().await;
    holder.signal(Signal::SIGTSTP);
    poll_until("the command stops", || state(command) == Some('T')).await;
    holder.signal(Signal::SIGCONT);
    poll_until("the command goes on", || state(command) != Some('T')).await;
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
    let mut fixture = CommandFixture::wired().await;
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
    let mut fixture = CommandFixture::wired().await;
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

// ---- terminals

#[tokio::test]
async fn ctrl_c_reaches_the_command_exactly_once() {
    let fixture = CommandFixture::new().await;
    let mut shell = Shell::start(&fixture, "", LISTENER);
    assert_eq!(shell.report.line().await, "up");
    shell.terminal.keys(CTRL_C);
    assert_eq!(shell.report.line().await, "INT");
    shell.terminal.keys(CTRL_BACKSLASH);
    let (_, lines) = shell.report.gone().await;
    assert_eq!(lines, ["QUIT"]);
    shell.ends_with(7).await;
}

#[tokio::test]
async fn ctrl_c_ends_default_command_with_130() {
    let fixture = CommandFixture::new().await;
    let mut shell = Shell::start(&fixture, "", "echo up >&3; exec sleep 1000");
    assert_eq!(shell.report.line().await, "up");
    shell.terminal.keys(CTRL_C);
    shell.ends_with(130).await;
    assert!(fixture.is_free("a").await);
}

/// `docker run -it` and `ssh -t` start sqlock without a shell around it.
#[tokio::test]
async fn ctrl_c_reaches_command_without_a_shell() {
    let fixture = CommandFixture::new().await;
    let lines = fixture.fifo("lines");
    let mut report = Report::of(lines.clone());
    let script = format!("exec 3>'{}'; {LISTENER}", lines.display());
    let arguments = ["run", "a", "--", "sh", "-c", &script];
    let terminal = Terminal::start(program(), &arguments, &[("DATABASE_URL", &fixture.db.url)]);
    assert_eq!(report.line().await, "up");
    terminal.keys(CTRL_C);
    assert_eq!(report.line().await, "INT");
    terminal.keys(CTRL_BACKSLASH);
    assert_eq!(report.gone().await.1, ["QUIT"]);
    assert_eq!(terminal.end().await.code(), Some(7));
}

#[tokio::test]
async fn command_reads_terminal_and_gets_ctrl_c_once() {
    let fixture = CommandFixture::new().await;
    let script = format!("read line; echo \"got $line\" >&3; {LISTENER}");
    let mut shell = Shell::start(&fixture, "", &script);
    shell.terminal.keys("something\n");
    assert_eq!(shell.report.line().await, "got something");
    assert_eq!(shell.report.line().await, "up");
    shell.terminal.keys(CTRL_C);
    assert_eq!(shell.report.line().await, "INT");
    shell.terminal.keys(CTRL_BACKSLASH);
    assert_eq!(shell.report.gone().await.1, ["QUIT"]);
    shell.ends_with(7).await;
    // The shell has the terminal again.
    shell.terminal.keys("echo an\"\"swer\n");
    shell.terminal.screen.shows("answer").await;
}

#[tokio::test]
async fn command_of_nested_run_reads_terminal() {
    let fixture = CommandFixture::new().await;
    let script = "\"$SQLOCK\" run b -- sh -c 'read line; echo \"got $line\" >&3'\necho \"ended with $?\" >&3";
    let mut shell = Shell::start(&fixture, "", script);
    shell.terminal.keys("something\n");
    assert_eq!(shell.report.line().await, "got something");
    assert_eq!(shell.report.line().await, "ended with 0");
    shell.ends_with(0).await;
}

/// A nested job that asked for the foreground may send SIGTTIN after it has it.
#[tokio::test]
async fn late_sigttin_does_not_stop_the_job() {
    let fixture = CommandFixture::new().await;
    let mut shell = Shell::start(&fixture, "", "read line; kill -TTIN $$; echo \"got $line\" >&3");
    shell.terminal.keys("something\n");
    assert_eq!(shell.report.line().await, "got something");
    shell.ends_with(0).await;
}

#[tokio::test]
async fn ctrl_z_and_fg_within_ttl_resume_command() {
    ctrl_z_and_fg_within_the_ttl(COUNTER).await;
}

/// The command owns the terminal, and sqlock does not.
#[tokio::test]
async fn ctrl_z_and_fg_resume_terminal_reading_command() {
    ctrl_z_and_fg_within_the_ttl(&format!("read line; {COUNTER}")).await;
}

/// Ctrl-Z stops the command of the nested run. Both runs follow.
#[tokio::test]
async fn ctrl_z_and_fg_resume_nested_command() {
    let reader = format!("read line; {COUNTER}");
    let script = format!("trap : USR1\nreader=$(cat <<'END'\n{reader}\nEND\n)\n\"$SQLOCK\" run b -- sh -c \"$reader\"");
    ctrl_z_and_fg_within_the_ttl(&script).await;
}

async fn ctrl_z_and_fg_within_the_ttl(script: &str) {
    let fixture = CommandFixture::new().await;
    let mut shell = Shell::start(&fixture, "--ttl 1000", script);
    if script.contains("read line") {
        shell.terminal.keys("something\n");
    }
    assert_eq!(shell.report.line().await, "up");
    let sqlock = shell.sqlock().await;
    let command = shell_of(sqlock).await;
    for round in 1..=2 {
        shell.terminal.keys(CTRL_Z);
        shell.says_stopped(round, sqlock, command).await;
        let count = shell.count();
        shell.terminal.keys("fg\n");
        poll_until("the command goes on", || shell.count() > count).await;
        assert_ne!(state(sqlock), Some('T'));
    }
    assert!(!fixture.is_free("a").await);
    kill(sqlock, Signal::SIGUSR1).expect("sqlock can be signalled");
    shell.ends_with(0).await;
    assert!(fixture.is_free("a").await);
}

#[tokio::test]
async fn ctrl_z_past_ttl_never_resumes_the_command() {
    ctrl_z_past_the_ttl("").await;
}

#[tokio::test]
async fn ctrl_z_past_ttl_never_resumes_terminal_reader() {
    ctrl_z_past_the_ttl("read line; ").await;
}

async fn ctrl_z_past_the_ttl(first: &str) {
    let fixture = CommandFixture::new().await;
    let mut shell = Shell::start(&fixture, "--ttl 10", &format!("{first}{COUNTER}"));
    if !first.is_empty() {
        shell.terminal.keys("something\n");
    }
    assert_eq!(shell.report.line().await, "up");
    let sqlock = shell.sqlock().await;
    let command = shell_of(sqlock).await;
    shell.terminal.keys(CTRL_Z);
    shell.says_stopped(1, sqlock, command).await;
    let count = shell.count();
    let row = fixture.row("a").await;
    let (died, _) = shell.report.gone().await;
    assert!(died <= row.expires_at, "{} µs late", died - row.expires_at);
    // Another client acquires it, and keeps it.
    let next = fixture.start(&["a"], OBEDIENT).up().await;
    shell.terminal.keys("fg\n");
    shell.ends_with(79).await;
    assert_eq!(shell.count(), count);
    assert!(!fixture.is_free("a").await);
    next.order("go");
    next.end().await.expect(0);
}

#[tokio::test]
async fn pipeline_behaves_as_without_sqlock() {
    let fixture = CommandFixture::new().await;
    let script = format!("echo through the pipe; {LISTENER}");
    let mut shell = Shell::start_in(&fixture, "", &script, "| cat");
    assert_eq!(shell.report.line().await, "up");
    shell.terminal.screen.shows("through the pipe").await;
    // As long as the command does not read from the terminal, a reader of its output can: it is in
    // the foreground.
    let sqlock = shell.sqlock().await;
    let cat = poll_for("cat", || children(shell.terminal.pid()).into_iter().find(|pid| name(*pid) == "cat")).await;
    assert_eq!(group(cat), group(sqlock));
    kill(sqlock, Signal::SIGINT).expect("sqlock can be signalled");
    assert_eq!(shell.report.line().await, "INT");
    kill(sqlock, Signal::SIGQUIT).expect("sqlock can be signalled");
    shell.ends_with(7).await;
}

#[tokio::test]
async fn ctrl_c_ends_a_pipeline() {
    let fixture = CommandFixture::new().await;
    let mut shell = Shell::start_in(&fixture, "", "echo up >&3; exec sleep 1000", "| cat");
    assert_eq!(shell.report.line().await, "up");
    shell.terminal.keys(CTRL_C);
    shell.ends_with(130).await;
    assert!(fixture.is_free("a").await);
}

/// A terminal shows one line about the wait, updated each second, and the list in its width.
#[tokio::test]
async fn terminal_shows_wait_in_place_and_narrow_table() {
    let fixture = CommandFixture::new().await;
    let holder = fixture.start(&["--label", "the release of the second week of this month", "a"], OBEDIENT).up().await;
    let environment = [("DATABASE_URL", fixture.db.url.as_str()), ("SQLOCK", program()), ("TERM", "xterm")];
    let script = "stty rows 24 cols 80; \"$SQLOCK\" --sidecar ls; echo listed; \"$SQLOCK\" --sidecar run a -- true";
    let terminal = Terminal::start("sh", &["-c", script], &environment);
    terminal.screen.shows("listed").await;
    let listed = terminal.screen.text();
    assert!(listed.lines().all(|line| line.trim_end().chars().count() <= 80), "{listed}");
    assert!(listed.contains("release") && listed.lines().count() > 4, "{listed}");
    let shown = |text: &str| text.matches("\r\x1b[K").count() >= 3;
    assert!(terminal.screen.shows_when(shown).await, "{}", terminal.screen.text());
    let live = terminal.screen.text();
    let line = live.rsplit("\r\x1b[K").next().expect("a line");
    assert!(line.contains("waiting for") && line.contains("next in the queue") && line.len() < 80, "{line}");
    holder.order("go");
    holder.end().await.expect(0);
    terminal.screen.shows("\"a\" obtained after").await;
    assert!(terminal.end().await.success());
}

/// Such a terminal would show the codes as text.
#[tokio::test]
async fn dumb_terminal_gets_no_escape_codes() {
    let fixture = CommandFixture::new().await;
    let holder = fixture.start(&["a"], OBEDIENT).up().await;
    let environment = [("DATABASE_URL", fixture.db.url.as_str()), ("SQLOCK", program()), ("TERM", "dumb")];
    // With one of these variables, there are colours whatever TERM says.
    let unset = "unset CI CLICOLOR CLICOLOR_FORCE";
    let script = format!("{unset}; \"$SQLOCK\" --sidecar run a -- true; \"$SQLOCK\" --sidecar ls --watch");
    let terminal = Terminal::start("sh", &["-c", &script], &environment);
    terminal.screen.shows("waiting for").await;
    holder.order("go");
    holder.end().await.expect(0);
    terminal.screen.shows("\"a\" obtained after").await;
    terminal.screen.shows("HOLDER").await;
    terminal.keys(CTRL_C);
    let shown = terminal.screen.closed().await;
    assert!(!shown.contains('\u{1b}'), "{shown:?}");
}

#[tokio::test]
async fn terminal_modes_are_restored_after_killed_command() {
    let fixture = CommandFixture::new().await;
    let mut shell = Shell::start(&fixture, "", "stty -echo </dev/tty; kill -9 $$");
    shell.ends_with(137).await;
    shell.terminal.keys("stty -a | grep -q -w -e -echo || echo ec\"\"hoes\n");
    shell.terminal.screen.shows("echoes").await;
}

/// The shell that could continue the job has ended: a command that reads from the terminal ends.
#[tokio::test]
async fn terminal_reader_without_a_shell_is_hung_up() {
    let fixture = CommandFixture::new().await;
    let start = fixture.fifo("start");
    let environment = [("DATABASE_URL", fixture.db.url.as_str()), ("SQLOCK", program()), ("TERM", "dumb")];
    let terminal = Terminal::start("bash", &["--norc", "--noprofile", "--noediting", "-i"], &environment);
    let job = format!("read go <'{}'; \"$SQLOCK\" run a -- cat </dev/tty; echo \"ended with $?\"", start.display());
    terminal.keys(&format!("sh -c '({}) &'\n", job.replace('\'', "'\\''")));
    terminal.keys("echo an\"\"swer\n");
    terminal.screen.shows("answer").await;
    tokio::task::spawn_blocking(move || std::fs::write(start, "go\n")).await.expect("no panic").expect("a reader");
    terminal.screen.shows("ended with 129").await;
    assert!(fixture.is_free("a").await);
}

const CTRL_C: &str = "\x03";
const CTRL_Z: &str = "\x1a";
const CTRL_BACKSLASH: &str = "\x1c";

/// An interactive shell in a terminal, with a `sqlock run` as its job.
struct Shell {
    terminal: Terminal,
    report: Report,
    count: String,
}

impl Shell {
    fn start(fixture: &CommandFixture, options: &str, script: &str) -> Self {
        Self::start_in(fixture, options, script, "")
    }

    /// `sqlock run OPTIONS a -- sh SCRIPT REST`.
    fn start_in(fixture: &CommandFixture, options: &str, script: &str, rest: &str) -> Self {
        let lines = fixture.fifo("lines");
        let report = Report::of(lines.clone());
        let (file, count) = (fixture.path("script"), fixture.path("count"));
        std::fs::write(&file, format!("exec 3>'{}'\n{script}", lines.display())).expect("a file can be written");
        let environment = [
            ("DATABASE_URL", fixture.db.url.as_str()),
            ("SQLOCK", program()),
            ("SCRIPT", &file),
            ("COUNT", &count),
            ("PS1", "$ "),
            ("TERM", "dumb"),
        ];
        let terminal = Terminal::start("bash", &["--norc", "--noprofile", "--noediting", "-i"], &environment);
        terminal.keys(&format!("\"$SQLOCK\" run {options} a -- sh \"$SCRIPT\" {rest}\n"));
        Self { terminal, report, count }
    }

    async fn sqlock(&self) -> Pid {
        let shell = self.terminal.pid();
        poll_for("sqlock", || children(shell).into_iter().find(|pid| name(*pid) == "sqlock")).await
    }

    fn count(&self) -> usize {
        std::fs::read_to_string(&self.count).unwrap_or_default().len()
    }

    /// Waits until the shell has reported `times` times that its job is stopped, and both processes
    /// are stopped.
    async fn says_stopped(&self, times: usize, sqlock: Pid, command: Pid) {
        let screen = &self.terminal.screen;
        let said = screen.shows_when(|text| text.matches("Stopped").count() >= times).await;
        let states = (state(sqlock), state(command));
        assert!(said && states == (Some('T'), Some('T')), "sqlock, command: {states:?}\n{}", screen.text());
    }

    /// Waits for the prompt of the shell, and returns the exit code that it shows.
    async fn ends_with(&mut self, code: i32) {
        self.terminal.keys("echo \"code=${PIPESTATUS[0]}.\"\n");
        self.terminal.screen.shows(&format!("code={code}.")).await;
    }
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
