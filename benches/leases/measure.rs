//! Rounds, ratios, and their display.

use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use crate::cpu::Usage;

/// How long to measure.
pub(crate) struct Pace {
    pub(crate) name: &'static str,
    pub(crate) rounds: usize,
    /// The time of one side in one round.
    pub(crate) turn: Duration,
    /// Cycles on the hot name, and the time after which fewer suffice.
    pub(crate) cycles: usize,
    pub(crate) at_most: Duration,
}

impl Pace {
    pub(crate) const FULL: Self = Self {
        name: "full",
        rounds: 7,
        turn: Duration::from_millis(400),
        cycles: 200_000,
        at_most: Duration::from_secs(80),
    };
    pub(crate) const QUICK: Self = Self {
        name: "quick",
        rounds: 3,
        turn: Duration::from_millis(200),
        cycles: 20_000,
        at_most: Duration::from_secs(20),
    };
}

/// One line of the table.
#[derive(Default)]
pub(crate) struct Line {
    pub(crate) database: String,
    pub(crate) metric: char,
    pub(crate) what: String,
    /// The measured peer. `None`: sqlock.
    pub(crate) peer: Option<&'static str>,
    pub(crate) unit: &'static str,
    pub(crate) ours: f64,
    pub(crate) floor: Option<f64>,
    /// The ratios of the contender to the floor, one for each round.
    pub(crate) ratios: Vec<f64>,
    pub(crate) aim: Option<Aim>,
    /// The processor time of the contender and the floor.
    pub(crate) cpu: Option<(Usage, Usage)>,
    pub(crate) note: String,
}

/// The aim for a ratio.
#[derive(Clone, Copy)]
pub(crate) enum Aim {
    AtMost(f64),
    AtLeast(f64),
}

impl Aim {
    fn is_met(self, ratio: f64) -> bool {
        match self {
            Self::AtMost(most) => ratio <= most,
            Self::AtLeast(least) => ratio >= least,
        }
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(most) => write!(f, "≤ {most:.2}"),
            Self::AtLeast(least) => write!(f, "≥ {least:.2}"),
        }
    }
}

impl Line {
    pub(crate) const HEAD: &str =
        "                                        sqlock      floor  unit        ratio (of the rounds)       aim";

    fn ratio(&self) -> Option<f64> {
        (!self.ratios.is_empty()).then(|| median(&self.ratios))
    }

    /// Returns the smallest and the largest ratio of a round.
    fn spread(&self) -> (f64, f64) {
        self.ratios.iter().fold((f64::INFINITY, 0.0), |(low, high), r| (r.min(low), r.max(high)))
    }

    pub(crate) fn json(&self) -> Value {
        let (low, high) = self.spread();
        let aim = self.aim.map(|aim| match aim {
            Aim::AtMost(most) => json!({ "at_most": most }),
            Aim::AtLeast(least) => json!({ "at_least": least }),
        });
        json!({
            "database": self.database,
            "metric": self.metric.to_string(),
            "what": self.what,
            "contender": self.peer.unwrap_or("sqlock"),
            "unit": self.unit,
            "value": self.ours,
            "floor": self.floor,
            "ratio": self.ratio(),
            "ratio_low": self.ratio().map(|_| low),
            "ratio_high": self.ratio().map(|_| high),
            "rounds": self.ratios.len(),
            "aim": aim,
            "aim_met": self.aim.zip(self.ratio()).map(|(aim, ratio)| aim.is_met(ratio)),
            "cpu": self.cpu.as_ref().map(|(ours, _)| ours.json()),
            "floor_cpu": self.cpu.as_ref().map(|(_, floor)| floor.json()),
            "note": self.note,
        })
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let floor = self.floor.map_or("–".into(), number);
        let what = self.peer.map_or_else(|| self.what.clone(), |peer| format!("{peer}: {}", self.what));
        write!(f, "{} {what:<32} {:>11} {floor:>10}  {:<10}", self.metric, number(self.ours), self.unit)?;
        if let Some(ratio) = self.ratio() {
            let (low, high) = self.spread();
            write!(f, " {ratio:>6.3} ({low:.3} … {high:.3})")?;
            if let Some(aim) = self.aim {
                write!(f, "  {aim} {}", if aim.is_met(ratio) { "met" } else { "MISSED" })?;
            }
        }
        if let Some((ours, floor)) = &self.cpu {
            write!(f, "  CPU {ours} µs, floor {floor} µs")?;
        }
        if !self.note.is_empty() {
            write!(f, "  {}", self.note)?;
        }
        Ok(())
    }
}

fn number(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v => format!("{v:.1}"),
    }
}

pub(crate) fn median(values: &[f64]) -> f64 {
    percentile(values, 50)
}

pub(crate) fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    sorted.get((sorted.len() * percent / 100).min(last)).copied().unwrap_or(f64::NAN)
}
