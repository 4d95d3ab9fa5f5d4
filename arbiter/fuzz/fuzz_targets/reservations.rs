//! Bytes as operations, played on a unit and on a naive model of `docs/reference/pcr.md`.
//!
//! The harness is that of the test `reservations`; `docs/internals/testing.md` tells how
//! to run this.
#![no_main]

// The test uses more of it than this does.
#[allow(dead_code, unused_imports)]
#[path = "../../tests/reservations/play/mod.rs"]
mod play;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    play::run(bytes);
});
