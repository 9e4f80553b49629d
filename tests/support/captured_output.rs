//! The output of a program that runs, captured while a test waits for parts of it.

use std::fs::File;
use std::io::Read;
use std::thread;

use tokio::io::AsyncReadExt;
use tokio::sync::watch;

use super::{SOON, soon};

/// The output of a program so far.
#[derive(Clone)]
pub struct CapturedOutput(watch::Receiver<String>);

impl CapturedOutput {
    /// Captures the output of a pipe.
    pub(super) fn of_pipe(mut pipe: impl tokio::io::AsyncRead + Unpin + Send + 'static) -> Self {
        let (sender, text) = watch::channel(String::new());
        tokio::spawn(async move {
            let mut buffer = vec![0; 16 * 1024];
            while let Ok(length @ 1..) = pipe.read(&mut buffer).await {
                let more = String::from_utf8_lossy(&buffer[..length]).into_owned();
                sender.send_modify(|text| text.push_str(&more));
            }
        });
        Self(text)
    }

    /// Captures the output of a terminal.
    pub(super) fn of_terminal(mut terminal: File) -> Self {
        let (sender, text) = watch::channel(String::new());
        thread::spawn(move || {
            let mut buffer = vec![0; 16 * 1024];
            while let Ok(length @ 1..) = terminal.read(&mut buffer) {
                let more = String::from_utf8_lossy(&buffer[..length]).into_owned();
                sender.send_modify(|text| text.push_str(&more));
            }
        });
        Self(text)
    }

    pub fn text(&self) -> String {
        self.0.borrow().clone()
    }

    /// Waits until the output contains `what`.
    pub async fn shows(&self, what: &str) {
        assert!(self.shows_when(|text| text.contains(what)).await, "{what:?} was not written, but:\n{}", self.text());
    }

    /// Waits until the output satisfies `like`. Returns `false` on a timeout.
    pub async fn shows_when(&self, like: impl Fn(&str) -> bool) -> bool {
        let mut text = self.0.clone();
        let seen = tokio::time::timeout(SOON, text.wait_for(|text| like(text))).await;
        matches!(seen, Ok(Ok(_)))
    }

    /// Waits until the output is closed, and returns it.
    pub async fn closed(&self) -> String {
        let mut text = self.0.clone();
        let _ = soon("the end of the output", text.wait_for(|_| false)).await;
        self.text()
    }
}
