//! The command ends before another holder can be granted the name, whatever fault hits sqlock, the
//! network or the server. A fault shorter than the TTL does not stop the command.
//!
//! Each test compares the death of the last process of the command with the end of its lease in the
//! row, on one host and by one clock. `SQLOCK_RUNS=20` repeats each fault 20 times, and
//! `--nocapture` prints the margins.
//!
//! SQLite has neither server nor network: another process takes the write lock of the sidecar file
//! instead, and is killed or paused, or releases the lock too late.

use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::time::sleep;

use crate::DATABASE;
use crate::support::command::run;
use crate::support::command_fixture::{CommandFixture, Row, Run, now};
use crate::support::server::PgBouncer;
use crate::support::{TestDatabase, renewed_twice, soon};

/// A command that ignores TERM, and has children outside its process group.
const DEFIANT: &str = r#"
trap '' TERM
sleep 1000 &
sh -c 'sleep 1000 & wait' &
setsid sleep 1000 &
echo up >&3
while :; do sleep 1000; done
"#;

/// A command that reports its start.
const NEXT: &str = "date +%s%6N >&3";

/// The number of holders of a fault.
const AT_ONCE: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// `kill -9` of sqlock.
    Killed,
    /// SIGSTOP of sqlock, for longer than the TTL.
    Stopped,
    ServerKilled,
    ServerFrozen,
    NetworkCut,
}

impl Fault {
    /// Returns whether other clients reach the database, and acquire the names during the fault.
    fn spares_others(self) -> bool {
        match self {
            Self::Killed | Self::Stopped => true,
            Self::ServerKilled | Self::ServerFrozen => false,
            Self::NetworkCut => DATABASE.server().is_some(),
        }
    }

    async fn fixture(self) -> CommandFixture {
        match self {
            Self::Killed | Self::Stopped => CommandFixture::new().await,
            Self::ServerKilled | Self::ServerFrozen => CommandFixture::with_server().await,
            Self::NetworkCut => CommandFixture::with_proxy().await,
        }
    }

    async fn strike(self, fixture: &mut CommandFixture, holders: &[Holder]) {
        match self {
            Self::Killed => holders.iter().for_each(|holder| holder.run.signal(Signal::SIGKILL)),
            Self::Stopped => holders.iter().for_each(|holder| holder.run.signal(Signal::SIGSTOP)),
            Self::ServerKilled => fixture.crash().await,
            Self::ServerFrozen => fixture.freeze().await,
            Self::NetworkCut => fixture.cut().await,
        }
    }

    async fn end(self, fixture: &mut CommandFixture) {
        match self {
            Self::Killed | Self::Stopped => {}
            Self::ServerKilled => fixture.restart(),
            Self::ServerFrozen => fixture.thaw().await,
            Self::NetworkCut => fixture.mend().await,
        }
    }
}

struct Holder {
    name: String,
    run: Run,
    /// Its row before the fault.
    row: Row,
}

#[tokio::test]
async fn command_dies_before_handover_when_sqlock_is_killed() {
    dead_before_anyone_else_can_hold(Fault::Killed).await;
}

#[tokio::test]
async fn command_dies_before_handover_when_sqlock_is_paused() {
    dead_before_anyone_else_can_hold(Fault::Stopped).await;
}

#[tokio::test]
async fn command_dies_before_handover_when_server_is_killed() {
    dead_before_anyone_else_can_hold(Fault::ServerKilled).await;
}

#[tokio::test]
async fn command_dies_before_handover_when_server_is_frozen() {
    dead_before_anyone_else_can_hold(Fault::ServerFrozen).await;
}

#[tokio::test]
async fn command_dies_before_handover_when_network_is_cut() {
    dead_before_anyone_else_can_hold(Fault::NetworkCut).await;
}

async fn dead_before_anyone_else_can_hold(fault: Fault) {
    let runs = std::env::var("SQLOCK_RUNS").map_or(1, |runs| runs.parse().expect("SQLOCK_RUNS is a number"));
    // Measurements use a TTL that leaves little time. Among the other tests, a busy machine must
    // not be mistaken for a command that survives.
    let ttl = Duration::from_secs(if runs > 1 { 2 } else { 10 });
    let mut fixture = fault.fixture().await;
    let mut early = Vec::new();
    while early.len() < runs {
        let first = early.len();
        early.extend(round(&mut fixture, fault, ttl, first..runs.min(first + AT_ONCE)).await);
    }
    early.sort_unstable();
    let ms = |i: usize| early.get(i).map_or(0, |micros| micros / 1000);
    println!(
        "{:>8} {:<12} {runs} runs, dead before the end of the lease by: {} ms at the earliest, {} ms median, {} ms at the \
         latest",
        format!("{DATABASE:?}"),
        format!("{fault:?}"),
        ms(early.len() - 1),
        ms(early.len() / 2),
        ms(0)
    );
}

/// Some holders, each with a waiter, and one fault: by how many microseconds the commands were dead
/// before the ends of their leases.
async fn round(fixture: &mut CommandFixture, fault: Fault, ttl: Duration, numbers: std::ops::Range<usize>) -> Vec<i64> {
    let seconds = ttl.as_secs().to_string();
    let (mut holders, mut waiters) = (Vec::new(), Vec::new());
    for number in numbers.clone() {
        let name = format!("n{number}");
        let run = fixture.start(&["--ttl", &seconds, &name], DEFIANT).up().await;
        let row = fixture.row(&name).await;
        let waiter = fixture.start_beside(&[&name], NEXT);
        waiter.stderr.shows("waiting for").await;
        holders.push(Holder { name, run, row });
        waiters.push(waiter);
    }
    for holder in &holders {
        fixture.renewed(&holder.name).await;
    }
    // The fault comes at different times after a heartbeat.
    let heartbeat = (ttl / 3).min(Duration::from_secs(1));
    sleep(heartbeat * u32::try_from(numbers.start % 7).expect("below 7") / 7).await;
    for holder in &mut holders {
        holder.row = fixture.row(&holder.name).await;
    }
    fault.strike(fixture, &holders).await;
    let struck = now();
    // A statement that a server executes when it thaws was not in force before.
    let in_force = |row: &Row| row.expires_at <= struck + micros(ttl);

    let mut deaths = Vec::new();
    if fault.spares_others() {
        // A statement in flight may still arrive, so the rows are read until other clients hold the
        // names.
        until_others_hold(fixture, &mut holders, in_force).await;
        for holder in &mut holders {
            deaths.push(Death { row: holder.row.clone(), at: holder.run.report.gone().await.0 });
        }
        if fault == Fault::Stopped {
            holders.iter().for_each(|holder| holder.run.signal(Signal::SIGCONT));
        }
        if fault != Fault::Killed {
            for holder in holders {
                holder.run.end().await.expect(79);
            }
        }
        fault.end(fixture).await;
    } else {
        let mut names = Vec::new();
        for mut holder in holders {
            deaths.push(Death { row: holder.row, at: holder.run.report.gone().await.0 });
            holder.run.end().await.expect(79);
            names.push(holder.name);
        }
        // The waiters are stopped while the rows of the dead holders are read.
        for waiter in &waiters {
            waiter.stop().await;
        }
        fault.end(fixture).await;
        for (death, name) in deaths.iter_mut().zip(&names) {
            let row = fixture.row(name).await;
            if row.token == death.row.token && in_force(&row) {
                death.row = row;
            }
        }
        for waiter in &waiters {
            waiter.signal(Signal::SIGCONT);
        }
    }

    let mut early = Vec::new();
    for (Death { row, at }, mut waiter) in deaths.into_iter().zip(waiters) {
        let late = at - row.expires_at;
        assert!(late <= 0, "{fault:?}: the command died {late} µs after the end of its lease");
        let next: i64 = waiter.report.line().await.parse().expect("a time");
        assert!(next >= at, "{fault:?}: the next command began {} µs before the death of the first", at - next);
        waiter.end().await.expect(0);
        early.push(-late);
    }
    early
}

/// The time at which the last process of a command had ended, and its lease.
struct Death {
    row: Row,
    at: i64,
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).expect("a short time")
}

/// Keeps the last row of each holder that was in force.
async fn until_others_hold(fixture: &CommandFixture, holders: &mut [Holder], in_force: impl Fn(&Row) -> bool) {
    let taken = async {
        let mut left = holders.len();
        while left > 0 {
            left = 0;
            for holder in &mut *holders {
                let row = fixture.row(&holder.name).await;
                if row.token != holder.row.token {
                    continue;
                }
                left += 1;
                if in_force(&row) {
                    holder.row = row;
                }
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    soon("the turn of the next ones", taken).await;
}

// ---- faults that a lease survives

/// A command that reports its start, and ends on an order.
const OBEDIENT: &str = r#"echo up >&3; read go <"$ORDERS"; echo "$go" >&3"#;

#[tokio::test]
async fn command_survives_database_restart_within_ttl() {
    let mut fixture = CommandFixture::with_server().await;
    let mut holder = fixture.start(&["--ttl", "120", "a"], OBEDIENT).up().await;
    let before = fixture.row("a").await;
    fixture.crash().await;
    fixture.restart();
    let renewed = |row: &Row| row.expires_at > before.expires_at;
    let after = fixture.row_when("a renewal", "a", renewed).await;
    assert_eq!((after.token, &after.owner), (before.token, &before.owner));
    assert!(!fixture.is_free("a").await);
    holder.order("go");
    assert_eq!(holder.report.line().await, "go");
    holder.end().await.expect(0);
    assert!(fixture.is_free("a").await);
}

#[tokio::test]
async fn command_survives_server_pause_within_ttl() {
    let mut fixture = CommandFixture::with_server().await;
    let holder = fixture.start(&["--ttl", "30", "a"], OBEDIENT).up().await;
    let before = fixture.row("a").await;
    fixture.freeze().await;
    // A renewal is due by now, and fails.
    sleep(Duration::from_secs(7)).await;
    fixture.thaw().await;
    let renewed = |row: &Row| row.expires_at > before.expires_at;
    assert_eq!(fixture.row_when("a renewal", "a", renewed).await.token, before.token);
    holder.order("go");
    holder.end().await.expect(0);
}

#[tokio::test]
async fn command_survives_lost_renewal_replies() {
    let mut fixture = CommandFixture::with_proxy().await;
    let holder = fixture.start(&["--ttl", "9", "a"], OBEDIENT).up().await;
    let before = fixture.row("a").await;
    for _ in 0..3 {
        fixture.cut_a_reply().await;
        assert_eq!(fixture.renewed("a").await.token, before.token);
    }
    holder.order("go");
    holder.end().await.expect(0);
    assert!(fixture.is_free("a").await);
}

/// Only PostgreSQL has a transaction pooler; the other databases run the same steps without one.
#[tokio::test]
async fn lease_works_behind_transaction_pooler() {
    let mut fixture = CommandFixture::with_server().await;
    let mut _bouncer = None;
    if DATABASE == crate::support::Database::Postgres {
        let bouncer = PgBouncer::start(fixture.server().expect("PostgreSQL has one"));
        // The pooler passes no search_path on.
        fixture.set_url(bouncer.url());
        run(&fixture.db, &["ls"]).await.expect(0);
        _bouncer = Some(bouncer);
    }
    let script = format!("{OBEDIENT}; exit 7");
    let first = fixture.start(&["--ttl", "9", "a"], &script).up().await;
    let waiter = fixture.start(&["--ttl", "9", "a"], OBEDIENT);
    waiter.stderr.shows("waiting for").await;
    let locks = TestDatabase::at(fixture.url().to_owned()).of_the_command().locks().await;
    renewed_twice(&locks, "a").await;
    assert!(waiter.stdout.text().is_empty());
    first.order("go");
    first.end().await.expect(7);
    let waiter = waiter.up().await;
    waiter.order("go");
    waiter.end().await.expect(0);
    assert_eq!(fixture.sqlock(&["run", "-n", "a", "--", "true"]).status().await.expect("sqlock").code(), Some(0));
}

#[tokio::test]
async fn waiter_gets_the_name_after_database_restart() {
    let mut fixture = CommandFixture::with_server().await;
    let holder = fixture.start(&["--ttl", "120", "a"], OBEDIENT).up().await;
    let waiter = fixture.start(&["--ttl", "120", "a"], OBEDIENT);
    waiter.stderr.shows("waiting for").await;
    let before = fixture.row("a").await;
    fixture.crash().await;
    // The time is long enough for sqlock to notice.
    sleep(Duration::from_secs(2)).await;
    fixture.restart();
    fixture.row_when("a renewal", "a", |row| row.expires_at > before.expires_at).await;
    holder.order("go");
    holder.end().await.expect(0);
    let waiter = waiter.up().await;
    assert!(fixture.row("a").await.token > before.token);
    waiter.order("go");
    waiter.end().await.expect(0);
}
