//! Cases that the simulation, in which every store is quick or broken, does not reach.

use super::*;

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
        mode: crate::protocol::Mode::Exclusive,
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
