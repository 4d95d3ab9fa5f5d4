//! From a configuration to a machine that is ready to run.

use std::io::{self, Write};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;

use arbiter::{Grant, PerKind, Phase};
use kvm_bindings::{CpuId, kvm_fpu, kvm_regs, kvm_sregs};
use kvm_pmu::{KvmPmu, KvmPmuError, KvmPmuParts, TrapMode, TrapPlan};
use pmu_virt::{
    BackendEnv, CorePmu, Holdings, Oversubscribe, OwnerId, PebsPrecision, PmuModel, Reservations,
    VcpuPmu,
};
use thiserror::Error;
use vmm_control::{
    ContextLine, ControlConfig, JobQueue, LeaseLine, Server, ServerError, ServerSetup,
};
use vmm_sys_util::eventfd::EventFd;

use super::state::{SavedMachine, StateFileError};
use crate::audit::{AuditArbiter, AuditError, AuditHeader, AuditTrail};
use crate::boot::memory::MemoryError;
use crate::boot::{
    self, BootError, BootRequest, FirmwareImage, FirmwareRequest, InitialState, ModuleRequest,
};
use crate::config::{ConfigError, OversubscribeChoice, RunConfig, UnpackChoice};
use crate::control::VmMemory;
use crate::counters::{CounterError, CounterPlan, backend_env};
use crate::cpuid::{ApicFacts, CpuidError, CpuidPlan, guest_cpuid, host_vendor};
use crate::devices::SharedPlatform;
use crate::devices::{ConsoleIrqError, PlatformParts, PortBus, ports};
use crate::firmware::{FirmwareChoice, FirmwarePlan, PlanError};
use crate::guest_kernel::{AgentPort, VmKernel};
use crate::kvm::{
    GuestRam, Host, HostError, KvmVcpu, KvmVm, VcpuError, VcpuId, VmError, VmOptions,
};
use crate::probe::ProbeReport;
use crate::reservations::{MachineReservations, ReservationError};
use crate::sched::CpuList;
use crate::vcpu::{Observer, VcpuControl, VcpuParts};

/// `IA32_MISC_ENABLE` and its fast-string bit: Linux switches REP MOVS off without it.
const MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
/// Its bit 7, "performance monitoring available" (SDM vol. 4, 0x1A0); KVM keeps it
/// clear while its own vPMU is off.
const MISC_ENABLE_PERFMON: u64 = 1 << 7;
/// `IA32_MTRR_DEF_TYPE`: MTRRs on, memory is write-back.
const MTRR_DEF_TYPE: u32 = 0x2ff;
const MTRR_ON_WRITE_BACK: u64 = 1 << 11 | 6;

/// The x87 control word and MXCSR after reset (SDM vol. 3A, table 11-1).
const RESET_FCW: u16 = 0x37f;
const RESET_MXCSR: u32 = 0x1f80;

/// A machine could not be made.
#[derive(Debug, Error)]
pub enum MachineError {
    /// Options that do not fit this host.
    #[error(transparent)]
    Config(Box<ConfigError>),
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Kernel, initrd or modules.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// CPUID.
    #[error(transparent)]
    Cpuid(#[from] CpuidError),
    /// Nobody counts what is sampled.
    #[error(
        "--pmu with ibs=on: {sources} counts neither cycles nor instructions, so that nothing \
         could be sampled; add clock or step to --counters, or leave ibs=on out"
    )]
    NoSamples {
        /// The backend's name.
        sources: &'static str,
    },
    /// No thread looks into the guest for tools.
    #[error("no thread for the VM: {0}; see `ulimit -u`, or give --control none")]
    Thread(std::io::Error),
    /// More vCPUs than this host's KVM allows.
    #[error("--cpus {asked}: this host's KVM allows {limit} vCPUs in one machine")]
    TooManyVcpus {
        /// As asked for.
        asked: u8,
        /// `KVM_CAP_MAX_VCPUS`.
        limit: u32,
    },
    /// KVM.
    #[error(transparent)]
    Host(#[from] HostError),
    /// KVM.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// KVM.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// KVM's part of a virtual PMU.
    #[error(transparent)]
    Pmu(#[from] KvmPmuError),
    /// The console's interrupt line.
    #[error(transparent)]
    Console(#[from] ConsoleIrqError),
    /// The state to start with.
    #[error(transparent)]
    State(#[from] StateFileError),
    /// The counter backend.
    #[error(transparent)]
    Counters(#[from] CounterError),
    /// Counters for the firmware.
    #[error("--firmware-counter: {0}")]
    Firmware(#[source] PlanError),
    /// Counters of the hypervisor.
    #[error(transparent)]
    Reservations(#[from] ReservationError),
    /// The audit file.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// The server of host tools.
    #[error(transparent)]
    Control(#[from] ServerError),
}

// By hand: the error is boxed, as it is much larger than all others.
impl From<ConfigError> for MachineError {
    fn from(error: ConfigError) -> Self {
        Self::Config(Box::new(error))
    }
}

/// What looks after the leases of a machine on the host's counters.
#[derive(Debug)]
pub struct LeaseLines {
    /// Tells the vCPUs what their guests may use.
    pub guest: LeaseLine,
    /// Asks for what host tools want to count.
    pub contexts: ContextLine,
}

/// A machine whose vCPUs are at their first instruction.
#[derive(Debug)]
pub struct Machine {
    pub(super) vcpus: Vec<VcpuParts>,
    /// The counters of each core that vCPUs share; none where each has its own.
    pub(super) cores: Vec<CorePmu>,
    /// Host CPUs for the threads that run vCPUs.
    pub(super) pin: Option<CpuList>,
    pub(super) platform: Arc<SharedPlatform>,
    pub(super) control: Arc<VcpuControl>,
    pub(super) audit: Arc<AuditTrail>,
    /// Serves host tools.
    pub(super) server: Option<Server>,
    pub(super) core_jobs: Vec<JobQueue>,
    /// Ends the run, as SIGTERM does.
    pub(super) stop: Option<EventFd>,
    lease_lines: Option<LeaseLines>,
    // The line stays connected for as long as its event lives.
    _com1_irq: EventFd,
    _com2_irq: Option<EventFd>,
}

/// Ends a run.
#[derive(Debug)]
pub struct Stopper(EventFd);

impl Stopper {
    /// Asks the machine to stop; one that has ended is no error.
    pub fn stop(&self) {
        // An event whose counter is full is readable all the same.
        let _ = self.0.write(1);
    }
}

impl Machine {
    /// Makes the machine that `config` describes. `observer` gives each vCPU
    /// its observer.
    ///
    /// # Errors
    /// [`MachineError`] names what was wrong and what to do.
    pub fn build(
        host: &Host,
        probes: &ProbeReport,
        config: &RunConfig,
        console: Box<dyn Write + Send>,
        observer: impl Fn(VcpuId) -> Box<dyn Observer>,
    ) -> Result<Self, MachineError> {
        let limit = host.features().max_vcpus;
        if u32::from(config.cpus) > limit {
            return Err(MachineError::TooManyVcpus {
                asked: config.cpus,
                limit,
            });
        }
        let supported = host.supported_cpuid()?;
        // The guest's vendor is needed even where the host's has no PMU model.
        let host_vendor = host_vendor(supported.as_slice())?;
        let mut guest = config.guest_cpu(host_vendor)?;
        let plan = firmware_plan(config, guest.pmu.as_ref())?;
        let pcr = match (&config.pcr, &guest.pmu) {
            (Some(choice), Some(model)) => Some(MachineReservations {
                plan: choice
                    .plan(model, plan.set_aside())
                    .map_err(ConfigError::from)?,
                phase: Arc::new(Phase::new(config.firmware.image != FirmwareChoice::None)),
                smm: probes.smm,
                holdings: Holdings::default(),
            }),
            _ => None,
        };
        let announced = config
            .budget
            .zip(guest.pmu.as_ref())
            .map(|(budget, model)| {
                let visible = pcr.as_ref().and_then(|pcr| pcr.plan.legacy);
                budget.announced(model, visible.unwrap_or(model.counts()))
            });
        let announced = announced.transpose().map_err(ConfigError::from)?;
        if let (Some(budget), Some(pcr)) = (config.budget, &pcr) {
            let policy = &pcr.plan.policy;
            budget.leaves_minima(policy).map_err(ConfigError::from)?;
        }
        let saved = config.restore.as_deref();
        let saved = saved.map(|path| SavedMachine::read(path, config.cpus));
        let saved = saved.transpose()?;
        let trap = probes.trap_plan(match &guest.pmu {
            Some(_) => config.rdpmc_trap,
            None => TrapMode::None,
        });
        let options = VmOptions::with_pmu(guest.pmu.as_ref()).trapping(trap);
        let memory = guest_ram(config.memory_mib, trap)?;
        let loaded = boot::load(memory.for_vmm(), &boot_request(config, &plan, probes))?;
        log::info!("{}", loaded.describe());

        let vm = Arc::new(KvmVm::new(host, memory, &options)?);
        let (mut parts, com1_irq) = PlatformParts::with_console(console)?;
        vm.connect_irq(&com1_irq, ports::COM1_GSI)?;
        let (mut agent, mut com2_irq) = (None, None);
        if config.agent {
            let irq = EventFd::new(libc::EFD_NONBLOCK).map_err(ConsoleIrqError::from)?;
            let copy = irq.try_clone().map_err(ConsoleIrqError::from)?;
            vm.connect_irq(&irq, ports::COM2_GSI)?;
            let (end, from_guest) = AgentPort::pair();
            parts.com2 = Some((copy, Box::new(from_guest)));
            (agent, com2_irq) = (Some(end), Some(irq));
        }
        let platform = Arc::new(SharedPlatform::new(PortBus::new(parts)));
        let mut agent = agent.map(|agent| agent.on(platform.clone()));
        let control = Arc::new(VcpuControl::default());

        let kvm = |id| vm.create_vcpu(id);
        let kvms: Vec<KvmVcpu> = (0..config.cpus)
            .map(VcpuId)
            .map(kvm)
            .collect::<Result<_, _>>()?;
        let tsc_khz = match kvms.first() {
            Some(kvm) => kvm.get_tsc_khz()?,
            None => 0,
        };
        let (mut cores, at_cpu) = match &guest.pmu {
            Some(_) => {
                let env = backend_env(tsc_khz, Some(host_vendor), probes.step_support());
                core_pmus(config, env)?
            }
            None => (Vec::new(), None),
        };
        // All cores count alike, so the first one answers for what the guest has.
        let mut tools_pmu = None;
        if let (Some(model), Some(core)) = (&mut guest.pmu, cores.first()) {
            let all = model.clone();
            let counted = all
                .clone()
                .counted(|event| core.backend().plan(event).is_ok());
            let exact = counted.pebs().map(|pebs| pebs.precision) == Some(PebsPrecision::Exact);
            if exact && core.backend().skids() {
                return Err(MachineError::from(ConfigError::PebsSkids {
                    model: counted.name(),
                    sources: core.backend().sources().join(","),
                }));
            }
            if all.ibs() != 0 && counted.ibs() == 0 {
                let sources = core.backend().name();
                return Err(MachineError::NoSamples { sources });
            }
            // What the guest may not count tools may.
            *model = all.counted(|event| core.plan_for_guest(event).is_ok());
            tools_pmu = Some(counted);
        }
        let audit = Arc::new(audit_trail(config, guest.pmu.as_ref(), pcr.as_ref())?);
        for (number, core) in (0..).zip(&mut cores) {
            core.set_host_audit(Box::new(audit.host_auditor(number)));
        }
        // A source that counts on one CPU keeps every core there.
        let pin = at_cpu
            .map(|cpu| CpuList::new(vec![cpu]))
            .or_else(|| config.pin.clone());
        let mut guest_kernel = None;
        let mut host_tools = match &tools_pmu {
            Some(model) if config.control.is_some() || config.lease.is_some() => {
                let memory = Box::new(VmMemory(vm.clone()));
                let unserved = || ControlConfig::at(PathBuf::new());
                let control = config.control.clone().unwrap_or_else(unserved);
                let mut setup = ServerSetup::new(&control, model.clone(), memory, tsc_khz);
                let kernel =
                    VmKernel::new(vm.clone(), agent.take()).map_err(MachineError::Thread)?;
                guest_kernel = Some(kernel.clone());
                setup.set_kernel(kernel);
                if config.control.is_some() {
                    setup.enable_hosting(&mut cores);
                }
                let shared = config.cores.map(|plan| plan.cores.into());
                let count = shared.unwrap_or(config.cpus.into());
                let cpu = |core| u32::try_from(pin.as_ref()?.of(core)?).ok();
                setup.set_core_cpus((0..count).map_while(cpu).collect());
                Some(setup.connect(config.cpus.into(), shared)?)
            }
            _ => None,
        };
        let lease_lines = match &mut host_tools {
            Some(tools) if config.lease.is_some() => Some(LeaseLines {
                guest: tools.server.lease_line()?,
                contexts: tools.server.context_line()?,
            }),
            _ => None,
        };
        let (server, endpoints, core_jobs) = match host_tools {
            Some(tools) => (Some(tools.server), tools.vcpus, tools.cores),
            None => (None, Vec::new(), Vec::new()),
        };
        let mut endpoints = endpoints.into_iter();
        let reserved = reservations(guest.pmu.as_ref(), pcr.as_ref(), tsc_khz, &audit)?;
        let pmu_cpuid = guest.pmu.as_ref().zip(cores.first());
        let pmu_cpuid = pmu_cpuid.map(|(model, core)| {
            let visible = pcr.as_ref().and_then(|pcr| pcr.plan.legacy);
            let visible = visible.unwrap_or(model.counts());
            let visible = announced.unwrap_or(visible);
            let cpuid = model.announced(|request| core.plan_for_guest(request).is_ok(), visible);
            match reserved.first() {
                Some(first) => cpuid.with_reservations(&first.unit),
                None => cpuid,
            }
        });
        let mut own = match config.cores {
            Some(_) => Vec::new(),
            None => std::mem::take(&mut cores),
        }
        .into_iter();

        let mut reserved = reserved.into_iter();
        let mut vcpus = Vec::with_capacity(config.cpus.into());
        for kvm in kvms {
            let id = kvm.id();
            let mut pmu = guest.pmu.as_ref().map(|model| {
                let answer = oversubscription(config.oversubscribe, tsc_khz);
                let owner = OwnerId(id.0.into());
                let grant = Grant::everything();
                let grant = config
                    .budget
                    .map_or(grant, |budget| grant.at_most(budget.most()));
                let grant = grant.leased(config.lease.unwrap_or(PerKind::ALL));
                let pmu = VcpuPmu::detached(owner, model.clone(), grant);
                let mut pmu = pmu.with_oversubscription(answer);
                if let Some(reservations) = reserved.next() {
                    pmu = pmu.with_reservations(reservations);
                }
                pmu.pause(config.paused);
                pmu
            });
            let mut core = own.next().map(Box::new);
            if let (Some(pmu), Some(core)) = (&mut pmu, &mut core) {
                pmu.attach(core);
            }
            if let (Some(pmu), Some(saved)) = (&mut pmu, &saved) {
                saved.restore(id, pmu, core.as_deref_mut())?;
            }
            let plan = CpuidPlan {
                cpus: config.cpus,
                vendor: guest.vendor,
                identity: config.cpu_model,
                pmu: pmu_cpuid.as_ref(),
                apic: ApicFacts {
                    x2apic: true,
                    tsc_deadline: host.features().tsc_deadline_timer,
                },
                async_page_faults: true,
                slow_cpl0: probes.slow_cpl0(),
                hidden: &config.hidden_features,
            };
            let entries = guest_cpuid(supported.as_slice(), id.0, &plan)?;
            set_registers(&kvm, &entries, &loaded.state)?;
            // AMD's processors have no such register to say it in.
            let perfmon = pmu_cpuid.is_some_and(|cpuid| cpuid.leaf_0xa.eax != 0);
            show_features(&kvm, perfmon)?;
            let pmu = KvmPmuParts {
                id,
                pmu,
                quirks: probes.quirks(),
                step: probes.step_support(),
                traps: vm.traps().clone(),
                pmi_floor: config.pmi_floor,
                tsc_khz,
            };
            vcpus.push(VcpuParts {
                pmu: KvmPmu::new(kvm.fd(), vm.fd(), pmu)?,
                kvm,
                vm: vm.clone(),
                platform: platform.clone(),
                control: control.clone(),
                observer: observer(id),
                own_core: core,
                firmware: pcr.as_ref().and_then(MachineReservations::expected),
                host: endpoints.next(),
                guest: guest_kernel.clone(),
            });
        }
        let server = server.filter(|_| config.control.is_some());
        let server = server.map(|server| server.start(guest_name(config)));
        let server = server.transpose()?;
        Ok(Self {
            server,
            core_jobs,
            stop: None,
            lease_lines,
            vcpus,
            cores,
            pin,
            platform,
            control,
            audit,
            _com1_irq: com1_irq,
            _com2_irq: com2_irq,
        })
    }

    /// What can end the run from any thread, as SIGTERM does.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn stopper(&mut self) -> io::Result<Stopper> {
        let stop = match self.stop.take() {
            Some(stop) => stop,
            None => EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        };
        Ok(Stopper(self.stop.insert(stop).try_clone()?))
    }

    /// What looks after the VM's leases, once, if [`RunConfig::lease`] says that there is one.
    /// Whoever takes it has to: contexts of host tools wait for it.
    pub fn take_lease_lines(&mut self) -> Option<LeaseLines> {
        self.lease_lines.take()
    }

    /// The audit of its vCPUs, to be finished when they have ended.
    #[must_use]
    pub fn audit(&self) -> Arc<AuditTrail> {
        self.audit.clone()
    }
}

fn guest_ram(mib: u64, trap: TrapPlan) -> Result<GuestRam, MemoryError> {
    let ranges = boot::memory::ranges(mib)?;
    GuestRam::new(&ranges, trap.may_patch()).map_err(|error| MemoryError::Allocation {
        mib,
        reason: error.to_string(),
    })
}

/// The name of what boots.
fn guest_name(config: &RunConfig) -> String {
    let name = config.kernel.file_name();
    name.map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn audit_trail(
    config: &RunConfig,
    model: Option<&PmuModel>,
    pcr: Option<&MachineReservations>,
) -> Result<AuditTrail, AuditError> {
    match (&config.audit, model) {
        (Some(path), Some(model)) => {
            let arbiter = pcr.map(|pcr| AuditArbiter {
                scheme: pcr.plan.scheme,
                policy: pcr.plan.policy,
                firmware: pcr.phase.has_firmware(),
                smm: pcr.smm,
            });
            let header = AuditHeader::now(config.cpus, model, arbiter.as_ref());
            AuditTrail::to(config.cpus, path, config.audit_out.clone(), &header)
        }
        _ => Ok(AuditTrail::new(config.cpus)),
    }
}

/// The reservations of each vCPU, if there are any.
fn reservations(
    model: Option<&PmuModel>,
    pcr: Option<&MachineReservations>,
    tsc_khz: u32,
    audit: &AuditTrail,
) -> Result<Vec<Reservations>, ReservationError> {
    let (Some(model), Some(pcr)) = (model, pcr) else {
        return Ok(Vec::new());
    };
    let auditors = audit.auditors();
    let units = auditors.map(|auditor| pcr.of_vcpu(model, tsc_khz, Box::new(auditor)));
    units.collect()
}

/// The counters of each core: of those that vCPUs share, or of each vCPU's own.
/// Also the host CPU on which they are, where that matters.
fn core_pmus(
    config: &RunConfig,
    env: BackendEnv,
) -> Result<(Vec<CorePmu>, Option<usize>), CounterError> {
    let cores = usize::from(config.cores.map_or(config.cpus, |plan| plan.cores));
    let pinned = config.pin.as_ref().and_then(|list| list.of(0));
    let plan = CounterPlan::prepare(&config.counters, env, cores, pinned)?;
    log::info!("counts come from {}", plan.sources());
    let core = |_| {
        let mut core = CorePmu::new(plan.open()?);
        core.set_event_filter(config.events.guest().clone());
        Ok(core)
    };
    let cores = (0..cores).map(core).collect::<Result<_, CounterError>>()?;
    Ok((cores, plan.needs_cpu()))
}

/// Length of a turn where counters take turns, as that of `perf`'s on a kernel
/// with a 250 Hz tick.
const TURN_MS: u64 = 4;

fn oversubscription(choice: OversubscribeChoice, tsc_khz: u32) -> Oversubscribe {
    let turn = NonZeroU64::new(TURN_MS * u64::from(tsc_khz));
    match (choice, turn) {
        (OversubscribeChoice::Multiplex, Some(turn)) => {
            Oversubscribe::Multiplex { timeslice: turn }
        }
        _ => Oversubscribe::Refuse,
    }
}

/// Which counters the firmware will ask for. The tables of event names are only
/// loaded where there are any.
fn firmware_plan(
    config: &RunConfig,
    model: Option<&PmuModel>,
) -> Result<FirmwarePlan, MachineError> {
    let specs = config.firmware.counters.as_slice();
    if specs.is_empty() {
        return Ok(FirmwarePlan::default());
    }
    FirmwarePlan::resolve(specs, model, umpire_events::names().as_ref())
        .map_err(MachineError::Firmware)
}

fn boot_request(config: &RunConfig, plan: &FirmwarePlan, probes: &ProbeReport) -> BootRequest {
    let image = match &config.firmware.image {
        FirmwareChoice::None => None,
        // The configuration was refused if there is none.
        FirmwareChoice::Builtin => firmware::image().map(FirmwareImage::Builtin),
        FirmwareChoice::File(path) => Some(FirmwareImage::File(path.clone())),
    };
    let modules = config.modules.iter().map(|module| ModuleRequest {
        path: module.path.clone(),
        cmdline: module.cmdline.clone(),
    });
    BootRequest {
        kernel: config.kernel.clone(),
        initrd: config.initrd.clone(),
        cmdline: config.cmdline.clone().unwrap_or_default(),
        modules: modules.collect(),
        cpus: config.cpus.into(),
        unpack: match config.unpack {
            UnpackChoice::Auto => boot::Unpack::Auto {
                slow_cpl0: probes.slow_cpl0(),
            },
            UnpackChoice::Always => boot::Unpack::Always,
            UnpackChoice::Never => boot::Unpack::Never,
        },
        pm_timer: true,
        firmware: image.map(|image| FirmwareRequest {
            image,
            counters: plan.counters().to_vec(),
            delay_ms: config.firmware.delay_ms,
        }),
    }
}

/// Registers at the first instruction. The boot processor gets the loader's
/// state; the others keep KVM's reset state and wait for their start-up IPI.
fn set_registers(
    kvm: &KvmVcpu,
    entries: &[kvm_bindings::kvm_cpuid_entry2],
    state: &InitialState,
) -> Result<(), MachineError> {
    let cpuid = CpuId::from_entries(entries).map_err(|_| CpuidError::Cpus(kvm.id().0))?;
    kvm.set_cpuid2(&cpuid)?;
    kvm.set_fpu(&kvm_fpu {
        fcw: RESET_FCW,
        mxcsr: RESET_MXCSR,
        ..Default::default()
    })?;
    if kvm.id() != VcpuId(0) {
        return Ok(());
    }
    kvm.set_sregs(&special_registers(kvm.get_sregs()?, state))?;
    kvm.set_regs(&kvm_regs {
        rip: state.rip,
        rsp: state.rsp,
        rflags: state.rflags,
        rax: state.rax,
        rbx: state.rbx,
        rsi: state.rsi,
        ..Default::default()
    })?;
    Ok(())
}

/// Comforts of real firmware; a KVM without these MSRs boots all the same.
fn show_features(kvm: &KvmVcpu, perfmon: bool) -> Result<(), MachineError> {
    if let Some(misc) = kvm.read_msr(MISC_ENABLE)? {
        let available = if perfmon { MISC_ENABLE_PERFMON } else { 0 };
        let misc = misc & !MISC_ENABLE_PERFMON | MISC_ENABLE_FAST_STRING | available;
        kvm.write_msr(MISC_ENABLE, misc)?;
    }
    kvm.write_msr(MTRR_DEF_TYPE, MTRR_ON_WRITE_BACK)?;
    Ok(())
}

/// `reset` with what the loader asks for.
fn special_registers(reset: kvm_sregs, state: &InitialState) -> kvm_sregs {
    let data = state.data.into();
    kvm_sregs {
        cs: state.cs.into(),
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        tr: state.tr.into(),
        gdt: state.gdt.into(),
        idt: state.idt.into(),
        cr0: state.cr0,
        cr3: state.cr3,
        cr4: state.cr4,
        efer: state.efer,
        ..reset
    }
}
