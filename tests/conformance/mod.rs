//! Written once, by noun; every database passes it.

mod lease;
