//! `perf`: the host's kernel counts, through `perf_event_open(2)`.
//!
//! - A vCPU has at most two groups of events on its core's thread, one of
//!   hardware and one of the kernel's software. Events belong to the thread
//!   that opens them and cannot be written: counts are told from the opening.
//! - A group's leader counts nothing and is pinned; pausing a vCPU is one call
//!   on it. Hardware events leave the host out by themselves, software events
//!   are switched at each entry and exit while one of them runs.
//! - One read tells all counts of a group; it serves until the next entry.
//! - An overflow is a signal to this thread, noted by [`note_overflow_signal`].
//!   Whether one came, and whose, is then told by the counts.
//! - A group that the kernel takes away, or that answers wrongly, is closed;
//!   its slots are unavailable until they are programmed anew, and their owners
//!   hear of it at the exit.

mod group;
mod inner;
mod member;
mod plan;
mod probe;
mod scale;
mod signal;
#[allow(unsafe_code)]
mod sys;
mod syscalls;
mod trials;

pub use probe::{PerfSupport, probe};
pub use signal::note_overflow_signal;
pub use syscalls::{Errno, EventFd, EventSource, EventSpec, GenericEvent, PerfSyscalls};

use std::cell::RefCell;
use std::num::NonZeroU64;

use pmu_model::{
    Constraint, CountRequest, Nanos, OwnerId, Progress, Provenance, Reading, SlotIndex, SlotSet,
    Tsc, Unavailable,
};

use super::{BackendEnv, BackendError, CountPlan, CounterBackend};
use inner::Inner;
use sys::HostPerf;

const NAME: &str = "perf";

/// Slots: more than vCPUs of a core need, and few enough descriptors.
const CAPACITY: usize = 64;

/// Shortest time to an overflow that a clock is armed for.
/// With signals much more often a guest makes no progress.
const FLOOR: Nanos = Nanos(100_000);

/// Counts with the host's kernel.
///
/// It serves one core: its slots are to be programmed, and its vCPUs run, on
/// one thread. What finds itself on another is told as lost.
#[derive(Debug)]
pub struct PerfBackend {
    /// A reading asks the kernel, which takes what a borrow of `self` hides.
    inner: RefCell<Inner>,
}

impl PerfBackend {
    /// The backend on the host's kernel.
    ///
    /// # Errors
    /// [`BackendError::Cannot`]: the host lets us open no event at all, or the
    /// VMM has no signal for overflows.
    pub fn new(env: &BackendEnv) -> Result<Self, BackendError> {
        PerfBackend::on_host(HostPerf::default(), env)
    }

    /// The same, but hardware events count what the thread does outside of guests
    /// too. For a machine that runs none, in which they would never count otherwise.
    pub(crate) fn without_guests(env: &BackendEnv) -> Result<Self, BackendError> {
        PerfBackend::on_host(HostPerf::without_guests(), env)
    }

    fn on_host(mut kernel: HostPerf, env: &BackendEnv) -> Result<Self, BackendError> {
        let cannot = |reason| BackendError::Cannot {
            backend: NAME,
            reason,
        };
        if env.overflow_signal <= 0 {
            let reason = "no signal was given for its overflows".to_owned();
            return Err(cannot(reason));
        }
        match kernel.open(&EventSpec::LEADER, None) {
            Ok(fd) => kernel.close(fd),
            Err(errno) => return Err(cannot(probe::refusal(errno, probe::paranoid()))),
        }
        let floor = probe::sample_floor().unwrap_or_default().max(FLOOR);
        Ok(PerfBackend::on(Box::new(kernel), env, floor))
    }

    /// The backend on another kernel: a model for tests, or one that fails.
    pub fn with_syscalls(kernel: Box<dyn PerfSyscalls>, env: &BackendEnv) -> Self {
        PerfBackend::on(kernel, env, FLOOR)
    }

    fn on(kernel: Box<dyn PerfSyscalls>, env: &BackendEnv, floor: Nanos) -> Self {
        PerfBackend {
            inner: RefCell::new(Inner::new(kernel, *env, floor)),
        }
    }
}

impl CounterBackend for PerfBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capacity(&self) -> usize {
        CAPACITY
    }

    /// Hardware events share the host's counters; everything else has a slot
    /// of its own for the asking.
    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        let mut inner = self.inner.borrow_mut();
        let event = inner.choose(request);
        let event = event.map_err(|reason| Unavailable { reason })?;
        Ok(CountPlan {
            provenance: event.source.provenance(),
            constraint: Constraint::slots(inner.room(&event)),
        })
    }

    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        let programmed = self.inner.get_mut().program(slot, request);
        programmed.map_err(|reason| Unavailable { reason })
    }

    fn release(&mut self, slot: SlotIndex) {
        self.inner.get_mut().release(slot);
    }

    fn start(&mut self, slot: SlotIndex) {
        self.resume(SlotSet::from_iter([slot]));
    }

    fn stop(&mut self, slot: SlotIndex) {
        self.pause(SlotSet::from_iter([slot]));
    }

    fn resume(&mut self, slots: SlotSet) {
        self.inner.get_mut().set_running(slots, true);
    }

    fn pause(&mut self, slots: SlotSet) {
        self.inner.get_mut().set_running(slots, false);
    }

    fn attach(&mut self, owner: OwnerId) {
        self.inner.get_mut().attach(owner);
    }

    fn read(&self, slot: SlotIndex) -> Reading {
        self.inner.borrow_mut().read(slot)
    }

    fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        self.inner.get_mut().arm(slot, after);
    }

    fn observe(&mut self, progress: &Progress) {
        match *progress {
            Progress::Entered { tsc } => self.inner.get_mut().enter(tsc),
            Progress::Left { tsc, .. } => self.inner.get_mut().leave(tsc),
            // The kernel sees for itself what happens in between.
            Progress::Retired { .. }
            | Progress::Delivered { .. }
            | Progress::Executed { .. }
            | Progress::Lost { .. } => {}
        }
    }

    fn take_overflows(&mut self) -> SlotSet {
        self.inner.get_mut().take_overflows()
    }

    /// Signals come by themselves; a clock that may not signal needs it, and so do
    /// hardware events, to notice that they are off their counters.
    fn deadline(&self) -> Option<Tsc> {
        self.inner.borrow().deadline()
    }
}
