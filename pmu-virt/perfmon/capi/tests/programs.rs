//! The C library, used by programs in C. They link it as any program would.

#[path = "../../client/tests/fake/mod.rs"]
mod fake;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use perfmon_abi::wire::{Errno, Refusal};
use rustix::thread::{CpuSet, sched_getaffinity};

use fake::{Fake, Trick};

/// The folder of the library that this package is. Cargo does not build it for
/// tests: nothing in Rust can link it. `UMPIRE_TESTS_BUILT` says that it is there (test.sh).
fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let test = std::env::current_exe().expect("this test has a path");
        // target/debug/deps/programs-…
        let profile = test
            .ancestors()
            .nth(2)
            .expect("a profile's folder")
            .to_owned();
        if std::env::var_os("UMPIRE_TESTS_BUILT").is_some() {
            return profile;
        }
        let target = profile.parent().expect("the target folder");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", env!("CARGO_PKG_NAME")]);
        cargo.arg("--target-dir").arg(target);
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        let built = cargo.status().expect("cargo");
        assert!(built.success(), "the library does not build");
        profile
    })
}

fn source(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../client")
        .join(relative)
}

/// Compiles a program; the compiler must have nothing to say about it.
fn compile(program: &Path, to: &Path, options: &[&str]) -> PathBuf {
    let binary = to.join(program.file_stem().expect("a name"));
    let output = Command::new("cc")
        .args(["-std=gnu99", "-O2", "-g", "-Wall", "-Wextra", "-Werror"])
        .args(options)
        .arg("-I")
        .arg(source("include"))
        .arg("-I")
        .arg(source("tests/spec"))
        .arg(program)
        .arg("-o")
        .arg(&binary)
        .arg("-L")
        .arg(library())
        .args(["-lumpire_perfmon", "-lpthread"])
        .arg(format!("-Wl,-rpath,{}", library().display()))
        .output()
        .expect("cc");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", program.display());
    binary
}

/// Runs a program against a control socket; it must succeed within 30 s.
fn run(binary: &Path, fake: &Fake, arguments: &[&str]) -> String {
    let log = fake.folder().join("log");
    let file = std::fs::File::create(&log).expect("a log");
    let mut child = Command::new(binary)
        .args(arguments)
        .env("UMPIRE_PERFMON", fake.path())
        .env("UMPIRE_TEST_EVENT", "0x4300c0")
        .env("UMPIRE_TEST_ENDING", "2")
        .stdin(Stdio::null())
        .stdout(file.try_clone().expect("a duplicate"))
        .stderr(file)
        .spawn()
        .expect("the program");
    let end = Instant::now() + Duration::from_secs(30);
    let status = loop {
        if let Some(status) = child.try_wait().expect("its status") {
            break Some(status);
        }
        if Instant::now() > end {
            child.kill().expect("killed");
            child.wait().expect("its status");
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let said = std::fs::read_to_string(&log).expect("what it said");
    let name = binary.display();
    match status {
        Some(status) => assert!(status.success(), "{name} {arguments:?}: {status}\n{said}"),
        None => panic!("{name} {arguments:?} hangs\n{said}"),
    }
    said
}

fn programs(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(source(folder)).expect("a folder");
    let mut found: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|it| it == "c"))
        .collect();
    found.sort();
    found
}

#[test]
fn the_specifications_shapes_of_programs_work() {
    let programs = programs("tests/spec");
    assert!(programs.len() >= 14, "{programs:?}");
    for program in programs {
        let fake = Fake::start();
        let binary = compile(&program, fake.folder(), &[]);
        let said = run(&binary, &fake, &[]);
        let contexts = &fake.shared().contexts;
        let open = contexts.iter().filter(|context| !context.is_closed());
        assert_eq!(
            open.count(),
            0,
            "{}: contexts are left\n{said}",
            program.display()
        );
    }
}

#[test]
fn the_same_works_with_checks_of_the_c_library() {
    let fake = Fake::start();
    let fortify = [
        "-U_FORTIFY_SOURCE",
        "-D_FORTIFY_SOURCE=2",
        "-D_FILE_OFFSET_BITS=64",
    ];
    let binary = compile(&source("tests/spec/mapping.c"), fake.folder(), &fortify);
    run(&binary, &fake, &[]);
}

#[test]
fn what_goes_wrong_has_a_number_and_a_reason() {
    let fake = Fake::start();
    let long = "x".repeat(5000);
    let table = [
        (
            Trick::Refuse(Refusal::new(Errno::EPERM, "only root may")),
            Errno::EPERM,
            "only root may",
        ),
        (
            Trick::Refuse(Refusal::new(Errno::EBUSY, long)),
            Errno::EBUSY,
            "xxxx",
        ),
        (Trick::HangUp, Errno::ECONNRESET, "closed"),
        (Trick::Bytes(vec![7; 100]), Errno::EPROTO, "no frame"),
        (Trick::Bytes(vec![7]), Errno::EPROTO, "no frame"),
        (Trick::OutOfStep, Errno::EPROTO, "another request"),
        (Trick::Full, Errno::EAGAIN, "too many connections"),
    ];
    for (trick, errno, reason) in table {
        let name = format!("{trick:?}");
        fake.trick(trick);
        let said = run(
            checks(),
            &fake,
            &["fails_once", &errno.number().to_string()],
        );
        assert!(said.contains(reason), "{name}: {said}");
    }
}

/// The program with the checks of the library, compiled once.
fn checks() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        compile(&source("../capi/tests/library.c"), folder, &[])
    })
}

macro_rules! checks {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            let fake = Fake::start();
            run(checks(), &fake, &[stringify!($name)]);
        }
    )*};
}

checks! {
    no_server others_are_left_alone reuse_of_numbers reuse_of_the_connection duplicates
    passed_on stale_messages many_messages signals threads fork_in_threads many_contexts no_allocation
    half_a_buffer formats events sums
}

#[test]
fn closed_while_read() {
    let fake = Fake::start();
    fake.shared().no_bells = true;
    run(checks(), &fake, &["closed_while_read"]);
}

/// 3.1.7: the core is the one on the caller's CPU, whatever its number.
#[test]
fn a_core_is_found_by_the_cpu_that_it_is_kept_on() {
    let allowed = sched_getaffinity(None).expect("an affinity");
    let cpu = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu));
    let cpu = cpu.and_then(|cpu| u32::try_from(cpu).ok()).expect("a CPU");
    let check = |core_cpus: &[u32], number: i32, reason: &str| {
        let fake = Fake::start();
        fake.shared().core_cpus = core_cpus.to_vec();
        let said = run(checks(), &fake, &["by_affinity", &number.to_string()]);
        assert!(said.contains(reason), "{core_cpus:?}: {said}");
    };
    let other = cpu + 1;
    check(&[other, cpu], 0, "");
    // There is no core 3.
    check(&[other, other, other, cpu], Errno::ESRCH.number(), "vCPUs");
    check(&[other, other], Errno::EINVAL.number(), "no core of the VM");
    check(&[cpu, cpu], Errno::EINVAL.number(), "several cores");
}

#[test]
fn a_load_does_not_wait_where_nothing_does() {
    let fake = Fake::start();
    run(checks(), &fake, &["does_not_wait"]);
}

#[test]
fn a_load_is_done_whatever_becomes_of_the_question_after_it() {
    let fake = Fake::start();
    // The creation, the load, and the question for the generation.
    fake.trick(Trick::Pass);
    fake.trick(Trick::Pass);
    fake.trick(Trick::Refuse(Refusal::new(Errno::EPERM, "not this one")));
    run(checks(), &fake, &["load_alone"]);
    assert!(fake.shared().tricks.is_empty());
}
