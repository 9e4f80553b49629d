//! `sqlock show --quorum`: the holders of a name on several independent databases.

use serde_json::{Value, json};
use sqlock::Locks;
use sqlock::inspect::LeaseInfo;

use crate::exit::Outcome;
use crate::global::Global;
use crate::majority::Majority;
use crate::majority_holders::{self, Holder};
use crate::pool::LeaseFilter;
use crate::stderr::{self, escape_line, quote};
use crate::{describe, duration, stdout};

pub async fn run(global: &Global, name: &str, as_json: bool) -> Outcome {
    let majority = Majority::open_existing(global, LeaseFilter::Name(name)).await?;
    let name = name.to_owned();
    let list = |locks: Locks| {
        let name = name.clone();
        async move { locks.holders(&name).await }
    };
    let lists = majority.list_holders(list).await;
    let needed = majority.needed();
    let described: Vec<String> = (0..majority.databases.len()).map(|node| majority.describe(node)).collect();
    majority.shutdown().await;
    let lists = lists?.into_iter().map(|listed| listed.map_err(|reason| stderr::print_warning(&reason)).ok());
    let databases: Vec<Listed> = described.into_iter().zip(lists).collect();
    let holders = majority_holders::merge(databases.iter().filter_map(|(_, held)| held.as_ref()).flatten().cloned());
    let overview = Overview { name, databases, holders, needed };
    if as_json {
        stdout::print_json_pretty(&overview.to_json())?;
    } else {
        stdout::print(&format!("{}\n\n{}", overview.describe_state(), overview.table()))?;
    }
    Ok(0)
}

/// A database, and the holders of the name there. `None`: the database has not answered.
type Listed = (String, Option<Vec<LeaseInfo>>);

/// A name on all databases.
struct Overview {
    name: String,
    databases: Vec<Listed>,
    /// The holder on the most databases comes first.
    holders: Vec<Holder>,
    /// The number of databases that make a majority.
    needed: usize,
}

/// Whether a majority holds a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Held,
    /// The databases that have not answered decide.
    Unknown,
    /// There are holders, none with a majority.
    Split,
    Free,
}

impl State {
    /// Decides by the votes of the holder on the most databases, and by the number of databases
    /// that have not answered, which is less than a majority.
    fn decide(votes: usize, silent: usize, needed: usize) -> Self {
        match votes {
            0 => Self::Free,
            _ if votes >= needed => Self::Held,
            _ if votes + silent >= needed => Self::Unknown,
            _ => Self::Split,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Unknown => "unknown",
            Self::Split => "split",
            Self::Free => "free",
        }
    }
}

impl Overview {
    fn silent(&self) -> usize {
        self.databases.iter().filter(|(_, held)| held.is_none()).count()
    }

    fn state(&self) -> State {
        State::decide(self.holders.first().map_or(0, Holder::votes), self.silent(), self.needed)
    }

    /// Describes in one line whether a majority holds the name.
    fn describe_state(&self) -> String {
        let (name, count) = (quote(&self.name), self.databases.len());
        let shares = || {
            let share = |holder: &Holder| {
                let shown = escape_line(&holder.decisive(self.needed).holder);
                format!("{shown} holds it on {} of {count} databases", holder.votes())
            };
            self.holders.iter().map(share).collect::<Vec<_>>().join(", ")
        };
        match (self.state(), self.holders.first()) {
            (State::Held, Some(holder)) => {
                let held = holder.decisive(self.needed);
                let (votes, by) = (holder.votes(), escape_line(&held.holder));
                match held.owner {
                    Some(owner) => format!(
                        "{name} is held by a majority, {votes} of {count} databases, with token {} by {by}, owner {owner}",
                        holder.token(self.needed)
                    ),
                    None => format!(
                        "{name} was released by {by}; it stays taken on {votes} of {count} databases for another {}",
                        duration::format(held.remaining)
                    ),
                }
            }
            (State::Unknown, Some(_)) => {
                format!("{name} may be held by a majority: {}, and {} did not answer", shares(), self.silent())
            }
            (State::Split, Some(_)) => format!("{name} is split, and no majority holds it: {}", shares()),
            _ => format!("{name} is free on {} of {count} databases", count - self.silent()),
        }
    }

    fn table(&self) -> String {
        let heading = ["DATABASE", "HOLDER", "TOKEN", "OWNER", "HELD FOR", "EXPIRES IN", "LABEL"];
        let mut rows = Vec::new();
        for (database, holders) in &self.databases {
            let without_holder = |reason: &str| vec![escape_line(database), reason.to_owned()];
            match holders.as_deref() {
                None => rows.push(without_holder("(unknown)")),
                Some([]) => rows.push(without_holder("(free)")),
                Some(holders) => rows.extend(holders.iter().map(|held| {
                    vec![
                        escape_line(database),
                        escape_line(&held.holder),
                        held.token.to_string(),
                        held.owner.map_or_else(|| "(released)".into(), |owner| owner.to_string()),
                        duration::format(describe::held_for(held)),
                        duration::format(held.remaining),
                        escape_line(&held.label),
                    ]
                })),
            }
        }
        for row in &mut rows {
            row.resize(heading.len(), String::new());
        }
        stdout::format_table(&heading, &rows)
    }

    fn to_json(&self) -> Value {
        let state = self.state();
        let majority = self.holders.first().filter(|_| state == State::Held);
        let databases = self.databases.iter().map(|(database, held)| json!({ "database": database, "holders": held }));
        json!({
            "name": self.name,
            "state": state.as_str(),
            "majority": majority.map(|holder| holder.to_json(self.needed)),
            "databases": databases.collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_database_leaves_a_minority_undecided() {
        // Three databases.
        assert_eq!(State::decide(0, 1, 2), State::Free);
        assert_eq!(State::decide(2, 1, 2), State::Held);
        assert_eq!(State::decide(1, 1, 2), State::Unknown);
        assert_eq!(State::decide(1, 0, 2), State::Split);
        // Five databases.
        assert_eq!(State::decide(1, 1, 3), State::Split);
        assert_eq!(State::decide(1, 2, 3), State::Unknown);
    }
}
