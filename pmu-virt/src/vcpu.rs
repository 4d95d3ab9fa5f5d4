//! One virtual CPU's PMU: registers, grant, logical counters, backend.

mod access;
mod counting;
mod report;

pub use report::CounterReport;

use crate::backend::{CounterBackend, UnavailableReason};
use crate::ids::{SlotIndex, SlotSet};
use crate::model::{MAX_FIXED, MAX_PROGRAMMABLE, PmuModel};
use crate::progress::Progress;
use crate::request::CountRequest;
use arbiter::{CounterId, CounterSet, Grant};

/// What a read comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The value to give to the guest.
    Value(u64),
    /// #GP(0).
    Gp,
    /// The index belongs to no register of this PMU.
    NotHandled,
}

/// What a write comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The write took place (reserved bits may have been dropped).
    Done,
    /// #GP(0); nothing changed.
    Gp,
    /// The index belongs to no register of this PMU.
    NotHandled,
}

/// What the VMM has to do for the counts; changes only at writes and resets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Tell the ring in [`Progress::Left`], and keep [`VcpuPmu::deadline`].
    pub ring: bool,
    /// Step the guest and tell each instruction.
    pub stepping: bool,
    /// Some counter is running.
    pub counting: bool,
}

/// A performance monitoring interrupt to be raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmiRequest {
    /// Counters that overflowed.
    pub counters: CounterSet,
}

const COUNTERS: usize = (MAX_PROGRAMMABLE + MAX_FIXED) as usize;

/// A counter as the guest sees it.
#[derive(Debug, Default)]
struct Logical {
    /// What its control asks for, decoded; `None` until that is written.
    request: Option<CountRequest>,
    /// Count at the last settlement, always within the counter's width.
    value: u64,
    /// The backend's count at that time.
    settled: u64,
    /// Physical counter that counts for it, and for which request.
    bound: Option<(SlotIndex, CountRequest)>,
    running: bool,
    unavailable: Option<UnavailableReason>,
}

/// One vCPU's PMU. Owned by the vCPU's thread.
///
/// Accesses take place between [`Progress::Left`] and [`Progress::Entered`].
/// No method allocates, apart from `new` and `report`.
#[derive(Debug)]
pub struct VcpuPmu {
    model: PmuModel,
    backend: Box<dyn CounterBackend>,
    grant: Grant,
    select: [u64; MAX_PROGRAMMABLE as usize],
    fixed_control: u64,
    global_control: u64,
    global_status: u64,
    counters: [Logical; COUNTERS],
    slots: SlotSet,
    pending: CounterSet,
    needs: Needs,
}

impl VcpuPmu {
    /// A PMU in its reset state.
    pub fn new(model: PmuModel, backend: Box<dyn CounterBackend>, grant: Grant) -> Self {
        let global_control = model.global_control_reset();
        VcpuPmu {
            model,
            backend,
            grant,
            select: [0; MAX_PROGRAMMABLE as usize],
            fixed_control: 0,
            global_control,
            global_status: 0,
            counters: Default::default(),
            slots: SlotSet::EMPTY,
            pending: CounterSet::EMPTY,
            needs: Needs::default(),
        }
    }

    /// Brings every register to its reset value, stops and frees every
    /// physical counter and forgets pending PMIs.
    pub fn reset(&mut self) {
        for counter in &mut self.counters {
            if let Some((slot, _)) = counter.bound {
                self.backend.stop(slot);
                self.backend.release(slot);
            }
            *counter = Logical::default();
        }
        self.select = [0; MAX_PROGRAMMABLE as usize];
        self.fixed_control = 0;
        self.global_control = self.model.global_control_reset();
        self.global_status = 0;
        self.slots = SlotSet::EMPTY;
        self.pending = CounterSet::EMPTY;
        self.needs = Needs::default();
    }

    /// Takes in what happened to the vCPU: counts are settled and overflows
    /// raised at `Left`, and at each instruction that completes an overflow.
    pub fn observe(&mut self, progress: Progress) {
        self.backend.observe(&progress);
        match progress {
            Progress::Entered { .. } => {}
            Progress::Left { .. } => {
                if self.needs.counting {
                    // Settling compares the counts themselves, so the notice
                    // of the backend has done its work by making us come here.
                    self.backend.take_overflows();
                    self.settle_all();
                }
            }
            Progress::Retired { .. } | Progress::Delivered { .. } | Progress::Lost { .. } => {
                let overflowed = self.backend.take_overflows();
                if !overflowed.is_empty() {
                    self.settle_slots(overflowed);
                }
            }
        }
    }

    /// The PMI to be raised for the overflows since the last call; those of
    /// several counters, or several of one, merge into one request.
    pub fn take_pmi(&mut self) -> Option<PmiRequest> {
        let counters = std::mem::take(&mut self.pending);
        (!counters.is_empty()).then_some(PmiRequest { counters })
    }

    /// TSC value at which the guest has to be interrupted; known after
    /// [`Progress::Entered`].
    pub fn deadline(&self) -> Option<u64> {
        self.backend.deadline()
    }

    /// What the VMM has to do while the guest runs.
    #[inline]
    pub fn needs(&self) -> Needs {
        self.needs
    }

    /// The model that the guest sees.
    pub fn model(&self) -> &PmuModel {
        &self.model
    }

    /// Name of the backend that counts.
    pub fn backend_name(&self) -> &'static str {
        self.backend.name()
    }

    /// What CPUID has to say with this backend.
    pub fn cpuid(&self) -> crate::cpuid::PmuCpuid {
        self.model.cpuid(self.backend.as_ref())
    }

    fn refresh_needs(&mut self) {
        let counting = self.counters.iter().any(|counter| counter.running);
        self.needs = Needs {
            ring: counting && self.backend.needs_ring(),
            stepping: counting && self.backend.needs_stepping(),
            counting,
        };
    }
}

/// Position of a counter of the model in `VcpuPmu::counters`.
#[inline]
fn index_of(counter: CounterId) -> usize {
    usize::from(match counter {
        CounterId::Programmable(n) => n,
        CounterId::Fixed(n) => MAX_PROGRAMMABLE + n,
    })
}
