//! Ours against the host's processor, and against what the manuals say.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "tests take low bits of random numbers"
)]

mod hosts;
mod native;
mod random;
mod sse;
mod x87;
