//! Regions that programs mark by `umpire_regions.h` and by the crate, here and under Callgrind; and
//! cargo's tests run by `umpire count`, in a project that has nothing else to do with it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use guest_tests::umpire;
use serde_json::Value;

use super::{Count, compiled, fetched};

/// The instructions of a request before the one by which Callgrind notices it: of these it counts
/// none, and a processor executes them.
const PREAMBLE: u64 = 4;

const MARKED_C: &str = r#"
#include <umpire_regions.h>
static unsigned long work(unsigned long turns)
{
    volatile unsigned long turn;
    unsigned long sum = 0;
    for (turn = 0; turn < turns; turn++)
        sum += turn;
    return sum;
}
int main(void)
{
    unsigned long sum;
    CALLGRIND_ZERO_STATS;
    sum = work(1000);
    CALLGRIND_DUMP_STATS_AT("short");
    sum += work(2000);
    CALLGRIND_DUMP_STATS_AT("long");
    sum += work(500);
    CALLGRIND_DUMP_STATS;
    CALLGRIND_STOP_INSTRUMENTATION;
    return sum == 0 || RUNNING_ON_VALGRIND > 1;
}
"#;

const MARKED_RUST: &str = r#"
/// ```
/// assert_eq!(marked::work(3), 3);
/// ```
pub fn work(turns: u64) -> u64 {
    (0..turns).map(std::hint::black_box).sum()
}

#[test]
fn works() {
    let project = std::env::var("CARGO_MANIFEST_DIR").expect("of cargo");
    assert!(std::path::Path::new(&project).join("Cargo.toml").exists());
    assert_eq!(work(4), 6);
}
"#;

const MAIN_RUST: &str = r#"
fn main() {
    umpire_regions::zero_stats();
    marked::work(1000);
    umpire_regions::dump_stats_at(c"short");
    marked::work(2000);
    umpire_regions::dump_stats_at(c"long");
    marked::work(500);
    umpire_regions::dump_stats();
    umpire_regions::stop_instrumentation();
}
"#;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("a folder above")
}

/// A project of cargo's that uses the crate.
fn project(folder: &Path) {
    let crate_path = root().join("vmm/count/regions");
    let manifest = format!(
        "[package]\nname = \"marked\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[workspace]\n\
         [dependencies]\numpire-regions = {{ path = {crate_path:?} }}\n"
    );
    fs::create_dir(folder.join("src")).expect("room");
    for (name, text) in [
        ("Cargo.toml", manifest.as_str()),
        ("src/lib.rs", MARKED_RUST),
        ("src/main.rs", MAIN_RUST),
    ] {
        fs::write(folder.join(name), text).expect("room");
    }
}

/// Cargo in `folder`, as whoever has just cloned it calls it.
fn cargo(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(folder).args(words).arg("--offline");
    for name in ["CARGO_TARGET_DIR", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
        command.env_remove(name);
    }
    command
}

/// The instructions of user code of each region, by name, in the order in which they ended.
fn regions(record: &Value) -> Vec<(String, u64)> {
    let all = record["counts"]["regions"].as_array().expect("regions");
    let one = |region: &Value| {
        let user = region["user"]["instructions"].as_u64();
        let name = region["name"].as_str().expect("a name");
        (name.to_owned(), user.expect("a count"))
    };
    all.iter().map(one).collect()
}

/// The same by Callgrind; none where there is no Valgrind.
fn under_callgrind(folder: &Path, program: &Path) -> Option<Vec<(String, u64)>> {
    let out = folder.join("out");
    let mut command = Command::new("valgrind");
    command
        .arg("--tool=callgrind")
        .arg(format!("--callgrind-out-file={}", out.display()));
    let output = command.arg(program).output().ok()?;
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let name = entry.file_name().into_string().expect("a name");
        let Some(number) = name
            .strip_prefix("out.")
            .and_then(|end| end.parse::<u32>().ok())
        else {
            continue;
        };
        let text = fs::read_to_string(entry.path()).expect("a profile");
        let after = |start: &str| text.lines().find_map(|line| line.strip_prefix(start));
        let name = after("desc: Trigger: Client Request").expect("a request");
        let sum = after("totals: ").expect("a sum").trim().parse();
        let name = name.trim_start_matches(": ").to_owned();
        found.insert(number, (name, sum.expect("a number")));
    }
    Some(found.into_values().collect())
}

#[track_caller]
fn check(program: &Path) {
    let folder = tempfile::tempdir().expect("a folder");
    let counted = Count::new(folder.path()).run(&[program]);
    counted.ends(0, "program 0");
    let here = regions(counted.record());
    let names: Vec<&str> = here.iter().map(|(name, _)| name.as_str()).take(3).collect();
    assert_eq!(names, ["short", "long", ""], "{}", counted.told());
    let Some(there) = under_callgrind(folder.path(), program) else {
        println!(
            "skipped: marks of {} under Callgrind: no valgrind",
            program.display()
        );
        return;
    };
    // One request ends each of them.
    let expected: Vec<_> = there
        .into_iter()
        .map(|(name, count)| (name, count + PREAMBLE))
        .collect();
    assert_eq!(here[..3], expected);
}

/// One more turn of a loop is found in its region, and named.
#[test]
fn a_region_that_grew_fails_the_gate() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let include = format!("-I{}", root().join("vmm/count/regions/include").display());
    let base = here.join("base").display().to_string();
    compiled(here, "marked", MARKED_C, &[&include]);
    let saved = Count::new(here)
        .options(["-e", "instructions"])
        .run(&["./marked"]);
    let record = serde_json::to_vec(saved.record()).expect("JSON");
    fs::write(&base, record).expect("room");
    let options = ["--compare", &base, "--gate-regions", "--threshold", "0.1%"];
    Count::new(here)
        .options(options)
        .run(&["./marked"])
        .ends(0, "program 0");
    let more = MARKED_C
        .replace("work(2000)", "work(2010)")
        .replace("\"short\"", "\"brief\"");
    compiled(here, "marked", &more, &[&include]);
    let grown = Count::new(here).options(options).run(&["./marked"]);
    grown.ends(123, "gate 123");
    let line = "instructions:u of marked long +";
    grown.says(&[
        line,
        "marked brief  (not in the gate; only now)",
        "only before",
    ]);
    Count::new(here)
        .options(options)
        .run(&["true"])
        .ends(125, "umpire 125")
        .says(&["--gate-regions: this run and", "have no region of one name"]);
}

#[test]
fn marks_of_c_are_those_of_callgrind() {
    let folder = tempfile::tempdir().expect("a folder");
    let include = format!("-I{}", root().join("vmm/count/regions/include").display());
    let strict = ["-Wall", "-Wextra", "-pedantic", "-Werror"];
    let flags: Vec<&str> = strict.into_iter().chain([include.as_str()]).collect();
    check(&compiled(folder.path(), "marked", MARKED_C, &flags));
    // The same source is C++, and the command prints the file that was included.
    let source = folder.path().join("marked.cc");
    fs::write(&source, MARKED_C).expect("room");
    let mut compiler = Command::new("c++");
    compiler
        .args(flags)
        .args(["-std=c++11", "-fsyntax-only"])
        .arg(&source);
    assert!(compiler.status().expect("a compiler of C++").success());
    let printed = Command::new(umpire::path())
        .args(["count", "--print-header"])
        .output();
    let file = fs::read(root().join("vmm/count/regions/include/umpire_regions.h"));
    assert_eq!(printed.expect("umpire").stdout, file.expect("the header"));
}

#[test]
fn cargo_runs_tests_and_marks_of_rust_are_those_of_callgrind() {
    fetched();
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path().canonicalize().expect("its path");
    project(&here);
    let counts: PathBuf = here.join("counts");
    let run = |options: &str| {
        let umpire = umpire::path();
        let runner = format!("{} count {options} --", umpire.display());
        let mut command = cargo(&here, &["test", "--lib", "--bins"]);
        command.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", runner);
        let output = command.output().expect("cargo");
        let told = [output.stdout, output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8_lossy(&told).into_owned(),
        )
    };
    // What cargo sets is not there unless that is asked for, and the end says so.
    let (passed, told) = run("-e instructions");
    assert!(
        !passed && told.contains("--env CARGO_* does that"),
        "{told}"
    );
    let options = format!("--env CARGO_* -j --append -o {}", counts.display());
    let (passed, told) = run(&options);
    assert!(passed && told.contains("test works ... ok"), "{told}");
    let lines = fs::read_to_string(&counts).expect("counts");
    let lines = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let runs: Vec<Value> = lines.filter(|line: &Value| line["status"] == 0).collect();
    // Tests of the library and of the program.
    assert_eq!(runs.len(), 2, "{runs:?}");
    for run in runs {
        let command = run["command"].as_str().expect("a command");
        assert!(command.contains("target/debug/deps/marked-"), "{command}");
    }
    assert!(
        cargo(&here, &["build", "-q"])
            .status()
            .expect("cargo")
            .success()
    );
    check(&here.join("target/debug/marked"));
}
