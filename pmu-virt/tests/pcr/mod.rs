//! Counter reservations at the PMU: the rules of `docs/reference/pcr.md`, played.

mod alias;
mod announced;
mod freeze;
mod kept;
mod leftovers;
mod legacy;
mod machine;
mod memory;
mod naive;
mod owner;
mod pebs;
mod props;
mod samplers;
mod shared;
mod sys;
mod unreserved;
