//! What the hypervisor has reserved is room for host contexts.

use std::sync::Arc;

use arbiter::{
    AdminAct, Caller, Cookie, CounterId, Effects, Layer, Outcome, PerKind, Reason, Reply, Request,
    Scheme, Wanted,
};
use perfmon_abi::consts::{PFM_FL_PREEMPTIBLE, PFM_PROV_LOST};
use perfmon_abi::wire::{Call, Errno};
use pmu_virt::perfmon::HostPolicy;
use pmu_virt::{
    CorePmu, CounterBackend, Grant, MsrIndex, OtherCores, Oversubscribe, OwnerId, PmuModel,
    Progress, ReadOutcome, Reading, Ring, SimBackend, Ticks, Tsc, WriteOutcome,
};
use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};

use super::rig::{Mail, Rig, Spot, context};
use super::truth::{EVENTS, Truth, clocks};
use crate::seated::Seated;

const TICKS_PER_MS: u64 = 1_000_000;

/// The PMU with reservations, of which none is made yet.
pub(crate) fn with_reservations(pmu: Seated) -> Seated {
    pmu.with_own_reservations(TICKS_PER_MS)
}

fn reserve(pmu: &mut Seated, n: u8) {
    let reserved = pmu.arbitrate(|unit, cx| {
        let cookie = Cookie::new(5).expect("a cookie");
        let reserved = unit.reserve_for_hypervisor(CounterId::Programmable(n), cookie, cx);
        ((), reserved.expect("nobody holds it"))
    });
    assert_eq!(reserved, Some(()));
}

#[test]
fn it_is_no_part_of_what_the_guest_can_use() {
    let clocks = clocks(6);
    let backend = || -> Box<dyn CounterBackend> { Box::new(SimBackend::of(&clocks)) };
    let mut rig = Rig::new((1, 1), HostPolicy::GuestFirst, backend);
    let vcpu = rig.vcpus.remove(0);
    rig.vcpus.push(with_reservations(vcpu));
    rig.switch(0, 0);
    let two = || context(0, &[vec![(0, EVENTS[0]), (1, EVENTS[4])]], 0);
    let load = |rig: &mut Rig, spot| rig.load(spot, two(), &Mail::default());
    for (n, expected) in [(4, Err(Errno::EBUSY)), (5, Ok(()))] {
        reserve(&mut rig.vcpus[0], n);
        let loaded = load(&mut rig, Spot::Vcpu(0));
        assert_eq!(
            loaded.map(|_| ()).map_err(|refusal| refusal.errno),
            expected
        );
    }
    assert!(!rig.vcpus[0].hypervisor_can_yield());
    assert!(rig.unload(Spot::Vcpu(0)).is_some());
    assert!(rig.vcpus[0].hypervisor_can_yield());
    // The core knows of it as well.
    assert!(load(&mut rig, Spot::Core(0)).is_ok());
    assert!(!rig.vcpus[0].hypervisor_can_yield());
}

/// REQUEST of a guest's kernel: counter `n`, for the event that it writes later.
pub(crate) fn kernel_reserves(pmu: &mut Seated, n: u8) -> Outcome {
    let request = Request::Reserve {
        wanted: Wanted::This(CounterId::Programmable(n)),
        cookie: Cookie::new(7).expect("a cookie"),
        lease_ms: None,
        event: None,
    };
    let answer = pmu.arbitrate(|unit, cx| {
        let asked = unit.request(Layer::GuestKernel, request, cx);
        let (answer, effects) = asked.expect("no request is pending");
        (answer.outcome, effects)
    });
    answer.expect("there are reservations")
}

/// A rig whose only vCPU has reservations, on a core with four counters.
pub(crate) fn rig(policy: HostPolicy) -> Rig {
    rig_of(4, policy)
}

/// The same with so many counters.
fn rig_of(counters: usize, policy: HostPolicy) -> Rig {
    let clocks = clocks(counters);
    let backend = || -> Box<dyn CounterBackend> { Box::new(SimBackend::of(&clocks)) };
    let mut rig = Rig::new((1, 1), policy, backend);
    let vcpu = rig.vcpus.remove(0);
    rig.vcpus.push(with_reservations(vcpu));
    rig.switch(0, 0);
    rig
}

fn three() -> Vec<Vec<(usize, u64)>> {
    vec![vec![(0, EVENTS[0]), (1, EVENTS[4]), (2, EVENTS[1])]]
}

/// Who keeps to less than before makes room, whatever the policy promises beside it; what
/// a context relies on then nobody gets, and afterwards everybody.
#[test]
fn owners_make_room_for_a_context() {
    let shares = HostPolicy::Shares { host: Some(1) };
    for policy in [HostPolicy::GuestFirst, HostPolicy::HostFirst, shares] {
        for spot in [Spot::Vcpu(0), Spot::Core(0)] {
            make_room(policy, spot);
        }
    }
}

fn make_room(policy: HostPolicy, spot: Spot) {
    let (mut rig, cookie) = (rig_of(6, policy), Cookie::new(9).expect("a cookie"));
    rig.vcpus[0].arbitrate(|unit, cx| {
        let act = AdminAct::SetScheme(Scheme::Interacting);
        (
            (),
            unit.administer(act, cx).expect("there is such a scheme"),
        )
    });
    for n in 0..6 {
        let granted = kernel_reserves(&mut rig.vcpus[0], n);
        assert!(matches!(granted, Outcome::Granted(_)), "{granted:?}");
    }
    let two = || context(0, &[vec![(0, EVENTS[0]), (1, EVENTS[4])]], 0);
    let refused = rig.load(spot, two(), &Mail::default());
    refused.expect_err("the guest has all");
    let limit = rig.beside.expect("its owners could make room");
    assert_eq!(limit.most, 4);
    let vcpu = &mut rig.vcpus[0];
    assert_eq!(vcpu.ask_owners(limit, cookie), Outcome::Pending);
    for n in [5, 4] {
        assert_eq!(vcpu.owners_answer(), None);
        let counter = CounterId::Programmable(n);
        vcpu.arbitrate(|unit, cx| {
            let yields = true;
            let reply = unit.reply(Layer::GuestKernel, Reply { counter, yields }, cx);
            ((), reply.expect("it was asked"))
        });
    }
    let Some(Outcome::Granted(given)) = vcpu.owners_answer() else {
        panic!("{:?}", vcpu.owners_answer());
    };
    let loaded = rig.load(spot, two(), &Mail::default());
    loaded.expect("there is room");
    let refused = kernel_reserves(&mut rig.vcpus[0], 4);
    // Nobody asks the hypervisor for what the context relies on.
    let expected = Outcome::Refused(Reason::Held);
    assert_eq!(refused, expected, "{policy:?} {spot:?}");

    assert!(rig.unload(spot).is_some());
    rig.vcpus[0].give_back(given, Cookie::new(8).expect("a cookie"));
    let held = |vcpu: &Seated| {
        let unit = vcpu.claims().unit().expect("reservations");
        unit.bank().held_by(Layer::Hypervisor).len()
    };
    assert_eq!(held(&rig.vcpus[0]), 2, "that is not its cookie");
    rig.vcpus[0].give_back(given, cookie);
    assert_eq!(held(&rig.vcpus[0]), 0);
    let granted = kernel_reserves(&mut rig.vcpus[0], 4);
    assert!(matches!(granted, Outcome::Granted(_)), "{granted:?}");
}

/// Events that no counter of the guest's would leave room for: nobody is asked in vain.
#[test]
fn nobody_is_asked_for_what_does_not_help() {
    let mut rig = rig(HostPolicy::HostFirst);
    let granted = kernel_reserves(&mut rig.vcpus[0], 0);
    assert!(matches!(granted, Outcome::Granted(_)), "{granted:?}");
    let five: Vec<(usize, u64)> = (0..5).map(|n| (n, EVENTS[n % 3])).collect();
    let refused = rig.load(Spot::Vcpu(0), context(0, &[five], 0), &Mail::default());
    refused.expect_err("there are four");
    assert_eq!(rig.beside, None);
}

/// Under a policy that promises the guest nothing it has what it has reserved.
#[test]
fn contexts_are_admitted_beside_what_the_guest_has_reserved() {
    let mut rig = rig(HostPolicy::HostFirst);
    for n in [0, 1] {
        let granted = kernel_reserves(&mut rig.vcpus[0], n);
        assert!(matches!(granted, Outcome::Granted(_)), "{granted:?}");
    }
    for spot in [Spot::Vcpu(0), Spot::Core(0)] {
        let refused = rig.load(spot, context(0, &three(), 0), &Mail::default());
        let refusal = refused.expect_err("two counters are left");
        assert_eq!(refusal.errno, Errno::EBUSY);
        assert!(refusal.to_string().contains("has reserved 2"), "{refusal}");
    }
}

/// What contexts rely on cannot be reserved, and the guest is told so at once.
#[test]
fn what_cannot_be_backed_is_refused() {
    let mut rig = rig(HostPolicy::HostFirst);
    let loaded = rig.load(Spot::Core(0), context(0, &three(), 0), &Mail::default());
    assert!(loaded.is_ok());
    let vcpu = &mut rig.vcpus[0];
    assert!(matches!(kernel_reserves(vcpu, 5), Outcome::Granted(_)));
    assert_eq!(kernel_reserves(vcpu, 4), Outcome::Refused(Reason::Unbacked));
    // A write of the key, and what it leaves in REFUSAL.
    let kernel = Caller::legacy(Layer::GuestKernel);
    let (key, refusal) = (0x554d_6000, 0x554d_6248);
    assert_eq!(vcpu.wrmsr(MsrIndex(key), 9, kernel), WriteOutcome::Gp);
    assert_eq!(
        vcpu.rdmsr(MsrIndex(refusal), kernel),
        ReadOutcome::Value(19)
    );
    assert!(rig.unload(Spot::Core(0)).is_some());
    let vcpu = &mut rig.vcpus[0];
    assert!(matches!(kernel_reserves(vcpu, 4), Outcome::Granted(_)));
    assert_eq!(vcpu.wrmsr(MsrIndex(key), 9, kernel), WriteOutcome::Done);
}

/// All contexts that count beside the vCPU are in the way, whoever loaded them where.
#[test]
fn each_of_several_contexts_is_kept_its_counters() {
    let mut rig = rig(HostPolicy::HostFirst);
    let one = || context(0, &[vec![(0, EVENTS[0])]], 0);
    for spot in [Spot::Vcpu(0), Spot::Core(0), Spot::Vcpu(0)] {
        assert!(rig.load(spot, one(), &Mail::default()).is_ok());
    }
    let vcpu = &mut rig.vcpus[0];
    assert!(matches!(kernel_reserves(vcpu, 5), Outcome::Granted(_)));
    assert_eq!(kernel_reserves(vcpu, 4), Outcome::Refused(Reason::Unbacked));
    let refused = rig.load(Spot::Core(0), one(), &Mail::default());
    let refusal = refused.expect_err("nothing is left");
    for part in [
        "has reserved 1",
        "context 1 has 1",
        "context 2 has 1",
        "context 3 has 1",
    ] {
        assert!(refusal.to_string().contains(part), "{refusal}");
    }
    assert!(rig.unload(Spot::Vcpu(0)).is_some());
    let vcpu = &mut rig.vcpus[0];
    assert!(matches!(kernel_reserves(vcpu, 4), Outcome::Granted(_)));
}

/// What a vCPU is promised on one core has to have room on the next.
#[test]
fn a_core_says_for_how_many_promises_it_has_room() {
    let mut rig = rig(HostPolicy::HostFirst);
    let room = |rig: &mut Rig| rig.core(0, |core| core.room());
    assert_eq!(room(&mut rig), usize::MAX, "nobody else relies on anything");
    let relies = |rig: &mut Rig| rig.switch(0, 0).relies_on();
    assert_eq!(relies(&mut rig), 0);
    assert!(matches!(
        kernel_reserves(&mut rig.vcpus[0], 2),
        Outcome::Granted(_)
    ));
    assert_eq!(relies(&mut rig), 1);
    let one = || {
        context(
            0,
            &[vec![(0, EVENTS[0])], vec![(0, EVENTS[0]), (1, EVENTS[4])]],
            1_000_000,
        )
    };
    assert!(rig.load(Spot::Vcpu(0), one(), &Mail::default()).is_ok());
    assert_eq!(relies(&mut rig), 3, "the larger set counts");
    assert!(rig.unload(Spot::Vcpu(0)).is_some());
    assert!(rig.load(Spot::Core(0), one(), &Mail::default()).is_ok());
    assert_eq!(room(&mut rig), 2);
    assert_eq!(relies(&mut rig), 1, "that of the core stays there");
}

/// More counters than the core has: the reserved one has its own all the time, whichever
/// of the others wait.
#[test]
fn what_is_reserved_takes_no_turns() {
    let turn = std::num::NonZeroU64::new(1_000).expect("not zero");
    let clocks = clocks(2);
    let model = PmuModel::parse("amd-core").expect("a model");
    let pmu = Seated::detached(OwnerId(0), model, Grant::everything())
        .with_oversubscription(Oversubscribe::Multiplex { timeslice: turn });
    let mut pmu = with_reservations(pmu);
    pmu.attach(Box::new(CorePmu::new(Box::new(SimBackend::of(&clocks)))));
    let kernel = Caller::legacy(Layer::GuestKernel);
    let owner = Caller {
        layer: Layer::GuestKernel,
        presented: 7,
    };
    let mut now = 0;
    let mut run = |pmu: &mut Seated, times: u32| {
        for _ in 0..times {
            pmu.observe(Progress::Entered { tsc: Tsc(now) });
            now += 700;
            pmu.observe(Progress::Left {
                tsc: Tsc(now),
                halted: Ticks(0),
                ring: Some(Ring::Kernel),
            });
        }
    };
    // Three counters take turns on two before the fourth is reserved.
    for n in 0..3 {
        pmu.wrmsr(MsrIndex(0xc001_0200 + 2 * n), EVENTS[0] | 1 << 22, kernel);
    }
    run(&mut pmu, 20);
    assert!(matches!(kernel_reserves(&mut pmu, 5), Outcome::Granted(_)));
    let select = MsrIndex(0x554d_6140 + 5);
    assert_eq!(
        pmu.wrmsr(select, EVENTS[0] | 1 << 22, owner),
        WriteOutcome::Done
    );
    run(&mut pmu, 50);
    let report = pmu.report();
    for one in &report {
        let whole = one.time_enabled == one.time_running;
        let reserved = one.counter == CounterId::Programmable(5);
        assert_eq!(whole, reserved, "{one:?}");
        assert!(one.time_running.0 > 0, "{one:?}");
    }
    assert_eq!(report.len(), 4);
}

/// Numbers that look random and are the same in each run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        usize::try_from(self.0 >> 33).expect("31 bits") % end
    }
}

/// The other core with the most room.
#[derive(Debug)]
struct Room(usize);

impl OtherCores for Room {
    fn most_room(&self) -> usize {
        self.0
    }
}

/// What a schedule of 16 vCPUs on 4 cores has come to.
#[derive(Debug, Default)]
struct Shares {
    /// Requests that were made and granted.
    asked: usize,
    granted: usize,
    /// Those for which some core has room.
    possible: usize,
    moves: usize,
    /// Slices that vCPUs ran, and ticks for which a reserved counter was to count and did.
    slices: usize,
    wanted: u64,
    counted: u64,
    stays: usize,
    /// Counters of the tools' that were lost.
    lost: usize,
}

/// vCPUs sleep and wake, reserve and give back; tools hold counters of half of the cores.
/// A core with two runnable vCPUs more than another gives one away: by load alone, or
/// only where `promises` have room.
fn schedule(seed: u64, promises: bool) -> Shares {
    const VCPUS: usize = 16;
    const CORES: usize = 4;
    const SLICE: u64 = 1_000;
    let clocks = clocks(6);
    let backend = || -> Box<dyn CounterBackend> { Box::new(SimBackend::of(&clocks)) };
    let mut rig = Rig::new((16, CORES), HostPolicy::HostFirst, backend);
    rig.vcpus = rig.vcpus.drain(..).map(with_reservations).collect();
    for vcpu in 0..VCPUS {
        rig.switch(vcpu, vcpu % CORES);
    }
    for core in 0..CORES / 2 {
        let tool = rig.load(Spot::Core(core), context(0, &three(), 0), &Mail::default());
        assert!(tool.is_ok());
        assert_eq!(rig.outcome(Spot::Core(core), Call::Start(None)), Ok(()));
    }
    let mut dice = Dice(seed);
    let mut shares = Shares::default();
    let (mut awake, mut home) = ([true; VCPUS], [0; VCPUS]);
    (0..VCPUS).for_each(|vcpu| home[vcpu] = vcpu % CORES);
    let mut turn = [0; CORES];
    for _ in 0..400 {
        for (core, turn) in turn.iter_mut().enumerate() {
            let ready = |on: usize| (0..VCPUS).filter(move |&one| home[one] == on && awake[one]);
            let count = ready(core).count();
            let Some(vcpu) = ready(core).nth(*turn % count.max(1)) else {
                continue;
            };
            *turn += 1;
            rig.switch(vcpu, core);
            let room: Vec<usize> = (0..CORES)
                .map(|one| rig.core(one, |core| core.room()))
                .collect();
            let others = (0..CORES).filter(|&one| promises && one != core);
            let most = others.map(|one| room[one]).max().unwrap_or(0);
            rig.vcpus[vcpu]
                .claims_mut()
                .set_other_cores(Arc::new(Room(most)));
            act(&mut rig, vcpu, &mut dice, &mut shares);
            if let Some(needs) = rig.vcpus[vcpu].needs_room() {
                let load = |core: usize| {
                    (0..VCPUS)
                        .filter(|&one| home[one] == core && awake[one])
                        .count()
                };
                let with_room = (0..CORES).filter(|&one| one != core && room[one] >= needs);
                let to = with_room
                    .min_by_key(|&one| load(one))
                    .expect("a core has room");
                rig.switch(vcpu, to);
                home[vcpu] = to;
                shares.moves += 1;
                let n = u8::try_from(needs - 1).expect("a few");
                use_granted(&mut rig, vcpu, n, &mut shares);
                continue;
            }
            let left = Progress::Left {
                tsc: Tsc(rig.tsc + SLICE),
                halted: Ticks(0),
                ring: Some(Ring::Kernel),
            };
            rig.run(vcpu, core, left);
            shares.slices += 1;
            if dice.below(3) == 0 {
                awake[vcpu] = false;
            }
        }
        for one in &mut awake {
            *one |= dice.below(6) == 0;
        }
        let load = |core: usize| {
            (0..VCPUS)
                .filter(|&one| home[one] == core && awake[one])
                .count()
        };
        let from = (0..CORES).max_by_key(|&core| load(core)).expect("a core");
        let to = (0..CORES).min_by_key(|&core| load(core)).expect("a core");
        if load(from) < load(to) + 2 {
            continue;
        }
        let room = rig.core(to, |core| core.room());
        let candidates: Vec<_> = (0..VCPUS)
            .filter(|&one| home[one] == from && awake[one])
            .collect();
        let fits = |rig: &mut Rig, one: usize| rig.switch(one, from).relies_on() <= room;
        match candidates
            .into_iter()
            .find(|&one| !promises || fits(&mut rig, one))
        {
            Some(one) => {
                rig.switch(one, to);
                home[one] = to;
            }
            None => shares.stays += 1,
        }
    }
    for (core, n) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] {
        let (_, how) = rig.read(Spot::Core(core), 0, n);
        shares.lost += usize::from(how == PFM_PROV_LOST);
    }
    for vcpu in 0..VCPUS {
        settle(&mut rig, vcpu, &mut shares);
    }
    shares
}

/// The guest of a vCPU that runs gives back, asks for a counter, or does neither.
fn act(rig: &mut Rig, vcpu: usize, dice: &mut Dice, shares: &mut Shares) {
    match dice.below(8) {
        0 => settle(rig, vcpu, shares),
        1..4 => {
            let held = rig.vcpus[vcpu].relies_on();
            let n = u8::try_from(held).expect("a few");
            if held == 6 {
                return;
            }
            shares.asked += 1;
            // Two cores have no tool.
            shares.possible += usize::from(held < 6);
            if let Outcome::Granted(_) = kernel_reserves(&mut rig.vcpus[vcpu], n) {
                use_granted(rig, vcpu, n, shares);
            }
        }
        _ => {}
    }
}

/// A counter was granted, and counts from now on.
fn use_granted(rig: &mut Rig, vcpu: usize, n: u8, shares: &mut Shares) {
    let unit = rig.vcpus[vcpu].claims().unit().expect("reservations");
    let answer = unit.answer(Layer::GuestKernel).outcome;
    assert!(matches!(answer, Outcome::Granted(_)), "{answer:?}");
    shares.granted += 1;
    let select = MsrIndex(0x554d_6140 + u32::from(n));
    let owner = Caller {
        layer: Layer::GuestKernel,
        presented: 7,
    };
    let wrote = rig.vcpus[vcpu].wrmsr(select, EVENTS[0] | 1 << 22, owner);
    assert_eq!(wrote, WriteOutcome::Done);
}

/// Adds up what the reserved counters of a vCPU counted, and gives all of them back.
fn settle(rig: &mut Rig, vcpu: usize, shares: &mut Shares) {
    let core = rig.home[vcpu].expect("it has run");
    rig.switch(vcpu, core);
    let pmu = &mut rig.vcpus[vcpu];
    for one in pmu.report() {
        shares.wanted += one.time_enabled.0;
        shares.counted += one.time_running.0;
        let CounterId::Programmable(n) = one.counter else {
            continue;
        };
        let release = Request::Release {
            counter: CounterId::Programmable(n),
            cookie: Cookie::new(7).expect("a cookie"),
        };
        pmu.arbitrate(|unit, cx| {
            let (_, effects) = unit
                .request(Layer::GuestKernel, release, cx)
                .expect("it is ours");
            ((), effects)
        });
    }
}

/// Promises are kept whoever goes where, and cost little of what a scheduler that knows
/// nothing of them would do. The figures are in docs/guide/cores.md.
#[test]
fn a_scheduler_that_knows_of_promises_keeps_them() {
    let (mut knowing, mut blind) = (Shares::default(), Shares::default());
    for seed in 0..20 {
        for (all, promises) in [(&mut knowing, true), (&mut blind, false)] {
            let one = schedule(seed, promises);
            all.asked += one.asked;
            all.granted += one.granted;
            all.possible += one.possible;
            all.moves += one.moves;
            all.slices += one.slices;
            all.wanted += one.wanted;
            all.counted += one.counted;
            all.stays += one.stays;
            all.lost += one.lost;
        }
    }
    println!("knowing {knowing:?}\nblind   {blind:?}");
    assert!(
        knowing.wanted > 1_000_000 && knowing.asked > 1_000,
        "{knowing:?}"
    );
    for all in [&knowing, &blind] {
        assert_eq!(
            all.counted, all.wanted,
            "what is reserved comes first anywhere"
        );
    }
    assert_eq!(knowing.lost, 0, "tools rely on their counters");
    assert_eq!(
        knowing.granted, knowing.possible,
        "vCPUs go where there is room"
    );
    assert!(blind.lost > 0, "the schedule needs no knowledge: {blind:?}");
}

/// What others do as fast as they can.
#[derive(Clone, Copy, Debug)]
enum Step {
    Reserve(usize, u8),
    GiveBack(usize, u8),
    Select(usize, u32, bool),
    Load(Spot, bool),
    Start(Spot),
    Unload(Spot),
    Run(usize, u64),
    Budget(usize, u8),
}

fn steps() -> impl Strategy<Value = Step> {
    let spot = || prop_oneof![Just(Spot::Core(0)), (0..2usize).prop_map(Spot::Vcpu)];
    prop_oneof![
        3 => (0..2usize, 0..5u8).prop_map(|(vcpu, n)| Step::Reserve(vcpu, n)),
        3 => (0..2usize, 0..5u8).prop_map(|(vcpu, n)| Step::GiveBack(vcpu, n)),
        2 => (0..2usize, 0..5u32, any::<bool>()).prop_map(|(vcpu, n, on)| Step::Select(vcpu, n, on)),
        3 => (spot(), any::<bool>()).prop_map(|(spot, yields)| Step::Load(spot, yields)),
        2 => spot().prop_map(Step::Start),
        3 => spot().prop_map(Step::Unload),
        4 => (0..2usize, 1..5_000u64).prop_map(|(vcpu, ticks)| Step::Run(vcpu, ticks)),
        1 => (0..2usize, 1..7u8).prop_map(|(vcpu, most)| Step::Budget(vcpu, most)),
    ]
}

proptest! {
    /// Guests reserve and give back, tools load and unload, and budgets change: a counter
    /// that is reserved all the while counts every event.
    #[test]
    fn a_reserved_count_loses_nothing_to_anybody(
        steps in proptest::collection::vec(steps(), 1..80),
        policy in prop_oneof![
            Just(HostPolicy::GuestFirst),
            Just(HostPolicy::HostFirst),
            Just(HostPolicy::Shares { host: None }),
        ],
    ) {
        let (here, elsewhere) = (clocks(4), clocks(64));
        let backend = || -> Box<dyn CounterBackend> { Box::new(SimBackend::of(&here)) };
        let mut rig = Rig::new((2, 1), policy, backend);
        rig.vcpus = rig.vcpus.drain(..).map(with_reservations).collect();
        let mut truth = Truth::new(&elsewhere, 0);
        let mut expected = 0;
        rig.switch(0, 0);
        let granted = kernel_reserves(&mut rig.vcpus[0], 5);
        prop_assert!(matches!(granted, Outcome::Granted(_)), "{granted:?}");
        let owner = Caller { layer: Layer::GuestKernel, presented: 7 };
        let select = MsrIndex(0x554d_6140 + 5);
        let on = EVENTS[0] | 1 << 22;
        prop_assert_eq!(rig.vcpus[0].wrmsr(select, on, owner), WriteOutcome::Done);
        for step in steps {
            match step {
                Step::Reserve(vcpu, n) => {
                    rig.switch(vcpu, 0);
                    let _ = kernel_reserves(&mut rig.vcpus[vcpu], n);
                }
                Step::GiveBack(vcpu, n) => {
                    let release = Request::Release {
                        counter: CounterId::Programmable(n),
                        cookie: Cookie::new(7).expect("a cookie"),
                    };
                    rig.switch(vcpu, 0).arbitrate(|unit, cx| {
                        let answer = unit.request(Layer::GuestKernel, release, cx);
                        ((), answer.map_or(Effects::NONE, |(_, effects)| effects))
                    });
                }
                Step::Select(vcpu, n, is_on) => {
                    let msr = MsrIndex(0xc001_0200 + 2 * n);
                    let kernel = Caller::legacy(Layer::GuestKernel);
                    rig.switch(vcpu, 0).wrmsr(msr, if is_on { on } else { 0 }, kernel);
                }
                Step::Load(spot, yields) => {
                    let flags = if yields { PFM_FL_PREEMPTIBLE } else { 0 };
                    let two = vec![vec![(0, EVENTS[0]), (1, EVENTS[4])]];
                    let _ = rig.load(spot, context(flags, &two, 0), &Mail::default());
                }
                Step::Start(spot) => {
                    let _ = rig.outcome(spot, Call::Start(None));
                }
                Step::Unload(spot) => drop(rig.unload(spot)),
                Step::Run(vcpu, ticks) => {
                    let entered = rig.tsc;
                    let left = Progress::Left {
                        tsc: Tsc(entered + ticks),
                        halted: Ticks(0),
                        ring: Some(Ring::Kernel),
                    };
                    rig.run(vcpu, 0, left);
                    if vcpu == 0 {
                        expected += truth.run(entered, &left)[0];
                    }
                }
                Step::Budget(vcpu, most) => {
                    let most = PerKind { programmable: most, ..PerKind::ALL };
                    // A budget that takes reserved counters may take this one.
                    let held = rig.vcpus[vcpu].claims().unit();
                    let held = held.map_or(0, |unit| unit.bank().held().len());
                    if u32::from(most.programmable) >= held {
                        let _ = rig.switch(vcpu, 0).set_budget(most, 0, None);
                    }
                }
            }
            let reports = rig.switch(0, 0).report();
            let five = CounterId::Programmable(5);
            let report = reports.iter().find(|one| one.counter == five).expect("in use");
            prop_assert_eq!(report.time_enabled, report.time_running, "{:?}", step);
            let counted = match report.reading {
                Reading::Counted { value, .. } => value,
                Reading::Unavailable(reason) => panic!("{step:?}: {reason}"),
            };
            prop_assert_eq!(counted, expected, "{:?}", step);
        }
    }
}
