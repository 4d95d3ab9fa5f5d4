//! What is kept of a vCPU when a run ends.

use pmu_virt::PmuState;

use super::run::Vcpu;
use crate::audit::Holding;
use crate::reservations::holdings;

impl Vcpu {
    /// Who holds its counters.
    #[must_use]
    pub fn holdings(&self) -> Vec<Holding> {
        self.pmu().map(holdings).unwrap_or_default()
    }

    /// The PMU's state; a PMI that is late or on its way is pending in it. `None`
    /// without a PMU. Counts are those of the last exit, on this core or after the
    /// vCPU has left its core.
    pub fn save_pmu(&mut self) -> Option<PmuState> {
        let late = self.core.pending_pmi.take();
        let pmu = self.core.pmu.as_mut()?;
        if let Some(late) = late {
            pmu.return_pmi(late.request);
        }
        Some(pmu.save())
    }
}
