//! The databases of a quorum, and the options of a lease on each.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::turn::Turns;
use crate::backend::Kind;
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::lease::options::LeaseOptions;
use crate::locks::Locks;

/// The state that all clones of a quorum share.
pub(super) struct Nodes {
    pub(super) locks: Vec<Locks>,
    /// The number of databases that must grant a name.
    pub(super) needed: usize,
    pub(super) rejoin_after: Option<Duration>,
    /// The turns of the waiters of this process.
    pub(super) turns: Turns,
    /// The server of each database, after it was asked. The inner `None`: the server has no
    /// identity.
    servers: Mutex<Vec<Option<Option<String>>>>,
}

const SAME_SERVER: Error = Error::Unsupported {
    what: "a quorum",
    reason: "two of its databases are on one server, which would vote twice: use independent servers",
};

impl Nodes {
    pub(super) fn new(locks: Vec<Locks>, needed: usize, rejoin_after: Option<Duration>) -> Self {
        let servers = Mutex::new(vec![None; locks.len()]);
        Self { locks, needed, rejoin_after, turns: Turns::default(), servers }
    }

    /// Returns the time on the clock of the clients. There is at least one, as
    /// [`check`](Self::check) requires.
    pub(super) fn now(&self) -> Moment {
        self.locks[0].client().now()
    }

    pub(super) fn check(&self) -> Result<()> {
        let refuse = |reason| Err(Error::Unsupported { what: "a quorum", reason });
        if self.locks.is_empty() {
            return refuse("it has no databases");
        }
        let is_repeated = |(i, locks): (usize, &Locks)| {
            self.locks.iter().skip(i + 1).any(|other| Arc::ptr_eq(locks.client(), other.client()))
        };
        if self.locks.iter().enumerate().any(is_repeated) {
            return refuse("it has the same client twice, which would vote twice");
        }
        let addresses: Vec<String> = self.locks.iter().filter_map(address).collect();
        if has_duplicate(&addresses) || has_duplicate(&self.known_servers()) {
            return Err(SAME_SERVER);
        }
        Ok(())
    }

    /// Records the server of a database. Returns an error if another database is on it.
    pub(super) fn record_server(&self, node: usize, server: Option<String>) -> Result<()> {
        if let Some(known) = self.servers.lock().unwrap_or_else(PoisonError::into_inner).get_mut(node) {
            *known = Some(server);
        }
        if has_duplicate(&self.known_servers()) { Err(SAME_SERVER) } else { Ok(()) }
    }

    /// Returns whether a database was already asked for its server.
    pub(super) fn is_server_known(&self, node: usize) -> bool {
        let servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        servers.get(node).is_some_and(Option::is_some)
    }

    fn known_servers(&self) -> Vec<String> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner).iter().flatten().flatten().cloned().collect()
    }

    /// Names a database in messages: `database 2 of 3 (db2:5432)`.
    pub(super) fn describe(&self, node: usize) -> String {
        let address = self.locks[node].client().backend.address();
        format!("database {} of {} ({address})", node + 1, self.locks.len())
    }

    /// Makes the error of a request without enough answers.
    pub(super) fn no_majority(
        &self,
        attempted: &'static str,
        answered: usize,
        mut errors: Vec<(usize, Error)>,
    ) -> Error {
        let (all, needed) = (self.locks.len(), self.needed);
        // An error that another attempt would not resolve comes first, unless the other databases
        // could still make a majority.
        let is_permanent = |error: &Error| !error.is_retryable();
        let left = all - errors.iter().filter(|(_, error)| is_permanent(error)).count();
        let is_decisive = |error: &Error| is_permanent(error) && (left < needed || is_misuse(error));
        if let Some(i) = errors.iter().position(|(_, error)| is_decisive(error)) {
            return errors.swap_remove(i).1;
        }
        let failed: Vec<String> =
            errors.iter().map(|(node, error)| format!("{}: {}", self.describe(*node), error.report())).collect();
        let lack = if answered < needed { format!("{needed} must") } else { "they disagree".into() };
        let reason = format!("{answered} of {all} databases answered, and {lack}; {}", failed.join("; "));
        Error::Unavailable { attempted, reason, source: None }
    }
}

/// Returns whether the request or the quorum is wrong, not the state of a database.
fn is_misuse(error: &Error) -> bool {
    matches!(error, Error::Unsupported { .. } | Error::OutOfRange { .. } | Error::Closed)
}

/// Returns the address of a server.
fn address(locks: &Locks) -> Option<String> {
    let client = locks.client();
    match client.kind {
        Kind::Postgres | Kind::MySql => Some(format!("{:?} {}", client.kind, client.backend.address())),
        _ => None,
    }
}

fn has_duplicate(texts: &[String]) -> bool {
    texts.iter().enumerate().any(|(i, text)| texts[..i].contains(text))
}

/// The options of a lease on a majority.
#[derive(Clone)]
pub(super) struct QuorumOptions {
    pub(super) lease: LeaseOptions,
    pub(super) node_timeout: Option<Duration>,
}

impl QuorumOptions {
    /// Returns how long a database may take to answer.
    pub(super) fn node_timeout(&self) -> Duration {
        self.node_timeout.unwrap_or((self.lease.ttl / 6).min(Duration::from_secs(1)))
    }
}

#[cfg(all(test, feature = "postgres", feature = "mysql"))]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::locks::LocksBuilder;

    fn check(urls: [&str; 2]) -> Result<()> {
        let locks = urls.map(|url| LocksBuilder::from_urls(url).map(LocksBuilder::build));
        let locks: Result<Vec<Locks>> = locks.into_iter().collect();
        Nodes::new(locks?, 2, None).check()
    }

    #[tokio::test]
    async fn servers_differ_by_their_unix_sockets() {
        let mysql = ["mysql://u@localhost/x?socket=/run/a.sock", "mysql://u@localhost/x?socket=/run/b.sock"];
        let postgres = ["postgres://u@localhost/x?host=/run/a", "postgres://u@localhost/x?host=/run/b"];
        for [a, b] in [mysql, postgres] {
            check([a, b]).expect("independent servers");
            assert!(matches!(check([a, a]), Err(Error::Unsupported { .. })), "{a}");
        }
    }
}
