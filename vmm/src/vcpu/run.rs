//! The run loop: enter, leave, settle the counts, deal with the exit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pmu_virt::{CorePmu, PmiDue, Progress, Ring, VcpuPmu};
use thiserror::Error;
use vmm_sys_util::errno;

use super::debug::{DebugControl, DebugQuirks};
use super::end::VcpuEnd;
use super::halt::HaltClock;
use super::kick::Seat;
use super::observe::{Observer, TrapEvent};
use super::platform::Platform;
use super::pmi::{self, Lvtpc, PmiError};
use super::rdpmc::GpWatch;
use super::stepping::{StepDriver, StepSupport};
use super::turn::{Stay, Turn};
use crate::firmware::Expected;
use crate::kvm::{KvmVcpu, KvmVm, VcpuError, VcpuId, VmExit};
use crate::perfmon::{HostSide, Tally};
use crate::sys::rdtsc;
use crate::trap::cpl;

/// How often the guest's own debug registers are looked at while ours are in
/// use, in milliseconds: KVM has no exit for MOV to DR then.
const DEBUG_REFRESH_MS: u64 = 1;

/// Exits after one that wanted registers during which KVM hands them over at
/// once: drivers write selects and read counters in runs. Each costs an exit
/// about a twentieth more, fetching them by ioctl half as much again.
pub(super) const SYNCED_EXITS: u8 = 16;

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
    /// A PMI could not be sent.
    #[error("a PMI could not be sent: {0}")]
    Pmi(#[from] PmiError),
    /// The kick timer could not be made.
    #[error("timer_create failed: {0} (limit of pending signals: `ulimit -i`)")]
    Timer(errno::Error),
    /// The thread could not be kept on its host CPU.
    #[error("sched_setaffinity failed for host CPU {cpu}: {error}")]
    Pin {
        /// Which one.
        cpu: usize,
        /// Why.
        error: errno::Error,
    },
    /// The signals that end a wait could not be blocked.
    #[error("pthread_sigmask failed: {0}")]
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
            Self::Vcpu(error) | Self::Pmi(PmiError::Vcpu(error)) => error.is_dead(),
            Self::Pmi(PmiError::Vm(_))
            | Self::Timer(_)
            | Self::Pin { .. }
            | Self::Wait(_)
            | Self::Signal(_) => false,
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
    /// Its PMU; `None` under `--pmu none`.
    pub pmu: Option<VcpuPmu>,
    /// The counters of the core that it has to itself, for its thread
    /// ([`Seat::with_pmu`]); the PMU is attached to them.
    pub own_core: Option<Box<CorePmu>>,
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
    /// What the firmware is expected to hold, to be compared when its phase is
    /// over.
    pub firmware: Option<Expected>,
    /// The way to the server of host tools, where there is one.
    pub host: Option<HostSide>,
}

/// One vCPU.
#[derive(Debug)]
pub struct Vcpu {
    tsc_khz: u32,
    pub(super) kvm: KvmVcpu,
    pub(super) core: Core,
    /// Its `KVM_RUN` looks for what would wake it and does nothing else.
    pub(super) looking: bool,
}

/// Everything but KVM's side, so that both can be borrowed at once.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) tsc_khz: u32,
    pub(super) vm: Arc<KvmVm>,
    pub(super) pmu: Option<VcpuPmu>,
    pub(super) platform: Arc<dyn Platform>,
    pub(super) control: Arc<VcpuControl>,
    pub(super) observer: Box<dyn Observer>,
    pub(super) debug: DebugControl,
    pub(super) gp: GpWatch,
    pub(super) stepping: StepDriver,
    /// Until it was compared.
    pub(super) firmware: Option<Expected>,
    /// The way of the PMI that is pending in the PMU.
    pub(super) pmi_way: Option<PmiWay>,
    pub(super) halt: HaltClock,
    /// What host tools can ask for.
    pub(super) tally: Tally,
    pub(super) host: Option<HostSide>,
    pub(super) counting: bool,
    pub(super) warned_full: bool,
    /// Exits yet to come at which registers are likely to be wanted.
    pub(super) registers_wanted: u8,
    pub(super) entered: u64,
    /// The PMU's deadline as of the last entry.
    pub(super) due: Option<u64>,
}

/// The local APIC's part in a PMI, as of its overflow.
#[derive(Debug, Clone, Copy)]
pub(super) struct PmiWay {
    lvtpc: Lvtpc,
    /// When its overflow was due, if the PMU knew.
    due: Option<u64>,
}

impl Vcpu {
    /// A vCPU that any thread may run, one at a time.
    #[must_use]
    pub fn new(parts: VcpuParts) -> Self {
        let tsc_khz = parts.tsc_khz.max(1);
        let floor = u64::from(parts.pmi_floor_us) * u64::from(tsc_khz) / 1000;
        let halt = HaltClock::new(&parts.kvm, tsc_khz);
        let tally = Tally::new(&parts.kvm, parts.host.as_ref());
        Self {
            tsc_khz,
            kvm: parts.kvm,
            looking: false,
            core: Core {
                tsc_khz,
                vm: parts.vm,
                pmu: parts.pmu.map(|pmu| pmu.with_pmi_floor(floor)),
                platform: parts.platform,
                control: parts.control,
                observer: parts.observer,
                debug: DebugControl::new(parts.quirks, DEBUG_REFRESH_MS * u64::from(tsc_khz)),
                gp: GpWatch::default(),
                stepping: StepDriver::new(parts.step),
                firmware: parts.firmware,
                pmi_way: None,
                halt,
                tally,
                host: parts.host,
                counting: false,
                warned_full: false,
                registers_wanted: 0,
                entered: 0,
                due: None,
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
        self.tsc_khz
    }

    /// Runs the guest until it ends or is stopped, on `seat`'s thread.
    ///
    /// # Errors
    /// [`VcpuFailure`]: an ioctl failed, which no guest should be able to cause.
    pub fn run(&mut self, seat: &mut Seat) -> Result<VcpuEnd, VcpuFailure> {
        loop {
            // Without a turn nothing but an end leads out of the loop.
            if let Stay::Ended(end) = self.stay(seat, None)? {
                return Ok(end);
            }
        }
    }

    pub(super) fn stay(
        &mut self,
        seat: &mut Seat,
        turn: Option<&Turn<'_>>,
    ) -> Result<Stay, VcpuFailure> {
        let core = &mut self.core;
        core.comes_to(seat);
        let stay = self.kvm.with_kicks(|kvm| core.stay(kvm, seat, turn));
        // The next stay may be on another thread.
        core.halt.leave(rdtsc(), core.counting);
        if let Ok(Stay::Paused(rest)) = &stay {
            core.note_rest(*rest);
        }
        stay.or_else(|failure| dead_machine(failure).map(Stay::Ended))
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

    /// PMIs delivered so far, and of these late ones.
    #[must_use]
    pub fn pmis(&self) -> (u64, u64) {
        let throttle = self.core.pmu.as_ref().map(VcpuPmu::throttle);
        throttle.map_or((0, 0), |throttle| (throttle.delivered(), throttle.late()))
    }
}

/// The end of a guest whose machine KVM has given up; other failures stay what
/// they are.
pub(super) fn dead_machine(failure: VcpuFailure) -> Result<VcpuEnd, VcpuFailure> {
    match failure.is_dead_machine() {
        true => Ok(VcpuEnd::Stuck(format!(
            "KVM has given this machine up ({failure}); the host's kernel log tells why"
        ))),
        false => Err(failure),
    }
}

/// Has KVM complete the access behind the last exit, so that the registers are
/// those after the instruction.
fn finish_access(kvm: &mut KvmVcpu) -> Result<(), VcpuError> {
    kvm.set_immediate_exit(true);
    kvm.run().map(|_| ())
}

impl Core {
    /// The loop of every vCPU: until an end, or until its turn is over.
    fn stay(
        &mut self,
        kvm: &mut KvmVcpu,
        seat: &mut Seat,
        turn: Option<&Turn<'_>>,
    ) -> Result<Stay, VcpuFailure> {
        let until = turn.and_then(|turn| turn.until);
        // KVM has completed what the last exit was about.
        let mut complete = true;
        if turn.is_some() {
            // A kick between two turns was seen by nobody.
            seat.timer.kicked();
        }
        loop {
            if self.control.stopping() {
                return Ok(Stay::Ended(VcpuEnd::Stopped));
            }
            // With turns, the core does what lies on the desk.
            if turn.is_none() {
                self.do_jobs(kvm, seat)?;
            }
            let barred = self.barred_until();
            let held = barred.is_some() || self.is_blocked();
            match turn {
                None if held => {
                    self.wait(seat, barred)?;
                    continue;
                }
                None => {}
                Some(turn) if held || turn.is_over() => {
                    if complete {
                        return Ok(Stay::Paused(self.rest(kvm)?));
                    }
                    // A vCPU that waits for its next turn must not owe its guest
                    // anything: this entry only completes the access.
                    kvm.set_immediate_exit(true);
                }
                Some(_) => {}
            }
            self.before_entry(kvm, seat, until)?;
            let exit = kvm.run()?;
            complete = exit == VmExit::Interrupted;
            self.tally.exit(&exit);
            self.settle(kvm, seat)?;
            let end = self.handle(kvm, seat, exit)?;
            // A step retires, and a write of the guest's takes a slot away, only
            // while the exit is handled.
            self.sample_pending(kvm, seat)?;
            if let Some(end) = end {
                finish_access(kvm)?;
                return Ok(Stay::Ended(end));
            }
            if barred.is_none()
                && let Some(until) = self.barred_until()
            {
                self.report(kvm.id(), || TrapEvent::Barred { until });
            }
        }
    }

    fn before_entry(
        &mut self,
        kvm: &mut KvmVcpu,
        seat: &mut Seat,
        until: Option<u64>,
    ) -> Result<(), VcpuFailure> {
        if let (Some(pmu), Some(core)) = (&mut self.pmu, &mut seat.pmu) {
            let memory = self.vm.memory();
            let gp_handler = self.gp.gate().map(|gate| gate.handler);
            let ended = self.stepping.before_entry(
                kvm,
                memory,
                &mut self.debug,
                (pmu, core),
                gp_handler,
            )?;
            if ended {
                self.gp.want(&mut self.debug);
            }
        }
        self.forward_pmi(kvm, rdtsc())?;
        self.forward_notices(kvm, seat.pmu.as_deref_mut())?;
        self.debug.apply(kvm)?;
        if let (Some(pmu), Some(core)) = (&mut self.pmu, &mut seat.pmu) {
            if pmu.has_host_overflow(core) {
                // An answer has taken a slot away: it is sampled where the guest
                // stands now.
                kvm.set_immediate_exit(true);
            }
            let needs = pmu.needs();
            if needs.counting {
                self.halt.entering(rdtsc(), !self.counting);
            }
            self.counting = needs.counting;
            let soon = self.registers_wanted > 0;
            self.registers_wanted = self.registers_wanted.saturating_sub(1);
            kvm.sync_registers(soon || needs.ring);
            let now = rdtsc();
            self.entered = now;
            pmu.observe(core, Progress::Entered { tsc: now });
            let late = pmu.throttle().deadline();
            self.due = pmu.deadline(core);
            let deadline = earliest(self.due, late);
            seat.timer.set(now, earliest(deadline, until));
        } else if until.is_some() {
            seat.timer.set(rdtsc(), until);
        }
        Ok(())
    }

    /// Tells the PMU that the guest has stopped, and sends what overflowed.
    fn settle(&mut self, kvm: &mut KvmVcpu, seat: &mut Seat) -> Result<(), VcpuFailure> {
        let tsc = rdtsc();
        // A kick has done its work once KVM_RUN has returned.
        if kvm.take_immediate_exit() {
            seat.timer.kicked();
        }
        let (Some(pmu), Some(core)) = (&mut self.pmu, &mut seat.pmu) else {
            return Ok(());
        };
        let needs = pmu.needs();
        let halted = self.halt.passed(self.entered, tsc, needs.counting);
        let ring = match needs.ring {
            true => Some(Ring::from_cpl(cpl(&kvm.get_sregs()?))),
            false => None,
        };
        pmu.observe(core, Progress::Left { tsc, halted, ring });
        self.sample_pending(kvm, seat)?;
        if self.firmware.is_some() {
            self.compare_firmware(kvm.id());
        }
        // A guest that sets breakpoints while ours are in use is noticed here.
        if self.debug.is_active() {
            self.debug.refresh_stale(kvm)?;
        }
        Ok(())
    }

    pub(super) fn forward_pmi(&mut self, kvm: &KvmVcpu, now: u64) -> Result<(), VcpuFailure> {
        let Some(pmu) = &mut self.pmu else {
            return Ok(());
        };
        let vendor = pmu.model().vendor();
        if let Some(request) = pmu.pmi_to_route() {
            let (lvtpc, due) = (Lvtpc::read(kvm)?, self.due);
            if let Some(delivery) = pmi::refusal(lvtpc) {
                pmu.pmi_dropped();
                self.report(kvm.id(), || TrapEvent::Pmi {
                    request,
                    delivery,
                    due,
                });
                return Ok(());
            }
            self.pmi_way = lvtpc.map(|lvtpc| PmiWay { lvtpc, due });
        }
        let request = match pmu.pmi_due(now) {
            PmiDue::Nothing => return Ok(()),
            PmiDue::Late => {
                self.report(kvm.id(), || TrapEvent::PmiLate);
                return Ok(());
            }
            PmiDue::Send(request) => request,
        };
        let Some(PmiWay { lvtpc, due }) = self.pmi_way else {
            return Ok(());
        };
        let delivery = pmi::send(kvm, &self.vm, vendor, lvtpc)?;
        pmu.pmi_sent();
        self.tally.pmi();
        self.report(kvm.id(), || TrapEvent::Pmi {
            request,
            delivery,
            due,
        });
        Ok(())
    }

    pub(super) fn report(&mut self, id: VcpuId, event: impl FnOnce() -> TrapEvent) {
        if self.observer.wants_events() {
            self.observer.event(id, &event());
        }
    }
}

pub(super) fn earliest(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}
