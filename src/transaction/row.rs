//! Row locks in the caller's own transaction, held until it ends: by name ([`RowLock`]), and on
//! rows of the caller's own tables ([`RowOf`], [`RowsOf`], [`RowsWhere`]).
//!
//! Each type has an example. To choose, see [the table of calls](crate#which-call).

pub use super::key::{KeyColumns, RowKey};
pub use super::row_lock::RowLock;
pub use super::rows_where::RowsWhere;
pub use super::table_rows::{RowOf, RowsOf};
pub use crate::error::RowError;
