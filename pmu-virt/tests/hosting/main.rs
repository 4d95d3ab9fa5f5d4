//! Host contexts on the cores' counters, beside the guests'.

mod admission;
mod rig;
mod schedule;
mod truth;
