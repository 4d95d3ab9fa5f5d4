//! `msr`: the physical counters of one CPU, through the host's msr device.

mod constrained;
mod error;
mod events;
mod interval;
mod layout;
mod program;
mod registers;
mod report;
mod slot;
#[allow(unsafe_code)]
mod sys;

pub use error::MsrRefusal;
pub use layout::HostCpuid;
pub use report::{MsrReport, probe};

use std::fmt::Debug;
use std::io;
use std::num::NonZeroU64;

use pmu_model::{
    CountRequest, EventCode, MsrIndex, Progress, Provenance, Reading, SlotIndex, SlotSet, Ticks,
    Tsc, Unavailable, UnavailableReason,
};

use super::{BackendEnv, BackendError, CountPlan, CounterBackend};
use registers::{Registers, self_test_codes};
use report::{open_device, report};
use slot::MsrSlot;

const NAME: &str = "msr";

/// Runs of which the residue is the median.
const RESIDUE_RUNS: u64 = 33;

/// Access to the registers of one CPU.
pub trait MsrDevice: Send + Debug {
    /// The register's value.
    ///
    /// # Errors
    /// EIO where the processor raises #GP, EPERM where the kernel forbids it.
    fn read(&self, msr: MsrIndex) -> io::Result<u64>;

    /// Writes the register.
    ///
    /// # Errors
    /// As of `read`.
    fn write(&mut self, msr: MsrIndex, value: u64) -> io::Result<()>;

    /// Whether the calling thread runs on that CPU at present.
    fn on_cpu(&self) -> bool;
}

/// Which counters to use, and how ruthlessly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsrOptions {
    /// The host CPU that the vCPU's thread is pinned to.
    pub cpu: u32,
    /// Take counters away from whoever uses them.
    pub force: bool,
}

/// Counts with the physical counters of one CPU, for a thread pinned to it.
///
/// The registers are ours from `open` to drop; what they held is restored
/// then. Counters run from [`Progress::Entered`] to [`Progress::Left`], so
/// counts include the host's way into the guest and out of it, which
/// [`MsrReport`] states; nothing is subtracted. Overflows are found by looking
/// at the counters at each exit, for which [`CounterBackend::deadline`] asks
/// in time. A counter whose registers somebody else changed has no count from
/// then on.
#[derive(Debug)]
pub struct MsrBackend {
    registers: Registers,
    cpuid: HostCpuid,
    options: MsrOptions,
    tsc_khz: u32,
    report: MsrReport,
    slots: Vec<Option<MsrSlot>>,
    running: SlotSet,
    overflowed: SlotSet,
    entered: Option<Tsc>,
    /// Slots that count right now.
    active: SlotSet,
    /// The log knows that counters can be lost here.
    warned: bool,
}

impl MsrBackend {
    /// Takes the counters of a CPU; to be called on a thread pinned to it.
    ///
    /// # Errors
    /// [`BackendError::Cannot`] with the [`MsrRefusal`].
    pub fn open(options: MsrOptions, env: &BackendEnv) -> Result<Self, BackendError> {
        let cannot = |refusal: MsrRefusal| BackendError::Cannot {
            backend: NAME,
            reason: refusal.to_string(),
        };
        let device = Box::new(open_device(options.cpu).map_err(cannot)?);
        let watchdog = sys::nmi_watchdog() == Some(true);
        let cpuid = sys::host_cpuid();
        let backend = MsrBackend::with_device(device, cpuid, options, env.tsc_khz, watchdog)
            .map_err(cannot)?;
        log::info!("msr: {}", backend.report);
        Ok(backend)
    }

    /// Takes the counters behind any `device`, as `open` does.
    ///
    /// # Errors
    /// Why they cannot be used; every register is as it was.
    pub fn with_device(
        device: Box<dyn MsrDevice>,
        cpuid: HostCpuid,
        options: MsrOptions,
        tsc_khz: u32,
        watchdog: bool,
    ) -> Result<Self, MsrRefusal> {
        if !device.on_cpu() {
            return Err(MsrRefusal::NotPinned { cpu: options.cpu });
        }
        let registers = Registers::take(device, &cpuid, options, watchdog)?;
        let mut backend = MsrBackend {
            report: report(options.cpu, &registers.layout),
            slots: registers.layout.counters.iter().map(|_| None).collect(),
            registers,
            cpuid,
            options,
            tsc_khz: tsc_khz.max(1),
            running: SlotSet::EMPTY,
            overflowed: SlotSet::EMPTY,
            entered: None,
            active: SlotSet::EMPTY,
            warned: false,
        };
        let [cycles, instructions] = self_test_codes(backend.registers.layout.model.vendor());
        backend.report.residue_cycles = backend.residue(cycles);
        backend.report.residue_instructions = backend.residue(instructions);
        Ok(backend)
    }

    /// What was found at the counters.
    pub fn report(&self) -> &MsrReport {
        &self.report
    }

    /// Events of the host's own between start and stop, with nothing between.
    fn residue(&mut self, (select, umask): (u16, u8)) -> Option<u64> {
        let slot = SlotIndex(0);
        let family = self.registers.layout.model.events();
        let event = EventCode::Selected {
            family,
            select,
            umask,
        };
        self.program(slot, &CountRequest::plain(event, true, true))
            .ok()?;
        self.start(slot);
        let mut runs = Vec::new();
        let mut before = 0;
        for run in 0..RESIDUE_RUNS {
            self.enter(Tsc(run));
            self.leave(Tsc(run));
            let Reading::Counted { value, .. } = self.read(slot) else {
                break;
            };
            runs.push(value - before);
            before = value;
        }
        self.release(slot);
        runs.sort_unstable();
        runs.get(runs.len() / 2)
            .copied()
            .filter(|events| *events > 0)
    }

    fn get(&self, slot: SlotIndex) -> Option<&MsrSlot> {
        self.slots.get(usize::from(slot.0))?.as_ref()
    }

    fn get_mut(&mut self, slot: SlotIndex) -> Option<&mut MsrSlot> {
        self.slots.get_mut(usize::from(slot.0))?.as_mut()
    }
}

impl Drop for MsrBackend {
    fn drop(&mut self) {
        self.leave(Tsc(0));
        for slot in std::mem::take(&mut self.slots).into_iter().flatten() {
            self.clear(&slot);
        }
        // Dropping the registers restores what they held.
    }
}

impl CounterBackend for MsrBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capacity(&self) -> usize {
        self.slots.len()
    }

    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        match self.lay_out(request) {
            Ok(plan) => Ok(CountPlan {
                provenance: Provenance::Hardware,
                constraint: plan.constraint,
            }),
            Err(reason) => Err(Unavailable { reason }),
        }
    }

    fn is_shared(&self, _: SlotIndex) -> bool {
        // The registers count for whoever runs on the CPU.
        true
    }

    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        self.release(slot);
        let plan = self.lay_out(request);
        let written = plan.and_then(|plan| self.write(slot, &plan));
        let written = written.map_err(|reason| Unavailable { reason })?;
        if let Some(place) = self.slots.get_mut(usize::from(slot.0)) {
            *place = Some(written);
        }
        Ok(Provenance::Hardware)
    }

    fn release(&mut self, slot: SlotIndex) {
        self.stop(slot);
        self.overflowed.remove(slot);
        let place = self.slots.get_mut(usize::from(slot.0));
        if let Some(programmed) = place.and_then(Option::take) {
            self.clear(&programmed);
        }
    }

    fn start(&mut self, slot: SlotIndex) {
        if self.get(slot).is_some() {
            self.running.insert(slot);
        }
    }

    fn stop(&mut self, slot: SlotIndex) {
        self.running.remove(slot);
        // In the middle of an interval, which no VMM should do, the others go on.
        if self.active.contains(slot)
            && let Some(entered) = self.entered
        {
            self.leave(entered);
            self.enter(entered);
        }
    }

    fn read(&self, slot: SlotIndex) -> Reading {
        let Some(programmed) = self.get(slot) else {
            return Reading::Unavailable(if usize::from(slot.0) >= self.slots.len() {
                UnavailableReason::NoSuchSlot {
                    backend: NAME,
                    slot,
                }
            } else {
                UnavailableReason::NotProgrammed {
                    backend: NAME,
                    slot,
                }
            });
        };
        match self.current(programmed) {
            Some(now) => Reading::Counted {
                value: programmed.count_at(now),
                provenance: Provenance::Hardware,
            },
            None => Reading::Unavailable(UnavailableReason::Lost { backend: NAME }),
        }
    }

    fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        self.overflowed.remove(slot);
        if self.get(slot).is_none() {
            return;
        }
        // Further events are those after what the register holds now.
        if let Some(slot) = self.get_mut(slot) {
            slot.arm(None);
        }
        if after.is_some() {
            self.fold(slot);
        }
        if let Some(slot) = self.get_mut(slot).filter(|slot| !slot.lost) {
            slot.arm(after);
        }
    }

    fn observe(&mut self, progress: &Progress) {
        match *progress {
            Progress::Entered { tsc } => self.enter(tsc),
            // Halted time does not count by itself, and rings the counters
            // tell apart.
            Progress::Left { tsc, .. } => self.leave(tsc),
            Progress::Retired { .. } | Progress::Delivered { .. } | Progress::Lost { .. } => {}
        }
    }

    fn take_overflows(&mut self) -> SlotSet {
        std::mem::take(&mut self.overflowed)
    }

    /// When to look at the counters next: at the estimated time of the first
    /// overflow, but not before 100 us and not after 1 ms.
    fn deadline(&self) -> Option<Tsc> {
        let entered = self.entered?;
        let slots = self.active.iter().filter_map(|slot| self.get(slot));
        let estimate = slots.filter_map(MsrSlot::estimate).min()?;
        let ms = u64::from(self.tsc_khz);
        Some(entered + estimate.clamp(Ticks((ms / 10).max(1)), Ticks(ms)))
    }
}
