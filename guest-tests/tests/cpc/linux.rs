//! Inside a Linux guest: an LWP is a thread of the program. One boot for all.

use guest_tests::linux::{LinuxImage, Step, UnderUmpire};

use super::{program, signals, values};

/// An instruction a nanosecond. Cycles are for `clock` to count.
const RATES: &str = "[event.instructions]\nrate = 1000\n";
const PROGRAMS: [&str; 4] = ["measure", "overflow", "rules", "robust"];
/// One program waits for its input to end while another takes all counters, pinned, for as long as
/// the first has not said that it has lost its own; then it gets them back.
const SYSTEM_WIDE: &str = "mkfifo /tmp/input; cpc-rules system_wide </tmp/input >/tmp/wide 2>&1 & \
     wide=$!; exec 9>/tmp/input; \
     said() { until grep -q $1 /tmp/wide || ! kill -0 $wide; do sleep 0.1; done; }; said bound; \
     perf stat -a -e cycles:D,cycles:D,cycles:D,cycles:D,cycles:D,cycles:D >/dev/null 2>&1 9>&- & \
     until [ $(ls -l /proc/$!/fd | grep -c perf_event) = 6 ]; do sleep 0.1; done; \
     exec 9>&-; said invalid; kill $!; wait $wide; status=$?; cat /tmp/wide; \
     [ $status = 0 ]";

#[test]
fn programs_measure_themselves() {
    let mut image = LinuxImage::fetch().expect("the guest's image");
    for name in PROGRAMS {
        image = image.with_program(&format!("cpc-{name}"), program(name));
    }
    let flags = ["--pmu", "amd-core"];
    let guest = UnderUmpire::with_rates(image, &flags, RATES);
    let programs = [
        "cpc-measure",
        "cpc-overflow",
        "cpc-rules states",
        "cpc-rules rings",
        "cpc-rules words",
        "cpc-rules threads",
        "cpc-rules system_overflows",
        "echo 2 >/proc/sys/kernel/perf_event_paranoid; cpc-rules unprivileged",
        // ENOENT and EINVAL are both ENOTSUP: nobody counts it, or not beside the others.
        "cpc-rules kernel_says 2 95 6",
        "cpc-rules kernel_says 22 95 5",
        "cpc-robust handler",
        "cpc-robust blocked",
        "cpc-robust waits",
        "cpc-robust forks",
        "cpc-robust cancelled",
        SYSTEM_WIDE,
    ];
    let script = programs.map(|line| format!("export CPC_TEST_SLOWER=10; {line}\n"));
    let script = script.concat();
    let steps = guest.run(&script).steps;
    for step in &steps {
        println!("{}: {:?}\n{}", step.command, step.status, step.output);
    }
    let [first, second, rules @ ..] = steps.as_slice() else {
        panic!("too few steps");
    };
    example_1(first);
    example_2(second);
    for step in rules {
        assert_eq!(step.status, Some(0), "{}: {}", step.command, step.output);
    }
}

fn example_1(step: &Step) {
    assert_eq!(step.status, Some(0), "{}", step.output);
    let values = values(&step.output);
    assert_eq!(values.len(), 20, "{}", step.output);
    // On a busy host a computation may be over before its ring was looked at.
    let seen = values
        .iter()
        .filter(|(cycles, instructions)| *cycles > 0 && *instructions > 0);
    assert!(seen.count() >= 18, "{}", step.output);
}

fn example_2(step: &Step) {
    assert_eq!(step.status, Some(0), "{}", step.output);
    let signals = signals(&step.output);
    assert!(signals.len() >= 3, "{}", step.output);
    // The program's context is the one that was interrupted, unless that was the handler
    // itself: then the signal waits for its end.
    let is_interrupted = |address: &u64| {
        let pc = format!("si_addr {address:#x} ucontext: %pc {address:#x} ");
        step.output.contains(&pc)
    };
    assert!(signals.iter().any(|(address, ..)| is_interrupted(address)));
    for (address, cycles, _) in signals {
        assert!(address > 0x1000, "{}", step.output);
        assert!(cycles < 1 << 40, "it has overflowed: {}", step.output);
    }
}
