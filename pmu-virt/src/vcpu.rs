//! One virtual CPU's PMU: registers, grant, logical counters, and the core
//! whose physical counters count for them.

mod access;
mod backing;
mod block;
mod budget;
mod counting;
mod hosting;
mod ibs;
mod ibs_contexts;
mod pebs;
mod placing;
mod pmi;
mod report;
mod reserved;
mod saved;
mod switch;
mod taken;
mod times;
mod uncounted;

pub use backing::OtherCores;
pub use ibs::IbsDue;
pub use placing::Oversubscribe;
pub use pmi::{PmiDue, PmiRequest};
pub use report::CounterReport;
pub use reserved::Reservations;
pub use switch::Needs;
use taken::Taken;

use std::cell::Cell;
use std::sync::Arc;

use arbiter::{CounterId, CounterSet, Grant, PcrRegister};
use perfmon::ContextId;
use pmu_model::{
    Constraint, CountRequest, IbsKind, LossReason, MAX_FIXED, MAX_PROGRAMMABLE, MsrIndex, OwnerId,
    PmuModel, Progress, Provenance, Ticks, Tsc, UnavailableReason,
};

use crate::attached::ContextGroup;
use crate::core_pmu::CorePmu;
use crate::slot_bank::SlotLease;
use crate::throttle::PmiThrottle;
use ibs::Ibs;
use pebs::PebsState;
use placing::Multiplexer;
use pmi::{Freeze, PendingPmi};
use report::Snapshot;
use times::Times;
use uncounted::Uncounted;

/// What a read comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The value to give to the guest.
    Value(u64),
    /// The processor's own value of the MSR, in which the bits `ours` are those of
    /// `value`. Only for [`PmuModel::shared_msrs`].
    Merge {
        /// Bits that are not the processor's.
        ours: u64,
        /// What they are.
        value: u64,
    },
    /// #GP(0).
    Gp,
    /// The index belongs to no register of this PMU.
    NotHandled,
}

/// What a write comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The write took place (reserved bits may have been dropped).
    Done,
    /// #GP(0); nothing changed.
    Gp,
    /// The index belongs to no register of this PMU.
    NotHandled,
}

/// A trapped RDMSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsrRead {
    /// What it comes to.
    pub outcome: ReadOutcome,
    /// The register yields random bits that may become a cookie: they must not be
    /// seen in logs, traces and tests.
    pub secret: bool,
}

/// A trapped WRMSR, with everything that follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsrWrite {
    /// What it comes to, if the processor takes `rest`.
    pub outcome: WriteOutcome,
    /// A part that belongs to the processor; nothing has changed yet. If the
    /// processor takes it, [`VcpuPmu::rest_taken`] completes the write; if not,
    /// the guest gets #GP(0). Only for [`PmuModel::shared_msrs`].
    pub rest: Option<u64>,
    /// It took place and is one that a guest does before it reads counts: it
    /// starts a counter or gives access to one, or is a step towards that.
    pub starts_counting: bool,
    /// It took place and set a count, which may be read whether or not it is started.
    pub sets_count: bool,
    /// The value is a cookie, which must not be seen in logs, traces and tests.
    pub secret: bool,
}

impl MsrRead {
    /// A read of `msr` where there is no PMU.
    pub fn without_pmu(msr: MsrIndex) -> Self {
        MsrRead {
            outcome: ReadOutcome::Gp,
            secret: matches!(PcrRegister::decode(msr.0), Some(PcrRegister::Random)),
        }
    }
}

impl MsrWrite {
    /// A write of `msr` where there is no PMU.
    pub fn without_pmu(msr: MsrIndex) -> Self {
        MsrWrite {
            secret: block::is_key(PcrRegister::decode(msr.0)),
            ..WriteOutcome::Gp.into()
        }
    }
}

impl From<WriteOutcome> for MsrWrite {
    fn from(outcome: WriteOutcome) -> Self {
        MsrWrite {
            outcome,
            rest: None,
            starts_counting: false,
            sets_count: false,
            secret: false,
        }
    }
}

const COUNTERS: usize = (MAX_PROGRAMMABLE + MAX_FIXED) as usize + IbsKind::ALL.len();

/// A counter as the guest sees it.
#[derive(Debug, Default)]
struct Logical {
    /// What its control asks for, decoded; `None` until that is written.
    request: Option<CountRequest>,
    /// Count at the last settlement, always within the counter's width.
    value: u64,
    /// Events since the guest programmed it.
    counted: u64,
    /// The physical counter that counts for it.
    lease: Option<SlotLease>,
    /// When it was to count, and when it did.
    times: Times,
    /// How its events were counted, as told at the last settlement.
    provenance: Option<Provenance>,
    /// Why they are no longer exact, as told when it last left a place.
    loss: Option<LossReason>,
    /// What it was to count when it was taken from its owner; told until another event
    /// is selected.
    taken: Option<CountRequest>,
    unavailable: Option<UnavailableReason>,
    /// The core of [`VcpuPmu::bank`] has no source for the event, and need not be
    /// asked again. Another core may have one.
    dead: Option<UnavailableReason>,
}

impl Logical {
    /// Whether it counts while the guest runs.
    #[inline]
    fn is_running(&self) -> bool {
        self.lease.as_ref().is_some_and(SlotLease::is_running)
    }
}

/// One vCPU's PMU. Owned by the thread that runs the vCPU.
///
/// Accesses take place between [`Progress::Left`] and [`Progress::Entered`].
/// Where physical counters suffice, only `new`, `report` and a change of cores
/// allocate.
#[derive(Debug)]
pub struct VcpuPmu {
    owner: OwnerId,
    model: PmuModel,
    /// It is switched in: what is done to it is done on that core.
    attached: bool,
    /// The slots that it was switched in to last.
    bank: Option<u64>,
    grant: Grant,
    /// Its budget has changed while it was on no core.
    budget_due: bool,
    reservations: Option<Box<Reservations>>,
    /// The other cores, if the scheduler moves it there.
    others: Option<Arc<dyn OtherCores>>,
    /// Reserved counters whose physical ones the host's kernel has taken.
    taken: Taken,
    /// Reserved counters whose owners know that what they select cannot be counted.
    unbacked: CounterSet,
    /// What can count most events of the guest's on the core where it was last; none
    /// before that was needed.
    any: Cell<Option<Constraint>>,
    select: [u64; MAX_PROGRAMMABLE as usize],
    fixed_control: u64,
    global_control: u64,
    global_status: u64,
    freeze: Freeze,
    pebs: PebsState,
    counters: [Logical; COUNTERS],
    /// Every counter that has a place, or is wanted and not dead, is among these.
    /// Switches look at no others.
    active: CounterSet,
    pmi: PendingPmi,
    /// Instruction-based sampling, where the model has it.
    ibs: Option<Box<Ibs>>,
    needs: Needs,
    /// [`VcpuPmu::is_programmed`].
    programmed: bool,
    /// How long the guest has run, halted time left out.
    ran: Ticks,
    /// TSC at entry, while the guest runs.
    entered: Option<Tsc>,
    /// TSC when the guest was last left; the clock of the reservations.
    left: Tsc,
    multiplexer: Multiplexer,
    snapshot: Snapshot,
    uncounted: Uncounted,
    /// Its host contexts.
    hosts: ContextGroup,
    /// It is on a core, and it or the core has host contexts.
    hosting: bool,
    /// A tool keeps it out of its guest.
    paused: bool,
    /// Slots of contexts that were unloaded while the vCPU was parked.
    orphans: Vec<(ContextId, Vec<SlotLease>)>,
}

impl VcpuPmu {
    /// A PMU in its reset state, on no core yet. No other vCPU on its cores
    /// may have the same `owner`.
    pub fn detached(owner: OwnerId, model: PmuModel, grant: Grant) -> Self {
        let global_control = model.global_control_reset();
        let ibs = Ibs::of(&model, PmiThrottle::new(Ticks(0)));
        VcpuPmu {
            owner,
            model,
            attached: false,
            bank: None,
            grant,
            budget_due: false,
            reservations: None,
            others: None,
            unbacked: CounterSet::EMPTY,
            any: Cell::new(None),
            taken: Taken::default(),
            select: [0; MAX_PROGRAMMABLE as usize],
            fixed_control: 0,
            global_control,
            global_status: 0,
            freeze: Freeze::default(),
            pebs: PebsState::default(),
            counters: Default::default(),
            active: CounterSet::EMPTY,
            pmi: PendingPmi::default(),
            ibs,
            needs: Needs::default(),
            programmed: false,
            ran: Ticks(0),
            entered: None,
            left: Tsc(0),
            multiplexer: Multiplexer::default(),
            snapshot: Snapshot::default(),
            uncounted: Uncounted::default(),
            hosts: ContextGroup::default(),
            hosting: false,
            paused: false,
            orphans: Vec::new(),
        }
    }

    /// The same PMU with this answer to more counters than the core has; the
    /// answer of a new one is [`Oversubscribe::Refuse`].
    #[must_use]
    pub fn with_oversubscription(mut self, answer: Oversubscribe) -> Self {
        self.multiplexer = Multiplexer::new(answer);
        self
    }

    /// Brings every register to its reset value, stops and frees every
    /// physical counter of the guest, and forgets pending PMIs and reservations.
    /// The phase of the firmware is the machine's, which restarts it itself. Host
    /// contexts go on: the guest does not know of them.
    pub fn reset(&mut self, core: Option<&mut CorePmu>) {
        self.reset_registers(&mut self.here(core));
        if let Some(reservations) = &mut self.reservations {
            reservations.unit.reset();
        }
        self.note_holdings();
    }

    fn reset_registers(&mut self, here: &mut Here<'_>) {
        for counter in &mut self.counters {
            if let (Some(lease), Some(core)) = (&counter.lease, &mut *here) {
                core.bank.release(lease);
            }
            *counter = Logical::default();
        }
        self.select = [0; MAX_PROGRAMMABLE as usize];
        self.fixed_control = 0;
        self.global_control = self.model.global_control_reset();
        self.global_status = 0;
        self.freeze = Freeze::default();
        self.pebs.reset();
        self.active = CounterSet::EMPTY;
        self.unbacked = CounterSet::EMPTY;
        self.taken = Taken::default();
        self.pmi.reset();
        if let Some(ibs) = &mut self.ibs {
            ibs.reset(&self.model);
        }
        self.multiplexer.reset();
        self.snapshot = Snapshot::default();
        self.programmed = false;
        self.refresh_needs(here.as_deref());
    }

    /// Takes in what happened to the vCPU: overflows are raised at `Left`, and
    /// at each instruction that completes one.
    #[inline]
    pub fn observe(&mut self, core: &mut CorePmu, progress: Progress) {
        let here = &mut self.here(Some(core));
        let before = self.ran;
        if let Some(core) = here {
            core.bank.observe(&progress);
        }
        match progress {
            Progress::Entered { tsc } => {
                self.entered = Some(tsc);
                if self.hosting {
                    self.enter_hosts(here, tsc);
                }
                return;
            }
            Progress::Left { tsc, halted, .. } => {
                let entered = self.entered.take().unwrap_or(tsc);
                self.ran += tsc - entered - halted;
                self.left = tsc;
            }
            Progress::Retired { .. } | Progress::Delivered { .. } | Progress::Lost { .. } => {}
        }
        if self.needs.counting {
            self.pebs.retiring = !matches!(progress, Progress::Left { .. });
            self.settle_overflows(here);
            self.pebs.retiring = false;
        }
        if self.hosting {
            self.observe_hosts(here, &progress, self.ran - before);
        }
        // After the counts: those of a counter that is taken away are gone.
        if matches!(progress, Progress::Left { .. }) {
            self.tick_reservations(here);
        }
    }

    /// What was counted may have come to an overflow, or to the end of a turn.
    #[inline]
    fn settle_overflows(&mut self, here: &mut Here<'_>) {
        let Some(core) = here else { return };
        let overflowed = core.bank.take_overflows();
        if !overflowed.is_empty() {
            self.settle_slots(here, overflowed);
        }
        if self.multiplexer.is_over(self.ran) {
            self.next_timeslice(here);
        }
    }

    /// TSC value at which the guest has to be interrupted, for an overflow, the
    /// end of a turn, of a lease, of a budget or of a revocation's notice, or a switch
    /// of a host context's event sets; known after
    /// [`Progress::Entered`].
    #[inline]
    pub fn deadline(&self, core: &CorePmu) -> Option<Tsc> {
        let core = self.if_here(Some(core));
        let overflow = core.and_then(|core| core.bank.deadline());
        let decides = self.reservations.is_some() || self.grant.budget.until.is_some();
        if !(self.multiplexer.is_active() || self.hosting || decides) {
            return overflow;
        }
        let turn = self.multiplexer.rest(self.ran).zip(self.entered);
        let turn = turn.map(|(rest, entered)| entered + rest);
        let host = if self.hosting {
            self.host_deadline(core)
        } else {
            None
        };
        [overflow, turn, self.decision_due(), self.taken.due(), host]
            .into_iter()
            .flatten()
            .min()
    }

    /// The model that the guest sees.
    pub fn model(&self) -> &PmuModel {
        &self.model
    }

    /// Whose counters these are.
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    /// Whether it is switched in.
    pub fn is_attached(&self) -> bool {
        self.attached
    }

    /// `core` while the vCPU is on it.
    #[inline]
    fn here<'a>(&self, core: Option<&'a mut CorePmu>) -> Here<'a> {
        core.filter(|core| self.is_on(core))
    }

    /// `core`, only to be looked at.
    #[inline]
    fn if_here<'a>(&self, core: Option<&'a CorePmu>) -> Option<&'a CorePmu> {
        core.filter(|core| self.is_on(core))
    }

    /// A caller that lends another core, or one that another vCPU was attached to
    /// meanwhile, must not get at that vCPU's counters.
    #[inline]
    fn is_on(&self, core: &CorePmu) -> bool {
        self.attached && core.bank.attached() == Some(self.owner)
    }
}

/// The core that a vCPU is on while something is done to it; none while it is
/// switched out: its registers change then, and no counter does.
type Here<'a> = Option<&'a mut CorePmu>;

/// Position of a counter of the model in `VcpuPmu::counters`.
#[inline]
fn index_of(counter: CounterId) -> usize {
    usize::from(match counter {
        CounterId::Programmable(n) => n,
        CounterId::Fixed(n) => MAX_PROGRAMMABLE + n,
        CounterId::Ibs(kind) => MAX_PROGRAMMABLE + MAX_FIXED + kind as u8,
    })
}
