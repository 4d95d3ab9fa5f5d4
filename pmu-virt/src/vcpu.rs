//! One virtual CPU's PMU: what its clients see of it. The VMM brings accesses of the guest,
//! entries and exits, and moves from core to core; host's tools bring contexts, and
//! administrators budgets.
//!
//! Below are three tiers, each of which knows nothing of the one above: who may use which
//! counter (`tenancy`), who counts where (`counting`), and what was counted (`tally`). The
//! values that these let meet own their fields, and call none of each other.

mod access;
mod backing;
mod claims;
mod counters;
mod counting;
#[cfg(feature = "contexts")]
mod host_side;
#[cfg(feature = "contexts")]
mod hosts;
#[cfg(not(feature = "contexts"))]
#[path = "vcpu/no_hosts.rs"]
mod hosts;
mod interrupts;
mod losses;
mod page;
mod pebs;
mod placer;
mod registers;
mod samplers;
mod saved;
mod seat;
mod tally;
mod tenancy;
mod terms;
mod times;
mod uncounted;

pub use backing::OtherCores;
pub use claims::{BudgetRefused, Claims, Reservations};
pub use counters::CounterReport;
#[cfg(feature = "contexts")]
pub use host_side::HostSide;
#[cfg(feature = "contexts")]
pub use hosts::Hosts;
pub use interrupts::Interrupts;
pub use placer::Oversubscribe;
pub use samplers::IbsDue;

use arbiter::{
    Budget, Caller, Context, CounterId, CounterSet, Effects, Grant, PcrRegister, PcrUnit, PerKind,
    Verdict,
};
use pmu_model::{
    IbsKind, MAX_FIXED, MAX_PROGRAMMABLE, MsrIndex, OwnerId, PmuModel, Progress, Ticks, Tsc,
    UnavailableReason,
};

use crate::core_pmu::CorePmu;
use crate::moment::Moment;
use crate::state::{NotSettled, PmuState, StateError};
use counting::Counting;
use seat::Seat;
use tally::Tally;
use tenancy::Tenancy;
use terms::counters_there;

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
            secret: access::is_key(PcrRegister::decode(msr.0)),
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

/// Position of a counter of the model among all.
#[inline]
fn index_of(counter: CounterId) -> usize {
    usize::from(match counter {
        CounterId::Programmable(n) => n,
        CounterId::Fixed(n) => MAX_PROGRAMMABLE + n,
        CounterId::Ibs(kind) => MAX_PROGRAMMABLE + MAX_FIXED + kind as u8,
    })
}

/// What the VMM has to do for the counts; changes at writes and resets, and at
/// whatever is done to host contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Tell the ring in [`Progress::Left`](crate::Progress::Left), and keep
    /// [`VcpuPmu::deadline`].
    pub ring: bool,
    /// Step the guest and tell each instruction.
    pub stepping: bool,
    /// Some counter is running, or waits for its turn, or a host context is
    /// started.
    pub counting: bool,
}

/// One vCPU's PMU. Owned by the thread that runs the vCPU.
///
/// Accesses take place between [`Progress::Left`] and [`Progress::Entered`].
/// Where physical counters suffice, an access allocates only where a counter may change
/// hands.
#[derive(Debug)]
pub struct VcpuPmu {
    tenancy: Tenancy,
    /// It is switched in: what is done to it is done on that core.
    attached: bool,
    /// The slots that it was switched in to last.
    bank: Option<u64>,
    /// Every count is in its register here: nothing was done on a core since
    /// [`VcpuPmu::settle`], or it has left its core.
    settled: bool,
}

impl VcpuPmu {
    /// A PMU in its reset state, on no core yet. No other vCPU on its cores
    /// may have the same `owner`.
    #[must_use]
    pub fn detached(owner: OwnerId, model: PmuModel, grant: Grant) -> Self {
        let claims = Claims::new(grant);
        let terms = claims.first_terms(&model);
        let tally = Tally::new(owner, model, terms);
        VcpuPmu {
            tenancy: Tenancy::new(claims, Counting::new(tally)),
            attached: false,
            bank: None,
            settled: true,
        }
    }

    /// The same PMU with this answer to more counters than the core has; the
    /// answer of a new one is [`Oversubscribe::Refuse`].
    #[must_use]
    pub fn with_oversubscription(mut self, answer: Oversubscribe) -> Self {
        self.counting_mut().set_answer(answer);
        self
    }

    /// The same PMU with so much time between two PMIs at least; a new one
    /// holds none back.
    #[must_use]
    pub fn with_pmi_floor(mut self, ticks: Ticks) -> Self {
        self.counting_mut().tally_mut().set_floor(ticks);
        self
    }

    /// The same PMU with reservations. The unit has the counters of the model.
    #[must_use]
    pub fn with_reservations(mut self, reservations: Reservations) -> Self {
        self.tenancy.reserve(reservations);
        self
    }

    #[inline]
    fn counting_mut(&mut self) -> &mut Counting {
        self.tenancy.counting_mut()
    }

    #[inline]
    fn tally(&self) -> &Tally {
        self.tenancy.counting().tally()
    }

    /// `core` while the vCPU is on it. Whatever is done to it begins here.
    #[inline]
    fn seat<'a>(&mut self, core: Option<&'a mut CorePmu>) -> Seat<'a> {
        self.tenancy.begin();
        match core {
            Some(core) if self.is_on(core) => {
                self.settled = false;
                Seat::On(core)
            }
            _ if self.attached => Seat::Away,
            _ => Seat::Off,
        }
    }

    /// Whether another core than `core` has counts of it.
    fn counts_elsewhere(&self, core: &CorePmu) -> bool {
        let here = core.bank().number();
        !self.settled && self.bank.is_some_and(|bank| bank != here)
    }

    /// Whether it is attached to `core`. A caller that lends another core, or one that another
    /// vCPU was attached to meanwhile, does not get at that vCPU's counters.
    #[inline]
    #[must_use]
    pub fn is_on(&self, core: &CorePmu) -> bool {
        self.attached && core.bank().attached() == Some(self.owner())
    }

    /// Brings every register to its reset value, stops and frees every
    /// physical counter of the guest, and forgets pending PMIs and reservations.
    /// The phase of the firmware is the machine's, which restarts it itself. Host
    /// contexts go on: the guest does not know of them.
    pub fn reset(&mut self, core: Option<&mut CorePmu>) {
        let seat = &mut self.seat(core);
        self.tenancy.reset(seat);
    }

    /// Takes in what happened to the vCPU: overflows are raised at `Left`, and
    /// at each instruction that completes one.
    #[inline]
    pub fn observe(&mut self, core: &mut CorePmu, progress: Progress) {
        let seat = &mut self.seat(Some(core));
        self.tenancy.observe(seat, progress);
    }

    /// TSC value at which the guest has to be interrupted, for an overflow, the
    /// end of a turn, of a lease, of a budget or of a revocation's notice, or a switch
    /// of a host context's event sets; known after
    /// [`Progress::Entered`].
    #[inline]
    #[must_use]
    pub fn deadline(&self, core: &CorePmu) -> Option<Tsc> {
        let core = self.is_on(core).then_some(core);
        let (overflow, counting) = self.tenancy.counting().deadline(core);
        if counting.is_none() && !self.tenancy.claims().decide() {
            return overflow;
        }
        let decision = self.tenancy.claims().due();
        [overflow, counting, decision, self.tally().losses().due()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Ticks for which a processor in software may go on before an overflow can come
    /// ([`CounterBackend::horizon`](crate::CounterBackend::horizon)); none if nothing is armed
    /// that its instructions complete. Each call of this PMU may change it.
    #[inline]
    #[must_use]
    pub fn horizon(&self, core: &CorePmu) -> Option<u64> {
        self.is_on(core).then(|| core.bank().horizon()).flatten()
    }

    /// The model that the guest sees.
    #[inline]
    #[must_use]
    pub fn model(&self) -> &PmuModel {
        self.tally().model()
    }

    /// Whose counters these are.
    #[inline]
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.tally().owner()
    }

    /// RDMSR. That the guest is at CPL 0 was checked before.
    pub fn rdmsr(&mut self, core: &mut CorePmu, msr: MsrIndex, caller: Caller) -> MsrRead {
        let seat = &mut self.seat(Some(core));
        self.tenancy.rdmsr(seat, msr, caller)
    }

    /// WRMSR. That the guest is at CPL 0 was checked before.
    pub fn wrmsr(
        &mut self,
        core: &mut CorePmu,
        msr: MsrIndex,
        value: u64,
        caller: Caller,
    ) -> MsrWrite {
        let seat = &mut self.seat(Some(core));
        self.tenancy.wrmsr(seat, msr, value, caller)
    }

    /// RDPMC. CPL and CR4.PCE were checked before. What `caller` presents is
    /// looked at only if `ecx` is one that takes a cookie.
    pub fn rdpmc(&mut self, core: &mut CorePmu, ecx: u32, caller: Caller) -> ReadOutcome {
        let seat = &mut self.seat(Some(core));
        self.tenancy.rdpmc(seat, ecx, caller)
    }

    /// The processor has taken its bits of a write, [`MsrWrite::rest`]; `value` is what the
    /// guest wrote.
    pub fn rest_taken(&mut self, msr: MsrIndex, value: u64) {
        self.counting_mut().tally_mut().rest_taken(msr, value);
    }

    /// A read of a counter by the hypervisor, on its own behalf or for a tool of the host,
    /// with the cookie `presented`: judged as a guest's reads are, by the cookie and by the
    /// mode bits of the hypervisor's layer. What is denied is recorded. `None`: there is no
    /// such counter, there are no reservations, or the cookie has too many bits.
    pub fn read_as_hypervisor(
        &mut self,
        core: Option<&mut CorePmu>,
        counter: CounterId,
        presented: u64,
    ) -> Option<Result<u64, Verdict>> {
        let seat = &mut self.seat(core);
        self.tenancy.read_as_hypervisor(seat, counter, presented)
    }

    /// The PMI of this vCPU.
    #[inline]
    #[must_use]
    pub fn interrupts(&self) -> &Interrupts {
        self.tally().interrupts()
    }

    /// The same, to be routed and sent.
    #[inline]
    pub fn interrupts_mut(&mut self) -> &mut Interrupts {
        self.counting_mut().tally_mut().interrupts_mut()
    }

    /// Whether there may be a PMI or a notice to be sent.
    #[inline]
    #[must_use]
    pub fn has_interrupt(&self) -> bool {
        let samples = self.tally().samplers().is_waiting();
        self.interrupts().is_pending() || samples || self.claims().unit().is_some()
    }

    /// When an interrupt is due that the throttle holds back.
    #[inline]
    #[must_use]
    pub fn interrupt_due(&self) -> Option<Tsc> {
        let samples = self.tally().samplers().deadline();
        let pmi = self.interrupts().deadline();
        [pmi, samples].into_iter().flatten().min()
    }

    /// Who may use its counters.
    #[inline]
    #[must_use]
    pub fn claims(&self) -> &Claims {
        self.tenancy.claims()
    }

    /// The same, for what a VMM takes up of it.
    #[inline]
    pub fn claims_mut(&mut self) -> &mut Claims {
        self.tenancy.claims_mut()
    }

    /// How many physical counters are promised to this vCPU, which is on `core` or was
    /// parked there: another core has to have room for them if it is to go on there.
    #[must_use]
    pub fn relies_on(&self, core: &CorePmu) -> usize {
        core.book()
            .relied_on(self.owner(), self.tally().terms().held_by_guest)
    }

    /// As many counters as there are; samplers are programmable ones here.
    #[must_use]
    pub fn there(&self) -> PerKind {
        PerKind::count(counters_there(self.model()))
    }

    /// The samplers that count now.
    #[must_use]
    pub fn sampling(&self) -> CounterSet {
        let samplers = counters_there(self.model()) & CounterSet::SAMPLERS;
        let counters = self.tally().counters();
        let counts = |one: &CounterId| counters.is_running(*one);
        samplers.iter().filter(counts).collect()
    }

    /// Room that it needs on another core for a request that waits for it, if one does.
    /// `core`: as for [`VcpuPmu::relies_on`].
    #[must_use]
    pub fn needs_room(&self, core: &CorePmu) -> Option<usize> {
        let programmable = self.claims().unit()?.move_needs()?;
        // Fixed-function counters and its contexts go with it.
        let fixed = CounterSet::first(0, arbiter::MAX_FIXED);
        let fixed = self.tally().terms().held_by_guest & fixed;
        Some(core.book().relied_on(self.owner(), fixed) + usize::from(programmable))
    }

    /// No core has that room: the request is refused.
    pub fn stay(&mut self, core: Option<&mut CorePmu>) {
        let _ = self.arbitrate(core, |unit, cx| ((), unit.stay(cx)));
    }

    /// Whether it has to get onto its core, because a request waits to know what can be
    /// backed there.
    #[inline]
    #[must_use]
    pub fn waits_for_core(&self) -> bool {
        !self.attached && self.claims().looks_for_room()
    }

    /// Lets the host itself act on the reservations, and does to the PMU what
    /// that means for it. `None` without reservations.
    pub fn arbitrate<R>(
        &mut self,
        core: Option<&mut CorePmu>,
        act: impl FnOnce(&mut PcrUnit, &mut Context<'_>) -> (R, Effects),
    ) -> Option<R> {
        let seat = &mut self.seat(core);
        self.tenancy.arbitrate(seat, act)
    }

    /// Lets what is due by TSC value `tsc` take place: ends of leases, of
    /// questions, and revocations. [`Progress::Left`](crate::Progress::Left) does
    /// so by itself; this is for a vCPU that is not run, halted for instance. It
    /// may be on no core.
    pub fn tick(&mut self, core: Option<&mut CorePmu>, tsc: Tsc) {
        let seat = &mut self.seat(core);
        self.tenancy.claims_mut().pass(tsc);
        self.tenancy.tick(seat);
    }

    /// The counters that the guest has enabled and that do not count now, and why.
    #[must_use]
    pub fn lacking(&self) -> Vec<(CounterId, UnavailableReason)> {
        self.tenancy.lacking()
    }

    /// Lets the guest use `most` counters at a time from now on; with `until` only to that
    /// TSC value, and then what it may use now. The guest's registers stay as they are.
    /// Counters that nobody has reserved make way at once; who has reserved more than
    /// that is told, and loses it after `grace_ms` milliseconds.
    ///
    /// # Errors
    /// Host contexts rely on what the guest would get. Nothing has changed.
    pub fn set_budget(
        &mut self,
        core: Option<&mut CorePmu>,
        most: PerKind,
        grace_ms: u32,
        until: Option<Tsc>,
    ) -> Result<(), BudgetRefused> {
        let seat = &mut self.seat(core);
        self.tenancy.set_budget(seat, most, grace_ms, until)
    }

    /// The VM's lease on the host's counters holds so many from now on: the guest uses no
    /// more at a time, whatever its budget is. `grace_ms` as of
    /// [`set_budget`](Self::set_budget).
    ///
    /// # Errors
    /// Host contexts rely on what the guest would get. Nothing has changed.
    pub fn set_lease(
        &mut self,
        core: Option<&mut CorePmu>,
        lease: PerKind,
        grace_ms: u32,
    ) -> Result<(), BudgetRefused> {
        let seat = &mut self.seat(core);
        let budget = *self.claims().budget();
        let budget = Budget { lease, ..budget };
        self.tenancy.change_budget(seat, budget, grace_ms)
    }

    /// Whether samples are due, and [`VcpuPmu::take_samples`] is to be called before the
    /// guest's exit is answered, and before it goes on.
    #[inline]
    #[must_use]
    pub fn has_samples(&self, core: Option<&CorePmu>) -> bool {
        let overflown = core.is_some_and(|core| self.tenancy.counting().hosts().has_overflow(core));
        overflown || self.pebs_due() || self.ibs_due().is_some()
    }

    /// Takes the samples that are due, of `moment`: a PEBS record is written, and its counters
    /// are reloaded; samplers have what they sampled; contexts of tools handle their
    /// overflows. A record that cannot be written leaves the guest's buffer as it is, and the
    /// counters go on. What `moment` says has to wait stays due.
    ///
    /// # Errors
    /// Those of `moment`; what was not taken stays due.
    pub fn take_samples<M: Moment>(
        &mut self,
        core: Option<&mut CorePmu>,
        moment: &mut M,
    ) -> Result<(), M::Error> {
        let seat = &mut self.seat(core);
        let taken = self.counting_mut().take_samples(seat, moment);
        self.tenancy.tell_owners();
        taken
    }

    /// Whether the hypervisor may yield a counter that it has reserved: what host
    /// contexts on this core rely on has room without it. If the vCPU is on no
    /// core, nobody can tell, and its contexts are not put at risk.
    #[must_use]
    pub fn hypervisor_can_yield(&self, core: Option<&CorePmu>) -> bool {
        match core.filter(|core| self.is_on(core)) {
            Some(core) => core.book().guest_may_have_more(core.planner(), 1),
            None => self.tenancy.counting().hosts().is_empty(),
        }
    }

    /// A sampler has come to its maximum, and its sample is to be taken where the guest
    /// stands.
    #[inline]
    #[must_use]
    pub fn ibs_due(&self) -> Option<IbsKind> {
        self.tenancy.counting().sample_due()
    }

    /// Whether a sample may fall due while the guest runs.
    #[inline]
    #[must_use]
    pub fn ibs_runs(&self) -> bool {
        let samplers = self.tally().samplers();
        samplers.exist() && (samplers.run() || self.tenancy.counting().hosts().may_sample())
    }

    /// What is to be done about the interrupt of samples at TSC value `now`. To be sent, it
    /// is over.
    pub fn ibs_interrupt(&mut self, now: Tsc) -> IbsDue {
        let tally = self.counting_mut().tally_mut();
        tally.samplers_mut().interrupt_due(now)
    }

    /// Whether a PEBS record is to be written.
    #[inline]
    #[must_use]
    pub fn pebs_due(&self) -> bool {
        self.tally().pebs_due().is_some()
    }

    /// Whether PEBS is enabled for some counter.
    #[inline]
    #[must_use]
    pub fn has_pebs(&self) -> bool {
        !self.tally().registers().pebs_enable().is_empty()
    }

    /// Switches the vCPU in: its counters count on `core` from now on. Those
    /// that are still in place are started, all as one; the others are given a
    /// place. Counters of other vCPUs are stopped, and stay until their place
    /// is needed.
    ///
    /// A vCPU that has counts on another core has to leave that one first ([`VcpuPmu::leave`]).
    /// Until it has, this does nothing: it stays where it is ([`VcpuPmu::is_on`]).
    pub fn attach(&mut self, core: &mut CorePmu) {
        if self.counts_elsewhere(core) {
            return;
        }
        core.bank_mut().begin_switch();
        // The counters of the one before are stopped only now: if it is the same one,
        // it never left.
        if core.bank().attached() != Some(self.owner()) {
            hosts::Hosts::leave_private(&mut Seat::On(core));
            core.bank_mut().attach(self.owner());
        }
        self.attached = true;
        self.settled = false;
        let is_new = self.bank.replace(core.bank().number()) != Some(core.bank().number());
        self.tenancy.begin();
        self.tenancy.sit_down(&mut Seat::On(core), is_new);
    }

    /// Switches the vCPU out. Its counters stay on the core, and are stopped
    /// when another vCPU is attached to it. Until then counts that the guest
    /// made last may not be settled yet.
    pub fn park(&mut self, core: &mut CorePmu) {
        if self.attached {
            self.tenancy.begin();
            self.counting_mut().park(&mut Seat::On(core));
            self.tenancy.tell_owners();
            self.attached = false;
        }
    }

    /// Takes every count of the vCPU off `core`, on which it was parked, so
    /// that it can go on elsewhere. A core that does not have its counts leaves them where they
    /// are, and the vCPU cannot be saved ([`VcpuPmu::save`]).
    pub fn leave(&mut self, core: &mut CorePmu) {
        if self.counts_elsewhere(core) {
            return;
        }
        self.tenancy.begin();
        core.bank_mut().begin_switch();
        self.counting_mut().leave(&mut Seat::On(core));
        core.bank_mut().forget(self.owner());
        core.bank_mut().end_switch();
        self.tenancy.tell_owners();
        self.settled = true;
    }

    /// What the VMM has to do while the guest runs.
    #[inline]
    #[must_use]
    pub fn needs(&self) -> Needs {
        self.tenancy.counting().needs()
    }

    /// The counters in use: those that are bound to a physical counter, those
    /// that should be but cannot, and those that are on but never advance.
    #[must_use]
    pub fn report(&self, core: Option<&CorePmu>) -> Vec<CounterReport> {
        let core = core.filter(|core| self.is_on(core));
        let counters = self.tally().counters();
        let report = |counter| counters.report(core, counter);
        self.model().counters().filter_map(report).collect()
    }

    /// True if the guest has enabled a counter in its control, whether or not it
    /// counts, or may believe so as somebody has reserved one: sooner or later its
    /// count is read.
    #[must_use]
    pub fn has_enabled(&self) -> bool {
        let counters = self.tally().counters();
        let request = |counter| counters.request(counter);
        let enabled = |counter| request(counter).is_some_and(|event| event.enabled);
        self.model().counters().any(enabled) || !self.tally().terms().held.is_empty()
    }

    /// True once the guest has set or started a counter, or has asked for one, since the
    /// PMU's reset, also before it was saved: from then on its guest may read a count at
    /// any time, however long ago the last counter was stopped.
    #[inline]
    #[must_use]
    pub fn is_programmed(&self) -> bool {
        self.tenancy.counting().is_programmed()
    }

    /// Takes in every count that is still on `core`, so that [`VcpuPmu::save`] finds it here,
    /// also on another thread; the guest does not run meanwhile. Nothing to do for a vCPU that
    /// has left its core ([`VcpuPmu::leave`]).
    ///
    /// # Errors
    /// `core` is not the one that has its counts.
    pub fn settle(&mut self, core: Option<&mut CorePmu>) -> Result<(), NotSettled> {
        if self.settled {
            return Ok(());
        }
        let mut seat = self.seat(core);
        if seat.is_off() {
            return Err(NotSettled(self.owner()));
        }
        self.counting_mut().settle_for_good(&mut seat);
        self.tenancy.tell_owners();
        self.settled = true;
        Ok(())
    }

    /// The whole state, counts settled.
    ///
    /// Reservations are no part of it: the guest will boot anew, and nobody
    /// will have the cookies. A counter that is reserved is saved as one that
    /// was given back, with nothing of its owner's in it. Host contexts are no
    /// part of it either: they are the host's.
    ///
    /// # Errors
    /// There may be counts on a core: neither [`VcpuPmu::settle`] nor [`VcpuPmu::leave`] was
    /// called since the guest ran, or since its PMU was changed there.
    pub fn save(&self) -> Result<PmuState, NotSettled> {
        if self.settled {
            Ok(self.tenancy.counting().save())
        } else {
            Err(NotSettled(self.owner()))
        }
    }

    /// Takes a state in. Every register then reads as it did; what is enabled
    /// counts on, as far as this core can count it; pending PMIs are taken by
    /// [`Interrupts::forward`]. Counters that are reserved here stay so, and take
    /// nothing in.
    ///
    /// # Errors
    /// The state is not one of this model; nothing was changed then.
    pub fn restore(
        &mut self,
        core: Option<&mut CorePmu>,
        state: &PmuState,
    ) -> Result<(), StateError> {
        let seat = &mut self.seat(core);
        saved::check(self.model(), state)?;
        self.counting_mut().restore(seat, state);
        self.tenancy.tell_owners();
        Ok(())
    }
}

/// Contexts of tools.
#[cfg(feature = "contexts")]
impl VcpuPmu {
    /// The host contexts of this vCPU.
    #[inline]
    #[must_use]
    pub fn hosts(&self) -> &Hosts {
        self.tenancy.counting().hosts()
    }

    /// The same, to be paused.
    pub fn hosts_mut(&mut self) -> &mut Hosts {
        self.counting_mut().hosts_mut()
    }

    /// What tools of the host do to it, where it is.
    pub fn host_side<'a>(&'a mut self, core: Option<&'a mut CorePmu>) -> HostSide<'a> {
        let seat = self.seat(core);
        HostSide::new(&mut self.tenancy, seat)
    }

    /// Works with the core that the vCPU is on, and with the contexts of that
    /// core; what that changes for the vCPU takes place at once. While it is
    /// switched out, nothing does.
    pub fn with_core<R>(&mut self, core: &mut CorePmu, act: impl FnOnce(&mut CorePmu) -> R) -> R {
        if !self.attached {
            return act(core);
        }
        self.tenancy.begin();
        self.tenancy.introduce(&mut Seat::On(core));
        let result = act(core);
        if core.host_mut().take_changed() {
            self.tenancy.hosts_changed(&mut Seat::On(core));
        }
        result
    }
}
