//! The variables of MySQL and MariaDB, and the check for harmful ones.

use crate::command::doctor::probe::Rows;
use crate::command::doctor::report::Check;

pub fn check_settings(variables: &Variables) -> Check {
    let mut check = Check::new("settings");
    if variables.is_on("log_bin") && variables.text("binlog_format") == "STATEMENT" {
        let advice =
            "Set binlog_format to ROW or MIXED: the server refuses to log sqlock's transactions as statements.";
        check = check.fail("binlog_format is STATEMENT", advice);
    }
    let silence: u64 = variables.text("wait_timeout").parse().unwrap_or(u64::MAX);
    if silence < 10 {
        let advice = "Set it to 10 at least: the server ends idle connections of sqlock, and each use opens a new one.";
        check = check.warn(format!("wait_timeout is {silence} s"), advice);
    }
    // sqlock sets its own values. These matter to the application's transactions that fence a lease
    // or lock rows.
    let shown =
        ["innodb_lock_wait_timeout", "innodb_rollback_on_timeout", "innodb_snapshot_isolation", "max_statement_time"];
    let shown: Vec<String> = shown
        .iter()
        .filter(|name| !matches!(variables.text(name), "" | "0.000000"))
        .map(|name| format!("{name} {}", variables.text(name)))
        .collect();
    check.ok(shown.join(", "))
}

/// Rows with name and value.
pub struct Variables(pub Rows);

impl Variables {
    pub fn text(&self, name: &str) -> &str {
        self.0.iter().find(|row| row[0].eq_ignore_ascii_case(name)).map_or("", |row| &row[1])
    }

    /// Returns whether a variable is on. read_only has more than two values since MariaDB 12.
    /// <https://mariadb.com/kb/en/server-system-variables/#read_only>
    pub fn is_on(&self, name: &str) -> bool {
        !matches!(self.text(name), "" | "OFF" | "0")
    }

    /// Returns whether Galera has a provider and is switched on.
    pub fn is_galera(&self) -> bool {
        self.is_on("wsrep_on") && !matches!(self.text("wsrep_provider"), "" | "none")
    }
}
