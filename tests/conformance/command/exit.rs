//! Every exit code of the command. Each test asserts the codes that it has provoked.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use sqlx::{AssertSqlSafe, Pool};

use crate::support::command::{ClosedPort, Ended, Running, bare, beside, end, held, path, program, run, sqlock};
use crate::support::server::{Kind, Options, Server};
use crate::support::{Database, LONG, TestDatabase, connect, empty, soon};
use crate::{DATABASE, Sql};

/// The exit codes that have occurred in a scenario.
#[derive(Default)]
struct ExitCodes(BTreeSet<i32>);

impl ExitCodes {
    /// Fails the test unless the command ended with this code.
    #[track_caller]
    fn add(&mut self, code: i32, how: &str, ended: Ended) -> Ended {
        assert_eq!(ended.code(), code, "{how}\nstdout:\n{}\nstderr:\n{}", ended.stdout, ended.stderr);
        self.0.insert(code);
        ended
    }

    /// Checks that these codes have occurred, and no others.
    #[track_caller]
    fn assert_are(&self, codes: &[i32]) {
        assert_eq!(self.0, BTreeSet::from_iter(codes.iter().copied()));
    }
}

// ---- the command ran

#[tokio::test]
async fn command_or_signal_exit_code_is_passed_on() {
    let (db, mut codes) = (empty().await, ExitCodes::default());
    for (code, script, how) in [
        (0, "exit 0", "the command exits with 0"),
        (3, "exit 3", "the command exits with 3"),
        (255, "exit 255", "the command exits with 255"),
        (137, "kill -KILL $$", "KILL ends the command"),
        (143, "kill -TERM $$", "TERM ends the command"),
        (129, "kill -HUP $$", "HUP ends the command"),
    ] {
        let ended = codes.add(code, how, run(&db, &["run", "job", "--", "sh", "-c", script]).await);
        assert_eq!((&*ended.stdout, &*ended.stderr), ("", ""), "there is nothing to say");
    }
    assert_eq!(held(&beside(&db).await, "job").await, None);
    codes.assert_are(&[0, 3, 129, 137, 143, 255]);
}

#[tokio::test]
async fn unstartable_command_frees_the_name() {
    let (db, mut codes) = (empty().await, ExitCodes::default());
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = path(directory.path(), "script");
    fs::write(&file, "#!/bin/sh\n").expect("the directory is ours to write");
    let locks = beside(&db).await;
    for (code, command, how) in [
        (126, &*file, "the command is a file without the right to execute it"),
        (126, &*path(directory.path(), ""), "the command is a directory"),
        (127, &*path(directory.path(), "missing"), "the command is a path where there is nothing"),
        (127, "sqlock-test-no-such-command", "the command is in no directory of PATH"),
    ] {
        let ended = codes.add(code, how, run(&db, &["run", "job", "--", command]).await);
        assert!(ended.stderr.contains(command), "{}", ended.stderr);
        assert_eq!(held(&locks, "job").await, None);
    }
    codes.assert_are(&[126, 127]);
}

// ---- 64

#[tokio::test]
async fn usage_error_exits_64_and_runs_nothing() {
    let (db, mut codes) = (empty().await, ExitCodes::default());
    let (long_name, long_label) = ("n".repeat(256), "l".repeat(256));
    let say = ["--", "echo", "it ran"];
    let run_with = |options: &[&'static str]| [&["run"], options, &["job"], &say].concat();
    let cases: Vec<(&str, Vec<&str>)> = vec![
        ("no subcommand", vec![]),
        ("an unknown subcommand", vec!["lock", "job"]),
        ("an unknown option", run_with(&["--frobnicate"])),
        ("no name", vec!["run"]),
        ("no command", vec!["run", "job"]),
        ("a command without --", vec!["run", "job", "echo", "it ran"]),
        ("-n together with -w", run_with(&["-n", "-w", "1s"])),
        ("--shared together with --permits", run_with(&["--shared", "--permits", "2"])),
        ("--permits 0", run_with(&["--permits", "0"])),
        ("--permits many", run_with(&["--permits", "many"])),
        ("--permits 2147483648", run_with(&["--permits", "2147483648"])),
        ("--elect together with --shared", run_with(&["--elect", "--shared"])),
        ("--elect together with --permits", run_with(&["--elect", "--permits", "2"])),
        ("-E together with --skip-ok", run_with(&["-E", "9", "--skip-ok"])),
        ("-E 256", run_with(&["-E", "256"])),
        ("-w soon", run_with(&["-w", "soon"])),
        ("--ttl 999ms", run_with(&["--ttl", "999ms"])),
        ("--ttl 25h", run_with(&["--ttl", "25h"])),
        ("--max-hold 0s", run_with(&["--max-hold", "0s"])),
        ("--max-hold of more than 100 years", run_with(&["--max-hold", "1000000000000000000"])),
        ("--kill-after of more than 100 years", run_with(&["--kill-after", "1000000000000000000"])),
        ("--hold-at-least 25h", run_with(&["--hold-at-least", "25h"])),
        ("--signal NOSUCH", run_with(&["--signal", "NOSUCH"])),
        ("an empty name", [&["run", ""], &say[..]].concat()),
        ("a name of 256 bytes", [&["run", &long_name], &say[..]].concat()),
        ("a label of 256 bytes", [&["run", "--label", &long_label, "job"], &say[..]].concat()),
        ("acquire: a name of 256 bytes", vec!["acquire", &long_name]),
        ("acquire --permits 0", vec!["acquire", "job", "--permits", "0"]),
        ("acquire --shared --permits 2", vec!["acquire", "job", "--shared", "--permits", "2"]),
        ("acquire --ttl 999ms", vec!["acquire", "job", "--ttl", "999ms"]),
        ("show: an empty name", vec!["show", ""]),
        ("release without --token", vec!["release", "job"]),
        ("release --token 0", vec!["release", "job", "--token", "0"]),
        ("renew --ttl 25h", vec!["renew", "job", "--token", "1", "--ttl", "25h"]),
        ("schema --db oracle", vec!["schema", "--db", "oracle"]),
    ];
    for (how, arguments) in cases {
        let ended = codes.add(64, how, run(&db, &arguments).await);
        assert_eq!(ended.stdout, "", "{how}");
        assert_ne!(ended.stderr, "", "{how}");
    }
    let nested = |how: &str, outer: &[&'static str], inner: &[&'static str]| {
        let inner = [&[program(), "run"], inner, &["job"], &say].concat();
        let command = sqlock(&db, &[&["run"], outer, &["job", "--"], &inner].concat());
        let how = how.to_owned();
        async move { (how, end(command).await) }
    };
    for nested in [
        nested("exclusive inside of --shared", &["--shared"], &[]),
        nested("exclusive inside of --permits", &["--permits", "2"], &[]),
        nested("--permits inside of exclusive", &[], &["--permits", "2"]),
    ] {
        let (how, ended) = nested.await;
        let ended = codes.add(64, &how, ended);
        assert_eq!(ended.stdout, "", "{how}");
        assert!(ended.stderr.contains("would wait for ever"), "{}", ended.stderr);
    }
    // The bounds themselves are in range.
    for ttl in ["1s", "24h"] {
        run(&db, &["acquire", "--ttl", ttl, &format!("for {ttl}")]).await.expect(0);
    }
    run(&db, &["run", &"n".repeat(255), "--label", &"l".repeat(255), "--", "true"]).await.expect(0);
    codes.assert_are(&[64]);
}

// ---- 78

#[tokio::test]
async fn invalid_configuration_exits_78_with_the_reason() {
    let mut codes = ExitCodes::default();
    let tried = |url: String| {
        let mut command = bare(&["run", "job", "--", "echo", "it ran"]);
        command.env("DATABASE_URL", url);
        end(command)
    };
    let mut refused = |how: &str, why: &str, ended: Ended| {
        let ended = codes.add(78, how, ended);
        assert!(ended.stderr.contains(why), "{how}: {}", ended.stderr);
        assert_eq!(ended.stdout, "", "{how}");
        assert!(!ended.stderr.contains("s3cret"), "{how}: {}", ended.stderr);
    };
    refused("DATABASE_URL is empty", "DATABASE_URL is empty", tried(String::new()).await);
    refused("an unknown scheme", "must begin with", tried("oracle://u:s3cret@127.0.0.1/x".into()).await);
    refused("sqlite::memory:", "in memory", tried("sqlite::memory:".into()).await);

    let db = empty().await;
    refused(
        "missing tables and --no-migrate",
        "sqlock migrate",
        run(&db, &["run", "--no-migrate", "job", "--", "echo", "it ran"]).await,
    );

    let directory = tempfile::tempdir().expect("a temporary directory");
    fs::write(directory.path().join(".env"), "DATABASE_URL=\"postgres://u:s3cret@127.0.0.1/x\nPORT=1\n")
        .expect("the directory is ours to write");
    let mut command = bare(&["run", "job", "--", "echo", "it ran"]);
    command.current_dir(directory.path());
    refused("a .env that cannot be parsed", ".env: syntax error in line 1", end(command).await);

    match DATABASE {
        Database::Sqlite => {
            let place = directory.path().display();
            refused(
                "a file in a directory that does not exist",
                "No such file or directory",
                tried(format!("sqlite://{place}/missing/app.db")).await,
            );
            refused("a directory in the place of the file", "is a directory", tried(format!("sqlite://{place}")).await);
            let file = directory.path().join("app.db-sqlock");
            fs::write(&file, "this is not a SQLite file, but long enough for the header of one".repeat(100))
                .expect("the directory is ours to write");
            refused(
                "a file that is not a SQLite database",
                "file is not a database",
                tried(format!("sqlite://{place}/app.db")).await,
            );
        }
        _ => {
            let (before, query) = db.url.split_once('?').unwrap_or((&db.url, ""));
            let base = before.rsplit_once('/').map_or(before, |(base, _)| base);
            refused("an unknown database", "missing", tried(format!("{base}/sqlock_missing?{query}")).await);
            if DATABASE == Database::Postgres {
                let option = format!("{}&options=-csearch_pth%3Dapp", db.url);
                refused("an unknown option of the server", "search_pth", tried(option).await);
            }
            let guarded = Guarded::start(&db).await;
            tried(guarded.url("s3cret")).await.expect(0);
            let wrong = guarded.url("s3cret-not");
            refused("a wrong password", &guarded.user, tried(wrong.clone()).await);
            let answered = soon("an answer of both servers", async {
                loop {
                    let ended = tried(format!("{wrong},{wrong}")).await;
                    // A server that is too slow to refuse the password is an outage.
                    if !ended.stderr.contains("no connection within") {
                        break ended;
                    }
                }
            });
            refused("a wrong password on two servers", &guarded.user, answered.await);
            refused("an unknown user", "nobody", tried(guarded.url("s3cret").replace(&guarded.user, "nobody")).await);
            guarded.drop().await;
        }
    }
    codes.assert_are(&[78]);
}

/// A server with a user that needs a password.
pub(super) struct Guarded {
    user: String,
    admin: Pool<Sql>,
    /// The URL, with a placeholder for the user's name and password.
    url: String,
    _server: Option<(Server, tempfile::TempDir)>,
}

impl Guarded {
    pub(super) async fn start(db: &TestDatabase) -> Self {
        if DATABASE.is_mysql() {
            let admin = db.pool_of(1).await;
            let place: String = sqlx::query_scalar("SELECT DATABASE()").fetch_one(&admin).await.expect("the place");
            let user = format!("g{place}");
            execute(&admin, &format!("CREATE USER {user}@'%' IDENTIFIED BY 's3cret'")).await;
            execute(&admin, &format!("GRANT ALL ON {place}.* TO {user}@'%'")).await;
            // MySQL takes passwords over TLS.
            let url = db.url.replacen("root@", "USER:PASSWORD@", 1).replace("ssl-mode=DISABLED", "ssl-mode=PREFERRED");
            return Self { user, admin, url, _server: None };
        }
        // The shared server needs no password.
        let directory = tempfile::Builder::new()
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .tempdir()
            .expect("a temporary directory");
        let rules = directory.path().join("pg_hba.conf");
        let text = "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n";
        fs::write(&rules, text).expect("the directory is ours to write");
        // PostgreSQL 13 stores passwords as MD5 by default.
        let settings = vec![format!("hba_file={}", rules.display()), "password_encryption=scram-sha-256".into()];
        let server = Server::start_with(Kind::Postgres, Options { settings, ..Options::default() });
        let admin = connect(&server.url(), 1).await;
        execute(&admin, "CREATE ROLE guarded LOGIN SUPERUSER PASSWORD 's3cret'").await;
        let url = server.url().replacen("postgres@", "USER:PASSWORD@", 1);
        Self { user: "guarded".into(), admin, url, _server: Some((server, directory)) }
    }

    pub(super) fn url(&self, password: &str) -> String {
        self.url.replacen("USER:PASSWORD", &format!("{}:{password}", self.user), 1)
    }

    pub(super) async fn drop(self) {
        if DATABASE.is_mysql() {
            execute(&self.admin, &format!("DROP USER {}@'%'", self.user)).await;
        }
        self.admin.close().await;
    }
}

async fn execute(pool: &Pool<Sql>, sql: &str) {
    sqlx::query(AssertSqlSafe(sql.to_owned())).execute(pool).await.expect(sql);
}

// ---- 69

#[tokio::test]
async fn unreachable_database_exits_69_not_75() {
    let mut codes = ExitCodes::default();
    if DATABASE == Database::Sqlite {
        // A file is always reachable; only the right to write can be missing.
        let db = empty().await;
        let locks = beside(&db).await;
        let pool = db.of_the_command().pool_of(1).await;
        let writing = pool.begin_with("BEGIN IMMEDIATE").await.expect("the file is there");
        for (options, how) in [(&["-n"][..], ", -n"), (&["-w", "1s"], ", -w 1s"), (&["-n", "-E", "9"], ", -n -E 9")] {
            let arguments = [&["run"], options, &["job", "--", "echo", "it ran"]].concat();
            let how = format!("another process is writing to the sidecar file all the time{how}");
            let ended = codes.add(69, &how, run(&db, &arguments).await);
            assert_eq!(ended.stdout, "");
        }
        writing.rollback().await.expect("rollback");
        assert_eq!(held(&locks, "job").await, None, "nothing arrived late");
        return codes.assert_are(&[69]);
    }
    let port = ClosedPort::reserve();
    let url = format!("{}://u:s3cret@127.0.0.1:{}/x", DATABASE.scheme(), port.number());
    for arguments in [
        &["run", "-n", "job", "--", "echo", "it ran"][..],
        &["run", "-n", "-E", "9", "job", "--", "echo", "it ran"],
        &["run", "job", "--", "echo", "it ran"],
        &["ls"],
        &["migrate"],
    ] {
        let mut command = bare(arguments);
        command.env("DATABASE_URL", &url);
        let how = format!("nothing listens on the port: {}", arguments.join(" "));
        let ended = codes.add(69, &how, end(command).await);
        assert_eq!(ended.stdout, "");
        assert!(
            ended.stderr.contains("cannot reach") && ended.stderr.contains(&port.number().to_string()),
            "{}",
            ended.stderr
        );
        assert!(!ended.stderr.contains("s3cret"), "{}", ended.stderr);
    }
    codes.assert_are(&[69]);
}

// ---- 75

/// Checks that nothing ran, and that a note names the holder with the label `busy`.
#[track_caller]
fn assert_refused(name: &str, ended: &Ended) {
    assert_eq!(ended.stdout, "");
    assert!(ended.stderr.contains(&format!("\"{name}\" not obtained")), "{}", ended.stderr);
    assert!(ended.stderr.contains("busy"), "it says who holds it: {}", ended.stderr);
}

#[tokio::test]
async fn held_name_exits_75_or_the_requested_code() {
    let (db, mut codes) = (empty().await, ExitCodes::default());
    let locks = beside(&db).await;
    let lease = locks.lease("job").ttl(LONG).label("busy").acquire().await.expect("acquire");
    let permit = locks.semaphore("permits", 2).ttl(LONG).label("busy").acquire().await.expect("acquire");
    // The waits run at the same time.
    let timed = async |arguments: &[&str]| {
        let start = Instant::now();
        (run(&db, arguments).await, start.elapsed())
    };
    let (limited, coded, skipped, acquired, permitted) = tokio::join!(
        timed(&["run", "-w", "5s", "job", "--", "echo", "it ran"]),
        timed(&["run", "-w", "5s", "-E", "9", "job", "--", "echo", "it ran"]),
        timed(&["run", "-w", "5s", "--skip-ok", "job", "--", "echo", "it ran"]),
        timed(&["acquire", "job", "-w", "5s"]),
        timed(&["run", "-w", "5s", "--permits", "1", "permits", "--", "echo", "it ran"]),
    );
    for (name, code, how, (ended, waited)) in [
        ("job", 75, "-w 5s, which ran out", limited),
        ("job", 9, "-w 5s -E 9", coded),
        ("job", 0, "-w 5s --skip-ok", skipped),
        ("job", 75, "acquire -w 5s", acquired),
        ("permits", 75, "-w 5s --permits 1, which ran out", permitted),
    ] {
        assert!(waited >= Duration::from_secs(5), "{how}: it ended after {waited:?}");
        assert_refused(name, &codes.add(code, how, ended));
    }
    for (code, options, how) in [
        (75, &["-n"][..], "-n, and somebody else holds the name"),
        (75, &["-w", "0"], "-w 0"),
        (9, &["-n", "-E", "9"], "-n -E 9"),
        (0, &["-n", "-E", "0"], "-n -E 0"),
        (0, &["-n", "--skip-ok"], "-n --skip-ok"),
    ] {
        let arguments = [&["run"], options, &["job", "--", "echo", "it ran"]].concat();
        assert_refused("job", &codes.add(code, how, run(&db, &arguments).await));
    }
    for (code, options, how) in [(75, &["-n"][..], "acquire -n"), (9, &["-n", "-E", "9"], "acquire -n -E 9")] {
        let ended = run(&db, &[&["acquire", "job"], options].concat()).await;
        assert_refused("job", &codes.add(code, how, ended));
    }
    lease.release().await.expect("ours to the end");
    run(&db, &["run", "-n", "job", "--", "true"]).await.expect(0);

    for (code, options, how) in [
        (75, &["-n"][..], "-n, and somebody has a permit"),
        (75, &["-n", "--permits", "1"], "-n --permits 1, and somebody has it"),
        (0, &["-n", "--permits", "2"], "-n --permits 2, and one of them is taken"),
    ] {
        codes.add(code, how, run(&db, &[&["run"], options, &["permits", "--", "true"]].concat()).await);
    }
    permit.release().await.expect("ours to the end");
    let alone = locks.lease("job").ttl(LONG).acquire().await.expect("acquire");
    let arguments = ["run", "-n", "--shared", "job", "--", "true"];
    codes.add(75, "-n --shared, and somebody holds the name alone", run(&db, &arguments).await);
    alone.release().await.expect("ours to the end");
    codes.assert_are(&[0, 9, 75]);
}

// ---- 79

#[tokio::test]
async fn stale_token_is_refused_with_79() {
    let (db, mut codes) = (empty().await, ExitCodes::default());
    let locks = beside(&db).await;
    let earlier = locks.lease("job").acquire().await.expect("acquire");
    let old = earlier.token().to_string();
    earlier.release().await.expect("release");
    for verb in ["renew", "release", "unlock"] {
        let how = format!("{verb} with the token of a lease that was released");
        let ended = codes.add(79, &how, run(&db, &[verb, "job", "--token", &old]).await);
        assert!(ended.stderr.contains("it is free"), "{}", ended.stderr);
    }
    // No heartbeat moves its expiry.
    let lease = locks.lease("job").ttl(LONG).renew(false).label("the next").acquire().await.expect("acquire");
    let before = held(&locks, "job").await.expect("held");
    for verb in ["renew", "release", "unlock"] {
        let how = format!("{verb} with the token of the holder before");
        let ended = codes.add(79, &how, run(&db, &[verb, "job", "--token", &old]).await);
        assert!(ended.stderr.contains("the next"), "it says who holds it now: {}", ended.stderr);
        assert_eq!(ended.stdout, "");
    }
    let after = held(&locks, "job").await.expect("held");
    assert_eq!((after.token, after.expires_at), (before.token, before.expires_at));
    lease.release().await.expect("ours to the end");
    codes.assert_are(&[79]);
}

#[tokio::test]
async fn unlock_stops_the_command_with_79() {
    let (db, mut codes) = (empty().await, ExitCodes::default());
    let script = "echo $SQLOCK_TOKEN; exec sleep 600";
    let mut holder = Running::start(sqlock(&db, &["run", "job", "--", "sh", "-c", script]));
    let token = holder.prints("").await;
    run(&db, &["unlock", "job", "--token", token.trim()]).await.expect(0);
    let how = "an operator unlocks the name while the command runs";
    let ended = codes.add(79, how, holder.end().await);
    assert!(ended.stderr.contains("the command was stopped"), "{}", ended.stderr);
    // The command had the stdout of sqlock, whose end was read, so the command has ended.
    assert_eq!(held(&beside(&db).await, "job").await, None);
    codes.assert_are(&[79]);
}

// ---- 130, 143

#[tokio::test]
async fn interrupted_waiter_leaves_nothing_behind() {
    let mut codes = ExitCodes::default();
    for (signal, sent, code) in [(Signal::INT, "INT", 130), (Signal::TERM, "TERM", 143), (Signal::HUP, "HUP", 129)] {
        for verb in [&["run", "job", "--", "echo", "it ran"][..], &["acquire", "job"]] {
            let db = empty().await;
            let locks = beside(&db).await;
            let lease = locks.lease("job").ttl(LONG).acquire().await.expect("acquire");
            let mut waiter = Running::start(sqlock(&db, verb));
            waiter.says("waiting for \"job\"").await;
            // The next waiter behind it.
            let others = beside(&db).await;
            let next = tokio::spawn(others.lease("job").ttl(LONG).acquire());
            waiter.signal(signal);
            let how = format!("{sent} while {} waits", verb[0]);
            let ended = codes.add(code, &how, waiter.end().await);
            assert_eq!(ended.stdout, "", "nothing ran, and nothing was granted");
            assert!(ended.stderr.contains("interrupted"), "{}", ended.stderr);
            lease.release().await.expect("ours to the end");
            let next = soon("the turn of the next", next).await.expect("no panic").expect("acquire");
            next.release().await.expect("release");
        }
    }
    codes.assert_are(&[129, 130, 143]);
}

/// With every limit, sqlock runs the command or names the missing resource.
#[tokio::test]
async fn low_file_limit_is_an_error() {
    let db = empty().await;
    run(&db, &["migrate"]).await.expect(0);
    let mut codes = Vec::new();
    for limit in [3, 6, 10, 16, 22, 28, 34, 40, 64] {
        let script = format!("ulimit -n {limit}; exec \"$0\" \"$@\"");
        let sqlock = sqlock(&db, &["run", "job", "--", "true"]);
        let mut command = tokio::process::Command::new("sh");
        command.args(["-c", &script]).arg(sqlock.as_std().get_program()).args(sqlock.as_std().get_args());
        for (name, value) in sqlock.as_std().get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let ended = end(command).await;
        assert!(!ended.stderr.contains("panicked"), "{limit}: {}", ended.stderr);
        let code = ended.status.code();
        assert!(code == Some(0) || !ended.stderr.is_empty() || limit < 4, "{limit}: {code:?} without a word");
        codes.push(code);
    }
    assert_eq!(codes.last(), Some(&Some(0)), "{codes:?}");
    assert!(codes.contains(&Some(71)), "{codes:?}");
}

/// Exit code 74 is not part of the contract, but every script that reads the token depends on it.
#[tokio::test]
async fn unwritable_output_exits_74() {
    let db = empty().await;
    for arguments in [&["ls", "--json"][..], &["show", "job"], &["schema"], &["--help"], &["ls", "-h"], &["--version"]]
    {
        let mut command = sqlock(&db, arguments);
        command.stdout(fs::File::create("/dev/full").expect("/dev/full")).stderr(std::process::Stdio::piped());
        let output = soon("the end of sqlock", command.spawn().expect("sqlock").wait_with_output()).await;
        let output = output.expect("its end");
        assert_eq!(output.status.code(), Some(74), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write to stdout"), "{arguments:?}");
    }
    let ended = run(&db, &["ls", "--json"]).await.expect(0);
    assert_eq!(serde_json::from_str::<Value>(&ended.stdout).expect("JSON"), Value::Array(Vec::new()));
}
