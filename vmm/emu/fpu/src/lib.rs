//! Floating point of a guest's instructions: values in, values and exception flags out.
//!
//! A result here is the same on every host. What IEEE 754 and the manual define wholly the
//! host's own SSE instructions compute ([`sse`] has the list, each with its reason), between the
//! guest's MXCSR, with all exceptions masked, and the host's, which is put back. All else, what
//! the manual leaves to the processor and the x87 whole, is integer code of ours.
//!
//! Nothing here raises anything: flags are given back, and who executes the instruction decides
//! on #XM and #MF.

#![deny(unsafe_code)]

pub mod sse;
pub mod x87;

mod approximate;
mod fixed;
mod soft;
#[allow(unsafe_code, reason = "instructions of the host's FPU")]
mod sys;
