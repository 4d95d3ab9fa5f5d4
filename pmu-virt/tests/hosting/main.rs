//! Host contexts on the cores' counters, beside the guests'.

mod admission;
mod policies;
mod private;
mod reserved;
mod rig;
mod schedule;
mod truth;
