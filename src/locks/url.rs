//! Reads the URLs of databases.

use std::sync::Arc;

use crate::backend::{Backend, Kind};
use crate::error::{Error, Result};

/// Splits a list of URLs. A comma separates if another URL follows. (Another comma may belong to a
/// password, or to a file's name.)
pub(super) fn split(urls: &str) -> Vec<&str> {
    let begins_url = |text: &str| {
        text.trim_start().split_once("://").is_some_and(|(scheme, _)| {
            !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.'))
        })
    };
    let (mut all, mut rest) = (Vec::new(), urls);
    let ends = urls.match_indices(',').map(|(at, _)| at).filter(|&at| begins_url(&urls[at + 1..]));
    for end in ends {
        let start = urls.len() - rest.len();
        all.push(&urls[start..end]);
        rest = &urls[end + 1..];
    }
    all.push(rest);
    if urls.trim().is_empty() { Vec::new() } else { all.into_iter().map(str::trim).collect() }
}

/// Returns the servers of a list of URLs.
pub(super) fn servers(urls: &str) -> Result<(Kind, Vec<Arc<dyn Backend>>)> {
    let (mut kind, mut servers) = (None, Vec::new());
    for url in split(urls) {
        let (server_kind, server) = server(url)?;
        if *kind.get_or_insert(server_kind) != server_kind {
            return Err(Error::InvalidUrl { reason: "all URLs of a list must name databases of one kind" });
        }
        servers.push(server);
    }
    match kind {
        None => Err(Error::InvalidUrl { reason: "it is empty" }),
        Some(Kind::Sqlite) if servers.len() > 1 => {
            Err(Error::InvalidUrl { reason: "a list of URLs cannot contain SQLite files" })
        }
        Some(kind) => Ok((kind, servers)),
    }
}

fn server(url: &str) -> Result<(Kind, Arc<dyn Backend>)> {
    // The parser's error may quote the URL.
    let unreadable = |_: sqlx::Error| Error::InvalidUrl {
        reason: "it cannot be parsed; percent-encode special characters in a password",
    };
    let missing = |what| Error::Unsupported { what, reason: "the feature of that name is not enabled" };
    // With some features, one of them is not used.
    let _ = (&unreadable, &missing);
    if url.ends_with(',') {
        // An empty entry, as from an unset variable, must not go unnoticed.
        return Err(Error::InvalidUrl { reason: "an entry of the list is empty" });
    }
    let scheme = match url.split_once(':') {
        // Without the slashes, the drivers would connect to localhost.
        Some((scheme, rest)) if scheme == "sqlite" || rest.starts_with("//") => Some(scheme),
        _ => None,
    };
    match scheme {
        #[cfg(feature = "postgres")]
        Some("postgres" | "postgresql") => {
            let server =
                crate::backend::postgres::PostgresBackend::from_options(Arc::new(url.parse().map_err(unreadable)?));
            Ok((Kind::Postgres, Arc::new(server)))
        }
        #[cfg(not(feature = "postgres"))]
        Some("postgres" | "postgresql") => Err(missing("postgres")),
        #[cfg(feature = "mysql")]
        Some("mysql" | "mariadb") => {
            let server = crate::backend::mysql::MySqlBackend::from_options(Arc::new(url.parse().map_err(unreadable)?));
            Ok((Kind::MySql, Arc::new(server)))
        }
        #[cfg(not(feature = "mysql"))]
        Some("mysql" | "mariadb") => Err(missing("mysql")),
        #[cfg(feature = "sqlite")]
        Some("sqlite") => {
            let options = url.parse::<sqlx::sqlite::SqliteConnectOptions>().map_err(unreadable)?;
            if options.get_filename().as_os_str().is_empty() {
                // SQLite would give each connection a database of its own.
                return Err(Error::InvalidUrl { reason: "it names no SQLite file" });
            }
            // No connection is closed for its age: a database in memory ends with the last one.
            let pool = sqlx::sqlite::SqlitePoolOptions::new().idle_timeout(None).max_lifetime(None);
            let pool = pool.connect_lazy_with(options);
            Ok((Kind::Sqlite, Arc::new(crate::backend::sqlite::SqliteBackend::new(pool))))
        }
        #[cfg(not(feature = "sqlite"))]
        Some("sqlite") => Err(missing("sqlite")),
        _ => Err(Error::InvalidUrl { reason: "it must begin with postgres://, mysql://, mariadb:// or sqlite:" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool that ends connections for their age needs a runtime.
    #[cfg(feature = "sqlite")]
    #[test]
    fn sqlite_url_needs_no_runtime() {
        assert!(servers("sqlite:app.db").is_ok());
    }

    #[test]
    fn url_without_server_or_file_is_refused() {
        for url in ["postgres:u:p@h/d", "postgresql:", "mysql:d", "mariadb:u@h/d"] {
            assert!(matches!(servers(url), Err(Error::InvalidUrl { .. })), "{url}");
        }
        #[cfg(feature = "sqlite")]
        for url in ["sqlite:", "sqlite://", "sqlite:?mode=rwc", "sqlite://?mode=memory", " sqlite:// "] {
            assert!(matches!(servers(url), Err(Error::InvalidUrl { .. })), "{url}");
        }
    }
}
