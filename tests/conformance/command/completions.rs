//! `sqlock completions`: names, completed by a shell with its script.

use crate::DATABASE;
use crate::support::command::{ClosedPort, Ended, bare, beside, end, path, program, run, sqlock};
use crate::support::{Database, Fresh, LONG, empty};

/// Returns what bash offers for the last word of a line on a database.
async fn complete(db: &Fresh, line: &[&str]) -> Vec<String> {
    let script = run(db, &["completions", "bash"]).await.expect(0).stdout;
    let prefix = if DATABASE == Database::Sqlite { &["sqlock", "--sidecar"][..] } else { &["sqlock"] };
    let test = format!(
        "{script}
        COMP_WORDS=(\"$@\") COMP_CWORD=$(($# - 1)) COMP_TYPE=9
        _clap_complete_sqlock sqlock \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD - 1]}}\"
        printf '%s\\n' \"${{COMPREPLY[@]}}\""
    );
    let mut bash = tokio::process::Command::new("bash");
    bash.args(["-c", &test, "bash"]).args(prefix).args(line);
    // The variables that the tests of the command set or remove are the same for the script.
    for (variable, value) in sqlock(db, &[]).as_std().get_envs() {
        match value {
            Some(value) => bash.env(variable, value),
            None => bash.env_remove(variable),
        };
    }
    let directory = std::path::Path::new(program()).parent().expect("a directory");
    bash.env("PATH", format!("{}:{}", directory.display(), std::env::var("PATH").expect("a path")));
    let ended = end(bash).await.expect(0);
    assert_eq!(ended.stderr, "");
    ended.stdout.lines().map(str::to_owned).collect()
}

/// Asks for candidates as a script for zsh does.
async fn ask(words: &[&str]) -> Ended {
    let mut asked = bare(&[&["--", "sqlock"], words].concat());
    asked.env("SQLOCK_COMPLETE", "zsh").env("_CLAP_COMPLETE_INDEX", words.len().to_string());
    end(asked).await.expect(0)
}

#[tokio::test]
async fn held_names_are_completed() {
    let db = empty().await;
    let locks = beside(&db).await;
    let mut leases = Vec::new();
    for name in ["report/nightly", "report/hourly", "deploy", "report/$(id)", "report/*", "report/a b", "-report"] {
        leases.push(locks.lease(name).ttl(LONG).acquire().await.expect("acquire"));
    }
    let reports = ["report/hourly", "report/nightly"];
    for line in [
        &["show", "rep"][..],
        &["ls", "report/"],
        &["unlock", "--token", "17", "rep"],
        &["run", "-n", "r"],
        &["acquire", "--ttl", "5s", "rep"],
    ] {
        assert_eq!(complete(&db, line).await, reports, "{line:?}");
    }
    assert_eq!(complete(&db, &["release", "dep"]).await, ["deploy"]);
    let all = complete(&db, &["show", ""]).await;
    assert_eq!(all[..4], ["deploy", "report/hourly", "report/nightly", "--json"]);
    assert_eq!(complete(&db, &["bench", "--prefix", "rep"]).await, [""]);

    // The database of the line counts, and zsh shows the holder.
    let sidecar = if DATABASE == Database::Sqlite { &["--sidecar"][..] } else { &[] };
    let ended = ask(&[&["-D", &db.url], sidecar, &["renew", "de"]].concat()).await;
    let holder = locks.holders("deploy").await.expect("list").remove(0).holder;
    assert_eq!(ended.stdout, format!("deploy:{holder}"));

    for lease in leases {
        lease.release().await.expect("release");
    }
    assert_eq!(complete(&db, &["show", "rep"]).await, [""]);
}

#[tokio::test]
async fn completion_without_a_database_prints_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let (file, closed) = (path(directory.path(), "app.db"), ClosedPort::reserve());
    let url = match DATABASE {
        Database::Sqlite => format!("sqlite:{file}"),
        Database::Postgres => format!("postgres://127.0.0.1:{}/app", closed.number()),
        _ => format!("mysql://127.0.0.1:{}/app", closed.number()),
    };
    for url in [&*url, "carrier-pigeon://", "@/nowhere/url"] {
        let ended = ask(&["-D", url, "show", "rep"]).await;
        assert_eq!((&*ended.stdout, &*ended.stderr), ("", ""), "{url}");
    }
    assert_eq!(std::fs::read_dir(directory.path()).expect("a list").count(), 0, "a file was made");
}
