//! Numbers in bytes that were read: little-endian, as the processor has them.

/// The 8 bytes of `bytes` from `at` on, which are inside.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|byte| bytes[at + byte]))
}

/// The 4 bytes of `bytes` from `at` on, which are inside.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]))
}
