//! What a tool may count: which events, and how many at a time.

use std::sync::Arc;

use pmu_model::{CountRequest, Unavailable, UnavailableReason};

use crate::backend::{CountPlan, CounterBackend};
use crate::filter::EventFilter;

/// What somebody else allows a context.
#[derive(Debug, Default)]
pub(super) struct Allowance {
    /// The counters that it may use at a time by a lease of the host's arbiter; without a
    /// number it needs none.
    lease: Option<usize>,
    /// Its largest set wants more than that: it is preempted for as long.
    exceeded: bool,
    /// What its tool may count; all without it.
    filter: Option<Arc<EventFilter>>,
}

impl Allowance {
    pub(super) fn set_lease(&mut self, counters: usize) {
        self.lease = Some(counters);
    }

    pub(super) fn set_filter(&mut self, filter: Arc<EventFilter>) {
        self.filter = Some(filter);
    }

    /// Its largest set wants so many counters.
    pub(super) fn compare(&mut self, counters: usize) {
        self.exceeded = self.lease.is_some_and(|lease| lease < counters);
    }

    pub(super) fn is_exceeded(&self) -> bool {
        self.exceeded
    }

    /// How a request of its tool's would be counted.
    pub(super) fn plan(
        &self,
        backend: &dyn CounterBackend,
        request: &CountRequest,
    ) -> Result<CountPlan, Unavailable> {
        if let Some(filter) = &self.filter {
            let denied = filter.check(request);
            denied.map_err(|reason| Unavailable { reason })?;
        }
        if request.is_for_host_alone() {
            let reason = UnavailableReason::HostOnly;
            return Err(Unavailable { reason });
        }
        backend.plan(request)
    }
}
