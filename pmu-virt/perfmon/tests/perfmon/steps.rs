//! What can befall a context, bad input included.

use perfmon_abi::wire::Call;
use perfmon_abi::{PmcArg, PmdArg, SetDesc, SetInfo, StartArg, Timespec, consts as pfm};
use pmu_model::Provenance;
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::sample::{select, subsequence};

use super::play::Step;

/// Any of these flags, none most of the time; and now and then bits that are
/// none.
fn some_of(flags: &'static [u32], others: &'static [u32]) -> impl Strategy<Value = u32> {
    let sum = |flags: Vec<u32>| flags.into_iter().fold(0, |sum, flag| sum | flag);
    prop_oneof![
        30 => subsequence(flags, 0..=flags.len()).prop_map(sum),
        1 => select(others),
    ]
}

/// Flags with which a context can be made.
pub(crate) fn flags() -> impl Strategy<Value = u32> {
    let kind = [0, pfm::PFM_FL_NOTIFY_BLOCK, pfm::PFM_FL_SYSTEM_WIDE];
    let quiet = [0, 0, pfm::PFM_FL_OVFL_NO_MSG];
    (select(kind.to_vec()), select(quiet.to_vec())).prop_map(|(kind, quiet)| kind | quiet)
}

/// Event sets: mostly ones that exist.
fn set() -> impl Strategy<Value = u16> {
    prop_oneof![40 => 0u16..4, 1 => Just(9), 1 => Just(u16::MAX)]
}

fn num() -> impl Strategy<Value = u16> {
    prop_oneof![40 => 0u16..4, 1 => select(&[4u16, 13, 14, 15, 16, 32, 63, 64, 65, 76, 77, 78, 79, 80, 127, 128, 65535][..])]
}

fn bits() -> impl Strategy<Value = [u64; 2]> {
    prop_oneof![
        20 => Just([0, 0]),
        20 => (0u64..16).prop_map(|low| [low, 0]),
        6 => (0u64..16, 0u64..1 << 14).prop_map(|(low, high)| [low, high]),
        1 => any::<[u64; 2]>(),
    ]
}

/// Values near the wraps of 64 and 48 bits, and others.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => (1u64..50).prop_map(|period| 0u64.wrapping_sub(period)),
        2 => (0u64..50).prop_map(|period| (1 << 48) - period),
        2 => 0u64..50,
        1 => any::<u64>(),
    ]
}

/// Event selects: on with rings and GuestOnly, HostOnly; or anything.
fn event() -> impl Strategy<Value = u64> {
    let part = |bits: &'static [u64]| select(bits);
    prop_oneof![
        8 => Just(1u64 << 22 | 3 << 16 | 0xc0),
        2 => (part(&[0, 1 << 22]), part(&[0, 1 << 16, 1 << 17]), part(&[0, 1 << 40, 1 << 41, 3 << 40]))
            .prop_map(|(on, ring, whose)| on | ring | whose | 0x76),
        1 => any::<u64>(),
    ]
}

fn pmc() -> impl Strategy<Value = PmcArg> {
    const FLAGS: &[u32] = &[
        pfm::PFM_REGFL_OVFL_NOTIFY,
        pfm::PFM_REGFL_RANDOM,
        pfm::PFM_REGFL_NO_64BIT_EMUL,
        pfm::PFM_REG_RETFL_EINVAL,
        pfm::PFM_REG_RETFL_NOSET,
    ];
    const OTHERS: &[u32] = &[8, 1 << 24, 1 << 28, u32::MAX];
    let flags = some_of(FLAGS, OTHERS);
    (num(), set(), flags, event(), bits(), bits()).prop_map(
        |(num, set, flags, value, reset_pmds, smpl_pmds)| PmcArg {
            num,
            set,
            flags,
            value,
            reset_pmds,
            smpl_pmds,
            eventid: 0,
        },
    )
}

fn pmd() -> impl Strategy<Value = PmdArg> {
    const FLAGS: &[u32] = &[pfm::PFM_REG_RETFL_NOTAVAIL, pfm::PFM_REG_RETFL_PROV_MASK];
    const OTHERS: &[u32] = &[1, pfm::PFM_REGFL_READ_RESET, 1 << 28, u32::MAX];
    let seeds = prop_oneof![any::<u32>(), select(&[0u32, 1, 0x7fff_ffff, u32::MAX][..])];
    let masks = prop_oneof![0u64..256, any::<u64>()];
    let periods = (value(), value(), value());
    (
        num(),
        set(),
        some_of(FLAGS, OTHERS),
        periods,
        0u64..4,
        (masks, seeds),
    )
        .prop_map(
            |(num, set, flags, (value, long_reset, short_reset), ovflsw_thres, random)| PmdArg {
                num,
                set,
                flags,
                value,
                long_reset,
                short_reset,
                last_reset_val: 77,
                ovflsw_thres,
                random_mask: random.0,
                random_seed: random.1,
            },
        )
}

fn read() -> impl Strategy<Value = PmdArg> {
    const FLAGS: &[u32] = &[pfm::PFM_REGFL_READ_RESET, pfm::PFM_REG_RETFL_PROV_MASK];
    const OTHERS: &[u32] = &[1, 2, 4, 1 << 28];
    let other = select(&[0u16, 1, 2, 3, 64, 75, 76, 78, 200][..]);
    (
        prop_oneof![3 => 0u16..4, 1 => other],
        set(),
        some_of(FLAGS, OTHERS),
    )
        .prop_map(|(num, set, flags)| PmdArg {
            num,
            set,
            flags,
            ..PmdArg::default()
        })
}

fn timeout() -> impl Strategy<Value = Timespec> {
    let time = |sec: i64, nsec: i64| Timespec { sec, nsec };
    let odd = [
        time(0, 0),
        time(-1, 0),
        time(0, -1),
        time(0, 1_000_000_000),
        time(i64::MAX, 999_999_999),
        time(i64::MIN, 0),
        time(18_446_744_073, 709_551_615),
        time(18_446_744_073, 709_500_000),
    ];
    prop_oneof![
        40 => (1i64..2_000_000).prop_map(move |nsec| time(0, nsec)),
        1 => select(odd.to_vec()),
    ]
}

fn desc() -> impl Strategy<Value = SetDesc> {
    const PLAIN: &[u32] = &[
        pfm::PFM_SETFL_EXPL_NEXT,
        pfm::PFM_SETFL_EXCL_IDLE,
        pfm::PFM_SET_RETFL_NOSET,
    ];
    const OTHERS: &[u32] = &[0x10, 0x20, 1 << 31, 3, u32::MAX];
    let by = [0, pfm::PFM_SETFL_OVFL_SWITCH, pfm::PFM_SETFL_TIME_SWITCH];
    (
        0u16..4,
        set(),
        select(by.to_vec()),
        some_of(PLAIN, OTHERS),
        timeout(),
    )
        .prop_map(|(id, next, by, flags, timeout)| SetDesc {
            id,
            next,
            flags: by | flags,
            timeout,
        })
}

fn deletion() -> impl Strategy<Value = SetDesc> {
    const FLAGS: &[u32] = &[pfm::PFM_SET_RETFL_EINVAL];
    (set(), some_of(FLAGS, &[1, 1 << 31])).prop_map(|(id, flags)| SetDesc {
        id,
        flags,
        ..SetDesc::default()
    })
}

fn question() -> impl Strategy<Value = SetInfo> {
    const FLAGS: &[u32] = &[pfm::PFM_SET_RETFL_EINVAL];
    (set(), some_of(FLAGS, &[1, 1 << 31])).prop_map(|(id, flags)| SetInfo {
        id,
        flags,
        runs: 9,
        ..SetInfo::default()
    })
}

fn call() -> impl Strategy<Value = Call> {
    let start = prop_oneof![
        2 => Just(None),
        1 => set().prop_map(|set| Some(StartArg { set })),
    ];
    prop_oneof![
        4 => vec(pmc(), 1..4).prop_map(Call::WritePmcs),
        4 => vec(pmd(), 1..4).prop_map(Call::WritePmds),
        1 => vec(read(), 1..4).prop_map(Call::ReadPmds),
        4 => start.prop_map(Call::Start),
        1 => Just(Call::Stop),
        3 => Just(Call::Restart),
        2 => vec(desc(), 1..4).prop_map(Call::CreateEvtsets),
        1 => vec(deletion(), 1..3).prop_map(Call::DeleteEvtsets),
        1 => vec(question(), 1..3).prop_map(Call::GetinfoEvtsets),
    ]
}

fn count() -> impl Strategy<Value = Step> {
    use Provenance::{Derived, Exact, Hardware, Scaled, Simulated};
    let events = prop_oneof![4 => 0u64..60, 1 => Just(1 << 48), 1 => any::<u64>()];
    let how = select(&[Exact, Hardware, Scaled, Derived, Simulated][..]);
    (0usize..4, events, how).prop_map(|(which, events, how)| Step::Count(which, events, how))
}

/// What happens at once, or one after the other.
fn happening() -> impl Strategy<Value = Vec<Step>> {
    let ns = prop_oneof![4 => 0u64..500_000, 1 => 0u64..50_000_000];
    let pass = (ns, any::<bool>()).prop_map(|(ns, counted)| Step::Pass(ns, counted));
    let one = prop_oneof![
        10 => call().prop_map(Step::Call),
        2 => set().prop_map(Step::Load),
        1 => Just(Step::Unload),
        2 => count(),
        1 => (0u16..4).prop_map(Step::Lose),
        1 => pass.clone(),
        1 => Just(Step::Expire),
        1 => Just(Step::Overflow(1)),
        1 => Just(Step::ReadMessages),
    ];
    let then = |steps: Vec<Step>, last: Step| [steps, vec![last]].concat();
    prop_oneof![
        6 => one.prop_map(|step| vec![step]),
        6 => vec(count(), 1..5).prop_map(move |counts| then(counts, Step::Overflow(1))),
        3 => pass.prop_map(move |pass| then(vec![pass], Step::Expire)),
        2 => Just(vec![Step::Call(Call::Restart)]),
        1 => (count(), set()).prop_map(|(count, set)| {
            let start = Call::Start(Some(StartArg { set }));
            vec![count, Step::Call(Call::Stop), Step::Call(start)]
        }),
        1 => Just(unread()),
    ]
}

/// More notifications than a queue has room for.
fn unread() -> Vec<Step> {
    let wraps = Step::Count(0, u64::MAX, Provenance::Exact);
    let once = [wraps, Step::Overflow(1), Step::Call(Call::Restart)];
    once.iter().cloned().cycle().take(27).collect()
}

/// Sets, registers, load and start, so that something can happen; and then
/// whatever comes.
pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let sets = vec(desc(), 3).prop_map(|mut descs| {
        for (desc, id) in descs.iter_mut().zip(1..) {
            desc.id = id;
        }
        descs
    });
    let setup = (
        sets,
        vec(desc(), 0..2),
        vec(pmc(), 4..12),
        vec(pmd(), 4..12),
        set(),
    );
    let setup = setup.prop_map(|(sets, changes, pmcs, pmds, set)| {
        let descs = sets.into_iter().chain(changes);
        let mut calls: Vec<Call> = descs.map(|it| Call::CreateEvtsets(vec![it])).collect();
        calls.extend(pmcs.into_iter().map(|it| Call::WritePmcs(vec![it])));
        calls.extend(pmds.into_iter().map(|it| Call::WritePmds(vec![it])));
        let mut steps: Vec<Step> = calls.into_iter().map(Step::Call).collect();
        steps.extend([Step::Load(set), Step::Call(Call::Start(None))]);
        steps
    });
    (setup, vec(happening(), 0..50)).prop_map(|(setup, rest)| [setup, rest.concat()].concat())
}
