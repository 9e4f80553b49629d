//! What a store is asked, and what it answers: plain data, the same for every database.
//!
//! A store keeps three tables (`sqlock_client`, `sqlock_lease`, `sqlock_entry`). A [`Request`]
//! changes or reads the rows of one client or of one name in one atomic step; `backend/memory.rs`
//! is the executable meaning of every request. Each request may be sent again when its answer was
//! lost: an acquisition is known by its [`LeaseId`], which is chosen before the first request.
//!
//! A request about a holding names it by name, id and token: the id says which acquisition it is,
//! the token which holding of it. A request from elsewhere knows the token alone. The client of a
//! row is no identity: a lease that is not renewed has none.
//!
//! A holding stands until a request ends it, also after its expiry. It is valid while its expiry,
//! or the heartbeat of its client plus its TTL, lies ahead.

mod identifier;
mod request;
mod response;
mod row;
pub(crate) mod timing;

pub(crate) use identifier::{ClientId, LeaseId};
pub(crate) use request::{
    Batch, Claim, Enqueue, Extension, GivenUp, Grantee, HolderChange, Keeper, Release, Request, Seen, Transition,
};
pub(crate) use response::{
    Amended, Asked, Granted, HolderNow, Joined, Polled, Presence, Released, Response, Withdrawn,
};
pub(crate) use row::{EntryRow, EntryState, Holder, LeaseRow, Mode, Queue};
