//! The run loop: enter, leave, settle the counts, deal with the exit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvm_pmu::{ExitOwner, HaltStats, KvmPmu, KvmPmuError, Lent, ThreadContext};
use pmu_virt::{CorePmu, VcpuPmu};
use thiserror::Error;
use vmm_control::{ControlEndpoint, HaltTimes, VcpuQuantities};
use vmm_sys_util::errno;

use super::observe::{Observer, Reports};
use super::outcome::{RunOutcome, Timeslice, VcpuEnd};
use crate::control::{VcpuHalts, exit_kind};
use crate::devices::Platform;
use crate::firmware::Expected;
use crate::guest_kernel::{VcpuLook, VmKernel};
use crate::kvm::{KvmVcpu, KvmVm, VcpuError, VcpuId, VmExit};

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

/// Why a vCPU's thread failed: the host's fault, not the guest's.
#[derive(Debug, Error)]
pub enum VcpuFailure {
    /// A vCPU ioctl failed.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// The PMU could not be served.
    #[error(transparent)]
    Pmu(#[from] KvmPmuError),
    /// The thread could not be kept on its host CPU.
    #[error("sched_setaffinity failed for host CPU {cpu}: {error}")]
    Pin {
        /// Which one.
        cpu: usize,
        /// Why.
        error: errno::Error,
    },
    /// A wait that a kick ends failed.
    #[error("a wait for a kick failed: {0}")]
    Wait(errno::Error),
    /// The signal that probes need could not be queued.
    #[error("a signal cannot be queued: {0} (limit of pending signals: `ulimit -i`)")]
    Signal(errno::Error),
}

impl VcpuFailure {
    /// A guest can lead KVM where its own checks fail; that ends the guest, and
    /// is no failure of ours.
    fn is_dead_machine(&self) -> bool {
        match self {
            Self::Vcpu(error) => error.is_dead(),
            Self::Pmu(error) => error.is_dead(),
            Self::Pin { .. } | Self::Wait(_) | Self::Signal(_) => false,
        }
    }
}

/// What a vCPU is made of.
#[derive(Debug)]
pub struct VcpuParts {
    /// KVM's side.
    pub kvm: KvmVcpu,
    /// Its VM.
    pub vm: Arc<KvmVm>,
    /// Its PMU.
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

/// One vCPU.
#[derive(Debug)]
pub struct Vcpu {
    pub(super) kvm: KvmVcpu,
    pub(super) core: RunState,
    /// Its `KVM_RUN` looks for what would wake it and does nothing else.
    pub(super) looking: bool,
}

/// Everything but KVM's side, so that both can be borrowed at once.
#[derive(Debug)]
pub(super) struct RunState {
    pub(super) vm: Arc<KvmVm>,
    pub(super) pmu: KvmPmu,
    pub(super) platform: Arc<dyn Platform>,
    pub(super) control: Arc<VcpuControl>,
    pub(super) reports: Reports,
    /// What the firmware is expected to hold.
    pub(super) firmware: Option<Expected>,
    /// It has not been seen yet that the firmware's phase is over.
    pub(super) in_firmware: bool,
    pub(super) host: Option<ControlEndpoint>,
    /// It waits for its start-up IPI, as far as tools want to know.
    pub(super) awaits_startup: bool,
}

impl Vcpu {
    /// A vCPU that any thread may run, one at a time.
    #[must_use]
    pub fn new(parts: VcpuParts) -> Self {
        let tally = tally(&parts.kvm, parts.host.as_ref());
        let unit = parts.pmu.pmu().and_then(|pmu| pmu.claims().unit());
        let id = u32::from(parts.kvm.id().0);
        let look = parts.guest.map(|guest| VcpuLook::new(guest, id));
        let in_firmware = unit.is_some_and(|unit| !unit.phase().is_over());
        Self {
            kvm: parts.kvm,
            looking: false,
            core: RunState {
                vm: parts.vm,
                pmu: parts.pmu,
                platform: parts.platform,
                control: parts.control,
                reports: Reports::new(parts.observer, tally, look),
                firmware: parts.firmware,
                in_firmware,
                host: parts.host,
                awaits_startup: false,
            },
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
        self.core.pmu.tsc_khz()
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

    pub(super) fn run_until(
        &mut self,
        thread: &mut ThreadContext,
        timeslice: Option<&Timeslice<'_>>,
    ) -> Result<RunOutcome, VcpuFailure> {
        let core = &mut self.core;
        core.comes_to(&self.kvm, thread)?;
        core.pmu.enter_thread(&self.kvm, thread);
        let outcome = core.run_loop(&mut self.kvm, thread, timeslice);
        // Another thread may run it on.
        let left = core.pmu.leave_thread(&mut self.kvm, thread);
        if let Ok(RunOutcome::Paused(runnability)) = &outcome {
            core.note_rest(*runnability);
        }
        let outcome = outcome.and_then(|outcome| left.map(|()| outcome).map_err(VcpuFailure::from));
        outcome.or_else(|failure| dead_machine(failure).map(RunOutcome::Ended))
    }

    /// KVM's side, while the guest does not run.
    #[must_use]
    pub fn kvm(&self) -> &KvmVcpu {
        &self.kvm
    }

    /// The PMU, while the guest does not run.
    #[must_use]
    pub fn pmu(&self) -> Option<&VcpuPmu> {
        self.core.pmu.pmu()
    }

    /// PMIs delivered so far, and of these late ones.
    #[must_use]
    pub fn pmis(&self) -> (u64, u64) {
        self.core.pmu.pmis()
    }
}

/// Times are for vCPUs with a server. A KVM without statistics has none.
fn tally(kvm: &KvmVcpu, host: Option<&ControlEndpoint>) -> VcpuQuantities {
    host.map_or_else(VcpuQuantities::default, |host| {
        let halts = HaltStats::open(kvm.fd()).ok();
        host.quantities(halts.map(|halts| Box::new(VcpuHalts(halts)) as Box<dyn HaltTimes>))
    })
}

/// The end of a guest whose machine KVM has given up; other failures stay what
/// they are.
pub(super) fn dead_machine(failure: VcpuFailure) -> Result<VcpuEnd, VcpuFailure> {
    if failure.is_dead_machine() {
        Ok(VcpuEnd::Stuck(format!(
            "KVM has given this machine up ({failure}); the host's kernel log tells why"
        )))
    } else {
        Err(failure)
    }
}

/// Has KVM complete the access behind the last exit, so that the registers are
/// those after the instruction.
fn finish_access(kvm: &mut KvmVcpu) -> Result<(), VcpuError> {
    kvm.set_immediate_exit(true);
    kvm.run().map(|_| ())
}

impl RunState {
    /// The loop of every vCPU: until an end, or until its timeslice is over.
    fn run_loop(
        &mut self,
        kvm: &mut KvmVcpu,
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
            // Where vCPUs share cores, the core does their jobs.
            if timeslice.is_none() && self.has_jobs() {
                self.note_startup(kvm)?;
                self.do_jobs(kvm, thread)?;
            }
            let locked_out = self.pmu.locked_out_until();
            let held = locked_out.is_some() || self.is_blocked();
            match timeslice {
                None if held => {
                    self.wait(thread, locked_out)?;
                    self.tick(thread);
                    continue;
                }
                None => {}
                Some(timeslice) if held || timeslice.is_over() || self.waits_for_room() => {
                    if complete {
                        return Ok(RunOutcome::Paused(self.runnability(kvm)?));
                    }
                    // A vCPU that waits for its next timeslice must not owe its guest
                    // anything: this entry only completes the access.
                    kvm.set_immediate_exit(true);
                }
                Some(_) => {}
            }
            self.answer_questions(thread);
            let (pmu, mut lent) = self.lend(thread);
            pmu.before_entry(kvm, &mut lent)?;
            let exit = kvm.enter();
            if let Ok(exit) = exit {
                complete = exit == VmExit::Interrupted;
                self.reports.tally.count_exit(exit_kind(exit));
            }
            if self.awaits_startup {
                self.note_startup(kvm)?;
            }
            let (pmu, mut lent) = self.lend(thread);
            let owner = pmu.take_exit(kvm, &mut lent, exit)?;
            if self.in_firmware {
                self.look_at_firmware(kvm.id());
            }
            if owner == ExitOwner::Vmm
                && let Ok(exit) = exit
                && let Some(end) = self.handle(kvm, exit)?
            {
                finish_access(kvm)?;
                return Ok(RunOutcome::Ended(end));
            }
        }
    }

    /// The PMU, and what it needs of the vCPU's surroundings.
    pub(super) fn lend<'a>(
        &'a mut self,
        thread: &'a mut ThreadContext,
    ) -> (&'a mut KvmPmu, Lent<'a>) {
        let lent = Lent {
            vm: self.vm.fd(),
            memory: self.vm.memory(),
            thread,
            observer: &mut self.reports,
        };
        (&mut self.pmu, lent)
    }
}
