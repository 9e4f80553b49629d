//! Throwaway database servers: real PostgreSQL, MariaDB and MySQL processes on loopback ports, each
//! in its own directory, for tests that kill them, stop them and set their clocks.
//!
//! `scripts/servers` prints the locations of the programs (put its output into the environment). No
//! server outlives the process that started it, even after a `kill -9` of that process: the kernel
//! kills the servers (the parent death signal), and the next start deletes their directories.

#![allow(clippy::expect_used, clippy::panic, reason = "a test ends where its server does not start")]
#![allow(unreachable_pub, reason = "included by several programs")]

use std::env;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError, mpsc};
use std::thread::{self, sleep};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

/// The user of the servers when the tests run as root, which PostgreSQL refuses: `nobody`, on every
/// Linux.
pub const NOBODY: u32 = 65534;

/// The directory of the servers' files: not `$TMPDIR`, which may be inaccessible to the
/// unprivileged user.
const PLACE: &str = "/tmp";

/// The prefix of the name of a server's directory; the port follows.
const PREFIX: &str = "sqlock-server-";

/// The longest time that an operation may take before the test fails: far more than it needs on a
/// busy machine.
const SERVER_TIMEOUT: Duration = Duration::from_secs(60);

/// The kind of a database server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Postgres,
    MariaDb,
    MySql,
}

/// The options of a server; by default it is fast rather than durable, and its clock is right.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Write through to the disk on commit. Otherwise commits survive `kill`, but not a power
    /// failure.
    pub durable: bool,
    /// Let [`Server::jump_clock`] set the server's clock. This makes reading the time slow.
    pub faketime: bool,
    /// Start MariaDB as the first node of a Galera cluster. The node is ready a moment after its
    /// greeting.
    pub galera: bool,
    /// Start PostgreSQL as the standby of a primary that does not exist.
    pub standby: bool,
    /// More server settings: `name=value` for PostgreSQL, `--name=value` for the others. They
    /// override the settings of this file.
    pub settings: Vec<String>,
}

/// A running or killed server. Dropping it stops the server and deletes its files.
pub struct Server {
    kind: Kind,
    options: Options,
    version: String,
    process: Option<Process>,
    node: Option<Box<Node>>,
    /// The port for the members of a replication group.
    group: Option<Port>,
    dir: TempDir,
    port: Port, // last: as long as it is reserved nobody sweeps up the directory
}

impl Server {
    pub fn start(kind: Kind) -> Server {
        Server::start_with(kind, Options::default())
    }

    pub fn start_with(kind: Kind, options: Options) -> Server {
        let mut server = Server::prepare(kind, options);
        fill_from_template(kind, server.dir.path());
        if server.options.galera {
            server.node = Some(Box::new(Node::alone()));
        }
        server.launch();
        server
    }

    /// Creates a server without a database.
    fn prepare(kind: Kind, options: Options) -> Server {
        let port = Port::reserve();
        let dir = port.directory();
        Server { kind, options, version: String::new(), process: None, node: None, group: None, dir, port }
    }

    /// Starts a PostgreSQL server on a copy of another server, which it follows. The primary knows
    /// the standby by `name`.
    pub fn standby_of(primary: &Server, name: &str, options: Options) -> Server {
        assert_eq!(primary.kind, Kind::Postgres, "the standbys of others are not made like this");
        let mut standby = Server::prepare(Kind::Postgres, options);
        let dir = standby.dir.path();
        let from = format!("host=127.0.0.1 port={} user=postgres application_name={name}", primary.port());
        let mut copy = unprivileged([], &Kind::Postgres.program().with_file_name("pg_basebackup"), dir);
        copy.args(["-d", &from, "-D", &text(&dir.join("data")), "-R", "-X", "stream", "-c", "fast", "--no-sync"]);
        Process::start(copy, dir).succeed();
        standby.launch();
        standby
    }

    /// Starts a Galera cluster of MariaDB servers. [`Server::restart`] brings back a killed node if
    /// others have stayed.
    pub fn galera(nodes: usize, options: Options) -> Vec<Server> {
        let mut all: Vec<Server> = (0..nodes).map(|_| Server::prepare(Kind::MariaDb, options.clone())).collect();
        // The first node is a cluster of one for a moment, and the others begin as its copies. They
        // receive the missing writes when they join (IST): a full copy by the servers (SST) would
        // need rsync.
        let first = &mut all[0];
        fill_from_template(Kind::MariaDb, first.dir.path());
        first.node = Some(Box::new(Node::alone()));
        first.launch();
        first.process.take().expect("it was started").end();
        let (from, desk) = (first.dir.path().join("data"), first.dir.path().join("ist"));
        for server in &mut all[1..] {
            copy(&from, &server.dir.path().join("data"));
            server.node = Some(Box::new(Node::alone()));
        }
        let members: Vec<u16> = all.iter().filter_map(|server| server.node.as_ref()).map(|node| node.group.0).collect();
        for (i, server) in all.iter_mut().enumerate() {
            let node = server.node.as_mut().expect("they all are nodes");
            (node.members, node.desk) = (members.clone(), desk.clone());
            node.founds = i == 0;
            server.launch();
        }
        all
    }

    /// Starts the founding and only member of a MySQL replication group. The member is ready a
    /// moment after its greeting.
    pub fn group_member(settings: &[&str]) -> Server {
        let group = Port::reserve();
        let mut all: Vec<String> = [
            "--plugin-load-add=group_replication.so",
            "--performance-schema=ON",
            "--log-bin=binlog",
            "--server-id=1",
            "--gtid-mode=ON",
            "--enforce-gtid-consistency=ON",
            "--report-host=127.0.0.1",
            "--group-replication-group-name=aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa",
            "--group-replication-bootstrap-group=ON",
            "--group-replication-start-on-boot=ON",
        ]
        .map(String::from)
        .into();
        all.push(format!("--group-replication-local-address=127.0.0.1:{}", group.0));
        all.extend(settings.iter().map(|&setting| setting.to_owned()));
        let mut server = Server::start_with(Kind::MySql, Options { settings: all, ..Options::default() });
        server.group = Some(group);
        server
    }

    /// Returns a URL with all rights: to create databases and users, and to end sessions of others.
    pub fn url(&self) -> String {
        match self.kind {
            Kind::Postgres => postgres_url(self.port.0),
            Kind::MariaDb | Kind::MySql => format!("mysql://root@127.0.0.1:{}/test", self.port.0),
        }
    }

    pub fn port(&self) -> u16 {
        self.port.0
    }

    /// Returns the version that the server reports to clients, such as `15.18` or
    /// `10.11.19-MariaDB-0+deb12u1`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Kills every process of the server at the same moment, as a crash does, and returns when all
    /// have ended. The files stay.
    pub fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }

    /// Starts the server again on the same port and files, after [`Server::kill`] (which it calls
    /// first if necessary).
    pub fn restart(&mut self) {
        self.kill();
        self.launch();
    }

    /// Stops every process of the server without ending it. The kernel still accepts connections
    /// for it.
    pub fn pause(&self) {
        freeze(self.running().pid());
    }

    /// Ends [`Server::pause`].
    pub fn resume(&self) {
        thaw(&freeze(self.running().pid()));
    }

    /// Sets the server's clock ahead of (or behind) the real one from now on. Only wall-clock time
    /// moves, as when an operator sets the clock: timeouts on the monotonic clock are not affected.
    pub fn jump_clock(&self, seconds: i64) {
        assert!(self.options.faketime, "this server was not started with Options {{ faketime: true, .. }}");
        set_clock(self.dir.path(), seconds);
    }

    fn running(&self) -> &Process {
        self.process.as_ref().expect("the server was killed and not restarted")
    }

    fn launch(&mut self) {
        let dir = self.dir.path();
        // Files that a killed server leaves, which would prevent a second start.
        for lock in ["data/postmaster.pid", "data/gvwstate.dat", "s", "s.lock", "pid"] {
            let _ = fs::remove_file(dir.join(lock));
        }
        if self.options.standby {
            let signal = dir.join("data/standby.signal");
            File::create(&signal).expect("the server's directory is ours to write");
            give_away(&signal);
        }
        let mut arguments = match self.kind {
            Kind::Postgres => postgres_arguments(dir, self.port.0, self.options.durable),
            Kind::MariaDb | Kind::MySql => mysql_arguments(self.kind, dir, self.port.0, self.options.durable),
        };
        if let Some(node) = &mut self.node {
            node.prepare(dir, &arguments);
            arguments.extend(node.arguments());
            node.founds = false;
        }
        for setting in &self.options.settings {
            if self.kind == Kind::Postgres {
                arguments.push("-c".into());
            }
            arguments.push(setting.clone());
        }
        let mut environment = Vec::new();
        if let Some(node) = &self.node {
            environment.push(format!("SQLOCK_IST={}", text(&node.desk)));
            // The path of the script with which a node requests missed writes.
            environment.push(format!("PATH={}:{}", text(dir), env::var("PATH").unwrap_or_default()));
        }
        if self.options.faketime {
            set_clock(dir, 0);
            environment = vec![
                format!("LD_PRELOAD={}", from_env("SQLOCK_FAKETIME")),
                format!("FAKETIME_TIMESTAMP_FILE={}", text(&dir.join("clock"))),
                "FAKETIME_NO_CACHE=1".into(),
                "FAKETIME_DONT_FAKE_MONOTONIC=1".into(),
                "FAKETIME_FORCE_MONOTONIC_FIX=0".into(), // else MySQL's timed waits spin
            ];
        }
        let mut command = unprivileged(environment, &self.kind.program(), dir);
        command.args(arguments);
        let said = fs::metadata(dir.join("log")).map_or(0, |log| log.len());
        let process = self.process.insert(Process::start(command, dir));
        let port = self.port.0;
        self.version = match self.kind {
            Kind::Postgres => process.await_greeting(|| greet_postgres(port)),
            Kind::MariaDb | Kind::MySql => process.await_greeting(|| greet_mysql(port)),
        };
        if self.node.is_some() {
            process.await_word("Synchronized with group, ready for connections", said);
        }
        if self.options.faketime {
            // Deletes libfaketime's shared memory, which a killed server would leave behind. The
            // server has it open.
            let pid = process.pid();
            for name in [format!("faketime_shm_{pid}"), format!("sem.faketime_sem_{pid}")] {
                let _ = fs::remove_file(Path::new("/dev/shm").join(name));
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(process) = self.process.take() else { return };
        if self.kind == Kind::Postgres {
            process.quit(); // gives its shared memory back to the system, which kill does not
        } else {
            process.kill();
        }
    }
}

/// PgBouncer in transaction mode in front of a PostgreSQL server: consecutive transactions of one
/// client may run on different server connections, which clients share.
pub struct PgBouncer {
    process: Option<Process>,
    _dir: TempDir,
    port: Port,
}

impl PgBouncer {
    pub fn start(upstream: &Server) -> PgBouncer {
        PgBouncer::start_with(upstream, "ignore_startup_parameters = extra_float_digits,options")
    }

    /// Starts PgBouncer with this line in its configuration instead of the one about startup
    /// parameters.
    pub fn start_with(upstream: &Server, parameters: &str) -> PgBouncer {
        assert_eq!(upstream.kind, Kind::Postgres, "PgBouncer speaks PostgreSQL only");
        let port = Port::reserve();
        let dir = port.directory();
        let users = dir.path().join("users");
        fs::write(&users, "\"postgres\" \"\"\n").expect("the new directory is ours to write");
        let config = dir.path().join("pgbouncer.ini");
        let text = format!(
            "[databases]\n\
             * = host=127.0.0.1 port={upstream}\n\
             [pgbouncer]\n\
             listen_addr = 127.0.0.1\n\
             listen_port = {port}\n\
             unix_socket_dir =\n\
             auth_type = trust\n\
             auth_file = {users}\n\
             admin_users = postgres\n\
             pool_mode = transaction\n\
             default_pool_size = 4\n\
             max_client_conn = 300\n\
             max_prepared_statements = 200\n\
             {parameters}\n",
            upstream = upstream.port(),
            port = port.0,
            users = users.display(),
        );
        fs::write(&config, text).expect("the new directory is ours to write");
        let mut command = unprivileged([], Path::new(&from_env("SQLOCK_PGBOUNCER")), dir.path());
        command.arg("-q").arg(config);
        let mut process = Process::start(command, dir.path());
        process.await_greeting(|| greet_postgres(port.0));
        PgBouncer { process: Some(process), _dir: dir, port }
    }

    pub fn url(&self) -> String {
        postgres_url(self.port.0)
    }

    pub fn port(&self) -> u16 {
        self.port.0
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }
}

/// Deletes the directories of servers whose process ended without dropping them.
pub fn sweep() {
    let Ok(entries) = fs::read_dir(PLACE) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let port = name.to_str().and_then(|name| name.strip_prefix(PREFIX)).and_then(|rest| rest.split('-').next());
        if let Some(port) = port.and_then(|port| port.parse().ok())
            && let Some(_nobody_has_it) = Port::claim(port)
        {
            let _ = fs::remove_dir_all(entry.path()); // another user's stays
        }
    }
}

/// Sends a signal to a process and all its descendants at the same moment, so that no process sees
/// the end of another before it receives its own signal.
pub fn signal_tree(root: Pid, signal: Signal) {
    let all = freeze(root);
    for &pid in &all {
        send(pid, signal);
    }
    thaw(&all);
}

impl Kind {
    /// Returns the server's program.
    fn program(self) -> PathBuf {
        let (variable, name) = match self {
            Kind::Postgres => ("SQLOCK_POSTGRES_BIN", "postgres"),
            Kind::MariaDb => ("SQLOCK_MARIADB_BIN", "mariadbd"),
            Kind::MySql => ("SQLOCK_MYSQL_BIN", "mysqld"),
        };
        Path::new(&from_env(variable)).join(name)
    }
}

fn from_env(variable: &str) -> String {
    env::var(variable)
        .unwrap_or_else(|_| panic!("${variable} is not set: run scripts/test, or eval \"$(scripts/servers)\" first"))
}

fn postgres_url(port: u16) -> String {
    format!("postgres://postgres@127.0.0.1:{port}/postgres")
}

fn postgres_arguments(dir: &Path, port: u16, durable: bool) -> Vec<String> {
    let durable = if durable { "on" } else { "off" };
    let settings = [
        format!("port={port}"),
        "listen_addresses=127.0.0.1".into(),
        "unix_socket_directories=".into(), // their path is limited to 107 bytes
        "max_connections=300".into(),
        "shared_buffers=64MB".into(),
        "dynamic_shared_memory_type=mmap".into(), // goes away with the directory, even after kill
        format!("fsync={durable}"),
        format!("full_page_writes={durable}"),
    ];
    let mut arguments = vec!["-D".into(), text(&dir.join("data"))];
    for setting in settings {
        arguments.extend(["-c".into(), setting]);
    }
    arguments
}

fn mysql_arguments(kind: Kind, dir: &Path, port: u16, durable: bool) -> Vec<String> {
    let mut arguments = mysql_installation(kind);
    arguments.extend([
        format!("--datadir={}", text(&dir.join("data"))),
        format!("--port={port}"),
        "--bind-address=127.0.0.1".into(),
        format!("--socket={}", text(&dir.join("s"))),
        format!("--pid-file={}", text(&dir.join("pid"))),
        "--skip-name-resolve".into(),
        "--skip-log-bin".into(),
        "--max-connections=300".into(),
        "--performance-schema=OFF".into(),
        "--innodb-lock-wait-timeout=5".into(),
        "--innodb-buffer-pool-size=64M".into(),
        "--innodb-use-native-aio=0".into(), // the kernel grants only so many of these in all
        format!("--innodb-flush-log-at-trx-commit={}", if durable { 1 } else { 2 }),
        format!("--innodb-doublewrite={}", if durable { "ON" } else { "OFF" }),
        match kind {
            Kind::MySql => "--innodb-redo-log-capacity=16M".into(),
            _ => "--innodb-log-file-size=16M".into(),
        },
    ]);
    if kind == Kind::MySql {
        arguments.extend([
            "--innodb-log-writer-threads=OFF".into(),
            "--mysqlx=OFF".into(),
            "--secure-file-priv=NULL".into(),
        ]);
    }
    arguments
}

/// The properties of a MariaDB server as a node of a Galera cluster.
struct Node {
    /// The port for the other nodes.
    group: Port,
    /// The port on which the node receives missed writes.
    ist: Port,
    /// The group ports of all nodes. Empty: the node is a cluster of one.
    members: Vec<u16>,
    /// The file in which a donor leaves the position for a joining node.
    desk: PathBuf,
    /// Whether the node founds the cluster.
    founds: bool,
}

impl Node {
    fn alone() -> Node {
        let (group, ist) = (Port::reserve(), Port::reserve());
        Node { group, ist, members: Vec::new(), desk: PathBuf::new(), founds: true }
    }

    /// Finds the position of a killed node, so that it receives only later writes.
    fn prepare(&self, dir: &Path, arguments: &[String]) {
        let state = dir.join("data/grastate.dat");
        if self.members.is_empty() {
            let _ = fs::remove_file(state);
            return;
        }
        let script = dir.join("wsrep_sst_ist");
        fs::write(&script, IST).expect("the server's directory is ours to write");
        fs::set_permissions(&script, Permissions::from_mode(0o755)).expect("it is ours");
        if self.founds {
            return;
        }
        let mut recover = unprivileged([], &Kind::MariaDb.program(), dir);
        recover.args(arguments).args(self.arguments()).args(["--wsrep-cluster-address=gcomm://", "--wsrep-recover"]);
        Process::start(recover, dir).succeed();
        let log = String::from_utf8_lossy(&fs::read(dir.join("log")).expect("it has a log")).into_owned();
        let position = log.rsplit("Recovered position: ").next().and_then(|rest| rest.split_whitespace().next());
        let (uuid, seqno) = position.and_then(|at| at.split_once(':')).expect("a node knows how far it has come");
        let saved = format!("# GALERA saved state\nversion: 2.1\nuuid: {uuid}\nseqno: {seqno}\nsafe_to_bootstrap: 0\n");
        fs::write(&state, saved).expect("the server's directory is ours to write");
        give_away(&state);
    }

    fn arguments(&self) -> Vec<String> {
        let address = format!("127.0.0.1:{}", self.group.0);
        let members: Vec<String> = self.members.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let mut arguments = vec![
            "--wsrep-on=ON".into(),
            format!("--wsrep-provider={}", from_env("SQLOCK_GALERA_PROVIDER")),
            format!("--wsrep-cluster-address=gcomm://{}", members.join(",")),
            format!("--wsrep-node-address={address}"),
            "--wsrep-sst-method=ist".into(),
            // Sets the ports, and timeouts with which a dead node is noticed within a second or
            // two.
            format!(
                "--wsrep-provider-options=gmcast.listen_addr=tcp://{address};base_port={};ist.recv_addr=127.0.0.1:{};\
                 gcache.size={};evs.keepalive_period=PT0.1S;evs.inactive_check_period=PT0.1S;evs.suspect_timeout=PT2S;\
                 evs.inactive_timeout=PT4S;evs.install_timeout=PT4S;gmcast.peer_timeout=PT2S;pc.wait_prim_timeout=PT30S",
                self.group.0,
                self.ist.0,
                if members.is_empty() { "8M" } else { "64M" },
            ),
            "--binlog-format=ROW".into(),
            "--default-storage-engine=InnoDB".into(),
            "--innodb-autoinc-lock-mode=2".into(),
        ];
        if self.founds {
            arguments.push("--wsrep-new-cluster".into());
        }
        arguments
    }
}

/// The script that the nodes of a cluster call to bring another node up to date; its name comes
/// from `wsrep_sst_method`. The script only passes on the position from which to send writes. A
/// node for which incremental writes do not suffice cannot join.
const IST: &str = r#"#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in
        --role) role=$2 ;;
        --gtid) position=$2 ;;
        --bypass) bypass=1 ;;
    esac
    shift
done
case $role in
    joiner)
        rm -f "$SQLOCK_IST"
        echo 'ready 127.0.0.1:1/ist'
        until [ -s "$SQLOCK_IST" ]; do sleep 0.05; done
        cat "$SQLOCK_IST"
        ;;
    donor)
        [ -n "$bypass" ] || exit 1
        echo "$position" >"$SQLOCK_IST.new" && mv "$SQLOCK_IST.new" "$SQLOCK_IST" && echo "done $position"
        ;;
esac
"#;

/// Returns the paths of the server's own parts, which it may look for in other places than beside
/// its program.
fn mysql_installation(kind: Kind) -> Vec<String> {
    let program = kind.program();
    let base = program.ancestors().nth(2).expect("the program's path has at least two directories");
    let mut arguments = vec!["--no-defaults".into(), format!("--basedir={}", text(base))];
    for share in ["share/mysql", "share/mariadb", "share"].map(|share| base.join(share)) {
        if share.join("charsets").is_dir() {
            arguments.push(format!("--lc-messages-dir={}", text(&share)));
            arguments.push(format!("--character-sets-dir={}", text(&share.join("charsets"))));
            break;
        }
    }
    arguments
}

/// Copies a fresh database into `dir/data`, because creating one takes seconds. The first process
/// creates the original, which stays beside the downloaded servers.
fn fill_from_template(kind: Kind, dir: &Path) {
    let program = kind.program();
    let about = fs::metadata(&program).unwrap_or_else(|e| panic!("no server program {}: {e}", program.display()));
    let place = Path::new(&from_env("SQLOCK_SERVER_CACHE")).join("templates");
    // One template for each build of the server; the number changes with this code.
    let template = place.join(format!("{kind:?}-{}-{}-{}-1", about.mtime(), about.size(), geteuid().as_raw()));

    // The lock keeps two threads of a process from creating the template twice. Two processes may:
    // the slower one's copy is discarded.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if !template.exists() {
        fs::create_dir_all(&place).unwrap_or_else(|e| panic!("cannot make {}: {e}", place.display()));
        let aside = directory(&place, "new-");
        create_database(kind, aside.path());
        if let Err(error) = fs::rename(aside.path().join("data"), &template) {
            assert!(template.exists(), "cannot make {}: {error}", template.display());
        }
    }
    drop(turn);

    copy(&template, &dir.join("data"));
}

/// Copies a directory with its content and ownership.
fn copy(from: &Path, to: &Path) {
    let status = Command::new("cp")
        .args(["-a", "--reflink=auto"])
        .args([from, to])
        .process_group(0) // Ctrl-C is for others
        .status()
        .expect("cp can be started");
    assert!(status.success(), "could not copy {}: {status}", from.display());
}

/// Creates `dir/data`, with a superuser without a password and an empty database to connect to.
fn create_database(kind: Kind, dir: &Path) {
    let data = text(&dir.join("data"));
    let setup = dir.join("setup.sql");
    let command = match kind {
        Kind::Postgres => {
            let initdb = kind.program().with_file_name("initdb");
            let mut command = unprivileged([], &initdb, dir);
            command.args([
                "-D",
                &data,
                "-U",
                "postgres",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--locale=C",
                "--wal-segsize=1",
                "--no-sync",
            ]);
            command
        }
        Kind::MariaDb => {
            let mut command = unprivileged([], Path::new(&from_env("SQLOCK_MARIADB_INSTALL_DB")), dir);
            command.args(mysql_installation(kind)).arg(format!("--datadir={data}")).args([
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                "--skip-name-resolve",
                "--innodb-log-file-size=16M",
                "--innodb-doublewrite=OFF",
            ]);
            command
        }
        Kind::MySql => {
            // root@localhost applies to the socket only, because names are not resolved.
            let statements = "CREATE USER root@'127.0.0.1';\n\
                              GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n\
                              CREATE DATABASE test;\n";
            fs::write(&setup, statements).expect("the new directory is ours to write");
            let mut command = unprivileged([], &kind.program(), dir);
            command.args(mysql_installation(kind)).args(["--initialize-insecure", "--skip-log-bin"]).args([
                format!("--datadir={data}"),
                format!("--init-file={}", text(&setup)),
                "--secure-file-priv=NULL".into(),
                "--innodb-redo-log-capacity=16M".into(),
                "--innodb-doublewrite=OFF".into(),
            ]);
            command
        }
    };
    Process::start(command, dir).succeed();
    match kind {
        Kind::Postgres => {}
        // A directory is a database.
        Kind::MariaDb => {
            let test = dir.join("data/test");
            fs::create_dir(&test).expect("the database server made its directory");
            give_away(&test);
        }
        // Each copy must generate its own server id.
        Kind::MySql => fs::remove_file(dir.join("data/auto.cnf")).expect("MySQL made its directory"),
    }
}

/// Returns a command that runs without root's rights and ends with this process, with its output in
/// `dir/log`. Only the program itself gets the environment, not the programs that start it.
fn unprivileged(environment: impl IntoIterator<Item = String>, program: &Path, dir: &Path) -> Command {
    let log =
        OpenOptions::new().create(true).append(true).open(dir.join("log")).expect("the directory is ours to write");
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    if geteuid().is_root() {
        command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".into()]);
    }
    command
        .args(["--", "env"])
        .args(environment)
        .arg(program)
        .current_dir(dir)
        .env_clear() // variables of the caller such as PGPORT or MYSQL_HOME are not meant for this server
        .env("PATH", env::var_os("PATH").unwrap_or_default())
        .env("HOME", dir)
        .env("TMPDIR", dir) // MariaDB when starting deletes what others have in a shared one
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a file handle can be duplicated"))
        .stderr(log)
        .process_group(0); // Ctrl-C is for the tests; what becomes of the servers is up to them
    command
}

/// Starts a child that outlives this thread. The kernel sends the parent death signal when the
/// *thread* that started the child ends, so a thread that ends with the process starts all
/// children.
fn spawn(command: Command) -> io::Result<Child> {
    type Job = (Command, mpsc::Sender<io::Result<Child>>);
    static STARTER: LazyLock<mpsc::Sender<Job>> = LazyLock::new(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        thread::spawn(move || {
            for (mut command, reply) in jobs {
                let _ = reply.send(command.spawn());
            }
        });
        sender
    });
    let (reply, child) = mpsc::channel();
    STARTER.send((command, reply)).expect("the starter ends with the process");
    child.recv().expect("the starter answers every job")
}

/// A child with descendants and a log.
struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    fn start(command: Command, dir: &Path) -> Process {
        let child = spawn(command).expect("setpriv (of util-linux) can be started");
        Process { child, log: dir.join("log") }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Waits for a child that must end successfully.
    fn succeed(mut self) {
        let status = self.child.wait().expect("a child can be waited for");
        assert!(status.success(), "a database could not be created ({status}):\n{}", self.log_tail());
    }

    /// Retries until the server sends its greeting, and returns the greeting.
    fn await_greeting(&mut self, greet: impl Fn() -> io::Result<String>) -> String {
        let deadline = Instant::now() + SERVER_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child can be waited for") {
                panic!("the server ended while starting ({status}):\n{}", self.log_tail());
            }
            match greet() {
                Ok(greeting) => return greeting,
                Err(error) => assert!(Instant::now() < deadline, "no answer ({error}):\n{}", self.log_tail()),
            }
            sleep(Duration::from_millis(10));
        }
    }

    fn log_tail(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    /// Kills all processes at the same moment and waits until they have ended.
    fn kill(mut self) {
        let all = freeze(self.pid());
        signal_tree(self.pid(), Signal::KILL);
        let _ = self.child.wait();
        await_true("killed processes to be gone", || all.iter().all(|&pid| family(pid).is_empty()));
    }

    /// Waits until the log contains `word` after the first `said` bytes.
    fn await_word(&mut self, word: &str, said: u64) {
        let deadline = Instant::now() + SERVER_TIMEOUT;
        loop {
            let log = fs::read(&self.log).unwrap_or_default();
            if String::from_utf8_lossy(log.get(said as usize..).unwrap_or_default()).contains(word) {
                return;
            }
            if let Some(status) = self.child.try_wait().expect("a child can be waited for") {
                panic!("the server ended while starting ({status}):\n{}", self.log_tail());
            }
            assert!(Instant::now() < deadline, "it does not say {word:?}:\n{}", self.log_tail());
            sleep(Duration::from_millis(10));
        }
    }

    /// Asks a server to end in order, and waits for its end.
    fn end(mut self) {
        send(self.pid(), Signal::TERM);
        let deadline = Instant::now() + SERVER_TIMEOUT;
        while matches!(self.child.try_wait(), Ok(None)) {
            assert!(Instant::now() < deadline, "it does not end:\n{}", self.log_tail());
            sleep(Duration::from_millis(5));
        }
    }

    /// Asks PostgreSQL to end at once, and waits for its end.
    fn quit(mut self) {
        thaw(&freeze(self.pid())); // it may have been paused
        send(self.pid(), Signal::QUIT);
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            if let Ok(Some(_)) = self.child.try_wait() {
                return;
            }
            sleep(Duration::from_millis(2));
        }
        self.kill();
    }
}

/// Stops a process and its descendants, and returns them. A stop signal takes effect a little
/// later, and a process may start others until then, so the signals are repeated until all
/// processes are seen stopped.
fn freeze(root: Pid) -> Vec<Pid> {
    let mut all = Vec::new();
    await_true("processes to stop", || {
        let family = family(root);
        let running: Vec<Pid> =
            family.iter().filter(|(_, state)| !"Tt".contains(*state)).map(|&(pid, _)| pid).collect();
        for &pid in &running {
            send(pid, Signal::STOP);
        }
        all = family.into_iter().map(|(pid, _)| pid).collect();
        running.is_empty()
    });
    all
}

fn thaw(all: &[Pid]) {
    for &pid in all {
        send(pid, Signal::CONT);
    }
}

fn send(pid: Pid, signal: Signal) {
    let _ = kill_process(pid, signal); // it may be gone already
}

fn await_true(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + SERVER_TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        sleep(Duration::from_millis(1));
    }
}

/// Returns a process, if it lives, and its descendants, parents first, with the kernel's letter for
/// their state.
fn family(root: Pid) -> Vec<(Pid, char)> {
    let all = processes();
    let mut found: Vec<(Pid, char)> = all
        .iter()
        .filter(|&&(pid, state, _)| pid == root && state != 'Z')
        .map(|&(pid, state, _)| (pid, state))
        .collect();
    let mut next = 0;
    while let Some(&(parent, _)) = found.get(next) {
        next += 1;
        found.extend(
            all.iter()
                .filter(|&&(_, state, its_parent)| its_parent == parent.as_raw_pid() && state != 'Z')
                .map(|&(pid, state, _)| (pid, state)),
        );
    }
    found
}

/// Returns every process of this machine: its id, state and parent.
fn processes() -> Vec<(Pid, char, i32)> {
    let entries = fs::read_dir("/proc").expect("there is a /proc");
    entries
        .flatten()
        .filter_map(|entry| {
            let pid = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
            let stat = fs::read(entry.path().join("stat")).ok()?;
            let stat = String::from_utf8_lossy(&stat);
            // PID (NAME) STATE PARENT ...; the name may hold anything
            let mut fields = stat.rsplit_once(") ")?.1.split(' ');
            Some((pid, fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
        })
        .collect()
}

/// Connects and reads what MySQL and MariaDB say first: protocol 10 and their version.
fn greet_mysql(port: u16) -> io::Result<String> {
    let mut stream = connect(port)?;
    let mut header = [0; 4];
    stream.read_exact(&mut header)?;
    let mut packet = vec![0; usize::from(u16::from_le_bytes([header[0], header[1]]))];
    stream.read_exact(&mut packet)?;
    let [10, rest @ ..] = &packet[..] else {
        return Err(io::Error::other(String::from_utf8_lossy(&packet)));
    };
    let version = strings(rest).next().unwrap_or_default();
    // MariaDB before 11 adds this prefix for clients that compare 10 as less than 5.
    Ok(version.strip_prefix("5.5.5-").unwrap_or(&version).to_owned())
}

/// Logs in, until PostgreSQL (or PgBouncer) is ready for a query, and returns the version it
/// reports.
fn greet_postgres(port: u16) -> io::Result<String> {
    let mut stream = connect(port)?;
    let parameters = b"\0\x03\0\0user\0postgres\0database\0postgres\0\0"; // protocol 3.0
    stream.write_all(&(parameters.len() as u32 + 4).to_be_bytes())?;
    stream.write_all(parameters)?;
    let mut version = String::new();
    loop {
        let mut header = [0; 5];
        stream.read_exact(&mut header)?;
        let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]);
        let mut message = vec![0; (length as usize).saturating_sub(4)];
        stream.read_exact(&mut message)?;
        match header[0] {
            b'E' => return Err(io::Error::other(strings(&message).collect::<Vec<_>>().join(" "))),
            b'S' => {
                let mut pair = strings(&message);
                if pair.next().as_deref() == Some("server_version") {
                    version = pair.next().unwrap_or_default().split(' ').next().unwrap_or_default().to_owned();
                }
            }
            b'Z' => break,
            _ => {}
        }
    }
    stream.write_all(b"X\0\0\0\x04")?; // goodbye
    Ok(version)
}

/// Connects with short timeouts, because a starting server may accept a connection and not answer.
fn connect(port: u16) -> io::Result<TcpStream> {
    let limit = Duration::from_secs(1);
    let stream = TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    Ok(stream)
}

/// Splits a message into its zero-terminated strings.
fn strings(message: &[u8]) -> impl Iterator<Item = String> {
    message.split(|&byte| byte == 0).map(|part| String::from_utf8_lossy(part).into_owned())
}

/// Replaces the file that libfaketime reads whenever the server asks for the time. Renaming keeps
/// the file complete at any time.
fn set_clock(dir: &Path, ahead: i64) {
    let file = dir.join("clock.new");
    fs::write(&file, format!("{ahead:+}\n")).expect("the server's directory is ours to write");
    give_away(&file);
    fs::rename(&file, dir.join("clock")).expect("the server's directory is ours to write");
}

/// A port that no other process with servers of this module uses, even while no server listens on
/// it.
///
/// The reservation is a Unix socket of that name in the abstract namespace: only one process can
/// have it, and the kernel removes it when that process ends, in any way.
struct Port(u16, #[allow(dead_code, reason = "held, never used")] UnixListener);

impl Port {
    /// Reserves a port below 32768, because the kernel may use higher ports for outgoing
    /// connections.
    fn reserve() -> Port {
        sweep();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("the clock is past 1970");
        let start = now.subsec_nanos() ^ std::process::id().wrapping_mul(7919);
        for offset in 0..10_000 {
            let port = 20_000 + (start.wrapping_add(offset) % 10_000) as u16;
            if let Some(reserved) = Port::claim(port)
                && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
            {
                return reserved;
            }
        }
        panic!("no port between 20000 and 29999 is free");
    }

    fn claim(port: u16) -> Option<Port> {
        let name = UnixAddr::from_abstract_name(format!("sqlock-test-port-{port}")).expect("the name is short");
        Some(Port(port, UnixListener::bind_addr(&name).ok()?))
    }

    /// Creates a temporary directory for the server on this port.
    fn directory(&self) -> TempDir {
        directory(Path::new(PLACE), &format!("{PREFIX}{}-", self.0))
    }
}

/// Creates a directory that the unprivileged user may fill.
fn directory(place: &Path, prefix: &str) -> TempDir {
    let dir = tempfile::Builder::new()
        .prefix(prefix)
        .permissions(Permissions::from_mode(0o755))
        .tempdir_in(place)
        .unwrap_or_else(|e| panic!("cannot make a directory in {}: {e}", place.display()));
    File::create(dir.path().join("log")).expect("the new directory is ours to write");
    give_away(dir.path());
    dir
}

fn give_away(path: &Path) {
    if geteuid().is_root() {
        chown(path, Some(NOBODY), Some(NOBODY)).expect("root may give a file away");
    }
}

fn text(path: &Path) -> String {
    path.to_str().expect("the paths of the tests are UTF-8").to_owned()
}
