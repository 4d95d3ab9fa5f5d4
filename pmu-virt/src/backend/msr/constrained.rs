//! Events that not every programmable counter can count, by processor.

use pmu_model::Vendor;

use super::layout::HostCpuid;

/// Events that not every programmable counter can count.
struct Row {
    /// Event selects: the first and the last.
    events: (u8, u8),
    /// `None`: whatever the unit mask.
    umask: Option<u8>,
    /// One bit for each programmable counter.
    counters: u8,
}

const fn any(event: u8, counters: u8) -> Row {
    range(event, event, counters)
}

const fn range(first: u8, last: u8, counters: u8) -> Row {
    Row {
        events: (first, last),
        umask: None,
        counters,
    }
}

const fn exact(event: u8, umask: u8, counters: u8) -> Row {
    Row {
        events: (event, event),
        umask: Some(umask),
        counters,
    }
}

// The tables below say what the event constraints of Linux say of these
// processors (arch/x86/events/intel/core.c, and ds.c for events that only
// precise sampling uses there), which follow the comments of Intel's event
// lists. The first row that fits holds. A core whose other thread is switched
// off has eight counters, and some events still need one of the lower four.

/// Core 2.
const CORE2: &[Row] = &[
    any(0x10, 0b01), // FP_COMP_OPS_EXE
    any(0x11, 0b10), // FP_ASSIST
    any(0x12, 0b10), // MUL
    any(0x13, 0b10), // DIV
    any(0x14, 0b01), // CYCLES_DIV_BUSY
    any(0x18, 0b01), // IDLE_DURING_DIV
    any(0x19, 0b10), // DELAYED_BYPASS
    any(0xa1, 0b01), // RS_UOPS_DISPATCHED
    any(0xc9, 0b01), // ITLB_MISS_RETIRED
    any(0xcb, 0b01), // MEM_LOAD_RETIRED
];

const NEHALEM: &[Row] = &[
    range(0x40, 0x43, 0b11), // L1D_CACHE_LD, _ST, _LOCK, L1D_ALL_REF
    any(0x48, 0b11),         // L1D_PEND_MISS
    any(0x4e, 0b11),         // L1D_PREFETCH
    any(0x51, 0b11),         // L1D
    any(0x63, 0b11),         // CACHE_LOCK_CYCLES
];

const WESTMERE: &[Row] = &[
    any(0x51, 0b11), // L1D
    any(0x60, 0b01), // OFFCORE_REQUESTS_OUTSTANDING
    any(0x63, 0b11), // CACHE_LOCK_CYCLES
    any(0xb3, 0b01), // SNOOPQ_REQUESTS_OUTSTANDING
];

const SANDY_BRIDGE: &[Row] = &[
    any(0x48, 0b0100),         // L1D_PEND_MISS
    exact(0xa3, 0x02, 0b0100), // CYCLE_ACTIVITY.CYCLES_L1D_PENDING
    exact(0xa3, 0x06, 0b0100), // CYCLE_ACTIVITY.STALLS_L1D_PENDING
    exact(0xa3, 0x04, 0b1111), // CYCLE_ACTIVITY.CYCLES_NO_DISPATCH
    exact(0xa3, 0x05, 0b1111), // CYCLE_ACTIVITY.STALLS_L2_PENDING
    exact(0xc0, 0x01, 0b0010), // INST_RETIRED.PREC_DIST
    any(0xcd, 0b1000),         // MEM_TRANS_RETIRED
    range(0xd0, 0xd3, 0b1111), // MEM_UOPS_RETIRED, MEM_LOAD_UOPS_*
];

const IVY_BRIDGE: &[Row] = &[
    exact(0x48, 0x01, 0b0100), // L1D_PEND_MISS.PENDING
    exact(0x79, 0x02, 0b1111), // IDQ.EMPTY
    exact(0x9c, 0x01, 0b1111), // IDQ_UOPS_NOT_DELIVERED.CORE
    exact(0xa3, 0x08, 0b0100), // CYCLE_ACTIVITY.CYCLES_L1D_PENDING
    exact(0xa3, 0x0c, 0b0100), // CYCLE_ACTIVITY.STALLS_L1D_PENDING
    exact(0xa3, 0x02, 0b1111), // CYCLE_ACTIVITY.CYCLES_LDM_PENDING
    exact(0xa3, 0x04, 0b1111), // CYCLE_ACTIVITY.CYCLES_NO_EXECUTE
    exact(0xa3, 0x05, 0b1111), // CYCLE_ACTIVITY.STALLS_L2_PENDING
    exact(0xa3, 0x06, 0b1111), // CYCLE_ACTIVITY.STALLS_LDM_PENDING
    exact(0xc0, 0x01, 0b0010), // INST_RETIRED.PREC_DIST
    any(0xcd, 0b1000),         // MEM_TRANS_RETIRED
    range(0xd0, 0xd3, 0b1111), // MEM_UOPS_RETIRED, MEM_LOAD_UOPS_*
];

const HASWELL: &[Row] = &[
    exact(0x48, 0x01, 0b0100), // L1D_PEND_MISS.PENDING
    exact(0xa3, 0x04, 0b1111), // CYCLE_ACTIVITY.CYCLES_NO_EXECUTE
    exact(0xa3, 0x08, 0b0100), // CYCLE_ACTIVITY.CYCLES_L1D_PENDING
    exact(0xa3, 0x0c, 0b0100), // CYCLE_ACTIVITY.STALLS_L1D_PENDING
    exact(0xc0, 0x01, 0b0010), // INST_RETIRED.PREC_DIST
    any(0xcd, 0b1000),         // MEM_TRANS_RETIRED
    range(0xd0, 0xd3, 0b1111), // MEM_UOPS_RETIRED, MEM_LOAD_UOPS_*
];

const BROADWELL: &[Row] = &[
    exact(0x48, 0x01, 0b0100), // L1D_PEND_MISS.PENDING
    exact(0xa3, 0x08, 0b0100), // CYCLE_ACTIVITY.CYCLES_L1D_MISS
    exact(0xa3, 0x0c, 0b0100), // CYCLE_ACTIVITY.STALLS_L1D_MISS
    exact(0xc0, 0x01, 0b0010), // INST_RETIRED.PREC_DIST
    any(0xcd, 0b1111),         // MEM_TRANS_RETIRED
    range(0xd0, 0xd3, 0b1111), // MEM_UOPS_RETIRED, MEM_LOAD_UOPS_*
];

/// Skylake to Comet Lake.
const SKYLAKE: &[Row] = &[
    exact(0xc0, 0x01, 0b0010), // INST_RETIRED.PREC_DIST
    any(0xc6, 0b1111),         // FRONTEND_RETIRED
    any(0xcd, 0b1111),         // MEM_TRANS_RETIRED
    range(0xd0, 0xd3, 0b1111), // MEM_INST_RETIRED, MEM_LOAD_*
];

/// Sapphire and Emerald Rapids.
const GOLDEN_COVE: &[Row] = &[
    any(0x2e, 0xff),           // LONGEST_LAT_CACHE
    any(0x3c, 0xff),           // CPU_CLK_UNHALTED
    range(0x01, 0x8f, 0b1111), // all others below 90H
    exact(0xa3, 0x01, 0b1111), // CYCLE_ACTIVITY.CYCLES_L2_MISS
    exact(0xa3, 0x02, 0b1111), // CYCLE_ACTIVITY.CYCLES_L3_MISS
    exact(0xa3, 0x08, 0b1111), // CYCLE_ACTIVITY.CYCLES_L1D_MISS
    exact(0xa4, 0x04, 0b0001), // TOPDOWN.BAD_SPEC_SLOTS
    exact(0xa4, 0x08, 0b0001), // TOPDOWN.BR_MISPREDICT_SLOTS
    exact(0xcd, 0x02, 0b0001), // MEM_TRANS_RETIRED.STORE_SAMPLE
    any(0xce, 0b0001),         // AMX_OPS_RETIRED
    range(0xd0, 0xdf, 0b1111), // MEM_INST_RETIRED, MEM_LOAD_*
];

/// `None` where the processor is not listed here.
fn rows(cpuid: &HostCpuid) -> Option<&'static [Row]> {
    match (cpuid.vendor, cpuid.family(), cpuid.model()) {
        (Some(Vendor::Intel), 6, model) => match model {
            0x0f | 0x16 | 0x17 | 0x1d => Some(CORE2),
            0x1a | 0x1e | 0x2e => Some(NEHALEM),
            0x25 | 0x2c | 0x2f => Some(WESTMERE),
            0x2a | 0x2d => Some(SANDY_BRIDGE),
            0x3a | 0x3e => Some(IVY_BRIDGE),
            0x3c | 0x3f | 0x45 | 0x46 => Some(HASWELL),
            0x3d | 0x47 | 0x4f | 0x56 => Some(BROADWELL),
            0x4e | 0x5e | 0x55 | 0x8e | 0x9e | 0xa5 | 0xa6 => Some(SKYLAKE),
            0x8f | 0xcf => Some(GOLDEN_COVE),
            _ => None,
        },
        _ => None,
    }
}

/// The programmable counters that can count an event of an Intel processor.
///
/// Of a processor that is not listed, architectural events go anywhere, and the
/// others only where its siblings count nearly all of theirs: on the lower four.
pub(super) fn intel_counters(cpuid: &HostCpuid, select: u16, umask: u8) -> Option<u8> {
    let fits = |row: &&Row| {
        let (first, last) = row.events;
        (u16::from(first)..=u16::from(last)).contains(&select)
            && row.umask.is_none_or(|wanted| wanted == umask)
    };
    match rows(cpuid) {
        Some(rows) => rows.iter().find(fits).map(|row| row.counters),
        None => (!ARCHITECTURAL.contains(&(select, umask))).then_some(0b1111),
    }
}

/// The architectural events up to version 4 (SDM vol. 3B, "Pre-defined
/// Architectural Performance Events").
const ARCHITECTURAL: [(u16, u8); 7] = [
    (0x3c, 0x00),
    (0x3c, 0x01),
    (0xc0, 0x00),
    (0x2e, 0x4f),
    (0x2e, 0x41),
    (0xc4, 0x00),
    (0xc5, 0x00),
];

/// The counters of a Family 15h core that can count an event, by the unit that
/// it comes from: bits 7:4 of the event select. Linux has the same table
/// (arch/x86/events/amd/core.c), from the BKDG for Family 15h.
pub(super) fn family_15h_counters(select: u16, umask: u8) -> u8 {
    const ALL: u8 = 0b11_1111;
    const LOWER: u8 = 0b00_0111;
    const UPPER: u8 = 0b11_1000;
    const THIRD: u8 = 0b00_1000;
    let several = umask.count_ones() > 1;
    match (select & 0xf0, select) {
        (0x00 | 0x10, 0x000) if umask & 0x0f != 0 && umask & 0xf0 != 0 => THIRD,
        (0x00 | 0x10, 0x004) if several => THIRD,
        (0x00 | 0x10, 0x003 | 0x00b | 0x00d) => THIRD,
        (0x00 | 0x10, _) => UPPER,
        (_, 0x023 | 0x043 | 0x045 | 0x046 | 0x054 | 0x055) => LOWER,
        (_, 0x02d) => THIRD,
        (_, 0x02e) => 0b00_1001,
        (_, 0x031) if several => 0,
        (_, 0x031) => LOWER,
        (_, 0x1c0) => UPPER,
        (0x20..=0x50 | 0xc0, _) => ALL,
        (_, 0x08f | 0x187 | 0x188) => 0b00_0001,
        (_, 0x0db..=0x0df | 0x1d6 | 0x1d8) => ALL,
        (0x60..=0x90 | 0xd0, _) => LOWER,
        // The northbridge has counters of its own, and nothing counts the rest.
        _ => 0,
    }
}
