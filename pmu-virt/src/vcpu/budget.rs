//! How many physical counters a vCPU's guest may use at a time, and what becomes of the
//! counters that are too many: `docs/guide/arbitration.md`, "Budgets".

use arbiter::{AdminAct, Budget, BudgetEnd, CounterId, CounterSet, Effects, PerKind};
use perfmon_abi::wire::{Errno, Refusal};
use pmu_model::{Tsc, UnavailableReason};

use super::{Here, VcpuPmu, index_of};
use crate::core_pmu::CorePmu;
use crate::placement::{self, Claim};

impl VcpuPmu {
    /// What the guest may use at a time.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.grant.budget
    }

    /// The counters that the guest has enabled and that do not count now, and why.
    #[must_use]
    pub fn lacking(&self) -> Vec<(CounterId, UnavailableReason)> {
        let all = self.model.counters().chain(self.samplers());
        let wanted = all.filter(|one| self.is_wanted(*one));
        let reason = |counter| Some((counter, self.counters[index_of(counter)].unavailable?));
        wanted.filter_map(reason).collect()
    }

    /// Lets the guest use `most` counters at a time from now on; with `until` only to that
    /// TSC value, and then what it may use now. The guest's registers stay as they are.
    /// Counters that nobody has reserved make way at once; who has reserved more than
    /// that is told, and loses it after `grace_ms` milliseconds.
    ///
    /// # Errors
    /// EBUSY: host contexts rely on what the guest would get. Nothing has changed.
    pub fn set_budget(
        &mut self,
        core: Option<&mut CorePmu>,
        most: PerKind,
        grace_ms: u32,
        until: Option<Tsc>,
    ) -> Result<(), Refusal> {
        let before = self.grant.budget;
        let lasting = before.until.map_or(before.asked, |end| end.most);
        let budget = Budget {
            asked: most,
            until: until.map(|at| BudgetEnd {
                at,
                most: lasting,
                grace_ms,
            }),
            ..before
        };
        self.change_budget(core, budget, grace_ms)
    }

    /// The VM's lease on the host's counters holds so many from now on: the guest uses no
    /// more at a time, whatever its budget is. `grace_ms` as of
    /// [`set_budget`](Self::set_budget).
    ///
    /// # Errors
    /// EBUSY: host contexts rely on what the guest would get. Nothing has changed.
    pub fn set_lease(
        &mut self,
        core: Option<&mut CorePmu>,
        lease: PerKind,
        grace_ms: u32,
    ) -> Result<(), Refusal> {
        let budget = self.grant.budget;
        self.change_budget(core, Budget { lease, ..budget }, grace_ms)
    }

    fn change_budget(
        &mut self,
        core: Option<&mut CorePmu>,
        budget: Budget,
        grace_ms: u32,
    ) -> Result<(), Refusal> {
        let here = &mut self.here(core);
        let before = self.grant.budget;
        self.grant.budget = Budget {
            generation: before.generation + 1,
            ..budget
        };
        let wish = self.wish().counters;
        let fits =
            |core: &&mut CorePmu| core.book().guest_may_have(core.planner(), self.owner, wish);
        if !here.as_ref().is_none_or(fits) {
            self.grant.budget = before;
            let reason = format!(
                "host contexts rely on counters that {} would get; unload one, or use \
                 --host-policy host-first",
                self.owner
            );
            return Err(Refusal::new(Errno::EBUSY, reason));
        }
        self.apply_budget(here, grace_ms);
        Ok(())
    }

    /// What was set for a time is over, if it is.
    #[inline]
    pub(super) fn tick_budget(&mut self, here: &mut Here<'_>) {
        let Some(end) = self.grant.budget.until.filter(|end| end.at <= self.left) else {
            return;
        };
        let budget = self.grant.budget;
        self.grant.budget = Budget {
            asked: end.most,
            generation: budget.generation + 1,
            until: None,
            ..budget
        };
        self.apply_budget(here, end.grace_ms);
    }

    fn apply_budget(&mut self, here: &mut Here<'_>, grace_ms: u32) {
        let most = self.grant.budget.most();
        log::info!("{}: the budget of its guest is {most}", self.owner);
        if let Some(core) = here {
            self.introduce_anew(core);
        }
        self.budget_due = here.is_none();
        self.look_for_room(here);
        if let Some(reservations) = &mut self.reservations {
            let (unit, mut context) = reservations.parts(self.left);
            let act = AdminAct::SetBudget { most, grace_ms };
            let effects = unit.administer(act, &mut context);
            // No budget makes no sense.
            self.take_away(here, effects.unwrap_or(Effects::NONE));
        }
        self.settle_all(here);
        self.distribute(here);
        self.refresh_needs(here.as_deref());
    }

    /// The vCPU is back on a core; its budget may have changed while it was on none.
    pub(super) fn catch_up_with_budget(&mut self, here: &mut Here<'_>) {
        if std::mem::take(&mut self.budget_due) {
            self.look_for_room(here);
            self.distribute(here);
        }
    }

    /// Whether the guest has not enabled more counters like this one than its budget
    /// lets it use at a time.
    pub(super) fn is_within_budget(&self, counter: CounterId) -> bool {
        let most = self.grant.budget.most().of(counter);
        if most == u8::MAX {
            return true;
        }
        let wanted = self.active.iter().filter(|one| self.is_wanted(*one));
        PerKind::count(wanted.collect()).of(counter) <= most
    }

    /// Takes out of `guest` what the budget does not leave it beside what is reserved:
    /// it takes turns, or is refused, for this reason.
    pub(super) fn keep_to_budget(
        &mut self,
        reserved: &[Claim],
        guest: &mut Vec<Claim>,
    ) -> Vec<(CounterId, UnavailableReason)> {
        let most = self.grant.budget.most();
        let lacking = placement::beyond(most, reserved, guest);
        if lacking.is_empty() {
            return Vec::new();
        }
        let reason = |counter| UnavailableReason::Budget {
            most: most.of(counter),
        };
        // Where what is reserved takes the whole budget there are no turns to be taken.
        let held: CounterSet = reserved.iter().map(|(_, demand)| demand.counter).collect();
        let has_turns = |counter| PerKind::count(held).of(counter) < most.of(counter);
        // A timeslice that begins here says who comes first.
        let waits = lacking
            .into_iter()
            .find(|counter| has_turns(*counter))
            .is_some_and(|one| self.answer_shortage(reason(one)) == UnavailableReason::Waiting);
        if let (true, Some(first)) = (waits, self.multiplexer.rotation()) {
            // Each kind by itself, so that all of one have as many turns.
            let fixed =
                guest.partition_point(|(_, demand)| !matches!(demand.counter, CounterId::Fixed(_)));
            let (programmable, fixed) = guest.split_at_mut(fixed);
            for kind in [programmable, fixed] {
                kind.rotate_left(first % kind.len().max(1));
            }
        }
        let beyond = placement::keep_to(most, reserved, guest).into_iter();
        let reasons = beyond.map(|counter| {
            let waiting = (waits && has_turns(counter)).then_some(UnavailableReason::Waiting);
            (counter, waiting.unwrap_or(reason(counter)))
        });
        reasons.collect()
    }
}
