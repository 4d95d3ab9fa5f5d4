//! The default sampling format (§3.6): one buffer, filled from the top, then
//! monitoring is masked.

use perfmon_abi::consts::{
    DEFAULT_FORMAT, PFM_DFL_SMPL_IIP_HDR, PFM_DFL_SMPL_NO_HDR, PFM_DFL_SMPL_VERSION,
};
use perfmon_abi::wire::Refusal;
use perfmon_abi::{DefaultArg, DefaultHeader, Record};

use super::{Control, OverflowArg, SamplingFormat, Setup, entry};
use crate::moment::Moment;

const FLAGS: u32 = PFM_DFL_SMPL_NO_HDR | PFM_DFL_SMPL_IIP_HDR;

/// Messages that its contexts' queues hold. A full buffer makes one; the others
/// are room for notices of other kinds, as in a context without a format.
pub(super) const DEPTH: usize = 8;

/// The default sampling format. Its buffer begins with `pfm_default_smpl_hdr_t`.
#[derive(Clone, Copy, Debug, Default)]
pub struct DefaultFormat;

impl DefaultFormat {
    fn argument(setup: &Setup<'_>) -> Result<(DefaultArg, usize), Refusal> {
        let arg = entry::argument(setup.arg, FLAGS)?;
        let least = DefaultHeader::SIZE + entry::max_size(setup.num_pmds);
        let size = entry::buffer_size(arg.buf_size, least)?;
        Ok((arg, size))
    }
}

impl SamplingFormat for DefaultFormat {
    fn name(&self) -> &'static str {
        "default"
    }

    fn uuid(&self) -> [u8; 16] {
        DEFAULT_FORMAT
    }

    fn arg_size(&self) -> usize {
        DefaultArg::SIZE
    }

    fn queue_depth(&self) -> usize {
        DEPTH
    }

    fn validate(&self, setup: &Setup<'_>) -> Result<(), Refusal> {
        Self::argument(setup).map(|_| ())
    }

    fn size(&self, setup: &Setup<'_>) -> Result<usize, Refusal> {
        Self::argument(setup).map(|(_, size)| size)
    }

    fn init(&self, setup: &Setup<'_>, buffer: &mut [u8]) -> Result<(), Refusal> {
        let (arg, size) = Self::argument(setup)?;
        entry::buffer_size(wide(buffer.len()), size)?;
        let header = DefaultHeader {
            count: 0,
            cur_offs: wide(DefaultHeader::SIZE),
            overflows: 0,
            buf_size: arg.buf_size,
            version: PFM_DFL_SMPL_VERSION,
            flags: arg.buf_flags,
        };
        entry::store(&header, buffer);
        Ok(())
    }

    /// A sample that does not fit any more is lost: it overflowed together with
    /// the one that filled the buffer (§3.6.5).
    fn handler(
        &self,
        buffer: &mut [u8],
        arg: &mut OverflowArg<'_>,
        moment: &Moment,
    ) -> Result<(), Refusal> {
        let mut header = DefaultHeader::get(header_of(buffer)?);
        let end = usize::try_from(header.buf_size).unwrap_or(usize::MAX);
        let end = end.min(buffer.len());
        let at = usize::try_from(header.cur_offs).unwrap_or(end).min(end);
        let most = entry::max_size(arg.num_pmds);
        let was_full = end - at < most;
        let written = entry::write(header.flags, arg, moment, &mut buffer[at..end]);
        if let Some(size) = written {
            header.count = header.count.saturating_add(1);
            header.cur_offs = wide(at + size);
        }
        let is_full = end - at - written.unwrap_or(0) < most;
        if is_full && !was_full {
            header.overflows = header.overflows.saturating_add(1);
        }
        entry::store(&header, buffer);
        arg.control = if is_full { full(arg.notify) } else { go_on() };
        Ok(())
    }

    fn restart(
        &self,
        buffer: &mut [u8],
        active: bool,
        control: &mut Control,
    ) -> Result<(), Refusal> {
        let mut header = DefaultHeader::get(header_of(buffer)?);
        header.count = 0;
        header.cur_offs = wide(DefaultHeader::SIZE);
        entry::store(&header, buffer);
        // An active restart touches nothing but the header.
        control.reset_ovfl_pmds = !active;
        Ok(())
    }
}

/// The buffer has room: on with the short period.
pub(super) fn go_on() -> Control {
    Control {
        reset_ovfl_pmds: true,
        ..Control::default()
    }
}

/// It has none. Whoever did not ask for notification is not blocked either:
/// nobody would wake him.
pub(super) fn full(notify: bool) -> Control {
    Control {
        notify_user: true,
        reset_ovfl_pmds: false,
        block_thread: notify,
        mask_monitoring: true,
    }
}

/// The buffer, if it has at least a header.
fn header_of(buffer: &[u8]) -> Result<&[u8], Refusal> {
    let least = DefaultHeader::SIZE;
    entry::buffer_size(wide(buffer.len()), least)?;
    Ok(buffer)
}

pub(super) fn wide(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}
