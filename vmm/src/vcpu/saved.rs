//! What is kept of a vCPU when a run ends.

use pmu_virt::{CorePmu, PmuState};

use super::run::Vcpu;
use crate::audit::Holding;
use crate::reservations::holdings;

impl Vcpu {
    /// Who holds its counters now, when it has ended: what came due since it was
    /// left last has taken place. `core` is the one that it was on, if it was on one.
    #[must_use]
    pub fn holdings(&mut self, mut core: Option<&mut CorePmu>) -> Vec<Holding> {
        self.core.pmu.tick(core.as_deref_mut(), kvm_pmu::now());
        let pmu = self.pmu();
        pmu.map(|pmu| holdings(pmu, core.as_deref()))
            .unwrap_or_default()
    }

    /// The PMU's state; a PMI that is late or on its way is pending in it. `None`
    /// without a PMU. Counts are those of the last exit, on this core or after the
    /// vCPU has left its core.
    pub fn save_pmu(&mut self, mut core: Option<&mut CorePmu>) -> Option<PmuState> {
        self.core.pmu.tick(core.as_deref_mut(), kvm_pmu::now());
        Some(self.core.pmu.pmu_mut()?.save(core))
    }
}
