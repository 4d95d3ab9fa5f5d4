//! What the hypervisor has reserved is room for host contexts.

use std::sync::Arc;

use arbiter::{
    Auditor, Caller, Cookie, CounterId, Entropy, GuardLimits, Layer, Outcome, PcrConfig, PcrUnit,
    PerKind, Phase, Policy, Reason, Record, Request, Scheme, Wanted,
};
use perfmon_abi::wire::Errno;
use pmu_virt::perfmon::HostPolicy;
use pmu_virt::{
    CorePmu, CounterBackend, Grant, MsrIndex, Oversubscribe, OwnerId, PmuModel, Progress,
    ReadOutcome, Reservations, Ring, SimBackend, Ticks, Tsc, WriteOutcome,
};

use crate::rig::{Mail, Rig, Spot, context};
use crate::seated::Seated;
use crate::truth::{EVENTS, clocks};

const TICKS_PER_MS: u64 = 1_000_000;

#[derive(Debug)]
struct Nobody;

impl Auditor for Nobody {
    fn record(&mut self, _: &Record) {}
}

impl Entropy for Nobody {
    fn bits(&mut self) -> Option<u64> {
        None
    }
}

/// The PMU with reservations, of which none is made yet.
pub(crate) fn with_reservations(pmu: Seated) -> Seated {
    let mut policy = Policy::default();
    policy.kernel.min = PerKind::default();
    let unit = PcrUnit::new(PcrConfig {
        counters: pmu.model().counts(),
        widths: pmu.model().widths(),
        policy,
        scheme: Scheme::Independent,
        guard: GuardLimits::with_ticks_per_ms(TICKS_PER_MS),
        ticks_per_ms: TICKS_PER_MS,
        phase: Arc::new(Phase::new(false)),
        legacy: None,
        smm: false,
    });
    pmu.with_reservations(Reservations {
        unit,
        entropy: Box::new(Nobody),
        audit: Box::new(Nobody),
        holdings: Default::default(),
    })
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
fn kernel_reserves(pmu: &mut Seated, n: u8) -> Outcome {
    let request = Request::Reserve {
        wanted: Wanted::This(CounterId::Programmable(n)),
        cookie: Cookie::new(7).expect("a cookie"),
        lease_ms: None,
    };
    let answer = pmu.arbitrate(|unit, cx| {
        let asked = unit.request(Layer::GuestKernel, request, cx);
        let (answer, effects) = asked.expect("no request is pending");
        (answer.outcome, effects)
    });
    answer.expect("there are reservations")
}

/// A rig whose only vCPU has reservations, on a core with four counters.
fn rig(policy: HostPolicy) -> Rig {
    let clocks = clocks(4);
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
