//! Guest firmware: code that runs before the guest's kernel.
//!
//! Nothing that Umpire boots today needs firmware: the loaders of the `vmm`
//! crate enter a kernel directly. This crate is where the firmware lives that
//! reserves counters as a BIOS would and then hands over to the kernel; it
//! links the core of `arbiter` and holds no code until that exists.
#![no_std]
#![forbid(unsafe_code)]
