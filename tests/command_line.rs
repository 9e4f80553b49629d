//! Output of the command: help, errors, completions and the man page. The expected texts are in
//! `snapshots/`; `SNAPSHOTS=overwrite` rewrites them.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic)]

#[path = "support/mod.rs"]
mod support;

use regex::Regex;
use rustix::process::Signal;
use snapbox::data::{Data, DataFormat};
use sqlock::Locks;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use tokio::process::Command;

use support::command::{ClosedPort, Ended, Running, bare, beside, end, program, run, sqlock};
use support::{LONG, TestDatabase, builder, empty};

/// The texts are the same on all databases, and SQLite needs no server.
type Sql = sqlx::Sqlite;
const DATABASE: support::Database = support::Database::Sqlite;

/// Compares with `snapshots/NAME.txt`, apart from what is different each time.
#[track_caller]
fn assert_snapshot(name: &str, text: &str) {
    let mut text = text.to_owned();
    for (pattern, placeholder) in [
        (r"\b\d{16}\b", "[TOKEN]"),
        (r"\b[0-9a-f]{32}\b", "[OWNER]"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", "[TIME]"),
        (r"(for|ends in|another|\(in|lasts) \d+(\.\d+)?(ms|s|m|h)( \d+(ms|s|m|h))*", "$1 [DURATION]"),
        (r"\(\d+(\.\d+)?(ms|s|m|h)( \d+(ms|s|m|h))* ago", "([DURATION] ago"),
        (r"--max-hold in \d+(\.\d+)?s", "--max-hold in [DURATION]"),
        // In the columns of ls.
        (r"  \d+(\.\d+)?(ms|s|m|h)( \d+(ms|s|m|h))* +\d+m( \d+s)? +", "  [AGE]  [LEFT]  "),
        (r"HELD FOR +EXPIRES IN +TOKEN +", "HELD FOR  EXPIRES IN  TOKEN  "),
        (r"sqlock \d+\.\d+\.\d+", "sqlock [VERSION]"),
        (r"127\.0\.0\.1:\d+", "127.0.0.1:[PORT]"),
    ] {
        text = Regex::new(pattern).expect(pattern).replace_all(&text, placeholder).into_owned();
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/snapshots/{name}.txt"));
    let expected = Data::read_from(&path, Some(DataFormat::Text)).raw();
    snapbox::Assert::new().action_env("SNAPSHOTS").eq(text, expected);
}

/// A command of fixed width.
fn wide(mut command: Command) -> Command {
    command.env("COLUMNS", "100");
    command
}

async fn said(arguments: &[&str]) -> Ended {
    end(wide(bare(arguments))).await
}

// ---- help

#[tokio::test]
async fn help_matches_the_snapshots() {
    let long = said(&["--help"]).await.expect(0);
    assert_eq!(long.stderr, "");
    assert_snapshot("help", &long.stdout);
    assert_snapshot("help-short", &said(&["-h"]).await.expect(0).stdout);
    let all = subcommands(&long.stdout);
    assert!(all.len() >= 14 && all.iter().any(|name| name == "run"), "{all:?}");
    for subcommand in all.into_iter().filter(|name| name != "help") {
        let help = said(&[&subcommand, "--help"]).await.expect(0);
        assert_eq!(help.stderr, "");
        assert_snapshot(&format!("help-{subcommand}"), &help.stdout);
        for inner in subcommands(&help.stdout).into_iter().filter(|name| name != "help") {
            let help = said(&[&subcommand, &inner, "--help"]).await.expect(0);
            assert_eq!(help.stderr, "");
            assert_snapshot(&format!("help-{subcommand}-{inner}"), &help.stdout);
        }
    }
}

/// As the help lists them, so that none is forgotten here.
fn subcommands(help: &str) -> Vec<String> {
    let list = help.split("Commands:\n").nth(1).unwrap_or_default();
    let lines = list.lines().take_while(|line| !line.is_empty());
    lines
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .collect()
}

/// The commands of the runbook work as written.
#[tokio::test]
async fn runbook_commands_and_options_exist() {
    let runbook = include_str!("../src/guide/runbook.rs");
    let commands: Vec<&str> = runbook.lines().filter_map(|line| line.strip_prefix("//! sqlock ")).collect();
    assert!(commands.len() >= 8, "{commands:?}");
    for command in commands {
        let words: Vec<&str> = command.split('#').next().unwrap_or_default().split_whitespace().collect();
        let inner = if words[0] == "idem" { 2 } else { 1 };
        let help = said(&[&words[..inner], &["--help"]].concat()).await.expect(0).stdout;
        for option in words.iter().filter(|word| word.starts_with("--")) {
            assert!(help.contains(option), "{command}: {option}");
        }
    }
}

#[tokio::test]
async fn help_fits_the_requested_width() {
    for (columns, limit) in [("100", 100), ("80", 80), ("500", 100)] {
        let mut command = bare(&["run", "--help"]);
        command.env("COLUMNS", columns);
        for line in end(command).await.expect(0).stdout.lines() {
            assert!(line.chars().count() <= limit, "{columns}: {line}");
        }
    }
}

// ---- errors, waiting, conflicts

/// Makes a database in which a holder with a fixed name holds "deploy".
async fn busy() -> (TestDatabase, Locks, sqlock::Lease) {
    let db = empty().await;
    let locks = builder(db.of_the_command().pool_of(2).await).holder("ci-7/4711").build();
    locks.migrate().await.expect("migrate");
    let lease = locks.lease("deploy").ttl(LONG).label("release 42").acquire().await.expect("acquire");
    (db, locks, lease)
}

/// Makes two holders that share "deploy".
async fn shared(locks: &Locks) -> [sqlock::Lease; 2] {
    let request = locks.lease("deploy").shared().ttl(LONG);
    let first = request.clone().label("search").acquire().await.expect("acquire");
    [first, request.acquire().await.expect("acquire")]
}

/// Returns stderr after the prompt.
fn answer(text: &mut String, shown: &str, ended: &Ended) {
    let said = [&*ended.stdout, &*ended.stderr].concat();
    // Said before or not at all, as time would have it.
    let said = Regex::new("(?m)^.*: stopping the command\n").expect("a pattern").replace_all(&said, "").into_owned();
    text.push_str(&format!("{}\n{said}[{}]\n\n", format!("$ sqlock {shown}").trim_end(), ended.code()));
}

#[tokio::test]
async fn usage_errors_say_what_is_wrong() {
    let (db, mut text) = (empty().await, String::new());
    for arguments in [
        &[][..],
        &["lock"],
        &["run"],
        &["run", "deploy"],
        &["run", "deploy", "make"],
        &["run", "-n", "-w", "5m", "deploy", "--", "make"],
        &["run", "--shared", "--permits", "3", "deploy", "--", "make"],
        &["run", "--permits", "0", "deploy", "--", "make"],
        &["run", "--elect", "--permits", "3", "deploy", "--", "make"],
        &["run", "-w", "soon", "deploy", "--", "make"],
        &["run", "--ttl", "100ms", "deploy", "--", "make"],
        &["run", "--signal", "NOPE", "deploy", "--", "make"],
        &["run", "", "--", "make"],
        &["release", "deploy"],
        &["release", "deploy", "--token", "0"],
        &["idem"],
        &["idem", "show", "order-17"],
        &["idem", "resolve", "order-17", "--global"],
        &["idem", "resolve", "order-17", "--global", "--token", "17"],
        &["postgres://me:s3cret@db.example/app", "run", "deploy"],
    ] {
        let shown: Vec<&str> = arguments.iter().map(|word| if word.is_empty() { "''" } else { word }).collect();
        // An option of its own would be something.
        let command = if arguments.is_empty() { bare(arguments) } else { sqlock(&db, arguments) };
        answer(&mut text, &shown.join(" "), &end(wide(command)).await.expect(64));
    }
    assert_snapshot("errors-usage", &text);
}

/// The limit cuts the last attempt short, which then has no reason of its own.
#[tokio::test]
async fn limited_wait_names_cause_of_outage() {
    let port = ClosedPort::reserve();
    let mut command = bare(&["run", "-w", "1s", "deploy", "--", "make"]);
    command.env("DATABASE_URL", format!("postgres://me:s3cret@127.0.0.1:{}/app", port.number()));
    let ended = end(command).await.expect(69);
    assert!(ended.stderr.contains("Connection refused"), "{}", ended.stderr);
}

#[tokio::test]
async fn unreachable_server_is_named_by_its_socket() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().display();
    for (url, address) in [
        (format!("postgres://me@localhost:5433/app?host={path}"), format!("PostgreSQL at {path}:5433: ")),
        (format!("mysql://me@localhost/app?socket={path}/mysqld.sock"), format!("MySQL at {path}/mysqld.sock: ")),
    ] {
        let mut command = bare(&["ls"]);
        command.env("DATABASE_URL", url);
        let ended = end(command).await.expect(69);
        assert!(ended.stderr.contains(&format!("cannot reach {address}")), "{}", ended.stderr);
    }
}

#[tokio::test]
async fn configuration_and_command_errors_say_what_to_do() {
    let (db, mut text) = (empty().await, String::new());
    let missing = ["run", "--no-migrate", "deploy", "--", "make"];
    answer(&mut text, &missing.join(" "), &run(&db, &missing).await.expect(78));
    let port = ClosedPort::reserve();
    let closed = format!("postgres://me:s3cret@127.0.0.1:{}/app", port.number());
    for (code, url) in [
        (78, ""),
        (78, "oracle://me:s3cret@db.example/app"),
        (78, "postgres://me:s3cret@db.example:port/app"),
        (78, "sqlite::memory:"),
        (78, "sqlite:///nowhere/app.db"),
        (69, &closed),
    ] {
        let mut command = bare(&["ls"]);
        command.env("DATABASE_URL", url);
        let shown = format!("ls        # DATABASE_URL={}", url.replace("s3cret", "…"));
        answer(&mut text, &shown, &end(command).await.expect(code));
    }
    for (code, command) in [(127, "/nowhere/make"), (126, "/")] {
        let arguments = ["run", "deploy", "--", command];
        answer(&mut text, &arguments.join(" "), &run(&db, &arguments).await.expect(code));
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut command = bare(&["run", "deploy", "--", "true"]);
    command.current_dir(directory.path()).env("XDG_STATE_HOME", directory.path());
    answer(&mut text, "run deploy -- true        # no database is named", &end(command).await.expect(0));
    let mut command = bare(&["--require-database", "run", "deploy", "--", "true"]);
    command.current_dir(directory.path());
    answer(&mut text, "--require-database run deploy -- true", &end(command).await.expect(78));
    std::fs::write(directory.path().join(".env"), "DATABASE_URL=\"unclosed\n").expect("a file");
    let mut command = bare(&["ls"]);
    command.current_dir(directory.path());
    answer(&mut text, "ls        # a .env with a quote that is not closed", &end(command).await.expect(78));
    let text = text.replace(&directory.path().display().to_string(), "[STATE]");
    let text = Regex::new("sqlock/host-[^/]+/").expect("a pattern").replace_all(&text, "sqlock/host-[HOST]/");
    assert_snapshot("errors-configuration", &text);
}

#[tokio::test]
async fn password_in_wrong_place_is_not_shown() {
    const SHAPES: [&str; 7] = [
        "@postgres://u:s3cret@h/d",
        "@mysql:u:s3cret@h",
        "@u:s3cret@h",
        "@host=h password=s3cret",
        "postgres:u:s3cret@h/d",
        "postgres://u:1/s3cret@h/d",
        "mysql://h/d?password=s3cret&mode",
    ];
    for shape in SHAPES {
        let ended = said(&["-D", shape, "ls"]).await;
        assert!(!ended.stderr.contains("s3cret"), "{shape}: {}", ended.stderr);
        assert!([69, 78].contains(&ended.code()), "{shape}: {}", ended.stderr);
    }
    let ended = said(&["-D", SHAPES[0], "ls"]).await.expect(78);
    assert!(ended.stderr.contains("a URL is written without the first @"), "{}", ended.stderr);
    for shape in SHAPES.into_iter().chain(["postgres://u:s3cret://s3cret@h/d", "u:s3cret\u{7}s3cret@h"]) {
        for arguments in [&["ls", "name", shape][..], &["run", "name", "--ttl", shape, "--", "true"], &[shape]] {
            let ended = said(arguments).await.expect(64);
            assert!(!ended.stderr.contains("s3cret"), "{arguments:?}: {}", ended.stderr);
        }
    }
}

#[tokio::test]
async fn url_without_slashes_is_refused() {
    for url in ["postgres:u:p@h/d", "postgresql:d", "mysql:d", "mariadb:u@h/d", "postgres:"] {
        let ended = said(&["-D", url, "ls"]).await.expect(78);
        assert!(ended.stderr.contains("--database-url must begin with postgres://"), "{}", ended.stderr);
    }
}

#[tokio::test]
async fn conflict_message_names_the_holder() {
    let (db, locks, lease) = busy().await;
    let mut text = String::new();
    for (code, arguments) in [
        (75, &["run", "-n", "deploy", "--", "make"][..]),
        (75, &["run", "-w", "50ms", "deploy", "--", "make"]),
        (0, &["run", "-n", "--skip-ok", "deploy", "--", "make"]),
        (75, &["acquire", "-n", "deploy"]),
        (75, &["-q", "acquire", "-n", "deploy"]),
        (79, &["renew", "deploy", "--token", "17"]),
        (79, &["release", "deploy", "--token", "17"]),
        (79, &["unlock", "other", "--token", "17"]),
        (79, &["idem", "resolve", "order-17", "--principal", "alice", "--token", "17", "--failed"]),
        (0, &["ls"]),
        (0, &["show", "deploy"]),
        (0, &["show", "other"]),
    ] {
        answer(&mut text, &arguments.join(" "), &run(&db, arguments).await.expect(code));
    }
    let token = lease.token().to_string();
    let unlock = ["unlock", "deploy", "--token", &token];
    answer(&mut text, &unlock.join(" "), &run(&db, &unlock).await.expect(0));

    let [_first, second] = shared(&locks).await;
    let mut waiter = Running::start(sqlock(&db, &["run", "--label", "release 43", "deploy", "--", "make"]));
    waiter.says("waiting for").await;
    let token = second.token().to_string();
    let unlock = ["unlock", "deploy", "--token", &token];
    // The waiter's process, and its host.
    let who = Regex::new(r"(?m)^1 +\S+ +").expect("a pattern");
    let heading = Regex::new("WAITER +MODE").expect("a pattern");
    for (code, arguments) in [
        (75, &["run", "-n", "deploy", "--", "make"][..]),
        (79, &["release", "deploy", "--token", "17"]),
        (0, &["ls"]),
        (0, &["show", "deploy"]),
        (0, &unlock),
    ] {
        let ended = run(&db, arguments).await.expect(code);
        let stdout = who.replace_all(&ended.stdout, "1         [WHO]  ");
        let heading = heading.replace_all(&stdout, "WAITER  MODE").into_owned();
        answer(&mut text, &arguments.join(" "), &Ended { stdout: heading, ..ended });
    }
    waiter.signal(Signal::INT);
    waiter.end().await.expect(130);
    let kept = locks.lease("nightly").hold_at_least(LONG).acquire().await.expect("acquire");
    kept.release().await.expect("release");
    let arguments = ["run", "-n", "nightly", "--", "make"];
    answer(&mut text, &arguments.join(" "), &run(&db, &arguments).await.expect(75));
    assert_snapshot("conflicts", &text);
}

#[tokio::test]
async fn waiter_names_the_holder_and_a_remedy() {
    let (db, locks, lease) = busy().await;
    let mut waiter = Running::start(sqlock(&db, &["run", "deploy", "--", "make"]));
    waiter.says("sqlock unlock").await;
    waiter.signal(Signal::INT);
    let mut text = String::new();
    answer(&mut text, "run deploy -- make        # interrupted", &waiter.end().await.expect(130));
    lease.release().await.expect("ours to the end");

    let _leases = shared(&locks).await;
    let mut first = Running::start(sqlock(&db, &["run", "deploy", "--", "make"]));
    first.says("sqlock unlock").await;
    let mut waiter = Running::start(sqlock(&db, &["run", "--shared", "deploy", "--", "make"]));
    waiter.says("sqlock unlock").await;
    waiter.signal(Signal::INT);
    answer(&mut text, "run --shared deploy -- make        # behind another", &waiter.end().await.expect(130));
    let enclosed = [
        "run",
        "--permits",
        "1",
        "import",
        "--",
        program(),
        "--sidecar",
        "run",
        "--permits",
        "1",
        "import",
        "--",
        "make",
    ];
    let mut waiter = Running::start(sqlock(&db, &enclosed));
    waiter.says("enclosing sqlock run").await;
    waiter.signal(Signal::INT);
    let shown = enclosed.join(" ").replace(&format!("{} --sidecar", program()), "sqlock");
    // The process that holds it, and its host.
    let ended = waiter.end().await.expect(130);
    let by = Regex::new(r"held by \S+").expect("a pattern").replace_all(&ended.stderr, "held by [HOLDER]").into_owned();
    answer(&mut text, &shown, &Ended { stderr: by, ..ended });
    assert_snapshot("waiting", &text);
}

#[tokio::test]
async fn remedy_works_for_name_that_begins_with_hyphen() {
    let db = empty().await;
    run(&db, &["acquire", "--ttl", "10m", "--", "--x y"]).await.expect(0);
    let mut waiter = Running::start(sqlock(&db, &["acquire", "--", "--x y"]));
    let line = waiter.says("sqlock unlock").await;
    let remedy = line.split("sqlock unlock ").nth(1).expect("a command").trim();
    let script = format!("\"$SQLOCK\" --sidecar unlock {remedy}");
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).env("SQLOCK", program()).env("DATABASE_URL", &db.url);
    end(shell).await.expect(0);
    waiter.end().await.expect(0);
}

#[tokio::test]
async fn stopped_command_reports_the_reason() {
    let (db, mut text) = (empty().await, String::new());
    let locks = beside(&db).await;
    let mut holder = Running::start(sqlock(&db, &["run", "deploy", "--", "sh", "-c", "echo; sleep 600"]));
    holder.prints("\n").await;
    let held = locks.inspect("deploy").await.expect("inspect").expect("held");
    assert!(locks.evict("deploy", held.token).await.expect("evict"));
    answer(&mut text, "run deploy -- make        # unlocked", &holder.end().await.expect(79));
    let arguments = ["run", "--ttl", "6s", "--max-hold", "5s", "deploy", "--", "sleep", "600"];
    answer(&mut text, &arguments.join(" "), &run(&db, &arguments).await.expect(79));
    assert_snapshot("stopped", &text);
}

// ---- colours

#[tokio::test]
async fn output_has_no_escape_codes_without_terminal() {
    let (db, _locks, _lease) = busy().await;
    for (code, arguments) in [
        (0, &["--help"][..]),
        (0, &["ls"]),
        (0, &["show", "deploy"]),
        (64, &["run", "--frobnicate"]),
        (75, &["run", "-n", "deploy", "--", "true"]),
        (79, &["unlock", "deploy", "--token", "17"]),
    ] {
        let ended = run(&db, arguments).await.expect(code);
        assert!(![ended.stdout, ended.stderr].concat().contains('\u{1b}'), "{arguments:?}");
    }
}

#[tokio::test]
async fn stderr_is_coloured_on_terminal_unless_no_color() {
    let (db, _locks, _lease) = busy().await;
    for (no_color, term, coloured) in [(None, "xterm", true), (Some("1"), "xterm", false), (None, "dumb", false)] {
        for (code, arguments) in [
            (75, &["run", "-n", "deploy", "--", "true"][..]),
            (79, &["unlock", "deploy", "--token", "17"]),
            (64, &["run", "--frobnicate"]),
        ] {
            let mut command = sqlock(&db, arguments);
            command.env("TERM", term);
            if let Some(value) = no_color {
                command.env("NO_COLOR", value);
            }
            let shown = on_a_terminal(command, code).await;
            assert_eq!(shown.contains("\u{1b}["), coloured, "{no_color:?} {term} {arguments:?}: {shown:?}");
        }
    }
}

/// Runs it with a terminal for stderr, and returns what that has shown.
async fn on_a_terminal(mut command: Command, code: i32) -> String {
    let terminal = nix::pty::openpty(None, None).expect("a terminal");
    let mut child = command.stdout(Stdio::null()).stderr(terminal.slave).spawn().expect("sqlock can be started");
    drop(command); // or the terminal would stay open on its account
    let master = std::fs::File::from(terminal.master);
    // Reading fails when no process has the terminal open any more.
    let shown = tokio::task::spawn_blocking(move || {
        let (mut shown, mut buffer) = (Vec::new(), [0; 4096]);
        while let Ok(read @ 1..) = std::io::Read::read(&mut &master, &mut buffer) {
            shown.extend_from_slice(&buffer[..read]);
        }
        shown
    });
    let status = support::soon("the end of sqlock", child.wait()).await.expect("its end");
    assert_eq!(status.code(), Some(code));
    let shown = support::soon("the end of what it shows", shown).await.expect("no panic");
    String::from_utf8(shown).expect("sqlock speaks UTF-8")
}

// ---- output for other programs

#[tokio::test]
async fn completions_are_valid_for_each_shell() {
    for shell in ["bash", "elvish", "fish", "zsh"] {
        let script = said(&["completions", shell]).await.expect(0).stdout;
        assert!(script.contains("SQLOCK_COMPLETE"), "{shell}: {script}");
        for (words, candidate) in [
            (&["sqlock", "unl"][..], "unlock"),
            (&["sqlock", "run", "--hold"], "--hold-at-least"),
            (&["sqlock", "idem", "show", "--prin"], "--principal"),
        ] {
            let mut asked = bare(&[&["--"], words].concat());
            asked.env("SQLOCK_COMPLETE", shell).env("_CLAP_COMPLETE_INDEX", (words.len() - 1).to_string());
            let offered = end(asked).await.expect(0).stdout;
            assert!(offered.contains(candidate), "{shell}: {offered}");
        }
    }
    let script = said(&["completions", "bash"]).await.expect(0).stdout;
    let output = through("bash", &["-n"], &script).expect("there is a bash");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    said(&["completions", "abacus"]).await.expect(64);
}

#[tokio::test]
async fn man_page_is_accepted_by_man() {
    let page = said(&["man"]).await.expect(0).stdout;
    let example = "  sqlock run -w 5m deploy -- make deploy         wait for 5 minutes at most";
    for (arguments, words) in [
        (&["man"][..], &["SQLOCK RUN", "SQLOCK IDEM RESOLVE", "--principal", "postgres://…", example][..]),
        (&["man", "run"], &["sqlock-run", "--kill-after", "126, 127 not executable"]),
        (&["man", "idem", "ls"], &["sqlock-idem-ls", "--state"]),
    ] {
        let page = said(arguments).await.expect(0).stdout;
        for (program, arguments) in FORMATTERS {
            let Some(output) = through(program, arguments, &page) else { continue };
            let shown = without_format(&output.stdout);
            for word in words {
                assert!(shown.contains(word), "{program} shows no {word}: {shown}");
            }
        }
    }
    for subcommand in subcommands(&said(&["--help"]).await.expect(0).stdout) {
        said(&["man", &subcommand]).await.expect(0);
    }
    for arguments in [&["man"][..], &["man", "run"]] {
        let page = said(arguments).await.expect(0).stdout;
        assert!(page.contains(r"<\fINAME\fR> \-\- <\fICOMMAND\fR>..."), "no -- before the command: {page}");
    }
    said(&["man", "nothing"]).await.expect(64);
    assert!(page.lines().any(|line| line.starts_with(".TH")), "it has a title");
    for (program, arguments) in FORMATTERS {
        let Some(output) = through(program, arguments, &page) else { continue };
        assert!(output.status.success(), "{program}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{program} has nothing to complain about");
        let shown = without_format(&output.stdout);
        for words in ["SQLOCK RUN", "SQLOCK IDEM RESOLVE", "--principal", "--database-url", "postgres://…"] {
            assert!(shown.contains(words), "{program} shows no {words}: {shown}");
        }
    }
}

const FORMATTERS: [(&str, &[&str]); 2] = [("man", &["--warnings", "-l", "-"]), ("groff", &["-man", "-Tutf8", "-ww"])];

/// The text of a page that was formatted for a terminal.
fn without_format(page: &[u8]) -> String {
    let format = Regex::new("\u{1b}\\[[0-9;]*m|.\u{8}").expect("a pattern");
    format.replace_all(&String::from_utf8_lossy(page), "").into_owned()
}

/// Runs a program with this on its stdin. `None`: it is not installed here.
fn through(program: &str, arguments: &[&str], input: &str) -> Option<std::process::Output> {
    let child = std::process::Command::new(program)
        .args(arguments)
        .env("MANWIDTH", "100")
        .env("LC_ALL", "C.UTF-8")
        .env("PAGER", "cat")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.ok()?;
    let mut stdin = child.stdin.take().expect("a pipe was asked for");
    let input = input.to_owned();
    let writing = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().expect("its end");
    // It need not read it to the end.
    let _ = writing.join().expect("no panic");
    Some(output)
}
