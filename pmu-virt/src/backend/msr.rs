//! `msr`: the physical counters of one CPU, through the host's msr device.

mod constrained;
mod error;
mod events;
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
use error::errno;
use events::MsrPlan;
use registers::{PmuMsrs, self_test_codes};
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
    registers: PmuMsrs,
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
        let registers = PmuMsrs::take(device, &cpuid, options, watchdog)?;
        let mut backend = MsrBackend {
            report: report(options.cpu, registers.layout()),
            slots: registers.layout().counters.iter().map(|_| None).collect(),
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
        let [cycles, instructions] = self_test_codes(backend.registers.layout().model.vendor());
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
        let family = self.registers.layout().model.events();
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

/// What its counters are written with.
impl MsrBackend {
    fn lay_out(&self, request: &CountRequest) -> Result<MsrPlan, UnavailableReason> {
        program::lay_out(&self.cpuid, self.registers.layout(), request)
    }

    /// Writes a counter's registers: stopped, with count 0.
    fn write(&mut self, index: SlotIndex, plan: &MsrPlan) -> Result<MsrSlot, UnavailableReason> {
        let misplaced = UnavailableReason::Misplaced {
            backend: NAME,
            slot: index,
        };
        let refused = |error: io::Error| UnavailableReason::Refused {
            backend: NAME,
            errno: errno(&error),
        };
        let layout = self.registers.layout();
        let counter = layout.counters.get(usize::from(index.0));
        let counter = *counter.ok_or(UnavailableReason::NoSuchSlot {
            backend: NAME,
            slot: index,
        })?;
        let partner = self.get(program::partner_of(index));
        let merged_away = index.0 % 2 == 1 && partner.is_some_and(MsrSlot::is_paired);
        let partner_taken = plan.constraint.paired && partner.is_some();
        let free = plan.constraint.slots;
        if merged_away || partner_taken || !plan.constraint.allows(index, free) {
            return Err(misplaced);
        }
        let control = program::control(layout, index, plan).ok_or(misplaced)?;
        let forces = self.options.force;
        let registers = &mut self.registers;
        registers.set_control(&control, forces).map_err(refused)?;
        registers.write(counter.value, 0).map_err(refused)?;
        Ok(MsrSlot::new(control, counter.value, counter.mask))
    }
}

/// From entry to exit: counters start, stop, and are looked at.
impl MsrBackend {
    fn enter(&mut self, tsc: Tsc) {
        self.entered = Some(tsc);
        let wanted = self.running.iter();
        let wanted = wanted.filter(|slot| self.get(*slot).is_some_and(|slot| !slot.is_lost()));
        self.active = wanted.collect();
        if self.active.is_empty() {
            return;
        }
        if !self.registers.on_cpu() {
            return self.lose_all(self.active);
        }
        self.switch_all(true);
    }

    fn leave(&mut self, tsc: Tsc) {
        let Some(entered) = self.entered.take() else {
            return;
        };
        let stopped = self.active;
        if stopped.is_empty() {
            return;
        }
        self.switch_all(false);
        if !self.registers.on_cpu() {
            self.lose_all(stopped);
        }
        let ticks = tsc - entered;
        for index in std::mem::take(&mut self.active).iter() {
            let Some(slot) = self.get_mut(index) else {
                continue;
            };
            slot.pass(ticks);
            if slot.is_due() && self.fold(index) {
                self.overflowed.insert(index);
            }
        }
    }

    /// Starts or stops the active counters: all at once, or each by its own select.
    fn switch_all(&mut self, on: bool) {
        let active = self.active;
        let Some(msr) = self.registers.layout().global_control else {
            for index in active.iter() {
                let control = self.get(index).map(|slot| *slot.control());
                if control.is_some_and(|control| !self.registers.switch(&control, on)) {
                    self.lose(index);
                }
            }
            return;
        };
        let paired = |slot| (slot, self.get(slot).is_some_and(MsrSlot::is_paired));
        let bits = program::global_bits(self.registers.layout(), active.iter().map(paired));
        let (from, to) = if on { (0, bits) } else { (bits, 0) };
        if !self.registers.replace(msr, from, to) {
            self.lose_all(active);
        }
    }

    /// Takes in a counter's register; true when its armed overflow came.
    fn fold(&mut self, index: SlotIndex) -> bool {
        let now = self.get(index).and_then(|slot| self.current(slot));
        match (now, self.get_mut(index)) {
            (Some(now), Some(slot)) => {
                slot.fold(now);
                slot.take_overflow()
            }
            _ => {
                self.lose(index);
                false
            }
        }
    }

    /// What a counter's register holds, if it is still ours.
    fn current(&self, slot: &MsrSlot) -> Option<u64> {
        if slot.is_lost() || slot.is_ambiguous() {
            return None;
        }
        self.registers.count(slot.control(), slot.register())
    }

    /// Makes a counter somebody else's.
    fn lose(&mut self, index: SlotIndex) {
        self.active.remove(index);
        let Some(slot) = self.get_mut(index) else {
            return;
        };
        let register = slot.register();
        if !slot.lose() {
            return;
        }
        // A guest that has its counters placed again and again is told of once.
        let level = if std::mem::replace(&mut self.warned, true) {
            log::Level::Debug
        } else {
            log::Level::Warn
        };
        log::log!(
            level,
            "msr: {register} was taken by somebody else; its count is not known any more"
        );
        // Should the registers still be ours, they are cleared at `release`.
    }

    fn lose_all(&mut self, slots: SlotSet) {
        for slot in slots.iter() {
            self.lose(slot);
        }
    }
}

impl Drop for MsrBackend {
    fn drop(&mut self) {
        self.leave(Tsc(0));
        for slot in std::mem::take(&mut self.slots).into_iter().flatten() {
            self.registers.clear_control(slot.control());
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
            self.registers.clear_control(programmed.control());
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
        if let Some(slot) = self.get_mut(slot).filter(|slot| !slot.is_lost()) {
            slot.arm(after);
        }
    }

    fn observe(&mut self, progress: &Progress) {
        match *progress {
            Progress::Entered { tsc } => self.enter(tsc),
            // Halted time does not count by itself, and rings the counters
            // tell apart.
            Progress::Left { tsc, .. } => self.leave(tsc),
            Progress::Retired { .. }
            | Progress::Delivered { .. }
            | Progress::Executed { .. }
            | Progress::Lost { .. } => {}
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
