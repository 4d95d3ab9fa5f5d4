//! One vCPU: the run loop, and what each exit leads to.

mod debug;
mod debug_exits;
mod end;
mod exits;
mod halt;
mod hosted;
mod kick;
mod log;
mod observe;
mod platform;
mod pmi;
mod rdpmc;
mod reserved;
mod run;
mod saved;
mod stepping;
mod timer;
mod turn;

pub use debug::{DebugControl, DebugEvent, DebugQuirks};
pub use end::VcpuEnd;
pub use kick::Seat;
pub use log::PmuLog;
pub use observe::{Observer, Silent, TrapEvent};
pub use platform::{Platform, SharedPlatform};
pub use pmi::{PmiDelivery, PmiRoute};
pub use run::{Vcpu, VcpuControl, VcpuFailure, VcpuParts};
pub use stepping::StepSupport;
pub use turn::{Stay, Turn};
