//! A storm on idempotent payments: clients send each order several times to servers that are
//! killed, stopped and cut off, and that charge in a transaction or at a provider that does not
//! always answer. At the end all accounts of the orders are compared: see
//! `payments/reconciliation.rs`.

#[path = "payments/clients.rs"]
mod clients;
#[path = "payments/http.rs"]
mod http;
#[path = "payments/order.rs"]
mod order;
#[path = "payments/provider.rs"]
pub(crate) mod provider;
#[path = "payments/reconciliation.rs"]
mod reconciliation;
#[path = "payments/server.rs"]
pub(crate) mod server;

use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use tokio::net::TcpSocket;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::process::Process;
use super::proxy::{CutWatch, Proxy};
use super::{Database, Place, random};
use clients::Clients;
use provider::Provider;
use server::TTL;

const SERVERS: usize = 4;

/// The longest pause between two faults.
const PAUSE: Duration = Duration::from_secs(3);

/// The time for which the disk of a server is full.
const FULL: Duration = Duration::from_secs(3);

#[derive(Default)]
struct Faults {
    kills: usize,
    stops: usize,
    full_disks: usize,
    cuts: Vec<CutWatch>,
    /// The violations that no fault explains.
    violations: Vec<String>,
}

/// Returns whether no violation was found.
pub(super) async fn soak(place: &Place, time: Duration) -> bool {
    let locks = place.database.locks().build();
    locks.migrate().await.expect("migrate");
    let _ = locks.shutdown().await;
    place.database.run(reconciliation::LEDGER.to_owned()).await;
    let provider = Provider::start();
    let mut servers: Vec<Server> = (0..SERVERS).map(|_| Server::start(place, &provider)).collect();
    let clients = Arc::new(Clients::new(servers.iter().map(|server| server.proxy.port()).collect(), time));
    let sending = tokio::spawn(Arc::clone(&clients).send_orders());

    let mut faults = make_faults(place, &mut servers, time).await;
    sending.await.expect("no panic");
    let cuts = faults.cuts.iter().filter(|cut| cut.has_happened()).count();
    for server in servers.iter_mut() {
        faults.violations.extend(server.end().await);
    }
    let mut reconciliation = reconciliation::settle(place, &provider, &clients).await;
    servers[0].restart(false);
    reconciliation.compare_answers(&clients, servers[0].port).await;
    faults.violations.extend(servers[0].end().await);
    reconciliation.violations.append(&mut faults.violations);

    let Faults { kills, stops, full_disks, .. } = faults;
    println!(
        "  payments: {}, {kills} kills, {stops} stops, {cuts} cuts, {full_disks} full disks, {reconciliation}; \
         requests a second: {}",
        clients.summary(),
        clients.rates()
    );
    for violation in reconciliation.violations.iter().take(20) {
        println!("    VIOLATION {violation}");
    }
    if !reconciliation.violations.is_empty() {
        println!("    {} violations; answers: {}", reconciliation.violations.len(), clients.answers());
    }
    reconciliation.violations.is_empty() && reconciliation.done > 0
}

/// Makes faults for `time`: cuts a reply to a client, and disturbs a server. All servers run at the
/// end.
async fn make_faults(place: &Place, servers: &mut [Server], time: Duration) -> Faults {
    let is_sqlite = matches!(place.database, Database::Sqlite(_));
    let mut faults = Faults::default();
    let mut stopped = JoinSet::new();
    let start = Instant::now();
    while start.elapsed() < time {
        sleep(Duration::from_micros(random(PAUSE.as_micros() as usize) as u64)).await;
        faults.cuts.push(servers[random(SERVERS)].proxy.cut_next_reply());
        let i = random(SERVERS);
        if let Some(violation) = servers[i].unexpected_end() {
            faults.violations.push(violation);
            servers[i].restart(false);
        }
        match random(if is_sqlite { 4 } else { 5 }) {
            0 | 1 => {
                servers[i].restart(false);
                faults.kills += 1;
            }
            2 => {
                servers[i].process.signal(Signal::STOP);
                faults.stops += 1;
                let (pid, length) = (servers[i].process.pid(), TTL + Duration::from_millis(random(3000) as u64));
                stopped.spawn(async move {
                    sleep(length).await;
                    // The process may be dead by now.
                    let _ = kill_process(pid, Signal::CONT);
                });
            }
            3 if is_sqlite => {
                servers[i].restart(true);
                faults.full_disks += 1;
                sleep(FULL).await;
                servers[i].restart(false);
                faults.kills += 2;
            }
            which => {
                let database = &servers[i].database.as_ref().expect("a server has a proxy").0;
                let text = if which == 3 { "" } else { "COMMIT" };
                faults.cuts.push(database.cut_reply_to(text));
            }
        }
    }
    stopped.join_all().await;
    for server in servers {
        server.proxy.pass();
        if let Some((database, _)) = &server.database {
            database.pass();
        }
    }
    faults
}

/// A server, behind a proxy for its clients and one for its connections to the database.
struct Server {
    process: Process,
    proxy: Proxy,
    /// `None`: a file.
    database: Option<(Proxy, String)>,
    url: String,
    port: u16,
    provider: u16,
    /// A socket that is bound to the port and never listens, to reserve the port while the server
    /// is dead.
    _placeholder: TcpSocket,
}

impl Server {
    fn start(place: &Place, provider: &Provider) -> Self {
        let placeholder = TcpSocket::new_v4().expect("a socket");
        placeholder.set_reuseaddr(true).expect("a socket takes this option");
        placeholder.bind(([127, 0, 0, 1], 0).into()).expect("a port");
        let port = placeholder.local_addr().expect("an address").port();
        let database = (!matches!(place.database, Database::Sqlite(_))).then(|| place.behind_a_proxy());
        let url = database.as_ref().map_or(&place.url, |(_, url)| url).clone();
        let process = start(&url, port, provider.port, false);
        let proxy = Proxy::start(port);
        Self { process, proxy, database, url, port, provider: provider.port, _placeholder: placeholder }
    }

    /// Kills the server, and starts it again, with or without a full disk.
    fn restart(&mut self, is_full: bool) {
        self.process.kill();
        self.process = start(&self.url, self.port, self.provider, is_full);
    }

    fn unexpected_end(&mut self) -> Option<String> {
        let status = self.process.child.try_wait().expect("it is ours")?;
        Some(format!("a server has ended by itself: {status}"))
    }

    /// Ends the server in order. Returns any fault of this end.
    async fn end(&mut self) -> Option<String> {
        if let Some(unexpected) = self.unexpected_end() {
            return Some(unexpected);
        }
        drop(self.process.child.stdin.take());
        let ended = timeout(Duration::from_secs(30), async {
            while matches!(self.process.child.try_wait(), Ok(None)) {
                sleep(Duration::from_millis(20)).await;
            }
        });
        let is_late = ended.await.is_err();
        self.process.kill();
        is_late.then(|| "a server does not come to its end".to_owned())
    }
}

fn start(url: &str, port: u16, provider: u16, is_full: bool) -> Process {
    let (port, provider) = (port.to_string(), provider.to_string());
    let arguments = ["pay", url, &port, &provider];
    Process::start(arguments.into_iter().chain(is_full.then_some("full")))
}
