//! One vCPU's PMU on KVM: what a run loop calls before and after each `KVM_RUN`.

mod guest_time;
mod interrupts;
mod msr_exits;
mod traps;

use std::sync::Arc;
use std::time::Duration;

use guest_exit::VmExit;
use pmu_virt::{
    CorePmu, IbsDue, PmiForwarded, Progress, Ring, SampledInstruction, Ticks, Tsc, VcpuPmu,
};

use crate::cpuid::announced;
use crate::debug::DebugQuirks;
use crate::error::{EntryError, Errno, KvmPmuError, VcpuError, VcpuId};
use crate::memory::GuestBytes;
#[cfg(feature = "contexts")]
use crate::moment::Around;
use crate::moment::StoppedVcpu;
use crate::observe::{TrapEvent, TrapObserver};
use crate::probe::{HostRefusal, ProbeReport};
use crate::step_driver::StepSupport;
use crate::thread::{ThreadContext, earliest};
use crate::time;
use crate::trap::cpl;
use crate::vcpu::KvmVcpu;
use crate::vm_traps::VmTraps;

use guest_time::GuestTime;
use interrupts::{PmiSender, forward_notices, forward_samples};
use msr_exits::OnKvm;
pub use msr_exits::{MsrAccess, MsrHolder, MsrTraps};
use traps::{Fault, Guest, Traps};

/// How often the guest's own debug registers are looked at while ours are in
/// use, by a kick if need be: KVM has no exit for MOV to DR then.
const DEBUG_REFRESH: Duration = Duration::from_millis(1);

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

    /// For a host that was asked ([`probe`](crate::probe)). How RDPMC is trapped is yet to be
    /// said, by [`ProbeReport::trap_plan`].
    ///
    /// # Errors
    /// [`HostRefusal`]: no virtual PMU can be had there; a KVM that answers RDPMC itself, for
    /// instance.
    pub fn on(host: &ProbeReport, pmu: VcpuPmu, tsc_khz: u32) -> Result<Self, HostRefusal> {
        host.check()?;
        Ok(Self {
            quirks: host.quirks(),
            step: host.step_support(),
            ..Self::new(pmu, tsc_khz)
        })
    }
}

/// What a VMM lends to the PMU of one vCPU for one call.
#[derive(Debug)]
pub struct Lent<'a> {
    pub memory: &'a dyn GuestBytes,
    /// The calling thread.
    pub thread: &'a mut ThreadContext,
    /// Receives reports.
    pub observer: &'a mut dyn TrapObserver,
}

/// How a vCPU left its guest, and whose exit that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Exited {
    /// The PMU's, and answered, or a mere interruption: enter the guest again, when the VMM
    /// has nothing else to do.
    Pmu(VmExit),
    /// The VMM's, to be answered before the next entry.
    Vmm(VmExit),
}

impl Exited {
    /// What the guest exited with, whosever that is.
    #[must_use]
    pub fn exit(self) -> VmExit {
        match self {
            Self::Pmu(exit) | Self::Vmm(exit) => exit,
        }
    }
}

/// A PMU, and the counters of the thread that has its vCPU.
type OnCore<'a> = (&'a mut VcpuPmu, &'a mut CorePmu);

/// One vCPU's PMU on KVM. Its calls take the [`KvmVcpu`] for which it was made.
///
/// It lets the parts meet: the registers and counters (`VcpuPmu`), the traps, the times of
/// the guest's stays and the way of its PMIs know nothing of each other.
#[derive(Debug)]
pub struct KvmPmu {
    /// The number of this process, which samples carry as that of the VM: asking the host
    /// for it would be a system call for each.
    #[cfg(feature = "contexts")]
    process: i32,
    /// The vCPU for which it was made.
    id: VcpuId,
    tsc_khz: u32,
    pmu: Option<VcpuPmu>,
    msrs: MsrTraps,
    traps: Traps,
    pmis: PmiSender,
    time: GuestTime,
    /// [`NEAR`].
    near: Ticks,
}

impl KvmPmu {
    /// Of `vcpu`, whose CPUID is set.
    ///
    /// # Errors
    /// [`KvmPmuError::Decoder`]; or the vCPU's CPUID could not be read.
    pub fn new(vcpu: &KvmVcpu, parts: KvmPmuParts) -> Result<Self, KvmPmuError> {
        let announced = announced(&vcpu.get_cpuid()?);
        if let Some(lacks) = announced.into_iter().find(|one| !one.is_decoded()) {
            let id = vcpu.id();
            return Err(KvmPmuError::Decoder { id, lacks });
        }
        let tsc_khz = parts.tsc_khz.max(1);
        let floor = Ticks::of(parts.pmi_floor, tsc_khz);
        let mut traps = Traps::new(
            vcpu.id(),
            parts.traps,
            (parts.quirks, parts.step),
            Ticks::of(DEBUG_REFRESH, tsc_khz),
            tsc_khz,
        );
        // One that was restored may be read on vCPUs that are run before this one.
        traps.programmed(parts.pmu.as_ref().is_some_and(VcpuPmu::is_programmed));
        Ok(Self {
            #[cfg(feature = "contexts")]
            process: std::process::id().cast_signed(),
            id: vcpu.id(),
            tsc_khz,
            pmu: parts.pmu.map(|pmu| pmu.with_pmi_floor(floor)),
            msrs: MsrTraps::new(),
            traps,
            pmis: PmiSender::default(),
            time: GuestTime::new(vcpu, tsc_khz),
            near: Ticks::of(NEAR, tsc_khz),
        })
    }

    /// The TSC's frequency in kHz.
    #[must_use]
    pub fn tsc_khz(&self) -> u32 {
        self.tsc_khz
    }

    /// The PMU, while the guest does not run.
    #[must_use]
    pub fn pmu(&self) -> Option<&VcpuPmu> {
        self.pmu.as_ref()
    }

    /// The PMU, to be changed while the guest does not run.
    #[must_use]
    pub fn pmu_mut(&mut self) -> Option<&mut VcpuPmu> {
        self.pmu.as_mut()
    }

    /// PMIs delivered so far, and of these late ones.
    #[must_use]
    pub fn pmis(&self) -> (u64, u64) {
        let throttle = self.pmu.as_ref().map(|pmu| pmu.interrupts().throttle());
        throttle.map_or((0, 0), |throttle| (throttle.delivered(), throttle.late()))
    }

    /// Until when the vCPU is to be kept out of the guest, for having presented too
    /// many wrong cookies; `None` if it may run.
    #[must_use]
    #[inline]
    pub fn locked_out_until(&self) -> Option<Tsc> {
        let until = self.pmu.as_ref()?.claims().locked_out_until()?;
        (time::now() < until).then_some(until)
    }

    /// `thread` runs `vcpu` from now on: a kick ends or prevents its `KVM_RUN`.
    pub fn enter_thread(&mut self, vcpu: &KvmVcpu, thread: &mut ThreadContext) {
        thread.bind(vcpu.kicks());
    }

    /// `thread` does not run `vcpu` from now on: registers may be read and set by its
    /// descriptor, and its PMU has every count, to be saved on any thread. Counters stay on
    /// this thread's; to go on elsewhere the vCPU leaves them as well ([`VcpuPmu::leave`]).
    ///
    /// # Errors
    /// Registers could not be set, or `thread` is not the one that has the counts.
    pub fn leave_thread(
        &mut self,
        vcpu: &mut KvmVcpu,
        thread: &mut ThreadContext,
    ) -> Result<(), KvmPmuError> {
        self.pause(vcpu, thread)?;
        if let Some(pmu) = &mut self.pmu {
            pmu.settle(thread.counters_mut())?;
        }
        Ok(())
    }

    /// [`KvmPmu::leave_thread`] of a vCPU whose counts stay in its thread's counters, between
    /// two timeslices: taking them in costs a system call each with some backends. Its PMU
    /// cannot be saved.
    ///
    /// # Errors
    /// Registers could not be set.
    pub fn pause(
        &mut self,
        vcpu: &mut KvmVcpu,
        thread: &mut ThreadContext,
    ) -> Result<(), KvmPmuError> {
        thread.unbind();
        self.traps.leave();
        self.time.leave();
        Ok(vcpu.leave()?)
    }

    /// Prepares a `KVM_RUN` that enters the guest. It is [`Entered::run`], or the VMM's own
    /// and then [`Entered::after_exit`].
    ///
    /// # Errors
    /// [`KvmPmuError`]: the PMU is another vCPU's, or the thread has no counters for this one; or
    /// an ioctl failed, which no
    /// guest should be able to cause.
    pub fn enter<'a>(
        &'a mut self,
        vcpu: &'a mut KvmVcpu,
        mut lent: Lent<'a>,
    ) -> Result<Entered<'a>, KvmPmuError> {
        self.check_vcpu(vcpu)?;
        if let Some(pmu) = &self.pmu {
            let lacks = match lent.thread.counters() {
                None => Some(EntryError::NoCounters),
                Some(core) => (!pmu.is_on(core)).then_some(EntryError::NotAttached),
            };
            if let Some(lacks) = lacks {
                return Err(KvmPmuError::Entry(vcpu.id(), lacks));
            }
        }
        lent.thread.check()?;
        lent.thread.bind(vcpu.kicks());
        self.prepare(vcpu, &mut lent)?;
        let guest = Guest::of(vcpu, lent.memory);
        let (pmu, target) = (self.pmu.as_ref(), lent.thread.target());
        self.traps.enter(guest, pmu, target, lent.observer)?;
        let (at_once, ring) = self.next_entry(lent.thread.counters());
        if at_once {
            vcpu.set_immediate_exit(true);
        }
        vcpu.hand_over();
        let near = self.note_entry(lent.thread, vcpu.in_smm());
        vcpu.want_registers(ring || near);
        Ok(Entered::new(self, vcpu, lent))
    }

    /// Prepares a `KVM_RUN` that does not enter the guest, as one with a signal
    /// pending: a PMI that was held back and is due is sent, which may wake a halted
    /// vCPU. [`KvmPmu::tick`] lets what else is due take place. The vCPU need not be on the
    /// thread's counters.
    ///
    /// # Errors
    /// As [`KvmPmu::enter`].
    pub fn probe<'a>(
        &'a mut self,
        vcpu: &'a mut KvmVcpu,
        mut lent: Lent<'a>,
    ) -> Result<Entered<'a>, KvmPmuError> {
        self.check_vcpu(vcpu)?;
        self.forward_interrupts(vcpu, &mut lent)?;
        vcpu.hand_over();
        self.time.outside();
        Ok(Entered::new(self, vcpu, lent))
    }

    /// What a PMU knows of its vCPU holds for no other.
    #[inline]
    fn check_vcpu(&self, vcpu: &KvmVcpu) -> Result<(), KvmPmuError> {
        if vcpu.id() == self.id {
            return Ok(());
        }
        let other = EntryError::OtherVcpu(self.id);
        Err(KvmPmuError::Entry(vcpu.id(), other))
    }

    /// Takes in what a `KVM_RUN` ended with: settles the counts, and answers the exit if it is
    /// the PMU's.
    #[inline(never)]
    fn take_exit(
        &mut self,
        vcpu: &mut KvmVcpu,
        lent: &mut Lent<'_>,
        exit: Result<VmExit, Errno>,
    ) -> Result<Exited, KvmPmuError> {
        let tsc = time::now();
        let handlers_changed = self.traps.leave();
        if vcpu.take_immediate_exit() {
            lent.thread.kicked(self.time.entered(), tsc);
        }
        let exit = match exit {
            Ok(exit) => exit,
            Err(error) => return Err(self.give_up(vcpu, lent, tsc, error)),
        };
        vcpu.left_with(exit);
        self.settle(vcpu, lent, tsc)?;
        let locked_out = self.locked_out_until().is_some();
        let guest = Guest::of(vcpu, lent.memory);
        let pmu = on_core(&mut self.pmu, lent.thread);
        let entered = self.time.entered().is_some();
        self.traps.end_step(guest, pmu, exit, entered)?;
        self.take_samples(vcpu, lent)?;
        let is_ours = self.answer(vcpu, lent, exit, handlers_changed)?;
        self.time.outside();
        // A step retires, and a write of the guest's takes a slot away, only
        // while the exit is handled.
        self.take_samples(vcpu, lent)?;
        if !locked_out && let Some(until) = self.locked_out_until() {
            lent.observer
                .event(vcpu.id(), TrapEvent::LockedOut { until });
        }
        if is_ours {
            return Ok(Exited::Pmu(exit));
        }
        // The VMM may change registers to answer it.
        vcpu.forget();
        Ok(Exited::Vmm(exit))
    }

    /// One line for each kind of exit that can be the PMU's. False: it is the VMM's.
    fn answer(
        &mut self,
        vcpu: &mut KvmVcpu,
        lent: &mut Lent<'_>,
        exit: VmExit,
        handlers_changed: bool,
    ) -> Result<bool, KvmPmuError> {
        let guest = Guest::of(vcpu, lent.memory);
        let pmu = on_core(&mut self.pmu, lent.thread);
        let observer = &mut *lent.observer;
        Ok(match exit {
            VmExit::Rdmsr { index } => {
                let access = self.msrs.rdmsr(&OnKvm(guest.vcpu), pmu, index)?;
                return self.finish(vcpu, lent, access);
            }
            VmExit::Wrmsr { index, value } => {
                let vcpu_msrs = &mut OnKvm(guest.vcpu);
                let access = self.msrs.wrmsr(vcpu_msrs, pmu, index, value)?;
                return self.finish(vcpu, lent, access);
            }
            VmExit::Debug(debug) => {
                self.traps.debug_exit(guest, pmu, &debug, observer)?;
                true
            }
            VmExit::IoOut {
                port,
                width: 1,
                len: 1,
            } => self.traps.out(guest, pmu, port, observer)?,
            VmExit::MmioWrite { address, data, len } => {
                let stored = self.traps.stored(address, &data[..len]);
                if stored {
                    observer.event(vcpu.id(), TrapEvent::HandlerWritten);
                }
                stored
            }
            VmExit::MemoryFault { address } => {
                self.fault(vcpu, observer, address, handlers_changed)
            }
            VmExit::InternalError(_) => self.fault(vcpu, observer, None, handlers_changed),
            VmExit::Interrupted => true,
            _ => false,
        })
    }

    /// Answers an access to an MSR, if it was one of the PMU's; false if not.
    fn finish(
        &mut self,
        vcpu: &mut KvmVcpu,
        lent: &mut Lent<'_>,
        access: Option<MsrAccess>,
    ) -> Result<bool, KvmPmuError> {
        let Some(access) = access else {
            return Ok(false);
        };
        lent.observer.event(vcpu.id(), access.event);
        if access.sets_up {
            vcpu.expect_use();
            let guest = Guest::of(vcpu, lent.memory);
            let pmu = self.pmu.as_ref();
            self.traps.sets_up(guest, pmu, lent.observer)?;
        }
        vcpu.answer(access.answer);
        Ok(true)
    }

    /// An access to memory that KVM could not do. True if it is tried again.
    #[cold]
    fn fault(
        &mut self,
        vcpu: &KvmVcpu,
        observer: &mut dyn TrapObserver,
        page: Option<u64>,
        handlers_changed: bool,
    ) -> bool {
        let fault = self.traps.fault(page, handlers_changed);
        if fault == Fault::Opened {
            observer.event(vcpu.id(), TrapEvent::HandlerWritten);
        }
        fault != Fault::NotOurs
    }

    /// `KVM_RUN` failed with `error` at `tsc`.
    #[cold]
    fn give_up(
        &mut self,
        vcpu: &mut KvmVcpu,
        lent: &mut Lent<'_>,
        tsc: Tsc,
        error: Errno,
    ) -> KvmPmuError {
        self.abandon(vcpu, lent, tsc);
        VcpuError::new(vcpu.id(), "KVM_RUN", error).into()
    }

    /// Nothing is known of an entry but that it is over at `tsc`. What was counted until then
    /// is, as far as KVM still tells what that takes.
    #[cold]
    fn abandon(&mut self, vcpu: &mut KvmVcpu, lent: &mut Lent<'_>, tsc: Tsc) {
        self.traps.leave();
        vcpu.take_back();
        vcpu.forget();
        let _ = self.settle(vcpu, lent, tsc);
        self.time.outside();
    }

    /// Everything that needs the stopped vCPU before its guest is entered.
    fn prepare(&mut self, vcpu: &KvmVcpu, lent: &mut Lent<'_>) -> Result<(), KvmPmuError> {
        self.take_samples(vcpu, lent)?;
        let guest = Guest::of(vcpu, lent.memory);
        if let Some(pmu) = on_core(&mut self.pmu, lent.thread) {
            self.traps.plan_step(guest, pmu)?;
        }
        if self.pmu.as_ref().is_some_and(VcpuPmu::has_interrupt) {
            self.forward_interrupts(vcpu, lent)?;
        }
        let pmu = self.pmu.as_ref();
        Ok(self.traps.prepare(guest, pmu, lent.observer)?)
    }

    /// Sends what is pending and may go now.
    #[inline(never)]
    fn forward_interrupts(
        &mut self,
        vcpu: &KvmVcpu,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        let Some(pmu) = &mut self.pmu else {
            return Ok(());
        };
        let due = self.time.due();
        let (forwarded, event) = self.pmis.forward(vcpu, pmu, time::now(), due)?;
        if forwarded == PmiForwarded::Sent {
            self.traps.look_soon();
        }
        if let Some(event) = event {
            lent.observer.event(vcpu.id(), event);
        }
        match forward_samples(vcpu, pmu, time::now())? {
            IbsDue::Send { .. } => self.traps.look_soon(),
            IbsDue::Late => lent.observer.event(vcpu.id(), TrapEvent::PmiLate),
            IbsDue::Nothing => {}
        }
        forward_notices(vcpu, pmu, lent.observer)
    }

    /// Whether the guest is to be left at once, and whether the ring at its exit is to be
    /// known.
    fn next_entry(&mut self, core: Option<&CorePmu>) -> (bool, bool) {
        let (Some(pmu), Some(core)) = (&mut self.pmu, core) else {
            return (false, false);
        };
        let needs = pmu.needs();
        self.time.entering(needs.counting);
        // Taking samples gives places anew, and planning a step settles what was counted:
        // either may come to one more overflow, which is sampled where the guest stands now.
        (overflow_of_tools(pmu, core), needs.ring)
    }

    /// The guest is entered now, in SMM or not. True if an overflow is near: its PMI wants
    /// registers, and must not wait until they are fetched.
    fn note_entry(&mut self, thread: &mut ThreadContext, smm: bool) -> bool {
        let now = time::now();
        let (mut deadline, mut due) = (None, None);
        let has_pmu = if let Some((pmu, core)) = on_core(&mut self.pmu, thread) {
            pmu.observe(core, Progress::Entered { tsc: now });
            due = pmu.deadline(core);
            deadline = earliest(due, pmu.interrupt_due());
            if smm && (pmu.pebs_due() || pmu.ibs_due().is_some()) {
                // KVM has no exit for the end of SMM.
                deadline = earliest(deadline, Some(now + self.traps.fresh_for()));
            }
            true
        } else {
            false
        };
        self.time.enter(now, due);
        let deadline = earliest(deadline, self.traps.deadline(has_pmu));
        thread.set_deadline(now, deadline);
        due.is_some_and(|due| due - now < self.near)
    }

    /// Reports to the PMU that the guest has stopped, and samples what overflowed.
    fn settle(&mut self, vcpu: &KvmVcpu, lent: &mut Lent<'_>, tsc: Tsc) -> Result<(), KvmPmuError> {
        let pmu = on_core(&mut self.pmu, lent.thread);
        let (Some((pmu, core)), Some(entered)) = (pmu, self.time.entered()) else {
            return Ok(());
        };
        let needs = pmu.needs();
        let halted = self.time.halted(vcpu, (entered, tsc), needs.counting)?;
        let ring = if needs.ring {
            Some(Ring::from_cpl(cpl(&vcpu.get_sregs()?)))
        } else {
            None
        };
        pmu.observe(core, Progress::Left { tsc, halted, ring });
        self.take_samples(vcpu, lent)?;
        if let Some(pmu) = &self.pmu {
            let traps = &mut self.traps;
            traps.share_debug_registers(vcpu, pmu, lent.observer)?;
        }
        Ok(())
    }

    /// Takes the samples that are due, of a guest that stands where it was found. In SMM
    /// those of the guest wait.
    #[inline]
    fn take_samples(&mut self, vcpu: &KvmVcpu, lent: &mut Lent<'_>) -> Result<(), KvmPmuError> {
        match &self.pmu {
            Some(pmu) if pmu.has_samples(lent.thread.counters()) => self.take_due(vcpu, lent),
            _ => Ok(()),
        }
    }

    #[cold]
    fn take_due(&mut self, vcpu: &KvmVcpu, lent: &mut Lent<'_>) -> Result<(), KvmPmuError> {
        #[cfg(feature = "contexts")]
        let around = Around {
            core: lent.thread.core(),
            process: self.process,
            observer: lent.observer,
        };
        let Some((pmu, core)) = on_core(&mut self.pmu, lent.thread) else {
            return Ok(());
        };
        let instruction = if pmu.needs().stepping && self.traps.is_under_way() {
            SampledInstruction::UnderWay
        } else {
            SampledInstruction::Unseen
        };
        let Guest { memory, .. } = Guest::of(vcpu, lent.memory);
        let mut moment = StoppedVcpu::standing(vcpu, memory, instruction);
        #[cfg(feature = "contexts")]
        moment.tell_tools(around);
        Ok(pmu.take_samples(Some(core), &mut moment)?)
    }

    /// Samples counters of attached contexts that have overflowed, before the guest
    /// runs on; `thread` is the one that has the vCPU. To be called when the VMM has
    /// changed something about them outside of an exit.
    ///
    /// # Errors
    /// Registers could not be read.
    #[cfg(feature = "contexts")]
    #[inline]
    pub fn sample_pending(
        &mut self,
        vcpu: &KvmVcpu,
        thread: &mut ThreadContext,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), KvmPmuError> {
        let around = Around {
            core: thread.core(),
            process: self.process,
            observer,
        };
        match on_core(&mut self.pmu, thread) {
            Some((pmu, core)) if pmu.hosts().has_overflow(core) => {
                let mut moment = StoppedVcpu::for_tools(vcpu, around);
                Ok(pmu.take_samples(Some(core), &mut moment)?)
            }
            _ => Ok(()),
        }
    }

    /// Lets what is due in the reservations by `now` take place, for a vCPU that is
    /// not run; `core` is the one that it is on, if it is on one.
    pub fn tick(&mut self, core: Option<&mut CorePmu>, now: Tsc) {
        if let Some(pmu) = &mut self.pmu {
            pmu.tick(core, now);
        }
    }
}

/// Whether a counter of a tool's context has overflowed.
#[inline]
#[cfg(feature = "contexts")]
fn overflow_of_tools(pmu: &VcpuPmu, core: &CorePmu) -> bool {
    pmu.hosts().has_overflow(core)
}

#[cfg(not(feature = "contexts"))]
fn overflow_of_tools(_: &VcpuPmu, _: &CorePmu) -> bool {
    false
}

/// A vCPU that may be in its guest, from [`KvmPmu::enter`] on. Until its exit is taken in, its
/// counters run and the VM's other vCPUs may wait for it; so nothing else can be done with it,
/// devices come afterwards. One that is dropped is taken in as it stands, also by a panic that
/// unwinds: with the ioctls that settling takes.
#[derive(Debug)]
#[must_use]
pub struct Entered<'a> {
    pmu: &'a mut KvmPmu,
    vcpu: &'a mut KvmVcpu,
    lent: Lent<'a>,
    taken: bool,
}

impl<'a> Entered<'a> {
    #[inline]
    fn new(pmu: &'a mut KvmPmu, vcpu: &'a mut KvmVcpu, lent: Lent<'a>) -> Self {
        Self {
            pmu,
            vcpu,
            lent,
            taken: false,
        }
    }

    /// `KVM_RUN`: runs the guest until it exits, settles the counts, and answers the exit if
    /// it is the PMU's. EINTR and EAGAIN are interruptions. EFAULT may be a store of the
    /// guest's to a page that the PMU has made read-only; if not, it is the VMM's to deal with.
    ///
    /// # Errors
    /// As [`KvmPmu::enter`], and any other errno of `KVM_RUN`: the guest cannot be run on.
    #[inline]
    pub fn run(self) -> Result<Exited, KvmPmuError> {
        let exit = self.vcpu.enter();
        self.take(exit)
    }

    /// The same of a `KVM_RUN` of the VMM's own, whether it `ran` or failed. Nothing may have
    /// written to `kvm_run` since: the bytes of an IN or a load come afterwards
    /// ([`KvmVcpu::io_data`], [`KvmVcpu::answer`]).
    ///
    /// # Errors
    /// As [`Entered::run`].
    pub fn after_exit(self, ran: Result<(), Errno>) -> Result<Exited, KvmPmuError> {
        let exit = self.vcpu.exit(ran.err());
        self.take(exit)
    }

    #[inline]
    fn take(mut self, exit: Result<VmExit, Errno>) -> Result<Exited, KvmPmuError> {
        self.taken = true;
        self.pmu.take_exit(self.vcpu, &mut self.lent, exit)
    }
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.taken {
            self.pmu.abandon(self.vcpu, &mut self.lent, time::now());
        }
    }
}

/// The PMU on the counters that its thread lends.
#[inline]
fn on_core<'a>(pmu: &'a mut Option<VcpuPmu>, thread: &'a mut ThreadContext) -> Option<OnCore<'a>> {
    pmu.as_mut().zip(thread.counters_mut())
}
