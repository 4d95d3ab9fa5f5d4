//! Any bytes as whatever can come over the control socket, or lie in a sampling
//! buffer.
//!
//! The harness is that of the test `any_bytes` of perfmon-abi; `docs/internals/testing.md`
//! tells how to run this.
#![no_main]

#[path = "../../perfmon/abi/tests/any_bytes/play.rs"]
mod play;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    play::run(bytes);
});
