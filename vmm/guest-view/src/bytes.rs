//! Numbers in bytes that were read: little-endian, as the processor has them.

/// The 8 bytes of `bytes` from `at` on, which are inside.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

/// The 4 bytes of `bytes` from `at` on, which are inside.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}
