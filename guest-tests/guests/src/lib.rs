//! Guest programs in Rust. The build script builds them for
//! `x86_64-unknown-none`, and [`arbiters`] returns the one that there is.
//!
//! They run in the micro-machine of `vmm::micro`, most of them in KVM's
//! instruction emulator where the host has one: no SSE, and few instructions.
#![no_std]
#![forbid(unsafe_code)]

/// The three arbiters of `arbiter::guest` in a guest of two vCPUs: an ELF64
/// file. `None` where the target was not installed when this crate was built.
#[cfg(not(target_os = "none"))]
#[must_use]
pub fn arbiters() -> Option<&'static [u8]> {
    #[cfg(guest_images)]
    {
        Some(include_bytes!(env!("UMPIRE_ARBITERS_GUEST")))
    }
    #[cfg(not(guest_images))]
    {
        None
    }
}
