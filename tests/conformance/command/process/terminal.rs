//! The command in a terminal: its foreground, its job control, and its loss.

use super::*;

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
