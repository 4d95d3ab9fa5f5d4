//! Runs many hostile guests, several at a time, and watches them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use pmu_virt::PmuModel;
use vmm::devices::{Platform, SharedPlatform};
use vmm::devices::{PlatformParts, PortBus, ports};
use vmm::kvm::KvmVm;
use vmm::micro::{MicroError, MicroOutcome, MicroPcr, MicroRun};
use vmm::sync::lock;
use vmm::vcpu::VcpuEnd;

use super::guest::HostileGuest;
use crate::micro::Lab;

/// The time in which a vCPU must leave its loop after a request to stop, also
/// on a loaded machine.
pub const STOP_LIMIT: Duration = Duration::from_secs(2);
/// A guest that has not come back after this hangs for good.
const HANG_LIMIT: Duration = Duration::from_secs(30);

/// A guest that did what no guest may.
#[derive(Debug)]
pub struct Failure {
    /// Which guest.
    pub guest: String,
    /// What it did.
    pub what: String,
}

/// What became of a batch.
#[derive(Debug, Default)]
pub struct Batch {
    /// How many guests ran.
    pub guests: u64,
    /// How many ended in which way.
    pub ends: BTreeMap<&'static str, u64>,
    /// PMIs that they got.
    pub pmis: u64,
    /// The longest time from the request to stop to the last thread's end.
    pub slowest_stop: Duration,
    /// Guests that broke out of the rules.
    pub failures: Vec<Failure>,
}

impl Batch {
    /// Runs the guests of `seeds`, `workers` at a time, each for `time` at most.
    ///
    /// A guest that hangs ends the process with status 101 and its seed: the
    /// thread of its vCPU could never be joined.
    #[must_use]
    pub fn run(lab: &Lab, seeds: Range<u64>, workers: usize, time: Duration) -> Self {
        let next = AtomicU64::new(seeds.start);
        let batch = Mutex::new(Self::default());
        let watch = Watch::new(workers);
        let (next, batch_ref, watch_ref) = (&next, &batch, &watch);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..workers)
                .map(|worker| {
                    scope.spawn(move || {
                        loop {
                            let seed = next.fetch_add(1, Ordering::Relaxed);
                            if seed >= seeds.end {
                                return;
                            }
                            watch_ref.began(worker, Some(seed));
                            let result = one(lab, seed, time);
                            watch_ref.began(worker, None);
                            lock(batch_ref).count(result);
                        }
                    })
                })
                .collect();
            while threads.iter().any(|thread| !thread.is_finished()) {
                if let Some(seed) = watch_ref.hanging() {
                    // The scope would wait for ever for that thread.
                    eprintln!("the guest of seed {seed} hangs: its vCPU cannot be stopped");
                    std::process::exit(101);
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        batch.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds another batch.
    pub fn add(&mut self, other: Self) {
        self.guests += other.guests;
        self.pmis += other.pmis;
        self.slowest_stop = self.slowest_stop.max(other.slowest_stop);
        self.failures.extend(other.failures);
        for (end, count) in other.ends {
            *self.ends.entry(end).or_default() += count;
        }
    }

    fn count(&mut self, result: Result<Told, Failure>) {
        self.guests += 1;
        match result {
            Ok(told) => {
                *self.ends.entry(told.end).or_default() += 1;
                self.pmis += told.pmis;
                self.slowest_stop = self.slowest_stop.max(told.stopping);
            }
            Err(failure) => self.failures.push(failure),
        }
    }
}

/// The result of a guest that kept the rules.
struct Told {
    end: &'static str,
    pmis: u64,
    stopping: Duration,
}

fn one(lab: &Lab, seed: u64, time: Duration) -> Result<Told, Failure> {
    let failed = |guest: String| {
        move |error: anyhow::Error| Failure {
            guest,
            what: format!("{error:#}"),
        }
    };
    let guest =
        HostileGuest::new(seed, lab.probe.slow_cpl0()).map_err(failed(format!("seed {seed}")))?;
    if std::env::var_os("UMPIRE_HOSTILE_TELL").is_some() {
        eprintln!("{guest}");
    }
    let outcome = play(lab, &guest, time).map_err(failed(guest.to_string()))?;
    if std::env::var_os("UMPIRE_HOSTILE_TELL").is_some() {
        for vcpu in &outcome.vcpus {
            eprintln!(
                "{guest}: {} at RIP {:#x}, PMIs {:?}",
                vcpu.end, vcpu.regs.rip, vcpu.pmis
            );
        }
    }
    Ok(Told {
        end: name_of(&outcome),
        pmis: outcome.vcpus.iter().map(|vcpu| vcpu.pmis.0).sum(),
        stopping: outcome.stopping,
    })
}

fn play(lab: &Lab, guest: &HostileGuest, time: Duration) -> Result<MicroOutcome> {
    let run = MicroRun {
        model: guest.model.map(PmuModel::parse).transpose()?,
        backend: lab.counting(guest.backend()),
        quirks: lab.probe.quirks(),
        step: lab.probe.step_support(),
        trap: lab.probe.trap_plan(vmm::vcpu::TrapMode::Auto),
        pmi_floor_us: 100,
        timeout: time,
        record: false,
        cores: None,
        pcr: Some(MicroPcr::default()),
    };
    let outcome = if lab.is_emulated() {
        run.run(lab.engine(), &guest.guest)?
    } else {
        run.run_on(lab.host()?, &guest.guest, real_devices)?
    };
    if outcome.stopping > STOP_LIMIT {
        bail!("it took {:?} to stop", outcome.stopping);
    }
    Ok(outcome)
}

/// The devices of `umpire run`, with the console's output dropped.
fn real_devices(vm: &KvmVm) -> Result<Arc<dyn Platform>, MicroError> {
    let failed = |error: &dyn std::fmt::Display| MicroError::Memory(error.to_string());
    let (parts, irq) =
        PlatformParts::with_console(Box::new(std::io::sink())).map_err(|e| failed(&e))?;
    vm.connect_irq(&irq, ports::COM1_GSI)?;
    Ok(Arc::new(SharedPlatform::new(PortBus::new(parts))))
}

fn name_of(outcome: &MicroOutcome) -> &'static str {
    let ends = outcome.vcpus.iter().map(|vcpu| match &vcpu.end {
        VcpuEnd::Stopped => "stopped at the end of its time",
        VcpuEnd::Guest(_) => "ended by an exit or reset port",
        VcpuEnd::TripleFault { .. } => "triple fault",
        VcpuEnd::Stuck(why) if why.contains("emulate") => "an instruction that KVM cannot emulate",
        VcpuEnd::Stuck(why) if why.contains("given this machine up") => "given up by KVM",
        VcpuEnd::Stuck(_) => "stuck otherwise",
        VcpuEnd::Asleep => "asleep for ever",
        VcpuEnd::Unimplemented { .. } => "something that the emulator lacks",
    });
    // The first vCPU to end stops the others.
    ends.min_by_key(|end| end.starts_with("stopped"))
        .unwrap_or("no vCPU")
}

/// When each worker started its guest.
struct Watch(Mutex<Vec<Option<(u64, Instant)>>>);

impl Watch {
    fn new(workers: usize) -> Self {
        Self(Mutex::new(vec![None; workers]))
    }

    fn began(&self, worker: usize, seed: Option<u64>) {
        lock(&self.0)[worker] = seed.map(|seed| (seed, Instant::now()));
    }

    fn hanging(&self) -> Option<u64> {
        lock(&self.0)
            .iter()
            .flatten()
            .find(|(_, since)| since.elapsed() > HANG_LIMIT)
            .map(|(seed, _)| *seed)
    }
}
