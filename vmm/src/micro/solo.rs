//! One micro-guest vCPU on the calling thread, with devices and an observer of
//! the caller's, and resumable after every end.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use arbiter::{Grant, PcrUnit};
use kvm_pmu::{KvmPmu, KvmPmuParts};
use pmu_virt::{CorePmu, CounterBackend, CounterReport, OwnerId, PmuModel, Reservations, VcpuPmu};

use super::emulated::{self, EmuPmu};
use super::error::MicroRunError;
use super::machine::MicroGuest;
use crate::devices::Platform;
use crate::emu::{EmuVcpu, Room, TSC_KHZ, VirtualClock};
use crate::kvm::{KvmVcpu, KvmVm};
use crate::sys::install_kick_handler;
use crate::vcpu::{
    DebugQuirks, Observer, StepSupport, ThreadContext, Vcpu, VcpuControl, VcpuEnd, VcpuFailure,
    VcpuParts,
};

/// What a solo vCPU is made of, besides its engine's parts.
#[derive(Debug)]
pub struct SoloParts {
    pub model: PmuModel,
    pub backend: Box<dyn CounterBackend>,
    /// Oddities of the host's KVM, if it runs there.
    pub quirks: DebugQuirks,
    /// What the host can step, likewise.
    pub step: StepSupport,
    /// Shortest time between two PMIs, in microseconds.
    pub pmi_floor_us: u32,
    /// Devices.
    pub platform: Arc<dyn Platform>,
    /// Receives the trap path's reports.
    pub observer: Box<dyn Observer>,
    /// Counter reservations; `None` is `--pcr off`.
    pub reservations: Option<Reservations>,
}

/// One vCPU in the real run loop; its thread is the one that made it.
#[derive(Debug)]
pub struct Solo {
    runs: Runs,
    control: Arc<VcpuControl>,
    tsc_khz: u32,
}

/// On which engine.
#[derive(Debug)]
enum Runs {
    Kvm(Box<Vcpu>, Box<ThreadContext>),
    Emulated(Box<Room>),
}

impl Solo {
    /// Wraps `kvm`, a vCPU of `vm`.
    ///
    /// # Errors
    /// [`MicroRunError`]: the kick handler or the kick timer cannot be had.
    pub fn new(kvm: KvmVcpu, vm: Arc<KvmVm>, parts: SoloParts) -> Result<Self, MicroRunError> {
        install_kick_handler().map_err(MicroRunError::Signal)?;
        let tsc_khz = kvm.get_tsc_khz()?;
        let control = Arc::new(VcpuControl::default());
        let mut core = Box::new(CorePmu::new(parts.backend));
        let mut pmu = VcpuPmu::detached(OwnerId::default(), parts.model, Grant::everything());
        pmu.attach(&mut core);
        let pmu = match parts.reservations {
            Some(reservations) => pmu.with_reservations(reservations),
            None => pmu,
        };
        let thread = ThreadContext::new(tsc_khz).map_err(VcpuFailure::from)?;
        let thread = thread.with_counters(Some(core));
        let pmu = KvmPmuParts {
            pmu: Some(pmu),
            traps: vm.traps().clone(),
            quirks: parts.quirks,
            step: parts.step,
            pmi_floor: Duration::from_micros(parts.pmi_floor_us.into()),
            tsc_khz,
        };
        let vcpu = Vcpu::new(VcpuParts {
            pmu: KvmPmu::new(&kvm, pmu).map_err(VcpuFailure::from)?,
            kvm,
            vm,
            platform: parts.platform,
            control: control.clone(),
            own_core: None,
            observer: parts.observer,
            firmware: None,
            host: None,
            guest: None,
        });
        Ok(Self {
            runs: Runs::Kvm(Box::new(vcpu), Box::new(thread)),
            control,
            tsc_khz,
        })
    }

    /// The first vCPU of `guest` on a processor in software, in virtual time, which `clock`
    /// shows.
    ///
    /// # Errors
    /// [`MicroRunError`]: the guest cannot be made.
    pub fn emulated(
        guest: &MicroGuest,
        parts: SoloParts,
        clock: VirtualClock,
    ) -> Result<Self, MicroRunError> {
        let (memory, states) = guest.emulated()?;
        let pmu = EmuPmu {
            visible: parts.model.counts(),
            model: &parts.model,
            backend: parts.backend,
            pmi_floor_us: parts.pmi_floor_us,
            reservations: parts.reservations,
        };
        let state = states.into_iter().next().unwrap_or_default();
        let vcpu = emulated::vcpu((0, 1), state, Some(pmu), parts.observer)?;
        let control = Arc::new(VcpuControl::default());
        let room = emulated::room(memory, vec![vcpu], parts.platform, (control.clone(), clock))?;
        Ok(Self {
            runs: Runs::Emulated(Box::new(room)),
            control,
            tsc_khz: TSC_KHZ,
        })
    }

    fn pmu(&self) -> Option<&VcpuPmu> {
        match &self.runs {
            Runs::Kvm(vcpu, _) => vcpu.pmu(),
            Runs::Emulated(room) => room.vcpus().first().and_then(EmuVcpu::pmu),
        }
    }

    fn core(&self) -> Option<&CorePmu> {
        match &self.runs {
            Runs::Kvm(_, thread) => thread.counters(),
            Runs::Emulated(room) => room.vcpus().first().and_then(EmuVcpu::core),
        }
    }

    /// Runs the guest until it ends; `None` if that took longer than `timeout`.
    /// After an end that the guest asked for, and after a time-out, it can be run on.
    ///
    /// # Errors
    /// The vCPU failed, by the host's fault.
    pub fn run(&mut self, timeout: Duration) -> Result<Option<VcpuEnd>, MicroRunError> {
        self.control.resume();
        let (vcpu, thread) = match &mut self.runs {
            Runs::Kvm(vcpu, thread) => (vcpu, thread),
            Runs::Emulated(room) => {
                let (end, _) = emulated::run_for(room, &self.control, timeout)?;
                return Ok((end.end != VcpuEnd::Stopped).then_some(end.end));
            }
        };
        let target = thread.target();
        let control = self.control.clone();
        let (running, ended) = channel::<()>();
        let (end, late) = std::thread::scope(|scope| {
            let watchdog = scope.spawn(move || {
                let late = ended.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout);
                if late {
                    // The loop looks at the flag after each kick.
                    control.stop();
                    target.kick();
                }
                late
            });
            let end = vcpu.run(thread);
            drop(running);
            (end, watchdog.join())
        });
        let end = end?;
        let late = late.map_err(|_| MicroRunError::Panicked)?;
        Ok((!late || end != VcpuEnd::Stopped).then_some(end))
    }

    /// The counters in use, while the guest does not run.
    #[must_use]
    pub fn counters(&self) -> Vec<CounterReport> {
        let report = |pmu: &VcpuPmu| pmu.report(self.core());
        self.pmu().map(report).unwrap_or_default()
    }

    /// Who holds which counters; `None` without reservations.
    #[must_use]
    pub fn reservations(&self) -> Option<&PcrUnit> {
        self.pmu()?.claims().unit()
    }

    /// Whether the guest is being single-stepped for a counter that runs.
    #[must_use]
    pub fn steps(&self) -> bool {
        self.pmu().is_some_and(|pmu| pmu.needs().stepping)
    }

    /// The backend that counts.
    #[must_use]
    pub fn backend(&self) -> Option<&dyn CounterBackend> {
        Some(self.core()?.backend())
    }

    /// PMIs delivered so far, and of these late ones.
    #[must_use]
    pub fn pmis(&self) -> (u64, u64) {
        let throttle = self.pmu().map(|pmu| pmu.interrupts().throttle());
        throttle.map_or((0, 0), |throttle| (throttle.delivered(), throttle.late()))
    }

    /// The guest's TSC frequency in kHz.
    #[must_use]
    pub fn tsc_khz(&self) -> u32 {
        self.tsc_khz
    }
}
