//! `msr`: the physical counters of one CPU, through the host's msr device.

mod error;
mod events;
mod layout;
mod registers;
mod slot;

pub use error::MsrRefusal;
pub use layout::HostCpuid;

use super::{
    BackendEnv, BackendError, CounterBackend, Provenance, Reading, Unavailable, UnavailableReason,
};
use crate::assign::Constraint;
use crate::event::EventCode;
use crate::ids::{MsrIndex, SlotIndex, SlotSet};
use crate::progress::Progress;
use crate::request::CountRequest;
use crate::sys;
use events::{MERGE, Plan, plan};
use registers::{ENABLE, Registers, check_unused, global_bit, look, self_test_codes};
use slot::{Control, MsrSlot};
use std::fmt::{self, Debug};
use std::io;
use std::num::NonZeroU64;

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

/// What was found at the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsrReport {
    /// The host CPU.
    pub cpu: u32,
    /// Name of the model whose registers it has.
    pub model: &'static str,
    /// Programmable counters.
    pub programmable: u8,
    /// Fixed counters.
    pub fixed: u8,
    /// Whether one register starts and stops all of them.
    pub global: bool,
    /// Cycles that every entry adds, beside those of the guest: counted from
    /// the write that starts counters to the write that stops them. `None`
    /// where it was not measured, or nothing was counted.
    pub residue_cycles: Option<u64>,
    /// Instructions, likewise.
    pub residue_instructions: Option<u64>,
}

impl fmt::Display for MsrReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "CPU {}: {} with {} programmable and {} fixed counters, started {}",
            self.cpu,
            self.model,
            self.programmable,
            self.fixed,
            if self.global {
                "by one write"
            } else {
                "one by one"
            }
        )?;
        let residues = [
            (self.residue_cycles, "cycles"),
            (self.residue_instructions, "instructions"),
        ];
        for (residue, what) in residues {
            match residue {
                Some(events) => write!(f, "; each entry adds {events} {what} of the host's")?,
                None => write!(f, "; the host's own {what} are not known")?,
            }
        }
        Ok(())
    }
}

/// Finds out whether the counters of a CPU can be used, without a change to
/// any register.
///
/// # Errors
/// Why they cannot.
pub fn probe(cpu: u32) -> Result<MsrReport, MsrRefusal> {
    let device = open_device(cpu)?;
    let (layout, saved) = look(&device, &sys::host_cpuid())?;
    check_unused(&layout, &saved, sys::nmi_watchdog() == Some(true))?;
    Ok(report(cpu, &layout))
}

fn open_device(cpu: u32) -> Result<sys::HostMsr, MsrRefusal> {
    sys::HostMsr::open(cpu).map_err(|error| match error.kind() {
        // ENXIO: the CPU's device node is there, the CPU is not.
        _ if error.raw_os_error() == Some(libc::ENXIO) => MsrRefusal::NoDevice { cpu },
        io::ErrorKind::NotFound => MsrRefusal::NoDevice { cpu },
        io::ErrorKind::WouldBlock => MsrRefusal::Locked { cpu },
        _ => MsrRefusal::Open {
            cpu,
            errno: error::errno(&error),
        },
    })
}

fn report(cpu: u32, layout: &layout::Layout) -> MsrReport {
    MsrReport {
        cpu,
        model: layout.model.name(),
        programmable: layout.model.programmable(),
        fixed: layout.model.fixed(),
        global: layout.global_control.is_some(),
        residue_cycles: None,
        residue_instructions: None,
    }
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
    entered: Option<u64>,
    /// Slots that count right now.
    active: SlotSet,
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
            self.enter(run);
            self.leave(run);
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

    fn plan(&self, request: &CountRequest) -> Result<Plan, UnavailableReason> {
        // Any-thread ends with architectural version 5 and never was AMD's.
        if request.any_thread {
            return Err(UnavailableReason::Modifier { backend: NAME });
        }
        let plan = plan(&self.cpuid, &self.registers.layout, request);
        plan.ok_or(UnavailableReason::Event {
            backend: NAME,
            event: request.event,
        })
    }

    /// Makes a counter somebody else's.
    fn lose(&mut self, index: SlotIndex) {
        self.active.remove(index);
        let Some(slot) = self.get_mut(index).filter(|slot| !slot.lost) else {
            return;
        };
        slot.lost = true;
        slot.target = None;
        let value = slot.value;
        log::warn!("msr: {value} was taken by somebody else; its count is not known any more");
        // Should the registers still be ours, they are cleared at `release`.
    }

    fn lose_all(&mut self, slots: SlotSet) {
        for slot in slots.iter() {
            self.lose(slot);
        }
    }

    /// The global control register's bits of `slots`.
    fn global_bits(&self, slots: SlotSet) -> u64 {
        let counters = &self.registers.layout.counters;
        let counter = |slot: SlotIndex| counters.get(usize::from(slot.0));
        let merged = |slot: SlotIndex| match self.get(slot).map(|slot| slot.control) {
            Some(Control::Select { merge: Some(_), .. }) => counter(SlotIndex(slot.0 + 1)),
            _ => None,
        };
        let bits = |slot| counter(slot).into_iter().chain(merged(slot));
        let bits = slots.iter().flat_map(bits);
        bits.fold(0, |all, counter| all | global_bit(counter.id))
    }

    fn enter(&mut self, tsc: u64) {
        self.entered = Some(tsc);
        let wanted = self.running.iter();
        let wanted = wanted.filter(|slot| self.get(*slot).is_some_and(|slot| !slot.lost));
        self.active = wanted.collect();
        if self.active.is_empty() {
            return;
        }
        if !self.registers.on_cpu() {
            return self.lose_all(self.active);
        }
        match self.registers.layout.global_control {
            Some(msr) => {
                let bits = self.global_bits(self.active);
                if !self.registers.replace(msr, 0, bits) {
                    self.lose_all(self.active);
                }
            }
            None => self.switch_each(true),
        }
    }

    /// Starts or stops the active counters by their own selects.
    fn switch_each(&mut self, on: bool) {
        for index in self.active.iter() {
            let Some(Control::Select {
                msr,
                outside,
                inside,
                merge,
            }) = self.get(index).map(|slot| slot.control)
            else {
                continue;
            };
            let (from, to) = if on {
                (outside, inside)
            } else {
                (inside, outside)
            };
            let merged = merge.is_none_or(|msr| {
                let enable = |value| MERGE | value & ENABLE;
                self.registers.replace(msr, enable(from), enable(to))
            });
            if !self.registers.replace(msr, from, to) || !merged {
                self.lose(index);
            }
        }
    }

    fn leave(&mut self, tsc: u64) {
        let Some(entered) = self.entered.take() else {
            return;
        };
        let stopped = self.active;
        if stopped.is_empty() {
            return;
        }
        match self.registers.layout.global_control {
            Some(msr) => {
                let bits = self.global_bits(stopped);
                if !self.registers.replace(msr, bits, 0) {
                    self.lose_all(stopped);
                }
            }
            None => self.switch_each(false),
        }
        if !self.registers.on_cpu() {
            self.lose_all(stopped);
        }
        let ticks = tsc.saturating_sub(entered);
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
        if slot.lost || slot.is_ambiguous() {
            return None;
        }
        let ours = match slot.control {
            Control::Select {
                msr,
                outside,
                inside,
                ..
            } => {
                let value = self.registers.read(msr).ok()?;
                value == outside || value == inside
            }
            Control::Fixed { field, bits } => {
                let msr = self.registers.layout.fixed_control?;
                self.registers.read(msr).ok()? & field == bits
            }
        };
        if !ours {
            return None;
        }
        self.registers.read(slot.value).ok()
    }

    /// Writes a counter's registers: stopped, with count 0.
    fn write(&mut self, index: SlotIndex, plan: &Plan) -> Result<MsrSlot, UnavailableReason> {
        let misplaced = UnavailableReason::Misplaced {
            backend: NAME,
            slot: index,
        };
        let refused = |error: io::Error| UnavailableReason::Refused {
            backend: NAME,
            errno: error::errno(&error),
        };
        let counters = &self.registers.layout.counters;
        let counter = *counters
            .get(usize::from(index.0))
            .ok_or(UnavailableReason::NoSuchSlot {
                backend: NAME,
                slot: index,
            })?;
        let partner = SlotIndex(index.0 ^ 1);
        let paired =
            |slot: &MsrSlot| matches!(slot.control, Control::Select { merge: Some(_), .. });
        let merged_away = index.0 % 2 == 1 && self.get(partner).is_some_and(paired);
        let partner_taken = plan.constraint.paired && self.get(partner).is_some();
        let free = plan.constraint.slots;
        if merged_away || partner_taken || !plan.constraint.allows(index, free) {
            return Err(misplaced);
        }
        let global = self.registers.layout.global_control.is_some();
        let merge = counters
            .get(usize::from(partner.0))
            .and_then(|counter| counter.select);
        let control = match (counter.select, plan.select) {
            (Some(msr), Some(select)) => Control::Select {
                msr,
                outside: select | if global { ENABLE } else { 0 },
                inside: select | ENABLE,
                merge: merge.filter(|_| plan.constraint.paired),
            },
            (Some(_), None) => return Err(misplaced),
            (None, _) => {
                let arbiter::CounterId::Fixed(n) = counter.id else {
                    return Err(misplaced);
                };
                Control::Fixed {
                    field: 0b1111 << (4 * n),
                    bits: plan.fixed << (4 * n),
                }
            }
        };
        self.set_control(control).map_err(refused)?;
        self.registers.write(counter.value, 0).map_err(refused)?;
        Ok(MsrSlot::new(control, counter.value, counter.mask))
    }

    fn set_control(&mut self, control: Control) -> io::Result<()> {
        let busy = || io::Error::from_raw_os_error(libc::EBUSY);
        match control {
            Control::Select {
                msr,
                outside,
                merge,
                ..
            } => {
                let merge = merge.map(|msr| (msr, MERGE | outside & ENABLE));
                for (msr, value) in [(msr, outside)].into_iter().chain(merge) {
                    if !self.options.force && self.registers.read(msr)? & ENABLE != 0 {
                        self.registers.disown(msr);
                        return Err(busy());
                    }
                    self.registers.write(msr, value)?;
                }
                Ok(())
            }
            Control::Fixed { field, bits } => {
                let msr = self.registers.layout.fixed_control.ok_or_else(busy)?;
                let value = self.registers.read(msr)?;
                if !self.options.force && value & field != 0 {
                    return Err(busy());
                }
                self.registers.write(msr, value & !field | bits)
            }
        }
    }

    /// Clears a counter's registers as far as they are ours.
    fn clear(&mut self, slot: &MsrSlot) {
        match slot.control {
            Control::Select {
                msr,
                outside,
                inside,
                merge,
            } => {
                // One of the two holds; a register that is neither is left alone.
                let outside_now = self.registers.holds(msr, outside);
                self.registers
                    .replace(msr, if outside_now { outside } else { inside }, 0);
                if let Some(msr) = merge {
                    self.registers.replace(msr, MERGE | outside & ENABLE, 0);
                }
            }
            Control::Fixed { field, bits } => {
                let Some(msr) = self.registers.layout.fixed_control else {
                    return;
                };
                match self.registers.read(msr) {
                    Ok(value) if value & field == bits => {
                        self.registers.replace(msr, value, value & !field);
                    }
                    _ => self.registers.disown(msr),
                }
            }
        }
    }
}

impl Drop for MsrBackend {
    fn drop(&mut self) {
        self.leave(0);
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

    fn can_count(&self, request: &CountRequest) -> Result<Provenance, Unavailable> {
        self.plan(request)
            .map(|_| Provenance::Hardware)
            .map_err(|reason| Unavailable { reason })
    }

    fn constraint(&self, request: &CountRequest) -> Constraint {
        match self.plan(request) {
            Ok(plan) => plan.constraint,
            Err(_) => Constraint::slots(SlotSet::EMPTY),
        }
    }

    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        self.release(slot);
        let plan = self.plan(request);
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
    fn deadline(&self) -> Option<u64> {
        let entered = self.entered?;
        let slots = self.active.iter().filter_map(|slot| self.get(slot));
        let estimate = slots.filter_map(MsrSlot::estimate).min()?;
        let ms = u64::from(self.tsc_khz);
        Some(entered.saturating_add(estimate.clamp((ms / 10).max(1), ms)))
    }
}
