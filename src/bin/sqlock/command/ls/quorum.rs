//! `sqlock ls --quorum`: the holders on several independent databases, in one list.

use serde_json::Value;
use sqlock::Locks;

use crate::exit::Outcome;
use crate::global::Global;
use crate::holders::{self, Holder};
use crate::majority::Majority;
use crate::signals::Signals;
use crate::stderr::escape_line;
use crate::{describe, duration, stdout};

pub async fn run(global: &Global, prefix: &str, as_json: bool) -> Outcome {
    let mut signals = Signals::listen()?;
    let majority = Majority::open_existing(global).await?;
    let prefix = prefix.to_owned();
    let list = |locks: Locks| {
        let prefix = prefix.clone();
        async move { locks.list(&prefix).await }
    };
    let lists = signals.unless_terminated(majority.list_holders(list)).await?;
    let (count, needed) = (majority.databases.len(), majority.needed());
    majority.shutdown().await;
    let holders = holders::merge(lists?.into_iter().flatten().flatten());
    if as_json {
        stdout::print_json_pretty(&Value::Array(holders.iter().map(|holder| holder.to_json(needed)).collect()))?;
    } else {
        stdout::print(&table(&holders, count, needed))?;
    }
    Ok(0)
}

fn table(holders: &[Holder], count: usize, needed: usize) -> String {
    let row = |holder: &Holder| {
        let held = holder.decisive(needed);
        let votes = holder.votes();
        let verdict = if votes < needed { ", no majority" } else { "" };
        vec![
            escape_line(held.name.as_str()),
            escape_line(&held.holder),
            format!("{votes} of {count}{verdict}"),
            duration::format(describe::held_for(held)),
            duration::format(held.remaining),
            holder.token(needed).to_string(),
            escape_line(&held.label),
        ]
    };
    let rows: Vec<Vec<String>> = holders.iter().map(row).collect();
    stdout::format_table(&["NAME", "HOLDER", "HELD ON", "HELD FOR", "EXPIRES IN", "TOKEN", "LABEL"], &rows)
}
