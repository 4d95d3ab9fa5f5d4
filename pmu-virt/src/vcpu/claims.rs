//! Who may use which counter: what the host gave to the guest, and what its layers have
//! reserved.

use std::sync::Arc;

use arbiter::{
    Access, AskedEvents, Auditor, Budget, Caller, Context, Cookie, CounterId, CounterSet, Entropy,
    Event, Grant, Layer, LegacyMap, PcrRegister, PcrUnit, Reason, Record, Request, SmramSource,
    Verdict,
};
use pmu_model::{MsrIndex, OwnerId, PmuModel, Ring, Tsc};
use thiserror::Error;

use super::access::{Part, has_alias};
use super::backing::OtherCores;
use super::terms::{Reach, Terms};
use super::{COUNTERS, index_of};
#[cfg(feature = "contexts")]
use crate::core_pmu::GuestClaim;
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

/// A budget that would give the guest what contexts of tools were promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "host contexts rely on counters that {owner} would get; unload one, or use \
     --host-policy host-first"
)]
pub struct BudgetRefused {
    /// The vCPU of the guest.
    pub owner: OwnerId,
}

/// Who may use the counters of one vCPU.
#[derive(Debug)]
pub struct Claims {
    grant: Grant,
    reservations: Option<Box<Reservations>>,
    /// The other cores, if the scheduler moves it there.
    others: Option<Arc<dyn OtherCores>>,
    /// The clock of the reservations: when the guest was last left, or ticked since.
    now: Tsc,
}

impl Claims {
    pub(super) fn new(grant: Grant) -> Self {
        Claims {
            grant,
            reservations: None,
            others: None,
            now: Tsc(0),
        }
    }

    /// Who holds which counter; `None` without reservations.
    #[inline]
    #[must_use]
    pub fn unit(&self) -> Option<&PcrUnit> {
        let reservations = self.reservations.as_ref()?;
        Some(&reservations.unit)
    }

    fn unit_mut(&mut self) -> Option<&mut PcrUnit> {
        let reservations = self.reservations.as_mut()?;
        Some(&mut reservations.unit)
    }

    /// The TSC value as of which the reservations are: when the vCPU left its guest, or
    /// was ticked since.
    #[must_use]
    pub fn time(&self) -> Tsc {
        self.now
    }

    /// The vector of an interrupt to raise on this vCPU, once: a notice has come
    /// for the layer that runs.
    #[inline]
    pub fn take_notice(&mut self) -> Option<u8> {
        self.unit_mut()?.take_notice()
    }

    /// Whether to raise an SMI on this vCPU: a notice has come for the firmware, which has
    /// left code in SMM. [`Claims::smi_sent`] is to be called once that is done.
    #[inline]
    #[must_use]
    pub fn wants_smi(&self) -> bool {
        self.unit().is_some_and(PcrUnit::wants_smi)
    }

    /// The SMI of [`Claims::wants_smi`] was raised, for all notices that have come.
    pub fn smi_sent(&mut self) {
        if let Some(unit) = self.unit_mut() {
            unit.smi_sent();
        }
    }

    /// What [`Claims::take_smram`] named is in SMRAM: from now on an SMI calls it.
    pub fn smram_filled(&mut self) {
        if let Some(unit) = self.unit_mut() {
            unit.smram_filled();
        }
    }

    /// What the firmware that ended its phase here wants to have in SMRAM, once
    /// ([`PcrUnit::take_smram`]).
    pub fn take_smram(&mut self) -> Option<SmramSource> {
        self.unit_mut()?.take_smram()
    }

    /// Whether an access to `msr` may present a cookie, so that the caller has
    /// to fetch the register that carries it.
    #[inline]
    #[must_use]
    pub fn takes_cookie(&self, msr: MsrIndex, write: bool) -> bool {
        PcrRegister::contains(msr.0)
            && self.reservations.is_some()
            && PcrRegister::decode(msr.0).is_some_and(|register| register.takes_cookie(write))
    }

    /// The layer of code that runs in `ring`, in SMM or not.
    #[inline]
    #[must_use]
    pub fn layer(&self, ring: Ring, smm: bool) -> Layer {
        match self.unit() {
            Some(unit) => unit.phase().layer(ring == Ring::Kernel, smm),
            None => match ring {
                Ring::Kernel => Layer::GuestKernel,
                Ring::User => Layer::GuestUser,
            },
        }
    }

    /// TSC value until which the vCPU is to be kept off its core, for having
    /// presented too many wrong cookies; `None` if it may run.
    #[inline]
    #[must_use]
    pub fn locked_out_until(&self) -> Option<Tsc> {
        self.unit()?.locked_out_until(self.now)
    }

    /// TSC value at which [`VcpuPmu::tick`](super::VcpuPmu::tick) has something to do.
    #[inline]
    #[must_use]
    pub fn due(&self) -> Option<Tsc> {
        let decision = self.unit().and_then(PcrUnit::deadline);
        let budget = self.grant.budget.until.map(|end| end.at);
        [decision, budget].into_iter().flatten().min()
    }

    /// What the guest may use at a time.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.grant.budget
    }

    /// Whether a request of the guest waits until the vCPU moves to a core that backs it.
    #[inline]
    #[must_use]
    pub fn waits_for_room(&self) -> bool {
        self.unit().is_some_and(PcrUnit::waits_for_move)
    }

    /// The scheduler moves vCPUs between this core and `others`: a request that this core
    /// cannot back waits for the move ([`VcpuPmu::needs_room`](super::VcpuPmu::needs_room)),
    /// if one of the others can.
    pub fn set_other_cores(&mut self, others: Arc<dyn OtherCores>) {
        self.others = Some(others);
    }

    pub(super) fn reserve(&mut self, reservations: Reservations) {
        self.reservations = Some(Box::new(reservations));
    }

    /// Whether anything may be decided here.
    #[inline]
    pub(super) fn decide(&self) -> bool {
        self.reservations.is_some() || self.grant.budget.until.is_some()
    }

    /// Forgets what layers of the guest have reserved. The phase of the firmware is the
    /// machine's, which restarts it itself.
    pub(super) fn reset(&mut self) {
        if let Some(unit) = self.unit_mut() {
            unit.reset();
        }
    }

    /// It is `now`, if it is not later.
    pub(super) fn pass(&mut self, now: Tsc) {
        self.now = self.now.max(now);
    }

    /// The guest was left at this time.
    #[inline]
    pub(super) fn set_time(&mut self, left: Tsc) {
        self.now = left;
    }

    /// Has the unit act.
    pub(super) fn act<R>(
        &mut self,
        act: impl FnOnce(&mut PcrUnit, &mut Context<'_>) -> R,
    ) -> Option<R> {
        let Reservations {
            unit,
            entropy,
            audit,
            ..
        } = &mut **self.reservations.as_mut()?;
        let mut context = Context {
            now: self.now,
            entropy: &mut **entropy,
            audit: &mut **audit,
        };
        Some(act(unit, &mut context))
    }

    /// Whether another vCPU has ended the firmware's phase since `terms`, so that legacy
    /// names are others.
    #[inline]
    pub(super) fn has_renamed(&mut self, terms: &Terms) -> bool {
        self.unit_mut()
            .is_some_and(|unit| unit.map().is_identity() == terms.reach.renames())
    }

    /// Whether that was decided since `terms` which changes them, be it without effects:
    /// counters are held anew, or by others, or for other events, or have other names.
    pub(super) fn differ_from(&mut self, terms: &Terms) -> bool {
        let renamed = self.has_renamed(terms);
        let Some(unit) = self.unit() else {
            return false;
        };
        let bank = unit.bank();
        let is_other = |counter| {
            let reservation = bank.reservation(counter);
            reservation.and_then(|one| one.event) != terms.event_of(counter)
        };
        renamed
            || bank.held() != terms.held
            || bank.held_by_guest() != terms.held_by_guest
            || bank.held().iter().any(is_other)
    }

    /// What counters count by, as of now.
    pub(super) fn terms(&mut self, model: &PmuModel) -> Terms {
        let reach = self.unit_mut().map(|unit| Reach::of(*unit.map(), unit));
        self.terms_with(model, reach)
    }

    /// The same as long as no legacy names were given.
    pub(super) fn first_terms(&self, model: &PmuModel) -> Terms {
        let reach = |unit| Reach::of(LegacyMap::identity(), unit);
        self.terms_with(model, self.unit().map(reach))
    }

    fn terms_with(&self, model: &PmuModel, reach: Option<Reach>) -> Terms {
        let grant = self.grant;
        let usable = |of_hypervisor: CounterSet| {
            let counters = model.counters().filter(|counter| grant.holds(*counter));
            let usable = counters.filter(|counter| !of_hypervisor.contains(*counter));
            usable.collect()
        };
        let reach = reach.unwrap_or_else(Reach::everything);
        let Some(unit) = self.unit() else {
            return Terms {
                grant,
                reach,
                held: CounterSet::EMPTY,
                held_by_guest: CounterSet::EMPTY,
                usable: usable(CounterSet::EMPTY),
                named: [None; COUNTERS],
            };
        };
        let bank = unit.bank();
        let mut named = [None; COUNTERS];
        for counter in bank.held().iter() {
            if let Some(event) = named.get_mut(index_of(counter)) {
                *event = bank.reservation(counter).and_then(|one| one.event);
            }
        }
        Terms {
            grant,
            reach,
            held: bank.held(),
            held_by_guest: bank.held_by_guest(),
            usable: usable(bank.held_by(Layer::Hypervisor)),
            named,
        }
    }

    /// Tells the VM what this vCPU holds, and how many counters its guest may want.
    pub(super) fn note_holdings(&self, owner: OwnerId, terms: &Terms) {
        if let Some(reservations) = &self.reservations {
            let event = |counter| terms.event_of(counter);
            let held = terms.held_by_guest;
            (reservations.holdings).note(owner, held, event, terms.wished());
        }
    }

    /// What the guest may want of a core: counters of the model that it was given and that
    /// the hypervisor has not reserved, and each event that has a name.
    #[cfg(feature = "contexts")]
    pub(super) fn wish(&self, model: &PmuModel, terms: &Terms) -> GuestClaim {
        let reservations = self.reservations.as_ref();
        GuestClaim {
            counters: terms.wished(),
            events: terms.events(model),
            family: Some(model.events()),
            holdings: reservations.map(|reservations| reservations.holdings.clone()),
        }
    }

    /// The budget is this one from now on.
    pub(super) fn set_budget(&mut self, budget: Budget) {
        self.grant.budget = budget;
    }

    /// What each layer asks for.
    pub(super) fn asked(&self) -> AskedEvents {
        self.unit().map(PcrUnit::asked_events).unwrap_or_default()
    }

    /// The same together with what a write asks for.
    pub(super) fn asked_with(
        &self,
        register: PcrRegister,
        value: u64,
        caller: Caller,
    ) -> AskedEvents {
        let mut asked = self.asked();
        if let PcrRegister::Request = register
            && let Ok(Request::Reserve { event, .. }) = Request::decode(value, caller.presented)
            && let Some(of_layer) = asked.get_mut(usize::from(caller.layer.code()))
        {
            // Of a request that is pending already it is not one more.
            of_layer.get_or_insert(event);
        }
        asked
    }

    #[inline]
    pub(super) fn looks_for_room(&self) -> bool {
        self.unit().is_some_and(PcrUnit::looks_for_room)
    }

    /// For how many promised counters the other core with the most room has room.
    pub(super) fn room_elsewhere(&self) -> usize {
        self.others.as_ref().map_or(0, |others| others.most_room())
    }

    /// The layer that holds a counter.
    pub(super) fn owner_of(&self, counter: CounterId) -> Option<Layer> {
        let reservation = self.unit()?.bank().reservation(counter)?;
        Some(reservation.owner)
    }

    /// Counters that others than `layer` hold.
    pub(super) fn held_beside(&self, layer: Layer) -> CounterSet {
        self.unit().map_or(CounterSet::EMPTY, |unit| {
            let bank = unit.bank();
            bank.held() & !bank.held_by(layer)
        })
    }

    /// The counter that a legacy register of `name` reaches, and what an access to
    /// it comes to. What is denied is recorded.
    #[inline]
    pub(super) fn check_legacy(
        &mut self,
        model: &PmuModel,
        layer: Layer,
        name: CounterId,
        access: Access,
    ) -> Option<(CounterId, Verdict)> {
        let is_used = self
            .unit_mut()
            .is_some_and(|unit| !unit.map().is_identity() || !unit.bank().held().is_empty());
        if !is_used {
            // Nobody has reserved anything, so the host alone decides.
            return Some((name, self.grant.check(layer, name, access)));
        }
        let counter = self.unit_mut()?.map().counter(name);
        let counter = counter.filter(|counter| model.has(*counter))?;
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
        match (self.grant.check(caller.0, counter, access), self.unit()) {
            (Verdict::Permit, Some(unit)) => unit.check(caller, counter, access, self.now),
            (granted, _) => granted,
        }
    }

    /// The same of an access that takes place: what is denied is recorded.
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
        if self.grant.check(caller.0, counter, access) == Verdict::Permit {
            self.act(|unit, cx| unit.denied(caller, counter, access, verdict, cx));
        }
    }

    /// What an access to a counter's alias comes to; `None` if there is no such alias, and,
    /// with a record, if the cookie has too many bits.
    pub(super) fn check_alias(
        &mut self,
        model: &PmuModel,
        (counter, part): (CounterId, Part),
        caller: Caller,
        access: Access,
    ) -> Option<Verdict> {
        let reservations = self.reservations.as_mut()?;
        if !has_alias(model, counter, part) {
            return None;
        }
        let Some(cookie) = Cookie::new(caller.presented) else {
            reservations.audit.record(&Record {
                layer: caller.layer,
                counter: Some(counter),
                event: Event::Faulted(Reason::Malformed),
            });
            return None;
        };
        Some(self.verdict((caller.layer, cookie), counter, access))
    }

    /// A counter that the host did not grant is absent from the block, as is a fixed one that
    /// the model's bitmap leaves out. What is beyond the model's counters the arbiter refuses.
    pub(super) fn may_manage(&self, model: &PmuModel, register: PcrRegister, layer: Layer) -> bool {
        match register {
            PcrRegister::ManagementKey(counter)
            | PcrRegister::AccessKey(counter)
            | PcrRegister::Control(counter)
            | PcrRegister::DropValue(counter)
            | PcrRegister::Status(counter) => {
                let given = self.grant.check(layer, counter, Access::Read);
                given == Verdict::Permit && !is_left_out(model, counter)
            }
            PcrRegister::Counter(_)
            | PcrRegister::Select(_)
            | PcrRegister::Overflow(_)
            | PcrRegister::Ibs(_)
            | PcrRegister::LegacyMap(_)
            | PcrRegister::Random
            | PcrRegister::Phase
            | PcrRegister::NoticeVector
            | PcrRegister::Request
            | PcrRegister::Answer
            | PcrRegister::Granted
            | PcrRegister::Notice
            | PcrRegister::Reply
            | PcrRegister::Refusal => true,
        }
    }
}

fn is_left_out(model: &PmuModel, counter: CounterId) -> bool {
    let (CounterId::Programmable(n) | CounterId::Fixed(n)) = counter else {
        return false;
    };
    n < model.counts().of(counter) && !model.has(counter)
}
