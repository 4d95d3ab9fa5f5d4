//! What programs that wrap `perf stat` get from `umpire stat` in its place: the streams, the
//! ends, and lines that a reader of perf-stat(1)'s CSV FORMAT and JSON FORMAT understands.

use std::process::Output;
use std::time::{Duration, Instant};

use guest_tests::umpire::skipped_without_kvm;
use guest_tests::vm::Vm;
use serde_json::Value;

use super::{boot, boot_idle};

/// Which of the optional fields a line has.
#[derive(Clone, Copy, Default)]
struct Expected {
    /// `-I`: a time stamp.
    time: bool,
    /// `-A`: a CPU.
    cpu: bool,
    /// `-r`: the variance.
    variance: bool,
}

/// A value and its event.
#[derive(Debug)]
struct Line {
    time: Option<String>,
    value: Option<f64>,
    event: String,
}

/// A number of digits with at most one point.
fn number(text: &str) -> Option<f64> {
    let digits = text.replacen('.', "", 1);
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| text.parse().expect("a number"))
}

/// The value, or that there is none; anything else is an error of the writer.
fn value(text: &str) -> Option<f64> {
    let value = number(text);
    let named = ["<not counted>", "<not supported>"].contains(&text);
    assert!(named || value.is_some(), "'{text}' is no value");
    value
}

/// Reads a line field by field; there is none too many and none missing.
fn line(text: &str, expected: Expected) -> Line {
    let mut fields = text.split(',');
    let mut next = || fields.next().unwrap_or_else(|| panic!("too short: {text}"));
    let time = expected.time.then(|| next().trim().to_owned());
    if let Some(time) = &time {
        let seconds = number(time).filter(|_| time.contains('.'));
        assert!(time == "summary" || seconds.is_some(), "{text}");
    }
    if expected.cpu {
        assert!(next().starts_with("vCPU"), "{text}");
    }
    let value = value(next());
    let unit = next();
    assert!(["", "msec", "MB"].contains(&unit), "{text}");
    let event = next().to_owned();
    if expected.variance {
        let percent = next();
        let known = percent.strip_suffix('%').and_then(number);
        assert!(
            known.is_some() || value.is_none() && percent.is_empty(),
            "{text}"
        );
    }
    let ran = next();
    assert!(ran.bytes().all(|byte| byte.is_ascii_digit()), "{text}");
    let percent = number(next()).unwrap_or_else(|| panic!("{text}"));
    assert!((0.0..=100.0).contains(&percent), "{text}");
    let (metric, of) = (next(), next());
    assert_eq!(number(metric).is_some(), !of.is_empty(), "{text}");
    assert_eq!(fields.next(), None, "too long: {text}");
    Line { time, value, event }
}

/// The lines of `stat`'s standard error, where there is nothing on standard output.
fn lines(output: &Output, expected: Expected) -> Vec<Line> {
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && output.stdout.is_empty(),
        "{output:?}"
    );
    let lines = told.lines().filter(|text| !text.starts_with('#'));
    lines.map(|text| line(text, expected)).collect()
}

const EVENTS: [&str; 6] = [
    "cycles",
    "instructions:u",
    "branches",
    "ref-cycles",
    "vm-exits",
    "vm-run-ns",
];

/// Each form beside one guest; what runs of it is `alive`.
fn check(vm: &Vm, alive: bool) {
    let events = EVENTS.join(",");
    let stat = |more: &[&str]| {
        let words = [&["stat", "-e", &events], more, &["--for", "150ms"]].concat();
        vm.tool(&words)
    };
    let names =
        |lines: &[Line]| -> Vec<String> { lines.iter().map(|line| line.event.clone()).collect() };
    let none = Expected::default();
    let found = lines(&stat(&["-x,"]), none);
    assert_eq!(names(&found), EVENTS);
    let counted = found[0].value.is_some_and(|cycles| cycles > 0.0);
    assert!(counted || !alive, "{found:?}");
    let variance = true;
    let found = lines(&stat(&["-x,", "-r2"]), Expected { variance, ..none });
    assert_eq!(names(&found), EVENTS);
    let cpu = true;
    let found = lines(&stat(&["-x", ",", "-A"]), Expected { cpu, ..none });
    assert_eq!(found.len() % EVENTS.len(), 0, "{found:?}");
    let time = true;
    let found = lines(
        &stat(&["-x,", "-I50", "--summary"]),
        Expected { time, ..none },
    );
    let is_sum = |line: &&Line| line.time.as_deref() == Some("summary");
    assert_eq!(
        found.iter().filter(is_sum).count(),
        EVENTS.len(),
        "{found:?}"
    );
    assert!(found.len() >= 2 * EVENTS.len(), "{found:?}");
    let told = String::from_utf8_lossy(&stat(&["-j"]).stderr).into_owned();
    let rows = told.lines().filter(|text| !text.starts_with('#'));
    let rows: Vec<Value> = rows
        .map(|text| serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}")))
        .collect();
    assert_eq!(rows.len(), EVENTS.len(), "{told}");
    for row in rows {
        value(row["counter-value"].as_str().expect("a string"));
        let percent = row["pcnt-running"].as_f64().expect("a number");
        assert!((0.0..=100.0).contains(&percent), "{row}");
    }
}

#[test]
fn wrappers_of_perf_stat_read_its_lines() {
    if skipped_without_kvm("wrappers_of_perf_stat_read_its_lines") {
        return;
    }
    let vm = boot(2, &["--cpus", "2"]);
    check(&vm, true);
    let _ = vm.printed(&["pause"]);
    check(&vm, false);
    // One that halts for good counts nothing either.
    check(&boot_idle(2, &[]), false);
}

/// How long a call took that succeeded, and what it said.
fn timed(vm: &Vm, words: &[&str]) -> (Duration, Output) {
    let began = Instant::now();
    let output = vm.tool(&[&["stat"], words].concat());
    assert!(output.status.success(), "{words:?}: {output:?}");
    (began.elapsed(), output)
}

#[test]
fn counts_go_where_wrappers_want_them_for_as_long_as_they_say() {
    if skipped_without_kvm("counts_go_where_wrappers_want_them") {
        return;
    }
    let vm = boot(4, &[]);
    let (_, output) = timed(&vm, &["-j", "--log-fd", "1", "-e", "cycles", "true"]);
    assert!(output.stdout.starts_with(b"{"), "{output:?}");
    // A descriptor of the shell's: what it writes itself stays around the counts.
    let umpire = guest_tests::umpire::path();
    let script = "echo before >&7; \"$0\" stat --control \"$1\" -x, -e cycles --log-fd 7 true; \
                  echo behind >&7";
    let file = vm.path("seven");
    let status = std::process::Command::new("bash")
        .args(["-c", &format!("exec 7>\"$2\"; {script}")])
        .arg(&umpire)
        .arg(vm.socket())
        .arg(&file)
        .status();
    assert!(status.expect("bash").success());
    let text = std::fs::read_to_string(&file).expect("the file");
    let found: Vec<&str> = text.lines().collect();
    assert_eq!(
        (found[0], found.len(), found[2]),
        ("before", 3, "behind"),
        "{text}"
    );
    assert_eq!(line(found[1], Expected::default()).event, "cycles");
    let (_, output) = timed(&vm, &["--quiet", "-e", "loads", "true"]);
    assert!(
        output.stdout.is_empty() && output.stderr.is_empty(),
        "{output:?}"
    );

    // A command that takes too long is ended, which is no failure.
    let (took, output) = timed(
        &vm,
        &["-x,", "--timeout", "100", "-e", "vm-exits", "sleep", "60"],
    );
    assert!(took < Duration::from_secs(30), "{output:?}");
    let (took, output) = timed(
        &vm,
        &["-I", "50", "--interval-count", "2", "-x,", "-evm-exits"],
    );
    assert!(took < Duration::from_secs(30), "{output:?}");
    let time = true;
    let found = lines(
        &output,
        Expected {
            time,
            ..Expected::default()
        },
    );
    assert_eq!(found.len(), 2, "{found:?}");
    // The command is waited for, and has its status.
    let words = [
        "stat",
        "-I50",
        "--interval-count=1",
        "-evm-exits",
        "sh",
        "-c",
    ];
    let ended = vm.tool(&[&words[..], &["sleep 0.2; exit 5"]].concat());
    assert_eq!(ended.status.code(), Some(5), "{ended:?}");
    let (_, output) = timed(&vm, &["--null", "-ecycles", "-B", "sleep", "0.05"]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        told.contains("seconds time elapsed") && !told.contains("cycles"),
        "{told}"
    );
    // What came before the delay is not counted.
    let (took, output) = timed(&vm, &["-D", "300", "-x,", "-evm-run-ns", "sleep", "0.4"]);
    let ran = lines(&output, Expected::default())[0]
        .value
        .expect("a count");
    assert!(took >= Duration::from_millis(400), "{took:?}");
    assert!(
        ran < took.as_secs_f64() * 1e3 - 250.0,
        "{ran} ms of {took:?}"
    );
    let (_, output) = timed(
        &vm,
        &["-v", "--all-user", "-x,", "-ecycles,vm-exits", "true"],
    );
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    for part in [
        "cycles:u is counted by",
        "vm-exits is counted by PMD",
        ",cycles:u,",
    ] {
        assert!(told.contains(part), "no {part}: {told}");
    }
}

/// One line says what counts and what does not, however often it is measured.
#[test]
fn what_does_not_count_is_named_once() {
    if skipped_without_kvm("what_does_not_count_is_named_once") {
        return;
    }
    let vm = boot(4, &[]);
    let words = [
        "-r3",
        "-e",
        "loads,cycles,stores,vm-exits",
        "--timeout",
        "20",
    ];
    let (_, output) = timed(&vm, &words);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let notes: Vec<&str> = told
        .lines()
        .filter(|line| line.contains("umpire: "))
        .collect();
    assert_eq!(notes.len(), 1, "{told}");
    for part in [
        "not supported here: loads (",
        "stores (",
        "; counted: cycles, vm-exits",
    ] {
        assert!(notes[0].contains(part), "no {part}: {told}");
    }
}
