//! Whole clients on one store: the model here, and every database in its own tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use tokio::task::JoinSet;

use super::{Coordinator, HeldLease};
use crate::backend::Job;
use crate::backend::memory::Memory;
use crate::clock::Moment;
use crate::engine::{Amendment, Patience, Refusal, Verdict, Wish};
use crate::executor::Executor;
use crate::name::LockName;
use crate::operation::{Connect, Connection};
use crate::owner::Owner;
use crate::protocol::{Holder, Mode, Request, Response};

/// For what must happen, however slow this machine is.
const SOON: Duration = Duration::from_secs(60);

pub(crate) fn client(connect: &Arc<dyn Connect>) -> Arc<Coordinator> {
    Coordinator::new(Executor::new(Arc::clone(connect), 2), "tests/1".into())
}

pub(crate) fn wish(name: &str, mode: Mode, ttl: Duration, patience: Patience) -> Wish {
    Wish {
        name: LockName::new(name).expect("a name"),
        owner: Owner::random(),
        reenters: false,
        mode,
        ttl,
        is_kept: true,
        max_hold: None,
        label: "".into(),
        patience,
    }
}

pub(crate) fn exclusive(name: &str) -> Wish {
    wish(name, Mode::Exclusive, Duration::from_secs(10), Patience::Wait(None))
}

fn a_try(name: &str) -> Wish {
    let patience = Patience::Try(Moment::now() + Duration::from_secs(10));
    wish(name, Mode::Exclusive, Duration::from_secs(10), patience)
}

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("it happens soon")
}

async fn give_back(lease: HeldLease) {
    let verdict = soon(lease.release(Duration::ZERO)).await;
    assert!(matches!(verdict, Verdict::Kept), "{verdict:?}");
}

/// What every store must do for the clients.
pub(crate) async fn clients_share_a_store(connect: Arc<dyn Connect>, prefix: &str) {
    let name = |name: &str| format!("{prefix}{name}");
    let (ours, theirs) = (client(&connect), client(&connect));

    // One holds, a try is refused, a wait is served, in this process and in another.
    let lease = soon(ours.acquire(exclusive(&name("a")))).await.expect("free");
    assert!(lease.is_held());
    for client in [&ours, &theirs] {
        let refused = soon(client.acquire(a_try(&name("a")))).await.err();
        assert!(matches!(refused, Some(Refusal::Held)), "{refused:?}");
    }
    let waiting = tokio::spawn(theirs.acquire(exclusive(&name("a"))));
    tokio::time::sleep(Duration::from_millis(50)).await;
    let first = lease.token();
    give_back(lease).await;
    let lease = soon(waiting).await.expect("no panic").expect("granted");
    assert!(lease.token() > first);

    // A wait that is dropped leaves the queue.
    let dropped = ours.acquire(exclusive(&name("a")));
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(dropped);
    let after = tokio::spawn(ours.acquire(exclusive(&name("a"))));
    give_back(lease).await;
    let lease = soon(after).await.expect("no panic").expect("granted");

    // Changes of a lease.
    soon(lease.amend(Amendment::Extend(Duration::from_secs(20)))).await.expect("extended");
    soon(lease.amend(Amendment::Downgrade)).await.expect("shared");
    let shared = wish(&name("a"), Mode::READ, Duration::from_secs(10), Patience::Wait(None));
    let reader = soon(theirs.acquire(shared)).await.expect("beside");
    give_back(reader).await;

    // From one process to another.
    let owner = lease.owner();
    let exported = lease.export().unwrap_or_else(|_| panic!("it is held once"));
    let patience = Patience::Try(Moment::now() + Duration::from_secs(10));
    let resume = Wish { owner, reenters: true, ..wish(&name("a"), Mode::READ, Duration::from_secs(10), patience) };
    let mut lease = soon(theirs.resume(resume.clone(), exported)).await.expect("resumed");
    lease.deliver();
    let again = soon(ours.resume(resume, exported)).await.err();
    assert!(matches!(again, Some(Refusal::Lost)), "{again:?}");
    give_back(lease).await;

    // Dropped, a lease is given back.
    drop(soon(ours.acquire(exclusive(&name("b")))).await.expect("free"));
    give_back(soon(theirs.acquire(exclusive(&name("b")))).await.expect("free soon")).await;

    // Shut down, everything is given back and refused.
    let lease = soon(ours.acquire(exclusive(&name("b")))).await.expect("free");
    let waiting = tokio::spawn(theirs.acquire(exclusive(&name("b"))));
    soon(ours.close()).await.expect("closed");
    assert!(!lease.is_held());
    give_back(soon(waiting).await.expect("no panic").expect("granted")).await;
    assert!(matches!(soon(ours.acquire(exclusive(&name("b")))).await.err(), Some(Refusal::Closed)));
    soon(theirs.close()).await.expect("closed");
}

/// Many tasks of several clients on a few names: one holder at a time, tokens only rise, everybody is served.
pub(crate) async fn storm(connect: Arc<dyn Connect>, prefix: &str) {
    const NAMES: usize = 3;
    const TASKS: usize = 8;
    const TURNS: u32 = 12;
    let clients: Vec<_> = (0..3).map(|_| client(&connect)).collect();
    let inside: Arc<Vec<AtomicU32>> = Arc::new((0..NAMES).map(|_| AtomicU32::new(0)).collect());
    let newest: Arc<Vec<AtomicI64>> = Arc::new((0..NAMES).map(|_| AtomicI64::new(0)).collect());
    let mut tasks = JoinSet::new();
    for (c, client) in clients.iter().enumerate() {
        for task in 0..TASKS {
            let (client, inside, newest) = (Arc::clone(client), Arc::clone(&inside), Arc::clone(&newest));
            let prefix = prefix.to_owned();
            tasks.spawn(async move {
                for turn in 0..TURNS as usize {
                    let i = (c + task + turn) % NAMES;
                    let name = format!("{prefix}storm/{i}");
                    if turn % 4 == 3 {
                        // A wait that is given up leaves nothing behind.
                        let brief = Duration::from_micros(700 * turn as u64);
                        drop(tokio::time::timeout(brief, client.acquire(exclusive(&name))).await);
                        continue;
                    }
                    let lease = client.acquire(exclusive(&name)).await.expect("granted");
                    assert_eq!(inside[i].fetch_add(1, Ordering::SeqCst), 0, "two holders");
                    let before = newest[i].swap(lease.token().get(), Ordering::SeqCst);
                    assert!(lease.token().get() > before, "tokens only rise");
                    tokio::time::sleep(Duration::from_micros(500)).await;
                    assert!(lease.is_held());
                    inside[i].fetch_sub(1, Ordering::SeqCst);
                    if turn % 4 == 2 {
                        drop(lease);
                    } else {
                        give_back(lease).await;
                    }
                }
            });
        }
    }
    while let Some(done) = soon(tasks.join_next()).await {
        done.expect("no panic");
    }
    for client in clients {
        soon(client.close()).await.expect("closed");
    }
}

/// The model as a store that answers at once.
#[derive(Clone, Default)]
struct Model {
    memory: Arc<std::sync::Mutex<(Memory, u64)>>,
}

impl Connect for Model {
    fn connect(&self) -> Job<'_, Box<dyn Connection>> {
        Box::pin(async { Ok(Box::new(self.clone()) as Box<dyn Connection>) })
    }
}

impl Connection for Model {
    fn execute<'a>(&'a mut self, request: &'a Request) -> Job<'a, Response> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
            let now = i64::try_from(since.as_micros()).expect("a moment");
            let mut state = self.memory.lock().expect("no panic");
            let (memory, transactions) = &mut *state;
            *transactions += 1;
            let prepared = memory.prepare(*transactions, now, request).expect("nobody locks a row");
            Ok(memory.commit(*transactions, now, prepared))
        })
    }

    fn close(self: Box<Self>) -> Job<'static, ()> {
        Box::pin(async { Ok(()) })
    }
}

#[tokio::test]
async fn clients_share_the_model() {
    clients_share_a_store(Arc::new(Model::default()), "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn storm_on_the_model() {
    let model = Model::default();
    storm(Arc::new(model.clone()), "").await;
    let state = model.memory.lock().expect("no panic");
    assert!(state.0.leases.values().all(|row| row.holder == Holder::Nobody), "{:?}", state.0.leases);
    assert!(state.0.entries.is_empty(), "{:?}", state.0.entries);
}
