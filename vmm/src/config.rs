//! How a guest is to be run, checked.
//!
//! [`RunConfig`] holds possible values only; whoever makes one has opened the
//! files that it names. What depends on the host's CPU is decided by
//! [`RunConfig::guest_cpu`].

mod choices;
mod engine;

pub use crate::reservations::{
    FollowsGrants, HypervisorCounters, PcrChoice, PcrPlan, PcrPlanError,
};
pub use choices::{
    BootModule, BudgetChoice, BudgetError, CPU_MODELS, CpuVendor, FirmwareConfig,
    OversubscribeChoice, PmuChoice, TRAP_MODES, UnpackChoice, cpu_model, trap_mode,
};
pub use engine::{CyclesChoice, Engine, EngineChoice, EngineConfig, ForeignOption};

use std::path::PathBuf;
use std::time::Duration;

use arbiter::PerKind;
use kvm_pmu::TrapMode;
use pmu_virt::{EventFilters, ModelError, PmuModel, Sources, Vendor};
use thiserror::Error;
use vmm_control::ControlConfig;

use crate::audit::AuditOut;
use crate::cores::{CorePlan, CpuList};
use crate::cpuid::{Feature, Identity};

/// On KVM. Below some 20 µs a guest makes no progress beside its own interrupts.
pub const DEFAULT_PMI_FLOOR_US: u32 = 100;

/// The configuration does not fit the host or the PMU model.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// A PMU model of one vendor for a guest CPU of the other.
    #[error(
        "the PMU model {model} is {pmu}'s, but the guest's CPU is {cpu}'s, whose driver will \
         not use it; add --cpu-vendor {} or choose an {cpu} model",
        flag_of(*pmu)
    )]
    VendorMismatch {
        model: &'static str,
        pmu: Vendor,
        /// The guest's CPU vendor.
        cpu: Vendor,
    },
    /// A processor of one vendor for a guest CPU of the other.
    #[error(
        "--cpu-model {name} is {own}'s processor, but the guest's CPU is {cpu}'s; add \
         --cpu-vendor {} or choose {}",
        flag_of(*own),
        processors_of(*cpu)
    )]
    IdentityVendor {
        /// The processor.
        name: &'static str,
        own: Vendor,
        /// The guest's CPU vendor.
        cpu: Vendor,
    },
    /// A processor whose event codes the PMU model cannot take.
    #[error(
        "--cpu-model {name} and the PMU model {model} do not fit: their event selects have other \
         bits; choose {right} or --pmu auto"
    )]
    IdentityEvents {
        /// The processor.
        name: &'static str,
        model: &'static str,
        /// The model that such a processor has.
        right: &'static str,
    },
    /// A model that there is not.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Records that a guest takes for exact, from a source that skids.
    #[error(
        "--pmu {model},pebs=exact: {sources} notices overflows late, and a guest takes every PEBS \
         record for exact; give --counters step (on the engine emu: emu), or pebs=skid"
    )]
    PebsSkids {
        /// The model's name.
        model: &'static str,
        /// The sources that count, in the words of `--counters`.
        sources: String,
    },
    /// Reservations that the PMU model cannot have.
    #[error(transparent)]
    Reservations(#[from] PcrPlanError),
    /// A budget that the PMU model cannot announce.
    #[error(transparent)]
    Budget(#[from] BudgetError),
}

fn flag_of(vendor: Vendor) -> &'static str {
    match vendor {
        Vendor::Intel => "intel",
        Vendor::Amd => "amd",
    }
}

/// The processors of one vendor, for a message.
fn processors_of(vendor: Vendor) -> String {
    let own = Identity::all().filter(|identity| identity.vendor() == vendor);
    let names: Vec<_> = own.map(Identity::name).collect();
    match names.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => String::new(),
    }
}

/// A checked configuration of `umpire run`.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// What runs the guest.
    pub engine: EngineConfig,
    /// The kernel: an ELF file, a bzImage or a Multiboot kernel.
    pub kernel: PathBuf,
    /// The initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line; without one the boot protocol's default holds.
    pub cmdline: Option<String>,
    /// Multiboot modules, in order.
    pub modules: Vec<BootModule>,
    /// Guest memory in MiB.
    pub memory_mib: u64,
    /// Number of vCPUs, 1 to [`MAX_CPUS`](crate::cpuid::MAX_CPUS).
    pub cpus: u8,
    /// vCPUs that share threads; without it every vCPU has its own.
    pub cores: Option<CorePlan>,
    /// Host CPUs for the threads that run vCPUs.
    pub pin: Option<CpuList>,
    /// The virtual PMU.
    pub pmu: PmuChoice,
    /// Where counts come from.
    pub counters: Sources,
    /// Which events the guest may count, and tools of the host.
    pub events: EventFilters,
    /// What happens where there are too few of them.
    pub oversubscribe: OversubscribeChoice,
    /// How many physical counters each vCPU's guest may use at a time; `None`: all that
    /// it has.
    pub budget: Option<BudgetChoice>,
    /// So many physical counters each vCPU's guest may use at the start, by the VM's lease on
    /// the host's counters, which [`LeaseLine`](vmm_control::LeaseLine) changes later;
    /// `None`: there is no lease.
    pub lease: Option<PerKind>,
    /// The CPU vendor that the guest sees.
    pub cpu_vendor: CpuVendor,
    /// The processor that it sees; none: no particular one.
    pub cpu_model: Option<Identity>,
    /// CPU features to hide.
    pub hidden_features: Vec<Feature>,
    /// Whether a compressed kernel is unpacked on the host.
    pub unpack: UnpackChoice,
    /// How RDPMC is trapped.
    pub rdpmc_trap: TrapMode,
    /// The least time between two PMIs of one vCPU; none: the engine's own
    /// ([`DEFAULT_PMI_FLOOR_US`] on KVM, none at all on the processor in software).
    pub pmi_floor: Option<Duration>,
    /// Counter reservations for guests; `None`: there are none.
    pub pcr: Option<PcrChoice>,
    /// Where every decision about counters is written.
    pub audit: Option<PathBuf>,
    /// What takes it instead of a file of that name.
    pub audit_out: Option<AuditOut>,
    /// When to stop the guest.
    pub timeout: Option<Duration>,
    /// What runs before the kernel.
    pub firmware: FirmwareConfig,
    /// Where the PMU state goes at the end.
    pub save_on_exit: Option<PathBuf>,
    /// The PMU state to start with.
    pub restore: Option<PathBuf>,
    /// How host tools are served; `None`: they are not.
    pub control: Option<ControlConfig>,
    /// The guest has a second serial port, for an agent that tells tools what runs there.
    pub agent: bool,
    /// Tools let the guest begin.
    pub paused: bool,
}

/// The guest's CPU vendor and PMU model, decided.
#[derive(Clone, Debug)]
pub struct GuestCpu {
    /// The vendor that CPUID names.
    pub vendor: Vendor,
    /// The virtual PMU; none under `--pmu none`.
    pub pmu: Option<PmuModel>,
}

impl RunConfig {
    /// Whether `engine` has all that was asked for.
    ///
    /// # Errors
    /// The first option that it has not, why not, and what to do.
    pub fn fits(&self, engine: Engine) -> Result<(), ForeignOption> {
        engine::foreign(self, engine).map_or(Ok(()), Err)
    }

    /// The vendor that stands for `--cpu-vendor host` where no host's processor runs the guest.
    #[must_use]
    pub fn vendor_without_host(&self) -> Vendor {
        engine::vendor_without_host(self)
    }

    /// How many counters each guest may use at most: those of its PMU model within the
    /// budget. `None` without a PMU.
    ///
    /// # Errors
    /// As [`RunConfig::guest_cpu`].
    pub fn guest_counters(&self, host: Vendor) -> Result<Option<PerKind>, ConfigError> {
        let there = self.guest_cpu(host)?.pmu.map(|model| model.counts());
        let most = self.budget.map_or(PerKind::ALL, BudgetChoice::most);
        Ok(there.map(|there| there.min_of_each(most)))
    }

    /// Decides about the guest's CPU, given the host's vendor.
    ///
    /// # Errors
    /// The processor or the PMU model is not one of the guest CPU's vendor, or the two do
    /// not fit.
    pub fn guest_cpu(&self, host: Vendor) -> Result<GuestCpu, ConfigError> {
        let vendor = match self.cpu_vendor {
            CpuVendor::Host => host,
            CpuVendor::Amd => Vendor::Amd,
            CpuVendor::Intel => Vendor::Intel,
        };
        if let Some(identity) = self.cpu_model.filter(|it| it.vendor() != vendor) {
            return Err(ConfigError::IdentityVendor {
                name: identity.name(),
                own: identity.vendor(),
                cpu: vendor,
            });
        }
        let pmu = match &self.pmu {
            PmuChoice::None => None,
            PmuChoice::Auto => Some(match self.cpu_model {
                Some(identity) => identity.pmu()?,
                None => PmuModel::default_for(vendor),
            }),
            PmuChoice::Model(model) if model.vendor() == vendor => Some(model.clone()),
            PmuChoice::Model(model) => {
                return Err(ConfigError::VendorMismatch {
                    model: model.name(),
                    pmu: model.vendor(),
                    cpu: vendor,
                });
            }
        };
        let pmu = match (pmu, self.cpu_model) {
            (Some(pmu), Some(identity)) => Some(events_of(identity, pmu)?),
            (pmu, _) => pmu,
        };
        Ok(GuestCpu { vendor, pmu })
    }
}

/// The PMU model with the event codes of a processor; one with codes that somebody chose
/// keeps them.
fn events_of(identity: Identity, model: PmuModel) -> Result<PmuModel, ConfigError> {
    let (name, chosen) = (model.name(), !model.has_usual_events());
    let own = model.clone().with_events(identity.events());
    match own {
        Some(_) if chosen => Ok(model),
        Some(own) => Ok(own),
        None => Err(ConfigError::IdentityEvents {
            name: identity.name(),
            model: name,
            right: identity.pmu()?.name(),
        }),
    }
}
