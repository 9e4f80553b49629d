//! Cases that the simulation, in which every store is quick or broken, does not reach.

use super::*;
use crate::protocol::timing::BEAT;
use crate::protocol::{Amended, Holder, HolderNow, LeaseRow, Mode, Polled, Presence, Response};

const START: Moment = Moment::from_nanos(1_000_000_000);

fn engine() -> Engine {
    Engine::new(ClientId::from_u128(1), "test".into(), LeaseId::from_u128(1 << 32), false)
}

/// Waits for a name so long while the store does not answer, on a machine that wakes the engine
/// much later. Returns the refusal.
fn refusal_of_wait(length: Duration) -> Refusal {
    let mut engine = engine();
    let wish = Wish {
        name: LockName::new("a").expect("a name"),
        owner: crate::owner::Owner::random(),
        reenters: false,
        mode: Mode::Exclusive,
        ttl: Duration::from_secs(10),
        is_kept: true,
        max_hold: None,
        label: "".into(),
        patience: Patience::Wait(Some(START + length)),
    };
    let waiter = WaiterId(1);
    engine.handle(START, Event::Acquire { waiter, wish });
    let late = START + length + Duration::from_millis(400);
    let mut actions = engine.handle(late, Event::Tick);
    actions.extend(engine.handle(late + WITHDRAWN_LATEST, Event::Tick));
    let refusals = actions.into_iter().filter_map(|action| match action {
        Action::Refused { refusal, .. } => Some(refusal),
        _ => None,
    });
    refusals.last().expect("a refusal")
}

/// Longer than any wait for a withdrawal.
const WITHDRAWN_LATEST: Duration = Duration::from_secs(1);

#[test]
fn short_wait_times_out_on_a_slow_machine() {
    assert!(matches!(refusal_of_wait(Duration::from_millis(50)), Refusal::Timeout));
}

#[test]
fn long_wait_without_an_answer_is_unanswered() {
    assert!(matches!(refusal_of_wait(Duration::from_millis(200)), Refusal::NoAnswer));
}

/// A conversation with a store that a test answers for.
struct Conversation {
    engine: Engine,
    now: Moment,
    /// The requests that were not answered yet.
    open: Vec<(RequestId, Request)>,
    told: Vec<Action>,
}

impl Conversation {
    fn feed(&mut self, event: Event) {
        for action in self.engine.handle(self.now, event) {
            match action {
                Action::Send { request, body, .. } => self.open.push((request, body)),
                action => self.told.push(action),
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        self.feed(Event::Tick);
    }

    /// Answers the first open request of a kind, and returns it.
    fn answer(&mut self, is_meant: impl Fn(&Request) -> bool, response: Response) -> Request {
        let open = self.open.iter().position(|(_, body)| is_meant(body));
        let (request, body) = self.open.remove(open.unwrap_or_else(|| panic!("not among {:?}", self.open)));
        let answer = Answer { sent_at: self.now, may_linger: false, is_repeated: false, result: Ok(response) };
        self.feed(Event::Answer { request, answer });
        body
    }

    fn is_told(&self, is_meant: impl Fn(&Action) -> bool) -> bool {
        self.told.iter().any(is_meant)
    }
}

/// The release is asked for between the look that finds a grant by another client and the
/// confirmation of the grant, which meets a locked row at first.
#[test]
fn request_before_a_confirmation_is_looked_up() {
    let mut store = Conversation { engine: engine(), now: START, open: Vec::new(), told: Vec::new() };
    let wish = |name| Wish {
        name: LockName::new(name).expect("a name"),
        owner: crate::owner::Owner::random(),
        reenters: false,
        mode: Mode::Exclusive,
        ttl: Duration::from_secs(10),
        is_kept: true,
        max_hold: None,
        label: "".into(),
        patience: Patience::Wait(None),
    };
    // The heartbeat keeps another lease.
    let token = FencingToken::new(5).expect("a token");
    store.feed(Event::Acquire { waiter: WaiterId(1), wish: wish("b") });
    store.answer(|body| matches!(body, Request::Acquire(_)), Response::Acquired(Ok(token)));
    store.told.clear();
    let wish = wish("a");
    let (name, owner) = (wish.name.clone(), Some(wish.owner));
    store.feed(Event::Acquire { waiter: WaiterId(2), wish });
    let held = HolderNow::Valid { owner: None, remaining: Duration::from_secs(10) };
    let claim = match store.answer(|body| matches!(body, Request::Acquire(_)), Response::Acquired(Err(held))) {
        Request::Acquire(claim) => claim,
        other => panic!("{other:?}"),
    };
    store.answer(|body| matches!(body, Request::Enqueue(_)), Response::Enqueued(held));
    store.pass(POLL_FIRST);
    // The grant is about to end, so it must be confirmed.
    let remaining = Some(Duration::from_millis(500));
    let polled = |asked| {
        let (holder, client) = (Holder::Lease(claim.id), Some(claim.client));
        let row = LeaseRow { holder, owner, client, token: 5, remaining, waiting: 0, lost: 0, asked };
        Response::Polled(Some(Polled { row, presences: vec![Presence::Holding { token, remaining }] }))
    };
    let is_poll = |body: &Request| matches!(body, Request::Poll { name: polled, .. } if *polled == name);
    let is_extend = |body: &Request| matches!(body, Request::Extend(_));
    store.answer(is_poll, polled(0));
    store.answer(is_extend, Response::Extended(Amended::Locked));
    store.pass(BEAT);
    store.answer(is_extend, Response::Extended(Amended::Locked));
    store.answer(|body| matches!(body, Request::Register { .. }), Response::Registered(1));
    store.pass(WHILE_LOCKED);
    store.answer(is_extend, Response::Extended(Amended::Done));
    assert!(store.is_told(|action| matches!(action, Action::Granted { .. })), "{:?}", store.told);
    store.answer(is_poll, polled(5));
    assert!(store.is_told(|action| matches!(action, Action::ReleaseRequested { .. })), "{:?}", store.told);
}
