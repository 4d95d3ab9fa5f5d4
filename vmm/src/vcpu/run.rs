//! The run loop: enter, leave, settle the counts, deal with the exit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arbiter::Layer;
use pmu_virt::{
    CounterSet, MsrIndex, PmiRequest, PmiThrottle, Progress, ReadOutcome, Register, Ring,
    ThrottleDecision, VcpuPmu, WriteOutcome,
};
use thiserror::Error;
use vmm_sys_util::errno;

use super::debug::{DebugControl, DebugEvent, DebugQuirks};
use super::end::VcpuEnd;
use super::halt::HaltClock;
use super::kick::DeadlineTimer;
use super::observe::{Observer, TrapEvent};
use super::platform::Platform;
use super::pmi::{self, PmiError};
use super::rdpmc::GpWatch;
use super::stepping::{StepDriver, StepSupport};
use crate::devices::DeviceOutcome;
use crate::kvm::{Answer, DebugExit, InternalError, KvmVcpu, KvmVm, VcpuError, VcpuId, VmExit};
use crate::sys::{KickTarget, rdtsc};
use crate::trap::{StepStop, cpl};

/// How often the guest's own debug registers are looked at while ours are in
/// use, in milliseconds: KVM has no exit for MOV to DR then.
const DEBUG_REFRESH_MS: u64 = 1;

/// Exits after one that wanted registers during which KVM hands them over at
/// once: drivers write selects and read counters in runs. Each costs an exit
/// about a twentieth more, fetching them by ioctl half as much again.
const SYNCED_EXITS: u8 = 16;

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
    /// A PMI could not be sent.
    #[error("a PMI could not be sent: {0}")]
    Pmi(#[from] PmiError),
    /// The kick timer could not be made.
    #[error("timer_create failed: {0} (limit of pending signals: `ulimit -i`)")]
    Timer(errno::Error),
}

/// What a vCPU is made of.
#[derive(Debug)]
pub struct VcpuParts {
    /// KVM's side.
    pub kvm: KvmVcpu,
    /// Its VM.
    pub vm: Arc<KvmVm>,
    /// Its PMU; `None` under `--pmu none`.
    pub pmu: Option<VcpuPmu>,
    /// Devices.
    pub platform: Arc<dyn Platform>,
    /// Requests from outside.
    pub control: Arc<VcpuControl>,
    /// Receives reports.
    pub observer: Box<dyn Observer>,
    /// Oddities of the host's KVM.
    pub quirks: DebugQuirks,
    /// What the host can step.
    pub step: StepSupport,
    /// Shortest time between two PMIs, in microseconds.
    pub pmi_floor_us: u32,
    /// TSC frequency.
    pub tsc_khz: u32,
}

/// One vCPU, on its thread.
#[derive(Debug)]
pub struct Vcpu {
    kvm: KvmVcpu,
    core: Core,
}

/// Everything but KVM's side, so that both can be borrowed at once.
#[derive(Debug)]
struct Core {
    vm: Arc<KvmVm>,
    pmu: Option<VcpuPmu>,
    platform: Arc<dyn Platform>,
    control: Arc<VcpuControl>,
    observer: Box<dyn Observer>,
    debug: DebugControl,
    gp: GpWatch,
    stepping: StepDriver,
    throttle: PmiThrottle,
    pending_pmi: Option<PmiRequest>,
    halt: HaltClock,
    timer: DeadlineTimer,
    counting: bool,
    warned_full: bool,
    /// Exits yet to come at which registers are likely to be wanted.
    registers_wanted: u8,
    entered: u64,
}

impl Vcpu {
    /// A vCPU whose kicks go to the calling thread, which must also run it.
    ///
    /// # Errors
    /// [`VcpuFailure::Timer`].
    pub fn new(parts: VcpuParts) -> Result<Self, VcpuFailure> {
        let tsc_khz = parts.tsc_khz.max(1);
        let floor = u64::from(parts.pmi_floor_us) * u64::from(tsc_khz) / 1000;
        let halt = HaltClock::new(&parts.kvm, tsc_khz);
        Ok(Self {
            kvm: parts.kvm,
            core: Core {
                vm: parts.vm,
                pmu: parts.pmu,
                platform: parts.platform,
                control: parts.control,
                observer: parts.observer,
                debug: DebugControl::new(parts.quirks, DEBUG_REFRESH_MS * u64::from(tsc_khz)),
                gp: GpWatch::default(),
                stepping: StepDriver::new(parts.step),
                throttle: PmiThrottle::new(floor),
                pending_pmi: None,
                halt,
                timer: DeadlineTimer::new(tsc_khz).map_err(VcpuFailure::Timer)?,
                counting: false,
                warned_full: false,
                registers_wanted: 0,
                entered: 0,
            },
        })
    }

    /// The thread to kick.
    #[must_use]
    pub fn kick_target() -> KickTarget {
        KickTarget::current()
    }

    /// Runs the guest until it ends or is stopped.
    ///
    /// # Errors
    /// [`VcpuFailure`]: an ioctl failed, which no guest should be able to cause.
    pub fn run(&mut self) -> Result<VcpuEnd, VcpuFailure> {
        let core = &mut self.core;
        self.kvm.with_kicks(|kvm| {
            loop {
                if core.control.stopping() {
                    return Ok(VcpuEnd::Stopped);
                }
                core.before_entry(kvm)?;
                let exit = kvm.run()?;
                core.settle(kvm)?;
                if let Some(end) = core.handle(kvm, exit)? {
                    finish_access(kvm)?;
                    return Ok(end);
                }
            }
        })
    }

    /// KVM's side, while the guest does not run.
    #[must_use]
    pub fn kvm(&self) -> &KvmVcpu {
        &self.kvm
    }

    /// The PMU, while the guest does not run.
    #[must_use]
    pub fn pmu(&self) -> Option<&VcpuPmu> {
        self.core.pmu.as_ref()
    }

    /// PMIs delivered and late so far.
    #[must_use]
    pub fn throttle(&self) -> &PmiThrottle {
        &self.core.throttle
    }
}

/// Has KVM complete the access behind the last exit, so that the registers are
/// those after the instruction.
fn finish_access(kvm: &mut KvmVcpu) -> Result<(), VcpuError> {
    kvm.set_immediate_exit(true);
    kvm.run().map(|_| ())
}

impl Core {
    fn before_entry(&mut self, kvm: &mut KvmVcpu) -> Result<(), VcpuFailure> {
        if let Some(pmu) = &mut self.pmu {
            let memory = self.vm.memory();
            let ended = self
                .stepping
                .before_entry(kvm, memory, &mut self.debug, pmu)?;
            if ended {
                self.gp.want(&mut self.debug);
            }
        }
        self.forward_pmi(kvm, rdtsc())?;
        self.debug.apply(kvm)?;
        if let Some(pmu) = &mut self.pmu {
            let needs = pmu.needs();
            if needs.counting && !self.counting {
                self.halt.begin();
            }
            self.counting = needs.counting;
            let soon = self.registers_wanted > 0;
            self.registers_wanted = self.registers_wanted.saturating_sub(1);
            kvm.sync_registers(soon || needs.ring);
            let now = rdtsc();
            self.entered = now;
            pmu.observe(Progress::Entered { tsc: now });
            let late = self.throttle.deadline();
            self.timer.set(now, earliest(pmu.deadline(), late));
        }
        Ok(())
    }

    /// Tells the PMU that the guest has stopped, and sends what overflowed.
    fn settle(&mut self, kvm: &mut KvmVcpu) -> Result<(), VcpuFailure> {
        let tsc = rdtsc();
        // A kick has done its work once KVM_RUN has returned.
        kvm.set_immediate_exit(false);
        let Some(pmu) = &mut self.pmu else {
            return Ok(());
        };
        let needs = pmu.needs();
        let ticks = tsc.saturating_sub(self.entered);
        let halted = self.halt.passed(ticks, needs.counting);
        let ring = match needs.ring {
            true => Some(Ring::from_cpl(cpl(&kvm.get_sregs()?))),
            false => None,
        };
        pmu.observe(Progress::Left { tsc, halted, ring });
        // A guest that sets breakpoints while ours are in use is noticed here.
        if self.debug.is_active() {
            self.debug.refresh_stale(kvm)?;
        }
        Ok(())
    }

    fn forward_pmi(&mut self, kvm: &KvmVcpu, now: u64) -> Result<(), VcpuFailure> {
        let Some(pmu) = &mut self.pmu else {
            return Ok(());
        };
        let vendor = pmu.model().vendor();
        let mut due = self.throttle.due(now);
        if let Some(request) = pmu.take_pmi() {
            self.pending_pmi = Some(match self.pending_pmi {
                Some(pending) => both(pending, request),
                None => request,
            });
            match self.throttle.request(now) {
                ThrottleDecision::Deliver => due = true,
                ThrottleDecision::Late { .. } if !due => {
                    self.report(kvm.id(), || TrapEvent::PmiLate);
                }
                ThrottleDecision::Late { .. } => {}
            }
        }
        if !due {
            return Ok(());
        }
        let Some(request) = self.pending_pmi.take() else {
            return Ok(());
        };
        let delivery = pmi::send(kvm, &self.vm, vendor)?;
        self.report(kvm.id(), || TrapEvent::Pmi { request, delivery });
        Ok(())
    }

    fn report(&mut self, id: VcpuId, event: impl FnOnce() -> TrapEvent) {
        if self.observer.wants_events() {
            self.observer.event(id, &event());
        }
    }

    /// One line per kind of exit.
    fn handle(&mut self, kvm: &mut KvmVcpu, exit: VmExit) -> Result<Option<VcpuEnd>, VcpuFailure> {
        if !matches!(exit, VmExit::Debug(_)) {
            self.step_stop(kvm, StepStop::Exit)?;
        }
        match exit {
            VmExit::Rdmsr { index } => self.rdmsr(kvm, MsrIndex(index)),
            VmExit::Wrmsr { index, value } => self.wrmsr(kvm, MsrIndex(index), value)?,
            VmExit::Debug(debug) => self.debug_exit(kvm, &debug)?,
            VmExit::Interrupted => {}
            VmExit::IoIn { port, width, len } => {
                let mut data = vec![0xff; len];
                self.platform.port_read(port, width, &mut data);
                kvm.answer(&Answer::Io(data));
            }
            VmExit::IoOut { port, width, data } => {
                return Ok(match self.platform.port_write(port, width, &data) {
                    DeviceOutcome::Continue => None,
                    DeviceOutcome::Exit(end) => Some(VcpuEnd::Guest(end)),
                });
            }
            VmExit::MmioRead { address, len } => {
                let mut data = [0xff; 8];
                self.platform.mmio_read(address, &mut data[..len]);
                kvm.answer(&Answer::Mmio(data));
            }
            VmExit::MmioWrite { address, data, len } => {
                self.platform.mmio_write(address, &data[..len]);
            }
            VmExit::SystemEvent { kind } => {
                return Ok(Some(VcpuEnd::Stuck(format!(
                    "KVM reports system event {kind}, which no x86 guest of ours can cause"
                ))));
            }
            VmExit::Shutdown => {
                // kvm_amd has reset the vCPU by now.
                const RESET_RIP: u64 = 0xfff0;
                let rip = kvm.get_regs()?.rip;
                return Ok(Some(VcpuEnd::TripleFault {
                    rip: (rip != RESET_RIP).then_some(rip),
                }));
            }
            VmExit::Halted => {
                return Ok(Some(VcpuEnd::Stuck(
                    "HLT exited to the VMM: this machine has no in-kernel irqchip".to_owned(),
                )));
            }
            VmExit::InternalError(error) => {
                return Ok(Some(VcpuEnd::Stuck(describe_internal_error(kvm, &error))));
            }
            VmExit::FailEntry { reason } => {
                return Ok(Some(VcpuEnd::Stuck(format!(
                    "the processor refused the guest's state (hardware reason {reason:#x})"
                ))));
            }
            VmExit::Unexpected { what } => {
                return Ok(Some(VcpuEnd::Stuck(format!("unexpected exit: {what}"))));
            }
        }
        Ok(None)
    }

    fn rdmsr(&mut self, kvm: &mut KvmVcpu, msr: MsrIndex) {
        // RDMSR is privileged: the processor checks CPL before the intercept.
        let outcome = match &mut self.pmu {
            Some(pmu) => pmu.rdmsr(msr, Layer::GuestKernel),
            None => ReadOutcome::Gp,
        };
        kvm.answer(&match outcome {
            ReadOutcome::Value(value) => Answer::Msr(value),
            ReadOutcome::Gp | ReadOutcome::NotHandled => Answer::MsrFault,
        });
        self.report(kvm.id(), || TrapEvent::MsrRead { msr, outcome });
    }

    fn wrmsr(&mut self, kvm: &mut KvmVcpu, msr: MsrIndex, value: u64) -> Result<(), VcpuFailure> {
        let outcome = match &mut self.pmu {
            Some(pmu) => pmu.wrmsr(msr, value, Layer::GuestKernel),
            None => WriteOutcome::Gp,
        };
        kvm.answer(&match outcome {
            WriteOutcome::Done => Answer::Done,
            WriteOutcome::Gp | WriteOutcome::NotHandled => Answer::MsrFault,
        });
        self.report(kvm.id(), || TrapEvent::MsrWrite {
            msr,
            value,
            outcome,
        });
        let register = self.pmu.as_ref().and_then(|pmu| pmu.model().decode(msr));
        if outcome == WriteOutcome::Done && register.is_some_and(starts_counting) {
            self.registers_wanted = SYNCED_EXITS;
            self.arm_rdpmc(kvm)?;
        }
        Ok(())
    }

    /// A guest that programs counters will read them: watch its #GP handler.
    fn arm_rdpmc(&mut self, kvm: &mut KvmVcpu) -> Result<(), VcpuFailure> {
        let full = self.gp.arm(kvm, self.vm.memory(), &mut self.debug)?;
        if full {
            // Once: a guest that takes and leaves the last one in turn must not
            // fill the host's log.
            if !std::mem::replace(&mut self.warned_full, true) {
                log::warn!(
                    "{}: the guest uses all four debug registers, its RDPMC will fault",
                    kvm.id()
                );
            }
            self.report(kvm.id(), || TrapEvent::DebugRegistersFull);
        }
        Ok(())
    }

    fn debug_exit(&mut self, kvm: &KvmVcpu, exit: &DebugExit) -> Result<(), VcpuFailure> {
        self.registers_wanted = SYNCED_EXITS;
        match self.debug.on_exit(kvm, exit)? {
            DebugEvent::Breakpoint(address) => self.breakpoint(kvm, address)?,
            DebugEvent::Guest(dr6) => {
                // After a data breakpoint the instruction is complete, before
                // an instruction breakpoint it has not begun.
                self.step_stop(kvm, StepStop::Exit)?;
                self.stepping.abandon();
                self.report(kvm.id(), || TrapEvent::GuestDebug { dr6 });
            }
            DebugEvent::Stepped => self.step_stop(kvm, StepStop::Trap)?,
            DebugEvent::Passed => {}
        }
        Ok(())
    }

    /// One of our breakpoints: the #GP handler, or another that a step leads to.
    fn breakpoint(&mut self, kvm: &KvmVcpu, address: u64) -> Result<(), VcpuFailure> {
        let memory = self.vm.memory();
        let gate = self.gp.gate().filter(|gate| gate.handler == address);
        let (Some(gate), Some(pmu)) = (gate, &mut self.pmu) else {
            self.step_stop(kvm, StepStop::Breakpoint(address))?;
            self.debug.pass(kvm, address)?;
            return Ok(());
        };
        if self.stepping.is_active() {
            self.stepping.hide_tf_in_frame(kvm, memory, &gate)?;
        }
        let event = self.gp.on_breakpoint(kvm, memory, &mut self.debug, pmu)?;
        match event {
            TrapEvent::Rdpmc {
                ring,
                outcome: ReadOutcome::Value(_),
                ..
            } if self.stepping.is_active() => self.stepping.emulated_rdpmc(ring, pmu),
            _ => self.step_stop(kvm, StepStop::Breakpoint(address))?,
        }
        self.report(kvm.id(), || event);
        Ok(())
    }

    /// Tells the stepper, if it is at work, that the guest stopped.
    fn step_stop(&mut self, kvm: &KvmVcpu, stop: StepStop) -> Result<(), VcpuFailure> {
        if let (true, Some(pmu)) = (self.stepping.is_active(), &mut self.pmu) {
            let memory = self.vm.memory();
            self.stepping
                .stopped(kvm, memory, &mut self.debug, pmu, stop)?;
        }
        Ok(())
    }
}

/// True for the registers that a guest writes before it reads counts.
fn starts_counting(register: Register) -> bool {
    matches!(
        register,
        Register::Select(_) | Register::FixedControl | Register::GlobalControl
    )
}

/// One PMI stands for the overflows of both.
fn both(one: PmiRequest, other: PmiRequest) -> PmiRequest {
    PmiRequest {
        counters: CounterSet::from_bits(one.counters.bits() | other.counters.bits()),
    }
}

fn earliest(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}

fn describe_internal_error(kvm: &KvmVcpu, error: &InternalError) -> String {
    let rip = kvm.get_regs().map_or(0, |regs| regs.rip);
    let bytes: Vec<String> = error
        .bytes
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let code = match bytes.is_empty() {
        true => "unknown bytes".to_owned(),
        false => bytes.join(" "),
    };
    match error.suberror {
        1 => format!(
            "KVM cannot emulate the instruction at RIP {rip:#x} ({code}): this KVM runs guest \
             CPL 0 in its emulator; try --hide-feature cx16,xsave, or a KVM that runs it natively"
        ),
        other => format!("KVM internal error {other} at RIP {rip:#x} ({code})"),
    }
}
