//! Counter reservations: the check on the way to each counter, and what decisions of
//! the arbiter do to the PMU.

use arbiter::{
    Access, Auditor, Context, Cookie, CounterId, CounterSet, Effects, Entropy, Layer, PcrRegister,
    PcrUnit, SmramSource, Verdict,
};
use pmu_model::{MsrIndex, Ring, Tsc};

use super::access::fields;
use super::{COUNTERS, Here, Logical, VcpuPmu, index_of};
use crate::core_pmu::CorePmu;
use crate::holdings::Holdings;

/// The reservations of one vCPU, with what they ask and report to.
#[derive(Debug)]
pub struct Reservations {
    /// Who holds which counter.
    pub unit: PcrUnit,
    /// Random bits for the guest.
    pub entropy: Box<dyn Entropy>,
    /// Receives every decision.
    pub audit: Box<dyn Auditor>,
    /// What all vCPUs of the VM hold.
    pub holdings: Holdings,
}

impl Reservations {
    /// The unit, and what its operations need at `now`.
    #[inline]
    pub(super) fn parts(&mut self, now: Tsc) -> (&mut PcrUnit, Context<'_>) {
        let context = Context {
            now,
            entropy: &mut *self.entropy,
            audit: &mut *self.audit,
        };
        (&mut self.unit, context)
    }
}

impl VcpuPmu {
    /// The same PMU with reservations. The unit has the counters of the model.
    #[must_use]
    pub fn with_reservations(mut self, reservations: Reservations) -> Self {
        self.reservations = Some(Box::new(reservations));
        self
    }

    /// Who holds which counter; `None` without reservations.
    pub fn reservations(&self) -> Option<&PcrUnit> {
        self.reservations
            .as_ref()
            .map(|reservations| &reservations.unit)
    }

    /// The TSC value as of which the reservations are: when the vCPU left its guest, or
    /// was ticked since.
    pub fn reservations_time(&self) -> Tsc {
        self.left
    }

    /// The vector of an interrupt to raise on this vCPU, once: a notice has come
    /// for the layer that runs.
    #[inline]
    pub fn take_notice(&mut self) -> Option<u8> {
        self.reservations.as_mut()?.unit.take_notice()
    }

    /// Whether to raise an SMI on this vCPU: a notice has come for the firmware, which has
    /// left code in SMM. [`VcpuPmu::smi_sent`] is to be called once that is done.
    #[inline]
    #[must_use]
    pub fn wants_smi(&self) -> bool {
        self.reservations().is_some_and(PcrUnit::wants_smi)
    }

    /// The SMI of [`VcpuPmu::wants_smi`] was raised, for all notices that have come.
    pub fn smi_sent(&mut self) {
        if let Some(reservations) = &mut self.reservations {
            reservations.unit.smi_sent();
        }
    }

    /// What [`VcpuPmu::take_smram`] named is in SMRAM: from now on an SMI calls it.
    pub fn smram_filled(&mut self) {
        if let Some(reservations) = &mut self.reservations {
            reservations.unit.smram_filled();
        }
    }

    /// What the firmware that ended its phase here wants to have in SMRAM, once
    /// ([`PcrUnit::take_smram`]).
    pub fn take_smram(&mut self) -> Option<SmramSource> {
        self.reservations.as_mut()?.unit.take_smram()
    }

    /// Lets the host itself act on the reservations, and does to the PMU what
    /// that means for it. `None` without reservations.
    pub fn arbitrate<R>(
        &mut self,
        core: Option<&mut CorePmu>,
        act: impl FnOnce(&mut PcrUnit, &mut Context<'_>) -> (R, Effects),
    ) -> Option<R> {
        let here = &mut self.here(core);
        self.look_for_room(here);
        let (unit, mut context) = self.reservations.as_mut()?.parts(self.left);
        let (result, effects) = act(unit, &mut context);
        self.take_away(here, effects);
        self.look_again(here);
        Some(result)
    }

    /// Counters that somebody holds.
    pub(super) fn held(&self) -> CounterSet {
        self.reservations()
            .map_or(CounterSet::EMPTY, |unit| unit.bank().held())
    }

    /// The layer that holds a counter.
    pub(super) fn owner_of(&self, counter: CounterId) -> Option<Layer> {
        let reservation = self.reservations()?.bank().reservation(counter)?;
        Some(reservation.owner)
    }

    /// Counters that `layer` holds.
    pub(super) fn held_by(&self, layer: Layer) -> CounterSet {
        self.reservations()
            .map_or(CounterSet::EMPTY, |unit| unit.bank().held_by(layer))
    }

    /// Whether an access to `msr` may present a cookie, so that the caller has
    /// to fetch the register that carries it.
    #[inline]
    pub fn takes_cookie(&self, msr: MsrIndex, write: bool) -> bool {
        PcrRegister::contains(msr.0)
            && self.reservations.is_some()
            && PcrRegister::decode(msr.0).is_some_and(|register| register.takes_cookie(write))
    }

    /// The layer of code that runs in `ring`, in SMM or not.
    #[inline]
    pub fn layer(&self, ring: Ring, smm: bool) -> Layer {
        match &self.reservations {
            Some(reservations) => reservations.unit.phase().layer(ring == Ring::Kernel, smm),
            None => match ring {
                Ring::Kernel => Layer::GuestKernel,
                Ring::User => Layer::GuestUser,
            },
        }
    }

    /// TSC value until which the vCPU is to be kept off its core, for having
    /// presented too many wrong cookies; `None` if it may run.
    #[inline]
    pub fn locked_out_until(&self) -> Option<Tsc> {
        self.reservations.as_ref()?.unit.locked_out_until(self.left)
    }

    /// The counter that a legacy register of `name` reaches, and what an access to
    /// it comes to. What is denied is recorded.
    #[inline]
    pub(super) fn check_legacy(
        &mut self,
        layer: Layer,
        name: CounterId,
        access: Access,
    ) -> Option<(CounterId, Verdict)> {
        let is_used = self.reservations.as_mut().is_some_and(|reservations| {
            let unit = &mut reservations.unit;
            !unit.map().is_identity() || !unit.bank().held().is_empty()
        });
        if !is_used {
            // Nobody has reserved anything, so the host alone decides.
            return Some((name, self.grant.check(layer, name, access)));
        }
        let counter = self.reservations.as_mut()?.unit.map().counter(name);
        let counter = counter.filter(|counter| self.model.has(*counter))?;
        let verdict = self.verdict((layer, Cookie::DEFAULT), counter, access);
        Some((counter, verdict))
    }

    /// What an access to one counter comes to: first what the host gave to the
    /// guest, then what the counter's owner says.
    #[inline]
    pub(super) fn judge(
        &self,
        caller: (Layer, Cookie),
        counter: CounterId,
        access: Access,
    ) -> Verdict {
        match (
            self.grant.check(caller.0, counter, access),
            &self.reservations,
        ) {
            (Verdict::Permit, Some(reservations)) => {
                reservations.unit.check(caller, counter, access, self.left)
            }
            (granted, _) => granted,
        }
    }

    /// What an access to one counter comes to that takes place: what is denied is
    /// recorded.
    #[inline]
    pub(super) fn verdict(
        &mut self,
        caller: (Layer, Cookie),
        counter: CounterId,
        access: Access,
    ) -> Verdict {
        let verdict = self.judge(caller, counter, access);
        if verdict != Verdict::Permit {
            self.note_denied(caller, counter, access, verdict);
        }
        verdict
    }

    /// What the host did not give is no business of the reservations.
    #[cold]
    pub(super) fn note_denied(
        &mut self,
        caller: (Layer, Cookie),
        counter: CounterId,
        access: Access,
        verdict: Verdict,
    ) {
        if self.grant.check(caller.0, counter, access) != Verdict::Permit {
            return;
        }
        if let Some(reservations) = &mut self.reservations {
            let (unit, mut context) = reservations.parts(self.left);
            unit.denied(caller, counter, access, verdict, &mut context);
        }
    }

    /// Lets what is due by TSC value `tsc` take place: ends of leases, of
    /// questions, and revocations. [`Progress::Left`](crate::Progress::Left) does
    /// so by itself; this is for a vCPU that is not run, halted for instance. It
    /// may be on no core.
    pub fn tick(&mut self, core: Option<&mut CorePmu>, tsc: Tsc) {
        self.left = self.left.max(tsc);
        self.tick_reservations(&mut self.here(core));
    }

    /// TSC value at which [`VcpuPmu::tick`] has something to do.
    #[inline]
    pub fn decision_due(&self) -> Option<Tsc> {
        let decision = self.reservations.as_ref();
        let decision = decision.and_then(|reservations| reservations.unit.deadline());
        let budget = self.grant.budget.until.map(|end| end.at);
        [decision, budget].into_iter().flatten().min()
    }

    /// Lets leases and budgets end and revocations take place that are due.
    #[inline]
    pub(super) fn tick_reservations(&mut self, here: &mut Here<'_>) {
        self.tick_budget(here);
        if !self.taken.counters.is_empty() {
            self.see_to_taken(here);
        }
        let Some(reservations) = &mut self.reservations else {
            return;
        };
        // Another vCPU may have ended the firmware's phase.
        reservations.unit.map();
        if self.is_frozen() {
            self.take_freeze(here);
        }
        // What changes hands may need another look before the next one does.
        for _ in 0..COUNTERS {
            let unit = self.reservations();
            let due = unit.and_then(PcrUnit::deadline);
            let waits = here.is_none() && self.waits_for_core();
            if waits || due.is_none_or(|due| self.left < due) {
                return;
            }
            self.look_for_room(here);
            let Some(reservations) = &mut self.reservations else {
                return;
            };
            let (unit, mut context) = reservations.parts(self.left);
            let effects = unit.tick(&mut context);
            self.take_away(here, effects);
            self.look_again(here);
        }
    }

    /// Does to the PMU what a decision means for it that no layer of the guest asked for.
    pub(super) fn take_away(&mut self, here: &mut Here<'_>, effects: Effects) {
        self.take_from(here, effects, effects.cleared);
    }

    /// Does to the PMU what a decision means for it. The accounting page tells owners other
    /// than who asked, whose counters `of` are cleared while they count.
    pub(super) fn take_from(&mut self, here: &mut Here<'_>, effects: Effects, of: CounterSet) {
        let mut taken = [None; COUNTERS];
        let lost = effects.cleared & of;
        for counter in lost.iter() {
            if self.model.has(counter) {
                let request = self.counters[index_of(counter)].request;
                taken[index_of(counter)] = request.filter(|request| request.enabled);
            }
        }
        self.take_effects(here, effects);
        for counter in lost.iter() {
            if self.model.has(counter) {
                self.counters[index_of(counter)].taken = taken[index_of(counter)];
            }
        }
    }

    /// Does to the PMU what a decision means for it.
    pub(super) fn take_effects(&mut self, here: &mut Here<'_>, effects: Effects) {
        self.note_holdings();
        if effects.is_empty() {
            return;
        }
        // The hypervisor may have more or less than before.
        if let Some(core) = here
            && core.host.is_enabled()
        {
            self.introduce_anew(core);
        }
        for counter in effects.cleared.iter() {
            self.clear(here, counter);
        }
        self.take_pebs_reach(here);
        for counter in (effects.reach & !effects.cleared).iter() {
            if self.model.has(counter) {
                self.settle(here, counter);
                self.update(here, counter);
            }
        }
        if self.is_frozen() {
            self.take_freeze(here);
        }
        self.refresh_needs(here.as_deref());
    }

    /// Leaves nothing of a counter's former owner.
    pub(super) fn clear(&mut self, here: &mut Here<'_>, counter: CounterId) {
        if !self.model.has(counter) {
            return;
        }
        match counter {
            CounterId::Programmable(n) => self.select[usize::from(n)] = 0,
            CounterId::Fixed(_) => {
                self.fixed_control &= !fields(std::iter::once(counter).collect());
            }
            CounterId::Ibs(kind) => self.clear_sampler(kind),
        }
        if let Some(bit) = counter.global_bit() {
            self.global_status &= !(1 << bit);
        }
        let index = index_of(counter);
        let mut lease = self.counters[index].lease.take();
        match (&mut lease, &mut *here) {
            (Some(held), Some(core)) => {
                core.bank.release(held);
                lease = None;
            }
            (Some(held), None) => held.stop(None),
            (None, _) => {}
        }
        // Off its core, the place is given back when it returns there.
        if lease.is_none() {
            self.active.remove(counter);
        }
        self.counters[index] = Logical {
            lease,
            ..Logical::default()
        };
        self.snapshot.counters[index] = [0; 4];
        self.pmi.clear(counter);
        self.pebs.clear(counter);
        self.unbacked.remove(counter);
        self.taken.clear(counter);
        if self.needs_places() {
            self.distribute(here);
        }
    }
}
