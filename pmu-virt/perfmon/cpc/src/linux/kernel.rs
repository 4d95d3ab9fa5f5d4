//! From event selects to perf's events, and which PMU model a processor has.

use pmu_model::{EventFamily, PmuModel, Vendor};

/// Bits of an event select that a raw event of perf has too.
const RAW: u64 = 0xf_ff84_ffff;

/// What a perf event is to count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `PERF_TYPE_RAW`.
    Raw(u64),
    /// `PERF_TYPE_HARDWARE`.
    Generic(u64),
}

impl Kind {
    /// `PERF_COUNT_HW_CPU_CYCLES`.
    pub(super) const CYCLES: Kind = Kind::Generic(0);
    /// `PERF_COUNT_HW_INSTRUCTIONS`.
    const INSTRUCTIONS: Kind = Kind::Generic(1);
    /// `PERF_COUNT_HW_REF_CPU_CYCLES`.
    const REF_CYCLES: Kind = Kind::Generic(9);
}

/// The event of an event select. Intel's fixed counters are event select 0 with unit mask
/// N + 1, as in libpfm.
pub(super) fn kind(select: u64, intel: bool) -> Kind {
    match (intel, select & 0xffff) {
        (true, 0x100) => Kind::INSTRUCTIONS,
        (true, 0x200) => Kind::CYCLES,
        (true, 0x300) => Kind::REF_CYCLES,
        _ => Kind::Raw(select & RAW),
    }
}

/// What CPUID says of a processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Processor {
    /// Vendor's twelve letters.
    pub(super) vendor: [u8; 12],
    pub(super) family: u32,
    pub(super) model: u32,
    /// Version of architectural performance monitoring (Intel).
    pub(super) version: u8,
    /// It has the core extension of six counters (AMD).
    pub(super) core_extension: bool,
    /// It has performance monitoring version 2 (AMD).
    pub(super) version2: bool,
    /// Programmable counters; 0: it does not say.
    pub(super) programmable: u8,
    /// Fixed counters.
    pub(super) fixed: u8,
}

impl Processor {
    /// Family and model as they are told (SDM vol. 2A, CPUID; APM vol. 3, E.3).
    pub(super) fn signature(eax: u32) -> (u32, u32) {
        let base = eax >> 8 & 0xf;
        let family = if base == 0xf {
            base + (eax >> 20 & 0xff)
        } else {
            base
        };
        let extended = if matches!(base, 6 | 0xf) {
            eax >> 12 & 0xf0
        } else {
            0
        };
        (family, eax >> 4 & 0xf | extended)
    }
}

/// The PMU of a processor, if it is one of those that there are models of.
pub(super) fn model(processor: &Processor) -> Option<PmuModel> {
    let (name, vendor) = match &processor.vendor {
        b"GenuineIntel" => match processor.version {
            0 => return None,
            version => (format!("intel-v{}", version.min(5)), Vendor::Intel),
        },
        b"AuthenticAMD" | b"HygonGenuine" => {
            let name = match processor {
                it if it.version2 => "amd-perfmonv2",
                it if it.core_extension => "amd-core",
                it if it.family >= 0x10 => "amd-fam10h",
                _ => "amd-k7",
            };
            (name.to_owned(), Vendor::Amd)
        }
        _ => return None,
    };
    let counters = match (processor.programmable, vendor) {
        (0, _) => String::new(),
        (programmable, Vendor::Intel) => {
            format!(",counters={programmable},fixed={}", processor.fixed)
        }
        (programmable, Vendor::Amd) => format!(",counters={programmable}"),
    };
    // Where it has more than the model can have, as many as that has.
    let model = PmuModel::parse(&(name.clone() + &counters)).or_else(|_| PmuModel::parse(&name));
    let model = model.ok()?;
    let events = EventFamily::of_processor(vendor, processor.family, processor.model);
    let with = events.and_then(|events| model.clone().with_events(events));
    Some(with.unwrap_or(model))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selects_become_raw_events() {
        assert_eq!(kind(0x41_00c0, true), Kind::Raw(0xc0));
        assert_eq!(kind(0x10c5_0729, false), Kind::Raw(0x1084_0729));
        assert_eq!(kind(0x3_0041_0076, false), Kind::Raw(0x3_0000_0076));
        assert_eq!(kind(0x41_0300, true), Kind::REF_CYCLES);
        assert_eq!(kind(0x41_0300, false), Kind::Raw(0x300));
    }

    #[test]
    fn processors_have_models() {
        let intel = Processor {
            vendor: *b"GenuineIntel",
            family: 6,
            model: 0x5e,
            version: 4,
            ..Processor::default()
        };
        let skylake = model(&intel).unwrap();
        assert_eq!(
            (skylake.name(), skylake.events().name()),
            ("intel-v4", "skylake")
        );
        let narrow = Processor {
            programmable: 2,
            fixed: 1,
            ..intel
        };
        let narrow = model(&narrow).unwrap();
        assert_eq!((narrow.programmable(), narrow.fixed_map()), (2, 1));
        let wide = Processor {
            programmable: 200,
            ..intel
        };
        assert_eq!(model(&wide).unwrap().name(), "intel-v4");
        let without = Processor {
            version: 0,
            ..intel
        };
        assert!(model(&without).is_none());
        let amd = Processor {
            vendor: *b"AuthenticAMD",
            family: 0x17,
            core_extension: true,
            ..Processor::default()
        };
        assert_eq!(model(&amd).unwrap().name(), "amd-core");
        assert!(model(&Processor::default()).is_none());
        assert_eq!(Processor::signature(0x000a_0653), (6, 0xa5));
        assert_eq!(Processor::signature(0x0087_0f10), (0x17, 0x71));
        assert_eq!(Processor::signature(0x0000_0622), (6, 2));
    }
}
