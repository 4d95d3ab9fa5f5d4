//! Estimates of multiplexed counts: their laws, and how good they are.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "workloads are drawn from small ranges of numbers above 0"
)]

mod accuracy;
mod workload;
