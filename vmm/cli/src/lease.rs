//! The lease of a VM on the host's counters: asked for before the VM starts, and followed by
//! what its guest may use.

use std::path::{Path, PathBuf};
use std::thread::Builder;
use std::time::{Duration, Instant};

use arbiter::PerKind;
use arbiter::host::CpuSet;
use pmu_virt::Source;
use umpire_lease::{
    Arbiter, CallError, Counters, Figure, Keeper, News, NoReply, Place, ReleaseIn, ReportIn,
    Request, WhoIn, WhoOut,
};
use vmm::config::{BudgetChoice, RunConfig};
use vmm::counters::on_this_host;
use vmm::cpuid::host_vendor;
use vmm::kvm::Host;
use vmm::sys::allowed_cpus;
use vmm_control::LeaseLine;

use crate::exit::UserError;

/// Between two tries of what cannot be done now: to get a new lease for one that was taken
/// away, or to let the guest use all of it.
const ASKS_AGAIN: Duration = Duration::from_secs(1);
/// Between two reports of what the VM did, for the arbiter's metrics.
const REPORTS: Duration = Duration::from_secs(5);
/// How long a VM that is not to wait is given until who has to make room for it has left.
const NOTICES: Duration = Duration::from_secs(1);
/// Of the notice so much is left to the guest's layers, in percent: what is to be free at
/// its end must be so before.
const LEFT_TO_LAYERS: u64 = 75;

/// Whom a VM asks for physical counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Whom {
    /// The host's arbiter, if one runs and a physical PMU counts.
    #[default]
    Auto,
    /// Nobody.
    Nobody,
    /// The arbiter at this socket, whatever counts.
    At(PathBuf),
}

impl Whom {
    /// What a value of `--arbiter` stands for.
    #[must_use]
    pub fn named(path: PathBuf) -> Self {
        match path.to_str() {
            Some("auto") => Whom::Auto,
            Some("none") => Whom::Nobody,
            _ => Whom::At(path),
        }
    }
}

/// `--arbiter` and what belongs to it.
#[derive(Clone, Debug, Default)]
pub struct ArbiterChoice {
    /// Who is asked.
    pub whom: Whom,
    /// Whether fewer counters than the PMU has will do at the start.
    pub fewer: bool,
    /// What the lease is to be like.
    pub terms: Request,
}

/// The physical counters that a guest's counters want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    /// Programmable ones for its programmable ones.
    programmable: u8,
    /// Fixed-function ones for its fixed-function ones.
    fixed: u8,
    /// Programmable ones for the rest of these: processors of AMD have no others.
    instead: u8,
}

impl Wanted {
    /// What the counters of a guest want of a PMU that has at least so many fixed-function
    /// ones on each CPU.
    fn of(guest: PerKind, fixed: u8) -> Self {
        let fixed = guest.fixed.min(fixed);
        Wanted {
            programmable: guest.programmable,
            fixed,
            instead: guest.fixed - fixed,
        }
    }

    /// In the order in which they are given.
    fn counters(self) -> Vec<Counters> {
        let programmable = |count: u8| Counters::programmable(count.into());
        let all = [
            (self.programmable, programmable(self.programmable)),
            (self.fixed, Counters::fixed(self.fixed.into())),
            (self.instead, programmable(self.instead)),
        ];
        let some = all.into_iter().filter(|(count, _)| *count > 0);
        some.map(|(_, counters)| counters).collect()
    }

    /// What the guest may use of the first `holds` of them.
    fn lets(self, holds: u32) -> PerKind {
        let holds = u8::try_from(holds).unwrap_or(u8::MAX);
        let programmable = holds.min(self.programmable);
        PerKind {
            programmable,
            fixed: (holds - programmable).min(self.fixed + self.instead),
        }
    }
}

/// A lease that the VM has got.
#[derive(Debug)]
pub(crate) struct VmLease {
    keeper: Keeper,
    socket: PathBuf,
    request: Request,
    wanted: Wanted,
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
    let Some(socket) = socket(choice, config) else {
        return Ok(None);
    };
    let supported = host.supported_cpuid().map_err(UserError::bad_input)?;
    let vendor = host_vendor(supported.as_slice()).map_err(UserError::bad_input)?;
    let guest = config
        .guest_counters(vendor)
        .map_err(UserError::bad_input)?;
    let Some(guest) = guest.filter(|guest| guest.programmable + guest.fixed > 0) else {
        return Ok(None);
    };
    let refused = |error: CallError| refusal(&error, &socket, choice);
    let cpus = cpus(config)?;
    let mut arbiter = Arbiter::connect(&socket).map_err(refused)?;
    let who: WhoOut = arbiter.call("Who", &WhoIn { cpu: None }).map_err(refused)?;
    let wanted = Wanted::of(guest, fixed_of_each(&who.places, &cpus));
    let mut request = Request {
        counters: wanted.counters(),
        at_least: choice.fewer.then_some(1),
        cpus: Some(cpus.to_string()),
        scope: Some("thread".to_owned()),
        // It stands for the threads of all vCPUs, which want the same.
        threads: Some(vec![std::process::id()]),
        // What it loses later it has again when it can.
        waits_ms: Some(-1),
        ..choice.terms.clone()
    };
    request.label.get_or_insert_with(|| name(config));
    let mut keeper = Keeper::acquire(&socket, &request, true, None).map_err(refused)?;
    let patience = choice.terms.waits_ms.is_none().then_some(NOTICES);
    wait_for(&mut keeper, patience).map_err(refused)?;
    let holds = wanted.lets(keeper.lease().holds);
    let lease = keeper.lease();
    let (id, held, all) = (lease.id, lease.holds, lease.wants);
    let mut wanted = wanted;
    if held < all {
        // CPUID announces what there is now for good: more would be of no use.
        config.budget = Some(BudgetChoice {
            programmable: Some(holds.programmable),
            fixed: Some(holds.fixed),
            round: true,
        });
        let release = ReleaseIn {
            lease: id,
            generation: Some(lease.generation),
            keep: Some(held),
        };
        let _: NoReply = arbiter.call("Release", &release).map_err(refused)?;
        wanted = Wanted::of(holds, wanted.fixed);
        request.counters = wanted.counters();
    }
    config.lease = Some(holds);
    log::info!("lease {id} on the host's counters: {held} of {all} on CPUs {cpus}");
    // From now on fewer are of use, too: what is too many takes turns.
    request.at_least = Some(1);
    Ok(Some(VmLease {
        keeper,
        socket,
        request,
        wanted,
    }))
}

/// The socket of the arbiter that is to be asked, if one is.
fn socket(choice: &ArbiterChoice, config: &RunConfig) -> Option<PathBuf> {
    let path = match &choice.whom {
        Whom::Nobody => return None,
        Whom::At(path) => return Some(path.clone()),
        Whom::Auto => umpire_lease::default_socket(),
    };
    let is_physical = |source: &Source| matches!(source, Source::Perf | Source::Msr { .. });
    if !on_this_host(&config.counters).iter().any(is_physical) {
        return None;
    }
    match Arbiter::connect(&path) {
        Ok(_) => Some(path),
        Err(error) => {
            log::info!("no lease on the host's counters: {error}");
            None
        }
    }
}

/// The host CPUs on which vCPUs may run.
fn cpus(config: &RunConfig) -> Result<CpuSet, UserError> {
    let cpus = match &config.pin {
        Some(list) => list.iter().collect(),
        None => allowed_cpus()
            .map_err(|error| UserError::bad_input(format!("sched_getaffinity failed: {error}")))?,
    };
    let number = |cpu| u32::try_from(cpu).ok();
    Ok(cpus.into_iter().filter_map(number).collect())
}

/// The fewest fixed-function counters that the first PMU has on one of these CPUs.
fn fixed_of_each(places: &[Place], cpus: &CpuSet) -> u8 {
    let first = places.first().map(|place| &place.pmu);
    let of_first = places.iter().filter(|place| Some(&place.pmu) == first);
    let here = of_first.filter(|place| {
        let shared: Result<CpuSet, _> = place.cpus.parse();
        shared.is_ok_and(|shared| shared.meets(cpus))
    });
    let fewest = here.map(|place| place.fixed).min().unwrap_or(0);
    u8::try_from(fewest).unwrap_or(u8::MAX)
}

/// What people call the VM.
fn name(config: &RunConfig) -> String {
    let kernel = config.kernel.file_name().unwrap_or_default();
    format!("vm {}", kernel.to_string_lossy())
}

/// Waits until the lease holds something, for `patience` at the longest.
fn wait_for(keeper: &mut Keeper, patience: Option<Duration>) -> Result<(), CallError> {
    let until = patience.map(|patience| Instant::now() + patience);
    let mut why = String::new();
    while keeper.lease().holds == 0 {
        while let Some(news) = keeper.hear() {
            match news {
                News::Lost(why) => return Err(CallError::Other(why)),
                News::Event(event) if event.what == "ended" => {
                    return Err(CallError::Other(event.message));
                }
                News::Event(event) => {
                    log::info!("lease {} {}", event.lease.id, event.message);
                    why = event.message;
                }
                News::Away | News::Back | News::NotRenewed(_) => {}
            }
        }
        if until.is_some_and(|until| until <= Instant::now()) {
            return Err(CallError::Other(format!("its request {why}")));
        }
        wait(keeper, until);
    }
    Ok(())
}

/// Waits until there may be news, or until `until`.
fn wait(keeper: &Keeper, until: Option<Instant>) {
    let until = [keeper.due(), until].into_iter().flatten().min();
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    umpire_lease::wait_readable(keeper.connection(), left);
}

fn refusal(error: &CallError, socket: &Path, choice: &ArbiterChoice) -> UserError {
    let next = match error {
        CallError::NoArbiter { .. } => "; or start the VM without a lease (--arbiter none)",
        CallError::Refused(_) | CallError::Other(_) if choice.fewer => {
            "; or --arbiter none, and share without a word"
        }
        CallError::Refused(_) | CallError::Other(_) => {
            "; or let the VM start with fewer (--arbiter-shortage fewer, or --budget)"
        }
        _ => "",
    };
    let socket = socket.display();
    UserError::bad_input(match error {
        CallError::NoArbiter { .. } => format!("--arbiter {error}{next}"),
        _ => format!("the arbiter at {socket} refuses the VM's counters: {error}{next}"),
    })
}

impl VmLease {
    /// Lets the guest behind `line` use what the lease holds, until this process ends.
    pub(crate) fn follow(self, line: LeaseLine) {
        let mut follower = Follower {
            set: self.wanted.lets(self.keeper.lease().holds),
            lease: self,
            line,
            due: None,
            reports: Instant::now(),
        };
        let body = move || {
            loop {
                follower.turn();
            }
        };
        if let Err(error) = Builder::new().name("lease".to_owned()).spawn(body) {
            log::warn!("the lease on the host's counters cannot be followed: {error}");
        }
    }
}

#[derive(Debug)]
struct Follower {
    lease: VmLease,
    line: LeaseLine,
    /// What the guest was told last.
    set: PerKind,
    /// When to try again what failed.
    due: Option<Instant>,
    /// When to report.
    reports: Instant,
}

impl Follower {
    fn turn(&mut self) {
        let keeper = &mut self.lease.keeper;
        while let Some(news) = keeper.hear() {
            let id = keeper.lease().id;
            match news {
                News::Event(event) => match event.what.as_str() {
                    "renewed" => {}
                    "holds" | "spared" | "mended" | "claimed" => {
                        log::info!("lease {id} {}", event.message);
                    }
                    _ => log::warn!("lease {id} {}", event.message),
                },
                // The guest counts on: the arbiter's successor gives it to nobody else.
                News::Away => log::warn!("the arbiter has gone away; lease {id} is held on"),
                News::Back => log::info!("the arbiter is back, and lease {id} is held"),
                News::Lost(why) => log::warn!("lease {id} is lost: {why}"),
                News::NotRenewed(why) => log::warn!("lease {id} cannot be renewed now: {why}"),
            }
        }
        self.obey();
        if self.lease.keeper.has_ended() && self.ask_again() {
            return;
        }
        if self.reports <= Instant::now() {
            self.report();
        }
        let until = self.due.map_or(self.reports, |due| due.min(self.reports));
        wait(&self.lease.keeper, Some(until));
    }

    /// Tells the arbiter what the VM did, for its metrics.
    fn report(&mut self) {
        self.reports = Instant::now() + REPORTS;
        if self.lease.keeper.connection().is_none() {
            return;
        }
        let now = self.line.figures();
        let figure = |(name, count): (&str, u64)| Figure {
            name: name.to_owned(),
            count,
        };
        let figures = [
            ("exits", now.exits),
            ("traps", now.traps),
            ("rdpmc_traps", now.rdpmc_traps),
            ("pmis", now.pmis),
        ];
        let report = ReportIn {
            lease: self.lease.keeper.lease().id,
            figures: figures.map(figure).to_vec(),
        };
        let told: Result<NoReply, CallError> = Arbiter::connect(&self.lease.socket)
            .and_then(|mut arbiter| arbiter.call("Report", &report));
        if let Err(error) = told {
            log::debug!("the arbiter does not take the VM's figures: {error}");
        }
    }

    /// Lets the guest use what the lease holds, or will hold after a notice.
    fn obey(&mut self) {
        let keeper = &self.lease.keeper;
        let lease = keeper.lease();
        let (holds, grace) = match &lease.leaving {
            _ if keeper.has_ended() => (0, 0),
            Some(leaving) => (leaving.to, leaving.in_ms * LEFT_TO_LAYERS / 100),
            None => (lease.holds, 0),
        };
        let lets = self.lease.wanted.lets(holds);
        if lets == self.set || self.due.is_some_and(|due| Instant::now() < due) {
            return;
        }
        match self
            .line
            .holds(lets, u32::try_from(grace).unwrap_or(u32::MAX))
        {
            Ok(()) => {
                self.set = lets;
                self.due = None;
            }
            Err(refusal) => {
                if self.due.is_none() {
                    log::warn!(
                        "the guest cannot use all of its lease now: {}",
                        refusal.reason
                    );
                }
                self.due = Some(Instant::now() + ASKS_AGAIN);
            }
        }
    }

    /// The lease was taken away. The VM asks anew, and waits for its turn. Returns whether
    /// it has another lease now.
    fn ask_again(&mut self) -> bool {
        if self.due.is_some_and(|due| Instant::now() < due) {
            return false;
        }
        let VmLease {
            socket, request, ..
        } = &self.lease;
        match Keeper::acquire(socket, request, true, None) {
            Ok(keeper) => {
                self.lease.keeper = keeper;
                self.due = None;
                true
            }
            Err(error) => {
                log::debug!("no new lease: {error}");
                self.due = Some(Instant::now() + ASKS_AGAIN);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn per_kind(programmable: u8, fixed: u8) -> PerKind {
        PerKind {
            programmable,
            fixed,
        }
    }

    #[test]
    fn what_a_guest_wants_and_may_use() {
        // The guest's counters, fixed-function ones of the host; what is held, and may be used.
        for (guest, fixed, held) in [
            (
                per_kind(4, 3),
                3,
                vec![(7, (4, 3)), (5, (4, 1)), (3, (3, 0)), (0, (0, 0))],
            ),
            (
                per_kind(4, 3),
                0,
                vec![(7, (4, 3)), (6, (4, 2)), (4, (4, 0))],
            ),
            (per_kind(2, 3), 1, vec![(5, (2, 3)), (3, (2, 1))]),
            (
                per_kind(6, 0),
                3,
                vec![(6, (6, 0)), (200, (6, 0)), (1, (1, 0))],
            ),
        ] {
            let wanted = Wanted::of(guest, fixed);
            let sum: u32 = wanted.counters().iter().filter_map(|one| one.count).sum();
            assert_eq!(
                sum,
                u32::from(guest.programmable + guest.fixed),
                "{wanted:?}"
            );
            for (holds, (programmable, fixed)) in held {
                assert_eq!(
                    wanted.lets(holds),
                    per_kind(programmable, fixed),
                    "{wanted:?}"
                );
            }
        }
    }

    #[test]
    fn fixed_counters_that_each_cpu_has() {
        let place = |pmu: &str, cpus: &str, fixed| Place {
            pmu: pmu.to_owned(),
            cpus: cpus.to_owned(),
            fixed,
            ..Place::default()
        };
        let places = [
            place("cpu_core", "0-3", 4),
            place("cpu_core", "4-7", 3),
            place("cpu_atom", "8", 0),
        ];
        let fixed = |cpus: &str| fixed_of_each(&places, &cpus.parse().unwrap());
        assert_eq!(
            (fixed("0"), fixed("3-4"), fixed("8"), fixed("99")),
            (4, 3, 0, 0)
        );
    }
}
