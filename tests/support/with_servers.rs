//! Runs a command with a throwaway database server of each kind: `with_servers [--durable] [--only
//! KIND,KIND] [--] COMMAND`.
//!
//! The command finds the servers in `SQLOCK_TEST_POSTGRES_URL`, `SQLOCK_TEST_MYSQL_URL` and
//! `SQLOCK_TEST_MARIADB_URL`. If such a variable is already set, its database is used, and no
//! server is started.

#![allow(clippy::expect_used, clippy::panic, reason = "a program for tests")]

use std::io::Write;
use std::iter;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, exit};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::timeout;

#[allow(dead_code, reason = "the rest is for the tests")]
#[path = "server.rs"]
mod server;

use server::{Kind, Options, Server};

const KINDS: [(Kind, &str, &str); 3] = [
    (Kind::Postgres, "postgres", "SQLOCK_TEST_POSTGRES_URL"),
    (Kind::MySql, "mysql", "SQLOCK_TEST_MYSQL_URL"),
    (Kind::MariaDb, "mariadb", "SQLOCK_TEST_MARIADB_URL"),
];

const USAGE: &str = "with_servers [--durable] [--only postgres,mysql,mariadb] [--] COMMAND [ARGUMENT...]";

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let request = Request::from_arguments().unwrap_or_else(|problem| {
        say(&format!("{problem}\nusage: {USAGE}"));
        exit(2)
    });
    let mut signals = signals(); // from here on none ends this program before its servers
    let mut command = Command::new(&request.command[0]);
    command.args(&request.command[1..]);
    // The command may be cargo itself. Build scripts of dependencies watch these variables: with
    // the values that the outer cargo sets for this package, the inner one would build those
    // dependencies, and all that use them, anew.
    for (variable, _) in std::env::vars_os() {
        let is_of_this_package = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        if variable.to_str().is_some_and(is_of_this_package) {
            command.env_remove(variable);
        }
    }

    let mut servers = Vec::new();
    for (kind, name, variable) in KINDS {
        if !request.only.contains(&kind) {
            continue;
        }
        if std::env::var_os(variable).is_some() {
            say(&format!("{name}: the one ${variable} names"));
            continue;
        }
        let mut options = Options { durable: request.durable, ..Options::default() };
        if !request.durable && kind != Kind::Postgres {
            // Each test creates tables. With a file for each, MySQL needs half as long again.
            options.settings.push("--innodb-file-per-table=OFF".into());
        }
        let server = Server::start_with(kind, options);
        say(&format!("{name}: {} on port {}", server.version(), server.port()));
        // A connection over TLS takes MySQL 4 ms, as long as dozens of statements.
        let query = if request.durable || kind != Kind::MySql { "" } else { "?ssl-mode=DISABLED" };
        command.env(variable, server.url() + query);
        servers.push(server);
    }

    // This wait receives signals that have already arrived.
    let code = match timeout(Duration::from_millis(1), signals.recv()).await {
        Ok(Some(signal)) => 128 + signal.as_raw(),
        _ => match command.spawn() {
            Ok(child) => wait(child, signals).await,
            Err(error) => {
                say(&format!("cannot run {}: {error}", request.command[0]));
                127
            }
        },
    };
    drop(servers);
    server::sweep(); // after tests that were ended before they could drop theirs
    exit(code)
}

/// The parsed command line.
struct Request {
    durable: bool,
    only: Vec<Kind>,
    command: Vec<String>,
}

impl Request {
    fn from_arguments() -> Result<Request, String> {
        let mut arguments = std::env::args().skip(1);
        let mut request = Request { durable: false, only: KINDS.map(|(kind, ..)| kind).to_vec(), command: Vec::new() };
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--durable" => request.durable = true,
                "--only" => {
                    let names = arguments.next().ok_or("--only what?")?;
                    request.only = names.split(',').map(named).collect::<Result<_, _>>()?;
                }
                "--" => request.command = arguments.by_ref().collect(),
                option if option.starts_with('-') => return Err(format!("unknown option {option}")),
                // `cargo run -- COMMAND` keeps the `--` to itself.
                _ => request.command = iter::once(argument).chain(arguments.by_ref()).collect(),
            }
        }
        if request.command.is_empty() {
            return Err("no command".into());
        }
        Ok(request)
    }
}

fn named(name: &str) -> Result<Kind, String> {
    let (kind, ..) =
        KINDS.iter().find(|(_, its_name, _)| *its_name == name).ok_or(format!("unknown database {name}"))?;
    Ok(*kind)
}

/// Returns the signals that ask a program to end, as they arrive. A shell starts background jobs
/// with these signals ignored, and children inherit this setting: the command and all tests would
/// ignore them. A signal with a handler here is not ignored there.
fn signals() -> mpsc::UnboundedReceiver<Signal> {
    let (sender, receiver) = mpsc::unbounded_channel();
    for wanted in [Signal::INT, Signal::QUIT, Signal::TERM, Signal::HUP] {
        let kind = SignalKind::from_raw(wanted.as_raw());
        let mut arrivals = signal(kind).expect("these signals can be handled");
        let sender = sender.clone();
        tokio::spawn(async move { while arrivals.recv().await.is_some() && sender.send(wanted).is_ok() {} });
    }
    receiver
}

/// Waits for the command to end, and passes signals on to all its descendants, because cargo, for
/// example, does not pass them on to its tests. (From a terminal they receive Ctrl-C twice, which
/// is harmless.)
async fn wait(mut child: Child, mut signals: mpsc::UnboundedReceiver<Signal>) -> i32 {
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())).expect("a child not waited for has an id");
    let mut received = None;
    loop {
        tokio::select! {
            status = child.wait() => {
                let status = status.expect("a child can be waited for");
                return received.map_or_else(|| code(status), |signal: Signal| 128 + signal.as_raw());
            }
            Some(signal) = signals.recv() => {
                received = Some(signal);
                server::signal_tree(pid, signal);
            }
        }
    }
}

/// Returns the exit status that a shell would report.
fn code(status: ExitStatus) -> i32 {
    status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1)
}

/// Prints to stderr and ignores a broken pipe, which must not keep the servers from being stopped.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
