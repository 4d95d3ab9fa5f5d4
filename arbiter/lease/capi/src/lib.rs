//! Leases on a host's performance counters for programs in C: `umpire_lease.h`.
//!
//! [`sys`] has what C sees, and is the only part that touches its memory; [`handle`] is a
//! lease, by the client in Rust; [`failure`] what C hears of an error.
#![deny(unsafe_code)]

mod failure;
mod handle;
#[allow(unsafe_code)]
mod sys;
