//! F, G, H. One name that several processes want. F is measured next to ZooKeeper, too.
//!
//! The floor is the least that a hand-over between processes needs: one commit and its notification.
//! Two bare connections pass a row to and fro; on PostgreSQL each is notified in a separate
//! statement after the commit, on the others it polls every millisecond.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::floor::{Bare, Held, NotificationListener};
use crate::measure::{Aim, Line, Pace, median, percentile};
use crate::place::{Kind, Place};
use crate::worker::{Contender, Turn, Worker, clock, keep, turns_of_each};
use crate::zookeeper::{WARM_UP, ZooKeeper};

/// How often the floor polls, without notifications.
const LOOK: Duration = Duration::from_millis(1);

/// F. Measures the time from the call of a release until another, waiting process holds the name.
pub(crate) async fn latency(place: &Place, pace: &Pace) -> Vec<Line> {
    let mut lines = Vec::new();
    let keeper = ZooKeeper::start().await;
    for (hold, most) in [(5, 4), (100, 20)] {
        let hold = Duration::from_millis(hold);
        let turn = pace.turn * most;
        let mut workers = vec![start(place, 1, hold).await, start(place, 1, hold).await];
        let mut peers = Vec::new();
        if let Some(keeper) = &keeper {
            for _ in 0..2 {
                peers.push(Worker::start(place, 1, hold, Contender::ZooKeeper(keeper.port())).await);
            }
            Worker::take_turns(&mut peers, WARM_UP).await;
        }
        let (mut ours, mut floor, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..pace.rounds.min(4) {
            ours.push(waits(&turns_of(&mut workers, turn).await));
            floor.push(waits(&to_and_fro(place, turn, hold).await));
            if keeper.is_some() {
                theirs.push(waits(&turns_of(&mut peers, turn).await));
            }
        }
        for worker in workers.into_iter().chain(peers) {
            worker.end().await;
        }
        let count: usize = ours.iter().map(Vec::len).sum();
        let aim = match place.kind() {
            Kind::Postgres => Some(Aim::AtMost(1.3)),
            _ => None,
        };
        let line = |percent, next_to: &str, floor: &[Vec<f64>], aim| {
            let of = |rounds: &[Vec<f64>]| rounds.iter().map(|round| percentile(round, percent)).collect::<Vec<_>>();
            let (ours, floor) = (of(&ours), of(floor));
            Line {
                database: place.title.clone(),
                metric: 'F',
                what: format!("release to holding, {} ms, p{percent}{next_to}", hold.as_millis()),
                unit: "µs",
                ours: median(&ours),
                floor: Some(median(&floor)),
                ratios: ours.iter().zip(&floor).map(|(ours, floor)| ours / floor).collect(),
                aim,
                note: format!("{count} hand-overs"),
                ..Line::default()
            }
        };
        lines.extend([line(50, "", &floor, aim), line(99, "", &floor, None)]);
        if keeper.is_some() {
            let aim = (place.kind() == Kind::Postgres).then_some(Aim::AtMost(1.2));
            lines.push(line(50, ", next to ZooKeeper", &theirs, aim));
        }
    }
    if let Some(keeper) = keeper {
        keeper.end().await;
    }
    lines
}

/// Lets workers take turns, and returns these.
async fn turns_of(workers: &mut [Worker], time: Duration) -> Vec<Turn> {
    Worker::take_turns(workers, time).await.into_iter().flat_map(|done| done.log).collect()
}

/// G. Measures processes that take the name in turn and release it at once.
pub(crate) async fn contention(place: &Place, pace: &Pace) -> Vec<Line> {
    let mut lines = Vec::new();
    for processes in [2, 8, 16] {
        let mut workers = Vec::new();
        for _ in 0..processes {
            workers.push(start(place, 1, Duration::ZERO).await);
        }
        let time = pace.turn * 3;
        let (mut ours, mut floor, mut fairness) = (Vec::new(), Vec::new(), Vec::new());
        Worker::take_turns(&mut workers, pace.turn).await;
        for _ in 0..pace.rounds.min(4) {
            let start = Instant::now();
            let turns = turns_of_each(Worker::take_turns(&mut workers, time).await);
            ours.push(turns.iter().sum::<u64>() as f64 / start.elapsed().as_secs_f64());
            let fewest = turns.iter().min().copied().unwrap_or_default();
            fairness.push(fewest as f64 / turns.iter().max().copied().unwrap_or(1).max(1) as f64);
            let start = Instant::now();
            let bare = to_and_fro(place, pace.turn, Duration::ZERO).await.len();
            floor.push(bare as f64 / start.elapsed().as_secs_f64());
        }
        for worker in workers {
            worker.end().await;
        }
        lines.push(Line {
            database: place.title.clone(),
            metric: 'G',
            what: format!("{processes} processes on one name"),
            unit: "hand-overs/s",
            ours: median(&ours),
            floor: Some(median(&floor)),
            ratios: ours.iter().zip(&floor).map(|(ours, floor)| ours / floor).collect(),
            note: format!("fairness {:.2}", median(&fairness)),
            ..Line::default()
        });
    }
    lines
}

/// H. Counts the statements that the server receives for each hand-over.
///
/// PostgreSQL counts transactions, also that in which a listening connection reads notifications.
/// Every notification wakes all of them, so 16 processes add 16 to each hand-over.
pub(crate) async fn statements(place: &Place, pace: &Pace) -> Vec<Line> {
    let mut lines = Vec::new();
    for (processes, tasks) in [(2, 1), (16, 1), (4, 4), (4, 32), (4, 256)] {
        // An idle run shows the cost of the beginning and the end.
        let (Some((idle, _)), Some((busy, turns))) =
            (bill(place, processes, tasks, Duration::ZERO).await, bill(place, processes, tasks, pace.turn * 10).await)
        else {
            return lines;
        };
        let (fewest, most) = (turns.iter().min().copied(), turns.iter().max().copied());
        let fairness = fewest.unwrap_or_default() as f64 / most.unwrap_or_default().max(1) as f64;
        let turns: u64 = turns.iter().sum();
        let each = (busy - idle) as f64 / turns as f64;
        lines.push(Line {
            database: place.title.clone(),
            metric: 'H',
            what: format!("{processes} processes of {tasks}"),
            unit: "statements",
            ours: each,
            note: format!("{turns} hand-overs, fairness {fairness:.2}"),
            ..Line::default()
        });
    }
    lines
}

/// Returns the server's count from the start of the first worker to the end of the last, and the
/// turns of each task.
async fn bill(place: &Place, processes: usize, tasks: usize, time: Duration) -> Option<(i64, Vec<u64>)> {
    let mut meter = place.monitor().await?;
    let before = meter.total(place.database()).await;
    let mut workers = Vec::new();
    for _ in 0..processes {
        workers.push(start(place, tasks, Duration::ZERO).await);
    }
    let done = if time.is_zero() { Vec::new() } else { Worker::take_turns(&mut workers, time).await };
    let turns = done.into_iter().flat_map(|done| done.turns).collect();
    for worker in workers {
        worker.end().await;
    }
    let after = meter.total(place.database()).await;
    meter.close().await;
    Some((after - before, turns))
}

async fn start(place: &Place, tasks: usize, hold: Duration) -> Worker {
    Worker::start(place, tasks, hold, Contender::Sqlock).await
}

/// Returns the times between two holders, in microseconds, if the later holder was waiting.
fn waits(log: &[Turn]) -> Vec<f64> {
    let mut turns: Vec<&Turn> = log.iter().collect();
    turns.sort_by_key(|turn| turn.token);
    let waited = |pair: &[&Turn]| match pair {
        [earlier, later] if later.called + 1_000_000 < earlier.released => {
            Some((later.acquired - earlier.released) as f64 / 1e3)
        }
        _ => None,
    };
    turns.windows(2).filter_map(waited).collect()
}

/// Passes a row to and fro between two connections.
async fn to_and_fro(place: &Place, time: Duration, hold: Duration) -> Vec<Turn> {
    let names = ["00000000000000000000000000000000", "11111111111111111111111111111111"];
    let log = Arc::new(Mutex::new(HashMap::new()));
    let start = Instant::now();
    let mut first = Some(place.bare().await.acquire("to and fro", names[0]).await);
    let mut parties = JoinSet::new();
    let listeners = [place.listener("party_0").await, place.listener("party_1").await];
    for (i, mut listener) in listeners.into_iter().enumerate() {
        let (mut bare, log) = (place.bare().await, Arc::clone(&log));
        let mut held = first.take();
        parties.spawn(async move {
            let (me, other) = (names[i], names[1 - i]);
            loop {
                let mine = match held.take() {
                    Some(held) => held,
                    None => wait(&mut listener, &mut bare, me).await,
                };
                let acquired = clock();
                if start.elapsed() >= time {
                    return bare.release(&mine).await;
                }
                if !hold.is_zero() {
                    keep(hold, acquired).await;
                }
                let token = mine.token;
                let released = clock();
                let theirs = bare.hand_over(mine, other).await;
                if listener.is_some() {
                    bare.say(&format!("party_{}", 1 - i), theirs.token).await;
                }
                let turn = Turn { token, called: i64::MIN / 2, acquired, released };
                log.lock().unwrap_or_else(PoisonError::into_inner).insert(token, turn);
            }
        });
    }
    parties.join_next().await;
    parties.shutdown().await;
    let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
    log.drain().map(|(_, turn)| turn).collect()
}

/// Waits until a party is notified that the row is its own, or reads it.
async fn wait(listener: &mut Option<NotificationListener>, bare: &mut Bare, me: &str) -> Held {
    let held = |token| Held { name: "to and fro".into(), owner: me.into(), token };
    if let Some(listener) = listener {
        return held(listener.receive().await);
    }
    loop {
        if let Some(token) = bare.look("to and fro", me).await {
            return held(token);
        }
        sleep(LOOK).await;
    }
}
