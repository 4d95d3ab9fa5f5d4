//! Decisions of the core on one thread, without socket and journal.

#[path = "../../../../arbiter/host/benches/host/workload.rs"]
pub(super) mod workload;

use std::time::{Duration, Instant};

use arbiter_host::{HostArbiter, Scope, Terms, ThreadId};
use serde::Serialize;

use super::{ArbiterOptions, nanos, progress};
use crate::stats::median;

/// CPUs in the mask of a request.
const MASKS: [u32; 4] = [1, workload::VCPU_CPUS, 128, workload::CPUS];
/// Decisions in a second that are wanted.
pub(super) const TARGET: f64 = 1_000_000.0;
/// A request and its release.
const DECISIONS: u64 = 2;
/// Requests that are timed together.
const BATCH: u64 = 64;
/// How long each row is measured.
const TIME: Duration = Duration::from_millis(100);

/// Requests of one kind.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CoreRow {
    /// Leases of vCPUs that are there, of two counters on 16 CPUs each.
    pub leases: u32,
    /// CPUs in the mask of the request.
    pub cpus: u32,
    /// `cpu` or `thread`.
    pub scope: &'static str,
    /// Nanoseconds for each decision, half of a request and its release.
    pub ns: f64,
    /// Decisions in a second.
    pub per_second: f64,
    /// A million in a second, or more.
    pub met: bool,
    /// No more than the row of fewest leases and CPUs, times the ratio of the CPUs and the
    /// ratio of the leases' logarithms.
    pub within_growth: bool,
}

pub(super) fn measure(options: &ArbiterOptions) -> Vec<CoreRow> {
    let mut rows: Vec<CoreRow> = Vec::new();
    for leases in [options.leases / 100, options.leases / 10, options.leases] {
        progress(&format!("{leases} leases in the core"));
        let mut host = workload::host(leases);
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
            for cpus in MASKS {
                let terms = workload::terms(7, cpus, scope.clone());
                let ns = time(&mut host, &terms, TIME);
                let per_second = 1e9 / ns;
                let mut row = CoreRow {
                    leases,
                    cpus,
                    scope: name,
                    ns,
                    per_second,
                    met: per_second >= TARGET,
                    within_growth: true,
                };
                let first = rows.iter().find(|first| first.scope == name);
                row.within_growth = first.is_none_or(|first| row.is_within_growth(first));
                rows.push(row);
            }
        }
    }
    rows
}

impl CoreRow {
    fn is_within_growth(&self, first: &Self) -> bool {
        let cpus = f64::from(self.cpus) / f64::from(first.cpus);
        let log = |leases: u32| f64::from(leases.max(2)).ln();
        self.ns <= first.ns * cpus * log(self.leases) / log(first.leases)
    }
}

/// Nanoseconds for each decision: the median of batches in that time.
pub(super) fn time(host: &mut HostArbiter, terms: &Terms, long: Duration) -> f64 {
    let mut batches = Vec::new();
    let until = Instant::now() + long;
    while batches.len() < 3 || Instant::now() < until {
        let begun = Instant::now();
        (0..BATCH).for_each(|_| workload::decide(host, terms));
        batches.push(nanos(begun.elapsed()));
    }
    let batch = median(&mut batches).unwrap_or(u64::MAX).max(1);
    // A batch takes far less than 2^52 ns.
    #[allow(clippy::cast_precision_loss, reason = "see above")]
    let ns = batch as f64 / (BATCH * DECISIONS) as f64;
    ns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_by_cpus_and_the_logarithm_of_leases() {
        let row = |leases, cpus, ns| CoreRow {
            leases,
            cpus,
            scope: "cpu",
            ns,
            per_second: 1e9 / ns,
            met: false,
            within_growth: false,
        };
        let first = row(100, 1, 500.0);
        assert!(row(10_000, 1, 999.0).is_within_growth(&first));
        assert!(!row(10_000, 1, 1_001.0).is_within_growth(&first));
        assert!(row(100, 16, 7_999.0).is_within_growth(&first));
        assert!(!row(100, 16, 8_001.0).is_within_growth(&first));
    }

    #[test]
    fn every_kind_of_request_has_a_row() {
        let options = ArbiterOptions {
            parts: Vec::new(),
            load_ms: 0,
            clients: 0,
            leases: 200,
            rounds: 0,
            iterations: 0,
        };
        let rows = measure(&options);
        assert_eq!(rows.len(), 3 * 2 * MASKS.len());
        assert!(rows.iter().all(|row| row.ns > 0.0 && row.per_second > 0.0));
    }
}
