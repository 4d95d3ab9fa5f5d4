//! What Callgrind counts, by the place of each instruction in its file.

use std::io;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::{ENVIRONMENT, NO_AVX, Spots};

/// Of a file of which Callgrind knows no name: so it has entries of the PLT.
pub(super) const NOWHERE: &str = "???";

/// Runs a program under Callgrind: how it ended, and its instructions; an error if Valgrind cannot
/// be started.
pub(super) fn run(here: &Path, program: &[&str]) -> io::Result<(Output, Spots)> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("callgrind.out");
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--dump-instr=yes", "--dump-line=no"])
        .args(["--compress-strings=no", "--compress-pos=no"])
        // Entries of the PLT are functions of their own, as Umpire has them.
        .arg("--skip-plt=no")
        .arg(format!("--callgrind-out-file={}", path.display()))
        .args(program)
        .current_dir(here)
        .env_clear()
        .envs(ENVIRONMENT)
        .envs([NO_AVX])
        .stdin(Stdio::null())
        .output()?;
    let file = std::fs::read_to_string(path);
    let told = || String::from_utf8_lossy(&output.stderr).into_owned();
    let file = file.unwrap_or_else(|error| panic!("{error}: {}", told()));
    Ok((output, spots(&file)))
}

/// Reads its file (Valgrind's manual, "Callgrind Format Specification").
fn spots(file: &str) -> Spots {
    let mut spots = Spots::new();
    let mut object = NOWHERE;
    let mut is_call = false;
    for line in file.lines() {
        if let Some(name) = line.strip_prefix("ob=") {
            object = name;
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if let Some(line) = line.strip_prefix("0x") {
            let (place, count) = line.split_once(' ').expect("a count");
            let place = u64::from_str_radix(place, 16).expect("a place");
            // That is what the call has cost, of which each part stands elsewhere.
            if !std::mem::take(&mut is_call) {
                let count: u64 = count.trim().parse().expect("a count");
                *spots.entry((object.to_owned(), place)).or_default() += count;
            }
        }
    }
    spots
}
