//! The holders that `sqlock ls` lists: in one database, or in several that vote.

use serde_json::{Value, json};
use sqlock::inspect::LeaseInfo;
use sqlock::{FencingToken, Locks};

use super::state::{Holding, Listed};
use super::view::Scope;
use crate::database::Database;
use crate::exit::Failure;
use crate::global::Global;
use crate::majority::Majority;
use crate::majority_holders::{self, Holder};
use crate::pool::LeaseFilter;
use crate::stderr::escape_line;
use crate::{describe, duration, stdout};

/// The databases in which holders are read and holdings are ended.
pub enum Source {
    Database(Database),
    Majority(Majority),
}

impl Source {
    pub async fn open(global: &Global, is_quorum: bool) -> Result<Self, Failure> {
        Ok(match is_quorum {
            true => Self::Majority(Majority::open_existing(global, LeaseFilter::All).await?),
            false => Self::Database(Database::open_existing(global, LeaseFilter::All).await?),
        })
    }

    /// Returns the headings of the screen.
    pub fn scope(&self) -> Scope {
        match self {
            Self::Database(db) => Scope { location: db.location.clone(), held_as: "MODE" },
            Self::Majority(majority) => {
                Scope { location: format!("{} databases", majority.databases.len()), held_as: "HELD ON" }
            }
        }
    }

    pub async fn list(&self, prefix: &str) -> Result<List, Failure> {
        match self {
            Self::Database(db) => Ok(List::Database(db.read(async || db.locks.list(prefix).await).await?)),
            Self::Majority(majority) => {
                let list = |locks: Locks| {
                    let prefix = prefix.to_owned();
                    async move { locks.list(&prefix).await }
                };
                let (mut held, mut missing) = (Vec::new(), Vec::new());
                for listed in majority.list_holders(list).await? {
                    match listed {
                        Ok(listed) => held.extend(listed),
                        Err(reason) => missing.push(reason),
                    }
                }
                let (count, needed) = (majority.databases.len(), majority.needed());
                Ok(List::Majority { holders: majority_holders::merge(held), count, needed, missing })
            }
        }
    }

    /// Ends the holding with this token. `false`: the token does not hold the name.
    pub async fn evict(&self, name: &str, token: FencingToken) -> sqlock::Result<bool> {
        match self {
            Self::Database(db) => db.locks.evict(name, token).await,
            Self::Majority(majority) => majority.quorum.evict(name, token).await,
        }
    }

    pub async fn shutdown(self) {
        match self {
            Self::Database(db) => drop(db.locks.shutdown().await),
            Self::Majority(majority) => majority.shutdown().await,
        }
    }
}

/// The holders at the time of a list.
pub enum List {
    Database(Vec<LeaseInfo>),
    Majority {
        holders: Vec<Holder>,
        /// The number of databases.
        count: usize,
        /// The number of databases that make a majority.
        needed: usize,
        /// Why databases are missing in the list: a text for each.
        missing: Vec<String>,
    },
}

impl List {
    /// Returns why databases are missing in the list.
    pub fn missing(&self) -> &[String] {
        match self {
            Self::Database(_) => &[],
            Self::Majority { missing, .. } => missing,
        }
    }

    pub fn to_json(&self) -> Value {
        match self {
            Self::Database(held) => json!(held),
            Self::Majority { holders, needed, .. } => holders.iter().map(|holder| holder.to_json(*needed)).collect(),
        }
    }

    pub fn to_table(&self) -> String {
        match self {
            Self::Database(held) => table(held),
            Self::Majority { holders, count, needed, .. } => table_of_majority(holders, *count, *needed),
        }
    }

    /// Returns the list for the screen.
    pub fn to_listed(&self) -> Listed {
        let holdings = match self {
            Self::Database(held) => held.iter().map(Holding::from).collect(),
            Self::Majority { holders, count, needed, .. } => {
                let row = |holder: &Holder| Holding {
                    held_as: describe_votes(holder, *count, *needed),
                    token: holder.token(*needed),
                    // A process that waits for a majority asks repeatedly, and is in no list.
                    waiters: None,
                    ..Holding::from(holder.decisive(*needed))
                };
                holders.iter().map(row).collect()
            }
        };
        Listed { holdings, missing: self.missing().to_vec() }
    }
}

fn table(held: &[LeaseInfo]) -> String {
    let rows: Vec<Vec<String>> = held
        .iter()
        .map(|held| {
            vec![
                escape_line(held.name.as_str()),
                escape_line(&held.holder),
                describe::format_mode(held.mode),
                held.waiters.to_string(),
                duration::format(describe::held_for(held)),
                duration::format(held.remaining),
                held.token.to_string(),
                escape_line(&held.label),
            ]
        })
        .collect();
    stdout::format_table(&["NAME", "HOLDER", "MODE", "WAITERS", "HELD FOR", "EXPIRES IN", "TOKEN", "LABEL"], &rows)
}

fn table_of_majority(holders: &[Holder], count: usize, needed: usize) -> String {
    let row = |holder: &Holder| {
        let held = holder.decisive(needed);
        vec![
            escape_line(held.name.as_str()),
            escape_line(&held.holder),
            describe_votes(holder, count, needed),
            duration::format(describe::held_for(held)),
            duration::format(held.remaining),
            holder.token(needed).to_string(),
            escape_line(&held.label),
        ]
    };
    let rows: Vec<Vec<String>> = holders.iter().map(row).collect();
    stdout::format_table(&["NAME", "HOLDER", "HELD ON", "HELD FOR", "EXPIRES IN", "TOKEN", "LABEL"], &rows)
}

/// Describes on how many databases a name is held.
fn describe_votes(holder: &Holder, count: usize, needed: usize) -> String {
    let votes = holder.votes();
    let verdict = if votes < needed { ", no majority" } else { "" };
    format!("{votes} of {count}{verdict}")
}
