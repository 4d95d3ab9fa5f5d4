//! What a decision of a host's arbiter costs: 512 CPUs, 10,000 vCPUs with leases.
//!
//! `cargo bench -p arbiter-host`; the goals are a million decisions a second, and a
//! cost that grows with the CPUs in the mask and hardly with the leases.

mod workload;

use arbiter_host::{Scope, ThreadId};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use workload::{decide, group, host, lease, terms, thread};

fn decisions(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("host");
    group.throughput(Throughput::Elements(2));
    for vcpus in [100, 1_000, 10_000] {
        let mut host = host(vcpus);
        for cpus in [1, 16, 128, 512] {
            for (scope, name) in [
                (Scope::Cpu, "cpu"),
                (
                    Scope::Thread(vec![ThreadId {
                        number: u32::MAX,
                        started: 0,
                    }]),
                    "thread",
                ),
            ] {
                let terms = terms(7, cpus, scope);
                let id = BenchmarkId::new(name, format!("{vcpus} leases, {cpus} CPUs"));
                group.bench_function(id, |bench| bench.iter(|| decide(&mut host, &terms)));
            }
        }
    }
    group.finish();
}

/// Requests that have nothing to do with control groups, beside leases of so many, and beside as
/// many of threads.
fn beside_groups(criterion: &mut Criterion) {
    let mut rows = criterion.benchmark_group("beside groups");
    rows.throughput(Throughput::Elements(2));
    for count in [1, 1_000, 10_000] {
        for (name, of) in [("threads", thread as fn(u32) -> Scope), ("groups", group)] {
            let mut host = host(10_000);
            lease(&mut host, of, count);
            let terms = terms(7, 1, Scope::Cpu);
            let id = BenchmarkId::new(name, count);
            rows.bench_function(id, |bench| bench.iter(|| decide(&mut host, &terms)));
        }
    }
    rows.finish();
}

criterion_group!(benches, decisions, beside_groups);
criterion_main!(benches);
