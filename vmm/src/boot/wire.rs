//! Little-endian fields in byte slices, read without running off the end, and alignment.

/// The `N` bytes at `offset`, or `None` beyond the end.
pub(crate) fn bytes_at<const N: usize>(data: &[u8], offset: usize) -> Option<[u8; N]> {
    let end = offset.checked_add(N)?;
    data.get(offset..end)?.try_into().ok()
}

/// The 16-bit field at `offset`.
pub(crate) fn u16_at(data: &[u8], offset: usize) -> Option<u16> {
    bytes_at(data, offset).map(u16::from_le_bytes)
}

/// The 32-bit field at `offset`.
pub(crate) fn u32_at(data: &[u8], offset: usize) -> Option<u32> {
    bytes_at(data, offset).map(u32::from_le_bytes)
}

/// The 64-bit field at `offset`.
#[cfg(test)]
pub(crate) fn u64_at(data: &[u8], offset: usize) -> Option<u64> {
    bytes_at(data, offset).map(u64::from_le_bytes)
}

/// Rounds up to a multiple of `alignment`, a power of two; `None` on overflow.
pub(crate) fn align_up(value: u64, alignment: u64) -> Option<u64> {
    let mask = alignment.checked_sub(1)?;
    value.checked_add(mask).map(|sum| sum & !mask)
}

/// Rounds down to a multiple of `alignment`, a power of two.
pub(crate) fn align_down(value: u64, alignment: u64) -> u64 {
    value & !(alignment - 1)
}

#[cfg(test)]
mod tests {
    use super::{align_down, align_up, u16_at, u32_at, u64_at};

    #[test]
    fn fields_end_with_the_slice() {
        let data = [1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(u16_at(&data, 6), Some(0x0807));
        assert_eq!(u16_at(&data, 7), None);
        assert_eq!(u32_at(&data, 4), Some(0x0807_0605));
        assert_eq!(u32_at(&data, usize::MAX), None);
        assert_eq!(u64_at(&data, 0), Some(0x0807_0605_0403_0201));
        assert_eq!(u64_at(&data, 1), None);
    }

    #[test]
    fn alignment_keeps_multiples_and_reports_overflow() {
        assert_eq!(align_up(0x1000, 0x1000), Some(0x1000));
        assert_eq!(align_up(0x1001, 0x1000), Some(0x2000));
        assert_eq!(align_up(u64::MAX, 0x1000), None);
        assert_eq!(align_up(5, 0), None);
        assert_eq!(align_down(0x1fff, 0x1000), 0x1000);
    }
}
