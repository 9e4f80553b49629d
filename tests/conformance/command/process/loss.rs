//! The command after the loss of its lease: it ends before another holder works.

use super::*;

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
    let mut fixture = CommandFixture::with_proxy().await;
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
