//! One vCPU's PMU on KVM: what a run loop calls before and after each `KVM_RUN`.

mod debug_exits;
mod entry;
mod handler_exits;
mod interrupts;
mod msr_exits;
mod samples;

use std::sync::Arc;
use std::time::Duration;

use kvm_ioctls::VmFd;
use pmu_virt::{CorePmu, Ticks, Tsc, VcpuPmu};
use vmm_sys_util::errno;

use crate::debug::{DebugControl, DebugQuirks};
use crate::error::{KvmPmuError, VcpuError};
use crate::exit::{Answer, VmExit};
use crate::gp_watch::GpWatch;
use crate::halt::HaltClock;
use crate::memory::{GuestBytes, OutOfReach};
use crate::observe::{TrapEvent, TrapObserver};
use crate::step_driver::{StepDriver, StepSupport};
use crate::thread::ThreadContext;
use crate::time;
use crate::vcpu::{KvmVcpu, VcpuAccess};
use crate::vm_traps::VmTraps;

use interrupts::PmiRouting;

/// How often the guest's own debug registers are looked at while ours are in
/// use, by a kick if need be: KVM has no exit for MOV to DR then.
const DEBUG_REFRESH: Duration = Duration::from_millis(1);

/// Exits after one that wanted registers during which KVM hands them over at
/// once: drivers write selects and read counters in runs. Each costs an exit
/// about a twentieth more, fetching them by ioctl half as much again.
const SYNCED_EXITS: u8 = 16;

/// Before an overflow that is due in less, KVM hands registers over at each exit: sending
/// a PMI wants them, and an ioctl takes as much time as the rest.
const NEAR: Duration = Duration::from_millis(2);

/// A guest with a tiny period makes progress between two PMIs of this distance.
const PMI_FLOOR: Duration = Duration::from_micros(100);

/// What the PMU of one vCPU is made of.
#[derive(Debug)]
pub struct KvmPmuParts {
    /// The registers; `None`: each register that any PMU may have raises #GP.
    pub pmu: Option<VcpuPmu>,
    /// Oddities of the host's KVM.
    pub quirks: DebugQuirks,
    /// What the host can step.
    pub step: StepSupport,
    /// How RDPMC is trapped: the same for all vCPUs of a VM.
    pub traps: Arc<VmTraps>,
    /// Shortest time between two PMIs.
    pub pmi_floor: Duration,
    /// TSC frequency.
    pub tsc_khz: u32,
}

impl KvmPmuParts {
    /// For a host of which nothing is known: what may be missing is not relied on,
    /// nothing is stepped, and PMIs are 100 µs apart.
    #[must_use]
    pub fn new(pmu: VcpuPmu, tsc_khz: u32) -> Self {
        Self {
            pmu: Some(pmu),
            quirks: DebugQuirks::UNKNOWN,
            step: StepSupport::default(),
            traps: VmTraps::by_breakpoint(),
            pmi_floor: PMI_FLOOR,
            tsc_khz,
        }
    }
}

/// What a VMM lends to the PMU of one vCPU for one call.
#[derive(Debug)]
pub struct Lent<'a> {
    /// The VM, for interrupts.
    pub vm: &'a VmFd,
    /// Its memory.
    pub memory: &'a dyn GuestBytes,
    /// The calling thread.
    pub thread: &'a mut ThreadContext,
    /// Receives reports.
    pub observer: &'a mut dyn TrapObserver,
}

impl Lent<'_> {
    /// The same with what the traps can see of the memory while `vcpu` stands where it does.
    fn seen_from(&mut self, vcpu: VcpuAccess<'_>) -> Lent<'_> {
        Lent {
            vm: self.vm,
            memory: if vcpu.in_smm() {
                &OutOfReach
            } else {
                self.memory
            },
            thread: self.thread,
            observer: self.observer,
        }
    }
}

/// Whose an exit was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum ExitOwner {
    /// The PMU's, or a mere interruption: enter the guest again, when the VMM has
    /// nothing else to do.
    Pmu,
    /// The VMM's, to be answered before the next entry.
    Vmm,
}

/// What an RDMSR or WRMSR comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MsrAnswer {
    /// The register is not the PMU's.
    NotOurs,
    /// It is done; the value is what an RDMSR reads.
    Done(u64),
    /// #GP(0).
    Gp,
}

impl MsrAnswer {
    /// Leaves it for the next `KVM_RUN`.
    fn give(self, vcpu: &mut KvmVcpu) -> ExitOwner {
        vcpu.answer(match self {
            Self::NotOurs => return ExitOwner::Vmm,
            Self::Done(value) => Answer::Msr(value),
            Self::Gp => Answer::MsrFault,
        });
        ExitOwner::Pmu
    }
}

/// One vCPU's PMU on KVM. Its calls take the [`KvmVcpu`] for which it was made.
#[derive(Debug)]
pub struct KvmPmu {
    traps: Traps,
}

#[derive(Debug)]
struct Traps {
    /// The number of this process, which samples carry as that of the VM: asking the host
    /// for it would be a system call for each.
    process: i32,
    tsc_khz: u32,
    pmu: Option<VcpuPmu>,
    /// MSRs that are a PMU's, whoever's model.
    ranges: Vec<(u32, u32)>,
    debug: DebugControl,
    gp: GpWatch,
    stepping: StepDriver,
    /// The way of the PMI that is pending in the PMU.
    pmi_routing: Option<PmiRouting>,
    halt: HaltClock,
    /// It was started; known once something has counted.
    started: bool,
    counting: bool,
    warned_full: bool,
    /// Looks at the debug registers of the running guest since it had a counter on.
    idle_looks: u8,
    /// Exits yet to come at which registers are likely to be wanted.
    registers_wanted: u8,
    /// TSC at the last entry; `None` if the guest was not entered.
    entered: Option<Tsc>,
    /// [`NEAR`].
    near: Ticks,
    /// The PMU's deadline as of the last entry.
    due: Option<Tsc>,
}

impl KvmPmu {
    /// Of `vcpu`.
    #[must_use]
    pub fn new(vcpu: &KvmVcpu, parts: KvmPmuParts) -> Self {
        let (id, quirks) = (vcpu.id(), parts.quirks);
        let tsc_khz = parts.tsc_khz.max(1);
        let floor = Ticks::of(parts.pmi_floor, tsc_khz);
        let mut gp = GpWatch::new(parts.traps, id, tsc_khz);
        // One that was restored may be read on vCPUs that are run before this one.
        gp.programmed(parts.pmu.as_ref().is_some_and(VcpuPmu::is_programmed));
        Self {
            traps: Traps {
                process: std::process::id().cast_signed(),
                tsc_khz,
                pmu: parts.pmu.map(|pmu| pmu.with_pmi_floor(floor)),
                ranges: pmu_virt::all_pmu_msr_ranges(),
                debug: DebugControl::new(quirks, Ticks::of(DEBUG_REFRESH, tsc_khz)),
                gp,
                stepping: StepDriver::new(parts.step),
                pmi_routing: None,
                halt: HaltClock::new(vcpu.fd(), id, tsc_khz),
                started: false,
                counting: false,
                warned_full: false,
                idle_looks: 0,
                near: Ticks::of(NEAR, tsc_khz),
                registers_wanted: 0,
                entered: None,
                due: None,
            },
        }
    }

    /// The TSC's frequency in kHz.
    #[must_use]
    pub fn tsc_khz(&self) -> u32 {
        self.traps.tsc_khz
    }

    /// The PMU, while the guest does not run.
    #[must_use]
    pub fn pmu(&self) -> Option<&VcpuPmu> {
        self.traps.pmu.as_ref()
    }

    /// The PMU, to be changed while the guest does not run.
    #[must_use]
    pub fn pmu_mut(&mut self) -> Option<&mut VcpuPmu> {
        self.traps.pmu.as_mut()
    }

    /// PMIs delivered so far, and of these late ones.
    #[must_use]
    pub fn pmis(&self) -> (u64, u64) {
        let throttle = self
            .traps
            .pmu
            .as_ref()
            .map(|pmu| pmu.interrupts().throttle());
        throttle.map_or((0, 0), |throttle| (throttle.delivered(), throttle.late()))
    }

    /// Until when the vCPU is to be kept out of the guest, for having presented too
    /// many wrong cookies; `None` if it may run.
    #[must_use]
    #[inline]
    pub fn locked_out_until(&self) -> Option<Tsc> {
        self.traps.locked_out_until()
    }

    /// `thread` runs `vcpu` from now on: a kick ends or prevents its `KVM_RUN`.
    pub fn enter_thread(&mut self, vcpu: &KvmVcpu, thread: &mut ThreadContext) {
        thread.bind(vcpu.kicks());
    }

    /// `thread` does not run `vcpu` from now on; any other one may, and registers
    /// may be read and set by its descriptor.
    ///
    /// # Errors
    /// Registers could not be set.
    pub fn leave_thread(
        &mut self,
        vcpu: &mut KvmVcpu,
        thread: &mut ThreadContext,
    ) -> Result<(), KvmPmuError> {
        thread.unbind();
        self.traps.gp.leave();
        self.traps.halt.leave(self.traps.counting);
        Ok(vcpu.leave()?)
    }

    /// Prepares a `KVM_RUN` that enters the guest.
    ///
    /// # Errors
    /// [`KvmPmuError`]: an ioctl failed, which no guest should be able to cause.
    pub fn before_entry(
        &mut self,
        vcpu: &mut KvmVcpu,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        lent.thread.bind(vcpu.kicks());
        let lent = &mut lent.seen_from(vcpu);
        let traps = &mut self.traps;
        traps.prepare(vcpu, lent)?;
        while !traps.gp.enter(lent.thread.target()) {
            if traps.gp.is_on() {
                let walked = traps.gp.walk_holds();
                traps.watch_gp_handler(vcpu, lent, walked)?;
                traps.debug.apply(vcpu)?;
            }
        }
        let smm = vcpu.in_smm();
        let (at_once, sync) = traps.next_entry(lent.thread);
        if at_once {
            vcpu.set_immediate_exit(true);
        }
        vcpu.hand_over();
        let near = traps.enter(lent.thread, smm);
        vcpu.want_registers(sync || near);
        Ok(())
    }

    /// Prepares a `KVM_RUN` that does not enter the guest, as one with a signal
    /// pending: a PMI that was held back and is due is sent, which may wake a halted
    /// vCPU. [`KvmPmu::tick`] lets what else is due take place.
    ///
    /// # Errors
    /// As [`KvmPmu::before_entry`].
    pub fn before_probe(
        &mut self,
        vcpu: &mut KvmVcpu,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        let now = time::now();
        let lent = &mut lent.seen_from(vcpu);
        self.traps.forward_pmi(vcpu, lent, now)?;
        self.traps.forward_samples(vcpu, lent)?;
        self.traps.forward_notices(vcpu, lent)?;
        vcpu.hand_over();
        self.traps.entered = None;
        Ok(())
    }

    /// Takes in what a `KVM_RUN` ended with, whether it `ran` or failed: settles the counts,
    /// and answers the exit if it is the PMU's. EINTR and EAGAIN are interruptions. EFAULT
    /// may be a store of the guest's to a page that the PMU has made read-only; if not, it
    /// is the VMM's to deal with.
    ///
    /// # Errors
    /// As [`KvmPmu::before_entry`], and any other errno of `KVM_RUN`: the guest cannot be
    /// run on.
    pub fn after_exit<T>(
        &mut self,
        vcpu: &mut KvmVcpu,
        lent: &mut Lent<'_>,
        ran: &Result<T, errno::Error>,
    ) -> Result<ExitOwner, KvmPmuError> {
        let exit = vcpu.exit(ran.as_ref().err().copied());
        self.take_exit(vcpu, lent, exit)
    }

    /// [`KvmPmu::after_exit`] of an exit that the VMM has taken from the vCPU itself, by
    /// [`KvmVcpu::exit`] or [`KvmVcpu::enter`].
    ///
    /// # Errors
    /// As there.
    pub fn take_exit(
        &mut self,
        vcpu: &mut KvmVcpu,
        lent: &mut Lent<'_>,
        exit: Result<VmExit, errno::Error>,
    ) -> Result<ExitOwner, KvmPmuError> {
        let tsc = time::now();
        let handlers_changed = self.traps.gp.leave();
        if vcpu.take_immediate_exit() {
            lent.thread.kicked(self.traps.entered, tsc);
        }
        let exit = match exit {
            Ok(exit) => exit,
            Err(error) => return Err(self.give_up(vcpu, lent, tsc, error)),
        };
        vcpu.left_with(exit);
        let lent = &mut lent.seen_from(vcpu);
        self.traps.settle(vcpu, lent, tsc)?;
        let locked_out = self.traps.locked_out_until().is_some();
        self.traps.end_step(vcpu, lent, exit)?;
        self.traps.sample_ibs(vcpu, lent)?;
        let owner = self.answer(vcpu, lent, exit, handlers_changed)?;
        self.traps.entered = None;
        // A step retires, and a write of the guest's takes a slot away, only
        // while the exit is handled.
        self.traps.sample_ibs(vcpu, lent)?;
        self.traps
            .sample_pending(vcpu, lent.thread, lent.observer)?;
        if !locked_out && let Some(until) = self.traps.locked_out_until() {
            lent.observer
                .event(vcpu.id(), TrapEvent::LockedOut { until });
        }
        if owner == ExitOwner::Vmm {
            // The VMM may change registers to answer it.
            vcpu.forget();
        }
        Ok(owner)
    }

    /// One line for each kind of exit that can be the PMU's.
    fn answer(
        &mut self,
        vcpu: &mut KvmVcpu,
        lent: &mut Lent<'_>,
        exit: VmExit,
        handlers_changed: bool,
    ) -> Result<ExitOwner, KvmPmuError> {
        let (traps, id) = (&mut self.traps, vcpu.id());
        Ok(match exit {
            VmExit::Rdmsr { index } => traps.rdmsr(vcpu, lent, index)?.give(vcpu),
            VmExit::Wrmsr { index, value } => traps.wrmsr(vcpu, lent, index, value)?.give(vcpu),
            VmExit::Debug(debug) => traps.debug_exit(vcpu, lent, &debug)?,
            VmExit::IoOut {
                port,
                width: 1,
                len: 1,
            } => self.out(vcpu, lent, port)?,
            VmExit::MmioWrite { address, data, len } => {
                traps.handler_stored(lent, id, (address, &data[..len]))
            }
            VmExit::MemoryFault { address } => {
                traps.handler_fault(lent, id, address, handlers_changed)
            }
            VmExit::InternalError(_) => traps.handler_fault(lent, id, None, handlers_changed),
            VmExit::Interrupted => ExitOwner::Pmu,
            _ => ExitOwner::Vmm,
        })
    }

    /// OUT of one byte: perhaps the one that stands in the #GP handler.
    fn out(
        &mut self,
        vcpu: &mut KvmVcpu,
        lent: &mut Lent<'_>,
        port: u16,
    ) -> Result<ExitOwner, KvmPmuError> {
        let Some(stop) = self.traps.gp.at_out(vcpu, lent.memory, port)? else {
            return Ok(ExitOwner::Vmm);
        };
        vcpu.at_handler();
        self.traps.handler_out(vcpu, lent, stop)
    }

    /// `KVM_RUN` failed with `error` at `tsc`. What was counted until then is, as far as KVM
    /// still tells what that takes; why it does not is the same error.
    #[cold]
    fn give_up(
        &mut self,
        vcpu: &mut KvmVcpu,
        lent: &mut Lent<'_>,
        tsc: Tsc,
        error: errno::Error,
    ) -> KvmPmuError {
        vcpu.forget();
        let _ = self.traps.settle(vcpu, lent, tsc);
        self.traps.entered = None;
        VcpuError::new(vcpu.id(), "KVM_RUN", error).into()
    }

    /// Samples counters of attached contexts that have overflowed, before the guest
    /// runs on; `thread` is the one that has the vCPU. To be called when the VMM has
    /// changed something about them outside of an exit.
    ///
    /// # Errors
    /// Registers could not be read.
    #[inline]
    pub fn sample_pending(
        &mut self,
        vcpu: &KvmVcpu,
        thread: &mut ThreadContext,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), KvmPmuError> {
        self.traps.sample_pending(vcpu, thread, observer)
    }

    /// Lets what is due in the reservations by `now` take place, for a vCPU that is
    /// not run; `core` is the one that it is on, if it is on one.
    pub fn tick(&mut self, core: Option<&mut CorePmu>, now: Tsc) {
        if let Some(pmu) = &mut self.traps.pmu {
            pmu.tick(core, now);
        }
    }
}
