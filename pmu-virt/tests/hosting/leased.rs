//! Contexts that may use no more counters than a lease of the host's arbiter holds.

use super::policies::{counting, rig, run};
use super::rig::{Mail, Rig, Spot, register};
use super::truth::EVENTS;
use perfmon_abi::PmcArg;
use perfmon_abi::consts as pfm;
use perfmon_abi::wire::Call;
use pmu_virt::perfmon::{ContextId, HostPolicy};

const MS: u64 = 1_000_000;

fn lease(rig: &mut Rig, spot: Spot, id: ContextId, counters: usize) {
    match spot {
        Spot::Vcpu(vcpu) => rig.vcpus[vcpu].lease_context(id, counters),
        Spot::Core(core) => rig.core(core, |core| core.lease_context(id, counters)),
    }
}

#[test]
fn a_context_counts_while_its_lease_holds_all_that_it_wants() {
    for (spot, flags) in [(Spot::Vcpu(0), 0), (Spot::Core(0), pfm::PFM_FL_SYSTEM_WIDE)] {
        let mut rig = rig(8, HostPolicy::HostFirst);
        rig.switch(0, 0);
        let mail = Mail::default();
        let id = rig.load(spot, counting(flags, 3), &mail).expect("room");
        assert_eq!(rig.outcome(spot, Call::Start(None)), Ok(()));
        lease(&mut rig, spot, id, 3);
        run(&mut rig, 0, MS);
        let whole = rig.read(spot, 0, 0);
        assert!(
            whole.0 > 0 && whole.1 == pfm::PFM_PROV_SIMULATED,
            "{whole:?}"
        );

        // The lease holds less: the count of before is told, and as a part.
        lease(&mut rig, spot, id, 2);
        assert_eq!(mail.kinds(), [pfm::PFM_MSG_PREEMPTED], "{spot:?}");
        // There is room, time and again, and no lease.
        for _ in 0..5 {
            run(&mut rig, 0, 2 * MS);
        }
        assert_eq!(rig.read(spot, 0, 0), (whole.0, pfm::PFM_PROV_LOST));
        assert!(mail.kinds().is_empty());

        lease(&mut rig, spot, id, 3);
        run(&mut rig, 0, 2 * MS);
        run(&mut rig, 0, MS);
        assert_eq!(mail.kinds(), [pfm::PFM_MSG_RESTORED], "{spot:?}");
        assert!(rig.read(spot, 0, 0).0 > whole.0);
    }
}

#[test]
fn a_context_that_grows_beyond_its_lease_stands_and_shrinks_back() {
    let mut rig = rig(8, HostPolicy::HostFirst);
    rig.switch(0, 0);
    let (spot, mail) = (Spot::Vcpu(0), Mail::default());
    let id = rig.load(spot, counting(0, 2), &mail).expect("room");
    lease(&mut rig, spot, id, 2);
    assert_eq!(rig.outcome(spot, Call::Start(None)), Ok(()));
    run(&mut rig, 0, MS);
    let select = |rig: &mut Rig, value| {
        let write = PmcArg {
            num: register(2),
            value,
            ..PmcArg::default()
        };
        assert_eq!(rig.outcome(spot, Call::Stop), Ok(()));
        assert_eq!(rig.outcome(spot, Call::WritePmcs(vec![write])), Ok(()));
        assert_eq!(rig.outcome(spot, Call::Start(None)), Ok(()));
        run(rig, 0, 2 * MS);
        run(rig, 0, MS);
        mail.kinds()
    };
    assert_eq!(select(&mut rig, EVENTS[0]), [pfm::PFM_MSG_PREEMPTED]);
    assert_eq!(select(&mut rig, 0), [pfm::PFM_MSG_RESTORED]);
}

#[test]
fn a_lease_that_goes_while_the_vcpu_is_away_is_gone_when_it_is_back() {
    let mut rig = rig(8, HostPolicy::HostFirst);
    rig.switch(0, 0);
    let (spot, mail) = (Spot::Vcpu(0), Mail::default());
    let id = rig.load(spot, counting(0, 2), &mail).expect("room");
    lease(&mut rig, spot, id, 2);
    assert_eq!(rig.outcome(spot, Call::Start(None)), Ok(()));
    run(&mut rig, 0, MS);
    let before = rig.read(spot, 0, 0).0;
    rig.clear(0);
    lease(&mut rig, spot, id, 0);
    assert!(mail.kinds().is_empty());
    run(&mut rig, 0, MS);
    assert_eq!(mail.kinds(), [pfm::PFM_MSG_PREEMPTED]);
    assert_eq!(rig.read(spot, 0, 0).0, before);
}
