//! The command `sqlock`, driven as real processes.

mod run;
mod tls;
