//! Cases that the simulation, in which every store is quick or broken, does not reach.

mod with_store;

use std::collections::VecDeque;

use super::answer::LOCKED_ROW_PAUSE;
use super::apply_decision::LONGEST_DELAY;
use super::holding::EXTEND_AFTER;
use super::poll_interval::{POLL_FIRST, POLL_SOONEST};
use super::release::FENCED_AFTER;
use super::schedule::LONGEST_TIMEOUT;
use super::*;
use crate::clock::reliance;
use crate::error::Error;
use crate::protocol::timing::{GRANT_TTL, HEARTBEAT_INTERVAL};
use crate::protocol::{
    ChangeOutcome, Claim, ClientChange, CurrentHolder, EntryRow, EntryState, Granted, Holder, JoinOutcome, LeaseRow,
    Mode, Polled, Presence, Queue, Release, ReleaseOutcome, Response, WithdrawalOutcome,
};

const START: Moment = Moment::from_nanos(1_000_000_000);

fn engine() -> Engine {
    Engine::new(ClientId::from_u128(1), "test".into(), AcquisitionId::from_u128(1 << 32))
}

/// Returns an exclusive request of a new owner.
fn spec(name: &str, wait_mode: WaitMode) -> LeaseSpec {
    LeaseSpec {
        name: LockName::new(name).expect("a name"),
        owner: crate::owner::Owner::random(),
        reenters: false,
        mode: Mode::Exclusive,
        ttl: Duration::from_secs(10),
        is_renewed: true,
        hold_time: HoldTime::default(),
        label: "".into(),
        wait_mode,
    }
}

fn token(number: i64) -> FencingToken {
    FencingToken::new(number).expect("a token")
}

fn is_register(body: &Request) -> bool {
    matches!(body, Request::Register { .. })
}

fn is_acquire(body: &Request) -> bool {
    matches!(body, Request::Acquire(_))
}

fn is_join(body: &Request) -> bool {
    matches!(body, Request::Join(_))
}

fn is_enqueue(body: &Request) -> bool {
    matches!(body, Request::Enqueue(_))
}

fn is_extend(body: &Request) -> bool {
    matches!(body, Request::Extend(_))
}

fn is_release(body: &Request) -> bool {
    matches!(body, Request::Release(_))
}

/// Waits for a name for `length` while the store does not answer, on a machine that wakes the
/// engine much later. Returns the refusal.
fn refusal_of_wait(length: Duration) -> Refusal {
    let mut engine = engine();
    let spec = spec("a", WaitMode::Wait(Some(START + length)));
    let waiter = WaiterId(1);
    engine.handle(START, Input::Acquire { waiter, spec });
    let late = START + length + Duration::from_millis(400);
    let mut actions = engine.handle(late, Input::Tick);
    actions.extend(engine.handle(late + WITHDRAWN_LATEST, Input::Tick));
    let refusals = actions.into_iter().filter_map(|action| match action {
        Action::Refused { refusal, .. } => Some(refusal),
        _ => None,
    });
    refusals.last().expect("a refusal")
}

/// Longer than a round trip to a store that answers.
const SHORT_WAIT: Duration = Duration::from_millis(200);

/// Longer than any wait for a withdrawal.
const WITHDRAWN_LATEST: Duration = Duration::from_secs(1);

#[test]
fn short_wait_times_out_on_a_slow_machine() {
    assert!(matches!(refusal_of_wait(Duration::from_millis(50)), Refusal::Timeout));
}

/// A fixture with an unanswered waiter, a wait that has ended behind it, and a try that came later.
fn with_try_behind_unanswered_waiter() -> EngineFixture {
    let mut fixture = EngineFixture::new();
    let until = |time| WaitMode::Wait(Some(START + time));
    fixture.feed(Input::Acquire { waiter: WaiterId(1), spec: spec("a", WaitMode::Wait(None)) });
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec: spec("a", until(SHORT_WAIT)) });
    fixture.pass(SHORT_WAIT);
    fixture.pass(WITHDRAWN_LATEST);
    let spec = spec("a", WaitMode::Try(fixture.now + HEARTBEAT_INTERVAL));
    fixture.feed(Input::Acquire { waiter: WaiterId(3), spec });
    assert!(fixture.refusal_of(WaiterId(3)).is_none(), "{:?}", fixture.actions);
    fixture
}

/// Neither a try nor another wait learns from a waiter ahead that the name is held.
#[test]
fn callers_behind_unanswered_waiter_are_unanswered() {
    let mut fixture = with_try_behind_unanswered_waiter();
    fixture.pass(HEARTBEAT_INTERVAL);
    for waiter in [WaiterId(2), WaiterId(3)] {
        assert!(matches!(fixture.refusal_of(waiter), Some(Refusal::NoAnswer)), "{waiter:?}: {:?}", fixture.actions);
    }
}

/// A slow store is not an unreachable one.
#[test]
fn try_behind_slow_waiter_is_decided_by_its_answer() {
    let refusal_after = |held| {
        let mut fixture = with_try_behind_unanswered_waiter();
        fixture.answer(is_acquire, Response::Acquired(held));
        fixture.refusal_of(WaiterId(3)).cloned()
    };
    let held = CurrentHolder::Valid { owner: None, remaining: Duration::from_secs(10) };
    assert!(matches!(refusal_after(Err(held)), Some(Refusal::Taken)));
    assert!(matches!(refusal_after(Ok(token(1))), Some(Refusal::Taken)));
}

#[test]
fn try_behind_failed_waiter_fails_with_it() {
    let mut fixture = with_try_behind_unanswered_waiter();
    fixture.fail(is_acquire);
    assert!(matches!(fixture.refusal_of(WaiterId(3)), Some(Refusal::Failed(_))), "{:?}", fixture.actions);
}

#[test]
fn try_behind_cancelled_waiter_asks_the_store() {
    let mut fixture = with_try_behind_unanswered_waiter();
    fixture.feed(Input::Cancel { waiter: WaiterId(1) });
    let held = CurrentHolder::Valid { owner: None, remaining: Duration::from_secs(10) };
    fixture.answer(is_acquire, Response::Acquired(Err(held)));
    let is_withdrawal = |body: &Request| matches!(body, Request::Withdraw { .. });
    fixture.answer(is_withdrawal, Response::Withdrawn(WithdrawalOutcome::Gone { awaited: false }));
    fixture.answer(is_acquire, Response::Acquired(Ok(token(1))));
    let is_granted = |action: &Action| matches!(action, Action::Granted { waiter: WaiterId(3), .. });
    assert!(fixture.has_acted(is_granted), "{:?}", fixture.actions);
}

#[test]
fn long_wait_without_an_answer_is_unanswered() {
    assert!(matches!(refusal_of_wait(SHORT_WAIT), Refusal::NoAnswer));
}

/// The dialogue of an engine with a store whose answers the test gives.
struct EngineFixture {
    engine: Engine,
    now: Moment,
    /// The unanswered requests.
    open: Vec<(RequestId, Request)>,
    actions: Vec<Action>,
}

impl EngineFixture {
    fn new() -> Self {
        Self { engine: engine(), now: START, open: Vec::new(), actions: Vec::new() }
    }

    fn feed(&mut self, input: Input) {
        for action in self.engine.handle(self.now, input) {
            match action {
                Action::Send { request, body, .. } => self.open.push((request, Request::clone(&body))),
                action => self.actions.push(action),
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        self.feed(Input::Tick);
    }

    /// Answers the first open request of a kind, and returns it.
    fn answer(&mut self, is_meant: impl Fn(&Request) -> bool, response: Response) -> Request {
        self.answer_after(Duration::ZERO, is_meant, response)
    }

    /// Answers the first open request of a kind, which was sent a while ago, and returns it.
    fn answer_after(&mut self, time: Duration, is_meant: impl Fn(&Request) -> bool, response: Response) -> Request {
        let sent_at = self.now;
        self.pass(time);
        let open = self.open.iter().position(|(_, body)| is_meant(body));
        let (request, body) = self.open.remove(open.unwrap_or_else(|| panic!("not among {:?}", self.open)));
        let answer = Answer { sent_at, may_linger: false, is_repeated: false, result: Ok(response) };
        self.feed(Input::Answer { request, answer });
        body
    }

    /// Fails the first open request of a kind: the store does not answer it.
    fn fail(&mut self, is_meant: impl Fn(&Request) -> bool) {
        let open = self.open.iter().position(|(_, body)| is_meant(body));
        let (request, _) = self.open.remove(open.unwrap_or_else(|| panic!("not among {:?}", self.open)));
        let error = Error::Unavailable { attempted: "release", reason: "no answer".into(), source: None };
        let result = Err(SharedError(error.into()));
        self.feed(Input::Answer {
            request,
            answer: Answer { sent_at: self.now, may_linger: true, is_repeated: false, result },
        });
    }

    /// Acquires a free name with this token. Returns the claim and the lease.
    fn hold(&mut self, waiter: u64, spec: LeaseSpec, token: FencingToken) -> (Claim, LeaseId) {
        let waiter = WaiterId(waiter);
        self.feed(Input::Acquire { waiter, spec });
        let claim = match self.answer(is_acquire, Response::Acquired(Ok(token))) {
            Request::Acquire(claim) => claim,
            other => panic!("{other:?}"),
        };
        (claim, self.lease_of(waiter).expect("a lease"))
    }

    /// Returns the lease that a waiter was granted, if any.
    fn lease_of(&self, id: WaiterId) -> Option<LeaseId> {
        self.actions.iter().find_map(|action| match action {
            Action::Granted { waiter, grant } if *waiter == id => Some(grant.lease),
            _ => None,
        })
    }

    /// Returns why a waiter was refused. `None`: it was not.
    fn refusal_of(&self, id: WaiterId) -> Option<&Refusal> {
        self.actions.iter().find_map(|action| match action {
            Action::Refused { waiter, refusal } if *waiter == id => Some(refusal),
            _ => None,
        })
    }

    fn has_acted(&self, is_meant: impl Fn(&Action) -> bool) -> bool {
        self.actions.iter().any(is_meant)
    }
}

/// The release is requested between the look that finds a grant by another client and the
/// confirmation of the grant, which meets a locked row at first.
#[test]
fn request_before_a_confirmation_is_looked_up() {
    let mut fixture = EngineFixture::new();
    // The heartbeat renews another lease.
    let token = token(5);
    fixture.hold(1, spec("b", WaitMode::Wait(None)), token);
    fixture.actions.clear();
    let spec = spec("a", WaitMode::Wait(None));
    let name = spec.name.clone();
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec });
    let held = CurrentHolder::Valid { owner: None, remaining: Duration::from_secs(10) };
    let claim = match fixture.answer(is_acquire, Response::Acquired(Err(held))) {
        Request::Acquire(claim) => claim,
        other => panic!("{other:?}"),
    };
    fixture.answer(is_enqueue, Response::Enqueued(held));
    fixture.pass(POLL_FIRST);
    // The grant is about to end, so it must be confirmed.
    let polled = |asked| held_by(&claim, token, Duration::from_millis(500), asked);
    let is_poll = |body: &Request| matches!(body, Request::Poll { name: polled, .. } if *polled == name);
    fixture.answer(is_poll, polled(0));
    fixture.answer(is_extend, Response::Extended(ChangeOutcome::Locked));
    fixture.pass(HEARTBEAT_INTERVAL);
    fixture.answer(is_extend, Response::Extended(ChangeOutcome::Locked));
    fixture.answer(is_register, Response::Registered(1));
    fixture.pass(LOCKED_ROW_PAUSE);
    fixture.answer(is_extend, Response::Extended(ChangeOutcome::Done));
    assert!(fixture.has_acted(|action| matches!(action, Action::Granted { .. })), "{:?}", fixture.actions);
    fixture.answer(is_poll, polled(5));
    assert!(fixture.has_acted(|action| matches!(action, Action::ReleaseRequested { .. })), "{:?}", fixture.actions);
}

/// A notice comes with every beat, and each look is answered after the next beat.
#[test]
fn frequent_notices_do_not_end_a_lease() {
    let mut fixture = EngineFixture::new();
    let token = token(5);
    let (claim, _) = fixture.hold(1, spec("a", WaitMode::Wait(None)), token);
    fixture.answer_after(HEARTBEAT_INTERVAL, is_register, Response::Registered(1));
    for notice in 2..40 {
        fixture.pass(HEARTBEAT_INTERVAL);
        fixture.answer(|body| matches!(body, Request::Beat { .. }), Response::Beat(Some(notice)));
        fixture.answer(is_poll_of("a"), held_by(&claim, token, Duration::from_secs(9), 0));
    }
    assert!(!fixture.has_acted(|action| matches!(action, Action::Lost { .. })), "{:?}", fixture.actions);
}

/// The failed release may not have taken effect.
#[test]
fn failed_release_keeps_name_for_its_hold_time() {
    for closes in [false, true] {
        let mut fixture = EngineFixture::new();
        let hold_time = HoldTime { at_least: Duration::from_secs(30), at_most: None };
        let (_, lease) = fixture.hold(1, LeaseSpec { hold_time, ..spec("a", WaitMode::Wait(None)) }, token(5));
        fixture.feed(Input::Release { lease });
        if closes {
            fixture.feed(Input::Close);
        }
        fixture.fail(is_release);
        let is_failed = |action: &Action| matches!(action, Action::Released { verdict: Verdict::Failed(_), .. });
        assert!(fixture.has_acted(is_failed), "{:?}", fixture.actions);
        fixture.open.retain(|(_, body)| !is_register(body));
        assert!(fixture.open.is_empty(), "{:?}", fixture.open);
        fixture.pass(Duration::from_secs(10));
        fixture.open.retain(|(_, body)| !is_register(body));
        match &fixture.open[..] {
            [(_, Request::Release(release))] if !closes => assert_eq!(release.keep_for, Duration::from_secs(20)),
            open => assert!(closes && open.is_empty(), "{open:?}"),
        }
    }
}

/// A request for the lease may take effect late. Its withdrawal would free the name too early.
#[test]
fn kept_name_outlasts_a_lingering_request() {
    for closes in [false, true] {
        let mut fixture = EngineFixture::new();
        let hold_time = HoldTime { at_least: Duration::from_secs(30), at_most: None };
        fixture.feed(Input::Acquire {
            waiter: WaiterId(1),
            spec: LeaseSpec { hold_time, ..spec("a", WaitMode::Wait(None)) },
        });
        let (request, _) = fixture.open.remove(0);
        let result = Ok(Response::Acquired(Ok(token(5))));
        let answer = Answer { sent_at: fixture.now, may_linger: true, is_repeated: true, result };
        fixture.feed(Input::Answer { request, answer });
        let lease = fixture.lease_of(WaiterId(1)).expect("a lease");
        fixture.feed(Input::Release { lease });
        fixture.answer(is_release, Response::Released(ReleaseOutcome::Ended { awaited: false }));
        if closes {
            fixture.feed(Input::Close);
            assert!(fixture.has_acted(|action| matches!(action, Action::Closed { .. })), "{:?}", fixture.actions);
        }
        let withdraws =
            |fixture: &EngineFixture| fixture.open.iter().any(|(_, body)| matches!(body, Request::Withdraw { .. }));
        fixture.pass(Duration::from_secs(29));
        assert!(!withdraws(&fixture), "{:?}", fixture.open);
        fixture.pass(Duration::from_secs(1));
        assert_eq!(withdraws(&fixture), !closes, "{:?}", fixture.open);
    }
}

/// A lease that no heartbeat renews is released under a fence, which outlasts it.
#[test]
fn release_under_a_lasting_fence_is_repeated_slowly() {
    let mut fixture = EngineFixture::new();
    let spec = LeaseSpec { ttl: Duration::from_secs(2), is_renewed: false, ..spec("a", WaitMode::Wait(None)) };
    let (_, lease) = fixture.hold(1, spec, token(5));
    fixture.feed(Input::Release { lease });
    let mut releases = 0;
    for _ in 0..12_000 {
        if fixture.open.iter().any(|(_, body)| is_release(body)) {
            fixture.answer(is_release, Response::Released(ReleaseOutcome::Locked));
            releases += 1;
        }
        fixture.pass(Duration::from_millis(5));
    }
    assert!((60..100).contains(&releases), "{releases}");
}

/// Ends a lease after a second, and returns for how long its release keeps the name.
fn kept_after(end: impl FnOnce(&mut EngineFixture, LeaseId)) -> Duration {
    let mut fixture = EngineFixture::new();
    let hold_time = HoldTime { at_least: Duration::from_secs(30), at_most: Some(Duration::from_secs(2)) };
    let spec = LeaseSpec { hold_time, ..spec("a", WaitMode::Wait(None)) };
    let (_, lease) = fixture.hold(1, spec, token(5));
    fixture.pass(Duration::from_secs(1));
    end(&mut fixture, lease);
    let release = fixture.open.iter().find_map(|(_, body)| match body {
        Request::Release(release) => Some(release.keep_for),
        // The queue is read first.
        Request::Read { .. } => Some(Duration::ZERO),
        _ => None,
    });
    release.unwrap_or_else(|| panic!("not released: {:?}", fixture.open))
}

#[test]
fn name_is_kept_however_its_lease_ends() {
    let remainder = Duration::from_secs(29);
    assert_eq!(kept_after(|fixture, lease| fixture.feed(Input::Release { lease })), remainder);
    assert_eq!(kept_after(|fixture, _| fixture.feed(Input::Close)), remainder);
    // The lease ends at its `max_hold`.
    let second = Duration::from_secs(1);
    assert_eq!(kept_after(|fixture, _| fixture.pass(second)), remainder - second);
}

#[test]
fn name_of_undelivered_lease_is_not_kept() {
    assert_eq!(kept_after(|fixture, lease| fixture.feed(Input::Discard { lease })), Duration::ZERO);
}

/// The answer to a poll that this claim holds the name.
fn held_by(claim: &Claim, token: FencingToken, remaining: Duration, asked: i64) -> Response {
    let (holder, owner, client) = (Holder::Lease(claim.id), Some(claim.owner), Some(claim.client));
    let remaining = Some(remaining);
    let row = LeaseRow { holder, owner, client, token: token.get(), remaining, waiting: 0, lost: 0, asked };
    Response::Polled(Some(Polled { row, presences: vec![Presence::Holding { token, remaining }] }))
}

fn is_poll_of(name: &str) -> impl Fn(&Request) -> bool {
    move |body| matches!(body, Request::Poll { name: polled, .. } if polled.as_str() == name)
}

/// A change of a lease meets a locked row, and is repeated after growing pauses. A notice comes
/// during a long pause.
#[test]
fn notice_is_followed_while_a_change_pauses() {
    let mut fixture = EngineFixture::new();
    let token = token(5);
    let (claim, lease) = fixture.hold(1, spec("a", WaitMode::Wait(None)), token);
    fixture.feed(Input::Amend { lease, amendment: Amendment::Extend(Duration::from_secs(60)) });
    for pause in [50, 100, 200, 400, 250] {
        fixture.answer(is_extend, Response::Extended(ChangeOutcome::Locked));
        fixture.pass(Duration::from_millis(pause));
    }
    fixture.answer(is_register, Response::Registered(1));
    fixture.answer(is_poll_of("a"), held_by(&claim, token, Duration::from_secs(10), 5));
    assert!(fixture.has_acted(|action| matches!(action, Action::ReleaseRequested { .. })), "{:?}", fixture.actions);
}

/// The holder changes its lease in a transaction that the lease fences.
#[test]
fn change_under_a_lasting_lock_is_given_up() {
    for amendment in [Amendment::Extend(Duration::from_secs(60)), Amendment::Downgrade] {
        let mut fixture = EngineFixture::new();
        let token = token(5);
        let spec = LeaseSpec { ttl: Duration::from_secs(60), ..spec("a", WaitMode::Wait(None)) };
        let (_, lease) = fixture.hold(1, spec, token);
        // An earlier attempt of the acquisition may still arrive. It changes nothing.
        fixture.engine.names.values_mut().for_each(|state| state.holdings[0].lingers = true);
        fixture.feed(Input::Amend { lease, amendment });
        let start = fixture.now;
        let is_change = |body: &Request| matches!(body, Request::Extend(_) | Request::Downgrade { .. });
        let is_given_up = |action: &Action| matches!(action, Action::Amended { result: Err(NotAmended::Locked), .. });
        while !fixture.has_acted(is_given_up) {
            let locked = match amendment {
                Amendment::Downgrade => Response::Downgraded(ChangeOutcome::Locked),
                _ => Response::Extended(ChangeOutcome::Locked),
            };
            fixture.answer(is_change, locked);
            fixture.pass(Duration::from_secs(1));
            fixture.open.retain(|(_, body)| is_change(body));
        }
        let took = fixture.now.since(start);
        assert!((Duration::from_secs(10)..Duration::from_secs(13)).contains(&took), "{took:?}");
        assert!(fixture.open.is_empty(), "{:?}", fixture.open);
    }
}

/// The first attempt of a downgrade may arrive when the owner's other holding has ended.
#[test]
fn refused_conversion_that_may_follow_loses_the_lease() {
    let mut fixture = EngineFixture::new();
    let token = token(5);
    let (claim, lease) = fixture.hold(1, spec("a", WaitMode::Wait(None)), token);
    fixture.feed(Input::Amend { lease, amendment: Amendment::Downgrade });
    let sent = fixture.open.iter().position(|(_, body)| matches!(body, Request::Downgrade { .. }));
    let (request, _) = fixture.open.remove(sent.expect("a request"));
    let result = Ok(Response::Downgraded(ChangeOutcome::NotHeld));
    let answer = Answer { sent_at: fixture.now, may_linger: true, is_repeated: true, result };
    fixture.feed(Input::Answer { request, answer });
    fixture.answer(is_poll_of("a"), held_by(&claim, token, Duration::from_secs(10), 0));
    assert!(fixture.has_acted(|action| matches!(action, Action::Lost { .. })), "{:?}", fixture.actions);
}

/// A lease with a longer TTL enters a holding whose row is locked.
#[test]
fn ttl_raise_on_locked_row_is_repeated_later() {
    let mut fixture = EngineFixture::new();
    let short = LeaseSpec { reenters: true, ..spec("a", WaitMode::Wait(None)) };
    let long = LeaseSpec { ttl: Duration::from_secs(60), ..short.clone() };
    fixture.hold(1, short, token(5));
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec: long });
    for pause in [50, 100, 200] {
        fixture.answer(is_extend, Response::Extended(ChangeOutcome::Locked));
        fixture.pass(Duration::from_millis(pause - 1));
        assert!(!fixture.open.iter().any(|(_, body)| is_extend(body)), "repeated before {pause} ms");
        fixture.pass(Duration::from_millis(1));
    }
    fixture.answer(is_extend, Response::Extended(ChangeOutcome::Done));
}

/// A lease that is to be renewed enters a holding while its TTL is being raised for another one.
#[test]
fn wants_during_an_extension_are_sent_after_it() {
    let mut fixture = EngineFixture::new();
    let short = LeaseSpec { reenters: true, is_renewed: false, ..spec("a", WaitMode::Wait(None)) };
    let long = LeaseSpec { ttl: Duration::from_secs(60), ..short.clone() };
    let kept = LeaseSpec { is_renewed: true, ..long.clone() };
    fixture.hold(1, short, token(5));
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec: long });
    fixture.feed(Input::Acquire { waiter: WaiterId(3), spec: kept });
    for is_renewed in [false, true] {
        match fixture.answer(is_extend, Response::Extended(ChangeOutcome::Done)) {
            Request::Extend(sent) => assert_eq!(matches!(sent.client_change, ClientChange::Set(_)), is_renewed),
            other => panic!("{other:?}"),
        }
    }
    assert!(!fixture.open.iter().any(|(_, body)| is_extend(body)), "{:?}", fixture.open);
}

/// Two leases of a holding are released together while a fence has locked it.
#[test]
fn releases_under_a_fence_are_all_answered() {
    let mut fixture = EngineFixture::new();
    let spec = LeaseSpec { reenters: true, ..spec("a", WaitMode::Wait(None)) };
    let token = token(5);
    let (claim, _) = fixture.hold(1, spec.clone(), token);
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec });
    let grants = fixture.actions.iter().filter_map(|action| match action {
        Action::Granted { grant, .. } => Some(grant.lease),
        _ => None,
    });
    for lease in grants.collect::<Vec<_>>() {
        fixture.feed(Input::Release { lease });
    }
    fixture.answer(is_poll_of("a"), held_by(&claim, token, Duration::from_secs(10), 0));
    fixture.answer(is_release, Response::Released(ReleaseOutcome::Locked));
    fixture.pass(FENCED_AFTER);
    fixture.answer(is_release, Response::Released(ReleaseOutcome::Locked));
    let is_released = |action: &&Action| matches!(action, Action::Released { verdict: Verdict::Held, .. });
    assert_eq!(fixture.actions.iter().filter(is_released).count(), 2, "{:?}", fixture.actions);
}

/// A statement of another client has locked the row until its commit.
#[test]
fn release_behind_a_brief_lock_is_answered_when_it_has_taken_effect() {
    let mut fixture = EngineFixture::new();
    let (_, lease) = fixture.hold(1, spec("a", WaitMode::Wait(None)), token(5));
    fixture.feed(Input::Release { lease });
    let is_released = |action: &Action| matches!(action, Action::Released { verdict: Verdict::Held, .. });
    for _ in 0..4 {
        fixture.answer(is_release, Response::Released(ReleaseOutcome::Locked));
        fixture.pass(FENCED_AFTER / 5);
        assert!(!fixture.has_acted(is_released), "{:?}", fixture.actions);
    }
    fixture.answer(is_release, Response::Released(ReleaseOutcome::Ended { awaited: false }));
    assert!(fixture.has_acted(is_released), "{:?}", fixture.actions);
}

/// The first lease leaves while a look is in flight; the release of the last one is sent beside it.
#[test]
fn failed_look_after_failed_release_is_harmless() {
    let mut fixture = EngineFixture::new();
    let hold_time = HoldTime { at_least: Duration::from_secs(30), at_most: None };
    let spec = LeaseSpec { reenters: true, hold_time, ..spec("a", WaitMode::Wait(None)) };
    let (_, first) = fixture.hold(1, spec.clone(), token(5));
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec });
    let last = fixture.lease_of(WaiterId(2)).expect("a lease");
    fixture.feed(Input::Release { lease: first });
    fixture.feed(Input::Release { lease: last });
    fixture.fail(is_release);
    fixture.fail(is_poll_of("a"));
    let failed = |action: &&Action| matches!(action, Action::Released { verdict: Verdict::Failed(_), .. });
    assert_eq!(fixture.actions.iter().filter(failed).count(), 2, "{:?}", fixture.actions);
}

/// A reader joins the holding of its owner in another process, and the answer comes too late.
#[test]
fn late_join_leaves_the_mode_of_a_reader() {
    let mut fixture = EngineFixture::new();
    let reader = LeaseSpec { reenters: true, mode: Mode::READ, ..spec("a", WaitMode::Wait(None)) };
    let held = |owner| CurrentHolder::Valid { owner, remaining: Duration::from_secs(10) };
    let (owner, ttl) = (Some(reader.owner), reader.ttl);
    fixture.feed(Input::Acquire { waiter: WaiterId(1), spec: reader });
    fixture.answer(is_acquire, Response::Acquired(Err(held(owner))));
    fixture.answer_after(ttl, is_join, Response::Joined(JoinOutcome::Done(token(5))));
    assert!(fixture.lease_of(WaiterId(1)).is_none(), "{:?}", fixture.actions);
    let is_withdrawal = |body: &Request| matches!(body, Request::Withdraw { .. });
    fixture.answer(is_withdrawal, Response::Withdrawn(WithdrawalOutcome::Gone { awaited: false }));
    fixture.answer(is_join, Response::Joined(JoinOutcome::NotHeld));
    match fixture.answer(is_acquire, Response::Acquired(Ok(token(6)))) {
        Request::Acquire(claim) => assert_eq!(claim.mode, Mode::READ),
        other => panic!("{other:?}"),
    }
}

/// Two readers ask at once. The first one joins an exclusive holding of its owner, behind which the
/// second one waits.
#[test]
fn wait_behind_a_reader_that_joins_is_reported() {
    let mut fixture = EngineFixture::new();
    let reader = LeaseSpec { reenters: true, mode: Mode::READ, ..spec("a", WaitMode::Wait(None)) };
    let held = CurrentHolder::Valid { owner: Some(reader.owner), remaining: Duration::from_secs(10) };
    fixture.feed(Input::Acquire { waiter: WaiterId(1), spec: reader });
    fixture.answer(is_acquire, Response::Acquired(Err(held)));
    let second = LeaseSpec { mode: Mode::READ, ..spec("a", WaitMode::Wait(None)) };
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec: second });
    fixture.answer(is_join, Response::Joined(JoinOutcome::Done(token(5))));
    let is_reported = |action: &Action| matches!(action, Action::Waits { waiter: WaiterId(2) });
    assert!(fixture.has_acted(is_reported), "{:?}", fixture.actions);
}

/// A store that lags behind refuses the extension of a lease that another client granted.
#[test]
fn refused_extension_of_a_held_lease_is_repeated() {
    let mut fixture = notified_of_grant(2, Duration::from_secs(60));
    fixture.pass(EXTEND_AFTER);
    let name = LockName::new("a").expect("a name");
    let claim = fixture.engine.names[&name].holdings[0].claim.clone();
    for _ in 0..2 {
        fixture.answer(is_extend, Response::Extended(ChangeOutcome::NotHeld));
        fixture.answer(is_poll_of("a"), held_by(&claim, token(5), GRANT_TTL, 0));
        fixture.pass(EXTEND_AFTER);
    }
    assert!(fixture.open.iter().any(|(_, body)| is_extend(body)), "{:?}", fixture.open);
}

/// The release is answered after the holding would have ended without it.
#[test]
fn late_answer_to_a_release_decides_the_verdict() {
    let not_held = ReleaseOutcome::NotHeld { lost: 5, token: 6 };
    for (outcome, is_held) in [(ReleaseOutcome::Ended { awaited: false }, true), (not_held, false)] {
        let mut fixture = EngineFixture::new();
        let spec = spec("a", WaitMode::Wait(None));
        let ttl = spec.ttl;
        let (_, lease) = fixture.hold(1, spec, token(5));
        fixture.feed(Input::Release { lease });
        fixture.pass(2 * ttl);
        let is_verdict = |action: &&Action| matches!(action, Action::Released { .. } | Action::Lost { .. });
        assert!(!fixture.actions.iter().any(|action| is_verdict(&action)), "{:?}", fixture.actions);
        fixture.answer(is_release, Response::Released(outcome));
        let verdict = fixture.actions.iter().find(is_verdict);
        assert_eq!(matches!(verdict, Some(Action::Released { verdict: Verdict::Held, .. })), is_held, "{verdict:?}");
    }
}

/// The store says which tokens of the name were taken away last, and granted last. A repeated
/// release may have ended the holding itself.
#[test]
fn verdict_of_ended_holding_follows_from_its_name() {
    for (is_repeated, lost, latest, expected) in [
        (false, 5, 6, "Lost(Superseded)"),
        (true, 5, 6, "Lost(Superseded)"),
        (false, 0, 5, "Held"),
        (true, 0, 5, "Held"),
        (false, 7, 8, "Lost(Superseded)"),
        (true, 7, 8, "Unknown"),
        // The name was swept.
        (false, 0, 0, "Lost(Superseded)"),
        (true, 0, 0, "Unknown"),
    ] {
        let mut fixture = EngineFixture::new();
        let (_, lease) = fixture.hold(1, spec("a", WaitMode::Wait(None)), token(5));
        fixture.feed(Input::Release { lease });
        let (request, _) = fixture.open.remove(0);
        let result = Ok(Response::Released(ReleaseOutcome::NotHeld { lost, token: latest }));
        let answer = Answer { sent_at: fixture.now, may_linger: false, is_repeated, result };
        fixture.feed(Input::Answer { request, answer });
        let verdict = fixture.actions.iter().find_map(|action| match action {
            Action::Released { verdict, .. } => Some(format!("{verdict:?}")),
            _ => None,
        });
        assert_eq!(verdict.as_deref(), Some(expected), "{is_repeated} {lost} {latest}");
    }
}

/// The next heartbeat may be answered before the lease ends.
#[test]
fn lease_outlives_a_failed_heartbeat() {
    let mut fixture = EngineFixture::new();
    let token = token(5);
    let (claim, lease) = fixture.hold(1, spec("a", WaitMode::Wait(None)), token);
    fixture.pass(HEARTBEAT_INTERVAL);
    fixture.answer(is_register, Response::Registered(0));
    fixture.answer(is_poll_of("a"), held_by(&claim, token, claim.ttl, 0));
    let deadline = fixture.now + reliance(claim.ttl);
    fixture.pass(HEARTBEAT_INTERVAL);
    let (request, body) = fixture.open.remove(0);
    assert!(matches!(body, Request::Beat { .. }), "{body:?}");
    let result = Err(SharedError(Arc::new(Error::Closed)));
    fixture.feed(Input::Answer {
        request,
        answer: Answer { sent_at: fixture.now, may_linger: false, is_repeated: false, result },
    });
    let is_lost = |action: &Action| matches!(action, Action::Lost { cause: LossCause::Expired, .. });
    assert_eq!(fixture.engine.deadline(lease), Some(deadline));
    assert!(!fixture.has_acted(is_lost), "{:?}", fixture.actions);
    fixture.pass(deadline.since(fixture.now));
    assert!(fixture.has_acted(is_lost), "{:?}", fixture.actions);
}

/// A caller suspects that its lease was taken away, as a failed fence shows.
#[test]
fn suspected_loss_is_looked_up_at_once() {
    for is_lost in [false, true] {
        let mut fixture = EngineFixture::new();
        let token = token(5);
        let (claim, _) = fixture.hold(1, spec("a", WaitMode::Wait(None)), token);
        fixture.feed(Input::LookUp { name: claim.name.clone() });
        let held = held_by(&claim, token, claim.ttl, 0);
        fixture.answer(is_poll_of("a"), if is_lost { Response::Polled(None) } else { held });
        let reports = |action: &Action| matches!(action, Action::Lost { cause: LossCause::Superseded, .. });
        assert_eq!(fixture.has_acted(reports), is_lost, "{:?}", fixture.actions);
    }
}

/// The answer to a look was given before the second suspicion. No heartbeat shows the loss of a lease
/// without renewal.
#[test]
fn suspicion_during_a_look_needs_another_look() {
    let mut fixture = EngineFixture::new();
    let token = token(5);
    let (claim, _) = fixture.hold(1, LeaseSpec { is_renewed: false, ..spec("a", WaitMode::Wait(None)) }, token);
    let look_up = || Input::LookUp { name: claim.name.clone() };
    fixture.feed(look_up());
    fixture.feed(look_up());
    fixture.answer(is_poll_of("a"), held_by(&claim, token, claim.ttl, 0));
    fixture.answer(is_poll_of("a"), Response::Polled(None));
    assert!(fixture.has_acted(|action| matches!(action, Action::Lost { .. })), "{:?}", fixture.actions);
}

/// The beat that fails must leave time for another one before any lease ends.
#[test]
fn heartbeat_timeout_follows_the_shortest_ttl() {
    let mut fixture = EngineFixture::new();
    let token = token(5);
    let seconds = Duration::from_secs;
    assert_eq!(fixture.engine.heartbeat_timeout(), LONGEST_TIMEOUT, "without a lease");
    for (waiter, name, ttl, timeout) in [
        (1, "a", seconds(60), LONGEST_TIMEOUT),
        (2, "b", seconds(10), seconds(10) / 3),
        (3, "c", seconds(1), seconds(1) / 3),
        (4, "d", seconds(10), seconds(1) / 3),
    ] {
        fixture.hold(waiter, LeaseSpec { ttl, ..spec(name, WaitMode::Wait(None)) }, token);
        assert_eq!(fixture.engine.heartbeat_timeout(), timeout, "{name}");
    }
}

/// The store restarts before the first heartbeat of the client, and may have lost releases.
#[test]
fn releases_before_a_restart_are_looked_up() {
    for is_repeated in [false, true] {
        let mut fixture = EngineFixture::new();
        let token = token(5);
        let names: Vec<String> = (1..=20).map(|i| format!("name {i}")).collect();
        for (waiter, name) in (1..).zip(&names) {
            let (_, lease) = fixture.hold(waiter, spec(name, WaitMode::Wait(None)), token);
            fixture.feed(Input::Release { lease });
            let ended = Response::Released(ReleaseOutcome::Ended { awaited: false });
            fixture.answer(is_release, ended);
            // Without a lease, the client sends no heartbeat for minutes.
            fixture.pass(if waiter == 1 { Duration::from_secs(120) } else { Duration::ZERO });
        }
        fixture.feed(Input::Acquire { waiter: WaiterId(100), spec: spec("c", WaitMode::Wait(None)) });
        let (request, _) = fixture.open.remove(0);
        let result = Ok(Response::Acquired(Ok(token)));
        let answer = Answer { sent_at: fixture.now, may_linger: false, is_repeated, result };
        fixture.feed(Input::Answer { request, answer });
        fixture.pass(HEARTBEAT_INTERVAL);
        fixture.answer(is_register, Response::Registered(0));
        let reads = |fixture: &EngineFixture| {
            let is_read = |(_, body): &&(RequestId, Request)| matches!(body, Request::Read { .. });
            fixture.open.iter().filter(is_read).count()
        };
        // Many reads at once would delay other requests.
        assert_eq!(reads(&fixture), usize::from(is_repeated), "{:?}", fixture.open);
        fixture.pass(Duration::from_millis(names.len() as u64));
        assert_eq!(reads(&fixture), names.len() * usize::from(is_repeated), "{:?}", fixture.open);
    }
}

/// Waits for two names that another client holds, with entries in the store.
fn waits_for_two_names() -> EngineFixture {
    let fixture = with_two_waits(EngineFixture::new());
    assert!(fixture.open.is_empty(), "{:?}", fixture.open);
    fixture
}

fn with_two_waits(mut fixture: EngineFixture) -> EngineFixture {
    let held = CurrentHolder::Valid { owner: None, remaining: Duration::from_secs(10) };
    for (waiter, name) in [(WaiterId(1), "a"), (WaiterId(2), "b")] {
        fixture.feed(Input::Acquire { waiter, spec: spec(name, WaitMode::Wait(None)) });
        fixture.answer(is_acquire, Response::Acquired(Err(held)));
        fixture.answer(is_enqueue, Response::Enqueued(held));
    }
    fixture
}

#[test]
fn wait_behind_a_holder_is_reported_once() {
    let mut fixture = EngineFixture::new();
    let held = CurrentHolder::Valid { owner: None, remaining: Duration::from_secs(10) };
    fixture.feed(Input::Acquire { waiter: WaiterId(1), spec: spec("a", WaitMode::Wait(None)) });
    fixture.answer(is_acquire, Response::Acquired(Err(held)));
    fixture.answer(is_enqueue, Response::Enqueued(held));
    let is_report = |action: &&Action| matches!(action, Action::Waits { waiter: WaiterId(1) });
    assert_eq!(fixture.actions.iter().filter(is_report).count(), 1, "{:?}", fixture.actions);
}

/// The store answers no poll of the waiting entry.
#[test]
fn queued_waiter_without_an_answer_is_unanswered() {
    let mut fixture = EngineFixture::new();
    let length = Duration::from_secs(5);
    let held = CurrentHolder::Valid { owner: None, remaining: 2 * length };
    let spec = spec("a", WaitMode::Wait(Some(START + length)));
    fixture.feed(Input::Acquire { waiter: WaiterId(1), spec });
    fixture.answer(is_acquire, Response::Acquired(Err(held)));
    fixture.answer(is_enqueue, Response::Enqueued(held));
    fixture.pass(POLL_FIRST);
    assert!(fixture.open.iter().any(|(_, body)| is_poll_of("a")(body)), "{:?}", fixture.open);
    fixture.pass(length);
    let is_unanswered = |action: &Action| matches!(action, Action::Refused { refusal: Refusal::NoAnswer, .. });
    assert!(fixture.has_acted(is_unanswered), "{:?}", fixture.actions);
}

/// A try waits for its answer between the reader and the waiter that keeps the reader out.
#[test]
fn wait_behind_try_and_waiter_is_reported() {
    let mut fixture = waits_for_two_names();
    let tries = LeaseSpec { reenters: true, ..spec("a", WaitMode::Try(START + HEARTBEAT_INTERVAL)) };
    fixture.feed(Input::Acquire { waiter: WaiterId(3), spec: tries });
    let reads = LeaseSpec { mode: Mode::READ, ..spec("a", WaitMode::Wait(None)) };
    fixture.feed(Input::Acquire { waiter: WaiterId(4), spec: reads });
    let is_reported = |action: &Action| matches!(action, Action::Waits { waiter: WaiterId(4) });
    assert!(fixture.has_acted(is_reported), "{:?}", fixture.actions);
}

/// A lease that the client does not know keeps its waiters out as long as the client beats.
#[test]
fn polled_holding_of_no_caller_is_withdrawn() {
    let mut fixture = waits_for_two_names();
    let (holder, client) = (Holder::Lease(AcquisitionId::from_u128(9)), Some(ClientId::from_u128(1)));
    let row =
        LeaseRow { holder, owner: None, client, token: 5, remaining: Some(GRANT_TTL), waiting: 1, lost: 0, asked: 0 };
    fixture.feed(Input::Notified(Notification::AnyName));
    let polled = Polled { row, presences: vec![Presence::Waiting { ahead: 0 }] };
    fixture.answer(is_poll_of("a"), Response::Polled(Some(polled)));
    let is_meant = |body: &Request| matches!(body, Request::Withdraw { id, .. } if *id == AcquisitionId::from_u128(9));
    assert!(fixture.open.iter().any(|(_, body)| is_meant(body)), "{:?}", fixture.open);
}

/// The remaining time of the grant may be over before a release gets through.
#[test]
fn grant_found_late_is_extended_before_its_use() {
    let mut fixture = waits_for_two_names();
    fixture.pass(POLL_FIRST);
    let holder = fixture.open.iter().find_map(|(_, body)| match body {
        Request::Poll { ids, .. } if is_poll_of("a")(body) => Some(Holder::Lease(ids[0])),
        _ => None,
    });
    let (token, remaining) = (token(5), Some(GRANT_TTL / 3));
    let (holder, client) = (holder.expect("a poll"), Some(ClientId::from_u128(1)));
    let row = LeaseRow { holder, owner: None, client, token: 5, remaining, waiting: 0, lost: 0, asked: 0 };
    let presences = vec![Presence::Holding { token, remaining }];
    fixture.answer(is_poll_of("a"), Response::Polled(Some(Polled { row, presences })));
    let is_granted = |action: &Action| matches!(action, Action::Granted { .. });
    assert!(!fixture.has_acted(is_granted), "{:?}", fixture.actions);
    fixture.answer(is_extend, Response::Extended(ChangeOutcome::Done));
    assert!(fixture.has_acted(is_granted), "{:?}", fixture.actions);
}

/// Waits for two names, and is notified of the grant of one. The heartbeat was answered with two
/// notices, and the grant was made after `notice`.
fn notified_of_grant(notice: i64, ttl: Duration) -> EngineFixture {
    let mut fixture = EngineFixture::new();
    fixture.engine.set_can_notify(true);
    let mut fixture = with_two_waits(fixture);
    fixture.answer(is_register, Response::Registered(2));
    let name = LockName::new("a").expect("a name");
    let claim = &mut fixture.engine.names.get_mut(&name).expect("a wait").waiters[0].claim;
    claim.ttl = ttl;
    let id = claim.id;
    let granted = Granted { id, token: token(5) };
    fixture.feed(Input::Notified(Notification::Granted { name, granted, notice }));
    fixture
}

#[test]
fn notified_grant_needs_no_poll() {
    let fixture = notified_of_grant(2, 10 * GRANT_TTL);
    let is_granted = |action: &Action| matches!(action, Action::Granted { grant, .. } if grant.token.get() == 5);
    assert!(fixture.has_acted(is_granted), "{:?}", fixture.actions);
    assert!(fixture.open.is_empty(), "{:?}", fixture.open);
}

/// Any role can send a notification; the heartbeat renews a short TTL without an extension.
#[test]
fn notified_grant_of_a_short_ttl_is_checked() {
    let mut fixture = notified_of_grant(2, GRANT_TTL);
    fixture.pass(Duration::from_millis(200));
    fixture.answer(is_extend, Response::Extended(ChangeOutcome::NotHeld));
    fixture.answer(is_poll_of("a"), Response::Polled(None));
    assert!(fixture.has_acted(|action| matches!(action, Action::Lost { .. })), "{:?}", fixture.actions);
}

/// A later notice may say that the grant was taken away again.
#[test]
fn notified_grant_before_a_notice_is_polled() {
    let fixture = notified_of_grant(1, 10 * GRANT_TTL);
    let is_granted = |action: &Action| matches!(action, Action::Granted { .. });
    assert!(!fixture.has_acted(is_granted), "{:?}", fixture.actions);
    assert!(fixture.open.iter().any(|(_, body)| is_poll_of("a")(body)), "{:?}", fixture.open);
}

#[test]
fn notification_without_a_name_polls_all_names() {
    let mut fixture = waits_for_two_names();
    fixture.feed(Input::Notified(Notification::AnyName));
    let polls: Vec<_> =
        ["a", "b"].map(|name| fixture.open.iter().filter(|(_, body)| is_poll_of(name)(body)).count()).into();
    assert_eq!(polls, [1, 1]);
    // The next notification comes too soon.
    fixture.feed(Input::Notified(Notification::AnyName));
    assert_eq!(fixture.open.len(), 2);
}

#[test]
fn client_without_notifications_polls_soon() {
    let mut fixture = waits_for_two_names();
    fixture.pass(POLL_SOONEST);
    assert_eq!(fixture.open.len(), 2, "{:?}", fixture.open);
}

/// Clients that pass a name on as soon as a poll shows that it is theirs. Polls take no time.
#[test]
fn long_queue_is_as_fast_as_short_one() {
    for clients in [2, 8, 16, 128] {
        let mut now = Moment::default();
        let mut queue: VecDeque<_> = (0..clients).map(|i| (QueuePace::new(now), now + POLL_SOONEST * i)).collect();
        let (mut grants, mut polls) = (0, 0);
        let start = now;
        while grants < 1000 {
            let i = (0..queue.len()).min_by_key(|&i| queue[i].1).expect("a queue");
            now = queue[i].1;
            polls += 1;
            if i == 0 {
                grants += 1;
                queue.pop_front();
                queue.push_back((QueuePace::new(now), now + POLL_SOONEST));
            } else {
                let (pace, poll_at) = &mut queue[i];
                pace.on_polled(now, i as u32 - 1);
                *poll_at = now + pace.interval(now);
            }
        }
        let turn = now.since(start) / grants;
        assert!(turn < POLL_SOONEST * 2, "{clients} clients: {turn:?}");
        assert!(polls < 5 * grants, "{clients} clients: {polls} polls for {grants} grants");
    }
}

/// A fence keeps a lock on the row until the transaction ends, possibly after the shutdown.
#[test]
fn close_ends_while_a_row_stays_locked() {
    let mut fixture = EngineFixture::new();
    fixture.hold(1, spec("a", WaitMode::Wait(None)), token(5));
    fixture.feed(Input::Close);
    let closes = |action: &Action| matches!(action, Action::Closed { error: Some(_) });
    for _ in 0..100 {
        while let Some((request, body)) = fixture.open.pop() {
            let response = match body {
                Request::Release(_) => Response::Released(ReleaseOutcome::Locked),
                Request::Withdraw { .. } => Response::Withdrawn(WithdrawalOutcome::Locked),
                _ => Response::Registered(1),
            };
            let answer = Answer { sent_at: fixture.now, may_linger: false, is_repeated: false, result: Ok(response) };
            fixture.feed(Input::Answer { request, answer });
        }
        fixture.pass(Duration::from_millis(100));
    }
    assert!(fixture.has_acted(closes), "{:?}", fixture.actions);
}

/// The store knows nothing of a waiter that stood behind another one in this process.
#[test]
fn waiter_that_never_asked_leaves_without_a_statement() {
    let mut fixture = EngineFixture::new();
    for waiter in (1..=50).map(WaiterId) {
        fixture.feed(Input::Acquire { waiter, spec: spec("a", WaitMode::Wait(None)) });
    }
    for waiter in (2..=50).map(WaiterId) {
        fixture.feed(Input::Cancel { waiter });
    }
    let token = token(5);
    fixture.answer(is_acquire, Response::Acquired(Ok(token)));
    assert!(fixture.has_acted(|action| matches!(action, Action::Granted { .. })));
    let sent = fixture.open.iter().find(|(_, body)| matches!(body, Request::Withdraw { .. }));
    assert!(sent.is_none(), "{sent:?}");
}

/// The store answers nothing. It can know the first waiter only.
#[test]
fn waiters_behind_failed_request_leave_without_statement() {
    let mut fixture = EngineFixture::new();
    for waiter in (1..=50).map(WaiterId) {
        fixture.feed(Input::Acquire { waiter, spec: spec("a", WaitMode::Wait(None)) });
    }
    let (request, _) = fixture.open.remove(0);
    let error = Error::Unavailable { attempted: "acquire", reason: "cut off".into(), source: None };
    let answer =
        Answer { sent_at: fixture.now, may_linger: true, is_repeated: true, result: Err(SharedError(Arc::new(error))) };
    fixture.feed(Input::Answer { request, answer });
    let withdrawals = &fixture.engine.names.values().next().expect("the name").withdrawals;
    assert_eq!(withdrawals.len(), 1, "{withdrawals:?}");
}

/// Another claim may succeed, so the other waiters go on.
#[test]
fn error_about_one_name_ends_one_wait() {
    let mut fixture = EngineFixture::new();
    for waiter in [WaiterId(1), WaiterId(2)] {
        fixture.feed(Input::Acquire { waiter, spec: spec("a", WaitMode::Wait(None)) });
    }
    let (request, _) = fixture.open.remove(0);
    let source = sqlx::Error::Decode("not a number".into());
    let result = Err(SharedError(Arc::new(Error::Database { attempted: "acquire", source })));
    fixture.feed(Input::Answer {
        request,
        answer: Answer { sent_at: fixture.now, may_linger: false, is_repeated: false, result },
    });
    let refused = fixture.actions.iter().filter_map(|action| match action {
        Action::Refused { waiter, .. } => Some(*waiter),
        _ => None,
    });
    assert_eq!(refused.collect::<Vec<_>>(), [WaiterId(1)]);
}

/// A caller asks for another name, whose row cannot be read, again and again.
#[test]
fn error_about_one_name_delays_no_other_name() {
    let mut fixture = EngineFixture::new();
    fixture.hold(1, spec("b", WaitMode::Wait(None)), token(5));
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec: spec("a", WaitMode::Wait(None)) });
    let (request, _) = fixture.open.remove(0);
    let source = sqlx::Error::Decode("not a number".into());
    let error = Error::Database { attempted: "acquire", source };
    let result = Err(SharedError(Arc::new(error)));
    fixture.feed(Input::Answer {
        request,
        answer: Answer { sent_at: fixture.now, may_linger: false, is_repeated: false, result },
    });
    assert!(fixture.engine.is_steady(fixture.now));
}

/// A new client may have begun at the end of an interruption, in which the others could not beat.
#[test]
fn new_client_passes_over_silent_entries_later() {
    let mut fixture = EngineFixture::new();
    fixture.feed(Input::Acquire { waiter: WaiterId(1), spec: spec("a", WaitMode::Wait(None)) });
    let claim = match fixture.answer(is_acquire, Response::Acquired(Err(CurrentHolder::Vacant))) {
        Request::Acquire(claim) => claim,
        other => panic!("{other:?}"),
    };
    fixture.answer(is_enqueue, Response::Enqueued(CurrentHolder::Vacant));
    let own = EntryRow { id: claim.id, client: Some(claim.client), ..entry_of_another(Some(GRANT_TTL)) };
    let entries = vec![entry_of_another(None), own];
    fixture.answer(is_read, queue(Holder::Nobody, entries.clone()));
    assert!(!fixture.open.iter().any(|(_, body)| is_transition(body)), "{:?}", fixture.open);
    fixture.pass(HEARTBEAT_INTERVAL);
    fixture.answer(is_read, queue(Holder::Nobody, entries));
    assert!(fixture.open.iter().any(|(_, body)| is_transition(body)), "{:?}", fixture.open);
}

/// A read is limited to some entries, and all of them have expired.
#[test]
fn entries_behind_expired_ones_are_read_at_once() {
    let mut fixture = EngineFixture::new();
    fixture.feed(Input::Acquire { waiter: WaiterId(1), spec: spec("a", WaitMode::Wait(None)) });
    fixture.answer(is_acquire, Response::Acquired(Err(CurrentHolder::Vacant)));
    fixture.answer(is_enqueue, Response::Enqueued(CurrentHolder::Vacant));
    fixture.engine.gap_free_from = START;
    let Response::Read(Some(read)) = queue(Holder::Nobody, vec![entry_of_another(None)]) else { unreachable!() };
    fixture.answer(is_read, Response::Read(Some(Queue { is_cut_off: true, ..read })));
    fixture.answer(is_transition, Response::Transitioned(Some(Vec::new())));
    assert!(fixture.open.iter().any(|(_, body)| is_read(body)), "{:?}", fixture.open);
}

/// The name was swept, or the store has lost it.
#[test]
fn release_without_a_row_reads_it_once() {
    let mut fixture = EngineFixture::new();
    let (_, lease) = fixture.hold(1, spec("a", WaitMode::Wait(None)), token(5));
    fixture.engine.steady_at = START + HEARTBEAT_INTERVAL;
    fixture.feed(Input::Release { lease });
    fixture.answer(is_read, Response::Read(None));
    assert!(matches!(fixture.open[..], [(_, Request::Release(_))]), "{:?}", fixture.open);
}

/// A failover may lose the export of a lease that a waiter of the same client resumes.
#[test]
fn export_missed_by_store_is_repeated_while_resumed() {
    let mut engine = engine();
    let spec = spec("a", WaitMode::Wait(None));
    let (name, owner) = (spec.name.clone(), spec.owner);
    let token = FencingToken::new(5).expect("positive");
    let exported = Exported { id: AcquisitionId::from_u128(7), token };
    engine.handle(START, Input::Resume { waiter: WaiterId(1), spec, exported });
    let client = engine.heartbeat.client;
    let (holder, remaining) = (Holder::Lease(exported.id), Some(Duration::from_secs(10)));
    let row = LeaseRow {
        holder,
        owner: Some(owner),
        client: Some(client),
        token: 5,
        remaining,
        waiting: 0,
        lost: 0,
        asked: 0,
    };
    let state = engine.names.get_mut(&name).expect("resumed");
    state.withdraw_forgotten(START, client, &row, &[]);
    let detached: Vec<_> = state.detachments.iter().map(|detachment| (detachment.id, detachment.token)).collect();
    assert_eq!(detached, [(exported.id, token)]);
    assert!(state.withdrawals.is_empty(), "the lease stays");
}

/// Two clients take turns: the next request of the one that released meets the other as holder.
#[test]
fn client_that_handed_over_gets_entry_at_once() {
    let mut fixture = EngineFixture::new();
    let token = token(5);
    let (_, lease) = fixture.hold(1, spec("a", WaitMode::Wait(None)), token);
    fixture.feed(Input::Release { lease });
    let granted = Granted { id: AcquisitionId::from_u128(9), token: self::token(6) };
    fixture.answer(is_release, Response::Released(ReleaseOutcome::ToEntry(granted)));
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec: spec("a", WaitMode::Wait(None)) });
    let held = CurrentHolder::Valid { owner: None, remaining: Duration::from_secs(10) };
    fixture.answer(is_enqueue, Response::Enqueued(held));
    assert!(fixture.open.iter().all(|(_, body)| !matches!(body, Request::Acquire(_))), "{:?}", fixture.open);
}

/// A queue with these entries behind the holder of the row.
fn queue(holder: Holder, entries: Vec<EntryRow>) -> Response {
    queue_of(holder, None, None, entries)
}

/// As [`queue`], with the owner and the client of the row.
fn queue_of(
    holder: Holder,
    owner: Option<crate::owner::Owner>,
    client: Option<ClientId>,
    entries: Vec<EntryRow>,
) -> Response {
    let remaining = (holder != Holder::Nobody).then_some(Duration::from_secs(10));
    let row = LeaseRow { holder, owner, client, token: 5, remaining, waiting: 0, lost: 0, asked: 0 };
    Response::Read(Some(Queue { row, entries, is_cut_off: false }))
}

fn is_read(body: &Request) -> bool {
    matches!(body, Request::Read { .. })
}

fn is_transition(body: &Request) -> bool {
    matches!(body, Request::Transition(_))
}

/// Other clients change the name between each read and its transition.
#[test]
fn overtaken_try_pauses_before_its_next_read() {
    let mut fixture = EngineFixture::new();
    let until = START + Duration::from_secs(8);
    fixture.feed(Input::Acquire { waiter: WaiterId(1), spec: spec("a", WaitMode::Try(until)) });
    fixture.answer(is_acquire, Response::Acquired(Err(CurrentHolder::Unknown)));
    // The first repetition needs no pause.
    for _ in 0..2 {
        fixture.answer(is_read, queue(Holder::Nobody, Vec::new()));
        fixture.answer(is_transition, Response::Transitioned(None));
    }
    assert!(fixture.open.is_empty(), "{:?}", fixture.open);
    fixture.pass(Duration::from_millis(10));
    fixture.answer(is_read, queue(Holder::Nobody, Vec::new()));
}

/// The row of the holding that a try would join stays locked: the store answers at once.
#[test]
fn try_on_locked_row_is_not_unanswered() {
    let mut fixture = EngineFixture::new();
    let until = START + Duration::from_secs(8);
    let spec = LeaseSpec { reenters: true, ..spec("a", WaitMode::Try(until)) };
    let held = CurrentHolder::Valid { owner: Some(spec.owner), remaining: Duration::from_secs(10) };
    fixture.feed(Input::Acquire { waiter: WaiterId(1), spec });
    fixture.answer(is_acquire, Response::Acquired(Err(held)));
    while fixture.now < until {
        fixture.answer(|body| matches!(body, Request::Join(_)), Response::Joined(JoinOutcome::Locked));
        fixture.pass(LOCKED_ROW_PAUSE);
    }
    fixture.pass(WITHDRAWN_LATEST);
    let is_timeout = |action: &Action| matches!(action, Action::Refused { refusal: Refusal::Timeout, .. });
    assert!(fixture.has_acted(is_timeout), "{:?}", fixture.actions);
}

/// The release meets a locked row. Before its next attempt, a read shows that the waiter's owner holds
/// the name elsewhere. A waiter that then left its entry would queue, read and leave in a loop.
#[test]
fn waiter_stays_queued_during_an_unanswered_release() {
    let mut fixture = EngineFixture::new();
    let named = LeaseSpec { reenters: true, ..spec("a", WaitMode::Wait(None)) };
    let (held, lease) = fixture.hold(1, named.clone(), token(5));
    let reader = LeaseSpec { reenters: true, mode: Mode::READ, ..spec("a", WaitMode::Wait(None)) };
    let owner = Some(reader.owner);
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec: reader });
    fixture.feed(Input::Release { lease });
    let waiting = match fixture.answer(is_enqueue, Response::Enqueued(CurrentHolder::Unknown)) {
        Request::Enqueue(entries) => entries[0].claim.clone(),
        other => panic!("{other:?}"),
    };
    fixture.answer(is_release, Response::Released(ReleaseOutcome::Locked));
    let (mode, client) = (Mode::READ, Some(waiting.client));
    let entry = EntryRow { id: waiting.id, client, owner, mode, ..entry_of_another(Some(GRANT_TTL)) };
    let entries = vec![entry_of_another(Some(GRANT_TTL)), entry];
    fixture.answer(is_read, queue_of(Holder::Lease(held.id), Some(held.owner), client, entries.clone()));
    // The waiter's owner takes the name elsewhere, before the next attempt to release.
    fixture.feed(Input::Acquire { waiter: WaiterId(3), spec: LeaseSpec { mode: Mode::READ, ..named } });
    fixture.answer(is_join, Response::Joined(JoinOutcome::NotHeld));
    fixture.answer(is_enqueue, Response::Enqueued(CurrentHolder::Unknown));
    let elsewhere = Holder::Lease(AcquisitionId::from_u128(8));
    fixture.answer(is_read, queue_of(elsewhere, owner, Some(ClientId::from_u128(2)), entries));
    let queues_again = |body: &Request| match body {
        Request::Enqueue(entries) => entries.iter().any(|entry| Some(entry.claim.owner) == owner),
        _ => false,
    };
    assert!(!fixture.open.iter().any(|(_, body)| queues_again(body)), "{:?}", fixture.open);
}

/// An earlier attempt of the refused request takes effect after the answer.
#[test]
fn late_grant_of_a_refused_request_is_used() {
    let mut fixture = EngineFixture::new();
    let spec = LeaseSpec { reenters: true, ..spec("a", WaitMode::Try(START + Duration::from_secs(8))) };
    let owner = Some(spec.owner);
    fixture.feed(Input::Acquire { waiter: WaiterId(1), spec });
    let claim = match fixture.answer(is_acquire, Response::Acquired(Err(CurrentHolder::Unknown))) {
        Request::Acquire(claim) => claim,
        other => panic!("{other:?}"),
    };
    fixture.answer(is_read, queue_of(Holder::Lease(claim.id), owner, Some(claim.client), Vec::new()));
    assert!(fixture.has_acted(|action| matches!(action, Action::Granted { .. })), "{:?}", fixture.actions);
}

/// The first waiter has a named owner, which may hold the name elsewhere, but not beside this
/// client's lease.
#[test]
fn waiter_with_a_named_owner_keeps_its_place() {
    let mut fixture = EngineFixture::new();
    let token = |n| FencingToken::new(n).expect("a token");
    let (_, lease) = fixture.hold(1, spec("a", WaitMode::Wait(None)), token(5));
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec: spec("a", WaitMode::Wait(None)) });
    let named = LeaseSpec { reenters: true, label: "named".into(), ..spec("a", WaitMode::Wait(None)) };
    fixture.feed(Input::Acquire { waiter: WaiterId(3), spec: named });
    fixture.feed(Input::Acquire { waiter: WaiterId(4), spec: spec("a", WaitMode::Wait(None)) });
    fixture.feed(Input::Release { lease });
    fixture.answer(is_release, Response::Released(ReleaseOutcome::ToNext(token(6))));
    let next = fixture.actions.iter().find_map(|action| match action {
        Action::Granted { waiter: WaiterId(2), grant } => Some(grant.lease),
        _ => None,
    });
    fixture.feed(Input::Release { lease: next.expect("a lease") });
    fixture.answer(is_release, Response::Released(ReleaseOutcome::Awaited));
    let held = CurrentHolder::Valid { owner: None, remaining: Duration::from_secs(10) };
    let enqueued = match fixture.answer(is_enqueue, Response::Enqueued(held)) {
        Request::Enqueue(entries) => entries,
        other => panic!("{other:?}"),
    };
    assert_eq!(&*enqueued[0].claim.label, "named", "{enqueued:?}");
}

/// The waiting entry of another client. `None`: it has expired.
fn entry_of_another(remaining: Option<Duration>) -> EntryRow {
    EntryRow {
        id: AcquisitionId::from_u128(9),
        client: Some(ClientId::from_u128(2)),
        owner: Some(crate::owner::Owner::random()),
        is_renewed: true,
        mode: Mode::Exclusive,
        state: EntryState::Waiting,
        ttl: Duration::from_secs(60),
        arrived: 0,
        remaining,
    }
}

/// The store was slow, so the other client may have missed its heartbeats, too.
#[test]
fn entry_that_seems_dead_is_passed_over_later() {
    let mut fixture = EngineFixture::new();
    let spec = LeaseSpec { ttl: Duration::from_secs(60), ..spec("a", WaitMode::Wait(None)) };
    let (claim, lease) = fixture.hold(1, spec, token(5));
    fixture.feed(Input::Release { lease });
    fixture.answer_after(HEARTBEAT_INTERVAL, is_release, Response::Released(ReleaseOutcome::Awaited));
    fixture.answer(is_register, Response::Registered(0));
    let silent = entry_of_another(None);
    fixture.answer(is_read, queue(Holder::Lease(claim.id), vec![silent.clone()]));
    assert!(!fixture.open.iter().any(|(_, body)| is_transition(body)), "{:?}", fixture.open);
    fixture.pass(HEARTBEAT_INTERVAL);
    let live = EntryRow { remaining: Some(GRANT_TTL), ..silent };
    fixture.answer(is_read, queue(Holder::Lease(claim.id), vec![live]));
    assert!(fixture.open.iter().any(|(_, body)| is_transition(body)), "{:?}", fixture.open);
}

/// Each answer takes longer than a heartbeat, and the waiting entry of another client is dead.
#[test]
fn slow_store_delays_release_for_limited_time() {
    let mut fixture = EngineFixture::new();
    let spec = LeaseSpec { ttl: Duration::from_secs(60), ..spec("a", WaitMode::Wait(None)) };
    let (claim, lease) = fixture.hold(1, spec, token(5));
    let dead = entry_of_another(None);
    fixture.feed(Input::Release { lease });
    fixture.answer_after(LONGEST_DELAY, is_release, Response::Released(ReleaseOutcome::Awaited));
    let since = fixture.now;
    while !fixture.open.iter().any(|(_, body)| is_transition(body)) {
        assert!(fixture.now.since(since) < 3 * LONGEST_DELAY, "{:?}", fixture.open);
        if fixture.open.iter().any(|(_, body)| is_read(body)) {
            fixture.answer_after(HEARTBEAT_INTERVAL, is_read, queue(Holder::Lease(claim.id), vec![dead.clone()]));
        } else {
            fixture.pass(HEARTBEAT_INTERVAL);
        }
    }
}

/// Another client grants the name while the release of this one is being decided. No notification
/// arrives.
#[test]
fn waiter_polls_after_an_overtaken_release() {
    let mut fixture = EngineFixture::new();
    let (claim, lease) = fixture.hold(1, spec("a", WaitMode::Wait(None)), token(5));
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec: spec("a", WaitMode::Wait(None)) });
    fixture.feed(Input::Release { lease });
    fixture.answer(is_release, Response::Released(ReleaseOutcome::Awaited));
    let id = match fixture.answer_after(HEARTBEAT_INTERVAL, is_enqueue, Response::Enqueued(CurrentHolder::Unknown)) {
        Request::Enqueue(entries) => entries[0].claim.id,
        other => panic!("{other:?}"),
    };
    let own = EntryRow { id, client: Some(ClientId::from_u128(1)), ..entry_of_another(Some(GRANT_TTL)) };
    fixture.answer(is_read, queue(Holder::Lease(claim.id), vec![own]));
    fixture.answer(is_transition, Response::Transitioned(None));
    fixture.answer(is_release, Response::Released(ReleaseOutcome::NotHeld { lost: 5, token: 6 }));
    let is_withdrawal = |body: &Request| matches!(body, Request::Withdraw { .. });
    fixture.answer(is_withdrawal, Response::Withdrawn(WithdrawalOutcome::Gone { awaited: false }));
    fixture.pass(HEARTBEAT_INTERVAL);
    assert!(fixture.open.iter().any(|(_, body)| is_poll_of("a")(body)), "{:?}", fixture.open);
}

/// A reader waits behind a writer of its own client.
#[test]
fn wait_of_reader_behind_writer_is_reported() {
    let mut fixture = EngineFixture::new();
    let held = CurrentHolder::Valid { owner: None, remaining: Duration::from_secs(10) };
    fixture.feed(Input::Acquire { waiter: WaiterId(1), spec: spec("a", WaitMode::Wait(None)) });
    fixture.answer(is_acquire, Response::Acquired(Err(held)));
    let reader = LeaseSpec { mode: Mode::READ, ..spec("a", WaitMode::Wait(None)) };
    fixture.feed(Input::Acquire { waiter: WaiterId(2), spec: reader });
    assert!(
        fixture.has_acted(|action| matches!(action, Action::Waits { waiter: WaiterId(2) })),
        "{:?}",
        fixture.actions
    );
}
