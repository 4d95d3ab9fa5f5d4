//! What runs in a 64-bit guest, out of its memory alone: no agent in it, no file of it.
//!
//! [`Search`] finds the note in which a Linux kernel says where it is, and [`KernelView`]
//! is that kernel: its symbols and those of its modules, wherever it moved itself to. A
//! [`Look`] says what a vCPU does that stands still: the [`Task`], the [`Chain`] of callers
//! of kernel and program, and what the program has mapped there, with the file's name.
//!
//! ```no_run
//! use guest_view::{Chain, GuestMemory, KernelView, Look, Registers, Search, Step};
//!
//! # fn example(memory: &dyn GuestMemory, at: &Registers, apic_id: u32) -> Option<()> {
//! let mut search = Search::new([0..3 << 30, 4 << 30..5 << 30]);
//! let view = loop {
//!     // A step at a time, on a thread that has time.
//!     match search.step(memory, 1024) {
//!         Step::Searching => {}
//!         Step::Found(note) => match KernelView::of(memory, note, at.cr3) {
//!             Ok(view) => break view,
//!             Err(_) => {} // It may be that of an earlier kernel.
//!         },
//!         Step::Done => return None,
//!     }
//! };
//! let cpu = view.processor(memory, apic_id)?;
//! let mut chain = Chain::default();
//! let look = Look::at(&view, memory);
//! let task = look.task(cpu, at).ok();
//! look.chain(task.as_ref(), at, &mut chain);
//! for frame in chain.kernel() {
//!     println!("{:?}", view.symbol(frame.instruction()));
//! }
//! # Some(())
//! # }
//! ```
//!
//! # What is trusted
//!
//! Nothing. The guest may write anything anywhere, at any time.
//!
//! | what a guest may try | what holds |
//! |---|---|
//! | tables, trees, lists and stacks without an end | every walk has a number of steps, and everything a budget: a look reads 2 MiB at most, 128 KiB more for a stack, and 64 KiB for each build id, a kernel with its modules 384 MiB, and keeps no more |
//! | addresses outside of memory | [`GuestMemory::read`] says so, and what depends on it is [`Unknown`] |
//! | a program that poses as its kernel | the page tables that run must lead to the same kernel, and the kernel's own variable to the note |
//! | structures of another shape | where members are, the kernel's BTF says, with their sizes; what it does not say is not known |
//! | names with control characters | they are replaced |
//!
//! What is read may be wrong where the guest lies about itself, or changes it meanwhile. It
//! is never read twice and trusted the second time.
#![forbid(unsafe_code)]

mod btf;
mod build_id;
mod bytes;
mod chain;
mod frame;
mod kallsyms;
mod kernel;
mod layout;
mod look;
mod mapping;
mod module;
mod note;
mod orc;
mod paging;
mod places;
mod registers;
mod space;
mod stack;
mod symbols;
mod task;
mod text;
mod unknown;
mod unwind;
mod view;

pub use btf::{BitField, Btf, BtfError, Member};
pub use build_id::BuildId;
pub use chain::{Chain, DEPTH};
pub use frame::{End, Frame};
pub use guest_exit::{GuestMemory, Mapped, Paging};
pub use look::Look;
pub use mapping::{File, Mapping, Path};
pub use note::{Note, Search, Step};
pub use places::TaskPlaces;
pub use registers::{Mode, ProgramRegisters, Registers};
pub use symbols::Symbol;
pub use task::{Comm, Inside, ProgramMemory, Task};
pub use text::{is_hidden, printable};
pub use unknown::Unknown;
pub use view::{KernelView, NoKernel};
