//! The lease of a VM on the host's counters: who is asked for it before the VM starts, and what
//! becomes of a refusal.

mod audit;
mod follow;
mod plan;
mod tools;

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use arbiter_host::CpuSet;
use pmu_virt::Source;
use tempfile::TempDir;
use umpire_arbiterd::{ArbiterConfig, OwnArbiter};
use umpire_lease::{Arbiter, CallError, Keeper, News, NoReply, ReleaseIn, Request};
use vmm::audit::AuditOut;
use vmm::config::{BudgetChoice, RunConfig};
use vmm::counters::on_this_host;
use vmm::cpuid::host_vendor;
use vmm::kvm::Host;
use vmm::sys::allowed_cpus;

use crate::exit::UserError;
use crate::host::stated_pmu;
use audit::AuditLines;
use plan::{LeasePlan, Wanted, there};

/// The word of `--audit` for the audit of the host.
pub const AUDIT_OF_HOST: &str = "arbiter";

/// The socket of a VM's own arbiter, in a folder of its own.
const OWN_SOCKET: &str = "arbiter";
/// Between two looks of such an arbiter for outsiders: each VM has one.
const OWN_LOOKS: Duration = Duration::from_secs(5);

/// How long a VM that is not to wait is given until who has to make room for it has left.
const NOTICES: Duration = Duration::from_secs(2);

/// Whom a VM asks for physical counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Whom {
    /// If a physical PMU counts: the host's arbiter, if one runs, or one of its own.
    #[default]
    Auto,
    /// An arbiter of its own, with the counters that were stated or that are measured.
    Own(Option<BudgetChoice>),
    /// Nobody.
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

/// A lease that the VM has got.
#[derive(Debug)]
pub(crate) struct VmLease {
    plan: LeasePlan,
    keeper: Keeper,
    /// Its number, for the VM's audit.
    number: Arc<AtomicU64>,
    wanted: Wanted,
    own: Option<Own>,
}

/// An arbiter of the VM's own, and the folder of its socket. Both end with the VM.
#[derive(Debug)]
pub(crate) struct Own {
    _arbiter: OwnArbiter,
    folder: TempDir,
}

impl Own {
    /// Of the counters of `cpus` that are stated, or else that the kernel shows.
    fn start(stated: Option<BudgetChoice>, cpus: CpuSet) -> Result<Self, UserError> {
        let pmus = stated.map(stated_pmu).transpose()?;
        let mut config = ArbiterConfig::default();
        config.pmus.extend(pmus);
        (config.measured, config.looks) = (Some(cpus), OWN_LOOKS);
        let folder = tempfile::Builder::new().prefix("umpire-").tempdir();
        let failed = |error| {
            UserError::bad_input(format!(
                "no folder for the socket of the VM's arbiter: {error}"
            ))
        };
        let folder = folder.map_err(failed)?;
        let arbiter = OwnArbiter::start(config, &folder.path().join(OWN_SOCKET));
        Ok(Own {
            _arbiter: arbiter.map_err(UserError::bad_input)?,
            folder,
        })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join(OWN_SOCKET)
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
        let Some(lease) = lease.as_ref().filter(|lease| lease.own.is_none()) else {
            let what = "--audit arbiter: the VM has no lease of the host's arbiter, so nobody takes an audit of it; \
                        give --arbiter SOCKET, or a file";
            return Err(UserError::bad_input(what));
        };
        let lines = AuditLines::new(lease.plan.socket.clone(), lease.number.clone());
        config.audit_out = Some(AuditOut::new(lines));
    }
    Ok(lease)
}

/// Gives the counters of a lease back but for the first `held`.
fn keep(socket: &Path, lease: u64, held: u32) -> Result<(), CallError> {
    let release = ReleaseIn {
        lease,
        generation: None,
        keep: Some(held),
    };
    let mut arbiter = Arbiter::connect(socket)?;
    let _: NoReply = arbiter.call("Release", &release)?;
    Ok(())
}

fn lease_of(
    choice: &ArbiterChoice,
    host: &Host,
    config: &mut RunConfig,
) -> Result<Option<VmLease>, UserError> {
    let supported = host.supported_cpuid().map_err(UserError::bad_input)?;
    let vendor = host_vendor(supported.as_slice()).map_err(UserError::bad_input)?;
    let guest = config.guest_counters(vendor);
    let guest = guest.map_err(UserError::bad_input)?;
    let Some(guest) = guest.filter(|guest| guest.programmable + guest.fixed > 0) else {
        return Ok(None);
    };
    let (cpus, whole_cpus) = cpus(config)?;
    let Some((socket, own)) = socket(choice, config, &cpus)? else {
        return Ok(None);
    };
    let choice = &ArbiterChoice {
        fewer: Some(choice.fewer.unwrap_or(own.is_some())),
        ..choice.clone()
    };
    let fewer = choice.fewer == Some(true);
    let refused = |error: CallError| refusal(&error, &socket, choice);
    let mut terms = choice.terms.clone();
    terms.label.get_or_insert_with(|| name(config));
    let mut plan = LeasePlan {
        socket: socket.clone(),
        terms,
        cpus,
        whole_cpus,
        guest,
    };
    let places = plan.places().map_err(refused)?;
    let (mut wanted, request) = plan.request(&places, fewer);
    let mut keeper = plan.acquire(&request).map_err(refused)?;
    if own.is_none() {
        wait_for(&mut keeper, choice).map_err(refused)?;
    }
    let lease = keeper.lease();
    let (id, held, all) = (lease.id, lease.holds, lease.wants);
    if held == 0 && choice.whom == Whom::Auto && own.is_some() {
        log::info!("no lease on the host's counters: others have them all");
        return Ok(None);
    }
    if held == 0 || held < all && !fewer {
        // What it holds itself is not in its way.
        drop(keeper);
        return Err(refused(plan.explain(request)));
    }
    let holds = wanted.lets(held);
    if holds != guest {
        // CPUID announces what there is now for good: more would be of no use.
        config.budget = Some(BudgetChoice {
            programmable: Some(holds.programmable),
            fixed: Some(holds.fixed),
            round: true,
        });
        keep(&socket, id, held).map_err(refused)?;
        plan.guest = holds;
        wanted = Wanted::of(holds, there(&places, &plan.cpus).1, true);
    }
    config.lease = Some(holds);
    log::info!("lease {id} on the host's counters: {held} of {all}");
    Ok(Some(VmLease {
        plan,
        keeper,
        number: Arc::new(AtomicU64::new(id)),
        wanted,
        own,
    }))
}

/// The socket of the arbiter that is to be asked, if one is, and the arbiter itself if it is the
/// VM's own.
fn socket(
    choice: &ArbiterChoice,
    config: &RunConfig,
    cpus: &CpuSet,
) -> Result<Option<(PathBuf, Option<Own>)>, UserError> {
    let own = |stated| {
        let own = Own::start(stated, cpus.clone())?;
        let socket = own.socket();
        log::info!("the VM has an arbiter of its own: {}", socket.display());
        Ok((socket, Some(own)))
    };
    let path = match &choice.whom {
        Whom::Nobody => return Ok(None),
        Whom::At(path) => return Ok(Some((path.clone(), None))),
        Whom::Own(stated) => return own(*stated).map(Some),
        Whom::Auto => umpire_lease::default_socket(),
    };
    let is_physical = |source: &Source| matches!(source, Source::Perf | Source::Msr { .. });
    if !on_this_host(&config.counters).iter().any(is_physical) {
        return Ok(None);
    }
    match Arbiter::connect(&path) {
        Err(CallError::NoArbiter { .. }) => Ok(own(None)
            .inspect_err(|error: &UserError| {
                log::info!("no lease on the host's counters: {error}");
            })
            .ok()),
        _ => Ok(Some((path, None))),
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

/// Waits until the lease holds all of it, or with `--arbiter-shortage fewer` and `wait`
/// something. Without `wait` it does so for as long as notices may take.
fn wait_for(keeper: &mut Keeper, choice: &ArbiterChoice) -> Result<(), CallError> {
    let waits = choice.terms.waits_ms.is_some();
    let until = (!waits).then(|| Instant::now() + NOTICES);
    loop {
        while let Some(news) = keeper.hear() {
            match news {
                News::Lost(why) => return Err(CallError::Other(why)),
                News::Event(event) if event.what == "ended" => {
                    return Err(CallError::Other(event.message));
                }
                News::Event(event) if waits => {
                    log::warn!("lease {} {}", event.lease.id, event.message);
                }
                News::Event(_) | News::Away | News::Back | News::NotRenewed(_) => {}
            }
        }
        let lease = keeper.lease();
        let enough = if waits && choice.fewer == Some(true) {
            1
        } else {
            lease.wants
        };
        if lease.holds >= enough || until.is_some_and(|until| until <= Instant::now()) {
            return Ok(());
        }
        wait(keeper.connection(), [keeper.due(), until]);
    }
}

/// Waits until one of these can be read, or one of these moments.
fn wait<'a>(
    what: impl IntoIterator<Item = BorrowedFd<'a>>,
    moments: impl IntoIterator<Item = Option<Instant>>,
) {
    let what: Vec<BorrowedFd<'_>> = what.into_iter().collect();
    let first = moments.into_iter().flatten().min();
    let left = first.map(|first| first.saturating_duration_since(Instant::now()));
    umpire_lease::wait_readable(&what, left);
}

fn refusal(error: &CallError, socket: &Path, choice: &ArbiterChoice) -> UserError {
    const WITHOUT: &str = "; or start the VM without a lease (--arbiter none)";
    let next = match error {
        CallError::Refused(why) => match why.reason.as_str() {
            "held" | "outside" | "kept" | "behind" | "over-maximum" | "more-than-there-is"
                if choice.fewer != Some(true) =>
            {
                "; or let the VM start with fewer (--arbiter-shortage fewer, or --budget), or wait \
                 (--arbiter-terms wait)"
            }
            "held" | "outside" | "kept" | "behind" => "; or let the VM wait (--arbiter-terms wait)",
            "too-long" => " (--arbiter-terms for-ms=N)",
            "priority" | "no-guarantees" | "must-be-preemptible" => " (--arbiter-terms)",
            _ => WITHOUT,
        },
        _ => WITHOUT,
    };
    let socket = socket.display();
    UserError::bad_input(match error {
        CallError::NoArbiter { .. } => format!("--arbiter {error}{next}"),
        CallError::Refused(_) => {
            format!("the arbiter at {socket} refuses the VM's counters: {error}{next}")
        }
        _ => format!("the arbiter at {socket} gives the VM no counters: {error}{next}"),
    })
}
