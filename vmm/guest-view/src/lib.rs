//! What runs in a guest, out of its memory alone: its page tables.
//!
//! Nothing that is read is trusted: the guest may write anything anywhere, at any time.
#![forbid(unsafe_code)]

mod memory;
mod paging;

pub use memory::GuestMemory;
pub use paging::{Mapped, Paging};
