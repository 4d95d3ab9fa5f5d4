//! Samples as the default format and the double buffer write them (§3.6.4).

use perfmon_abi::consts::{PFM_DFL_SMPL_IIP_HDR, PFM_DFL_SMPL_NO_HDR};
use perfmon_abi::wire::{Errno, Refusal};
use perfmon_abi::{DefaultArg, DefaultEntry, Field, Record};

use super::OverflowArg;
use crate::moment::Moment;

/// Bytes of a PMD's value.
const VALUE: usize = 8;

/// The argument, if its flags are among `known` and do not contradict each
/// other.
pub(super) fn argument(bytes: &[u8], known: u32) -> Result<DefaultArg, Refusal> {
    let arg = DefaultArg::from_bytes(bytes)
        .map_err(|error| invalid(format!("argument of the sampling format: {error}")))?;
    let unknown = arg.buf_flags & !known;
    if unknown != 0 {
        let reason = format!("buf_flags has bits that are not defined: {unknown:#x}");
        return Err(invalid(reason));
    }
    let both = PFM_DFL_SMPL_NO_HDR | PFM_DFL_SMPL_IIP_HDR;
    if arg.buf_flags & both == both {
        let reason = "buf_flags: PFM_DFL_SMPL_NO_HDR and PFM_DFL_SMPL_IIP_HDR exclude each other";
        return Err(invalid(reason.to_owned()));
    }
    Ok(arg)
}

/// `buf_size`, if it has room for `least` bytes.
pub(super) fn buffer_size(size: u64, least: usize) -> Result<usize, Refusal> {
    let found = usize::try_from(size).ok().filter(|&size| size >= least);
    found.ok_or_else(|| invalid(format!("buf_size is {size}: give at least {least} bytes")))
}

pub(super) fn invalid(reason: String) -> Refusal {
    Refusal::new(Errno::EINVAL, reason)
}

/// Most bytes of a sample on a PMU with so many PMDs, as §3.6.5 defines it: with
/// a full header, whatever the flags say.
pub(super) fn max_size(num_pmds: u16) -> usize {
    DefaultEntry::SIZE + VALUE * usize::from(num_pmds)
}

/// Writes a sample to the beginning of `room`, and its size. `None` if there is
/// not enough room: nothing is written then.
pub(super) fn write(
    flags: u32,
    arg: &OverflowArg<'_>,
    moment: &Moment,
    room: &mut [u8],
) -> Option<usize> {
    let header = match flags {
        _ if flags & PFM_DFL_SMPL_NO_HDR != 0 => 0,
        _ if flags & PFM_DFL_SMPL_IIP_HDR != 0 => <u64 as Field>::SIZE,
        _ => DefaultEntry::SIZE,
    };
    let size = header + VALUE * arg.values.len();
    let (head, body) = room.get_mut(..size)?.split_at_mut(header);
    if header == DefaultEntry::SIZE {
        entry(arg, moment).put(head);
    } else if header != 0 {
        moment.ip.put(head);
    }
    for (value, place) in arg.values.iter().zip(body.chunks_exact_mut(VALUE)) {
        value.put(place);
    }
    Some(size)
}

fn entry(arg: &OverflowArg<'_>, moment: &Moment) -> DefaultEntry {
    DefaultEntry {
        pid: moment.vm,
        tid: moment.vcpu,
        ovfl_pmd: arg.ovfl_pmd,
        set: arg.active_set,
        cpu: moment.core,
        last_reset_val: arg.last_reset,
        tstamp: moment.tsc,
        ip: moment.ip,
    }
}

/// Writes a header that the tool may be reading: no word of it is anything but
/// its old or its new value at any time, and those that stay are not touched.
pub(super) fn store<T: Record>(header: &T, buffer: &mut [u8]) {
    let mut image = [0; 128];
    header.put(&mut image);
    let words = image[..T::SIZE].chunks_exact(VALUE);
    for (new, old) in words.zip(buffer.chunks_exact_mut(VALUE)) {
        if new != old {
            old.copy_from_slice(new);
        }
    }
}
