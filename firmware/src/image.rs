//! The firmware that was built together with this crate.

/// The built-in firmware, an ELF64 file. `None` where the target
/// `x86_64-unknown-none` was not installed when this crate was built.
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
