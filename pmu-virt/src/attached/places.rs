//! Slots that count for a context, and what it misses.

use std::collections::BTreeSet;

use perfmon::{ContextId, Wanted};
use pmu_model::{CountRequest, OwnerId, Reading, SlotIndex, UnavailableReason};

use crate::slot_bank::{Claimant, Settled, SlotLease};

/// A slot of a context, which counts for a PMD.
#[derive(Clone, Copy, Debug)]
struct PmdLease {
    lease: SlotLease,
    pmd: u16,
}

/// The slots of one context. Their counts are given to whoever asks, and kept nowhere.
#[derive(Debug)]
pub(super) struct Places {
    context: ContextId,
    /// The vCPU that it is loaded on; none if that is a core.
    vcpu: Option<OwnerId>,
    /// Slots that count for it, and slots that it keeps for a while.
    leases: Vec<PmdLease>,
    /// What is to count and has no slot.
    missing: Vec<Wanted>,
    /// Set and PMD of what nobody counts, as the log has it.
    uncounted: BTreeSet<(u16, u16)>,
}

impl Places {
    pub(super) fn new(context: ContextId) -> Self {
        Places {
            context,
            vcpu: None,
            leases: Vec::new(),
            missing: Vec::new(),
            uncounted: BTreeSet::new(),
        }
    }

    /// The context is loaded on a vCPU, or a core.
    pub(super) fn begin(&mut self, vcpu: Option<OwnerId>) {
        self.vcpu = vcpu;
        self.uncounted.clear();
    }

    pub(super) fn context(&self) -> ContextId {
        self.context
    }

    pub(super) fn vcpu(&self) -> Option<OwnerId> {
        self.vcpu
    }

    pub(super) fn claimant(&self, pmd: u16) -> Claimant {
        Claimant::Context {
            vcpu: self.vcpu,
            context: self.context,
            pmd,
        }
    }

    /// Places by which to walk, the last first: leaving one moves those after it.
    pub(super) fn indices(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.leases.len()).rev()
    }

    pub(super) fn lease(&self, index: usize) -> &SlotLease {
        &self.leases[index].lease
    }

    /// What is done with the slot of a place is noted there.
    pub(super) fn lease_mut(&mut self, index: usize) -> &mut SlotLease {
        &mut self.leases[index].lease
    }

    /// For which PMD a place counts, and what it has counted since the last time by what its
    /// slot tells.
    pub(super) fn absorb(&mut self, index: usize, reading: Reading) -> (u16, Settled) {
        let PmdLease { lease, pmd } = &mut self.leases[index];
        (*pmd, lease.absorb(reading))
    }

    /// A place was left.
    pub(super) fn remove(&mut self, index: usize) {
        self.leases.swap_remove(index);
    }

    /// Yields what is held on the core where the vCPU was parked.
    pub(super) fn end_away(&mut self) -> Vec<SlotLease> {
        self.leases.drain(..).map(|place| place.lease).collect()
    }

    /// Somebody counts for a PMD of `set`.
    pub(super) fn note_counted(&mut self, set: u16, pmd: u16) {
        self.uncounted.remove(&(set, pmd));
    }

    /// Says why nobody counts for a PMD of `set`: once, until it counts again.
    pub(super) fn log_uncounted(
        &mut self,
        set: u16,
        pmd: u16,
        what: &str,
        reason: UnavailableReason,
    ) {
        if self.uncounted.insert((set, pmd)) {
            let context = self.context;
            log::info!("{context}: PMD{pmd} of event set {set} {what}: {reason}");
        }
    }

    /// What each place is to count, so that all of `wanted` counts which finds a slot that
    /// counts it already; the rest is missing.
    pub(super) fn serve(&mut self, mut wanted: Vec<Wanted>) -> Vec<Option<Wanted>> {
        let mut serving = vec![None; self.leases.len()];
        // First those that stay as they are, then those that can serve another.
        for same in [true, false] {
            for (place, serves) in self.leases.iter().zip(&mut serving) {
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
        self.missing = wanted;
        serving
    }

    /// A place counts for a PMD from now on: who it is, if it was another one.
    pub(super) fn give_to(&mut self, index: usize, pmd: u16) -> Option<Claimant> {
        let before = std::mem::replace(&mut self.leases[index].pmd, pmd);
        (before != pmd).then(|| self.claimant(pmd))
    }

    /// It has a place more, with this number.
    pub(super) fn come(&mut self, lease: SlotLease, pmd: u16) -> usize {
        self.leases.push(PmdLease { lease, pmd });
        self.leases.len() - 1
    }

    pub(super) fn is_short(&self) -> bool {
        !self.missing.is_empty()
    }

    pub(super) fn missing(&self) -> &[Wanted] {
        &self.missing
    }

    pub(super) fn miss(&mut self, wanted: Wanted) {
        self.missing.push(wanted);
    }

    pub(super) fn take_missing(&mut self) -> Vec<Wanted> {
        std::mem::take(&mut self.missing)
    }

    pub(super) fn take_missing_pmd(&mut self, pmd: u16) -> Option<Wanted> {
        let at = self.missing.iter().position(|wanted| wanted.pmd == pmd)?;
        Some(self.missing.swap_remove(at))
    }

    /// The place that counts for a PMD.
    pub(super) fn place_of(&self, pmd: u16) -> Option<usize> {
        let is_it = |place: &PmdLease| place.lease.is_running() && place.pmd == pmd;
        self.leases.iter().position(is_it)
    }

    /// What counts, on which slot, and what is missing.
    pub(super) fn requests(&self) -> impl Iterator<Item = (u16, &CountRequest, Option<SlotIndex>)> {
        let running = self.leases.iter().filter(|place| place.lease.is_running());
        let held =
            running.map(|PmdLease { lease, pmd }| (*pmd, lease.request(), Some(lease.slot())));
        let missing = self.missing.iter();
        held.chain(missing.map(|wanted| (wanted.pmd, &wanted.request, None)))
    }
}
