//! Guest firmware: it runs before the guest's kernel, reserves counters as a
//! BIOS power manager would, ends its phase and enters the kernel.
//!
//! The crate has four parts:
//!
//! - [`config`]: the configuration area, which the `vmm` crate writes and the
//!   firmware reads, and the firmware's answer in it; [`layout`]: where all of
//!   it lies in guest memory.
//! - [`reserve`]: reserves one vCPU's counters, as functions of a
//!   [`Machine`](reserve::Machine), so that tests need no guest.
//! - [`smm`]: what it leaves in SMRAM, to answer for its counters after its phase.
//! - `src/guest`: the freestanding program around them, for the target
//!   `x86_64-unknown-none`. The build script builds it, and [`image`] returns
//!   it.
//!
//! `docs/guide/firmware.md` is the contract for other firmware.
#![no_std]
#![forbid(unsafe_code)]

pub mod config;
pub mod layout;
pub mod reserve;
pub mod smm;

/// The built-in firmware, an ELF64 file. `None` where the target
/// `x86_64-unknown-none` was not installed when this crate was built.
#[cfg(not(target_os = "none"))]
#[must_use]
pub fn image() -> Option<&'static [u8]> {
    #[cfg(firmware_image)]
    {
        Some(include_bytes!(env!("UMPIRE_FIRMWARE_IMAGE")))
    }
    #[cfg(not(firmware_image))]
    {
        None
    }
}
