//! The maintenance commands on records, and their responses.

use std::time::Duration;

use super::attempt::{self, AttemptEnding};
use super::claim::{self, ClaimRequest};
use super::key::FullKey;
use super::list::{self, Selection};
use super::record::{self, Record};
use super::resolution::{self, ResolveRequest, StoredResolution};
use super::step::{self, Step};
use super::{RecordDialect, identity, purge, request};
use crate::backend::micros;

/// A command on records, for a connection of the client. Every command may be sent again.
pub(crate) enum RecordCommand {
    /// Reads a record.
    Read(FullKey),
    /// Reads the committed record; on MySQL and MariaDB also whether an open transaction has locked
    /// it, and that claim's fingerprint.
    Peek(FullKey),
    /// Makes the attempt under a lease with this token the latest one of a record. `resume`: even
    /// if the outcome of the record is unknown.
    Start { claim: ClaimRequest, token: i64, resume: bool },
    /// Stores the ending of the attempt with this token, if it is the latest and has not ended.
    End { id: String, token: i64, ending: AttemptEnding },
    /// Deletes the record of the attempt with this token, if it is the latest and the request is
    /// not done.
    Forget { id: String, token: i64 },
    /// Stores the result of a step of the attempt with this token, if it is the latest.
    StoreStep { step: Step, token: i64, result: Vec<u8> },
    /// Reads the result of a step.
    ReadStep(Step),
    /// Stores a token that a client may use once.
    Issue { key: FullKey, ttl: Duration },
    /// Reads records in order of their creation.
    List(Selection),
    /// Reads the stored request of a record.
    ReadRequest { id: String, begun: i64 },
    /// Reads the names of the steps of a record.
    ListSteps { id: String, begun: i64 },
    /// Ends a record that has no outcome, or an unknown one, if the attempt with the token is the
    /// latest, and stores the resolution.
    Resolve(ResolveRequest),
    /// Reads how the outcomes of a key were resolved.
    ListResolutions { id: String },
    /// Reads the identity of the database.
    ReadIdentity,
    /// Deletes a record if it has expired.
    DeleteExpired(FullKey),
    /// Deletes expired records, at most this number.
    Purge { limit: u32 },
}

impl RecordCommand {
    /// Returns the operation for error messages.
    pub(crate) fn attempted(&self) -> &'static str {
        match self {
            Self::Read(_) | Self::Peek(_) | Self::ReadRequest { .. } => "look a request up",
            Self::Start { .. } => "record an attempt",
            Self::End { .. } | Self::Forget { .. } => "record how an attempt ended",
            Self::StoreStep { .. } => "record a step",
            Self::ReadStep(_) | Self::ListSteps { .. } => "look steps up",
            Self::Resolve(_) => "resolve an outcome",
            Self::ListResolutions { .. } => "look resolutions up",
            Self::Issue { .. } => "issue a token",
            Self::List(_) => "list requests",
            Self::ReadIdentity => "identify the database",
            Self::DeleteExpired(_) | Self::Purge { .. } => "purge requests",
        }
    }
}

/// The response to a [`RecordCommand`]: each command fills the fields that it reads or changes.
#[derive(Default)]
pub(crate) struct RecordResponse {
    pub(crate) records: Vec<Record>,
    /// Whether another transaction has locked the record.
    pub(crate) is_locked: bool,
    /// The fingerprint of that transaction's claim, if the claim is visible.
    pub(crate) fingerprint: Option<Vec<u8>>,
    /// The number of changed rows.
    pub(crate) changed: u64,
    pub(crate) result: Option<Vec<u8>>,
    pub(crate) steps: Vec<String>,
    pub(crate) resolutions: Vec<StoredResolution>,
    pub(crate) identity: Option<String>,
}

/// Executes a command.
pub(crate) async fn execute_command<DB: RecordDialect>(
    conn: &mut DB::Connection,
    command: &RecordCommand,
) -> Result<RecordResponse, sqlx::Error> {
    match command {
        RecordCommand::Read(key) | RecordCommand::Peek(key) => {
            let records = record::read::<DB>(conn, &key.id, "").await?.into_iter().collect();
            Ok(RecordResponse { records, ..RecordResponse::default() })
        }
        RecordCommand::Start { claim, token, resume } => {
            let records = attempt::start::<DB>(conn, claim, *token, *resume).await?.into_iter().collect();
            Ok(RecordResponse { records, ..RecordResponse::default() })
        }
        RecordCommand::End { id, token, ending } => attempt::end::<DB>(conn, id, *token, ending).await.map(changed),
        RecordCommand::Forget { id, token } => attempt::forget::<DB>(conn, id, *token).await.map(changed),
        RecordCommand::StoreStep { step, token, result } => {
            step::store_step::<DB>(conn, step, *token, result).await.map(changed)
        }
        RecordCommand::ReadStep(step) => {
            Ok(RecordResponse { result: step::read_step::<DB>(conn, step).await?, ..RecordResponse::default() })
        }
        RecordCommand::Issue { key, ttl } => claim::issue::<DB>(conn, key, micros(*ttl)).await.map(changed),
        RecordCommand::List(selection) => {
            Ok(RecordResponse { records: list::list::<DB>(conn, selection).await?, ..RecordResponse::default() })
        }
        RecordCommand::ReadRequest { id, begun } => {
            Ok(RecordResponse { result: request::read::<DB>(conn, id, *begun).await?, ..RecordResponse::default() })
        }
        RecordCommand::ListSteps { id, begun } => {
            Ok(RecordResponse { steps: step::list_steps::<DB>(conn, id, *begun).await?, ..RecordResponse::default() })
        }
        RecordCommand::Resolve(request) => resolution::resolve::<DB>(conn, request).await.map(changed),
        RecordCommand::ListResolutions { id } => {
            Ok(RecordResponse { resolutions: resolution::list::<DB>(conn, id).await?, ..RecordResponse::default() })
        }
        RecordCommand::ReadIdentity => {
            Ok(RecordResponse { identity: identity::<DB>(conn).await?, ..RecordResponse::default() })
        }
        RecordCommand::DeleteExpired(key) => {
            purge::delete_expired::<DB>(conn, std::slice::from_ref(&key.id)).await.map(changed)
        }
        RecordCommand::Purge { limit } => purge::purge::<DB>(conn, *limit).await.map(changed),
    }
}

fn changed(rows: u64) -> RecordResponse {
    RecordResponse { changed: rows, ..RecordResponse::default() }
}
