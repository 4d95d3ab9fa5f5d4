//! Where decisions become counts: what the guest and the host's tools ask for passes by
//! who may use which counter, and what was decided is done to the counters.

use arbiter::{
    Access, AdminAct, AskedEvents, Budget, BudgetEnd, Caller, Context, Cookie, CounterId,
    CounterSet, Effects, Layer, PcrRegister, PcrUnit, PerKind, Verdict,
};
use pmu_model::accounting::{self, CounterAccount, PageRegister, Word};
use pmu_model::{MsrIndex, Progress, Register, Tsc, UnavailableReason};

use super::access::{self, COUNT, Part, part_of};
use super::backing::backing;
use super::claims::{BudgetRefused, Claims, Reservations};
use super::counting::{Counting, ground};
use super::hosts;
use super::losses::Retry;
use super::registers::Registers;
use super::seat::Seat;
use super::terms::counters_there;
use super::{COUNTERS, MsrRead, MsrWrite, ReadOutcome, WriteOutcome};
use crate::core_pmu::CorePmu;

/// So long after a physical counter was taken it is tried again, in milliseconds, and
/// each further time after twice as long, up to the last: a try costs system calls.
const FIRST_TRY_MS: u32 = 10;
const LAST_TRY_MS: u32 = 1_000;

/// The counters of one vCPU, and who may use them.
#[derive(Debug)]
pub(super) struct Tenancy {
    claims: Claims,
    counting: Counting,
    /// The budget has changed while the vCPU was on no core.
    budget_due: bool,
    /// The guest has done nothing since it was reset.
    is_fresh: bool,
}

impl Tenancy {
    pub(super) fn new(claims: Claims, counting: Counting) -> Self {
        Tenancy {
            claims,
            counting,
            budget_due: false,
            is_fresh: true,
        }
    }

    #[inline]
    pub(super) fn claims(&self) -> &Claims {
        &self.claims
    }

    #[inline]
    pub(super) fn claims_mut(&mut self) -> &mut Claims {
        &mut self.claims
    }

    #[inline]
    pub(super) fn counting(&self) -> &Counting {
        &self.counting
    }

    #[inline]
    pub(super) fn counting_mut(&mut self) -> &mut Counting {
        &mut self.counting
    }

    /// What was decided counters count by from now on.
    #[cold]
    pub(super) fn renew_terms(&mut self) {
        let terms = self.claims.terms(self.counting.tally().model());
        self.counting.tally_mut().set_terms(terms);
    }

    /// The vCPU has these reservations, of which none is made yet.
    pub(super) fn reserve(&mut self, reservations: Reservations) {
        self.claims.reserve(reservations);
        self.power_on();
    }

    /// The guest has reserved nothing. Its firmware's phase may be that of before, which the
    /// machine is about to start over: no names are given for its end.
    fn power_on(&mut self) {
        let terms = self.claims.first_terms(self.counting.tally().model());
        self.counting.tally_mut().set_terms(terms);
        self.is_fresh = true;
    }

    /// Whatever is done begins with it: another vCPU may have ended the firmware's phase.
    #[inline]
    pub(super) fn begin(&mut self) {
        if !self.is_fresh && self.claims.has_renamed(self.counting.tally().terms()) {
            self.renew_terms();
        }
    }

    /// The guest does something, or time passes for it: if its firmware's phase starts over
    /// after a reset, it has.
    #[inline]
    fn leave_reset(&mut self) {
        if std::mem::take(&mut self.is_fresh) {
            self.begin();
        }
    }

    /// What is done ends with it: owners hear which of their counters have no physical one.
    /// Decisions come after it too: it is who owns them by then that is to hear.
    #[inline]
    pub(super) fn tell_owners(&mut self) {
        if self.counting.tally().losses().has_untold() {
            self.tell_losses();
        }
    }

    #[cold]
    fn tell_losses(&mut self) {
        for counter in self.counting.tally_mut().losses_mut().take_untold() {
            self.claims.act(|unit, cx| unit.note_unbacked(counter, cx));
        }
    }

    /// Tells the VM what this vCPU holds, and how many counters its guest may want.
    fn note_holdings(&self) {
        let tally = self.counting.tally();
        self.claims.note_holdings(tally.owner(), tally.terms());
    }

    pub(super) fn reset(&mut self, seat: &mut Seat<'_>) {
        self.counting.reset(seat);
        self.claims.reset();
        self.power_on();
        self.note_holdings();
    }

    /// Has the unit act, with owners told of all that was found before.
    fn act<R>(&mut self, act: impl FnOnce(&mut PcrUnit, &mut Context<'_>) -> R) -> Option<R> {
        self.tell_owners();
        self.claims.act(act)
    }

    /// Before an access: where PMIs freeze, it finds that done.
    #[inline]
    fn begin_access(&mut self, seat: &mut Seat<'_>) {
        self.leave_reset();
        if self.counting.tally().registers().is_freezing() {
            self.counting.settle_freeze(seat);
            self.tell_owners();
        }
    }

    pub(super) fn rdmsr(&mut self, seat: &mut Seat<'_>, msr: MsrIndex, caller: Caller) -> MsrRead {
        self.begin_access(seat);
        // No model has registers where the block is.
        let (outcome, secret) = if PcrRegister::contains(msr.0) {
            let register = PcrRegister::decode(msr.0);
            let outcome = register.map_or(ReadOutcome::Gp, |register| {
                self.read_block(seat, register, caller)
            });
            (outcome, matches!(register, Some(PcrRegister::Random)))
        } else {
            (self.read_model(seat, msr, caller.layer), false)
        };
        self.tell_owners();
        MsrRead { outcome, secret }
    }

    fn read_model(&mut self, seat: &mut Seat<'_>, msr: MsrIndex, layer: Layer) -> ReadOutcome {
        let model = self.counting.tally().model();
        let Some(register) = model.decode(msr) else {
            let merged = self.counting.tally().registers().read_merged(model, msr);
            return merged.unwrap_or_else(|| self.read_page(seat, msr, layer));
        };
        let Some((name, part)) = part_of(register) else {
            return ReadOutcome::Value(self.counting.read_shared(seat, register));
        };
        match self.claims.check_legacy(model, layer, name, Access::Read) {
            Some((counter, verdict)) => self.read_part(seat, verdict, counter, part),
            None => ReadOutcome::NotHandled,
        }
    }

    pub(super) fn rdpmc(&mut self, seat: &mut Seat<'_>, ecx: u32, caller: Caller) -> ReadOutcome {
        self.begin_access(seat);
        let model = self.counting.tally().model();
        let outcome = if let Some(name) = model.rdpmc_counter(ecx) {
            let checked = self
                .claims
                .check_legacy(model, caller.layer, name, Access::Rdpmc);
            match checked {
                Some((counter, verdict)) => self.read_part(seat, verdict, counter, COUNT),
                None => ReadOutcome::Gp,
            }
        } else if let Some(counter) = PcrRegister::rdpmc(ecx) {
            self.read_alias(seat, (counter, COUNT), caller, Access::Rdpmc)
        } else {
            ReadOutcome::Gp
        };
        self.tell_owners();
        outcome
    }

    /// A read of what belongs to one counter, by the `verdict` on it.
    #[inline]
    fn read_part(
        &mut self,
        seat: &mut Seat<'_>,
        verdict: Verdict,
        counter: CounterId,
        part: Part,
    ) -> ReadOutcome {
        match verdict {
            Verdict::Permit => self.counting.read_part(seat, counter, part),
            Verdict::Drop { read_as } => ReadOutcome::Value(read_as),
            Verdict::Fault => ReadOutcome::Gp,
        }
    }

    /// A read of one counter with a cookie.
    fn read_alias(
        &mut self,
        seat: &mut Seat<'_>,
        what: (CounterId, Part),
        caller: Caller,
        access: Access,
    ) -> ReadOutcome {
        let model = self.counting.tally().model();
        match self.claims.check_alias(model, what, caller, access) {
            Some(verdict) => self.read_part(seat, verdict, what.0, what.1),
            None => ReadOutcome::Gp,
        }
    }

    /// RDMSR of a register of the block.
    fn read_block(
        &mut self,
        seat: &mut Seat<'_>,
        register: PcrRegister,
        caller: Caller,
    ) -> ReadOutcome {
        let model = self.counting.tally().model();
        if let Some(what) = access::alias(model, register) {
            return self.read_alias(seat, what, caller, Access::Read);
        }
        if !self.claims.may_manage(model, register, caller.layer) {
            return ReadOutcome::Gp;
        }
        let value = self.act(|unit, cx| unit.read(register, caller, cx));
        match value.flatten() {
            Some(value) => ReadOutcome::Value(value),
            None => ReadOutcome::Gp,
        }
    }

    /// RDMSR of an index that the model does not have.
    fn read_page(&mut self, seat: &mut Seat<'_>, msr: MsrIndex, layer: Layer) -> ReadOutcome {
        match accounting::decode(msr) {
            Some(PageRegister::Snapshot) => {
                self.counting.take_snapshot(seat);
                ReadOutcome::Value(self.counting.page().sequence())
            }
            Some(PageRegister::Sequence) => ReadOutcome::Value(self.counting.page().sequence()),
            Some(PageRegister::Word(counter, word)) => self.read_word(counter, word, layer),
            None if accounting::contains(msr) => ReadOutcome::Gp,
            None => ReadOutcome::NotHandled,
        }
    }

    /// A counter that the reader may not use is as absent here as at its own
    /// register; but where that yields a value, the status word tells.
    fn read_word(&mut self, counter: CounterId, word: Word, layer: Layer) -> ReadOutcome {
        let model = self.counting.tally().model();
        if !model.has(counter) {
            // CPUID tells of so many counters, not of which are left out.
            let told = matches!(counter, CounterId::Fixed(n) if n < model.fixed());
            return if told {
                ReadOutcome::Value(0)
            } else {
                ReadOutcome::Gp
            };
        }
        let caller = (layer, Cookie::DEFAULT);
        let verdict = self.claims.judge(caller, counter, Access::Read);
        if verdict == Verdict::Permit {
            return ReadOutcome::Value(self.counting.page().word(counter, word));
        }
        if let (Verdict::Drop { .. }, Word::Status) = (verdict, word) {
            return ReadOutcome::Value(CounterAccount::NOT_GRANTED.status());
        }
        (self.claims).note_denied(caller, counter, Access::Read, verdict);
        match verdict {
            Verdict::Drop { read_as } => ReadOutcome::Value(read_as),
            Verdict::Fault | Verdict::Permit => ReadOutcome::Gp,
        }
    }

    pub(super) fn wrmsr(
        &mut self,
        seat: &mut Seat<'_>,
        msr: MsrIndex,
        value: u64,
        caller: Caller,
    ) -> MsrWrite {
        self.begin_access(seat);
        let written = if PcrRegister::contains(msr.0) {
            self.write_block(seat, msr, value, caller)
        } else {
            self.write_model(seat, msr, value, caller.layer)
        };
        self.tell_owners();
        let programmed = written.starts_counting || written.sets_count;
        self.counting.note_programmed(programmed);
        written
    }

    fn write_model(
        &mut self,
        seat: &mut Seat<'_>,
        msr: MsrIndex,
        value: u64,
        layer: Layer,
    ) -> MsrWrite {
        let model = self.counting.tally().model();
        let Some(register) = model.decode(msr) else {
            return if accounting::contains(msr) {
                WriteOutcome::Gp.into()
            } else {
                Registers::write_merged(model, msr, value)
            };
        };
        let outcome = match part_of(register) {
            Some((name, part)) => {
                match self.claims.check_legacy(model, layer, name, Access::Write) {
                    Some((counter, verdict)) => {
                        self.write_part(seat, verdict, (counter, part), value)
                    }
                    None => WriteOutcome::NotHandled,
                }
            }
            None => done(self.counting.write_shared(seat, register, value)),
        };
        let is_start = matches!(
            register,
            Register::Select(_) | Register::FixedControl | Register::GlobalControl
        );
        let is_count = matches!(register, Register::Counter { .. });
        MsrWrite {
            starts_counting: is_start && outcome == WriteOutcome::Done,
            sets_count: is_count && outcome == WriteOutcome::Done,
            ..outcome.into()
        }
    }

    /// A write of what belongs to one counter, by the `verdict` on it.
    #[inline]
    fn write_part(
        &mut self,
        seat: &mut Seat<'_>,
        verdict: Verdict,
        (counter, part): (CounterId, Part),
        value: u64,
    ) -> WriteOutcome {
        match verdict {
            Verdict::Permit => done(self.counting.write_part(seat, counter, part, value)),
            Verdict::Drop { .. } => WriteOutcome::Done,
            Verdict::Fault => WriteOutcome::Gp,
        }
    }

    /// WRMSR of an index of the block.
    fn write_block(
        &mut self,
        seat: &mut Seat<'_>,
        msr: MsrIndex,
        value: u64,
        caller: Caller,
    ) -> MsrWrite {
        let register = PcrRegister::decode(msr.0);
        let outcome = register.map_or(WriteOutcome::Gp, |register| {
            self.write_register(seat, register, value, caller)
        });
        let is_done = outcome == WriteOutcome::Done;
        MsrWrite {
            starts_counting: is_done && access::starts_counting(register),
            sets_count: is_done && matches!(register, Some(PcrRegister::Counter(_))),
            secret: access::is_key(register),
            ..outcome.into()
        }
    }

    fn write_register(
        &mut self,
        seat: &mut Seat<'_>,
        register: PcrRegister,
        value: u64,
        caller: Caller,
    ) -> WriteOutcome {
        let model = self.counting.tally().model();
        if let Some(what) = access::alias(model, register) {
            return match self.claims.check_alias(model, what, caller, Access::Write) {
                Some(verdict) => self.write_part(seat, verdict, what, value),
                None => WriteOutcome::Gp,
            };
        }
        if !self.claims.may_manage(model, register, caller.layer) {
            return WriteOutcome::Gp;
        }
        // Only these can take a counter.
        let takes = matches!(
            register,
            PcrRegister::Request | PcrRegister::ManagementKey(_) | PcrRegister::Reply
        );
        if takes {
            let asked = self.claims.asked_with(register, value, caller);
            self.look_for_room(seat, asked);
        }
        let handed = match register {
            PcrRegister::ManagementKey(counter) => Some((counter, self.claims.owner_of(counter))),
            _ => None,
        };
        // One that lends its counter need not be the one that asks.
        let others = self.claims.held_beside(caller.layer);
        let written = self.act(|unit, cx| unit.write(register, value, caller, cx));
        let Some(effects) = written.flatten() else {
            return WriteOutcome::Gp;
        };
        self.take_effects(seat, effects, others);
        if let Some((counter, before)) = handed
            && before.is_some()
            && before != self.claims.owner_of(counter)
        {
            let tally = self.counting.tally_mut();
            let is_held = tally.terms().held_by_guest.contains(counter);
            tally.losses_mut().hand_over(counter, is_held);
            self.tell_owners();
        }
        if self.counting.tally().registers().is_frozen() {
            // It may reach other counters than before.
            self.counting.take_freeze(seat);
            self.tell_owners();
        }
        self.look_again(seat);
        WriteOutcome::Done
    }

    /// A read of a counter by the hypervisor, with a cookie.
    pub(super) fn read_as_hypervisor(
        &mut self,
        seat: &mut Seat<'_>,
        counter: CounterId,
        presented: u64,
    ) -> Option<Result<u64, Verdict>> {
        let layer = Layer::Hypervisor;
        let caller = Caller { layer, presented };
        let model = self.counting.tally().model();
        let checked = (self.claims).check_alias(model, (counter, COUNT), caller, Access::Read);
        let verdict = checked?;
        if verdict != Verdict::Permit {
            return Some(Err(verdict));
        }
        let read = self.counting.read_part(seat, counter, COUNT);
        self.tell_owners();
        match read {
            ReadOutcome::Value(value) => Some(Ok(value)),
            _ => None,
        }
    }

    /// Lets the host itself act on the reservations, and does what that means.
    pub(super) fn arbitrate<R>(
        &mut self,
        seat: &mut Seat<'_>,
        act: impl FnOnce(&mut PcrUnit, &mut Context<'_>) -> (R, Effects),
    ) -> Option<R> {
        self.look_for_room(seat, self.claims.asked());
        let (result, effects) = self.act(act)?;
        self.take_effects(seat, effects, effects.cleared);
        self.look_again(seat);
        Some(result)
    }

    /// Tells the reservations what can be backed, before a layer asks for that in `asked`.
    /// Off its core, what they were told last holds.
    fn look_for_room(&mut self, seat: &mut Seat<'_>, asked: AskedEvents) {
        let mut next = Some(asked);
        // Each time a counter is taken or a request has its answer.
        while let (Some(asked), Some(core)) = (next.take(), seat.core()) {
            if self.claims.unit().is_none() {
                return;
            }
            let counters = self.counting.tally().counters();
            let backing = backing(
                ground(self.counting.tally(), core),
                |counter| counters.placed_request(counter),
                PerKind::count(counters_there(self.counting.tally().model())),
                asked,
                self.claims.room_elsewhere(),
            );
            if let Some(effects) = self.act(|unit, cx| unit.back(backing, cx)) {
                self.take_effects(seat, effects, effects.cleared);
            }
            next = self.claims.looks_for_room().then(|| self.claims.asked());
        }
    }

    /// Looks for room again where requests wait for that.
    fn look_again(&mut self, seat: &mut Seat<'_>) {
        if self.claims.looks_for_room() {
            self.look_for_room(seat, self.claims.asked());
        }
    }

    /// Does to the counters what a decision means for them; `of`: as for
    /// [`Counting::take_effects`].
    fn take_effects(&mut self, seat: &mut Seat<'_>, effects: Effects, of: CounterSet) {
        let are_renewed = self.claims.differ_from(self.counting.tally().terms());
        if are_renewed || !effects.is_empty() {
            self.renew_terms();
        }
        self.note_holdings();
        if effects.is_empty() {
            return;
        }
        // The hypervisor may have more or less than before.
        if hosts::are_taken(seat.core()) {
            self.introduce_anew(seat);
        }
        self.counting.take_effects(seat, effects, of);
        self.tell_owners();
    }

    /// Tells the core what guests may want of it, if nobody has.
    pub(super) fn introduce(&self, seat: &mut Seat<'_>) {
        hosts::introduce(seat, self.counting.tally(), &self.claims);
    }

    /// The same after that has changed.
    pub(super) fn introduce_anew(&self, seat: &mut Seat<'_>) {
        hosts::introduce_anew(seat, self.counting.tally(), &self.claims);
    }

    /// Takes in what happened to the vCPU.
    #[inline]
    pub(super) fn observe(&mut self, seat: &mut Seat<'_>, progress: Progress) {
        self.leave_reset();
        if let Progress::Left { tsc, .. } = progress {
            self.claims.set_time(tsc);
        }
        self.counting.observe(seat, progress);
        self.tell_owners();
        // After the counts: those of a counter that is taken away are gone.
        if matches!(progress, Progress::Left { .. }) {
            self.tick(seat);
        }
    }

    /// Lets leases and budgets end and revocations take place that are due.
    #[inline]
    pub(super) fn tick(&mut self, seat: &mut Seat<'_>) {
        self.tick_budget(seat);
        if !self.counting.tally().losses().taken().is_empty() {
            self.see_to_taken(seat);
        }
        if self.claims.unit().is_some() {
            self.tick_reservations(seat);
        }
    }

    fn tick_reservations(&mut self, seat: &mut Seat<'_>) {
        self.leave_reset();
        if self.counting.tally().registers().is_frozen() {
            self.counting.take_freeze(seat);
            self.tell_owners();
        }
        // What changes hands may need another look before the next one does.
        for _ in 0..COUNTERS {
            let due = self.claims.unit().and_then(PcrUnit::deadline);
            let waits = seat.is_nowhere() && self.claims.looks_for_room();
            if waits || due.is_none_or(|due| self.claims.time() < due) {
                return;
            }
            self.look_for_room(seat, self.claims.asked());
            if let Some(effects) = self.act(PcrUnit::tick) {
                self.take_effects(seat, effects, effects.cleared);
            }
            self.look_again(seat);
        }
    }

    /// What was set for a time is over, if it is.
    #[inline]
    fn tick_budget(&mut self, seat: &mut Seat<'_>) {
        let budget = self.claims.budget();
        if let Some(end) = budget.until.filter(|end| end.at <= self.claims.time()) {
            let budget = *budget;
            self.claims.set_budget(Budget {
                asked: end.most,
                generation: budget.generation + 1,
                until: None,
                ..budget
            });
            self.apply_budget(seat, end.grace_ms);
        }
    }

    /// Lets the guest use `most` counters at a time ([`super::VcpuPmu::set_budget`]).
    pub(super) fn set_budget(
        &mut self,
        seat: &mut Seat<'_>,
        most: PerKind,
        grace_ms: u32,
        until: Option<Tsc>,
    ) -> Result<(), BudgetRefused> {
        let before = *self.claims.budget();
        let lasting = before.until.map_or(before.asked, |end| end.most);
        let until = until.map(|at| BudgetEnd {
            at,
            most: lasting,
            grace_ms,
        });
        let budget = Budget {
            asked: most,
            until,
            ..before
        };
        self.change_budget(seat, budget, grace_ms)
    }

    pub(super) fn change_budget(
        &mut self,
        seat: &mut Seat<'_>,
        budget: Budget,
        grace_ms: u32,
    ) -> Result<(), BudgetRefused> {
        let before = *self.claims.budget();
        self.claims.set_budget(Budget {
            generation: before.generation + 1,
            ..budget
        });
        self.renew_terms();
        let wish = self.counting.tally().terms().wished();
        let owner = self.counting.tally().owner();
        let fits = |core: &CorePmu| core.book().guest_may_have(core.planner(), owner, wish);
        if !seat.core().is_none_or(fits) {
            self.claims.set_budget(before);
            self.renew_terms();
            return Err(BudgetRefused { owner });
        }
        self.apply_budget(seat, grace_ms);
        Ok(())
    }

    fn apply_budget(&mut self, seat: &mut Seat<'_>, grace_ms: u32) {
        self.renew_terms();
        let most = self.claims.budget().most();
        let owner = self.counting.tally().owner();
        log::info!("{owner}: the budget of its guest is {most}");
        self.introduce_anew(seat);
        self.budget_due = seat.is_off();
        self.look_for_room(seat, self.claims.asked());
        let act = AdminAct::SetBudget { most, grace_ms };
        let effects = self.act(|unit, cx| unit.administer(act, cx));
        if let Some(effects) = effects {
            // No budget makes no sense.
            let effects = effects.unwrap_or(Effects::NONE);
            self.take_effects(seat, effects, effects.cleared);
        }
        // Counts until now are those of whoever had a place.
        self.counting.tally_mut().settle_all(seat);
        self.counting.distribute(seat);
        self.counting.refresh_needs(seat);
        self.tell_owners();
    }

    /// Owners hear that the host's kernel has taken a physical counter, and when it is
    /// back: that is tried again and again, as what is reserved is held.
    #[cold]
    fn see_to_taken(&mut self, seat: &mut Seat<'_>) {
        let tally = self.counting.tally_mut();
        let held = tally.terms().held_by_guest;
        let untold = tally.losses_mut().tell_taken(held);
        for counter in untold.iter() {
            self.tell_taken(counter, false);
        }
        let losses = self.counting.tally().losses();
        if losses.taken().is_empty() {
            return;
        }
        let pause = match losses.retry(self.claims.time()) {
            Retry::Begin => FIRST_TRY_MS,
            Retry::Now(pause) if !seat.is_off() => {
                self.retry_taken(seat);
                (pause * 2).min(LAST_TRY_MS)
            }
            Retry::Now(_) | Retry::Later => return,
        };
        let in_time = self.claims.unit().map(|unit| unit.to_ticks(pause));
        let again = in_time.map(|in_time| self.claims.time() + in_time);
        let losses = self.counting.tally_mut().losses_mut();
        losses.try_again(again, pause);
    }

    /// Those that have counted since they were tried last are back, and the others are
    /// tried again.
    fn retry_taken(&mut self, seat: &mut Seat<'_>) {
        let tally = self.counting.tally();
        let has_run = tally.losses().has_run_since(tally.counters().ran());
        for counter in tally.losses().taken().iter() {
            if self.counting.try_again(seat, counter, has_run) {
                self.tell_taken(counter, true);
            }
            self.tell_owners();
        }
    }

    fn tell_taken(&mut self, counter: CounterId, is_back: bool) {
        self.act(|unit, cx| unit.note_taken(counter, is_back, cx));
    }

    /// The vCPU is switched in on a core; `is_new`: it was on another one before.
    pub(super) fn sit_down(&mut self, seat: &mut Seat<'_>, is_new: bool) {
        if hosts::are_taken(seat.core()) {
            self.introduce(seat);
        }
        self.counting.sit_down(seat, is_new);
        self.tell_owners();
        if std::mem::take(&mut self.budget_due) {
            // It has changed meanwhile.
            self.look_for_room(seat, self.claims.asked());
            self.counting.distribute(seat);
            self.tell_owners();
        }
        if let Some(bank) = seat.bank() {
            bank.end_switch();
        }
        self.counting.catch_up(seat);
        self.tell_owners();
        if self.claims.waits_for_room() {
            // It may have come for this core's room.
            self.look_for_room(seat, self.claims.asked());
        }
        self.look_again(seat);
        self.counting.refresh_needs(seat);
    }

    #[cfg(feature = "contexts")]
    pub(super) fn hosts_changed(&mut self, seat: &mut Seat<'_>) {
        self.counting.hosts_changed(seat);
        self.tell_owners();
    }

    /// The counters that the guest has enabled and that do not count now, and why.
    pub(super) fn lacking(&self) -> Vec<(CounterId, UnavailableReason)> {
        let counters = self.counting.tally().counters();
        let wanted = counters_there(self.counting.tally().model()).iter();
        let wanted = wanted.filter(|one| counters.is_wanted(*one));
        let reason = |counter| Some((counter, counters.unavailable(counter)?));
        wanted.filter_map(reason).collect()
    }
}

fn done(is_done: bool) -> WriteOutcome {
    if is_done {
        WriteOutcome::Done
    } else {
        WriteOutcome::Gp
    }
}
