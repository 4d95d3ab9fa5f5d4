//! What travels between the server and the threads that run vCPUs: jobs there,
//! reports and views back.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use arbiter::{Cookie, CounterSet, PerKind};
use perfmon_abi::wire::budget::{BudgetChange, BudgetInfo};
use perfmon_abi::wire::info::{ReservedInfo, VcpuState};
use perfmon_abi::wire::pause::PauseInfo;
use perfmon_abi::wire::pcr::{PcrAct, PcrInfo};
use perfmon_abi::wire::{Call, Refusal};
use pmu_virt::perfmon::{
    AttachedContext, ContextId, GuestLimit, NotLoaded, Phase, Quantities, VirtualPmd,
};
use pmu_virt::{CorePmu, HolderReport, VcpuPmu};
use rustix::event::{EventfdFlags, eventfd};
use serde::Serialize;

use crate::buffer::SharedBuffer;
use crate::kernel::FoundKernel;

/// What a context is, or is to be, attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// The vCPU of this number.
    Vcpu(usize),
    /// The core of this number. Where vCPUs share no cores, it is the thread of
    /// the vCPU of this number.
    Core(usize),
}

impl Target {
    pub(crate) fn number(self) -> usize {
        match self {
            Target::Vcpu(number) | Target::Core(number) => number,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Vcpu(number) => write!(f, "vCPU {number}"),
            Target::Core(number) => write!(f, "core {number}"),
        }
    }
}

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Work {
    /// Attach the context, with this set first.
    Load(Box<AttachedContext>, u16),
    /// A command for the context.
    Call(Call),
    /// Detach the context.
    Unload,
    /// Its lease on the host's counters holds so many now.
    Lease(usize),
    /// Ask the owners of the vCPU's counters for room for the context.
    Ask(Ask),
    /// Tell what there is. This work is for no context ([`INSPECTION`]).
    Inspect,
    /// Show or administer what the guest of the vCPU may use and what its layers have
    /// reserved. This work is for no context either; the number tells requests apart.
    Administer(u64, Box<Administration>),
}

/// What is asked of the owners of a vCPU's counters, for a context.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ask {
    /// To keep to this. `is_there`: the vCPU can be on the context's core.
    KeepTo { limit: GuestLimit, is_there: bool },
    /// Nothing any more: nobody waits for the answer.
    NoMore,
    /// Nothing any more: they may have these back.
    GiveBack(GivenUp),
}

/// Counters of a vCPU that their owners gave up, and what gives them back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GivenUp {
    pub(crate) counters: CounterSet,
    pub(crate) cookie: Cookie,
}

/// What an administrator asks of a vCPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Administration {
    /// About counter reservations.
    Pcr(PcrAct),
    /// About the budget: a change of it, or nothing but the answer.
    Budget(Option<BudgetChange>),
    /// Whether it stands from now on, or nothing but the answer.
    Pause(Option<bool>),
    /// The VM's lease on the host's counters holds so many now; who has reserved more is
    /// told so many milliseconds before. No tool asks for this.
    Lease(PerKind, u32),
    /// What the vCPU did so far. No tool asks for this.
    Figures,
}

impl Administration {
    /// Whether it leaves everything as it is.
    pub(crate) fn only_looks(&self) -> bool {
        matches!(
            self,
            Self::Pcr(PcrAct::Show) | Self::Budget(None) | Self::Pause(None) | Self::Figures
        )
    }
}

/// What there is then.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Administered {
    Pcr(Box<PcrInfo>),
    Budget(Box<BudgetInfo>),
    Pause(PauseInfo),
    Lease,
    Figures(VcpuFigures),
}

/// What a vCPU did since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VcpuFigures {
    /// Exits to the VMM.
    pub exits: u64,
    /// Those for RDMSR and WRMSR.
    pub traps: u64,
    pub rdpmc_traps: u64,
    /// PMIs that were raised in the guest.
    pub pmis: u64,
}

impl VcpuFigures {
    pub(crate) fn of(values: &dyn Quantities) -> Self {
        let read = |which| values.read(which).unwrap_or(0);
        VcpuFigures {
            exits: read(VirtualPmd::Exits),
            traps: read(VirtualPmd::MsrExits),
            rdpmc_traps: read(VirtualPmd::RdpmcExits),
            pmis: read(VirtualPmd::Pmis),
        }
    }

    /// The sums of both.
    pub(crate) fn plus(self, other: Self) -> Self {
        VcpuFigures {
            exits: self.exits + other.exits,
            traps: self.traps + other.traps,
            rdpmc_traps: self.rdpmc_traps + other.rdpmc_traps,
            pmis: self.pmis + other.pmis,
        }
    }
}

/// Stands for a context where a job is for none.
pub(crate) const INSPECTION: ContextId = ContextId(0);

/// What became of a job.
#[derive(Debug)]
pub(crate) enum Done {
    /// The context is attached, or comes back.
    Loaded(Result<(), NotLoaded>),
    /// The command with its argument as it is now.
    Called(Call, Result<(), Refusal>),
    /// The context is detached; `None` if it was not attached.
    Unloaded(Option<Box<AttachedContext>>),
    /// What the owners gave up, nothing if that was not needed; or why they did not.
    Asked(Result<Option<GivenUp>, String>),
    /// What is asked no more, was given back, or is leased now.
    Settled,
    /// What there is.
    Inspected(Box<View>),
    /// What there is now, for the request of this number.
    Administered(u64, Result<Administered, Refusal>),
    /// Nobody does it: the vCPU or core has ended.
    Undone(Work),
}

/// What threads tell the server.
#[derive(Debug)]
pub(crate) enum Report {
    /// A job for this context and this vCPU or core came back.
    Job(ContextId, Target, Done),
    /// This vCPU or core has ended, and gives the contexts back that it had.
    Ended(Target, Vec<AttachedContext>),
    /// A search for the guest's kernel has ended.
    Kernel(FoundKernel),
    /// A sampling buffer was made for the request of this number, or there is none.
    Buffer(u64, Result<SharedBuffer, Refusal>),
}

/// An event descriptor that wakes the server's thread: readable from a
/// notification until it is drained.
#[derive(Debug)]
pub(crate) struct Notifier(OwnedFd);

impl Notifier {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(eventfd(0, flags)?))
    }

    /// Never waits. If the counter is full, the descriptor is readable anyway.
    pub(crate) fn notify(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    pub(crate) fn drain(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8][..]);
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Where reports go.
#[derive(Clone, Debug)]
pub(crate) struct Outbox {
    pub(crate) reports: Sender<Report>,
    pub(crate) notifier: Arc<Notifier>,
}

impl Outbox {
    /// One, and where its reports arrive.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(crate) fn new() -> io::Result<(Self, Receiver<Report>)> {
        let (reports, received) = channel();
        let notifier = Arc::new(Notifier::new()?);
        Ok((Outbox { reports, notifier }, received))
    }

    pub(crate) fn send(&self, report: Report) {
        // Without a server nobody needs it, and what was sent is dropped.
        if self.reports.send(report).is_ok() {
            self.notifier.notify();
        }
    }
}

/// A job, until it is done. One that is dropped comes back undone, so no job is
/// ever lost.
#[derive(Debug)]
pub struct Job {
    pub(crate) context: ContextId,
    pub(crate) target: Target,
    /// `None` once it is done.
    pub(crate) work: Option<Work>,
    pub(crate) outbox: Outbox,
}

impl Job {
    /// The vCPU or core that the job is about.
    #[must_use]
    pub fn target(&self) -> Target {
        self.target
    }

    /// The job only asks what there is. Answer it with
    /// [`serve_inspection`](crate::serve_inspection).
    #[must_use]
    pub fn is_inspection(&self) -> bool {
        matches!(self.work, Some(Work::Inspect))
    }

    /// The job is about what the guest of a vCPU may use or has reserved, for an
    /// administrator or for a tool. Leases,
    /// budgets and revocations that are due by now should have ended before it.
    #[must_use]
    pub fn is_administration(&self) -> bool {
        matches!(self.work, Some(Work::Administer(..) | Work::Ask(_)))
    }

    /// The job asks the owners of a vCPU's counters something. Do it with
    /// [`ControlEndpoint::ask_owners`](crate::ControlEndpoint::ask_owners).
    #[must_use]
    pub fn is_question(&self) -> bool {
        matches!(self.work, Some(Work::Ask(_)))
    }

    /// Does the job: `act` gets the work and returns what came of it.
    pub(crate) fn act(mut self, act: impl FnOnce(ContextId, Work) -> Done) {
        if let Some(work) = self.work.take() {
            let done = act(self.context, work);
            let report = Report::Job(self.context, self.target, done);
            self.outbox.send(report);
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            let report = Report::Job(self.context, self.target, Done::Undone(work));
            self.outbox.send(report);
        }
    }
}

/// What one thread has.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Its core; none where the core is not its own.
    pub cores: Vec<CoreView>,
    /// The vCPUs that it runs.
    pub vcpus: Vec<VcpuView>,
}

/// A vCPU.
#[derive(Clone, Debug)]
pub struct VcpuView {
    pub(crate) vcpu: usize,
    pub(crate) state: VcpuState,
    pub(crate) halted: Option<bool>,
    pub(crate) contexts: Vec<ContextView>,
    pub(crate) reserved: Vec<ReservedInfo>,
}

/// A core.
#[derive(Clone, Debug)]
pub struct CoreView {
    pub(crate) core: usize,
    /// The vCPU that has the counters.
    pub(crate) vcpu: Option<usize>,
    pub(crate) contexts: Vec<ContextView>,
    pub(crate) holders: Vec<HolderReport>,
    pub(crate) free: Option<u32>,
}

/// An attached context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContextView {
    pub(crate) id: ContextId,
    pub(crate) phase: Phase,
    pub(crate) started: bool,
    pub(crate) preempted: bool,
    pub(crate) sets: usize,
    pub(crate) active_set: u16,
    pub(crate) dropped: u64,
}

impl ContextView {
    fn of(hosted: &AttachedContext) -> Self {
        let context = hosted.context();
        Self {
            id: hosted.id(),
            phase: context.phase(),
            started: context.is_started(),
            preempted: hosted.is_preempted(),
            sets: context.set_count(),
            active_set: context.active_set(),
            dropped: context.account().dropped,
        }
    }
}

impl VcpuView {
    /// vCPU number `vcpu`. If nothing blocks it, it is in state `otherwise`.
    #[must_use]
    pub fn of(vcpu: usize, pmu: Option<&VcpuPmu>, otherwise: VcpuState) -> Self {
        let state = match pmu {
            Some(pmu) if pmu.hosts().is_paused() => VcpuState::Paused,
            Some(pmu) if pmu.hosts().is_blocked() => VcpuState::Blocked,
            _ => otherwise,
        };
        Self {
            vcpu,
            state,
            halted: None,
            contexts: pmu.map_or_else(Vec::new, |pmu| {
                pmu.hosts().contexts().map(ContextView::of).collect()
            }),
            reserved: pmu.map(reserved).unwrap_or_default(),
        }
    }

    /// The same, with what is known of whether it is halted.
    #[must_use]
    pub fn halted(self, halted: bool) -> Self {
        Self {
            halted: Some(halted),
            ..self
        }
    }
}

/// Who has reserved counters of a vCPU's PMU.
fn reserved(pmu: &VcpuPmu) -> Vec<ReservedInfo> {
    let Some(bank) = pmu.claims().unit().map(|unit| unit.bank()) else {
        return Vec::new();
    };
    let info = |counter| {
        Some(ReservedInfo {
            layer: bank.reservation(counter)?.owner.to_string(),
            counter: counter.to_string(),
        })
    };
    bank.held().iter().filter_map(info).collect()
}

impl CoreView {
    /// Core number `core` with counters `pmu`, which `vcpu` has.
    #[must_use]
    pub fn of(core: usize, vcpu: Option<usize>, pmu: Option<&CorePmu>) -> Self {
        Self {
            core,
            vcpu,
            contexts: pmu.map_or_else(Vec::new, |pmu| {
                pmu.host_contexts().map(ContextView::of).collect()
            }),
            holders: pmu.map(CorePmu::holders).unwrap_or_default(),
            free: pmu.map(CorePmu::free_slots),
        }
    }
}
