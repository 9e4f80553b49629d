//! The subcommands, one file each: the options, and a function `run`.

pub mod acquire;
pub mod bench;
pub mod completions;
pub mod doctor;
pub mod idem;
pub mod ls;
pub mod migrate;
pub mod release;
pub mod renew;
pub mod run;
pub mod schema;
pub mod show;
pub mod sweep;
pub mod unlock;
