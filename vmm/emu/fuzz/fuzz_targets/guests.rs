//! Any guests on the processor in software.
//!
//! The harness is that of the test `any_guest` of emu; `docs/internals/testing.md` tells how to run
//! this.
#![no_main]

#[path = "../../tests/any_guest/play.rs"]
mod play;
#[path = "../../tests/any_guest/sys.rs"]
mod sys;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    play::run(bytes);
});
