//! The features that `--hide-feature` can hide, named as Linux prints them in
//! `/proc/cpuinfo`.
//!
//! Features of a PMU are not here: `--pmu` decides about them. Neither are those
//! without which no 64-bit guest starts (`fpu`, `msr`, `pae`, `cx8`, `apic`,
//! `sse2`, `lm` and the like).

use std::fmt;
use std::str::FromStr;

use pmu_virt::Vendor;
use thiserror::Error;

use super::vendor::{self, AMD_MIRRORED_EDX};
use pmu_virt::cpuid::{Leaves, Reg};

/// Features that KVM's instruction emulator lacks. They are hidden where it
/// runs guest CPL 0.
pub const SLOW_CPL0_HIDDEN: [&str; 2] = ["cx16", "xsave"];

/// A feature that can be hidden.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Feature(&'static FeatureRow);

/// There is no such feature, or it cannot be hidden.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("no CPU feature '{name}' can be hidden; these can: {}", known())]
pub struct UnknownFeature {
    /// The name that was given.
    pub name: String,
}

impl Feature {
    /// Every feature that can be hidden, in the order of the CPUID leaves.
    pub fn all() -> impl Iterator<Item = Feature> {
        TABLE.iter().map(Feature)
    }

    /// Its name in `/proc/cpuinfo`.
    pub fn name(self) -> &'static str {
        self.0.name
    }
}

impl FromStr for Feature {
    type Err = UnknownFeature;

    fn from_str(name: &str) -> Result<Self, UnknownFeature> {
        row(name).map(Feature).ok_or_else(|| UnknownFeature {
            name: name.to_owned(),
        })
    }
}

impl fmt::Debug for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Feature({})", self.name())
    }
}

/// Clears a feature and everything that cannot be used without it.
pub(super) fn hide(leaves: &mut Leaves, feature: Feature) {
    let row = feature.0;
    leaves.clear(row.leaf, row.index, row.reg, row.bit);
    // AMD repeats some bits of leaf 1 EDX in 80000001H; a mirror must not remain.
    let mirrored = (row.leaf, row.reg) == (1, Reg::Edx) && AMD_MIRRORED_EDX & 1 << row.bit != 0;
    if mirrored && vendor::is(leaves, Vendor::Amd) {
        leaves.clear(0x8000_0001, 0, Reg::Edx, row.bit);
    }
    for name in row.dependants {
        hide_by_name(leaves, name);
    }
}

/// Clears a feature that is named in this module's own tables, and everything
/// that cannot be used without it.
pub(super) fn hide_by_name(leaves: &mut Leaves, name: &str) {
    if let Some(row) = row(name) {
        hide(leaves, Feature(row));
    }
}

fn row(name: &str) -> Option<&'static FeatureRow> {
    TABLE.iter().find(|row| row.name == name)
}

fn known() -> String {
    let names: Vec<&str> = TABLE.iter().map(|row| row.name).collect();
    names.join(", ")
}

#[derive(Debug, PartialEq, Eq)]
struct FeatureRow {
    name: &'static str,
    leaf: u32,
    index: u32,
    reg: Reg,
    bit: u8,
    /// Features that need this one.
    dependants: &'static [&'static str],
}

/// The features of one register: bit and name, in a row of their own each.
macro_rules! table {
    ($($leaf:literal . $index:literal $reg:ident { $($bit:literal $name:literal $([$($dependant:literal)*])?,)* })*) => {
        static TABLE: &[FeatureRow] = &[$($(FeatureRow {
            name: $name,
            leaf: $leaf,
            index: $index,
            reg: Reg::$reg,
            bit: $bit,
            dependants: &[$($($dependant),*)?],
        },)*)*];
    };
}

// The dependants follow Linux's own table of CPU feature dependencies: a guest
// that finds one of them without its base would clear it as well.
table! {
    1 . 0 Ecx {
        0 "pni", 1 "pclmulqdq", 3 "monitor", 9 "ssse3", 12 "fma", 13 "cx16",
        17 "pcid" ["invpcid"], 19 "sse4_1", 20 "sse4_2", 21 "x2apic", 22 "movbe",
        23 "popcnt", 24 "tsc_deadline_timer", 25 "aes" ["vaes"],
        26 "xsave" ["avx" "xsaveopt" "xsavec" "xgetbv1" "xsaves" "xsaveerptr" "pku" "mpx" "amx_tile"],
        28 "avx" ["avx2" "fma" "f16c" "xop" "fma4" "avx512f" "vaes" "vpclmulqdq"],
        29 "f16c", 30 "rdrand",
    }
    1 . 0 Edx {
        1 "vme", 2 "de", 3 "pse", 7 "mce" ["mca"], 11 "sep", 12 "mtrr", 13 "pge", 14 "mca",
        16 "pat", 17 "pse36", 19 "clflush" ["clflushopt" "clwb"], 23 "mmx",
    }
    6 . 0 Eax { 2 "arat", }
    7 . 0 Ebx {
        0 "fsgsbase", 1 "tsc_adjust", 3 "bmi1", 4 "hle",
        5 "avx2" ["avx512f" "avx_vnni"], 7 "smep", 8 "bmi2", 9 "erms", 10 "invpcid",
        11 "rtm", 14 "mpx",
        16 "avx512f" ["avx512dq" "avx512ifma" "avx512pf" "avx512er" "avx512cd" "avx512bw"
            "avx512vl" "avx512_4vnniw" "avx512_4fmaps" "avx512_vpopcntdq"
            "avx512_vp2intersect"],
        17 "avx512dq", 18 "rdseed", 19 "adx", 20 "smap", 21 "avx512ifma", 23 "clflushopt",
        24 "clwb", 26 "avx512pf", 27 "avx512er", 28 "avx512cd", 29 "sha_ni",
        30 "avx512bw" ["avx512_bf16" "avx512_fp16" "avx512_bitalg" "avx512vbmi" "avx512_vbmi2"],
        31 "avx512vl" ["avx512_vnni" "avx512_bitalg" "avx512vbmi" "avx512_vbmi2" "avx512_bf16"
            "avx512_fp16"],
    }
    7 . 0 Ecx {
        1 "avx512vbmi", 2 "umip", 3 "pku", 5 "waitpkg", 6 "avx512_vbmi2", 8 "gfni", 9 "vaes",
        10 "vpclmulqdq", 11 "avx512_vnni", 12 "avx512_bitalg", 14 "avx512_vpopcntdq",
        16 "la57", 22 "rdpid", 24 "bus_lock_detect", 25 "cldemote", 27 "movdiri",
        28 "movdir64b",
    }
    7 . 0 Edx {
        2 "avx512_4vnniw", 3 "avx512_4fmaps", 4 "fsrm", 8 "avx512_vp2intersect",
        10 "md_clear", 14 "serialize", 16 "tsxldtrk", 22 "amx_bf16", 23 "avx512_fp16",
        24 "amx_tile" ["amx_bf16" "amx_int8"], 25 "amx_int8", 28 "flush_l1d",
        29 "arch_capabilities",
    }
    7 . 1 Eax { 4 "avx_vnni", 5 "avx512_bf16", }
    0xd . 1 Eax { 0 "xsaveopt", 1 "xsavec", 2 "xgetbv1", 3 "xsaves", }
    0x8000_0001 . 0 Ecx {
        0 "lahf_lm", 4 "cr8_legacy", 5 "abm", 6 "sse4a", 7 "misalignsse", 8 "3dnowprefetch",
        9 "osvw", 11 "xop", 16 "fma4", 17 "tce", 21 "tbm", 22 "topoext",
    }
    0x8000_0001 . 0 Edx {
        20 "nx", 22 "mmxext", 25 "fxsr_opt", 26 "pdpe1gb", 27 "rdtscp",
    }
    0x8000_0008 . 0 Ebx { 0 "clzero", 2 "xsaveerptr", 4 "rdpru", 9 "wbnoinvd", }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_and_bits_are_unique_and_dependants_exist() {
        let mut names = HashSet::new();
        let mut bits = HashSet::new();
        for r in TABLE {
            assert!(names.insert(r.name), "{} twice", r.name);
            let reg = format!("{:?}", r.reg);
            assert!(bits.insert((r.leaf, r.index, reg, r.bit)), "{}", r.name);
            for dependant in r.dependants {
                assert!(row(dependant).is_some(), "{}: {dependant}", r.name);
            }
        }
    }

    #[test]
    fn no_dependency_goes_in_a_circle() {
        fn depth(r: &FeatureRow) -> usize {
            let below = r.dependants.iter().filter_map(|d| row(d));
            1 + below.map(depth).max().unwrap_or(0)
        }
        assert!(TABLE.iter().map(depth).all(|d| d < 8));
    }

    #[test]
    fn names_parse() {
        fn check(name: &str, known: bool) {
            let parsed: Result<Feature, _> = name.parse();
            assert_eq!(parsed.is_ok(), known, "{name}");
        }
        check("cx16", true);
        check("tsc_deadline_timer", true);
        check("CX16", false);
        check("", false);
        check("perfctr_core", false);
        let error = "sse9".parse::<Feature>().unwrap_err().to_string();
        assert!(error.starts_with("no CPU feature 'sse9'"), "{error}");
        assert!(error.contains("fsgsbase"), "{error}");
    }
}
