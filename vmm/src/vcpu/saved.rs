//! What is kept of a vCPU when a run ends.

use pmu_virt::{CorePmu, PmuState};

use super::run::Vcpu;
use crate::audit::Holding;
use crate::reservations::holdings;
use crate::sys::rdtsc;

impl Vcpu {
    /// Who holds its counters now, when it has ended: what came due since it was
    /// left last has taken place.
    #[must_use]
    pub fn holdings(&mut self, mut core: Option<&mut CorePmu>) -> Vec<Holding> {
        self.core.tick(core.as_deref_mut(), rdtsc());
        let pmu = self.pmu();
        pmu.map(|pmu| holdings(pmu, core.as_deref()))
            .unwrap_or_default()
    }

    /// The PMU's state; a PMI that is late or on its way is pending in it. `None`
    /// without a PMU. Counts are those of the last exit, on this core or after the
    /// vCPU has left its core.
    pub fn save_pmu(&mut self, mut core: Option<&mut CorePmu>) -> Option<PmuState> {
        self.core.tick(core.as_deref_mut(), rdtsc());
        let pmu = self.core.pmu.as_mut()?;
        Some(pmu.save(core))
    }
}
