//! `sqlock idem`: lists, shows, resolves and purges the idempotency records of an application.

mod describe;

use clap::Args;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sqlock::FencingToken;
use sqlock::idempotency::{Idempotency, IdempotencyKey, RecordInfo, RecordState, Resolution};

use self::describe::{find_worker, format_record, format_records, format_resolution, has_died, record_to_json};
use crate::database::Database;
use crate::exit::{self, Failure, Outcome};
use crate::global::Global;
use crate::parse::parse_token;
use crate::stderr::{self, quote};
use crate::stdout;

/// The prefix of the names of leases on keys.
const LEASE_PREFIX: &str = "sqlock-idem/";

/// Show, resolve and purge idempotency records.
///
/// The records are in the application's own database, also on SQLite: in the file of the URL, not
/// in FILE-sqlock.
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    subcommand: Subcommand,
}

#[derive(clap::Subcommand)]
enum Subcommand {
    #[command(visible_alias = "list")]
    Ls(LsArgs),
    Show(ShowArgs),
    Resolve(ResolveArgs),
    /// Purge expired records.
    ///
    /// Purging only saves space: an expired key counts as new, or is refused, also before. Records
    /// that are started or unknown are never touched.
    Purge,
}

/// List records, in order of creation.
///
/// Prints one line for each key, with its state: issued (a token that is not used yet), started (an
/// attempt runs, with its holder under WHO, or has died), unknown (the effect may have happened),
/// done, or expired (done, without its result, and refused). With --json an array of objects with
/// namespace, principal (null: a global key), key, state, token (of the latest attempt; null: done
/// in one transaction), attempts, created_at, expires_at (null: never, since the request has not
/// ended, or is expired) and holder (of the running attempt, or null).
#[derive(Args)]
struct LsArgs {
    /// List only records in this namespace.
    #[arg(long, value_name = "NS")]
    namespace: Option<String>,
    /// List only records in this state.
    #[arg(long)]
    state: Option<State>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// The most records to list.
    #[arg(long, value_name = "N", default_value = "1000", value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
}

/// Show the record of a key.
///
/// With --json the object that ls prints, with four more members: request_bytes and result_bytes,
/// the lengths of the stored request and of the stored result (null: none), steps, the names of the
/// steps that are done, and resolutions, how unknown outcomes were resolved: objects with outcome
/// (done or failed), token, by, note and at. If the key has no record, prints null, or an object
/// with only the resolutions.
#[derive(Args)]
struct ShowArgs {
    #[command(flatten)]
    key: KeyArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Record whether a request with an unknown outcome took effect.
///
/// The record must be in the state unknown, or started by an attempt that has died. The token,
/// which "sqlock idem show" prints, names the attempt: the outcome of a newer attempt is never
/// resolved by mistake (exit code 79). The operator, the time and the note are stored, also when
/// the record is deleted, and printed by "sqlock idem show".
#[derive(Args)]
struct ResolveArgs {
    #[command(flatten)]
    key: KeyArgs,
    #[command(flatten)]
    outcome: OutcomeArgs,
    /// The token of the latest attempt, as printed by ls and show.
    #[arg(short, long, value_name = "N", value_parser = parse_token)]
    token: FencingToken,
    /// The result that later requests with the key receive. It cannot be changed afterwards.
    ///
    /// For a request over HTTP, the stored response: {"status": 201, "headers": [["location",
    /// "/charges/1"]], "body": {"text": "charged"}}, or null for a response without content.
    #[arg(long, value_name = "JSON", conflicts_with = "failed", value_parser = parse_json)]
    result: Option<Box<RawValue>>,
    /// The operator who found out the outcome. By default USER@HOST.
    #[arg(long, value_name = "WHO")]
    by: Option<String>,
    /// How the outcome was found out.
    #[arg(long, value_name = "TEXT", default_value = "")]
    note: String,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct OutcomeArgs {
    /// The request took effect: the key replays the --result.
    #[arg(long, requires = "result")]
    done: bool,
    /// The request took no effect: the key is new again.
    #[arg(long)]
    failed: bool,
}

/// Checks the text, and keeps it as it is: a [`Value`] rounds long numbers.
fn parse_json(text: &str) -> Result<Box<RawValue>, String> {
    let parsed = serde_json::from_str::<Value>(text).and_then(|_| serde_json::from_str(text));
    parsed.map_err(|error| format!("not JSON: {error}"))
}

/// The options that name a key.
#[derive(Args)]
struct KeyArgs {
    /// The key.
    key: String,
    /// The namespace of the key.
    #[arg(long, value_name = "NS", default_value = "default")]
    namespace: String,
    #[command(flatten)]
    principal: PrincipalArgs,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct PrincipalArgs {
    /// The principal of the key.
    #[arg(long, value_name = "PRINCIPAL")]
    principal: Option<String>,
    /// The key has no principal.
    #[arg(long)]
    global: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum State {
    Issued,
    Started,
    Unknown,
    Done,
    Expired,
}

impl State {
    fn to_record_state(self) -> RecordState {
        match self {
            Self::Issued => RecordState::Issued,
            Self::Started => RecordState::Started,
            Self::Unknown => RecordState::Unknown,
            Self::Done => RecordState::Done,
            Self::Expired => RecordState::Expired,
        }
    }
}

impl KeyArgs {
    fn key(&self) -> IdempotencyKey {
        match &self.principal.principal {
            Some(principal) => IdempotencyKey::new(principal, &self.key),
            None => IdempotencyKey::global(&self.key),
        }
    }

    fn idempotency(&self, db: &Database) -> Idempotency {
        Idempotency::new(&db.locks).namespace(&self.namespace)
    }
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let db = Database::open_application(global).await?;
    match args.subcommand {
        Subcommand::Ls(args) => ls(&db, args).await?,
        Subcommand::Show(args) => show(&db, args).await?,
        Subcommand::Resolve(args) => resolve(&db, args).await?,
        Subcommand::Purge => {
            let purged = db.read(async || Idempotency::new(&db.locks).purge().await).await?;
            stdout::print(&format!("purged {purged} requests\n"))?;
        }
    }
    let _ = db.locks.shutdown().await;
    Ok(0)
}

async fn ls(db: &Database, args: LsArgs) -> Result<(), Failure> {
    let idempotency = Idempotency::new(&db.locks);
    let (namespace, state) = (args.namespace.as_deref(), args.state.map(State::to_record_state));
    // One more record shows whether there are more.
    let limit = args.limit.saturating_add(1);
    let list = async || db.read(async || idempotency.records_in(namespace, state, limit).await).await;
    let mut records = list().await?;
    let mut held = Vec::new();
    while records.iter().any(|record| record.state == RecordState::Started) {
        held = db.read(async || db.locks.list(LEASE_PREFIX).await).await?;
        let attempt = |record: &RecordInfo| (record.lease.clone(), record.token);
        let dead: Vec<_> = records.iter().filter(|record| has_died(record, &held)).map(attempt).collect();
        if dead.is_empty() {
            break;
        }
        // An attempt may have ended between the two reads, and another one may have begun.
        records = list().await?;
        if records.iter().all(|record| !has_died(record, &held) || dead.contains(&attempt(record))) {
            break;
        }
    }
    let all = records.len() <= args.limit as usize;
    records.truncate(args.limit as usize);
    if args.json {
        stdout::print_json_pretty(
            &records.iter().map(|record| record_to_json(record, find_worker(record, &held))).collect(),
        )?;
    } else {
        stdout::print(&format_records(&records, &held))?;
    }
    if !all {
        stderr::print_note(&format!("only the first {} are shown: --limit shows more", args.limit));
    }
    Ok(())
}

async fn show(db: &Database, args: ShowArgs) -> Result<(), Failure> {
    let (idempotency, key) = (args.key.idempotency(db), args.key.key());
    let inspect = async || db.read(async || idempotency.inspect(&key).await).await;
    let (mut record, mut held) = (inspect().await?, None);
    while let Some(RecordInfo { state: RecordState::Started, lease, token, .. }) = &record {
        held = db.read(async || db.locks.inspect(lease).await).await?;
        if held.is_some() {
            break;
        }
        // The attempt may have ended between the two reads, and another one may have begun.
        let (dead, now) = (*token, inspect().await?);
        record = now;
        if record.as_ref().is_some_and(|record| record.token == dead) {
            break;
        }
    }
    let held = held.as_ref().filter(|_| record.as_ref().is_some_and(|record| record.state == RecordState::Started));
    let resolutions = db.read(async || idempotency.resolutions(&key).await).await?;
    if args.json {
        let mut shown = record.map_or(Value::Null, |record| {
            let mut shown = record_to_json(&record, held);
            shown["request_bytes"] = record.request_bytes.into();
            shown["result_bytes"] = record.result_bytes.into();
            shown["steps"] = record.steps.into();
            shown
        });
        if !shown.is_null() || !resolutions.is_empty() {
            shown["resolutions"] = json!(resolutions);
        }
        return stdout::print_json_pretty(&shown);
    }
    let mut shown = match record {
        Some(record) => format_record(&record, held),
        None => format!("{} has no record\n", quote(&args.key.key)),
    };
    shown.extend(resolutions.iter().map(format_resolution));
    stdout::print(&shown)
}

async fn resolve(db: &Database, args: ResolveArgs) -> Result<(), Failure> {
    let ResolveArgs { key: key_args, outcome, token, result, by, note } = args;
    let (idempotency, key) = (key_args.idempotency(db), key_args.key());
    let resolution = result.as_ref().map_or_else(|| Ok(Resolution::failed()), Resolution::done)?;
    let resolution = resolution.by(by.unwrap_or_else(operator)).note(note);
    if !db.read(async || idempotency.resolve(&key, token, resolution.clone()).await).await? {
        let now = db.read(async || idempotency.inspect(&key).await).await?;
        return Err(refusal(&key_args, token, now.as_ref()));
    }
    let (key, end) = (quote(&key_args.key), if outcome.done { "done" } else { "new again" });
    stderr::print_note(&format!("{key} is {end}"));
    Ok(())
}

/// Returns the user and the host.
fn operator() -> String {
    let user =
        ["USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok().filter(|user| !user.is_empty()));
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{}@{host}", user.as_deref().unwrap_or("unknown"))
}

/// Makes the failure for a token that does not resolve the key.
fn refusal(key_args: &KeyArgs, token: FencingToken, now: Option<&RecordInfo>) -> Failure {
    let reason = match now {
        None => "it has no record".into(),
        Some(RecordInfo { state: RecordState::Done, .. }) => "it is done".into(),
        Some(RecordInfo { state: RecordState::Issued, .. }) => "it is not used yet".into(),
        Some(RecordInfo { state: RecordState::Started, token: Some(latest), .. }) if *latest == token => {
            "its attempt is in progress: it still held the lease on the key".into()
        }
        Some(RecordInfo { state, token: Some(latest), .. }) => format!("it is {state}, by token {latest}"),
        Some(RecordInfo { state, .. }) => format!("it is {state}"),
    };
    Failure::new(exit::LOST, format!("token {token} does not resolve {}: {reason}", quote(&key_args.key)))
}
