//! What controls ask their counters for on this machine.

use std::sync::Arc;

use perfmon_abi::PmcArg;
use pmu_model::ibs::is_on;
use pmu_model::{CountRequest, CounterId, IbsKind};

use crate::description::{LogicalPmu, PmcDescription};

/// The PMU that a tool sees, and which of the ways to count fetches is taken.
#[derive(Debug)]
pub(super) struct Requests {
    pmu: Arc<LogicalPmu>,
    fetch_choice: usize,
}

impl Requests {
    pub(super) fn new(pmu: Arc<LogicalPmu>) -> Self {
        Requests {
            pmu,
            fetch_choice: 0,
        }
    }

    pub(super) fn pmu(&self) -> &LogicalPmu {
        &self.pmu
    }

    /// Of what can be counted for the samplers, chooses the best that `counts`; where
    /// nothing does, the last says so.
    pub(super) fn choose_for_samplers(&mut self, mut counts: impl FnMut(&CountRequest) -> bool) {
        if self.pmu.sampler(IbsKind::Fetch).is_none() {
            return;
        }
        let all: Vec<_> = self.pmu.sampler_requests(IbsKind::Fetch, 0).collect();
        let best = all.iter().position(|request| {
            counts(&CountRequest {
                enabled: true,
                ..*request
            })
        });
        self.fetch_choice = best.unwrap_or(all.len().saturating_sub(1));
    }

    /// What a PMC of this value asks for.
    pub(super) fn of(&self, pmc: &PmcDescription, value: u64) -> Option<CountRequest> {
        match pmc.counter {
            CounterId::Ibs(kind @ IbsKind::Fetch) => self
                .pmu
                .sampler_requests(kind, value)
                .nth(self.fetch_choice),
            _ => self.pmu.request(pmc, value),
        }
    }

    /// What a write of a control asks for, if that control exists and would count.
    pub(super) fn of_write(&self, num: u16, value: u64) -> Option<CountRequest> {
        let pmc = self.pmu.pmc(num)?;
        let request = self.of(pmc, pmc.accept(value))?;
        request.can_advance().then_some(request)
    }

    /// The sampler that a write of a control would use, if that control exists.
    pub(super) fn sampler_of_write(&self, write: &PmcArg) -> Option<IbsKind> {
        let pmc = self.pmu.pmc(write.num)?;
        match pmc.counter {
            CounterId::Ibs(kind) if is_on(kind, pmc.accept(write.value)) => Some(kind),
            _ => None,
        }
    }
}
