//! `sqlock ls --watch` on a terminal.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use sqlock::Lease;
use tokio::process::Command;

use super::quorum::{Three, json};
use crate::DATABASE;
use crate::support::Database;
use crate::support::command::{beside, program};
use crate::support::command_fixture::CommandFixture;
use crate::support::process_table::{children, name, poll_for};
use crate::support::soon;
use crate::support::terminal::Terminal;

const TTL: Duration = Duration::from_secs(600);

const ENTER_SCREEN: &str = "\u{1b}[?1049h";
const LEAVE_SCREEN: &str = "\u{1b}[?1049l";

async fn hold(fixture: &CommandFixture, name: &str, label: &str) -> Lease {
    beside(&fixture.db).await.lease(name).ttl(TTL).label(label).acquire().await.expect("acquire")
}

/// Starts the screen from a shell, which prints the exit code and the settings of the terminal
/// afterwards.
async fn watch(url: &str, option: &str) -> Terminal {
    let script = format!("\"$SQLOCK\" ls --watch {option}; echo \"exit code $?\"; stty -a; echo no more");
    let environment = [("DATABASE_URL", url), ("SQLOCK", program()), ("TERM", "xterm")];
    let terminal = Terminal::start("sh", &["-c", &script], &environment);
    terminal.screen.shows(ENTER_SCREEN).await;
    terminal
}

/// Asserts that the screen has ended with this code, and that the terminal is as before.
async fn assert_restored(terminal: Terminal, code: u8) {
    let screen = terminal.screen.clone();
    for text in [&format!("exit code {code}"), "no more"] {
        screen.shows(text).await;
    }
    soon("the end of the shell", terminal.end()).await;
    let text = screen.text();
    let (_, after) = text.split_once(LEAVE_SCREEN).expect("the screen is left");
    assert!(!after.contains(ENTER_SCREEN) && text.contains("\u{1b}[?25h"), "the cursor is back: {after}");
    for setting in [" icanon", " echo "] {
        assert!(after.contains(setting), "no {setting:?}: {after}");
    }
}

#[tokio::test]
async fn screen_filters_resizes_and_unlocks() {
    let fixture = CommandFixture::new().await;
    let (job, other) = (hold(&fixture, "job/1", "deploy").await, hold(&fixture, "other", "not this").await);
    let terminal = watch(fixture.url(), "").await;
    for text in ["deploy", "not this", "HEARTBEAT"] {
        terminal.screen.shows(text).await;
    }

    let shell = terminal.pid();
    let sqlock = poll_for("sqlock", || children(shell).into_iter().find(|child| name(*child) == "sqlock")).await;
    let resized =
        Command::new("stty").args(["-F", &format!("/proc/{sqlock}/fd/0"), "cols", "70", "rows", "9"]).status();
    assert!(resized.await.expect("stty of coreutils").success());
    // The last line, with the keys, moves to the ninth row.
    terminal.screen.shows("\u{1b}[9;1H\u{1b}[2K").await;

    // crossterm returns a resize before keys that arrive with it, and reads those with the next
    // key.
    terminal.keys("/job/");
    tokio::time::sleep(Duration::from_millis(300)).await;
    terminal.keys("\r");
    terminal.screen.shows("sqlock ls \"job/\": 1 held").await;
    terminal.keys("u");
    terminal.screen.shows("unlock \"job/1\"").await;
    // Any other key is a no.
    terminal.keys("n");
    terminal.keys("u");
    terminal.keys("y");
    terminal.screen.shows("any more: unlocked").await;
    soon("the loss", job.lost()).await;
    assert!(other.is_held());
    terminal.keys("q");
    assert_restored(terminal, 0).await;
    other.release().await.expect("ours to the end");
}

#[tokio::test]
async fn screen_survives_outage_and_ends_with_signal() {
    let mut fixture = CommandFixture::with_proxy().await;
    let first = hold(&fixture, "first", "").await;
    let terminal = watch(fixture.url(), "").await;
    terminal.screen.shows("first").await;
    fixture.cut().await;
    if DATABASE != Database::Sqlite {
        // A writer in a SQLite file disturbs no reader.
        terminal.screen.shows("the list is").await;
    }
    fixture.mend().await;
    let second = hold(&fixture, "second", "").await;
    terminal.screen.shows("second").await;

    let shell = terminal.pid();
    let sqlock = poll_for("sqlock", || children(shell).into_iter().find(|child| name(*child) == "sqlock")).await;
    kill(sqlock, Signal::SIGTERM).expect("it can be signalled");
    assert_restored(terminal, 143).await;
    for lease in [first, second] {
        lease.release().await.expect("ours to the end");
    }
}

#[tokio::test]
async fn quorum_screen_names_silent_databases_and_unlocks() {
    let three = Three::with_one_down().await;
    let acquire = ["acquire", "--quorum", "job", "--ttl", "10m", "--label", "a step"];
    let acquired = json(&three.run(&acquire).await.expect(0));
    let terminal = watch(&three.urls, "--quorum").await;
    for text in ["in 3 databases", "HELD ON", "2 of 3", "a step", "missing in the list: database 2 of 3"] {
        terminal.screen.shows(text).await;
    }
    terminal.keys("u");
    terminal.screen.shows(&format!("with token {}? y: yes", acquired["token"])).await;
    terminal.keys("y");
    terminal.screen.shows("any more: unlocked").await;
    terminal.screen.shows("sqlock ls: 0 held").await;
    terminal.keys("q");
    assert_restored(terminal, 0).await;
    let left = three.run(&["show", "--quorum", "job"]).await.expect(0);
    assert!(left.stdout.starts_with("\"job\" is free on 2 of 3 databases"), "{}", left.stdout);
}
