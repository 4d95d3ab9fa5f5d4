//! Samplers of IBS: registers, samples, and that nothing loses one by the way.

use perfmon::{Context, PmdKind};
use perfmon_abi::wire::{Call, Errno};
use perfmon_abi::{Message, PmcArg, PmdArg, consts as pfm};
use pmu_model::ibs::{FetchRecord, IbsSample, OpRecord, OpSample};
use pmu_model::{CountRequest, CounterId, IbsKind, Provenance};
use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};

use super::bench::{
    COUNTS, Known, MOMENT, Messages, call, context, launch, must, pmc, pmd, pmu, read, set, start,
};

const MODEL: &str = "amd-core,ibs=on";
const FETCH_EN: u64 = 1 << 48;
const FETCH_VAL: u64 = 1 << 49;
const FETCH_COMPLETE: u64 = 1 << 50;
const RANDOM: u64 = 1 << 57;
const OP_EN: u64 = 1 << 17;
const OP_VAL: u64 = 1 << 18;
const OPS: u64 = 1 << 19;
/// All that a tool can write of it but the count.
const OP_CONTROL: u64 = 0x7f0_ffff | OP_EN | OPS;
/// PMCs, and PMDs of the controls.
const FETCH: (u16, u16) = (4, 4);
const OP: (u16, u16) = (5, 7);
const RIP: u16 = 8;

/// A context whose op sampler comes to its end after 16 ops.
fn sampling(flags: u32) -> Context {
    let mut context = context(MODEL, 0);
    let arg = PmcArg {
        flags,
        ..pmc(0, OP.0, 1 | OP_EN | OPS)
    };
    must(&mut context, Call::WritePmcs(vec![arg]));
    launch(&mut context, 0);
    context
}

fn op(rip: u64) -> IbsSample {
    IbsSample::Op(OpSample::Exact(OpRecord {
        rip,
        ..OpRecord::default()
    }))
}

fn count(context: &mut Context, events: u64) {
    context.count(OP.1, events, Provenance::Exact);
}

fn overflow(context: &mut Context) -> Vec<Message> {
    let mut queue = Messages::default();
    context.overflow(&MOMENT, &Known, &mut queue);
    queue.0.into_iter().flatten().collect()
}

#[test]
fn the_numbers_are_those_that_were_kept_free() {
    let of = |model: &str| {
        let pmu = pmu(model);
        let is_sampler = |counter| matches!(counter, CounterId::Ibs(_));
        let pmcs = pmu.pmcs().iter().filter(|pmc| is_sampler(pmc.counter));
        let pmcs: Vec<_> = pmcs.map(|pmc| (pmc.num, pmc.index)).collect();
        let pmds = pmu.pmds().iter().filter_map(|pmd| match pmd.what {
            PmdKind::Sampler { pmc, .. } | PmdKind::Sample { pmc, .. } => {
                Some((pmd.num, pmd.index - 0xc001_1030, pmc))
            }
            _ => None,
        });
        (pmcs, pmds.collect::<Vec<_>>())
    };
    let (pmcs, pmds) = of(MODEL);
    assert_eq!(pmcs, [(4, 0xc001_1030), (5, 0xc001_1033)]);
    let fetch = [(4, 0, 4), (5, 1, 4), (6, 2, 4)];
    let op = (7..14).map(|num| (num, u64::from(num) - 4, 5));
    let all: Vec<_> = fetch.into_iter().chain(op).chain([(63, 11, 5)]).collect();
    assert_eq!(pmds, all);
    // No branch targets.
    assert_eq!(of("amd-fam10h,ibs=on").1, all[..10]);
    for model in ["amd-core", "amd-k7", "amd-perfmonv2", "intel-v5"] {
        assert_eq!(of(model), (vec![], vec![]), "{model}");
    }
}

#[test]
fn without_ibs_they_are_absent() {
    let mut context = context("amd-core", 0);
    for num in [4, 5] {
        let (result, after) = call(&mut context, Call::WritePmcs(vec![pmc(0, num, OP_EN)]));
        assert_eq!(result, Err(Errno::EINVAL));
        let Call::WritePmcs(args) = after else {
            unreachable!()
        };
        assert_eq!(args[0].flags, pfm::PFM_REG_RETFL_NOTAVAIL);
    }
    for num in (4..14).chain([63]) {
        let (result, _) = call(&mut context, Call::ReadPmds(vec![pmd(0, num, 0)]));
        assert_eq!(result, Err(Errno::EINVAL), "PMD{num}");
    }
}

#[test]
fn reserved_bits_keep_their_default_and_samples_are_read_only() {
    let mut context = context(MODEL, 0);
    let all = vec![pmc(0, FETCH.0, u64::MAX), pmc(0, OP.0, u64::MAX)];
    must(&mut context, Call::WritePmcs(all));
    assert_eq!(read(&mut context, 0, FETCH.1).0, 0xffff | FETCH_EN | RANDOM);
    assert_eq!(read(&mut context, 0, OP.1).0, OP_CONTROL);
    let all = vec![pmd(0, FETCH.1, u64::MAX), pmd(0, OP.1, u64::MAX)];
    must(&mut context, Call::WritePmds(all));
    let counts = [
        (FETCH.1, 0xffff << 16, 0xffff | FETCH_EN | RANDOM),
        (OP.1, 0x7ff_ffff << 32, OP_CONTROL),
    ];
    for (num, count, control) in counts {
        assert_eq!(read(&mut context, 0, num).0, count | control, "PMD{num}");
    }
    for num in [5, 6, 8, 13, 63] {
        let (result, after) = call(&mut context, Call::WritePmds(vec![pmd(0, num, 1)]));
        let Call::WritePmds(args) = after else {
            unreachable!()
        };
        assert_eq!(result, Err(Errno::EINVAL), "PMD{num}");
        assert_eq!(args[0].flags, pfm::PFM_REG_RETFL_EINVAL);
        let reset = PmdArg {
            flags: pfm::PFM_REGFL_READ_RESET,
            ..pmd(0, num, 0)
        };
        let (result, _) = call(&mut context, Call::ReadPmds(vec![reset]));
        assert_eq!(result, Err(Errno::EINVAL), "PMD{num}");
        let nothing = (0, pfm::PFM_PROV_NOT_COUNTED);
        assert_eq!(read(&mut context, 0, num), nothing, "PMD{num}");
    }
    let narrow = PmcArg {
        flags: pfm::PFM_REGFL_NO_64BIT_EMUL,
        ..pmc(0, OP.0, OP_EN)
    };
    // 6.2.1: ignored, as these are no counters.
    must(&mut context, Call::WritePmcs(vec![narrow]));
    must(&mut context, Call::WritePmds(vec![pmd(0, OP.1, u64::MAX)]));
    let wide = 0x7ff_ffff << 32 | OP_EN;
    assert_eq!(read(&mut context, 0, OP.1).0, wide);
}

#[test]
fn a_sampler_that_nobody_asks_holds_its_first_sample() {
    let mut context = sampling(0);
    let wanted = context.wanted();
    assert_eq!((wanted.len(), wanted[0].pmd), (1, OP.1));
    assert_eq!(wanted[0].until.map(u64::from), Some(16));
    count(&mut context, 15);
    assert_eq!(context.sample_due(), None);
    assert_eq!(context.wanted()[0].until.map(u64::from), Some(1));
    let counted = (1 | OP_EN | OPS | 15 << 32, pfm::PFM_PROV_EXACT);
    assert_eq!(read(&mut context, 0, OP.1), counted);
    assert!(!context.sampled(&op(0x1)), "it is not due");
    count(&mut context, 1);
    assert_eq!(context.sample_due(), Some(IbsKind::Op));
    assert!(context.wanted().is_empty() && !context.may_sample());
    // What still counts is not told again, and only its own sample will do.
    count(&mut context, 7);
    assert!(!context.sampled(&IbsSample::Fetch(FetchRecord {
        linear: 1,
        physical: None
    })));
    assert!(context.sampled(&op(0x1234)));
    assert!(context.has_pending_overflow());
    assert_eq!(overflow(&mut context), []);
    assert_eq!(read(&mut context, 0, OP.1).0, 1 | OP_EN | OPS | OP_VAL);
    assert_eq!(read(&mut context, 0, RIP), (0x1234, pfm::PFM_PROV_NONE));
    count(&mut context, 100);
    assert_eq!(context.sample_due(), None);
    // Who reads it and resets it has the next one.
    let reset = PmdArg {
        flags: pfm::PFM_REGFL_READ_RESET,
        ..pmd(0, OP.1, 0)
    };
    must(&mut context, Call::ReadPmds(vec![reset]));
    assert_eq!(read(&mut context, 0, OP.1).0, 1 | OP_EN | OPS);
    assert_eq!(read(&mut context, 0, RIP).0, 0x1234);
    count(&mut context, 16);
    assert_eq!(context.sample_due(), Some(IbsKind::Op));
}

#[test]
fn a_notice_masks_and_a_restart_goes_on_from_the_reset_value() {
    let mut context = sampling(pfm::PFM_REGFL_OVFL_NOTIFY);
    let long = PmdArg {
        long_reset: 10 << 32,
        ..pmd(0, OP.1, 4 << 32)
    };
    must(&mut context, Call::WritePmds(vec![long]));
    assert_eq!(context.wanted()[0].until.map(u64::from), Some(12));
    count(&mut context, 12);
    assert!(context.sampled(&op(0x10)));
    let messages = overflow(&mut context);
    assert_eq!(messages[0].kind, pfm::PFM_MSG_OVFL);
    assert_eq!(messages[0].ovfl_pmds, [1 << OP.1, 0]);
    assert!(context.is_masked());
    must(&mut context, Call::Restart);
    assert_eq!(context.wanted()[0].until.map(u64::from), Some(6));
    assert_eq!(read(&mut context, 0, OP.1).0 & OP_VAL, 0);
    // 3.4.2: a long reset value that is written between them is the one that counts.
    count(&mut context, 6);
    assert!(context.sampled(&op(0x10)));
    overflow(&mut context);
    let drawn = PmdArg {
        long_reset: 13 << 32,
        ..pmd(0, OP.1, 0)
    };
    must(&mut context, Call::WritePmds(vec![drawn]));
    must(&mut context, Call::Restart);
    assert_eq!(context.wanted()[0].until.map(u64::from), Some(3));
}

#[test]
fn a_fetch_is_described_and_its_count_has_random_bits() {
    let mut context = context(MODEL, 0);
    must(
        &mut context,
        Call::WritePmcs(vec![pmc(0, FETCH.0, 2 | FETCH_EN | RANDOM)]),
    );
    let seeded = PmdArg {
        random_seed: 1,
        ..pmd(0, FETCH.1, 0)
    };
    must(&mut context, Call::WritePmds(vec![seeded]));
    launch(&mut context, 0);
    // 16807 & 15
    assert_eq!(context.wanted()[0].until.map(u64::from), Some(32 - 7));
    context.count(FETCH.1, 25, Provenance::Derived);
    assert_eq!(context.sample_due(), Some(IbsKind::Fetch));
    assert!(context.sampled(&IbsSample::Fetch(FetchRecord {
        linear: 0x40_1000,
        physical: Some((0x1000, 12)),
    })));
    let control = 2 | 2 << 16 | FETCH_EN | FETCH_VAL | FETCH_COMPLETE | 1 << 52 | RANDOM;
    assert_eq!(read(&mut context, 0, FETCH.1).0, control);
    assert_eq!(read(&mut context, 0, 5).0, 0x40_1000);
    assert_eq!(read(&mut context, 0, 6).0, 0x1000);
}

/// What the sources of a core count is found out, the best first.
#[test]
fn fetches_are_counted_by_what_there_is() {
    let mut context = context(MODEL, 0);
    must(
        &mut context,
        Call::WritePmcs(vec![pmc(0, FETCH.0, 2 | FETCH_EN)]),
    );
    let requests: Vec<CountRequest> = pmu(MODEL)
        .model()
        .ibs_requests(IbsKind::Fetch, false)
        .collect();
    for (at, expected) in requests.iter().enumerate() {
        context.choose_for_samplers(|request| {
            requests[at..].iter().any(|it| it.event == request.event)
        });
        assert_eq!(context.demands()[0].1[0].1.event, expected.event);
    }
    context.choose_for_samplers(|_| false);
    assert_eq!(context.demands()[0].1[0].1.event, requests[2].event);
}

#[derive(Clone, Debug)]
enum Act {
    Count(u64),
    Sample,
    Stop,
    Start(u16),
    Unload,
    Load,
    Disable,
    Enable,
    Preempt,
    Time(u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (1u64..40).prop_map(Act::Count),
        Just(Act::Sample),
        Just(Act::Stop),
        (0u16..2).prop_map(Act::Start),
        Just(Act::Unload),
        Just(Act::Load),
        Just(Act::Disable),
        Just(Act::Enable),
        Just(Act::Preempt),
        (1u64..400_000).prop_map(Act::Time),
    ]
}

proptest! {
    /// Neither a stop nor anything else but a write or a reset of its PMD takes a sample
    /// away, and none is made up.
    #[test]
    fn a_pending_sample_stays(acts in proptest::collection::vec(act(), 1..80), seed in any::<u64>()) {
        let mut context = context(MODEL, 0);
        let timed = |id| set(id, pfm::PFM_SETFL_TIME_SWITCH, 0, 200_000);
        must(&mut context, Call::CreateEvtsets(vec![timed(0), timed(1)]));
        let control = |value| pmc(0, OP.0, value);
        must(&mut context, Call::WritePmcs(vec![control(1 | OP_EN | OPS), pmc(1, 0, COUNTS)]));
        launch(&mut context, 0);
        let (mut rip, mut held) = (seed, None);
        for act in acts {
            let before = (context.active_set(), context.sample_due());
            match act {
                Act::Count(events) if context.active_set() == 0 => {
                    if context.wanted().iter().any(|wanted| wanted.pmd == OP.1) {
                        count(&mut context, events);
                    }
                }
                Act::Count(_) => {}
                Act::Sample => {
                    rip = rip.wrapping_add(1);
                    let taken = context.sampled(&op(rip));
                    // The VMM does this before it listens to a tool.
                    overflow(&mut context);
                    prop_assert_eq!(taken, before.1.is_some());
                    if taken {
                        prop_assert_eq!((before.0, held), (0, None));
                        held = Some(rip);
                    }
                }
                Act::Stop => {
                    let _ = call(&mut context, Call::Stop);
                    prop_assert_eq!((context.active_set(), context.sample_due()), before);
                }
                Act::Start(set) => drop(call(&mut context, start(set))),
                Act::Unload => context.detached(),
                Act::Load => {
                    if context.prepare_load(0).is_ok() {
                        context.attached(0);
                    }
                }
                Act::Disable => drop(must(&mut context, Call::WritePmcs(vec![control(0)]))),
                Act::Enable => {
                    must(&mut context, Call::WritePmcs(vec![control(1 | OP_EN | OPS)]));
                }
                Act::Preempt => {
                    context.lose(OP.1);
                    context.preempted(&mut Messages::default());
                }
                Act::Time(ns) => {
                    context.pass(pmu_model::Nanos(ns), true);
                    if context.switch_due() == Some(pmu_model::Nanos(0)) {
                        context.expire();
                    }
                }
            }
            let value = read(&mut context, 0, OP.1).0;
            prop_assert_eq!(value & OP_VAL != 0, held.is_some());
            if let Some(rip) = held {
                prop_assert_eq!(read(&mut context, 0, RIP).0, rip);
                prop_assert_eq!(value >> 32, 0);
            }
            prop_assert!(value >> 32 <= 16, "{:#x}", value);
            // A tool takes it at last.
            if held.is_some() && rip % 3 == 0 {
                let reset = PmdArg { flags: pfm::PFM_REGFL_READ_RESET, ..pmd(0, OP.1, 0) };
                must(&mut context, Call::ReadPmds(vec![reset]));
                held = None;
            }
        }
    }
}
