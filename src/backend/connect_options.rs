//! The options of the connections of a backend.

use std::sync::Arc;

use sqlx::{ConnectOptions, Connection, Database, Pool};

type Options<DB> = <<DB as Database>::Connection as Connection>::Options;

/// The source of the options of new connections.
pub(super) enum OptionsSource<DB: Database> {
    /// The caller's pool. The caller may replace its options, as for a new password: see
    /// [`Pool::set_connect_options`].
    Pool(Pool<DB>),
    Url(Arc<Options<DB>>),
}

impl<DB: Database> OptionsSource<DB> {
    /// Returns the current options.
    pub(super) fn current(&self) -> Arc<Options<DB>> {
        match self {
            Self::Pool(pool) => pool.connect_options(),
            Self::Url(options) => Arc::clone(options),
        }
    }

    /// Returns the current options, for connections of this crate.
    pub(super) fn without_logging(&self) -> Options<DB> {
        (*self.current()).clone().disable_statement_logging()
    }
}
