//! How long a lease is safe: deadlines, renewals, loss.
//!
//! A [`Tenure`] is the local truth about one holding. Its deadline was taken *before* the request that the database
//! granted, on a clock that counts suspend, and ends earlier than the database's by a margin. So the holder knows first,
//! even if no task of ours got to run: [`Tenure::is_held`] reads a clock.
//!
//! The [`Keeper`] is one task per client with one agenda: it renews what is due (all of it in one statement, since what
//! is due together meets in the pump), declares lost what has run out, and wakes resting lines.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use super::Terms;
use crate::backend::{Holding, Renewal, Standing};
use crate::backoff::Backoff;
use crate::client::Client;
use crate::clock::{MARGIN, Moment, margin, reliance};
use crate::error::LossCause;
use crate::name::LockName;
use crate::owner::Hold;
use crate::panics;
use crate::pump::{Answer, Reply, Verb};
use crate::token::FencingToken;

/// When to renew a lease that is a mere claim as yet. Who gives it back before that saves the statement.
const CONFIRM_AFTER: Duration = Duration::from_millis(200);

/// At least so often the keeper compares clocks while anything is held: timers stand still while the machine sleeps.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// One holding, as its holder may see it.
pub(crate) struct Tenure {
    pub(crate) holding: Holding,
    pub(crate) ttl: Duration,
    terms: Terms,
    begun: Moment,
    /// When `max_hold` is over.
    ends: Option<Moment>,
    /// Nanoseconds of a [`Moment`].
    deadline: AtomicU64,
    fate: AtomicU8,
    renewing: AtomicBool,
    ended: Notify,
}

/// What has become of a tenure. It begins held and ends once, in one of the other ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Held,
    /// Given back or exported by its holder.
    Returned,
    Lost(LossCause),
}

impl Fate {
    const fn code(self) -> u8 {
        match self {
            Self::Held => 0,
            Self::Returned => 1,
            Self::Lost(LossCause::Expired) => 2,
            Self::Lost(LossCause::Superseded) => 3,
            Self::Lost(LossCause::MaxHold) => 4,
            Self::Lost(LossCause::Shutdown) => 5,
            Self::Lost(LossCause::Disconnected) => 6,
        }
    }

    const fn of(code: u8) -> Self {
        match code {
            0 => Self::Held,
            1 => Self::Returned,
            3 => Self::Lost(LossCause::Superseded),
            4 => Self::Lost(LossCause::MaxHold),
            5 => Self::Lost(LossCause::Shutdown),
            6 => Self::Lost(LossCause::Disconnected),
            _ => Self::Lost(LossCause::Expired),
        }
    }
}

impl Tenure {
    /// A tenure that was granted for so long by the answer to a request sent at `sent_at`.
    pub(crate) fn begin(holding: Holding, ttl: Duration, terms: Terms, sent_at: Moment, lasts: Duration) -> Arc<Self> {
        // A grant by others may be learned of long after what is known to have been before it.
        let begun = Moment::now();
        let ends = terms.max_hold.map(|max| begun + max);
        let tenure = Self {
            holding,
            ttl,
            terms,
            begun,
            ends,
            deadline: AtomicU64::new(0),
            fate: AtomicU8::new(Fate::Held.code()),
            renewing: AtomicBool::new(false),
            ended: Notify::new(),
        };
        tenure.prolong(sent_at, ttl.min(lasts));
        Arc::new(tenure)
    }

    /// The same tenure with another holding, which the answer to a request sent at `sent_at` has confirmed.
    pub(crate) fn converted(&self, holding: Holding, sent_at: Moment, lasts: Duration) -> Arc<Self> {
        let next = Self {
            holding,
            ttl: self.ttl,
            terms: self.terms,
            begun: self.begun,
            ends: self.ends,
            deadline: AtomicU64::new(0),
            fate: AtomicU8::new(Fate::Held.code()),
            renewing: AtomicBool::new(false),
            ended: Notify::new(),
        };
        next.prolong(sent_at, lasts);
        Arc::new(next)
    }

    /// The same tenure under a higher token.
    pub(crate) fn raised(&self, to: FencingToken) -> Arc<Self> {
        Arc::new(Self {
            holding: Holding { token: to, ..self.holding.clone() },
            ttl: self.ttl,
            terms: self.terms,
            begun: self.begun,
            ends: self.ends,
            deadline: AtomicU64::new(self.deadline.load(Ordering::Acquire)),
            fate: AtomicU8::new(Fate::Held.code()),
            renewing: AtomicBool::new(false),
            ended: Notify::new(),
        })
    }

    /// The moment from which on the lease must not be relied upon.
    pub(crate) fn deadline(&self) -> Moment {
        Moment::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    /// The database has confirmed the holding for `ttl` from a moment after `sent_at`.
    pub(crate) fn prolong(&self, sent_at: Moment, ttl: Duration) {
        let until = sent_at + reliance(ttl);
        let until = self.ends.map_or(until, |ends| until.min(ends));
        self.deadline.fetch_max(until.nanos(), Ordering::AcqRel);
    }

    /// What has become of it, up to this moment.
    pub(crate) fn fate(&self) -> Fate {
        let fate = Fate::of(self.fate.load(Ordering::Acquire));
        if fate == Fate::Held && self.deadline().is_past() {
            self.lose(self.expiry());
            return Fate::of(self.fate.load(Ordering::Acquire));
        }
        fate
    }

    pub(crate) fn is_held(&self) -> bool {
        self.fate() == Fate::Held
    }

    /// Ends it as lost. `false`: it had ended before.
    pub(crate) fn lose(&self, cause: LossCause) -> bool {
        let lost = self.end(Fate::Lost(cause));
        if lost {
            tracing::warn!(name = %self.holding.name, token = %self.holding.token, %cause, "lost a lease");
        }
        lost
    }

    /// Ends it as given back. Otherwise, how it had ended.
    pub(crate) fn give_back(&self) -> Result<(), Fate> {
        self.fate();
        if self.end(Fate::Returned) {
            return Ok(());
        }
        Err(self.fate())
    }

    /// Completes when it is lost.
    pub(crate) async fn lost(&self) -> LossCause {
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            // From here on no end is missed, also one between the check and the wait.
            ended.as_mut().enable();
            if let Fate::Lost(cause) = self.fate() {
                return cause;
            }
            // The keeper wakes us. Should it not get to run, a look at the clock now and then does.
            let _ = tokio::time::timeout(self.deadline().remaining().min(HEARTBEAT), ended).await;
        }
    }

    /// The part of `hold_at_least` that the database must still see to, or zero.
    pub(crate) fn unserved(&self) -> Duration {
        let least = self.terms.hold_at_least.unwrap_or_default();
        if Moment::now().since(self.begun) >= least { Duration::ZERO } else { least }
    }

    /// For how long the name must stay taken after this hold, or `None`.
    pub(crate) fn still_to_serve(&self) -> Option<Duration> {
        let left = self.terms.hold_at_least?.saturating_sub(Moment::now().since(self.begun));
        (!left.is_zero()).then_some(left)
    }

    /// What to ask for when renewing: never less than what is granted already, never beyond `max_hold`.
    pub(crate) fn renewal(&self, ttl: Duration) -> Duration {
        // The margin is taken off what is asked for: with it, the deadline is confirmed and not merely kept.
        let left = self.deadline().remaining() + MARGIN;
        let ttl = ttl.max(left + left / 99);
        self.ends.map_or(ttl, |ends| ttl.min(ends.remaining() + margin(ttl)))
    }

    fn end(&self, fate: Fate) -> bool {
        let ended =
            self.fate.compare_exchange(Fate::Held.code(), fate.code(), Ordering::AcqRel, Ordering::Acquire).is_ok();
        if ended {
            self.ended.notify_waiters();
        }
        ended
    }

    fn expiry(&self) -> LossCause {
        if self.ends.is_some_and(Moment::is_past) { LossCause::MaxHold } else { LossCause::Expired }
    }

    /// When to renew after a confirmation: at the next multiple of a third of the TTL that is not too near. All leases of
    /// one TTL share these moments, whenever they were acquired, so ten thousand of them fall due together.
    fn due_after(&self, sent_at: Moment) -> Moment {
        if !self.terms.renew {
            return self.deadline();
        }
        let period = u64::try_from((self.ttl / 3).as_nanos()).unwrap_or(u64::MAX).max(1);
        let soonest = (sent_at + self.ttl / 12).nanos();
        Moment::from_nanos(soonest.div_ceil(period).saturating_mul(period)).min(self.deadline())
    }
}

/// What the keeper has to do, and when.
#[derive(Default)]
pub(crate) struct Keeper {
    agenda: Mutex<Agenda>,
    wake: Arc<Notify>,
    started: AtomicBool,
}

#[derive(Default)]
struct Agenda {
    entries: BTreeMap<(Moment, u64), Entry>,
    tenures: HashMap<Hold, Kept>,
    /// When to look after the places in line.
    attend: Option<(Moment, u64)>,
    serial: u64,
    /// Until when the task sleeps unless it is woken.
    asleep_until: Option<Moment>,
    /// The serial when the task last looked: a client in use is not put to sleep for good.
    seen: u64,
    stopped: bool,
}

struct Kept {
    tenure: Arc<Tenure>,
    due: (Moment, u64),
    /// Grows while renewals fail.
    retry: Backoff,
}

enum Entry {
    Tenure(Hold),
    Attend,
}

impl Keeper {
    /// Starts the task on the present runtime, the first time.
    pub(crate) fn start(&self, client: &Arc<Client>) {
        if self.started.load(Ordering::Acquire) {
            return;
        }
        let runtime = tokio::runtime::Handle::current();
        if !self.started.swap(true, Ordering::AcqRel) {
            runtime.spawn(keep(Arc::downgrade(client), Arc::clone(&self.wake)));
        }
    }

    pub(crate) fn stop(&self) {
        self.agenda().stopped = true;
        self.wake.notify_one();
    }

    /// Takes a tenure into care. `claimed`: its TTL is still to be confirmed.
    pub(crate) fn keep(&self, tenure: &Arc<Tenure>, claimed: bool) {
        let soon = CONFIRM_AFTER.min(tenure.deadline().remaining() / 2);
        let due = if claimed { tenure.begun + soon } else { tenure.due_after(tenure.begun) };
        let mut agenda = self.agenda();
        let due = agenda.enter(due, Entry::Tenure(tenure.holding.hold));
        let kept = Kept { tenure: Arc::clone(tenure), due, retry: retry(tenure.ttl) };
        agenda.tenures.insert(tenure.holding.hold, kept);
        self.wake_for(agenda, due);
    }

    /// Forgets a tenure that has ended.
    pub(crate) fn let_go(&self, hold: Hold) {
        let mut agenda = self.agenda();
        if let Some(kept) = agenda.tenures.remove(&hold) {
            agenda.entries.remove(&kept.due);
        }
    }

    /// Ends the tenures of a holding that was evicted through this client.
    pub(crate) fn evicted(&self, name: &LockName, token: FencingToken) {
        for tenure in self.tenures() {
            if tenure.holding.name == *name && tenure.holding.token == token && tenure.lose(LossCause::Superseded) {
                self.reschedule(tenure.holding.hold, |_| Moment::now());
            }
        }
    }

    /// Has the places in line looked after, at that moment or before.
    pub(crate) fn attend_at(&self, when: Moment) {
        let mut agenda = self.agenda();
        if let Some(planned) = agenda.attend {
            if planned.0 <= when {
                return;
            }
            agenda.entries.remove(&planned);
        }
        let due = agenda.enter(when, Entry::Attend);
        agenda.attend = Some(due);
        self.wake_for(agenda, due);
    }

    pub(crate) fn tenures(&self) -> Vec<Arc<Tenure>> {
        self.agenda().tenures.values().map(|kept| Arc::clone(&kept.tenure)).collect()
    }

    /// Moves the next entry of a tenure.
    fn reschedule(&self, hold: Hold, when: impl FnOnce(&mut Kept) -> Moment) {
        let mut agenda = self.agenda();
        let Some(mut kept) = agenda.tenures.remove(&hold) else {
            return;
        };
        agenda.entries.remove(&kept.due);
        let when = when(&mut kept);
        kept.due = agenda.enter(when, Entry::Tenure(hold));
        let due = kept.due;
        agenda.tenures.insert(hold, kept);
        self.wake_for(agenda, due);
    }

    /// Wakes the task when it would sleep past the new entry.
    fn wake_for(&self, agenda: MutexGuard<'_, Agenda>, due: (Moment, u64)) {
        if agenda.asleep_until.is_none_or(|until| due.0 < until) {
            drop(agenda);
            self.wake.notify_one();
        }
    }

    fn agenda(&self) -> MutexGuard<'_, Agenda> {
        self.agenda.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Agenda {
    fn enter(&mut self, due: Moment, entry: Entry) -> (Moment, u64) {
        self.serial += 1;
        let due = (due, self.serial);
        self.entries.insert(due, entry);
        due
    }

    fn take_due(&mut self, now: Moment) -> Vec<Entry> {
        let later = self.entries.split_off(&(now, u64::MAX));
        std::mem::replace(&mut self.entries, later).into_values().collect()
    }

    /// How long the task may sleep: `None` is until it is woken.
    fn pause(&mut self) -> Option<Duration> {
        let next = self.entries.first_key_value().map(|((due, _), _)| due.remaining());
        let in_use = !self.tenures.is_empty() || self.seen != self.serial;
        self.seen = self.serial;
        let pause = [next, in_use.then_some(HEARTBEAT)].into_iter().flatten().min();
        self.asleep_until = pause.map(|pause| Moment::now() + pause);
        pause
    }
}

/// Renewals that fail are repeated soon, and less often as they go on failing.
fn retry(ttl: Duration) -> Backoff {
    Backoff::between((ttl / 60).min(Duration::from_millis(100)), (ttl / 10).min(Duration::from_secs(2)))
}

/// The keeper's task. It ends when its client does.
async fn keep(client: Weak<Client>, wake: Arc<Notify>) {
    loop {
        let pause = match client.upgrade() {
            Some(client) => client.keeper.work(&client),
            None => return,
        };
        match pause {
            Some(pause) => {
                let _ = tokio::time::timeout(pause, wake.notified()).await;
            }
            None => wake.notified().await,
        }
    }
}

impl Keeper {
    /// Does what is due, and tells how long to sleep: `None` is until woken.
    fn work(&self, client: &Arc<Client>) -> Option<Duration> {
        let due = self.agenda().take_due(Moment::now());
        for entry in due {
            // A panic, for one in a subscriber of `tracing`, must not end the care for what else is held.
            match entry {
                Entry::Attend => {
                    self.agenda().attend = None;
                    if panics::caught(|| client.attend()).is_err() {
                        self.attend_at(Moment::now() + HEARTBEAT);
                    }
                }
                Entry::Tenure(hold) => {
                    if panics::caught(|| self.see_to(hold, client)).is_err() {
                        self.reschedule(hold, |_| Moment::now() + HEARTBEAT);
                    }
                }
            }
        }
        let mut agenda = self.agenda();
        if agenda.stopped { Some(Duration::ZERO) } else { agenda.pause() }
    }

    fn see_to(&self, hold: Hold, client: &Arc<Client>) {
        let Some(tenure) = self.agenda().tenures.get(&hold).map(|kept| Arc::clone(&kept.tenure)) else {
            return;
        };
        if !tenure.is_held() {
            self.let_go(hold);
            client.vacate(&tenure.holding);
            return;
        }
        self.reschedule(hold, |kept| kept.tenure.deadline());
        // A lease that does not renew was extended by its holder: its deadline has moved.
        if tenure.terms.renew && !tenure.renewing.swap(true, Ordering::AcqRel) {
            self.renew(tenure, client);
        }
    }

    fn renew(&self, tenure: Arc<Tenure>, client: &Arc<Client>) {
        let ttl = tenure.renewal(tenure.ttl);
        let renewal = Renewal::new(tenure.holding.clone(), ttl);
        let keeper = Arc::downgrade(client);
        let reply = Reply::to(move |answer: Answer<Standing>| {
            tenure.renewing.store(false, Ordering::Release);
            if let Some(client) = keeper.upgrade() {
                client.keeper.renewed(&tenure, ttl, answer);
            }
        });
        client.pump.send(Verb::Renew(renewal, reply));
    }

    /// An answer to a renewal, ours or the holder's own.
    pub(crate) fn renewed(&self, tenure: &Tenure, ttl: Duration, answer: Answer<Standing>) {
        let hold = tenure.holding.hold;
        match answer.outcome {
            Ok(Standing::Held) => {
                tenure.prolong(answer.sent_at, ttl);
                self.reschedule(hold, |kept| {
                    kept.retry = retry(kept.tenure.ttl);
                    kept.tenure.due_after(answer.sent_at)
                });
            }
            Ok(Standing::Released | Standing::Superseded) => {
                tenure.lose(LossCause::Superseded);
                self.reschedule(hold, |_| Moment::now());
            }
            outcome => {
                tracing::debug!(name = %tenure.holding.name, ?outcome, "a renewal failed; trying again");
                self.reschedule(hold, |kept| {
                    let soon = Moment::now() + kept.retry.step();
                    soon.min(kept.tenure.deadline())
                });
            }
        }
    }
}
