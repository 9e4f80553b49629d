//! The command `sqlock`, run as real processes.

mod access;
mod completions;
mod doctor;
mod exit;
mod faults;
mod idem;
mod listing;
mod once;
mod orphans;
mod outage;
mod process;
mod quorum;
mod quorum_inspection;
mod request;
mod run;
mod screen;
mod setup;
mod sharing;
mod sqlite_file;
mod steps;
mod tls;
