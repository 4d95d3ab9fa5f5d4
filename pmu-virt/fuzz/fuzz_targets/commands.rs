//! Bytes as commands to a context and what befalls it, compared with a naive
//! model of the specification.
//!
//! The harness is that of the test `perfmon_play`; `docs/testing.md` tells how
//! to run this.
#![no_main]

// The test uses more of it than this does.
#[allow(dead_code, unused_imports)]
#[path = "../../tests/perfmon_play/play/mod.rs"]
mod play;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    play::run(bytes);
});
