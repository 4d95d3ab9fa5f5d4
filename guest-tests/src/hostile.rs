//! Hostile guests: random code that goes for everything a guest can reach, made
//! from a seed, on the real run loop and the real devices.

mod accesses;
mod batch;
mod census;
mod guest;
mod rng;
mod state;

pub use batch::{Batch, Failure, STOP_LIMIT};
pub use census::Census;
pub use guest::{HostileGuest, MODELS};
pub use rng::Rng;
