//! The lease of a VM on the host's counters: who is asked for it before the VM starts, and what
//! becomes of a refusal.

mod audit;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arbiter::PerKind;
use arbiter_host::CpuSet;
use pmu_virt::Source;
use umpire_arbiterd::OwnLeases;
use umpire_lease::{Arbiter, AtSocket, CallError, Leases, Reason, Request};
use vmm::audit::AuditOut;
use vmm::config::{BudgetChoice, RunConfig};
use vmm::counters::on_this_host;
use vmm::cpuid::host_vendor;
use vmm::kvm::Host;
use vmm::lease::{Enough, LeasePlan, NoLease, Patience, VmLease};
use vmm::sys::allowed_cpus;

use crate::exit::UserError;
use crate::host::stated_pmu;
use audit::AuditLines;

/// The word of `--audit` for the audit of the host.
pub const AUDIT_OF_HOST: &str = "arbiter";

/// Whom a VM asks for physical counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Whom {
    /// If a physical PMU counts: the host's arbiter, if one runs, or one of its own.
    #[default]
    Auto,
    /// An arbiter of its own, with the counters that were stated or that are measured.
    Own(Option<BudgetChoice>),
    Nobody,
    /// The arbiter at this socket, whatever counts.
    At(PathBuf),
}

impl Whom {
    /// What a value of `--arbiter` stands for.
    #[must_use]
    pub fn named(path: PathBuf) -> Self {
        match path
            .to_str()
            .map(|word| word.split_once(':').unwrap_or((word, "")))
        {
            Some(("auto", "")) => Whom::Auto,
            Some(("none", "")) => Whom::Nobody,
            Some(("own", "")) => Whom::Own(None),
            Some(("own", words)) => match BudgetChoice::parse(words, false) {
                Some(budget) => Whom::Own(Some(budget)),
                None => Whom::At(path),
            },
            _ => Whom::At(path),
        }
    }
}

/// `--arbiter` and what belongs to it.
#[derive(Clone, Debug, Default)]
pub struct ArbiterChoice {
    /// Who is asked.
    pub whom: Whom,
    /// Whether fewer counters than the PMU has will do at the start. If nobody says so, they
    /// do where no arbiter of the host was asked for.
    pub fewer: Option<bool>,
    /// What the lease is to be like.
    pub terms: Request,
}

/// An arbiter that is asked.
#[derive(Debug)]
enum Asked {
    /// The host's, at this socket.
    Host(PathBuf),
    /// One in this process.
    Own(OwnLeases),
}

impl Asked {
    fn leases(&self) -> Arc<dyn Leases> {
        match self {
            Asked::Host(socket) => Arc::new(AtSocket(socket.clone())),
            Asked::Own(own) => Arc::new(own.clone()),
        }
    }
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Asked::Host(socket) => write!(f, "the arbiter at {}", socket.display()),
            Asked::Own(_) => f.write_str("the VM's own arbiter"),
        }
    }
}

/// Gets the lease that `choice` asks for, if it does, and lets the guest of `config` use no
/// more.
///
/// # Errors
/// There is no arbiter, or it refuses; and what to do.
pub(crate) fn take(
    choice: &ArbiterChoice,
    host: &Host,
    config: &mut RunConfig,
) -> Result<Option<VmLease>, UserError> {
    let lease = lease_of(choice, host, config)?;
    if config.audit.as_deref() == Some(Path::new(AUDIT_OF_HOST)) {
        let Some((Asked::Host(socket), lease)) = &lease else {
            let what = "--audit arbiter: the VM has no lease of the host's arbiter, so nobody takes an audit of it; \
                        give --arbiter SOCKET, or a file";
            return Err(UserError::bad_input(what));
        };
        let lines = AuditLines::new(socket.clone(), lease.number());
        config.audit_out = Some(AuditOut::new(lines));
    }
    Ok(lease.map(|(_, lease)| lease))
}

fn lease_of(
    choice: &ArbiterChoice,
    host: &Host,
    config: &mut RunConfig,
) -> Result<Option<(Asked, VmLease)>, UserError> {
    let Some(guest) = guest_counters(host, config)? else {
        return Ok(None);
    };
    let (cpus, whole_cpus) = cpus(config)?;
    let Some(asked) = asked(choice, config, &cpus)? else {
        return Ok(None);
    };
    let is_own = matches!(asked, Asked::Own(_));
    let enough = if choice.fewer.unwrap_or(is_own) {
        Enough::Some
    } else {
        Enough::All
    };
    let patience = match choice.terms.waits_ms {
        // Nobody makes room but tools, which there are none of yet.
        _ if is_own => Patience::None,
        None => Patience::Notices,
        Some(_) => Patience::Turn,
    };
    let mut terms = choice.terms.clone();
    terms.label.get_or_insert_with(|| name(config));
    let plan = LeasePlan {
        leases: asked.leases(),
        terms,
        cpus,
        whole_cpus,
        guest,
    };
    match VmLease::take(plan, enough, patience) {
        Ok(lease) => {
            lease.bound(config);
            Ok(Some((asked, lease)))
        }
        Err(NoLease::Nothing(why)) if is_own && choice.whom == Whom::Auto => {
            log::info!("no lease on the host's counters: {why}");
            Ok(None)
        }
        Err(NoLease::Nothing(why) | NoLease::NotEnough(why)) => Err(refusal(&why, &asked, enough)),
    }
}

/// The counters of the guest's PMU; `None`: it has none.
fn guest_counters(host: &Host, config: &RunConfig) -> Result<Option<PerKind>, UserError> {
    let supported = host.supported_cpuid().map_err(UserError::bad_input)?;
    let vendor = host_vendor(&supported).map_err(UserError::bad_input)?;
    let guest = config.guest_counters(vendor);
    let guest = guest.map_err(UserError::bad_input)?;
    Ok(guest.filter(|guest| guest.programmable + guest.fixed > 0))
}

/// The arbiter that is to be asked, if one is.
fn asked(
    choice: &ArbiterChoice,
    config: &RunConfig,
    cpus: &CpuSet,
) -> Result<Option<Asked>, UserError> {
    let own = |stated: Option<BudgetChoice>| -> Result<Asked, UserError> {
        let stated = stated.map(stated_pmu).transpose()?;
        let own = OwnLeases::start(stated, cpus).map_err(UserError::bad_input)?;
        log::info!("the VM has an arbiter of its own");
        Ok(Asked::Own(own))
    };
    let usual = match &choice.whom {
        Whom::Nobody => return Ok(None),
        Whom::At(socket) => return Ok(Some(Asked::Host(socket.clone()))),
        Whom::Own(stated) => return own(*stated).map(Some),
        Whom::Auto => umpire_lease::default_socket(),
    };
    let is_physical = |source: &Source| matches!(source, Source::Perf | Source::Msr { .. });
    if !on_this_host(&config.counters).iter().any(is_physical) {
        return Ok(None);
    }
    match Arbiter::connect(&usual) {
        Err(CallError::NoArbiter { .. }) => {
            let own = own(None).inspect_err(|error| {
                log::info!("no lease on the host's counters: {error}");
            });
            Ok(own.ok())
        }
        _ => Ok(Some(Asked::Host(usual))),
    }
}

/// The host CPUs on which vCPUs may run, and whether the VM has the counters of these for
/// itself: whoever writes the registers shares them with nobody.
fn cpus(config: &RunConfig) -> Result<(CpuSet, bool), UserError> {
    let allowed = || {
        let failed = |error| UserError::bad_input(format!("sched_getaffinity failed: {error}"));
        allowed_cpus().map_err(failed)
    };
    let number = |cpu: usize| u32::try_from(cpu).ok();
    let registers = config.counters.iter().find_map(|source| match source {
        Source::Msr { cpu, .. } => Some(*cpu),
        _ => None,
    });
    if let Some(asked) = registers {
        let first = match (asked, &config.pin) {
            (Some(cpu), _) => Some(cpu),
            (None, Some(list)) => list.of(0).and_then(number),
            (None, None) => allowed()?.first().copied().and_then(number),
        };
        return Ok((first.into_iter().collect(), true));
    }
    let threads = config.cores.map_or(config.cpus, |plan| plan.cores);
    let cpus: Vec<usize> = match &config.pin {
        Some(list) => (0..threads.into())
            .filter_map(|thread| list.of(thread))
            .collect(),
        None => allowed()?,
    };
    Ok((cpus.into_iter().filter_map(number).collect(), false))
}

/// What people call the VM.
fn name(config: &RunConfig) -> String {
    let kernel = config.kernel.file_name().unwrap_or_default();
    format!("vm {}", kernel.to_string_lossy())
}

fn refusal(error: &CallError, asked: &Asked, enough: Enough) -> UserError {
    const WITHOUT: &str = "; or start the VM without a lease (--arbiter none)";
    let next = match error {
        CallError::Refused(why) => match why.reason {
            Reason::Held
            | Reason::Outside
            | Reason::Kept
            | Reason::Behind
            | Reason::OverMaximum
            | Reason::MoreThanThereIs
                if enough == Enough::All =>
            {
                "; or let the VM start with fewer (--arbiter-shortage fewer, or --budget), or wait \
                 (--arbiter-terms wait)"
            }
            Reason::Held | Reason::Outside | Reason::Kept | Reason::Behind => {
                "; or let the VM wait (--arbiter-terms wait)"
            }
            Reason::TooLong => " (--arbiter-terms for-ms=N)",
            Reason::Priority | Reason::NoGuarantees | Reason::MustBePreemptible => {
                " (--arbiter-terms)"
            }
            _ => WITHOUT,
        },
        _ => WITHOUT,
    };
    UserError::bad_input(match error {
        CallError::NoArbiter { .. } => format!("--arbiter {error}{next}"),
        CallError::Refused(_) => {
            format!("{asked} refuses the VM's counters: {error}{next}")
        }
        _ => format!("{asked} gives the VM no counters: {error}{next}"),
    })
}
