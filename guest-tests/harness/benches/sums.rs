//! Benches of gungraun.

use std::hint::black_box;

use counted_benches::squares;
use gungraun::{library_benchmark, library_benchmark_group, main};

#[library_benchmark]
#[bench::few(1_000)]
#[bench::many(2_000)]
fn sums(end: u64) -> u64 {
    black_box(squares(black_box(end)))
}

library_benchmark_group!(name = all, benchmarks = sums);
main!(library_benchmark_groups = all);
