//! The pools that are known to belong to the database of the client.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use sqlx::Pool;

use super::handle::{Idempotency, TABLE};
use crate::backend::Database;
use crate::backend::records::{self, RecordCommand};
use crate::error::{Error, Result, RowError};

/// The greatest number of remembered pools.
const MAX_POOLS: usize = 16;

/// The options of pools, of which each pool has its own.
#[derive(Default)]
pub(super) struct KnownPools(Mutex<Vec<Arc<dyn Any + Send + Sync>>>);

impl KnownPools {
    fn contains(&self, options: &Arc<dyn Any + Send + Sync>) -> bool {
        self.lock().iter().any(|known| Arc::ptr_eq(known, options))
    }

    fn insert(&self, options: Arc<dyn Any + Send + Sync>) {
        let mut pools = self.lock();
        if pools.len() >= MAX_POOLS {
            pools.remove(0);
        }
        pools.push(options);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<dyn Any + Send + Sync>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Idempotency {
    /// Checks, before its first use, that a pool belongs to the database of the client: otherwise
    /// the client would look for duplicates in one database and claim keys in another.
    pub(super) async fn check_pool<DB: Database>(&self, pool: &Pool<DB>) -> Result<()> {
        let other = |cause| Err(Error::Row { table: TABLE.into(), cause });
        if DB::KIND != self.client.kind {
            return other(RowError::OtherDatabase);
        }
        let options: Arc<dyn Any + Send + Sync> = pool.connect_options();
        if self.pools.contains(&options) {
            return Ok(());
        }
        let attempted = "identify the database";
        let mut conn = pool.acquire().await.map_err(|error| Error::from_caller(attempted, error))?;
        let theirs = records::identity::<DB>(&mut conn).await.map_err(|error| Error::from_caller(attempted, error))?;
        drop(conn);
        let ours = self.send(RecordCommand::ReadIdentity).await?.identity;
        if theirs.is_some() && ours.is_some() && theirs != ours {
            return other(RowError::OtherPool);
        }
        self.pools.insert(options);
        Ok(())
    }
}
