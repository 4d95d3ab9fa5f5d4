//! Running a micro-guest on this host and collecting what it logged.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pmu_virt::{
    ClockBackend, CounterBackend, CounterId, CounterReport, EmuBackend, EmuCycles, PmuModel,
    StepBackend,
};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};
use vmm::devices::GuestEnd;
use vmm::kvm::{Host, HostError};
use vmm::micro::{BackendFactory, MicroEngine, MicroGuest, MicroOutcome, MicroPcr, MicroRun};
use vmm::probe::{
    GuestStep, HandlerOut, ProbeError, ProbeReport, ProtectedStore, RdpmcBehaviour, probe,
};
use vmm::sched::CorePlan;
use vmm::vcpu::{StepSupport, TrapEvent, TrapMode, VcpuEnd};

use super::program::{DATA, ENTRY_SIZE, LOG};

/// Instructions of the loop that the probe times, for which it enters the guest once and leaves it
/// once.
const PROBED: u64 = 8000;

/// From entering a guest to its exit, as the probe's loop has found it at CPL 3, which no KVM
/// emulates: `picoseconds` for each instruction.
pub(crate) fn exit_time(picoseconds: u64) -> Duration {
    Duration::from_nanos(picoseconds * PROBED / 1000)
}

/// More is never lost, in percent.
pub(crate) const MOST_LOST: u64 = 35;

/// How much of a vCPU's time exits take that take `exit`, in percent, beyond what each tolerance
/// has room for: two of each millisecond, one for the VMM's look at a vCPU that counts, and one for
/// what the guest's own timer asks for (three or four exits every 4 ms).
pub(crate) fn lost_to_exits(exit: Duration) -> u64 {
    const CHEAP: Duration = Duration::from_micros(60);
    if exit <= CHEAP {
        return 0;
    }
    let lost = u64::try_from(exit.as_micros() / 5);
    lost.unwrap_or(MOST_LOST).min(MOST_LOST)
}

/// This host cannot serve for tests.
#[derive(Debug, Error)]
pub enum LabError {
    /// KVM cannot be opened.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The probe guests could not run.
    #[error("the probe guests failed: {0}")]
    Probe(#[from] ProbeError),
}

/// Where guests run: on this host's KVM, with its probed capabilities, or on processors in
/// software.
#[derive(Debug)]
pub struct Lab {
    /// `/dev/kvm`, where it is that.
    host: Option<Host>,
    /// What the probe guests found.
    pub probe: ProbeReport,
}

/// What processors in software do: all of it right, and there is no SMM.
const EMULATED: ProbeReport = ProbeReport {
    cpl0_ps_per_instruction: 1000,
    cpl3_ps_per_instruction: 1000,
    rdpmc: RdpmcBehaviour::Faults,
    step_cpl0: true,
    step_cpl3: true,
    step_fence: true,
    breakpoint_cpl0: true,
    breakpoint_cpl3: true,
    rf_honoured: true,
    dr_access_trap: true,
    handler_out: HandlerOut::At,
    protected_store_cpl0: ProtectedStore::Mmio,
    protected_store_cpl3: ProtectedStore::Mmio,
    block_irq: true,
    smm: false,
    guest_step: GuestStep::ToGuest,
    guest_step_beside_ours: GuestStep::ToGuest,
    guest_breakpoint_beside_ours: true,
};

/// How a guest is run.
#[derive(Debug, Clone)]
pub struct Setup {
    /// PMU model, as in `--pmu`, `none` included.
    pub model: String,
    /// Counter backend of each vCPU.
    pub backend: BackendFactory,
    /// Shortest time between two PMIs, in microseconds.
    pub pmi_floor_us: u32,
    /// After this the guest has failed.
    pub timeout: Duration,
    /// The step capabilities to assume, in place of the host's.
    pub step: Option<StepSupport>,
    /// How RDPMC is trapped, as in `--rdpmc-trap`.
    pub trap: TrapMode,
    /// vCPUs share cores.
    pub cores: Option<CorePlan>,
    /// Counter reservations; by default there are some, and nothing is reserved.
    pub pcr: Option<MicroPcr>,
}

impl Setup {
    /// `model` on the `clock` backend.
    #[must_use]
    pub fn clock(model: &str) -> Self {
        Self {
            model: model.to_owned(),
            backend: || Box::new(ClockBackend::new()),
            pmi_floor_us: 100,
            timeout: Duration::from_secs(10),
            step: None,
            trap: TrapMode::Auto,
            cores: None,
            pcr: Some(MicroPcr::default()),
        }
    }

    /// `model` on the `step` backend.
    #[must_use]
    pub fn step(model: &str) -> Self {
        Self {
            backend: step_backend,
            ..Self::clock(model)
        }
    }

    /// The PMU that the guest has: as with `umpire run`, without what its counters cannot
    /// count where CPUID can say so. `None` is `none`.
    ///
    /// # Errors
    /// There is no such model.
    pub fn guest_model(&self) -> Result<Option<PmuModel>> {
        if self.model == "none" {
            return Ok(None);
        }
        let backend = (self.backend)();
        let model = PmuModel::parse(&self.model).with_context(|| self.model.clone())?;
        Ok(Some(model.counted(|event| backend.plan(event).is_ok())))
    }
}

/// An `emu` backend for one vCPU.
fn emu_backend() -> Box<dyn CounterBackend> {
    Box::new(EmuBackend::new(EmuCycles::Unavailable))
}

/// A `step` backend for one vCPU.
#[must_use]
pub fn step_backend() -> Box<dyn CounterBackend> {
    Box::new(StepBackend::new())
}

/// One entry of a guest's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// [`super::VALUE`], or [`super::FAULT`] plus a vector.
    pub kind: u64,
    /// RAX, or an error code.
    pub a: u64,
    /// RDX, or how far RIP is from where the fault was expected.
    pub b: u64,
    /// A third value, or the interrupted code's CS.
    pub c: u64,
}

impl Entry {
    /// What [`super::log_value`] leaves.
    #[must_use]
    pub const fn value(rax: u64, rdx: u64) -> Self {
        Self {
            kind: super::VALUE,
            a: rax,
            b: rdx,
            c: 0,
        }
    }
}

/// A guest that came to its end.
#[derive(Debug)]
pub struct LabRun {
    /// All that it left behind.
    pub outcome: MicroOutcome,
    /// The log of vCPU 0.
    pub log: Vec<Entry>,
    /// It ran on processors in software.
    pub emulated: bool,
}

impl Lab {
    /// Opens KVM and probes it.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn open() -> Result<Self, LabError> {
        let host = Host::open()?;
        let probe = probe()?;
        Ok(Self {
            host: Some(host),
            probe,
        })
    }

    /// What exits may take of a guest's time here, in percent.
    #[must_use]
    pub fn lost(&self) -> u64 {
        lost_to_exits(self.exit_time())
    }

    /// From entering a guest to its exit.
    #[must_use]
    pub fn exit_time(&self) -> Duration {
        exit_time(self.probe.cpl3_ps_per_instruction)
    }

    /// Processors in software, which are there on every host.
    #[must_use]
    pub fn emulated() -> Self {
        Self {
            host: None,
            probe: EMULATED,
        }
    }

    /// What runs guests here.
    #[must_use]
    pub fn engine(&self) -> MicroEngine<'_> {
        self.host
            .as_ref()
            .map_or(MicroEngine::Emu, MicroEngine::Kvm)
    }

    /// Whether guests run on processors in software.
    #[must_use]
    pub fn is_emulated(&self) -> bool {
        self.host.is_none()
    }

    /// The KVM of this host.
    ///
    /// # Errors
    /// Guests run on processors in software here.
    pub fn host(&self) -> Result<&Host> {
        self.host.as_ref().context("there is no KVM here")
    }

    /// The counters that a guest with `backend` has: what steps a guest on KVM is told what it
    /// executes elsewhere.
    #[must_use]
    pub fn counting(&self, backend: BackendFactory) -> BackendFactory {
        let steps = backend().name() == step_backend().name();
        if self.is_emulated() && steps {
            emu_backend
        } else {
            backend
        }
    }

    /// Runs `guest` until it writes 0 to the exit port.
    ///
    /// # Errors The guest did not come to that end; the message names where it
    /// was.
    pub fn run(&self, setup: &Setup, guest: &MicroGuest) -> Result<LabRun> {
        let run = MicroRun {
            model: setup.guest_model()?,
            backend: self.counting(setup.backend),
            quirks: self.probe.quirks(),
            step: setup.step.unwrap_or(self.probe.step_support()),
            trap: self.probe.trap_plan(setup.trap),
            pmi_floor_us: setup.pmi_floor_us,
            timeout: setup.timeout,
            record: true,
            cores: setup.cores,
            pcr: setup.pcr.clone(),
        };
        let outcome = run.run(self.engine(), guest)?;
        let log = read_log(&outcome)?;
        let told = || {
            let vcpus: Vec<String> = outcome
                .vcpus
                .iter()
                .map(|vcpu| {
                    let last = vcpu.events.iter().rev().take(6).rev().collect::<Vec<_>>();
                    format!(
                        "\n  {} at RIP {:#x}; last events {last:x?}",
                        vcpu.end, vcpu.regs.rip
                    )
                })
                .collect();
            format!(
                "{}\n  port writes {:x?}\n  log {log:x?}\n  data {:x?}",
                vcpus.concat(),
                outcome.writes,
                nonzero(&outcome)
            )
        };
        ensure!(!outcome.timed_out, "the guest timed out{}", told());
        let ended = outcome
            .vcpus
            .iter()
            .any(|vcpu| vcpu.end == VcpuEnd::Guest(GuestEnd::TestExit(0)))
            && outcome
                .written_to(vmm::micro::UNEXPECTED_VECTOR_PORT)
                .is_empty();
        ensure!(ended, "the guest did not end as it should{}", told());
        Ok(LabRun {
            outcome,
            log,
            emulated: self.is_emulated(),
        })
    }
}

/// The words of the guest's data that are not 0, with their offsets.
fn nonzero(outcome: &MicroOutcome) -> Vec<(u64, u64)> {
    let word = |offset| outcome.memory.read_obj(GuestAddress(DATA + offset));
    let words = (0..0x200).step_by(8).map(|at| (at, word(at).unwrap_or(0)));
    words.filter(|(_, word)| *word != 0).collect()
}

/// The entries between the log's start and vCPU 0's R12.
fn read_log(outcome: &MicroOutcome) -> Result<Vec<Entry>> {
    let vcpu = outcome.vcpus.first().context("a guest has a vCPU")?;
    let end = vcpu.regs.r12;
    if !(LOG..LOG + 0x8000).contains(&end) {
        return Ok(Vec::new());
    }
    (LOG..end)
        .step_by(usize::try_from(ENTRY_SIZE)?)
        .map(|at| {
            let word = |index: u64| {
                let address = GuestAddress(at + 8 * index);
                outcome.memory.read_obj::<u64>(address)
            };
            Ok(Entry {
                kind: word(0)?,
                a: word(1)?,
                b: word(2)?,
                c: word(3)?,
            })
        })
        .collect()
}

impl LabRun {
    /// The quadword at guest address `at`.
    ///
    /// # Errors
    /// There is no memory.
    pub fn word(&self, at: u64) -> Result<u64> {
        Ok(self.outcome.memory.read_obj(GuestAddress(at))?)
    }

    /// The report of `counter` on vCPU `vcpu`.
    ///
    /// # Errors
    /// The counter is not in use.
    pub fn report(&self, vcpu: usize, counter: CounterId) -> Result<CounterReport> {
        let reports = &self.outcome.vcpus[vcpu].counters;
        match reports.iter().find(|report| report.counter == counter) {
            Some(report) => Ok(*report),
            None => bail!("no report of {counter}; there are {reports:?}"),
        }
    }

    /// Events of vCPU 0 that `wanted` picks.
    pub fn events(&self, wanted: impl Fn(&TrapEvent) -> bool) -> Vec<&TrapEvent> {
        let events = &self.outcome.vcpus[0].events;
        events.iter().filter(|event| wanted(event)).collect()
    }
}
