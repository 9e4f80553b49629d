//! A peer: the lock of ZooKeeper's recipes, on a server that writes to the disk before it answers.
//!
//! An acquisition creates an ephemeral sequential node, and reads the nodes of all others. It waits
//! until the node before its own is gone, of which the server notifies it. A release deletes the
//! node.
//! <https://zookeeper.apache.org/doc/r3.8.0/recipes.html#sc_recipes_Locks>

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use crate::peer::free_port;

/// How long Java compiles the code of a server.
pub(crate) const WARM_UP: Duration = Duration::from_secs(5);

/// The variable with the server's archive of classes, beside those that it needs.
const ARCHIVE: &str = "SQLOCK_ZOOKEEPER";

/// A session lasts for this long without a request, in milliseconds. The bench lets none rest for
/// longer.
const SESSION_TIMEOUT: i32 = 60_000;

const CREATE: i32 = 1;
const DELETE: i32 = 2;
const EXISTS: i32 = 3;
const GET_CHILDREN: i32 = 8;

const PERSISTENT: i32 = 0;
const EPHEMERAL_SEQUENTIAL: i32 = 3;

const NO_NODE: i32 = -101;
const NODE_EXISTS: i32 = -110;

/// A throwaway server.
pub(crate) struct ZooKeeper {
    server: Child,
    _directory: TempDir,
    port: u16,
}

impl ZooKeeper {
    /// Starts a server, if its program is known.
    pub(crate) async fn start() -> Option<Self> {
        let archive = std::env::var_os(ARCHIVE)?;
        let directory = tempfile::tempdir().expect("a temporary directory");
        let port = free_port();
        let settings = format!(
            "dataDir={}\nclientPort={port}\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\n\
             maxClientCnxns=0\nmaxSessionTimeout={SESSION_TIMEOUT}\n",
            directory.path().display(),
        );
        let file = directory.path().join("zoo.cfg");
        std::fs::write(&file, settings).expect("a file");
        let classes = Path::new(&archive).parent().expect("a directory").join("*");
        let server = Command::new("java")
            .args(["-Xmx512m", "-cp"])
            .arg(classes)
            .arg("org.apache.zookeeper.server.ZooKeeperServerMain")
            .arg(file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("Java starts");
        // A server that is starting closes its connections, or does not answer.
        for _ in 0..200 {
            if let Ok(Ok(_)) = timeout(Duration::from_secs(1), open_session(port)).await {
                return Some(Self { server, _directory: directory, port });
            }
            sleep(Duration::from_millis(100)).await;
        }
        panic!("ZooKeeper did not start");
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) async fn end(mut self) {
        self.server.kill().await.expect("the server ends");
    }
}

/// A lock of one client, with a session of its own.
pub(crate) struct ZooKeeperLock {
    stream: BufReader<TcpStream>,
    /// The number of the last request.
    request: i32,
    /// The server has notified this session since it last asked to be notified.
    is_notified: bool,
    name: &'static str,
    /// The node of this client.
    node: Option<String>,
}

impl ZooKeeperLock {
    pub(crate) async fn connect(port: u16, name: &'static str) -> Self {
        let stream = open_session(port).await.expect("a session");
        let mut lock = Self { stream, request: 0, is_notified: false, name, node: None };
        let created = lock.create(&format!("/{name}"), PERSISTENT).await;
        assert!(matches!(created, Ok(_) | Err(NODE_EXISTS)), "{created:?}");
        lock
    }

    /// Returns the number that the server has given to the node of this holder.
    pub(crate) async fn acquire(&mut self) -> i64 {
        let name = self.name;
        let path = self.create(&format!("/{name}/"), EPHEMERAL_SEQUENTIAL).await.expect("a node");
        let (_, mine) = path.rsplit_once('/').expect("a path");
        while let Some(previous) = self.children().await.into_iter().filter(|node| **node < *mine).max() {
            self.is_notified = false;
            let mut exists = Vec::new();
            put_bytes(&mut exists, format!("/{name}/{previous}").as_bytes());
            exists.push(1); // Notify this session when the node is gone.
            match self.ask(EXISTS, &exists).await {
                Ok(_) => self.notified().await,
                Err(error) => assert_eq!(error, NO_NODE),
            }
        }
        let number = mine.parse().expect("a number");
        self.node = Some(path);
        number
    }

    pub(crate) async fn release(&mut self) {
        let mut delete = Vec::new();
        put_bytes(&mut delete, self.node.take().expect("it is held").as_bytes());
        delete.extend((-1_i32).to_be_bytes()); // in any version
        self.ask(DELETE, &delete).await.expect("the node is deleted");
    }

    /// Creates a node and returns its path, or the number of the error.
    async fn create(&mut self, path: &str, flags: i32) -> Result<String, i32> {
        let mut create = Vec::new();
        put_bytes(&mut create, path.as_bytes());
        put_bytes(&mut create, b""); // no data
        create.extend(1_i32.to_be_bytes()); // one right:
        create.extend(31_i32.to_be_bytes()); // everything
        put_bytes(&mut create, b"world");
        put_bytes(&mut create, b"anyone");
        create.extend(flags.to_be_bytes());
        self.ask(CREATE, &create).await.map(|answer| take_text(&mut &answer[..]))
    }

    async fn children(&mut self) -> Vec<String> {
        let mut get = Vec::new();
        put_bytes(&mut get, format!("/{}", self.name).as_bytes());
        get.push(0); // without a notification
        let answer = self.ask(GET_CHILDREN, &get).await.expect("the nodes");
        let mut rest = &answer[..];
        (0..take_number(&mut rest)).map(|_| take_text(&mut rest)).collect()
    }

    /// Sends a request and returns its answer, or the number of the error.
    async fn ask(&mut self, kind: i32, body: &[u8]) -> Result<Vec<u8>, i32> {
        self.request += 1;
        let mut request = Vec::new();
        request.extend(self.request.to_be_bytes());
        request.extend(kind.to_be_bytes());
        request.extend(body);
        send(&mut self.stream, &request).await.expect("the session is open");
        loop {
            if let Some((error, answer)) = self.next_answer().await {
                return if error == 0 { Ok(answer) } else { Err(error) };
            }
        }
    }

    async fn notified(&mut self) {
        while !self.is_notified {
            assert_eq!(self.next_answer().await, None, "nothing was asked");
        }
    }

    /// Returns the next answer and its error. `None`: it was a notification.
    async fn next_answer(&mut self) -> Option<(i32, Vec<u8>)> {
        let answer = receive(&mut self.stream).await.expect("the session is open");
        let mut rest = &answer[..];
        if take_number(&mut rest) != self.request {
            self.is_notified = true;
            return None;
        }
        rest = &rest[8..]; // the number of the last change
        let error = take_number(&mut rest);
        Some((error, rest.to_vec()))
    }
}

async fn open_session(port: u16) -> std::io::Result<BufReader<TcpStream>> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    stream.set_nodelay(true)?;
    let mut hello = Vec::new();
    hello.extend(0_i32.to_be_bytes()); // version
    hello.extend(0_i64.to_be_bytes()); // the last change seen
    hello.extend(SESSION_TIMEOUT.to_be_bytes());
    hello.extend(0_i64.to_be_bytes()); // a new session
    put_bytes(&mut hello, &[0; 16]); // without a password
    let mut stream = BufReader::new(stream);
    send(&mut stream, &hello).await?;
    receive(&mut stream).await?;
    Ok(stream)
}

async fn send(stream: &mut BufReader<TcpStream>, bytes: &[u8]) -> std::io::Result<()> {
    let mut packet = Vec::new();
    put_bytes(&mut packet, bytes);
    stream.write_all(&packet).await
}

async fn receive(stream: &mut BufReader<TcpStream>) -> std::io::Result<Vec<u8>> {
    let length = stream.read_i32().await?;
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

/// Appends bytes after their number.
fn put_bytes(packet: &mut Vec<u8>, bytes: &[u8]) {
    packet.extend((bytes.len() as i32).to_be_bytes());
    packet.extend(bytes);
}

fn take_number(rest: &mut &[u8]) -> i32 {
    let (number, after) = rest.split_first_chunk().expect("four bytes");
    *rest = after;
    i32::from_be_bytes(*number)
}

fn take_text(rest: &mut &[u8]) -> String {
    let length = take_number(rest) as usize;
    let (text, after) = rest.split_at(length);
    *rest = after;
    String::from_utf8(text.to_vec()).expect("UTF-8")
}
