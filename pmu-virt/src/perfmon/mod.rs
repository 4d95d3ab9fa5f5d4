//! perfmon2 for host tools: the parts that are functions of state and input.
//!
//! - [`estimate`] says what a multiplexed event would have counted, had it been
//!   counted all the time.

pub mod estimate;
