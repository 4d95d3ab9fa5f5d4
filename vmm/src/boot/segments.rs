//! The parts of a kernel file and their places in guest memory.

use super::error::BootError;
use super::image::Image;
use super::memory::{GuestMemory, HIGH_MEMORY_START, HOLE_START, MIB, low_end, write};

/// One loadable part of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoadSegment {
    /// Where it begins in the file.
    pub(crate) offset: u64,
    /// Guest-physical address.
    pub(crate) address: u64,
    /// Address it is linked at, for entry points that are given as such.
    pub(crate) linked: u64,
    /// Bytes that come from the file.
    pub(crate) file_len: u64,
    /// Bytes in memory; those beyond `file_len` are zero.
    pub(crate) memory_len: u64,
}

impl LoadSegment {
    fn end(&self) -> u64 {
        self.address.saturating_add(self.memory_len)
    }
}

/// A range of guest-physical addresses that is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    /// First address.
    pub(crate) start: u64,
    /// First address behind it.
    pub(crate) end: u64,
}

/// Copies all segments and returns the range that they take.
///
/// Everything is checked before the first byte is written.
pub(crate) fn load(
    image: &Image,
    mem: &GuestMemory,
    segments: &[LoadSegment],
) -> Result<Span, BootError> {
    load_where(image, mem, segments, |span| check_fit(image, mem, span))
}

/// Copies all segments and returns the range that they take. `fit` refuses a segment whose place
/// will not do.
pub(crate) fn load_where(
    image: &Image,
    mem: &GuestMemory,
    segments: &[LoadSegment],
    fit: impl Fn(Span) -> Result<(), BootError>,
) -> Result<Span, BootError> {
    let span = check(image, segments, fit)?;
    for segment in segments {
        let LoadSegment {
            offset,
            address,
            file_len,
            ..
        } = *segment;
        image.copy_to_guest(mem, address, offset, file_len, "a segment")?;
        zero(mem, address + file_len, segment.end())?;
    }
    Ok(span)
}

/// The guest-physical address of an entry point that is given as a physical or a linked address.
///
/// Linux gives physical ones; kernels of the "higher half" kind often give linked ones.
pub(crate) fn physical_entry(segments: &[LoadSegment], entry: u64) -> Option<u64> {
    let within = |start: u64, segment: &LoadSegment| {
        entry
            .checked_sub(start)
            .filter(|&distance| distance < segment.memory_len)
    };
    segments
        .iter()
        .find_map(|segment| within(segment.address, segment).map(|_| entry))
        .or_else(|| {
            segments.iter().find_map(|segment| {
                within(segment.linked, segment)
                    .and_then(|distance| segment.address.checked_add(distance))
            })
        })
}

/// Checks that a range which a kernel needs lies in memory above the first MiB.
pub(crate) fn check_fit(image: &Image, mem: &GuestMemory, span: Span) -> Result<(), BootError> {
    let path = image.path().to_owned();
    if span.start < HIGH_MEMORY_START {
        let what = format!(
            "it wants to be loaded at {:#x}, where the boot data lies; link it at 1 MiB or above",
            span.start
        );
        return Err(BootError::Unsupported { path, what });
    }
    if span.end > HOLE_START {
        let what = format!(
            "it reaches up to address {:#x}, into the hole at 3 GiB; link it lower",
            span.end
        );
        return Err(BootError::Unsupported { path, what });
    }
    let low_end = low_end(mem)?;
    if span.end > low_end {
        let (needs_mib, has_mib) = (span.end.div_ceil(MIB), low_end / MIB);
        return Err(BootError::KernelTooLarge {
            path,
            needs_mib,
            has_mib,
        });
    }
    Ok(())
}

fn check(
    image: &Image,
    segments: &[LoadSegment],
    fit: impl Fn(Span) -> Result<(), BootError>,
) -> Result<Span, BootError> {
    let malformed = |what: String| BootError::Malformed {
        path: image.path().to_owned(),
        what,
    };
    let mut sorted: Vec<&LoadSegment> = segments.iter().collect();
    sorted.sort_by_key(|segment| segment.address);
    let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else {
        return Err(malformed("it has no loadable segment".into()));
    };
    for segment in &sorted {
        if segment.file_len > segment.memory_len {
            return Err(malformed(format!(
                "the segment at {:#x} has more bytes in the file than in memory",
                segment.address
            )));
        }
        fit(Span {
            start: segment.address,
            end: segment.end(),
        })?;
        // The loader does not need this range; an empty read of it gives the error.
        let end = segment.offset.saturating_add(segment.file_len);
        if end > image.len() {
            return Err(BootError::Truncated {
                role: image.role(),
                path: image.path().to_owned(),
                what: "a segment",
                needed: end,
                len: image.len(),
            });
        }
    }
    for pair in sorted.windows(2) {
        if pair[0].end() > pair[1].address {
            return Err(malformed(format!(
                "the segments at {:#x} and {:#x} overlap",
                pair[0].address, pair[1].address
            )));
        }
    }
    Ok(Span {
        start: first.address,
        end: last.end(),
    })
}

fn zero(mem: &GuestMemory, start: u64, end: u64) -> Result<(), BootError> {
    static ZEROES: [u8; 0x1_0000] = [0; 0x1_0000];
    let mut at = start;
    while at < end {
        let part = usize::try_from(end - at).map_or(ZEROES.len(), |rest| rest.min(ZEROES.len()));
        write(mem, at, &ZEROES[..part])?;
        at += part as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::boot::memory::create;

    fn segment(address: u64, file_len: u64, memory_len: u64) -> LoadSegment {
        LoadSegment {
            offset: 16,
            address,
            linked: address.wrapping_add(1 << 40),
            file_len,
            memory_len,
        }
    }

    fn check_load(segments: &[LoadSegment], expected: Result<(u64, u64), &str>) {
        let mem = create(4).expect("memory");
        let image = Image::from_bytes("kernel", Path::new("k"), vec![0xa5; 0x2000]);
        match (load(&image, &mem, segments), expected) {
            (Ok(span), Ok(expected)) => assert_eq!((span.start, span.end), expected),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (result, expected) => panic!("{result:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn segments_are_checked_before_they_are_copied() {
        check_load(&[segment(MIB, 8, 16)], Ok((MIB, MIB + 16)));
        check_load(
            &[segment(3 * MIB, 8, MIB), segment(MIB, 0, 4)],
            Ok((MIB, 4 * MIB)),
        );
        check_load(&[], Err("no loadable segment"));
        check_load(&[segment(0x8000, 8, 8)], Err("link it at 1 MiB or above"));
        check_load(
            &[segment(MIB, 9, 8)],
            Err("more bytes in the file than in memory"),
        );
        check_load(
            &[segment(MIB, 8, 0x100), segment(MIB + 0xff, 8, 8)],
            Err("overlap"),
        );
        check_load(
            &[segment(3 * MIB, 8, MIB + 1)],
            Err("needs 5 MiB, the guest has 4 MiB"),
        );
        check_load(&[segment(MIB, 0x2000, 0x2000)], Err("truncated"));
        check_load(&[segment(MIB, 8, u64::MAX)], Err("hole at 3 GiB"));
        check_load(&[segment(u64::MAX, 8, 8)], Err("hole at 3 GiB"));
    }

    #[test]
    fn the_rest_of_a_segment_is_zeroed() {
        let mem = create(4).expect("memory");
        mem.write_slice(&[0xff; 0x2_0000], GuestAddress(MIB))
            .expect("dirtied");
        let image = Image::from_bytes("kernel", Path::new("k"), vec![0xa5; 0x2000]);
        load(&image, &mem, &[segment(MIB, 4, 0x1_8000)]).expect("loaded");
        let word = |address| mem.read_obj::<u32>(GuestAddress(address)).expect("inside");
        assert_eq!(word(MIB), 0xa5a5_a5a5);
        assert_eq!(word(MIB + 4), 0);
        assert_eq!(word(MIB + 0x1_7ffc), 0);
        assert_eq!(word(MIB + 0x1_8000), u32::MAX);
    }

    #[test]
    fn entries_are_physical_or_linked() {
        let segments = [segment(MIB, 8, 16), segment(2 * MIB, 8, 16)];
        assert_eq!(physical_entry(&segments, MIB + 15), Some(MIB + 15));
        assert_eq!(
            physical_entry(&segments, 2 * MIB + 4 + (1 << 40)),
            Some(2 * MIB + 4)
        );
        assert_eq!(physical_entry(&segments, MIB + 16), None);
        assert_eq!(
            physical_entry(&[segment(u64::MAX, 0, 16)], 7 + (1 << 40)),
            None
        );
    }
}
