//! Where counts come from: one trait, and the backends behind it.

mod clock;
mod combined;
mod emu;
mod instructions;
pub mod msr;
mod open;
mod patience;
pub mod perf;
#[cfg(feature = "toml")]
mod sim;
mod slots;
mod sources;
mod step;

pub use clock::ClockBackend;
pub use combined::CombinedBackend;
pub use emu::{EmuBackend, EmuCycles};
pub use msr::{HostCpuid, MsrBackend, MsrDevice, MsrOptions, MsrRefusal, MsrReport};
pub use open::{BackendEnv, BackendError, BackendSummary, backend_names};
#[cfg(feature = "toml")]
pub use sim::{RateError, RateProblem, RateTable, SimBackend, SimClocks};
pub use sources::{Source, Sources};
pub use step::StepBackend;

use std::fmt::Debug;
use std::num::NonZeroU64;

use pmu_model::{
    Constraint, CountRequest, LossReason, OwnerId, Progress, Provenance, Reading, SlotIndex,
    SlotSet, Tsc, Unavailable,
};

/// How a backend would count a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountPlan {
    /// How well.
    pub provenance: Provenance,
    /// On which slots.
    pub constraint: Constraint,
}

/// A source of counts: a set of physical counters, addressed by slot.
///
/// A slot goes through `program` (stopped, count 0), any number of `start` and
/// `stop`, and `release`. Calls at a slot that is not programmed change
/// nothing, and reading it says so. Counters are programmed, started and
/// stopped while the guest does not run, that is outside of an interval from
/// [`Progress::Entered`] to [`Progress::Left`].
pub trait CounterBackend: Send + Debug {
    /// Its name, as in `--counters`.
    fn name(&self) -> &'static str;

    /// Slots that it has, at most 128. Slots of several vCPUs may be
    /// programmed at once; a source whose stopped counters cost nothing offers
    /// more slots than one vCPU needs.
    fn capacity(&self) -> usize;

    /// How it would count `request`.
    ///
    /// # Errors
    /// Why it cannot.
    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable>;

    /// Binds a slot to a request: stopped, with count 0. What it counted
    /// before is forgotten.
    ///
    /// # Errors
    /// Why it cannot; the slot is then not programmed.
    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable>;

    /// Frees a slot; it counts no longer.
    fn release(&mut self, slot: SlotIndex);

    /// Lets a programmed slot count from now on.
    fn start(&mut self, slot: SlotIndex);

    /// Freezes a slot's count.
    fn stop(&mut self, slot: SlotIndex);

    /// Starts every slot of a set: one operation where the source has a
    /// common enable.
    fn resume(&mut self, slots: SlotSet) {
        for slot in slots.iter() {
            self.start(slot);
        }
    }

    /// Stops every slot of a set, likewise. The counts stand still until
    /// [`CounterBackend::resume`], whoever runs in between.
    fn pause(&mut self, slots: SlotSet) {
        for slot in slots.iter() {
            self.stop(slot);
        }
    }

    /// The vCPU for which slots are programmed, started and stopped from now
    /// on.
    fn attach(&mut self, owner: OwnerId) {
        let _ = owner;
    }

    /// Events since `program`. Never falls.
    fn read(&self, slot: SlotIndex) -> Reading;

    /// Asks for one overflow when `after` further events have been counted;
    /// `None` takes an earlier request back.
    fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>);

    /// [`CounterBackend::arm`] for somebody to whom a little later is as good, so that one
    /// exit serves several overflows. A source that is told by hardware has no use for it.
    fn arm_about(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        self.arm(slot, after);
    }

    /// What happened to the vCPU.
    fn observe(&mut self, progress: &Progress);

    /// Slots whose armed overflow came, each told once. A running slot that has lost
    /// its counter is told as well, so that its owner looks: a reading says so.
    fn take_overflows(&mut self) -> SlotSet;

    /// TSC value at which the guest has to be interrupted, known after
    /// [`Progress::Entered`]: an armed overflow, the last of several that may wait, or a
    /// sample of the ring.
    fn deadline(&self) -> Option<Tsc>;

    /// Ticks for which a processor in software may go on before an armed overflow of a running
    /// slot can come, at least 1; none while nothing is armed. An instruction takes one or
    /// more of them, and so does a delivery. Who goes no further at once, and tells
    /// ([`Progress::Executed`]), stops behind the very instruction that completes an overflow.
    /// A source that is told no such sums has nothing to say.
    fn horizon(&self) -> Option<u64> {
        None
    }

    /// Whether a running slot needs the ring in [`Progress::Left`].
    fn needs_ring(&self) -> bool {
        false
    }

    /// Whether a running slot has to be told every instruction.
    fn needs_stepping(&self) -> bool {
        false
    }

    /// Whether an overflow may be noticed some instructions after the one that completed
    /// it. A source that sees each instruction says no.
    fn skids(&self) -> bool {
        true
    }

    /// Why a slot's count is no longer exact, if it once was.
    fn loss(&self, slot: SlotIndex) -> Option<LossReason> {
        let _ = slot;
        None
    }

    /// Whether a stopped slot may count on for another vCPU as it is programmed.
    /// False where it belongs to the vCPU for which it was programmed.
    fn is_shared(&self, slot: SlotIndex) -> bool {
        let _ = slot;
        false
    }

    /// Names of the sources that count, in order of preference: one, but for a
    /// combination.
    fn sources(&self) -> Vec<&'static str> {
        vec![self.name()]
    }

    /// Name of the source behind a slot; differs from [`CounterBackend::name`]
    /// in a combination of sources.
    fn source(&self, slot: SlotIndex) -> &'static str {
        let _ = slot;
        self.name()
    }
}
