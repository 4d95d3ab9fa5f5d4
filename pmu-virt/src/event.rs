//! Events: the codes that guests write, and the ones whose meaning is known.

use crate::ids::Vendor;
use std::fmt;

/// The vocabulary in which an event code is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventFamily {
    /// Intel: 8-bit event select.
    Intel,
    /// AMD K7 and K8: 8-bit event select.
    AmdK7,
    /// AMD Family 10h: 12-bit event select.
    AmdFam10h,
    /// AMD with the core extension; event numbers of Family 17h.
    AmdZen,
    /// AMD with PerfMonV2; event numbers of Family 19h model 10h and later.
    AmdZen4,
}

impl EventFamily {
    /// The vendor who defined the codes.
    pub fn vendor(self) -> Vendor {
        match self {
            EventFamily::Intel => Vendor::Intel,
            _ => Vendor::Amd,
        }
    }

    /// Whether retired-instruction counts include each delivered exception
    /// and interrupt (K8 and Family 10h BKDG, event 0C0h).
    pub fn deliveries_are_instructions(self) -> bool {
        matches!(self, EventFamily::AmdK7 | EventFamily::AmdFam10h)
    }
}

/// What a fixed-function counter counts (SDM vol. 3B, "Fixed-function
/// Performance Counters").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FixedFunction {
    /// Counter 0: instructions retired.
    Instructions,
    /// Counter 1: core cycles when not halted.
    CoreCycles,
    /// Counter 2: reference cycles when not halted.
    RefCycles,
}

impl FixedFunction {
    /// The function of fixed counter `index`.
    pub fn of(index: u8) -> Option<Self> {
        match index {
            0 => Some(FixedFunction::Instructions),
            1 => Some(FixedFunction::CoreCycles),
            2 => Some(FixedFunction::RefCycles),
            _ => None,
        }
    }

    /// The index of the counter with this function.
    pub fn index(self) -> u8 {
        match self {
            FixedFunction::Instructions => 0,
            FixedFunction::CoreCycles => 1,
            FixedFunction::RefCycles => 2,
        }
    }
}

/// The event that a counter is asked to count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventCode {
    /// Selected by software.
    Selected {
        /// Vocabulary of the code.
        family: EventFamily,
        /// Event select: 8 bits, on AMD from Family 10h on 12 bits.
        select: u16,
        /// Unit mask.
        umask: u8,
    },
    /// Built into the counter (Intel).
    Fixed(FixedFunction),
    /// Something that the host's kernel counts in software. No event select
    /// means it: tools of the host ask for it.
    Software(SoftwareEvent),
}

/// What a host's kernel counts about a thread (`perf_event_open(2)`,
/// `PERF_TYPE_SOFTWARE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SoftwareEvent {
    /// Nanoseconds on a CPU.
    TaskClock,
    /// Page faults, minor and major.
    PageFaults,
    /// Switches away from the thread.
    ContextSwitches,
    /// Moves to another CPU.
    CpuMigrations,
}

impl fmt::Display for SoftwareEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SoftwareEvent::TaskClock => "task-clock",
            SoftwareEvent::PageFaults => "page-faults",
            SoftwareEvent::ContextSwitches => "context-switches",
            SoftwareEvent::CpuMigrations => "cpu-migrations",
        })
    }
}

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

/// Codes shared by every AMD family (K8 BKDG, Family 10h BKDG, Family 17h and
/// 19h PPR, "Performance Monitor Counters"). The unit mask is unused there.
const AMD_COMMON: &[(u16, KnownEvent)] = &[
    (0x76, KnownEvent::CoreCycles),
    (0xc0, KnownEvent::Instructions),
    (0xc2, KnownEvent::Branches),
    (0xc3, KnownEvent::MispredictedBranches),
    (0xc4, KnownEvent::TakenBranches),
    (0xc6, KnownEvent::FarBranches),
];

/// Codes with a unit mask. Intel: SDM vol. 3B, "Pre-defined Architectural
/// Performance Events", and the event lists of Sandy Bridge to Skylake for
/// the taken, far, load and store events. AMD: Family 17h PPR PMCx029 and
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
    row(EventFamily::Intel, 0xd0, 0x81, KnownEvent::Loads),
    row(EventFamily::Intel, 0xd0, 0x82, KnownEvent::Stores),
    row(EventFamily::AmdZen, 0x29, 0x01, KnownEvent::Loads),
    row(EventFamily::AmdZen, 0x29, 0x02, KnownEvent::Stores),
    row(EventFamily::AmdZen4, 0x29, 0x01, KnownEvent::Loads),
    row(EventFamily::AmdZen4, 0x29, 0x02, KnownEvent::Stores),
    row(EventFamily::AmdZen4, 0x120, 0x01, KnownEvent::RefCycles),
];

/// The seven architectural events in the order of CPUID leaf 0xA EBX bits 0
/// to 6: select and unit mask.
pub(crate) const ARCHITECTURAL: [(u16, u8); 7] = [
    (0x3c, 0x00),
    (0xc0, 0x00),
    (0x3c, 0x01),
    (0x2e, 0x4f),
    (0x2e, 0x41),
    (0xc4, 0x00),
    (0xc5, 0x00),
];

impl KnownEvent {
    /// Every one.
    pub const ALL: [KnownEvent; 12] = [
        KnownEvent::CoreCycles,
        KnownEvent::RefCycles,
        KnownEvent::Instructions,
        KnownEvent::Branches,
        KnownEvent::TakenBranches,
        KnownEvent::FarBranches,
        KnownEvent::Loads,
        KnownEvent::Stores,
        KnownEvent::MispredictedBranches,
        KnownEvent::LlcReferences,
        KnownEvent::LlcMisses,
        KnownEvent::TopdownSlots,
    ];
}

impl EventCode {
    /// The code that selects `event` in the vocabulary of `family`; `None`
    /// where it has no such event.
    pub fn of(family: EventFamily, event: KnownEvent) -> Option<Self> {
        let row = EVENTS
            .iter()
            .find(|row| row.family == family && row.event == event)
            .map(|row| (row.select, row.umask));
        let common = || {
            let all = AMD_COMMON.iter().find(|(_, known)| *known == event);
            let amd = all.filter(|_| family.vendor() == Vendor::Amd);
            amd.map(|(select, _)| (*select, 0))
        };
        let (select, umask) = row.or_else(common)?;
        Some(EventCode::Selected {
            family,
            select,
            umask,
        })
    }

    /// What the code means, if that is known.
    pub fn known(&self) -> Option<KnownEvent> {
        match *self {
            EventCode::Fixed(FixedFunction::Instructions) => Some(KnownEvent::Instructions),
            EventCode::Fixed(FixedFunction::CoreCycles) => Some(KnownEvent::CoreCycles),
            EventCode::Fixed(FixedFunction::RefCycles) => Some(KnownEvent::RefCycles),
            EventCode::Selected {
                family,
                select,
                umask,
            } => known(family, select, umask),
            EventCode::Software(_) => None,
        }
    }

    /// Vocabulary in which deliveries and branches are to be counted; `None`
    /// for an event of no processor.
    pub fn family(&self) -> Option<EventFamily> {
        match *self {
            EventCode::Fixed(_) => Some(EventFamily::Intel),
            EventCode::Selected { family, .. } => Some(family),
            EventCode::Software(_) => None,
        }
    }

    /// The vendor who defined the code, if a processor has the event.
    pub fn vendor(&self) -> Option<Vendor> {
        self.family().map(EventFamily::vendor)
    }
}

fn known(family: EventFamily, select: u16, umask: u8) -> Option<KnownEvent> {
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
            KnownEvent::MispredictedBranches => "mispredicted branches",
            KnownEvent::LlcReferences => "last-level cache references",
            KnownEvent::LlcMisses => "last-level cache misses",
            KnownEvent::TopdownSlots => "top-down slots",
        })
    }
}

impl fmt::Display for EventCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(event) = self.known() {
            return event.fmt(f);
        }
        match *self {
            EventCode::Selected { select, umask, .. } => {
                write!(f, "event {select:#x} umask {umask:#x}")
            }
            EventCode::Fixed(function) => write!(f, "{function:?}"),
            EventCode::Software(event) => event.fmt(f),
        }
    }
}
