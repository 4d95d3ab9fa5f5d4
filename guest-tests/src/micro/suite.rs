//! Plays tests one after the other, and counts those that this host cannot run.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use vmm::host::KvmAccessError;
use vmm::kvm::HostError;

use super::lab::{Lab, LabError};
use super::limits::Limit;

/// One test.
#[derive(Debug, Clone, Copy)]
pub struct Test {
    /// Its theme and name.
    pub name: &'static str,
    /// Plays it.
    pub run: fn(&Lab) -> anyhow::Result<()>,
}

/// What the command line asks for, in libtest's words.
#[derive(Debug, Default)]
struct Arguments {
    filters: Vec<String>,
    exact: bool,
    list: bool,
    /// Runs what the limits rule out, to see whether they still hold.
    limited: bool,
    /// On KVM alone, or on processors in software alone.
    engine: Option<String>,
}

impl Arguments {
    fn parse(arguments: impl IntoIterator<Item = String>) -> Self {
        let mut parsed = Self::default();
        for argument in arguments {
            if let Some(engine) = argument.strip_prefix("--engine=") {
                parsed.engine = Some(engine.to_owned());
                continue;
            }
            match argument.as_str() {
                "--exact" => parsed.exact = true,
                "--list" => parsed.list = true,
                "--limited" => parsed.limited = true,
                // Tests run one by one and print nothing, so libtest's other
                // options change nothing here.
                other if other.starts_with('-') => {}
                _ => parsed.filters.push(argument),
            }
        }
        parsed
    }

    fn wants(&self, name: &str) -> bool {
        let matches = |filter: &String| {
            if self.exact {
                name == filter
            } else {
                name.contains(filter.as_str())
            }
        };
        self.filters.is_empty() || self.filters.iter().any(matches)
    }
}

/// Where a suite runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum On {
    Kvm,
    /// On KVM, and once more on processors in software; `--engine=kvm` and `--engine=emu`
    /// choose one. L1 has them too, and a slow processor below.
    Each,
}

/// Runs `tests` as the command line asks, without those that `limits` rule out
/// here, and prints libtest-like lines.
#[must_use]
pub fn run_suite(tests: &[Test], limits: &[Limit]) -> ExitCode {
    run_on(On::Kvm, tests, limits)
}

/// [`run_suite`], on KVM and then on processors in software, which need none.
#[must_use]
pub fn run_suite_on_each_engine(tests: &[Test], limits: &[Limit]) -> ExitCode {
    run_on(On::Each, tests, limits)
}

fn run_on(engines: On, tests: &[Test], limits: &[Limit]) -> ExitCode {
    let arguments = Arguments::parse(std::env::args().skip(1));
    let wanted: Vec<&Test> = tests
        .iter()
        .filter(|test| arguments.wants(test.name))
        .collect();
    if arguments.list {
        wanted
            .iter()
            .for_each(|test| println!("{}: test", test.name));
        return ExitCode::SUCCESS;
    }
    if let Some(name) = unknown_limit(tests, limits) {
        println!("the table of limits names a test that does not exist: {name}");
        return ExitCode::FAILURE;
    }
    let limits = if arguments.limited { &[] } else { limits };
    let engine = arguments.engine.as_deref();
    let mut passed = true;
    if engine.is_none_or(|engine| engine == "kvm") {
        passed &= match Lab::open() {
            Ok(lab) => run(&lab, &wanted, limits),
            Err(error) => without_lab(&error, wanted.len()),
        };
    }
    let emulates = engine.map_or(!crate::l1::inside(), |engine| engine == "emu");
    if engines == On::Each && emulates {
        println!("\non processors in software:");
        passed &= run(&Lab::emulated(), &wanted, limits);
    }
    if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// A machine without KVM runs the tests in L1 instead; any other obstacle is a
/// failure, and so is this one in L1.
fn without_lab(error: &LabError, tests: usize) -> bool {
    let no_device = matches!(
        error,
        LabError::Host(HostError::Access(KvmAccessError::Missing { .. }))
    );
    if no_device && !crate::l1::inside() {
        println!("skipped: all {tests} tests: {error}");
        return true;
    }
    println!("no micro-guest can run here: {error}");
    false
}

/// Whether all of them have passed that this lab can run.
fn run(lab: &Lab, tests: &[&Test], limits: &[Limit]) -> bool {
    let start = Instant::now();
    let (mut passed, mut failed, mut skipped) = (0, Vec::new(), 0);
    println!("\nrunning {} tests", tests.len());
    for test in tests {
        if let Some(reason) = reason_to_skip(lab, test.name, limits) {
            println!("skipped: {}: {reason}", test.name);
            skipped += 1;
            continue;
        }
        let began = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| (test.run)(lab)));
        let took = began.elapsed().as_secs_f64();
        let failure = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(format!("{error:#}")),
            Err(_) => Some("panicked".to_owned()),
        };
        match failure {
            None => {
                println!("test {} ... ok ({took:.2} s)", test.name);
                passed += 1;
            }
            Some(why) => {
                println!("test {} ... FAILED ({took:.2} s)\n{why}", test.name);
                failed.push(test.name);
            }
        }
    }
    let verdict = if failed.is_empty() { "ok" } else { "FAILED" };
    for name in &failed {
        println!("failed: {name}");
    }
    println!(
        "\ntest result: {verdict}. {passed} passed; {} failed; {skipped} skipped; finished in {:.2}s",
        failed.len(),
        start.elapsed().as_secs_f64()
    );
    failed.is_empty()
}

/// One of three runs passes: for a share of time, of which other work on the host can only
/// take away; and for what L1 loses now and then, a breakpoint's hit or a step
/// (docs/internals/testing.md, "Limits of L1").
///
/// # Errors
/// Of the last run, where all fail.
pub fn one_of_three(lab: &Lab, run: impl Fn(&Lab) -> anyhow::Result<()>) -> anyhow::Result<()> {
    for _ in 0..2 {
        match run(lab) {
            Ok(()) => return Ok(()),
            Err(error) => println!("  once more: {error:#}"),
        }
    }
    run(lab)
}

fn reason_to_skip(lab: &Lab, name: &str, limits: &[Limit]) -> Option<&'static str> {
    limits
        .iter()
        .find(|limit| limit.tests.contains(&name) && (limit.applies)(lab))
        .map(|limit| limit.reason)
}

fn unknown_limit(tests: &[Test], limits: &[Limit]) -> Option<&'static str> {
    let known = |name: &str| tests.iter().any(|test| test.name == name);
    let mut limited = limits.iter().flat_map(|limit| limit.tests);
    limited.find(|name| !known(name)).copied()
}
