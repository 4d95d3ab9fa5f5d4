//! With nothing reserved, nobody can tell that there are reservations.

use pmu_virt::{Caller, Grant, MsrIndex, PmuModel, Ticks, Tsc};
use proptest::collection::vec;
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use proptest::sample::select as one_of;

use super::machine::*;
use crate::seated::Seated;

const MODELS: [&str; 9] = [
    "intel-v1",
    "intel-v1,counters=8,full-width=on,width=48",
    "intel-v2",
    "intel-v2,counters=8,fixed=3,width=40,fixed-width=48,full-width=off",
    "intel-v2,counters=3,fixed=1,width=32,fixed-width=33",
    "amd-k7",
    "amd-fam10h",
    "amd-core",
    "amd-perfmonv2",
];

#[derive(Clone, Copy, Debug)]
enum Legacy {
    Read(u32),
    Write(u32, u64),
    Rdpmc(u32),
    Run(u64),
    Freeze(u64),
    Pmi,
    Reset,
    SaveAndRestore,
}

fn legacy(spec: &'static str) -> impl Strategy<Value = Legacy> {
    let model = PmuModel::parse(spec).expect(spec);
    let ranges = model.msr_ranges().into_iter();
    let registers: Vec<u32> = ranges.flat_map(|(first, last)| first..=last).collect();
    let page = pmu_virt::accounting::MSR_BASE..pmu_virt::accounting::MSR_BASE + 0x210;
    let msr = prop_oneof![
        20 => one_of(registers),
        2 => page,
        1 => 0xc0u32..0x400,
        1 => 0xc000_0300u32..0xc000_0310,
        1 => any::<u32>(),
    ];
    let event = one_of(vec![
        0x43_013c, 0x53_013c, 0x53_0076, 0x53_003c, 0x53_00c0, 0,
    ]);
    let value = prop_oneof![
        4 => event,
        4 => (0u64..60, 30u32..64).prop_map(|(below, bits)| ((1 << bits) - 1) ^ below),
        2 => (0u64..8, 0u64..256).prop_map(|(fixed, rest)| fixed << 32 | rest),
        2 => 0u64..0x1000,
        1 => any::<u64>(),
    ];
    let ecx = prop_oneof![4 => 0u32..8, 2 => 0x4000_0000u32..0x4000_0004, 1 => any::<u32>()];
    // The block itself is what a machine without reservations lacks.
    let outside = |msr: &u32| !(0x554d_6000..0x554d_7000).contains(msr);
    let ecx = ecx.prop_filter("takes a cookie", |ecx| ecx >> 8 != 0x55_4d00);
    let msr = msr.prop_filter("of the block", outside);
    prop_oneof![
        5 => msr.clone().prop_map(Legacy::Read),
        12 => (msr, value).prop_map(|(msr, value)| Legacy::Write(msr, value)),
        2 => ecx.prop_map(Legacy::Rdpmc),
        6 => prop_oneof![0u64..100, 0u64..1 << 34].prop_map(Legacy::Run),
        1 => (0u64..2).prop_map(|on| Legacy::Freeze(on << 12)),
        2 => Just(Legacy::Pmi),
        1 => Just(Legacy::Reset),
        1 => Just(Legacy::SaveAndRestore),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    #[test]
    fn with_nothing_reserved_it_is_a_pmu_without_reservations(
        (spec, ops) in one_of(&MODELS).prop_flat_map(|spec| (Just(spec), vec(legacy(spec), 1..100))),
        // Whatever a register holds that carries no cookie.
        presented in any::<u64>(),
    ) {
        let mut with = Machine::new(&Setup::of(spec));
        with.act_as(KERNEL, presented);
        let model = PmuModel::parse(spec).expect(spec);
        let mut without = Seated::new(model, counts_all_that_is_fixed(), Grant::everything());
        let (mut now, kernel) = (1 << 32, Caller::legacy(KERNEL));
        for op in ops {
            match op {
                Legacy::Read(msr) => {
                    prop_assert_eq!(with.read(msr), without.rdmsr(MsrIndex(msr), kernel));
                }
                Legacy::Write(msr, value) => {
                    let plain = without.wrmsr(MsrIndex(msr), value, kernel);
                    prop_assert_eq!(with.write(msr, value), plain);
                }
                Legacy::Rdpmc(ecx) => {
                    prop_assert_eq!(with.rdpmc(ecx), without.rdpmc(ecx, kernel));
                }
                Legacy::Run(ticks) => {
                    with.run(ticks);
                    run(&mut without, &mut now, ticks);
                }
                Legacy::Freeze(value) => {
                    with.pmu.rest_taken(MsrIndex(0x1d9), value);
                    without.rest_taken(MsrIndex(0x1d9), value);
                }
                Legacy::Pmi => prop_assert_eq!(with.pmu.take_pmi(), without.take_pmi()),
                Legacy::Reset => {
                    with.pmu.reset();
                    without.reset();
                }
                Legacy::SaveAndRestore => {
                    let (state, plain) = (with.pmu.save(), without.save());
                    prop_assert_eq!(&state, &plain);
                    prop_assert_eq!(with.pmu.restore(&plain), without.restore(&state));
                }
            }
            prop_assert_eq!(with.pmu.needs(), without.needs());
        }
        prop_assert_eq!(with.pmu.report(), without.report());
        prop_assert!(with.told().is_empty(), "nothing was decided");
    }
}

fn run(pmu: &mut Seated, now: &mut u64, ticks: u64) {
    *now += 10;
    pmu.observe(pmu_virt::Progress::Entered { tsc: Tsc(*now) });
    *now += ticks;
    pmu.observe(pmu_virt::Progress::Left {
        tsc: Tsc(*now),
        halted: Ticks(0),
        ring: Some(pmu_virt::Ring::Kernel),
    });
}
