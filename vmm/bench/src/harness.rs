//! What all measuring guests share: how they are built, run and heard.

use std::sync::Arc;
use std::time::Duration;

use pmu_virt::{BackendEnv, CounterBackend, PmuModel, Reservations};
use vm_memory::{Bytes, GuestAddress};
use vmm::config::DEFAULT_PMI_FLOOR_US;
use vmm::counters::backend_env;
use vmm::cpuid::host_vendor;
use vmm::devices::Platform;
use vmm::devices::{DeviceOutcome, GuestEnd};
use vmm::host::CpuFacts;
use vmm::kvm::{Host, KvmVcpu, KvmVm, VmOptions};
use vmm::micro::{KERNEL_CODE, MicroGuest, Solo, SoloParts, Start, UNEXPECTED_VECTOR_PORT};
use vmm::probe::ProbeReport;
use vmm::vcpu::{Observer, TrapMode, VcpuEnd};

use super::error::BenchError;

/// A batch takes some milliseconds, even on a slow KVM.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// The port that a finished batch is reported on, with its number.
pub(super) const DONE: u16 = 0xe1;
/// Reported instead of a batch's number, with the vector, if the guest took an
/// exception that it should not.
const UNEXPECTED: u32 = 0x100;

/// The host, what it was found to do, and the model that fits it.
#[derive(Clone, Debug)]
pub(super) struct Harness<'a> {
    pub(super) host: &'a Host,
    pub(super) probe: &'a ProbeReport,
    pub(super) model: PmuModel,
}

impl<'a> Harness<'a> {
    /// With the default model of the host's vendor.
    pub(super) fn new(host: &'a Host, probe: &'a ProbeReport) -> Result<Self, BenchError> {
        let vendor = host_vendor(&host.supported_cpuid()?)?;
        Ok(Self {
            host,
            probe,
            model: PmuModel::default_for(vendor),
        })
    }

    /// What counter sources must know of the host: the TSC's frequency, which a
    /// vCPU has, and the vendor.
    pub(super) fn env(&self) -> Result<BackendEnv, BenchError> {
        let guest = MicroGuest::new().start(Start::at(KERNEL_CODE, 0));
        let (_vm, vcpus) = self.build(&guest)?;
        let tsc_khz = only(vcpus)?.get_tsc_khz()?;
        let vendor = Some(self.model.vendor());
        Ok(backend_env(tsc_khz, vendor, self.probe.step_support()))
    }

    /// Makes the VM of `guest`.
    pub(super) fn build(
        &self,
        guest: &MicroGuest,
    ) -> Result<(Arc<KvmVm>, Vec<KvmVcpu>), BenchError> {
        self.build_trapping(guest, TrapMode::Auto)
    }

    /// Makes the VM of `guest`, in which RDPMC is trapped by `mode`.
    pub(super) fn build_trapping(
        &self,
        guest: &MicroGuest,
        mode: TrapMode,
    ) -> Result<(Arc<KvmVm>, Vec<KvmVcpu>), BenchError> {
        let trap = self.probe.trap_plan(mode);
        let options = VmOptions::with_pmu(Some(&self.model)).trapping(trap);
        Ok(guest.build(self.host, &options)?)
    }

    /// Puts `kvm` into the real run loop, on the calling thread.
    pub(super) fn solo(
        &self,
        kvm: KvmVcpu,
        vm: &Arc<KvmVm>,
        backend: Box<dyn CounterBackend>,
        platform: Arc<dyn Platform>,
        observer: Box<dyn Observer>,
    ) -> Result<Solo, BenchError> {
        self.solo_with(kvm, vm, backend, platform, observer, None)
    }

    /// Puts `kvm` into the real run loop, on the calling thread, with counter
    /// reservations or without.
    pub(super) fn solo_with(
        &self,
        kvm: KvmVcpu,
        vm: &Arc<KvmVm>,
        backend: Box<dyn CounterBackend>,
        platform: Arc<dyn Platform>,
        observer: Box<dyn Observer>,
        reservations: Option<Reservations>,
    ) -> Result<Solo, BenchError> {
        let parts = SoloParts {
            model: self.model.clone(),
            backend,
            quirks: self.probe.quirks(),
            step: self.probe.step_support(),
            pmi_floor_us: DEFAULT_PMI_FLOOR_US,
            platform,
            observer,
            reservations,
        };
        Ok(Solo::new(kvm, vm.clone(), parts)?)
    }
}

/// The host's processor, for a report's head.
pub(super) fn processor() -> Option<String> {
    CpuFacts::read(std::path::Path::new("/")).model_name
}

/// Resident memory of a process in bytes (proc_pid_status(5), VmRSS): `self`, or a number.
pub(super) fn resident(process: &str) -> Result<u64, BenchError> {
    let path = format!("/proc/{process}/status");
    let status = std::fs::read(&path).map_err(BenchError::Memory)?;
    // The process's name may be any bytes.
    let status = String::from_utf8_lossy(&status);
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix("kB"));
    let kilobytes = kilobytes.and_then(|number| number.trim().parse::<u64>().ok());
    kilobytes.map(|number| number * 1024).ok_or_else(|| {
        let what = format!("{path} tells no VmRSS");
        BenchError::Memory(std::io::Error::other(what))
    })
}

/// The only vCPU of a guest that has one.
pub(super) fn only(vcpus: Vec<KvmVcpu>) -> Result<KvmVcpu, BenchError> {
    let vcpu = vcpus.into_iter().next();
    vcpu.ok_or_else(|| BenchError::Guest("it has no vCPU".to_owned()))
}

/// Runs to the end of a batch and returns its number.
pub(super) fn batch(solo: &mut Solo, patience: Duration) -> Result<u32, BenchError> {
    match solo.run(patience)? {
        Some(VcpuEnd::Guest(GuestEnd::TestExit(vector))) if vector & UNEXPECTED != 0 => {
            let vector = vector & !UNEXPECTED;
            Err(BenchError::Guest(format!("it took vector {vector}")))
        }
        Some(VcpuEnd::Guest(GuestEnd::TestExit(batch))) => Ok(batch),
        Some(end) => Err(BenchError::Guest(end.to_string())),
        None => Err(BenchError::TimedOut(patience)),
    }
}

/// Little-endian words of `N` bytes that the guest left at `address`.
pub(super) fn words<const N: usize>(
    vm: &KvmVm,
    address: u64,
    count: u32,
) -> Result<Vec<[u8; N]>, BenchError> {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let mut bytes = vec![0; N * count];
    vm.memory()
        .read_slice(&mut bytes, GuestAddress(address))
        .map_err(|error| BenchError::Guest(error.to_string()))?;
    let (words, _) = bytes.as_chunks::<N>();
    Ok(words.to_vec())
}

/// Times are far below 2^52 ns, so both are exact as `f64`.
#[allow(clippy::cast_precision_loss, reason = "see above")]
pub(super) fn ratio(one: u64, other: u64) -> f64 {
    one as f64 / other.max(1) as f64
}

/// Ends the run loop at the end of a batch, with its number.
#[derive(Debug)]
pub(super) struct BatchPort;

impl Platform for BatchPort {
    fn port_read(&self, _: u16, _: u8, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn port_write(&self, port: u16, _: u8, data: &[u8]) -> DeviceOutcome {
        let word: [u8; 4] = data.try_into().unwrap_or([0xff; 4]);
        match port {
            DONE => DeviceOutcome::Exit(GuestEnd::TestExit(u32::from_le_bytes(word))),
            UNEXPECTED_VECTOR_PORT => {
                let vector = u32::from_le_bytes(word) & 0xff;
                DeviceOutcome::Exit(GuestEnd::TestExit(UNEXPECTED | vector))
            }
            _ => DeviceOutcome::Continue,
        }
    }

    fn mmio_read(&self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn mmio_write(&self, _: u64, _: &[u8]) {}
}
