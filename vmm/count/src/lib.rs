//! What a run of `umpire count` was and what it counted: the file of a run, the tables and the
//! JSON that show it, and what has changed from one run to another.
//!
//! Pure: whoever runs the program makes a [`Record`], and writes what this crate prints.
//!
//! - What was counted, and of what: [`record`], [`inputs`]; which events there are: [`event`].
//! - As people, programs and a job's summary read it: [`table`], [`json`], [`markdown`].
//! - Two runs: [`compare`] is the gate of a job, [`diff`] names the functions that changed,
//!   [`regions`] finds what programs have marked in both.

#![forbid(unsafe_code)]

pub mod compare;
pub mod diff;
pub mod event;
pub mod inputs;
pub mod json;
pub mod markdown;
pub mod number;
pub mod record;
pub mod regions;
pub mod table;

pub use event::{Chosen, Event, Side};
pub use inputs::Inputs;
pub use record::{Outcome, Record};
