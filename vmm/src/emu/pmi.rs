//! Interrupts that a PMU raises, by the local APICs of an emulated machine.

use std::convert::Infallible;

use irqchip::Chips;
use kvm_pmu::{TrapEvent, Tsc};
use pmu_virt::{
    IbsDue, Lvtpc, PmiDelivery, PmiForwarded, PmiLine, PmiRequest, PmiRoute, VcpuPmu, Vendor,
};

/// The way of a PMI from its overflow until it was sent.
#[derive(Debug, Default)]
pub(super) struct PmiSender {
    /// LVTPC as the overflow found it.
    latched: Option<Lvtpc>,
}

/// The local APIC of one vCPU.
struct ApicLine<'a> {
    chips: &'a mut Chips,
    cpu: usize,
    vendor: Vendor,
    latched: &'a mut Option<Lvtpc>,
    event: Option<TrapEvent>,
}

impl ApicLine<'_> {
    fn report(&mut self, request: PmiRequest, delivery: PmiDelivery) {
        // An overflow is noticed behind the instruction that completes it: there is no time
        // at which it was due before.
        self.event = Some(TrapEvent::Pmi {
            request,
            delivery,
            due: None,
        });
    }
}

impl PmiLine for ApicLine<'_> {
    type Error = Infallible;

    fn latch(&mut self, request: PmiRequest) -> Result<bool, Infallible> {
        // Where the APIC is disabled, the register reads as masked.
        let lvtpc = self.chips.lvtpc(self.cpu).map(Lvtpc::enabled);
        match lvtpc.map_or(PmiRoute::Masked, Lvtpc::route) {
            PmiRoute::Nmi | PmiRoute::Fixed(_) => {
                *self.latched = lvtpc;
                Ok(true)
            }
            route @ (PmiRoute::Masked | PmiRoute::Unusable(_)) => {
                self.report(request, PmiDelivery::by(route));
                Ok(false)
            }
        }
    }

    fn send(&mut self, request: PmiRequest) -> Result<bool, Infallible> {
        let Some(lvtpc) = self.latched.take() else {
            return Ok(false);
        };
        let route = lvtpc.route();
        raise(self.chips, self.cpu, route);
        let masked_after = lvtpc.after_delivery(self.vendor).is_some();
        if masked_after {
            self.chips.mask_lvtpc(self.cpu);
        }
        let delivery = PmiDelivery {
            route,
            masked_after,
        };
        self.report(request, delivery);
        Ok(true)
    }
}

fn raise(chips: &mut Chips, cpu: usize, route: PmiRoute) {
    match route {
        PmiRoute::Nmi => chips.raise_nmi(cpu),
        PmiRoute::Fixed(vector) => chips.raise(cpu, vector),
        PmiRoute::Masked | PmiRoute::Unusable(_) => {}
    }
}

impl PmiSender {
    /// Sends what is pending in the PMU of `cpu` and may go at `now`; what is to be reported
    /// of it goes to `report`.
    pub(super) fn forward(
        &mut self,
        (chips, cpu): (&mut Chips, usize),
        pmu: &mut VcpuPmu,
        now: Tsc,
        report: &mut dyn FnMut(TrapEvent),
    ) {
        let mut line = ApicLine {
            vendor: pmu.model().vendor(),
            chips,
            cpu,
            latched: &mut self.latched,
            event: None,
        };
        let Ok(forwarded) = pmu.interrupts_mut().forward(now, &mut line);
        let event = match forwarded {
            PmiForwarded::Nothing => None,
            PmiForwarded::Late => Some(TrapEvent::PmiLate),
            PmiForwarded::Dropped | PmiForwarded::Sent => line.event,
        };
        event.into_iter().for_each(&mut *report);
        match pmu.ibs_interrupt(now) {
            IbsDue::Send { vector } => raise(chips, cpu, PmiRoute::decode(vector)),
            IbsDue::Late => report(TrapEvent::PmiLate),
            IbsDue::Nothing => {}
        }
        while let Some(vector) = pmu.claims_mut().take_notice() {
            let sent = chips.takes_vectors(cpu);
            chips.raise(cpu, vector);
            report(TrapEvent::Notice { vector, sent });
        }
    }
}
