//! Random guests: against a naive second implementation, and against the
//! properties that reservations promise.

use super::machine::*;
use super::naive::{COOKIES, Naive, Reg, Seen};
use arbiter::{PerKind, abi};
use pmu_virt::{Layer, MsrIndex, ReadOutcome, WriteOutcome};
use proptest::collection::vec;
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use proptest::sample::select as one_of;

#[derive(Clone, Copy, Debug)]
enum Act {
    Read(Reg),
    Write(Reg, u64),
    Rdpmc(u8),
    RdpmcWith(u8),
    Run(u64),
    Freeze(bool),
    Pmi,
}

fn position() -> impl Strategy<Value = u8> {
    prop_oneof![6 => 0u8..3, 4 => 32u8..35, 1 => 0u8..64]
}

fn reg() -> impl Strategy<Value = Reg> {
    let shared = vec![
        Reg::FixedCtrl,
        Reg::Ctrl,
        Reg::Ctrl,
        Reg::Status,
        Reg::Clear,
        Reg::Set,
        Reg::InUse,
    ];
    prop_oneof![
        3 => (0u8..6).prop_map(Reg::Counter),
        3 => (0u8..6).prop_map(Reg::Select),
        6 => one_of(shared),
        3 => position().prop_map(Reg::Alias),
        3 => position().prop_map(Reg::AliasSelect),
        2 => position().prop_map(Reg::AliasOverflow),
        4 => position().prop_map(Reg::Management),
        3 => position().prop_map(Reg::Access),
        4 => position().prop_map(Reg::Control),
        1 => position().prop_map(Reg::DropValue),
        1 => position().prop_map(Reg::Reserved),
        1 => position().prop_map(Reg::Map),
        1 => Just(Reg::Phase),
    ]
}

fn value(amd: bool, reg: Reg) -> proptest::strategy::BoxedStrategy<u64> {
    let event: u64 = if amd { 0x76 } else { 0x13c };
    let usual = match reg {
        Reg::Counter(_) | Reg::Alias(_) | Reg::DropValue(_) => {
            prop_oneof![(0u64..40).prop_map(|n| (1 << 48) - 1 - n), 0u64..100].boxed()
        }
        Reg::AliasSelect(32..64) => (0u64..12).boxed(),
        Reg::Select(_) | Reg::AliasSelect(_) => one_of(vec![
            0x43_0000 | event,
            0x53_0000 | event,
            0x52_0000 | event,
            0x51_0000 | event,
            0x13_0000 | event,
            0,
        ])
        .boxed(),
        Reg::FixedCtrl => one_of(vec![0, 0x3, 0x33, 0x333, 0xb0, 0xbbb, 0x030]).boxed(),
        Reg::Ctrl | Reg::Clear | Reg::Set => prop_oneof![
            (0u64..64).prop_map(|bits| bits),
            one_of(vec![1u64 << 59, 1 << 59 | 1, 1 << 60, 1 << 58 | 2]),
            (0u64..8, 0u64..16).prop_map(|(fixed, bits)| fixed << 32 | bits),
        ]
        .boxed(),
        Reg::Control(_) => (0u64..16, 0u64..4, any::<u8>())
            .prop_map(|(reach, faults, modes)| reach << 16 | faults << 8 | u64::from(modes | 0x44))
            .boxed(),
        Reg::Phase | Reg::AliasOverflow(_) => (0u64..3).boxed(),
        _ => one_of(COOKIES.to_vec()).boxed(),
    };
    prop_oneof![12 => usual, 1 => any::<u64>(), 1 => (0u32..64).prop_map(|bit| 1 << bit)].boxed()
}

fn act(amd: bool) -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => reg().prop_map(Act::Read),
        12 => reg().prop_flat_map(move |reg| {
            value(amd, reg).prop_map(move |value| Act::Write(reg, value))
        }),
        2 => (0u8..6).prop_map(Act::Rdpmc),
        2 => position().prop_map(Act::RdpmcWith),
        5 => prop_oneof![0u64..50, 0u64..1 << 20].prop_map(Act::Run),
        1 => any::<bool>().prop_map(Act::Freeze),
        1 => Just(Act::Pmi),
    ]
}

fn layer() -> impl Strategy<Value = Layer> {
    prop_oneof![5 => Just(KERNEL), 3 => Just(FIRMWARE), 1 => Just(HYPERVISOR)]
}

type Step = (Act, Layer, u64);

fn steps(amd: bool) -> impl Strategy<Value = Vec<Step>> {
    vec((act(amd), layer(), one_of(COOKIES.to_vec())), 1..100)
}

/// The index of a register of a model.
fn msr(amd: bool, reg: Reg) -> Option<u32> {
    let alias = |row: fn(u32) -> u32, n: u8| Some(row(u32::from(n)));
    match reg {
        Reg::Counter(n) if amd => Some(0xc001_0201 + 2 * u32::from(n)),
        Reg::Counter(n) => Some(0x4c1 + u32::from(n)),
        Reg::Select(n) if amd => Some(0xc001_0200 + 2 * u32::from(n)),
        Reg::Select(n) => Some(0x186 + u32::from(n)),
        Reg::FixedCtrl => (!amd).then_some(0x38d),
        Reg::Ctrl => Some(if amd { 0xc000_0301 } else { 0x38f }),
        Reg::Status => Some(if amd { 0xc000_0300 } else { 0x38e }),
        Reg::Clear => Some(if amd { 0xc000_0302 } else { 0x390 }),
        Reg::Set => Some(if amd { 0xc000_0303 } else { 0x391 }),
        Reg::InUse => (!amd).then_some(0x392),
        Reg::Alias(n) => alias(counter, n),
        Reg::AliasSelect(n) => alias(select, n),
        Reg::AliasOverflow(n) => alias(overflow, n),
        Reg::Management(n) => alias(management, n),
        Reg::Access(n) => alias(access, n),
        Reg::Control(n) => alias(control, n),
        Reg::DropValue(n) => alias(drop_value, n),
        Reg::Reserved(n) => alias(status, n),
        Reg::Map(n) => alias(legacy_map, n),
        Reg::Phase => Some(PHASE),
    }
}

fn read(outcome: ReadOutcome) -> Seen {
    match outcome {
        ReadOutcome::Value(value) => Seen::Value(value),
        ReadOutcome::Gp => Seen::Gp,
        ReadOutcome::NotHandled | ReadOutcome::Merge { .. } => Seen::Absent,
    }
}

fn wrote(outcome: WriteOutcome) -> Seen {
    match outcome {
        WriteOutcome::Done => Seen::Done,
        WriteOutcome::Gp => Seen::Gp,
        WriteOutcome::NotHandled => Seen::Absent,
    }
}

/// What one step comes to at both; `None` where there is nothing to compare.
fn both(machine: &mut Machine, naive: &mut Naive, amd: bool, step: Step) -> Option<(Seen, Seen)> {
    let (act, layer, cookie) = step;
    machine.act_as(layer, cookie);
    match act {
        Act::Read(reg) => {
            let seen = read(machine.read(msr(amd, reg)?));
            Some((seen, naive.read(reg, layer, cookie)))
        }
        Act::Write(reg, value) => {
            let seen = wrote(machine.write(msr(amd, reg)?, value));
            Some((seen, naive.write(reg, value, layer, cookie)))
        }
        Act::Rdpmc(n) => {
            let seen = read(machine.rdpmc(u32::from(n)));
            Some((seen, naive.rdpmc(n, layer)))
        }
        Act::RdpmcWith(n) => {
            let seen = read(machine.rdpmc(abi::RDPMC_COOKIE + u32::from(n)));
            Some((seen, naive.rdpmc_with(n, layer, cookie)))
        }
        Act::Run(ticks) => {
            machine.run(ticks);
            naive.run(ticks);
            None
        }
        Act::Freeze(on) if !amd => {
            machine.pmu.rest_taken(MsrIndex(0x1d9), u64::from(on) << 12);
            naive.freeze = on;
            None
        }
        Act::Freeze(_) => None,
        Act::Pmi => {
            let pending = machine.pmu.take_pmi().map_or(0, |pmi| pmi.counters.bits());
            let expected = std::mem::take(&mut naive.pending);
            Some((Seen::Value(pending), Seen::Value(expected)))
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    #[test]
    fn it_does_what_the_naive_one_does(
        (amd, steps) in any::<bool>().prop_flat_map(|amd| (Just(amd), steps(amd))),
        newer in any::<bool>(),
        firmware in any::<bool>(),
        visible in prop_oneof![Just(None), (1u8..6, 0u8..4).prop_map(Some)],
    ) {
        let legacy = visible.map(|(programmable, fixed)| PerKind { programmable, fixed });
        let model = match (amd, newer) {
            (true, _) => "amd-perfmonv2",
            (false, true) => "intel-v4",
            (false, false) => "intel-v2",
        };
        let setup = Setup { firmware, legacy, ..Setup::of(model) };
        let mut machine = Machine::new(&setup);
        let mut naive = Naive::new(amd, firmware, visible);
        if newer && !amd {
            naive = naive.version_4();
        }
        for step in &steps {
            if let Some((seen, expected)) = both(&mut machine, &mut naive, amd, *step) {
                prop_assert_eq!(seen, expected, "{:x?}", step);
            }
        }
        // Everything that is behind a cookie, by those who have it.
        for n in naive.positions() {
            let (layer, cookie) = match naive.owner(n) {
                None => (KERNEL, 0),
                Some(owner) => {
                    let layers = [KERNEL, FIRMWARE, HYPERVISOR];
                    let valid = |l: &Layer| owner.control >> (4 + l.code()) & 1 == 1;
                    let Some(layer) = layers.into_iter().find(valid) else { continue };
                    (layer, owner.access)
                }
            };
            for reg in [Reg::Alias(n), Reg::AliasSelect(n), Reg::AliasOverflow(n)] {
                let step = (Act::Read(reg), layer, cookie);
                let found = both(&mut machine, &mut naive, amd, step);
                prop_assert!(found.is_some_and(|(seen, expected)| seen == expected), "{:?}", reg);
            }
        }
        let unit = machine.pmu.claims().unit().expect("it has reservations");
        prop_assert_eq!(unit.wrong_cookies(), naive.wrong);
    }

    #[test]
    fn denied_accesses_change_nothing_and_faults_yield_nothing(
        amd in any::<bool>(),
        owned in one_of(vec![0u8, 1, 2]),
        faults in 0u64..4,
        steps in vec((reg(), any::<u64>(), any::<bool>(), one_of(vec![0, X])), 1..60),
    ) {
        let model = if amd { "amd-perfmonv2" } else { "intel-v2" };
        let n = u32::from(owned);
        let mut machine = check(&Setup::of(model), &private(n));
        let event = if amd { 0x53_0076 } else { 0x53_013c };
        let begin = [
            Op::As(KERNEL, A),
            Op::W(select(n), event),
            Op::W(counter(n), (1 << 48) - 5),
            Op::Run(9),
        ];
        play(&mut machine, &begin);
        play(&mut machine, &controlled(n, abi::CONTROL_INITIAL | faults << 8));
        machine.told();
        let before = private_state(&mut machine, n);
        for (reg, value, write, cookie) in steps {
            // Only what belongs to this counter.
            let reg = match reg {
                Reg::Counter(_) => Reg::Counter(owned),
                Reg::Select(_) => Reg::Select(owned),
                Reg::AliasSelect(_) => Reg::AliasSelect(owned),
                Reg::AliasOverflow(_) => Reg::AliasOverflow(owned),
                Reg::Management(_) => Reg::Management(owned),
                Reg::Access(_) => Reg::Access(owned),
                Reg::Control(_) => Reg::Control(owned),
                Reg::DropValue(_) => Reg::DropValue(owned),
                _ => Reg::Alias(owned),
            };
            let Some(msr) = msr(amd, reg) else { continue };
            let expected = match (reg, write) {
                // Everybody may read these.
                (Reg::Control(_) | Reg::DropValue(_), false) => continue,
                (Reg::Management(_) | Reg::Access(_), _) => Seen::Gp,
                (Reg::Control(_) | Reg::DropValue(_), true) => Seen::Gp,
                _ if faults & 1 == 1 => Seen::Gp,
                (_, true) => Seen::Done,
                (_, false) => Seen::Value(0),
            };
            machine.act_as(KERNEL, cookie);
            let seen = if write { wrote(machine.write(msr, value)) } else { read(machine.read(msr)) };
            prop_assert_eq!(seen, expected, "{:x?}", reg);
            // Each is told, but for a read of what can only be written.
            let no_such = matches!(reg, Reg::Management(_) | Reg::Access(_)) && !write;
            prop_assert_eq!(machine.told().is_empty(), no_such);
        }
        prop_assert_eq!(private_state(&mut machine, n), before);
    }

    #[test]
    fn without_the_management_cookie_no_reservation_changes(
        owned in position().prop_filter("it exists", |n| matches!(n, 0..4 | 32..35)),
        word in (0u64..16, 0u64..4).prop_map(|(reach, faults)| reach << 16 | faults << 8 | 0xff),
        steps in vec((0u32..0x260, any::<u64>(), any::<bool>(), layer(), 0usize..4), 1..120),
    ) {
        let n = u32::from(owned);
        let mut machine = check(&Setup::of("intel-v2"), &private(n));
        play(&mut machine, &controlled(n, word));
        let told = |machine: &mut Machine| {
            [status(n), control(n), drop_value(n)].map(|msr| machine.read(msr))
        };
        let before = told(&mut machine);
        for (offset, value, write, layer, cookie) in steps {
            // Half of the accesses aim at that counter.
            let offset = match value % 2 {
                0 if offset < 0x200 => offset / 0x40 * 0x40 + n,
                _ => offset,
            };
            machine.act_as(layer, [0, A, X, value >> 16][cookie]);
            let value = [0, A, X, value][(value % 4) as usize];
            if write {
                let _ = machine.write(abi::MSR_BASE + offset, value);
            } else {
                let _ = machine.read(abi::MSR_BASE + offset);
            }
            prop_assert_eq!(told(&mut machine), before);
        }
        // The owner's cookies still do.
        let ops = [
            Op::As(KERNEL, M),
            Op::W(control(n), 0xff),
            Op::As(KERNEL, A),
            Op::W(counter(n), 77),
            Op::R(counter(n), 77),
        ];
        play(&mut machine, &ops);
    }
}

/// All that its owner sees of a counter.
fn private_state(machine: &mut Machine, n: u32) -> Vec<ReadOutcome> {
    machine.act_as(KERNEL, A);
    [
        counter(n),
        select(n),
        overflow(n),
        status(n),
        control(n),
        drop_value(n),
    ]
    .map(|msr| machine.read(msr))
    .to_vec()
}
