//! A whole machine: memory with a kernel in it, devices, vCPUs with their PMUs,
//! and the loop that serves it until it ends.

mod build;
mod console;
mod emu_thread;
mod event_loop;
mod figures;
mod outside;
mod run;
mod signals;
mod state;
#[allow(unsafe_code, reason = "a signal handler")]
mod sys;
mod threads;

pub(crate) use build::SEEDED_BEGINNING;
pub use build::{EngineFacts, LeaseLines, Machine, MachineError, Stopper};
pub use event_loop::LoopError;
pub use figures::{EngineFigures, NoFigures};
pub use run::{RunEnd, RunError, run};
pub use state::probe as probe_state_file;
pub use state::{SavedMachine, StateFileError};
pub use threads::StartError;
