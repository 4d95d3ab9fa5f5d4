//! Bytes as commands to a context and what befalls it, compared with a naive
//! model of the specification.
//!
//! The harness is that of the test `perfmon` of the crate `perfmon`; `docs/internals/testing.md` tells how
//! to run this.
#![no_main]

// The test uses more of them than this does.
#[allow(dead_code)]
#[path = "../../perfmon/tests/perfmon/bench.rs"]
mod bench;
#[allow(dead_code)]
#[path = "../../perfmon/tests/perfmon/model/mod.rs"]
mod model;
#[allow(dead_code)]
#[path = "../../perfmon/tests/perfmon/play/mod.rs"]
mod play;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    play::run(bytes);
});
