//! The requests to a store and its responses: plain data, the same for every database.
//!
//! A store keeps three tables (`sqlock_client`, `sqlock_lease`, `sqlock_entry`). A [`Request`]
//! changes or reads the rows of one client or of one name in one atomic step; `backend/memory.rs`
//! is the executable specification of every request. Each request may be sent again after its
//! answer was lost: an acquisition is identified by its [`AcquisitionId`], which is chosen before the
//! first request.
//!
//! A request about a holding has its name, id and token: the id identifies the acquisition, the
//! token its holding. A request of another client has the token alone. The client of a row is no
//! identity: a lease that is not renewed has no client.
//!
//! A holding exists until a request ends it, even after its expiry. A holding is valid while its
//! expiry, or the heartbeat of its client plus its TTL, lies ahead.

mod identifier;
mod request;
mod response;
mod row;
pub(crate) mod timing;

pub(crate) use identifier::{AcquisitionId, ClientId, RequestId};
pub(crate) use request::{
    Batch, Claim, ClientChange, Enqueue, Extension, GivenUp, Grantee, HolderChange, Release, Request, Seen, Transition,
};
pub(crate) use response::{
    AskOutcome, ChangeOutcome, CurrentHolder, Granted, JoinOutcome, Notification, Polled, Presence, ReleaseOutcome,
    Response, WithdrawalOutcome,
};
pub(crate) use row::{EntryRow, EntryState, Holder, LeaseRow, Mode, Queue};
