//! What CPUID says of fewer counters, and of the reservations.

use super::machine::{Setup, unit};
use arbiter::{PerKind, abi};
use pmu_virt::{ClockBackend, CountRequest, CounterBackend, CounterSet, CpuidRegs, PmuModel};

#[test]
fn no_more_is_announced_than_is_left_and_can_be_said() {
    let check = |spec: &str, taken: u64, expected: Option<(u8, u8)>| {
        let model = PmuModel::parse(spec).expect(spec);
        let free = CounterSet::from_bits(!taken);
        let expected = expected.map(|(programmable, fixed)| PerKind {
            programmable,
            fixed,
        });
        assert_eq!(model.can_announce(free), expected, "{spec} {taken:#x}");
    };
    check("intel-v2", 0, Some((4, 3)));
    check("intel-v2", 1, Some((3, 3)));
    check("intel-v2", 0xe, Some((1, 3)));
    check("intel-v2", 0xf, None);
    // Only the first fixed-function counters can be announced.
    check("intel-v2", 1 << 34, Some((4, 2)));
    check("intel-v2", 1 << 33, Some((4, 1)));
    check("intel-v2", 1 << 32, Some((4, 0)));
    check("intel-v1", 1, Some((1, 0)));
    check("intel-v1", 3, None);
    check("amd-perfmonv2", 0, Some((6, 0)));
    check("amd-perfmonv2", 0x3, Some((4, 0)));
    check("amd-perfmonv2", 0x1f, Some((1, 0)));
    check("amd-perfmonv2", 0x3f, None);
    check("amd-core", 0, Some((6, 0)));
    check("amd-core", 0x20, Some((4, 0)));
    check("amd-core", 0x3, Some((4, 0)));
    check("amd-core", 0x7, None);
    check("amd-k7", 0, Some((4, 0)));
    check("amd-k7", 1, None);
    check("amd-fam10h", 8, None);
}

fn counted(request: &CountRequest) -> bool {
    ClockBackend::new().plan(request).is_ok()
}

#[test]
fn leaves_show_the_visible_counters_and_no_others() {
    let of = |spec: &str, programmable, fixed| {
        let visible = PerKind {
            programmable,
            fixed,
        };
        let model = PmuModel::parse(spec).expect(spec);
        let all = model.cpuid(counted);
        let shown = model.announced(counted, visible);
        assert_eq!(shown.hypervisor, all.hypervisor, "{spec}: its own leaves");
        assert_eq!(model.announced(counted, model.counts()), all, "{spec}");
        shown
    };
    let intel = of("intel-v2", 2, 1).leaf_0xa;
    assert_eq!((intel.eax >> 8 & 0xff, intel.edx & 0x1f), (2, 1));
    let v2 = of("amd-perfmonv2", 3, 0);
    assert!(v2.perfctr_core && v2.perfmon_v2);
    assert_eq!(v2.leaf_80000022.ebx, 3);
    assert!(of("amd-core", 6, 0).perfctr_core);
    assert!(!of("amd-core", 4, 0).perfctr_core);
}

#[test]
fn the_leaf_of_the_reservations_is_there_only_with_them() {
    let model = PmuModel::parse("intel-v2").expect("a model");
    let without = model.cpuid(counted);
    let [(base, head), (features, words), (leaf, none)] = without.hypervisor;
    assert_eq!((base, head.eax), (0x4000_0100, 0x4000_0101));
    assert_eq!((features, words.ecx), (0x4000_0101, 1));
    assert_eq!((leaf, none), (0x4000_0102, CpuidRegs::default()));

    let unit = unit(&Setup::of("intel-v2"), &model);
    let with = model.cpuid(counted).with_reservations(&unit);
    let [(_, head), (_, words), (leaf, shown)] = with.hypervisor;
    assert_eq!(head.eax, 0x4000_0102);
    assert_eq!((words.ecx, words.edx), (0x101, 0x0304));
    assert_eq!(leaf, abi::CPUID_LEAF);
    let expected = CpuidRegs {
        eax: 3,
        ebx: abi::MSR_BASE,
        ecx: unit.features(),
        edx: 48 << 16 | 3 << 8 | 4,
    };
    assert_eq!(shown, expected);
}
