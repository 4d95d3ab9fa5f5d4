//! Any accesses to the interrupt controllers of three CPUs, at any times.
//!
//! The harness is that of the test `any_access` of irqchip; `docs/internals/testing.md` tells how
//! to run this.
#![no_main]

#[path = "../../tests/any_access/play.rs"]
mod play;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    play::run(bytes);
});
