//! One vCPU's PMU on KVM: what a run loop calls before and after each `KVM_RUN`.

mod debug_exits;
mod handler_exits;
mod interrupts;
mod msr_exits;

use std::sync::Arc;
use std::time::Duration;

use kvm_bindings::KVM_MP_STATE_RUNNABLE;
use kvm_ioctls::{VcpuFd, VmFd};
use pmu_virt::perfmon::Moment;
use pmu_virt::{CorePmu, Progress, Ring, Ticks, Tsc, VcpuPmu};

use crate::debug::{DebugControl, DebugQuirks};
use crate::error::{KvmPmuError, VcpuId};
use crate::gp_watch::GpWatch;
use crate::halt::HaltClock;
use crate::memory::GuestBytes;
use crate::observe::{TrapEvent, TrapObserver};
use crate::registers::{RegisterCache, VcpuAccess};
use crate::step_driver::{StepDriver, StepSupport};
use crate::sys::{KickFlag, PmuExit, answer_msr, rdtsc};
use crate::thread::{ThreadContext, earliest};
use crate::time;
use crate::trap::{StepStop, cpl};
use crate::vm_traps::VmTraps;

use interrupts::PmiRouting;

/// How often the guest's own debug registers are looked at while ours are in
/// use, by a kick if need be: KVM has no exit for MOV to DR then.
const DEBUG_REFRESH: Duration = Duration::from_millis(1);

/// Exits after one that wanted registers during which KVM hands them over at
/// once: drivers write selects and read counters in runs. Each costs an exit
/// about a twentieth more, fetching them by ioctl half as much again.
const SYNCED_EXITS: u8 = 16;

/// Before an overflow that is due in so many milliseconds, KVM hands registers over at
/// each exit: sending a PMI wants them, and an ioctl takes as much time as the rest.
const NEAR_MS: u64 = 2;

/// A guest with a tiny period makes progress between two PMIs of this distance.
const PMI_FLOOR: Duration = Duration::from_micros(100);

/// What the PMU of one vCPU is made of.
#[derive(Debug)]
pub struct KvmPmuParts {
    /// Which vCPU it is.
    pub id: VcpuId,
    /// Its PMU; `None`: each register that any PMU may have raises #GP.
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
    pub fn new(id: VcpuId, pmu: VcpuPmu, tsc_khz: u32) -> Self {
        Self {
            id,
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

/// One vCPU's PMU on KVM.
#[derive(Debug)]
pub struct KvmPmu {
    id: VcpuId,
    registers: RegisterCache,
    kicks: Arc<KickFlag>,
    traps: Traps,
}

/// Everything but the register cache, so that both can be borrowed at once.
#[derive(Debug)]
struct Traps {
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
    counting: bool,
    warned_full: bool,
    /// Looks at the debug registers of the running guest since it had a counter on.
    idle_looks: u8,
    /// Exits yet to come at which registers are likely to be wanted.
    registers_wanted: u8,
    /// TSC at the last entry; `None` if the guest was not entered.
    entered: Option<u64>,
    /// The PMU's deadline as of the last entry.
    due: Option<Tsc>,
}

impl KvmPmu {
    /// Of the vCPU behind `fd`, of `vm`.
    ///
    /// # Errors
    /// [`KvmPmuError::Map`].
    pub fn new(fd: &VcpuFd, vm: &VmFd, parts: KvmPmuParts) -> Result<Self, KvmPmuError> {
        let KvmPmuParts { id, quirks, .. } = parts;
        let tsc_khz = parts.tsc_khz.max(1);
        let floor = Ticks::of(parts.pmi_floor, tsc_khz);
        Ok(Self {
            id,
            registers: RegisterCache::new(vm),
            kicks: KickFlag::of(fd).map_err(|error| KvmPmuError::Map { id, error })?,
            traps: Traps {
                tsc_khz,
                pmu: parts.pmu.map(|pmu| pmu.with_pmi_floor(floor)),
                ranges: pmu_virt::all_pmu_msr_ranges(),
                debug: DebugControl::new(quirks, Ticks::of(DEBUG_REFRESH, tsc_khz).0),
                gp: GpWatch::new(parts.traps, id),
                stepping: StepDriver::new(parts.step),
                pmi_routing: None,
                halt: HaltClock::new(fd, id, tsc_khz),
                counting: false,
                warned_full: false,
                idle_looks: 0,
                registers_wanted: 0,
                entered: None,
                due: None,
            },
        })
    }

    /// Which vCPU it is.
    #[must_use]
    pub fn id(&self) -> VcpuId {
        self.id
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
        let throttle = self.traps.pmu.as_ref().map(VcpuPmu::throttle);
        throttle.map_or((0, 0), |throttle| (throttle.delivered(), throttle.late()))
    }

    /// Until when the vCPU is to be kept out of the guest, for having presented too
    /// many wrong cookies; `None` if it may run.
    #[must_use]
    #[inline]
    pub fn locked_out_until(&self) -> Option<Tsc> {
        self.traps.locked_out_until()
    }

    /// `thread` runs the vCPU from now on: a kick ends or prevents its `KVM_RUN`.
    pub fn enter_thread(&mut self, thread: &mut ThreadContext) {
        thread.bind(&self.kicks);
    }

    /// `thread` does not run the vCPU from now on; any other one may, and registers
    /// may be read and set by ioctls.
    ///
    /// # Errors
    /// Registers could not be set.
    pub fn leave_thread(
        &mut self,
        fd: &VcpuFd,
        thread: &mut ThreadContext,
    ) -> Result<(), KvmPmuError> {
        thread.unbind();
        self.traps.gp.leave();
        self.traps.halt.leave(rdtsc(), self.traps.counting);
        let flushed = self.registers.access(fd, self.id).flush();
        self.registers.forget();
        Ok(flushed?)
    }

    /// Prepares a `KVM_RUN` that enters the guest.
    ///
    /// # Errors
    /// [`KvmPmuError`]: an ioctl failed, which no guest should be able to cause.
    pub fn before_entry(
        &mut self,
        fd: &mut VcpuFd,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        lent.thread.bind(&self.kicks);
        let vcpu = self.registers.access(fd, self.id);
        let traps = &mut self.traps;
        traps.prepare(vcpu, lent)?;
        while !traps.gp.enter(lent.thread.target()) {
            if traps.gp.gate().is_some() {
                traps.watch_gp_handler(vcpu, lent)?;
                traps.debug.apply(vcpu)?;
            }
        }
        let (at_once, sync) = traps.next_entry(lent.thread);
        if at_once {
            fd.set_kvm_immediate_exit(1);
        }
        self.registers.hand_over(fd);
        PmuExit::expect_interruption(fd.get_kvm_run());
        let near = traps.enter(lent.thread);
        self.registers.want(fd, sync || near);
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
        fd: &mut VcpuFd,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        let now = time::now();
        let vcpu = self.registers.access(fd, self.id);
        self.traps.forward_pmi(vcpu, lent, now)?;
        self.traps.forward_notices(vcpu, lent)?;
        self.registers.hand_over(fd);
        PmuExit::expect_interruption(fd.get_kvm_run());
        self.traps.entered = None;
        Ok(())
    }

    /// A `KVM_RUN` failed with EFAULT, before [`KvmPmu::after_exit`]: the guest may have
    /// stored to a page that the PMU has made read-only, and not every KVM says so.
    pub fn note_fault(&self, fd: &mut VcpuFd) {
        PmuExit::note_fault(fd.get_kvm_run());
    }

    /// Takes in what a `KVM_RUN` ended with, also one that failed with EINTR or
    /// EAGAIN: settles the counts, and answers the exit if it is the PMU's.
    ///
    /// # Errors
    /// As [`KvmPmu::before_entry`].
    pub fn after_exit(
        &mut self,
        fd: &mut VcpuFd,
        lent: &mut Lent<'_>,
    ) -> Result<ExitOwner, KvmPmuError> {
        let tsc = rdtsc();
        let handlers_changed = self.traps.gp.leave();
        // A kick, or the VMM, has set it. A kick that comes in between is not lost:
        // either it is noticed here, or the flag stays set for the next `KVM_RUN`.
        if fd.get_kvm_run().immediate_exit != 0 {
            fd.set_kvm_immediate_exit(0);
            lent.thread.kicked(self.traps.entered, tsc);
        }
        let exit = PmuExit::of(fd.get_kvm_run());
        let debug_exit = matches!(exit, PmuExit::Debug(_));
        self.registers.after_run(fd, debug_exit);
        let vcpu = self.registers.access(fd, self.id);
        self.traps.settle(vcpu, lent, tsc)?;
        let locked_out = self.traps.locked_out_until().is_some();
        // A debug exit says itself where the step ended; an entry that was prevented
        // stepped nothing.
        let stopped = match exit {
            PmuExit::Debug(_) => false,
            PmuExit::Interrupted => self.traps.entered.is_some(),
            _ => true,
        };
        if stopped && self.traps.stepping.is_active() {
            self.traps.step_stop(vcpu, lent, StepStop::Exit)?;
        }
        let owner = match exit {
            PmuExit::Rdmsr { index } => match self.traps.rdmsr(vcpu, lent, index)? {
                Some(answer) => {
                    answer_msr(fd.get_kvm_run(), answer);
                    ExitOwner::Pmu
                }
                None => ExitOwner::Vmm,
            },
            PmuExit::Wrmsr { index, value } => match self.traps.wrmsr(vcpu, lent, index, value)? {
                Some(done) => {
                    answer_msr(fd.get_kvm_run(), done.then_some(0));
                    ExitOwner::Pmu
                }
                None => ExitOwner::Vmm,
            },
            PmuExit::Debug(debug) => {
                self.traps.debug_exit(vcpu, lent, &debug)?;
                ExitOwner::Pmu
            }
            PmuExit::Out { port } => match self.traps.gp.at_out(vcpu, lent.memory, port)? {
                Some(stop) => {
                    self.registers.at_handler();
                    let vcpu = self.registers.access(fd, self.id);
                    self.traps.handler_out(vcpu, lent, stop)?
                }
                None => ExitOwner::Vmm,
            },
            PmuExit::Store { address, data, len } => {
                self.traps
                    .handler_stored(lent, self.id, (address, &data[..len]))
            }
            PmuExit::MemoryFault { address } => {
                self.traps
                    .handler_fault(lent, self.id, address, handlers_changed)
            }
            PmuExit::InternalError => {
                self.traps
                    .handler_fault(lent, self.id, None, handlers_changed)
            }
            PmuExit::Interrupted => ExitOwner::Pmu,
            PmuExit::Other => ExitOwner::Vmm,
        };
        self.traps.entered = None;
        // A step retires, and a write of the guest's takes a slot away, only
        // while the exit is handled.
        let vcpu = self.registers.access(fd, self.id);
        self.traps
            .sample_pending(vcpu, lent.thread, lent.observer)?;
        if !locked_out && let Some(until) = self.traps.locked_out_until() {
            lent.observer.event(self.id, TrapEvent::LockedOut { until });
        }
        if owner == ExitOwner::Vmm {
            // The VMM may change registers to answer it.
            self.registers.forget();
        }
        Ok(owner)
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
        fd: &VcpuFd,
        thread: &mut ThreadContext,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), KvmPmuError> {
        let vcpu = self.registers.access(fd, self.id);
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

impl Traps {
    #[inline]
    fn locked_out_until(&self) -> Option<Tsc> {
        let until = self.pmu.as_ref()?.locked_out_until()?;
        (time::now() < until).then_some(until)
    }

    /// Everything that needs the stopped vCPU.
    fn prepare(&mut self, vcpu: VcpuAccess<'_>, lent: &mut Lent<'_>) -> Result<(), KvmPmuError> {
        if let (Some(pmu), Some(core)) = (&mut self.pmu, lent.thread.counters_mut())
            && (pmu.needs().stepping || self.stepping.is_active())
        {
            let gp_handler = self.gp.gate().map(|gate| gate.handler);
            let debug = &mut self.debug;
            let stepping = &mut self.stepping;
            if stepping.before_entry(vcpu, lent.memory, debug, (pmu, core), gp_handler)? {
                self.gp.want(debug);
            }
        }
        if self.pmu.as_ref().is_some_and(VcpuPmu::has_interrupt) {
            self.forward_pmi(vcpu, lent, time::now())?;
            self.forward_notices(vcpu, lent)?;
        }
        let stepped = self.pmu.as_ref().is_some_and(|pmu| pmu.needs().stepping);
        if self.gp.is_due(stepped) {
            self.watch_gp_handler(vcpu, lent)?;
        }
        if let Some(pmu) = &self.pmu
            && self
                .gp
                .is_idle_look_due(pmu.needs().counting, self.tsc_khz)
            // A halted one reads nothing, and may have been halted all the time.
            && vcpu.get_mp_state()?.mp_state == KVM_MP_STATE_RUNNABLE
        {
            let before = self.gp.armed();
            self.gp.looked(pmu.has_enabled());
            self.tell_armed(vcpu, lent, before);
        }
        if !self.debug.is_idle() {
            self.debug.apply(vcpu)?;
        }
        Ok(())
    }

    /// Whether the guest is to be left at once, and whether registers are likely
    /// to be wanted at its exit.
    fn next_entry(&mut self, thread: &ThreadContext) -> (bool, bool) {
        let (Some(pmu), Some(core)) = (&mut self.pmu, thread.counters()) else {
            return (false, false);
        };
        let needs = pmu.needs();
        if needs.counting {
            self.halt.entering(rdtsc(), !self.counting);
        }
        self.counting = needs.counting;
        let soon = self.registers_wanted > 0;
        self.registers_wanted = self.registers_wanted.saturating_sub(1);
        // An answer may have taken a slot away: it is sampled where the guest
        // stands now.
        (pmu.has_host_overflow(core), soon || needs.ring)
    }

    /// The guest is entered now. True if an overflow is near: its PMI wants registers,
    /// and must not wait until they are fetched.
    fn enter(&mut self, thread: &mut ThreadContext) -> bool {
        let now = rdtsc();
        self.entered = Some(now);
        let mut deadline = self.debug.deadline();
        if let (Some(pmu), Some(core)) = (&mut self.pmu, thread.counters_mut()) {
            pmu.observe(core, Progress::Entered { tsc: Tsc(now) });
            let due = pmu.deadline(core);
            self.due = due;
            let due = earliest(due, pmu.throttle().deadline());
            deadline = earliest(deadline, due.map(|at| at.0));
            deadline = earliest(deadline, self.gp.deadline());
        }
        thread.set_deadline(now, deadline);
        let near = u64::from(self.tsc_khz) * NEAR_MS;
        self.due
            .is_some_and(|Tsc(due)| due.saturating_sub(now) < near)
    }

    /// Reports to the PMU that the guest has stopped, and samples what overflowed.
    fn settle(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        tsc: u64,
    ) -> Result<(), KvmPmuError> {
        let pmu = (&mut self.pmu, lent.thread.counters_mut());
        let ((Some(pmu), Some(core)), Some(entered)) = (pmu, self.entered) else {
            return Ok(());
        };
        let needs = pmu.needs();
        let halted = self.halt.passed(entered, tsc, needs.counting);
        let ring = if needs.ring {
            Some(Ring::from_cpl(cpl(&vcpu.get_sregs()?)))
        } else {
            None
        };
        let left = Progress::Left {
            tsc: Tsc(tsc),
            halted: Ticks(halted),
            ring,
        };
        pmu.observe(core, left);
        self.sample_pending(vcpu, lent.thread, lent.observer)?;
        if self.debug.is_active() {
            self.share_debug_registers(vcpu, lent)?;
        }
        Ok(())
    }

    #[inline]
    fn sample_pending(
        &mut self,
        vcpu: VcpuAccess<'_>,
        thread: &mut ThreadContext,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), KvmPmuError> {
        let number = thread.core();
        match (&mut self.pmu, thread.counters_mut()) {
            (Some(pmu), Some(core)) if pmu.has_host_overflow(core) => {
                sample((pmu, core), vcpu, number, observer)
            }
            _ => Ok(()),
        }
    }
}

fn sample(
    (pmu, core): (&mut VcpuPmu, &mut CorePmu),
    vcpu: VcpuAccess<'_>,
    number: u16,
    observer: &mut dyn TrapObserver,
) -> Result<(), KvmPmuError> {
    let (regs, sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
    let moment = Moment {
        tsc: rdtsc(),
        ip: regs.rip,
        ring: Ring::from_cpl(cpl(&sregs)),
        cr3: sregs.cr3,
        vm: std::process::id().cast_signed(),
        vcpu: vcpu.id().0.into(),
        core: number,
    };
    pmu.sample_hosts(core, &moment, observer.quantities());
    Ok(())
}
