//! A peer: the usual lock on a Redis that writes to the disk before it answers (`appendfsync
//! always`), as the databases do.
//!
//! An acquisition is `SET NX PX`; a release is a script that deletes the key if it has the value of
//! the holder. There is no queue, no token and no renewal. All tasks share one connection, and none
//! waits for the answer to another, as in the clients of Redis.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::process::Stdio;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::floor::TTL;
use crate::peer::free_port;

/// The variable with the program of the server.
const PROGRAM: &str = "SQLOCK_REDIS";

const RELEASE: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0";

/// A throwaway server, with a connection for all tasks.
pub(crate) struct Redis {
    server: Child,
    _directory: TempDir,
    client: RedisClient,
    connection: JoinSet<()>,
}

/// What a task needs to send commands.
#[derive(Clone)]
pub(crate) struct RedisClient {
    commands: mpsc::UnboundedSender<(String, Answer)>,
    /// The digest of the script that releases.
    release: String,
}

/// Receives the reply to a command.
type Answer = oneshot::Sender<String>;

impl Redis {
    /// Starts a server, if its program is known.
    pub(crate) async fn start() -> Option<Self> {
        let program = std::env::var_os(PROGRAM)?;
        let directory = tempfile::tempdir().expect("a temporary directory");
        let port = free_port();
        let server = Command::new(program)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--dir"])
            .arg(directory.path())
            .args(["--appendonly", "yes", "--appendfsync", "always", "--save", ""])
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("the program of the variable starts");
        let stream = connect(port).await;
        stream.set_nodelay(true).expect("a socket");
        let (read, write) = stream.into_split();
        let (commands, sent) = mpsc::unbounded_channel();
        let (waiting, answered) = mpsc::unbounded_channel();
        let mut connection = JoinSet::new();
        connection.spawn(send(write, sent, waiting));
        connection.spawn(receive(read, answered));
        let mut client = RedisClient { commands, release: String::new() };
        client.release = client.ask(&["SCRIPT", "LOAD", RELEASE]).await;
        Some(Self { server, _directory: directory, client, connection })
    }

    pub(crate) fn client(&self) -> RedisClient {
        self.client.clone()
    }

    pub(crate) async fn end(mut self) {
        drop(self.client);
        self.connection.join_all().await;
        self.server.kill().await.expect("the server ends");
    }
}

impl RedisClient {
    pub(crate) async fn acquire_and_release(&self, name: &str) {
        let owner = "0123456789abcdef0123456789abcdef";
        let ttl = (TTL / 1000).to_string();
        assert_eq!(self.ask(&["SET", name, owner, "NX", "PX", &ttl]).await, "+OK", "the name is free");
        assert_eq!(self.ask(&["EVALSHA", &self.release, "1", name, owner]).await, ":1", "the holder releases");
    }

    /// Sends a command and returns its reply: a text, or the line of any other kind.
    async fn ask(&self, words: &[&str]) -> String {
        let mut command = format!("*{}\r\n", words.len());
        for word in words {
            write!(command, "${}\r\n{word}\r\n", word.len()).expect("a text takes any text");
        }
        let (answer, answered) = oneshot::channel();
        assert!(self.commands.send((command, answer)).is_ok(), "the connection is open");
        answered.await.expect("an answer")
    }
}

/// Connects to a server that is starting.
async fn connect(port: u16) -> TcpStream {
    for _ in 0..500 {
        if let Ok(stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
            return stream;
        }
        sleep(Duration::from_millis(20)).await;
    }
    panic!("Redis did not start within ten seconds");
}

/// Sends what all tasks have asked for since the last time in one piece.
async fn send(
    mut write: OwnedWriteHalf,
    mut commands: mpsc::UnboundedReceiver<(String, Answer)>,
    waiting: mpsc::UnboundedSender<Answer>,
) {
    let mut batch = Vec::new();
    while commands.recv_many(&mut batch, 1024).await > 0 {
        let mut text = String::new();
        for (command, answer) in batch.drain(..) {
            text.push_str(&command);
            assert!(waiting.send(answer).is_ok(), "the replies are read");
        }
        write.write_all(text.as_bytes()).await.expect("the connection is open");
    }
}

/// Reads the replies, which come in the order of the commands.
async fn receive(read: OwnedReadHalf, mut waiting: mpsc::UnboundedReceiver<Answer>) {
    let mut lines = BufReader::new(read).lines();
    while let Some(answer) = waiting.recv().await {
        let mut line = async || lines.next_line().await.expect("the connection is open").expect("a reply");
        let first = line().await;
        let is_text = first.starts_with('$') && first != "$-1";
        let reply = if is_text { line().await } else { first };
        assert!(answer.send(reply).is_ok(), "the task waits");
    }
}
