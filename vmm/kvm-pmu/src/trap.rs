//! Traps that KVM has no exit for: RDPMC, and the debug registers and single
//! steps that they are caught with.

mod breakpoints;
mod context;
mod displaced;
mod frame;
mod implicit;
mod paging;
mod patches;
mod rdpmc;
mod step_targets;
mod stepping;

pub(crate) use breakpoints::{DR6_BS, DR6_SLOTS, GuestBreakpoints, Placement, merge_dr6};
pub(crate) use context::{CpuContext, Gate, GateKind, cpl};
pub use displaced::PatchRefusal;
pub(crate) use displaced::{Displaced, LONGEST, OUT, OUT_SIZE, patch_site};
pub(crate) use frame::{ExceptionFrame, Return};
pub(crate) use implicit::Implicit;
pub(crate) use paging::page_of;
pub(crate) use patches::{Patch, Patches};
pub(crate) use rdpmc::{GP_VECTOR, Presented, Rdpmc, RdpmcTrap, inspect};
pub(crate) use step_targets::StepInputs;
pub(crate) use stepping::{Executed, StepResult, StepStop, Stepper, TfRepair};

/// Bits of RFLAGS (SDM vol. 1, 3.4.3).
pub(crate) const RFLAGS_TF: u64 = 1 << 8;
pub(crate) const RFLAGS_IF: u64 = 1 << 9;
pub(crate) const RFLAGS_RF: u64 = 1 << 16;
pub(crate) const RFLAGS_VM: u64 = 1 << 17;
pub(crate) const RFLAGS_AC: u64 = 1 << 18;
