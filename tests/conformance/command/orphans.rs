//! Orphans and zombies of the command: `sqlock run` ends although no other process waits for them.

use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::Command;

use crate::support::command::{program, run};
use crate::support::command_fixture::{CommandFixture, Run};
use crate::support::process_table::{self, poll_until, state};

/// A command with a child and a grandchild. On an order, it sends TERM to sqlock, its parent.
const PARENT: &str = r#"
sleep 1000 &
sh -c 'sleep 1000 & wait' &
echo up >&3
read go <"$ORDERS"
kill -TERM $PPID
wait
"#;

#[tokio::test]
async fn run_ends_by_term_where_init_reaps_nothing() {
    let fixture = CommandFixture::new().await;
    let holder = start_below_a_lazy_init(&fixture, &["--kill-after", "1", "a"], PARENT).await.up().await;
    holder.order("go");
    holder.stdout.shows("sqlock ended with 143").await;
    assert!(fixture.is_free("a").await);
}

#[tokio::test]
async fn run_ends_by_loss_where_init_reaps_nothing() {
    let fixture = CommandFixture::new().await;
    let holder = start_below_a_lazy_init(&fixture, &["a"], PARENT).await.up().await;
    let token = fixture.row("a").await.token.to_string();
    run(&fixture.db, &["unlock", "a", "--token", &token]).await.expect(0);
    holder.stdout.shows("sqlock ended with 79").await;
    assert!(fixture.is_free("a").await);
}

/// `/proc` shows the processes by their PIDs in the outer namespace.
#[tokio::test]
async fn detached_process_dies_by_loss_beside_outer_proc() {
    let fixture = CommandFixture::new().await;
    let script = "setsid sleep 1000 &\necho up >&3\nwait";
    let mut holder = start_below_a_lazy_init(&fixture, &["a"], script).await.up().await;
    let token = fixture.row("a").await.token.to_string();
    run(&fixture.db, &["unlock", "a", "--token", &token]).await.expect(0);
    holder.stdout.shows("sqlock ended with 79").await;
    holder.report.gone().await;
}

/// The parent of the zombie is alive, has left the process group, cannot be found by its
/// environment, and never waits.
#[tokio::test]
async fn run_ends_when_only_zombies_remain() {
    let fixture = CommandFixture::new().await;
    let script = r#"
        sh -c 'sh -c "read go <\"$ORDERS\"" & echo $! $$ >&3; exec env -i setsid sleep 1000 3>&- >/dev/null 2>&1' &
        wait
    "#;
    let mut holder = fixture.start(&["--kill-after", "1", "a"], script);
    let line = holder.report.line().await;
    let (zombie, parent) = line.split_once(' ').expect("two process ids");
    let pid = |text: &str| Pid::from_raw(text.parse().expect("a process id"));
    let (zombie, parent) = (pid(zombie), Stray(pid(parent)));
    poll_until("the parent sleeps", || process_table::name(parent.0) == "sleep").await;
    holder.order("go");
    poll_until("a zombie", || state(zombie) == Some('Z')).await;
    holder.signal(Signal::SIGTERM);
    holder.end().await.expect(143);
    assert_eq!(state(zombie), Some('Z'), "nobody has waited for it");
    assert!(fixture.is_free("a").await);
}

/// A process that only this test ends.
struct Stray(Pid);

impl Drop for Stray {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGKILL);
    }
}

/// `sqlock run ARGUMENTS -- sh -c SCRIPT` in a PID namespace whose first process reaps no children,
/// as in many containers. It prints the exit status of sqlock on stdout.
async fn start_below_a_lazy_init(fixture: &CommandFixture, arguments: &[&str], script: &str) -> Run {
    let sqlock = fixture.sqlock(&[]);
    let mut command = Command::new("unshare");
    command
        .args(namespace().await)
        .args(["--pid", "--fork", "--kill-child", "sh", "-c"])
        .arg("(\"$@\"; echo \"sqlock ended with $?\") & exec sleep 1000 >/dev/null 2>&1")
        .args(["sh", program(), "run"])
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    for (name, value) in sqlock.as_std().get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    fixture.start_as(command, script)
}

/// The options by which `unshare` makes a PID namespace here: root needs none, others need a user
/// namespace too.
async fn namespace() -> &'static [&'static str] {
    let all: [&[&str]; 2] = [&[], &["--user", "--map-root-user"]];
    for options in all {
        let tried = Command::new("unshare").args(options).args(["--pid", "--fork", "true"]).output().await;
        if tried.expect("unshare of util-linux is installed").status.success() {
            return options;
        }
    }
    panic!(
        "this test needs a PID namespace and may not make one: run it as root, or let users make user namespaces \
         (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"
    );
}
