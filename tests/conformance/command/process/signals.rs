//! Signals to the command: forwarded, ignored, and to stop and continue.

use super::*;

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
sh -c 'trap "echo TERM >&3; exit" TERM; trap "echo HUP >&3" HUP; echo up >&3; until read go <"$ORDERS"; do :; done; echo done >&3' &
exit 3
"#;

#[tokio::test]
async fn name_stays_held_until_process_group_ends() {
    let fixture = CommandFixture::new().await;
    let mut holder = fixture.start(&["--kill-after", "1", "--ttl", "9", "a"], BACKGROUND).up().await;
    holder.stderr.shows("stays held until its background processes have ended").await;
    holder.signal(Signal::SIGHUP);
    assert_eq!(holder.report.line().await, "HUP");
    // The lease is renewed after the command has ended. HUP does not set the limit of --kill-after.
    for _ in 0..2 {
        fixture.renewed("a").await;
    }
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
async fn signaled_candidate_does_not_acquire_again() {
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
    let mut fixture = CommandFixture::with_proxy().await;
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
async fn signal_to_end_reaches_a_stopped_command() {
    let fixture = CommandFixture::new().await;
    let holder = fixture.start(&["a"], OBEDIENT).up().await;
    let command = holder.command().await;
    kill(command, Signal::SIGSTOP).expect("the command can be stopped");
    poll_until("the command stops", || state(command) == Some('T')).await;
    holder.signal(Signal::SIGTERM);
    holder.end().await.expect(143);
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
