//! The library's own signal, which tells of overflows.

#[allow(unsafe_code)]
mod sys;

pub(crate) use sys::{OVERFLOW, SIGEMT, signal_on, unblock};
