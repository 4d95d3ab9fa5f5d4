//! Hostile guests: random code that goes for everything a guest can reach, made
//! from a seed, on the real run loop and the real devices.

mod accesses;
mod batch;
mod census;
mod guest;
mod handler;
mod rng;
mod state;

pub use batch::{Batch, Failure, STOP_LIMIT};
pub use census::Census;
pub use guest::{HostileGuest, MODELS};
pub use rng::Rng;

/// What an attack may know.
#[derive(Debug)]
struct Facts {
    /// This vCPU.
    vcpu: u8,
    /// The PMU model's registers; all models' without one.
    pmu_msrs: Vec<(u32, u32)>,
    /// What starts counter 0 close to its overflow, PMI on.
    start_counting: Vec<(u32, u64)>,
    /// Attacks that few guests survive are among its attacks.
    deadly: bool,
    /// The exit and reset ports are targets too.
    may_end: bool,
    /// KVM emulates CPL 0, and gives up where its emulator ends.
    emulated: bool,
    /// Holds this vCPU's IDTR image.
    idtr: u64,
    /// Where its handler is.
    handler: u64,
    /// The handlers of all vCPUs, if they begin with an instruction that can be patched.
    handlers: Vec<u64>,
    /// Where this vCPU's gate of #GP is.
    gp_gate: u64,
}
