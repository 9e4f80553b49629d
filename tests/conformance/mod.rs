//! Written once, by noun; every database passes it.

mod examples;
mod lease;
