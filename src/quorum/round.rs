//! A round of votes: asks all databases at once, and raises lower tokens.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout};

use super::nodes::{Nodes, QuorumOptions};
use super::tally::{Decision, Tally};
use crate::clock::Moment;
use crate::error::{Error, Result, no_answer_within};
use crate::lease::handle::Lease;
use crate::lease::request::LeaseRequest;
use crate::name::LockName;
use crate::operation::{ReadOrigin, Uptime};
use crate::owner::Owner;
use crate::panics;
use crate::token::FencingToken;

/// The shortest time that slower databases have to answer.
const MIN_GRACE: Duration = Duration::from_millis(10);

/// The votes of one request. Dropping it releases grants that arrive later.
pub(super) struct Round {
    nodes: Arc<Nodes>,
    name: LockName,
    /// The owner on all databases, so that people see which leases belong together.
    owner: Owner,
    pub(super) options: QuorumOptions,
    answers: JoinSet<NodeAnswer>,
    /// Whether each database still has to answer.
    pending: Vec<bool>,
    /// The lowest token of a vote that counts. `None`: there is no majority yet.
    token: Option<FencingToken>,
}

/// A database, and its answer.
type NodeAnswer = (usize, Result<Option<Lease>>);

/// A lease on one of the databases.
pub(super) type Vote = (usize, Lease);

/// The outcome of a round.
pub(super) enum Outcome {
    /// A majority granted the name, and all its rows have this token or a higher one.
    Granted(Vec<Vote>, FencingToken),
    Taken {
        split: bool,
    },
    Unreachable(Error),
}

impl Round {
    pub(super) fn new(nodes: Arc<Nodes>, name: LockName, owner: Owner, options: QuorumOptions) -> Self {
        let pending = vec![false; nodes.locks.len()];
        Self { nodes, name, owner, options, answers: JoinSet::new(), pending, token: None }
    }

    pub(super) fn ask_all(&mut self, within: Duration) {
        for node in 0..self.nodes.locks.len() {
            self.ask(node, within);
        }
    }

    /// Asks a database, unless it still has to answer.
    pub(super) fn ask(&mut self, node: usize, within: Duration) {
        if std::mem::replace(&mut self.pending[node], true) {
            return;
        }
        let request = self.nodes.locks[node].lease(self.name.as_str());
        let request = request.options(self.options.lease.without_limits()).owner_without_reentry(self.owner);
        let (nodes, lease) = (Arc::clone(&self.nodes), &self.options.lease);
        let kept_for = lease.ttl.max(lease.hold_at_least);
        // Dropping a request at its limit releases a later grant.
        self.answers.spawn(async move {
            let vote = panics::caught_in(vote(&nodes, node, request, kept_for));
            (node, answer(timeout(within, vote).await, within))
        });
    }

    /// Returns the next answer. Pending while no answer is expected. A vote has at least the token
    /// of the round.
    pub(super) async fn next_answer(&mut self, within: Duration) -> NodeAnswer {
        loop {
            let (node, answer) = match self.answers.join_next().await {
                Some(Ok(answer)) => answer,
                // The runtime is about to end.
                Some(Err(_)) => continue,
                None => std::future::pending().await,
            };
            match (answer, self.token) {
                (Ok(Some(lease)), Some(token)) if lease.token() < token => self.raise((node, lease), token, within),
                (answer, _) => {
                    self.pending[node] = false;
                    return (node, answer);
                }
            }
        }
    }

    fn raise(&mut self, (node, lease): Vote, to: FencingToken, within: Duration) {
        self.pending[node] = true;
        self.answers.spawn(async move {
            let raised = panics::caught_in(lease.raise_token(to));
            (node, answer(timeout(within, raised).await, within))
        });
    }

    /// Waits until the round is decided. `splits` counts the rounds just before in which the votes
    /// were split: each doubles the time for slower databases.
    pub(super) async fn outcome(&mut self, within: Duration, splits: u32) -> Outcome {
        let start = Instant::now();
        let mut until = None;
        let mut granted: Vec<Vote> = Vec::new();
        let mut refused = 0;
        let mut errors = Vec::new();
        loop {
            let decision = self.tally(granted.len(), refused).decide();
            let split = !granted.is_empty();
            match (decision, self.token) {
                (Decision::Granted, Some(token)) => return Outcome::Granted(granted, token),
                (Decision::Granted, None) => {
                    granted = self.write_back(granted, within);
                    continue;
                }
                (Decision::Taken, _) => return Outcome::Taken { split },
                (Decision::Unreachable, _) => {
                    let answered = granted.len() + refused;
                    return Outcome::Unreachable(self.nodes.no_majority("acquire a majority", answered, errors));
                }
                (Decision::Wait, _) => until = None,
                // The slower databases get as much time again as the others needed.
                (Decision::WaitBriefly, _) => {
                    until.get_or_insert_with(|| {
                        let grace = start.elapsed().max(MIN_GRACE).saturating_mul(1 << splits.min(16));
                        Instant::now() + grace.min(within)
                    });
                }
            }
            let grace = until.map_or(within, |until| until.saturating_duration_since(Instant::now()));
            let Ok(answer) = timeout(grace, self.next_answer(within)).await else {
                if until.is_some() {
                    return Outcome::Taken { split };
                }
                continue;
            };
            match answer {
                (node, Ok(Some(lease))) => granted.push((node, lease)),
                (_, Ok(None)) => refused += 1,
                (_, Err(error @ Error::Unsupported { .. })) => return Outcome::Unreachable(error),
                (node, Err(error)) => errors.push((node, error)),
            }
        }
    }

    fn tally(&self, granted: usize, refused: usize) -> Tally {
        let (databases, needed) = (self.nodes.locks.len(), self.nodes.needed);
        let pending = (0..databases).filter(|node| self.pending[*node]);
        let may_share_server = pending.clone().any(|node| !self.nodes.is_server_known(node));
        let (pending, has_token) = (pending.count(), self.token.is_some());
        Tally { databases, needed, granted, refused, pending, may_share_server, has_token }
    }

    /// Decides the token, and raises lower ones. Returns the votes that count at once.
    fn write_back(&mut self, granted: Vec<Vote>, within: Duration) -> Vec<Vote> {
        let Some(token) = granted.iter().map(|(_, lease)| lease.token()).max() else {
            return granted;
        };
        self.token = Some(token);
        let (counts, lower) = granted.into_iter().partition(|(_, lease)| lease.token() >= token);
        let lower: Vec<Vote> = lower;
        for vote in lower {
            self.raise(vote, token, within);
        }
        counts
    }
}

/// Returns the answer of a database. A panic, or no answer `within` this time, is an error.
fn answer(answer: Result<Result<Result<Option<Lease>>, String>, Elapsed>, within: Duration) -> Result<Option<Lease>> {
    let reason = match answer {
        Ok(Ok(answer)) => return answer,
        Ok(Err(panic)) => panics::reason(&panic),
        Err(_) => no_answer_within(within),
    };
    Err(Error::Unavailable { attempted: "acquire", reason, source: None })
}

/// Returns the vote of a database, if the database may vote.
async fn vote(nodes: &Nodes, node: usize, request: LeaseRequest, kept_for: Duration) -> Result<Option<Lease>> {
    let asked_at = Moment::now();
    let client = nodes.locks[node].client();
    let Some(lease) = request.try_acquire().await? else {
        // The vote of another database on the same server may be what keeps the name taken.
        if !nodes.is_server_known(node) {
            nodes.record_server(node, client.run(ReadOrigin).await?.server)?;
        }
        return Ok(None);
    };
    // The age is read after the grant, to reveal a loss of data or a restart in between.
    let before = |age: Duration| age.saturating_sub(Moment::now().since(asked_at));
    let origin = client.run(ReadOrigin).await?;
    nodes.record_server(node, origin.server)?;
    let least = kept_for.max(nodes.rejoin_after.unwrap_or_default());
    // A single database cannot have replaced another member, so its age does not matter.
    if let Some(age) = origin.age.map(before).filter(|age| *age < least && nodes.locks.len() > 1) {
        return Err(no_vote_error(format!("its tables were created {age:.0?} ago, and it votes after {least:?}")));
    }
    if let Some(least) = nodes.rejoin_after
        && let Some(up) = client.run(Uptime).await?.map(before).filter(|up| *up < least)
    {
        return Err(no_vote_error(format!("the server has been up for {up:?} only, and votes after {least:?}")));
    }
    Ok(Some(lease))
}

fn no_vote_error(reason: String) -> Error {
    Error::Unavailable { attempted: "acquire", reason, source: None }
}
