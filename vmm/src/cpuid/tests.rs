//! Every step on made-up tables, and the whole list on two of them.

use kvm_bindings::kvm_cpuid_entry2;
use pmu_virt::{CpuidRegs, PmuCpuid, Vendor};

use super::leaves::{Leaves, Reg, Regs};
use super::*;

const APIC: ApicFacts = ApicFacts {
    x2apic: true,
    tsc_deadline: true,
};

fn regs(eax: u32, ebx: u32, ecx: u32, edx: u32) -> Regs {
    Regs { eax, ebx, ecx, edx }
}

fn table(rows: &[(u32, u32, Regs)]) -> Leaves {
    let mut leaves = Leaves::new(&[]);
    for &(function, index, r) in rows {
        leaves.set(function, index, r);
    }
    leaves
}

const ALL: Regs = Regs {
    eax: !0,
    ebx: !0,
    ecx: !0,
    edx: !0,
};

/// An AMD host on which every feature bit there is happens to be set.
fn amd_host() -> Vec<kvm_cpuid_entry2> {
    table(&[
        (0, 0, regs(0x23, 0x6874_7541, 0x444d_4163, 0x6974_6e65)),
        (1, 0, regs(0x00a1_0f11, 0x0002_0800, !0, !0)),
        (6, 0, ALL),
        (7, 0, regs(1, !0, !0, !0)),
        (7, 1, ALL),
        (0xa, 0, regs(0x0730_0404, 0, 0, 0x603)),
        (0xb, 0, regs(0, 0, 0, 1)),
        (0xd, 0, regs(0x2e7, 0x980, 0x988, 0)),
        (0xd, 1, regs(0xf, 0x980, 0x9900, 0)),
        (0xd, 2, regs(0x100, 0x240, 0, 0)),
        (0xd, 5, regs(0x40, 0x340, 0, 0)),
        (0xd, 6, regs(0x200, 0x380, 0, 0)),
        (0xd, 7, regs(0x400, 0x580, 0, 0)),
        (0xd, 9, regs(0x8, 0x980, 0, 0)),
        (0x14, 0, ALL),
        (0x1c, 0, ALL),
        (0x23, 0, ALL),
        (
            0x4000_0000,
            0,
            regs(0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d),
        ),
        (0x4000_0001, 0, regs(0x0100_7efb, 0, 0, 0)),
        (
            0x8000_0000,
            0,
            regs(0x8000_0026, 0x6874_7541, 0x444d_4163, 0x6974_6e65),
        ),
        (0x8000_0001, 0, regs(0x00a1_0f11, 0x4000_0000, !0, !0)),
        (0x8000_0005, 0, ALL),
        (0x8000_0006, 0, regs(!0, !0, 0x0400_6140, !0)),
        (0x8000_0007, 0, ALL),
        (0x8000_0008, 0, regs(0x0030_3030, !0, 0x7001, !0)),
        (0x8000_000a, 0, ALL),
        (0x8000_001b, 0, ALL),
        (0x8000_001c, 0, ALL),
        (0x8000_001d, 0, regs(0x121, 0x01c0_003f, 0x3f, 0)),
        (0x8000_001d, 1, regs(0x122, 0x01c0_003f, 0x3f, 0)),
        (0x8000_001d, 2, regs(0x143, 0x01c0_003f, 0x7ff, 2)),
        (0x8000_001d, 3, regs(0x4163, 0x03c0_003f, 0x7fff, 1)),
        (0x8000_001d, 4, Regs::default()),
        (0x8000_001e, 0, regs(5, 5, 5, 0)),
        (0x8000_001f, 0, ALL),
        (0x8000_0022, 0, ALL),
        (0x8000_0026, 0, ALL),
    ])
    .into_entries()
}

/// An Intel host, the same way.
fn intel_host() -> Vec<kvm_cpuid_entry2> {
    table(&[
        (0, 0, regs(0x23, 0x756e_6547, 0x6c65_746e, 0x4965_6e69)),
        (1, 0, regs(0x0008_06f8, 0x0002_0800, !0, 0x1fff_fbff)),
        (2, 0, regs(0x00fe_ff01, 0, 0, 0)),
        (4, 0, regs(0xfc00_4121, 0x02c0_003f, 0x3f, 0)),
        (4, 1, regs(0xfc00_4122, 0x01c0_003f, 0x3f, 0)),
        (4, 2, regs(0xfc00_4143, 0x03c0_003f, 0x7ff, 0)),
        (4, 3, regs(0xfc1f_c163, 0x0380_003f, 0x1_bfff, 4)),
        (7, 0, regs(1, !0, !0, !0)),
        (7, 1, ALL),
        (0xa, 0, regs(0x0830_0805, 0, 0xf, 0x8603)),
        (0xb, 0, regs(1, 2, 0x100, 1)),
        (0xd, 0, regs(0x602e7, 0x2b00, 0x2b00, 0)),
        (0xd, 1, regs(0xf, 0x2b00, 0x9900, 0)),
        (0xd, 2, regs(0x100, 0x240, 0, 0)),
        (0xd, 17, regs(0x40, 0xac0, 0, 0)),
        (0xd, 18, regs(0x2000, 0xb00, 0, 0)),
        (0x12, 0, ALL),
        (0x14, 0, ALL),
        (0x1a, 0, ALL),
        (0x1f, 0, regs(1, 2, 0x100, 1)),
        (
            0x4000_0000,
            0,
            regs(0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d),
        ),
        (0x4000_0001, 0, regs(0x0100_7efb, 0, 0, 0)),
        (0x8000_0000, 0, regs(0x8000_0008, 0, 0, 0)),
        (0x8000_0001, 0, regs(0, 0, 0x121, 0x2c10_0800)),
        (0x8000_0006, 0, regs(0, 0, 0x0800_7040, 0)),
        (0x8000_0008, 0, regs(0x3934, 0x0100_d000, 0, 0)),
    ])
    .into_entries()
}

fn core_pmu() -> PmuCpuid {
    PmuCpuid {
        leaf_0xa: CpuidRegs::default(),
        pdcm: false,
        perf_capabilities: None,
        perfctr_core: true,
        leaf_80000022: CpuidRegs::default(),
        perfmon_v2: false,
    }
}

fn intel_pmu() -> PmuCpuid {
    PmuCpuid {
        leaf_0xa: CpuidRegs {
            eax: 0x0730_0402,
            ebx: 0x7e,
            ecx: 0,
            edx: 0x603,
        },
        pdcm: true,
        perf_capabilities: Some(0x2000),
        perfctr_core: false,
        ..core_pmu()
    }
}

fn plan(vendor: Vendor, pmu: Option<&PmuCpuid>) -> CpuidPlan<'_> {
    CpuidPlan {
        cpus: 4,
        vendor,
        pmu,
        apic: APIC,
        async_page_faults: true,
        slow_cpl0: false,
        hidden: &[],
    }
}

fn made(host: &[kvm_cpuid_entry2], vcpu: u8, plan: &CpuidPlan<'_>) -> Leaves {
    Leaves::new(&guest_cpuid(host, vcpu, plan).unwrap())
}

#[test]
fn bad_plans_are_refused() {
    fn check(cpus: u8, vcpu: u8, expected: CpuidError) {
        let plan = CpuidPlan {
            cpus,
            ..plan(Vendor::Amd, None)
        };
        assert_eq!(guest_cpuid(&amd_host(), vcpu, &plan), Err(expected));
    }
    check(0, 0, CpuidError::Cpus(0));
    check(65, 0, CpuidError::Cpus(65));
    check(2, 2, CpuidError::NoSuchVcpu { vcpu: 2, cpus: 2 });
    let error = guest_cpuid(&[], 0, &plan(Vendor::Amd, None));
    assert_eq!(error, Err(CpuidError::MissingLeaf(0)));
}

#[test]
fn host_vendors() {
    fn check(text: &[u8; 12], expected: Result<Vendor, CpuidError>) {
        let word = |i: usize| u32::from_le_bytes(text[i..i + 4].try_into().unwrap());
        let leaves = table(&[(0, 0, regs(1, word(0), word(8), word(4)))]);
        assert_eq!(host_vendor(&leaves.into_entries()), expected);
    }
    check(b"AuthenticAMD", Ok(Vendor::Amd));
    check(b"HygonGenuine", Ok(Vendor::Amd));
    check(b"GenuineIntel", Ok(Vendor::Intel));
    check(
        b"CentaurHauls",
        Err(CpuidError::UnknownHostVendor("CentaurHauls".into())),
    );
    assert_eq!(host_vendor(&[]), Err(CpuidError::MissingLeaf(0)));
}

#[test]
fn no_pmu_leaves_no_trace_on_either_vendor() {
    for host in [amd_host(), intel_host()] {
        assert!(!pmu::traces(&Leaves::new(&host)).is_empty());
        for vendor in [Vendor::Amd, Vendor::Intel] {
            let leaves = made(&host, 0, &plan(vendor, None));
            assert_eq!(pmu::traces(&leaves), Vec::<String>::new(), "{vendor}");
        }
    }
}

#[test]
fn a_pmu_shows_what_it_has_and_nothing_else() {
    fn check(host: &[kvm_cpuid_entry2], vendor: Vendor, pmu: &PmuCpuid, traces: &[&str]) {
        let leaves = made(host, 0, &plan(vendor, Some(pmu)));
        assert_eq!(pmu::traces(&leaves), traces);
    }
    let v2 = PmuCpuid {
        leaf_80000022: CpuidRegs {
            eax: 1,
            ebx: 6,
            ..CpuidRegs::default()
        },
        perfmon_v2: true,
        ..core_pmu()
    };
    for host in [amd_host(), intel_host()] {
        check(&host, Vendor::Amd, &core_pmu(), &["PerfCtrExtCore"]);
        check(
            &host,
            Vendor::Amd,
            &v2,
            &["PerfCtrExtCore", "leaf 0x80000022"],
        );
        check(&host, Vendor::Intel, &intel_pmu(), &["PDCM", "leaf 0xa"]);
        let leaves = made(&host, 0, &plan(Vendor::Amd, Some(&v2)));
        assert_eq!(leaves.get(0x8000_0022, 0), regs(1, 6, 0, 0));
        assert!(leaves.get(0x8000_0000, 0).eax >= 0x8000_0022);
        let leaves = made(&host, 0, &plan(Vendor::Intel, Some(&intel_pmu())));
        assert_eq!(leaves.get(0xa, 0), regs(0x0730_0402, 0x7e, 0, 0x603));
    }
}

#[test]
fn every_list_is_a_fixed_point() {
    for host in [amd_host(), intel_host()] {
        for vendor in [Vendor::Amd, Vendor::Intel] {
            for pmu in [None, Some(&core_pmu()), Some(&intel_pmu())] {
                let plan = plan(vendor, pmu);
                let once = guest_cpuid(&host, 3, &plan).unwrap();
                let mut twice = guest_cpuid(&once, 3, &plan).unwrap();
                let key = |e: &kvm_cpuid_entry2| (e.function, e.index);
                let mut once = once;
                once.sort_by_key(key);
                twice.sort_by_key(key);
                assert_eq!(once, twice);
            }
        }
    }
}

#[test]
fn topology_of_both_vendors() {
    fn check(cpus: u8, vcpu: u8, ids: u32, bits: u32) {
        let (n, id) = (u32::from(cpus), u32::from(vcpu));
        for (host, vendor) in [
            (amd_host(), Vendor::Amd),
            (amd_host(), Vendor::Intel),
            (intel_host(), Vendor::Amd),
            (intel_host(), Vendor::Intel),
        ] {
            let plan = CpuidPlan {
                cpus,
                ..plan(vendor, None)
            };
            let leaves = made(&host, vcpu, &plan);
            assert_eq!(leaves.get(1, 0).ebx, id << 24 | ids << 16 | 0x0800);
            assert_eq!(leaves.test(1, 0, Reg::Edx, 28), cpus > 1);
            assert_eq!(leaves.get(0xb, 0), regs(0, 1, 0x100, id));
            assert_eq!(leaves.get(0xb, 1), regs(bits, n, 0x201, id));
            assert_eq!(leaves.get(0xb, 2), regs(0, 0, 2, id));
            assert_eq!(leaves.get(0x8000_0026, 0), Regs::default());
            match vendor {
                Vendor::Intel => {
                    assert_eq!(leaves.get(4, 0).eax >> 14, (ids - 1) << 12);
                    assert_eq!(leaves.get(4, 3).eax >> 14, (ids - 1) << 12 | (ids - 1));
                }
                Vendor::Amd => {
                    assert_eq!(
                        leaves.get(0x8000_0008, 0).ecx & 0xf0ff,
                        bits << 12 | (n - 1)
                    );
                    assert_eq!(leaves.get(0x8000_001d, 0).eax >> 14, 0);
                    assert_eq!(leaves.get(0x8000_001d, 3).eax >> 14, n - 1);
                    assert_eq!(leaves.get(0x8000_001e, 0), regs(id, id, 0, 0));
                    assert_eq!(leaves.test(0x8000_0001, 0, Reg::Ecx, 1), cpus > 1);
                }
            }
        }
    }
    check(1, 0, 1, 0);
    check(2, 1, 2, 1);
    check(3, 2, 4, 2);
    check(64, 63, 64, 6);
    let leaves = made(&intel_host(), 1, &plan(Vendor::Intel, None));
    assert_eq!(leaves.get(0x1f, 1), regs(2, 4, 0x201, 1));
}

#[test]
fn amd_dressed_as_intel() {
    let leaves = made(&amd_host(), 0, &plan(Vendor::Intel, None));
    assert_eq!(
        host_vendor(&leaves.clone().into_entries()),
        Ok(Vendor::Intel)
    );
    assert_eq!(leaves.get(1, 0).eax, INTEL_SIGNATURE);
    assert_eq!(leaves.get(2, 0), regs(0xff01, 0, 0, 0));
    assert_eq!(leaves.get(4, 2), regs(0x0c00_0143, 0x01c0_003f, 0x7ff, 2));
    assert_eq!(leaves.get(0x8000_0000, 0), regs(0x8000_0008, 0, 0, 0));
    assert_eq!(leaves.get(0x8000_0001, 0), regs(0, 0, 0x121, 0x2c10_0800));
    assert_eq!(leaves.get(0x8000_0007, 0), regs(0, 0, 0, 0x100));
    assert_eq!(leaves.get(0x8000_0008, 0), regs(0x3030, 0x200, 0, 0));
    let beyond = |e: &kvm_cpuid_entry2| e.function > 0x8000_0008;
    assert!(!leaves.into_entries().iter().any(beyond));
}

#[test]
fn intel_dressed_as_amd() {
    let leaves = made(&intel_host(), 0, &plan(Vendor::Amd, None));
    assert_eq!(host_vendor(&leaves.clone().into_entries()), Ok(Vendor::Amd));
    let signature = leaves.get(1, 0).eax;
    // Base family 0FH plus extended family 0AH is family 19H.
    assert_eq!((signature >> 8 & 0xf, signature >> 20 & 0xff), (0xf, 0xa));
    assert_eq!(leaves.get(0x8000_0001, 0).eax, signature);
    assert!(leaves.test(0x8000_0001, 0, Reg::Ecx, 22), "TOPOEXT");
    assert_eq!(leaves.get(0x8000_0000, 0).eax, 0x8000_001e);
    assert_eq!(leaves.get(0x8000_001d, 2).eax, 0x143);
    for leaf in [2, 4, 0x12, 0x1a] {
        assert_eq!(leaves.get(leaf, 0), Regs::default(), "{leaf:#x}");
    }
}

#[test]
fn the_hosts_own_vendor_keeps_family_and_model() {
    let leaves = made(&amd_host(), 0, &plan(Vendor::Amd, None));
    assert_eq!(leaves.get(1, 0).eax, 0x00a1_0f11);
    let leaves = made(&intel_host(), 0, &plan(Vendor::Intel, None));
    assert_eq!(leaves.get(1, 0).eax, 0x0008_06f8);
}

/// One step on a table of set bits: which bits of which register it clears.
fn check_cleared(step: fn(&mut Leaves), leaf: u32, index: u32, reg: Reg, expected: &[u8]) {
    let mut leaves = table(&[(leaf, index, ALL)]);
    step(&mut leaves);
    let mut left = leaves.get(leaf, index);
    let cleared: Vec<u8> = (0..32).filter(|b| *left.of(reg) & 1 << b == 0).collect();
    assert_eq!(cleared, expected, "{leaf:#x}.{index} {reg:?}");
}

#[test]
fn platform_steps() {
    use platform as p;
    check_cleared(p::hide_nested_virtualisation, 1, 0, Reg::Ecx, &[5, 6]);
    check_cleared(
        p::hide_nested_virtualisation,
        0x8000_0001,
        0,
        Reg::Ecx,
        &[2, 12],
    );
    check_cleared(p::hide_fred_and_cet, 7, 1, Reg::Eax, &[17, 18, 20]);
    check_cleared(p::hide_fred_and_cet, 7, 0, Reg::Ecx, &[7]);
    check_cleared(p::hide_fred_and_cet, 7, 0, Reg::Edx, &[20]);
    check_cleared(p::hide_fred_and_cet, 7, 1, Reg::Edx, &[18]);
    check_cleared(p::hide_fred_and_cet, 0xd, 1, Reg::Ecx, &[11, 12]);
    check_cleared(
        p::hide_breakpoint_extensions,
        0x8000_0001,
        0,
        Reg::Ecx,
        &[26],
    );
    check_cleared(
        p::hide_async_page_faults,
        0x4000_0001,
        0,
        Reg::Eax,
        &[4, 10, 14],
    );
    check_cleared(pmu::hide_everything, 1, 0, Reg::Edx, &[21]);
    check_cleared(pmu::hide_everything, 1, 0, Reg::Ecx, &[2, 4, 15]);
    check_cleared(
        pmu::hide_everything,
        0x8000_0001,
        0,
        Reg::Ecx,
        &[10, 15, 23, 24, 27, 28],
    );

    let mut leaves = table(&[(1, 0, Regs::default())]);
    platform::show_hypervisor(&mut leaves);
    assert_eq!(leaves.get(1, 0).ecx, 1 << 31);
}

#[test]
fn apic_features_follow_the_irqchip() {
    fn check(before: u32, x2apic: bool, tsc_deadline: bool, expected: u32) {
        let mut leaves = table(&[(1, 0, regs(0, 0, before, 0))]);
        let facts = ApicFacts {
            x2apic,
            tsc_deadline,
        };
        platform::show_apic_features(&mut leaves, facts);
        assert_eq!(leaves.get(1, 0).ecx, expected);
    }
    check(0, true, true, 1 << 21 | 1 << 24);
    check(0, true, false, 1 << 21);
    check(!0, false, false, !(1 << 21 | 1 << 24));
}

#[test]
fn nested_leaves_go_away() {
    let leaves = made(&amd_host(), 0, &plan(Vendor::Amd, None));
    assert!(!leaves.has(0x8000_000a, 0) && !leaves.has(0x8000_001f, 0));
}

#[test]
fn kvms_own_leaves_stay() {
    let leaves = made(&amd_host(), 0, &plan(Vendor::Amd, None));
    assert_eq!(leaves.get(0x4000_0000, 0).ebx, 0x4b4d_564b);
    assert_eq!(leaves.get(0x4000_0001, 0).eax, 0x0100_7efb);
}

#[test]
fn hiding_a_feature_hides_what_needs_it() {
    fn check(hidden: &str, gone: &[(u32, u32, Reg, u8)], stays: &[(u32, u32, Reg, u8)]) {
        let hidden = [hidden.parse().unwrap()];
        let plan = CpuidPlan {
            hidden: &hidden,
            ..plan(Vendor::Amd, None)
        };
        let leaves = made(&amd_host(), 0, &plan);
        for &(leaf, index, reg, bit) in gone {
            assert!(
                !leaves.test(leaf, index, reg, bit),
                "{hidden:?} {leaf:#x} {reg:?} {bit}"
            );
        }
        for &(leaf, index, reg, bit) in stays {
            assert!(
                leaves.test(leaf, index, reg, bit),
                "{hidden:?} {leaf:#x} {reg:?} {bit}"
            );
        }
    }
    let (ecx, ebx, edx) = (Reg::Ecx, Reg::Ebx, Reg::Edx);
    check("cx16", &[(1, 0, ecx, 13)], &[(1, 0, ecx, 26)]);
    check(
        "xsave",
        &[
            (1, 0, ecx, 26),
            (1, 0, ecx, 28),
            (1, 0, ecx, 12),
            (7, 0, ebx, 5),
            (7, 0, ebx, 16),
            (7, 0, ecx, 11),
            (7, 1, Reg::Eax, 5),
        ],
        &[(7, 0, ebx, 0), (1, 0, ecx, 20)],
    );
    check(
        "avx512f",
        &[(7, 0, ebx, 31), (7, 0, edx, 23)],
        &[(7, 0, ebx, 5)],
    );
    // What an earlier step shows can be hidden all the same.
    check("x2apic", &[(1, 0, ecx, 21)], &[(1, 0, ecx, 24)]);
    check("tsc_deadline_timer", &[(1, 0, ecx, 24)], &[(1, 0, ecx, 21)]);
    // AMD's mirror of leaf 1 goes too.
    check("pge", &[(1, 0, edx, 13), (0x8000_0001, 0, edx, 13)], &[]);
}

#[test]
fn slow_cpl0_hides_what_the_emulator_lacks() {
    let plan = CpuidPlan {
        slow_cpl0: true,
        ..plan(Vendor::Amd, None)
    };
    let leaves = made(&amd_host(), 0, &plan);
    assert_eq!(leaves.get(1, 0).ecx & (1 << 13 | 1 << 26 | 1 << 28), 0);
    assert!(!leaves.has(0xd, 0));
}

#[test]
fn state_components_follow_their_features() {
    fn check(hidden: &[&str], components: u32, size: u32) {
        let hidden: Vec<Feature> = hidden.iter().map(|n| n.parse().unwrap()).collect();
        let plan = CpuidPlan {
            hidden: &hidden,
            ..plan(Vendor::Amd, None)
        };
        let leaves = made(&amd_host(), 0, &plan);
        let leaf = leaves.get(0xd, 0);
        assert_eq!((leaf.eax, leaf.ecx), (components, size), "{hidden:?}");
        for index in 2..32 {
            if components & 1 << index == 0 {
                assert_eq!(leaves.get(0xd, index), Regs::default(), "{index}");
            }
        }
    }
    check(&[], 0x2e7, 0x988);
    check(&["pku"], 0xe7, 0x980);
    check(&["avx512f"], 0x207, 0x988);
    check(&["avx512f", "pku"], 0x7, 0x340);
    check(&["avx", "pku"], 0x3, 576);
    check(&["xsave"], 0, 0);
}
