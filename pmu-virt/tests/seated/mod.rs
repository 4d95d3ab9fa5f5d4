//! A vCPU's PMU together with the core that it is on, as the thread has them
//! that runs the one on the other.
#![allow(dead_code, reason = "no test uses all of it")]

mod line;
mod snapshot;

pub(crate) use line::Line;
pub(crate) use snapshot::{Located, Snapshot};

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use arbiter::{
    Cookie, CounterSet, Effects, GuardLimits, NoAudit, NoEntropy, Outcome, PcrConfig, PcrUnit,
    PerKind, Phase, Policy, Scheme,
};
use perfmon_abi::wire::{Call, Refusal};
use pmu_virt::perfmon::{AttachedContext, ContextId, GuestLimit, Moment, NotLoaded, Quantities};
use pmu_virt::{
    Caller, ClockBackend, CorePmu, CounterBackend, CounterReport, Grant, IbsDue, IbsSample,
    MsrIndex, MsrWrite, Oversubscribe, OwnerId, PmiForwarded, PmiRequest, PmuModel, PmuState,
    Progress, ReadOutcome, Reservations, StateError, Ticks, Tsc, VcpuPmu, WriteOutcome,
};

/// A PMU and its core.
#[derive(Debug)]
pub(crate) struct Seated {
    pmu: VcpuPmu,
    /// None while it is switched out.
    core: Option<Box<CorePmu>>,
    /// A core that it never was on, for accesses while it is switched out: they
    /// must leave every counter alone.
    elsewhere: Box<CorePmu>,
}

impl Deref for Seated {
    type Target = VcpuPmu;

    fn deref(&self) -> &VcpuPmu {
        &self.pmu
    }
}

impl DerefMut for Seated {
    fn deref_mut(&mut self) -> &mut VcpuPmu {
        &mut self.pmu
    }
}

impl Seated {
    /// On a core of its own.
    pub(crate) fn new(model: PmuModel, backend: Box<dyn CounterBackend>, grant: Grant) -> Self {
        let mut pmu = Seated::detached(OwnerId::default(), model, grant);
        pmu.attach(Box::new(CorePmu::new(backend)));
        pmu
    }

    pub(crate) fn detached(owner: OwnerId, model: PmuModel, grant: Grant) -> Self {
        Seated {
            pmu: VcpuPmu::detached(owner, model, grant),
            core: None,
            elsewhere: Box::new(CorePmu::new(Box::new(ClockBackend::new()))),
        }
    }

    pub(crate) fn with_oversubscription(self, answer: Oversubscribe) -> Self {
        Seated {
            pmu: self.pmu.with_oversubscription(answer),
            ..self
        }
    }

    pub(crate) fn with_pmi_floor(self, ticks: u64) -> Self {
        Seated {
            pmu: self.pmu.with_pmi_floor(Ticks(ticks)),
            ..self
        }
    }

    pub(crate) fn with_reservations(self, reservations: Reservations) -> Self {
        Seated {
            pmu: self.pmu.with_reservations(reservations),
            ..self
        }
    }

    /// The PMU, and the core to name in a call.
    pub(crate) fn parts(&mut self) -> (&mut VcpuPmu, &mut CorePmu) {
        let core = self.core.as_mut().unwrap_or(&mut self.elsewhere);
        (&mut self.pmu, core)
    }

    pub(crate) fn core(&self) -> Option<&CorePmu> {
        self.core.as_deref()
    }

    pub(crate) fn attach(&mut self, mut core: Box<CorePmu>) {
        self.pmu.attach(&mut core);
        self.core = Some(core);
    }

    pub(crate) fn park(&mut self) -> Option<Box<CorePmu>> {
        let mut core = self.core.take()?;
        self.pmu.park(&mut core);
        Some(core)
    }

    pub(crate) fn depart(&mut self) -> Option<Box<CorePmu>> {
        let mut core = self.core.take()?;
        self.pmu.park(&mut core);
        self.pmu.leave(&mut core);
        Some(core)
    }

    pub(crate) fn rdmsr(&mut self, msr: MsrIndex, caller: Caller) -> ReadOutcome {
        let (pmu, core) = self.parts();
        pmu.rdmsr(core, msr, caller).outcome
    }

    pub(crate) fn wrmsr(&mut self, msr: MsrIndex, value: u64, caller: Caller) -> WriteOutcome {
        self.written(msr, value, caller).outcome
    }

    /// A write with all that follows from it.
    pub(crate) fn written(&mut self, msr: MsrIndex, value: u64, caller: Caller) -> MsrWrite {
        let (pmu, core) = self.parts();
        pmu.wrmsr(core, msr, value, caller)
    }

    /// The PMI of the overflows since the last call, sent at once.
    pub(crate) fn take_pmi(&mut self) -> Option<PmiRequest> {
        let mut line = Line::open();
        let forwarded = line.forward(self, Tsc(0));
        assert_ne!(forwarded, PmiForwarded::Late, "nothing holds it back");
        line.sent
    }

    /// Takes a sample in.
    pub(crate) fn sampled(&mut self, sample: IbsSample) {
        let memory = Located::by(&sample);
        self.take_samples(&mut Snapshot::of_sample(&sample, &memory));
    }

    pub(crate) fn try_samples(&mut self, moment: &mut Snapshot<'_>) -> Result<(), &'static str> {
        self.pmu.take_samples(self.core.as_deref_mut(), moment)
    }

    /// Takes the samples that are due.
    pub(crate) fn take_samples(&mut self, moment: &mut Snapshot<'_>) {
        let done = self.try_samples(moment);
        assert_eq!(done, Ok(()));
    }

    /// The interrupt of the samples since the last call, sent at once.
    pub(crate) fn take_ibs_interrupt(&mut self) -> Option<u32> {
        match self.pmu.ibs_interrupt(Tsc(0)) {
            IbsDue::Send { vector } => Some(vector),
            IbsDue::Nothing => None,
            IbsDue::Late => panic!("nothing holds it back"),
        }
    }

    pub(crate) fn rdpmc(&mut self, ecx: u32, caller: Caller) -> ReadOutcome {
        let (pmu, core) = self.parts();
        pmu.rdpmc(core, ecx, caller)
    }

    pub(crate) fn observe(&mut self, progress: Progress) {
        let (pmu, core) = self.parts();
        pmu.observe(core, progress);
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        let core = self.core.as_deref().unwrap_or(&self.elsewhere);
        self.pmu.deadline(core).map(|due| due.0)
    }

    pub(crate) fn reset(&mut self) {
        self.pmu.reset(self.core.as_deref_mut());
    }

    pub(crate) fn report(&self) -> Vec<CounterReport> {
        self.pmu.report(self.core.as_deref())
    }

    pub(crate) fn save(&mut self) -> PmuState {
        self.pmu.settle(self.core.as_deref_mut()).expect("settled");
        self.pmu.save().expect("a state")
    }

    pub(crate) fn restore(&mut self, state: &PmuState) -> Result<(), StateError> {
        self.pmu.restore(self.core.as_deref_mut(), state)
    }

    pub(crate) fn tick(&mut self, tsc: u64) {
        self.pmu.tick(self.core.as_deref_mut(), Tsc(tsc));
    }

    pub(crate) fn arbitrate<R>(
        &mut self,
        act: impl FnOnce(&mut PcrUnit, &mut arbiter::Context<'_>) -> (R, Effects),
    ) -> Option<R> {
        self.pmu.arbitrate(self.core.as_deref_mut(), act)
    }

    pub(crate) fn set_budget(
        &mut self,
        most: PerKind,
        grace_ms: u32,
        until: Option<u64>,
    ) -> Result<(), Refusal> {
        let (pmu, core) = self.parts();
        Ok(pmu.set_budget(Some(core), most, grace_ms, until.map(Tsc))?)
    }

    pub(crate) fn relies_on(&self) -> usize {
        self.core
            .as_deref()
            .map_or(0, |core| self.pmu.relies_on(core))
    }

    pub(crate) fn needs_room(&self) -> Option<usize> {
        let core = self.core.as_deref()?;
        self.pmu.needs_room(core)
    }

    /// The same with reservations, of which none is made yet. No layer has a minimum.
    pub(crate) fn with_own_reservations(self, ticks_per_ms: u64) -> Self {
        let mut policy = Policy::default();
        policy.kernel.min = PerKind::default();
        let unit = PcrUnit::new(PcrConfig {
            counters: self.model().counts(),
            widths: self.model().widths(),
            policy,
            scheme: Scheme::Independent,
            guard: GuardLimits::with_ticks_per_ms(ticks_per_ms),
            ticks_per_ms,
            phase: Arc::new(Phase::new(false)),
            legacy: None,
            smm: false,
        });
        let unit = match self.model().ibs() {
            0 => unit,
            _ => unit.with_samplers(),
        };
        self.with_reservations(Reservations {
            unit,
            entropy: Box::new(NoEntropy),
            audit: Box::new(NoAudit),
            holdings: Default::default(),
        })
    }

    /// Asks the owners of its counters as for a context of its own.
    pub(crate) fn ask_owners(&mut self, limit: GuestLimit, cookie: Cookie) -> Outcome {
        let core = self.core.as_deref_mut();
        let asked = self.pmu.host_side(core).ask_owners(limit, true, cookie);
        asked.expect("reservations").expect("no request is pending")
    }

    pub(crate) fn owners_answer(&mut self) -> Option<Outcome> {
        self.pmu.host_side(self.core.as_deref_mut()).owners_answer()
    }

    pub(crate) fn give_back(&mut self, counters: CounterSet, cookie: Cookie) {
        let core = self.core.as_deref_mut();
        self.pmu.host_side(core).give_back(counters, cookie);
    }

    pub(crate) fn hypervisor_can_yield(&self) -> bool {
        self.pmu.hypervisor_can_yield(self.core.as_deref())
    }

    pub(crate) fn with_core<R>(&mut self, act: impl FnOnce(&mut CorePmu) -> R) -> Option<R> {
        let core = self.core.as_mut()?;
        Some(self.pmu.with_core(core, act))
    }

    pub(crate) fn load_context(
        &mut self,
        hosted: Box<AttachedContext>,
        set: u16,
    ) -> Result<(), NotLoaded> {
        let core = self.core.as_deref_mut();
        self.pmu.host_side(core).load(hosted, set)
    }

    pub(crate) fn unload_context(&mut self, id: ContextId) -> Option<Box<AttachedContext>> {
        self.pmu.host_side(self.core.as_deref_mut()).unload(id)
    }

    pub(crate) fn call_context(
        &mut self,
        id: ContextId,
        call: &mut Call,
        values: &dyn Quantities,
    ) -> Result<(), Refusal> {
        let core = self.core.as_deref_mut();
        self.pmu.host_side(core).call(id, call, values)
    }

    pub(crate) fn lease_context(&mut self, id: ContextId, counters: usize) {
        let core = self.core.as_deref_mut();
        self.pmu.host_side(core).lease(id, counters);
    }

    /// The contexts of the vCPU, the oldest first.
    pub(crate) fn context_ids(&self) -> Vec<ContextId> {
        self.pmu
            .hosts()
            .contexts()
            .map(AttachedContext::id)
            .collect()
    }

    pub(crate) fn has_host_overflow(&self) -> bool {
        let core = self.core.as_deref().unwrap_or(&self.elsewhere);
        self.pmu.hosts().has_overflow(core)
    }

    pub(crate) fn sample_hosts(&mut self, moment: &Moment, values: &dyn Quantities) {
        self.take_samples(&mut Snapshot {
            host: Some((moment, values)),
            left: 0,
            ..Snapshot::of(&Located::NOWHERE)
        });
    }
}
