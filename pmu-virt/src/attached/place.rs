//! Slots that count for a context.

use perfmon::Wanted;
use perfmon_abi::wire::Call;
use pmu_model::{CountRequest, SlotIndex, SlotSet, UnavailableReason};

use super::AttachedContext;
use crate::assign::Demand;
use crate::placement::Claim;
use crate::slot_bank::{Settled, SlotBank, SlotLease};

/// A slot of a context, which counts for a PMD.
#[derive(Clone, Copy, Debug)]
pub(super) struct PmdLease {
    pub(super) lease: SlotLease,
    pmd: u16,
}

impl AttachedContext {
    /// Takes in what its slots have counted since the last time.
    pub(crate) fn settle(&mut self, bank: &mut SlotBank) {
        for index in (0..self.places.len()).rev() {
            self.settle_place(index, bank);
        }
    }

    /// Takes in what the slots have counted whose overflow has come.
    pub(crate) fn settle_slots(&mut self, slots: SlotSet, bank: &mut SlotBank) {
        for index in (0..self.places.len()).rev() {
            let lease = &mut self.places[index].lease;
            if slots.contains(lease.slot()) && bank.holds(lease) {
                lease.overflowed();
                self.settle_place(index, bank);
            }
        }
    }

    fn settle_place(&mut self, index: usize, bank: &mut SlotBank) {
        let PmdLease { lease, pmd } = &mut self.places[index];
        let pmd = *pmd;
        if let Some(settled) = lease.settle(bank) {
            self.take_in(pmd, settled);
        }
    }

    /// What was counted is the PMD's.
    fn take_in(&mut self, pmd: u16, settled: Settled) {
        match settled {
            Settled::Counted(events, provenance) => {
                self.context.count(pmd, events, provenance);
                self.uncounted.remove(&(self.context.active_set(), pmd));
            }
            Settled::Uncounted(reason) => {
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
    fn leave_at(&mut self, index: usize, bank: &mut SlotBank) {
        let PmdLease { lease, pmd } = self.places.swap_remove(index);
        let (settled, _) = lease.end(bank);
        if let Some(settled) = settled.filter(|_| lease.is_running()) {
            self.take_in(pmd, settled);
        }
    }

    /// Gives every slot back.
    pub(crate) fn leave_all(&mut self, bank: &mut SlotBank) {
        self.leave_where(bank, |_, _| true);
    }

    /// Leaves the slots that cannot count for another vCPU, before there is one.
    pub(crate) fn leave_private(&mut self, bank: &mut SlotBank) {
        self.leave_where(bank, SlotBank::is_private);
    }

    fn leave_where(&mut self, bank: &mut SlotBank, which: impl Fn(&SlotBank, &SlotLease) -> bool) {
        for index in (0..self.places.len()).rev() {
            if which(bank, &self.places[index].lease) {
                self.leave_at(index, bank);
            }
        }
    }

    /// Starts and stops its slots as the context wants it; what finds none is
    /// missing. Counts were settled before, or its vCPU was away.
    pub(crate) fn reconcile(&mut self, bank: &mut SlotBank) {
        self.leave_where(bank, |bank, lease| !bank.holds(lease));
        if self.beyond_lease {
            // Whoever found that has recorded it.
            let _ = self.preempt(bank);
        }
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
                    wanted.request.counts_like(place.lease.request())
                        && (!same || wanted.pmd == place.pmd)
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
                Some(wanted) => self.run(index, &wanted, bank),
                None => self.places[index].lease.stop(Some(bank)),
            }
        }
        self.missing = wanted;
    }

    /// Whether a command leaves its places as they are: it tells values, and nothing
    /// waits for a slot.
    pub(crate) fn is_only_read_by(&self, call: &Call) -> bool {
        let waits = self.blind.is_some() || !self.missing.is_empty();
        call.only_reads() && !waits
    }

    /// Has a place count for `wanted`.
    fn run(&mut self, index: usize, wanted: &Wanted, bank: &mut SlotBank) {
        let claimant = self.claimant(wanted.pmd);
        let PmdLease { lease, pmd } = &mut self.places[index];
        if *pmd != wanted.pmd {
            *pmd = wanted.pmd;
            bank.rename(lease, claimant);
        }
        lease.start(bank);
        // A set that switches at overflows (PFM_SETFL_OVFL_SWITCH) does so as late as a sample
        // comes: what it counted meanwhile is its own, and no count is missing.
        lease.arm_about(wanted.until, bank);
    }

    /// Gives slots to what is missing, where that moves nobody who counts.
    pub(crate) fn place_missing(&mut self, bank: &mut SlotBank) {
        for missing in std::mem::take(&mut self.missing) {
            let Ok(plan) = self.plan(bank.backend(), &missing.request) else {
                self.miss(missing);
                continue;
            };
            match bank.find(&missing.request, &plan.constraint) {
                Some(slots) => self.bind(slots, missing, bank),
                None => self.missing.push(missing),
            }
        }
    }

    /// Puts what is missing on a slot, or a pair.
    fn bind(&mut self, slots: SlotSet, wanted: Wanted, bank: &mut SlotBank) {
        match bank.place(slots, self.claimant(wanted.pmd), &wanted.request) {
            Ok(lease) => {
                let pmd = wanted.pmd;
                self.places.push(PmdLease { lease, pmd });
                self.run(self.places.len() - 1, &wanted, bank);
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

    /// Nobody counts for what is still missing.
    pub(crate) fn miss_the_rest(&mut self) {
        for missing in std::mem::take(&mut self.missing) {
            self.miss(missing);
        }
    }

    /// Whether something that can be counted finds no slot.
    pub(crate) fn is_short(&self, bank: &SlotBank) -> bool {
        self.missing
            .iter()
            .any(|wanted| self.plan(bank.backend(), &wanted.request).is_ok())
    }

    /// What it wants counted that can be.
    pub(crate) fn claims(&self, bank: &SlotBank) -> Vec<Claim> {
        let running = self.places.iter().filter(|place| place.lease.is_running());
        let held =
            running.map(|PmdLease { lease, pmd }| (*pmd, lease.request(), Some(lease.slot())));
        let missing = self.missing.iter();
        let missing = missing.map(|wanted| (wanted.pmd, &wanted.request, None));
        held.chain(missing)
            .filter_map(|(pmd, request, held)| {
                Some((self.claimant(pmd), self.demand(pmd, request, held, bank)?))
            })
            .collect()
    }

    /// What it would demand if it were not preempted.
    pub(crate) fn demands_if_restored(&self, bank: &SlotBank) -> Vec<Demand> {
        let wanted = self.context.wanted();
        wanted
            .iter()
            .filter_map(|wanted| self.demand(wanted.pmd, &wanted.request, None, bank))
            .collect()
    }

    fn demand(
        &self,
        pmd: u16,
        request: &CountRequest,
        held: Option<SlotIndex>,
        bank: &SlotBank,
    ) -> Option<Demand> {
        Some(Demand {
            counter: self.context.counter_of(pmd),
            constraint: self.plan(bank.backend(), request).ok()?.constraint,
            held,
        })
    }

    /// Leaves the slot of a PMD, which is missing from then on.
    pub(crate) fn displace(&mut self, pmd: u16, bank: &mut SlotBank) {
        let at = |place: &PmdLease| place.lease.is_running() && place.pmd == pmd;
        let Some(index) = self.places.iter().position(at) else {
            return;
        };
        self.leave_at(index, bank);
        let mut wanted = self.context.wanted().into_iter();
        self.missing.extend(wanted.find(|wanted| wanted.pmd == pmd));
    }

    /// Puts a PMD that is missing on a slot, or a pair.
    pub(crate) fn bind_slot(&mut self, pmd: u16, slots: SlotSet, bank: &mut SlotBank) {
        let missing = self.missing.iter().position(|wanted| wanted.pmd == pmd);
        if let Some(index) = missing {
            let missing = self.missing.swap_remove(index);
            self.bind(slots, missing, bank);
        }
    }

    /// Whether anything is to be done while the guest runs.
    pub(crate) fn is_active(&self) -> bool {
        self.context.is_started()
    }
}
