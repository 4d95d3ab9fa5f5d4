//! Samples of guests in a file, and reports of them.
//!
//! `umpire record` writes a profile with [`ProfileWriter`]; `umpire report` and
//! `umpire script` read it with [`ProfileReader`]. `docs/guide/profiling.md` describes
//! the file and the commands.

mod annotate;
mod choice;
mod chosen;
mod code;
mod command;
mod diff;
mod error;
pub mod facts;
pub mod firefox;
mod input;
mod jit;
pub mod location;
pub mod names;
mod packages;
pub mod paths;
pub mod perf_data;
mod plain;
pub mod pprof;
pub mod programs;
mod reader;
mod record;
pub mod report;
pub mod script;
pub mod stacks;
pub mod symbols;
pub mod symfs;
pub mod tally;
pub mod unwind;
mod wire;
mod writer;

pub use annotate::{AnnotateOptions, Syntax, annotate};
pub use choice::{SampleChoice, TimeChoice, TimeChoiceError, WordList, WordListError};
pub use code::CodeError;
pub use command::{diff, report};
pub use diff::DiffOptions;
pub use error::ReportError;
pub use input::ProfileChoice;
pub use reader::{Ending, ProfileError, ProfileReader};
pub use record::{
    Filter, Header, LeftOut, Loss, LossKind, Record, Ring, Sample, SampledEvent, Sampling, Sink,
    Totals,
};
pub use report::{Percentage, ReportOptions};
pub use script::{ScriptOptions, script};
pub use wire::{LONGEST_HEADER, MAGIC, VERSION};
pub use writer::ProfileWriter;

#[cfg(test)]
mod file_tests;
#[cfg(test)]
mod jit_tests;
#[cfg(test)]
mod output_tests;
#[cfg(test)]
mod program_tests;
#[cfg(test)]
mod test_elf;
