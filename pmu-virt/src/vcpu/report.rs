//! What a vCPU's counters count, for people and tools.

use super::{VcpuPmu, index_of};
use crate::backend::{Provenance, Reading};
use crate::progress::LossReason;
use crate::request::CountRequest;
use arbiter::CounterId;

/// One counter that the guest uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterReport {
    /// Which counter.
    pub counter: CounterId,
    /// What the guest asked for; `Display` describes it.
    pub event: CountRequest,
    /// Events counted since the guest programmed it, or why there are none.
    pub reading: Reading,
    /// Why the count is no longer exact, if it once was.
    pub loss: Option<LossReason>,
    /// The guest-visible count at the last settlement.
    pub value: u64,
    /// Whether it is running now.
    pub running: bool,
}

impl VcpuPmu {
    /// The counters in use: those that are bound to a physical counter, those
    /// that should be but cannot, and those that are on but never advance.
    pub fn report(&self) -> Vec<CounterReport> {
        self.model
            .counters()
            .filter_map(|counter| self.report_of(counter))
            .collect()
    }

    fn report_of(&self, counter: CounterId) -> Option<CounterReport> {
        let logical = &self.counters[index_of(counter)];
        let event = self.request_of(counter)?;
        let (reading, loss) = if let Some(reason) = logical.unavailable {
            (Reading::Unavailable(reason), None)
        } else if let Some((slot, _)) = logical.bound {
            (self.backend.read(slot), self.backend.loss(slot))
        } else if event.enabled && !event.can_advance() {
            // Nothing was to be counted, so zero is a count somebody took.
            let reading = Reading::Counted {
                value: 0,
                provenance: Provenance::Exact,
            };
            (reading, None)
        } else {
            return None;
        };
        Some(CounterReport {
            counter,
            event,
            reading,
            loss,
            value: logical.value,
            running: logical.running,
        })
    }
}
