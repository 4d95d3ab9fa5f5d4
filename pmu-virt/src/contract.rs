//! The contract that every counter backend has to keep, as one suite.
//!
//! [`check`] takes a factory of fresh backends and a [`Driver`] that makes
//! events happen. It names each clause that is broken and by what. The suite
//! allocates and takes its time: it is for tests and for `doctor`.

mod clauses;
mod drivers;
#[allow(unsafe_code)]
mod sys;

#[cfg(feature = "toml")]
pub use drivers::SimDriver;
pub use drivers::{ClockDriver, EmuDriver, PerfDriver, StepDriver};

use std::fmt;
use std::ops::RangeInclusive;

use pmu_model::{CountRequest, Ring, Tsc};

use crate::backend::CounterBackend;

/// Makes countable events happen in front of a backend.
pub trait Driver {
    /// What the events are: a request for both rings that the backend must
    /// be able to count.
    fn request(&self) -> CountRequest;

    /// A request that the backend cannot count.
    fn uncountable(&self) -> CountRequest;

    /// The fewest events that the driver can make happen and tell from those
    /// that happen on the way; runs are of some hundred units.
    fn unit(&self) -> u64 {
        1
    }

    /// Lets about `events` events happen in `ring`, from an entry to an exit,
    /// and tells `backend` of them. Returns by how much the count of a
    /// running counter of that ring has to have grown.
    fn run(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        events: u64,
    ) -> RangeInclusive<u64>;

    /// Enters the guest, asks `backend` for its deadline, and leaves again
    /// with no event in between.
    fn deadline(&mut self, backend: &mut dyn CounterBackend) -> Asked;

    /// Lets so many instructions be executed in `ring` at once, each of which makes as many
    /// events happen as one can; returns how many that is. `None` from a driver whose events
    /// no processor in software makes happen, which does nothing.
    fn execute(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        instructions: u64,
    ) -> Option<u64> {
        let _ = (backend, ring, instructions);
        None
    }
}

/// What became of asking a backend for its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Nobody did: this driver's events are not tied to time.
    NotTimed,
    /// Its answer.
    Deadline(Option<Tsc>),
}

/// One promise of [`CounterBackend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Clause {
    /// A freshly programmed slot counts nothing before it is started.
    StartsAtZero,
    /// A running slot counts what happens.
    CountsWhatHappens,
    /// A stopped slot stands still.
    StoppedStandsStill,
    /// A slot that is started again goes on where it stood.
    Resumes,
    /// A count never falls.
    NeverFalls,
    /// A released slot has no count.
    ReleasedHasNoCount,
    /// A slot that is programmed again starts at 0 and is stopped.
    ReprogrammedStartsAnew,
    /// Slots do not disturb each other.
    SlotsAreIndependent,
    /// A set of slots that is paused stands still while another vCPU runs, and
    /// goes on where it stood.
    SetsActAsOne,
    /// Every slot below the capacity works, none above.
    CapacityIsTrue,
    /// A counter of one ring leaves the other ring's events out.
    RingsAreSplit,
    /// The ring is asked for if and only if a running counter needs it.
    RingOnDemand,
    /// An armed overflow is told, once, when the events have happened.
    OverflowIsTold,
    /// It is not told before.
    OverflowIsNotEarly,
    /// An overflow that is taken back is not told.
    DisarmedIsSilent,
    /// A deadline is given while an overflow is armed at a running slot, and
    /// none while nothing is armed.
    DeadlineIsGiven,
    /// A horizon is given while an overflow is armed at a running slot, and none while
    /// nothing is armed. Who executes no further at once finds the overflow behind the very
    /// instruction that completes it, and gets there in few steps.
    HorizonIsKept,
    /// What cannot be counted is refused, and its slot has no count.
    UnavailableIsNoZero,
    /// A slot that is not programmed has no count, and calls at it do nothing.
    UnprogrammedIsNoZero,
    /// `plan`, `program` and `read` agree on the provenance.
    ProvenanceAgrees,
}

impl fmt::Display for Clause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Clause::StartsAtZero => "a programmed slot starts at zero",
            Clause::CountsWhatHappens => "a running slot counts what happens",
            Clause::StoppedStandsStill => "a stopped slot stands still",
            Clause::Resumes => "a restarted slot goes on where it stood",
            Clause::NeverFalls => "a count never falls",
            Clause::ReleasedHasNoCount => "a released slot has no count",
            Clause::ReprogrammedStartsAnew => "a slot programmed again starts anew",
            Clause::SlotsAreIndependent => "slots are independent",
            Clause::SetsActAsOne => "a set of slots pauses and resumes as one",
            Clause::CapacityIsTrue => "the capacity is true",
            Clause::RingsAreSplit => "rings are split",
            Clause::RingOnDemand => "the ring is asked for on demand",
            Clause::OverflowIsTold => "an overflow is told, once",
            Clause::OverflowIsNotEarly => "an overflow is not told early",
            Clause::DisarmedIsSilent => "a disarmed overflow is silent",
            Clause::DeadlineIsGiven => "a deadline is given when one is needed",
            Clause::HorizonIsKept => "no overflow comes before the horizon",
            Clause::UnavailableIsNoZero => "what is unavailable is not zero",
            Clause::UnprogrammedIsNoZero => "an unprogrammed slot is not zero",
            Clause::ProvenanceAgrees => "the provenance is the same everywhere",
        })
    }
}

/// A clause that a backend broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub clause: Clause,
    /// What was seen instead.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.clause, self.detail)
    }
}

/// Every clause, in the order in which they are checked.
pub fn all_clauses() -> impl Iterator<Item = Clause> {
    clauses::ALL.iter().map(|(clause, _)| *clause)
}

/// Holds fresh backends of `factory` to every clause.
///
/// # Errors
/// Every clause that was broken, with what was seen.
pub fn check(
    factory: impl Fn() -> Box<dyn CounterBackend>,
    mut driver: impl Driver,
) -> Result<(), Vec<Violation>> {
    let violations: Vec<_> = clauses::ALL
        .iter()
        .filter_map(|(clause, holds)| {
            let detail = holds(&factory, &mut driver).err()?;
            Some(Violation {
                clause: *clause,
                detail,
            })
        })
        .collect();
    if violations.is_empty() {
        Ok(())
    } else {
        Err(violations)
    }
}
