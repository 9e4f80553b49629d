//! `sqlock ls --quorum`: the holders on several independent databases, in one list.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sqlock::Owner;
use sqlock::inspect::LeaseInfo;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::exit::{self, Failure, Outcome};
use crate::global::Global;
use crate::majority::Majority;
use crate::signals::Signals;
use crate::stderr::{self, escape_line};
use crate::{describe, duration, stdout};

/// How long a database may take to list its holders.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

pub async fn run(global: &Global, prefix: &str, as_json: bool) -> Outcome {
    let mut signals = Signals::listen()?;
    let majority = Majority::open_existing(global).await?;
    let (lists, failures) = signals.unless_terminated(list_each(&majority, prefix)).await?;
    let (count, answered) = (majority.databases.len(), lists.len());
    majority.shutdown().await;
    for failure in failures {
        stderr::print_warning(&failure);
    }
    let needed = count / 2 + 1;
    if answered < needed {
        let message = format!("{answered} of {count} databases answered, and {needed} must");
        return Err(Failure::new(exit::UNREACHABLE, message));
    }
    let holders = merge(lists);
    if as_json {
        stdout::print_json_pretty(&Value::Array(holders.iter().map(|holder| holder.to_json(needed)).collect()))?;
    } else {
        stdout::print(&table(&holders, count, needed))?;
    }
    Ok(0)
}

/// Lists the holders on each database. Returns the lists, and why the other databases have none.
async fn list_each(majority: &Majority, prefix: &str) -> (Vec<Vec<LeaseInfo>>, Vec<String>) {
    let mut requests = JoinSet::new();
    for (node, db) in majority.databases.iter().map(Arc::clone).enumerate() {
        let prefix = prefix.to_owned();
        requests.spawn(async move { (node, timeout(LIST_TIMEOUT, db.locks.list(&prefix)).await) });
    }
    let mut answers = requests.join_all().await;
    answers.sort_unstable_by_key(|(node, _)| *node);
    let (mut lists, mut failures) = (Vec::new(), Vec::new());
    for (node, answer) in answers {
        match answer {
            Ok(Ok(list)) => lists.push(list),
            Ok(Err(error)) => failures.push(format!("{}: {}", majority.describe(node), error.report())),
            Err(_) => failures.push(format!("{}: no answer", majority.describe(node))),
        }
    }
    (lists, failures)
}

/// A holder on some of the databases.
struct Holder {
    /// On each database that grants it the name, the longest lease first.
    leases: Vec<LeaseInfo>,
}

/// Joins what the databases list: one owner of a name is one holder.
fn merge(lists: Vec<Vec<LeaseInfo>>) -> Vec<Holder> {
    let key = |held: &LeaseInfo| -> (String, Option<Owner>) { (held.name.as_str().into(), held.owner) };
    let mut holders: Vec<Holder> = Vec::new();
    for held in lists.into_iter().flatten() {
        match holders.iter_mut().find(|holder| holder.leases.iter().any(|other| key(other) == key(&held))) {
            Some(holder) => holder.leases.push(held),
            None => holders.push(Holder { leases: vec![held] }),
        }
    }
    for holder in &mut holders {
        holder.leases.sort_by_key(|held| std::cmp::Reverse(held.remaining));
    }
    // A holder of a majority comes before other owners of the name.
    holders.sort_by(|a, b| {
        let key = |holder: &Holder| (holder.leases[0].name.clone(), std::cmp::Reverse(holder.leases.len()));
        key(a).cmp(&key(b))
    });
    holders
}

impl Holder {
    fn first(&self) -> &LeaseInfo {
        &self.leases[0]
    }

    /// The lease that ends first of the longest that make a majority. Without a majority, the
    /// longest.
    fn decisive(&self, needed: usize) -> &LeaseInfo {
        self.leases.get(needed - 1).unwrap_or(self.first())
    }

    /// The token of the holder: the highest of a majority.
    fn token(&self) -> i64 {
        self.leases.iter().map(|held| held.token.get()).max().unwrap_or_default()
    }

    fn to_json(&self, needed: usize) -> Value {
        let mut shown = json!(self.decisive(needed));
        shown["token"] = json!(self.token());
        shown["databases"] = json!(self.leases.len());
        shown["has_majority"] = json!(self.leases.len() >= needed);
        shown
    }
}

fn table(holders: &[Holder], count: usize, needed: usize) -> String {
    let row = |holder: &Holder| {
        let held = holder.decisive(needed);
        let votes = holder.leases.len();
        let verdict = if votes < needed { ", no majority" } else { "" };
        vec![
            escape_line(held.name.as_str()),
            escape_line(&held.holder),
            format!("{votes} of {count}{verdict}"),
            duration::format(describe::held_for(held)),
            duration::format(held.remaining),
            holder.token().to_string(),
            escape_line(&held.label),
        ]
    };
    let rows: Vec<Vec<String>> = holders.iter().map(row).collect();
    stdout::format_table(&["NAME", "HOLDER", "HELD ON", "HELD FOR", "EXPIRES IN", "TOKEN", "LABEL"], &rows)
}
