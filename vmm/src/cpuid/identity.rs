//! Processors that a guest can be told it runs on: family, model and stepping, a name, and
//! the PMU that such a processor has.
//!
//! An identity says who the processor is, not what it can do: features stay those that this
//! KVM supports, so none is announced that is not there. One that the real processor never
//! had stays as well: a guest's drivers look for features by their own bits.

use pmu_virt::{EventFamily, ModelError, PmuModel, Vendor};

use pmu_virt::cpuid::{CpuidRegs, Leaves};

/// A processor that a guest can be told it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity(&'static Row);

#[derive(Debug, PartialEq, Eq)]
struct Row {
    name: &'static str,
    vendor: Vendor,
    /// Leaf 1 EAX, on AMD also 80000001H EAX.
    signature: u32,
    /// What the brand string says, at most 47 characters.
    brand: &'static str,
    /// The PMU of such a processor, without its events.
    pmu: &'static str,
    events: EventFamily,
}

/// Processors before full-width writes still have `IA32_PERF_CAPABILITIES`.
const NEHALEM_PMU: &str = "intel-v3,full-width=off,perf-capabilities=on";

/// Signatures: Intel, SDM vol. 4, table "CPUID Signature Values of DisplayFamily_DisplayModel"
/// and the specification updates; AMD, the revision guides and PPRs of each family. K8 is
/// revision E: from revision F on Linux treats every K8 and Family 10h as one whose timer
/// stops in C1E (erratum 400), unless the processor says otherwise.
const TABLE: &[Row] = &[
    intel(
        "nehalem",
        0x0001_06a5,
        "Intel Nehalem",
        NEHALEM_PMU,
        EventFamily::IntelNehalem,
    ),
    intel(
        "skylake",
        0x0005_06e3,
        "Intel Skylake",
        "intel-v4",
        EventFamily::IntelSkylake,
    ),
    intel(
        "skylake-server",
        0x0005_0654,
        "Intel Skylake Server",
        "intel-v4",
        EventFamily::IntelSkylake,
    ),
    intel(
        "ice-lake",
        0x0007_06e5,
        "Intel Ice Lake",
        "intel-v5",
        EventFamily::IntelIceLake,
    ),
    intel(
        "ice-lake-server",
        0x0006_06a6,
        "Intel Ice Lake Server",
        "intel-v5",
        EventFamily::IntelIceLake,
    ),
    amd("k8", 0x0002_0f12, "AMD K8", "amd-k7", EventFamily::AmdK7),
    amd(
        "fam10h",
        0x0010_0f23,
        "AMD Family 10h",
        "amd-fam10h",
        EventFamily::AmdFam10h,
    ),
    amd(
        "zen2",
        0x0083_0f10,
        "AMD Zen 2",
        "amd-core",
        EventFamily::AmdZen,
    ),
    amd(
        "zen3",
        0x00a0_0f11,
        "AMD Zen 3",
        "amd-core",
        EventFamily::AmdZen,
    ),
    amd(
        "zen4",
        0x00a1_0f11,
        "AMD Zen 4",
        "amd-perfmonv2",
        EventFamily::AmdZen4,
    ),
];

const fn intel(
    name: &'static str,
    signature: u32,
    brand: &'static str,
    pmu: &'static str,
    events: EventFamily,
) -> Row {
    Row {
        name,
        vendor: Vendor::Intel,
        signature,
        brand,
        pmu,
        events,
    }
}

const fn amd(
    name: &'static str,
    signature: u32,
    brand: &'static str,
    pmu: &'static str,
    events: EventFamily,
) -> Row {
    Row {
        vendor: Vendor::Amd,
        ..intel(name, signature, brand, pmu, events)
    }
}

/// The first leaf of the brand string, which has three.
const BRAND: u32 = 0x8000_0002;

impl Identity {
    /// Every one, Intel's first.
    pub fn all() -> impl Iterator<Item = Identity> {
        TABLE.iter().map(Identity)
    }

    /// The one called `name`.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::all().find(|identity| identity.name() == name)
    }

    /// Its name, as in `--cpu-model`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Whose processor it is.
    #[must_use]
    pub fn vendor(self) -> Vendor {
        self.0.vendor
    }

    /// Family, model and stepping as CPUID packs them.
    #[must_use]
    pub fn signature(self) -> u32 {
        self.0.signature
    }

    /// Whose event codes its PMU takes.
    #[must_use]
    pub fn events(self) -> EventFamily {
        self.0.events
    }

    /// The PMU that such a processor has.
    ///
    /// # Errors
    /// The table has a model that there is not.
    pub fn pmu(self) -> Result<PmuModel, ModelError> {
        PmuModel::parse(&format!("{},events={}", self.0.pmu, self.0.events.name()))
    }
}

/// Shows the processor as `identity`, which is one of the vendor that the table shows.
pub(super) fn show(leaves: &mut Leaves, identity: Identity) {
    let Row {
        signature, vendor, ..
    } = *identity.0;
    leaves.edit(1, 0, |r| r.eax = signature);
    if vendor == Vendor::Amd {
        leaves.edit(0x8000_0001, 0, |r| r.eax = signature);
    }
    let mut text = [0; 48];
    let name = identity.0.brand.as_bytes();
    for (to, from) in text.iter_mut().zip(name) {
        *to = *from;
    }
    let (parts, _) = text.as_chunks::<16>();
    for (leaf, part) in (BRAND..).zip(parts) {
        let [a, b, c, d] = words(part);
        let regs = CpuidRegs {
            eax: a,
            ebx: b,
            ecx: c,
            edx: d,
        };
        leaves.set(leaf, 0, regs);
    }
    leaves.edit(0x8000_0000, 0, |r| r.eax = r.eax.max(BRAND + 2));
}

fn words(part: &[u8; 16]) -> [u32; 4] {
    let (words, _) = part.as_chunks::<4>();
    let word = |n: usize| words.get(n).copied().map_or(0, u32::from_le_bytes);
    [word(0), word(1), word(2), word(3)]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Family and model as drivers take them apart (SDM vol. 2A, CPUID leaf 1; APM vol. 3,
    /// appendix E.3.2).
    fn family_and_model(signature: u32) -> (u32, u32) {
        let base = signature >> 8 & 0xf;
        let family = if base == 0xf {
            base + (signature >> 20 & 0xff)
        } else {
            base
        };
        (family, signature >> 12 & 0xf0 | signature >> 4 & 0xf)
    }

    #[test]
    fn signatures_are_those_of_the_named_processors() {
        let table = [
            ("nehalem", 6, 0x1a, "intel-v3"),
            ("skylake", 6, 0x5e, "intel-v4"),
            ("skylake-server", 6, 0x55, "intel-v4"),
            ("ice-lake", 6, 0x7e, "intel-v5"),
            ("ice-lake-server", 6, 0x6a, "intel-v5"),
            ("k8", 0xf, 0x21, "amd-k7"),
            ("fam10h", 0x10, 0x2, "amd-fam10h"),
            ("zen2", 0x17, 0x31, "amd-core"),
            ("zen3", 0x19, 0x01, "amd-core"),
            ("zen4", 0x19, 0x11, "amd-perfmonv2"),
        ];
        assert_eq!(Identity::all().count(), table.len());
        for (name, family, model, pmu) in table {
            let identity = Identity::parse(name).expect(name);
            let found = family_and_model(identity.signature());
            assert_eq!(found, (family, model), "{name}");
            let has = identity.pmu().expect(name);
            assert_eq!(
                (has.name(), has.vendor()),
                (pmu, identity.vendor()),
                "{name}"
            );
            assert_eq!(has.events(), identity.events(), "{name}");
            assert!(identity.0.brand.len() < 48, "{name}");
        }
        assert_eq!(Identity::parse("host"), None);
    }
}
