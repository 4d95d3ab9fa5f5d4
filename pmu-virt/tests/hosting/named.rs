//! Requests that name an event, on a core whose counters differ: a physical counter that
//! can count it is kept, or the request is refused when it is made.

use std::sync::Arc;

use arbiter::{
    Caller, Control, CounterId, CounterSet, GuardLimits, Layer, NamedEvent, NoAudit, NoEntropy,
    PcrConfig, PcrUnit, PerKind, Phase, Policy, Scheme,
};
use perfmon_abi::wire::Errno;
use pmu_virt::accounting::{self, CounterAccount, CounterState};
use pmu_virt::perfmon::HostPolicy;
use pmu_virt::{
    CorePmu, CounterBackend, Grant, Holdings, LossReason, MsrIndex, OwnerId, PmuModel, Progress,
    RateTable, ReadOutcome, Reading, Reservations, Ring, SimBackend, SimClocks, Ticks, Tsc,
    WriteOutcome,
};
use proptest::prelude::{Strategy, any, prop_assert, proptest};

use super::rig::{Mail, Rig, Spot, context};
use super::truth::KHZ;
use crate::seated::Seated;

/// Event selects, and the slots that can count each; of the first every one can.
const CYCLES: u64 = 0x76;
const INSTRUCTIONS: u64 = 0xc0;
const BRANCHES: u64 = 0xc2;
const MISSES: u64 = 0xc3;
const EVENTS: [u64; 4] = [CYCLES, INSTRUCTIONS, BRANCHES, MISSES];

const BASE: u32 = 0x554d_6000;
const SELECT: u32 = BASE + 0x140;
const REQUEST: MsrIndex = MsrIndex(BASE + 0x243);
const ANSWER: MsrIndex = MsrIndex(BASE + 0x244);
const GRANTED: MsrIndex = MsrIndex(BASE + 0x245);
const NOTICE: MsrIndex = MsrIndex(BASE + 0x246);
const REPLY: MsrIndex = MsrIndex(BASE + 0x247);
const ENABLED: u64 = 0x43_0000;
const COUNTERS: u8 = 6;

fn clocks(instructions: &str, branches: &str) -> SimClocks {
    let text = format!(
        "counters = 4\n[event.cycles]\nrate = 100\n[event.branch-misses]\nrate = 10\n\
         [event.instructions]\nrate = 50\nslots = [{instructions}]\n\
         [event.branches]\nrate = 20\nslots = [{branches}]\n"
    );
    let table = RateTable::parse(&text, "rates").unwrap_or_else(|error| panic!("{error}"));
    SimClocks::new(table, KHZ.get())
}

/// A vCPU whose firmware (in SMM) and kernel are both there to ask and to be asked.
fn with_layers(pmu: Seated, scheme: Scheme, holdings: &Holdings) -> Seated {
    let mut policy = Policy::default();
    policy.kernel.min = PerKind::default();
    policy.grace_ms = 5;
    // A master takes from the firmware what the kernel is short of.
    policy.kernel.priority = u8::from(scheme == Scheme::SingleMaster);
    let model = PmuModel::parse("amd-core").expect("a model");
    let phase = Phase::new(true);
    phase.end();
    let unit = PcrUnit::new(PcrConfig {
        counters: model.counts(),
        widths: model.widths(),
        policy,
        scheme,
        guard: GuardLimits::with_ticks_per_ms(1),
        ticks_per_ms: 1,
        phase: Arc::new(phase),
        legacy: None,
        smm: true,
    });
    pmu.with_reservations(Reservations {
        unit,
        entropy: Box::new(NoEntropy),
        audit: Box::new(NoAudit),
        holdings: holdings.clone(),
    })
}

fn seated(scheme: Scheme, clocks: &SimClocks) -> Seated {
    let model = PmuModel::parse("amd-core").expect("a model");
    let pmu = Seated::detached(OwnerId(0), model, Grant::everything());
    let mut pmu = with_layers(pmu, scheme, &Holdings::default());
    pmu.attach(Box::new(CorePmu::new(Box::new(SimBackend::of(clocks)))));
    pmu
}

fn own(layer: Layer) -> Caller {
    Caller {
        layer,
        presented: 0x70 + u64::from(layer.code()),
    }
}

/// What REQUEST comes to: the counters that are granted, or the word of ANSWER.
fn request(pmu: &mut Seated, layer: Layer, value: u64) -> Result<CounterSet, u64> {
    let written = pmu.wrmsr(REQUEST, value, own(layer));
    assert_eq!(written, WriteOutcome::Done, "{value:#x}");
    answer(pmu, layer)
}

fn answer(pmu: &mut Seated, layer: Layer) -> Result<CounterSet, u64> {
    let answer = read(pmu, ANSWER, layer);
    match answer & 0xf {
        1 => Ok(CounterSet::from_bits(read(pmu, GRANTED, layer))),
        _ => Err(answer & 0xff0f),
    }
}

fn read(pmu: &mut Seated, msr: MsrIndex, layer: Layer) -> u64 {
    match pmu.rdmsr(msr, own(layer)) {
        ReadOutcome::Value(value) => value,
        other => panic!("{msr:?}: {other:?}"),
    }
}

/// The counter of the next notice that asks.
fn asked(pmu: &mut Seated, layer: Layer) -> Option<u64> {
    loop {
        let notice = read(pmu, NOTICE, layer);
        match notice & 0xf {
            0 => return None,
            1 => return Some(notice >> 8 & 0xff),
            _ => {}
        }
    }
}

/// A value for REQUEST: so many counters for an event.
fn any_for(count: u64, select: u64) -> u64 {
    1 | count << 8
        | NamedEvent::of_select(select)
            .expect("an event")
            .request_bits()
}

const REFUSED_UNBACKED: Result<CounterSet, u64> = Err(2 | 19 << 8);
const PENDING: Result<CounterSet, u64> = Err(3);

fn pmcs(all: &[u8]) -> Result<CounterSet, u64> {
    Ok(all.iter().map(|n| CounterId::Programmable(*n)).collect())
}

fn select(pmu: &mut Seated, layer: Layer, n: u8, event: u64) {
    let msr = MsrIndex(SELECT + u32::from(n));
    assert_eq!(
        pmu.wrmsr(msr, event | ENABLED, own(layer)),
        WriteOutcome::Done
    );
}

/// Whether a counter that selects something counts.
fn counts(pmu: &Seated, n: u8) -> bool {
    let reports = pmu.report();
    let mut reports = reports.iter();
    let own = reports.find(|one| one.counter == CounterId::Programmable(n));
    own.is_some_and(|one| !matches!(one.reading, Reading::Unavailable { .. }))
}

#[test]
fn a_request_is_refused_when_nothing_can_count_its_event() {
    let kernel = Layer::GuestKernel;
    let mut pmu = seated(Scheme::Independent, &clocks("0", "0, 1"));
    // Of two that only one can count neither is granted.
    assert_eq!(
        request(&mut pmu, kernel, any_for(2, INSTRUCTIONS)),
        REFUSED_UNBACKED
    );
    assert_eq!(
        request(&mut pmu, kernel, any_for(1, INSTRUCTIONS)),
        pmcs(&[5])
    );
    assert_eq!(
        request(&mut pmu, kernel, any_for(1, INSTRUCTIONS)),
        REFUSED_UNBACKED
    );
    // It takes the place of one of the branches', and of one of all.
    assert_eq!(
        request(&mut pmu, kernel, any_for(2, BRANCHES)),
        REFUSED_UNBACKED
    );
    assert_eq!(request(&mut pmu, kernel, any_for(1, BRANCHES)), pmcs(&[4]));
    assert_eq!(request(&mut pmu, kernel, 1 | 3 << 8), REFUSED_UNBACKED);
    assert_eq!(request(&mut pmu, kernel, 1 | 2 << 8), pmcs(&[2, 3]));
    // What nobody counts at all, and an event that this model has no bits for.
    assert_eq!(request(&mut pmu, kernel, 2 | 1 << 4 | 4 << 8), pmcs(&[4]));
    assert_eq!(
        request(&mut pmu, kernel, any_for(1, 0x1ff)),
        REFUSED_UNBACKED
    );
    // Each counts what it was granted for, in whatever order they begin.
    assert_eq!(request(&mut pmu, kernel, any_for(1, BRANCHES)), pmcs(&[4]));
    for (n, event) in [(2, CYCLES), (3, MISSES), (4, BRANCHES), (5, INSTRUCTIONS)] {
        select(&mut pmu, kernel, n, event);
    }
    assert!((2..6).all(|n| counts(&pmu, n)), "{:?}", pmu.report());
    // Another event for one that is held already: only if that has room.
    let renamed = |n: u64, event| any_for(n, event) | 1 << 4;
    assert_eq!(
        request(&mut pmu, kernel, renamed(2, INSTRUCTIONS)),
        REFUSED_UNBACKED
    );
    assert_eq!(request(&mut pmu, kernel, renamed(5, CYCLES)), pmcs(&[5]));
}

#[test]
fn what_is_selected_later_takes_no_room_that_was_promised() {
    let kernel = Layer::GuestKernel;
    let mut pmu = seated(Scheme::Independent, &clocks("0", "0, 1"));
    assert_eq!(
        request(&mut pmu, kernel, any_for(1, INSTRUCTIONS)),
        pmcs(&[5])
    );
    assert_eq!(request(&mut pmu, kernel, 1 | 2 << 8), pmcs(&[3, 4]));
    // Nobody counts instructions yet, and the place is kept all the same.
    select(&mut pmu, kernel, 4, INSTRUCTIONS);
    assert!(!counts(&pmu, 4));
    let unbacked = 8 | 4 << 8 | 2 << 16 | 19 << 24;
    assert_eq!(read(&mut pmu, NOTICE, kernel), unbacked);
    assert_eq!(read(&mut pmu, NOTICE, kernel), 0, "told once");
    select(&mut pmu, kernel, 3, BRANCHES);
    assert!(counts(&pmu, 3));
    select(&mut pmu, kernel, 4, BRANCHES);
    assert!(!counts(&pmu, 4), "slot 1 is taken and slot 0 is kept");
    assert_eq!(read(&mut pmu, NOTICE, kernel), unbacked);
    select(&mut pmu, kernel, 5, INSTRUCTIONS);
    assert!(counts(&pmu, 5) && counts(&pmu, 3) && !counts(&pmu, 4));
    // When it is given back another one may have it.
    assert_eq!(request(&mut pmu, kernel, 2 | 1 << 4 | 5 << 8), pmcs(&[5]));
    assert!(counts(&pmu, 4) && counts(&pmu, 3));
    assert_eq!(read(&mut pmu, NOTICE, kernel), 0);
}

/// Four counters for any event are held, and slot 0 is one of them: whichever owner yields
/// makes room for an event that only slot 0 counts.
#[test]
fn another_layer_is_asked_for_a_counter_that_helps() {
    let (kernel, firmware) = (Layer::GuestKernel, Layer::Firmware);
    let mut pmu = seated(Scheme::Interacting, &clocks("0", "0, 1"));
    assert_eq!(
        request(&mut pmu, firmware, any_for(1, INSTRUCTIONS)),
        pmcs(&[5])
    );
    assert_eq!(request(&mut pmu, firmware, 1 | 3 << 8), pmcs(&[2, 3, 4]));
    // Two positions are free, and any of the firmware's counters is not what is short.
    assert_eq!(request(&mut pmu, kernel, any_for(1, INSTRUCTIONS)), PENDING);
    assert_eq!(asked(&mut pmu, firmware), Some(5));
    let yielded = pmu.wrmsr(REPLY, 1 | 5 << 8, own(firmware));
    assert_eq!(yielded, WriteOutcome::Done);
    assert_eq!(answer(&mut pmu, kernel), pmcs(&[5]));
    select(&mut pmu, kernel, 5, INSTRUCTIONS);
    assert!(counts(&pmu, 5));
    // The other way round: room for any event comes from any of them.
    assert_eq!(request(&mut pmu, firmware, any_for(1, CYCLES)), PENDING);
    assert_eq!(asked(&mut pmu, kernel), Some(5));
    // Of two one more is needed, which is looked for when the first has come.
    let withdrawn = pmu.wrmsr(REQUEST, 3, own(firmware));
    assert_eq!(withdrawn, WriteOutcome::Done);
    assert_eq!(request(&mut pmu, kernel, any_for(2, CYCLES)), PENDING);
    for n in [4, 3] {
        assert_eq!(asked(&mut pmu, firmware), Some(n));
        let yielded = pmu.wrmsr(REPLY, 1 | n << 8, own(firmware));
        assert_eq!(yielded, WriteOutcome::Done);
    }
    assert_eq!(answer(&mut pmu, kernel), pmcs(&[3, 4]));
}

/// Each counter that changes hands changes what there is room for; two that are due at once
/// both come.
#[test]
fn two_counters_are_revoked_at_once() {
    let (kernel, firmware) = (Layer::GuestKernel, Layer::Firmware);
    let mut pmu = seated(Scheme::SingleMaster, &clocks("0", "0, 1"));
    assert_eq!(request(&mut pmu, firmware, 1 | 4 << 8), pmcs(&[2, 3, 4, 5]));
    assert_eq!(request(&mut pmu, kernel, any_for(2, BRANCHES)), PENDING);
    pmu.tick(5);
    assert_eq!(answer(&mut pmu, kernel), pmcs(&[4, 5]));
    for n in [4, 5] {
        select(&mut pmu, kernel, n, BRANCHES);
    }
    assert!(counts(&pmu, 4) && counts(&pmu, 5));
}

/// A select that does not count yet is in nobody's way.
#[test]
fn what_is_only_selected_keeps_no_room() {
    let kernel = Layer::GuestKernel;
    let mut pmu = seated(Scheme::Independent, &clocks("0", "0, 1"));
    assert_eq!(
        request(&mut pmu, kernel, any_for(1, INSTRUCTIONS)),
        pmcs(&[5])
    );
    assert_eq!(request(&mut pmu, kernel, 1 | 1 << 8), pmcs(&[4]));
    let stopped = MsrIndex(SELECT + 4);
    let written = pmu.wrmsr(stopped, INSTRUCTIONS | 0x3_0000, own(kernel));
    assert_eq!(written, WriteOutcome::Done);
    assert_eq!(request(&mut pmu, kernel, 1 | 2 << 8), pmcs(&[2, 3]));
    // What was promised stays so while its owner counts something else there.
    select(&mut pmu, kernel, 5, CYCLES);
    select(&mut pmu, kernel, 4, INSTRUCTIONS);
    assert!(counts(&pmu, 5) && !counts(&pmu, 4));
    assert_eq!(read(&mut pmu, NOTICE, kernel) >> 24, 19);
    select(&mut pmu, kernel, 5, INSTRUCTIONS);
    assert!(counts(&pmu, 5) && !counts(&pmu, 4));
    assert_eq!(read(&mut pmu, NOTICE, kernel), 0);
}

/// A request that waits for a look on its core asks to get there.
#[test]
fn a_request_is_looked_at_when_its_vcpu_is_back() {
    let (kernel, firmware) = (Layer::GuestKernel, Layer::Firmware);
    let mut pmu = seated(Scheme::Interacting, &clocks("0", "0, 1"));
    let leased = any_for(1, INSTRUCTIONS) | 1 << 16;
    assert_eq!(request(&mut pmu, firmware, leased), pmcs(&[5]));
    pmu.tick(8);
    assert_eq!(request(&mut pmu, kernel, any_for(1, INSTRUCTIONS)), PENDING);
    let core = pmu.park().expect("a core");
    assert!(!pmu.waits_for_core());
    pmu.tick(10);
    assert!(pmu.waits_for_core(), "the firmware's lease has ended");
    pmu.attach(core);
    assert!(!pmu.waits_for_core());
    assert_eq!(answer(&mut pmu, kernel), pmcs(&[5]));
}

/// A vCPU that is on a core need not be brought to one: what is due takes place, whoever
/// cannot lend that core.
#[test]
fn leases_end_while_the_core_of_a_vcpu_is_not_lent() {
    let (kernel, firmware) = (Layer::GuestKernel, Layer::Firmware);
    let check = |is_on_its_core: bool, left: &[u8]| {
        let mut pmu = seated(Scheme::Interacting, &clocks("0", "0, 1"));
        let leased = any_for(1, INSTRUCTIONS) | 1 << 16;
        assert_eq!(request(&mut pmu, firmware, leased), pmcs(&[5]));
        assert_eq!(
            request(&mut pmu, firmware, 1 | 1 << 8 | 2 << 16),
            pmcs(&[4])
        );
        pmu.tick(8);
        assert_eq!(request(&mut pmu, kernel, any_for(1, INSTRUCTIONS)), PENDING);
        if !is_on_its_core {
            let _ = pmu.park();
        }
        for tsc in [10, 20] {
            pmu.parts().0.tick(None, Tsc(tsc));
        }
        let held = (pmu.claims().unit()).map(|unit| unit.bank().held_by(firmware));
        assert_eq!(
            Ok(held.expect("reservations")),
            pmcs(left),
            "{is_on_its_core}"
        );
    };
    check(true, &[]);
    check(false, &[4]);
}

/// What a context relies on is not taken by an event that was never named.
#[test]
fn a_later_select_leaves_contexts_what_they_rely_on() {
    let kernel = Layer::GuestKernel;
    let clocks = clocks("0", "0, 1");
    let backend = || -> Box<dyn CounterBackend> { Box::new(SimBackend::of(&clocks)) };
    let mut rig = Rig::new((1, 1), HostPolicy::HostFirst, backend);
    let vcpu = rig.vcpus.remove(0);
    let vcpu = with_layers(vcpu, Scheme::Independent, &Holdings::default());
    rig.vcpus.push(vcpu);
    rig.switch(0, 0);
    let tool = context(0, &[vec![(0, INSTRUCTIONS | 0x43_0000)]], 0);
    let tool = rig.load(Spot::Core(0), tool, &Mail::default());
    assert!(tool.is_ok(), "{tool:?}");
    let pmu = &mut rig.vcpus[0];
    assert_eq!(
        request(pmu, kernel, any_for(1, INSTRUCTIONS)),
        REFUSED_UNBACKED
    );
    assert_eq!(request(pmu, kernel, 1 | 1 << 8), pmcs(&[5]));
    select(pmu, kernel, 5, INSTRUCTIONS);
    assert!(!counts(pmu, 5));
    assert_eq!(request(pmu, kernel, 1 | 2 << 8), pmcs(&[3, 4]));
    assert!(rig.unload(Spot::Core(0)).is_some());
    select(&mut rig.vcpus[0], kernel, 5, INSTRUCTIONS);
    assert!(counts(&rig.vcpus[0], 5));
}

/// An owner that lends its counter hears by the page too that it was cleared while it counted;
/// one that gives it back knows.
#[test]
fn a_counter_that_is_lent_is_shown_as_taken() {
    let (kernel, firmware) = (Layer::GuestKernel, Layer::Firmware);
    let mut pmu = seated(Scheme::Interacting, &clocks("0", "0, 1"));
    let page = |pmu: &mut Seated, n: u32| {
        // Takes a snapshot.
        read(pmu, MsrIndex(accounting::MSR_BASE), kernel);
        let status = MsrIndex(accounting::MSR_BASE + 0x100 + 4 * n);
        read(pmu, status, kernel)
    };
    assert_eq!(request(&mut pmu, firmware, 1 | 2 << 8), pmcs(&[4, 5]));
    for n in [4, 5] {
        select(&mut pmu, firmware, n, CYCLES);
    }
    let lends = Control::INITIAL.with_lend(true).bits();
    let control = MsrIndex(BASE + 0x80 + 5);
    assert_eq!(pmu.wrmsr(control, lends, own(firmware)), WriteOutcome::Done);
    assert_eq!(request(&mut pmu, kernel, 1 | 1 << 4 | 5 << 8), pmcs(&[5]));
    // Legacy software reads the page, and may use the counter from here on.
    let access_key = MsrIndex(BASE + 0x40 + 5);
    assert_eq!(pmu.wrmsr(access_key, 0, own(kernel)), WriteOutcome::Done);
    assert_eq!(request(&mut pmu, firmware, 2 | 1 << 4 | 4 << 8), pmcs(&[4]));
    let unused = |loss| CounterAccount {
        state: CounterState::Unused,
        reading: None,
        loss,
    };
    let taken = Some(LossReason::Taken);
    assert_eq!(page(&mut pmu, 5), unused(taken).status());
    assert_eq!(page(&mut pmu, 4), unused(None).status());
}

/// Contexts are admitted beside what vCPUs have named, on each core, and a core whose
/// context was there before says whom it has no room for.
#[test]
fn contexts_and_cores_keep_room_for_it() {
    let kernel = Layer::GuestKernel;
    let clocks = clocks("0", "0, 1");
    let backend = || -> Box<dyn CounterBackend> { Box::new(SimBackend::of(&clocks)) };
    let mut rig = Rig::new((2, 3), HostPolicy::HostFirst, backend);
    let holdings = Holdings::default();
    let vcpus = rig.vcpus.drain(..);
    rig.vcpus = vcpus
        .map(|pmu| with_layers(pmu, Scheme::Independent, &holdings))
        .collect();
    let tool = |event: u64| context(0, &[vec![(0, event | 0x43_0000)]], 0);
    for (vcpu, core) in [(0, 0), (1, 1), (0, 2), (0, 0)] {
        rig.switch(vcpu, core);
    }
    // Before the request, on a core where the vCPU is not.
    let early = rig.load(Spot::Core(1), tool(INSTRUCTIONS), &Mail::default());
    assert!(early.is_ok(), "{early:?}");
    let granted = request(&mut rig.vcpus[0], kernel, any_for(1, INSTRUCTIONS));
    assert_eq!(granted, pmcs(&[5]));
    let refused = rig.load(Spot::Core(0), tool(INSTRUCTIONS), &Mail::default());
    assert_eq!(refused.map_err(|refusal| refusal.errno), Err(Errno::EBUSY));
    let refused = rig.load(Spot::Core(2), tool(INSTRUCTIONS), &Mail::default());
    assert_eq!(refused.map_err(|refusal| refusal.errno), Err(Errno::EBUSY));
    assert!(
        rig.load(Spot::Core(2), tool(BRANCHES), &Mail::default())
            .is_ok()
    );
    let refuses: Vec<u64> = (0..3)
        .map(|one| rig.core(one, |core| core.refuses()))
        .collect();
    assert_eq!(refuses, [0, 1, 0]);
    // vCPU 1 may go anywhere, and when vCPU 0 has given it back, so may that.
    let given = request(&mut rig.vcpus[0], kernel, 2 | 1 << 4 | 5 << 8);
    assert_eq!(given, pmcs(&[5]));
    let refuses: Vec<u64> = (0..3)
        .map(|one| rig.core(one, |core| core.refuses()))
        .collect();
    assert_eq!(refuses, [0, 0, 0]);
}

/// A core that takes no contexts says the same of guests of which it hears by a budget.
#[test]
fn a_core_without_contexts_says_whom_it_has_no_room_for() {
    let holdings = Holdings::default();
    let seat = |vcpu, instructions| {
        let model = PmuModel::parse("amd-core").expect("a model");
        let pmu = Seated::detached(OwnerId(vcpu), model, Grant::everything());
        let mut pmu = with_layers(pmu, Scheme::Independent, &holdings);
        let backend = SimBackend::of(&clocks(instructions, "0"));
        pmu.attach(Box::new(CorePmu::new(Box::new(backend))));
        pmu
    };
    let (mut here, mut there) = (seat(0, "0, 1"), seat(1, "0"));
    let granted = request(&mut here, Layer::GuestKernel, any_for(2, INSTRUCTIONS));
    assert_eq!(granted, pmcs(&[4, 5]));
    let four = PerKind {
        programmable: 4,
        ..PerKind::ALL
    };
    assert_eq!(there.set_budget(four, 0, None), Ok(()));
    assert_eq!(there.core().map(CorePmu::refuses), Some(1));
}

/// One step of a guest's.
#[derive(Clone, Copy, Debug)]
enum Step {
    Ask(Layer, u64, Option<usize>),
    GiveBack(Layer, u8),
    Reply(Layer, bool),
    Select(u8, usize),
    Stop(u8),
    Wait,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (
        0..12u8,
        any::<bool>(),
        0..COUNTERS,
        0..EVENTS.len(),
        1..3u64,
    );
    let step = step.prop_map(|(what, firmware, n, event, count)| {
        let layer = if firmware {
            Layer::Firmware
        } else {
            Layer::GuestKernel
        };
        match what {
            0..4 => Step::Ask(layer, count, Some(event)),
            4 => Step::Ask(layer, count, None),
            5 => Step::GiveBack(layer, n),
            6 | 7 => Step::Reply(layer, n > 1),
            8 | 9 => Step::Select(n, event),
            10 => Step::Stop(n),
            _ => Step::Wait,
        }
    });
    proptest::collection::vec(step, 1..60)
}

/// Whether each of `wanted` has a slot of its own: tried one by one.
fn fit(wanted: &[&[u8]], free: &[u8]) -> bool {
    let Some((first, rest)) = wanted.split_first() else {
        return true;
    };
    first.iter().filter(|slot| free.contains(slot)).any(|slot| {
        let left: Vec<u8> = free.iter().copied().filter(|one| one != slot).collect();
        fit(rest, &left)
    })
}

proptest! {
    /// What was granted can be counted, all of it together, whatever else is done; what
    /// selects its own event counts; and without other layers in the way a request is
    /// granted as often as the counters allow.
    #[test]
    fn a_grant_is_kept(
        which in 0..3usize,
        instructions in proptest::sample::subsequence(vec![0u8, 1, 2, 3], 1..3),
        branches in proptest::sample::subsequence(vec![0u8, 1, 2, 3], 1..4),
        steps in steps(),
    ) {
        let scheme = [Scheme::Independent, Scheme::SingleMaster, Scheme::Interacting][which];
        let list = |slots: &[u8]| slots.iter().map(u8::to_string).collect::<Vec<_>>().join(", ");
        let mut pmu = seated(scheme, &clocks(&list(&instructions), &list(&branches)));
        let all = [0u8, 1, 2, 3];
        let slots = |event: usize| -> &[u8] {
            match EVENTS[event] {
                INSTRUCTIONS => &instructions,
                BRANCHES => &branches,
                _ => &all,
            }
        };
        // Of each counter that is held the layer and the event that was named.
        let of = |pmu: &Seated, n: u8| {
            let unit = pmu.claims().unit().expect("reservations");
            let held = unit.bank().reservation(CounterId::Programmable(n))?;
            let event = held.event.map(|event| {
                let select = event.select();
                EVENTS.iter().position(|one| *one == select).expect("one of these")
            });
            Some((held.owner, event))
        };
        let mut selected = [None; COUNTERS as usize];
        let mut now = 0;
        for step in steps {
            let held: Vec<&[u8]> = (0..COUNTERS)
                .filter_map(|n| Some(of(&pmu, n)?.1.map_or(&all[..], slots)))
                .collect();
            match step {
                Step::Ask(layer, count, event) => {
                    let value = event.map_or(1 | count << 8, |event| any_for(count, EVENTS[event]));
                    if pmu.wrmsr(REQUEST, value, own(layer)) == WriteOutcome::Done {
                        let more = event.map_or(&all[..], slots);
                        let mut wanted = held.clone();
                        wanted.extend((0..count).map(|_| more));
                        let number = usize::try_from(count).unwrap();
                        let free = usize::from(COUNTERS) - held.len() >= number;
                        let possible = free && fit(&wanted, &all);
                        // What is selected now and was never promised may stand in the way.
                        let plain = (0..COUNTERS).all(|n| {
                            selected[usize::from(n)].is_none_or(|event| {
                                of(&pmu, n).is_some_and(|(_, named)| named == Some(event))
                            })
                        });
                        let answer = answer(&mut pmu, layer);
                        if possible && plain {
                            prop_assert!(answer.is_ok(), "{step:?}: {answer:?}");
                        }
                        if scheme == Scheme::Independent && !possible {
                            prop_assert!(answer.is_err(), "{step:?}: {answer:?}");
                        }
                    }
                }
                Step::GiveBack(layer, n) => {
                    pmu.wrmsr(REQUEST, 2 | 1 << 4 | u64::from(n) << 8, own(layer));
                }
                Step::Reply(layer, yields) => {
                    if let Some(n) = asked(&mut pmu, layer) {
                        let reply = if yields { 1 } else { 2 };
                        pmu.wrmsr(REPLY, reply | n << 8, own(layer));
                    }
                }
                Step::Select(n, event) => {
                    if let Some((layer, _)) = of(&pmu, n) {
                        select(&mut pmu, layer, n, EVENTS[event]);
                        selected[usize::from(n)] = Some(event);
                    }
                }
                Step::Stop(n) => {
                    if let Some((layer, _)) = of(&pmu, n) {
                        pmu.wrmsr(MsrIndex(SELECT + u32::from(n)), 0, own(layer));
                    }
                }
                Step::Wait => {
                    pmu.observe(Progress::Entered { tsc: Tsc(now) });
                    now += 7;
                    pmu.observe(Progress::Left {
                        tsc: Tsc(now),
                        halted: Ticks(0),
                        ring: Some(Ring::Kernel),
                    });
                }
            }
            let report = pmu.report();
            let mut promised: Vec<&[u8]> = Vec::new();
            for n in 0..COUNTERS {
                let own = report.iter().find(|one| one.counter == CounterId::Programmable(n));
                // A counter that changes hands is cleared.
                if own.is_none() {
                    selected[usize::from(n)] = None;
                }
                let Some((_, named)) = of(&pmu, n) else { continue };
                promised.push(named.map_or(&all[..], slots));
                if let (Some(own), Some(named)) = (own, named)
                    && selected[usize::from(n)] == Some(named)
                {
                    let counts = !matches!(own.reading, Reading::Unavailable { .. });
                    prop_assert!(counts, "{step:?}: {own:?}");
                }
            }
            prop_assert!(fit(&promised, &all), "{step:?}: {promised:?}");
        }
    }
}
