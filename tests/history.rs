//! Tests of the history checker. Simulated histories of a correct lock must pass; then one promise
//! at a time is broken in them, and the checker must name it.

#![allow(clippy::expect_used, reason = "a test that cannot be set up must fail")]

#[path = "support/history.rs"]
mod history;

use std::fs::OpenOptions;
use std::io::Write;
use std::thread;
use std::time::Duration;

use history::{Audit, Event, History, Op, Outcome, Recorder, Residue, Rules, Violation};

const MS: u64 = 1_000_000;
const TTL: u64 = 1_000 * MS;
const MARGIN: u64 = 50 * MS;
const SEEDS: std::ops::Range<u64> = 1..201;
const STRICT: Rules = Rules { client_exclusion: true, liveness: Some(Duration::from_millis(500)) };

#[test]
fn correct_histories_are_accepted() {
    for seed in SEEDS {
        simulated(seed).assert_clean(&STRICT);
    }
}

#[test]
fn simulation_covers_every_operation_and_outcome() {
    let all: Vec<Event> = SEEDS.flat_map(|seed| simulated(seed).events).collect();
    let met = |op, outcome| all.iter().filter(|e| e.op == op && e.outcome == outcome).count();
    for op in [Op::Acquire, Op::Release, Op::FencedCommit] {
        assert!(met(op, Outcome::Ok) > 100, "{op:?}");
        assert!(met(op, Outcome::Refused) > 100, "{op:?}");
        assert!(met(op, Outcome::Unknown) > 100, "{op:?}");
    }
    for op in [Op::Renew, Op::FencedBegin] {
        assert!(met(op, Outcome::Ok) > 100 && met(op, Outcome::Refused) > 100, "{op:?}");
    }
    assert!(met(Op::Acquire, Outcome::Late) > 100);
    assert!(met(Op::Held, Outcome::Ok) > 100 && met(Op::Lost, Outcome::Ok) > 100);
}

#[test]
fn token_below_an_earlier_one_is_found() {
    each_is_found(
        |history, rng| {
            let (earlier, later) = two_grants(history, rng)?;
            retoken(history, &later, earlier.token.map(|token| token - 1));
            Some(())
        },
        |violation| matches!(violation, Violation::TokenWentBack(..)),
    );
}

#[test]
fn swapped_tokens_of_two_grants_are_found() {
    each_is_found(
        |history, rng| {
            let (earlier, later) = two_grants(history, rng)?;
            retoken(history, &earlier, later.token);
            retoken(history, &later, earlier.token);
            Some(())
        },
        |violation| matches!(violation, Violation::TokenWentBack(..)),
    );
}

#[test]
fn token_of_two_owners_is_found() {
    each_is_found(
        |history, rng| {
            let (earlier, later) = two_grants(history, rng)?;
            retoken(history, &later, earlier.token);
            Some(())
        },
        |violation| matches!(violation, Violation::TokenOfTwoOwners(..)),
    );
}

#[test]
fn token_reused_after_last_release_is_found() {
    each_is_found(
        |history, rng| {
            let (grant, release) = rng.pick(&plain_holdings(history))?.clone();
            let (invoke_ns, return_ns) = (release.return_ns + 1, release.return_ns + 2);
            let deadline_ns = Some(return_ns + TTL);
            history.events.push(Event { invoke_ns, return_ns, deadline_ns, ..grant });
            Some(())
        },
        |violation| matches!(violation, Violation::TokenReused(..)),
    );
}

#[test]
fn stale_commit_after_the_takeover_is_found() {
    each_is_found(
        |history, rng| {
            let (earlier, later) = two_grants(history, rng)?;
            let (old, new) = (earlier.token?, later.token?);
            let last = history.audit.last().map_or(0, |row| row.seq);
            for (token, seq) in [(new, last + 1), (old, last + 2)] {
                let (name, proc) = (earlier.name.clone(), earlier.proc.clone());
                history.audit.push(Audit { seq, name, token, proc });
            }
            Some(())
        },
        |violation| matches!(violation, Violation::StaleWrite(..)),
    );
}

#[test]
fn commits_in_wrong_order_are_found() {
    each_is_found(
        |history, rng| {
            let first = rng.pick(&history.audit)?.clone();
            let differs = |row: &&Audit| row.name == first.name && row.token != first.token;
            let others: Vec<Audit> = history.audit.iter().filter(differs).cloned().collect();
            let second = rng.pick(&others)?;
            for row in &mut history.audit {
                row.seq = match row.seq {
                    seq if seq == first.seq => second.seq,
                    seq if seq == second.seq => first.seq,
                    seq => seq,
                };
            }
            Some(())
        },
        |violation| matches!(violation, Violation::StaleWrite(..)),
    );
}

#[test]
fn success_under_stale_token_is_found_without_audit() {
    for op in [Op::FencedBegin, Op::FencedCommit, Op::Renew, Op::Release] {
        each_is_found(
            |history, rng| {
                let (earlier, later) = two_grants(history, rng)?;
                let (invoke_ns, return_ns) = (later.return_ns + 1, later.return_ns + 2);
                history.events.push(Event { invoke_ns, return_ns, op, ..earlier });
                Some(())
            },
            |violation| matches!(violation, Violation::SuccessAfterTakeover(..)),
        );
    }
}

#[test]
fn overlapping_holders_are_found() {
    each_is_found(overlap, |violation| matches!(violation, Violation::Overlap(..)));
}

#[test]
fn overlapping_holders_are_tolerated_without_client_exclusion() {
    let tolerant = Rules { client_exclusion: false, ..STRICT };
    for seed in SEEDS {
        let (mut history, mut rng) = (simulated(seed), Rng::new(seed));
        let _ = overlap(&mut history, &mut rng);
        let found = history.check(&tolerant);
        assert!(!found.iter().any(|violation| matches!(violation, Violation::Overlap(..))));
    }
}

#[test]
fn reentrant_holder_holds_until_last_release() {
    let events = vec![
        ok(Op::Acquire, "o1", 1, 0, 10),
        ok(Op::Acquire, "o1", 1, 20, 30),
        ok(Op::Release, "o1", 1, 40, 50),
        ok(Op::Acquire, "o2", 2, 60, 70),
        ok(Op::Release, "o1", 1, 80, 90),
    ];
    let found = History { events, ..History::default() }.check(&STRICT);
    let overlap = |violation: &Violation| matches!(violation, Violation::Overlap(..));
    assert!(found.iter().any(overlap), "{found:?}");
}

#[test]
fn late_grant_treated_as_ok_is_found() {
    each_is_found(
        |history, _| {
            let mut events = history.events.iter_mut();
            events.find(|e| e.outcome == Outcome::Late)?.outcome = Outcome::Ok;
            Some(())
        },
        |violation| matches!(violation, Violation::LateGrant(..)),
    );
}

#[test]
fn late_renewal_treated_as_ok_is_found() {
    each_is_found(
        |history, _| {
            let mut events = history.events.iter_mut();
            let renewal = events.find(|e| e.op == Op::Renew && e.outcome == Outcome::Ok)?;
            renewal.deadline_ns = Some(renewal.return_ns);
            Some(())
        },
        |violation| matches!(violation, Violation::LateGrant(..)),
    );
}

#[test]
fn lost_update_is_found() {
    each_is_found(
        |history, _| {
            *history.counters.values_mut().find(|counter| **counter > 0)? -= 1;
            Some(())
        },
        |violation| matches!(violation, Violation::LostUpdate(..)),
    );
}

#[test]
fn lost_update_is_found_without_an_audit() {
    each_is_found(
        |history, _| {
            history.audit.clear();
            let committed =
                history.events.iter().filter(|e| e.name == "a" && e.op == Op::FencedCommit && e.outcome == Outcome::Ok);
            let too_few = (committed.count() as u64).checked_sub(1)?;
            history.counters.insert("a".into(), too_few);
            Some(())
        },
        |violation| matches!(violation, Violation::LostUpdate(..)),
    );
}

#[test]
fn uncommitted_write_is_found() {
    each_is_found(
        |history, _| {
            let begun = |e: &&Event| e.name == "a" && e.op == Op::FencedBegin;
            let too_many = 1 + history.events.iter().filter(begun).count() as u64;
            history.counters.insert("a".into(), too_many);
            Some(())
        },
        |violation| matches!(violation, Violation::PhantomUpdate(..)),
    );
}

#[test]
fn counted_rolled_back_commit_is_found() {
    let mut rolled_back = ok(Op::FencedCommit, "o1", 1, 40, 50);
    rolled_back.outcome = Outcome::Refused;
    let grant = ok(Op::Acquire, "o1", 1, 0, 10);
    let events = vec![grant, ok(Op::FencedBegin, "o1", 1, 20, 30), rolled_back];
    let counters = [("a".to_owned(), 1)].into();
    let found = History { events, counters, ..History::default() }.check(&STRICT);
    assert_eq!(found, [Violation::PhantomUpdate("a".into(), 1, 0)]);
}

#[test]
fn success_after_loss_is_found() {
    for op in [Op::FencedBegin, Op::FencedCommit, Op::Renew, Op::Release, Op::Held] {
        each_is_found(
            |history, rng| {
                let lost = history.events.iter().find(|e| e.op == Op::Lost)?.clone();
                // The transaction that it fenced in time may still commit: that one is used up.
                history.events.retain(|e| e.op != Op::FencedBegin || e.owner != lost.owner);
                let invoke_ns = lost.return_ns + 1 + rng.below(10 * MS);
                let deadline_ns = Some(invoke_ns + TTL);
                let return_ns = invoke_ns + 1;
                history.events.push(Event { invoke_ns, return_ns, op, deadline_ns, ..lost });
                Some(())
            },
            |violation| matches!(violation, Violation::SuccessAfterLost(..)),
        );
    }
}

#[test]
fn lease_held_past_its_deadline_is_found() {
    each_is_found(
        |history, rng| {
            let mut events = history.events.iter();
            let held = events.find(|e| e.op == Op::Held && e.outcome == Outcome::Ok)?.clone();
            let same = history.events.iter().filter(|e| e.owner == held.owner);
            let deadline = same.filter_map(|e| e.deadline_ns).max().unwrap_or(0);
            let invoke_ns = deadline + rng.below(100 * MS);
            history.events.push(Event { invoke_ns, return_ns: invoke_ns + 1, ..held });
            Some(())
        },
        |violation| matches!(violation, Violation::HeldPastDeadline(..)),
    );
}

#[test]
fn waiter_starved_before_free_name_is_found() {
    each_is_found(
        |history, rng| {
            let end = history.events.iter().map(|e| e.return_ns.max(e.deadline_ns.unwrap_or(0)));
            let (end, other) = (end.max()?, rng.pick(&history.events)?.clone());
            let patient = Event {
                invoke_ns: end - rng.below(TTL),
                return_ns: end + 501 * MS,
                op: Op::Acquire,
                outcome: Outcome::Refused,
                token: None,
                ..other
            };
            history.events.push(patient);
            Some(())
        },
        |violation| matches!(violation, Violation::Starved(..)),
    );
}

#[test]
fn waiter_granted_too_late_is_found() {
    each_is_found(
        |history, rng| {
            let (grant, _) = rng.pick(&plain_holdings(history))?.clone();
            // The grant and all that is asked for after it come ten seconds later.
            for event in history.events.iter_mut().filter(|e| e.name == grant.name) {
                let follows = event.invoke_ns >= grant.return_ns;
                if follows || *event == grant {
                    event.invoke_ns += if follows { 10_000 * MS } else { 0 };
                    event.return_ns += 10_000 * MS;
                    event.deadline_ns = event.deadline_ns.map(|deadline| deadline + 10_000 * MS);
                }
            }
            Some(())
        },
        |violation| matches!(violation, Violation::Starved(..)),
    );
}

#[test]
fn late_loss_does_not_excuse_starvation() {
    let events =
        vec![ok(Op::Acquire, "o1", 1, 0, 10), ok(Op::Acquire, "o2", 2, 20, 5_000), ok(Op::Lost, "o1", 1, 20, 6_000)];
    let found = History { events, ..History::default() }.check(&STRICT);
    assert!(matches!(found[..], [Violation::Starved(..)]), "{found:?}");
}

#[test]
fn residue_is_found() {
    for (live_leases, open_transactions) in [(1, 0), (0, 1)] {
        let mut history = simulated(1);
        history.residue = Residue { live_leases, open_transactions };
        assert_eq!(history.check(&STRICT), [Violation::LeftBehind(history.residue)]);
    }
}

#[test]
fn success_without_token_or_deadline_is_found() {
    for op in [Op::Acquire, Op::Renew, Op::Held] {
        for (token, deadline_ns) in [(None, Some(50 * MS)), (Some(1), None)] {
            let event = Event { token, deadline_ns, ..ok(op, "o1", 1, 0, 10) };
            let incomplete = Violation::Incomplete(event.clone());
            let history = History { events: vec![event], ..History::default() };
            assert!(history.check(&STRICT).contains(&incomplete), "{incomplete}");
        }
    }
}

#[test]
#[should_panic(expected = "proves nothing")]
fn history_without_a_grant_proves_nothing() {
    History::default().assert_clean(&STRICT);
}

/// On small random histories, the sweeps must find the same violations as a comparison of all
/// pairs.
#[test]
fn sweeps_agree_with_pairwise_comparison() {
    let bound = 5;
    let rules = Rules { client_exclusion: true, liveness: Some(Duration::from_nanos(bound)) };
    let mut outcomes = [[0; 2]; 3];
    for seed in 1..3_001 {
        let events = nonsense(&mut Rng::new(seed));
        let pairs = || events.iter().flat_map(|a| events.iter().map(move |b| (a, b)));
        let went_back = pairs().any(|(a, b)| a.return_ns < b.invoke_ns && a.token > b.token);
        let overlap = pairs().any(|(a, b)| {
            let shared_from = a.return_ns.max(b.return_ns);
            a.owner != b.owner && Some(shared_from) < a.deadline_ns.min(b.deadline_ns)
        });
        let taken = |at: u64| events.iter().any(|e| e.return_ns <= at && Some(at) < e.deadline_ns);
        let starved = events.iter().any(|e| {
            let cells: Vec<bool> = (e.invoke_ns..e.return_ns).map(taken).collect();
            cells.split(|taken| *taken).any(|free| free.len() as u64 > bound)
        });
        let history = History { events, ..History::default() };
        let found = history.check(&rules);
        let found = [
            found.iter().any(|v| matches!(v, Violation::TokenWentBack(..))),
            found.iter().any(|v| matches!(v, Violation::Overlap(..))),
            found.iter().any(|v| matches!(v, Violation::Starved(..))),
        ];
        assert_eq!(found, [went_back, overlap, starved], "seed {seed}: {history:#?}");
        for (count, found) in outcomes.iter_mut().zip(found) {
            count[usize::from(found)] += 1;
        }
    }
    assert!(outcomes.as_flattened().iter().all(|count| *count > 100), "{outcomes:?}");
}

#[test]
fn recorded_events_are_read_without_torn_line() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut expected = simulated(7).events;
    thread::scope(|scope| {
        for proc in ["p0", "p1", "p2", "p3"] {
            let mine: Vec<&Event> = expected.iter().filter(|e| e.proc == proc).collect();
            let recorder = Recorder::create(dir.path(), proc);
            scope.spawn(move || mine.into_iter().for_each(|event| recorder.record(event)));
        }
    });
    let mut torn = OpenOptions::new().append(true).open(dir.path().join("p1.jsonl")).expect("p1");
    torn.write_all(br#"{"proc":"p1","invoke_ns":12"#).expect("half a line");
    let mut read = history::read_dir(dir.path());
    expected.sort();
    read.sort();
    assert_eq!(read, expected);
}

#[test]
#[should_panic(expected = "p0.jsonl")]
fn broken_line_in_the_middle_is_reported() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(dir.path().join("p0.jsonl"), "{\"proc\":\n").expect("a broken line");
    history::read_dir(dir.path());
}

#[test]
fn violation_message_names_process_operation_and_time() {
    let event = Event {
        token: Some(5),
        deadline_ns: Some(3_000 * MS),
        ..event("p1", Op::Acquire, "job", "o7", 1_000 * MS, 1_500 * MS)
    };
    let answer = Violation::LateGrant(event).to_string();
    let expected = "1s .. 1.5s p1: Acquire \"job\" by o7, token 5: Ok until 3s";
    assert!(answer.ends_with(expected), "{answer}");
}

#[test]
fn boot_clock_moves_forward() {
    let before = history::boot_ns();
    thread::sleep(Duration::from_millis(2));
    assert!(history::boot_ns() - before >= 2 * MS);
}

/// Breaks the history of each seed, and demands that the checker names the fault in every one.
fn each_is_found(break_it: impl Fn(&mut History, &mut Rng) -> Option<()>, is_named: impl Fn(&Violation) -> bool) {
    let mut broken = 0;
    for seed in SEEDS {
        let (mut history, mut rng) = (simulated(seed), Rng::new(seed));
        if break_it(&mut history, &mut rng).is_some() {
            broken += 1;
            let found = history.check(&STRICT);
            assert!(found.iter().any(&is_named), "seed {seed}, found instead: {found:#?}");
        }
    }
    assert!(broken >= 25, "only {broken} histories could be broken");
}

fn grants(history: &History) -> impl Iterator<Item = &Event> {
    history.events.iter().filter(|e| e.op == Op::Acquire && e.outcome == Outcome::Ok)
}

/// Two grants of one name to different owners, the second asked for after the first had come.
fn two_grants(history: &History, rng: &mut Rng) -> Option<(Event, Event)> {
    let all: Vec<&Event> = grants(history).collect();
    let first = *rng.pick(&all)?;
    let follows = |e: &&&Event| e.name == first.name && e.owner != first.owner && first.before(e);
    let later: Vec<&Event> = all.iter().filter(follows).copied().collect();
    Some((first.clone(), (*rng.pick(&later)?).clone()))
}

/// The grant and the release of each holding that has one of both and time in between.
fn plain_holdings(history: &History) -> Vec<(Event, Event)> {
    let whole = grants(history).filter_map(|grant| {
        let same = history.events.iter().filter(|e| e.owner == grant.owner);
        let acquired = same.clone().filter(|e| e.op == Op::Acquire).count();
        let mut releases = same.filter(|e| e.op == Op::Release && e.outcome == Outcome::Ok);
        let release = releases.find(|e| e.invoke_ns > grant.return_ns && acquired == 1)?;
        Some((grant.clone(), release.clone()))
    });
    whole.collect()
}

/// Moves a whole holding back in time, so that it begins inside another.
fn overlap(history: &mut History, rng: &mut Rng) -> Option<()> {
    let mut all = plain_holdings(history);
    let (first, release) = rng.pick(&all)?.clone();
    all.retain(|(other, _)| other.name == first.name && first.before(other));
    let (second, _) = rng.pick(&all)?;
    let begins = first.return_ns + rng.below(release.invoke_ns - first.return_ns);
    let back = second.return_ns - begins;
    let same = history.events.iter_mut().filter(|e| e.owner == second.owner);
    for event in same {
        event.invoke_ns -= back;
        event.return_ns -= back;
        event.deadline_ns = event.deadline_ns.map(|deadline| deadline - back);
    }
    Some(())
}

fn retoken(history: &mut History, grant: &Event, token: Option<u64>) {
    for event in history.events.iter_mut().filter(|e| e.owner == grant.owner) {
        event.token = event.token.and(token);
    }
}

fn event(proc: &str, op: Op, name: &str, owner: &str, invoke_ns: u64, return_ns: u64) -> Event {
    Event {
        proc: proc.into(),
        invoke_ns,
        return_ns,
        op,
        name: name.into(),
        owner: owner.into(),
        token: None,
        deadline_ns: None,
        outcome: Outcome::Ok,
    }
}

/// A success on the name "a"; milliseconds, with a deadline one TTL after the call.
fn ok(op: Op, owner: &str, token: u64, from: u64, to: u64) -> Event {
    let asked = matches!(op, Op::Acquire | Op::Renew | Op::Held);
    Event {
        token: Some(token),
        deadline_ns: asked.then_some(to * MS + TTL),
        ..event("p0", op, "a", owner, from * MS, to * MS)
    }
}

/// Grants at random times with random tokens, each token once.
fn nonsense(rng: &mut Rng) -> Vec<Event> {
    let mut tokens: Vec<u64> = (1..=2 + rng.below(5)).collect();
    let mut events = Vec::new();
    while !tokens.is_empty() {
        let token = tokens.swap_remove(rng.below(tokens.len() as u64) as usize);
        let invoke_ns = rng.below(60);
        let return_ns = invoke_ns + rng.below(12);
        let owner = format!("o{}", rng.below(4));
        events.push(Event {
            token: Some(token),
            deadline_ns: Some(return_ns + 1 + rng.below(12)),
            ..event("p0", Op::Acquire, "a", &owner, invoke_ns, return_ns)
        });
    }
    events
}

/// What four processes see of three names whose lock keeps its promises, while holders crash, sleep
/// past their deadline, lose replies and get them late.
fn simulated(seed: u64) -> History {
    let mut rng = Rng::new(seed);
    let mut history = History::default();
    let mut commits = Vec::new();
    for name in ["a", "b", "c"] {
        let start = 1_000_000 * MS + rng.below(TTL);
        let mut lock = Lock {
            name,
            rng: &mut rng,
            events: &mut history.events,
            commits: Vec::new(),
            free_at: start,
            waiting_since: start,
            token: 0,
        };
        for n in 0..12 {
            lock.next_holder(n);
        }
        history.counters.insert(name.into(), lock.commits.len() as u64);
        commits.append(&mut lock.commits);
    }
    commits.sort_by_key(|(at, _)| *at);
    let rows = (1..).zip(commits).map(|(seq, (_, row))| Audit { seq, ..row });
    history.audit = rows.collect();
    history
}

/// One name, as the database and its users know it.
struct Lock<'a> {
    name: &'static str,
    rng: &'a mut Rng,
    events: &'a mut Vec<Event>,
    commits: Vec<(u64, Audit)>,
    /// When the next one can be granted, and since when at most it has waited for that.
    free_at: u64,
    waiting_since: u64,
    token: u64,
}

/// One holding in progress: what its owner knows, and when the database lets it expire.
struct Holder {
    proc: String,
    owner: String,
    now: u64,
    deadline: u64,
    expiry: u64,
}

impl Lock<'_> {
    fn next_holder(&mut self, n: u64) {
        let granted = self.free_at + self.rng.below(100 * MS);
        let sent = granted - self.rng.below(2 * MS);
        let waits = self.rng.below(800 * MS);
        let invoked = sent.min(self.waiting_since.max(sent - waits));
        self.token = (self.token + 1).max(granted / 1_000);
        let mut holder = Holder {
            proc: format!("p{}", self.rng.below(4)),
            owner: format!("{}{n}", self.name),
            now: invoked,
            deadline: sent + TTL - MARGIN,
            expiry: granted + TTL,
        };
        if self.rng.one_in(8) {
            let returned = sent + TTL + self.rng.below(TTL);
            let outcome = self.rng.either(Outcome::Late, Outcome::Unknown);
            self.record(&mut holder, Op::Acquire, outcome, returned - invoked);
            (self.free_at, self.waiting_since) = (holder.expiry, invoked);
            return;
        }
        let reply = granted + 1 + self.rng.below(20 * MS);
        self.record(&mut holder, Op::Acquire, Outcome::Ok, reply - invoked);
        self.waiting_since = reply;
        let mut entered = 1;
        for _ in 0..self.rng.below(6) {
            holder.now += self.rng.below(200 * MS);
            match self.rng.below(6) {
                0 => self.record(&mut holder, Op::Held, Outcome::Ok, 1_000),
                1 => self.refuse_another(&holder),
                2 | 3 => self.fenced(&mut holder),
                op => {
                    // Renewed, or entered once more by the same owner.
                    let op = if op == 4 && entered == 1 { Op::Acquire } else { Op::Renew };
                    entered += u64::from(op == Op::Acquire);
                    holder.deadline = holder.now + TTL - MARGIN;
                    let took = 1 + self.rng.below(20 * MS);
                    holder.expiry = holder.now + TTL + self.rng.below(took);
                    self.record(&mut holder, op, Outcome::Ok, took);
                }
            }
        }
        self.free_at = match self.rng.below(8) {
            0 => self.crash(&mut holder),
            1 | 2 => self.sleep(&mut holder),
            3 => self.unlocked(&mut holder),
            _ => (0..entered).map(|_| self.release(&mut holder)).last().unwrap_or(holder.expiry),
        };
    }

    /// Tries as another owner for a while, without success.
    fn refuse_another(&mut self, holder: &Holder) {
        let proc = format!("p{}", self.rng.below(4));
        let returned = holder.now + self.rng.below(300 * MS);
        let invoked = holder.now - self.rng.below(holder.now - self.waiting_since + 1);
        let refused = event(&proc, Op::Acquire, self.name, "another", invoked, returned);
        self.events.push(Event { outcome: Outcome::Refused, ..refused });
    }

    fn fenced(&mut self, holder: &mut Holder) {
        let took = self.rng.below(5 * MS);
        self.record(holder, Op::FencedBegin, Outcome::Ok, took);
        let outcome = match self.rng.below(8) {
            0 => Outcome::Unknown,
            1 => Outcome::Refused,
            _ => Outcome::Ok,
        };
        self.commit(holder, outcome);
    }

    fn commit(&mut self, holder: &mut Holder, outcome: Outcome) {
        let (at, took) = (holder.now, 1 + self.rng.below(10 * MS));
        self.record(holder, Op::FencedCommit, outcome, took);
        let landed = outcome == Outcome::Ok || outcome == Outcome::Unknown && self.rng.one_in(2);
        if landed {
            let at = at + self.rng.below(took);
            self.write(holder, at);
        }
    }

    fn write(&mut self, holder: &Holder, at: u64) {
        let (name, proc, token) = (self.name.into(), holder.proc.clone(), self.token);
        self.commits.push((at, Audit { seq: 0, name, token, proc }));
    }

    /// Killed, perhaps in the middle of a transaction, the end of which goes on no record.
    fn crash(&mut self, holder: &mut Holder) -> u64 {
        if self.rng.one_in(2) {
            self.record(holder, Op::FencedBegin, Outcome::Ok, MS);
            if self.rng.one_in(2) {
                self.write(holder, holder.now + MS);
            }
        }
        holder.expiry
    }

    /// Sleeps past its deadline, perhaps inside a fenced transaction, which keeps others out. When
    /// it wakes it notices the loss, and every call fails until it acquires again.
    fn sleep(&mut self, holder: &mut Holder) -> u64 {
        let fenced = self.rng.one_in(2);
        if fenced {
            self.record(holder, Op::FencedBegin, Outcome::Ok, MS);
        }
        let asleep = holder.deadline - holder.now + self.rng.below(2 * TTL);
        if self.rng.one_in(2) {
            // A last look at the lease was in time, but the answer arrives after the sleep.
            self.record(holder, Op::Held, Outcome::Ok, asleep);
        } else {
            holder.now += asleep;
        }
        self.told_of_the_loss(holder);
        let mut free_at = holder.expiry;
        if fenced {
            let outcome = self.rng.either(Outcome::Ok, Outcome::Refused);
            self.commit(holder, outcome);
            free_at = free_at.max(holder.now);
        }
        for op in [Op::Renew, Op::FencedBegin, Op::Held, Op::Release] {
            holder.now += self.rng.below(50 * MS);
            self.record(holder, op, Outcome::Refused, MS);
        }
        if self.rng.one_in(4) {
            // No other holder came in between: the row still has this owner and its token.
            holder.deadline = holder.now + TTL - MARGIN;
            self.record(holder, Op::Acquire, Outcome::Ok, 10 * MS);
            self.fenced(holder);
            self.record(holder, Op::Release, Outcome::Ok, MS);
            free_at = holder.now;
        }
        free_at
    }

    /// An operator frees the name, and the holder learns of it when it tries to renew.
    fn unlocked(&mut self, holder: &mut Holder) -> u64 {
        self.record(holder, Op::Renew, Outcome::Refused, MS);
        self.told_of_the_loss(holder);
        holder.now
    }

    /// A task has waited for the loss since the lease was granted.
    fn told_of_the_loss(&mut self, holder: &mut Holder) {
        let (since, now) = (self.waiting_since, holder.now);
        holder.now = since;
        self.record(holder, Op::Lost, Outcome::Ok, now - since);
        holder.now += MS;
    }

    /// Given back; or the guard was dropped, and the name is free at the latest when it expires.
    fn release(&mut self, holder: &mut Holder) -> u64 {
        let outcome = if self.rng.one_in(6) { Outcome::Unknown } else { Outcome::Ok };
        let (at, took) = (holder.now, 1 + self.rng.below(10 * MS));
        self.record(holder, Op::Release, outcome, took);
        match outcome {
            Outcome::Ok => at + self.rng.below(took),
            _ => self.rng.either(at, holder.expiry),
        }
    }

    fn record(&mut self, holder: &mut Holder, op: Op, outcome: Outcome, took: u64) {
        let (from, to) = (holder.now, holder.now + took);
        let known = op != Op::Acquire || outcome != Outcome::Unknown;
        let answer = matches!(op, Op::Acquire | Op::Renew | Op::Held) && outcome != Outcome::Refused;
        self.events.push(Event {
            token: known.then_some(self.token),
            deadline_ns: (known && answer).then_some(holder.deadline),
            outcome,
            ..event(&holder.proc, op, self.name, &holder.owner, from, to)
        });
        holder.now = to;
    }
}

/// xorshift64*: small, and the same on every machine.
struct Rng(u64);

impl Rng {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        rng.below(1);
        rng
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) % bound
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn either<T>(&mut self, one: T, other: T) -> T {
        if self.one_in(2) { one } else { other }
    }

    fn pick<'t, T>(&mut self, of: &'t [T]) -> Option<&'t T> {
        of.get(self.below(of.len().max(1) as u64) as usize)
    }
}
