//! What a connection is asked to do.

use crate::backend::Job;
use crate::protocol::{Request, Response};

/// A connection that the executor uses for nothing but operations.
pub(crate) trait Connection: Send {
    /// Carries out a request about leases.
    fn execute<'a>(&'a mut self, request: &'a Request) -> Job<'a, Response>;

    /// Ends the connection in order.
    fn close(self: Box<Self>) -> Job<'static, ()>;
}

/// Opens connections.
pub(crate) trait Connect: Send + Sync {
    fn connect(&self) -> Job<'_, Box<dyn Connection>>;
}

/// Something that a connection can do, and do again when its answer was lost.
pub(crate) trait Operation: Send + Sync + 'static {
    type Output: Send + 'static;

    /// What it is, for errors: `cannot {attempted}`.
    fn attempted(&self) -> &'static str;

    fn run<'a>(&'a self, connection: &'a mut dyn Connection) -> Job<'a, Self::Output>;
}

impl Operation for Request {
    type Output = Response;

    fn attempted(&self) -> &'static str {
        match self {
            Self::Register { .. } | Self::Beat { .. } => "send a heartbeat",
            Self::Acquire(_) | Self::Join(_) => "acquire",
            Self::Enqueue(_) | Self::Poll { .. } => "wait",
            Self::Release(_) | Self::Withdraw { .. } => "release",
            Self::Read { .. } | Self::Transition(_) => "hand over",
            Self::Extend(_) => "extend",
            Self::Downgrade { .. } => "downgrade",
            Self::Raise { .. } => "raise a token",
            Self::Evict { .. } => "evict",
        }
    }

    fn run<'a>(&'a self, connection: &'a mut dyn Connection) -> Job<'a, Response> {
        connection.execute(self)
    }
}
