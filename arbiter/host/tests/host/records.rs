//! Leases are kept over a restart as journals of before had them.

use std::collections::BTreeSet;

use arbiter::CounterSet;
use arbiter_host::{
    Asker, Cause, Change, Demand, GroupId, HeldBefore, HostArbiter, Lease, LeaseId, LeaseRecord,
    Outcome, Owner, Scope, TenantId, Terms, Waits,
};

use crate::fixture::*;

/// As the release of before these types wrote it.
const OF_BEFORE: &str = r#"{"id":1,"tenant":"b","uid":1001,"pid":1,"label":"of 1","demands":[["cpu",7],["cpu",7]],"at_least":2,"cpus":"0-1","threads":[9,12],"started":[0,0],"guaranteed":false,"priority":3,"preemptible":true,"lasts":5000000000,"waits":2000000,"holds":2,"generation":1,"waits_since":0,"since":0,"until":5000000000,"leaving":[7000000,0,1001],"blind":0,"arrival":0}"#;

fn host() -> Host {
    let mut host = Host::new(policy());
    let asked = Terms {
        scope: of_threads(&[9, 12]),
        guaranteed: false,
        priority: 3,
        preemptible: true,
        lasts: Some(arbiter::Nanos(5000 * MS)),
        waits: Waits::For(arbiter::Nanos(2 * MS)),
        ..terms(programmable(2), "0-1")
    };
    let id = host.granted(1, asked);
    let grace = Some(arbiter::Nanos(7 * MS));
    let (now, out) = (host.now, &mut host.out);
    let revoked = host.arbiter.revoke(id, grace, caller(1), now, out);
    revoked.expect("it is its own");
    host
}

fn only(host: &Host) -> Lease {
    host.arbiter.leases().next().expect("a lease").clone()
}

fn held(lease: Lease, next: u64) -> HeldBefore {
    HeldBefore {
        leases: vec![lease],
        next,
        ..HeldBefore::default()
    }
}

#[test]
fn a_record_has_the_bytes_of_before() {
    let host = host();
    let record = LeaseRecord::of(&only(&host), &host.arbiter);
    let text = serde_json::to_string(&record).expect("JSON");
    assert_eq!(text, OF_BEFORE);
    let of_before: LeaseRecord = serde_json::from_str(OF_BEFORE).expect("a record");
    assert_eq!(of_before, record);
}

#[test]
fn a_lease_comes_back_with_what_is_kept_of_it() {
    let before = host();
    let record = LeaseRecord::of(&only(&before), &before.arbiter);
    let mut after = Host::new(policy());
    let lease = record.recall(&after.arbiter).expect("all is there");
    let window = arbiter::Nanos(MS);
    let (now, out) = (after.now, &mut after.out);
    let next = before.arbiter.next_id();
    let lost = after.arbiter.restore(held(lease, next), window, now, out);
    assert_eq!(lost, []);
    assert_eq!(LeaseRecord::of(&only(&after), &after.arbiter), record);
}

#[test]
fn what_the_host_or_the_policy_does_not_have_is_not_recalled() {
    let host = host();
    let record = LeaseRecord::of(&only(&host), &host.arbiter);
    let of_others = [
        LeaseRecord {
            tenant: "nobody".into(),
            ..record.clone()
        },
        LeaseRecord {
            demands: vec![("gone".into(), 7)],
            ..record.clone()
        },
        LeaseRecord {
            holds: 3,
            ..record.clone()
        },
        LeaseRecord {
            cpus: "x".into(),
            ..record.clone()
        },
    ];
    for record in of_others {
        assert_eq!(record.recall(&host.arbiter), None, "{record:?}");
    }
    // Journals of before say no starts: the threads are no more.
    let without = LeaseRecord {
        started: None,
        ..record
    };
    let lease = without.recall(&host.arbiter).expect("a lease");
    assert_eq!(lease.terms.scope, of_threads(&[9, 12]));
}

/// A part is its holder's, who has to claim it.
#[test]
fn parts_of_a_groups_lease_come_back() {
    for with_others in [false, true] {
        let mut before = Host::new(policy());
        let ask = |scope| Terms {
            scope,
            ..terms(programmable(2), "0")
        };
        before.granted(0, ask(of_group(3)));
        let part = before.granted(0, ask(of_part(3, &[9], with_others)));
        let lease = before.arbiter.lease(part).expect("a lease");
        let text = serde_json::to_string(&LeaseRecord::of(lease, &before.arbiter)).expect("JSON");
        let record: LeaseRecord = serde_json::from_str(&text).expect("a record");
        let lease = record.recall(&before.arbiter).expect("a lease");
        assert_eq!(lease.terms.scope, of_part(3, &[9], with_others));
        assert_eq!(text.contains("with_others"), with_others, "{text}");
    }
}

/// A control group, and who asked for it, come back; nobody has to claim what it holds.
#[test]
fn the_lease_of_a_group_is_its_own_after_a_restart() {
    const TEXT: &str = r#""group":{"id":3,"above":[1,2],"path":"/3"},"by":["a",1000]"#;
    let mut before = Host::new(policy());
    let owner = Owner {
        by: Some(Asker {
            tenant: TenantId(0),
            uid: 1000,
        }),
        ..owner(1)
    };
    let asked = Terms {
        scope: of_group(3),
        ..terms(programmable(2), "0")
    };
    let now = before.now;
    let granted = before.arbiter.request(owner, asked, now, &mut before.out);
    assert!(
        matches!(granted, Ok(Outcome::Granted { .. })),
        "{granted:?}"
    );
    let record = LeaseRecord::of(&only(&before), &before.arbiter);
    let text = serde_json::to_string(&record).expect("JSON");
    assert!(text.contains(TEXT), "{text}");
    let mut after = Host::new(policy());
    let read: LeaseRecord = serde_json::from_str(&text).expect("a record");
    let lease = read.recall(&after.arbiter).expect("all is there");
    let window = arbiter::Nanos(MS);
    let (now, out) = (after.now, &mut after.out);
    let next = before.arbiter.next_id();
    let lost = after.arbiter.restore(held(lease, next), window, now, out);
    assert_eq!(lost, []);
    after.pass(1000);
    assert_eq!(only(&after).holds, 2);
    assert_eq!(LeaseRecord::of(&only(&after), &after.arbiter), record);
    // Who asked gives it back as well as its owner.
    for (by, right) in [(caller(2), false), (caller(0), true), (caller(1), true)] {
        let own = after.arbiter.own(only(&after).id, None, by);
        assert_eq!(own.is_ok(), right, "{by:?}");
    }
}

/// What was preempted from a group is still to come back to it: nobody has to claim it.
#[test]
fn the_lease_of_a_group_that_was_preempted_is_its_own_after_a_restart() {
    let mut before = Host::new(open_policy());
    let asked = Terms {
        scope: of_group(3),
        guaranteed: false,
        waits: Waits::Always,
        ..terms(programmable(2), "0")
    };
    let lease = before.granted(0, asked);
    before.waiting(1, terms(programmable(3), "0"));
    before.pass(1000);
    assert_eq!(before.holds(lease), Some(0));
    let kept = before.arbiter.lease(lease).expect("it waits").clone();
    let mut after = Host::new(open_policy());
    let (now, out) = (after.now, &mut after.out);
    let window = arbiter::Nanos(MS);
    let lost = after.arbiter.restore(held(kept, 9), window, now, out);
    assert_eq!(lost, []);
    after.pass(1000);
    assert_eq!(after.holds(lease), Some(2));
}

/// Leases of group 1 and of one beside it, and what is below both, also what waits there.
fn leases_in_groups() -> (Vec<Lease>, [BTreeSet<LeaseId>; 2]) {
    let mut before = Host::new(open_policy());
    let any = |count, of| {
        let counters = CounterSet::first(of, 0);
        let pmu = CORE;
        vec![Demand { pmu, counters }; count]
    };
    let ask = |demands, scope| Terms {
        scope,
        ..terms(demands, "0")
    };
    let outer = before.granted(0, ask(any(2, 3), of_group(1)));
    let more = before.granted(0, ask(any(1, 2), of_group(1)));
    let inner: [Scope; 4] = [
        of_group(4),
        of_group(3),
        of_part(1, &[7], false),
        of_part(1, &[8], true),
    ];
    let inner = inner.map(|scope| before.granted(1, ask(any(1, 2), scope)));
    let waits = before.waiting(1, ask(any(2, 2), of_part(1, &[9], true)));
    before.granted(0, ask(any(1, 2), of_group(5)));
    let leases = before.arbiter.leases().cloned().collect();
    let below = [&inner[..], &[waits]].concat().into_iter().collect();
    (leases, [[outer, more].into(), below])
}

/// A host that has two counters of what was three, and the causes why leases have ended.
fn restored(
    leases: Vec<Lease>,
    lost: impl IntoIterator<Item = GroupId>,
) -> (HostArbiter, Vec<LeaseId>, Vec<(LeaseId, Cause)>) {
    let mut pmus = pmus();
    pmus[0].counters = CounterSet::first(2, 0);
    let mut after = HostArbiter::new(pmus, open_policy()).expect("the policy fits");
    let (window, now, mut out) = (arbiter::Nanos(MS), at_ms(1), Vec::new());
    let before = HeldBefore {
        leases,
        lost: lost.into_iter().collect(),
        next: 20,
    };
    let lost = after.restore(before, window, now, &mut out);
    let ended = out.into_iter().filter_map(|change| match change {
        Change::Ended { lease, why } => Some((lease.id, why)),
        _ => None,
    });
    (after, lost, ended.collect())
}

/// What was taken out of a lease that does not come back ends with it.
#[test]
fn what_is_below_a_group_that_does_not_come_back_ends() {
    let (mut leases, [of_group, below]) = leases_in_groups();
    let [outer, more] = *of_group.into_iter().collect::<Vec<_>>() else {
        panic!("two leases");
    };
    let (after, lost, ended) = restored(leases.clone(), []);
    assert_eq!(lost, [outer]);
    // One of its two has come back, and has a counter on.
    let why = |(_, why): &(LeaseId, Cause)| *why == Cause::AboveEnded;
    assert!(ended.iter().all(why), "{ended:?}");
    let left: Vec<LeaseId> = after.leases().map(|lease| lease.id).collect();
    assert_eq!((left.len(), left[0], ended.len()), (6, more, 1), "{left:?}");
    // None has: what it was is known, or not.
    leases.retain(|lease| lease.id != more);
    for is_known in [true, false] {
        leases.retain(|lease| is_known || lease.id != outer);
        let (after, lost, ended) = restored(leases.clone(), (!is_known).then_some(GroupId(1)));
        assert_eq!(lost, is_known.then_some(outer).as_slice());
        assert!(ended.iter().all(why), "{ended:?}");
        let ended = ended.into_iter().map(|(id, _)| id);
        assert_eq!(ended.collect::<BTreeSet<_>>(), below);
        assert_eq!(after.leases().count(), 1);
    }
}
