//! Names of perf's for events whose code depends on the processor: those of caches, and a few
//! others.
//!
//! How they are written: perf-list(1), "hardware cache events", with the other words that perf
//! takes for each part. Codes are those that Linux takes (`arch/x86/events/amd/core.c`,
//! `arch/x86/events/intel/core.c`: the tables of cache events and the event maps), as far as the
//! processors of a vocabulary agree on them and their event lists have the event.

use pmu_model::EventFamily;

/// An event of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PerfName {
    Cache {
        cache: Cache,
        operation: Operation,
        misses: bool,
    },
    BusCycles,
    StalledFrontend,
    StalledBackend,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cache {
    L1Data,
    L1Instructions,
    LastLevel,
    DataTlb,
    InstructionTlb,
    Branches,
    Node,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Load,
    Store,
    Prefetch,
}

/// Every word for a cache, perf's own name first.
const CACHES: [(Cache, &[&str]); 7] = [
    (Cache::L1Data, &["L1-dcache", "L1-data", "l1-d", "l1d"]),
    (
        Cache::L1Instructions,
        &["L1-icache", "L1-instruction", "l1-i", "l1i"],
    ),
    (Cache::LastLevel, &["LLC", "L2"]),
    (Cache::DataTlb, &["dTLB", "Data-TLB", "d-tlb"]),
    (Cache::InstructionTlb, &["iTLB", "Instruction-TLB", "i-tlb"]),
    (
        Cache::Branches,
        &["branch", "branches", "bpu", "btb", "bpc"],
    ),
    (Cache::Node, &["node"]),
];

const OPERATIONS: [(Operation, &[&str]); 3] = [
    (
        Operation::Prefetch,
        &[
            "prefetches",
            "prefetch",
            "speculative-read",
            "speculative-load",
        ],
    ),
    (Operation::Load, &["loads", "load", "read"]),
    (Operation::Store, &["stores", "store", "write"]),
];

/// Words for accesses and for misses.
const RESULTS: [(bool, &[&str]); 2] = [
    (false, &["refs", "reference", "ops", "access"]),
    (true, &["misses", "miss"]),
];

/// A part of a name.
#[derive(Clone, Copy)]
enum Part {
    Operation(Operation),
    Misses(bool),
}

impl PerfName {
    /// The event `text`; case does not matter. The error is the part of a cache event that is
    /// wrong, and why.
    pub(super) fn find(text: &str) -> Option<Result<Self, String>> {
        let lower = text.to_ascii_lowercase();
        match lower.as_str() {
            "bus-cycles" => return Some(Ok(Self::BusCycles)),
            "stalled-cycles-frontend" | "idle-cycles-frontend" => {
                return Some(Ok(Self::StalledFrontend));
            }
            "stalled-cycles-backend" | "idle-cycles-backend" => {
                return Some(Ok(Self::StalledBackend));
            }
            _ => {}
        }
        let words = CACHES.iter().flat_map(|(cache, words)| {
            let each = words.iter().map(|word| (*cache, word.to_ascii_lowercase()));
            each.collect::<Vec<_>>()
        });
        let (cache, word, rest) = words
            .filter_map(|(cache, word)| {
                let rest = lower.strip_prefix(&word)?;
                let ends = rest.is_empty() || rest.starts_with('-');
                ends.then(|| (cache, word.clone(), rest.to_owned()))
            })
            .max_by_key(|(_, word, _)| word.len())?;
        match parts(&rest) {
            Ok((operation, misses)) if cache.has(operation) => Some(Ok(Self::Cache {
                cache,
                operation,
                misses,
            })),
            Ok((operation, _)) => Some(Err(format!(
                "perf has no {} of {}",
                operation.name(),
                cache.name()
            ))),
            // What begins with `branch-` may be anything.
            Err(_) if matches!(cache, Cache::Branches | Cache::Node) || word == "l2" => None,
            Err(wrong) => {
                let wrong = text.get(text.len() - wrong.len()..).unwrap_or(&wrong);
                Some(Err(format!(
                    "'{wrong}' is nothing that perf counts of {}: there are loads, stores and \
                     prefetches, and of each its misses, as in {}-load-misses",
                    cache.name(),
                    cache.name()
                )))
            }
        }
    }

    /// As perf lists it.
    pub(super) fn name(self) -> String {
        match self {
            Self::BusCycles => "bus-cycles".to_owned(),
            Self::StalledFrontend => "stalled-cycles-frontend".to_owned(),
            Self::StalledBackend => "stalled-cycles-backend".to_owned(),
            Self::Cache {
                cache,
                operation,
                misses,
            } => match (misses, operation) {
                (false, _) => format!("{}-{}", cache.name(), operation.name()),
                (true, Operation::Prefetch) => format!("{}-prefetch-misses", cache.name()),
                (true, Operation::Load) => format!("{}-load-misses", cache.name()),
                (true, Operation::Store) => format!("{}-store-misses", cache.name()),
            },
        }
    }

    /// The event select for it.
    pub(super) fn code(self, family: EventFamily) -> Option<u64> {
        let family_is_old_amd = matches!(family, EventFamily::AmdK7 | EventFamily::AmdFam10h);
        match self {
            Self::Cache {
                cache,
                operation,
                misses,
            } => cache_code(family, cache, operation, misses),
            Self::BusCycles => (family.vendor() == pmu_model::Vendor::Intel).then_some(0x013c),
            // Uops issued and executed in less than one of a cycle.
            Self::StalledFrontend if family == EventFamily::IntelNehalem => Some(0x0180_010e),
            Self::StalledBackend if family == EventFamily::IntelNehalem => Some(0x0180_3fb1),
            Self::StalledFrontend if family_is_old_amd => Some(0xd0),
            Self::StalledBackend if family_is_old_amd => Some(0xd1),
            Self::StalledFrontend if family == EventFamily::AmdZen4 => Some(0xa9),
            Self::StalledFrontend | Self::StalledBackend => None,
        }
    }
}

impl Cache {
    fn name(self) -> &'static str {
        match self {
            Cache::L1Data => "L1-dcache",
            Cache::L1Instructions => "L1-icache",
            Cache::LastLevel => "LLC",
            Cache::DataTlb => "dTLB",
            Cache::InstructionTlb => "iTLB",
            Cache::Branches => "branch",
            Cache::Node => "node",
        }
    }

    /// Whether perf has the operation of it.
    fn has(self, operation: Operation) -> bool {
        match self {
            Cache::L1Data | Cache::LastLevel | Cache::DataTlb | Cache::Node => true,
            Cache::L1Instructions => operation != Operation::Store,
            Cache::InstructionTlb | Cache::Branches => operation == Operation::Load,
        }
    }
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Operation::Load => "loads",
            Operation::Store => "stores",
            Operation::Prefetch => "prefetches",
        }
    }
}

/// What `-load-misses` and its like say: an operation and a result, each at most once and in
/// any order. The error is what is left over.
fn parts(text: &str) -> Result<(Operation, bool), String> {
    let (mut operation, mut result) = (None, None);
    let mut rest = text;
    while let Some(part) = rest.strip_prefix('-') {
        let Some((found, behind)) = part_of(part) else {
            return Err(part.to_owned());
        };
        let before = match found {
            Part::Operation(one) => operation.replace(one).is_some(),
            Part::Misses(one) => result.replace(one).is_some(),
        };
        if before {
            return Err(part.to_owned());
        }
        rest = behind;
    }
    Ok((
        operation.unwrap_or(Operation::Load),
        result.unwrap_or(false),
    ))
}

/// The part with which `text` begins, and what is behind it.
fn part_of(text: &str) -> Option<(Part, &str)> {
    let behind = |words: &[&str]| {
        words.iter().find_map(|word| {
            let rest = text.strip_prefix(word)?;
            (rest.is_empty() || rest.starts_with('-')).then_some(rest)
        })
    };
    let operation = OPERATIONS
        .iter()
        .find_map(|(it, words)| Some((Part::Operation(*it), behind(words)?)));
    let result = || {
        let mut results = RESULTS.iter();
        results.find_map(|(it, words)| Some((Part::Misses(*it), behind(words)?)))
    };
    operation.or_else(result)
}

/// Codes of one vocabulary: cache, operation, accesses, misses; 0 where there is none.
type Row = (Cache, Operation, u64, u64);

const OLD_AMD: &[Row] = &[
    (Cache::L1Data, Operation::Load, 0x0040, 0x0141),
    (Cache::L1Data, Operation::Prefetch, 0x0267, 0x0167),
    (Cache::L1Instructions, Operation::Load, 0x0080, 0x0081),
    (Cache::L1Instructions, Operation::Prefetch, 0x014b, 0),
    (Cache::LastLevel, Operation::Load, 0x037d, 0x037e),
    (Cache::LastLevel, Operation::Store, 0x017f, 0),
    (Cache::DataTlb, Operation::Load, 0x0040, 0x0746),
    (Cache::InstructionTlb, Operation::Load, 0x0080, 0x0385),
    (Cache::Branches, Operation::Load, 0x00c2, 0x00c3),
    (Cache::Node, Operation::Load, 0xb8e9, 0x98e9),
];

const ZEN: &[Row] = &[
    (Cache::L1Data, Operation::Load, 0x0040, 0xc860),
    (Cache::L1Data, Operation::Prefetch, 0xff5a, 0),
    (Cache::L1Instructions, Operation::Load, 0x0080, 0x0081),
    (Cache::DataTlb, Operation::Load, 0xff45, 0xf045),
    (Cache::InstructionTlb, Operation::Load, 0x0084, 0xff85),
    (Cache::Branches, Operation::Load, 0x00c2, 0x00c3),
];

const NEHALEM: &[Row] = &[
    (Cache::L1Data, Operation::Load, 0x010b, 0x0151),
    (Cache::L1Data, Operation::Store, 0x020b, 0x0251),
    (Cache::L1Data, Operation::Prefetch, 0x014e, 0x024e),
    (Cache::L1Instructions, Operation::Load, 0x0380, 0x0280),
    (Cache::DataTlb, Operation::Load, 0, 0x0108),
    (Cache::DataTlb, Operation::Store, 0, 0x010c),
    (Cache::Branches, Operation::Load, 0x00c4, 0),
];

/// What the event lists from Sandy Bridge on agree on, and `L1D.REPLACEMENT`, which only
/// a known processor has for certain.
const MODERN: &[Row] = &[
    (Cache::L1Data, Operation::Load, 0x81d0, 0x0151),
    (Cache::L1Data, Operation::Store, 0x82d0, 0),
    (Cache::DataTlb, Operation::Load, 0x81d0, 0),
    (Cache::DataTlb, Operation::Store, 0x82d0, 0),
    (Cache::Branches, Operation::Load, 0x00c4, 0x00c5),
];

fn cache_code(
    family: EventFamily,
    cache: Cache,
    operation: Operation,
    misses: bool,
) -> Option<u64> {
    let rows = match family {
        EventFamily::AmdK7 | EventFamily::AmdFam10h => OLD_AMD,
        EventFamily::AmdZen | EventFamily::AmdZen4 => ZEN,
        EventFamily::IntelNehalem => NEHALEM,
        EventFamily::Intel if cache == Cache::L1Data && misses => return None,
        EventFamily::Intel | EventFamily::IntelSkylake | EventFamily::IntelIceLake => MODERN,
    };
    let own = |row: &&Row| row.0 == cache && row.1 == operation;
    let (.., accesses, missed) = rows.iter().find(own)?;
    let code = if misses { *missed } else { *accesses };
    (code != 0).then_some(code)
}
