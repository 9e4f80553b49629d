//! A critical section that leases guard and that counts its own occupants in all processes: a
//! directory with a file for each occupant. The tests and the worker include this file.

#![allow(dead_code, unreachable_pub, reason = "included by several tests")]
#![allow(clippy::expect_used, clippy::panic, reason = "for tests")]

use std::fs;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use sqlock::{Lease, Locks};

/// How an occupant shares the critical section.
#[derive(Clone, Copy, Debug)]
pub enum AccessMode {
    Alone,
    Shared,
    /// A number of permits, and the limit.
    Permits(u32, u32),
}

impl FromStr for AccessMode {
    type Err = String;

    /// `alone`, `shared` or `2/3`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((n, of)) => Ok(Self::Permits(n.parse().expect("a number"), of.parse().expect("a number"))),
            None if text == "alone" => Ok(Self::Alone),
            None if text == "shared" => Ok(Self::Shared),
            None => Err(format!("error {text} is not an access mode")),
        }
    }
}

impl AccessMode {
    pub async fn acquire(self, locks: &Locks, name: &str, ttl: Duration) -> sqlock::Result<Lease> {
        match self {
            Self::Alone => locks.lease(name).ttl(ttl).acquire().await,
            Self::Shared => locks.lease(name).ttl(ttl).shared().acquire().await,
            Self::Permits(n, of) => locks.semaphore(name, of).ttl(ttl).acquire_many(n).await,
        }
    }

    /// Returns the permits of an occupant. 0: exclusive.
    fn units(self) -> u32 {
        match self {
            Self::Alone => 0,
            Self::Shared => 1,
            Self::Permits(n, _) => n,
        }
    }

    fn room(self) -> u32 {
        match self {
            Self::Alone => 0,
            Self::Shared => u32::MAX,
            Self::Permits(_, of) => of,
        }
    }
}

#[derive(Clone, Debug)]
pub struct CriticalSection(PathBuf);

/// An occupant, which leaves when it is dropped.
pub struct Occupant(PathBuf);

impl Drop for Occupant {
    fn drop(&mut self) {
        fs::remove_file(&self.0).expect("it was there");
    }
}

impl CriticalSection {
    pub fn of(dir: impl Into<PathBuf>) -> Self {
        Self(dir.into())
    }

    /// Enters the section. `Err`: the occupants must exclude each other.
    pub fn enter(&self, manner: AccessMode) -> Result<(Occupant, u32), String> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let own = self.0.join(format!("{}-{}-{serial}", manner.units(), std::process::id()));
        fs::write(&own, "").expect("a file can be made");
        let presence = Occupant(own);
        let together = self.present();
        let taken: u32 = together.iter().sum();
        let alone = together.iter().filter(|units| **units == 0).count();
        if alone > 0 && together.len() > 1 || taken > manner.room() {
            return Err(format!("error inside together: {together:?}"));
        }
        Ok((presence, taken))
    }

    /// Returns the permits of each occupant.
    fn present(&self) -> Vec<u32> {
        let seen: Vec<PathBuf> =
            fs::read_dir(&self.0).expect("the directory").map(|entry| entry.expect("an entry").path()).collect();
        // Occupants that still exist also existed when the last one was seen, so all of them
        // overlap.
        let units = |path: &PathBuf| path.file_name()?.to_str()?.split_once('-')?.0.parse::<u32>().ok();
        seen.iter().filter(|path| path.exists()).filter_map(units).collect()
    }

    /// Returns the permits of all occupants together.
    pub fn permits_inside(&self) -> u32 {
        self.present().iter().sum()
    }

    /// Ends the visits of all processes.
    pub fn close(&self) {
        fs::write(self.0.join("closed"), "").expect("a file can be made");
    }

    pub fn is_closed(&self) -> bool {
        self.0.join("closed").exists()
    }

    /// Enters and leaves repeatedly until the section is closed.
    pub async fn come_and_go(
        self,
        locks: Locks,
        name: String,
        manner: AccessMode,
        stay: Duration,
    ) -> Result<Visits, String> {
        const TTL: Duration = Duration::from_secs(600);
        let mut visits = Visits::default();
        while !self.is_closed() {
            let came = Instant::now();
            let lease = manner.acquire(&locks, &name, TTL).await.map_err(|error| format!("error {error}"))?;
            visits.longest_wait = visits.longest_wait.max(came.elapsed());
            visits.count += 1;
            let (presence, together) = self.enter(manner)?;
            visits.together = visits.together.max(together);
            tokio::time::sleep(stay).await;
            drop(presence);
            lease.release().await.map_err(|error| format!("error {error}"))?;
        }
        Ok(visits)
    }
}

/// The counts of visits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Visits {
    pub count: u64,
    pub longest_wait: Duration,
    /// The greatest number of simultaneous occupants: permits, or readers.
    pub together: u32,
}

impl Visits {
    pub fn and(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            longest_wait: self.longest_wait.max(other.longest_wait),
            together: self.together.max(other.together),
        }
    }

    /// Formats the counts as a worker reports them.
    pub fn to_line(self) -> String {
        format!("visits {} {} {}", self.count, self.longest_wait.as_millis(), self.together)
    }

    pub fn of_line(line: &str) -> Self {
        let words: Vec<u64> = line.split(' ').skip(1).map(|n| n.parse().unwrap_or_else(|_| panic!("{line}"))).collect();
        let [count, longest, together] = words[..] else { panic!("{line}") };
        let together = u32::try_from(together).expect("a small number");
        Self { count, longest_wait: Duration::from_millis(longest), together }
    }
}
