//! Estimates of multiplexed counts: their laws, and how good they are.

mod accuracy;
mod laws;
mod workload;
