//! The whole list, made for either vendor on either host.

use pmu_virt::cpuid::Leaf;

use super::*;

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
    let error = guest_cpuid(&Leaves::default(), 0, &plan(Vendor::Amd, None));
    assert_eq!(error, Err(CpuidError::MissingLeaf(0)));
}

#[test]
fn host_vendors() {
    fn check(text: &[u8; 12], expected: Result<Vendor, CpuidError>) {
        let word = |i: usize| u32::from_le_bytes(text[i..i + 4].try_into().unwrap());
        let leaves = table(&[(0, 0, regs(1, word(0), word(8), word(4)))]);
        assert_eq!(host_vendor(&leaves), expected);
    }
    check(b"AuthenticAMD", Ok(Vendor::Amd));
    check(b"HygonGenuine", Ok(Vendor::Amd));
    check(b"GenuineIntel", Ok(Vendor::Intel));
    check(
        b"CentaurHauls",
        Err(CpuidError::UnknownHostVendor("CentaurHauls".into())),
    );
    assert_eq!(
        host_vendor(&Leaves::default()),
        Err(CpuidError::MissingLeaf(0))
    );
}

#[test]
fn no_pmu_leaves_no_trace_on_either_vendor() {
    for host in [amd_host(), intel_host()] {
        assert!(!pmu::traces(&host).is_empty());
        for vendor in [Vendor::Amd, Vendor::Intel] {
            let leaves = made(&host, 0, &plan(vendor, None));
            assert_eq!(pmu::traces(&leaves), Vec::<String>::new(), "{vendor}");
        }
    }
}

#[test]
fn a_pmu_shows_what_it_has_and_nothing_else() {
    fn check(host: &Leaves, vendor: Vendor, pmu: &PmuCpuid, traces: &[&str]) {
        let leaves = made(host, 0, &plan(vendor, Some(pmu)));
        let ours = ["leaf 0x40000100", "leaf 0x40000101"];
        assert_eq!(pmu::traces(&leaves), [traces, &ours].concat());
        // Two blocks, each with its own limit.
        let limits = [0x4000_0000, 0x4000_0100].map(|leaf| leaves.get(leaf, 0).eax);
        assert_eq!(limits, [0x4000_0001, 0x4000_0101]);
        let signature = leaves.get(0x4000_0100, 0);
        let words = [signature.ebx, signature.ecx, signature.edx].map(u32::to_le_bytes);
        assert_eq!(words.concat(), accounting::SIGNATURE);
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
        let sampling = PmuCpuid {
            leaf_8000001b: CpuidRegs {
                eax: 0xef,
                ..CpuidRegs::default()
            },
            ..core_pmu()
        };
        let traces = ["IBS", "PerfCtrExtCore", "leaf 0x8000001b"];
        check(&host, Vendor::Amd, &sampling, &traces);
        let leaves = made(&host, 0, &plan(Vendor::Amd, Some(&sampling)));
        assert_eq!(leaves.get(0x8000_001b, 0), regs(0xef, 0, 0, 0));
        assert!(leaves.get(0x8000_0000, 0).eax >= 0x8000_001b);
        check(&host, Vendor::Intel, &intel_pmu(), &["PDCM", "leaf 0xa"]);
        let leaves = made(&host, 0, &plan(Vendor::Amd, Some(&v2)));
        assert_eq!(leaves.get(0x8000_0022, 0), regs(1, 6, 0, 0));
        assert!(leaves.get(0x8000_0000, 0).eax >= 0x8000_0022);
        let leaves = made(&host, 0, &plan(Vendor::Intel, Some(&intel_pmu())));
        assert_eq!(leaves.get(0xa, 0), regs(0x0730_0402, 0x7e, 0, 0x603));
    }
}

fn sorted(leaves: &Leaves) -> Vec<Leaf> {
    let mut sorted: Vec<Leaf> = leaves.iter().copied().collect();
    sorted.sort_by_key(|entry| (entry.leaf, entry.subleaf));
    sorted
}

#[test]
fn every_list_is_a_fixed_point() {
    for host in [amd_host(), intel_host()] {
        for vendor in [Vendor::Amd, Vendor::Intel] {
            for pmu in [None, Some(&core_pmu()), Some(&intel_pmu())] {
                let plan = plan(vendor, pmu);
                let once = guest_cpuid(&host, 3, &plan).unwrap();
                let twice = guest_cpuid(&once, 3, &plan).unwrap();
                assert_eq!(sorted(&once), sorted(&twice));
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
            assert_eq!(leaves.get(0x8000_0026, 0), CpuidRegs::default());
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
    assert_eq!(host_vendor(&leaves), Ok(Vendor::Intel));
    assert_eq!(leaves.get(1, 0).eax, INTEL_SIGNATURE);
    assert_eq!(leaves.get(2, 0), regs(0xff01, 0, 0, 0));
    assert_eq!(leaves.get(4, 2), regs(0x0c00_0143, 0x01c0_003f, 0x7ff, 2));
    assert_eq!(leaves.get(0x8000_0000, 0), regs(0x8000_0008, 0, 0, 0));
    assert_eq!(leaves.get(0x8000_0001, 0), regs(0, 0, 0x121, 0x2c10_0800));
    assert_eq!(leaves.get(0x8000_0007, 0), regs(0, 0, 0, 0x100));
    assert_eq!(leaves.get(0x8000_0008, 0), regs(0x3030, 0x200, 0, 0));
    assert!(!leaves.iter().any(|entry| entry.leaf > 0x8000_0008));
}

#[test]
fn intel_dressed_as_amd() {
    let leaves = made(&intel_host(), 0, &plan(Vendor::Amd, None));
    assert_eq!(host_vendor(&leaves), Ok(Vendor::Amd));
    let signature = leaves.get(1, 0).eax;
    // Base family 0FH plus extended family 0AH is family 19H.
    assert_eq!((signature >> 8 & 0xf, signature >> 20 & 0xff), (0xf, 0xa));
    assert_eq!(leaves.get(0x8000_0001, 0).eax, signature);
    assert!(leaves.test(0x8000_0001, 0, Reg::Ecx, 22), "TOPOEXT");
    assert_eq!(leaves.get(0x8000_0000, 0).eax, 0x8000_001e);
    assert_eq!(leaves.get(0x8000_001d, 2).eax, 0x143);
    for leaf in [2, 4, 0x12, 0x1a] {
        assert_eq!(leaves.get(leaf, 0), CpuidRegs::default(), "{leaf:#x}");
    }
}

#[test]
fn the_hosts_own_vendor_keeps_family_and_model() {
    let leaves = made(&amd_host(), 0, &plan(Vendor::Amd, None));
    assert_eq!(leaves.get(1, 0).eax, 0x00a1_0f11);
    let leaves = made(&intel_host(), 0, &plan(Vendor::Intel, None));
    assert_eq!(leaves.get(1, 0).eax, 0x0008_06f8);
}

/// Only who the processor is changes; what it can do stays what KVM supports.
#[test]
fn a_named_processor_changes_its_signature_and_its_name_alone() {
    for host in [amd_host(), intel_host()] {
        for identity in Identity::all() {
            let vendor = identity.vendor();
            let before = made(&host, 1, &plan(vendor, None));
            let named = CpuidPlan {
                identity: Some(identity),
                ..plan(vendor, None)
            };
            let mut after = made(&host, 1, &named);
            let signature = identity.signature();
            assert_eq!(after.get(1, 0).eax, signature);
            let extended = after.get(0x8000_0001, 0).eax;
            match vendor {
                Vendor::Amd => assert_eq!(extended, signature),
                Vendor::Intel => assert_eq!(extended, before.get(0x8000_0001, 0).eax),
            }
            let brand = (0x8000_0002..=0x8000_0004).flat_map(|leaf| {
                let CpuidRegs { eax, ebx, ecx, edx } = after.get(leaf, 0);
                [eax, ebx, ecx, edx].map(u32::to_le_bytes).concat()
            });
            let brand = String::from_utf8(brand.collect()).unwrap();
            let starts = if vendor == Vendor::Amd {
                "AMD "
            } else {
                "Intel "
            };
            assert!(
                brand.starts_with(starts) && brand.ends_with('\0'),
                "{brand:?}"
            );
            for leaf in [1, 0x8000_0001] {
                let eax = before.get(leaf, 0).eax;
                after.edit(leaf, 0, |r| r.eax = eax);
            }
            let parts = 0x8000_0002..=0x8000_0004;
            let rest = |leaves: Leaves| {
                let rest = leaves.iter().filter(|entry| !parts.contains(&entry.leaf));
                rest.copied().collect::<Vec<_>>()
            };
            assert_eq!(rest(after), rest(before), "{}", identity.name());
        }
    }
}
