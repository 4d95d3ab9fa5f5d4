//! Traps that KVM has no exit for: RDPMC, and the debug registers and single
//! steps that they are caught with.

mod breakpoints;
mod context;
mod cookie;
mod flags_image;
mod frame;
mod paging;
mod rdpmc;
mod reach;
mod segment;
mod stepping;

pub(crate) use breakpoints::{DR6_BS, DR6_SLOTS, GuestBreakpoints, Placement, merge_dr6};
pub(crate) use context::{CpuContext, Gate, cpl};
pub(crate) use cookie::Presented;
pub(crate) use frame::{ExceptionFrame, Return};
pub(crate) use rdpmc::{GP_VECTOR, Rdpmc, RdpmcTrap, inspect};
pub(crate) use stepping::{StepInputs, StepResult, StepStop, Stepper, TfRepair};
