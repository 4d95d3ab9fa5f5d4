//! The PMI of a vCPU, from the overflow until it was sent, and
//! FREEZE_PERFMON_ON_PMI: a PMI stops the counters.
//!
//! A PMI is pending here and nowhere else. The VMM asks what is to be done
//! ([`VcpuPmu::pmi_to_route`], [`VcpuPmu::pmi_due`]), looks at the guest's local
//! APIC, sends, and reports ([`VcpuPmu::pmi_dropped`], [`VcpuPmu::pmi_sent`]).
//!
//! What a PMI does depends on the version (SDM vol. 3B, "Freezing LBR and Performance
//! Counters on PMI"). Versions 2 and 3: when a counter overflows that asks for a PMI, the
//! enable bits of the global control register are cleared, and software sets them again.
//! From version 4 on: the status bit CTR_FRZ is set, and while it is, counters stand,
//! whatever the global control register says; software clears it. The control bit lies in
//! IA32_DEBUGCTL, whose other bits are the processor's.

use arbiter::{CounterId, CounterSet, Shared};
use pmu_model::{CTR_FRZ, DEBUGCTL, MISC_ENABLE, MsrIndex, Ticks, Tsc};

use super::{Here, MsrWrite, ReadOutcome, VcpuPmu, WriteOutcome};
use crate::throttle::{PmiThrottle, ThrottleDecision};

/// A performance monitoring interrupt to be raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmiRequest {
    /// Counters that overflowed.
    pub counters: CounterSet,
}

/// What is to be done about a PMI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmiDue {
    /// None is to be sent now.
    Nothing,
    /// Counters have overflowed, and their PMI is held back by the throttle.
    Late,
    /// It is to be sent now, and [`VcpuPmu::pmi_sent`] to be called.
    Send(PmiRequest),
}

/// Overflows that have not raised their PMI.
#[derive(Debug)]
pub(super) struct PendingPmi {
    /// Those that the VMM has not been asked to route.
    fresh: CounterSet,
    /// Those whose PMI was let through, and waits to be sent.
    routed: CounterSet,
    throttle: PmiThrottle,
}

impl Default for PendingPmi {
    fn default() -> Self {
        PendingPmi {
            fresh: CounterSet::EMPTY,
            routed: CounterSet::EMPTY,
            throttle: PmiThrottle::new(Ticks(0)),
        }
    }
}

impl PendingPmi {
    pub(super) fn overflowed(&mut self, counter: CounterId) {
        self.fresh.insert(counter);
    }

    /// A PMI of a counter that was taken from its owner is nobody's.
    pub(super) fn clear(&mut self, counter: CounterId) {
        self.fresh.remove(counter);
        self.routed.remove(counter);
    }

    pub(super) fn reset(&mut self) {
        (self.fresh, self.routed) = (CounterSet::EMPTY, CounterSet::EMPTY);
        self.throttle.reset();
    }

    /// Counters with a PMI that was not sent.
    pub(super) fn counters(&self) -> CounterSet {
        union(self.fresh, self.routed)
    }

    pub(super) fn restore(&mut self, counters: CounterSet) {
        self.fresh = counters;
    }

    fn due(&mut self, now: Tsc) -> PmiDue {
        let fresh = std::mem::take(&mut self.fresh);
        self.routed = union(self.routed, fresh);
        // A late PMI that is due takes the new overflows along.
        let due = self.throttle.due(now)
            || !fresh.is_empty() && self.throttle.request(now) == ThrottleDecision::Deliver;
        match (due, self.routed.is_empty()) {
            (true, false) => PmiDue::Send(PmiRequest {
                counters: self.routed,
            }),
            (false, _) if !fresh.is_empty() => PmiDue::Late,
            _ => PmiDue::Nothing,
        }
    }
}

fn union(one: CounterSet, other: CounterSet) -> CounterSet {
    CounterSet::from_bits(one.bits() | other.bits())
}

impl VcpuPmu {
    /// The same PMU with so much time between two PMIs at least; a new one
    /// holds none back.
    #[must_use]
    pub fn with_pmi_floor(mut self, ticks: Ticks) -> Self {
        self.pmi.throttle = PmiThrottle::new(ticks);
        if let Some(ibs) = &mut self.ibs {
            ibs.set_throttle(PmiThrottle::new(ticks));
        }
        self
    }

    /// Whether there may be a PMI or a notice to be sent.
    #[inline]
    pub fn has_interrupt(&self) -> bool {
        let waits = self.pmi.throttle.deadline().is_some();
        let samples = self.ibs.as_ref().is_some_and(|ibs| ibs.is_waiting());
        waits || samples || !self.pmi.counters().is_empty() || self.reservations.is_some()
    }

    /// Overflows whose PMI finds no other one on its way: the VMM has to look now
    /// whether the guest's local APIC lets one through, as hardware does at the
    /// overflow. If it does not, [`VcpuPmu::pmi_dropped`] is to be called.
    #[inline]
    pub fn pmi_to_route(&self) -> Option<PmiRequest> {
        let counters = self.pmi.fresh;
        (!counters.is_empty() && self.pmi.routed.is_empty()).then_some(PmiRequest { counters })
    }

    /// The PMI of [`VcpuPmu::pmi_to_route`] was not let through, and is gone.
    pub fn pmi_dropped(&mut self) {
        self.pmi.fresh = CounterSet::EMPTY;
    }

    /// What is to be done about the PMI at TSC value `now`. Overflows of several
    /// counters, or several of one, merge into one; those of counters that were
    /// cleared since are none.
    #[inline]
    pub fn pmi_due(&mut self, now: Tsc) -> PmiDue {
        self.pmi.due(now)
    }

    /// The PMI of [`VcpuPmu::pmi_due`] was sent.
    pub fn pmi_sent(&mut self) {
        self.pmi.routed = CounterSet::EMPTY;
    }

    /// When an interrupt is due that the throttle holds back.
    #[inline]
    pub fn interrupt_due(&self) -> Option<Tsc> {
        let samples = self.ibs.as_ref().and_then(|ibs| ibs.deadline());
        let pmi = self.pmi.throttle.deadline();
        [pmi, samples].into_iter().flatten().min()
    }

    /// PMIs that were let through and that were late, and when a late one is due.
    pub fn throttle(&self) -> &PmiThrottle {
        &self.pmi.throttle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pmi_of_cleared_counters_is_none() {
        let set = |counters: &[u8]| -> CounterSet {
            let counters = counters.iter();
            counters.map(|n| CounterId::Programmable(*n)).collect()
        };
        let check = |overflowed: &[u8], cleared: &[u8], left: Option<&[u8]>| {
            let mut pmi = PendingPmi {
                throttle: PmiThrottle::new(Ticks(100)),
                ..PendingPmi::default()
            };
            // One has just been sent, so the next one is late.
            assert_eq!(pmi.throttle.request(Tsc(0)), ThrottleDecision::Deliver);
            pmi.restore(set(overflowed));
            assert_eq!(pmi.due(Tsc(50)), PmiDue::Late);
            for counter in set(cleared).iter() {
                pmi.clear(counter);
            }
            let expected = left.map_or(PmiDue::Nothing, |left| {
                PmiDue::Send(PmiRequest {
                    counters: set(left),
                })
            });
            assert_eq!(
                pmi.due(Tsc(100)),
                expected,
                "{overflowed:?} without {cleared:?}"
            );
        };
        check(&[1], &[1], None);
        check(&[1, 2], &[1], Some(&[2]));
        check(&[1], &[2, 3], Some(&[1]));
    }
}

/// `IA32_DEBUGCTL.FREEZE_PERFMON_ON_PMI`.
pub(super) const FREEZE_PERFMON_ON_PMI: u64 = 1 << 12;
/// Bits of `IA32_MISC_ENABLE` (SDM vol. 4, 1A0H), all read-only: there is a PMU, no
/// branch trace storage, no PEBS.
const PERFMON: u64 = 1 << 7;
const BTS_UNAVAILABLE: u64 = 1 << 11;
const PEBS_UNAVAILABLE: u64 = 1 << 12;

/// Whether PMIs stop the counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Freeze {
    /// The guest wants it.
    pub(super) on: bool,
    /// There was a PMI that did not take effect yet.
    pub(super) due: bool,
    /// Counters that stand because of CTR_FRZ.
    pub(super) frozen: CounterSet,
}

impl VcpuPmu {
    /// RDMSR of an MSR that the model shares with the processor.
    pub(super) fn read_shared_msr(&self, msr: MsrIndex) -> Option<ReadOutcome> {
        let (ours, value) = match msr {
            MISC_ENABLE => (
                PERFMON | BTS_UNAVAILABLE | PEBS_UNAVAILABLE,
                PERFMON | BTS_UNAVAILABLE,
            ),
            _ => {
                let freeze = u64::from(self.freeze.on) * FREEZE_PERFMON_ON_PMI;
                (FREEZE_PERFMON_ON_PMI, freeze)
            }
        };
        self.shares(msr)
            .then_some(ReadOutcome::Merge { ours, value })
    }

    /// WRMSR of an index that the model does not have: one that it shares with the
    /// processor, or none of ours.
    pub(super) fn write_shared_msr(&self, msr: MsrIndex, value: u64) -> MsrWrite {
        if !self.shares(msr) {
            return WriteOutcome::NotHandled.into();
        }
        let rest = match msr {
            // Read-only here; the processor's own say that it has neither.
            MISC_ENABLE => value | PERFMON | BTS_UNAVAILABLE | PEBS_UNAVAILABLE,
            _ => value & !FREEZE_PERFMON_ON_PMI,
        };
        MsrWrite {
            rest: Some(rest),
            ..WriteOutcome::Done.into()
        }
    }

    /// The processor has taken its bits of a write, [`MsrWrite::rest`]; `value` is what the guest wrote.
    pub fn rest_taken(&mut self, msr: MsrIndex, value: u64) {
        if msr == DEBUGCTL && self.shares(msr) {
            self.freeze.on = value & FREEZE_PERFMON_ON_PMI != 0;
        }
    }

    fn shares(&self, msr: MsrIndex) -> bool {
        self.model.shared_msrs().contains(&msr)
    }

    /// Lets a PMI that was noted stop the counters. Where the enable bits are cleared,
    /// it is those that the guest can set again: of counters that have a legacy name, and
    /// whose owners let both freezing and the global control register reach them.
    #[cold]
    pub(super) fn freeze_counters(&mut self, here: &mut Here<'_>) {
        if self.model.has_frozen_status() {
            self.global_status |= CTR_FRZ;
            self.take_freeze(here);
        } else {
            let frozen = self.touchable(Shared::GlobalControl) & self.touchable(Shared::Freeze);
            self.write_global_control(here, self.global_control & !frozen.bits());
        }
        // Counters that were settled for it may have overflowed as well; all
        // that can be stopped has been.
        self.freeze.due = false;
    }

    /// Stops what CTR_FRZ reaches and starts what it no longer does: counters whose owners
    /// let freezing reach them, and that have a legacy name, so that nobody's are stopped
    /// who has no say in it.
    #[cold]
    pub(super) fn take_freeze(&mut self, here: &mut Here<'_>) {
        let frozen = if self.is_frozen() {
            self.touchable(Shared::Freeze)
        } else {
            CounterSet::EMPTY
        };
        let before = std::mem::replace(&mut self.freeze.frozen, frozen);
        let changed = CounterSet::from_bits(before.bits() ^ frozen.bits());
        if changed.is_empty() {
            return;
        }
        let counters = self.model.counters();
        for counter in counters.filter(|counter| changed.contains(*counter)) {
            self.settle(here, counter);
            self.update(here, counter);
        }
        self.refresh_needs(here.as_deref());
    }

    /// Whether CTR_FRZ is set.
    #[inline]
    pub(super) fn is_frozen(&self) -> bool {
        self.global_status & CTR_FRZ != 0
    }

    /// Before an access where PMIs freeze, so that it finds the counters as the last
    /// one left them.
    #[cold]
    pub(super) fn settle_freeze(&mut self, here: &mut Here<'_>) {
        self.settle_all(here);
        if self.freeze.due {
            self.freeze_counters(here);
        }
    }
}
