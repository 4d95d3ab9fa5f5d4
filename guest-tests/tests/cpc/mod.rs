//! `libcpc`: programs in C, the examples of `cpc_bind_event(3CPC)` among them, beside a VM, whose
//! vCPUs they measure, and inside a Linux guest, where they measure themselves.

mod host;
mod linux;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use guest_tests::umpire;

/// The folder of the library.
fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| umpire::built_beside("umpire-cpc"))
}

fn source(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
}

/// The binary of a program in this folder. The compiler must have nothing to say about it.
fn program(name: &str) -> PathBuf {
    let binary = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cpc-{name}"));
    let building = tempfile::Builder::new().tempfile_in(env!("CARGO_TARGET_TMPDIR"));
    let building = building.expect("a file").into_temp_path();
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu99", "-O2", "-g", "-Wall", "-Wextra", "-Werror"]);
    compile(&mut cc, &source(&format!("tests/cpc/{name}.c")), &building);
    // Tests that run at the same time build the same, and none runs a half-written one.
    building.persist(&binary).expect("a binary");
    binary
}

fn compile(compiler: &mut Command, program: &Path, binary: &Path) {
    compiler
        .arg("-I")
        .arg(source("../pmu-virt/perfmon/cpc/include"));
    compiler.arg(program).arg("-o").arg(binary);
    compiler.arg("-L").arg(library());
    compiler.args(["-lumpire_cpc", "-lpthread"]);
    compiler.arg(format!("-Wl,-rpath,{}", library().display()));
    let output = compiler.output().expect("a compiler");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", program.display());
}

/// Values that a program has printed behind `begins`, line by line: `  1: 300 200`.
fn values(said: &str) -> Vec<(u64, u64)> {
    let pair = |line: &str| {
        let (number, values) = line.split_once(": ")?;
        number.trim().parse::<u32>().ok()?;
        let (first, second) = values.split_once(' ')?;
        Some((first.parse().ok()?, second.parse().ok()?))
    };
    said.lines().filter_map(pair).collect()
}

/// The signals that example 2 has printed: `si_addr` and counters.
fn signals(said: &str) -> Vec<(u64, u64, u64)> {
    let number = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let lines: Vec<&str> = said.lines().collect();
    let signal = |pair: &[&str]| {
        let (_, rest) = pair[0].split_once("si_addr ")?;
        let (first, second) = pair[1].split_once(' ')?;
        let address = number(rest.split(' ').next()?)?;
        Some((address, number(first)?, number(second)?))
    };
    lines.windows(2).filter_map(signal).collect()
}

/// The structure is in C what it is in Rust, and the header is C99 and C++.
#[test]
fn the_header_is_c_and_cpp() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = "#include <libcpc.h>\n#include <stddef.h>\n\
        typedef char size[sizeof(cpc_event_t) == 152 ? 1 : -1];\n\
        typedef char hrt[offsetof(cpc_event_t, ce_hrt) == 8 ? 1 : -1];\n\
        typedef char pic[offsetof(cpc_event_t, ce_pic) == 24 ? 1 : -1];\n\
        typedef char pes[offsetof(cpc_event_t, ce_pes) == 88 ? 1 : -1];\n\
        int main(void) { return cpc_version(CPC_VER_CURRENT) != CPC_VER_CURRENT; }\n";
    for (compiler, standard, name) in [
        ("cc", "-std=c99", "header.c"),
        ("c++", "-std=c++11", "header.cc"),
    ] {
        let file = folder.path().join(name);
        std::fs::write(&file, text).expect("a file");
        let mut command = Command::new(compiler);
        command.args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic"]);
        command.arg("-Wno-unused-local-typedefs");
        let binary = folder.path().join("header");
        compile(&mut command, &file, &binary);
        assert!(Command::new(&binary).status().expect("a program").success());
    }
}
