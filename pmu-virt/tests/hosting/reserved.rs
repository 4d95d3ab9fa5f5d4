//! What the hypervisor has reserved is room for host contexts.

use std::sync::Arc;

use arbiter::{
    Auditor, Cookie, CounterId, Entropy, GuardLimits, PcrConfig, PcrUnit, PerKind, Phase, Policy,
    Record, Scheme,
};
use perfmon_abi::wire::Errno;
use pmu_virt::perfmon::HostPolicy;
use pmu_virt::{CounterBackend, Reservations, SimBackend};

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
fn with_reservations(pmu: Seated) -> Seated {
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
