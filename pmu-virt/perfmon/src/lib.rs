//! perfmon2 for host tools: contexts, event sets, sampling formats.
//!
//! Everything here is pure: state and command in, outcome out. [`Context`] is
//! the software state of the specification (HPL-2004-200 (R.1), version 0.6);
//! it says what it wants counted ([`Wanted`]) and takes what was counted.
//! [`estimate`] extrapolates multiplexed counts. Physical counters, sockets
//! and time are brought by others. What the specification's words mean for
//! vCPUs and cores is defined in `docs/reference/perfmon.md`.
#![deny(unsafe_code)]

mod bits;
mod carta;
mod context;
mod description;
pub mod estimate;
mod format;
mod inspect;
mod moment;
pub mod registers;
mod throttle;

pub use bits::PmdBits;
pub use context::{Account, Context, How, Phase, Wanted};
pub use description::{LogicalPmu, PmcDescription, PmdDescription, PmdKind};
pub use format::{
    CompactFormat, Control, DefaultFormat, DoubleFormat, FormatRegistry, OverflowArg, Sampler,
    SamplingFormat, Setup, Wish,
};
pub use moment::{MessageQueue, Moment, Quantities, SampleBuffer};
pub use pmu_model::{ContextId, Nanos, VirtualPmd};
pub use throttle::{DEFAULT_OVERFLOW_RATE, Throttle};
