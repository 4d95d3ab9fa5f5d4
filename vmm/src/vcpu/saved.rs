//! What is kept of a vCPU when a run ends.

use kvm_pmu::Tsc;
use pmu_virt::PmuState;

use super::run::Vcpu;
use crate::audit::Holding;
use crate::reservations::holdings;

impl Vcpu {
    /// Who holds its counters now, when it has ended: what came due since it was
    /// left last has taken place.
    #[must_use]
    pub fn holdings(&mut self) -> Vec<Holding> {
        self.core.pmu.tick(Tsc::now());
        self.pmu().map(holdings).unwrap_or_default()
    }

    /// The PMU's state; a PMI that is late or on its way is pending in it. `None`
    /// without a PMU. Counts are those of the last exit, on this core or after the
    /// vCPU has left its core.
    pub fn save_pmu(&mut self) -> Option<PmuState> {
        self.core.pmu.tick(Tsc::now());
        self.core.pmu.return_pmi();
        Some(self.core.pmu.pmu_mut()?.save())
    }
}
