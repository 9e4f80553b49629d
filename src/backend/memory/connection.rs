//! A connection to a [`MemoryServer`], and the backend that opens it.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::{Instant, sleep, sleep_until};

use super::Entry;
use super::server::{MemoryServer, State};
use crate::backend::note::NoteStore;
use crate::backend::records::{RecordCommand, RecordResponse};
use crate::backend::store::{AdminStore, LeaseStore, RecordStore, RowStore};
use crate::backend::{
    Backend, BoxFuture, ClientRange, ListedHolder, ListedWaiter, Names, Note, SessionHolder, SessionLocks, Store,
    StoreFuture, SweepRange, Swept,
};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, EntryState, Holder, Mode, Request, Response};
use crate::token::FencingToken;

/// A backend whose connections lead to a [`MemoryServer`].
pub(crate) struct MemoryBackend(pub(crate) Arc<MemoryServer>);

struct MemoryConnection {
    server: Arc<MemoryServer>,
    /// The number of outages of the server when the connection was opened.
    outages: u64,
}

/// Makes an error that is not repeated.
fn refused(reason: &'static str) -> sqlx::Error {
    sqlx::Error::Configuration(reason.into())
}

impl Backend for MemoryBackend {
    fn connect(&self) -> StoreFuture<'_, Box<dyn Store>> {
        Box::pin(async move {
            let state = self.0.state();
            if state.is_away {
                return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionRefused.into()));
            }
            let connection = MemoryConnection { server: Arc::clone(&self.0), outages: state.outages };
            Ok(Box::new(connection) as Box<dyn Store>)
        })
    }

    fn clock(&self) -> Clock {
        Clock::Tokio(self.0.started_at)
    }

    fn max_connections_used(&self) -> usize {
        2
    }

    fn max_batch_len(&self) -> usize {
        1
    }

    fn address(&self) -> String {
        "memory".into()
    }

    fn migrate(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn open_session_locks(&self) -> BoxFuture<'_, Result<Box<dyn SessionLocks>>> {
        let reason = "it is a model of leases; test session locks on a database";
        Box::pin(async move { Err(Error::Unsupported { what: "a session lock in testing::Memory", reason }) })
    }

    fn session_holders<'a>(&'a self, _: &'a LockName) -> BoxFuture<'a, Result<Vec<SessionHolder>>> {
        Box::pin(async { Ok(Vec::new()) })
    }
}

impl MemoryConnection {
    /// Waits for the delay of the server, and fails on demand or during an outage.
    async fn reach(&self) -> Result<(), sqlx::Error> {
        self.check()?;
        let delay = self.server.state().delay;
        if !delay.is_zero() {
            sleep(delay).await;
        }
        self.check()?;
        let mut state = self.server.state();
        if state.failing > 0 {
            state.failing -= 1;
            return Err(refused("a failure on demand"));
        }
        Ok(())
    }

    fn check(&self) -> Result<(), sqlx::Error> {
        let state = self.server.state();
        if state.is_away || state.outages != self.outages {
            return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into()));
        }
        Ok(())
    }

    /// Returns until when the client of a heartbeat is cut off. `None`: it is not cut off.
    fn cut_off_until(&self, request: &Request) -> Option<Instant> {
        let (Request::Register { client } | Request::Beat { client }) = request else {
            return None;
        };
        let until = self.server.state().cut_off.get(client).copied();
        until.filter(|until| Instant::now() < *until)
    }
}

impl LeaseStore for MemoryConnection {
    fn execute<'a>(&'a mut self, request: &'a Request) -> StoreFuture<'a, Response> {
        Box::pin(async move {
            self.reach().await?;
            // After the delay: a heartbeat that is under way does not take effect either.
            while let Some(until) = self.cut_off_until(request) {
                sleep_until(until).await;
                self.check()?;
            }
            let now = self.server.now();
            let response = self.server.state().execute(now, request);
            response.ok_or_else(|| refused("a row is locked"))
        })
    }
}

impl AdminStore for MemoryConnection {
    fn list<'a>(&'a mut self, names: &'a Names) -> StoreFuture<'a, Vec<ListedHolder>> {
        Box::pin(async move {
            self.reach().await?;
            let (now, state) = (self.server.now(), self.server.state());
            let is_meant = |name: &&LockName| match names {
                Names::WithPrefix(prefix) => name.as_str().starts_with(prefix.as_str()),
                Names::One(other) => *name == other,
            };
            Ok(state.model.leases.keys().filter(is_meant).flat_map(|name| state.list(name, now)).collect())
        })
    }

    fn waiters<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, Vec<ListedWaiter>> {
        Box::pin(async move {
            self.reach().await?;
            let (now, state) = (self.server.now(), self.server.state());
            let mut waiting: Vec<_> = state.waiting(name, now).collect();
            waiting.sort_by_key(|(id, entry)| (entry.arrived, *id));
            let waiter = |(id, entry): (AcquisitionId, &Entry)| {
                let (holder, label) = state.text(id);
                ListedWaiter { id, mode: entry.mode, holder, label, arrived_at: entry.arrived }
            };
            Ok(waiting.into_iter().map(waiter).collect())
        })
    }

    fn sweep<'a>(&'a mut self, _: &'a SweepRange) -> StoreFuture<'a, Swept> {
        Box::pin(async move {
            self.reach().await?;
            Ok(Swept { purged: 0, last: None, clients: Vec::new() })
        })
    }

    fn sweep_clients<'a>(&'a mut self, _: &'a ClientRange) -> StoreFuture<'a, Option<String>> {
        Box::pin(async move {
            self.reach().await?;
            Ok(None)
        })
    }
}

impl NoteStore for MemoryConnection {
    fn write_note<'a>(&'a mut self, note: &'a Note) -> StoreFuture<'a, bool> {
        Box::pin(async move {
            self.reach().await?;
            let (now, mut state) = (self.server.now(), self.server.state());
            let is_valid = state.model.is_valid(note, now);
            if is_valid {
                state.delete_notes_before(&note.name, note.token);
                state.notes.insert((note.name.clone(), note.token.get()), note.text.clone());
            }
            Ok(is_valid)
        })
    }

    fn last_note<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, Option<String>> {
        Box::pin(async move {
            self.reach().await?;
            let state = self.server.state();
            let token = state.model.leases.get(name).map(|row| row.token);
            Ok(token.and_then(|token| state.notes.get(&(name.clone(), token)).cloned()))
        })
    }
}

impl RowStore for MemoryConnection {}

impl RecordStore for MemoryConnection {
    fn execute_command<'a>(&'a mut self, command: &'a RecordCommand) -> StoreFuture<'a, RecordResponse> {
        Box::pin(async move {
            self.reach().await?;
            match command {
                RecordCommand::Purge { .. } | RecordCommand::List(_) => Ok(RecordResponse::default()),
                _ => Err(refused("testing::Memory has no records of requests")),
            }
        })
    }
}

impl Store for MemoryConnection {
    fn close(self: Box<Self>) -> StoreFuture<'static, ()> {
        Box::pin(async { Ok(()) })
    }
}

impl State {
    fn text(&self, id: AcquisitionId) -> (String, String) {
        self.texts.get(&id).map(|(holder, label)| (holder.to_string(), label.to_string())).unwrap_or_default()
    }

    /// Deletes the notes of former holders of a name whose tokens are lower than this one.
    fn delete_notes_before(&mut self, name: &LockName, token: FencingToken) {
        let holding = self.model.tokens(name);
        self.notes.retain(|(noted, of), _| {
            noted != name || *of >= token.get() || holding.iter().any(|token| token.get() == *of)
        });
    }

    fn waiting<'s>(&'s self, name: &'s LockName, now: i64) -> impl Iterator<Item = (AcquisitionId, &'s Entry)> {
        let is_live = move |entry: &Entry| self.model.entry_until(entry) > now;
        self.model.entries_named(name).filter(move |(_, e)| e.state == EntryState::Waiting && is_live(e))
    }

    /// Lists the holders of a name.
    fn list(&self, name: &LockName, now: i64) -> Vec<ListedHolder> {
        let waiters = i64::try_from(self.waiting(name, now).count()).unwrap_or(i64::MAX);
        let beat_at = |client| self.model.last_heartbeat(client).unwrap_or(0);
        let listed = |id, mode, owner, token: i64, expires_at, client| {
            let (holder, label) = self.text(id);
            let note = self.notes.get(&(name.clone(), token)).cloned();
            let (name, acquired_at) = (name.as_str().to_owned(), token.min(now));
            ListedHolder {
                name,
                mode,
                owner,
                acquisitions: 1,
                token,
                holder,
                label,
                acquired_at,
                expires_at,
                beat_at: beat_at(client),
                now,
                waiters,
                note,
            }
        };
        let row = self.model.leases.get(name);
        let alone = row.and_then(|row| {
            let id = match row.holder {
                Holder::Lease(id) => id,
                Holder::Kept => AcquisitionId::from_u128(0),
                Holder::Nobody | Holder::Entries => return None,
            };
            let until = self.model.valid_until(row.expires_at, row.client, row.ttl);
            Some(listed(id, Mode::Exclusive, row.owner, row.token, until, row.client))
        });
        let mut by_token: BTreeMap<i64, ListedHolder> = BTreeMap::new();
        for (id, entry) in self.model.entries_named(name) {
            if let EntryState::Holding(token) = entry.state {
                let until = self.model.entry_until(entry);
                let one = listed(id, entry.mode, entry.owner, token, until, entry.client);
                by_token
                    .entry(token)
                    .and_modify(|other| {
                        other.acquisitions += 1;
                        other.expires_at = other.expires_at.max(until);
                        other.beat_at = other.beat_at.max(beat_at(entry.client));
                    })
                    .or_insert(one);
            }
        }
        alone.into_iter().chain(by_token.into_values()).filter(|listed| listed.expires_at > now).collect()
    }
}
