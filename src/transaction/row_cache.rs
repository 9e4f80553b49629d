//! What a client knows of the rows that it locks.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::sealed::Column;
use crate::clock::Moment;
use crate::name::LockName;

/// For how long it is taken for granted that the row of a name is there.
pub(crate) const ENSURED_FOR: Duration = Duration::from_secs(60);

/// How many names a client remembers to have ensured.
const MAX_ENSURED: usize = 10_000;

/// See the [module](self).
#[derive(Default)]
pub(crate) struct RowCache {
    ensured: Mutex<HashMap<LockName, Moment>>,
    /// By table and column.
    columns: Mutex<HashMap<(String, String), Column>>,
}

impl RowCache {
    /// Whether the row of a name is there for sure.
    pub(crate) fn is_ensured(&self, name: &LockName) -> bool {
        lock(&self.ensured).get(name).is_some_and(is_recent)
    }

    /// The row of a name was there at this moment.
    pub(crate) fn set_ensured(&self, name: &LockName, at: Moment) {
        let mut names = lock(&self.ensured);
        if names.len() >= MAX_ENSURED {
            names.retain(|_, at| is_recent(at));
        }
        if names.len() < MAX_ENSURED {
            names.insert(name.clone(), at);
        }
    }

    pub(crate) fn forget(&self, name: &LockName) {
        lock(&self.ensured).remove(name);
    }

    pub(crate) fn column(&self, key: &(String, String)) -> Option<Column> {
        lock(&self.columns).get(key).cloned()
    }

    pub(crate) fn set_column(&self, key: (String, String), column: Column) {
        lock(&self.columns).insert(key, column);
    }
}

fn is_recent(ensured: &Moment) -> bool {
    Moment::now().since(*ensured) < ENSURED_FOR
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
