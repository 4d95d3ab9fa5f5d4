//! What touches C: symbols, memory that callers point to, signals.

mod descriptors;
pub(crate) mod environment;
mod exports;
pub(crate) mod guard;
pub(crate) mod last;
pub(crate) mod memory;
pub(crate) mod real;
