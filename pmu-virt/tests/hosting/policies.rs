//! Guests and host contexts on the same few counters, step by step.

use super::rig::{Mail, Nothing, Rig, Spot, context};
use super::truth::{EVENTS, clocks};
use crate::seated::{Located, Snapshot};
use perfmon_abi::consts as pfm;
use perfmon_abi::wire::{Call, Errno};
use perfmon_abi::{PmcArg, PmdArg};
use pmu_virt::perfmon::{Context, ContextId, HostAudit, HostEvent, HostPolicy, HostRecord, Moment};
use pmu_virt::{
    Claimant, CorePmu, CounterBackend, OwnerId, Progress, Ring, SimBackend, Ticks, Tsc, accounting,
};
use std::sync::{Arc, Mutex};

const CYCLES: u64 = EVENTS[0];
const INSTRUCTIONS: u64 = EVENTS[4];
const MS: u64 = 1_000_000;

pub(crate) fn rig(slots: usize, policy: HostPolicy) -> Rig {
    let clocks = clocks(slots);
    Rig::new((2, 1), policy, || -> Box<dyn CounterBackend> {
        Box::new(SimBackend::of(&clocks))
    })
}

pub(crate) fn counting(flags: u32, counters: usize) -> Context {
    let set = (0..counters).map(|n| (n, CYCLES)).collect();
    context(flags, &[set], 0)
}

pub(crate) fn run(rig: &mut Rig, vcpu: usize, ticks: u64) {
    let left = Progress::Left {
        tsc: Tsc(rig.tsc + ticks),
        halted: Ticks(0),
        ring: Some(Ring::User),
    };
    rig.run(vcpu, 0, left);
}

fn guest_counts(rig: &mut Rig, vcpu: usize, counters: u32) {
    for n in 0..counters {
        rig.write(vcpu, 0xc001_0200 + 2 * n, CYCLES);
    }
}

/// The reason in the status word of the guest's accounting page, by counter.
fn reasons(rig: &mut Rig, vcpu: usize) -> Vec<String> {
    let reports = rig.vcpus[vcpu].report();
    let word = |report: &pmu_virt::CounterReport| match report.reading {
        pmu_virt::Reading::Counted { .. } => "counted".to_owned(),
        pmu_virt::Reading::Unavailable(reason) => reason.to_string(),
    };
    reports.iter().map(word).collect()
}

fn moment() -> Moment {
    Moment {
        tsc: 1,
        ip: 0x1234,
        ring: Ring::User,
        cr3: 0x5000,
        vm: 1,
        vcpu: 0,
        core: 0,
    }
}

const BUSY: &str = "the counters of the sim backend are in use by the host";

#[test]
fn guest_first_leaves_what_the_guest_cannot_use() {
    let mut rig = rig(8, HostPolicy::GuestFirst);
    rig.switch(0, 0);
    let refused = rig.load(Spot::Vcpu(0), counting(0, 3), &Mail::default());
    let refusal = refused.expect_err("the guest may want six of eight");
    assert_eq!(refusal.errno, Errno::EBUSY);
    assert!(
        refusal.reason.contains("keeps 6 for the guest"),
        "{refusal}"
    );
    assert!(
        rig.load(Spot::Vcpu(0), counting(0, 2), &Mail::default())
            .is_ok()
    );
    assert_eq!(rig.outcome(Spot::Vcpu(0), Call::Start(None)), Ok(()));
    guest_counts(&mut rig, 0, 6);
    run(&mut rig, 0, MS);
    assert_eq!(reasons(&mut rig, 0), ["counted"; 6]);
    let guest = rig.value(0, 0xc001_0201);
    assert!(guest > 0);
    assert_eq!(rig.read(Spot::Vcpu(0), 0, 1).0, guest);
}

#[test]
fn host_first_takes_and_gives_back() {
    let mut rig = rig(6, HostPolicy::HostFirst);
    rig.switch(0, 0);
    guest_counts(&mut rig, 0, 6);
    run(&mut rig, 0, MS);
    assert!(
        rig.load(Spot::Vcpu(0), counting(0, 4), &Mail::default())
            .is_ok()
    );
    assert_eq!(
        reasons(&mut rig, 0),
        ["counted"; 6],
        "nothing is started yet"
    );
    assert_eq!(rig.outcome(Spot::Vcpu(0), Call::Start(None)), Ok(()));
    run(&mut rig, 0, MS);
    let expected = [["counted"; 2].as_slice(), &[BUSY; 4]].concat();
    assert_eq!(reasons(&mut rig, 0), expected);
    // The page tells the guest: unavailable, and why.
    let reason = |rig: &mut Rig, n| {
        rig.value(0, accounting::MSR_BASE);
        let status = accounting::PAGE.iter().find(|row| row.name == "STATUS");
        let status = status.expect("a status word");
        let msr = accounting::MSR_BASE + status.offset + n * status.stride;
        rig.value(0, msr) >> 8 & 0xff
    };
    assert_eq!([0, 1, 2, 5].map(|n| reason(&mut rig, n)), [0, 0, 7, 7]);
    // What it frees is the guest's at once.
    assert_eq!(rig.outcome(Spot::Vcpu(0), Call::Stop), Ok(()));
    assert_eq!(reasons(&mut rig, 0), ["counted"; 6]);
    assert_eq!(rig.outcome(Spot::Vcpu(0), Call::Start(None)), Ok(()));
    assert_eq!(reasons(&mut rig, 0), expected);
    assert!(rig.unload(Spot::Vcpu(0)).is_some());
    assert_eq!(reasons(&mut rig, 0), ["counted"; 6]);
}

#[test]
fn a_preemptible_context_makes_room_and_comes_back() {
    let mut rig = rig(6, HostPolicy::GuestFirst);
    rig.switch(0, 0);
    let mail = Mail::default();
    guest_counts(&mut rig, 0, 3);
    assert!(
        rig.load(Spot::Vcpu(0), counting(pfm::PFM_FL_PREEMPTIBLE, 3), &mail)
            .is_ok()
    );
    assert_eq!(rig.outcome(Spot::Vcpu(0), Call::Start(None)), Ok(()));
    run(&mut rig, 0, MS);
    let (before, how) = rig.read(Spot::Vcpu(0), 0, 0);
    assert_eq!(before, rig.value(0, 0xc001_0201));
    assert_ne!(how, pfm::PFM_PROV_LOST);

    // The guest needs one more.
    guest_counts(&mut rig, 0, 4);
    assert_eq!(mail.kinds(), [pfm::PFM_MSG_PREEMPTED]);
    assert_eq!(reasons(&mut rig, 0), ["counted"; 4]);
    run(&mut rig, 0, 3 * MS);
    assert_eq!(rig.read(Spot::Vcpu(0), 0, 0), (before, pfm::PFM_PROV_LOST));
    assert_eq!(mail.kinds(), [0; 0]);

    // For a moment it does not, as its driver's interrupt handler runs.
    rig.write(0, 0xc001_0200, 0);
    run(&mut rig, 0, 1_000);
    rig.write(0, 0xc001_0200, CYCLES);
    run(&mut rig, 0, MS);
    assert_eq!(mail.kinds(), [0; 0]);

    // Then for longer.
    rig.write(0, 0xc001_0200, 0);
    run(&mut rig, 0, 2 * MS);
    let messages = mail.take();
    let restored = messages[0].expect("a message");
    assert_eq!(restored.kind, pfm::PFM_MSG_RESTORED);
    assert_eq!(messages.len(), 1);
    run(&mut rig, 0, MS);
    let after = rig.read(Spot::Vcpu(0), 0, 0);
    assert!(after.0 > before && after.1 == pfm::PFM_PROV_LOST);
}

/// Every record that a core tells.
#[derive(Clone, Debug, Default)]
struct Trail(Arc<Mutex<Vec<HostRecord>>>);

impl HostAudit for Trail {
    fn record(&mut self, record: &HostRecord) {
        self.0.lock().expect("the trail").push(record.clone());
    }
}

#[test]
fn two_contexts_share_a_core_and_the_trail_tells() {
    let mut rig = rig(6, HostPolicy::HostFirst);
    rig.limit(1);
    rig.switch(0, 0);
    let trail = Trail::default();
    rig.core(0, |core| core.set_host_audit(Box::new(trail.clone())));
    let (soft, hard) = (Mail::default(), Mail::default());
    let flags = pfm::PFM_FL_SYSTEM_WIDE | pfm::PFM_FL_PREEMPTIBLE;
    let first = rig
        .load(Spot::Core(0), counting(flags, 4), &soft)
        .expect("room");
    let again = rig.load(Spot::Core(0), counting(flags, 1), &soft);
    assert!(
        again
            .expect_err("one at a time")
            .reason
            .contains("context 1 already")
    );
    assert_eq!(rig.outcome(Spot::Core(0), Call::Start(None)), Ok(()));
    run(&mut rig, 0, MS);
    run(&mut rig, 1, MS);
    rig.switch(0, 0);
    let second = rig
        .load(Spot::Vcpu(0), counting(0, 3), &hard)
        .expect("room");
    assert_eq!(rig.outcome(Spot::Vcpu(0), Call::Start(None)), Ok(()));
    assert_eq!(soft.kinds(), [pfm::PFM_MSG_PREEMPTED]);
    run(&mut rig, 0, MS);
    assert!(rig.read(Spot::Vcpu(0), 0, 0).0 > 0);
    // The other vCPU has none, so there is room while it runs.
    run(&mut rig, 1, 2 * MS);
    assert_eq!(soft.kinds(), [pfm::PFM_MSG_RESTORED]);
    rig.switch(0, 0);
    assert_eq!(soft.kinds(), [pfm::PFM_MSG_PREEMPTED]);
    assert!(rig.unload(Spot::Vcpu(0)).is_some());
    run(&mut rig, 0, 2 * MS);
    assert_eq!(soft.kinds(), [pfm::PFM_MSG_RESTORED]);
    let told = trail.0.lock().expect("the trail");
    let told: Vec<_> = told
        .iter()
        .map(|record| {
            let what = match &record.event {
                HostEvent::Loaded { .. } => "loaded",
                HostEvent::Refused { .. } => "refused",
                HostEvent::Unloaded => "unloaded",
                HostEvent::Preempted => "preempted",
                HostEvent::Restored { .. } => "restored",
                HostEvent::Overdrawn => "overdrawn",
            };
            (record.context, record.vcpu, what)
        })
        .collect();
    let vcpu = Some(OwnerId(0));
    assert_eq!(
        told,
        [
            (first, None, "loaded"),
            (second, vcpu, "loaded"),
            (first, None, "preempted"),
            (first, None, "restored"),
            (first, None, "preempted"),
            (second, vcpu, "unloaded"),
            (first, None, "restored"),
        ]
    );
}

#[test]
fn a_context_that_moves_to_a_full_core_is_told() {
    let clocks = clocks(5);
    let backend = || -> Box<dyn CounterBackend> { Box::new(SimBackend::of(&clocks)) };
    let mut rig = Rig::new((2, 2), HostPolicy::HostFirst, backend);
    let trail = Trail::default();
    rig.core(1, |core| core.set_host_audit(Box::new(trail.clone())));
    rig.switch(0, 0);
    assert!(
        rig.load(Spot::Vcpu(0), counting(0, 4), &Mail::default())
            .is_ok()
    );
    assert_eq!(rig.outcome(Spot::Vcpu(0), Call::Start(None)), Ok(()));
    run(&mut rig, 0, MS);
    let of_core = counting(pfm::PFM_FL_SYSTEM_WIDE, 4);
    assert!(rig.load(Spot::Core(1), of_core, &Mail::default()).is_ok());
    assert_eq!(rig.outcome(Spot::Core(1), Call::Start(None)), Ok(()));
    let before = rig.read(Spot::Vcpu(0), 0, 0);
    assert_eq!(before.1, pfm::PFM_PROV_SIMULATED);
    let left = Progress::Left {
        tsc: Tsc(rig.tsc + MS),
        halted: Ticks(0),
        ring: Some(Ring::User),
    };
    rig.run(0, 1, left);
    let of_core = rig.read(Spot::Core(1), 0, 0).0;
    assert!(of_core > 0);
    let found: Vec<(u64, u32)> = (0..4).map(|n| rig.read(Spot::Vcpu(0), 0, n)).collect();
    let whole = (before.0 + of_core, pfm::PFM_PROV_SIMULATED);
    let part = (before.0, pfm::PFM_PROV_LOST);
    assert_eq!(
        found.iter().filter(|one| **one == whole).count(),
        1,
        "{found:?}"
    );
    assert_eq!(
        found.iter().filter(|one| **one == part).count(),
        3,
        "{found:?}"
    );
    let told = trail.0.lock().expect("the trail");
    assert!(
        told.iter()
            .any(|record| record.event == HostEvent::Overdrawn)
    );
    drop(told);
    // Where there is room again, all four go on.
    run(&mut rig, 0, MS);
    let last: Vec<u64> = (0..4).map(|n| rig.read(Spot::Vcpu(0), 0, n).0).collect();
    assert!(last.iter().zip(&found).all(|(now, then)| *now > then.0));
}

#[test]
fn an_event_that_nothing_counts_is_refused() {
    let mut rig = rig(8, HostPolicy::GuestFirst);
    rig.switch(0, 0);
    // LLC misses are not in the table.
    let loads = context(0, &[vec![(0, 0x43_0064)]], 0);
    let refused = rig.load(Spot::Vcpu(0), loads, &Mail::default());
    let refusal = refused.expect_err("nothing counts it");
    assert_eq!(refusal.errno, Errno::EINVAL);
    assert!(
        refusal
            .reason
            .starts_with("event set 0, PMD0: the sim backend"),
        "{refusal}"
    );

    assert!(
        rig.load(Spot::Vcpu(0), counting(0, 1), &Mail::default())
            .is_ok()
    );
    let write = |num, value| PmcArg {
        num,
        value,
        ..PmcArg::default()
    };
    let writes = vec![
        write(0, INSTRUCTIONS),
        write(1, 0x43_0064),
        write(2, CYCLES),
    ];
    let mut call = Call::WritePmcs(writes);
    let refusal = rig
        .call(Spot::Vcpu(0), &mut call)
        .expect_err("nothing counts it");
    assert_eq!(refusal.errno, Errno::EINVAL);
    assert!(
        refusal
            .reason
            .starts_with("event set 0, PMC1: the sim backend"),
        "{refusal}"
    );
    let Call::WritePmcs(writes) = call else {
        panic!("the call stays the same");
    };
    let bad = |write: &PmcArg| write.flags & pfm::PFM_REG_RETFL_EINVAL != 0;
    let flags: Vec<bool> = writes.iter().map(bad).collect();
    assert_eq!(flags, [false, true, false]);
    // The first was done, the others were not.
    assert_eq!(rig.outcome(Spot::Vcpu(0), Call::Start(None)), Ok(()));
    run(&mut rig, 0, MS);
    assert!(rig.read(Spot::Vcpu(0), 0, 0).0 > 0);
    assert_eq!(rig.read(Spot::Vcpu(0), 0, 2).0, 0);
}

/// A context that stops at the overflow after a hundred cycles, and begins again at `long_reset`.
fn blocking(long_reset: u64) -> Context {
    let mut context = counting(pfm::PFM_FL_NOTIFY_BLOCK, 0);
    let pmc = PmcArg {
        value: CYCLES,
        flags: pfm::PFM_REGFL_OVFL_NOTIFY,
        ..PmcArg::default()
    };
    let pmd = PmdArg {
        value: u64::MAX - 99,
        long_reset,
        ..PmdArg::default()
    };
    for mut call in [Call::WritePmcs(vec![pmc]), Call::WritePmds(vec![pmd])] {
        assert_eq!(context.call(&mut call, &Nothing), Ok(()));
    }
    context
}

#[test]
fn an_overflow_is_sampled_at_its_moment_and_blocks() {
    let mut rig = rig(8, HostPolicy::GuestFirst);
    rig.switch(0, 0);
    let mail = Mail::default();
    let blocking = blocking(u64::MAX - 49);
    assert!(rig.load(Spot::Vcpu(0), blocking, &mail).is_ok());
    assert!(!rig.vcpus[0].needs().counting);
    assert_eq!(rig.outcome(Spot::Vcpu(0), Call::Start(None)), Ok(()));
    assert!(rig.vcpus[0].needs().counting);

    // The guest is to be interrupted when the hundredth cycle has passed.
    let tsc = rig.tsc;
    let pmu = &mut rig.vcpus[0];
    pmu.observe(Progress::Entered { tsc: Tsc(tsc) });
    let due = pmu.deadline().expect("an overflow is armed");
    assert!(due > tsc && due < tsc + 10_000, "{}", due - tsc);
    assert!(!pmu.has_host_overflow());
    pmu.observe(Progress::Left {
        tsc: Tsc(due),
        halted: Ticks(0),
        ring: None,
    });
    assert!(pmu.has_host_overflow());
    assert!(pmu.take_pmi().is_none(), "that is no business of the guest");
    assert!(!pmu.hosts().is_blocked());
    pmu.sample_hosts(&moment(), &Nothing);
    assert!(!pmu.has_host_overflow() && pmu.hosts().is_blocked());
    rig.tsc = due;
    assert_eq!(mail.kinds(), [pfm::PFM_MSG_OVFL]);
    let value = rig.read(Spot::Vcpu(0), 0, 0).0;

    // Masked, nothing counts; a restart resets, and another overflow follows.
    run(&mut rig, 0, 10_000);
    assert_eq!(rig.read(Spot::Vcpu(0), 0, 0).0, value);
    assert_eq!(rig.outcome(Spot::Vcpu(0), Call::Restart), Ok(()));
    assert!(!rig.vcpus[0].hosts().is_blocked());
    run(&mut rig, 0, 10_000);
    assert!(rig.vcpus[0].has_host_overflow());
}

/// A sample that was taken has stopped its context: that counts no more, whatever fails behind it.
#[test]
fn a_failure_behind_a_sample_leaves_nothing_undone() {
    let mut rig = rig(8, HostPolicy::GuestFirst);
    rig.switch(0, 0);
    let blocking = blocking(0);
    let loaded = rig.load(Spot::Vcpu(0), blocking, &Mail::default());
    assert!(loaded.is_ok(), "{loaded:?}");
    assert_eq!(rig.outcome(Spot::Vcpu(0), Call::Start(None)), Ok(()));
    run(&mut rig, 0, 10_000);
    let pmu = &mut rig.vcpus[0];
    assert!(pmu.has_host_overflow() && pmu.needs().counting);
    let done = pmu.try_samples(&mut Snapshot {
        host: Some((&moment(), &Nothing)),
        host_fails: Some("no registers"),
        ..Snapshot::of(&Located::NOWHERE)
    });
    assert_eq!(done, Err("no registers"));
    assert!(pmu.hosts().is_blocked());
    let holders = pmu.core().expect("a core").holders();
    assert!(holders.iter().all(|one| !one.counting), "{holders:?}");
}

#[test]
fn the_guest_s_state_is_not_the_host_s() {
    let mut rig = rig(8, HostPolicy::GuestFirst);
    rig.switch(0, 0);
    guest_counts(&mut rig, 0, 1);
    let alone = rig.vcpus[0].save();
    assert!(
        rig.load(Spot::Vcpu(0), counting(0, 2), &Mail::default())
            .is_ok()
    );
    assert_eq!(rig.outcome(Spot::Vcpu(0), Call::Start(None)), Ok(()));
    assert_eq!(rig.vcpus[0].save(), alone);
    run(&mut rig, 0, MS);
    let (before, _) = rig.read(Spot::Vcpu(0), 0, 1);
    // A reset of the guest's PMU, and a state that is restored, leave it alone.
    rig.vcpus[0].reset();
    assert!(rig.vcpus[0].needs().counting);
    run(&mut rig, 0, MS);
    let (after, _) = rig.read(Spot::Vcpu(0), 0, 1);
    assert!(after > before);
    assert_eq!(rig.vcpus[0].restore(&alone), Ok(()));
    run(&mut rig, 0, MS);
    assert!(rig.read(Spot::Vcpu(0), 0, 1).0 > after);
    assert!(rig.value(0, 0xc001_0201) > 0);
}

#[test]
fn contexts_of_a_vcpu_make_room_for_each_other() {
    let mut rig = rig(6, HostPolicy::HostFirst);
    rig.switch(0, 0);
    let spot = Spot::Vcpu(0);
    let load = |rig: &mut Rig, flags, counters| {
        let mail = Mail::default();
        let id = rig
            .load(spot, counting(flags, counters), &mail)
            .expect("room");
        assert_eq!(rig.call_one(spot, id, &mut Call::Start(None)), Ok(()));
        (id, mail)
    };
    let soft = [0; 3].map(|_| load(&mut rig, pfm::PFM_FL_PREEMPTIBLE, 2));
    run(&mut rig, 0, MS);
    let kinds = |soft: &[(ContextId, Mail); 3]| soft.each_ref().map(|(_, mail)| mail.kinds());
    assert_eq!(kinds(&soft), [const { Vec::<u32>::new() }; 3]);
    // The oldest make room, and no more of them than have to.
    let (hard, _) = load(&mut rig, 0, 3);
    let preempted = vec![pfm::PFM_MSG_PREEMPTED];
    assert_eq!(kinds(&soft), [preempted.clone(), preempted, vec![]]);
    run(&mut rig, 0, MS);
    for (id, how) in [
        (soft[0].0, pfm::PFM_PROV_LOST),
        (soft[2].0, pfm::PFM_PROV_SIMULATED),
        (hard, pfm::PFM_PROV_SIMULATED),
    ] {
        let (value, found) = rig.read_one((spot, id), 0, 0);
        assert!(value > 0 && found == how, "{id}: {value}, {found}");
    }
    // They come back one at a time, the oldest first.
    assert!(rig.unload_one(spot, hard).is_some());
    let restored = vec![pfm::PFM_MSG_RESTORED];
    run(&mut rig, 0, MS);
    assert_eq!(kinds(&soft), [restored.clone(), vec![], vec![]]);
    run(&mut rig, 0, MS);
    assert_eq!(kinds(&soft), [vec![], restored, vec![]]);
}

#[test]
fn one_more_than_may_be_is_refused() {
    let mut rig = rig(6, HostPolicy::HostFirst);
    for most in [1, 3] {
        rig.limit(most);
        for spot in [Spot::Vcpu(0), Spot::Core(0)] {
            for _ in 0..most {
                let loaded = rig.load(spot, counting(0, 0), &Mail::default());
                assert!(loaded.is_ok(), "{loaded:?}");
            }
            let refused = rig.load(spot, counting(0, 0), &Mail::default());
            let refusal = refused.expect_err("too many");
            assert_eq!(refusal.errno, Errno::EBUSY);
            let names: Vec<String> = rig.contexts(spot).iter().map(ToString::to_string).collect();
            assert!(refusal.reason.contains(&names.join(", ")), "{refusal}");
            assert!(refusal.reason.contains("--contexts-per-vcpu"), "{refusal}");
            for _ in 0..most {
                assert!(rig.unload(spot).is_some());
            }
            rig.clear(0);
        }
    }
}

#[test]
fn the_hypervisor_keeps_what_a_firm_context_relies_on() {
    // Policy, counters of the context, whether it is preemptible; then whether
    // the guest may have one more than its six, of eight.
    let table = [
        (HostPolicy::GuestFirst, 0, false, true),
        (HostPolicy::GuestFirst, 1, false, true),
        (HostPolicy::GuestFirst, 2, false, false),
        (HostPolicy::GuestFirst, 3, true, true),
        (HostPolicy::HostFirst, 8, false, true),
        (HostPolicy::Shares { host: Some(2) }, 2, false, true),
        (HostPolicy::Shares { host: Some(1) }, 2, false, false),
    ];
    for (policy, counters, soft, expected) in table {
        let mut rig = rig(8, policy);
        rig.switch(0, 0);
        let flags = if soft { pfm::PFM_FL_PREEMPTIBLE } else { 0 };
        let set: Vec<_> = (0..counters.min(6)).map(|n| (n, CYCLES)).collect();
        let loaded = rig.load(Spot::Vcpu(0), context(flags, &[set], 0), &Mail::default());
        assert!(loaded.is_ok(), "{policy} {counters}: {loaded:?}");
        let found = rig.vcpus[0].hypervisor_can_yield();
        assert_eq!(found, expected, "{policy} {counters} {soft}");
    }
}

#[test]
fn holders_are_told() {
    let mut rig = rig(8, HostPolicy::GuestFirst);
    rig.switch(0, 0);
    guest_counts(&mut rig, 0, 1);
    let id = rig.load(
        Spot::Core(0),
        counting(pfm::PFM_FL_SYSTEM_WIDE, 1),
        &Mail::default(),
    );
    assert_eq!(rig.outcome(Spot::Core(0), Call::Start(None)), Ok(()));
    let held = |core: &mut CorePmu| -> Vec<(Claimant, bool)> {
        let holders = core.holders();
        holders
            .iter()
            .map(|held| (held.holder, held.counting))
            .collect()
    };
    let guest = |vcpu, n| Claimant::Guest {
        vcpu: OwnerId(vcpu),
        counter: pmu_virt::CounterId::Programmable(n),
    };
    let context = Claimant::Context {
        vcpu: None,
        context: id.expect("it is loaded"),
        pmd: 0,
    };
    assert_eq!(rig.core(0, held), [(guest(0, 0), true), (context, true)]);
    // The other vCPU's counters come beside those that are kept.
    rig.switch(1, 0);
    guest_counts(&mut rig, 1, 1);
    let found = rig.core(0, held);
    assert!(found.contains(&(context, true)), "{found:?}");
    assert!(found.contains(&(guest(1, 0), true)), "{found:?}");
    assert!(found.contains(&(guest(0, 0), false)), "{found:?}");
    assert_eq!(context.to_string(), "PMD0 of context 1");
    assert_eq!(guest(1, 0).to_string(), "PMC0 of vCPU 1's guest");
}
