//! What counts now, and what was counted.

use std::num::NonZeroU64;

use perfmon_abi::PmcArg;
use perfmon_abi::consts::{
    PFM_REGFL_NO_64BIT_EMUL, PFM_REGFL_OVFL_NOTIFY, PFM_SETFL_OVFL_SWITCH, PFM_SETFL_TIME_SWITCH,
};
use pmu_model::ibs::maximum;
use pmu_model::{CountRequest, CounterId, Nanos, Provenance, low_bits};

use super::ibs::request_by;
use super::{Context, EventSet, How, Phase, Pmc, Pmd, Wanted};
use crate::description::{LogicalPmu, PmcDescription, PmdDescription, PmdKind};

impl How {
    /// More was counted, so.
    pub(super) fn and(self, provenance: Provenance) -> Self {
        match self {
            How::NotCounted => How::Counted(provenance),
            How::Counted(earlier) => How::Counted(earlier.and(provenance)),
            How::Lost => How::Lost,
        }
    }
}

impl EventSet {
    /// The bits that a PMD has: 64 for a counter, or the hardware's if its PMC
    /// says so (6.2.1).
    pub(super) fn mask(&self, pmd: &PmdDescription) -> u64 {
        let PmdKind::Counter { width, pmc, .. } = pmd.what else {
            return u64::MAX;
        };
        let narrow = |pmc: &Pmc| pmc.flags & PFM_REGFL_NO_64BIT_EMUL != 0;
        if self.pmcs.get(&pmc).is_some_and(narrow) {
            low_bits(width)
        } else {
            u64::MAX
        }
    }

    /// The PMCs whose counters can advance: which, its state, the request.
    fn requests<'a>(
        &'a self,
        pmu: &'a LogicalPmu,
        choice: usize,
    ) -> impl Iterator<Item = (&'a PmcDescription, &'a Pmc, CountRequest)> {
        self.pmcs.iter().filter_map(move |(&num, pmc)| {
            let description = pmu.pmc(num)?;
            let request = request_by(pmu, choice, description, pmc.value)?;
            request.can_advance().then_some((description, pmc, request))
        })
    }
}

impl Context {
    /// Per set: its number, and PMD and request of each counter that can advance.
    #[must_use]
    pub fn demands(&self) -> Vec<(u16, Vec<(u16, CountRequest)>)> {
        let of = |set: &EventSet| {
            let requests = set.requests(&self.pmu, self.fetch_choice);
            requests
                .map(|(pmc, _, request)| (pmc.pmd, request))
                .collect()
        };
        self.sets.iter().map(|(&id, set)| (id, of(set))).collect()
    }

    /// What a write of a control would ask for, if that control exists and
    /// would count.
    #[must_use]
    pub fn request_of(&self, write: &PmcArg) -> Option<CountRequest> {
        self.sets.get(&write.set)?;
        let pmu = &self.pmu;
        let pmc = pmu.pmc(write.num)?;
        let request = self.request_by(pmc, pmc.accept(write.value))?;
        request.can_advance().then_some(request)
    }

    /// What the control that `write` names asks for at present, if it exists and counts.
    #[must_use]
    pub fn present_request(&self, write: &PmcArg) -> Option<CountRequest> {
        let value = self.sets.get(&write.set)?.pmcs.get(&write.num)?.value;
        let value = PmcArg { value, ..*write };
        self.request_of(&value)
    }

    /// The counter behind a PMD; one that is not counted on slots, as virtual
    /// PMDs are, stands for the first.
    #[must_use]
    pub fn counter_of(&self, pmd: u16) -> CounterId {
        match self.pmu.pmd(pmd).map(|pmd| pmd.what) {
            Some(PmdKind::Counter { counter, .. }) => counter,
            _ => CounterId::Programmable(0),
        }
    }

    /// The counters of the active set that are to count now; none while the
    /// context is detached, stopped or masked.
    #[must_use]
    pub fn wanted(&self) -> Vec<Wanted> {
        let Some(set) = self.counting() else {
            return Vec::new();
        };
        set.requests(&self.pmu, self.fetch_choice)
            .filter(|(pmc, ..)| !self.is_standing(set, pmc.pmd))
            .map(|(pmc, state, request)| Wanted {
                pmd: pmc.pmd,
                request,
                until: self.until(set, pmc.pmd, state),
            })
            .collect()
    }

    /// The active set, if it counts.
    pub(super) fn counting(&self) -> Option<&EventSet> {
        let counts = self.phase == Phase::Loaded && self.started;
        counts.then(|| self.sets.get(&self.active)).flatten()
    }

    /// Events until the overflow of a PMD; `None` if nothing comes of it: the
    /// counter simply wraps then (3.4.3), which needs nobody's attention.
    fn until(&self, set: &EventSet, num: u16, pmc: &Pmc) -> Option<NonZeroU64> {
        let pmd = set.pmds.get(&num).copied().unwrap_or_default();
        if let PmdKind::Sampler { kind, .. } = self.pmu.pmd(num)?.what {
            // It stops there, whoever is told.
            let left = maximum(kind, pmc.value).saturating_sub(pmd.value);
            return NonZeroU64::new(left.max(1));
        }
        let is_trigger = set.flags & PFM_SETFL_OVFL_SWITCH != 0 && pmd.threshold != 0;
        if self.sampler.is_none() && pmc.flags & PFM_REGFL_OVFL_NOTIFY == 0 && !is_trigger {
            return None;
        }
        let mask = set.mask(self.pmu.pmd(num)?);
        // 2^64 events, from a counter at 0, are more than any u64 can say and
        // than anybody will see.
        NonZeroU64::new((mask - (pmd.value & mask)).wrapping_add(1)).or(Some(NonZeroU64::MAX))
    }

    /// `events` have taken place at a counter of the active set. A wrap waits for
    /// [`Context::overflow`]; the value goes on from it, and several wraps at
    /// once are one overflow.
    pub fn count(&mut self, pmd: u16, events: u64, provenance: Provenance) {
        if let Some(PmdKind::Sampler { kind, .. }) = self.pmu.pmd(pmd).map(|pmd| pmd.what) {
            return self.count_for_sample((kind, pmd), events, provenance);
        }
        let Some((state, mask)) = self.counter(pmd) else {
            return;
        };
        let sum = u128::from(state.value) + u128::from(events);
        let wrapped = sum > u128::from(mask);
        state.value = state.value.wrapping_add(events) & mask;
        state.how = state.how.and(provenance);
        if wrapped {
            self.pending.insert(pmd);
        }
    }

    /// A counter of the active set was to count for a time in which nobody did.
    pub fn lose(&mut self, pmd: u16) {
        if let Some((state, _)) = self.counter(pmd) {
            state.how = How::Lost;
        }
    }

    /// A counter, or a sampler, of the active set, with the bits that it has.
    fn counter(&mut self, num: u16) -> Option<(&mut Pmd, u64)> {
        let description = self.pmu.pmd(num)?;
        if !matches!(
            description.what,
            PmdKind::Counter { .. } | PmdKind::Sampler { .. }
        ) {
            return None;
        }
        let set = self.sets.get_mut(&self.active)?;
        let mask = set.mask(description);
        Some((set.pmds.entry(num).or_default(), mask))
    }

    /// `time` has passed in which the context was on its vCPU's core, or on its
    /// core. Time that counts is all the active set's, also what exceeds its
    /// timeout: the events of that time went to this set, and a rate needs both.
    /// `counted` is false for idle time of the core, in which nothing is counted:
    /// timeouts run on, the duration of a set with PFM_SETFL_EXCL_IDLE does not,
    /// and what exceeds [`Context::switch_due`] waits for [`Context::expire`],
    /// which gives it to the sets whose turn it was. Nothing passes while the
    /// context is stopped or masked.
    pub fn pass(&mut self, time: Nanos, counted: bool) {
        if self.counting().is_none() {
            return;
        }
        let counts = counted || !self.is_system_wide();
        let beyond = self.spend(time, counts);
        if counted {
            self.overrun(beyond);
        } else {
            self.overdue_counts = counts;
            self.overdue += beyond;
        }
    }

    /// Time until the time switch; `None` if none is going to come.
    #[must_use]
    pub fn switch_due(&self) -> Option<Nanos> {
        let set = self.counting()?;
        (set.flags & PFM_SETFL_TIME_SWITCH != 0).then_some(set.timeout_left)
    }
}
