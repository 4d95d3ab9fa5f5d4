//! Who may use which performance counter.
#![no_std]
#![forbid(unsafe_code)]
