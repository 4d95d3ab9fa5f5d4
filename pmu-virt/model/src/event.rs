//! Events: the codes that guests write, and the ones whose meaning is known.

mod known;

pub use known::KnownEvent;

use std::fmt;

use crate::ids::Vendor;

/// The vocabulary in which an event code is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventFamily {
    /// Intel: 8-bit event select; the events that processors from Sandy Bridge on agree on.
    Intel,
    /// Intel's Nehalem and Westmere.
    IntelNehalem,
    /// Intel's cores from Sandy Bridge to Skylake, and what was sold after it with the same core.
    IntelSkylake,
    /// Intel's Ice Lake and the cores after it that count alike.
    IntelIceLake,
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
    /// Every vocabulary, Intel's first.
    pub const ALL: [EventFamily; 8] = [
        EventFamily::Intel,
        EventFamily::IntelNehalem,
        EventFamily::IntelSkylake,
        EventFamily::IntelIceLake,
        EventFamily::AmdK7,
        EventFamily::AmdFam10h,
        EventFamily::AmdZen,
        EventFamily::AmdZen4,
    ];

    /// The word for it in the property `events` of a PMU model.
    pub fn name(self) -> &'static str {
        match self {
            EventFamily::Intel => "intel",
            EventFamily::IntelNehalem => "nehalem",
            EventFamily::IntelSkylake => "skylake",
            EventFamily::IntelIceLake => "ice-lake",
            EventFamily::AmdK7 => "k7",
            EventFamily::AmdFam10h => "fam10h",
            EventFamily::AmdZen => "zen",
            EventFamily::AmdZen4 => "zen4",
        }
    }

    /// The vendor who defined the codes.
    pub fn vendor(self) -> Vendor {
        match self {
            EventFamily::Intel
            | EventFamily::IntelNehalem
            | EventFamily::IntelSkylake
            | EventFamily::IntelIceLake => Vendor::Intel,
            EventFamily::AmdK7
            | EventFamily::AmdFam10h
            | EventFamily::AmdZen
            | EventFamily::AmdZen4 => Vendor::Amd,
        }
    }

    /// The vocabulary of a processor by its family and model as CPUID gives them, extensions
    /// added (SDM vol. 4, table "CPUID Signature Values of DisplayFamily_DisplayModel"); for a
    /// processor of Intel's that is not listed, what all of them agree on. `None` for AMD,
    /// whose codes differ less, and whose PMU model says which they are.
    pub fn of_processor(vendor: Vendor, family: u32, model: u32) -> Option<Self> {
        if vendor != Vendor::Intel {
            return None;
        }
        Some(match (family, model) {
            (6, 0x1a | 0x1e | 0x1f | 0x2e | 0x25 | 0x2c | 0x2f) => EventFamily::IntelNehalem,
            (
                6,
                0x2a | 0x2d | 0x3a | 0x3e | 0x3c | 0x3f | 0x45 | 0x46 | 0x3d | 0x47 | 0x4f | 0x56
                | 0x4e | 0x5e | 0x55 | 0x8e | 0x9e | 0xa5 | 0xa6,
            ) => EventFamily::IntelSkylake,
            (6, 0x7d | 0x7e | 0x9d | 0x6a | 0x6c | 0xa7 | 0x8c | 0x8d | 0x8f | 0xcf) => {
                EventFamily::IntelIceLake
            }
            _ => EventFamily::Intel,
        })
    }

    /// Whether event selects of both have the same bits, so that a model of the one can
    /// read its codes as the other.
    pub fn has_selects_of(self, other: EventFamily) -> bool {
        let zen = |family| matches!(family, EventFamily::AmdZen | EventFamily::AmdZen4);
        let intel = |family: EventFamily| family.vendor() == Vendor::Intel;
        self == other || intel(self) && intel(other) || zen(self) && zen(other)
    }

    /// Whether a guest that reads its codes as `self` has the events of `processor`: they
    /// are the same, or `self` is no processor's in particular.
    pub fn covers(self, processor: EventFamily) -> bool {
        self == processor || self == EventFamily::Intel && processor.vendor() == Vendor::Intel
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
    /// Something that instructions do and that no event select means: tools of
    /// the host ask for it.
    Meaning(KnownEvent),
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

impl EventCode {
    /// The code that selects `event` in the vocabulary of `family`; `None`
    /// where it has no such event.
    pub fn of(family: EventFamily, event: KnownEvent) -> Option<Self> {
        let (select, umask) = known::code_of(family, event)?;
        Some(EventCode::Selected {
            family,
            select,
            umask,
        })
    }

    /// The code with which a processor of `host`'s vocabulary counts this event: itself,
    /// unless it is in the words of another processor of Intel's. `None` where the processor
    /// has no such event, or nobody knows what it is.
    pub fn on_processor(self, host: EventFamily) -> Option<Self> {
        let EventCode::Selected { family, .. } = self else {
            return Some(self);
        };
        let both_intel = family.vendor() == Vendor::Intel && host.vendor() == Vendor::Intel;
        if !both_intel || family == EventFamily::Intel || family == host {
            return Some(self);
        }
        EventCode::of(host, self.known()?)
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
            } => known::of_code(family, select, umask),
            EventCode::Meaning(event) => Some(event),
            EventCode::Software(_) => None,
        }
    }

    /// Vocabulary in which deliveries and branches are to be counted; `None`
    /// for an event without a code.
    pub fn family(&self) -> Option<EventFamily> {
        match *self {
            EventCode::Fixed(_) => Some(EventFamily::Intel),
            EventCode::Selected { family, .. } => Some(family),
            EventCode::Software(_) | EventCode::Meaning(_) => None,
        }
    }

    /// The vendor who defined the code, if it has one.
    pub fn vendor(&self) -> Option<Vendor> {
        self.family().map(EventFamily::vendor)
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
            EventCode::Meaning(event) => event.fmt(f),
        }
    }
}
