//! Counter reservations at the PMU: the rules of `docs/pcr.md`, played.

mod alias;
mod announced;
mod freeze;
mod kept;
mod legacy;
mod machine;
mod memory;
mod owner;
mod props;
mod shared;
