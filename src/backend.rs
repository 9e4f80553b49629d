//! The seam between the locks and the databases: what a database must be able to do, in batches.
//!
//! A [`Backend`] opens [`Session`]s; a session is one connection. Each verb of a session takes a batch, names any name at
//! most once, in ascending order of names, and answers in the order of the batch. Every verb may be sent again when its
//! reply was lost: an acquisition is known by its hold, which is chosen before it is sent.
//!
//! No verb waits in the server for another client's transaction.

#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, clippy::print_stdout, dead_code, reason = "tests")]
pub(crate) mod differential;
pub(crate) mod failover;
#[cfg(test)]
pub(crate) mod memory;
#[cfg(feature = "mysql")]
pub(crate) mod mysql;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
pub(crate) mod records;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;
#[cfg(test)]
#[allow(dead_code, reason = "what the stores will need")]
pub(crate) mod stored;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{CENTURY, Moment};
use crate::error::Result;
use crate::name::LockName;
use crate::owner::{Hold, Owner};
use crate::token::FencingToken;

/// A storage operation under way.
pub(crate) type Job<'a, T> = Pin<Box<dyn Future<Output = Result<T, sqlx::Error>> + Send + 'a>>;

/// A database that leases can be kept in.
pub(crate) trait Backend: Send + Sync {
    /// Opens a connection of its own, ready for the verbs.
    fn connect(&self) -> Job<'_, Box<dyn Session>>;

    /// How many connections at most do any good. SQLite has one writer.
    fn useful_connections(&self) -> usize;

    /// Where it is, for people: never with a credential.
    fn place(&self) -> String;

    /// Makes all connections wait until a second server has what the first has done. `false`: here is no such thing.
    fn synchronous(&mut self) -> bool {
        false
    }

    /// Whether other servers take writes as well, and know nothing of the locks of transactions here.
    fn is_one_of_many_writers(&self) -> bool {
        false
    }

    /// Whether it can tell of grants.
    fn rings(&self) -> bool {
        false
    }

    /// Opens a connection that hears what is said on a channel, if there is such a thing.
    fn listen<'a>(&'a self, channel: &'a str) -> Job<'a, Option<Box<dyn Listener>>> {
        let _ = channel;
        Box::pin(async { Ok(None) })
    }

    /// Creates the tables or brings them up to date.
    fn migrate(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>>;

    /// Opens what session locks live on, or says why they would be a lie here.
    fn anchor(&self) -> Anchoring<'_>;
}

/// An [`Anchor`] that is being opened.
pub(crate) type Anchoring<'a> = Pin<Box<dyn Future<Output = Result<Box<dyn Anchor>>> + Send + 'a>>;

/// What session locks live on, and end with: one connection that is used for nothing else, or the open files of this process.
///
/// Nothing waits in the server. A lock of one name is taken once, and given back before it is taken again.
pub(crate) trait Anchor: Send {
    /// For how long it outlives the last statement that the server has received: then, and after any error that is not the
    /// server's own word on one lock, nothing is known of the others. `None`: it ends with this process and no sooner.
    fn outlives_silence(&self) -> Option<Duration>;

    /// Takes a lock that is free. `false`: it is not.
    fn take<'a>(&'a mut self, name: &'a LockName, shared: bool) -> Job<'a, bool>;

    /// Gives a lock back. `false`: it was not held.
    fn give_back<'a>(&'a mut self, name: &'a LockName, shared: bool) -> Job<'a, bool>;

    /// Asks whether it is still what it was; an error says that it is not.
    fn prove(&mut self) -> Job<'_, ()>;

    /// Gives every lock back and ends.
    fn close(self: Box<Self>) -> Job<'static, ()>;
}

/// How long the server keeps a session from which nothing is heard, where it can be told.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const SILENCE: Duration = Duration::from_secs(15);

/// What stands for a name within a place (a schema, a database) where names are numbers, or short, or know no case.
pub(crate) fn session_key(place: &str, name: &LockName) -> [u8; 32] {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    hash.update(b"sqlock/session/1");
    for part in [place, name.as_str()] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// Two digits for each byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The session is not the one that it was: something between us and the server passes statements on to another.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) fn another_session() -> sqlx::Error {
    sqlx::Error::Protocol("the statement was answered by another session".into())
}

/// A connection that hears.
pub(crate) trait Listener: Send {
    /// What is said next. An error: something may have been missed.
    fn hear(&mut self) -> Job<'_, String>;
}

/// One connection, and the verbs that the pump sends on it.
pub(crate) trait Session: Send {
    /// Takes each name that is free and for which nobody waits. `None`: it is not so.
    fn acquire<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>>;

    /// Adds a hold to each name that the claim's owner holds already. `None`: it does not.
    fn join<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>>;

    /// Moves the expiry. `false`: the holding was not found as named.
    fn renew<'a>(&'a mut self, renewals: &'a [Renewal]) -> Job<'a, Vec<bool>>;

    /// Ends the hold; the last one frees the name. `false`: the holding was not found as named, or it is the last one and
    /// others wait, to whom it must be [passed](Self::pass) instead. `None`: somebody else has the name already, and it is not
    /// known whether that came of this.
    fn release<'a>(&'a mut self, releases: &'a [Release]) -> Job<'a, Vec<Option<bool>>>;

    /// Ends a holding and gives the name to the claim, in one step, if nobody waits in line. `None`: nothing was changed.
    fn hand_off<'a>(&'a mut self, hand_offs: &'a [HandOff]) -> Job<'a, Vec<Option<FencingToken>>>;

    /// Reads the rows of the names, without locking anything. A name without a row is left out.
    fn look<'a>(&'a mut self, names: &'a [LockName]) -> Job<'a, Vec<Row>>;

    /// Reads who holds which names, in order of names.
    fn list<'a>(&'a mut self, names: &'a Names) -> Job<'a, Vec<Listed>>;

    /// Puts each claim in line, once however often it is sent, and marks its name as waited for. Creates what rows are
    /// missing. Names may repeat. For how long another owner alone holds the name, who will see that somebody waits. `None`:
    /// that is not so, or not known.
    fn enqueue<'a>(&'a mut self, tickets: &'a [Ticket]) -> Job<'a, Vec<Option<Duration>>>;

    /// Reads a name: its row, all who share it, and the first `limit` of those who wait. `None`: it has no row.
    fn queue<'a>(&'a mut self, name: &'a LockName, limit: u32) -> Job<'a, Option<Queue>>;

    /// Gives a name to others, all or nothing, if it still stands as it was seen. `None`: nothing was changed. Otherwise
    /// those who got it: whoever has left the line in between does not.
    fn pass<'a>(&'a mut self, pass: &'a Pass) -> Job<'a, Option<Vec<Granted>>>;

    /// Ends a holding and gives the name to the first in line, in one step, if that one lives and wants it alone. `None`:
    /// nothing was changed, and [`queue`](Self::queue) and [`pass`](Self::pass) do it. Not every database has it.
    fn pass_on<'a>(&'a mut self, from: &'a Release) -> Job<'a, Option<PassedOn>> {
        let _ = from;
        Box::pin(async { Ok(None) })
    }

    /// Deletes places of a name, by their marks, whose time has run out.
    fn bury<'a>(&'a mut self, name: &'a LockName, dead: &'a [String]) -> Job<'a, ()>;

    /// Deletes places, of those who wait and of those who share. `false`: there was none.
    fn leave<'a>(&'a mut self, places: &'a [Spot]) -> Job<'a, Vec<bool>>;

    /// Keeps the places of those who wait for another [`PLACE`]. `false`: it does not wait any more.
    fn keep<'a>(&'a mut self, places: &'a [Spot], bell: &'a str) -> Job<'a, Vec<bool>>;

    /// Reads how far places have come. `None`: the name has no row.
    fn watch<'a>(&'a mut self, places: &'a [Spot]) -> Job<'a, Vec<Option<Watched>>>;

    /// [`renew`](Self::renew) for those who share. Names may repeat.
    fn renew_shares<'a>(&'a mut self, renewals: &'a [Renewal]) -> Job<'a, Vec<bool>>;

    /// Puts a second share beside one, with a hold of its own and the same token. `false`: there is none.
    fn copy<'a>(&'a mut self, from: &'a Holding, to: Hold, ttl: Duration) -> Job<'a, bool>;

    /// Turns the last hold of an exclusive holding into the only one that shares the name, in one step. The token stays.
    fn downgrade<'a>(&'a mut self, from: &'a Holding, to: &'a Ticket) -> Job<'a, bool>;

    /// Rings bells: what follows each is what is said.
    fn ring<'a>(&'a mut self, bells: &'a [(String, String)]) -> Job<'a, ()> {
        let _ = bells;
        Box::pin(async { Ok(()) })
    }

    /// Raises the token of a holding that stands alone, in one step with the token of its fence. `true` also when that was done
    /// before. `false`: the holding was not found as named, or somebody had locked its rows.
    fn raise<'a>(&'a mut self, holding: &'a Holding, to: FencingToken) -> Job<'a, bool>;

    /// For how long the server has been up, by its own clock. `None`: there is no server.
    fn uptime(&mut self) -> Job<'_, Option<Duration>> {
        Box::pin(async { Ok(None) })
    }

    /// Ends the holding with that token, whoever has it. `false`: that token does not hold.
    fn evict<'a>(&'a mut self, name: &'a LockName, token: FencingToken) -> Job<'a, bool>;

    /// Reads what the row of a name tells of evictions. `None`: there is no such row.
    fn last_eviction<'a>(&'a mut self, name: &'a LockName) -> Job<'a, Option<LastEviction>>;

    /// Makes the holding with that token last at least `ttl` from now, whoever has it. `false`: that token does not hold.
    fn extend<'a>(&'a mut self, name: &'a LockName, token: FencingToken, ttl: Duration) -> Job<'a, bool>;

    /// Makes sure that a row stands for the name, to be locked by others. Waits for nobody who has locked it. Where a database
    /// locks no rows, there is nothing to do.
    fn ensure<'a>(&'a mut self, name: &'a LockName) -> Job<'a, ()> {
        let _ = name;
        Box::pin(async { Ok(()) })
    }

    /// Does something about the records of requests.
    fn record<'a>(&'a mut self, errand: &'a records::Errand) -> Job<'a, records::Findings>;

    /// What the catalogue says about a column, for those whose transactions [cannot ask](sealed::Catalogued::Elsewhere) themselves:
    /// of a schema, a table, a column.
    fn column<'a>(&'a mut self, of: &'a (String, String, String)) -> Job<'a, Option<sealed::Column>> {
        let _ = of;
        Box::pin(async { Ok(None) })
    }

    /// Deletes up to `limit` rows that have been free, and whose token was overtaken by the clock, for `retention`; and places
    /// that have expired as long ago. Whoever has just joined a line may not be visible yet: a name that was marked as waited
    /// for within a [`CLAIM`] stays. Likewise rows that nobody has [made sure of](Self::ensure) and nobody has locked, for
    /// `retention` and at least an hour.
    fn sweep(&mut self, retention: Duration, limit: u32) -> Job<'_, u64>;

    /// Begins a transaction around the verbs that follow, or ends it.
    fn transact(&mut self, step: Step) -> Job<'_, ()>;

    /// Lets places that wait stand at one moment in their lines, the latest of theirs.
    fn align<'a>(&'a mut self, places: &'a [Spot]) -> Job<'a, ()>;

    /// Ends the connection in order.
    fn close(self: Box<Self>) -> Job<'static, ()>;
}

/// What becomes of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Begin,
    Commit,
    RollBack,
}

/// How long a name that was handed over lasts without its new holder's confirmation, and how long a dead waiter may stand in
/// the way of others. They are one and the same, so that when one dead waiter's grant has run out, the places of all that
/// died with it have as well.
pub(crate) const CLAIM: Duration = Duration::from_secs(3);

/// How long a place is left alone when it is first seen without a sign of life: if the database stood still, the living write
/// theirs at once when it goes on.
pub(crate) const GRACE: Duration = Duration::from_millis(300);

/// How long a place lasts without a sign of life.
pub(crate) const PLACE: Duration = Duration::from_millis(2_700);

/// How long the row of a name stays that nobody asks for, to be locked. Whoever asks for it makes sure of it every
/// [`ENSURED`](crate::row::ENSURED) and notes that down every [`NOTED`].
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const UNSEEN: Duration = Duration::from_secs(3600);

/// How old the note may get that a row is in use. Writing it makes others' snapshots stale, so it is written seldom.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const NOTED: Duration = Duration::from_secs(600);

/// How a name is wanted, or held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// By one alone.
    Exclusive,
    /// By one alone, if it can have other names as well. Nobody else lets it in.
    Joint,
    /// Together with others: so many units, of so many permits.
    Shared { units: u32, permits: u32 },
}

impl Mode {
    /// A shared lease: one of more than there can ever be.
    pub(crate) const READ: Self = Self::Shared { units: 1, permits: u32::MAX };

    /// As the tables have it: units and permits.
    pub(crate) fn columns(self) -> (i64, i64) {
        match self {
            Self::Exclusive => (0, 0),
            Self::Joint => (0, 1),
            Self::Shared { units, permits } => (units.into(), permits.into()),
        }
    }

    pub(crate) fn of_columns(units: i64, permits: i64) -> Self {
        if units <= 0 {
            return if permits == 0 { Self::Exclusive } else { Self::Joint };
        }
        let number = |n: i64| u32::try_from(n).unwrap_or(u32::MAX);
        Self::Shared { units: number(units), permits: number(permits) }
    }
}

/// A request for a name.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) hold: Hold,
    pub(crate) mode: Mode,
    pub(crate) ttl: Duration,
    /// The holder in words, for people.
    pub(crate) holder: Arc<str>,
    pub(crate) label: Arc<str>,
}

impl Claim {
    pub(crate) fn spot(&self) -> Spot {
        Spot { name: self.name.clone(), hold: self.hold }
    }
}

/// One hold of one owner on a name.
#[derive(Clone, Debug)]
pub(crate) struct Holding {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) hold: Hold,
    pub(crate) mode: Mode,
    pub(crate) token: FencingToken,
}

impl Holding {
    pub(crate) fn spot(&self) -> Spot {
        Spot { name: self.name.clone(), hold: self.hold }
    }
}

/// A place in line, by its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) name: LockName,
    pub(crate) hold: Hold,
}

/// What joins a line.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    pub(crate) claim: Claim,
    pub(crate) client: Arc<str>,
    pub(crate) bell: Arc<str>,
    /// When it came. It is placed as if it had come there then.
    pub(crate) since: Moment,
}

impl Ticket {
    /// How long it has waited already, in microseconds.
    pub(crate) fn waited(&self) -> i64 {
        micros(Moment::now().since(self.since))
    }
}

/// What stands in a line.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// The mark of the hold.
    pub(crate) hold: String,
    pub(crate) owner: String,
    /// Empty: none.
    pub(crate) bell: String,
    pub(crate) mode: Mode,
    /// When it came, in microseconds.
    pub(crate) place: i64,
    /// Zero: it waits.
    pub(crate) token: i64,
    pub(crate) holder: String,
    pub(crate) label: String,
    pub(crate) expires_at: i64,
}

impl Place {
    /// Its bell, if it has one, and what to say.
    pub(crate) fn bell(&self, said: String) -> Option<(String, String)> {
        (!self.bell.is_empty()).then(|| (self.bell.clone(), said))
    }
}

/// A name and who stands before it: those who share it, then those who wait, in order.
#[derive(Clone, Debug)]
pub(crate) struct Queue {
    pub(crate) row: Row,
    pub(crate) places: Vec<Place>,
    /// When so many wait, there may be more.
    pub(crate) limit: u32,
}

impl Queue {
    pub(crate) fn of(row: Row, places: impl Iterator<Item = Place>, limit: u32) -> Self {
        let mut places: Vec<Place> = places.collect();
        places.sort_by(|a, b| (a.token == 0, a.place, &a.hold).cmp(&(b.token == 0, b.place, &b.hold)));
        Self { row, places, limit }
    }
}

/// What is to become of a name.
#[derive(Clone, Debug)]
pub(crate) struct Pass {
    pub(crate) name: LockName,
    pub(crate) seen: Seen,
    pub(crate) to: To,
    /// Nobody else waits.
    pub(crate) last: bool,
}

/// The state of a name that a decision was made upon. Every grant raises the token.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) token: i64,
    pub(crate) holds: String,
    /// `None`: it may have been renewed since.
    pub(crate) expires_at: Option<i64>,
    pub(crate) waiting: i64,
}

#[derive(Clone, Debug)]
pub(crate) enum To {
    /// It stays as it is; only whether anybody waits is noted down.
    Nobody,
    /// It is free.
    Free,
    /// To one alone, by the mark of its hold.
    One(String, Duration),
    /// To these as well as to those who share it already.
    More(Vec<(String, Duration)>),
    /// To these, who are the first to share it.
    Several(Vec<(String, Duration)>),
}

/// Who got a name.
#[derive(Clone, Debug)]
pub(crate) struct Granted {
    /// The mark of the hold.
    pub(crate) hold: String,
    pub(crate) token: FencingToken,
}

/// What came of [`Session::pass_on`].
#[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "only PostgreSQL has it"))]
pub(crate) struct PassedOn {
    pub(crate) to: Granted,
    /// The new holder's. Empty: none.
    pub(crate) bell: String,
    /// Somebody goes on waiting.
    pub(crate) others: bool,
}

impl Granted {
    /// What to say to somebody who was granted a name: the mark of its hold, then the token.
    pub(crate) fn message(&self) -> String {
        format!("{}{}", self.hold, self.token)
    }
}

/// How far a place has come.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    pub(crate) row: Row,
    /// `None`: the place is gone. Zero: it waits. Otherwise, the token of its share.
    pub(crate) token: Option<i64>,
    /// How many wait before it.
    pub(crate) ahead: i64,
}

/// Which names to list.
#[derive(Clone, Debug)]
pub(crate) enum Names {
    BeginningWith(String),
    Just(LockName),
}

/// A holding as it is listed: the columns of a row, how it is held, and how many wait.
#[derive(Clone, Debug)]
pub(crate) struct Listed {
    pub(crate) row: Row,
    pub(crate) mode: Mode,
    pub(crate) waiters: i64,
}

#[derive(Clone, Debug)]
pub(crate) struct Renewal {
    pub(crate) holding: Holding,
    pub(crate) ttl: Duration,
    /// A share that was given back and is to be kept from others for so long: it is nobody's from now on.
    pub(crate) given_back: bool,
}

impl Renewal {
    pub(crate) fn new(holding: Holding, ttl: Duration) -> Self {
        Self { holding, ttl, given_back: false }
    }

    /// Whose share it is afterwards, as the tables have it.
    pub(crate) fn owner(&self) -> String {
        if self.given_back { String::new() } else { self.holding.owner.to_string() }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Release {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) hold: Hold,
    /// `None` undoes an acquisition whose reply never came.
    pub(crate) token: Option<FencingToken>,
    /// The name stays taken, by nobody, until it has been held so long. Zero: it is free at once.
    pub(crate) hold_at_least: Duration,
}

#[derive(Clone, Debug)]
pub(crate) struct HandOff {
    pub(crate) from: Holding,
    pub(crate) to: Claim,
}

/// What stands in the table about a name.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) owner: String,
    pub(crate) holds: String,
    pub(crate) token: i64,
    pub(crate) holder: String,
    pub(crate) label: String,
    /// Microseconds since the Unix epoch, as `expires_at` and `now`: all by the database's clock.
    pub(crate) acquired_at: i64,
    pub(crate) expires_at: i64,
    /// Zero: nobody waits. Otherwise rises whenever somebody joins the line.
    pub(crate) waiting: i64,
    pub(crate) now: i64,
}

/// What the row of a name tells of evictions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastEviction {
    /// The token of the present or last holding.
    pub(crate) token: i64,
    /// The token of the holding that was evicted last. Zero: none was.
    pub(crate) evicted: i64,
}

/// What stands in `holds` while the name is shared.
pub(crate) const SHARED: &str = "+";

/// The columns of [`Row`], in the order in which every backend selects them.
macro_rules! row_columns {
    () => {
        "name, owner, holds, token, holder, label, acquired_at, expires_at, waiting"
    };
    ($table:literal) => {
        concat!(
            $table,
            ".name, ",
            $table,
            ".owner, ",
            $table,
            ".holds, ",
            $table,
            ".token, ",
            $table,
            ".holder, ",
            $table,
            ".label, ",
            $table,
            ".acquired_at, ",
            $table,
            ".expires_at, ",
            $table,
            ".waiting"
        )
    };
}
pub(crate) use row_columns;

/// The columns of [`Place`], likewise.
macro_rules! place_columns {
    ($table:literal) => {
        concat!(
            $table,
            ".hold, ",
            $table,
            ".owner, ",
            $table,
            ".bell, ",
            $table,
            ".units, ",
            $table,
            ".permits, ",
            $table,
            ".place, ",
            $table,
            ".token, ",
            $table,
            ".holder, ",
            $table,
            ".label, ",
            $table,
            ".expires_at"
        )
    };
}
pub(crate) use place_columns;

impl Row {
    /// How long it is still held by one alone; `None` when it is not.
    pub(crate) fn held_for(&self) -> Option<Duration> {
        let left = u64::try_from(self.expires_at - self.now).ok().filter(|us| *us > 0)?;
        (!self.holds.is_empty() && self.holds != SHARED).then(|| Duration::from_micros(left))
    }

    /// Whether a claim could have it: nobody holds it, nobody waits.
    pub(crate) fn is_free(&self) -> bool {
        (self.holds.is_empty() || self.expires_at <= self.now) && self.waiting == 0
    }

    /// What has become of a holding.
    pub(crate) fn standing(&self, owner: Owner, hold: Hold, token: Option<FencingToken>) -> Standing {
        if self.owner != owner.to_string() || token.is_some_and(|t| t.get() != self.token) {
            Standing::Superseded
        } else if self.holds.contains(&hold.mark()) {
            Standing::Held
        } else {
            Standing::Released
        }
    }
}

#[cfg(any(feature = "mysql", feature = "sqlite"))]
impl Row {
    /// Whether an update has matched a holding that stands like that `after` it. `None`: it would have been given back, and
    /// somebody else has the name now.
    fn tells(&self, owner: Owner, hold: Hold, token: Option<FencingToken>, after: Standing) -> Option<bool> {
        let standing = self.standing(owner, hold, token);
        let overtaken = standing == Standing::Superseded && token.is_none_or(|token| self.token > token.get());
        (after != Standing::Released || !overtaken).then_some(standing == after)
    }
}

/// What has become of a holding, as far as its row tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It stands as named.
    Held,
    /// It stands as named, and it was not given back because others wait for it.
    Awaited,
    /// It was given back, and nobody has come since.
    Released,
    /// Another holding stands there, or none of ours ever did.
    Superseded,
    /// Another holding stands there, and it is not known whether ours was given back before.
    Overtaken,
    /// It stands as named, yet an update that named it did not match: nothing was done.
    Unsettled,
}

/// For how long a name is held, as a number of microseconds tells.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) fn held_for(us: i64) -> Option<Duration> {
    u64::try_from(us).ok().filter(|us| *us > 0).map(Duration::from_micros)
}

/// Durations go to the database in microseconds, which are added to the time there: not so many that the sum is no number.
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.min(CENTURY).as_micros()).unwrap_or(i64::MAX)
}

/// A token as read from a row. The tables hold positive ones only; anything else is no grant.
pub(crate) fn token(value: i64) -> Option<FencingToken> {
    FencingToken::new(value)
}

/// Brings answers that came in any order into the order of the batch.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn in_order<T, A: Clone>(
    batch: &[T],
    name: impl Fn(&T) -> &LockName,
    answers: impl IntoIterator<Item = (String, A)>,
) -> Vec<Option<A>> {
    let answers: std::collections::HashMap<String, A> = answers.into_iter().collect();
    batch.iter().map(|item| answers.get(name(item).as_str()).cloned()).collect()
}

/// Which holds of a batch were among the marks of an answer.
pub(crate) fn by_hold(
    batch: impl Iterator<Item = Hold>,
    marks: impl Iterator<Item = Result<String, sqlx::Error>>,
) -> Result<Vec<bool>, sqlx::Error> {
    let marks: std::collections::HashSet<String> = marks.collect::<Result<_, _>>()?;
    Ok(batch.map(|hold| marks.contains(&hold.mark())).collect())
}

/// The rows that can be read. One that cannot costs the others nothing.
pub(crate) fn readable<T>(rows: impl Iterator<Item = Result<T, sqlx::Error>>) -> impl Iterator<Item = T> {
    rows.filter_map(|row| row.inspect_err(|error| tracing::warn!(%error, "left out a row that cannot be read")).ok())
}

/// Which holdings of a batch an update matched, where the database tells only how many. When that leaves a doubt, the rows
/// tell: `after` is how a holding stands that was matched. `None`: what was given back, if it was, somebody has taken since.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
pub(crate) async fn matched(
    session: &mut dyn Session,
    affected: u64,
    batch: &[(&LockName, Owner, Hold, Option<FencingToken>)],
    after: Standing,
) -> Result<Vec<Option<bool>>, sqlx::Error> {
    if affected == 0 || affected == batch.len() as u64 {
        return Ok(vec![Some(affected > 0); batch.len()]);
    }
    let names: Vec<LockName> = batch.iter().map(|(name, ..)| (*name).clone()).collect();
    let looked = session.look(&names).await;
    let rows = if after == Standing::Released { looked.map_err(in_doubt)? } else { looked? };
    Ok(batch
        .iter()
        .map(|&(name, owner, hold, token)| {
            let Some(row) = rows.iter().find(|row| row.name == name.as_str()) else {
                // What was given back may have been swept since.
                return Some(after == Standing::Released);
            };
            row.tells(owner, hold, token, after)
        })
        .collect())
}

/// The error of one who looks at what became of a statement that took effect. It is as if that had not been answered: when it
/// is sent again, what it did the first time must not be taken for the work of others.
///
/// A row that cannot be read will not be read the next time either. The pump knows that from the error.
pub(crate) fn in_doubt(error: sqlx::Error) -> sqlx::Error {
    if is_unreadable(&error) { error } else { sqlx::Error::Io(std::io::Error::other(error)) }
}

/// Whether a statement was carried out, and its answer has a value in it that is none.
pub(crate) fn is_unreadable(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_))
}

/// For the verbs whose answer is that a row was found.
#[cfg(feature = "postgres")]
pub(crate) fn found(answers: Vec<Option<()>>) -> Vec<bool> {
    answers.into_iter().map(|answer| answer.is_some()).collect()
}

/// The databases whose transactions can be fenced: [`sqlx::Postgres`], [`sqlx::MySql`] (also MariaDB), [`sqlx::Sqlite`].
///
/// Sealed: nobody else can implement it.
pub trait Database: sqlx::Database + sealed::Fence + sealed::Dialect + records::Records {}

pub(crate) mod sealed {
    use std::pin::Pin;

    /// A holding in the words of its row.
    #[derive(Debug)]
    pub struct Check {
        pub name: String,
        pub owner: String,
        pub mark: String,
        pub token: i64,
        pub shared: bool,
        /// Locks are not seen by others who may write: see [`Backend`](super::Backend::is_one_of_many_writers).
        pub by_writing: bool,
    }

    /// What the row says to a transaction that wants to be fenced.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Verdict {
        /// Nobody else can be granted the name until this transaction has ended.
        Fenced,
        /// The holding has ended.
        Superseded,
        /// The transaction reads from before the holding.
        StaleSnapshot,
    }

    /// What statements on the caller's own tables are made of. Part of [`Database`](super::Database) that is nobody's business
    /// outside.
    pub trait Dialect: sqlx::Database {
        /// Encloses the name of a table or column; doubled inside.
        const QUOTE: char;
        /// As what a whole number of any width is read: `CAST(… AS …)`.
        const INTEGER: &'static str;
        /// Makes a SELECT read what is there now, not what was there when the transaction began to read.
        const PRESENT: &'static str;
        /// How a transaction begins that is going to write. `None`: as any other.
        const BEGIN: Option<&'static str>;
        /// Whether an error leaves a transaction unusable.
        const ABORTS: bool;
        /// Whether rows are locked one by one, or all at once with the database.
        const LOCKS_ROWS: bool;
        /// Whether a statement with several keys of a unique index locks only their rows.
        const LOOKS_UP_SEVERAL: bool;

        /// The statements with which a transaction begins, made from the one that the caller would have.
        fn begin(sql: sqlx::SqlStr) -> sqlx::SqlStr {
            sql
        }

        /// Ends a transaction that began with [these](Self::begin), where the driver does not do that as well.
        fn end(conn: &mut Self::Connection, ending: Ending) -> super::Job<'_, Ended> {
            let _ = (conn, ending);
            Box::pin(async { Ok(Ended::ByDriver) })
        }

        /// The rows that a statement returns.
        fn fetch<'a>(
            conn: &'a mut Self::Connection,
            query: &'a mut sqlx::QueryBuilder<Self>,
        ) -> super::Job<'a, Vec<Self::Row>>;

        /// Ends what is left of a transaction on a connection that another is to use. `false`: only closing the connection does.
        fn settle(conn: &mut Self::Connection) -> super::Job<'_, bool> {
            let _ = conn;
            Box::pin(async { Ok(false) })
        }

        /// What stands in a column that was read as [`INTEGER`](Self::INTEGER).
        fn integer(row: &Self::Row, column: usize) -> Result<i64, sqlx::Error>;

        /// Binds a whole number.
        fn push_integer(query: &mut sqlx::QueryBuilder<Self>, value: i64);

        /// How many rows a statement has matched.
        fn execute<'a>(conn: &'a mut Self::Connection, query: &'a mut sqlx::QueryBuilder<Self>) -> super::Job<'a, u64>;

        /// What makes a SELECT lock its rows.
        fn clauses(locking: Locking) -> Clauses;

        /// What to select for the row that stands for a name, up to the clauses.
        fn push_named(query: &mut sqlx::QueryBuilder<Self>, name: &str);

        /// Does what has to be done once that row is locked, so that others notice.
        fn mark<'a>(conn: &'a mut Self::Connection, locked: &'a Self::Row, name: &'a str) -> super::Job<'a, ()> {
            let _ = (conn, locked, name);
            Box::pin(async { Ok(()) })
        }

        /// What an error of a statement that locks rows says about the lock.
        fn refusal(error: &sqlx::Error) -> Option<Refusal>;

        /// Whether that error has ended the transaction although it looks like one that does not.
        fn has_rolled_back<'a>(conn: &'a mut Self::Connection, error: &'a sqlx::Error) -> super::Job<'a, bool> {
            let _ = (conn, error);
            Box::pin(async { Ok(false) })
        }

        /// Where an error [would](Self::ABORTS), keeps the next statement from ending the transaction, and bounds its time.
        /// What is returned restores the settings.
        fn guard(conn: &mut Self::Connection, within: Option<std::time::Duration>) -> super::Job<'_, String> {
            let _ = (conn, within);
            Box::pin(async { Ok(String::new()) })
        }

        /// After [`guard`](Self::guard), once the statement has succeeded or failed.
        fn unguard<'a>(conn: &'a mut Self::Connection, settings: &'a str, succeeded: bool) -> super::Job<'a, ()> {
            let _ = (conn, settings, succeeded);
            Box::pin(async { Ok(()) })
        }

        /// Where [no single rows](Self::LOCKS_ROWS) are locked, makes sure that the transaction has the lock on them all.
        fn seize<'a>(conn: &'a mut Self::Connection, table: &'a str) -> super::Job<'a, ()> {
            let _ = (conn, table);
            Box::pin(async { Ok(()) })
        }

        /// What the catalogue says about a column. `None`: it knows no such table, or no such column in it.
        fn column<'a>(
            conn: &'a mut Self::Connection,
            table: &'a crate::table::Table,
            column: &'a str,
        ) -> super::Job<'a, Catalogued>;

        /// What to select for the key of a row, so that it can be read as a key of that type.
        fn push_column(query: &mut sqlx::QueryBuilder<Self>, column: &str, key: &Self::TypeInfo) {
            let _ = key;
            query.push(column);
        }

        /// Whether keys of a type can be looked up in an index on such a column.
        fn suits(key: &Self::TypeInfo, column: &Column) -> bool {
            let _ = (key, column);
            true
        }
    }

    /// How a transaction is to end.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Ending {
        Commit,
        Rollback,
    }

    /// What came of the end of a transaction.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Ended {
        /// It is still open: the driver is to end it.
        ByDriver,
        /// It ended as it was to, and the session is as it was before.
        AsAsked,
        /// It had ended before it was to be committed: rolled back, or committed, by one of its own statements.
        Before,
    }

    /// How rows are to be locked.
    #[derive(Clone, Copy, Debug)]
    pub struct Locking {
        pub shared: bool,
        /// Also against those who only refer to the row by its key.
        pub key_update: bool,
        pub wait: Wait,
    }

    /// What to do about rows that others have locked.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Wait {
        /// Wait, as long as the session's own settings allow.
        Unbounded,
        /// Wait, but not longer.
        AtMost(std::time::Duration),
        /// Fail.
        Refuse,
        /// Leave them out.
        Skip,
    }

    /// What stands before a SELECT, right behind the word, and at its end.
    #[derive(Debug, Default)]
    pub struct Clauses {
        pub before: String,
        pub hint: String,
        pub after: String,
    }

    /// Why a row was not locked.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Refusal {
        /// Somebody else has it.
        Taken,
        /// The statement ran into a bound on its time.
        Cut,
        /// The transaction reads from before the row became what it is.
        Stale,
        /// The transaction cannot get the lock on the database.
        Deferred,
    }

    /// An answer of the catalogue.
    #[derive(Debug)]
    pub enum Catalogued {
        Known(Column),
        /// There is no such table, or it has no such column.
        Unknown,
        /// To look into it would be the beginning of what the transaction reads. Another connection can, in this schema.
        Elsewhere(String),
    }

    /// What the catalogue says about a column.
    #[derive(Clone, Debug)]
    pub struct Column {
        /// Its type, as the database calls it.
        pub type_name: String,
        /// A unique index on this column alone, if possible one without an obstacle.
        pub unique: Option<Unique>,
        /// The engine that keeps the table, if it locks no rows.
        pub rowless: Option<String>,
    }

    /// A unique index.
    #[derive(Clone, Debug)]
    pub struct Unique {
        pub name: String,
        /// Why the database would not look a single row up in it.
        pub obstacle: Option<String>,
    }

    impl Unique {
        /// An index that can be used.
        #[cfg(any(feature = "postgres", feature = "sqlite"))]
        pub fn usable(name: String) -> Self {
            Self { name, obstacle: None }
        }
    }

    /// The part of [`Database`](super::Database) that is nobody's business outside.
    pub trait Fence: sqlx::Database {
        /// Which kind of backend the transaction must belong to.
        const KIND: super::Kind;

        /// Checks the holding and keeps everybody else from it until the transaction ends.
        fn fence<'a>(
            conn: &'a mut Self::Connection,
            check: &'a Check,
        ) -> Pin<Box<dyn Future<Output = Result<Verdict, sqlx::Error>> + Send + 'a>>;
    }
}

/// The kinds of database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Kind {
    Postgres,
    MySql,
    Sqlite,
}

#[cfg(all(test, any(feature = "mysql", feature = "sqlite")))]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::*;

    /// Several were released in one statement, not all of them were there, and somebody was faster than the look at the rows.
    #[test]
    fn release_is_not_called_lost_because_somebody_has_taken_the_name_since() {
        let (owner, hold, token) = (Owner::random(), Hold::random(), FencingToken::new(7).expect("positive"));
        let row = |owner: String, holds: String, token| Row {
            name: "a".into(),
            owner,
            holds,
            token,
            holder: String::new(),
            label: String::new(),
            acquired_at: 0,
            expires_at: 0,
            waiting: 0,
            now: 0,
        };
        let tells = |row: Row| row.tells(owner, hold, Some(token), Standing::Released);
        let other = || (Owner::random().to_string(), Hold::random().mark());
        assert_eq!(tells(row(owner.to_string(), String::new(), 7)), Some(true), "given back");
        assert_eq!(tells(row(owner.to_string(), hold.mark(), 7)), Some(false), "others wait");
        assert_eq!(tells(row(String::new(), String::new(), 7)), Some(false), "evicted");
        assert_eq!(tells(row(other().0, other().1, 8)), None, "taken, before or after");
        assert_eq!(tells(row(owner.to_string(), other().1, 8)), None, "taken by another hold of the same owner");
    }
}
