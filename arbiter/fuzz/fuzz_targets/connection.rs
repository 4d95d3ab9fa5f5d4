//! Any bytes on a connection of the arbiter, in pieces.
//!
//! The harness is `any_bytes` of umpire-arbiterd, which its tests use too; `docs/internals/testing.md`
//! tells how to run this.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    umpire_arbiterd::any_bytes::connection(bytes);
});
