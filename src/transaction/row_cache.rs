//! A client's cache of ensured names and of columns.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::dialect::Column;
use crate::clock::Moment;
use crate::name::LockName;

/// How long the row of a name is assumed to exist, and a column to be as it was.
pub(crate) const ENSURED_FOR: Duration = Duration::from_secs(60);

/// The most names, and the most keys of tables, in the cache.
const MAX_ENTRIES: usize = 10_000;

/// The name of a table as the caller wrote it, and the columns of a key.
type KeyOfTable = (String, Vec<String>);

#[derive(Default)]
pub(crate) struct RowCache {
    ensured: Mutex<HashMap<LockName, Moment>>,
    columns: Mutex<HashMap<KeyOfTable, (Column, Moment)>>,
}

impl RowCache {
    /// Returns whether the row of a name exists for certain.
    pub(crate) fn is_ensured(&self, name: &LockName) -> bool {
        lock(&self.ensured).get(name).is_some_and(is_recent)
    }

    /// Records that the row of a name existed at this moment.
    pub(crate) fn set_ensured(&self, name: &LockName, at: Moment) {
        insert(&mut lock(&self.ensured), name.clone(), at, is_recent);
    }

    pub(crate) fn forget(&self, name: &LockName) {
        lock(&self.ensured).remove(name);
    }

    pub(crate) fn column(&self, key: &KeyOfTable) -> Option<Column> {
        lock(&self.columns).get(key).filter(|(_, at)| is_recent(at)).map(|(column, _)| column.clone())
    }

    pub(crate) fn set_column(&self, key: KeyOfTable, column: Column) {
        insert(&mut lock(&self.columns), key, (column, Moment::now()), |(_, at)| is_recent(at));
    }
}

/// Inserts an entry unless the cache is full of recent ones.
fn insert<K: Eq + Hash, V>(cache: &mut HashMap<K, V>, key: K, value: V, is_recent: impl Fn(&V) -> bool) {
    if cache.len() >= MAX_ENTRIES {
        cache.retain(|_, value| is_recent(value));
    }
    if cache.len() < MAX_ENTRIES {
        cache.insert(key, value);
    }
}

fn is_recent(at: &Moment) -> bool {
    Moment::now().since(*at) < ENSURED_FOR
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
