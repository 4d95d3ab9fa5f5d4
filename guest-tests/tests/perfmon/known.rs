//! A source whose counts are known: `sim`, at rates that are whole numbers.

use std::sync::OnceLock;

use anyhow::{Context, Result};
use guest_tests::micro::Lab;
use pmu_virt::{CounterBackend, RateTable, SimBackend};
use vmm::kvm::VmOptions;
use vmm::micro::MicroGuest;

/// Cycles and returns in a microsecond.
pub(crate) const CYCLE_RATE: u64 = 1000;
pub(crate) const RETURN_RATE: u64 = 500;

/// Ticks of the TSC in a millisecond.
static TSC_KHZ: OnceLock<u32> = OnceLock::new();

/// To be called before a backend is made: the host's TSC is asked for.
pub(crate) fn measure(lab: &Lab, guest: &MicroGuest) -> Result<u32> {
    if let Some(khz) = TSC_KHZ.get() {
        return Ok(*khz);
    }
    let (_, vcpus) = guest.build(lab.host()?, &VmOptions::with_pmu(None))?;
    let khz = vcpus.first().context("a vCPU")?.get_tsc_khz()?;
    Ok(*TSC_KHZ.get_or_init(|| khz))
}

/// Counters for everybody.
pub(crate) fn sim() -> Box<dyn CounterBackend> {
    let text =
        format!("[event.cycles]\nrate = {CYCLE_RATE}\n[event.returns]\nrate = {RETURN_RATE}\n");
    let table = RateTable::parse(&text, "known").expect("a table of rates");
    let khz = TSC_KHZ.get().copied().expect("the TSC was measured");
    Box::new(SimBackend::new(table, khz))
}
