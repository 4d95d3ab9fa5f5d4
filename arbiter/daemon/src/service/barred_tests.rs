//! What a user loses whose event counts on, and what others see of it.

use crate::budget::{EventSpec, Follows, HandedEvent, Rings};
use arbiter::CounterSet;
use arbiter_host::{CpuSet, GroupId, HostArbiter, LeaseId, PmuId};
use serde_json::{Value, json};
use umpire_lease::INTERFACE;
use varlink::{Reply, Request};

use super::*;
use crate::config::ArbiterConfig;
use crate::peer::Client;
use crate::service::ConnectionId;

/// Root, an operator, and two users, on two CPUs with four counters each.
fn service() -> Service {
    let text = "[[pmu]]\nprogrammable = 4\nperf-type = 1\ncpus = \"0-1\"\n\
                [[tenant]]\nname = \"root\"\nusers = [0]\noperator = true\n\
                [[tenant]]\nname = \"blue\"\nusers = [7]\nwhole-cpus = true\nopens-events = true\n\
                [[tenant]]\nname = \"green\"\nusers = [8]\nwhole-cpus = true\n";
    let config = ArbiterConfig::parse("test".as_ref(), text).expect("a configuration");
    let config = ArbiterConfig {
        audit: Some(crate::audit::AuditConfig {
            path: "audit".into(),
            size: 4096,
            keep: 8,
            age_ms: None,
        }),
        ..config
    };
    let pmus = config.host_pmus(&CpuSet::from_iter([0, 1]));
    let arbiter = HostArbiter::new(pmus, config.policy.clone()).expect("the policy fits");
    Service::new(arbiter, config)
}

/// Its answers go to a connection of the user's number.
fn send(service: &mut Service, uid: u32, method: &str, parameters: Value) {
    let client = Client {
        pid: 40 + uid,
        uid,
        ..Client::default()
    };
    let request = Request::create(format!("{INTERFACE}.{method}"), Some(parameters));
    let from = ConnectionId(u64::from(uid));
    service.call(from, &client, &request, BootTime(1));
}

fn call(service: &mut Service, uid: u32, method: &str, parameters: Value) -> Reply {
    let before = service.output.answers().len();
    send(service, uid, method, parameters);
    let from = ConnectionId(u64::from(uid));
    let mut answers = service.output.answers()[before..].iter();
    let own = answers.rfind(|answer| answer.to == from);
    own.expect("an answer").reply.clone()
}

fn acquire(service: &mut Service, uid: u32, counters: u32) -> Reply {
    let request = json!({ "counters": [{ "count": counters }], "cpus": "0" });
    call(service, uid, "Acquire", json!({ "request": request }))
}

fn reason(reply: &Reply) -> String {
    let refusal = reply.parameters.as_ref().and_then(|all| all.get("refusal"));
    let reason = refusal.and_then(|refusal| refusal.get("reason")?.as_str());
    reason.unwrap_or("granted").to_owned()
}

fn allowed(thread: Option<u32>, cpu: Option<u32>) -> Allowed {
    Allowed::of(HandedEvent {
        spec: EventSpec {
            perf_type: 1,
            config: 1,
            config1: 0,
            config2: 0,
        },
        thread,
        cpu,
        rings: Rings::User,
        period: None,
        follows: Follows::Nothing,
    })
}

fn outlived(service: &mut Service, uid: u32, pid: u32, allowed: Allowed) {
    service.hear(Told::Outlived(Having { uid, pid, allowed }));
}

fn taken(thread: Option<u32>, cpu: Option<u32>) -> Taken {
    Taken {
        uid: 7,
        pid: 47,
        lease: LeaseId(1),
        pmu: PmuId(0),
        counters: CounterSet::first(4, 0),
        by: thread.map_or(TakenBy::Cpu, TakenBy::Thread),
        cpu,
    }
}

fn events(service: &Service) -> Vec<String> {
    let records = service.output.records().iter();
    let events = records.filter_map(|record| record.get("event")?.as_str());
    events.map(str::to_owned).collect()
}

#[test]
fn who_counts_on_loses_leases_and_events_until_an_operator_pardons() {
    let mut service = service();
    assert_eq!(reason(&acquire(&mut service, 7, 1)), "granted");
    assert_eq!(reason(&acquire(&mut service, 8, 1)), "granted");
    outlived(&mut service, 7, 47, allowed(Some(41), None));
    outlived(&mut service, 7, 47, allowed(Some(41), None));
    service.set_taken(vec![taken(Some(41), None)], BootTime(2));
    // Its leases have ended, and no other's.
    let left: Vec<u32> = service
        .arbiter()
        .leases()
        .map(|one| one.owner.uid)
        .collect();
    assert_eq!(left, [8]);
    let bars = service.output.entries().iter();
    let bars = bars.filter(|entry| matches!(entry, Entry::Barred(_)));
    assert_eq!(bars.count(), 1);
    let told = events(&service);
    for event in ["barred", "outsider", "ended"] {
        assert!(told.iter().any(|one| one == event), "{event}: {told:?}");
    }
    assert!(
        service
            .all()
            .iter()
            .any(|one| matches!(one, Entry::Barred(_)))
    );

    // It gets nothing, and nobody is promised what it has: of four, one is user 8's.
    assert_eq!(reason(&acquire(&mut service, 7, 1)), "barred");
    let explain = json!({ "request": { "counters": [{ "count": 1 }] } });
    assert_eq!(reason(&call(&mut service, 7, "Explain", explain)), "barred");
    let claim = json!({ "lease": 2 });
    assert_eq!(reason(&call(&mut service, 7, "Claim", claim)), "barred");
    assert_eq!(reason(&acquire(&mut service, 8, 3)), "held");
    assert_eq!(reason(&acquire(&mut service, 8, 2)), "granted");
    let who = call(&mut service, 0, "Who", json!({}))
        .parameters
        .expect("places");
    assert_eq!(
        (&who["places"][0]["outside"], &who["places"][1]["outside"]),
        (&json!(1), &json!(1))
    );
    let outsiders = who["outsiders"].as_array().expect("some");
    assert!(
        outsiders
            .iter()
            .any(|one| one["what"] == "process" && one["pid"] == 47)
    );
    assert!(
        outsiders
            .iter()
            .any(|one| one["what"] == "barred" && one["uid"] == 7)
    );
    let metrics = service.render(crate::metrics::InUse::default());
    assert!(
        metrics.contains("umpire_arbiter_users_barred 1"),
        "{metrics}"
    );
    assert!(
        metrics.contains("umpire_arbiter_outsiders{what=\"process\"} 1"),
        "{metrics}"
    );

    // Others see that there is somebody, and no process.
    let who = call(&mut service, 8, "Who", json!({}))
        .parameters
        .expect("places");
    let seen = who["outsiders"].to_string();
    assert!(
        seen.contains("1 processes of other users") && !seen.contains("47"),
        "{seen}"
    );

    let pardon = json!({ "uid": 7 });
    for uid in [7, 8] {
        assert_eq!(
            reason(&call(&mut service, uid, "Pardon", pardon.clone())),
            "foreign"
        );
    }
    assert!(service.is_barred(7));
    assert_eq!(
        reason(&call(&mut service, 0, "Pardon", pardon.clone())),
        "granted"
    );
    assert_eq!(
        reason(&call(&mut service, 0, "Pardon", pardon)),
        "wrong-request"
    );
    assert_eq!(service.take_forgiven(), [7]);
    service.set_taken(Vec::new(), BootTime(3));
    assert_eq!(reason(&acquire(&mut service, 7, 1)), "granted");
    let told = events(&service);
    assert!(told.contains(&"pardoned".to_owned()) && told.contains(&"outsider-gone".to_owned()));
    assert!(
        !service
            .all()
            .iter()
            .any(|one| matches!(one, Entry::Barred(_)))
    );
}

#[test]
fn what_is_taken_is_taken_where_it_may_be() {
    let mut service = service();
    let mut check = |all: Vec<Taken>, expected: [usize; 2]| {
        service.set_taken(all.clone(), BootTime(1));
        let of = |domain| Place {
            pmu: PmuId(0),
            domain,
        };
        let outside = [0, 1].map(|domain| service.arbiter().outside(of(domain)).len());
        assert_eq!(outside, expected, "{all:?}");
    };
    let (one, other) = (Some(41), Some(42));
    check(vec![taken(one, None)], [1, 1]);
    check(vec![taken(one, None), taken(one, None)], [2, 2]);
    // Two threads share a counter in time.
    check(vec![taken(one, None), taken(other, None)], [1, 1]);
    check(vec![taken(one, Some(0)), taken(other, None)], [1, 1]);
    check(vec![taken(one, Some(0)), taken(one, None)], [2, 1]);
    check(vec![taken(None, Some(1)), taken(one, Some(1))], [0, 2]);
    check(vec![taken(None, Some(1)), taken(one, None)], [1, 2]);
    // What threads of a group have inherited they may all have; groups share it in time.
    let of_group = |number, cpu| Taken {
        by: TakenBy::Group(GroupId(number)),
        ..taken(None, cpu)
    };
    check(vec![of_group(5, None), of_group(5, None)], [2, 2]);
    check(vec![of_group(5, None), of_group(6, Some(1))], [1, 1]);
    check(vec![of_group(5, None), of_group(5, Some(1))], [1, 2]);
    check(vec![of_group(5, None), taken(one, None)], [1, 1]);
    // No more than there are; CPUs that are none.
    check(vec![taken(one, Some(0)); 99], [4, 0]);
    check(vec![taken(one, Some(9))], [0, 0]);
    check(vec![], [0, 0]);
}

/// A lease whose counters are taken is broken, as by any outsider.
#[test]
fn whoever_holds_what_is_taken_is_told() {
    let mut service = service();
    assert_eq!(reason(&acquire(&mut service, 8, 4)), "granted");
    service.set_taken(vec![taken(Some(41), None)], BootTime(2));
    assert!(events(&service).contains(&"broken".to_owned()));
}

/// To find a thread of another PID namespace takes a look at many. Nobody has it done for whom
/// there is no event in any case.
#[test]
fn threads_are_looked_for_when_there_may_be_an_event() {
    let me = crate::task::Task::of(std::process::id()).expect("it can be seen");
    let client = |uid| Client {
        pid: std::process::id(),
        uid,
        process: me.as_ref().map(|me| me.id),
        is_inner: Some(true),
        ..Client::default()
    };
    let mut service = service();
    let lease = |service: &mut Service, uid| {
        let granted = acquire(service, uid, 1).parameters.expect("a lease");
        let of = |name: &str| granted["lease"][name].as_u64();
        let lease = of("id").expect("a number");
        wire::EventRequest {
            lease,
            generation: of("generation"),
            thread: Some(u32::MAX),
            ..wire::EventRequest::default()
        }
    };
    let looked = |service: &mut Service, uid, request: &wire::EventRequest| {
        let mut looks = 0;
        let refused = service.allow(&client(uid), request, &mut looks);
        (refused.expect_err("no event").refusal.reason, looks)
    };
    let none = wire::EventRequest {
        lease: 99,
        ..lease(&mut service, 7)
    };
    assert_eq!(looked(&mut service, 7, &none).1, 0, "no lease");
    // Its policy opens no events.
    let green = lease(&mut service, 8);
    assert_eq!(looked(&mut service, 8, &green), (Reason::NoEvents, 0));
    let blue = lease(&mut service, 7);
    let (reason, looks) = looked(&mut service, 7, &blue);
    assert!(
        reason == Reason::ForeignThread && looks > 0,
        "{reason} {looks}"
    );
    outlived(&mut service, 7, 1, allowed(None, Some(0)));
    assert_eq!(looked(&mut service, 7, &blue), (Reason::Barred, 0));
}

/// Who was to lose counters and does not any more: who waits to be told of them goes by that.
#[test]
fn a_lease_that_is_spared_has_changed() {
    let mut service = service();
    let ask = |service: &mut Service, uid: u32, guaranteed: bool| {
        let request = json!({
            "counters": [{ "count": 4 }], "cpus": "0", "guaranteed": guaranteed, "waits_ms": -1,
        });
        send(service, uid, "Acquire", json!({ "request": request }));
    };
    ask(&mut service, 7, false);
    let changed = |service: &mut Service| service.take().changed().to_vec();
    assert_eq!(changed(&mut service), [LeaseId(1)]);
    ask(&mut service, 8, true);
    assert_eq!(changed(&mut service), [LeaseId(1)], "it is to lose them");
    service.gone(ConnectionId(8), BootTime(2));
    assert!(changed(&mut service).contains(&LeaseId(1)), "it is spared");
}
