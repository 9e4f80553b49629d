//! Asking all databases at once, and raising the tokens of those who granted a lower one.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::nodes::{Nodes, QuorumOptions};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::lease::handle::Lease;
use crate::lease::request::LeaseRequest;
use crate::name::LockName;
use crate::operation::Uptime;
use crate::owner::Owner;
use crate::token::FencingToken;

/// The least time that is given to the slower ones.
const MIN_GRACE: Duration = Duration::from_millis(10);

/// Votes that are asked for, and come in. Dropping it gives back what is still on its way.
pub(super) struct Round {
    nodes: Arc<Nodes>,
    name: LockName,
    /// One and the same on all databases, so that people see what belongs together.
    owner: Owner,
    pub(super) options: QuorumOptions,
    answers: JoinSet<Answer>,
    /// Which databases have not answered yet.
    pending: Vec<bool>,
    /// What the token of a vote must be at least; `None`: there is no majority yet.
    token: Option<FencingToken>,
}

/// A database, and what it says.
type Answer = (usize, Result<Option<Lease>>);

/// A lease on one of the databases.
pub(super) type Vote = (usize, Lease);

/// What came of it.
pub(super) enum Outcome {
    /// By a majority, whose rows all have this token or a higher one.
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

    /// Asks one of them, unless it has been asked and may still answer.
    pub(super) fn ask(&mut self, node: usize, within: Duration) {
        if std::mem::replace(&mut self.pending[node], true) {
            return;
        }
        let request = self.nodes.locks[node]
            .lease(self.name.as_str())
            .ttl(self.options.ttl)
            .renew(self.options.renew)
            .label(&*self.options.label)
            .owner_without_reentry(self.owner);
        let nodes = Arc::clone(&self.nodes);
        // What is dropped when the time is over goes back, also if it is granted after that.
        self.answers.spawn(async move {
            let answer = timeout(within, vote(&nodes, node, request)).await;
            (node, answer.unwrap_or_else(|_| Err(no_answer_error(within))))
        });
    }

    /// The next answer; pending while none is to come. A vote has the token that it must have.
    pub(super) async fn next_answer(&mut self, within: Duration) -> Answer {
        loop {
            let (node, answer) = match self.answers.join_next().await {
                Some(Ok(answer)) => answer,
                // A task that has panicked, or the runtime is about to end.
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
            let raised = timeout(within, lease.raise_token(to)).await;
            (node, raised.unwrap_or_else(|_| Err(no_answer_error(within))))
        });
    }

    /// Waits until it is decided.
    pub(super) async fn outcome(&mut self, within: Duration) -> Outcome {
        let start = Instant::now();
        let mut until = None;
        let needed = self.nodes.needed();
        let mut granted: Vec<Vote> = Vec::new();
        let mut refused = 0;
        let mut errors = Vec::new();
        loop {
            let pending = self.pending.iter().filter(|pending| **pending).count();
            if granted.len() >= needed {
                match self.token {
                    Some(token) => return Outcome::Granted(granted, token),
                    // From here on a vote counts only with this token.
                    None => granted = self.write_back(granted, within),
                }
                continue;
            }
            let answered = granted.len() + refused;
            // Enough have answered to know that it is not for want of answers.
            let known = answered >= needed || refused > self.nodes.locks.len() - needed;
            if granted.len() + pending < needed && (known || pending == 0) {
                if known {
                    return Outcome::Taken { split: !granted.is_empty() };
                }
                return Outcome::Unreachable(self.no_majority(answered, errors));
            }
            // Votes must not be kept from others for the sake of a database that is down: once enough have answered, the rest is
            // given as much time again.
            let hurry = known && self.token.is_none();
            let grace = match (hurry, until) {
                (false, _) => within,
                (true, Some(until)) => Instant::saturating_duration_since(&until, Instant::now()),
                (true, None) => start.elapsed().max(MIN_GRACE),
            };
            until = hurry.then(|| until.unwrap_or_else(|| Instant::now() + grace));
            let Ok(answer) = timeout(grace, self.next_answer(within)).await else {
                if hurry {
                    return Outcome::Taken { split: !granted.is_empty() };
                }
                continue;
            };
            match answer {
                (node, Ok(Some(lease))) => granted.push((node, lease)),
                (_, Ok(None)) => refused += 1,
                (_, Err(error)) => errors.push(error),
            }
        }
    }

    /// Decides upon the token, and has it written where it is lower. The rest counts at once.
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

    /// The error of those who did not vote at all.
    fn no_majority(&self, answered: usize, errors: Vec<Error>) -> Error {
        let mut errors = errors;
        // What asking again will not cure is what has to be told.
        if let Some(i) = errors.iter().position(|error| !error.is_retryable()) {
            return errors.swap_remove(i);
        }
        let (all, needed) = (self.nodes.locks.len(), self.nodes.needed());
        let first = errors.first().map(ToString::to_string).unwrap_or_default();
        let reason = format!("{answered} of {all} databases answered, and {needed} must: {first}");
        Error::Unavailable { attempted: "acquire a majority", reason, source: None }
    }
}

fn no_answer_error(within: Duration) -> Error {
    let reason = format!("no answer came within {within:?}");
    Error::Unavailable { attempted: "acquire", reason, source: None }
}

/// The vote of one database, if it may vote.
async fn vote(nodes: &Nodes, node: usize, request: LeaseRequest) -> Result<Option<Lease>> {
    let asked = Moment::now();
    let Some(lease) = request.try_acquire().await? else {
        return Ok(None);
    };
    let Some(least) = nodes.rejoin_after else {
        return Ok(Some(lease));
    };
    // Asked after the grant: a server that was restarted in between is known by it.
    let up = nodes.locks[node].client().run(Uptime).await?;
    let before = |up: Duration| up.saturating_sub(Moment::now().since(asked));
    match up.map(before) {
        Some(up) if up < least => {
            let reason = format!("it has been up for {up:?} only, and does not vote before {least:?}");
            Err(Error::Unavailable { attempted: "acquire", reason, source: None })
        }
        _ => Ok(Some(lease)),
    }
}
