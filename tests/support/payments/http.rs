//! Requests over HTTP/1.1, each on a connection of its own.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) is_replay: bool,
    pub(super) body: String,
}

pub(super) async fn post(port: u16, path: &str, key: &str, body: &str) -> io::Result<Answer> {
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: storm\r\nConnection: close\r\nIdempotency-Key: \"{key}\"\r\n\
         Content-Type: text/plain\r\nContent-Length: {}\r\n\r\n{body}",
        body.len(),
    );
    exchange(port, &request).await
}

pub(super) async fn get(port: u16, path: &str) -> io::Result<Answer> {
    exchange(port, &format!("GET {path} HTTP/1.1\r\nHost: storm\r\nConnection: close\r\n\r\n")).await
}

async fn exchange(port: u16, request: &str) -> io::Result<Answer> {
    let mut connection = TcpStream::connect(("127.0.0.1", port)).await?;
    connection.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await?;
    Answer::parse(&answer).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

impl Answer {
    /// Parses an answer. `None`: the answer is incomplete.
    fn parse(answer: &str) -> Option<Self> {
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let mut lines = head.lines();
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let header = |wanted: &str| {
            lines.clone().filter_map(|line| line.split_once(": ")).find(|(name, _)| name.eq_ignore_ascii_case(wanted))
        };
        let length: usize = header("Content-Length")?.1.parse().ok()?;
        let is_replay = header("Idempotent-Replayed").is_some_and(|(_, value)| value == "true");
        (body.len() == length).then(|| Self { status, is_replay, body: body.to_owned() })
    }
}
