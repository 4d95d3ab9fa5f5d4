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
    /// Conditional branch instructions retired, taken or not: Jcc, LOOP and JCXZ.
    ConditionalBranches,
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

/// A code with a unit mask: event select, unit mask, meaning.
type Code = (u16, u8, KnownEvent);

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

/// The codes of Intel's processors from version 1 on (SDM vol. 3B, "Pre-defined
/// Architectural Performance Events").
const INTEL_ARCHITECTURAL: &[Code] = &[
    (0x3c, 0x00, KnownEvent::CoreCycles),
    (0x3c, 0x01, KnownEvent::RefCycles),
    (0xc0, 0x00, KnownEvent::Instructions),
    (0x2e, 0x4f, KnownEvent::LlcReferences),
    (0x2e, 0x41, KnownEvent::LlcMisses),
    (0xc4, 0x00, KnownEvent::Branches),
    (0xc5, 0x00, KnownEvent::MispredictedBranches),
];

/// Codes that the event lists of Sandy Bridge to Ice Lake and later agree on.
const INTEL_MODERN: &[Code] = &[
    (0xc4, 0x20, KnownEvent::TakenBranches),
    (0xc4, 0x40, KnownEvent::FarBranches),
    (0xc4, 0x02, KnownEvent::Calls),
    (0xc4, 0x08, KnownEvent::Returns),
    (0xd0, 0x81, KnownEvent::Loads),
    (0xd0, 0x82, KnownEvent::Stores),
];

/// SDM vol. 3B, "Pre-defined Architectural Performance Events", from Ice Lake on.
const INTEL_SLOTS: &[Code] = &[(0xa4, 0x01, KnownEvent::TopdownSlots)];

/// Event list of Nehalem: `BR_INST_RETIRED.CONDITIONAL`, `.NEAR_CALL` and `.ALL_BRANCHES`,
/// `INST_RETIRED.ANY_P`, `MEM_INST_RETIRED.LOADS` and `.STORES`.
const NEHALEM: &[Code] = &[
    (0xc4, 0x01, KnownEvent::ConditionalBranches),
    (0xc4, 0x02, KnownEvent::Calls),
    (0xc4, 0x04, KnownEvent::Branches),
    (0xc0, 0x01, KnownEvent::Instructions),
    (0x0b, 0x01, KnownEvent::Loads),
    (0x0b, 0x02, KnownEvent::Stores),
];

/// Event lists of Sandy Bridge to Skylake: `BR_INST_RETIRED.CONDITIONAL`.
const SKYLAKE: &[Code] = &[(0xc4, 0x01, KnownEvent::ConditionalBranches)];

/// Event list of Ice Lake: `BR_INST_RETIRED.COND` (unit mask 01 has the taken ones alone
/// there), `TOPDOWN.SLOTS_P`.
const ICE_LAKE: &[Code] = &[
    (0xc4, 0x11, KnownEvent::ConditionalBranches),
    (0xa4, 0x01, KnownEvent::TopdownSlots),
];

/// K8 BKDG, event 0CBh, which tells packed SSE from scalar.
const K7: &[Code] = &[
    (0xcb, 0x0f, KnownEvent::FloatingPoint),
    (0xcb, 0x01, KnownEvent::X87),
    (0xcb, 0x02, KnownEvent::Mmx),
    (0xcb, 0x0c, KnownEvent::Sse),
];

/// Family 10h BKDG and Family 17h PPR, event 0CBh.
const FAM10H: &[Code] = &[
    (0xcb, 0x07, KnownEvent::FloatingPoint),
    (0xcb, 0x01, KnownEvent::X87),
    (0xcb, 0x02, KnownEvent::Mmx),
    (0xcb, 0x04, KnownEvent::Sse),
];

/// Family 17h PPR, PMCx029.
const ZEN: &[Code] = &[
    (0x29, 0x01, KnownEvent::Loads),
    (0x29, 0x02, KnownEvent::Stores),
];

/// Family 19h model 10h PPR, PMCx120.
const ZEN4: &[Code] = &[(0x120, 0x01, KnownEvent::RefCycles)];

/// Family 17h PPR, PMCx0D1: without a unit mask. Family 10h and 15h have another event
/// there, dispatch stalls.
const ZEN_CONDITIONAL: (u16, KnownEvent) = (0xd1, KnownEvent::ConditionalBranches);

/// The codes with a unit mask of one vocabulary.
fn masked(family: EventFamily) -> impl Iterator<Item = &'static Code> {
    let tables: [&[Code]; 3] = match family {
        EventFamily::Intel => [INTEL_ARCHITECTURAL, INTEL_MODERN, INTEL_SLOTS],
        EventFamily::IntelNehalem => [INTEL_ARCHITECTURAL, NEHALEM, &[]],
        EventFamily::IntelSkylake => [INTEL_ARCHITECTURAL, INTEL_MODERN, SKYLAKE],
        EventFamily::IntelIceLake => [INTEL_ARCHITECTURAL, INTEL_MODERN, ICE_LAKE],
        EventFamily::AmdK7 => [K7, &[], &[]],
        EventFamily::AmdFam10h => [FAM10H, &[], &[]],
        EventFamily::AmdZen => [FAM10H, ZEN, &[]],
        EventFamily::AmdZen4 => [FAM10H, ZEN, ZEN4],
    };
    tables.into_iter().flatten()
}

/// The codes of one vocabulary with which any unit mask will do.
fn unmasked(family: EventFamily) -> impl Iterator<Item = &'static (u16, KnownEvent)> {
    let common: &[_] = match family.vendor() {
        Vendor::Intel => &[],
        Vendor::Amd => AMD_COMMON,
    };
    let zen = matches!(family, EventFamily::AmdZen | EventFamily::AmdZen4);
    common.iter().chain(zen.then_some(&ZEN_CONDITIONAL))
}

impl KnownEvent {
    /// Every one.
    pub const ALL: [KnownEvent; 20] = [
        KnownEvent::CoreCycles,
        KnownEvent::RefCycles,
        KnownEvent::Instructions,
        KnownEvent::Branches,
        KnownEvent::TakenBranches,
        KnownEvent::ConditionalBranches,
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
    let exact = masked(family)
        .find(|(code, mask, _)| (*code, *mask) == (select, umask))
        .map(|(.., event)| *event);
    let any = || unmasked(family).find(|(code, _)| *code == select);
    exact.or_else(|| any().map(|(_, event)| *event))
}

impl fmt::Display for KnownEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KnownEvent::CoreCycles => "core cycles",
            KnownEvent::RefCycles => "reference cycles",
            KnownEvent::Instructions => "instructions",
            KnownEvent::Branches => "branches",
            KnownEvent::TakenBranches => "taken branches",
            KnownEvent::ConditionalBranches => "conditional branches",
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
    let exact = masked(family)
        .find(|(.., known)| *known == event)
        .map(|(select, umask, _)| (*select, *umask));
    let any = || unmasked(family).find(|(_, known)| *known == event);
    exact.or_else(|| any().map(|(select, _)| (*select, 0)))
}
