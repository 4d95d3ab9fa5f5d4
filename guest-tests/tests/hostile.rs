//! Hostile guests: nothing that a guest does may panic, hang or leak, on KVM or on the processor in
//! software.

use std::ops::Range;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use guest_tests::hostile::{Batch, Census};
use guest_tests::l1;
use guest_tests::micro::{Lab, LabError};
use vmm::host::KvmAccessError;
use vmm::kvm::HostError;
use vmm::sync::lock;

/// Guests on a host's own KVM, and in L1, where an emulated processor runs them.
const GUESTS: u64 = 1_000;
const GUESTS_IN_L1: u64 = 150;
/// Each of which has as much time, and no exits that take most of it.
const GUESTS_ON_EMU: u64 = 240;
/// Overrides each.
const GUESTS_VARIABLE: &str = "UMPIRE_HOSTILE_GUESTS";
/// Plays one guest only, to look at it.
const SEED_VARIABLE: &str = "UMPIRE_HOSTILE_SEED";

/// Guests that end L1's QEMU itself, without a word: its emulation of SVM does
/// not contain them. A real processor's KVM and the host's own run them.
const FATAL_IN_L1: [u64; 1] = [37];

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

/// `seeds` in pieces of at most [`PER_BATCH`], without those to leave out.
fn batches(seeds: Range<u64>, left_out: &[u64]) -> Vec<Range<u64>> {
    let mut batches: Vec<Range<u64>> = Vec::new();
    for seed in seeds.filter(|seed| !left_out.contains(seed)) {
        match batches.last_mut() {
            Some(last) if last.end == seed && seed - last.start < PER_BATCH => last.end += 1,
            _ => batches.push(seed..seed + 1),
        }
    }
    batches
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
    let (workers, default) = if l1::inside() {
        (WORKERS_IN_L1, GUESTS_IN_L1)
    } else {
        (WORKERS, GUESTS)
    };
    play(&lab, workers, default);
}

/// Their vCPUs run on a processor in software, whatever this machine has.
#[test]
fn hostile_guests_on_emu() {
    if l1::inside() {
        return;
    }
    // What is freed goes back to the system at once, so what stays is a leak: code of the guests
    // and what they write to ports is much of what they take here.
    const PLAIN: [(&str, &str); 3] = [
        ("MALLOC_ARENA_MAX", "1"),
        ("MALLOC_TRIM_THRESHOLD_", "0"),
        ("MALLOC_MMAP_THRESHOLD_", "32768"),
    ];
    if std::env::var_os(PLAIN[0].0).is_some() {
        play(&Lab::emulated(), WORKERS, GUESTS_ON_EMU);
        return;
    }
    let program = std::env::current_exe().expect("a running test has a file");
    let mut again = Command::new(program);
    again.args(["--exact", "hostile::hostile_guests_on_emu", "--nocapture"]);
    let status = again.envs(PLAIN).status().expect("the same program");
    assert!(status.success(), "{status}");
}

/// Plays `default` guests, unless another number is asked for. What they leave behind is looked for
/// in the whole process.
fn play(lab: &Lab, workers: usize, default: u64) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = lock(&ALONE);
    let guests = number(GUESTS_VARIABLE).unwrap_or(default);
    let seeds = match number(SEED_VARIABLE) {
        Some(seed) => seed..seed + 1,
        None => 0..guests,
    };
    let left_out: &[u64] = if l1::inside() { &FATAL_IN_L1 } else { &[] };
    for seed in left_out.iter().filter(|seed| seeds.contains(seed)) {
        println!("left out: seed {seed}: it ends the QEMU that L1 runs in");
    }
    let batches = batches(seeds, left_out);
    let first = Census::take().expect("/proc");
    // Threads' stacks, allocators' arenas and KVM's modules are there after this.
    let warm = Batch::run(lab, 0..8, workers, TIME);
    assert!(warm.failures.is_empty(), "{:?}", warm.failures);
    let before = first.settled().expect("/proc");
    println!("before: {before:?}");

    let start = Instant::now();
    let mut all = Batch::default();
    for batch in &batches {
        all.add(Batch::run(lab, batch.clone(), workers, TIME));
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
    let wanted: u64 = batches.iter().map(|batch| batch.end - batch.start).sum();
    assert_eq!(all.guests, wanted);
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
