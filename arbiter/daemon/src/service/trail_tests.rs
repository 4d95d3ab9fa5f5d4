//! Who has caused what a lease is told, as the audit has it.

use arbiter_host::{BootTime, CpuSet, GroupRecord, HostArbiter};
use serde_json::json;
use umpire_lease::INTERFACE;

use super::*;
use crate::audit::{AuditConfig, Record};
use crate::config::ArbiterConfig;
use crate::journal::tests::lease;
use crate::peer::Client;
use crate::service::ConnectionId;

const LOUD: u32 = 7;
const QUIET: u32 = 8;
/// Of both tenants, the quiet one first.
const BOTH: u32 = 9;

fn service() -> Service {
    let text = "grace-ms = 0\n[[pmu]]\nprogrammable = 4\ncpus = \"0\"\n\
                [[tenant]]\nname = \"quiet\"\nusers = [8, 9]\nwhole-cpus = true\n\
                [[tenant]]\nname = \"loud\"\nusers = [7, 9]\nwhole-cpus = true\n";
    let config = ArbiterConfig::parse("test".as_ref(), text).expect("a configuration");
    let audit = AuditConfig {
        path: "audit".into(),
        size: 4096,
        keep: 8,
        age_ms: None,
    };
    let config = ArbiterConfig {
        audit: Some(audit),
        ..config
    };
    let pmus = config.host_pmus(&CpuSet::from_iter([0]));
    let arbiter = HostArbiter::new(pmus, config.policy.clone()).expect("the policy fits");
    Service::new(arbiter, config)
}

fn acquire(service: &mut Service, uid: u32, guaranteed: bool) {
    acquire_for(service, uid, guaranteed, None);
}

fn acquire_for(service: &mut Service, uid: u32, guaranteed: bool, tenant: Option<&str>) {
    let client = Client {
        pid: 40 + uid,
        uid,
        ..Client::default()
    };
    let request = json!({
        "counters": [{ "count": 4 }],
        "cpus": "0",
        "guaranteed": guaranteed,
        "waits_ms": -1,
        "tenant": tenant,
    });
    let method = format!("{INTERFACE}.Acquire");
    let mut call = Request::create(method, Some(json!({ "request": request })));
    call.more = Some(true);
    service.call(ConnectionId(u64::from(uid)), &client, &call, BootTime(1));
}

/// Event, tenant and cause of the records since the last time.
fn told(service: &mut Service) -> Vec<(String, String, Option<String>)> {
    let records = service.output.take_records();
    let text = |record: &Record, key: &str| {
        let text = record.get(key).and_then(Value::as_str);
        text.map(str::to_owned)
    };
    let records = records.iter();
    records
        .map(|record| {
            let (event, tenant) = (text(record, "event"), text(record, "tenant"));
            (
                event.unwrap_or_default(),
                tenant.unwrap_or_default(),
                text(record, "by"),
            )
        })
        .collect()
}

#[test]
fn what_one_tenant_does_to_another_is_its_doing() {
    let mut service = service();
    acquire(&mut service, QUIET, false);
    let own = told(&mut service);
    assert!(
        own.iter()
            .all(|(_, tenant, by)| tenant == "quiet" && by.is_none()),
        "{own:?}"
    );
    for _ in 0..3 {
        acquire(&mut service, LOUD, true);
        service.gone(ConnectionId(u64::from(LOUD)), BootTime(2));
        let told = told(&mut service);
        let (of_quiet, of_loud): (Vec<_>, Vec<_>) =
            told.iter().partition(|(_, tenant, _)| tenant == "quiet");
        assert!(of_quiet.len() >= 3, "{told:?}");
        for (event, _, by) in of_quiet {
            assert_eq!(by.as_deref(), Some("loud"), "{event}: {told:?}");
        }
        assert!(of_loud.iter().all(|(_, _, by)| by.is_none()), "{told:?}");
    }
}

/// What a user of two tenants asks for in the name of one of them is that one's doing.
#[test]
fn what_a_user_of_two_tenants_does_is_the_named_ones_doing() {
    let mut service = service();
    acquire(&mut service, QUIET, false);
    told(&mut service);
    for _ in 0..3 {
        acquire_for(&mut service, BOTH, true, Some("loud"));
        let granted = told(&mut service);
        let of_loud = granted.iter().filter(|(_, tenant, _)| tenant == "loud");
        let causes: Vec<_> = of_loud.map(|(_, _, by)| by.as_deref()).collect();
        assert!(!causes.is_empty(), "{granted:?}");
        assert!(causes.iter().all(Option::is_none), "{granted:?}");
        let of_quiet = granted.iter().find(|(_, tenant, _)| tenant == "quiet");
        let (_, _, by) = of_quiet.expect("it is told");
        assert_eq!(by.as_deref(), Some("loud"), "{granted:?}");
        service.gone(ConnectionId(u64::from(BOTH)), BootTime(2));
        told(&mut service);
    }
}

/// A refusal is in the audit as that of the tenant for which it was asked, and it is the same
/// however many others there were in that second.
#[test]
fn a_refusal_is_that_of_the_tenant_that_was_named() {
    let mut service = service();
    acquire(&mut service, QUIET, true);
    told(&mut service);
    let request = |tenant: Option<&str>| {
        let counters = json!([{ "count": 4 }]);
        json!({ "request": { "counters": counters, "cpus": "0", "tenant": tenant } })
    };
    let client = Client {
        pid: 40 + BOTH,
        uid: BOTH,
        ..Client::default()
    };
    let mut refused = |tenant| {
        let method = format!("{INTERFACE}.Acquire");
        let call = Request::create(method, Some(request(tenant)));
        service.call(ConnectionId(u64::from(BOTH)), &client, &call, BootTime(1));
        told(&mut service)
    };
    let of = |tenant: &str| vec![("refused".to_owned(), tenant.to_owned(), None)];
    for (named, tenant) in [(Some("loud"), "loud"), (Some("quiet"), "quiet")] {
        assert_eq!(refused(named), of(tenant));
        // Each once a second.
        assert_eq!(refused(named), []);
    }
    assert_eq!(refused(None), [], "it is the first tenant's");
}

/// An event that the kernel does not open is refused to the tenant of its lease.
#[test]
fn a_refused_event_is_that_of_the_tenant_of_its_lease() {
    let mut service = service();
    acquire_for(&mut service, BOTH, true, Some("loud"));
    let lease = service.arbiter().leases().next().expect("it is granted").id;
    let client = Client {
        uid: BOTH,
        ..Client::default()
    };
    for (lease, tenant) in [(Some(lease), "loud"), (None, "quiet")] {
        let rules = (service.config(), service.arbiter());
        let refusal = umpire_lease::Refusal::of(Reason::NotOpened, "no");
        let asker = events::NoEvent::asker(rules, &client, lease);
        let no = events::NoEvent::of_host(&client, asker, refusal);
        service.hear(Told::Denied(no));
        let told = told(&mut service);
        let (event, of, _) = told.last().expect("it is told");
        assert_eq!((event.as_str(), of.as_str()), ("refused", tenant));
    }
    // A user without a tenant asks for none.
    let nobody = Client {
        uid: 4242,
        ..Client::default()
    };
    let request = umpire_lease::EventRequest {
        lease: lease.0,
        ..umpire_lease::EventRequest::default()
    };
    let no = service.allow(&nobody, &request, &mut 0);
    assert_eq!(no.expect_err("it is another's").tenant, None);
}

/// The host has no such PMU any more, or the configuration no such tenant.
#[test]
fn what_does_not_come_back_and_what_ends_with_it_is_in_the_audit() {
    let in_group = |id, above: &[u64]| {
        let group = GroupRecord {
            id: 90 + id,
            above: above.to_vec(),
            path: format!("/{id}"),
        };
        Stored {
            tenant: "quiet".into(),
            uid: QUIET,
            demands: vec![("cpu".into(), 0xf)],
            at_least: 1,
            cpus: "0".into(),
            threads: None,
            started: None,
            group: Some(group),
            leaving: None,
            ..lease(id, 1)
        }
    };
    let part = |id, of: u64| Stored {
        threads: Some(vec![9]),
        started: Some(vec![345]),
        with_others: true,
        group: in_group(of, &[]).group,
        ..in_group(id, &[])
    };
    let leases = vec![
        Stored {
            demands: vec![("gone".into(), 1)],
            by: Some(("loud".into(), LOUD)),
            ..in_group(1, &[])
        },
        Stored {
            tenant: "nobody".into(),
            ..in_group(2, &[])
        },
        in_group(3, &[91]),
        part(4, 2),
        in_group(5, &[]),
    ];
    let mut service = service();
    service.restore(leases, 6, BootTime(1));
    let records = service.output.take_records();
    let ended = records.iter().filter(|record| record["event"] == "ended");
    // Each says what it holds, so that who adds that up knows of its end.
    for record in ended.clone() {
        let is_there = |key: &&str| record.get(*key).is_some_and(Value::is_u64);
        assert!(
            ["wants", "holds", "blind_ms"].iter().all(is_there),
            "{record:?}"
        );
    }
    let first = ended.clone().next().expect("one has ended");
    assert_eq!(
        (&first["holds"], &first["asked_by_uid"]),
        (&json!(0), &json!(LOUD))
    );
    let ended: Vec<(u64, &str)> = ended
        .map(|record| {
            let why = record["why"].as_str().unwrap_or_default();
            (record["lease"].as_u64().unwrap_or_default(), why)
        })
        .collect();
    let right = [
        (1, "no-such-counters"),
        (2, "unknown-tenant"),
        (4, "above-ended"),
        (3, "above-ended"),
    ];
    assert_eq!(ended, right);
    let left: Vec<u64> = service.arbiter().leases().map(|lease| lease.id.0).collect();
    assert_eq!(left, [5]);
    // So it is in the journal.
    let left = service.all();
    let left = left.iter().filter(|entry| matches!(entry, Entry::Lease(_)));
    assert_eq!(left.count(), 1);
}

#[test]
fn who_comes_first_is_named_by_its_lease() {
    let mut service = service();
    acquire(&mut service, QUIET, false);
    acquire(&mut service, LOUD, true);
    service.advance(BootTime(2));
    let records = service.output.take_records();
    let first = records.iter().find(|record| record["tenant"] == "loud");
    let first = first.and_then(|record| record["lease"].as_u64());
    assert!(first.is_some(), "{records:?}");
    let named = |event: &str| {
        let mut of_quiet = records.iter().filter(|record| record["tenant"] == "quiet");
        let of_it =
            of_quiet.find(|record| record["event"] == event && record["why"] == "preempted");
        of_it.and_then(|record| record.get("by_lease")?.as_u64())
    };
    for event in ["leaving", "holds"] {
        assert_eq!(named(event), first, "{event}: {records:?}");
    }
    // Nobody is named where a lease was granted.
    let granted = |record: &&Record| record["why"] == "granted";
    assert!(
        records
            .iter()
            .filter(granted)
            .all(|record| !record.contains_key("by_lease")),
        "{records:?}"
    );
}
