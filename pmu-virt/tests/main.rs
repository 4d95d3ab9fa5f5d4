//! The integration tests of this crate: one program, because each one more is linked with all that
//! it tests once more. A file or folder beside this one is a module here.

mod accounting;
mod assign;
mod contract;
mod cpuid;
mod decode;
mod emu_backend;
mod estimate;
mod hosting;
mod ibs;
mod limited;
mod msr;
mod naive;
mod pcr;
mod pebs;
mod registers;
mod rules;
mod schedules;
mod seated;
mod sharing;
mod sim;
mod small_backend;
mod state;
mod step_backend;
mod switching;
mod switching_sim;
mod vcpu;
mod vcpu_prop;
