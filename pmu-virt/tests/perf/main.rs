//! `perf` against the host's kernel and against a model of one.
//!
//! One binary without libtest, so that what this host refuses is counted as
//! skipped and named.

mod fake;
mod faults;
mod host;
mod model;

use std::process::ExitCode;

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
                println!("test {name} ... skipped: {why}");
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
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    ExitCode::from(u8::from(failed > 0))
}

/// The test's end if `holds`, else what was seen.
fn ensure(holds: bool, seen: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(seen()) }
}
