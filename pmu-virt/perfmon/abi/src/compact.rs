//! The compact format: samples told by their difference to the one before.
//!
//! The buffer is a ring of blocks. Each block stands for itself: it has a number
//! and says how many samples came before it, so a reader that was overtaken goes
//! on with the oldest block that is left and knows how many samples it missed. No
//! command is needed to go on, and the writer never waits.
//!
//! A sample is a byte of flags (`UMPIRE_COMPACT_*`), then numbers in LEB128, 7
//! bits to a byte, lowest first, the last without bit 7. Differences are taken
//! modulo 2^64 and folded, so that small ones of either sign are short:
//! 0, -1, 1, -2 become 0, 1, 2, 3. In this order:
//!
//! 1. difference of the time stamp, difference of the instruction pointer;
//! 2. SOURCE: set, PMD, event id;
//! 3. PLACE: VM, vCPU, core;
//! 4. RESET: difference of the last reset value;
//! 5. BODY: the two words of the vector of recorded PMDs;
//! 6. TASK: the numbers of task and mapping ([`GuestPlace`]);
//! 7. CHAIN: how many frames are the kernel's, why it has no more, the same of the
//!    program, 0 for a part that is not there; for each frame the difference of its
//!    address to the frame before, and in the program's that of its mapping. In front of
//!    the first frame are the sample's own;
//! 8. STACK: the program's stack pointer; 0, or 1 and its frame pointer; how many mappings
//!    the words of the stack lead to, and for each the difference of its number to the one
//!    before; how many bytes of the stack there are, and these ([`ProgramStack`]);
//! 9. for each recorded PMD, by ascending index, the difference of its value to
//!    the last that was recorded of this PMD in the block.
//!
//! What has no flag is as in the sample before, but for chain and stack: there are none then.
//! Before the first sample of a block everything is 0.

mod codec;
mod cursor;

pub use crate::place::{
    CallChain, ChainEnd, GuestPlace, MOST_FRAMES, MOST_STACK, MOST_STACK_MAPPINGS, ProgramFrame,
    ProgramStack,
};
pub use codec::{
    MAX_CHAIN, MAX_SAMPLE, MAX_STACK_NUMBERS, NextSample, RecordError, Values, decode, encode,
};
pub use cursor::{Batch, CompactError, Cursor};
