//! Who executed what in an emulated guest: [`Attribution`] looks on while the machine runs, and
//! tells processes, programs and threads of one tree apart, and what the kernel did for each.
//!
//! A count is attributed by the instruction, not by samples: user code to the thread that executed
//! it, the kernel's to the thread that it ran on behalf of, up to the first instruction of
//! `__switch_to`. So all programs together have what the tree has executed, whatever the guest does.
//! The guest's memory is not trusted: what it says of its tasks is read within bounds, and a guest
//! that lies about them miscounts itself.
//!
//! ```no_run
//! use attribution::{Attribution, Kernel, Start, find};
//! # fn example(memory: &vm_memory::GuestMemoryMmap, cr3: u64) -> Option<()> {
//! // Once, and kept with a snapshot: all of the kernel is read for it.
//! let kernel = Kernel::of(&find(memory, cr3).ok()?).ok()?;
//! let observer = Box::new(Attribution::new(kernel, Start::First));
//! // Before the program is executed: room.observe(Some(observer), &kernel.places());
//! // When the machine has ended:     room.observe(None, &[])
//! # let given_back: Option<Box<dyn emu::Observer>> = Some(observer);
//! let counts = Attribution::taken(given_back?)?.counts();
//! # Some(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod attribution;
mod callgrind;
mod calls;
mod counts;
mod folded;
mod functions;
mod kernel;
mod regions;
mod tree;

pub use attribution::{Attribution, Start};
pub use callgrind::{ContextCosts, Costs, ProfileHead, write_callgrind};
pub use counts::{
    CallEdge, Context, ContextRoot, Contexts, Counts, Events, Function, MappedFile, Part, PartEnd,
    Program, Region, Rest, Syscall, Thread, Undefined,
};
pub use folded::write_folded;
pub use functions::Objects;
pub use kernel::{Kernel, KernelError, find};
pub use regions::Collect;
