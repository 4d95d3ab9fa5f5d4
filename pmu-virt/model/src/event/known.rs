//! Events whose meaning is known, and the codes that select them.

use std::fmt;

use super::EventFamily;
use crate::ids::Vendor;

/// Events whose meaning is known, whatever their code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KnownEvent {
    /// Core clock cycles while not halted.
    CoreCycles,
    /// Cycles of a constant reference clock while not halted.
    RefCycles,
    /// Instructions retired.
    Instructions,
    /// Branch instructions retired, taken or not.
    Branches,
    /// Branch instructions retired that were taken.
    TakenBranches,
    /// Far control transfers retired.
    FarBranches,
    /// Memory loads.
    Loads,
    /// Memory stores.
    Stores,
    /// Near calls retired.
    Calls,
    /// Near returns retired.
    Returns,
    /// x87, MMX, 3DNow!, SSE and AVX instructions retired.
    FloatingPoint,
    /// x87 instructions retired.
    X87,
    /// MMX and 3DNow! instructions retired.
    Mmx,
    /// SSE and AVX instructions retired, scalar and packed.
    Sse,
    /// String instructions retired, a repeated one once. No processor has a
    /// code for them.
    Strings,
    /// Branch instructions retired that were mispredicted.
    MispredictedBranches,
    /// Last-level cache references.
    LlcReferences,
    /// Last-level cache misses.
    LlcMisses,
    /// Issue slots of the top-down method.
    TopdownSlots,
}

/// One row of the event table.
struct EventRow {
    family: EventFamily,
    select: u16,
    umask: u8,
    event: KnownEvent,
}

const fn row(family: EventFamily, select: u16, umask: u8, event: KnownEvent) -> EventRow {
    EventRow {
        family,
        select,
        umask,
        event,
    }
}

/// Codes shared by the AMD families from K8 on (K8 BKDG, Family 10h BKDG, Family
/// 17h and 19h PPR, "Performance Monitor Counters"); K7 has them all but 0C8h.
/// The unit mask is unused there.
const AMD_COMMON: &[(u16, KnownEvent)] = &[
    (0x76, KnownEvent::CoreCycles),
    (0xc0, KnownEvent::Instructions),
    (0xc2, KnownEvent::Branches),
    (0xc3, KnownEvent::MispredictedBranches),
    (0xc4, KnownEvent::TakenBranches),
    (0xc6, KnownEvent::FarBranches),
    (0xc8, KnownEvent::Returns),
];

/// Codes with a unit mask. Intel: SDM vol. 3B, "Pre-defined Architectural
/// Performance Events", and the event lists of Sandy Bridge to Skylake for
/// the taken, far, call, return, load and store events. AMD: BKDG and PPR
/// PMCx0CB (K8 tells packed SSE from scalar), Family 17h PPR PMCx029 and
/// Family 19h model 10h PPR PMCx120.
const EVENTS: &[EventRow] = &[
    row(EventFamily::Intel, 0x3c, 0x00, KnownEvent::CoreCycles),
    row(EventFamily::Intel, 0x3c, 0x01, KnownEvent::RefCycles),
    row(EventFamily::Intel, 0xc0, 0x00, KnownEvent::Instructions),
    row(EventFamily::Intel, 0x2e, 0x4f, KnownEvent::LlcReferences),
    row(EventFamily::Intel, 0x2e, 0x41, KnownEvent::LlcMisses),
    row(EventFamily::Intel, 0xc4, 0x00, KnownEvent::Branches),
    row(
        EventFamily::Intel,
        0xc5,
        0x00,
        KnownEvent::MispredictedBranches,
    ),
    row(EventFamily::Intel, 0xa4, 0x01, KnownEvent::TopdownSlots),
    row(EventFamily::Intel, 0xc4, 0x20, KnownEvent::TakenBranches),
    row(EventFamily::Intel, 0xc4, 0x40, KnownEvent::FarBranches),
    row(EventFamily::Intel, 0xc4, 0x02, KnownEvent::Calls),
    row(EventFamily::Intel, 0xc4, 0x08, KnownEvent::Returns),
    row(EventFamily::Intel, 0xd0, 0x81, KnownEvent::Loads),
    row(EventFamily::Intel, 0xd0, 0x82, KnownEvent::Stores),
    row(EventFamily::AmdK7, 0xcb, 0x0f, KnownEvent::FloatingPoint),
    row(EventFamily::AmdK7, 0xcb, 0x01, KnownEvent::X87),
    row(EventFamily::AmdK7, 0xcb, 0x02, KnownEvent::Mmx),
    row(EventFamily::AmdK7, 0xcb, 0x0c, KnownEvent::Sse),
    row(
        EventFamily::AmdFam10h,
        0xcb,
        0x07,
        KnownEvent::FloatingPoint,
    ),
    row(EventFamily::AmdFam10h, 0xcb, 0x01, KnownEvent::X87),
    row(EventFamily::AmdFam10h, 0xcb, 0x02, KnownEvent::Mmx),
    row(EventFamily::AmdFam10h, 0xcb, 0x04, KnownEvent::Sse),
    row(EventFamily::AmdZen, 0xcb, 0x07, KnownEvent::FloatingPoint),
    row(EventFamily::AmdZen, 0xcb, 0x01, KnownEvent::X87),
    row(EventFamily::AmdZen, 0xcb, 0x02, KnownEvent::Mmx),
    row(EventFamily::AmdZen, 0xcb, 0x04, KnownEvent::Sse),
    row(EventFamily::AmdZen4, 0xcb, 0x07, KnownEvent::FloatingPoint),
    row(EventFamily::AmdZen4, 0xcb, 0x01, KnownEvent::X87),
    row(EventFamily::AmdZen4, 0xcb, 0x02, KnownEvent::Mmx),
    row(EventFamily::AmdZen4, 0xcb, 0x04, KnownEvent::Sse),
    row(EventFamily::AmdZen, 0x29, 0x01, KnownEvent::Loads),
    row(EventFamily::AmdZen, 0x29, 0x02, KnownEvent::Stores),
    row(EventFamily::AmdZen4, 0x29, 0x01, KnownEvent::Loads),
    row(EventFamily::AmdZen4, 0x29, 0x02, KnownEvent::Stores),
    row(EventFamily::AmdZen4, 0x120, 0x01, KnownEvent::RefCycles),
];

impl KnownEvent {
    /// Every one.
    pub const ALL: [KnownEvent; 19] = [
        KnownEvent::CoreCycles,
        KnownEvent::RefCycles,
        KnownEvent::Instructions,
        KnownEvent::Branches,
        KnownEvent::TakenBranches,
        KnownEvent::FarBranches,
        KnownEvent::Loads,
        KnownEvent::Stores,
        KnownEvent::Calls,
        KnownEvent::Returns,
        KnownEvent::FloatingPoint,
        KnownEvent::X87,
        KnownEvent::Mmx,
        KnownEvent::Sse,
        KnownEvent::Strings,
        KnownEvent::MispredictedBranches,
        KnownEvent::LlcReferences,
        KnownEvent::LlcMisses,
        KnownEvent::TopdownSlots,
    ];
}

/// What a code means, if that is known.
pub(super) fn of_code(family: EventFamily, select: u16, umask: u8) -> Option<KnownEvent> {
    let exact = EVENTS
        .iter()
        .find(|row| row.family == family && row.select == select && row.umask == umask)
        .map(|row| row.event);
    if exact.is_some() || family == EventFamily::Intel {
        return exact;
    }
    AMD_COMMON
        .iter()
        .find(|(code, _)| *code == select)
        .map(|(_, event)| *event)
}

impl fmt::Display for KnownEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KnownEvent::CoreCycles => "core cycles",
            KnownEvent::RefCycles => "reference cycles",
            KnownEvent::Instructions => "instructions",
            KnownEvent::Branches => "branches",
            KnownEvent::TakenBranches => "taken branches",
            KnownEvent::FarBranches => "far branches",
            KnownEvent::Loads => "loads",
            KnownEvent::Stores => "stores",
            KnownEvent::Calls => "near calls",
            KnownEvent::Returns => "near returns",
            KnownEvent::FloatingPoint => "x87, MMX and SSE instructions",
            KnownEvent::X87 => "x87 instructions",
            KnownEvent::Mmx => "MMX instructions",
            KnownEvent::Sse => "SSE instructions",
            KnownEvent::Strings => "string instructions",
            KnownEvent::MispredictedBranches => "mispredicted branches",
            KnownEvent::LlcReferences => "last-level cache references",
            KnownEvent::LlcMisses => "last-level cache misses",
            KnownEvent::TopdownSlots => "top-down slots",
        })
    }
}

/// Event select and unit mask of `event`; `None` where `family` has no code.
pub(super) fn code_of(family: EventFamily, event: KnownEvent) -> Option<(u16, u8)> {
    let row = EVENTS
        .iter()
        .find(|row| row.family == family && row.event == event)
        .map(|row| (row.select, row.umask));
    let common = || {
        let all = AMD_COMMON.iter().find(|(_, known)| *known == event);
        let amd = all.filter(|_| family.vendor() == Vendor::Amd);
        amd.map(|(select, _)| (*select, 0))
    };
    row.or_else(common)
}
