//! Counter reservations at the PMU: the rules of `docs/reference/pcr.md`, played.

mod alias;
mod announced;
mod freeze;
mod kept;
mod leftovers;
mod legacy;
#[expect(dead_code, reason = "late and shared counters are for other tests")]
#[path = "../limited/mod.rs"]
mod limited;
mod machine;
mod memory;
mod naive;
mod owner;
mod pebs;
mod props;
mod samplers;
#[path = "../seated/mod.rs"]
mod seated;
mod shared;
mod sys;
mod unreserved;
