//! One micro-guest vCPU on the calling thread, with devices and an observer of
//! the caller's, and resumable after every end.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use arbiter::{Grant, PcrUnit};
use kvm_pmu::{KvmPmu, KvmPmuParts};
use pmu_virt::{CorePmu, CounterBackend, CounterReport, OwnerId, PmuModel, Reservations, VcpuPmu};

use super::error::MicroRunError;
use crate::devices::Platform;
use crate::kvm::{KvmVcpu, KvmVm};
use crate::sys::install_kick_handler;
use crate::vcpu::{
    DebugQuirks, Observer, StepSupport, ThreadContext, Vcpu, VcpuControl, VcpuEnd, VcpuFailure,
    VcpuParts,
};

/// What a solo vCPU is made of, besides KVM's parts.
#[derive(Debug)]
pub struct SoloParts {
    pub model: PmuModel,
    pub backend: Box<dyn CounterBackend>,
    /// Oddities of the host's KVM.
    pub quirks: DebugQuirks,
    /// What the host can step.
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
    vcpu: Vcpu,
    thread: ThreadContext,
    control: Arc<VcpuControl>,
    tsc_khz: u32,
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
            pmu: KvmPmu::new(&kvm, pmu),
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
            vcpu,
            thread,
            control,
            tsc_khz,
        })
    }

    /// Runs the guest until it ends; `None` if that took longer than `timeout`.
    /// After an end that the guest asked for, and after a time-out, it can be run on.
    ///
    /// # Errors
    /// The vCPU failed, by the host's fault.
    pub fn run(&mut self, timeout: Duration) -> Result<Option<VcpuEnd>, MicroRunError> {
        self.control.resume();
        let target = self.thread.target();
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
            let end = self.vcpu.run(&mut self.thread);
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
        let report = |pmu: &VcpuPmu| pmu.report(self.thread.counters());
        self.vcpu.pmu().map(report).unwrap_or_default()
    }

    /// Who holds which counters; `None` without reservations.
    #[must_use]
    pub fn reservations(&self) -> Option<&PcrUnit> {
        self.vcpu.pmu()?.claims().unit()
    }

    /// Whether the guest is being single-stepped for a counter that runs.
    #[must_use]
    pub fn steps(&self) -> bool {
        self.vcpu.pmu().is_some_and(|pmu| pmu.needs().stepping)
    }

    /// The backend that counts.
    #[must_use]
    pub fn backend(&self) -> Option<&dyn CounterBackend> {
        Some(self.thread.counters()?.backend())
    }

    /// PMIs delivered so far, and of these late ones.
    #[must_use]
    pub fn pmis(&self) -> (u64, u64) {
        self.vcpu.pmis()
    }

    /// The guest's TSC frequency in kHz.
    #[must_use]
    pub fn tsc_khz(&self) -> u32 {
        self.tsc_khz
    }
}
