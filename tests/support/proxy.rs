//! A TCP proxy on loopback that makes the faults of a network, at the moments that a test chooses.
//!
//! The proxy runs on its own thread, so that a test that blocks its runtime does not stall it. Each
//! method returns when the fault is in force: it applies to all later bytes, on open connections
//! too.

#![allow(clippy::expect_used, clippy::panic, reason = "a test ends where its proxy does not start")]
#![allow(unreachable_pub, reason = "included by several programs")]

use std::cell::RefCell;
use std::io;
use std::net::Ipv4Addr;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak, mpsc as blocking};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// The direction of bytes: `Up` is from the client to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Up,
    Down,
    Both,
}

/// A proxy between clients, which connect to its port, and a server on this machine. Dropping it
/// drops their connections.
pub struct Proxy {
    port: u16,
    open: Arc<AtomicUsize>,
    /// `None` ends the thread.
    orders: Option<mpsc::UnboundedSender<(Order, blocking::Sender<()>)>>,
    thread: Option<JoinHandle<()>>,
}

/// Waits until [`Proxy::cut_next_reply`] has cut a reply.
pub struct CutWatch(watch::Receiver<bool>);

/// A request that [`Proxy::hold_request_with`] holds back.
pub struct HeldRequest(Arc<watch::Sender<HoldStage>>);

impl Proxy {
    /// Starts a proxy. The server need not run yet, and may be restarted.
    pub fn start(upstream_port: u16) -> Proxy {
        let (orders, inbox) = mpsc::unbounded_channel();
        let (started, port) = blocking::channel();
        let open = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&open);
        let work = move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be built");
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime, async {
                let hub = Hub::open(upstream_port, count).expect("a port can be opened");
                let _ = started.send(hub.port);
                hub.run(inbox).await;
            });
        };
        let thread = thread::Builder::new().name("proxy".into()).spawn(work).expect("a thread can be started");
        let port = port.recv().expect("the proxy starts");
        Proxy { port, open, orders: Some(orders), thread: Some(thread) }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Ends every fault. Swallowed bytes stay lost; delayed bytes are sent at once.
    pub fn pass(&self) {
        self.fault(|faults| {
            *faults = Faults { resets: faults.resets, swallowed: faults.swallowed, ..Faults::default() }
        });
        self.order(Order::Listen);
    }

    /// Swallows all traffic in a direction, including FIN and RST, as when a cable is pulled:
    /// neither side notices. (A client can still connect to the proxy, and reaches the server when
    /// this fault ends.)
    pub fn blackhole(&self, direction: Direction) {
        self.fault(move |faults| {
            faults.up.lossy = direction != Direction::Down;
            faults.down.lossy = direction != Direction::Up;
        });
    }

    /// Delays all bytes from the server by this time. Replaces other delays.
    pub fn delay_replies(&self, delay: Duration) {
        self.fault(move |faults| {
            faults.up.delay = Duration::ZERO;
            faults.down.delay = delay;
        });
    }

    /// Delays all bytes in both directions by this time. Replaces other delays.
    pub fn delay(&self, delay: Duration) {
        self.fault(move |faults| {
            faults.up.delay = delay;
            faults.down.delay = delay;
        });
    }

    /// Waits for a client to send bytes and for the first reply on its connection, loses that reply
    /// and resets the connection. So the server has executed the request, and the client cannot
    /// know.
    ///
    /// Cuts only the first possible connection; [`Proxy::pass`] cancels the cut.
    pub fn cut_next_reply(&self) -> CutWatch {
        self.cut_reply_to("")
    }

    /// Cuts the next reply, as [`Self::cut_next_reply`], to a client that has sent bytes with
    /// `text` in them.
    pub fn cut_reply_to(&self, text: &'static str) -> CutWatch {
        self.cut(text, false)
    }

    /// Cuts a reply, as [`Self::cut_reply_to`], and then swallows all bytes in both directions.
    pub fn cut_reply_to_and_freeze(&self, text: &'static str) -> CutWatch {
        self.cut(text, true)
    }

    fn cut(&self, text: &'static str, freezes: bool) -> CutWatch {
        let (happened, watch) = watch::channel(false);
        self.fault(move |faults| faults.cut = Some(Cut { happened: Arc::new(happened), text, freezes }));
        CutWatch(watch)
    }

    /// Holds the next bytes of a client with `text` in them, and everything that follows on that
    /// connection, as a congested network does. Other connections work. Only
    /// [`HeldRequest::deliver`] passes the bytes on; [`Proxy::pass`] cancels a hold that has not
    /// begun.
    pub fn hold_request_with(&self, text: &'static str) -> HeldRequest {
        let stage = Arc::new(watch::Sender::new(HoldStage::Awaited));
        let hold = Hold { stage: Arc::clone(&stage), text };
        self.fault(move |faults| faults.hold = Some(hold));
        HeldRequest(stage)
    }

    /// Resets every connection and refuses new ones, until [`Proxy::pass`]: as if the server were
    /// down.
    pub fn refuse(&self) {
        self.order(Order::Refuse);
    }

    /// Resets every open connection. New ones work.
    pub fn reset(&self) {
        self.order(Order::Reset);
    }

    /// Swallows everything on every open connection from now on. New ones work.
    pub fn swallow_all(&self) {
        self.fault(|faults| faults.swallowed += 1);
    }

    /// Returns the number of open client connections.
    pub fn connections(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    fn fault(&self, change: impl FnOnce(&mut Faults) + Send + 'static) {
        self.order(Order::Change(Box::new(change)));
    }

    /// Sends an order to the proxy, and returns when it has been carried out, which takes
    /// microseconds.
    fn order(&self, order: Order) {
        let (done, receipt) = blocking::channel();
        let orders = self.orders.as_ref().expect("the proxy is only stopped by its end");
        orders.send((order, done)).expect("the proxy's thread is alive");
        receipt.recv().expect("the proxy's thread is alive");
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl CutWatch {
    /// Waits for the cut. Panics if it was cancelled.
    pub async fn happened(mut self) {
        self.0.wait_for(|&happened| happened).await.expect("no reply was cut before that was called off");
    }

    pub fn has_happened(&self) -> bool {
        *self.0.borrow()
    }
}

impl HeldRequest {
    pub fn is_held(&self) -> bool {
        *self.0.borrow() == HoldStage::Held
    }

    /// Passes the bytes on, and waits for the end of their connection, which the client has closed:
    /// the server has then executed the request.
    pub async fn deliver(self) {
        self.0.send_replace(HoldStage::Delivered);
        let mut stage = self.0.subscribe();
        stage.wait_for(|stage| *stage == HoldStage::Ended).await.expect("its sender lives");
    }
}

enum Order {
    Change(Box<dyn FnOnce(&mut Faults) + Send>),
    Reset,
    Refuse,
    Listen,
}

/// The current faults of the network.
#[derive(Default)]
struct Faults {
    up: Way,
    down: Way,
    /// The number of resets of all connections. Each connection ends when this number changes.
    resets: u64,
    /// The number of times that all connections were made deaf. A connection is deaf after this
    /// number has changed.
    swallowed: u64,
    cut: Option<Cut>,
    hold: Option<Hold>,
}

/// The order to cut a reply.
#[derive(Clone)]
struct Cut {
    /// Notified when the reply was cut.
    happened: Arc<watch::Sender<bool>>,
    /// The text that the request must contain.
    text: &'static str,
    /// Whether all bytes are swallowed afterwards.
    freezes: bool,
}

/// The order to hold a request.
struct Hold {
    stage: Arc<watch::Sender<HoldStage>>,
    /// The text that the request must contain.
    text: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HoldStage {
    Awaited,
    Held,
    Delivered,
    /// The connection of the request has ended.
    Ended,
}

impl Faults {
    fn way(&self, way: Direction) -> &Way {
        if way == Direction::Up { &self.up } else { &self.down }
    }
}

#[derive(Default)]
struct Way {
    lossy: bool,
    delay: Duration,
}

/// The part on the proxy's thread.
struct Hub {
    port: u16,
    upstream: u16,
    faults: Rc<watch::Sender<Faults>>,
    open: Arc<AtomicUsize>,
    /// A socket that is bound to the port and never listens, to reserve the port while there is no
    /// listener.
    _placeholder: TcpSocket,
    listener: Option<TcpListener>,
    connections: JoinSet<()>,
}

impl Hub {
    fn open(upstream: u16, open: Arc<AtomicUsize>) -> io::Result<Hub> {
        let placeholder = bind(0)?;
        let port = placeholder.local_addr()?.port();
        Ok(Hub {
            port,
            upstream,
            faults: Rc::new(watch::Sender::new(Faults::default())),
            open,
            _placeholder: placeholder,
            listener: Some(bind(port)?.listen(1024)?),
            connections: JoinSet::new(),
        })
    }

    /// Carries out orders and accepts connections until the proxy is dropped.
    async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<(Order, blocking::Sender<()>)>) {
        loop {
            tokio::select! {
                biased;
                order = inbox.recv() => {
                    let Some((order, done)) = order else { return };
                    self.carry_out(order).await;
                    let _ = done.send(());
                }
                Some(client) = accept(self.listener.as_ref()) => {
                    let connection = Connection::new(self.upstream, Rc::clone(&self.faults));
                    let count = Count::one_more(&self.open);
                    self.connections.spawn_local(async move {
                        let _count = count;
                        connection.serve(client).await;
                    });
                }
                Some(_) = self.connections.join_next() => {}
            }
        }
    }

    async fn carry_out(&mut self, order: Order) {
        match order {
            Order::Change(change) => self.faults.send_modify(change),
            Order::Reset => self.reset().await,
            Order::Refuse => {
                self.listener = None; // first, or clients would come back at once
                self.reset().await;
            }
            Order::Listen if self.listener.is_some() => {}
            Order::Listen => {
                let listener = bind(self.port).and_then(|socket| socket.listen(1024));
                self.listener = Some(listener.expect("the placeholder kept the port"));
            }
        }
    }

    async fn reset(&mut self) {
        self.faults.send_modify(|faults| faults.resets += 1);
        while self.connections.join_next().await.is_some() {}
    }
}

/// Binds a socket to a port (0: any) of the loopback interface. Several may be bound as long as
/// only one listens.
fn bind(port: u16) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv4Addr::LOCALHOST, port).into())?;
    Ok(socket)
}

/// Accepts the next client. Pending while connections are refused.
async fn accept(listener: Option<&TcpListener>) -> Option<TcpStream> {
    Some(listener?.accept().await.expect("a listening socket accepts").0)
}

/// Counts a connection for as long as it lives.
struct Count(Arc<AtomicUsize>);

impl Count {
    fn one_more(open: &Arc<AtomicUsize>) -> Count {
        open.fetch_add(1, Ordering::SeqCst);
        Count(Arc::clone(open))
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The state that both directions of a connection share.
struct Connection {
    upstream: u16,
    faults: Rc<watch::Sender<Faults>>,
    /// The reset count when this connection began.
    born: u64,
    /// The number of `swallow_all` when this connection began.
    swallowed: u64,
    /// The cut that was ordered when the client last sent matching bytes.
    asked: RefCell<Weak<watch::Sender<bool>>>,
    /// The stage of the hold, once a request of this connection is held.
    held: RefCell<Option<Arc<watch::Sender<HoldStage>>>>,
}

/// An arrival, in order.
enum Arrival {
    Bytes(Vec<u8>),
    /// The sender has finished (FIN).
    End,
    /// The sender reset the connection (RST).
    Break,
}

impl Connection {
    fn new(upstream: u16, faults: Rc<watch::Sender<Faults>>) -> Connection {
        let (born, swallowed) = (faults.borrow().resets, faults.borrow().swallowed);
        Connection { upstream, faults, born, swallowed, asked: RefCell::default(), held: RefCell::default() }
    }

    /// Serves a connection until both sides have finished, one side resets it, or the proxy resets
    /// all connections. After a reset, both sides receive an RST.
    async fn serve(self, mut client: TcpStream) {
        let Some(Ok(mut server)) = self.unless_reset(self.dial()).await else {
            break_off(&client);
            return;
        };
        let both_nodelay = client.set_nodelay(true).and(server.set_nodelay(true));
        both_nodelay.expect("a socket takes this option");
        let exchange = async {
            let (from_client, to_client) = client.split();
            let (from_server, to_server) = server.split();
            tokio::try_join!(
                self.pipe(from_client, to_server, Direction::Up),
                self.pipe(from_server, to_client, Direction::Down),
            )
        };
        if !matches!(self.unless_reset(exchange).await, Some(Ok(_))) {
            break_off(&client);
            break_off(&server);
        }
        if let Some(stage) = self.held.take() {
            stage.send_replace(HoldStage::Ended);
        }
    }

    /// Connects to the server, and waits while the network swallows bytes.
    async fn dial(&self) -> io::Result<TcpStream> {
        self.reachable(Direction::Up).await;
        TcpStream::connect((Ipv4Addr::LOCALHOST, self.upstream)).await
    }

    async fn unless_reset<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut faults = self.faults.subscribe();
        tokio::select! {
            biased;
            _ = faults.wait_for(|faults| faults.resets != self.born) => None,
            outcome = work => Some(outcome),
        }
    }

    /// Forwards one direction. Reads on while earlier bytes are delayed: the network is slow, not
    /// narrow.
    async fn pipe(&self, mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, way: Direction) -> io::Result<()> {
        let (queue, mut arrivals) = mpsc::channel(1024);
        let read = async move {
            loop {
                let mut buffer = vec![0; 16 * 1024];
                let arrival = match from.read(&mut buffer).await {
                    Ok(0) => Arrival::End,
                    Ok(length) => {
                        buffer.truncate(length);
                        Arrival::Bytes(buffer)
                    }
                    Err(_) => Arrival::Break,
                };
                let last = !matches!(arrival, Arrival::Bytes(_));
                if let Arrival::Bytes(bytes) = &arrival {
                    if self.is_lossy(way) {
                        continue;
                    }
                    self.cut(way, bytes)?;
                    self.hold(way, bytes);
                }
                let sent = queue.send((Instant::now(), arrival)).await;
                if last || sent.is_err() {
                    return Ok(());
                }
            }
        };
        let write = async {
            while let Some((arrived, arrival)) = arrivals.recv().await {
                self.delay(way, arrived).await;
                self.until_delivered(way).await;
                if let Arrival::Bytes(bytes) = arrival {
                    if !self.is_lossy(way) {
                        to.write_all(&bytes).await?;
                    }
                    continue;
                }
                // Unlike bytes, a FIN or RST is not lost: the other side receives it when it can be
                // reached.
                self.reachable(way).await;
                if let Arrival::Break = arrival {
                    return Err(io::ErrorKind::ConnectionReset.into());
                }
                to.shutdown().await?;
            }
            Ok(())
        };
        tokio::try_join!(read, write).map(|_| ())
    }

    fn is_lossy(&self, way: Direction) -> bool {
        self.swallows(&self.faults.borrow(), way)
    }

    fn swallows(&self, faults: &Faults, way: Direction) -> bool {
        faults.way(way).lossy || faults.swallowed != self.swallowed
    }

    /// Waits while bytes in this direction are lost.
    async fn reachable(&self, way: Direction) {
        let mut faults = self.faults.subscribe();
        let _ = faults.wait_for(|faults| !self.swallows(faults, way)).await;
    }

    /// Waits until bytes that arrived at `arrived` are due, according to the current delay.
    async fn delay(&self, way: Direction, arrived: Instant) {
        let mut faults = self.faults.subscribe();
        loop {
            let due = arrived + faults.borrow_and_update().way(way).delay;
            if due <= Instant::now() {
                return;
            }
            tokio::select! {
                () = sleep_until(due) => {}
                _ = faults.changed() => {}
            }
        }
    }

    /// Notes that bytes were sent. Fails if they are the reply to cut.
    fn cut(&self, way: Direction, bytes: &[u8]) -> io::Result<()> {
        let ordered = self.faults.borrow().cut.clone();
        let Some(Cut { happened, text, freezes }) = ordered else { return Ok(()) };
        if way == Direction::Up {
            if !contains(bytes, text) {
                return Ok(());
            }
            *self.asked.borrow_mut() = Arc::downgrade(&happened);
        } else if self.asked.borrow().as_ptr() == Arc::as_ptr(&happened) {
            self.faults.send_modify(|faults| {
                faults.cut = None;
                faults.up.lossy |= freezes;
                faults.down.lossy |= freezes;
            });
            happened.send_replace(true);
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(())
    }

    /// Begins the hold of these bytes if they are the request to hold.
    fn hold(&self, way: Direction, bytes: &[u8]) {
        let is_meant = |hold: &Hold| way == Direction::Up && contains(bytes, hold.text);
        if !self.faults.borrow().hold.as_ref().is_some_and(is_meant) {
            return;
        }
        self.faults.send_modify(|faults| {
            if let Some(hold) = faults.hold.take() {
                hold.stage.send_replace(HoldStage::Held);
                self.held.replace(Some(hold.stage));
            }
        });
    }

    /// Waits while a request of this connection is held.
    async fn until_delivered(&self, way: Direction) {
        let held = self.held.borrow().clone();
        if let (Direction::Up, Some(stage)) = (way, held) {
            let _ = stage.subscribe().wait_for(|stage| *stage != HoldStage::Held).await;
        }
    }
}

/// Returns whether the bytes contain the text.
fn contains(bytes: &[u8], text: &str) -> bool {
    text.is_empty() || bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// Makes the close of the socket send a reset.
fn break_off(stream: &TcpStream) {
    let _ = stream.set_zero_linger(); // fails when it is closed already
}
