//! The machine without KVM: vCPUs that are processors in software (`emu`), interrupt
//! controllers that are state machines (`irqchip`), and virtual time.
//!
//! A [`Room`] runs all vCPUs of a machine on the thread that calls it. They take turns, and
//! one clock goes on with each tick that any of them executes: a tick is an instruction, a
//! nanosecond, and a tick of the TSC. Timers, interrupts and PMIs come at the very instruction
//! before which they are due. While all wait, time is skipped to the next timer, unless
//! somebody outside of the machine is waited for ([`Outside`]).
//!
//! Nothing here reads a clock of the host's, and no state depends on an address of its: two
//! runs of the same machine do the same to the last instruction, whatever looks on.

mod clock;
mod common;
mod cpuid;
mod hash;
mod moment;
mod msrs;
mod outside;
mod paravirt;
mod pmi;
mod registers;
mod room;
mod saved;
mod schedule;
mod vcpu;

#[cfg(test)]
mod tests;

pub use clock::VirtualClock;
pub use cpuid::processor;
pub(crate) use cpuid::supported;
pub use outside::{Lines, Nobody, Outside, PinLine, Waited};
pub use registers::{debug, general, special, starting_at, state_of};
pub use room::{Room, RoomEnd, RoomError, RoomParts};
pub use saved::{NotSaved, RoomState};
pub use vcpu::{EmuVcpu, EmuVcpuParts, NotRestored};

/// Ticks of virtual time, and of the TSC, in a second.
pub const TSC_HZ: u64 = 1_000_000_000;
/// And in a millisecond.
pub const TSC_KHZ: u32 = 1_000_000;
const _: () = assert!(TSC_KHZ as u64 * 1000 == TSC_HZ);
