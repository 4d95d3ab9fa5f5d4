//! The processor against the host's, against tables, and against itself.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "tests take low bits of random numbers"
)]

mod any_guest;
mod caches;
mod codes;
mod debug;
mod generator;
mod guest;
mod legacy;
mod lockstep;
mod narrow;
mod native;
mod observer;
mod oracle;
mod paging;
mod random;
mod system;
mod undefined;
mod vector;
mod x87;
