//! What a decision of a host's arbiter costs: 512 CPUs, 10,000 vCPUs with leases.
//!
//! `cargo bench -p arbiter --bench host`; the goals are a million decisions a second, and a
//! cost that grows with the CPUs in the mask and hardly with the leases.

use std::hint::black_box;

use arbiter::CounterSet;
use arbiter::host::{
    BootTime, Caller, CpuSet, Demand, HostArbiter, HostPmu, HostPolicy, Outcome, Owner, PmuId,
    Scope, Tenant, TenantId, Terms, ThreadId, Waits,
};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const CPUS: u32 = 512;
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
    }
}

/// Two programmable counters on so many CPUs from `first` on.
fn terms(first: u32, cpus: u32, scope: Scope) -> Terms {
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

/// A host on which so many vCPUs hold two counters each, on one of 16 CPUs.
fn host(vcpus: u32) -> HostArbiter {
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
        let scope = Scope::Thread(vec![ThreadId(vcpu)]);
        let terms = terms(vcpu * 16, 16, scope);
        host.request(owner(), terms, BootTime(0), &mut out)
            .expect("they share in time");
        out.clear();
    }
    host
}

/// A request and its release: two decisions.
fn decide(host: &mut HostArbiter, terms: &Terms) {
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

fn decisions(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("host");
    group.throughput(Throughput::Elements(2));
    for vcpus in [100, 1_000, 10_000] {
        let mut host = host(vcpus);
        for cpus in [1, 16, 128, 512] {
            for (scope, name) in [
                (Scope::Cpu, "cpu"),
                (Scope::Thread(vec![ThreadId(u32::MAX)]), "thread"),
            ] {
                let terms = terms(7, cpus, scope);
                let id = BenchmarkId::new(name, format!("{vcpus} leases, {cpus} CPUs"));
                group.bench_function(id, |bench| bench.iter(|| decide(&mut host, &terms)));
            }
        }
    }
    group.finish();
}

criterion_group!(benches, decisions);
criterion_main!(benches);
