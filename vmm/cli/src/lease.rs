//! The lease of a VM on the host's counters: asked for before the VM starts, and followed by
//! what its guest may use.

mod audit;

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Builder;
use std::time::{Duration, Instant};

use arbiter::PerKind;
use arbiter::host::CpuSet;
use pmu_virt::Source;
use umpire_lease::{
    Arbiter, CallError, Counters, ExplainIn, ExplainOut, Figure, Keeper, News, NoReply, Place,
    ReleaseIn, ReportIn, Request, WhoIn, WhoOut,
};
use vmm::audit::AuditOut;
use vmm::config::{BudgetChoice, RunConfig};
use vmm::counters::on_this_host;
use vmm::cpuid::host_vendor;
use vmm::kvm::Host;
use vmm::sys::allowed_cpus;
use vmm_control::LeaseLine;

use crate::exit::UserError;
use audit::AuditLines;

/// The word of `--audit` for the audit of the host.
pub const AUDIT_OF_HOST: &str = "arbiter";

/// Between two tries of what cannot be done now: to get a new lease for one that was taken
/// away, or to let the guest use all of it.
const TRIES: Duration = Duration::from_secs(1);
/// Between two reports of what the VM did, for the arbiter's metrics.
const REPORTS: Duration = Duration::from_secs(5);
/// How long a VM that is not to wait is given until who has to make room for it has left.
const NOTICES: Duration = Duration::from_secs(2);
/// Of the notice so much is left to the guest's layers, in percent: what is to be free at
/// its end must be so before.
const LEFT_TO_LAYERS: u32 = 75;

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
    /// What the counters of a guest want where each CPU has at least `there`; no more than
    /// that, if fewer will do.
    fn of(guest: PerKind, there: PerKind, fewer: bool) -> Self {
        let fixed = guest.fixed.min(there.fixed);
        let most = if fewer { there.programmable } else { u8::MAX };
        let programmable = guest.programmable.min(most);
        Wanted {
            programmable,
            fixed,
            instead: (guest.fixed - fixed).min(most - programmable),
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

/// What a VM asks of which arbiter.
#[derive(Debug)]
struct Plan {
    socket: PathBuf,
    /// What the lease is to be like.
    terms: Request,
    /// The host CPUs on which vCPUs may run.
    cpus: CpuSet,
    /// The counters are there for whatever runs on these CPUs (`msr`).
    whole_cpus: bool,
    /// What the guest may use at most.
    guest: PerKind,
}

impl Plan {
    /// The request, on a host with these places.
    fn request(&self, places: &[Place], fewer: bool) -> (Wanted, Request) {
        let (cpus, there) = there(places, &self.cpus);
        let wanted = Wanted::of(self.guest, there, fewer);
        let threads = || vec![std::process::id()];
        let request = Request {
            counters: wanted.counters(),
            // Fewer are of use while the guest runs: its counters take turns.
            at_least: Some(1),
            cpus: Some(cpus.to_string()),
            scope: Some(if self.whole_cpus { "cpu" } else { "thread" }.to_owned()),
            // This one stands for the threads of all vCPUs, which want the same.
            threads: (!self.whole_cpus).then(threads),
            // What it loses later it has again when it can.
            waits_ms: Some(-1),
            ..self.terms.clone()
        };
        (wanted, request)
    }

    fn places(&self) -> Result<Vec<Place>, CallError> {
        let who: WhoOut = Arbiter::connect(&self.socket)?.call("Who", &WhoIn { cpu: None })?;
        Ok(who.places)
    }

    fn acquire(&self, request: &Request) -> Result<Keeper, CallError> {
        Keeper::acquire(&self.socket, request, true, None)
    }

    /// Why it cannot have all that it asked for.
    fn explain(&self, request: Request) -> CallError {
        let whole = Request {
            at_least: None,
            waits_ms: None,
            ..request
        };
        let explain = ExplainIn { request: whole };
        let explained: Result<ExplainOut, CallError> = Arbiter::connect(&self.socket)
            .and_then(|mut arbiter| arbiter.call("Explain", &explain));
        match explained {
            Ok(ExplainOut { why: Some(why), .. }) => CallError::Refused(Box::new(why)),
            Ok(_) => CallError::Other("the counters are free by now; try again".to_owned()),
            Err(error) => error,
        }
    }
}

/// The CPUs of `cpus` that have the first PMU, and the fewest counters that one of them has.
fn there(places: &[Place], cpus: &CpuSet) -> (CpuSet, PerKind) {
    let small = |count: u32| u8::try_from(count).unwrap_or(u8::MAX);
    let first = places.first().map(|place| &place.pmu);
    let mut fewest: Option<PerKind> = None;
    let mut here = CpuSet::default();
    for place in places.iter().filter(|place| Some(&place.pmu) == first) {
        let shared: CpuSet = place.cpus.parse().unwrap_or_default();
        let shared = shared.and(cpus);
        if shared.is_empty() {
            continue;
        }
        shared.iter().for_each(|cpu| here.insert(cpu));
        let there = PerKind {
            programmable: small(place.programmable),
            fixed: small(place.fixed),
        };
        fewest = Some(fewest.map_or(there, |fewest| fewest.min_of_each(there)));
    }
    match fewest {
        Some(fewest) => (here, fewest),
        // The arbiter says what is wrong with these.
        None => (cpus.clone(), PerKind::ALL),
    }
}

/// A lease that the VM has got.
#[derive(Debug)]
pub(crate) struct VmLease {
    plan: Plan,
    keeper: Keeper,
    /// Its number, for the VM's audit.
    number: Arc<AtomicU64>,
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
    let audits = config.audit.as_deref() == Some(Path::new(AUDIT_OF_HOST));
    let Some(socket) = socket(choice, config) else {
        if audits {
            let what = "--audit arbiter: the VM has no lease, so the arbiter takes no audit of it; \
                        give --arbiter SOCKET, or a file";
            return Err(UserError::bad_input(what));
        }
        return Ok(None);
    };
    let supported = host.supported_cpuid().map_err(UserError::bad_input)?;
    let vendor = host_vendor(supported.as_slice()).map_err(UserError::bad_input)?;
    let guest = config.guest_counters(vendor);
    let guest = guest.map_err(UserError::bad_input)?;
    let Some(guest) = guest.filter(|guest| guest.programmable + guest.fixed > 0) else {
        return Ok(None);
    };
    let refused = |error: CallError| refusal(&error, &socket, choice);
    let (cpus, whole_cpus) = cpus(config)?;
    let mut terms = choice.terms.clone();
    terms.label.get_or_insert_with(|| name(config));
    let mut plan = Plan {
        socket: socket.clone(),
        terms,
        cpus,
        whole_cpus,
        guest,
    };
    let places = plan.places().map_err(refused)?;
    let (mut wanted, request) = plan.request(&places, choice.fewer);
    let mut keeper = plan.acquire(&request).map_err(refused)?;
    wait_for(&mut keeper, choice).map_err(refused)?;
    let lease = keeper.lease();
    let (id, held, all) = (lease.id, lease.holds, lease.wants);
    if held == 0 || held < all && !choice.fewer {
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
        let release = ReleaseIn {
            lease: id,
            generation: None,
            keep: Some(held),
        };
        let _: NoReply = Arbiter::connect(&socket)
            .and_then(|mut arbiter| arbiter.call("Release", &release))
            .map_err(refused)?;
        plan.guest = holds;
        wanted = Wanted::of(holds, there(&places, &plan.cpus).1, true);
    }
    config.lease = Some(holds);
    log::info!("lease {id} on the host's counters: {held} of {all}");
    let number = Arc::new(AtomicU64::new(id));
    if audits {
        let lines = AuditLines::new(socket.clone(), number.clone());
        config.audit_out = Some(AuditOut::new(lines));
    }
    Ok(Some(VmLease {
        plan,
        keeper,
        number,
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
        Err(error @ CallError::NoArbiter { .. }) => {
            log::info!("no lease on the host's counters: {error}");
            None
        }
        _ => Some(path),
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
        let enough = if waits && choice.fewer {
            1
        } else {
            lease.wants
        };
        if lease.holds >= enough || until.is_some_and(|until| until <= Instant::now()) {
            return Ok(());
        }
        wait(keeper.connection(), None, [keeper.due(), until]);
    }
}

/// Waits until one of these can be read, or one of these moments.
fn wait<const N: usize>(
    connection: Option<BorrowedFd<'_>>,
    line: Option<BorrowedFd<'_>>,
    moments: [Option<Instant>; N],
) {
    let what: Vec<BorrowedFd<'_>> = connection.into_iter().chain(line).collect();
    let first = moments.into_iter().flatten().min();
    let left = first.map(|first| first.saturating_duration_since(Instant::now()));
    umpire_lease::wait_readable(&what, left);
}

fn refusal(error: &CallError, socket: &Path, choice: &ArbiterChoice) -> UserError {
    const WITHOUT: &str = "; or start the VM without a lease (--arbiter none)";
    let next = match error {
        CallError::Refused(why) => match why.reason.as_str() {
            "held" | "outside" | "kept" | "behind" | "over-maximum" | "more-than-there-is"
                if !choice.fewer =>
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

impl VmLease {
    /// Lets the guest behind `line` use what the lease holds, until this process ends.
    ///
    /// # Errors
    /// The host has no thread left.
    pub(crate) fn follow(self, line: LeaseLine) -> Result<(), UserError> {
        let mut follower = Follower {
            told: (self.wanted.lets(self.keeper.lease().holds), None),
            lease: self,
            line,
            refused: None,
            asks: None,
            silence: String::new(),
            reports: Instant::now(),
            arbiter: None,
        };
        let body = move || {
            loop {
                follower.turn();
            }
        };
        let thread = Builder::new().name("lease".to_owned()).spawn(body);
        let failed = |error| UserError::bad_input(format!("no thread for the VM's lease: {error}"));
        thread.map(|_| ()).map_err(failed)
    }
}

#[derive(Debug)]
struct Follower {
    lease: VmLease,
    line: LeaseLine,
    /// What the guest was told last, and until when its layers have time, if they have.
    told: (PerKind, Option<Instant>),
    /// When those vCPUs are told again that refused.
    refused: Option<Instant>,
    /// When the arbiter is asked again.
    asks: Option<Instant>,
    /// Why there is no lease, as it was logged.
    silence: String,
    /// When to report.
    reports: Instant,
    /// Takes reports.
    arbiter: Option<Arbiter>,
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
                // The guest counts on: with a journal the arbiter's successor gives it to
                // nobody else.
                News::Away => log::warn!("the arbiter has gone away; lease {id} is held on"),
                News::Back => log::info!("the arbiter is back, and lease {id} is held"),
                News::Lost(why) => log::warn!("lease {id} is lost: {why}"),
                News::NotRenewed(why) => log::warn!("lease {id} cannot be renewed now: {why}"),
            }
        }
        self.obey();
        self.hear_vcpus();
        if self.lease.keeper.has_ended() && self.ask_again() {
            return;
        }
        if self.reports <= Instant::now() {
            self.report();
        }
        let asks = self.asks.filter(|_| self.lease.keeper.has_ended());
        let moments = [
            self.lease.keeper.due(),
            self.refused,
            asks,
            Some(self.reports),
        ];
        let connection = self.lease.keeper.connection();
        wait(connection, Some(self.line.as_fd()), moments);
    }

    /// Lets the guest use what the lease holds, or will hold after a notice.
    fn obey(&mut self) {
        let now = Instant::now();
        let keeper = &self.lease.keeper;
        let (holds, at) = match keeper.leaves() {
            _ if keeper.has_ended() => (0, None),
            Some((at, to)) => (to, Some(at)),
            None => (keeper.lease().holds, None),
        };
        let lets = self.lease.wanted.lets(holds);
        let (told, until) = self.told;
        // The notice became shorter, or is over before its time.
        let sooner = until.filter(|until| *until > now);
        let sooner = sooner.is_some_and(|until| at.is_none_or(|at| at < until));
        if lets == told && !sooner {
            return;
        }
        let grace = at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        let grace = (grace * LEFT_TO_LAYERS / 100).as_millis();
        self.line
            .tell(lets, u32::try_from(grace).unwrap_or(u32::MAX));
        self.told = (lets, at);
    }

    /// Vcpus that cannot let their guest use more are told again and again.
    fn hear_vcpus(&mut self) {
        let now = Instant::now();
        if let Some(why) = self.line.hear()
            && self.refused.is_none()
        {
            let why = why.reason;
            log::warn!("the guest cannot use all of its lease now: {why}");
        }
        if !self.line.is_refused() {
            self.refused = None;
        } else if self.refused.is_none_or(|at| at <= now) {
            if self.refused.is_some() {
                self.line.tell_again();
            }
            self.refused = Some(now + TRIES);
        }
    }

    /// Tells the arbiter what the VM did, for its metrics. Vcpus are asked for the next time.
    fn report(&mut self) {
        self.reports = Instant::now() + REPORTS;
        let now = self.line.figures();
        self.line.ask_figures();
        if self.lease.keeper.connection().is_none() || now.exits == 0 {
            return;
        }
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
        let connected = self.arbiter.take();
        let connected = connected.map_or_else(|| Arbiter::connect(&self.lease.plan.socket), Ok);
        let told = connected.and_then(|mut arbiter| {
            arbiter.tell("Report", &report)?;
            Ok(arbiter)
        });
        match told {
            Ok(arbiter) => self.arbiter = Some(arbiter),
            Err(error) => log::debug!("the arbiter does not take the VM's figures: {error}"),
        }
    }

    /// The lease was taken away. The VM asks anew, and waits for its turn. Returns whether
    /// it has another lease now.
    fn ask_again(&mut self) -> bool {
        let now = Instant::now();
        if self.asks.is_some_and(|asks| now < asks) {
            return false;
        }
        self.asks = Some(now + TRIES);
        let plan = &self.lease.plan;
        let asked = plan.places().and_then(|places| {
            let (wanted, request) = plan.request(&places, true);
            Ok((wanted, plan.acquire(&request)?))
        });
        match asked {
            Ok((wanted, keeper)) => {
                self.lease.wanted = wanted;
                self.lease
                    .number
                    .store(keeper.lease().id, Ordering::Relaxed);
                self.lease.keeper = keeper;
                self.silence.clear();
                true
            }
            Err(error) => {
                let why = error.to_string();
                if why != self.silence {
                    log::warn!("the guest has no counters, as there is no new lease: {why}");
                    self.silence = why;
                }
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
        let few = [(7, (4, 3)), (5, (4, 1)), (3, (3, 0)), (0, (0, 0))];
        // The guest's counters, those of each CPU, whether fewer will do; the sum that is
        // asked for; what is held, and may be used.
        for (guest, there, fewer, sum, held) in [
            (per_kind(4, 3), per_kind(4, 3), false, 7, &few[..]),
            (
                per_kind(4, 3),
                per_kind(6, 0),
                false,
                7,
                &[(7, (4, 3)), (6, (4, 2)), (4, (4, 0))],
            ),
            (
                per_kind(4, 3),
                per_kind(6, 0),
                true,
                6,
                &[(6, (4, 2)), (7, (4, 2))],
            ),
            (
                per_kind(2, 3),
                per_kind(9, 1),
                false,
                5,
                &[(5, (2, 3)), (3, (2, 1))],
            ),
            (
                per_kind(6, 0),
                per_kind(4, 3),
                false,
                6,
                &[(6, (6, 0)), (200, (6, 0))],
            ),
            (
                per_kind(6, 0),
                per_kind(4, 3),
                true,
                4,
                &[(4, (4, 0)), (1, (1, 0))],
            ),
        ] {
            let wanted = Wanted::of(guest, there, fewer);
            let asked: u32 = wanted.counters().iter().filter_map(|one| one.count).sum();
            assert_eq!(asked, sum, "{wanted:?}");
            for &(holds, (programmable, fixed)) in held {
                assert_eq!(
                    wanted.lets(holds),
                    per_kind(programmable, fixed),
                    "{wanted:?}"
                );
            }
        }
    }

    #[test]
    fn what_each_cpu_has() {
        let place = |pmu: &str, cpus: &str, fixed| Place {
            pmu: pmu.to_owned(),
            cpus: cpus.to_owned(),
            programmable: 8,
            fixed,
            ..Place::default()
        };
        let places = [
            place("cpu_core", "0-3", 4),
            place("cpu_core", "4-7", 3),
            place("cpu_atom", "8", 0),
        ];
        for (cpus, here, fixed) in [("0", "0", 4), ("3-4", "3-4", 3), ("0-15", "0-7", 3)] {
            let (found, fewest) = there(&places, &cpus.parse().unwrap());
            assert_eq!(
                (found.to_string().as_str(), fewest),
                (here, per_kind(8, fixed))
            );
        }
        // The arbiter says that they are not there.
        let (found, fewest) = there(&places, &"99".parse().unwrap());
        assert_eq!((found.to_string().as_str(), fewest), ("99", PerKind::ALL));
    }
}
