//! From a configuration to a machine that is ready to run.

mod emu;
mod kvm;

use std::io::{self, Write};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;

use arbiter::{Grant, PerKind, Phase};
use kvm_pmu::{KvmPmuError, TrapMode, TrapPlan};
use pmu_virt::cpuid::Leaves;
use pmu_virt::{
    BackendEnv, CorePmu, Holdings, Oversubscribe, OwnerId, PebsPrecision, PmuCpuid, PmuModel,
    Reservations, Tsc, VcpuPmu, Vendor,
};
use thiserror::Error;
use umpire_audit::Arbitration;
use vm_memory::GuestMemoryMmap;
use vmm_control::{
    ContextLine, ControlConfig, ControlEndpoint, JobQueue, LeaseLine, PreparedServer, Server,
    ServerError, ServerSetup,
};
use vmm_sys_util::eventfd::EventFd;

pub(super) use self::emu::EmuMachine;
pub(crate) use self::emu::SEEDED_BEGINNING;
pub(super) use self::kvm::KvmMachine;
use super::state::{SavedMachine, StateFileError};
use crate::audit::{self, AuditError, AuditTrail};
use crate::boot::memory::MemoryError;
use crate::boot::{
    self, BootError, BootRequest, FirmwareImage, FirmwareRequest, InitialState, ModuleRequest,
};
use crate::config::{ConfigError, GuestCpu, OversubscribeChoice, RunConfig, UnpackChoice};
use crate::control::VmMemory;
use crate::counters::{CounterError, CounterPlan, backend_env};
use crate::cpuid::{ApicFacts, CpuidError, CpuidPlan, MAX_CPUS, guest_cpuid, host_vendor};
use crate::devices::{
    ConsoleIrqError, DeviceClock, InterruptLine, PlatformParts, PortBus, SharedPlatform,
    TimerWidth, ports,
};
use crate::emu::RoomError;
use crate::entropy::Randomness;
use crate::firmware::{FirmwareChoice, FirmwarePlan, PlanError};
use crate::guest_kernel::{AgentLine, AgentPort, VmKernel};
use crate::kvm::{GuestRam, Host, HostError, KvmVm, VcpuError, VcpuId, VmError, VmOptions};
use crate::probe::ProbeReport;
use crate::reservations::{MachineReservations, ReservationError};
use crate::sched::CpuList;
use crate::vcpu::Observer;

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
        asked: u8,
        /// `KVM_CAP_MAX_VCPUS`.
        limit: u32,
    },
    /// There is no seed for the guest's random numbers.
    #[error("the operating system has no random numbers; --seed N takes them from a number")]
    NoRandom,
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
    /// The processor in software.
    #[error(transparent)]
    Emu(#[from] RoomError),
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

/// What is to run a machine, and what is known of it.
#[derive(Debug, Clone, Copy)]
pub enum EngineFacts<'a> {
    /// KVM.
    Kvm {
        host: &'a Host,
        /// What probe guests found.
        probes: &'a ProbeReport,
    },
    /// The processor in software, which is the same everywhere.
    Emu,
}

/// A machine whose vCPUs are at their first instruction.
#[derive(Debug)]
pub struct Machine {
    pub(super) runner: Runner,
    pub(super) platform: Arc<SharedPlatform>,
    pub(super) audit: Arc<AuditTrail>,
    /// Serves host tools.
    pub(super) server: Option<Server>,
    /// Ends the run, as SIGTERM does.
    pub(super) stop: Option<EventFd>,
    lease_lines: Option<LeaseLines>,
}

/// The part of a machine that is its engine's.
#[derive(Debug)]
pub(super) enum Runner {
    Kvm(Box<KvmMachine>),
    Emu(Box<EmuMachine>),
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
        engine: EngineFacts<'_>,
        config: &RunConfig,
        console: Box<dyn Write + Send>,
        observer: impl Fn(VcpuId) -> Box<dyn Observer>,
    ) -> Result<Self, MachineError> {
        let order = Order { engine, config };
        let mut guest = order.plan_guest()?;
        let mut random = order.randomness();
        let (memory, start) = order.load_guest(&guest, &mut random)?;
        let shown = memory.for_vmm().clone();
        let base = Base::new(order, &guest, memory)?;
        let devices = Devices::connect(&base, console, config.agent)?;
        let tsc_khz = base.tsc_khz()?;
        let mut counters = order.open_counters(&mut guest, tsc_khz)?;
        let audit = Arc::new(order.audit_trail(&guest)?);
        for (number, core) in (0..).zip(&mut counters.cores) {
            core.set_host_audit(Box::new(audit.host_auditor(number)));
        }
        let tools = order.connect_tools(shown, devices.agent, &mut counters, tsc_khz)?;
        let reserved = guest.reservations(tsc_khz, &audit, (&mut random, base.now()))?;
        let cpuid = guest.pmu_cpuid(&counters, reserved.first());
        let (shared_cores, own_cores) = counters.deal(config.cores.is_some());
        let outfit = Outfit {
            order,
            guest: &guest,
            cpuid: cpuid.as_ref(),
            state: &start,
            platform: &devices.platform,
            kernel: tools.kernel.as_ref(),
            tsc_khz,
        };
        let mut reserved = reserved.into_iter();
        let mut own_cores = own_cores.map(Box::new);
        let mut endpoints = tools.endpoints.into_iter();
        let shares = (0..config.cpus.into()).map(VcpuId).map(|id| {
            let own = own_cores.next();
            outfit.share(id, reserved.next(), own, endpoints.next(), observer(id))
        });
        let shares = shares.collect::<Result<_, _>>()?;
        let cores = SharedParts {
            cores: shared_cores,
            jobs: tools.core_jobs,
            pin: counters.pin,
        };
        let runner = base.into_runner(&outfit, shares, cores)?;
        let server = tools.server.filter(|_| config.control.is_some());
        let server = server.map(|server| server.start(guest_name(config)));
        Ok(Self {
            runner,
            server: server.transpose()?,
            stop: None,
            lease_lines: tools.lease_lines,
            platform: devices.platform,
            audit,
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

/// What a machine is made for: what was asked for, and where.
#[derive(Clone, Copy)]
struct Order<'a> {
    engine: EngineFacts<'a>,
    config: &'a RunConfig,
}

/// What the guest gets, before there is anything of it.
struct GuestPlan {
    /// The vendor of the processor that executes it.
    host: Vendor,
    /// What the engine can announce.
    supported: Leaves,
    cpu: GuestCpu,
    firmware: FirmwarePlan,
    pcr: Option<MachineReservations>,
    /// Counters that CPUID announces under a budget.
    budgeted: Option<PerKind>,
    saved: Option<SavedMachine>,
    trap: TrapPlan,
}

/// What an engine has of a machine before there are counters: its devices' lines and its
/// clock.
enum Base<'a> {
    Kvm(kvm::KvmBase<'a>),
    Emu(emu::EmuBase),
}

impl<'a> Base<'a> {
    fn new(order: Order<'a>, guest: &GuestPlan, memory: GuestRam) -> Result<Self, MachineError> {
        Ok(match order.engine {
            EngineFacts::Kvm { host, probes } => {
                let options = VmOptions::with_pmu(guest.cpu.pmu.as_ref()).trapping(guest.trap);
                let vm = Arc::new(KvmVm::new(host, memory, &options)?);
                Self::Kvm(kvm::KvmBase::new(vm, probes, order.config.cpus)?)
            }
            EngineFacts::Emu => Self::Emu(emu::EmuBase::new(order, memory)),
        })
    }

    fn tsc_khz(&self) -> Result<u32, MachineError> {
        match self {
            Self::Kvm(base) => Ok(base.tsc_khz()?),
            Self::Emu(_) => Ok(crate::emu::TSC_KHZ),
        }
    }

    /// The time by which leases and claims go.
    fn now(&self) -> Tsc {
        match self {
            Self::Kvm(_) => kvm_pmu::now(),
            Self::Emu(_) => Tsc(0),
        }
    }

    /// A new line that raises `gsi`.
    fn line(&self, gsi: u32) -> Result<Box<dyn InterruptLine>, MachineError> {
        match self {
            Self::Kvm(base) => base.line(gsi),
            Self::Emu(base) => Ok(base.line(gsi)),
        }
    }

    /// The clock of the devices.
    fn clock(&self) -> Box<dyn DeviceClock> {
        match self {
            Self::Kvm(_) => Box::new(crate::devices::HostClock::new()),
            Self::Emu(base) => base.clock(),
        }
    }

    fn into_runner(
        self,
        outfit: &Outfit<'_>,
        shares: Vec<VcpuShare>,
        cores: SharedParts,
    ) -> Result<Runner, MachineError> {
        Ok(match self {
            Self::Kvm(base) => Runner::Kvm(Box::new(base.into_machine(outfit, shares, cores)?)),
            Self::Emu(base) => Runner::Emu(Box::new(base.into_machine(outfit, shares, cores)?)),
        })
    }
}

/// What vCPUs of one machine share: cores, if they take turns on some.
struct SharedParts {
    cores: Vec<CorePmu>,
    jobs: Vec<JobQueue>,
    pin: Option<CpuList>,
}

/// What one vCPU gets, whatever engine runs it.
struct VcpuShare {
    id: VcpuId,
    pmu: Option<VcpuPmu>,
    /// The counters of the core that it has to itself.
    own: Option<Box<CorePmu>>,
    endpoint: Option<ControlEndpoint>,
    observer: Box<dyn Observer>,
}

impl Order<'_> {
    /// Refuses what does not fit this host, or does not fit together.
    fn plan_guest(&self) -> Result<GuestPlan, MachineError> {
        let config = self.config;
        let (supported, host) = self.processor()?;
        let cpu = config.guest_cpu(host)?;
        let firmware = firmware_plan(config, cpu.pmu.as_ref())?;
        let pcr = self.plan_reservations(cpu.pmu.as_ref(), &firmware)?;
        let budgeted = budgeted(config, cpu.pmu.as_ref(), pcr.as_ref())?;
        let saved = config.restore.as_deref();
        let saved = saved.map(|path| SavedMachine::read(path, config.cpus));
        let trap = match self.engine {
            EngineFacts::Kvm { probes, .. } => probes.trap_plan(match &cpu.pmu {
                Some(_) => config.rdpmc_trap,
                None => TrapMode::None,
            }),
            EngineFacts::Emu => TrapPlan::default(),
        };
        Ok(GuestPlan {
            host,
            supported,
            cpu,
            firmware,
            pcr,
            budgeted,
            saved: saved.transpose()?,
            trap,
        })
    }

    /// What the engine can announce, and whose processor it is. The vendor is needed even
    /// where the host's has no PMU model.
    fn processor(&self) -> Result<(Leaves, Vendor), MachineError> {
        let asked = self.config.cpus;
        let limit = match self.engine {
            EngineFacts::Kvm { host, .. } => host.features().max_vcpus,
            EngineFacts::Emu => MAX_CPUS.into(),
        };
        if u32::from(asked) > limit {
            return Err(MachineError::TooManyVcpus { asked, limit });
        }
        match self.engine {
            EngineFacts::Kvm { host, .. } => {
                let supported = host.supported_cpuid()?;
                let vendor = host_vendor(&supported)?;
                Ok((supported, vendor))
            }
            EngineFacts::Emu => {
                let vendor = self.config.vendor_without_host();
                Ok((crate::emu::supported(vendor), vendor))
            }
        }
    }

    /// Where the guest's random numbers come from.
    fn randomness(&self) -> Randomness {
        match self.engine {
            EngineFacts::Kvm { .. } => Randomness::System,
            EngineFacts::Emu => Randomness::of(self.config.engine.seed),
        }
    }

    /// Whether guests have system management mode.
    fn has_smm(&self) -> bool {
        match self.engine {
            EngineFacts::Kvm { probes, .. } => probes.smm,
            EngineFacts::Emu => false,
        }
    }

    fn plan_reservations(
        &self,
        model: Option<&PmuModel>,
        firmware: &FirmwarePlan,
    ) -> Result<Option<MachineReservations>, ConfigError> {
        let (Some(choice), Some(model)) = (&self.config.pcr, model) else {
            return Ok(None);
        };
        let has_firmware = self.config.firmware.image != FirmwareChoice::None;
        Ok(Some(MachineReservations {
            plan: choice.plan(model, firmware.set_aside())?,
            phase: Arc::new(Phase::new(has_firmware)),
            smm: self.has_smm(),
            holdings: Holdings::default(),
        }))
    }

    /// Memory with the kernel in it, and the registers that it starts with.
    fn load_guest(
        &self,
        guest: &GuestPlan,
        random: &mut Randomness,
    ) -> Result<(GuestRam, InitialState), MachineError> {
        let memory = guest_ram(self.config.memory_mib, guest.trap)?;
        let request = self.boot_request(&guest.firmware, random)?;
        let loaded = boot::load(memory.for_vmm(), &request)?;
        log::info!("{}", loaded.describe());
        Ok((memory, loaded.state))
    }

    fn boot_request(
        &self,
        plan: &FirmwarePlan,
        random: &mut Randomness,
    ) -> Result<BootRequest, MachineError> {
        let config = self.config;
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
        // A processor in software has no noise that a kernel could take numbers from.
        let (slow_cpl0, rng_seed) = match self.engine {
            EngineFacts::Kvm { probes, .. } => (probes.slow_cpl0(), None),
            EngineFacts::Emu => (true, Some(random.bytes().ok_or(MachineError::NoRandom)?)),
        };
        Ok(BootRequest {
            kernel: config.kernel.clone(),
            initrd: config.initrd.clone(),
            cmdline: config.cmdline.clone().unwrap_or_default(),
            modules: modules.collect(),
            cpus: config.cpus.into(),
            unpack: match config.unpack {
                UnpackChoice::Auto => boot::Unpack::Auto { slow_cpl0 },
                UnpackChoice::Always => boot::Unpack::Always,
                UnpackChoice::Never => boot::Unpack::Never,
            },
            pm_timer: true,
            virtio: None,
            rng_seed,
            firmware: image.map(|image| FirmwareRequest {
                image,
                counters: plan.counters().to_vec(),
                delay_ms: config.firmware.delay_ms,
            }),
        })
    }

    /// The counters of each core: of those that vCPUs share, or of each vCPU's own. From
    /// now on the guest's model has only what they count.
    fn open_counters(&self, guest: &mut GuestPlan, tsc_khz: u32) -> Result<Counters, MachineError> {
        let Some(model) = &mut guest.cpu.pmu else {
            return Ok(Counters {
                cores: Vec::new(),
                for_tools: None,
                pin: self.config.pin.clone(),
            });
        };
        let (cores, at_cpu) = match self.engine {
            EngineFacts::Kvm { probes, .. } => {
                let env = backend_env(tsc_khz, Some(guest.host), probes.step_support());
                core_pmus(self.config, env)?
            }
            EngineFacts::Emu => (emu::core_pmus(self.config, guest.host)?, None),
        };
        // All cores count alike, so the first one answers for what the guest has.
        let for_tools = cores.first().map(|core| counted_by(core, model));
        // A source that counts on one CPU keeps every core there.
        let at_cpu = at_cpu.map(|cpu| CpuList::new(vec![cpu]));
        Ok(Counters {
            cores,
            for_tools: for_tools.transpose()?,
            pin: at_cpu.or_else(|| self.config.pin.clone()),
        })
    }

    fn audit_trail(&self, guest: &GuestPlan) -> Result<AuditTrail, AuditError> {
        let config = self.config;
        let (Some(path), Some(model)) = (&config.audit, &guest.cpu.pmu) else {
            return Ok(AuditTrail::new(config.cpus));
        };
        let arbitration = guest.pcr.as_ref().map(|pcr| Arbitration {
            firmware: pcr.phase.has_firmware(),
            smm: pcr.smm,
            ..Arbitration::of(pcr.plan.scheme, &pcr.plan.policy)
        });
        let header = audit::header_now(config.cpus, model, arbitration);
        AuditTrail::to(config.cpus, path, config.audit_out.clone(), &header)
    }

    /// Prepares the server of host tools, which leases of the host's counters need too.
    fn connect_tools(
        &self,
        memory: GuestMemoryMmap,
        agent: Option<AgentLine>,
        counters: &mut Counters,
        tsc_khz: u32,
    ) -> Result<HostTools, MachineError> {
        let config = self.config;
        let model = match &counters.for_tools {
            Some(model) if config.control.is_some() || config.lease.is_some() => model,
            _ => return Ok(HostTools::default()),
        };
        let shown = Box::new(VmMemory(memory.clone()));
        let unserved = || ControlConfig::at(PathBuf::new());
        let control = config.control.clone().unwrap_or_else(unserved);
        let mut setup = ServerSetup::new(&control, model.clone(), shown, tsc_khz);
        let kernel = VmKernel::new(memory, agent).map_err(MachineError::Thread)?;
        setup.set_kernel(kernel.clone());
        if matches!(self.engine, EngineFacts::Emu) {
            setup.set_virtual_time();
        }
        if config.control.is_some() {
            setup.enable_hosting(&mut counters.cores);
        }
        let shared = config.cores.map(|plan| plan.cores.into());
        let count = shared.unwrap_or(config.cpus.into());
        let cpu = |core| u32::try_from(counters.pin.as_ref()?.of(core)?).ok();
        setup.set_core_cpus((0..count).map_while(cpu).collect());
        let mut connected = setup.connect(config.cpus.into(), shared)?;
        let lease_lines = match config.lease {
            Some(_) => Some(LeaseLines {
                guest: connected.server.lease_line()?,
                contexts: connected.server.context_line()?,
            }),
            None => None,
        };
        Ok(HostTools {
            server: Some(connected.server),
            endpoints: connected.vcpus,
            core_jobs: connected.cores,
            kernel: Some(kernel),
            lease_lines,
        })
    }
}

impl GuestPlan {
    /// The reservations of each vCPU, if there are any.
    fn reservations(
        &self,
        tsc_khz: u32,
        audit: &AuditTrail,
        (random, now): (&mut Randomness, Tsc),
    ) -> Result<Vec<Reservations>, ReservationError> {
        let (Some(model), Some(pcr)) = (&self.cpu.pmu, &self.pcr) else {
            return Ok(Vec::new());
        };
        let auditors = audit.auditors();
        let units = auditors.map(|auditor| {
            let audit = Box::new(auditor);
            pcr.of_vcpu_with(model, (tsc_khz, now), audit, random.fork())
        });
        units.collect()
    }

    /// What CPUID says of the PMU, with the unit of one vCPU, which all have alike.
    fn pmu_cpuid(&self, counters: &Counters, reserved: Option<&Reservations>) -> Option<PmuCpuid> {
        let (model, core) = self.cpu.pmu.as_ref().zip(counters.cores.first())?;
        let visible = visible(model, self.pcr.as_ref());
        let visible = self.budgeted.unwrap_or(visible);
        let cpuid = model.announced(|request| core.plan_for_guest(request).is_ok(), visible);
        Some(match reserved {
            Some(first) => cpuid.with_reservations(&first.unit),
            None => cpuid,
        })
    }
}

/// The host's side of the machine's counters.
struct Counters {
    cores: Vec<CorePmu>,
    /// What host tools may count.
    for_tools: Option<PmuModel>,
    /// Host CPUs for the threads that run vCPUs.
    pin: Option<CpuList>,
}

impl Counters {
    /// The cores that vCPUs share, and those that each vCPU has to itself: one of the two.
    fn deal(&mut self, shared: bool) -> (Vec<CorePmu>, std::vec::IntoIter<CorePmu>) {
        let cores = std::mem::take(&mut self.cores);
        let (shared, own) = if shared {
            (cores, Vec::new())
        } else {
            (Vec::new(), cores)
        };
        (shared, own.into_iter())
    }
}

/// What `core` counts of `model`, for host tools; the guest's `model` becomes what it may
/// count of that.
fn counted_by(core: &CorePmu, model: &mut PmuModel) -> Result<PmuModel, MachineError> {
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
    Ok(counted)
}

/// Counters that a guest without a budget sees.
fn visible(model: &PmuModel, pcr: Option<&MachineReservations>) -> PerKind {
    let legacy = pcr.and_then(|pcr| pcr.plan.legacy);
    legacy.unwrap_or(model.counts())
}

/// Counters that CPUID announces under a budget, which leaves to each layer its minimum.
fn budgeted(
    config: &RunConfig,
    model: Option<&PmuModel>,
    pcr: Option<&MachineReservations>,
) -> Result<Option<PerKind>, MachineError> {
    let Some(budget) = config.budget else {
        return Ok(None);
    };
    let announced = model.map(|model| budget.announced(model, visible(model, pcr)));
    let announced = announced.transpose().map_err(ConfigError::from)?;
    if let Some(pcr) = pcr {
        let policy = &pcr.plan.policy;
        budget.leaves_minima(policy).map_err(ConfigError::from)?;
    }
    Ok(announced)
}

/// The machine's devices, connected to its interrupt lines.
struct Devices {
    platform: Arc<SharedPlatform>,
    agent: Option<AgentLine>,
}

impl Devices {
    fn connect(
        base: &Base<'_>,
        console: Box<dyn Write + Send>,
        has_agent: bool,
    ) -> Result<Self, MachineError> {
        let mut parts = PlatformParts {
            com1_irq: base.line(ports::COM1_GSI)?,
            console,
            com2: None,
            time: base.clock(),
            timer_width: TimerWidth::default(),
        };
        let mut agent = None;
        if has_agent {
            let (end, from_guest) = AgentPort::pair();
            parts.com2 = Some((base.line(ports::COM2_GSI)?, Box::new(from_guest)));
            agent = Some(end);
        }
        let platform = Arc::new(SharedPlatform::new(PortBus::new(parts)));
        Ok(Self {
            agent: agent.map(|agent| agent.on(platform.clone())),
            platform,
        })
    }
}

/// The server of host tools, not started yet, and what the machine has of it.
#[derive(Default)]
struct HostTools {
    server: Option<PreparedServer>,
    endpoints: Vec<ControlEndpoint>,
    core_jobs: Vec<JobQueue>,
    kernel: Option<Arc<VmKernel>>,
    lease_lines: Option<LeaseLines>,
}

/// What the vCPUs of a machine have in common.
struct Outfit<'a> {
    order: Order<'a>,
    guest: &'a GuestPlan,
    cpuid: Option<&'a PmuCpuid>,
    state: &'a InitialState,
    platform: &'a Arc<SharedPlatform>,
    kernel: Option<&'a Arc<VmKernel>>,
    tsc_khz: u32,
}

impl Outfit<'_> {
    /// What vCPU `id` gets, with the counters of a core of its `own`.
    fn share(
        &self,
        id: VcpuId,
        reserved: Option<Reservations>,
        mut own: Option<Box<CorePmu>>,
        endpoint: Option<ControlEndpoint>,
        observer: Box<dyn Observer>,
    ) -> Result<VcpuShare, MachineError> {
        Ok(VcpuShare {
            id,
            pmu: self.pmu(id, reserved, own.as_deref_mut())?,
            own,
            endpoint,
            observer,
        })
    }

    /// Its PMU, in the state that is restored if one is, on its `own` core if it has one.
    fn pmu(
        &self,
        id: VcpuId,
        reserved: Option<Reservations>,
        mut own: Option<&mut CorePmu>,
    ) -> Result<Option<VcpuPmu>, MachineError> {
        let Some(model) = &self.guest.cpu.pmu else {
            return Ok(None);
        };
        let config = self.order.config;
        let grant = Grant::everything();
        let grant = config
            .budget
            .map_or(grant, |budget| grant.at_most(budget.most()));
        let grant = grant.leased(config.lease.unwrap_or(PerKind::ALL));
        let pmu = VcpuPmu::detached(OwnerId(id.0), model.clone(), grant);
        let answer = oversubscription(config.oversubscribe, self.tsc_khz);
        let mut pmu = pmu.with_oversubscription(answer);
        if let Some(reservations) = reserved {
            pmu = pmu.with_reservations(reservations);
        }
        pmu.hosts_mut().pause(config.paused);
        if let Some(core) = own.as_deref_mut() {
            pmu.attach(core);
        }
        if let Some(saved) = &self.guest.saved {
            saved.restore(id, &mut pmu, own)?;
        }
        Ok(Some(pmu))
    }

    /// The CPUID of vCPU `id`.
    fn leaves(&self, id: VcpuId) -> Result<Leaves, CpuidError> {
        let Order { engine, config } = self.order;
        // What KVM has besides a processor.
        let (tsc_deadline, slow_cpl0, on_kvm) = match engine {
            EngineFacts::Kvm { host, probes } => {
                (host.features().tsc_deadline_timer, probes.slow_cpl0(), true)
            }
            EngineFacts::Emu => (true, false, false),
        };
        let plan = CpuidPlan {
            cpus: config.cpus,
            vendor: self.guest.cpu.vendor,
            identity: config.cpu_model,
            pmu: self.cpuid,
            apic: ApicFacts {
                x2apic: true,
                tsc_deadline,
            },
            async_page_faults: on_kvm,
            slow_cpl0,
            hidden: &config.hidden_features,
        };
        let id = u8::try_from(id.0).unwrap_or(u8::MAX);
        guest_cpuid(&self.guest.supported, id, &plan)
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
