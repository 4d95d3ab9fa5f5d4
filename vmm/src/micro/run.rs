//! Runs a micro-guest through the real run loop.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arbiter::{AskRecord, Auditor, Grant, Phase, Record};
use emu::State;
use kvm_bindings::{kvm_debugregs, kvm_regs};
use kvm_pmu::{KvmPmu, KvmPmuParts, TrapPlan, Tsc, now};
use pmu_virt::{
    CorePmu, CountRequest, CounterBackend, CounterReport, Holdings, OwnerId, PmuCpuid, PmuModel,
    VcpuPmu,
};
use vm_memory::GuestMemoryMmap;
use vmm_control::{ControlConfig, ControlEndpoint, JobQueue, Server, ServerSetup};

use super::emulated::{self, EmuPmu};
use super::error::MicroRunError;
use super::machine::{MicroError, MicroGuest};
use super::platform::{PortWrite, RecordingPlatform};
use super::threads::{Cores, Ran};
use crate::audit::Holding;
use crate::control::VmMemory;
use crate::cpuid::bare_cpuid;
use crate::devices::Platform;
use crate::emu::{EmuVcpu, EmuVcpuParts, RoomEnd, TSC_KHZ, VirtualClock, debug, general};
use crate::kvm::{Host, KvmVcpu, KvmVm, VcpuError, VcpuId, VmOptions};
use crate::reservations::{MachineReservations, PcrPlan, holdings};
use crate::sched::{CoreEnd, CorePlan, CoreReport};
use crate::sync::lock;
use crate::sys::install_kick_handler;
use crate::vcpu::{
    DebugQuirks, Observer, Silent, StepSupport, TrapEvent, Vcpu, VcpuControl, VcpuEnd, VcpuFailure,
    VcpuParts,
};

/// What runs a micro-guest.
#[derive(Debug, Clone, Copy)]
pub enum MicroEngine<'a> {
    /// The KVM of this host.
    Kvm(&'a Host),
    /// Processors in software, in virtual time. What a run says of KVM (`quirks`, `step`,
    /// `trap`) means nothing there.
    Emu,
}

impl<'a> From<&'a Host> for MicroEngine<'a> {
    fn from(host: &'a Host) -> Self {
        Self::Kvm(host)
    }
}

/// Makes a counter backend for one vCPU.
pub type BackendFactory = fn() -> Box<dyn CounterBackend>;

/// How a micro-guest is run.
#[derive(Debug, Clone)]
pub struct MicroRun {
    /// PMU model; `None` is `--pmu none`.
    pub model: Option<PmuModel>,
    /// Counter backend of each vCPU.
    pub backend: BackendFactory,
    /// Oddities of the host's KVM.
    pub quirks: DebugQuirks,
    /// What the host can step.
    pub step: StepSupport,
    /// How RDPMC is trapped.
    pub trap: TrapPlan,
    /// Shortest time between two PMIs, in microseconds.
    pub pmi_floor_us: u32,
    /// After this the guest is stopped.
    pub timeout: Duration,
    /// Keep every [`TrapEvent`].
    pub record: bool,
    /// vCPUs share cores; without it each has a thread of its own.
    pub cores: Option<CorePlan>,
    /// Counter reservations; `None` is `--pcr off`.
    pub pcr: Option<MicroPcr>,
}

/// Counter reservations of a micro-guest.
#[derive(Debug, Clone, Default)]
pub struct MicroPcr {
    /// Who may hold what, and what the hypervisor holds.
    pub plan: PcrPlan,
    /// The guest starts in the firmware's phase.
    pub firmware: bool,
}

/// What one vCPU left behind.
#[derive(Debug)]
pub struct VcpuOutcome {
    pub end: VcpuEnd,
    /// General registers at the end; zeros if KVM gave the machine up.
    pub regs: kvm_regs,
    /// The guest's own debug registers at the end.
    pub debug_regs: kvm_debugregs,
    /// Its counters at the end.
    pub counters: Vec<CounterReport>,
    /// What happened on the trap path.
    pub events: Vec<TrapEvent>,
    /// PMIs delivered, and of these late ones.
    pub pmis: (u64, u64),
    /// What was decided about its counters.
    pub decisions: Vec<Record>,
    /// What layers asked of the arbiter, and when.
    pub asks: Vec<(Instant, AskRecord)>,
    /// Who held which counter at the end.
    pub holdings: Vec<Holding>,
}

/// What a micro-guest left behind.
#[derive(Debug)]
pub struct MicroOutcome {
    /// Port writes in the order of their exits.
    pub writes: Vec<PortWrite>,
    /// One for each vCPU.
    pub vcpus: Vec<VcpuOutcome>,
    /// Its memory.
    pub memory: GuestMemoryMmap,
    /// It has system management mode.
    pub smm: bool,
    /// How long it ran by its own clock, where that is a virtual one.
    pub virtual_time: Option<Duration>,
    /// It did not end by itself.
    pub timed_out: bool,
    /// How long its vCPUs took to leave their loops once they were asked to.
    pub stopping: Duration,
    /// What each core did, where vCPUs shared cores.
    pub cores: Vec<CoreReport>,
}

impl MicroOutcome {
    /// The values written to `port`.
    #[must_use]
    pub fn written_to(&self, port: u16) -> Vec<u32> {
        let on_port = self.writes.iter().filter(|write| write.port == port);
        on_port.map(|write| write.value).collect()
    }
}

impl MicroRun {
    /// Runs `guest` until one of its vCPUs ends; that stops the others.
    ///
    /// # Errors
    /// [`MicroRunError`]; what the guest does is never an error.
    pub fn run<'a>(
        &self,
        engine: impl Into<MicroEngine<'a>>,
        guest: &MicroGuest,
    ) -> Result<MicroOutcome, MicroRunError> {
        let platform = Arc::new(RecordingPlatform::default());
        let outcome = match engine.into() {
            MicroEngine::Kvm(host) => self.run_on(host, guest, |_| Ok(platform.clone()))?,
            MicroEngine::Emu => self.emulate(guest, platform.clone())?,
        };
        Ok(MicroOutcome {
            writes: platform.writes(),
            ..outcome
        })
    }

    /// Runs `guest` on KVM with devices of the caller's, which `connect` makes for the VM;
    /// port writes are theirs to record.
    ///
    /// # Errors
    /// [`MicroRunError`]; also those of `connect`.
    pub fn run_on(
        &self,
        host: &Host,
        guest: &MicroGuest,
        connect: impl FnOnce(&KvmVm) -> Result<Arc<dyn Platform>, MicroError>,
    ) -> Result<MicroOutcome, MicroRunError> {
        self.run_served(host, guest, None, connect)
    }

    /// Runs `guest` with devices of the caller's and a server of host tools, from
    /// before the guest starts until it has ended.
    ///
    /// # Errors
    /// [`MicroRunError`]; also those of `connect` and of the server.
    pub fn run_served(
        &self,
        host: &Host,
        guest: &MicroGuest,
        control: Option<&ControlConfig>,
        connect: impl FnOnce(&KvmVm) -> Result<Arc<dyn Platform>, MicroError>,
    ) -> Result<MicroOutcome, MicroRunError> {
        let cores = self.core_pmus(guest.vcpus());
        self.run_counted(host, guest, (control, cores), connect)
    }

    /// Runs `guest` with devices of the caller's, a server of host tools, and the
    /// counters of each core: of those that the vCPUs share, or of each vCPU's own.
    ///
    /// # Errors
    /// [`MicroRunError`]; also those of `connect` and of the server.
    pub fn run_counted(
        &self,
        host: &Host,
        guest: &MicroGuest,
        (control, mut cores): (Option<&ControlConfig>, Vec<CorePmu>),
        connect: impl FnOnce(&KvmVm) -> Result<Arc<dyn Platform>, MicroError>,
    ) -> Result<MicroOutcome, MicroRunError> {
        install_kick_handler().map_err(MicroRunError::Signal)?;
        let options = VmOptions::with_pmu(self.model.as_ref()).trapping(self.trap);
        let (vm, vcpus) = guest.build(host, &options)?;
        let platform = connect(&vm)?;
        let tsc_khz = vcpus.first().map_or(Ok(0), KvmVcpu::get_tsc_khz)?;
        let stop = Arc::new(VcpuControl::default());
        let recorders: Vec<Recorder> = vcpus.iter().map(|_| Recorder::default()).collect();
        let vcpus = vcpus.into_iter().zip(&recorders);
        let pcr = self
            .pcr
            .as_ref()
            .map(|pcr| pcr.reservations(vm.smram().is_some()));
        let shared = Shared {
            host,
            vm: &vm,
            platform: &platform,
            control: &stop,
            pcr: pcr.as_ref(),
        };
        let mut served = self.serve((control, tsc_khz), &vm, &mut cores, recorders.len())?;
        let own = match self.cores {
            Some(_) => &mut [],
            None => cores.as_mut_slice(),
        };
        let mut own = own.iter_mut();
        let vcpus = vcpus
            .map(|(kvm, recorder)| {
                let mut parts = self.vcpu(kvm, recorder, &shared, own.next())?;
                parts.host = served.endpoints.pop_front();
                Ok(Vcpu::new(parts))
            })
            .collect::<Result<Vec<_>, MicroRunError>>()?;
        let cores = Cores {
            plan: self.cores,
            pmus: cores,
            jobs: served.jobs,
        };
        let ran = Ran::new(vcpus, cores, &stop, self.timeout)?;
        drop(served.server);
        let ended = ran.ends.into_iter().zip(&recorders);
        let vcpus = ended.map(|(end, recorder)| VcpuOutcome::of(end, recorder));
        Ok(MicroOutcome {
            writes: Vec::new(),
            vcpus: vcpus.collect::<Result<_, _>>()?,
            memory: vm.memory().clone(),
            smm: vm.smram().is_some(),
            virtual_time: None,
            timed_out: ran.timed_out,
            stopping: ran.stopping,
            cores: ran.cores,
        })
    }

    /// Runs `guest` on processors in software.
    fn emulate(
        &self,
        guest: &MicroGuest,
        platform: Arc<dyn Platform>,
    ) -> Result<MicroOutcome, MicroRunError> {
        if self.cores.is_some() {
            return Err(MicroRunError::NotEmulated("vCPUs that share cores"));
        }
        let (memory, states) = guest.emulated()?;
        let recorders: Vec<Recorder> = states.iter().map(|_| Recorder::default()).collect();
        let vcpus = self.emulated_vcpus(states, &recorders)?;
        let control = Arc::new(VcpuControl::default());
        let clock = VirtualClock::beginning_at(0);
        let mut room = emulated::room(memory, vcpus, platform, (control.clone(), clock))?;
        let (end, stopped) = emulated::run_for(&mut room, &control, self.timeout)?;
        let memory = room.memory().clone();
        room.tick();
        let vcpus = room.vcpus().iter().zip(&recorders);
        let vcpus =
            vcpus.map(|(vcpu, recorder)| VcpuOutcome::of_emulated(vcpu, &end, recorder.take()));
        Ok(MicroOutcome {
            writes: Vec::new(),
            vcpus: vcpus.collect(),
            memory,
            smm: false,
            // A tick is a nanosecond.
            virtual_time: Some(Duration::from_nanos(room.now())),
            timed_out: stopped.is_some() && end.end == VcpuEnd::Stopped,
            stopping: stopped.map_or(Duration::ZERO, |at| at.elapsed()),
            cores: Vec::new(),
        })
    }

    fn emulated_vcpus(
        &self,
        states: Vec<State>,
        recorders: &[Recorder],
    ) -> Result<Vec<EmuVcpuParts>, MicroRunError> {
        let reservations = self.pcr.as_ref().map(|pcr| pcr.reservations(false));
        let cpus = u8::try_from(states.len()).unwrap_or(u8::MAX);
        let mut vcpus = Vec::new();
        for (id, (state, recorder)) in (0u8..).zip(states.into_iter().zip(recorders)) {
            let mut pmu = None;
            if let Some(model) = &self.model {
                let of_vcpu = |pcr: &MachineReservations| {
                    let auditor = Box::new(recorder.clone());
                    pcr.of_vcpu(model, (TSC_KHZ, Tsc(0)), auditor)
                };
                let legacy = reservations.as_ref().and_then(|pcr| pcr.plan.legacy);
                pmu = Some(EmuPmu {
                    model,
                    backend: (self.backend)(),
                    pmi_floor_us: self.pmi_floor_us,
                    reservations: reservations.as_ref().map(of_vcpu).transpose()?,
                    visible: legacy.unwrap_or(model.counts()),
                });
            }
            let observer: Box<dyn Observer> = if self.record {
                Box::new(recorder.clone())
            } else {
                Box::new(Silent)
            };
            vcpus.push(emulated::vcpu((id, cpus), state, pmu, observer)?);
        }
        Ok(vcpus)
    }

    /// The counters of each core: of those that `vcpus` vCPUs share, or of each
    /// vCPU's own.
    fn core_pmus(&self, vcpus: usize) -> Vec<CorePmu> {
        let cores = self.cores.map_or(vcpus, |plan| plan.cores.into());
        let core = |_| CorePmu::new((self.backend)());
        match self.model {
            Some(_) => (0..cores).map(core).collect(),
            None => Vec::new(),
        }
    }

    fn serve(
        &self,
        (control, tsc_khz): (Option<&ControlConfig>, u32),
        vm: &Arc<KvmVm>,
        cores: &mut [CorePmu],
        vcpus: usize,
    ) -> Result<Served, MicroRunError> {
        let (Some(control), Some(model)) = (control, &self.model) else {
            return Ok(Served::default());
        };
        let memory = Box::new(VmMemory(vm.memory().clone()));
        let mut setup = ServerSetup::new(control, model.clone(), memory, tsc_khz);
        setup.enable_hosting(cores);
        let tools = setup.connect(vcpus, self.cores.map(|plan| plan.cores.into()))?;
        Ok(Served {
            server: Some(tools.server.start("micro-guest".to_owned())?),
            endpoints: tools.vcpus.into(),
            jobs: tools.cores,
        })
    }

    fn vcpu(
        &self,
        kvm: KvmVcpu,
        recorder: &Recorder,
        shared: &Shared<'_>,
        core: Option<&mut CorePmu>,
    ) -> Result<VcpuParts, MicroRunError> {
        let tsc_khz = kvm.get_tsc_khz()?;
        let mut pmu = self.model.as_ref().map(|model| {
            let owner = OwnerId(kvm.id().0);
            let mut pmu = VcpuPmu::detached(owner, model.clone(), Grant::everything());
            if let Some(core) = core {
                pmu.attach(core);
            }
            pmu
        });
        if let (Some(model), Some(pcr)) = (&self.model, shared.pcr) {
            let reservations = pcr.of_vcpu(model, (tsc_khz, now()), Box::new(recorder.clone()))?;
            let visible = pcr.plan.legacy.unwrap_or(model.counts());
            let backend = (self.backend)();
            let countable = |request: &CountRequest| backend.plan(request).is_ok();
            let cpuid = model.announced(countable, visible);
            announce(
                &kvm,
                shared.host,
                &cpuid.with_reservations(&reservations.unit),
            )?;
            pmu = pmu.map(|pmu| pmu.with_reservations(reservations));
        }
        let observer: Box<dyn Observer> = if self.record {
            Box::new(recorder.clone())
        } else {
            Box::new(Silent)
        };
        let pmu = KvmPmuParts {
            pmu,
            quirks: self.quirks,
            step: self.step,
            traps: shared.vm.traps().clone(),
            pmi_floor: Duration::from_micros(self.pmi_floor_us.into()),
            tsc_khz,
        };
        let pmu = KvmPmu::new(&kvm, pmu).map_err(VcpuFailure::from)?;
        Ok(VcpuParts {
            kvm,
            vm: shared.vm.clone(),
            pmu,
            platform: shared.platform.clone(),
            control: shared.control.clone(),
            own_core: None,
            observer,
            // Tests say themselves what is right.
            firmware: None,
            host: None,
            guest: None,
        })
    }
}

impl VcpuOutcome {
    fn of_emulated(vcpu: &EmuVcpu, end: &RoomEnd, recorded: Recorded) -> Self {
        let state = vcpu.cpu().state();
        let pmu = vcpu.pmu();
        let throttle = pmu.map(|pmu| pmu.interrupts().throttle());
        Self {
            end: if end.vcpu == vcpu.id() {
                end.end.clone()
            } else {
                VcpuEnd::Stopped
            },
            regs: general(state),
            debug_regs: debug(state),
            counters: pmu.map(|pmu| pmu.report(vcpu.core())).unwrap_or_default(),
            events: recorded.events,
            pmis: throttle.map_or((0, 0), |throttle| (throttle.delivered(), throttle.late())),
            decisions: recorded.decisions,
            asks: recorded.asks,
            holdings: pmu
                .map(|pmu| holdings(pmu, vcpu.core()))
                .unwrap_or_default(),
        }
    }

    fn of(ended: CoreEnd, recorder: &Recorder) -> Result<Self, MicroRunError> {
        let CoreEnd {
            mut vcpu,
            end,
            mut own_core,
        } = ended;
        let holdings = vcpu.holdings(own_core.as_deref_mut());
        let report = |pmu: &VcpuPmu| pmu.report(own_core.as_deref());
        let Recorded {
            events,
            decisions,
            asks,
        } = recorder.take();
        Ok(Self {
            end: end?,
            regs: unless_dead(vcpu.kvm().get_regs())?,
            debug_regs: unless_dead(vcpu.kvm().get_debug_regs())?,
            counters: vcpu.pmu().map(report).unwrap_or_default(),
            events,
            pmis: vcpu.pmis(),
            decisions,
            asks,
            holdings,
        })
    }
}

impl MicroPcr {
    /// The reservations of the vCPUs of a machine, which has system management mode or not.
    fn reservations(&self, smm: bool) -> MachineReservations {
        MachineReservations {
            plan: self.plan.clone(),
            phase: Arc::new(Phase::new(self.firmware)),
            smm,
            holdings: Holdings::default(),
        }
    }
}

/// Announces the reservations in CPUID.
fn announce(kvm: &KvmVcpu, host: &Host, pmu: &PmuCpuid) -> Result<(), MicroRunError> {
    let supported = host.supported_cpuid().map_err(MicroError::from)?;
    Ok(kvm.set_cpuid(&bare_cpuid(supported, pmu))?)
}

/// A machine that KVM has given up has no registers to read; its end says so.
fn unless_dead<T: Default>(read: Result<T, VcpuError>) -> Result<T, VcpuError> {
    match read {
        Err(error) if error.is_dead() => Ok(T::default()),
        read => read,
    }
}

/// What a micro-guest's vCPUs have in common.
struct Shared<'a> {
    host: &'a Host,
    vm: &'a Arc<KvmVm>,
    platform: &'a Arc<dyn Platform>,
    control: &'a Arc<VcpuControl>,
    pcr: Option<&'a MachineReservations>,
}

/// A server of host tools, and what vCPUs and cores have of it.
#[derive(Debug, Default)]
struct Served {
    server: Option<Server>,
    endpoints: VecDeque<ControlEndpoint>,
    jobs: Vec<JobQueue>,
}

/// Keeps every event and every decision.
#[derive(Debug, Clone, Default)]
struct Recorder {
    events: Arc<Mutex<Vec<TrapEvent>>>,
    decisions: Arc<Mutex<Vec<Record>>>,
    asks: Arc<Mutex<Vec<(Instant, AskRecord)>>>,
}

/// What a recorder has kept.
#[derive(Debug, Default)]
struct Recorded {
    events: Vec<TrapEvent>,
    decisions: Vec<Record>,
    asks: Vec<(Instant, AskRecord)>,
}

impl Recorder {
    /// All that it has kept so far.
    fn take(&self) -> Recorded {
        Recorded {
            events: std::mem::take(&mut *lock(&self.events)),
            decisions: std::mem::take(&mut *lock(&self.decisions)),
            asks: std::mem::take(&mut *lock(&self.asks)),
        }
    }
}

/// A hostile guest must not fill the host's memory with decisions.
const MOST_DECISIONS: usize = 100_000;

impl Auditor for Recorder {
    fn record(&mut self, record: &Record) {
        let mut decisions = lock(&self.decisions);
        if decisions.len() < MOST_DECISIONS {
            decisions.push(*record);
        }
    }

    fn asked(&mut self, ask: &AskRecord) {
        let mut asks = lock(&self.asks);
        if asks.len() < MOST_DECISIONS {
            asks.push((Instant::now(), *ask));
        }
    }
}

impl Observer for Recorder {
    fn event(&mut self, _: VcpuId, event: &TrapEvent) {
        lock(&self.events).push(event.clone());
    }
}
