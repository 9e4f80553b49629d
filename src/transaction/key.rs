//! Keys of rows: of one column, or of several.

use sqlx::{Encode, QueryBuilder, Type};

use crate::backend::Database;
use crate::backend::table::push_key;

/// The names of the `N` columns of a key: a text, or a tuple of up to four. Implemented for both by
/// this crate.
pub trait KeyColumns<const N: usize> {
    /// Returns the names.
    #[doc(hidden)]
    fn into_names(self) -> Vec<String>;
}

/// The values of a key of `N` columns: a value that sqlx can bind, or a tuple of up to four.
/// Implemented for both by this crate.
pub trait RowKey<DB: Database, const N: usize> {
    /// Returns the type of each value.
    #[doc(hidden)]
    fn types() -> Vec<DB::TypeInfo>;

    /// Writes the comparison of these columns with the values.
    #[doc(hidden)]
    fn push_condition(&self, query: &mut QueryBuilder<DB>, columns: &[String]);
}

macro_rules! one_column {
    ($($text:ty),+) => {
        $(impl KeyColumns<1> for $text {
            fn into_names(self) -> Vec<String> {
                vec![self.into()]
            }
        })+
    };
}

one_column!(&str, String, &String);

impl<DB: Database, K> RowKey<DB, 1> for K
where
    K: for<'q> Encode<'q, DB> + Type<DB>,
{
    fn types() -> Vec<DB::TypeInfo> {
        vec![K::type_info()]
    }

    fn push_condition(&self, query: &mut QueryBuilder<DB>, columns: &[String]) {
        push_equal(query, columns, 0, self);
    }
}

macro_rules! several_columns {
    ($n:literal: $($Column:ident $Key:ident $i:tt),+) => {
        impl<$($Column: Into<String>),+> KeyColumns<$n> for ($($Column,)+) {
            fn into_names(self) -> Vec<String> {
                vec![$(self.$i.into()),+]
            }
        }

        impl<DB: Database, $($Key),+> RowKey<DB, $n> for ($($Key,)+)
        where
            $($Key: for<'q> Encode<'q, DB> + Type<DB>),+
        {
            fn types() -> Vec<DB::TypeInfo> {
                vec![$($Key::type_info()),+]
            }

            fn push_condition(&self, query: &mut QueryBuilder<DB>, columns: &[String]) {
                $(push_equal(query, columns, $i, &self.$i);)+
            }
        }
    };
}

several_columns!(2: C0 K0 0, C1 K1 1);
several_columns!(3: C0 K0 0, C1 K1 1, C2 K2 2);
several_columns!(4: C0 K0 0, C1 K1 1, C2 K2 2, C3 K3 3);

fn push_equal<DB, K>(query: &mut QueryBuilder<DB>, columns: &[String], i: usize, key: &K)
where
    DB: Database,
    K: for<'q> Encode<'q, DB> + Type<DB>,
{
    let Some(column) = columns.get(i) else { return };
    query.push(if i > 0 { " AND " } else { "" }).push(column).push(" = ");
    push_key(query, key);
}
