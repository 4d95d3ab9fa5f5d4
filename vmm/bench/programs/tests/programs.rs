//! The same bytes come to the same result everywhere, and Callgrind counts what `emu` counts,
//! less a constant.

use std::collections::BTreeSet;

use bench_programs::{FLOATING, HostError, PROGRAMS, ProgramFile, image, run_in_emu};
use emu::EventClass;

/// Rounds of each program: the largest has some millions of instructions.
const ROUNDS: u64 = 1;

/// The name under which what is left out is told (`docs/internals/testing.md`, "Skips").
const TEST: &str = "counts_are_those_of_callgrind";

#[test]
fn counts_are_those_of_callgrind() {
    let Some(image) = image() else {
        println!(
            "skipped: {TEST}: the programs could not be built; CONTRIBUTING.md says what they need"
        );
        return;
    };
    let file = ProgramFile::new(image).expect("a file");
    let mut less = BTreeSet::new();
    let mut missing = 0;
    for program in PROGRAMS.iter().chain(&FLOATING) {
        let name = program.name;
        let guest = run_in_emu(image, program, ROUNDS).unwrap_or_else(|e| panic!("{name}: {e}"));
        let host = file
            .run(program, ROUNDS)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(guest.result, host.result, "{name}");
        assert_ne!(guest.result, 0, "{name} computes nothing");
        // Valgrind counts each repetition of one, which is no instruction.
        assert_eq!(guest.whole.of(EventClass::Strings), 0, "{name}");
        match file.run_in_callgrind(program, ROUNDS) {
            Err(HostError::Start { error, .. }) => {
                println!("skipped: {TEST}: {name}: valgrind cannot be started: {error}");
                missing += 1;
            }
            Err(error) => panic!("{name}: {error}"),
            Ok(callgrind) => {
                assert_eq!(callgrind.run.result, host.result, "{name}");
                let counted = guest.whole.of(EventClass::Instructions);
                less.insert(counted - callgrind.instructions);
            }
        }
    }
    // Callgrind counts a block when the next one begins: not that of the last system call.
    if missing < PROGRAMS.len() + FLOATING.len() {
        assert_eq!(less.len(), 1, "Callgrind counts less by {less:?}");
        assert!(less.iter().all(|one| *one < 16), "{less:?}");
    }
}
