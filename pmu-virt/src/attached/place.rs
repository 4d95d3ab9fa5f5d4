//! Slots that count for a context.

use perfmon::Wanted;
use pmu_model::{CountRequest, Reading, SlotIndex, SlotSet, UnavailableReason};

use super::Hosted;
use crate::assign::Demand;
use crate::core_pmu::{CorePmu, Last, Stay};

/// A slot of a context.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    stay: Stay,
    pmd: u16,
    request: CountRequest,
    /// The slot's count at the last settlement.
    settled: u64,
    /// The slot's count at which its overflow is armed.
    armed: Option<u64>,
    /// It counts while the vCPU runs; if not, it is kept, until somebody needs
    /// it.
    running: bool,
}

impl Place {
    pub(super) fn stay(&self) -> Stay {
        self.stay
    }
}

impl Hosted {
    /// Takes in what its slots have counted since the last time.
    pub(crate) fn settle(&mut self, core: &mut CorePmu) {
        for index in (0..self.places.len()).rev() {
            self.settle_place(index, core);
        }
    }

    /// The same of those slots, whose overflow has come.
    pub(crate) fn settle_slots(&mut self, slots: SlotSet, core: &mut CorePmu) {
        for index in (0..self.places.len()).rev() {
            let place = &mut self.places[index];
            if slots.contains(place.stay.slot) && core.holds(place.stay) {
                place.armed = None;
                self.settle_place(index, core);
            }
        }
    }

    fn settle_place(&mut self, index: usize, core: &mut CorePmu) {
        let place = self.places[index];
        if !place.running || !core.holds(place.stay) {
            return;
        }
        let reading = core.read(place.stay.slot);
        self.absorb(index, reading);
    }

    /// Takes a slot's count in. One that tells none keeps its place: it may count
    /// again, as it does for a guest's counter.
    fn absorb(&mut self, index: usize, reading: Reading) {
        let place = &mut self.places[index];
        let pmd = place.pmd;
        match reading {
            Reading::Counted { value, provenance } => {
                let events = value.wrapping_sub(place.settled);
                place.settled = value;
                self.context.count(pmd, events, provenance);
                self.uncounted.remove(&(self.context.active_set(), pmd));
            }
            Reading::Unavailable(reason) => {
                self.context.lose(pmd);
                self.log_uncounted(pmd, "is not counted", reason);
            }
        }
    }

    /// Says why nobody counts for a PMD of the active set: once, until it counts
    /// again.
    fn log_uncounted(&mut self, pmd: u16, what: &str, reason: UnavailableReason) {
        let set = self.context.active_set();
        if self.uncounted.insert((set, pmd)) {
            log::info!("{}: PMD{pmd} of event set {set} {what}: {reason}", self.id);
        }
    }

    /// Leaves a place, with the count.
    fn leave_at(&mut self, index: usize, core: &mut CorePmu) {
        let place = self.places[index];
        let last = core.last_of(place.stay);
        if let Some(Last {
            reading: Some(reading),
            ..
        }) = last.filter(|_| place.running)
        {
            self.absorb(index, reading);
        }
        core.release(place.stay);
        self.places.swap_remove(index);
    }

    /// Gives every slot back.
    pub(crate) fn leave_all(&mut self, core: &mut CorePmu) {
        self.leave_where(core, |_, _| true);
    }

    /// Leaves the slots that cannot count for another vCPU, before there is one.
    pub(crate) fn leave_private(&mut self, core: &mut CorePmu) {
        self.leave_where(core, |core, place| core.is_private(place.stay));
    }

    fn leave_where(&mut self, core: &mut CorePmu, which: impl Fn(&CorePmu, &Place) -> bool) {
        for index in (0..self.places.len()).rev() {
            if which(core, &self.places[index]) {
                self.leave_at(index, core);
            }
        }
    }

    /// Starts and stops its slots as the context wants it; what finds none is
    /// missing. Counts were settled before, or its vCPU was away.
    pub(crate) fn line_up(&mut self, core: &mut CorePmu) {
        self.leave_where(core, |core, place| !core.holds(place.stay));
        let mut wanted = self.context.wanted();
        if self.blind.is_some() {
            // Also what was started or written since it was preempted.
            for wanted in wanted.drain(..) {
                self.context.lose(wanted.pmd);
            }
        }
        let mut serving = vec![None; self.places.len()];
        // First those that stay as they are, then those that can serve another.
        for same in [true, false] {
            for (place, serves) in self.places.iter().zip(&mut serving) {
                let fits = |wanted: &Wanted| {
                    wanted.request.counts_like(&place.request) && (!same || wanted.pmd == place.pmd)
                };
                if serves.is_none()
                    && let Some(at) = wanted.iter().position(fits)
                {
                    *serves = Some(wanted.swap_remove(at));
                }
            }
        }
        for (index, serves) in serving.into_iter().enumerate() {
            match serves {
                Some(wanted) => self.run(index, &wanted, core),
                None => {
                    self.places[index].running = false;
                    core.stop(self.places[index].stay.slot);
                }
            }
        }
        self.missing = wanted;
    }

    /// Has a place count for `wanted`.
    fn run(&mut self, index: usize, wanted: &Wanted, core: &mut CorePmu) {
        let holder = self.holder(wanted.pmd);
        let place = &mut self.places[index];
        if place.pmd != wanted.pmd {
            place.pmd = wanted.pmd;
            core.rename(place.stay, holder);
        }
        place.running = true;
        if !core.is_running(place.stay.slot) {
            core.start(place.stay.slot);
        }
        let at = |until: std::num::NonZeroU64| place.settled.saturating_add(until.get());
        let armed = wanted.until.map(at);
        if place.armed != armed {
            place.armed = armed;
            core.arm(place.stay.slot, wanted.until);
        }
    }

    /// Gives slots to what is missing, where that moves nobody who counts.
    pub(crate) fn fill_in(&mut self, core: &mut CorePmu) {
        for missing in std::mem::take(&mut self.missing) {
            let Ok(plan) = core.backend().plan(&missing.request) else {
                self.miss(missing);
                continue;
            };
            match core.find(&missing.request, &plan.constraint) {
                Some(slot) => self.come(plan.constraint.taken_at(slot), missing, core),
                None => self.missing.push(missing),
            }
        }
    }

    /// Puts what is missing on a slot, or a pair.
    fn come(&mut self, slots: SlotSet, wanted: Wanted, core: &mut CorePmu) {
        match core.place(slots, self.holder(wanted.pmd), &wanted.request) {
            Ok((stay, begin)) => {
                self.places.push(Place {
                    stay,
                    pmd: wanted.pmd,
                    request: wanted.request,
                    settled: begin,
                    armed: None,
                    running: true,
                });
                self.run(self.places.len() - 1, &wanted, core);
            }
            Err(reason) => {
                self.log_uncounted(wanted.pmd, "finds no counter", reason);
                self.miss(wanted);
            }
        }
    }

    /// Nobody counts for it, and its context is told so: each time, as its set,
    /// or what was written meanwhile, may be another one.
    fn miss(&mut self, wanted: Wanted) {
        self.context.lose(wanted.pmd);
        self.missing.push(wanted);
    }

    /// The same of all that is still missing.
    pub(crate) fn miss_the_rest(&mut self) {
        for missing in std::mem::take(&mut self.missing) {
            self.miss(missing);
        }
    }

    /// Whether something that can be counted finds no slot.
    pub(crate) fn is_short(&self, core: &CorePmu) -> bool {
        self.missing
            .iter()
            .any(|wanted| core.backend().plan(&wanted.request).is_ok())
    }

    /// What it wants counted that can be: PMD, and what it demands.
    pub(crate) fn demands(&self, core: &CorePmu) -> Vec<(u16, Demand)> {
        let running = self.places.iter().filter(|place| place.running);
        let held = running.map(|place| (place.pmd, &place.request, Some(place.stay.slot)));
        let missing = self.missing.iter();
        let missing = missing.map(|wanted| (wanted.pmd, &wanted.request, None));
        held.chain(missing)
            .filter_map(|(pmd, request, held)| Some((pmd, self.demand(pmd, request, held, core)?)))
            .collect()
    }

    /// What it would demand if it were not preempted.
    pub(crate) fn demands_if_restored(&self, core: &CorePmu) -> Vec<Demand> {
        let wanted = self.context.wanted();
        wanted
            .iter()
            .filter_map(|wanted| self.demand(wanted.pmd, &wanted.request, None, core))
            .collect()
    }

    fn demand(
        &self,
        pmd: u16,
        request: &CountRequest,
        held: Option<SlotIndex>,
        core: &CorePmu,
    ) -> Option<Demand> {
        Some(Demand {
            counter: self.context.counter_of(pmd),
            constraint: core.backend().plan(request).ok()?.constraint,
            held,
        })
    }

    /// Leaves the slot of a PMD, which is missing from then on.
    pub(crate) fn displace(&mut self, pmd: u16, core: &mut CorePmu) {
        let at = |place: &Place| place.running && place.pmd == pmd;
        let Some(index) = self.places.iter().position(at) else {
            return;
        };
        self.leave_at(index, core);
        let mut wanted = self.context.wanted().into_iter();
        self.missing.extend(wanted.find(|wanted| wanted.pmd == pmd));
    }

    /// Puts a PMD that is missing on a slot, or a pair.
    pub(crate) fn come_to(&mut self, pmd: u16, slots: SlotSet, core: &mut CorePmu) {
        let missing = self.missing.iter().position(|wanted| wanted.pmd == pmd);
        if let Some(index) = missing {
            let missing = self.missing.swap_remove(index);
            self.come(slots, missing, core);
        }
    }

    /// Whether anything is to be done while the guest runs.
    pub(crate) fn is_active(&self) -> bool {
        self.context.is_started()
    }
}
