//! Row locks and conditional writes in the caller's own transactions, and their retry.

mod key;
pub mod retry;
pub mod row;
pub(crate) mod row_cache;
mod row_lock;
mod rows_where;
mod select;
mod table_rows;
pub(crate) mod target;
pub mod version;
pub(crate) mod work_error;
