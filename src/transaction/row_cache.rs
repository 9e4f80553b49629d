//! What a client knows of the rows that it locks.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::sealed::Column;
use crate::clock::Moment;
use crate::name::LockName;

/// For how long it is taken for granted that the row of a name is there.
pub(crate) const ENSURED: Duration = Duration::from_secs(60);

/// How many names a client remembers to have ensured.
const REMEMBERED: usize = 10_000;

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Rows {
    ensured: Mutex<HashMap<LockName, Moment>>,
    /// By table and column.
    columns: Mutex<HashMap<(String, String), Column>>,
}

impl Rows {
    /// Whether the row of a name is there for sure.
    pub(crate) fn is_ensured(&self, name: &LockName) -> bool {
        unpoisoned(&self.ensured).get(name).is_some_and(is_recent)
    }

    /// The row of a name was there at this moment.
    pub(crate) fn ensured(&self, name: &LockName, at: Moment) {
        let mut names = unpoisoned(&self.ensured);
        if names.len() >= REMEMBERED {
            names.retain(|_, at| is_recent(at));
        }
        if names.len() < REMEMBERED {
            names.insert(name.clone(), at);
        }
    }

    pub(crate) fn forget(&self, name: &LockName) {
        unpoisoned(&self.ensured).remove(name);
    }

    pub(crate) fn column(&self, key: &(String, String)) -> Option<Column> {
        unpoisoned(&self.columns).get(key).cloned()
    }

    pub(crate) fn found(&self, key: (String, String), column: Column) {
        unpoisoned(&self.columns).insert(key, column);
    }
}

fn is_recent(ensured: &Moment) -> bool {
    Moment::now().since(*ensured) < ENSURED
}

fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
