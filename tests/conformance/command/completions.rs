//! `sqlock completions`: names, completed by a shell with its script.

use crate::DATABASE;
use crate::support::command::{ClosedPort, Ended, bare, beside, end, path, program, run, sqlock};
use crate::support::{Database, LONG, TestDatabase, empty};

/// The options with which the command finds its leases in the database of a test.
const OPTIONS: &str = if matches!(DATABASE, Database::Sqlite) { "--sidecar " } else { "" };

/// Splits a line as bash does: at spaces, and before and after ":" and "=".
fn split(line: &str) -> Vec<String> {
    let is_break = |c| ":=".contains(c);
    let mut words = Vec::new();
    for word in line.split(' ') {
        let mut pieces: Vec<String> = vec![String::new()];
        for c in word.chars() {
            match pieces.last_mut() {
                Some(piece) if piece.is_empty() || piece.ends_with(is_break) == is_break(c) => piece.push(c),
                _ => pieces.push(c.to_string()),
            }
        }
        words.append(&mut pieces);
    }
    words
}

/// Returns the candidates of bash for the end of a line.
async fn complete(db: &TestDatabase, line: &str) -> Vec<String> {
    let script = run(db, &["completions", "bash"]).await.expect(0).stdout;
    let test = format!(
        "{script}
        COMP_LINE=$1 COMP_POINT=${{#1}} COMP_TYPE=9
        shift
        COMP_WORDS=(\"$@\") COMP_CWORD=$(($# - 1))
        current=${{COMP_WORDS[COMP_CWORD]}}
        [[ $current != [:=]* ]] || current=
        _sqlock sqlock \"$current\" \"${{COMP_WORDS[COMP_CWORD - 1]}}\"
        for candidate in \"${{COMPREPLY[@]}}\"; do echo \"$candidate\"; done"
    );
    let line = format!("sqlock {line}");
    let mut bash = tokio::process::Command::new("bash");
    bash.args(["-c", &test, "bash", &line]).args(split(&line));
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
    for name in ["report/nightly", "report/hourly", "deploy", "a:b", "a:c", "report/$(id)", "report/a b", "-report"] {
        leases.push(locks.lease(name).ttl(LONG).acquire().await.expect("acquire"));
    }
    let reports = ["report/hourly", "report/nightly"];
    for line in ["show rep", "ls report/", "unlock --token=17 rep", "run -n r", "acquire --ttl 5s rep"] {
        assert_eq!(complete(&db, &format!("{OPTIONS}{line}")).await, reports, "{line}");
    }
    assert_eq!(complete(&db, &format!("{OPTIONS}release dep")).await, ["deploy"]);
    assert_eq!(complete(&db, &format!("{OPTIONS}show a:")).await, ["b", "c"]);
    let all = complete(&db, &format!("{OPTIONS}show ")).await;
    assert_eq!(all[..6], ["a:b", "a:c", "deploy", "report/hourly", "report/nightly", "--json"]);
    // Bash completes files here.
    assert!(complete(&db, &format!("{OPTIONS}run job -- rep")).await.is_empty());
    assert!(complete(&db, &format!("{OPTIONS}bench --prefix rep")).await.is_empty());
    let others = empty().await;
    let line = |value: &str| format!("renew --ttl {value} {OPTIONS}-D {} rep", db.url);
    assert_eq!(complete(&others, &line("5s")).await, reports);
    assert_eq!(complete(&others, &line("soon")).await, reports, "another option is wrong");

    // Zsh shows the holder, too.
    let options: Vec<&str> = OPTIONS.split_whitespace().collect();
    let ended = ask(&[&["-D", &db.url], &options[..], &["renew", "de"]].concat()).await;
    let holder = locks.holders("deploy").await.expect("list").remove(0).holder;
    assert_eq!(ended.stdout, format!("deploy:{holder}"));

    for lease in leases {
        lease.release().await.expect("release");
    }
    assert!(complete(&db, &format!("{OPTIONS}show rep")).await.is_empty());
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

/// A script puts "--" before the words. Without it, a command must not be mistaken for a question.
#[tokio::test]
async fn variable_of_completions_alone_changes_nothing() {
    let db = empty().await;
    for shell in ["bash", "abacus"] {
        let mut command = sqlock(&db, &["run", "job", "--", "echo", "ran"]);
        command.env("SQLOCK_COMPLETE", shell);
        assert_eq!(end(command).await.expect(0).stdout, "ran\n", "{shell}");
    }
}
