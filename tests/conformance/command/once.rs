//! Concurrent starts of one script: `sqlock run` executes them one at a time.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tokio::process::Command;
use tokio::task::JoinSet;

use crate::support::command::{Ended, end, sqlock};
use crate::support::process_table::poll_until;
use crate::support::{empty, soon};

/// A migration: it creates a mark on which a second one fails, does its work, and counts.
const MIGRATION: &str = r#"
mkdir "$DIR/running" 2>/dev/null || { echo overlap >>"$DIR/overlaps"; exit 9; }
sleep 0.2
echo done >>"$DIR/runs"
rmdir "$DIR/running"
"#;

/// The same migration, which first checks whether it is still needed.
const ONLY_ONCE: &str = r#"
if [ ! -e "$DIR/migrated" ]; then
    sleep 0.2
    echo done >>"$DIR/runs"
    : >"$DIR/migrated"
fi
"#;

/// Starts four processes at once on a new database.
async fn four_times(dir: &Path, script: &str) -> Vec<Ended> {
    let db = empty().await;
    let mut all = JoinSet::new();
    for _ in 0..4 {
        let mut command = sqlock(&db, &["run", "migrate", "--", "sh", "-c", script]);
        command.env("DIR", dir);
        all.spawn(end(command));
    }
    soon("the end of all", all.join_all()).await
}

fn lines(file: &Path) -> usize {
    std::fs::read_to_string(file).unwrap_or_default().lines().count()
}

#[tokio::test]
async fn concurrent_runs_on_empty_database_are_serialized() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for ended in four_times(dir.path(), MIGRATION).await {
        ended.expect(0);
    }
    assert_eq!(lines(&dir.path().join("overlaps")), 0);
    assert_eq!(lines(&dir.path().join("runs")), 4);
}

#[tokio::test]
async fn concurrent_runs_do_checked_work_once() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for ended in four_times(dir.path(), ONLY_ONCE).await {
        ended.expect(0);
    }
    assert_eq!(lines(&dir.path().join("runs")), 1);
}

/// The scripts themselves detect an overlap.
#[tokio::test]
async fn same_scripts_overlap_without_sqlock() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    // Each script reports that it is in the middle, and waits for permission to continue.
    let gate = dir.path().join("gate");
    mkfifo(&gate, Mode::S_IRUSR | Mode::S_IWUSR).expect("a FIFO can be made");
    let start = |script: &str| {
        let script = script.replace("sleep 0.2", "echo >>\"$DIR/middle\"; read go <\"$DIR/gate\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).env("DIR", dir.path()).stdin(Stdio::null()).kill_on_drop(true);
        command.spawn().expect("sh can be started")
    };
    let in_the_middle = async |n| poll_until("they are in the middle", || lines(&dir.path().join("middle")) == n).await;
    // Exactly one word for each waiting script: a surplus word would let a later script through. So
    // would a tokio file, which may be closed a moment after it is dropped.
    let open_for = async |n| {
        let path = gate.clone();
        let opening = tokio::task::spawn_blocking(|| std::fs::OpenOptions::new().write(true).open(path));
        let mut gate = soon("somebody at the gate", opening).await.expect("no panic").expect("the FIFO can be written");
        gate.write_all("go\n".repeat(n).as_bytes()).expect("there is room");
        gate
    };

    let mut first = start(MIGRATION);
    in_the_middle(1).await;
    let second = soon("the second", start(MIGRATION).wait()).await.expect("it is ours to wait for");
    assert_eq!(second.code(), Some(9));
    assert_eq!(lines(&dir.path().join("overlaps")), 1);
    let held_open = open_for(1).await;
    assert!(soon("the first", first.wait()).await.expect("it is ours to wait for").success());
    drop(held_open);

    let mut both = [start(ONLY_ONCE), start(ONLY_ONCE)];
    in_the_middle(3).await;
    let _held_open = open_for(2).await;
    for one in &mut both {
        assert!(soon("the end", one.wait()).await.expect("it is ours to wait for").success());
    }
    // After the one migration comes the work that must be done once.
    assert_eq!(lines(&dir.path().join("runs")), 1 + 2);
}
