//! A small kernel whose memory is changed anywhere, before it is found or after.
//!
//! The harness is that of the test `any_memory` of guest-view; `docs/internals/testing.md` tells how
//! to run this.
#![no_main]

#[path = "../../tests/linux/mod.rs"]
mod linux;
#[path = "../../tests/any_memory/play.rs"]
mod play;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    play::run(bytes);
});
