//! Signals: none while a call is under way, and the library's own, which tells of overflows.

#[allow(unsafe_code)]
mod sys;

pub(crate) use sys::{
    OVERFLOW, SIGEMT, Undisturbed, errno, set_errno, signal_on, unblock, undisturbed,
};
