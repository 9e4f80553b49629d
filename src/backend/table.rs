//! Names of the caller's own tables and columns in statements.

use std::fmt;

use sqlx::{Encode, QueryBuilder, Type, TypeInfo};

use crate::backend::{Database, Kind};
use crate::error::{Error, Result};

/// A table of the caller: `accounts`, or with its schema `shop.accounts`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    schema: Option<Identifier>,
    name: Identifier,
}

impl Table {
    pub(crate) fn new(name: &str) -> Result<Self> {
        match name.split_once('.') {
            None => Ok(Self { schema: None, name: Identifier::new(name)? }),
            Some((_, table)) if table.contains('.') => {
                Err(Error::InvalidIdentifier { name: name.into(), reason: "it has more than one dot" })
            }
            Some((schema, table)) => Ok(Self { schema: Some(Identifier::new(schema)?), name: Identifier::new(table)? }),
        }
    }

    /// Returns the schema. `None`: the default of the connection.
    #[cfg(any(feature = "mysql", feature = "sqlite"))]
    pub(crate) fn schema(&self) -> Option<&str> {
        self.schema.as_ref().map(Identifier::as_str)
    }

    pub(crate) fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Returns the quoted name.
    pub(crate) fn quoted<DB: Database>(&self) -> String {
        let name = self.name.quoted::<DB>();
        self.schema.as_ref().map_or(name.clone(), |schema| format!("{}.{name}", schema.quoted::<DB>()))
    }
}

/// Writes the name as the caller gave it.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(schema) = &self.schema {
            write!(f, "{}.", schema.as_str())?;
        }
        f.write_str(self.name.as_str())
    }
}

/// The name of a column, a table or a schema: any text that a database accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identifier(String);

impl Identifier {
    pub(crate) fn new(name: &str) -> Result<Self> {
        let reason = match name {
            "" => "it is empty",
            name if name.contains('\0') => "it contains a NUL character",
            name => return Ok(Self(name.into())),
        };
        Err(Error::InvalidIdentifier { name: name.into(), reason })
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the quoted name. Quoted names are case-sensitive where the database's names are: on
    /// PostgreSQL, a name that was created without quotes is in lower case.
    pub(crate) fn quoted<DB: Database>(&self) -> String {
        let mut quoted = String::with_capacity(self.0.len() + 2);
        quoted.push(DB::QUOTE);
        for c in self.0.chars() {
            quoted.push(c);
            if c == DB::QUOTE {
                quoted.push(c);
            }
        }
        quoted.push(DB::QUOTE);
        quoted
    }
}

/// Binds a key of the caller.
///
/// sqlx prepares a statement once for each text, and PostgreSQL refuses the same text with a key of
/// another type (`7_i32`, `7_i64`). So on PostgreSQL the type becomes part of the text.
pub(crate) fn push_key<'q, DB, K>(query: &mut QueryBuilder<DB>, key: K)
where
    DB: Database,
    K: Encode<'q, DB> + Type<DB>,
{
    let r#type = (DB::KIND == Kind::Postgres).then(|| key.produces().unwrap_or_else(K::type_info));
    query.push_bind(key);
    if let Some(r#type) = r#type {
        let name = r#type.name().replace(|c: char| !c.is_alphanumeric(), "_");
        query.push(format_args!(" /* {name} */"));
    }
}
