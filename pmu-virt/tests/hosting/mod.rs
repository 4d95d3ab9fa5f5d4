//! Host contexts on the cores' counters, beside the guests'.

mod admission;
mod budget;
mod filtered;
mod ibs;
mod leased;
mod losses;
mod named;
mod outside;
mod policies;
mod private;
mod reserved;
mod rig;
mod schedule;
pub(crate) mod shaky;
mod together;
mod truth;
