//! What a decision of a host's arbiter costs: 512 CPUs, 10,000 vCPUs with leases.
//!
//! `cargo bench -p arbiter-host`; the goals are a million decisions a second, and a
//! cost that grows with the CPUs in the mask and hardly with the leases.

mod workload;

use arbiter_host::{Scope, ThreadId};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use workload::{decide, host, terms};

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

criterion_group!(benches, decisions);
criterion_main!(benches);
