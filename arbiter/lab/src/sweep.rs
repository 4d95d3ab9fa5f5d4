//! Sweeps: one workload under every scheme and policy, over many seeds.

use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::figures::{Figures, Metric, Who};
use crate::interval::{Estimate, estimate};
use crate::plan::{Machine, Variant, Workload};
use crate::simulate::simulate_watched;

/// The seeds of a sweep.
#[derive(Clone, Copy, Debug)]
pub struct Seeds {
    /// That of the first run of each variant.
    pub first: u64,
    /// How many runs each variant gets.
    pub count: NonZero<u32>,
}

/// One variant with the figures of all its seeds.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    pub variant: Variant,
    /// The figures, in the order of the seeds.
    pub runs: Vec<Figures>,
}

impl Cell {
    /// The mean of a figure over the seeds. `None` means that no run has it.
    pub fn estimate(&self, metric: Metric, who: Who) -> Option<Estimate> {
        estimate(self.runs.iter().map(|run| run.value(metric, who)))
    }
}

/// Runs every variant with seeds from `first` on. The result does not depend on the
/// number of threads. `progress` hears, from any of them, which part of the virtual time
/// of all runs is over.
pub fn sweep(
    (machine, workload): (&Machine, &Workload),
    variants: &[Variant],
    seeds: Seeds,
    threads: NonZero<usize>,
    progress: &(dyn Fn(f64) + Sync),
) -> Vec<Cell> {
    let Seeds { first, count } = seeds;
    let seeds = usize::try_from(count.get()).unwrap_or(usize::MAX);
    let all = variants.len().saturating_mul(seeds);
    let (next, over) = (AtomicUsize::new(0), AtomicU64::new(0));
    let whole = workload.length() as f64 * all as f64;
    let passed = |time| {
        let before = over.fetch_add(time, Ordering::Relaxed);
        progress((before + time) as f64 / whole);
    };
    let results: Mutex<Vec<Option<Figures>>> = Mutex::new(vec![None; all]);
    std::thread::scope(|scope| {
        for _ in 0..threads.get().min(all) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(variant) = variants.get(index / seeds) else {
                        return;
                    };
                    let seed = first.wrapping_add((index % seeds) as u64);
                    let figures = simulate_watched(machine, workload, variant, seed, &passed);
                    // A run that panics ends the sweep when the scope joins it.
                    if let Ok(mut results) = results.lock() {
                        results[index] = Some(figures);
                    }
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_default();
    let mut results = results.into_iter().flatten();
    variants
        .iter()
        .map(|variant| Cell {
            variant: variant.clone(),
            runs: results.by_ref().take(seeds).collect(),
        })
        .collect()
}
