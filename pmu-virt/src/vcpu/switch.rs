//! Onto a core and off it, and what counting needs of the VMM there.

use arbiter::{CounterId, CounterSet};
use pmu_model::{CountRequest, LossReason, MAX_FIXED, MAX_PROGRAMMABLE, SlotSet};

use super::{Here, VcpuPmu, index_of};
use crate::attached::AttachedContext;
use crate::core_pmu::CorePmu;
use crate::slot_bank::{Return, Settled};

impl VcpuPmu {
    /// Switches the vCPU in: its counters count on `core` from now on. Those
    /// that are still in place are started, all as one; the others are given a
    /// place. Counters of other vCPUs are stopped, and stay until their place
    /// is needed.
    pub fn attach(&mut self, core: &mut CorePmu) {
        core.bank.begin_switch();
        // The counters of the one before are stopped only now: if it is the same one,
        // it never left.
        if core.bank.attached() != Some(self.owner) {
            for hosted in core.host.contexts_mut() {
                hosted.leave_private(&mut core.bank);
            }
            core.bank.attach(self.owner);
        }
        self.attached = true;
        let is_new = self.bank.replace(core.bank.number()) != Some(core.bank.number());
        if is_new {
            self.revive_dead();
            self.any.set(None);
        }
        self.note_hosts(Some(core));
        if core.host.is_enabled() {
            self.introduce(core);
        }
        let here = &mut self.here(Some(core));
        if is_new {
            self.choose_for_ibs(here);
        }
        let (mut before, mut refused) = (CounterSet::EMPTY, CounterSet::EMPTY);
        for counter in self.active.iter() {
            self.return_to_place(here, counter);
            let logical = &mut self.counters[super::index_of(counter)];
            match (logical.times.is_enabled(), logical.unavailable) {
                (false, _) if logical.lease.is_none() => self.active.remove(counter),
                (true, None) if !logical.is_running() => drop(before.insert(counter)),
                (true, Some(_)) if !logical.is_running() => drop(refused.insert(counter)),
                _ => {}
            }
        }
        if self.hosting || !self.orphans.is_empty() {
            self.return_hosts(here);
        } else {
            // The context that had one may have gone while the vCPU was on no core.
            self.return_samplers(here);
        }
        // Those that counted before come first, so that they go on.
        for counter in before.iter().chain(refused.iter()) {
            // What was brought up before may have placed this one as well.
            if !self.counters[super::index_of(counter)].is_running() {
                self.bring_up(here, counter);
            }
        }
        if self.hosting {
            self.give_places(here);
        }
        self.catch_up_with_budget(here);
        if let Some(core) = here {
            core.bank.end_switch();
            let overflowed = core.bank.take_overflows();
            self.settle_slots(here, overflowed);
        }
        if self.waits_for_room() {
            // It may have come for this core's room.
            self.look_for_room(here);
        }
        self.look_again(here);
        self.refresh_needs(here.as_deref());
    }

    /// Switches the vCPU out. Its counters stay on the core, and are stopped
    /// when another vCPU is attached to it. Until then counts that the guest
    /// made last may not be settled yet.
    pub fn park(&mut self, core: &mut CorePmu) {
        if !self.attached {
            return;
        }
        let overflowed = core.bank.take_overflows();
        let here = &mut Some(core);
        self.settle_slots(here, overflowed);
        if let (true, Some(core)) = (self.hosting, here) {
            self.settle_hosts(core);
        }
        self.attached = false;
        self.hosting = false;
        self.refresh_needs(None);
    }

    /// Takes every count of the vCPU off `core`, on which it was parked, so
    /// that it can go on elsewhere.
    pub fn leave(&mut self, core: &mut CorePmu) {
        core.bank.begin_switch();
        for counter in self.active.iter() {
            self.release_slot(&mut Some(&mut *core), counter);
        }
        self.take_hosts_off(core);
        core.bank.forget(self.owner);
        core.bank.end_switch();
        if self.freeze.due {
            self.freeze_counters(&mut None);
        }
        self.refresh_needs(None);
    }

    /// Switches the vCPU out for good, with every count.
    pub fn depart(&mut self, core: &mut CorePmu) {
        self.park(core);
        self.leave(core);
    }

    /// This core may have a source for what the last one had none for.
    fn revive_dead(&mut self) {
        for counter in
            (CounterSet::first(MAX_PROGRAMMABLE, MAX_FIXED) | CounterSet::SAMPLERS).iter()
        {
            if self.counters[index_of(counter)].dead.take().is_some() {
                self.active.insert(counter);
            }
        }
    }

    /// A counter that had a place looks whether it still has.
    fn return_to_place(&mut self, here: &mut Here<'_>, counter: CounterId) {
        let logical = &mut self.counters[super::index_of(counter)];
        let (Some(lease), Some(core)) = (&mut logical.lease, &mut *here) else {
            return;
        };
        match lease.come_back(logical.request, &mut core.bank) {
            Return::InPlace => {}
            Return::Lost => self.release_slot(here, counter),
            Return::Superseded => {
                let request = *lease.request();
                core.bank.release(lease);
                logical.lease = None;
                self.leave_place(here, counter, &request, None, None);
            }
        }
    }

    /// A lease for `request` is over, with this as its last count.
    pub(super) fn leave_place(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        request: &CountRequest,
        settled: Option<Settled>,
        loss: Option<LossReason>,
    ) {
        let ran = self.ran;
        // What was cleared while it was away is nobody's count any more.
        let is_used = self.counters[super::index_of(counter)].request.is_some();
        if let Some(settled) = settled.filter(|_| is_used) {
            self.take_in(here, counter, request, settled);
        }
        let logical = &mut self.counters[super::index_of(counter)];
        // The first reason is the one that counts.
        logical.loss = logical.loss.or(loss.filter(|_| is_used));
        logical.times.stop(ran);
    }

    /// Settles the counters on `slots`. A PMI that this brings, or that was noted
    /// before, freezes the counters.
    pub(super) fn settle_slots(&mut self, here: &mut Here<'_>, slots: SlotSet) {
        for counter in self.active.iter() {
            let lease = &mut self.counters[super::index_of(counter)].lease;
            if let Some(lease) = lease
                && slots.contains(lease.slot())
            {
                lease.overflowed();
                self.settle(here, counter);
            }
        }
        if self.freeze.due {
            self.freeze_counters(here);
        }
        self.stop_ibs_if_due(here);
    }
}

/// What the VMM has to do for the counts; changes at writes and resets, and at
/// whatever is done to host contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Tell the ring in [`Progress::Left`](crate::Progress::Left), and keep
    /// [`VcpuPmu::deadline`].
    pub ring: bool,
    /// Step the guest and tell each instruction.
    pub stepping: bool,
    /// Some counter is running, or waits for its turn, or a host context is
    /// started.
    pub counting: bool,
}

impl VcpuPmu {
    /// What the VMM has to do while the guest runs.
    #[inline]
    pub fn needs(&self) -> Needs {
        self.needs
    }

    pub(super) fn refresh_needs(&mut self, core: Option<&CorePmu>) {
        let is_running = |counter| self.counters[index_of(counter)].is_running();
        let mut running = self.active.iter().any(is_running);
        let mut active = false;
        if self.hosting {
            running |= core.is_some_and(|core| core.bank.is_counting());
            active = self.hosts(core).any(AttachedContext::is_active);
        }
        self.needs = match core {
            Some(core) => Needs {
                ring: running && core.backend().needs_ring(),
                stepping: running && core.backend().needs_stepping(),
                // Turns go on where none of the first counters could be had.
                counting: running || active || self.multiplexer.is_active(),
            },
            None => Needs::default(),
        };
    }
}
