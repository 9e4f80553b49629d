//! The checks of a SQLite file.
//!
//! The file is opened without creating it and without changing its journal mode. Nothing is written
//! but a lock for a moment.

use std::path::Path;
use std::time::Duration;

use nix::unistd::{AccessFlags, access};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, Error, Sqlite, SqliteConnection};
use tokio::time::Instant;

use super::clocks::{check_future, longest_ttl};
use super::definitions::{self, MissingTables};
use super::hooks::check_hooks;
use super::probe::{check_version, connect, first_cell, format_brief, query, run_with_timeout};
use super::report::{Check, REACHABLE, Report};
use super::table::{self, Catalog, HISTORY};
use crate::exit::Failure;
use crate::sqlite_file;
use crate::url::{Kind, Url};

/// The statements, formatted for readability.
#[rustfmt::skip]
mod sql {
pub(super) const VERSION: &str = "SELECT sqlite_version()";
pub(super) const JOURNAL: &str = "PRAGMA journal_mode";
pub(super) const SYNCHRONOUS: &str = "PRAGMA synchronous";

// Takes the write lock, which fails if the file cannot be written, and releases it without changing
// a page. https://www.sqlite.org/lang_transaction.html#immediate
pub(super) const LOCK: &str = "BEGIN IMMEDIATE; ROLLBACK";

// The record has whole seconds, rounded down.
pub(super) const HISTORY: &str = "
SELECT version, success, hex(checksum),
       CAST(strftime('%s', 'now') AS INTEGER) - CAST(strftime('%s', installed_on) AS INTEGER) - 1
  FROM _sqlock_migrations
 ORDER BY version";

pub(super) const TABLES: &str = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name LIKE '%sqlock%'";

pub(super) const VIEW: &str = "SELECT name FROM sqlite_schema WHERE type = 'view' AND name = 'sqlock_holders'";

// The time of a trigger stands before its event. Without one, it runs before.
pub(super) const HOOKS: &str = "
SELECT tbl_name, iif(substr(text, 1, instr(text, ' ON ')) LIKE '% AFTER %', 'after', 'before'), name
  FROM (SELECT tbl_name, name, replace(replace(replace(upper(sql), char(9), ' '), char(10), ' '), char(13), ' ') AS text
          FROM sqlite_schema
         WHERE type = 'trigger' AND (tbl_name GLOB 'sqlock_*' OR tbl_name = '_sqlock_migrations'))
 ORDER BY 1, 3";

// The number of leases ahead of the clock by more than the time of a statement, by how many
// seconds, and the longest TTL.
pub(super) const LEASES: &str = "
SELECT CAST(count(*) AS TEXT), CAST(max(a.at - n.us) / 1000000.0 AS TEXT),
       (SELECT CAST(max(ttl) / 1000000.0 AS TEXT) FROM sqlock_lease)
  FROM (SELECT CAST(strftime('%s', 'now') AS INTEGER) * 1000000 AS us) AS n,
       (SELECT acquired_at AS at FROM sqlock_lease WHERE owner <> '' UNION ALL SELECT beat_at FROM sqlock_client) AS a
 WHERE a.at > n.us + 10000000";

pub(super) const COLUMNS: &str = "
SELECT t.name, c.name, lower(c.type), '', c.\"notnull\", c.dflt_value IS NOT NULL
  FROM sqlite_schema AS t JOIN pragma_table_info(t.name) AS c
 WHERE t.type = 'table'";

// A column with another collation than BINARY gets another name here, so that it does not match.
pub(super) const INDEXES: &str = "
SELECT t.name, i.\"unique\", (SELECT group_concat(name || iif(coll = 'BINARY', '', ' COLLATE ' || coll))
                              FROM (SELECT * FROM pragma_index_xinfo(i.name) WHERE key = 1 ORDER BY seqno))
  FROM sqlite_schema AS t JOIN pragma_index_list(t.name) AS i
 WHERE t.type = 'table' AND NOT i.partial";
}

/// The advice for a file that cannot be opened.
const FILE_ADVICE: &str = "Check the path in the URL, that the file is a SQLite database or does not exist yet, and that this user may \
                           read and write the file and its directory.";

/// Makes the report of a file that cannot be opened for checks. Fails if the URL cannot be parsed.
pub fn report_unopened(url: &Url, failure: &Failure) -> Result<Report, Failure> {
    let options: SqliteConnectOptions = url.parse_options()?;
    let mut report = Report::new(format!("SQLite, the file {}", options.get_filename().display()));
    report.checks.push(Check::new(REACHABLE).fail(format!("no: {}", failure.message), FILE_ADVICE));
    Ok(report)
}

/// Checks the file with the leases of the command.
pub async fn examine(options: &SqliteConnectOptions, missing_tables: MissingTables) -> Report {
    let file = options.get_filename();
    let mut report = Report::new(format!("SQLite, the file {}", file.display()));
    if !file.exists() {
        report_missing_file(file, missing_tables, &mut report);
        return report;
    }
    let owner = match sqlite_file::holds_only_leases(file) {
        true => FileOwner::Command { missing_tables },
        false => FileOwner::Application { missing_tables },
    };
    examine_file(file, owner, &mut report).await;
    report
}

/// Checks the application's own file, if it has tables of sqlock.
pub async fn examine_if_used(options: &SqliteConnectOptions) -> Option<Report> {
    let file = options.get_filename();
    let mut conn = open(file).await.ok()?;
    let tables = query::<Sqlite>(&mut conn, sql::TABLES).await;
    let _ = conn.close().await;
    if !tables.ok()?.iter().any(|row| row.first().is_some_and(|name| name == "sqlock_lease" || name == HISTORY)) {
        return None;
    }
    let mut report = Report::new(format!("SQLite, the application's own file {}", file.display()));
    examine_file(file, FileOwner::Application { missing_tables: MissingTables::Forbidden }, &mut report).await;
    Some(report)
}

/// The owner of a file with leases.
#[derive(Clone, Copy)]
enum FileOwner {
    Command {
        missing_tables: MissingTables,
    },
    /// The application, and the command too if its leases are in the same file.
    Application {
        missing_tables: MissingTables,
    },
}

async fn open(file: &Path) -> Result<SqliteConnection, Error> {
    let options = SqliteConnectOptions::new().filename(file).create_if_missing(false);
    options.busy_timeout(Duration::from_secs(2)).disable_statement_logging().connect().await
}

/// Checks whether a missing file can be created.
fn report_missing_file(file: &Path, missing_tables: MissingTables, report: &mut Report) {
    let check = Check::new(REACHABLE);
    let found = "there is no such file";
    report.checks.push(match missing_tables {
        MissingTables::Created => check.warn(found, "It is created on first use; or run \"sqlock migrate\"."),
        MissingTables::Forbidden => {
            check.fail(found, "Run \"sqlock migrate\": with --no-migrate, other subcommands do not create it.")
        }
        MissingTables::NoVote => check.fail(found, "Run \"sqlock migrate\" with its URL: a new file does not vote."),
    });
    let is_default = sqlite_file::default_path().is_ok_and(|path| path == file);
    // The first use creates the directories of the embedded database.
    let place = if is_default { file.ancestors().find(|path| path.parent().is_some_and(Path::exists)) } else { None };
    let rights = check_directory(place.unwrap_or(file), Check::new("rights"));
    report.checks.push(rights.or_ok("the directory can be written"));
}

async fn examine_file(file: &Path, owner: FileOwner, report: &mut Report) {
    let start = Instant::now();
    let opened = async {
        let mut conn = open(file).await?;
        // Opening alone does not read the file.
        query::<Sqlite>(&mut conn, sql::TABLES).await?;
        Ok(conn)
    };
    let mut conn = match connect(opened, FILE_ADVICE).await {
        Ok(conn) => conn,
        Err(check) => return report.checks.push(check),
    };
    report.checks.push(Check::new(REACHABLE).ok(format!("yes, opened in {}", format_brief(start.elapsed()))));
    report.add_server(&file.canonicalize().map(|file| file.display().to_string()).unwrap_or_default());
    report.skew = Some((0.0, 0.0));
    run_with_timeout(report, async |report| run_checks(&mut conn, file, owner, report).await).await;
    // The last connection to close removes the files beside the database.
    let _ = conn.close().await;
}

async fn run_checks(
    conn: &mut SqliteConnection,
    file: &Path,
    owner: FileOwner,
    report: &mut Report,
) -> Result<(), Error> {
    let rows = query::<Sqlite>(conn, sql::VERSION).await?;
    report.add("server", Ok(check_version("SQLite", first_cell(&rows), (3, 38))))?;
    report.add("durability", check_durability(conn, owner).await)?;
    let clock = Check::new("clock").ok("that of this host");
    let clock = match query::<Sqlite>(conn, sql::LEASES).await {
        Ok(leases) => {
            report.longest_ttl = longest_ttl(&leases);
            check_future(clock, &leases)
        }
        // There are no tables, or the file is locked.
        Err(Error::Database(_)) => clock,
        Err(error) => return Err(error),
    };
    report.add("clock", Ok(clock))?;

    let expected = table::expected_tables(Kind::Sqlite);
    let found = read_catalog(conn).await;
    let (FileOwner::Command { missing_tables } | FileOwner::Application { missing_tables }) = owner;
    report.add(
        "tables",
        found.as_ref().map_or_else(
            |_| Ok(Check::new("tables").unknown("the file cannot be read at this moment", "")),
            |found| Ok(definitions::check_presence(Kind::Sqlite, &expected, found, missing_tables)),
        ),
    )?;
    report.record = found.as_ref().ok().and_then(|found| found.record(Kind::Sqlite));
    let hooks = query::<Sqlite>(conn, sql::HOOKS).await.unwrap_or_default();
    let definitions = |found: Catalog| {
        let check = check_hooks(Check::new("definitions"), &hooks);
        definitions::check_definitions(Kind::Sqlite, &expected, &found.tables, check)
    };
    report.add("definitions", found.map(definitions))?;
    report.add("rights", check_rights(conn, file).await)
}

async fn check_durability(conn: &mut SqliteConnection, owner: FileOwner) -> Result<Check, Error> {
    let journal = query::<Sqlite>(conn, sql::JOURNAL).await?;
    let synchronous = query::<Sqlite>(conn, sql::SYNCHRONOUS).await?;
    let check = Check::new("durability");
    let synchronous = match first_cell(&synchronous) {
        "0" => return Ok(check.warn("synchronous is off", "A crash of the host can lose grants, or the file.")),
        "1" => "normal",
        "2" => "full",
        _ => "extra",
    };
    let found =
        format!("journal_mode {}, synchronous {synchronous} unless a program sets another", first_cell(&journal));
    Ok(match owner {
        FileOwner::Application { .. } if first_cell(&journal) != "wal" => {
            let advice = "Set journal_mode to WAL in the options of your pool: then readers do not wait for writers.";
            check.warn(found, advice)
        }
        _ => check.ok(found),
    })
}

async fn read_catalog(conn: &mut SqliteConnection) -> Result<Catalog, Error> {
    let mut tables = table::from_rows(&query::<Sqlite>(conn, sql::TABLES).await?);
    table::add_columns(&mut tables, &query::<Sqlite>(conn, sql::COLUMNS).await?);
    table::add_indexes(&mut tables, &query::<Sqlite>(conn, sql::INDEXES).await?);
    let history = match tables.iter().any(|table| table.name == HISTORY) {
        true => Some(query::<Sqlite>(conn, sql::HISTORY).await?),
        false => None,
    };
    let has_view = !query::<Sqlite>(conn, sql::VIEW).await?.is_empty();
    Ok(Catalog { tables, history, has_view, place: "in this file".into() })
}

/// Checks whether the file can be written, and the files that SQLite puts beside it.
async fn check_rights(conn: &mut SqliteConnection, file: &Path) -> Result<Check, Error> {
    let check = Check::new("rights");
    let check = match query::<Sqlite>(conn, sql::LOCK).await {
        Ok(_) => check,
        Err(Error::Database(error)) => {
            if sqlite_file::is_busy(&*error) {
                let advice = "End the long transaction in this file: until then leases cannot be renewed.";
                check.warn("another process has been writing for 2 s", advice)
            } else {
                let advice = "Let this user write the file.";
                check.fail(format!("the file cannot be written: {}", error.message()), advice)
            }
        }
        Err(error) => return Err(error),
    };
    Ok(check_directory(file, check).or_ok("the file and its directory can be written"))
}

/// Checks whether several processes can share a database in this directory.
fn check_directory(file: &Path, check: Check) -> Check {
    let directory = file.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let check = match access(directory, AccessFlags::W_OK) {
        Ok(()) => check,
        Err(error) => {
            let advice = "Let this user write the directory: SQLite keeps its log beside the file.";
            check.fail(format!("the directory cannot be written: {}", error.desc()), advice)
        }
    };
    match network_file_system(directory) {
        Some(system) => check.warn(
            format!("the directory is on a network file system ({system})"),
            "Put the file on a local disk: SQLite's locks are not reliable on network file systems, and WAL mode does not work \
             from two hosts.",
        ),
        None => check,
    }
}

/// Returns the network file system of a directory, if its number is known.
/// <https://man7.org/linux/man-pages/man2/statfs.2.html>
#[cfg(target_os = "linux")]
fn network_file_system(directory: &Path) -> Option<&'static str> {
    let number = nix::sys::statfs::statfs(directory).ok()?.filesystem_type().0;
    // The numbers have 32 bits; the field is wider or signed on some systems.
    match number as u32 {
        0x6969 => Some("NFS"),
        0x517b | 0xff53_4d42 | 0xfe53_4d42 => Some("SMB"),
        0x00c3_6400 => Some("Ceph"),
        0x0bd0_0bd0 => Some("Lustre"),
        0x5346_414f | 0x6b41_4653 => Some("AFS"),
        0x0102_1997 => Some("9P"),
        0x6573_5546 => Some("FUSE, such as sshfs"),
        0x786f_4256 => Some("VirtualBox"),
        0x7461_636f => Some("OCFS2"),
        0x0116_1970 => Some("GFS2"),
        _ => None,
    }
}

#[cfg(not(target_os = "linux"))]
fn network_file_system(_: &Path) -> Option<&'static str> {
    None
}
