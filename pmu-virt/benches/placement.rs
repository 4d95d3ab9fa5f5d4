//! What it costs to find physical counters for all who want one.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};

use pmu_virt::{Constraint, CounterId, Demand, SlotIndex, SlotSet, assign_most, try_assign};

const COUNTERS: usize = 8;

/// So many demands of four classes by precedence: what is reserved, the guest's, firm
/// contexts and what has the rest. One in four can be counted on half of the counters
/// only; the first eight have a place.
fn demands(count: u8) -> Vec<Demand> {
    let any = Constraint::any(COUNTERS);
    let few = Constraint::slots(SlotSet::below(COUNTERS / 2));
    let demand = |n: u8| Demand {
        counter: CounterId::Programmable(n),
        constraint: if n % 4 == 3 { few } else { any },
        held: (usize::from(n) < COUNTERS).then_some(SlotIndex(n ^ 1)),
    };
    (0..count).map(demand).collect()
}

fn placement(criterion: &mut Criterion) {
    let slots = SlotSet::below(COUNTERS);
    let mut group = criterion.benchmark_group("8 counters");
    for count in [4, 8, 16] {
        let demands = demands(count);
        group.bench_function(format!("{count} claims"), |bench| {
            bench.iter(|| {
                let all = try_assign(black_box(&demands), slots);
                all.unwrap_or_else(|| assign_most(black_box(&demands), slots, 0))
            });
        });
        group.bench_function(format!("{count} claims, in turns"), |bench| {
            bench.iter(|| assign_most(black_box(&demands), slots, 3));
        });
    }
    group.finish();
}

criterion_group!(benches, placement);
criterion_main!(benches);
