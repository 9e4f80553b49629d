//! The reconciliation after the storm: unknown outcomes are resolved by the ledger of the provider,
//! dead attempts are resumed, and then the charges of the provider, the application's ledger, the
//! records and the answers to the clients are compared, order by order.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use sqlock::idempotency::{IdempotencyKey, RecordInfo, RecordState, Resolution, ResumePolicy};
use tokio::time::{Instant, sleep};

use super::clients::{Clients, Heard};
use super::order::{Mode, Order};
use super::provider::{Charge, Provider};
use super::server::{CUSTOMER, Shop, TTL, entry, stored_answer};
use crate::any_pool::AnyPool;
use crate::{Database, Place};

/// The application's ledger. Nothing in it prevents a second charge.
pub(super) const LEDGER: &str = "CREATE TABLE storm_ledger (mode VARCHAR(20) NOT NULL, order_name VARCHAR(80) NOT NULL,
                                                            receipt VARCHAR(40) NOT NULL)";

/// The number of rounds after which every record must have ended. A dead attempt takes two: it is
/// resumed, and if its outcome stays unknown, it is resolved in the next round.
const ROUNDS: usize = 10;

/// The time within which an order that is sent again must be answered.
const ANSWERED: Duration = Duration::from_secs(60);

/// The approximate number of completed orders that are sent again.
const SAMPLE: usize = 500;

#[derive(Default)]
pub(super) struct Reconciliation {
    pub(super) done: usize,
    refused: usize,
    failed: usize,
    stuck: usize,
    /// The number of rounds of resolutions and resumptions.
    rounds: usize,
    /// The unknown outcomes that were resolved: to done, and to failed.
    resolved: (usize, usize),
    charges: usize,
    booked: usize,
    doubles: usize,
    /// The receipts of completed orders.
    receipts: BTreeMap<Order, String>,
    /// The completed orders of which no client received the result.
    unheard: Vec<Order>,
    pub(super) violations: Vec<String>,
}

impl fmt::Display for Reconciliation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { done, refused, failed, stuck, rounds, resolved: (to_done, to_failed), charges, .. } = self;
        let Self { booked, doubles, .. } = self;
        let resolved = to_done + to_failed;
        write!(
            f,
            "{resolved} unknown resolved in {rounds} rounds ({to_done} done, {to_failed} failed), {charges} charges at the \
             provider, "
        )?;
        write!(f, "{booked} booked, {doubles} doubles, {stuck} stuck ({done} done, {refused} refused, {failed} failed)")
    }
}

/// Ends every record, and compares the ledgers, the records and the answers.
pub(super) async fn settle(place: &Place, provider: &Provider, clients: &Clients) -> Reconciliation {
    let mut reconciliation = Reconciliation::default();
    provider.stop_faults().await;
    let shop = Shop::open(AnyPool::open(&place.url, 8), provider.port);
    let records = shop.records(Mode::Lease);
    while !records.unfinished(1).await.expect("list").is_empty() && reconciliation.rounds < ROUNDS {
        reconciliation.rounds += 1;
        reconciliation.resolve_unknown(place, &shop, &provider.charges().await).await;
        // The leases of killed processes expire first.
        sleep(TTL).await;
        shop.resume(ResumePolicy::new()).await.expect("resume");
    }
    let mut states = HashMap::new();
    for mode in Mode::BOTH {
        let records = shop.records(mode).records_in(Some(mode.name()), None, u32::MAX).await.expect("list");
        states.extend(records.into_iter().map(|record| (Order { mode, name: record.key }, record.state.as_str())));
    }
    let _ = shop.locks.shutdown().await;
    let charged = provider.charges().await.into_iter().map(|Charge { order, receipt }| (order, receipt));
    let charged = grouped(charged.map(|(name, receipt)| (Order { mode: Mode::Lease, name }, receipt)));
    let booked = grouped(place.database.ledger().await);
    reconciliation.compare(clients.heard(), &states, &charged, &booked);
    for status in clients.unexpected_answers() {
        reconciliation.violations.push(format!("a client was answered with {status}"));
    }
    reconciliation
}

fn grouped(charges: impl IntoIterator<Item = (Order, String)>) -> HashMap<Order, Vec<String>> {
    let mut grouped: HashMap<Order, Vec<String>> = HashMap::new();
    for (order, receipt) in charges {
        grouped.entry(order).or_default().push(receipt);
    }
    grouped
}

impl Reconciliation {
    /// Resolves unknown outcomes, as an operator does with `sqlock idem ls` and `sqlock idem
    /// resolve`.
    async fn resolve_unknown(&mut self, place: &Place, shop: &Shop, charges: &[Charge]) {
        let receipts: HashMap<&str, &str> =
            charges.iter().map(|charge| (charge.order.as_str(), charge.receipt.as_str())).collect();
        let records = shop.records(Mode::Lease);
        let unknown =
            records.records_in(Some(Mode::Lease.name()), Some(RecordState::Unknown), u32::MAX).await.expect("list");
        let booked = grouped(place.database.ledger().await);
        for RecordInfo { key, token, .. } in unknown {
            let receipt = receipts.get(key.as_str());
            let resolution = match receipt {
                Some(receipt) => {
                    if !booked.contains_key(&Order { mode: Mode::Lease, name: key.clone() }) {
                        place.database.run(entry(Mode::Lease, &key, receipt)).await;
                    }
                    self.resolved.0 += 1;
                    Resolution::done(&stored_answer(receipt)).expect("JSON")
                }
                None => {
                    self.resolved.1 += 1;
                    Resolution::failed()
                }
            };
            let resolution = resolution.by("the storm").note("the provider's ledger");
            let token = token.expect("an attempt has a token");
            let resolved = records.resolve(&IdempotencyKey::new(CUSTOMER, &*key), token, resolution).await;
            if !resolved.expect("resolve") {
                self.violations.push(format!("the outcome of {key} cannot be resolved"));
            }
        }
    }

    fn compare(
        &mut self,
        heard: BTreeMap<Order, Heard>,
        states: &HashMap<Order, &'static str>,
        charged: &HashMap<Order, Vec<String>>,
        booked: &HashMap<Order, Vec<String>>,
    ) {
        self.charges = charged.values().map(Vec::len).sum();
        self.booked = booked.values().map(Vec::len).sum();
        for order in states.keys().chain(charged.keys()).chain(booked.keys()).filter(|order| !heard.contains_key(order))
        {
            self.violations.push(format!("nobody has sent {order:?}"));
        }
        for (order, heard) in heard {
            let receipts = |ledger: &HashMap<Order, Vec<String>>| ledger.get(&order).cloned().unwrap_or_default();
            let booked = receipts(booked);
            // An order in a transaction has only the ledger of the application.
            let charged = if order.mode == Mode::Lease { receipts(charged) } else { booked.clone() };
            let doubles = booked.len().max(charged.len()).saturating_sub(1);
            self.doubles += doubles;
            if doubles > 0 {
                self.violations.push(format!("{order:?} was charged with {charged:?}, and the ledger has {booked:?}"));
                continue;
            }
            match states.get(&order) {
                Some(&"done") => self.done += 1,
                None if heard.is_refused => self.refused += 1,
                None => self.failed += 1,
                Some(state) => {
                    self.stuck += 1;
                    self.violations.push(format!("{order:?} is stuck: {state}"));
                    continue;
                }
            }
            let is_done = states.contains_key(&order);
            let is_right = charged == booked
                && charged.len() == usize::from(is_done)
                && heard.receipts.iter().all(|receipt| charged.contains(receipt));
            if !is_right {
                let Heard { receipts, .. } = &heard;
                self.violations.push(format!(
                    "{order:?}, done: {is_done}, was charged with {charged:?}, the ledger has {booked:?}, and its \
                     clients have {receipts:?}"
                ));
            } else if is_done {
                if heard.receipts.is_empty() {
                    self.unheard.push(order.clone());
                }
                self.receipts.insert(order, charged.concat());
            }
        }
    }

    /// Sends again the orders whose result no client received, and some others: each must be
    /// answered with its receipt, as a replay.
    pub(super) async fn compare_answers(&mut self, clients: &Clients, port: u16) {
        let step = (self.receipts.len() / SAMPLE).max(1);
        let sample: Vec<Order> = self.unheard.drain(..).chain(self.receipts.keys().step_by(step).cloned()).collect();
        let until = Instant::now() + ANSWERED;
        for order in sample {
            let answer = loop {
                match clients.ask(port, &order).await {
                    // The server is starting, or the database is busy.
                    Err(_) if Instant::now() < until => sleep(Duration::from_millis(50)).await,
                    Ok(answer) if answer.status == 503 && Instant::now() < until => {
                        sleep(Duration::from_millis(50)).await
                    }
                    answer => break answer,
                }
            };
            let is_right = matches!(&answer, Ok(answer) if answer.status == 201 && answer.is_replay
                && self.receipts.get(&order) == Some(&answer.body));
            if !is_right {
                let answer = answer.map(|answer| (answer.status, answer.body));
                self.violations.push(format!("{order:?} is answered with {answer:?} in the end"));
            }
        }
    }
}

impl Database {
    /// Reads the application's ledger.
    async fn ledger(&self) -> Vec<(Order, String)> {
        const ROWS: &str = "SELECT mode, order_name, receipt FROM storm_ledger";
        let rows: Result<Vec<(String, String, String)>, _> = match self {
            Self::Postgres(pool) => sqlx::query_as(ROWS).fetch_all(pool).await,
            Self::MySql(pool) => sqlx::query_as(ROWS).fetch_all(pool).await,
            Self::Sqlite(pool) => sqlx::query_as(ROWS).fetch_all(pool).await,
        };
        let mode = |name: &str| Mode::BOTH.into_iter().find(|mode| mode.name() == name).expect("a mode");
        rows.expect("the ledger")
            .into_iter()
            .map(|(name, order, receipt)| (Order { mode: mode(&name), name: order }, receipt))
            .collect()
    }
}
