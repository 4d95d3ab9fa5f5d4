//! What the formats of this crate have in common: how they are asked, and samples as the
//! default format and the double buffer write them (§3.6.4).

use std::fmt::Debug;

use perfmon_abi::consts::{PFM_DFL_SMPL_IIP_HDR, PFM_DFL_SMPL_NO_HDR};
use perfmon_abi::wire::{Errno, Refusal};
use perfmon_abi::{DefaultArg, DefaultEntry, Field, Record};

use super::{Control, OverflowArg, SamplingFormat, Setup, Wish};
use crate::moment::Moment;

/// Bytes of a PMD's value.
const VALUE: usize = 8;

/// Messages that queues hold. A full buffer makes one; the others
/// are room for notices of other kinds, as in a context without a format.
const DEPTH: usize = 8;

/// A format of this crate: its argument makes a plan, which makes a buffer that begins
/// with a header.
pub(super) trait Builtin: Send + Sync + Debug {
    const NAME: &'static str;
    const UUID: [u8; 16];
    type Arg: Record;
    type Plan;

    /// The plan, and the size of its buffer.
    fn plan(setup: &Setup<'_>) -> Result<(Self::Plan, usize), Refusal>;

    /// Prepares a buffer of that size.
    fn begin(plan: &Self::Plan, buffer: &mut [u8]) -> Result<(), Refusal>;

    fn wished(plan: &Self::Plan) -> Wish {
        let _ = plan;
        Wish::default()
    }

    fn record(
        buffer: &mut [u8],
        arg: &OverflowArg<'_>,
        moment: &Moment,
    ) -> Result<Control, Refusal>;

    /// The tool has read what it was told of.
    fn go_on(buffer: &mut [u8]) -> Result<(), Refusal>;
}

impl<T: Builtin> SamplingFormat for T {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn uuid(&self) -> [u8; 16] {
        T::UUID
    }

    fn arg_size(&self) -> usize {
        T::Arg::SIZE
    }

    fn queue_depth(&self) -> usize {
        DEPTH
    }

    fn validate(&self, setup: &Setup<'_>) -> Result<(), Refusal> {
        T::plan(setup).map(|_| ())
    }

    fn size(&self, setup: &Setup<'_>) -> Result<usize, Refusal> {
        T::plan(setup).map(|(_, size)| size)
    }

    fn init(&self, setup: &Setup<'_>, buffer: &mut [u8]) -> Result<(), Refusal> {
        let (plan, size) = T::plan(setup)?;
        buffer_size(wide(buffer.len()), size)?;
        T::begin(&plan, buffer)
    }

    fn wish(&self, setup: &Setup<'_>) -> Wish {
        T::plan(setup).map_or(Wish::default(), |(plan, _)| T::wished(&plan))
    }

    fn handler(
        &self,
        buffer: &mut [u8],
        arg: &mut OverflowArg<'_>,
        moment: &Moment,
    ) -> Result<(), Refusal> {
        arg.control = T::record(buffer, arg, moment)?;
        Ok(())
    }

    fn restart(
        &self,
        buffer: &mut [u8],
        active: bool,
        control: &mut Control,
    ) -> Result<(), Refusal> {
        T::go_on(buffer)?;
        // An active restart touches nothing but the buffer.
        control.reset_ovfl_pmds = !active;
        Ok(())
    }
}

/// The buffer has room: on with the short period.
pub(super) fn has_room() -> Control {
    Control {
        reset_ovfl_pmds: true,
        ..Control::default()
    }
}

/// It has none. Whoever did not ask for notification is not blocked either:
/// nobody would wake him.
pub(super) fn is_full(notify: bool) -> Control {
    Control {
        notify_user: true,
        reset_ovfl_pmds: false,
        block_thread: notify,
        mask_monitoring: true,
    }
}

pub(super) fn wide(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}

/// The argument of a format with samples of §3.6.4 and its buffer's size: room for so many
/// of the largest ones behind a `header`. Its flags are among `known` and do not contradict
/// each other.
pub(super) fn plan_samples(
    setup: &Setup<'_>,
    known: u32,
    header: usize,
    samples: usize,
) -> Result<(DefaultArg, usize), Refusal> {
    let arg = argument(setup.arg, known)?;
    let least = header + samples * max_size(setup.num_pmds);
    let size = buffer_size(arg.buf_size, least)?;
    Ok((arg, size))
}

/// The argument, if its flags are among `known` and do not contradict each
/// other.
fn argument(bytes: &[u8], known: u32) -> Result<DefaultArg, Refusal> {
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
