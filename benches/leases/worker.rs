//! One of the processes that want one name: this program, started again, with its own client.
//!
//! Its standard input has the database and the behaviour, as JSON, and then a line with a duration
//! for each series of turns. The process answers each with a line of JSON, and ends with its input.

use std::io::BufRead;
use std::process::Stdio;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinSet;

use crate::place::{Options, Place};
use crate::queue::User;

/// The argument that makes this program a worker.
pub(crate) const WORKER: &str = "--worker";

/// What the process takes turns with.
#[derive(Clone, Copy)]
pub(crate) enum Contender {
    Sqlock,
    /// The least queue of the database, without a hold.
    Queue,
    /// The ZooKeeper on this port.
    ZooKeeper(u16),
}

/// One turn of a holder of the name, in nanoseconds of the clock that all processes share.
pub(crate) struct Turn {
    pub(crate) token: i64,
    pub(crate) called: i64,
    pub(crate) acquired: i64,
    pub(crate) released: i64,
}

/// The results of a worker.
pub(crate) struct Done {
    /// The number of turns of each of its tasks.
    pub(crate) turns: Vec<u64>,
    /// The single turns, if they were held for a while.
    pub(crate) log: Vec<Turn>,
}

/// The parent's handle to a worker.
pub(crate) struct Worker {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    /// Starts a worker and waits until it is connected. `hold`: about how long it keeps the name.
    pub(crate) async fn start(place: &Place, tasks: usize, hold: Duration, contender: Contender) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program has a path"))
            .arg(WORKER)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("it can be started again");
        let orders = child.stdin.take().expect("it is piped");
        let answers = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let mut worker = Self { child, orders, answers };
        let hold = hold.as_micros() as u64;
        let contender = match contender {
            Contender::Sqlock => json!("sqlock"),
            Contender::Queue => json!("queue"),
            Contender::ZooKeeper(port) => json!(port),
        };
        let behaviour = json!({ "address": place.address(), "tasks": tasks, "hold": hold, "contender": contender });
        worker.tell(&behaviour.to_string()).await;
        assert_eq!(worker.read_line().await, "ready");
        worker
    }

    /// Lets all workers take turns at the same time.
    pub(crate) async fn take_turns(workers: &mut [Self], time: Duration) -> Vec<Done> {
        for worker in &mut *workers {
            worker.tell(&time.as_micros().to_string()).await;
        }
        let mut done = Vec::new();
        for worker in workers {
            let answer: Value = serde_json::from_str(&worker.read_line().await).expect("JSON");
            let number = |value: &Value| value.as_i64().expect("a number");
            let numbers = |value: &Value| value.as_array().expect("an array").iter().map(number).collect::<Vec<_>>();
            let turn = |value: &Value| match numbers(value)[..] {
                [token, called, acquired, released] => Turn { token, called, acquired, released },
                _ => panic!("no turn: {value}"),
            };
            done.push(Done {
                turns: numbers(&answer["turns"]).into_iter().map(i64::cast_unsigned).collect(),
                log: answer["log"].as_array().expect("an array").iter().map(turn).collect(),
            });
        }
        done
    }

    /// Waits until the process and its connections have ended.
    pub(crate) async fn end(self) {
        let Self { mut child, orders, answers } = self;
        drop(orders);
        assert!(child.wait().await.expect("it ends").success());
        drop(answers);
    }

    async fn tell(&mut self, order: &str) {
        self.orders.write_all(format!("{order}\n").as_bytes()).await.expect("it listens");
    }

    async fn read_line(&mut self) -> String {
        self.answers.next_line().await.expect("it answers").expect("it answers")
    }
}

/// Returns the number of turns of each worker.
pub(crate) fn turns_of_each(done: Vec<Done>) -> Vec<u64> {
    done.into_iter().map(|done| done.turns.into_iter().sum()).collect()
}

/// Runs the worker itself.
pub(crate) async fn run() {
    let mut orders = std::io::stdin().lock().lines().map(|order| order.expect("an order"));
    let behaviour: Value = serde_json::from_str(&orders.next().expect("where to go")).expect("JSON");
    let tasks = behaviour["tasks"].as_u64().expect("a number");
    let hold = Duration::from_micros(behaviour["hold"].as_u64().expect("a number"));
    let options = Options::at(&behaviour["address"]);
    match &behaviour["contender"] {
        Value::Number(port) => {
            let port = port.as_u64().and_then(|port| port.try_into().ok()).expect("a port");
            return run_user(User::of_zookeeper(port).await, hold, orders).await;
        }
        contender if contender == "queue" => {
            let id = std::process::id().to_string();
            return run_user(User::connect(&options, &id).await, hold, orders).await;
        }
        _ => {}
    }
    let locks = options.locks();
    let own = format!("worker/{}", std::process::id());
    locks.lease(own).acquire().await.expect("acquire").release().await.expect("release");
    println!("ready");
    for order in orders {
        let time = Duration::from_micros(order.parse().expect("a number"));
        let until = clock() + time.as_nanos() as i64;
        let mut running = JoinSet::new();
        for _ in 0..tasks {
            let locks = locks.clone();
            running.spawn(async move {
                let (mut turns, mut log) = (0, Vec::new());
                while clock() < until {
                    let called = clock();
                    let lease = locks.lease("hot").acquire().await.expect("acquire");
                    let acquired = clock();
                    turns += 1;
                    if !hold.is_zero() {
                        keep(hold, acquired).await;
                        log.push((lease.token().get(), called, acquired, clock()));
                    }
                    lease.release().await.expect("release");
                }
                (turns, log)
            });
        }
        let (turns, logs): (Vec<u64>, Vec<Vec<_>>) = running.join_all().await.into_iter().unzip();
        println!("{}", json!({ "turns": turns, "log": logs.concat() }));
    }
    locks.shutdown().await.expect("shutdown");
}

/// Takes turns as a user of a rival.
async fn run_user(mut user: User, hold: Duration, orders: impl Iterator<Item = String>) {
    println!("ready");
    for order in orders {
        let time = Duration::from_micros(order.parse().expect("a number"));
        let until = clock() + time.as_nanos() as i64;
        let (mut turns, mut log) = (0, Vec::new());
        while clock() < until {
            let called = clock();
            let token = user.acquire().await;
            if !hold.is_zero() {
                let acquired = clock();
                keep(hold, acquired).await;
                log.push((token, called, acquired, clock()));
            }
            user.release().await;
            turns += 1;
        }
        println!("{}", json!({ "turns": [turns], "log": log }));
    }
}

/// Keeps the name for about this time. The time varies, to avoid a common rhythm with parties that
/// poll.
pub(crate) async fn keep(hold: Duration, acquired: i64) {
    tokio::time::sleep(hold.mul_f64(0.75 + (acquired / 1000 % 1000) as f64 / 2000.0)).await;
}

/// Returns the nanoseconds of a clock that is the same in all processes.
pub(crate) fn clock() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}
