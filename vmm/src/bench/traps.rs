//! Trapped PMU accesses against bare exits of the same kind, side by side in one
//! VM: vCPU 0 runs in the real run loop with the `clock` backend, vCPU 1 in a
//! loop that only answers. Both run the same code, in turn and on one thread, so
//! that noise hits both alike.

use std::sync::Arc;
use std::time::Duration;

use pmu_virt::{ClockBackend, PmuModel, all_pmu_msr_ranges};
use serde::Serialize;
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::errno;

use super::bare::Bare;
use super::guest::{Access, BATCH, DONE, guest, samples_at};
use super::stats::{Percentiles, percentiles};
use crate::cpuid::{CpuidError, host_vendor};
use crate::devices::{DeviceOutcome, GuestEnd};
use crate::host::CpuFacts;
use crate::kvm::{Host, HostError, KvmVm, VcpuError, VmOptions};
use crate::micro::{MicroError, MicroRunError, Solo, SoloParts, UNEXPECTED_VECTOR_PORT};
use crate::probe::ProbeReport;
use crate::vcpu::{Platform, Silent, VcpuEnd};

/// A batch of 100 takes some milliseconds, even on a slow KVM.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Told instead of a batch's number, with the vector, if the guest took an
/// exception that it should not.
pub(super) const UNEXPECTED: u32 = 0x100;
const SUBJECT: u8 = 0;
const BARE: u8 = 1;
/// Places of the series; a side's own comes first.
const UNARMED: usize = 2;

/// The measurement failed.
#[derive(Debug, Error)]
pub enum BenchError {
    /// The guest could not be made.
    #[error(transparent)]
    Machine(#[from] MicroError),
    /// The guest could not be run.
    #[error(transparent)]
    Run(#[from] MicroRunError),
    /// An ioctl failed.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// An ioctl failed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The host's processor is of no known vendor.
    #[error(transparent)]
    Vendor(#[from] CpuidError),
    /// The kick signal could not be set up.
    #[error("the kick signal cannot be set up: {0}")]
    Signal(errno::Error),
    /// Two VMs cannot run side by side.
    #[error("this needs two host CPUs, and only one may be used (see `taskset -p $$`)")]
    OneCpu,
    /// The guest did something else than its code says.
    #[error("the measuring guest went astray: {0}")]
    Guest(String),
    /// The guest hung.
    #[error("the measuring guest did not finish a batch within {} s", PATIENCE.as_secs())]
    TimedOut,
}

/// Round trips of one kind of access.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TrapRow {
    /// What the guest did.
    pub access: Access,
    /// Through Umpire's run loop.
    pub umpire: Percentiles,
    /// Through the loop that only answers, with the same breakpoint in place.
    pub bare: Percentiles,
    /// The same without a breakpoint; none for RDPMC, which needs it.
    pub bare_unarmed: Option<Percentiles>,
    /// Ratio of the medians.
    pub ratio_p50: f64,
    /// Ratio of the 99th percentiles.
    pub ratio_p99: f64,
    /// Highest `ratio_p50` that is wanted.
    pub target: f64,
    /// `ratio_p50` is no higher.
    pub met: bool,
}

/// The whole measurement.
#[derive(Clone, Debug, Serialize)]
pub struct TrapReport {
    /// The host's processor.
    pub processor: Option<String>,
    /// Guest CPL 0 runs in KVM's instruction emulator.
    pub slow_cpl0: bool,
    /// PMU model of the guest.
    pub model: &'static str,
    /// The counter backend.
    pub backend: &'static str,
    /// Samples of each kind on the bare side; twice as many through Umpire.
    pub iterations: u32,
    /// TSC frequency in kHz.
    pub tsc_khz: u32,
    /// One for each kind of access.
    pub rows: Vec<TrapRow>,
}

/// Measures `iterations` round trips of each kind, rounded up to whole batches
/// of 100.
///
/// # Errors
/// The guest could not be made or run, or did something unexpected.
pub fn measure(
    host: &Host,
    probe: &ProbeReport,
    iterations: u32,
) -> Result<TrapReport, BenchError> {
    let vendor = host_vendor(host.supported_cpuid()?.as_slice())?;
    let model = PmuModel::default_for(vendor);
    let mut pair = Pair::new(host, probe, &model)?;
    let rounds = iterations.div_ceil(BATCH);
    // Caches, and the first write that finds the #GP handler.
    pair.round(false, true)?;
    pair.samples = Default::default();
    // The bare side is measured with and without the breakpoint in turn, so it
    // takes two rounds for one of each.
    for round in 0..2 * rounds {
        pair.round(round / 2 % 2 == 1, round % 2 == 0)?;
    }
    Ok(TrapReport {
        processor: CpuFacts::read(std::path::Path::new("/")).model_name,
        slow_cpl0: probe.slow_cpl0(),
        model: model.name(),
        backend: "clock",
        iterations: rounds * BATCH,
        tsc_khz: pair.subject.tsc_khz(),
        rows: pair.rows()?,
    })
}

/// Samples of one side, by the place of the access in [`Access::ALL`].
type Series = [Vec<u32>; Access::ALL.len()];

/// The two vCPUs.
#[derive(Debug)]
struct Pair {
    vm: Arc<KvmVm>,
    subject: Solo,
    bare: Bare,
    samples: [Series; 3],
}

impl Pair {
    fn new(host: &Host, probe: &ProbeReport, model: &PmuModel) -> Result<Self, BenchError> {
        let options = VmOptions {
            irqchip: true,
            trapped_msrs: all_pmu_msr_ranges(),
        };
        let (vm, vcpus) = guest(model, 2)?.build(host, &options)?;
        let Ok([subject, bare]) = <[_; 2]>::try_from(vcpus) else {
            return Err(BenchError::Guest("it must have two vCPUs".to_owned()));
        };
        let parts = SoloParts {
            model: model.clone(),
            backend: || Box::new(ClockBackend::new()),
            quirks: probe.quirks(),
            step: probe.step_support(),
            pmi_floor_us: crate::config::DEFAULT_PMI_FLOOR_US
                .try_into()
                .unwrap_or(u32::MAX),
            platform: Arc::new(BatchPort),
            observer: Box::new(Silent),
        };
        Ok(Self {
            subject: Solo::new(subject, vm.clone(), parts)?,
            bare: Bare::new(bare, vm.clone())?,
            vm,
            samples: Default::default(),
        })
    }

    /// One batch of each kind on each side; which side comes first alternates.
    fn round(&mut self, bare_first: bool, armed: bool) -> Result<(), BenchError> {
        let sides = match bare_first {
            true => [BARE, SUBJECT],
            false => [SUBJECT, BARE],
        };
        for (expected, access) in Access::ALL.into_iter().enumerate() {
            let armed = armed || access.is_rdpmc();
            for side in sides {
                let number = match side {
                    SUBJECT => self.subject_batch()?,
                    _ => self.bare.batch(access, armed, PATIENCE)?,
                };
                if usize::try_from(number) != Ok(expected) {
                    return Err(BenchError::Guest(format!(
                        "vCPU {side} finished batch {number} instead of {expected}"
                    )));
                }
                let series = match side == BARE && !armed {
                    true => UNARMED,
                    false => usize::from(side),
                };
                self.collect(side, series, expected)?;
            }
        }
        Ok(())
    }

    fn subject_batch(&mut self) -> Result<u32, BenchError> {
        match self.subject.run(PATIENCE)? {
            Some(VcpuEnd::Guest(GuestEnd::TestExit(vector))) if vector & UNEXPECTED != 0 => {
                let vector = vector & !UNEXPECTED;
                Err(BenchError::Guest(format!("it took vector {vector}")))
            }
            Some(VcpuEnd::Guest(GuestEnd::TestExit(batch))) => Ok(batch),
            Some(end) => Err(BenchError::Guest(end.to_string())),
            None => Err(BenchError::TimedOut),
        }
    }

    fn collect(&mut self, side: u8, series: usize, access: usize) -> Result<(), BenchError> {
        let mut bytes = [0; 4 * BATCH as usize];
        self.vm
            .memory()
            .read_slice(&mut bytes, GuestAddress(samples_at(side)))
            .map_err(|error| BenchError::Guest(error.to_string()))?;
        let (words, _) = bytes.as_chunks::<4>();
        let ticks = words.iter().map(|word| u32::from_le_bytes(*word));
        self.samples[series][access].extend(ticks);
        Ok(())
    }

    fn rows(&mut self) -> Result<Vec<TrapRow>, BenchError> {
        let tsc_khz = self.subject.tsc_khz();
        let [subject, bare, unarmed] = &mut self.samples;
        let none = || BenchError::Guest("it took no samples".to_owned());
        Access::ALL
            .into_iter()
            .zip(subject.iter_mut().zip(bare.iter_mut().zip(unarmed)))
            .map(|(access, (subject, (bare, unarmed)))| {
                let umpire = percentiles(subject, tsc_khz).ok_or_else(none)?;
                let bare = percentiles(bare, tsc_khz).ok_or_else(none)?;
                let ratio_p50 = ratio(umpire.p50_ns, bare.p50_ns);
                Ok(TrapRow {
                    access,
                    umpire,
                    bare,
                    bare_unarmed: percentiles(unarmed, tsc_khz),
                    ratio_p50,
                    ratio_p99: ratio(umpire.p99_ns, bare.p99_ns),
                    target: access.target(),
                    met: ratio_p50 <= access.target(),
                })
            })
            .collect()
    }
}

/// Round trips are far below 2^52 ns, so both are exact as `f64`.
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
