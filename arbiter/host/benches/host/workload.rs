//! A host of 512 CPUs whose vCPUs hold leases, and a request and its release there.
//! `umpire bench arbiter` has the same.

use std::hint::black_box;
use std::sync::Arc;

use arbiter::CounterSet;
use arbiter_host::{
    BootTime, Caller, CpuSet, Demand, Group, GroupId, HostArbiter, HostPmu, HostPolicy, Outcome,
    Owner, PmuId, Scope, Tenant, TenantId, Terms, ThreadId, Waits,
};

/// CPUs of the host.
pub(crate) const CPUS: u32 = 512;
/// CPUs on which each vCPU may run.
pub(crate) const VCPU_CPUS: u32 = 16;
const CALLER: Caller = Caller {
    tenant: TenantId(0),
    uid: 0,
    operator: true,
};

fn owner() -> Owner {
    Owner {
        tenant: TenantId(0),
        uid: 0,
        pid: 1,
        label: String::new(),
        by: None,
    }
}

/// Two programmable counters on so many CPUs from `first` on.
pub(crate) fn terms(first: u32, cpus: u32, scope: Scope) -> Terms {
    let demand = Demand {
        pmu: PmuId(0),
        counters: CounterSet::first(6, 0),
    };
    Terms {
        demands: vec![demand; 2],
        at_least: 2,
        cpus: (0..cpus).map(|cpu| (first + cpu) % CPUS).collect(),
        scope,
        guaranteed: true,
        priority: 0,
        preemptible: false,
        lasts: None,
        waits: Waits::No,
    }
}

/// A host on which so many vCPUs hold two counters each, on [`VCPU_CPUS`] of its CPUs.
pub(crate) fn host(vcpus: u32) -> HostArbiter {
    let pmu = HostPmu {
        name: "cpu".into(),
        counters: CounterSet::first(6, 3),
        domains: (0..CPUS).map(|cpu| CpuSet::from_iter([cpu])).collect(),
        for_threads: true,
    };
    let tenant = Tenant {
        most_leases: usize::MAX,
        ..Tenant::open("all")
    };
    let policy = HostPolicy {
        tenants: vec![tenant],
        ..HostPolicy::default()
    };
    let mut host = HostArbiter::new(vec![pmu], policy).expect("it fits");
    let mut out = Vec::new();
    for vcpu in 0..vcpus {
        let scope = Scope::Thread(vec![ThreadId {
            number: vcpu,
            started: 0,
        }]);
        let terms = terms(vcpu * VCPU_CPUS, VCPU_CPUS, scope);
        host.request(owner(), terms, BootTime(0), &mut out)
            .expect("they share in time");
        out.clear();
    }
    host
}

/// A control group that is in no other.
pub(crate) fn group(number: u32) -> Scope {
    Scope::Group(Arc::new(Group {
        id: GroupId(number.into()),
        above: Vec::new(),
        path: format!("/{number}"),
    }))
}

/// A thread that is none of the vCPUs.
pub(crate) fn thread(number: u32) -> Scope {
    Scope::Thread(vec![ThreadId {
        number: u32::MAX - number,
        started: 0,
    }])
}

/// Has so many of these lease two counters of one CPU each.
pub(crate) fn lease(host: &mut HostArbiter, of: fn(u32) -> Scope, count: u32) {
    let mut out = Vec::new();
    for number in 0..count {
        let terms = terms(number, 1, of(number));
        host.request(owner(), terms, BootTime(0), &mut out)
            .expect("they share in time");
        out.clear();
    }
}

/// A request and its release: two decisions.
pub(crate) fn decide(host: &mut HostArbiter, terms: &Terms) {
    let mut out = Vec::new();
    let now = BootTime(1);
    let granted = host.request(owner(), black_box(terms.clone()), now, &mut out);
    let Ok(Outcome::Granted { lease, .. }) = granted else {
        panic!("{granted:?}")
    };
    host.release(lease, 0, None, CALLER, now, &mut out)
        .expect("it is there");
    black_box(out);
}
