//! The double buffer (§6.3.1): the tool deals with one half while samples go to
//! the other, so that there is no blind spot between notification and restart.
//!
//! A half that is full goes to the tool, with a notification, if the other half
//! is free. While the tool has the other one, the full half waits: for the next
//! restart, or until its samples are overwritten from the top (counted as lost).
//! With PFM_DOUBLE_FMT_MASK_WHEN_FULL monitoring is masked instead, and the tool
//! has both halves.

use perfmon_abi::consts::{
    DOUBLE_FORMAT, PFM_DFL_SMPL_IIP_HDR, PFM_DFL_SMPL_NO_HDR, PFM_DOUBLE_FMT_MASK_WHEN_FULL,
    PFM_DOUBLE_HALF_ACTIVE, PFM_DOUBLE_HALF_FREE, PFM_DOUBLE_HALF_FULL, PFM_DOUBLE_SMPL_VERSION,
};
use perfmon_abi::wire::Refusal;
use perfmon_abi::{DefaultArg, DoubleHeader, Record};

use super::common::{self, Builtin, has_room, is_full, wide};
use super::{Control, OverflowArg, Setup};
use crate::moment::Moment;

const FLAGS: u32 = PFM_DFL_SMPL_NO_HDR | PFM_DFL_SMPL_IIP_HDR | PFM_DOUBLE_FMT_MASK_WHEN_FULL;

/// The double buffer. Its buffer begins with `pfm_double_smpl_hdr_t`.
#[derive(Clone, Copy, Debug, Default)]
pub struct DoubleFormat;

impl Builtin for DoubleFormat {
    const NAME: &'static str = "double";
    const UUID: [u8; 16] = DOUBLE_FORMAT;
    type Arg = DefaultArg;
    /// The argument, and the bytes behind the header.
    type Plan = (DefaultArg, usize);

    fn plan(setup: &Setup<'_>) -> Result<(Self::Plan, usize), Refusal> {
        let (arg, size) = common::plan_samples(setup, FLAGS, DoubleHeader::SIZE, 2)?;
        Ok(((arg, size - DoubleHeader::SIZE), size))
    }

    fn begin((arg, room): &Self::Plan, buffer: &mut [u8]) -> Result<(), Refusal> {
        // Samples are multiples of 8 bytes, and so are halves.
        let half = room / 2 / 8 * 8;
        let offs = [DoubleHeader::SIZE, DoubleHeader::SIZE + half].map(wide);
        let header = DoubleHeader {
            version: PFM_DOUBLE_SMPL_VERSION,
            flags: arg.buf_flags,
            buf_size: arg.buf_size,
            half_size: wide(half),
            overflows: 0,
            lost: 0,
            offs,
            count: [0; 2],
            cur_offs: offs,
            filling: [1, 0],
            state: [PFM_DOUBLE_HALF_ACTIVE, PFM_DOUBLE_HALF_FREE],
        };
        common::store(&header, buffer);
        Ok(())
    }

    fn record(
        buffer: &mut [u8],
        arg: &OverflowArg<'_>,
        moment: &Moment,
    ) -> Result<Control, Refusal> {
        let mut halves = Halves::of(buffer, arg.num_pmds)?;
        let notify = halves.record(arg, moment);
        halves.save();
        Ok(match notify {
            Notify::No => has_room(),
            Notify::Half => Control {
                notify_user: true,
                ..has_room()
            },
            Notify::Both => is_full(arg.notify),
        })
    }

    /// Frees the full half that was filled first.
    fn go_on(buffer: &mut [u8]) -> Result<(), Refusal> {
        let mut halves = Halves::of(buffer, 0)?;
        halves.free();
        halves.save();
        Ok(())
    }
}

/// What the tool is to be told.
enum Notify {
    No,
    /// A half is its own now.
    Half,
    /// Both are, and there is no room.
    Both,
}

/// The state of the halves; samples go to a buffer of its own.
struct Halves<'a> {
    header: DoubleHeader,
    bytes: &'a mut [u8],
    /// Most bytes of a sample.
    most: usize,
}

impl<'a> Halves<'a> {
    fn of(buffer: &'a mut [u8], num_pmds: u16) -> Result<Self, Refusal> {
        common::buffer_size(wide(buffer.len()), DoubleHeader::SIZE)?;
        Ok(Halves {
            header: DoubleHeader::get(buffer),
            bytes: buffer,
            most: common::max_size(num_pmds),
        })
    }

    fn save(self) {
        common::store(&self.header, self.bytes);
    }

    /// The half that samples go to; `None` if the tool has both.
    fn active(&self) -> Option<usize> {
        self.in_state(PFM_DOUBLE_HALF_ACTIVE).next()
    }

    fn in_state(&self, state: u32) -> impl Iterator<Item = usize> {
        let states = self.header.state;
        (0..2).filter(move |&half| states[half] == state)
    }

    fn record(&mut self, arg: &OverflowArg<'_>, moment: &Moment) -> Notify {
        let Some(waiting) = self.active() else {
            self.lose(1);
            return Notify::Both;
        };
        let mut notify = Notify::No;
        if self.is_full(waiting) {
            // It found no free half when it was filled. There may be one now.
            if self.hand_over(waiting) {
                notify = Notify::Half;
            } else {
                self.lose(self.header.count[waiting]);
                self.begin(waiting);
            }
        }
        let half = self.active().unwrap_or(waiting);
        self.write(half, arg, moment);
        if !self.is_full(half) {
            return notify;
        }
        self.header.overflows = self.header.overflows.saturating_add(1);
        if self.hand_over(half) {
            Notify::Half
        } else if self.header.flags & PFM_DOUBLE_FMT_MASK_WHEN_FULL != 0 {
            self.header.state[half] = PFM_DOUBLE_HALF_FULL;
            Notify::Both
        } else {
            notify
        }
    }

    /// Gives the tool this half and makes the other one active, if it is free.
    fn hand_over(&mut self, half: usize) -> bool {
        let other = 1 - half;
        let free = self.header.state[other] == PFM_DOUBLE_HALF_FREE;
        if free {
            self.header.state[half] = PFM_DOUBLE_HALF_FULL;
            self.begin(other);
        }
        free
    }

    /// Takes back what the tool has had longest.
    fn free(&mut self) {
        let full = self.in_state(PFM_DOUBLE_HALF_FULL);
        let filling = self.header.filling;
        let Some(half) = full.min_by_key(|&half| filling[half]) else {
            return;
        };
        if self.active().is_none() {
            self.begin(half);
        } else {
            self.header.state[half] = PFM_DOUBLE_HALF_FREE;
        }
    }

    fn begin(&mut self, half: usize) {
        let [first, second] = self.header.filling;
        self.header.filling[half] = first.max(second).saturating_add(1);
        self.header.state[half] = PFM_DOUBLE_HALF_ACTIVE;
        self.header.count[half] = 0;
        self.header.cur_offs[half] = self.header.offs[half];
    }

    fn lose(&mut self, samples: u64) {
        self.header.lost = self.header.lost.saturating_add(samples);
    }

    fn is_full(&self, half: usize) -> bool {
        let (at, end) = self.range(half);
        end - at < self.most
    }

    fn write(&mut self, half: usize, arg: &OverflowArg<'_>, moment: &Moment) {
        let (at, end) = self.range(half);
        match common::write(self.header.flags, arg, moment, &mut self.bytes[at..end]) {
            Some(size) => {
                self.header.count[half] = self.header.count[half].saturating_add(1);
                self.header.cur_offs[half] = wide(at + size);
            }
            None => self.lose(1),
        }
    }

    /// Where the next sample goes, and where the half ends.
    fn range(&self, half: usize) -> (usize, usize) {
        let narrow = |offset| usize::try_from(offset).unwrap_or(usize::MAX);
        let end = self.header.offs[half].saturating_add(self.header.half_size);
        let end = narrow(end).min(self.bytes.len());
        (narrow(self.header.cur_offs[half]).min(end), end)
    }
}
