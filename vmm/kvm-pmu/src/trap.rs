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

pub use breakpoints::{DR6_BS, DR6_SLOTS, merge_dr6};
pub use breakpoints::{DebugCause, GuestBreakpoints, Placement};
pub use context::{CpuContext, Gate, GateKind, cpl};
pub use cookie::Presented;
pub use frame::{ExceptionFrame, Return};
pub use paging::{Paging, translate};
pub use rdpmc::GP_VECTOR;
pub use rdpmc::{Rdpmc, RdpmcTrap, inspect};
pub use segment::load as load_segment;
pub use stepping::{StepInputs, StepPlan, StepResult, StepStop, Stepper, TfRepair};
