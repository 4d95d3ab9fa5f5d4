//! Counter reservations: the check on the way to each counter, what decisions of
//! the arbiter do to the PMU, and the synthetic MSRs of `docs/pcr.md`, RDPMC with
//! a cookie among them.

use arbiter::{
    Access, AskedEvents, Auditor, Caller, Context, Cookie, CounterId, CounterSet, Effects, Entropy,
    Event, Layer, PcrRegister, PcrUnit, Reason, Record, Request, SmramSource, Verdict,
};
use pmu_model::{MsrIndex, Ring, Tsc, WriteForm};

use super::access::Part;
use super::{
    COUNTERS, Here, Logical, MsrRead, MsrWrite, ReadOutcome, VcpuPmu, WriteOutcome, index_of,
};
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
    fn take_from(&mut self, here: &mut Here<'_>, effects: Effects, of: CounterSet) {
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
        for counter in (effects.reach & !effects.cleared).iter() {
            if self.model.has(counter) {
                self.settle(here, counter);
                self.update(here, counter);
            }
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
            CounterId::Fixed(n) => self.fixed_control &= !(0xf << (4 * u32::from(n))),
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
        if self.needs_places() {
            self.distribute(here);
        }
    }
}

impl VcpuPmu {
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
        let (layer, part) = (Layer::Hypervisor, Part::Count(WriteForm::FullWidth));
        let caller = Caller { layer, presented };
        let cookie = self.alias_cookie(counter, part, caller)?;
        let verdict = self.verdict((layer, cookie), counter, Access::Read);
        if verdict != Verdict::Permit {
            return Some(Err(verdict));
        }
        let here = &mut self.here(core);
        match self.read_part(here, verdict, counter, part) {
            ReadOutcome::Value(value) => Some(Ok(value)),
            _ => None,
        }
    }

    /// A read of one counter with a cookie.
    pub(super) fn read_alias(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        part: Part,
        caller: Caller,
        access: Access,
    ) -> ReadOutcome {
        let Some(cookie) = self.alias_cookie(counter, part, caller) else {
            return ReadOutcome::Gp;
        };
        let verdict = self.verdict((caller.layer, cookie), counter, access);
        self.read_part(here, verdict, counter, part)
    }

    fn write_alias(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        part: Part,
        value: u64,
        caller: Caller,
    ) -> WriteOutcome {
        let Some(cookie) = self.alias_cookie(counter, part, caller) else {
            return WriteOutcome::Gp;
        };
        let verdict = self.verdict((caller.layer, cookie), counter, Access::Write);
        self.write_part(here, verdict, counter, part, value)
    }

    fn has_alias(&self, counter: CounterId, part: Part) -> bool {
        let exists = self.reservations.is_some() && self.model.has(counter);
        exists && (self.model.has_status() || !matches!(part, Part::Overflow))
    }

    /// The cookie that is presented to an alias; `None` if there is no such alias,
    /// and, with a record, if the cookie has too many bits.
    fn alias_cookie(&mut self, counter: CounterId, part: Part, caller: Caller) -> Option<Cookie> {
        if !self.has_alias(counter, part) {
            return None;
        }
        let cookie = Cookie::new(caller.presented);
        if let (None, Some(reservations)) = (cookie, &mut self.reservations) {
            reservations.audit.record(&Record {
                layer: caller.layer,
                counter: Some(counter),
                event: Event::Faulted(Reason::Malformed),
            });
        }
        cookie
    }

    /// RDMSR of an index of the block.
    pub(super) fn read_block(
        &mut self,
        here: &mut Here<'_>,
        msr: MsrIndex,
        caller: Caller,
    ) -> MsrRead {
        let register = PcrRegister::decode(msr.0);
        MsrRead {
            outcome: register.map_or(ReadOutcome::Gp, |register| {
                self.read_register(here, register, caller)
            }),
            secret: matches!(register, Some(PcrRegister::Random)),
        }
    }

    fn read_register(
        &mut self,
        here: &mut Here<'_>,
        register: PcrRegister,
        caller: Caller,
    ) -> ReadOutcome {
        if let Some((counter, part)) = alias(register) {
            return self.read_alias(here, counter, part, caller, Access::Read);
        }
        if !self.may_manage(register, caller.layer) {
            return ReadOutcome::Gp;
        }
        let Some(reservations) = &mut self.reservations else {
            return ReadOutcome::Gp;
        };
        let (unit, mut context) = reservations.parts(self.left);
        match unit.read(register, caller, &mut context) {
            Some(value) => ReadOutcome::Value(value),
            None => ReadOutcome::Gp,
        }
    }

    /// WRMSR of an index of the block.
    pub(super) fn write_block(
        &mut self,
        here: &mut Here<'_>,
        msr: MsrIndex,
        value: u64,
        caller: Caller,
    ) -> MsrWrite {
        let register = PcrRegister::decode(msr.0);
        let outcome = register.map_or(WriteOutcome::Gp, |register| {
            self.write_register(here, register, value, caller)
        });
        MsrWrite {
            starts_counting: outcome == WriteOutcome::Done && starts_counting(register),
            secret: is_key(register),
            ..outcome.into()
        }
    }

    fn write_register(
        &mut self,
        here: &mut Here<'_>,
        register: PcrRegister,
        value: u64,
        caller: Caller,
    ) -> WriteOutcome {
        if let Some((counter, part)) = alias(register) {
            return self.write_alias(here, counter, part, value, caller);
        }
        if !self.may_manage(register, caller.layer) {
            return WriteOutcome::Gp;
        }
        // Only these can take a counter.
        let takes = matches!(
            register,
            PcrRegister::Request | PcrRegister::ManagementKey(_) | PcrRegister::Reply
        );
        if takes {
            let asked = self.asked_with(register, value, caller);
            self.look_for_room_of(here, asked);
        }
        // One that lends its counter need not be the one that asks.
        let others = self.held() & !self.held_by(caller.layer);
        let Some(reservations) = &mut self.reservations else {
            return WriteOutcome::Gp;
        };
        let (unit, mut context) = reservations.parts(self.left);
        match unit.write(register, value, caller, &mut context) {
            Some(effects) => {
                // If that was the end of the firmware's phase, legacy names are
                // those of this moment.
                unit.map();
                self.take_from(here, effects, others);
                self.look_again(here);
                WriteOutcome::Done
            }
            None => WriteOutcome::Gp,
        }
    }

    /// What layers ask for together with what a write asks for.
    fn asked_with(&self, register: PcrRegister, value: u64, caller: Caller) -> AskedEvents {
        let asked = self.reservations().map(PcrUnit::asked_events);
        let mut asked = asked.unwrap_or_default();
        if let PcrRegister::Request = register
            && let Ok(Request::Reserve { event, .. }) = Request::decode(value, caller.presented)
            && let Some(of_layer) = asked.get_mut(usize::from(caller.layer.code()))
        {
            // Of a request that is pending already it is not one more.
            of_layer.get_or_insert(event);
        }
        asked
    }

    /// A counter that the host did not grant is absent from the block.
    fn may_manage(&self, register: PcrRegister, layer: Layer) -> bool {
        match register {
            PcrRegister::ManagementKey(counter)
            | PcrRegister::AccessKey(counter)
            | PcrRegister::Control(counter)
            | PcrRegister::DropValue(counter)
            | PcrRegister::Status(counter) => {
                self.grant.check(layer, counter, Access::Read) == Verdict::Permit
            }
            PcrRegister::Counter(_)
            | PcrRegister::Select(_)
            | PcrRegister::Overflow(_)
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

/// Whether the register takes a cookie as its value.
pub(super) fn is_key(register: Option<PcrRegister>) -> bool {
    matches!(
        register,
        Some(PcrRegister::ManagementKey(_) | PcrRegister::AccessKey(_))
    )
}

/// Whether a guest writes the register before it reads counts.
fn starts_counting(register: Option<PcrRegister>) -> bool {
    matches!(
        register,
        Some(
            PcrRegister::Select(_)
                | PcrRegister::AccessKey(_)
                | PcrRegister::Phase
                | PcrRegister::Request
        )
    )
}

/// What an alias register is another name of.
fn alias(register: PcrRegister) -> Option<(CounterId, Part)> {
    match register {
        PcrRegister::Counter(counter) => Some((counter, Part::Count(WriteForm::FullWidth))),
        PcrRegister::Select(counter) => Some((counter, Part::Control)),
        PcrRegister::Overflow(counter) => Some((counter, Part::Overflow)),
        PcrRegister::ManagementKey(_)
        | PcrRegister::AccessKey(_)
        | PcrRegister::Control(_)
        | PcrRegister::DropValue(_)
        | PcrRegister::Status(_)
        | PcrRegister::LegacyMap(_)
        | PcrRegister::Random
        | PcrRegister::Phase
        | PcrRegister::NoticeVector
        | PcrRegister::Request
        | PcrRegister::Answer
        | PcrRegister::Granted
        | PcrRegister::Notice
        | PcrRegister::Reply
        | PcrRegister::Refusal => None,
    }
}
