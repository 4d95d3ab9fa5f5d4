//! `perf` against the host's kernel and against a model of one.
//!
//! One binary without libtest, so that what this host refuses is counted as
//! skipped and named.

mod fake;
mod faults;
mod host;
mod model;
#[path = "../seated/mod.rs"]
mod seated;

use std::process::ExitCode;
use std::time::Instant;

/// What came of a test.
enum Verdict {
    Passed,
    Skipped(String),
}

type Run = fn() -> Result<Verdict, String>;

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    let tests = [model::TESTS, faults::TESTS, host::TESTS].concat();
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    let start = Instant::now();
    for (name, run) in tests {
        if !wanted.is_empty() && !wanted.iter().any(|part| name.contains(part)) {
            continue;
        }
        match std::panic::catch_unwind(run) {
            Ok(Ok(Verdict::Passed)) => {
                passed += 1;
                println!("test {name} ... ok");
            }
            Ok(Ok(Verdict::Skipped(why))) => {
                skipped += 1;
                println!("skipped: {name}: {why}");
            }
            Ok(Err(why)) => {
                failed += 1;
                println!("test {name} ... FAILED: {why}");
            }
            Err(_) => {
                failed += 1;
                println!("test {name} ... FAILED: it panicked");
            }
        }
    }
    // As libtest ends; `test.sh` adds such lines up.
    let verdict = if failed > 0 { "FAILED" } else { "ok" };
    println!(
        "\ntest result: {verdict}. {passed} passed; {failed} failed; {skipped} skipped; finished in {:.2}s",
        start.elapsed().as_secs_f64()
    );
    ExitCode::from(u8::from(failed > 0))
}

/// The test's end if `holds`, else what was seen.
fn ensure(holds: bool, seen: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(seen()) }
}
