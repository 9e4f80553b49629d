//! The URL of the database: its sources, and its kind.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::str::FromStr;

use sqlock::LocksBuilder;

use crate::exit::Failure;
use crate::global::Global;
use crate::{sqlite_file, stderr};

/// The variables that name the database, in the environment and in `.env`. The first that is set
/// counts.
const VARIABLES: [&str; 2] = ["SQLOCK_DATABASE_URL", "DATABASE_URL"];

/// The variable that forbids the embedded database, as --require-database does.
const REQUIRE_VARIABLE: &str = "SQLOCK_REQUIRE_DATABASE";

/// The kinds of databases, whether or not this binary was built for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    Postgres,
    #[value(alias = "mariadb")]
    Mysql,
    Sqlite,
}

/// The URL of one database, or the URLs of several.
#[derive(Clone)]
pub struct Url {
    pub url: String,
    kind: Kind,
    /// The file of the embedded database, if no database is named.
    #[cfg_attr(not(feature = "sqlite"), allow(dead_code, reason = "SQLite alone has a file"))]
    pub default_file: Option<PathBuf>,
}

impl Url {
    /// Finds the URL of the database, on one server or on several for failover.
    pub fn find(global: &Global) -> Result<Self, Failure> {
        Self::find_with(global, Self::parse)
    }

    /// Finds the URLs of several databases of any kinds.
    pub fn find_several(global: &Global) -> Result<Self, Failure> {
        let several = |urls: &str, from: &str| {
            let first = split_list(urls, from)?.first().copied().unwrap_or_default();
            Ok(Self { url: urls.into(), ..Self::parse_one(first, from)? })
        };
        Self::find_with(global, several)
    }

    fn find_with(global: &Global, parse: impl Fn(&str, &str) -> Result<Self, Failure>) -> Result<Self, Failure> {
        if let Some(url) = &global.database_url {
            let Some(path) = url.strip_prefix('@') else {
                return parse(url, "--database-url");
            };
            let text = std::fs::read_to_string(path).map_err(|error| unreadable_file(path, &error))?;
            let (urls, from) = (trim_start_mark(&text).trim(), format!("the file {}", stderr::escape_line(path)));
            // A list may have its URLs on lines of their own.
            if LocksBuilder::split_urls(urls).iter().any(|url| url.contains('\n')) {
                return Err(Failure::configuration(format!(
                    "{from} has more than one line: it must contain the URL alone"
                )));
            }
            return parse(urls, &from);
        }
        for variable in VARIABLES {
            if let Some(url) = std::env::var_os(variable) {
                let not_text = |_| Failure::configuration(format!("{variable} is not UTF-8"));
                return parse(&url.into_string().map_err(not_text)?, variable);
            }
        }
        if !global.no_dotenv
            && let Some((variable, url)) = read_dotenv()?
        {
            return parse(&url, &format!("{variable} in .env"));
        }
        let is_required = std::env::var_os(REQUIRE_VARIABLE).is_some_and(|set| !set.is_empty() && set != "0");
        if global.require_database || is_required || !cfg!(feature = "sqlite") {
            return Err(Failure::configuration(
                "no database is named: set SQLOCK_DATABASE_URL or DATABASE_URL, or give --database-url",
            ));
        }
        let file = sqlite_file::default_path()?;
        stderr::print_note_always(&format!(
            "no database is named (--database-url, SQLOCK_DATABASE_URL, DATABASE_URL, .env): using the file {}, which \
             excludes other commands of this user on this host only",
            file.display()
        ));
        Ok(Self { url: "sqlite:".into(), kind: Kind::Sqlite, default_file: Some(file) })
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Splits several URLs: `postgres://…,postgres://…`.
    pub fn split(&self) -> Result<Vec<Self>, Failure> {
        if self.default_file.is_some() {
            return Ok(vec![self.clone()]);
        }
        LocksBuilder::split_urls(&self.url).into_iter().map(|url| Self::parse_one(url, "each database URL")).collect()
    }

    /// Parses one URL, or several of one kind for failover.
    fn parse(urls: &str, from: &str) -> Result<Self, Failure> {
        let several = split_list(urls, from)?;
        let mut found = Self::parse_one(several.first().copied().unwrap_or_default(), from)?;
        if let [_, others @ ..] = &*several
            && !others.is_empty()
        {
            for url in others {
                if Self::parse_one(url, from)?.kind != found.kind || found.kind == Kind::Sqlite {
                    return Err(Failure::configuration(format!(
                        "{from} names several databases: for failover all must be PostgreSQL, or all MySQL or MariaDB"
                    )));
                }
            }
            found.url = urls.into();
        }
        Ok(found)
    }

    fn parse_one(url: &str, from: &str) -> Result<Self, Failure> {
        // An empty URL means an unset secret, for instance in CI. Leases in a fallback file would
        // not exclude other hosts.
        if url.trim().is_empty() {
            return Err(Failure::configuration(format!("{from} is empty")));
        }
        let kind = match url.split_once(':') {
            // Without the slashes, the drivers would connect to localhost.
            Some(("postgres" | "postgresql", rest)) if rest.starts_with("//") => Kind::Postgres,
            Some(("mysql" | "mariadb", rest)) if rest.starts_with("//") => Kind::Mysql,
            Some(("sqlite", _)) => Kind::Sqlite,
            _ => {
                return Err(Failure::configuration(format!(
                    "{from} must begin with postgres://, mysql://, mariadb:// or sqlite://"
                )));
            }
        };
        if kind != Kind::Sqlite && is_cut_in_password(url) {
            return Err(Failure::configuration(format!(
                "in the password in {from}, write # as %23, / as %2F and ? as %3F; after the host, write @ as %40"
            )));
        }
        Ok(Self { url: url.into(), kind, default_file: None })
    }

    /// Returns the first of several URLs.
    fn first_url(&self) -> &str {
        LocksBuilder::split_urls(&self.url).first().copied().unwrap_or_default()
    }

    /// Parses the first URL. The error does not show the URL, which may contain a password.
    pub fn parse_options<O: FromStr<Err = sqlx::Error>>(&self) -> Result<O, Failure> {
        let url = self.first_url();
        url.parse().map_err(|error| {
            let reason = match error {
                sqlx::Error::Configuration(cause) => cause.to_string(),
                _ => "malformed".into(),
            };
            let reason = if reason.contains(url) { "malformed".into() } else { reason };
            let hint = if url.contains(',') { "; several servers are written as several URLs: URL,URL" } else { "" };
            Failure::configuration(format!("invalid database URL: {reason}{hint}"))
        })
    }
}

/// Returns whether a password seems to contain a character that must be percent-encoded, because an
/// @ comes after it. The text before that character would be read as the host and the port.
fn is_cut_in_password(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let after = rest.find(['#', '/', '?']).map_or("", |end| &rest[end..]);
    // The value of a parameter may contain an @.
    let (path, query) = after.split_once('?').unwrap_or((after, ""));
    let in_query = query.split('&').any(|parameter| parameter.split('=').next().is_some_and(|name| name.contains('@')));
    path.contains('@') || in_query
}

/// Makes the failure for a file that should contain the URL. A text that may be a URL itself is not
/// shown, because it may contain a password.
fn unreadable_file(path: &str, error: &std::io::Error) -> Failure {
    Failure::configuration(if path.contains([':', '@', '=']) {
        format!("cannot read the file after @ in --database-url: {error}; a URL is written without the first @")
    } else {
        format!("cannot read the file {} of --database-url: {error}", stderr::escape_line(path))
    })
}

/// Splits a list of URLs, and refuses empty ones, as from an unset variable.
fn split_list<'a>(urls: &'a str, from: &str) -> Result<Vec<&'a str>, Failure> {
    let several = LocksBuilder::split_urls(urls);
    if several.iter().any(|url| url.is_empty() || url.starts_with(',') || url.ends_with(',')) {
        return Err(Failure::configuration(format!("{from} names several databases, and one of them is empty")));
    }
    Ok(several)
}

/// Reads the URL and its variable from the `.env` of this directory: the `.env` of a parent may
/// belong to another project. Other variables there are neither used nor passed to the command.
fn read_dotenv() -> Result<Option<(&'static str, String)>, Failure> {
    let file = std::env::current_dir().unwrap_or_default().join(".env");
    let unreadable = |reason: String| Failure::configuration(format!("cannot read {}: {reason}", file.display()));
    let text = match std::fs::read_to_string(".env") {
        Ok(text) => text,
        // Container tools make a directory where a file to be mounted is missing.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::IsADirectory) => return Ok(None),
        Err(error) => return Err(unreadable(error.to_string())),
    };
    let text = trim_start_mark(&text);
    let variables = dotenvy::from_read_iter(text.as_bytes()).collect::<Result<Vec<_>, _>>();
    let variables = variables.map_err(|error| match error {
        // The line may contain a password.
        dotenvy::Error::LineParse(line, _) => {
            let number = line_number(text, &line).map(|number| format!(" in line {number}")).unwrap_or_default();
            unreadable(format!("syntax error{number}: expected NAME=value, with quotes around a value with spaces"))
        }
        error => unreadable(error.to_string()),
    })?;
    let value = |wanted| variables.iter().find(|(name, _)| name == wanted).map(|(_, value)| (wanted, value.clone()));
    Ok(VARIABLES.into_iter().find_map(value))
}

/// Removes the byte order mark that some editors write.
fn trim_start_mark(text: &str) -> &str {
    text.trim_start_matches('\u{feff}')
}

/// Returns the number of the line at which a part of a text begins.
fn line_number(text: &str, part: &str) -> Option<usize> {
    let at = text.find(part.trim_end())?;
    Some(text[..at].matches('\n').count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_of_urls_is_split_at_each_scheme() {
        let split = LocksBuilder::split_urls;
        assert_eq!(split("postgres://a,postgresql://b/x"), ["postgres://a", "postgresql://b/x"]);
        assert_eq!(split("mysql://u:p,w@a/x, mysql://b"), ["mysql://u:p,w@a/x", "mysql://b"]);
        assert_eq!(split("postgres://u@a:1,b:2/x?options=-cx%3D1,2"), ["postgres://u@a:1,b:2/x?options=-cx%3D1,2"]);
        assert_eq!(split("sqlite://a,b.db"), ["sqlite://a,b.db"]);
    }

    #[test]
    fn url_cut_in_its_password_is_found() {
        for password in ["1/x", "1#x", "1?x", "1/x?y", "1/x#", "a@b#x"] {
            assert!(is_cut_in_password(&format!("mysql://u:{password}@h/d")), "{password}");
        }
        for rest in ["u:a@b@h:1/d?user=a@b", "h:1/d?user=a@b&password=c@d", "/d", "h"] {
            assert!(!is_cut_in_password(&format!("postgres://{rest}")), "{rest}");
        }
    }
}
