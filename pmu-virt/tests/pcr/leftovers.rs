//! Counters that change owners: who has one next finds it as if nobody had used it.

use arbiter::{AdminAct, CounterId, abi};
use pmu_virt::ibs::{FetchRecord, OpSample};
use pmu_virt::{IbsKind, IbsSample, Layer, ReadOutcome};
use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, Strategy, any, prop_assert_eq, prop_oneof, proptest};
use proptest::sample::select as among;

use super::machine::*;

const M2: u64 = 0x2222_2222_2222;
const LEASE_MS: u32 = 50;
const FETCH: u32 = abi::POSITION_IBS_FETCH;
const OP: u32 = abi::POSITION_IBS_OP;

/// What its owner does to a counter.
#[derive(Clone, Debug)]
enum Use {
    Select(u64),
    Count(u64),
    Overflow(bool),
    /// The field of IA32_FIXED_CTR_CTRL, bit 4 for `Adaptive_Record`.
    Field(u64),
    Pebs(bool),
    Ibs(u32, u64),
    Run(u64),
    Sample,
}

fn uses() -> impl Strategy<Value = Use> {
    // Cycles that a clock counts, with and without INT, and events that it does not.
    let selects = among(vec![
        0x53_013c,
        0x43_003c,
        0x43_0076,
        0x53_0076,
        0x53_00c5,
        0x43_00c3,
        0x4_0053_013c,
        0xb,
        0xf,
        0x3,
        0,
    ]);
    let counts = among(vec![0, 1, (1 << 48) - 10, (1 << 48) - 1, 0x1234_5678]);
    prop_oneof![
        3 => selects.prop_map(Use::Select),
        2 => counts.prop_map(Use::Count),
        1 => any::<bool>().prop_map(Use::Overflow),
        2 => (0u64..32).prop_map(Use::Field),
        2 => any::<bool>().prop_map(Use::Pebs),
        3 => (0u32..12, among(vec![1 << 17 | 0x10, 1 << 48 | 0x10, 0x1f, u64::MAX >> 8, 0x77]))
            .prop_map(|(n, value)| Use::Ibs(n, value)),
        3 => (0u64..0x400).prop_map(Use::Run),
        2 => among(vec![Use::Sample]),
    ]
}

fn counter_at(position: u32) -> CounterId {
    let n = u8::try_from(position & 31).expect("a small number");
    match position {
        FETCH => CounterId::Ibs(IbsKind::Fetch),
        OP => CounterId::Ibs(IbsKind::Op),
        32.. => CounterId::Fixed(n),
        _ => CounterId::Programmable(n),
    }
}

/// Uses a counter as its owner does; what the model has not got raises #GP, and so does
/// what belongs to another one.
fn act(machine: &mut Machine, layer: Layer, position: u32, one: &Use) {
    machine.act_as(layer, A);
    let _ = match *one {
        Use::Select(value) => machine.write(select(position), value),
        Use::Count(value) => machine.write(counter(position), value),
        Use::Overflow(clear) => machine.write(overflow(position), clear.into()),
        Use::Field(value) => {
            let field = (value & 0xf) | (value >> 4) << 32;
            let n = position.saturating_sub(32);
            if !(32..40).contains(&position) {
                return;
            }
            machine.write(0x38d, field << (4 * n))
        }
        Use::Pebs(on) => {
            if position >= FETCH {
                return;
            }
            machine.write(0x3f1, u64::from(on) << position)
        }
        Use::Ibs(n, value) => {
            // Registers 0 to 2 are those of fetches.
            if position < FETCH || (n < 3) != (position == FETCH) {
                return;
            }
            machine.write(abi::MSR_BASE + abi::MSR_IBS + n, value)
        }
        Use::Run(ticks) => return machine.run(ticks),
        Use::Sample => {
            let sample = match position {
                FETCH => IbsSample::Fetch(FetchRecord {
                    linear: 0x5ec2e7,
                    physical: None,
                }),
                _ => IbsSample::Op(OpSample::Near { rip: 0x5ec2e7 }),
            };
            return machine.pmu.sampled(sample);
        }
    };
}

/// How a counter is taken from its owner.
#[derive(Clone, Copy, Debug)]
enum End {
    GivenBack,
    Revoked,
    Expired,
}

fn end(machine: &mut Machine, layer: Layer, position: u32, how: End) {
    machine.act_as(layer, M);
    match how {
        End::GivenBack => {
            let _ = machine.write(management(position), 0);
        }
        End::Revoked => {
            let act = AdminAct::Revoke {
                counter: counter_at(position),
                grace_ms: 0,
            };
            machine
                .pmu
                .arbitrate(|unit, cx| match unit.administer(act, cx) {
                    Ok(effects) => ((), effects),
                    Err(error) => panic!("{error}"),
                });
        }
        End::Expired => {}
    }
    machine.run(u64::from(LEASE_MS + 10) * MS);
}

/// Everything that `layer` can see, and that is kept of the PMU; but that a counter was taken
/// from its owner is told where the event is counted on.
fn visible(machine: &mut Machine, layer: Layer) -> Vec<String> {
    const LOSS: u64 = 0xff << 16;
    let pages = SNAPSHOT + 0x100..SNAPSHOT + 0x200;
    machine.act_as(layer, 0);
    let _ = machine.read(SNAPSHOT);
    let mut all = Vec::new();
    for (first, last) in pmu_virt::all_pmu_msr_ranges() {
        for msr in first..=last {
            match machine.read(msr) {
                ReadOutcome::Gp | ReadOutcome::NotHandled => {}
                ReadOutcome::Value(word) if pages.contains(&msr) && msr.is_multiple_of(4) => {
                    all.push(format!("{msr:#x}: {:x?}", word & !LOSS));
                }
                seen => all.push(format!("{msr:#x}: {seen:x?}")),
            }
        }
    }
    let saved = format!("{:x?}", machine.pmu.save());
    // The page's words were looked at.
    let (before, page) = saved.split_once("snapshot: ").expect("a page");
    let (_, after) = page.split_once("ibs: ").expect("samplers");
    let kept = format!("{:x?} {before} {after}", machine.pmu.report());
    all.push(kept.replace("loss: Some(Taken)", "loss: None"));
    all.push(format!("{:?}", machine.pmu.take_pmi()));
    all.push(format!("{:?}", machine.pmu.take_ibs_interrupt()));
    all.push(format!("{:?}", machine.pmu.deadline()));
    all
}

/// A machine in which `former` has a counter, to itself, and with it what it shares.
fn owned(model: &'static str, former: Layer, position: u32) -> Option<Machine> {
    let mut setup = Setup::of(model);
    setup.firmware = true;
    setup.policy.firmware.lease_ms = Some(LEASE_MS);
    setup.policy.kernel.lease_ms = Some(LEASE_MS);
    let mut machine = Machine::new(&setup);
    machine.act_as(former, 0);
    if machine.write(management(position), M) != pmu_virt::WriteOutcome::Done {
        return None;
    }
    machine.act_as(former, M);
    let word = 0xff | abi::CONTROL_PEBS_ENABLE | abi::CONTROL_FIXED_CTRL;
    let _ = machine.write(control(position), word);
    let _ = machine.write(access(position), A);
    // A write of it programs every counter that it reaches.
    let _ = machine.write(0x38d, 0);
    Some(machine)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_next_one_finds_nothing_of_the_former_owner(
        model in among(vec![
            "intel-v2", "intel-v4,pebs=skid", "intel-v5,pebs=skid", "intel-v4,pebs=skid,pebs-format=3",
            "amd-core,ibs=on", "amd-perfmonv2,ibs=on", "amd-fam10h,ibs=on",
        ]),
        position in among(vec![0u32, 1, 32, 33, FETCH, OP]),
        (former, next, how) in among(vec![
            (FIRMWARE, KERNEL, End::GivenBack),
            (FIRMWARE, KERNEL, End::Revoked),
            (FIRMWARE, KERNEL, End::Expired),
            (KERNEL, FIRMWARE, End::GivenBack),
            (KERNEL, FIRMWARE, End::Revoked),
            (KERNEL, KERNEL, End::GivenBack),
            (KERNEL, KERNEL, End::Expired),
        ]),
        used in vec(uses(), 0..12),
        then in vec(uses(), 0..8),
    ) {
        let machines = [&used[..], &[]].map(|used| {
            let mut machine = owned(model, former, position)?;
            // As much time for both.
            let ran: u64 = used.iter().map(|one| if let Use::Run(ticks) = one { *ticks } else { 0 }).sum();
            used.iter().for_each(|one| act(&mut machine, former, position, one));
            machine.run(0x4000 - ran);
            machine.set_time(0x8000);
            end(&mut machine, former, position, how);
            machine.act_as(former, 0);
            while machine.read(abi::MSR_BASE + abi::MSR_NOTICE) != ReadOutcome::Value(0) {}
            Some(machine)
        });
        let [Some(mut used), Some(mut idle)] = machines else {
            return Ok(());
        };
        prop_assert_eq!(visible(&mut used, next), visible(&mut idle, next), "free");
        for machine in [&mut used, &mut idle] {
            machine.act_as(next, 0);
            let _ = machine.write(management(position), M2);
            machine.act_as(next, M2);
            let _ = machine.write(access(position), A);
            let _ = machine.write(control(position), 0xff);
        }
        for one in &then {
            for machine in [&mut used, &mut idle] {
                act(machine, next, position, one);
            }
        }
        for machine in [&mut used, &mut idle] {
            // What it has, everybody can see from now on.
            machine.act_as(next, M2);
            let _ = machine.write(access(position), 0);
        }
        prop_assert_eq!(visible(&mut used, next), visible(&mut idle, next), "used again");
    }
}

/// Each owner of a sampler that a tool of the host has hears that it stands, also when it
/// was handed over as it is; so does that of a counter whose event nobody counts.
#[test]
fn each_owner_hears_that_nobody_counts() {
    const UNBACKED: u64 = abi::NOTICE_TAKEN
        | 1 << abi::NOTICE_POSITION_SHIFT
        | abi::REASON_UNBACKED << abi::NOTICE_REASON_SHIFT;
    const NOTICE: u32 = abi::MSR_BASE + abi::MSR_NOTICE;
    let layer = |code: u64| UNBACKED | code << abi::NOTICE_LAYER_SHIFT;
    let uncounted = 0x43_00c5;
    let mut setup = Setup::of("intel-v2");
    setup.firmware = true;
    let mut machine = Machine::new(&setup);
    let take = |machine: &mut Machine, who: Layer, from: u64, key: u64| {
        machine.act_as(who, from);
        let done = machine.write(management(1), key);
        assert_eq!(done, pmu_virt::WriteOutcome::Done);
    };
    let hears = |machine: &mut Machine, who: Layer, code: u64| {
        machine.act_as(who, 0);
        assert_eq!(machine.read(NOTICE), ReadOutcome::Value(layer(code)));
        assert_eq!(machine.read(NOTICE), ReadOutcome::Value(0));
    };
    take(&mut machine, FIRMWARE, 0, M);
    machine.act_as(FIRMWARE, M);
    let _ = machine.write(control(1), 0xff);
    machine.act_as(FIRMWARE, 0);
    let _ = machine.write(select(1), uncounted);
    hears(&mut machine, FIRMWARE, abi::LAYER_FIRMWARE);
    // Handed over as it is, and given back and taken anew.
    take(&mut machine, KERNEL, M, M2);
    hears(&mut machine, KERNEL, abi::LAYER_KERNEL);
    take(&mut machine, KERNEL, M2, 0);
    take(&mut machine, FIRMWARE, 0, M);
    machine.act_as(FIRMWARE, M);
    let _ = machine.write(control(1), 0xff);
    machine.act_as(FIRMWARE, 0);
    assert_eq!(machine.read(NOTICE), ReadOutcome::Value(0));
    let _ = machine.write(select(1), uncounted);
    hears(&mut machine, FIRMWARE, abi::LAYER_FIRMWARE);
}
