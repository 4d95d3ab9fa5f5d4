//! Little-endian fields of the area. Offsets are constants of the layout and
//! lie inside it. A field outside would read as 0 and not be written.

use super::Area;

pub(super) fn bytes<const N: usize>(area: &Area, at: usize) -> [u8; N] {
    match area.get(at..).and_then(<[u8]>::first_chunk) {
        Some(found) => *found,
        None => [0; N],
    }
}

pub(super) fn put(area: &mut Area, at: usize, value: &[u8]) {
    let place = at
        .checked_add(value.len())
        .and_then(|end| area.get_mut(at..end));
    if let Some(place) = place {
        place.copy_from_slice(value);
    }
}

pub(super) fn u8_at(area: &Area, at: usize) -> u8 {
    let [value] = bytes(area, at);
    value
}

pub(super) fn u16_at(area: &Area, at: usize) -> u16 {
    u16::from_le_bytes(bytes(area, at))
}

pub(super) fn u32_at(area: &Area, at: usize) -> u32 {
    u32::from_le_bytes(bytes(area, at))
}

pub(super) fn u64_at(area: &Area, at: usize) -> u64 {
    u64::from_le_bytes(bytes(area, at))
}

/// Whether all bytes of a range are 0.
pub(super) fn zero(area: &Area, from: usize, to: usize) -> bool {
    area.get(from..to)
        .is_some_and(|part| part.iter().all(|&byte| byte == 0))
}
