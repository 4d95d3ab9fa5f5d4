//! Micro-guests as tests: code written with an assembler library, the expected
//! result of each instruction, and the suite that runs it on this host's KVM.
//!
//! A guest writes what it sees into a log in its own memory, so that looking
//! costs no exit; the harness compares the log, the counters' reports and the
//! run loop's events after the guest's end.

mod image;
mod lab;
mod limits;
mod program;
mod script;
mod suite;

pub use image::MicroImage;
pub use lab::{Entry, Lab, LabError, LabRun, Setup, step_backend};
pub(crate) use lab::{MOST_LOST, exit_time, lost_to_exits};
pub use limits::{LIMITS, Limit};
pub use program::{
    DATA, DISPLACEABLE, ENDBR64, ENTRY_SIZE, FAULT, LOG, Program, VALUE, Written, enter_user, exit,
    log_fault, log_value, spin, spin_for, tsc, wrmsr,
};
pub use script::{Op, Script};
pub use suite::{Test, one_of_three, run_suite, run_suite_on_each_engine};
