//! Leases by the library for C.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use guest_tests::umpire;

use super::fixture::Daemon;

/// The folder of the library.
pub(crate) fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| umpire::built_beside("umpire-lease-c"))
}

fn source(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
}

/// Compiles a program; the compiler must have nothing to say about it.
fn compile(compiler: &mut Command, program: &Path, binary: &Path) {
    compiler.args(["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pedantic"]);
    compiler
        .arg("-I")
        .arg(source("../arbiter/lease/capi/include"));
    compiler.arg(program).arg("-o").arg(binary);
    compiler.arg("-L").arg(library()).arg("-lumpire_lease");
    compiler.arg(format!("-Wl,-rpath,{}", library().display()));
    let output = compiler.output().expect("a compiler");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", program.display());
}

fn compile_c(program: &Path, binary: &Path) {
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-D_POSIX_C_SOURCE=200809L"]);
    compile(&mut cc, program, binary);
}

/// The program with the tests, compiled once.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let binary = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lease");
        compile_c(&source("tests/arbiterd/lease.c"), &binary);
        binary
    })
}

/// The program doing one of its tests.
pub(super) fn command(daemon: &Daemon, test: &str) -> Command {
    let mut command = Command::new("timeout");
    command.arg("60").arg(program()).arg(test);
    command.env("UMPIRE_ARBITER", daemon.socket());
    command
}

fn check(test: &str) {
    let daemon = Daemon::start();
    let output = command(&daemon, test).output().expect("it starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{test}: {errors}");
    assert_eq!(daemon.connect().leases().expect("it answers"), []);
}

#[test]
fn a_program_in_c_holds_leases() {
    check("held");
}

#[test]
fn a_program_in_c_hears_of_events() {
    check("events");
}

#[test]
fn what_a_program_in_c_gets_wrong_is_named() {
    check("wrong");
}

#[test]
fn a_program_in_c_keeps_its_lease_over_a_restart() {
    let mut daemon = Daemon::start();
    let mut command = command(&daemon, "restart");
    let child = command.stdout(Stdio::piped()).spawn();
    let mut child = child.expect("it starts");
    let mut line = String::new();
    let out = child.stdout.take().expect("its output");
    BufReader::new(out).read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    daemon.kill();
    daemon.begin();
    assert!(child.wait().expect("it is ours").success());
}

#[test]
fn the_example_of_the_documentation_compiles() {
    let page = std::fs::read_to_string(source("../docs/reference/arbiterd.md")).expect("the page");
    let (_, example) = page.split_once("```c\n").expect("an example");
    let (example, _) = example.split_once("```").expect("its end");
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("example.c");
    std::fs::write(&program, example).expect("a file");
    compile_c(&program, &folder.path().join("example"));
}

#[test]
fn the_header_is_for_cxx_too() {
    let name = "the_header_is_for_cxx_too";
    if let Err(error) = Command::new("c++").arg("--version").output() {
        println!("skipped: {name}: c++: {error}");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("lease.cc");
    let text = "#include <umpire_lease.h>\n\
                int main() { umpire_lease_terms terms = {}; terms.size = sizeof terms;\n\
                return umpire_lease_acquire(\"/nowhere\", &terms) != nullptr; }\n";
    std::fs::write(&program, text).expect("a file");
    let mut cxx = Command::new("c++");
    cxx.args(["-std=c++11", "-Wno-missing-field-initializers"]);
    compile(&mut cxx, &program, &folder.path().join("lease"));
}
