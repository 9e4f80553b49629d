//! The operations of a connection.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::dialect::Column;
use crate::backend::records::{RecordCommand, RecordResponse};
use crate::backend::{
    ClientRange, ListedHolder, ListedWaiter, Names, Note, Origin, Store, StoreFuture, SweepRange, Swept,
};
use crate::name::LockName;
use crate::protocol::{Batch, Request, Response};

/// An operation of a connection, which may be repeated after its answer was lost.
pub(crate) trait Operation: Send + Sync + 'static {
    type Output: Send + 'static;

    /// Returns the operation for error texts: `cannot {attempted}`.
    fn attempted(&self) -> &'static str;

    fn run<'a>(&'a self, store: &'a mut dyn Store) -> StoreFuture<'a, Self::Output>;

    /// Adds the operation to a batch, or begins one. Returns `false` if it must be sent alone.
    fn join(&self, batch: &mut Option<Batch>) -> bool {
        let _ = batch;
        false
    }

    /// Converts the response from a batch.
    fn output(response: Response) -> Option<Self::Output> {
        let _ = response;
        None
    }
}

impl Operation for Arc<Request> {
    type Output = Response;

    fn attempted(&self) -> &'static str {
        match &**self {
            Request::Register { .. } | Request::Beat { .. } => "send a heartbeat",
            Request::Acquire(_) | Request::Join(_) => "acquire",
            Request::Enqueue(_) | Request::Poll { .. } => "wait",
            Request::Release(_) | Request::Withdraw { .. } => "release",
            Request::Read { .. } | Request::Transition(_) => "hand over",
            Request::Extend(_) => "extend",
            Request::Downgrade { .. } => "downgrade",
            Request::Raise { .. } => "raise a token",
            Request::Evict { .. } => "evict",
            Request::Ask { .. } => "ask for a release",
        }
    }

    fn run<'a>(&'a self, store: &'a mut dyn Store) -> StoreFuture<'a, Response> {
        store.execute(self)
    }

    fn join(&self, batch: &mut Option<Batch>) -> bool {
        match batch {
            Some(batch) => batch.add(self),
            None => {
                *batch = Batch::from_request(self);
                batch.is_some()
            }
        }
    }

    fn output(response: Response) -> Option<Response> {
        Some(response)
    }
}

macro_rules! operation {
    ($(#[$doc:meta])* $type:ty => $attempted:literal, $output:ty, |$self:ident, $store:ident| $run:expr) => {
        $(#[$doc])*
        impl Operation for $type {
            type Output = $output;

            fn attempted(&self) -> &'static str {
                $attempted
            }

            fn run<'a>(&'a $self, $store: &'a mut dyn Store) -> StoreFuture<'a, $output> {
                $run
            }
        }
    };
}

/// Opens a connection and does nothing else.
pub(crate) struct Connect;

/// Lists the holders of names.
pub(crate) struct ListHolders(pub(crate) Names);

/// Lists the entries that wait for a name.
pub(crate) struct ListWaiters(pub(crate) LockName);

/// Writes the note of a holder.
pub(crate) struct WriteNote(pub(crate) Note);

/// Reads the note of the latest holder of a name.
pub(crate) struct ReadNote(pub(crate) LockName);

/// Purges one range of names.
pub(crate) struct Sweep(pub(crate) SweepRange);

/// Purges one range of clients.
pub(crate) struct SweepClients(pub(crate) ClientRange);

/// Reads the uptime of the server.
pub(crate) struct Uptime;

/// Reads the identity of the server and the age of the tables.
pub(crate) struct ReadOrigin;

/// Creates the row of a name for row locks.
pub(crate) struct Ensure(pub(crate) LockName);

/// Looks up a column: schema, table, the column and the others of its key.
pub(crate) struct LookUpColumn(pub(crate) (String, String, Vec<String>));

operation!(Connect => "connect", (), |self, store| {
    let _ = store;
    Box::pin(async { Ok(()) })
});
operation!(ListHolders => "list", Vec<ListedHolder>, |self, store| store.list(&self.0));
operation!(ListWaiters => "list waiters", Vec<ListedWaiter>, |self, store| store.waiters(&self.0));
operation!(WriteNote => "write a note", bool, |self, store| store.write_note(&self.0));
operation!(ReadNote => "read a note", Option<String>, |self, store| store.last_note(&self.0));
operation!(Sweep => "sweep", Swept, |self, store| store.sweep(&self.0));
operation!(SweepClients => "sweep", Option<String>, |self, store| store.sweep_clients(&self.0));
operation!(Uptime => "ask for the uptime", Option<Duration>, |self, store| store.uptime());
operation!(ReadOrigin => "read the age of the tables", Origin, |self, store| store.origin());
operation!(Ensure => "create the row of a name", (), |self, store| store.ensure(&self.0));
operation!(LookUpColumn => "look a table up", Option<Column>, |self, store| store.column(&self.0));

impl Operation for RecordCommand {
    type Output = RecordResponse;

    fn attempted(&self) -> &'static str {
        RecordCommand::attempted(self)
    }

    fn run<'a>(&'a self, store: &'a mut dyn Store) -> StoreFuture<'a, RecordResponse> {
        store.execute_command(self)
    }
}
