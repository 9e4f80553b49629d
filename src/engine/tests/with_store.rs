//! Dialogues in which the model of the store answers.

use super::*;
use crate::backend::memory::Memory;

/// The store's clock at [`START`], in microseconds.
const STORE_START: i64 = 1_700_000_000_000_000;

/// An engine and its store.
struct Client {
    dialogue: EngineFixture,
    store: Memory,
    transactions: u64,
}

impl Client {
    fn new() -> Self {
        Self { dialogue: EngineFixture::new(), store: Memory::new(false), transactions: 0 }
    }

    /// Returns the claim of the first open request.
    fn claim(&self) -> Claim {
        match self.dialogue.open.first() {
            Some((_, Request::Acquire(claim))) => claim.clone(),
            other => panic!("{other:?}"),
        }
    }

    fn acquire(&mut self, waiter: u64, wait_mode: WaitMode) {
        self.dialogue.feed(Input::Acquire { waiter: WaiterId(waiter), spec: spec("a", wait_mode) });
    }

    /// Carries out a request of any client.
    fn execute(&mut self, body: &Request) -> Response {
        let since = i64::try_from(self.dialogue.now.since(START).as_micros()).expect("a short test");
        self.transactions += 1;
        let prepared = self.store.prepare(self.transactions, STORE_START + since, body).expect("no row is locked");
        self.store.commit(self.transactions, STORE_START + since, prepared)
    }

    /// Answers one request.
    fn answer(&mut self, request: RequestId, body: &Request) {
        let response = self.execute(body);
        let answer = Answer { sent_at: self.dialogue.now, may_linger: false, is_repeated: false, result: Ok(response) };
        self.dialogue.feed(Input::Answer { request, answer });
    }

    /// Answers every request for some time.
    fn serve(&mut self, time: Duration) {
        const STEP: Duration = Duration::from_millis(20);
        let until = self.dialogue.now + time;
        while self.dialogue.now < until {
            while !self.dialogue.open.is_empty() {
                assert!(self.transactions < 1_000, "requests without a pause");
                let (request, body) = self.dialogue.open.remove(0);
                self.answer(request, &body);
            }
            self.dialogue.pass(STEP);
        }
    }

    /// Returns the grants so far.
    fn grants(&self) -> Vec<(WaiterId, Grant)> {
        let grant = |action: &Action| match action {
            Action::Granted { waiter, grant } => Some((*waiter, grant.clone())),
            _ => None,
        };
        self.dialogue.actions.iter().filter_map(grant).collect()
    }

    /// Returns the holder of the name in the store.
    fn holder(&self) -> Option<Holder> {
        self.store.leases.values().next().map(|lease| lease.holder)
    }
}

/// The answers about the first waiters do not concern a waiter behind them.
#[test]
fn waiter_behind_many_tries_keeps_its_grant() {
    let mut client = Client::new();
    let until = START + Duration::from_secs(60);
    (1..=33).for_each(|waiter| client.acquire(waiter, WaitMode::Try(until)));
    client.acquire(34, WaitMode::Wait(None));
    client.dialogue.feed(Input::Cancel { waiter: WaiterId(1) });
    for turn in 0.. {
        client.serve(Duration::from_secs(5));
        let (waiter, grant) = client.grants().get(turn).cloned().expect("a grant");
        assert_eq!(client.holder(), Some(Holder::Lease(grant.id)), "{waiter:?}");
        if waiter == WaiterId(34) {
            break;
        }
        client.dialogue.feed(Input::Release { lease: grant.lease });
    }
}

#[test]
fn waiters_that_have_left_are_forgotten() {
    let mut client = Client::new();
    let hour = WaitMode::Wait(Some(START + Duration::from_secs(3_600)));
    client.acquire(1, hour);
    client.acquire(2, hour);
    client.dialogue.feed(Input::Cancel { waiter: WaiterId(2) });
    client.serve(HEARTBEAT_INTERVAL);
    let (_, grant) = client.grants().remove(0);
    client.dialogue.feed(Input::Release { lease: grant.lease });
    client.serve(HEARTBEAT_INTERVAL);
    assert!(client.dialogue.engine.is_idle());
    assert_eq!(client.dialogue.engine.wakes_at(), None);
}

/// The owner enters a lease without renewal, which was evicted, and asks for renewal.
#[test]
fn refused_extension_is_looked_up() {
    let mut client = Client::new();
    let first = LeaseSpec { reenters: true, is_renewed: false, ..spec("a", WaitMode::Wait(None)) };
    let again = LeaseSpec { is_renewed: true, ..first.clone() };
    client.dialogue.feed(Input::Acquire { waiter: WaiterId(1), spec: first });
    client.serve(HEARTBEAT_INTERVAL);
    let (_, grant) = client.grants().remove(0);
    client.execute(&Request::Evict { name: grant.name.clone(), token: grant.token });
    client.dialogue.feed(Input::Acquire { waiter: WaiterId(2), spec: again });
    client.serve(HEARTBEAT_INTERVAL);
    let lost = |action: &&Action| matches!(action, Action::Lost { cause: LossCause::Superseded, .. });
    assert_eq!(client.dialogue.actions.iter().filter(lost).count(), 2, "{:?}", client.dialogue.actions);
}

/// The sweeper deletes the row of an idle client. The first notice in the next row must differ from
/// the last one that the client has seen.
#[test]
fn first_notice_after_a_sweep_is_news() {
    let mut client = Client::new();
    for waiter in 1..=3 {
        client.acquire(waiter, WaitMode::Wait(None));
        client.serve(HEARTBEAT_INTERVAL / 4);
        let (_, grant) = client.grants().pop().expect("a grant");
        client.execute(&Request::Ask { name: grant.name.clone() });
        client.serve(HEARTBEAT_INTERVAL * 2);
        let is_asked = |action: &Action| matches!(action, Action::ReleaseRequested { lease } if *lease == grant.lease);
        assert!(client.dialogue.has_acted(is_asked), "{waiter}: {:?}", client.dialogue.actions);
        client.dialogue.feed(Input::Release { lease: grant.lease });
        client.serve(HEARTBEAT_INTERVAL);
        client.store.clients.clear();
    }
}

/// The lease was granted by another client, for a short time at first.
#[test]
fn lost_lease_is_withdrawn_soon_whatever_its_ttl() {
    let mut client = Client::new();
    client.acquire(1, WaitMode::Wait(None));
    client.serve(HEARTBEAT_INTERVAL);
    let (_, grant) = client.grants().remove(0);
    let name = client.dialogue.engine.names.get_mut(&grant.name).expect("the name");
    let holding = name.holding(grant.id).expect("the holding");
    (holding.claim.ttl, holding.lifetime.ttl) = (Duration::from_secs(24 * 3_600), GRANT_TTL);
    let now = client.dialogue.now;
    client.dialogue.engine.lose(now, &grant.name, grant.id, LossCause::Expired);
    client.serve(HEARTBEAT_INTERVAL);
    assert_eq!(client.holder(), Some(Holder::Nobody));
}

/// The owner of the exclusive holding is known, so no other owner can join it.
#[test]
fn waiters_of_other_owners_do_not_join() {
    let mut client = Client::new();
    client.acquire(1, WaitMode::Wait(None));
    client.serve(HEARTBEAT_INTERVAL);
    for waiter in (2..=50).map(WaiterId) {
        let spec = LeaseSpec { reenters: true, ..spec("a", WaitMode::Wait(None)) };
        client.dialogue.feed(Input::Acquire { waiter, spec });
    }
    let join = client.dialogue.open.iter().find(|(_, body)| matches!(body, Request::Join(_)));
    assert!(join.is_none(), "{join:?}");
}

/// Two clients have released the entries of an owner, which keep the name.
#[test]
fn owner_waits_for_hold_time_without_loop() {
    let mut client = Client::new();
    let hold_time = HoldTime { at_least: Duration::from_secs(5), at_most: None };
    let spec = LeaseSpec { reenters: true, hold_time, ..spec("a", WaitMode::Wait(None)) };
    client.dialogue.feed(Input::Acquire { waiter: WaiterId(1), spec: spec.clone() });
    let elsewhere = Claim { id: AcquisitionId::from_u128(9), client: ClientId::from_u128(2), ..client.claim() };
    client.serve(HEARTBEAT_INTERVAL);
    let Response::Joined(JoinOutcome::Done(token)) = client.execute(&Request::Join(elsewhere.clone())) else {
        panic!("the owner holds the name");
    };
    let Claim { name, id, .. } = elsewhere;
    client.execute(&Request::Release(Release { name, id, token, keep_for: hold_time.at_least, next: None }));
    let lease = client.grants()[0].1.lease;
    client.dialogue.feed(Input::Release { lease });
    client.dialogue.feed(Input::Acquire { waiter: WaiterId(2), spec });
    client.serve(Duration::from_secs(1));
    let before = client.transactions;
    client.serve(Duration::from_secs(1));
    assert!(client.transactions - before < 40, "{} requests in a second", client.transactions - before);
    assert_eq!(client.grants().len(), 1);
    client.serve(hold_time.at_least);
    assert_eq!(client.grants().len(), 2);
}

/// An earlier change of the lease has no answer yet.
#[test]
fn changes_are_answered_in_order() {
    let mut client = Client::new();
    let first = LeaseSpec { reenters: true, ..spec("a", WaitMode::Wait(None)) };
    client.dialogue.feed(Input::Acquire { waiter: WaiterId(1), spec: first.clone() });
    client.serve(HEARTBEAT_INTERVAL);
    client.dialogue.feed(Input::Acquire { waiter: WaiterId(2), spec: first });
    let lease = client.grants()[0].1.lease;
    client.dialogue.feed(Input::Amend { lease, amendment: Amendment::Extend(Duration::from_secs(60)) });
    client.dialogue.feed(Input::Amend { lease, amendment: Amendment::Downgrade });
    client.serve(HEARTBEAT_INTERVAL);
    let result = |action: &Action| match action {
        Action::Amended { result, .. } => Some(result.is_ok()),
        _ => None,
    };
    let results: Vec<bool> = client.dialogue.actions.iter().filter_map(result).collect();
    assert_eq!(results, [true, false]);
}
