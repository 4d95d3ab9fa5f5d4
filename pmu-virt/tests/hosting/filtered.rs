//! Events that a guest or a tool may not count.

use std::sync::Arc;

use super::policies::{rig, run};
use super::rig::{Mail, Rig, Spot, context, register};
use super::truth::EVENTS;
use super::truth::clocks;
use arbiter::PerKind;
use perfmon_abi::PmcArg;
use perfmon_abi::wire::{Call, Errno};
use pmu_virt::perfmon::{AttachedContext, ContextId, HostPolicy};
use pmu_virt::{
    CounterBackend, EventFilters, Progress, Reading, Ring, SimBackend, Ticks, Tsc,
    UnavailableReason, accounting,
};

const MS: u64 = 1_000_000;
const FILTER: &str = "[guest]\n[[guest.rule]]\naction = \"deny\"\nselect = 0xc0\n\
                      [[tools]]\nusers = [7]\n[[tools.rule]]\naction = \"deny\"\nselect = 0x76\n";

#[test]
fn what_is_denied_is_unavailable_and_never_0() {
    let filters = EventFilters::parse(FILTER).expect("filters");
    let (cycles, instructions) = (EVENTS[0], EVENTS[4]);
    let mut rig = rig(8, HostPolicy::GuestFirst);
    rig.core(0, |core| core.set_event_filter(filters.guest().clone()));
    rig.switch(0, 0);
    // The guest: its counter stands where it was, and the accounting page says why.
    rig.write(0, 0xc001_0201, 41);
    rig.write(0, 0xc001_0200, instructions);
    rig.write(0, 0xc001_0202, cycles);
    run(&mut rig, 0, MS);
    assert_eq!(rig.value(0, 0xc001_0201), 41);
    assert!(rig.value(0, 0xc001_0203) > 0);
    let reports = rig.vcpus[0].report();
    let Reading::Unavailable(reason @ UnavailableReason::Denied { .. }) = reports[0].reading else {
        panic!("{:?}", reports[0].reading);
    };
    let text = "the VM's --event-filter denies instructions";
    assert_eq!(reason.to_string(), text);
    assert!(reason.is_lasting());
    rig.value(0, accounting::MSR_BASE);
    let status = accounting::PAGE.iter().find(|row| row.name == "STATUS");
    let status = accounting::MSR_BASE + status.expect("a status word").offset;
    assert_eq!(rig.value(0, status) >> 8 & 0xff, 13);
    // It can select something else.
    rig.write(0, 0xc001_0200, cycles);
    run(&mut rig, 0, MS);
    assert!(rig.value(0, 0xc001_0201) > 41);

    // Tools: those that are named have a filter of their own.
    for (user, denied, allowed) in [
        (7, (cycles, "core cycles"), instructions),
        (8, (instructions, "instructions"), cycles),
    ] {
        let filter = filters.tool(user, &[]);
        let mut load = |id, event| {
            let context = context(0, &[vec![(0, event)]], 0);
            let mail = Box::new(Mail::default());
            let mut hosted = AttachedContext::new(ContextId(id), Box::new(context), mail);
            hosted.set_filter(Arc::clone(filter));
            rig.vcpus[0].load_context(hosted, 0)
        };
        let refusal = load(user, denied.0).expect_err("it is denied").refusal;
        assert_eq!(refusal.errno, Errno::EINVAL);
        let why = format!(
            "event set 0, PMD0: the VM's --event-filter denies {}",
            denied.1
        );
        assert_eq!(refusal.reason, why);
        load(user, allowed).expect("it is allowed");
        // Not by a later write either.
        let mut write = Call::WritePmcs(vec![PmcArg {
            num: register(1),
            value: denied.0,
            ..PmcArg::default()
        }]);
        let refused = rig.call_one(Spot::Vcpu(0), ContextId(user), &mut write);
        let refusal = refused.expect_err("it is denied");
        assert!(
            refusal.reason.contains("--event-filter denies"),
            "{refusal}"
        );
        assert!(rig.unload_one(Spot::Vcpu(0), ContextId(user)).is_some());
    }
}

/// A vCPU that moves to another core, where its counters take turns, brings no denied event
/// along.
#[test]
fn what_is_denied_stays_so_on_another_core() {
    let filters = EventFilters::parse(FILTER).expect("filters");
    let (cycles, instructions) = (EVENTS[0], EVENTS[4]);
    let clocks = clocks(8);
    let backend = || -> Box<dyn CounterBackend> { Box::new(SimBackend::of(&clocks)) };
    let mut rig = Rig::new((1, 2), HostPolicy::GuestFirst, backend);
    for core in 0..2 {
        rig.core(core, |core| core.set_event_filter(filters.guest().clone()));
    }
    rig.switch(0, 0);
    let two = PerKind {
        programmable: 2,
        fixed: u8::MAX,
    };
    let given = rig.vcpus[0].set_budget(two, 0, None);
    given.expect("no context is there");
    for (n, event) in [(0, cycles), (1, instructions), (2, cycles)] {
        rig.write(0, 0xc001_0200 + 2 * n, event);
    }
    run(&mut rig, 0, MS);
    for core in [1, 0, 1] {
        for _ in 0..20 {
            let left = Progress::Left {
                tsc: Tsc(rig.tsc + MS),
                halted: Ticks(0),
                ring: Some(Ring::User),
            };
            rig.run(0, core, left);
        }
        assert_eq!(rig.value(0, 0xc001_0203), 0, "core {core}");
    }
    assert!(rig.value(0, 0xc001_0201) > 0 && rig.value(0, 0xc001_0205) > 0);
}
