//! Names of events in a table of rates.

use pmu_model::{EventCode, KnownEvent, SoftwareEvent};

use super::error::RateProblem;

/// Which events a table entry is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventKey {
    /// Every code with this meaning.
    Known(KnownEvent),
    /// This very code, in the vocabulary of any family.
    Raw { select: u16, umask: u8 },
    /// An event of the host's kernel.
    Software(SoftwareEvent),
}

const NAMES: [(&str, EventKey); 28] = [
    ("cycles", EventKey::Known(KnownEvent::CoreCycles)),
    ("cpu-cycles", EventKey::Known(KnownEvent::CoreCycles)),
    ("ref-cycles", EventKey::Known(KnownEvent::RefCycles)),
    ("instructions", EventKey::Known(KnownEvent::Instructions)),
    ("branches", EventKey::Known(KnownEvent::Branches)),
    ("branch-instructions", EventKey::Known(KnownEvent::Branches)),
    ("taken-branches", EventKey::Known(KnownEvent::TakenBranches)),
    (
        "conditional-branches",
        EventKey::Known(KnownEvent::ConditionalBranches),
    ),
    ("far-branches", EventKey::Known(KnownEvent::FarBranches)),
    ("loads", EventKey::Known(KnownEvent::Loads)),
    ("stores", EventKey::Known(KnownEvent::Stores)),
    ("calls", EventKey::Known(KnownEvent::Calls)),
    ("returns", EventKey::Known(KnownEvent::Returns)),
    (
        "fp-instructions",
        EventKey::Known(KnownEvent::FloatingPoint),
    ),
    ("x87-instructions", EventKey::Known(KnownEvent::X87)),
    ("mmx-instructions", EventKey::Known(KnownEvent::Mmx)),
    ("sse-instructions", EventKey::Known(KnownEvent::Sse)),
    ("string-instructions", EventKey::Known(KnownEvent::Strings)),
    (
        "branch-misses",
        EventKey::Known(KnownEvent::MispredictedBranches),
    ),
    (
        "cache-references",
        EventKey::Known(KnownEvent::LlcReferences),
    ),
    ("cache-misses", EventKey::Known(KnownEvent::LlcMisses)),
    ("llc-references", EventKey::Known(KnownEvent::LlcReferences)),
    ("llc-misses", EventKey::Known(KnownEvent::LlcMisses)),
    ("topdown-slots", EventKey::Known(KnownEvent::TopdownSlots)),
    ("task-clock", EventKey::Software(SoftwareEvent::TaskClock)),
    ("page-faults", EventKey::Software(SoftwareEvent::PageFaults)),
    (
        "context-switches",
        EventKey::Software(SoftwareEvent::ContextSwitches),
    ),
    (
        "cpu-migrations",
        EventKey::Software(SoftwareEvent::CpuMigrations),
    ),
];

/// Bits of a raw code that say how to count, not what: USR, OS, PC, INT, EN.
const HOW: u64 = 0b101_1011 << 16;
/// Event select in bits 7:0 and 35:32, unit mask in bits 15:8.
const WHAT: u64 = 0xf_0000_ffff;

impl EventKey {
    /// The event of that name, or of a raw code: `r` or `0x` and hexadecimal
    /// digits laid out as in an event select.
    pub(super) fn parse(name: &str) -> Result<Self, RateProblem> {
        if let Some((_, key)) = NAMES.iter().find(|(known, _)| *known == name) {
            return Ok(*key);
        }
        let digits = name.strip_prefix("0x").or_else(|| name.strip_prefix('r'));
        let raw = digits.filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        match raw.and_then(|digits| u64::from_str_radix(digits, 16).ok()) {
            Some(raw) if raw & !(WHAT | HOW) != 0 => Err(RateProblem::Raw {
                name: name.to_owned(),
            }),
            Some(raw) => {
                let [low, umask, _, _, high, ..] = raw.to_le_bytes();
                Ok(EventKey::Raw {
                    select: u16::from_le_bytes([low, high]),
                    umask,
                })
            }
            None => Err(RateProblem::Event {
                name: name.to_owned(),
                nearest: nearest(name, NAMES.map(|(known, _)| known)),
            }),
        }
    }

    /// Whether `event` is one of this entry's.
    pub(super) fn matches(&self, event: &EventCode) -> bool {
        match (*self, *event) {
            (
                EventKey::Raw { select, umask },
                EventCode::Selected {
                    select: s,
                    umask: u,
                    ..
                },
            ) => (select, umask) == (s, u),
            (EventKey::Software(known), EventCode::Software(event)) => known == event,
            (EventKey::Known(known), event) => event.known() == Some(known),
            _ => false,
        }
    }
}

/// The word of `known` that looks most like `word`.
pub(super) fn nearest<const N: usize>(word: &str, known: [&'static str; N]) -> &'static str {
    known
        .into_iter()
        .max_by(|a, b| strsim::jaro_winkler(a, word).total_cmp(&strsim::jaro_winkler(b, word)))
        .unwrap_or("nothing")
}
