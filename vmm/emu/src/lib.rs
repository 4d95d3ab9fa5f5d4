//! A processor in software that counts exactly.
//!
//! State, memory and a budget go in; state, counts and a [`VmExit`] come out. It knows no KVM,
//! PMU, device, clock or file, and what it does depends on nothing else: neither on the host,
//! nor on budgets, nor on which code is decoded already.
//!
//! Instructions are decoded once, to operations in blocks ([`Cpu::run`] executes these), and
//! counted as stepping a guest counts them. What CPUID does not announce raises #UD; what it
//! announces and is not there stops with [`VmExit::Unimplemented`], and has counted nothing.

#![deny(unsafe_code)]

mod block;
mod code;
mod cpu;
mod cpuid;
mod decode;
mod entry;
mod events;
mod flags;
mod insn;
mod observer;
mod paging;
mod quick;
mod slow_path;
mod state;
mod stop;
#[allow(
    unsafe_code,
    reason = "guest RAM is memory that the guest and others share"
)]
mod sys;
mod tlb;
mod unannounced;

pub use code::CodeChanges;
pub use cpu::Cpu;
pub use cpuid::Cpuid;
pub use entry::Entry;
pub use flags::Flags;
pub use guest_exit::{Answer, VmExit};
pub use insn::is_known;
pub use observer::{Event, Follow, Observer, Sight};
pub use pmu_model::{EventClass, EventTotals, Ring};
pub use slow_path::{SlowPath, SlowPaths};
pub use state::{Msrs, Seg, Segment, Shadow, State, Table};
pub use stop::Missing;
pub use sys::ram::{PAGE, Ram, RamError, Scalar};
pub use unannounced::NotAnnounced;
