//! The log of the library, and its spans.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, NoSubscriber};
use tracing::{Dispatch, Event, Level, Metadata, Subscriber};

/// Fields by name; the text of a line is its `message`.
pub type Fields = BTreeMap<String, String>;

/// The lines and spans of the library on this thread.
#[derive(Clone, Default)]
pub struct Log {
    lines: Arc<Mutex<Vec<(Level, Fields)>>>,
    spans: Arc<Mutex<Vec<(&'static str, Fields)>>>,
}

impl Log {
    /// Captures the log of this thread until the guard is dropped. The runtime of a test has one
    /// thread.
    pub fn capture() -> (Self, DefaultGuard) {
        // While there is one subscriber, a line that another thread reaches first stays disabled
        // for all threads if that thread has no subscriber.
        static SECOND: OnceLock<Dispatch> = OnceLock::new();
        SECOND.get_or_init(|| Dispatch::new(NoSubscriber::new()));
        let log = Self::default();
        (log.clone(), tracing::subscriber::set_default(log))
    }

    /// Returns the messages of at least this level.
    pub fn messages(&self, level: Level) -> Vec<String> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter(|(at, _)| *at <= level).map(|(_, fields)| fields["message"].clone()).collect()
    }

    /// Returns the fields of all spans of a name, in the order of their opening.
    pub fn spans(&self, name: &str) -> Vec<Fields> {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.iter().filter(|(of, _)| *of == name).map(|(_, fields)| fields.clone()).collect()
    }
}

struct Collect<'f>(&'f mut Fields);

impl Visit for Collect<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }
}

impl Subscriber for Log {
    fn enabled(&self, about: &Metadata<'_>) -> bool {
        about.target().starts_with("sqlock")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Fields::new();
        span.record(&mut Collect(&mut fields));
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.push((span.metadata().name(), fields));
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        values.record(&mut Collect(&mut spans[span.into_u64() as usize - 1].1));
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::new();
        event.record(&mut Collect(&mut fields));
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).push((*event.metadata().level(), fields));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
