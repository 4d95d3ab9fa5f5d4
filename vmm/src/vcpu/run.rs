//! One vCPU: the run loop, which enters, leaves, settles the counts and deals with the
//! exit; and what cores and tools do with a vCPU between its turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvm_bindings::KVM_MP_STATE_RUNNABLE;
use kvm_pmu::{Exited, HaltStats, KvmPmu, Lent, ThreadContext, Tsc, now};
use perfmon_abi::wire::info::VcpuState;
use pmu_virt::{CorePmu, NotSettled, PmuState, VcpuPmu};
use vmm_control::{
    ControlEndpoint, HaltTimes, Job, OffCoreReason, Snapshot, VcpuQuantities, VcpuView, serve_vcpu,
};

use super::exits::handle_kvm;
use super::firmware::FirmwarePhase;
use super::hosted::{Hosted, VcpuFacts, view};
use super::observe::{Observer, Reports};
use super::outcome::{RunOutcome, Runnability, Timeslice, VcpuEnd, VcpuFailure, dead_machine};
use super::timer;
use crate::audit::Holding;
use crate::control::{VcpuHalts, VcpuThread, exit_kind};
use crate::devices::Platform;
use crate::firmware::Expected;
use crate::guest_kernel::{VcpuLook, VmKernel};
use crate::kvm::{KvmVcpu, KvmVm, VcpuId, VmExit, set_signal_mask};
use crate::reservations::{answer_questions, holdings};
use crate::sys::{SignalMask, nap};

/// Nothing but a kick ends a wait of this length.
const LONG: Duration = Duration::from_secs(3600);

/// What other threads may do to a vCPU.
#[derive(Debug, Default)]
pub struct VcpuControl {
    stop: AtomicBool,
}

impl VcpuControl {
    /// Asks the vCPU to leave its loop; kick its thread to have it look.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// Takes back a [`VcpuControl::stop`], to run a stopped vCPU on.
    pub fn resume(&self) {
        self.stop.store(false, Ordering::Release);
    }

    /// True once [`VcpuControl::stop`] was called.
    #[must_use]
    pub fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// What a vCPU is made of.
#[derive(Debug)]
pub struct VcpuParts {
    /// KVM's side.
    pub kvm: KvmVcpu,
    pub vm: Arc<KvmVm>,
    pub pmu: KvmPmu,
    /// Devices.
    pub platform: Arc<dyn Platform>,
    /// Requests from outside.
    pub control: Arc<VcpuControl>,
    /// Receives reports.
    pub observer: Box<dyn Observer>,
    /// The counters of the core that it has to itself, for its thread
    /// ([`ThreadContext::with_counters`]); the PMU is attached to them.
    pub own_core: Option<Box<CorePmu>>,
    /// What the firmware is expected to hold, to be compared when its phase is
    /// over.
    pub firmware: Option<Expected>,
    /// The way to the server of host tools, where there is one.
    pub host: Option<ControlEndpoint>,
    /// Its guest's kernel, where host tools may ask for it.
    pub(crate) guest: Option<Arc<VmKernel>>,
}

/// One vCPU, which any thread may run, one at a time.
#[derive(Debug)]
pub struct Vcpu {
    kvm: KvmVcpu,
    vm: Arc<KvmVm>,
    pmu: KvmPmu,
    platform: Arc<dyn Platform>,
    control: Arc<VcpuControl>,
    reports: Reports,
    firmware: FirmwarePhase,
    host: Hosted,
    /// Its `KVM_RUN` looks for what would wake it and does nothing else.
    looking: bool,
}

/// Where the loop goes on.
enum Turn {
    /// It enters the guest.
    Enter,
    /// It has waited, and looks again.
    Again,
    /// Its timeslice is over.
    Over,
}

impl Vcpu {
    /// A vCPU that any thread may run, one at a time.
    #[must_use]
    pub fn new(parts: VcpuParts) -> Self {
        let tally = tally(&parts.kvm, parts.host.as_ref());
        let id = parts.kvm.id().0;
        let look = parts.guest.map(|guest| VcpuLook::new(guest, id));
        Self {
            firmware: FirmwarePhase::of(parts.pmu.pmu(), parts.firmware),
            kvm: parts.kvm,
            vm: parts.vm,
            pmu: parts.pmu,
            platform: parts.platform,
            control: parts.control,
            reports: Reports::new(parts.observer, tally, look),
            host: Hosted::new(parts.host),
            looking: false,
        }
    }

    /// Which vCPU this is.
    #[must_use]
    pub fn id(&self) -> VcpuId {
        self.kvm.id()
    }

    /// The TSC's frequency in kHz.
    #[must_use]
    pub fn tsc_khz(&self) -> u32 {
        self.pmu.tsc_khz()
    }

    /// KVM's side, while the guest does not run.
    #[must_use]
    pub fn kvm(&self) -> &KvmVcpu {
        &self.kvm
    }

    /// The PMU, while the guest does not run.
    #[must_use]
    pub fn pmu(&self) -> Option<&VcpuPmu> {
        self.pmu.pmu()
    }

    /// PMIs delivered so far, and of these late ones.
    #[must_use]
    pub fn pmis(&self) -> (u64, u64) {
        self.pmu.pmis()
    }

    /// Runs the guest until it ends or is stopped, on `thread`.
    ///
    /// # Errors
    /// [`VcpuFailure`]: an ioctl failed, which no guest should be able to cause.
    pub fn run(&mut self, thread: &mut ThreadContext) -> Result<VcpuEnd, VcpuFailure> {
        loop {
            // Without a timeslice nothing but an end leads out of the loop.
            if let RunOutcome::Ended(end) = self.run_until(thread, None)? {
                return Ok(end);
            }
        }
    }

    /// Runs the guest for one timeslice. Afterwards any thread may run it on: KVM has
    /// completed its last access.
    ///
    /// # Errors
    /// [`VcpuFailure`]: an ioctl failed, which no guest should be able to cause.
    pub fn run_for(
        &mut self,
        thread: &mut ThreadContext,
        timeslice: &Timeslice<'_>,
    ) -> Result<RunOutcome, VcpuFailure> {
        if self.looking {
            set_signal_mask(&self.kvm, None)?;
            self.looking = false;
        }
        self.run_until(thread, Some(timeslice))
    }

    fn run_until(
        &mut self,
        thread: &mut ThreadContext,
        timeslice: Option<&Timeslice<'_>>,
    ) -> Result<RunOutcome, VcpuFailure> {
        if self.host.is_served() {
            let thread_of_it = VcpuThread(thread.target());
            self.host.comes_to(thread.core().into(), thread_of_it);
            self.note_startup()?;
        }
        self.pmu.enter_thread(&self.kvm, thread);
        let outcome = self.run_loop(thread, timeslice);
        // Another thread may run it on.
        let left = self.pmu.pause(&mut self.kvm, thread);
        if let Ok(RunOutcome::Paused(runnability)) = &outcome {
            self.note_rest(*runnability);
        }
        let outcome = outcome.and_then(|outcome| left.map(|()| outcome).map_err(VcpuFailure::from));
        outcome.or_else(|failure| dead_machine(failure).map(RunOutcome::Ended))
    }

    /// The loop of every vCPU: until an end, or until its timeslice is over.
    fn run_loop(
        &mut self,
        thread: &mut ThreadContext,
        timeslice: Option<&Timeslice<'_>>,
    ) -> Result<RunOutcome, VcpuFailure> {
        thread.kick_at(timeslice.and_then(|timeslice| timeslice.until));
        // KVM has completed what the last exit was about.
        let mut complete = true;
        if timeslice.is_some() {
            // A kick between two timeslices was seen by nobody.
            thread.forget_kick();
        }
        loop {
            if self.control.stopping() {
                return Ok(RunOutcome::Ended(VcpuEnd::Stopped));
            }
            match self.turn(thread, timeslice, complete)? {
                Turn::Enter => {}
                Turn::Again => continue,
                Turn::Over => return Ok(RunOutcome::Paused(self.runnability()?)),
            }
            self.answer_questions(thread);
            let (pmu, kvm, lent) = self.lend(thread);
            let exited = pmu.enter(kvm, lent)?.run()?;
            complete = exited.exit() == VmExit::Interrupted;
            self.reports.tally.count_exit(exit_kind(exited.exit()));
            if self.host.awaits_startup() {
                self.note_startup()?;
            }
            self.firmware
                .look(self.kvm.id(), self.pmu.pmu_mut(), &self.vm);
            if let Exited::Vmm(exit) = exited
                && let Some(end) = handle_kvm(&mut self.kvm, &*self.platform, exit)?
            {
                self.finish_access()?;
                return Ok(RunOutcome::Ended(end));
            }
        }
    }

    fn note_startup(&mut self) -> Result<(), VcpuFailure> {
        let awaits = self.kvm.awaits_startup()?;
        self.host.note_startup(awaits, &self.reports.tally);
        Ok(())
    }

    /// What comes before an entry, and whether there is to be one.
    #[inline]
    fn turn(
        &mut self,
        thread: &mut ThreadContext,
        timeslice: Option<&Timeslice<'_>>,
        complete: bool,
    ) -> Result<Turn, VcpuFailure> {
        // Where vCPUs share cores, the core does their jobs.
        if timeslice.is_none() && self.host.has_jobs() {
            self.note_startup()?;
            self.do_jobs(thread)?;
        }
        let locked_out = self.pmu.locked_out_until();
        let held = locked_out.is_some() || self.is_blocked();
        match timeslice {
            None if held => {
                self.wait(thread, locked_out)?;
                self.tick(thread);
                return Ok(Turn::Again);
            }
            None => {}
            Some(timeslice) if held || timeslice.is_over() || self.waits_for_room() => {
                if complete {
                    return Ok(Turn::Over);
                }
                // A vCPU that waits for its next timeslice must not owe its guest
                // anything: this entry only completes the access.
                self.kvm.set_immediate_exit(true);
            }
            Some(_) => {}
        }
        Ok(Turn::Enter)
    }

    /// The PMU, its vCPU, and what it needs of the vCPU's surroundings.
    fn lend<'a>(
        &'a mut self,
        thread: &'a mut ThreadContext,
    ) -> (&'a mut KvmPmu, &'a mut KvmVcpu, Lent<'a>) {
        let lent = Lent {
            memory: self.vm.memory(),
            thread,
            observer: &mut self.reports,
        };
        (&mut self.pmu, &mut self.kvm, lent)
    }

    /// Has KVM complete the access behind the last exit, so that the registers are
    /// those after the instruction.
    fn finish_access(&mut self) -> Result<(), VcpuFailure> {
        self.kvm.set_immediate_exit(true);
        self.kvm.run()?;
        Ok(())
    }

    /// Waits until `until` or a kick, outside of `KVM_RUN`: interrupts and PMIs
    /// wait as well. The thread is this vCPU's own.
    fn wait(&mut self, thread: &mut ThreadContext, until: Option<Tsc>) -> Result<(), VcpuFailure> {
        let khz = self.pmu.tsc_khz();
        // Its guest does not run, and yet a question to it may end.
        let until = [until, self.decision_due()].into_iter().flatten().min();
        let time = until.map_or(LONG, |until| (until - now()).duration(khz));
        self.reports.tally.off_thread(OffCoreReason::Held);
        let began = Instant::now();
        let waited = nap(time, || !self.control.stopping() && !self.host.has_jobs());
        // The vCPU's thread is its core: nothing ran there.
        if let Some(core) = thread.counters_mut() {
            self.pass_idle(core, began.elapsed());
        }
        self.reports.tally.on_thread();
        waited.map_err(VcpuFailure::Wait)
    }

    /// What is due takes place although the guest does not run.
    fn tick(&mut self, thread: &mut ThreadContext) {
        self.pmu.tick(thread.counters_mut(), now());
        self.answer_questions(thread);
    }

    /// Answers what the hypervisor was asked, and passes on what it was answered.
    #[inline]
    fn answer_questions(&mut self, thread: &mut ThreadContext) {
        if let Some(pmu) = self.pmu.pmu_mut()
            && answer_questions(pmu, thread.counters_mut())
        {
            self.host.hear_owners(pmu, thread.counters_mut());
        }
    }

    /// Whether a tool's context keeps it off its core.
    #[inline]
    pub(crate) fn is_blocked(&self) -> bool {
        self.pmu().is_some_and(|pmu| pmu.hosts().is_blocked())
    }

    /// Whether the guest has asked for counters that another core has.
    #[inline]
    fn waits_for_room(&self) -> bool {
        self.pmu().is_some_and(|pmu| pmu.claims().waits_for_room())
    }

    /// When something is due in the reservations.
    fn decision_due(&self) -> Option<Tsc> {
        self.pmu().and_then(|pmu| pmu.claims().due())
    }

    fn note_rest(&self, runnability: Runnability) {
        self.host.note_rest(runnability, &self.reports.tally);
    }

    /// Could it run? KVM answers only while the vCPU is outside `KVM_RUN`.
    ///
    /// # Errors
    /// The error of `KVM_GET_MP_STATE`.
    pub fn runnability(&self) -> Result<Runnability, VcpuFailure> {
        if self.is_blocked() {
            return Ok(Runnability::Blocked);
        }
        if let Some(until) = self.pmu.locked_out_until() {
            return Ok(Runnability::LockedOut { until });
        }
        // Halted, or a processor that waits for INIT or SIPI.
        match self.kvm.get_mp_state()?.mp_state {
            KVM_MP_STATE_RUNNABLE => Ok(Runnability::Runnable),
            _ => Ok(Runnability::Idle),
        }
    }

    /// Asks whether an idle vCPU has been woken, without entering the guest: with
    /// a signal pending, `KVM_RUN` makes one pass of its halt check. A LAPIC timer
    /// that has expired needs two: the first one makes an interrupt of it.
    ///
    /// `mask` lets [`hold_pending_signal`](crate::sys::hold_pending_signal)'s
    /// signal of the calling thread through.
    ///
    /// # Errors
    /// [`VcpuFailure`]: an ioctl failed, which no guest should be able to cause.
    pub fn probe(
        &mut self,
        thread: &mut ThreadContext,
        mask: SignalMask,
    ) -> Result<RunOutcome, VcpuFailure> {
        let outcome = self.look(thread, mask);
        outcome.or_else(|failure| dead_machine(failure).map(RunOutcome::Ended))
    }

    fn look(
        &mut self,
        thread: &mut ThreadContext,
        mask: SignalMask,
    ) -> Result<RunOutcome, VcpuFailure> {
        if !self.looking {
            set_signal_mask(&self.kvm, Some(mask))?;
            self.looking = true;
        }
        // A kick at the very end of the last timeslice has left it set, and `KVM_RUN`
        // would return before it looks.
        self.kvm.set_immediate_exit(false);
        // A vCPU that halts is not left again, and time goes on for its leases.
        self.tick(thread);
        let (pmu, kvm, lent) = self.lend(thread);
        // A look is no exit of the guest, so tools do not see it.
        let exited = pmu.probe(kvm, lent)?.run()?;
        if let Exited::Vmm(exit) = exited
            && let Some(end) = handle_kvm(&mut self.kvm, &*self.platform, exit)?
        {
            return Ok(RunOutcome::Ended(end));
        }
        let runnability = self.runnability()?;
        if runnability == Runnability::Runnable {
            self.note_rest(runnability);
        }
        Ok(RunOutcome::Paused(runnability))
    }

    /// Enters and leaves `KVM_RUN` without running the guest, so that what KVM
    /// does for a vCPU on a new thread is done and its cost can be reported.
    ///
    /// # Errors
    /// [`VcpuFailure`]: an ioctl failed, which no guest should be able to cause.
    pub fn settle_in(&mut self) -> Result<(), VcpuFailure> {
        self.finish_access()?;
        self.kvm.set_immediate_exit(false);
        Ok(())
    }

    /// The instant at which something is known to happen that may wake it: its
    /// timer expires, or a lease, a question or a revocation's notice ends.
    ///
    /// # Errors
    /// The error of `KVM_GET_LAPIC` or `KVM_GET_MSRS`.
    pub fn wake_due(&self) -> Result<Option<Tsc>, VcpuFailure> {
        let timer = timer::due(&self.kvm, self.tsc_khz())?;
        Ok([timer, self.decision_due()].into_iter().flatten().min())
    }

    /// Lets take place what is due by `now` although it may not run; when the next is due.
    /// `None`: nothing is, or it may run.
    pub(crate) fn tick_held(&mut self, thread: &mut ThreadContext, now: Tsc) -> Option<Tsc> {
        let at = self.decision_due()?;
        if !self.is_blocked() && self.pmu.locked_out_until().is_none() {
            return None;
        }
        if at > now {
            return Some(at);
        }
        self.tick(thread);
        self.decision_due()
    }

    /// Its PMU, which gets the counters of a core and gives them back.
    pub(crate) fn pmu_mut(&mut self) -> Option<&mut VcpuPmu> {
        self.pmu.pmu_mut()
    }

    /// Nothing ran on `core`, on which it is, for `time`.
    pub(crate) fn pass_idle(&mut self, core: &mut CorePmu, time: Duration) {
        if let Some(pmu) = self.pmu.pmu_mut() {
            pmu.with_core(core, |core| core.pass_idle(time));
        }
    }

    /// What there is of it, for tools.
    pub(crate) fn view(&self, otherwise: VcpuState) -> Result<VcpuView, VcpuFailure> {
        Ok(view(VcpuFacts::of(&self.kvm)?, self.pmu(), otherwise))
    }

    /// Its quantities now; asked on the thread that has it.
    pub(crate) fn quantities(&self) -> Snapshot {
        Snapshot::of(&self.reports.tally)
    }

    /// Whether there may be jobs for it.
    pub(crate) fn has_jobs(&self) -> bool {
        self.host.has_jobs()
    }

    /// Does its jobs on the core that has it, while it is not run.
    pub(crate) fn do_jobs(&mut self, thread: &mut ThreadContext) -> Result<(), VcpuFailure> {
        if let (Some(pmu), Some(core)) = (self.pmu.pmu_mut(), thread.counters_mut()) {
            let (kvm, tally) = (&self.kvm, &self.reports.tally);
            let facts = || VcpuFacts::of(kvm);
            if self.host.do_jobs(facts, (pmu, core), tally, now)? {
                // A guest that reads KVM's clock is told that it was stopped, so that its
                // watchdogs do not take the time for a lockup. Others do not hear of it.
                let _ = kvm.clock_ctrl();
            }
        }
        self.sample_pending(thread)
    }

    /// Does a job for the core that it is on, that of `thread`. `values` are the
    /// core's.
    pub(crate) fn do_core_job(
        &mut self,
        job: Job,
        thread: &mut ThreadContext,
        values: &Snapshot,
    ) -> Result<(), VcpuFailure> {
        if let (Some(pmu), Some(core)) = (self.pmu.pmu_mut(), thread.counters_mut()) {
            serve_vcpu(job, pmu, core, values);
        }
        // What the job has found overflowed is this vCPU's, not of who comes next.
        self.sample_pending(thread)
    }

    /// Counters of tools that have overflowed get their samples and notices,
    /// before the guest runs on.
    fn sample_pending(&mut self, thread: &mut ThreadContext) -> Result<(), VcpuFailure> {
        let reports = &mut self.reports;
        Ok(self.pmu.sample_pending(&self.kvm, thread, reports)?)
    }

    /// `core` has it from now on, and has not run it yet.
    pub(crate) fn moves_to(&self, core: usize, runnability: Runnability) {
        self.host.moves_to(core);
        // One that waits for its start-up IPI may never be run.
        self.note_rest(runnability);
    }

    /// It has ended: tools get their contexts back. `core` is the one that it was
    /// on, if it was on one.
    pub(crate) fn close_endpoint(&mut self, core: Option<&mut CorePmu>) {
        let tally = &self.reports.tally;
        self.host.close(self.pmu.pmu_mut(), core, tally);
    }

    /// Who holds its counters now, when it has ended: what came due since it was
    /// left last has taken place. `core` is the one that it was on, if it was on one.
    #[must_use]
    pub fn holdings(&mut self, mut core: Option<&mut CorePmu>) -> Vec<Holding> {
        self.pmu.tick(core.as_deref_mut(), now());
        let pmu = self.pmu();
        pmu.map(|pmu| holdings(pmu, core.as_deref()))
            .unwrap_or_default()
    }

    /// The PMU's state; a PMI that is late or on its way is pending in it. `None`
    /// without a PMU. Counts are those of the last exit, on this core or after the
    /// vCPU has left its core.
    ///
    /// # Errors
    /// It is parked on another core.
    pub fn save_pmu(
        &mut self,
        mut core: Option<&mut CorePmu>,
    ) -> Result<Option<PmuState>, NotSettled> {
        self.pmu.tick(core.as_deref_mut(), now());
        let Some(pmu) = self.pmu.pmu_mut() else {
            return Ok(None);
        };
        pmu.settle(core)?;
        pmu.save().map(Some)
    }
}

/// Times are for vCPUs with a server. A KVM without statistics has none.
fn tally(kvm: &KvmVcpu, host: Option<&ControlEndpoint>) -> VcpuQuantities {
    host.map_or_else(VcpuQuantities::default, |host| {
        let halts = HaltStats::open(kvm).ok();
        host.quantities(halts.map(|halts| Box::new(VcpuHalts(halts)) as Box<dyn HaltTimes>))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cores hand vCPUs to each other.
    #[test]
    fn a_vcpu_can_move_to_another_thread() {
        fn movable<T: Send>() {}
        movable::<Vcpu>();
    }
}
