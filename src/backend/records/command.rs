//! The maintenance commands on records, and their responses.

use std::time::Duration;

use super::attempt::{self, Ending};
use super::claim::{self, Claiming};
use super::key::FullKey;
use super::list::{self, Selection};
use super::record::{self, Record, State};
use super::resolution::{self, Resolved, Resolving};
use super::step::{self, Step};
use super::{Records, identity, purge, request};
use crate::backend::micros;

/// What is to be done about records, on a connection of our own. Each may be sent again.
pub(crate) enum Errand {
    /// Reads a record.
    Read(FullKey),
    /// Reads a record, and what of it a transaction has not committed yet.
    Peek(FullKey),
    /// Makes an attempt, under a lease with this token, the latest one of a record. `resume`: also
    /// of one whose outcome is not known.
    Start { claim: Claiming, token: i64, resume: bool },
    /// Writes how the attempt with this token has ended, if it is still the latest and has not
    /// ended.
    End { id: String, token: i64, ending: Ending },
    /// Deletes the record of the attempt with this token, if it is still the latest and has not
    /// ended well.
    Forget { id: String, token: i64 },
    /// Stores the result of a step of the attempt with this token, if it is still the latest.
    Step { step: Step, token: i64, result: Vec<u8> },
    /// Reads the result of a step.
    Recall(Step),
    /// Writes down a token that has been made.
    Issue { key: FullKey, ttl: Duration },
    /// Reads records in order of their creation.
    List(Selection),
    /// Reads the stored request of a record.
    Request { id: String, begun: i64 },
    /// Reads the names of the steps of a record.
    Steps { id: String, begun: i64 },
    /// Ends a record whose outcome is unknown, if the attempt with this token is the latest, and
    /// keeps who says so.
    Resolve(Resolving),
    /// Reads how the outcomes of a key were resolved.
    Resolutions { id: String },
    /// Tells which database the records are in.
    Identity,
    /// Deletes a record whose time has run out.
    Bury(FullKey),
    /// Deletes so many records whose time has run out.
    Purge { limit: u32 },
}

impl Errand {
    /// In words.
    pub(crate) fn attempted(&self) -> &'static str {
        match self {
            Self::Read(_) | Self::Peek(_) | Self::Request { .. } => "look a request up",
            Self::Start { .. } => "record an attempt",
            Self::End { .. } | Self::Forget { .. } => "record how an attempt ended",
            Self::Step { .. } => "record a step",
            Self::Recall(_) | Self::Steps { .. } => "look steps up",
            Self::Resolve(_) => "resolve an unknown outcome",
            Self::Resolutions { .. } => "look resolutions up",
            Self::Issue { .. } => "issue a token",
            Self::List(_) => "list requests",
            Self::Identity => "identify the database",
            Self::Bury(_) | Self::Purge { .. } => "purge requests",
        }
    }
}

/// What came of an [`Errand`].
#[derive(Default)]
pub(crate) struct Findings {
    pub(crate) records: Vec<Record>,
    /// A transaction has the record that is not committed yet; with what fingerprint, if it can be
    /// seen that it has claimed it.
    pub(crate) busy: bool,
    pub(crate) fingerprint: Option<Vec<u8>>,
    /// How many rows were changed.
    pub(crate) changed: u64,
    pub(crate) result: Option<Vec<u8>>,
    pub(crate) steps: Vec<String>,
    pub(crate) resolutions: Vec<Resolved>,
    pub(crate) identity: Option<String>,
}

/// Carries an errand out.
pub(crate) async fn carry<DB: Records>(conn: &mut DB::Connection, errand: &Errand) -> Result<Findings, sqlx::Error> {
    match errand {
        Errand::Read(key) | Errand::Peek(key) => {
            let records = record::read::<DB>(conn, &key.id, "").await?.into_iter().collect();
            Ok(Findings { records, ..Findings::default() })
        }
        Errand::Start { claim, token, resume } => {
            let records = attempt::start::<DB>(conn, claim, *token, *resume).await?.into_iter().collect();
            Ok(Findings { records, ..Findings::default() })
        }
        Errand::End { id, token, ending } => attempt::end::<DB>(conn, id, *token, ending).await.map(changed),
        Errand::Forget { id, token } => {
            attempt::forget::<DB>(conn, id, &[State::Started, State::Unknown], *token).await.map(changed)
        }
        Errand::Step { step, token, result } => step::put_step::<DB>(conn, step, *token, result).await.map(changed),
        Errand::Recall(step) => Ok(Findings { result: step::recall::<DB>(conn, step).await?, ..Findings::default() }),
        Errand::Issue { key, ttl } => claim::issue::<DB>(conn, key, micros(*ttl)).await.map(changed),
        Errand::List(selection) => {
            Ok(Findings { records: list::list::<DB>(conn, selection).await?, ..Findings::default() })
        }
        Errand::Request { id, begun } => {
            Ok(Findings { result: request::read::<DB>(conn, id, *begun).await?, ..Findings::default() })
        }
        Errand::Steps { id, begun } => {
            Ok(Findings { steps: step::steps::<DB>(conn, id, *begun).await?, ..Findings::default() })
        }
        Errand::Resolve(resolving) => resolution::resolve::<DB>(conn, resolving).await.map(changed),
        Errand::Resolutions { id } => {
            Ok(Findings { resolutions: resolution::list::<DB>(conn, id).await?, ..Findings::default() })
        }
        Errand::Identity => Ok(Findings { identity: identity::<DB>(conn).await?, ..Findings::default() }),
        Errand::Bury(key) => purge::bury::<DB>(conn, std::slice::from_ref(&key.id)).await.map(changed),
        Errand::Purge { limit } => purge::purge::<DB>(conn, *limit).await.map(changed),
    }
}

fn changed(rows: u64) -> Findings {
    Findings { changed: rows, ..Findings::default() }
}
