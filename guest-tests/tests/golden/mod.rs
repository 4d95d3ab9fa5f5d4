//! The golden corpus: what programs read of `umpire` stays byte-identical.
//!
//! Each file in `guest-tests/golden` holds one answer: of a command on fixed input
//! in full, of a command's options their names, values and defaults, and of what
//! a live guest leads to the shape (keys, kinds of values, words that are fixed).
//! `GOLDEN_RECORD_WITH=PROGRAM cargo test -p guest-tests --test suites golden::` records
//! the corpus anew, from that program. A change of the corpus is a change of
//! what users rely on: CHANGELOG names it.

mod documented;
mod live;
pub(crate) mod schemas;
mod shape;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use guest_tests::umpire;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

/// The program that records, if that is what is wanted.
fn recorder() -> Option<OsString> {
    std::env::var_os("GOLDEN_RECORD_WITH")
}

/// `umpire`, or the program that records.
fn program() -> PathBuf {
    recorder().map_or_else(umpire::path, PathBuf::from)
}

/// Runs `umpire` in the folder of the corpus, where its input lies.
fn run(words: &[&str]) -> Output {
    let command = Command::new(program())
        .args(words)
        .current_dir(folder())
        .env_remove("UMPIRE_PERFMON")
        .env_remove("XDG_RUNTIME_DIR")
        .env("COLUMNS", "100")
        .stdin(Stdio::null())
        .output();
    command.expect("umpire can be started")
}

/// Compares `found` with the file `name` of the corpus, or writes it there.
fn check(name: &str, found: &str) {
    let path = folder().join(name);
    if recorder().is_some() {
        fs::write(&path, found).expect("the corpus can be written");
        return;
    }
    let expected = fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{} is missing: {error}", path.display()));
    if expected == found {
        return;
    }
    let differs = expected
        .lines()
        .zip(found.lines())
        .position(|(old, new)| old != new)
        .unwrap_or_else(|| expected.lines().count().min(found.lines().count()));
    let line = |text: &str| text.lines().nth(differs).unwrap_or("(no line)").to_owned();
    panic!(
        "{name} differs in line {}:\n  golden: {}\n  found:  {}",
        differs + 1,
        line(&expected),
        line(found)
    );
}

/// One command on fixed input, whose answer is compared in full.
struct Case {
    name: &'static str,
    words: &'static [&'static str],
}

const fn case(name: &'static str, words: &'static [&'static str]) -> Case {
    Case { name, words }
}

#[test]
fn answers_on_fixed_input_are_as_before() {
    const SHORT: &str = "../../docs/examples/short.script";
    const LENDING: &str = "../../docs/examples/lending.script";
    const GREEDY: &str = "../../docs/examples/greedy.script";
    let cases = [
        case("arbitrate-short.json", &["arbitrate", "-j", SHORT]),
        case("arbitrate-lending.json", &["arbitrate", "-j", LENDING]),
        case("arbitrate-greedy.json", &["arbitrate", "-j", GREEDY]),
        case(
            "arbitrate-policy.json",
            &[
                "arbitrate",
                "-j",
                "--counters",
                "2",
                "--fixed",
                "1",
                "--policy",
                "kernel:priority=1,max=1",
                "--grace",
                "50",
                GREEDY,
            ],
        ),
        case(
            "events-amd-core.json",
            &["events", "--pmu", "amd-core", "-j"],
        ),
        case("events-amd-k7.json", &["events", "--pmu", "amd-k7", "-j"]),
        case(
            "events-amd-fam10h.json",
            &["events", "--pmu", "amd-fam10h", "-j"],
        ),
        case(
            "events-amd-perfmonv2.json",
            &["events", "--pmu", "amd-perfmonv2", "-j"],
        ),
        case(
            "events-intel-v1.json",
            &["events", "--pmu", "intel-v1", "-j"],
        ),
        case(
            "events-intel-v2.json",
            &["events", "--pmu", "intel-v2", "-j"],
        ),
        case(
            "report.json",
            &[
                "report",
                "-i",
                "guest.data",
                "--symbols",
                "System.map",
                "-j",
            ],
        ),
        case(
            "report-sorted.json",
            &[
                "report",
                "-i",
                "guest.data",
                "--symbols",
                "System.map",
                "--sort",
                "vcpu,core,ring,cr3,symbol",
                "--percent-limit",
                "1",
                "-j",
            ],
        ),
        case(
            "report.folded",
            &[
                "report",
                "-i",
                "guest.data",
                "--symbols",
                "System.map",
                "--event",
                "cycles",
                "--folded",
            ],
        ),
        case(
            "report-events.folded",
            &[
                "report",
                "-i",
                "guest.data",
                "--folded",
                "--weight",
                "events",
                "--event",
                "cycles",
            ],
        ),
        case(
            "script.json",
            &[
                "script",
                "-i",
                "guest.data",
                "--symbols",
                "System.map",
                "-j",
            ],
        ),
        case(
            "script.txt",
            &[
                "script",
                "-i",
                "guest.data",
                "--symbols",
                "System.map",
                "-F",
                "vm,vcpu,core,time,period,event,set,ring,cr3,ip,sym",
            ],
        ),
        // With tasks and callers; the guest's kernel says the symbols.
        case("report-tasks.json", &["report", "-i", "tasks.data", "-j"]),
        case(
            "report-callers.json",
            &[
                "report",
                "-i",
                "tasks.data",
                "-g=callee",
                "--sort",
                "pid,tid,comm,dso,symbol",
                "-j",
            ],
        ),
        case(
            "report-tasks.folded",
            &["report", "-i", "tasks.data", "--folded"],
        ),
        case(
            "script-tasks.json",
            &[
                "script",
                "-i",
                "tasks.data",
                "-F",
                "comm,pid,tid,vm,vcpu,core,time,period,event,set,ring,cr3,ip,sym,dso,callchain",
                "-j",
            ],
        ),
        case("script-tasks.txt", &["script", "-i", "tasks.data"]),
    ];
    for Case { name, words } in cases {
        let output = run(words);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {told}");
        check(name, &String::from_utf8(output.stdout).expect("text"));
    }
}

/// A report that goes to a file.
#[test]
fn files_of_reports_are_as_before() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, option) in [("flame.svg", "--flamegraph"), ("firefox.json", "--firefox")] {
        let path = folder.path().join(name);
        let file = path.to_str().expect("a path in UTF-8");
        let output = run(&[
            "report",
            "-i",
            "guest.data",
            "--symbols",
            "System.map",
            "--event",
            "cycles",
            option,
            file,
        ]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{option}: {told}");
        check(name, &fs::read_to_string(&path).expect("the report"));
    }
}

/// Names, short forms, value names, possible values, aliases and defaults of a
/// command's options, in their order; not what the help says of them.
fn options_of(help: &str) -> String {
    let mut found = String::new();
    for line in help.lines() {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        // What an option means stands behind two spaces, or in lines of their own
        // that are indented further.
        let entry = match text.strip_prefix("- ") {
            Some(value) if indent >= 10 => value.split([':', ' ']).next(),
            _ if line.starts_with("Usage:") => Some(text),
            _ if (2..=6).contains(&indent) && text.starts_with(['-', '[', '<']) => {
                text.split("  ").next()
            }
            _ => None,
        };
        if let Some(entry) = entry {
            let _ = writeln!(found, "{entry}");
        }
        // A default of several words is a sentence.
        let notes = text.split('[').skip(1);
        for note in notes.filter_map(|rest| rest.split(']').next()) {
            let is_value = note
                .strip_prefix("default: ")
                .is_some_and(|value| !value.contains(' '));
            if is_value || note.starts_with("alias") || note.starts_with("possible values: ") {
                let _ = writeln!(found, "  [{note}]");
            }
        }
    }
    found
}

#[test]
fn options_are_as_before() {
    let commands: [&[&str]; 38] = [
        &["run"],
        &["doctor"],
        &["demo"],
        &["demo", "pcr"],
        &["events"],
        &["arbitrate"],
        &["stat"],
        &["track"],
        &["record"],
        &["ls"],
        &["report"],
        &["annotate"],
        &["script"],
        &["bench", "traps"],
        &["bench", "neighbour"],
        &["bench", "pcr"],
        &["bench", "pmi"],
        &["bench", "slowdown"],
        &["bench", "switch"],
        &["bench", "scale"],
        &["bench", "perfmon"],
        &["bench", "emu"],
        &["bench"],
        &["budget"],
        &["pcr"],
        &["pcr", "revoke"],
        &["pcr", "read"],
        &["pcr", "bar"],
        &["pcr", "unbar"],
        &["pcr", "policy"],
        &["pcr", "scheme"],
        &["top"],
        &["diff"],
        &["pause"],
        &["resume"],
        &["stop"],
        &["count"],
        &["count", "diff"],
    ];
    let mut all = String::new();
    for words in commands {
        let output = run(&[words, &["--help"]].concat());
        assert!(output.status.success(), "{words:?} --help");
        let help = String::from_utf8(output.stdout).expect("text");
        let _ = writeln!(all, "{}\n{}", words.join(" "), options_of(&help));
    }
    check("options.txt", &all);
}

/// Command lines that cannot be used, with the status of each and how many lines
/// say so.
#[test]
fn statuses_of_refusals_are_as_before() {
    let cases: [&[&str]; 54] = [
        &[],
        &["walk"],
        &["run"],
        &["run", "--kernel", "gone"],
        &["run", "--kernel", "System.map"],
        &["run", "--kernel", "System.map", "--cpus", "65"],
        &["run", "--kernel", "System.map", "--memory", "much"],
        &["run", "--kernel", "System.map", "--pmu", "pentium"],
        &["run", "--kernel", "System.map", "--counters", "abacus"],
        &[
            "run",
            "--kernel",
            "System.map",
            "--counters",
            "sim=gone.toml",
        ],
        &[
            "run",
            "--kernel",
            "System.map",
            "--policy",
            "kernel:least=1",
        ],
        &["run", "--config", "gone.toml"],
        &["stat"],
        &["stat", "--control", "gone.sock"],
        &["stat", "--control", "gone.sock", "-j", "-x", ","],
        &["stat", "--control", "gone.sock", "-I", "1"],
        &["stat", "--control", "gone.sock", "-r", "0"],
        &["stat", "--control", "gone.sock", "-e", "no such event"],
        &["stat", "--control", "gone.sock", "--for", "3"],
        &["record", "--control", "gone.sock"],
        &["record", "--control", "gone.sock", "-c", "5", "-F", "5"],
        &["record", "--control", "gone.sock", "--buffer", "1"],
        &["record", "--control", "gone.sock", "--call-graph"],
        &["record", "--control", "gone.sock", "--call-graph", "lbr"],
        &["record", "--control", "gone.sock", "--call-graph", "dwarf"],
        &[
            "record",
            "--control",
            "gone.sock",
            "--call-graph",
            "dwarf,12",
            "--symfs",
            ".",
        ],
        &[
            "record",
            "--control",
            "gone.sock",
            "--call-graph",
            "dwarf",
            "--symfs",
            "gone",
        ],
        &["record", "--control", "gone.sock", "-g", "--symfs", "."],
        &["ls", "gone.sock"],
        &["ls"],
        &["report", "-i", "gone.data"],
        &["report", "-i", "System.map"],
        &["report", "-i", "guest.data", "--symbols", "gone.map"],
        &["report", "-i", "guest.data", "--sort", "colour"],
        &["annotate", "-i", "gone.data"],
        &["annotate", "-i", "guest.data"],
        &["annotate", "-i", "guest.data", "--event", "cycles"],
        &["script", "-i", "System.map"],
        &["script", "-i", "guest.data", "-F", "colour"],
        &["events", "no such event"],
        &["events", "--pmu", "no such table"],
        &["arbitrate", "gone.script"],
        &[
            "arbitrate",
            "--counters",
            "33",
            "../../docs/examples/short.script",
        ],
        &["diff"],
        &["diff", "guest.data"],
        &["diff", "gone.data", "guest.data"],
        &["diff", "guest.data", "gone.data"],
        &["diff", "guest.data", "System.map"],
        &["diff", "guest.data", "tasks.data", "--event", "branches"],
        &["diff", "guest.data", "guest.data", "--sort", "colour"],
        &["pause", "--control", "gone.sock"],
        &["resume", "--control", "gone.sock"],
        &["stop", "--control", "gone.sock"],
        &["stop", "no-such-vm"],
    ];
    let mut all = String::new();
    for words in cases {
        let output = run(words);
        let status = output.status.code();
        let lines = String::from_utf8_lossy(&output.stderr).lines().count();
        let _ = writeln!(
            all,
            "{words:?}: status {status:?}, {lines} lines, {} bytes of output",
            output.stdout.len()
        );
    }
    check("refusals.txt", &all);
}

/// A file that no test reads is no promise.
#[test]
fn every_file_of_the_corpus_is_compared() {
    let input = BTreeSet::from(["guest.data", "tasks.data", "System.map"]);
    let code = [include_str!("mod.rs"), include_str!("live.rs")].concat();
    for entry in fs::read_dir(folder()).expect("the corpus") {
        let name = entry.expect("an entry").file_name();
        let name = name.to_str().expect("a name in UTF-8");
        assert!(
            input.contains(name) || code.contains(&format!("\"{name}\"")),
            "no test compares golden/{name}"
        );
    }
}
