//! `sqlock idem`: the requests that an application makes take effect once.

use clap::Args;
use serde_json::{Value, json};
use sqlock::FencingToken;
use sqlock::idempotency::{Idempotency, IdempotencyKey, RecordInfo};
use sqlock::inspect::LeaseInfo;

use crate::database::Database;
use crate::exit::{self, Failure, Outcome};
use crate::hold::time;
use crate::options::Global;
use crate::output;
use crate::say::{self, printable_line, quoted};
use crate::unlock::parse_token;

/// How the names of the leases on keys begin.
const LEASES: &str = "sqlock-idem/";

/// Show, release and purge requests that take effect once.
///
/// They are in the application's own database, also on SQLite: in the file that is named, not in FILE-sqlock.
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    subcommand: Subcommand,
}

#[derive(clap::Subcommand)]
enum Subcommand {
    #[command(visible_alias = "list")]
    Ls(Ls),
    Show(Show),
    Release(Release),
    /// Purge the requests whose time has run out.
    ///
    /// It only tidies: their keys count as new with or without it. What has not ended, or of which nobody knows how it has, is
    /// never touched.
    Purge,
}

/// List requests, in order of creation.
///
/// One line for each key, with how far it has come: issued (a token that nobody has used so far), started (an attempt is at
/// work, or has died: WHO tells who is), unknown (nobody knows whether it took effect) or done. With --json an array of objects
/// with namespace, principal (null: it is everybody's key), key, state, token (of the latest attempt; null: it was done in one
/// transaction), attempts, created_at, expires_at (null: never, since it has not ended) and holder (who is at work, or null).
#[derive(Args)]
struct Ls {
    /// Only those in this namespace.
    #[arg(long, value_name = "NS")]
    namespace: Option<String>,
    /// Only those that have come so far.
    #[arg(long)]
    state: Option<State>,
    /// As JSON.
    #[arg(long)]
    json: bool,
    /// How many at most.
    #[arg(long, value_name = "N", default_value = "1000", value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
}

/// Show what stands under a key.
///
/// With --json the object that ls has, with two members more: result_bytes, how long the stored result is (null: there is
/// none), and steps, the names of those that are done; or null when nothing stands under the key.
#[derive(Args)]
struct Show {
    #[command(flatten)]
    which: Which,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Make a key as good as new: for a request that has certainly taken no effect.
///
/// For one that has died or of which nobody knows how it has ended; what is done is done. The token, which "sqlock idem show"
/// tells, says which attempt is meant: a newer one is never released by mistake (exit code 79). One that is at work is not
/// stopped, but it cannot store its result any more.
#[derive(Args)]
struct Release {
    #[command(flatten)]
    which: Which,
    /// The token of the latest attempt, as printed by ls and show.
    #[arg(short, long, value_name = "N", value_parser = parse_token)]
    token: FencingToken,
}

/// Which request is meant.
#[derive(Args)]
struct Which {
    /// The key.
    key: String,
    /// The namespace that it is in.
    #[arg(long, value_name = "NS", default_value = "default")]
    namespace: String,
    #[command(flatten)]
    whose: Whose,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct Whose {
    /// Whose key it is.
    #[arg(long, value_name = "WHO")]
    principal: Option<String>,
    /// It is everybody's key.
    #[arg(long)]
    global: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum State {
    Issued,
    Started,
    Unknown,
    Done,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Issued => "issued",
            Self::Started => "started",
            Self::Unknown => "unknown",
            Self::Done => "done",
        }
    }
}

impl Which {
    fn key(&self) -> IdempotencyKey {
        match &self.whose.principal {
            Some(principal) => IdempotencyKey::new(principal, &self.key),
            None => IdempotencyKey::global(&self.key),
        }
    }

    fn requests(&self, db: &Database) -> Idempotency {
        Idempotency::new(&db.locks).namespace(&self.namespace)
    }
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let db = Database::open_of_the_application(global).await?;
    match args.subcommand {
        Subcommand::Ls(args) => ls(&db, args).await?,
        Subcommand::Show(args) => show(&db, args).await?,
        Subcommand::Release(args) => release(&db, args).await?,
        Subcommand::Purge => {
            let purged = db.read(async || Idempotency::new(&db.locks).purge().await).await?;
            output::text(&format!("purged {purged} requests\n"))?;
        }
    }
    let _ = db.locks.shutdown().await;
    Ok(0)
}

async fn ls(db: &Database, args: Ls) -> Result<(), Failure> {
    let requests = Idempotency::new(&db.locks);
    let (namespace, state) = (args.namespace.as_deref(), args.state.map(State::name));
    // One more tells whether these are all.
    let limit = args.limit.saturating_add(1);
    let mut records = db.read(async || requests.records_in(namespace, state, limit).await).await?;
    let all = records.len() <= args.limit as usize;
    records.truncate(args.limit as usize);
    let mut held = Vec::new();
    if records.iter().any(|record| record.state == "started") {
        held = db.read(async || db.locks.list(LEASES).await).await?;
    }
    if args.json {
        output::json_on_many_lines(&records.iter().map(|record| json(record, at_work(record, &held))).collect())?;
    } else {
        output::text(&table(&records, &held))?;
    }
    if !all {
        say::note(&format!("only the first {} are shown: --limit shows more", args.limit));
    }
    Ok(())
}

fn table(records: &[RecordInfo], held: &[LeaseInfo]) -> String {
    let rows: Vec<Vec<String>> = records
        .iter()
        .map(|record| {
            vec![
                printable_line(&record.namespace),
                whose(record),
                printable_line(&record.key),
                record.state.into(),
                record.attempts.to_string(),
                record.token.map_or_else(|| "-".into(), |token| token.to_string()),
                time(record.created_at),
                expiry(record).unwrap_or_else(|| "never".into()),
                at_work(record, held).map_or_else(String::new, |held| printable_line(&held.holder)),
            ]
        })
        .collect();
    let heading = ["NAMESPACE", "PRINCIPAL", "KEY", "STATE", "ATTEMPTS", "TOKEN", "CREATED AT", "EXPIRES AT", "WHO"];
    output::table(&heading, &rows)
}

/// Who is at work on it.
fn at_work<'h>(record: &RecordInfo, held: &'h [LeaseInfo]) -> Option<&'h LeaseInfo> {
    held.iter().find(|held| record.state == "started" && held.name.as_str() == record.lease)
}

/// `None`: never, since it has not ended.
fn expiry(record: &RecordInfo) -> Option<String> {
    matches!(record.state, "done" | "issued").then(|| time(record.expires_at))
}

fn whose(record: &RecordInfo) -> String {
    record.principal.as_deref().map_or_else(|| "(global)".into(), printable_line)
}

/// As `ls --json` has it.
fn json(record: &RecordInfo, held: Option<&LeaseInfo>) -> Value {
    json!({
        "namespace": record.namespace,
        "principal": record.principal,
        "key": record.key,
        "state": record.state,
        "token": record.token.map(FencingToken::get),
        "attempts": record.attempts,
        "created_at": time(record.created_at),
        "expires_at": expiry(record),
        "holder": held.map(|held| &held.holder),
    })
}

async fn show(db: &Database, args: Show) -> Result<(), Failure> {
    let (requests, key) = (args.which.requests(db), args.which.key());
    let record = db.read(async || requests.inspect(&key).await).await?;
    let held = match &record {
        Some(record) => db.read(async || db.locks.inspect(&record.lease).await).await?,
        None => None,
    };
    let held = held.as_ref().filter(|_| record.as_ref().is_some_and(|record| record.state == "started"));
    if args.json {
        return output::json_on_many_lines(&record.map_or(Value::Null, |record| {
            let mut shown = json(&record, held);
            shown["result_bytes"] = record.result_bytes.into();
            shown["steps"] = record.steps.into();
            shown
        }));
    }
    match record {
        Some(record) => output::text(&lines(&record, held)),
        None => output::text(&format!("nothing stands under {}\n", quoted(&args.which.key))),
    }
}

fn lines(record: &RecordInfo, held: Option<&LeaseInfo>) -> String {
    let state = match (record.state, held) {
        ("issued", _) => "issued: a token that nobody has used so far".into(),
        ("started", Some(held)) => format!("started: {} is at work", printable_line(&held.holder)),
        ("started", None) => "started: nobody is at work".into(),
        ("unknown", _) => "unknown: nobody knows whether it took effect".into(),
        (state, _) => state.into(),
    };
    let lines = [
        ("namespace", printable_line(&record.namespace)),
        ("principal", whose(record)),
        ("key", printable_line(&record.key)),
        ("state", state),
        ("attempts", record.attempts.to_string()),
        ("token", record.token.map_or_else(|| "none: in one transaction".into(), |token| token.to_string())),
        ("result", record.result_bytes.map_or_else(|| "none".into(), |bytes| format!("{bytes} bytes"))),
        ("steps done", printable_line(&record.steps.join(", "))),
        ("created at", time(record.created_at)),
        ("expires at", expiry(record).unwrap_or_else(|| "never, since it has not ended".into())),
    ];
    let lines = lines.iter().filter(|(_, value)| !value.is_empty());
    lines.map(|(what, value)| format!("{what:<11}  {value}\n")).collect()
}

async fn release(db: &Database, args: Release) -> Result<(), Failure> {
    let Release { which, token } = args;
    let (requests, key) = (which.requests(db), which.key());
    let record = db.read(async || requests.inspect(&key).await).await?;
    if !db.read(async || requests.forget(&key, token).await).await? {
        let now = db.read(async || requests.inspect(&key).await).await?;
        return Err(refused(&which, token, now.as_ref()));
    }
    say::note(&format!("{} is as good as new", quoted(&which.key)));
    // It was released, whether or not one can see who is still there.
    if let Some(record) = record
        && let Ok(Some(held)) = db.locks.inspect(&record.lease).await
    {
        let holder = printable_line(&held.holder);
        say::warning(&format!(
            "{holder} is still at work on it, or has just died: until its lease ends, the key is in progress"
        ));
    }
    Ok(())
}

/// What to say when the token does not tell what can be released.
fn refused(which: &Which, token: FencingToken, now: Option<&RecordInfo>) -> Failure {
    let why = match now {
        None => "nothing stands under it".into(),
        Some(RecordInfo { state: "done", .. }) => "it is done".into(),
        Some(RecordInfo { state: "issued", .. }) => "nobody has used it so far".into(),
        Some(RecordInfo { state, token: Some(latest), .. }) => format!("it is {state}, by token {latest}"),
        Some(RecordInfo { state, .. }) => format!("it is {state}"),
    };
    Failure::new(exit::LOST, format!("token {token} does not release {}: {why}", quoted(&which.key)))
}
