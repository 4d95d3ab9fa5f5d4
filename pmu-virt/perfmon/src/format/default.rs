//! The default sampling format (§3.6): one buffer, filled from the top, then
//! monitoring is masked.

use perfmon_abi::consts::{
    DEFAULT_FORMAT, PFM_DFL_SMPL_IIP_HDR, PFM_DFL_SMPL_NO_HDR, PFM_DFL_SMPL_VERSION,
};
use perfmon_abi::wire::Refusal;
use perfmon_abi::{DefaultArg, DefaultHeader, Record};

use super::common::{self, Builtin, has_room, is_full, wide};
use super::{Control, OverflowArg, Setup};
use crate::moment::Moment;

const FLAGS: u32 = PFM_DFL_SMPL_NO_HDR | PFM_DFL_SMPL_IIP_HDR;

/// The default sampling format. Its buffer begins with `pfm_default_smpl_hdr_t`.
#[derive(Clone, Copy, Debug, Default)]
pub struct DefaultFormat;

impl Builtin for DefaultFormat {
    const NAME: &'static str = "default";
    const UUID: [u8; 16] = DEFAULT_FORMAT;
    type Arg = DefaultArg;
    type Plan = DefaultArg;

    fn plan(setup: &Setup<'_>) -> Result<(DefaultArg, usize), Refusal> {
        common::plan_samples(setup, FLAGS, DefaultHeader::SIZE, 1)
    }

    fn begin(arg: &DefaultArg, buffer: &mut [u8]) -> Result<(), Refusal> {
        let header = DefaultHeader {
            count: 0,
            cur_offs: wide(DefaultHeader::SIZE),
            overflows: 0,
            buf_size: arg.buf_size,
            version: PFM_DFL_SMPL_VERSION,
            flags: arg.buf_flags,
        };
        common::store(&header, buffer);
        Ok(())
    }

    /// A sample that does not fit any more is lost: it overflowed together with
    /// the one that filled the buffer (§3.6.5).
    fn record(
        buffer: &mut [u8],
        arg: &OverflowArg<'_>,
        moment: &Moment,
    ) -> Result<Control, Refusal> {
        let mut header = header_of(buffer)?;
        let end = usize::try_from(header.buf_size).unwrap_or(usize::MAX);
        let end = end.min(buffer.len());
        let at = usize::try_from(header.cur_offs).unwrap_or(end).min(end);
        let most = common::max_size(arg.num_pmds);
        let was_full = end - at < most;
        let written = common::write(header.flags, arg, moment, &mut buffer[at..end]);
        if let Some(size) = written {
            header.count = header.count.saturating_add(1);
            header.cur_offs = wide(at + size);
        }
        let full = end - at - written.unwrap_or(0) < most;
        if full && !was_full {
            header.overflows = header.overflows.saturating_add(1);
        }
        common::store(&header, buffer);
        Ok(if full {
            is_full(arg.notify)
        } else {
            has_room()
        })
    }

    fn go_on(buffer: &mut [u8]) -> Result<(), Refusal> {
        let mut header = header_of(buffer)?;
        header.count = 0;
        header.cur_offs = wide(DefaultHeader::SIZE);
        common::store(&header, buffer);
        Ok(())
    }
}

/// The header, if the buffer has room for one.
fn header_of(buffer: &[u8]) -> Result<DefaultHeader, Refusal> {
    common::buffer_size(wide(buffer.len()), DefaultHeader::SIZE)?;
    Ok(DefaultHeader::get(buffer))
}
