//! Statements on the caller's own tables, in the caller's own transactions.

use sqlx::{MySql, MySqlConnection, QueryBuilder, Row as _};

use crate::backend::Job;
use crate::backend::sealed::Dialect;

impl Dialect for MySql {
    const QUOTE: char = '`';
    const INTEGER: &'static str = "SIGNED";
    const PRESENT: &'static str = " LOCK IN SHARE MODE";
    const BEGIN: Option<&'static str> = None;

    fn fetch<'a>(conn: &'a mut MySqlConnection, query: &'a mut QueryBuilder<Self>) -> Job<'a, Vec<Self::Row>> {
        Box::pin(query.build().fetch_all(conn))
    }

    fn execute<'a>(conn: &'a mut MySqlConnection, query: &'a mut QueryBuilder<Self>) -> Job<'a, u64> {
        Box::pin(async move { Ok(query.build().execute(conn).await?.rows_affected()) })
    }

    fn integer(row: &Self::Row, column: usize) -> Result<i64, sqlx::Error> {
        row.try_get(column)
    }

    fn push_integer(query: &mut QueryBuilder<Self>, value: i64) {
        query.push_bind(value);
    }
}
