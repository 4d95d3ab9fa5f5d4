//! A virtio device behind memory-mapped registers, for machines on the processor in software:
//! the file system that a guest mounts by its tag (virtio 1.2, 4.2.2 "MMIO Device Register
//! Layout" and 5.11 "File System Device").
//!
//! Registers are a state machine (`registers`); [`VirtioFs`] has the queues, takes a request
//! of FUSE out of each chain, asks whoever serves files, and gives the reply back before the
//! guest's store has retired. So a run is the same each time, and nothing is ever waited for.
//!
//! # Threat model
//!
//! The guest's kernel is hostile: it chooses registers, rings, chains and requests.
//!
//! | threat | answer |
//! |---|---|
//! | rings outside of memory, of no possible size, or not aligned | looked at when a queue is made ready; the device breaks ([`Broken`]) |
//! | chains that are circular, cut off, too long, or whose buffers are no memory | at most [`MOST_PIECES`] pieces and [`MOST_BYTES`] bytes each way; the device breaks |
//! | more heads than the ring has room for, also by replies over the ring | the device breaks |
//! | buffers over rings, over code, over each other | all accesses are the VMM's own, bounded ones; what was written is told to the processor |
//! | no room for the reply | a reply of an error without data, if that fits; else the device breaks |
//! | registers that are not there, or of another width | read as 0, and nothing is written |
//! | endless breaking and resetting | nothing is logged; the first break ends the run |

mod fs;
mod queue;
mod registers;

pub use fs::{FsState, VirtioFs};
pub use queue::{Broken, MOST_BYTES, MOST_PIECES};

/// Bytes of the registers' page.
pub const WINDOW: u32 = 0x1000;
