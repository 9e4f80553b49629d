//! The options that every subcommand has.

use clap::Args;

#[derive(Args)]
pub struct Global {
    /// The database: postgres://…, mysql://…, mariadb://… or sqlite://FILE; @FILE reads the URL
    /// from a file. Without it, SQLOCK_DATABASE_URL or DATABASE_URL. Several servers of one
    /// database: URL,URL; the first that accepts writes is used.
    #[arg(short = 'D', long, global = true, value_name = "URL", help_heading = "Global options")]
    pub database_url: Option<String>,
    /// Do not look for a file .env in this directory.
    #[arg(long, global = true, help_heading = "Global options")]
    pub no_dotenv: bool,
    /// Fail with exit code 78 if no database is named. SQLOCK_REQUIRE_DATABASE=1 does the same.
    #[arg(long, global = true, help_heading = "Global options")]
    pub require_database: bool,
    /// Keep the leases of a SQLite database in FILE-sqlock, whether or not FILE has sqlock's
    /// tables. A FILE named sqlock.db or *-sqlock keeps its leases itself.
    #[arg(long, global = true, conflicts_with = "same_file", help_heading = "Global options")]
    pub sidecar: bool,
    /// Keep the leases of a SQLite database in FILE itself.
    #[arg(long, global = true, help_heading = "Global options")]
    pub same_file: bool,
    /// Fail with exit code 78 instead of creating missing tables.
    #[arg(long, global = true, help_heading = "Global options")]
    pub no_migrate: bool,
    /// Print nothing but errors, and the database that is used when none is named.
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub quiet: bool,
}
