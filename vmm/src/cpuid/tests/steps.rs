//! Single steps, and what hiding a feature takes along.

use super::*;

/// One step on a table of set bits: which bits of which register it clears.
fn check_cleared(step: fn(&mut Leaves), leaf: u32, index: u32, reg: Reg, expected: &[u8]) {
    let mut leaves = table(&[(leaf, index, ALL)]);
    step(&mut leaves);
    let mut left = leaves.get(leaf, index);
    let cleared: Vec<u8> = (0..32)
        .filter(|b| *left.register(reg) & 1 << b == 0)
        .collect();
    assert_eq!(cleared, expected, "{leaf:#x}.{index} {reg:?}");
}

#[test]
fn platform_steps() {
    use platform as p;
    let hide_obstacles = |leaves: &mut Leaves| {
        assert!(pmu::hide_obstacles(leaves, &[]).is_empty());
    };
    check_cleared(hide_obstacles, 1, 0, Reg::Ecx, &[5, 6]);
    check_cleared(hide_obstacles, 7, 1, Reg::Eax, &[17, 18, 20]);
    check_cleared(hide_obstacles, 7, 0, Reg::Ecx, &[7]);
    check_cleared(hide_obstacles, 7, 0, Reg::Edx, &[20]);
    check_cleared(hide_obstacles, 7, 1, Reg::Edx, &[18]);
    check_cleared(hide_obstacles, 0xd, 1, Reg::Ecx, &[11, 12]);
    let amd = [2, 11, 12, 21, 26];
    check_cleared(hide_obstacles, 0x8000_0001, 0, Reg::Ecx, &amd);
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

    let mut leaves = table(&[(1, 0, CpuidRegs::default())]);
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
fn a_foreign_vendor_gets_no_hypercall_features() {
    // 0x0100_7efb without PV_UNHALT (7), PV_SEND_IPI (11), PV_SCHED_YIELD (13).
    let leaves = made(&amd_host(), 0, &plan(Vendor::Intel, None));
    assert_eq!(leaves.get(0x4000_0001, 0).eax, 0x0100_567b);
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
                assert_eq!(leaves.get(0xd, index), CpuidRegs::default(), "{index}");
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
