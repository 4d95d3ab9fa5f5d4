//! GuestOnly and HostOnly of a tool's event select: the tool stands outside of the guest.

use super::policies::{rig, run};
use super::rig::{Mail, Spot, context, register};
use super::truth::EVENTS;
use perfmon_abi::PmcArg;
use perfmon_abi::consts::PFM_REG_RETFL_EINVAL;
use perfmon_abi::wire::{Call, Errno, Subcode};
use pmu_virt::perfmon::{AttachedContext, ContextId, HostPolicy};

const MS: u64 = 1_000_000;
const GUEST_ONLY: u64 = 1 << 40;
const HOST_ONLY: u64 = 1 << 41;

#[test]
fn a_guest_only_counter_of_a_tool_counts_and_one_of_the_host_alone_is_refused() {
    let cycles = EVENTS[0];
    let mut rig = rig(16, HostPolicy::GuestFirst);
    rig.switch(0, 0);
    // As without the bits, for what the guest does is the host's guest's. The guest itself
    // has no guests: for it GuestOnly counts nothing, which is a true 0.
    rig.write(0, 0xc001_0200, cycles | GUEST_ONLY);
    let counters = [0, GUEST_ONLY, GUEST_ONLY | HOST_ONLY];
    let counters: Vec<_> = (0..).zip(counters.map(|bits| cycles | bits)).collect();
    let counting = context(0, &[counters], 0);
    rig.load(Spot::Vcpu(0), counting, &Mail::default())
        .expect("it is loaded");
    rig.call(Spot::Vcpu(0), &mut Call::Start(None))
        .expect("it is started");
    run(&mut rig, 0, MS);
    let (plain, how) = rig.read(Spot::Vcpu(0), 0, 0);
    assert!(plain > 0);
    for n in [1, 2] {
        assert_eq!(rig.read(Spot::Vcpu(0), 0, n), (plain, how), "PMC{n}");
    }
    assert_eq!(rig.value(0, 0xc001_0201), 0);
    // The host alone: at the load, and at a write while it is loaded.
    let alone = context(0, &[vec![(0, cycles | HOST_ONLY)]], 0);
    let mail = Box::new(Mail::default());
    let hosted = AttachedContext::new(ContextId(77), Box::new(alone), mail);
    let refusal = rig.vcpus[0].load_context(hosted, 0);
    let refusal = refusal.expect_err("it counts nothing").refusal;
    let why = (refusal.errno, refusal.subcode);
    assert_eq!(why, (Errno::EINVAL, Subcode::PicNotCapable));
    assert!(refusal.reason.contains("event set 0, PMD0"), "{refusal}");
    assert!(refusal.reason.contains("HostOnly"), "{refusal}");
    let mut write = Call::WritePmcs(vec![PmcArg {
        num: register(3),
        value: cycles | HOST_ONLY,
        ..PmcArg::default()
    }]);
    let refusal = rig.call(Spot::Vcpu(0), &mut write);
    let refusal = refusal.expect_err("it counts nothing");
    assert!(refusal.reason.contains("HostOnly"), "{refusal}");
    let Call::WritePmcs(write) = write else {
        unreachable!("the command stays the same")
    };
    assert_eq!(write[0].flags, PFM_REG_RETFL_EINVAL);
}
