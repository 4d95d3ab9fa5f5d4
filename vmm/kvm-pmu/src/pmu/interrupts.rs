//! Interrupts that a PMU raises: PMIs at overflows, and those that announce
//! notices of the reservations.

use pmu_virt::{CounterSet, PmiRequest, ThrottleDecision, VcpuPmu};

use super::{Lent, Traps};
use crate::error::KvmPmuError;
use crate::observe::TrapEvent;
use crate::pmi::{self, Lvtpc};
use crate::registers::VcpuAccess;
use crate::time::Tsc;

/// A PMI that has left the PMU and has not been sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct PendingPmi {
    request: PmiRequest,
    lvtpc: Lvtpc,
    /// When its overflow was due, if the PMU knew.
    due: Option<Tsc>,
}

impl Traps {
    pub(super) fn forward_pmi(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        now: u64,
    ) -> Result<(), KvmPmuError> {
        self.drop_cleared();
        let Some(pmu) = &mut self.pmu else {
            return Ok(());
        };
        let vendor = pmu.model().vendor();
        let news = pmu.take_pmi();
        if let Some(request) = news
            && !self.latch_pmi(vcpu, lent, request)?
        {
            return Ok(());
        }
        // A late PMI that is due takes the new overflows along.
        let due = self.throttle.due(now)
            || news.is_some() && self.throttle.request(now) == ThrottleDecision::Deliver;
        if news.is_some() && !due {
            lent.observer.event(vcpu.id(), TrapEvent::PmiLate);
        }
        if !due {
            return Ok(());
        }
        let Some(pending) = self.pending_pmi.take() else {
            return Ok(());
        };
        let delivery = pmi::send(vcpu, lent.vm, vendor, pending.lvtpc)?;
        let event = TrapEvent::Pmi {
            request: pending.request,
            delivery,
            due: pending.due,
        };
        lent.observer.event(vcpu.id(), event);
        Ok(())
    }

    /// Keeps a new PMI until it is sent; false if LVTPC lets none through now
    /// and no earlier one is on its way.
    fn latch_pmi(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        request: PmiRequest,
    ) -> Result<bool, KvmPmuError> {
        if let Some(pending) = &mut self.pending_pmi {
            pending.request = both(pending.request, request);
            return Ok(true);
        }
        let lvtpc = Lvtpc::read(vcpu)?;
        let due = self.due;
        if let Some(delivery) = pmi::refusal(lvtpc) {
            let event = TrapEvent::Pmi {
                request,
                delivery,
                due,
            };
            lent.observer.event(vcpu.id(), event);
            return Ok(false);
        }
        self.pending_pmi = lvtpc.map(|lvtpc| PendingPmi {
            request,
            lvtpc,
            due,
        });
        Ok(true)
    }

    /// Raises the interrupts that announce notices of the reservations. A notice
    /// whose interrupt finds the local APIC off stays in the guest's queue.
    pub(super) fn forward_notices(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        while let Some(vector) = self.pmu.as_mut().and_then(VcpuPmu::take_notice) {
            let sent = pmi::interrupt(vcpu, lent.vm, vector)?;
            let event = TrapEvent::Notice { vector, sent };
            lent.observer.event(vcpu.id(), event);
        }
        Ok(())
    }

    /// Forgets that counters overflowed which have been cleared since: given back,
    /// or taken from their owner. A PMI of none is none.
    fn drop_cleared(&mut self) {
        let Some(pmu) = &mut self.pmu else { return };
        let cleared = pmu.take_cleared();
        if cleared.is_empty() {
            return;
        }
        self.pending_pmi = self.pending_pmi.take().and_then(|mut pending| {
            pending.request = without(pending.request, cleared)?;
            Some(pending)
        });
    }

    pub(super) fn return_pmi(&mut self) {
        self.drop_cleared();
        if let (Some(late), Some(pmu)) = (self.pending_pmi.take(), &mut self.pmu) {
            pmu.return_pmi(late.request);
        }
    }
}

/// One PMI stands for the overflows of both.
fn both(one: PmiRequest, other: PmiRequest) -> PmiRequest {
    PmiRequest {
        counters: CounterSet::from_bits(one.counters.bits() | other.counters.bits()),
    }
}

/// The PMI of all other counters, if there are any.
fn without(request: PmiRequest, cleared: CounterSet) -> Option<PmiRequest> {
    let counters = request.counters & !cleared;
    (!counters.is_empty()).then_some(PmiRequest { counters })
}

#[cfg(test)]
mod tests {
    use arbiter::CounterId;

    use super::*;

    #[test]
    fn a_pmi_of_cleared_counters_is_none() {
        let set = |counters: &[u8]| -> CounterSet {
            let counters = counters.iter();
            counters.map(|n| CounterId::Programmable(*n)).collect()
        };
        let check = |overflowed: &[u8], cleared: &[u8], left: Option<&[u8]>| {
            let counters = set(overflowed);
            let left = left.map(|left| PmiRequest {
                counters: set(left),
            });
            let found = without(PmiRequest { counters }, set(cleared));
            assert_eq!(found, left, "{overflowed:?} without {cleared:?}");
        };
        check(&[1], &[1], None);
        check(&[1, 2], &[1], Some(&[2]));
        check(&[1], &[2, 3], Some(&[1]));
    }
}
