//! Names that mean the same on every processor that has the event.

use pmu_model::{
    CountRequest, CounterId, EventCode, EventFamily, FixedFunction, KnownEvent, PmuModel,
};

use super::families::all_models;

/// A generic name.
#[derive(Debug)]
pub(super) struct Generic {
    /// The name, and other words for it.
    pub(super) names: &'static [&'static str],
    /// What it means.
    pub(super) event: KnownEvent,
    /// What has to be known about it.
    pub(super) note: &'static str,
}

/// Every generic name, those of perf first.
pub(super) const GENERIC: [Generic; 20] = [
    Generic {
        names: &["cycles", "cpu-cycles"],
        event: KnownEvent::CoreCycles,
        note: "",
    },
    Generic {
        names: &["instructions"],
        event: KnownEvent::Instructions,
        note: "",
    },
    Generic {
        names: &["ref-cycles"],
        event: KnownEvent::RefCycles,
        note: "on AMD the cycles of P0, with PerfMonV2",
    },
    Generic {
        names: &["branches", "branch-instructions"],
        event: KnownEvent::Branches,
        note: "AMD counts exceptions and interrupts as branches too",
    },
    Generic {
        names: &["branch-misses"],
        event: KnownEvent::MispredictedBranches,
        note: "",
    },
    Generic {
        names: &["taken-branches"],
        event: KnownEvent::TakenBranches,
        note: "on Intel near ones only",
    },
    Generic {
        names: &["conditional-branches"],
        event: KnownEvent::ConditionalBranches,
        note: "Jcc, LOOP and JCXZ, taken or not; on Intel the processor has to be known",
    },
    Generic {
        names: &["far-branches"],
        event: KnownEvent::FarBranches,
        note: "far calls, jumps and returns, IRET, SYSCALL and SYSRET",
    },
    Generic {
        names: &["loads"],
        event: KnownEvent::Loads,
        note: "",
    },
    Generic {
        names: &["stores"],
        event: KnownEvent::Stores,
        note: "",
    },
    Generic {
        names: &["calls"],
        event: KnownEvent::Calls,
        note: "near ones; AMD has no event for them",
    },
    Generic {
        names: &["returns"],
        event: KnownEvent::Returns,
        note: "near ones",
    },
    Generic {
        names: &["fp-instructions"],
        event: KnownEvent::FloatingPoint,
        note: "AMD's MMX/FP event, which moves and integer vectors belong to",
    },
    Generic {
        names: &["x87-instructions"],
        event: KnownEvent::X87,
        note: "",
    },
    Generic {
        names: &["mmx-instructions"],
        event: KnownEvent::Mmx,
        note: "3DNow! among them",
    },
    Generic {
        names: &["sse-instructions"],
        event: KnownEvent::Sse,
        note: "scalar and packed, AVX among them",
    },
    Generic {
        names: &["string-instructions"],
        event: KnownEvent::Strings,
        note: "MOVS, STOS and their like, a repeated one once; no command asks for them yet",
    },
    Generic {
        names: &["cache-references"],
        event: KnownEvent::LlcReferences,
        note: "on AMD requests to the L2 cache, as perf has it",
    },
    Generic {
        names: &["cache-misses"],
        event: KnownEvent::LlcMisses,
        note: "on AMD misses of the L2 cache, as perf has it",
    },
    Generic {
        names: &["slots"],
        event: KnownEvent::TopdownSlots,
        note: "issue slots of the top-down method",
    },
];

/// The generic name `name`; case does not matter.
pub(super) fn find(name: &str) -> Option<&'static Generic> {
    GENERIC.iter().find(|generic| {
        let is = |one: &&str| one.eq_ignore_ascii_case(name);
        generic.names.iter().any(is)
    })
}

/// The generic names that `model` counts as `event`.
pub(super) fn names_of(event: EventCode, model: &PmuModel) -> impl Iterator<Item = &'static str> {
    let all = GENERIC.iter();
    let meant = all.filter(move |generic| {
        let request = generic.request(model);
        request.is_some_and(|request| request.event == event)
    });
    meant.flat_map(|generic| generic.names).copied()
}

/// Every generic name.
pub fn all_names() -> impl Iterator<Item = &'static str> {
    GENERIC.iter().flat_map(|generic| generic.names).copied()
}

impl Generic {
    /// The request with which `model` counts it at both rings; none if the
    /// model has no such event.
    pub(super) fn request(&self, model: &PmuModel) -> Option<CountRequest> {
        let fixed = (self.event == KnownEvent::RefCycles)
            .then_some(FixedFunction::RefCycles)
            .filter(|function| model.has(CounterId::Fixed(function.index())));
        let event = match fixed {
            // As perf does: the programmable event may tick at another rate.
            Some(function) => EventCode::Fixed(function),
            None => EventCode::of(model.events(), self.event)
                .or_else(|| amd_cache(model.events(), self.event))?,
        };
        Some(CountRequest::plain(event, true, true))
    }
}

impl Generic {
    /// The request at both rings for what no model has a code for.
    pub(super) fn without_code(&self) -> Option<CountRequest> {
        let nowhere = all_models()
            .iter()
            .all(|model| self.request(model).is_none());
        nowhere.then(|| CountRequest::plain(EventCode::Meaning(self.event), true, true))
    }
}

/// The codes that perf uses on AMD, whose cores have no last-level event
/// (`arch/x86/events/amd/core.c` of Linux, `amd_perfmon_event_map` and
/// `amd_f17h_perfmon_event_map`; BKDG PMCx07D and 07E, PPR PMCx060 and 064).
fn amd_cache(family: EventFamily, event: KnownEvent) -> Option<EventCode> {
    let (references, misses) = match family {
        EventFamily::AmdK7 | EventFamily::AmdFam10h => ((0x7d, 0x07), (0x7e, 0x07)),
        EventFamily::AmdZen | EventFamily::AmdZen4 => ((0x60, 0xff), (0x64, 0x09)),
        _ => return None,
    };
    let (select, umask) = match event {
        KnownEvent::LlcReferences => references,
        KnownEvent::LlcMisses => misses,
        _ => return None,
    };
    Some(EventCode::Selected {
        family,
        select,
        umask,
    })
}
