//! `umpire track`: lines as `cputrack` has them.

use guest_tests::umpire::skipped_without_kvm;

use super::boot;

/// The fields of a line, and its counts; none where nobody has counted.
fn fields(line: &str) -> (f64, String, String, Vec<u64>) {
    let mut words = line.split_whitespace();
    let mut word = || words.next().expect("a field").to_owned();
    let (time, vcpu, event) = (word(), word(), word());
    let time = time.parse().expect("a time");
    let counts = if line.contains("<not counted>") {
        Vec::new()
    } else {
        words.map(|count| count.parse().expect("a count")).collect()
    };
    (time, vcpu, event, counts)
}

#[test]
fn a_line_an_interval_and_vcpu_and_totals() {
    if skipped_without_kvm("a_line_an_interval_and_vcpu_and_totals") {
        return;
    }
    // The second processor is never started.
    let vm = boot(4, &["--cpus", "2"]);
    let words = ["track", "-c", "cycles,instructions", "-T", "0.2", "-N", "3"];
    let printed = vm.printed(&words);
    let lines: Vec<&str> = printed.lines().collect();
    assert!(lines[0].ends_with("cycles    instructions"), "{printed}");
    assert_eq!(
        lines.last(),
        Some(&"# cycles simulated, instructions simulated")
    );
    let lines: Vec<_> = lines[1..lines.len() - 1]
        .iter()
        .map(|line| fields(line))
        .collect();
    let of = |event: &'static str| lines.iter().filter(move |line| line.2 == event);
    assert_eq!(of("exit").count(), 2, "{printed}");
    assert_eq!(of("total").count(), 1, "{printed}");
    // The last one may be cut in two.
    let ticks = of("tick").count();
    assert!(ticks == 6 || ticks == 8, "{printed}");
    for vcpu in ["0", "1"] {
        let sum = |event: &'static str| -> u64 {
            let mine = of(event).filter(|line| line.1 == vcpu);
            mine.filter_map(|line| line.3.first()).sum()
        };
        assert_eq!(sum("tick"), sum("exit"), "{printed}");
        assert_eq!(sum("exit") > 0, vcpu == "0", "{printed}");
    }
}

#[test]
fn a_file_without_a_heading() {
    if skipped_without_kvm("a_file_without_a_heading") {
        return;
    }
    let vm = boot(4, &[]);
    let file = vm.path("lines").display().to_string();
    let words = [
        "track",
        "-c",
        "cycles",
        "-c",
        "instructions",
        "-T",
        "0",
        "-N",
        "1",
        "-n",
        "-o",
        &file,
    ];
    assert_eq!(vm.printed(&words), "");
    let text = std::fs::read_to_string(&file).expect("a file");
    let (time, vcpu, event, counts) = fields(text.trim_end());
    assert!((0.9..3.0).contains(&time), "{text}");
    assert_eq!((vcpu.as_str(), event.as_str()), ("0", "exit"));
    assert!(
        counts[0] > 0 && counts[0].abs_diff(4 * counts[1]) <= 4,
        "{text}"
    );
}

#[test]
fn from_the_first_instruction() {
    if skipped_without_kvm("from_the_first_instruction") {
        return;
    }
    let vm = boot(4, &["--paused"]);
    let words = [
        "track",
        "-c",
        "cycles,vm-run-ns",
        "--resume",
        "-T",
        "0",
        "-N",
        "1",
        "-n",
    ];
    let (_, _, _, counts) = fields(vm.printed(&words).trim_end());
    // Two cycles a nanosecond, and no time without its cycles.
    assert!(counts[0] > 0, "{counts:?}");
    let expected = 2 * counts[1];
    assert!(counts[0].abs_diff(expected) < expected / 10, "{counts:?}");
    assert!(vm.printed(&["ls", &vm.socket()]).contains("running"));
}
