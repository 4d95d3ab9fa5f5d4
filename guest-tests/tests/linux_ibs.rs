//! Debian's kernels, 6.1 and 6.12, take instruction-based sampling, and their `perf` samples by
//! it.

use guest_tests::linux::perf::LOG;
use guest_tests::linux::{LinuxImage, Step, UnderUmpire};

/// What a kernel says when it meets something that should not be.
const TROUBLE: &str = "dmesg | grep -E 'WARNING|unchecked MSR|Call Trace|BUG:|Broken BIOS|\
     Firmware Bug|dazed|perfevents: irq loop|lockup' || true";
/// `clock` counts no ops, which bit 4 would announce.
const DETECTED: &str = "perf: AMD IBS detected (0x000000ef)";
/// Samples of ops that are there at the least: a sampler stands from each sample to its handler,
/// and L1 is slow, so that there are fewer than its period has room for.
const LEAST_OPS: usize = 100;
/// And of fetches, which the kernel stops until its next tick when they are too many.
const LEAST_FETCHES: usize = 20;

/// Every 4 ms, on a TSC of 2 to 3 GHz.
const RECORD_OPS: &str = "perf record -q OF -e ibs_op// -c 10000000 -o /tmp/op spin 2";
/// A fetch counter has 20 bits, which a TSC goes through in half a millisecond: that is about
/// what a handler takes in L1.
const RECORD_FETCHES: &str = "perf record -q OF -e ibs_fetch// -c 1000000 -o /tmp/fetch spin 1";
/// How many samples of `spin` there are of each function.
const SAMPLES: &str = "perf script -i FILE --comm spin -F ip,sym | sed 's/.* //' | sort | uniq -c \
     | sort -rn | head -n 40";

fn boot(image: LinuxImage, commands: &[&str]) -> Vec<Step> {
    let head = [LOG, "dmesg | grep -E 'IBS|LVT offset'"];
    let script = [&head, commands, &[TROUBLE]].concat().join("\n");
    let flags = [
        "--cpu-vendor",
        "amd",
        "--pmu",
        "amd-core,ibs=on",
        "--counters",
        "clock",
    ];
    let steps = UnderUmpire::new(image, &flags).run(&script).successes();
    let (said, trouble) = (&steps[1].output, &steps[steps.len() - 1].output);
    assert!(said.contains(DETECTED), "{said}");
    assert!(
        said.contains("LVT offset 0 assigned for vector 0x400"),
        "{said}"
    );
    assert_eq!(trouble.trim(), "");
    steps[head.len()..steps.len() - 1].to_vec()
}

fn samples(file: &str) -> String {
    SAMPLES.replace("FILE", file)
}

/// Samples of `spin`, and those of them that are in its loop.
fn count(step: &Step) -> (usize, usize) {
    let of = |line: &str| -> Option<(usize, bool)> {
        let (count, symbol) = line.trim().split_once(' ')?;
        Some((count.parse().ok()?, symbol.contains("spin_hot")))
    };
    let functions: Vec<_> = step.output.lines().filter_map(of).collect();
    let all = functions.iter().map(|(count, _)| count).sum();
    let busy = functions.iter().filter(|(_, busy)| *busy);
    (all, busy.map(|(count, _)| count).sum())
}

/// There are samples, and of ops most are in the loop.
fn check(ops: &Step, fetches: &Step) {
    let (all, busy) = count(ops);
    let found = &ops.output;
    assert!(
        all >= LEAST_OPS && 2 * busy > all,
        "{busy} of {all}:\n{found}"
    );
    let (all, busy) = count(fetches);
    let found = &fetches.output;
    assert!(
        all >= LEAST_FETCHES && busy > 0,
        "{busy} of {all}:\n{found}"
    );
}

fn record_and_check(image: LinuxImage, of: &str) {
    let [ops, fetches] = [RECORD_OPS, RECORD_FETCHES].map(|record| record.replace("OF", of));
    let (of_ops, of_fetches) = (samples("/tmp/op"), samples("/tmp/fetch"));
    let beside =
        format!("perf record -q {of} -e ibs_op// -e cycles -c 10000000 -o /tmp/all spin 1");
    let count_each = "perf script -i /tmp/all --comm spin -F event | sort | uniq -c";
    let commands = [&ops, &of_ops, &fetches, &of_fetches, &beside, count_each];
    let steps = boot(image, &commands);
    let [_, ops, _, fetches, _, beside] = steps.as_slice() else {
        panic!("six steps");
    };
    check(ops, fetches);
    for event in ["ibs_op//", "cycles"] {
        assert!(beside.output.contains(event), "{}", beside.output);
    }
}

#[test]
fn linux_6_1_samples_ops_and_fetches_of_a_cpu() {
    record_and_check(LinuxImage::fetch().expect("the guest's image"), "-a");
}

#[test]
fn linux_6_12_samples_ops_and_fetches_of_a_task() {
    let image = LinuxImage::fetch_newer().expect("the guest's newer image");
    record_and_check(image, "");
}
