//! Ranges of MSR indices.

use crate::accounting;

/// Every MSR index that a PMU of either vendor may have, as inclusive ranges,
/// ascending: what has to raise #GP where the guest has no PMU, or another
/// vendor's or an older one.
///
/// Covers the core counters of every architectural version, their global
/// registers, `IA32_PERF_CAPABILITIES`, PEBS, the debug store area and IBS;
/// on AMD also the counters of the north bridge and the shared cache, whose
/// CPUID bits stay hidden; the accounting page and the reservations' block.
pub fn all_pmu_msr_ranges() -> Vec<(u32, u32)> {
    let page = (
        accounting::MSR_BASE,
        accounting::MSR_BASE + accounting::MSR_COUNT - 1,
    );
    let block = (
        arbiter::abi::MSR_BASE,
        arbiter::abi::MSR_BASE + arbiter::abi::MSR_COUNT - 1,
    );
    merge(ALL.iter().copied().chain([page, block]).collect())
}

/// SDM vol. 4, tables of architectural MSRs and of 0x1900 to 0x19FF (version
/// 6); APM vol. 2 appendix A, "MSR Cross-Reference"; Family 19h PPR.
const ALL: &[(u32, u32)] = &[
    (0xc1, 0xc8),               // IA32_PMC0..7
    (0x186, 0x18d),             // IA32_PERFEVTSEL0..7
    (0x309, 0x30f),             // IA32_FIXED_CTR0..6
    (0x329, 0x329),             // IA32_PERF_METRICS
    (0x345, 0x345),             // IA32_PERF_CAPABILITIES
    (0x38d, 0x392),             // fixed and global control and status
    (0x3f1, 0x3f2),             // IA32_PEBS_ENABLE, PEBS_DATA_CFG
    (0x3f6, 0x3f7),             // PEBS load latency, PEBS front end
    (0x4c1, 0x4c8),             // IA32_A_PMC0..7
    (0x600, 0x600),             // IA32_DS_AREA
    (0x1900, 0x19ff),           // version 6 counters, selects, reload values
    (0xc000_0300, 0xc000_0303), // PerfCntrGlobal*
    (0xc001_0000, 0xc001_0007), // legacy PerfCtl and PerfCtr
    (0xc001_0200, 0xc001_020b), // core extension
    (0xc001_0230, 0xc001_023b), // shared cache
    (0xc001_0240, 0xc001_024f), // north bridge, data fabric
    (0xc001_1030, 0xc001_103d), // IBS
];

/// Sorts ranges and joins those that touch or overlap.
pub(super) fn merge(mut ranges: Vec<(u32, u32)>) -> Vec<(u32, u32)> {
    ranges.sort_unstable();
    let mut merged: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match merged.last_mut() {
            Some(previous) if first <= previous.1.saturating_add(1) => {
                previous.1 = previous.1.max(last);
            }
            _ => merged.push((first, last)),
        }
    }
    merged
}
