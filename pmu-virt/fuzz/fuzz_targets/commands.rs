//! Bytes as commands to a context and what befalls it, compared with a naive
//! model of the specification.
//!
//! The harness is that of the test `perfmon` of pmu-virt; `docs/testing.md` tells how
//! to run this.
#![no_main]

// The test uses more of them than this does.
#[allow(dead_code)]
#[path = "../../tests/perfmon/bench.rs"]
mod bench;
#[allow(dead_code)]
#[path = "../../tests/perfmon/model/mod.rs"]
mod model;
#[allow(dead_code)]
#[path = "../../tests/perfmon/play/mod.rs"]
mod play;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    play::run(bytes);
});
