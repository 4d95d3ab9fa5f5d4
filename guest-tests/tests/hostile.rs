//! Hostile guests: nothing that a guest does may panic, hang or leak.

use std::time::{Duration, Instant};

use guest_tests::hostile::{Batch, Census};
use guest_tests::l1;
use guest_tests::micro::{Lab, LabError};
use vmm::host::KvmAccessError;
use vmm::kvm::HostError;

/// Guests on a host's own KVM, and in L1, where an emulated processor runs them.
const GUESTS: u64 = 1_000;
const GUESTS_IN_L1: u64 = 150;
/// Overrides both.
const GUESTS_VARIABLE: &str = "UMPIRE_HOSTILE_GUESTS";
/// Plays one guest only, to look at it.
const SEED_VARIABLE: &str = "UMPIRE_HOSTILE_SEED";

const PER_BATCH: u64 = 100;
/// Guests at a time; L1's two emulated processors have enough with one.
const WORKERS: usize = 4;
const WORKERS_IN_L1: usize = 1;
const TIME: Duration = Duration::from_millis(50);
/// Resident memory may grow by allocators' caches, not by guests: a leaked
/// guest's memory alone would be some hundred KiB.
const GROWTH_KIB: u64 = 16 << 10;

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().expect(variable))
}

#[test]
fn a_thousand_hostile_guests() {
    let lab = match Lab::open() {
        Ok(lab) => lab,
        Err(LabError::Host(error @ HostError::Access(KvmAccessError::Missing { .. })))
            if !l1::inside() =>
        {
            println!("skipped: a_thousand_hostile_guests: {error}");
            return;
        }
        Err(error) => panic!("no guest can run here: {error}"),
    };
    let workers = if l1::inside() { WORKERS_IN_L1 } else { WORKERS };
    let default = if l1::inside() { GUESTS_IN_L1 } else { GUESTS };
    let guests = number(GUESTS_VARIABLE).unwrap_or(default);
    let seeds = match number(SEED_VARIABLE) {
        Some(seed) => seed..seed + 1,
        None => 0..guests,
    };
    // Threads' stacks, allocators' arenas and KVM's modules are there after this.
    let warm = Batch::run(&lab, 0..8, workers, TIME);
    assert!(warm.failures.is_empty(), "{:?}", warm.failures);
    let before = Census::take().expect("/proc");
    println!("before: {before:?}");

    let start = Instant::now();
    let mut all = Batch::default();
    for first in seeds
        .clone()
        .step_by(usize::try_from(PER_BATCH).expect("a small number"))
    {
        let batch = first..(first + PER_BATCH).min(seeds.end);
        all.add(Batch::run(&lab, batch.clone(), workers, TIME));
        let now = before.settled().expect("/proc");
        assert_eq!(
            (now.descriptors, now.threads),
            (before.descriptors, before.threads),
            "left behind by the guests of seeds {batch:?}"
        );
    }
    let after = before.settled().expect("/proc");
    println!("after: {after:?}");
    println!(
        "{} guests in {:.1} s, {} PMIs, slowest stop {:?}",
        all.guests,
        start.elapsed().as_secs_f64(),
        all.pmis,
        all.slowest_stop
    );
    for (end, count) in &all.ends {
        println!("{count:>6} {end}");
    }
    assert_eq!(all.guests, seeds.end - seeds.start);
    for failure in &all.failures {
        println!("FAILED: {}: {}", failure.guest, failure.what);
    }
    assert!(
        all.failures.is_empty(),
        "{} guests failed",
        all.failures.len()
    );
    assert!(
        after.resident_kib <= before.resident_kib + GROWTH_KIB,
        "resident memory grew from {} to {} KiB",
        before.resident_kib,
        after.resident_kib
    );
}
