//! The fencing token, which distinguishes an old holder from a new one.

use std::fmt;
use std::num::NonZeroI64;

use serde::Serialize;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::{Database, Decode, Encode, Type};

/// A fencing token: strictly greater than the token of every earlier lease on the same name.
///
/// It is `greatest(previous + 1, database clock in microseconds)`, a hybrid logical clock
/// ([Kulkarni et al., 2014](https://cse.buffalo.edu/tech-reports/2014-04.pdf)) computed by the
/// database after locking the row. So tokens keep rising after a release, an expiry, a purge by the
/// sweeper, a restart, and a failover to a replica that missed the last grants. A token stays below
/// 2<sup>53</sup> and is therefore exact in JSON.
///
/// Send the token along with every effect outside this database. The receiver must *first* record
/// the token as the highest it has seen and refuse a lower one, *then* read, then write on
/// condition that the recorded token is still this one. Data inside this database needs no tokens:
/// see [`Lease::fence`](crate::Lease::fence).
///
/// sqlx binds and reads a token as a `BIGINT`, for receivers with a database of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct FencingToken(NonZeroI64);

impl FencingToken {
    /// Makes a token from its number, as printed by another process. Returns `None` for zero and
    /// negative numbers.
    pub fn new(token: i64) -> Option<Self> {
        NonZeroI64::new(token).filter(|t| t.get() > 0).map(Self)
    }

    /// Returns the number.
    pub fn get(self) -> i64 {
        self.0.get()
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<FencingToken> for i64 {
    fn from(token: FencingToken) -> i64 {
        token.get()
    }
}

impl<DB: Database> Type<DB> for FencingToken
where
    i64: Type<DB>,
{
    fn type_info() -> DB::TypeInfo {
        i64::type_info()
    }

    fn compatible(column: &DB::TypeInfo) -> bool {
        i64::compatible(column)
    }
}

impl<'q, DB: Database> Encode<'q, DB> for FencingToken
where
    i64: Encode<'q, DB>,
{
    fn encode_by_ref(&self, buffer: &mut DB::ArgumentBuffer) -> Result<IsNull, BoxDynError> {
        self.get().encode_by_ref(buffer)
    }
}

impl<'r, DB: Database> Decode<'r, DB> for FencingToken
where
    i64: Decode<'r, DB>,
{
    fn decode(value: DB::ValueRef<'r>) -> Result<Self, BoxDynError> {
        let token = i64::decode(value)?;
        Self::new(token).ok_or_else(|| format!("{token} is not a fencing token: it is not positive").into())
    }
}
