//! The compact format of Umpire, for high rates: a ring of blocks whose samples
//! are told by their differences ([`perfmon_abi::compact`] has the layout and
//! the reader).
//!
//! It never masks and needs no PFM_RESTART. A block that is full makes a
//! notification for those who ask for one; whoever polls does not.

use std::sync::atomic::{Ordering, fence};

use perfmon_abi::compact::{
    GuestPlace, MAX_CHAIN, MAX_SAMPLE, MAX_STACK_NUMBERS, NextSample, encode,
};
use perfmon_abi::consts::{
    COMPACT_FORMAT, PFM_MAX_PMDS, UMPIRE_COMPACT_FL_CHAIN, UMPIRE_COMPACT_FL_STACK_MASK,
    UMPIRE_COMPACT_FL_STACK_SHIFT, UMPIRE_COMPACT_FL_TASK, UMPIRE_COMPACT_MAX_BLOCK,
    UMPIRE_COMPACT_VERSION,
};
use perfmon_abi::wire::Refusal;
use perfmon_abi::{CompactArg, CompactBlock, CompactHeader, CompactLast, Record};

use super::common::{self, Builtin, has_room, wide};
use super::{Control, OverflowArg, Setup, Wish};
use crate::moment::Moment;

/// What the writer remembers of the block: the last sample, and the last value
/// of each PMD. Both lie between header and blocks.
const LAST: usize = CompactHeader::SIZE;
const OF_PMDS: usize = LAST + CompactLast::SIZE;
const BLOCKS: usize = OF_PMDS + 8 * PFM_MAX_PMDS as usize;

/// Blocks have room for the largest sample at least, and are multiples of this.
const ALIGN: usize = 8;
const MIN_BLOCK: usize = (CompactBlock::SIZE + MAX_SAMPLE).next_multiple_of(ALIGN);
/// With one block there would be nothing to read while it is cleared.
const MIN_BLOCKS: usize = 2;

/// What the format chooses: a ring of this many blocks, as far as their size
/// allows it.
const USUAL_BLOCKS: usize = 16;
const USUAL_BLOCK: std::ops::RangeInclusive<usize> = 4 << 10..=64 << 10;

/// The compact format. Its buffer begins with `umpire_compact_hdr_t`.
#[derive(Clone, Copy, Debug, Default)]
pub struct CompactFormat;

/// How a buffer is divided.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    flags: u32,
    size: usize,
    block: u32,
    blocks: u32,
}

impl Plan {
    fn of(setup: &Setup<'_>) -> Result<Self, Refusal> {
        let arg = CompactArg::from_bytes(setup.arg).map_err(|error| {
            common::invalid(format!("argument of the sampling format: {error}"))
        })?;
        let least = least_block(arg.flags)?;
        let size = common::buffer_size(arg.buf_size, BLOCKS + MIN_BLOCKS * least)?;
        let room = size - BLOCKS;
        let given = usize::try_from(arg.block_size).unwrap_or(usize::MAX);
        let block = if given == 0 {
            let share = (room / USUAL_BLOCKS).clamp(*USUAL_BLOCK.start(), *USUAL_BLOCK.end());
            let share = share.max(least);
            share.min(room / MIN_BLOCKS) / ALIGN * ALIGN
        } else {
            given
        };
        let most = room / MIN_BLOCKS;
        let fits = block >= least && block <= most && block.is_multiple_of(ALIGN);
        match (u32::try_from(block), u32::try_from(room / block.max(1))) {
            (Ok(block), Ok(blocks)) if fits && block <= UMPIRE_COMPACT_MAX_BLOCK => Ok(Plan {
                flags: arg.flags,
                size,
                block,
                blocks,
            }),
            _ => Err(common::invalid(format!(
                "block_size is {given}: give a multiple of {ALIGN} from {least} to {} (half the buffer at most), or 0",
                most.min(1 << 20) / ALIGN * ALIGN
            ))),
        }
    }
}

/// Bytes of the smallest block that has room for a sample with all that `flags` ask for.
fn least_block(flags: u32) -> Result<usize, Refusal> {
    let known = UMPIRE_COMPACT_FL_TASK | UMPIRE_COMPACT_FL_CHAIN | UMPIRE_COMPACT_FL_STACK_MASK;
    let unknown = flags & !known;
    if unknown != 0 {
        let reason = format!("buf_flags has bits that are not defined: {unknown:#x}");
        return Err(common::invalid(reason));
    }
    let stack = stack_of(flags);
    let chain = flags & UMPIRE_COMPACT_FL_CHAIN != 0;
    if stack > 0 && !(chain && stack.is_multiple_of(ALIGN)) {
        let reason = format!(
            "buf_flags asks for {stack} bytes of the stack: that is for samples with callers \
             (UMPIRE_COMPACT_FL_CHAIN), and a multiple of {ALIGN}"
        );
        return Err(common::invalid(reason));
    }
    let of_chain = if chain { MAX_CHAIN } else { 0 };
    let of_stack = if stack > 0 {
        MAX_STACK_NUMBERS + stack
    } else {
        0
    };
    let least = CompactBlock::SIZE + MAX_SAMPLE + of_chain + of_stack;
    Ok(least.next_multiple_of(ALIGN))
}

impl Builtin for CompactFormat {
    const NAME: &'static str = "compact";
    const UUID: [u8; 16] = COMPACT_FORMAT;
    type Arg = CompactArg;
    type Plan = Plan;

    fn plan(setup: &Setup<'_>) -> Result<(Plan, usize), Refusal> {
        let plan = Plan::of(setup)?;
        Ok((plan, plan.size))
    }

    fn begin(plan: &Plan, buffer: &mut [u8]) -> Result<(), Refusal> {
        let header = CompactHeader {
            version: UMPIRE_COMPACT_VERSION,
            flags: plan.flags,
            buf_size: wide(plan.size),
            blocks_offs: wide(BLOCKS),
            block_size: plan.block,
            blocks: plan.blocks,
            sequence: 0,
            samples: 0,
        };
        common::store(&header, buffer);
        let mut ring = Ring::of(buffer)?;
        ring.open();
        Ok(())
    }

    fn wished(plan: &Plan) -> Wish {
        Wish {
            task: plan.flags & UMPIRE_COMPACT_FL_TASK != 0,
            chain: plan.flags & UMPIRE_COMPACT_FL_CHAIN != 0,
            stack: stack_of(plan.flags),
        }
    }

    fn record(
        buffer: &mut [u8],
        arg: &OverflowArg<'_>,
        moment: &Moment,
    ) -> Result<Control, Refusal> {
        let mut ring = Ring::of(buffer)?;
        let wants = |flag| ring.header.flags & flag != 0;
        let known = arg.guest.filter(|_| wants(UMPIRE_COMPACT_FL_TASK));
        let chain = arg.guest.filter(|_| wants(UMPIRE_COMPACT_FL_CHAIN));
        let none = GuestPlace::default();
        let GuestPlace { chain, stack, .. } = chain.unwrap_or(&none);
        let head = CompactLast {
            task: known.map_or(0, |guest| guest.task),
            mapping: known.map_or(0, |guest| guest.mapping),
            tstamp: moment.tsc,
            ip: moment.ip,
            last_reset_val: arg.last_reset,
            eventid: arg.eventid,
            smpl_pmds: arg.smpl_pmds.words(),
            pid: moment.vm,
            tid: moment.vcpu,
            cpu: moment.core,
            set: arg.active_set,
            ovfl_pmd: arg.ovfl_pmd,
        };
        let sample = NextSample {
            head: &head,
            values: arg.values,
            chain,
            stack,
            // Somebody else may have asked for more of it.
            most_stack: stack_of(ring.header.flags),
        };
        let next_block = !ring.append(&sample);
        if next_block {
            ring.open();
            ring.append(&sample);
        }
        Ok(Control {
            notify_user: next_block,
            ..has_room()
        })
    }

    /// Readers follow without it. It goes on after a mask: overflows came too
    /// often, or the queue was full.
    fn go_on(_: &mut [u8]) -> Result<(), Refusal> {
        Ok(())
    }
}

/// Bytes of the stack that `UMPIRE_COMPACT_FL_*` ask for.
fn stack_of(flags: u32) -> usize {
    let bytes = (flags & UMPIRE_COMPACT_FL_STACK_MASK) >> UMPIRE_COMPACT_FL_STACK_SHIFT;
    usize::try_from(bytes).unwrap_or(0)
}

/// The buffer, with its header in front of the rest.
struct Ring<'a> {
    header: CompactHeader,
    bytes: &'a mut [u8],
}

// Readers have the memory mapped. What they have to see in order is separated by
// fences; on x86-64 these cost nothing, for its stores are in order, and they
// keep the compiler from changing that.
impl<'a> Ring<'a> {
    fn of(buffer: &'a mut [u8]) -> Result<Self, Refusal> {
        common::buffer_size(wide(buffer.len()), BLOCKS + MIN_BLOCKS * MIN_BLOCK)?;
        let header = CompactHeader::get(buffer);
        common::buffer_size(header.block_size.into(), MIN_BLOCK)?;
        Ok(Ring {
            header,
            bytes: buffer,
        })
    }

    /// Begins the next block, in place of the oldest one.
    fn open(&mut self) {
        self.header.sequence = self.header.sequence.saturating_add(1);
        self.bytes[LAST..BLOCKS].fill(0);
        let place = self.block();
        let Some(bytes) = self.bytes.get_mut(place) else {
            return;
        };
        // Its number goes first and comes back last, so that what a reader has
        // between two equal numbers is of one block.
        let mut block = CompactBlock::get(bytes);
        block.sequence = 0;
        common::store(&block, bytes);
        fence(Ordering::Release);
        block.first = self.header.samples;
        block.used = u32::try_from(CompactBlock::SIZE).unwrap_or(u32::MAX);
        block.count = 0;
        common::store(&block, bytes);
        fence(Ordering::Release);
        block.sequence = self.header.sequence;
        common::store(&block, bytes);
        fence(Ordering::Release);
        common::store(&self.header, self.bytes);
    }

    /// Writes a sample; `false` if the block has no room for it.
    fn append(&mut self, sample: &NextSample<'_>) -> bool {
        let place = self.block();
        if place.end > self.bytes.len() {
            return false;
        }
        let (notes, blocks) = self.bytes.split_at_mut(BLOCKS);
        let (_, notes) = notes.split_at_mut(LAST);
        let (last_bytes, of_pmds) = notes.split_at_mut(CompactLast::SIZE);
        let bytes = &mut blocks[place.start - BLOCKS..place.end - BLOCKS];
        let mut block = CompactBlock::get(bytes);
        let used = usize::try_from(block.used).unwrap_or(usize::MAX);
        let mut last = CompactLast::get(last_bytes);
        let room = bytes.get_mut(used..).unwrap_or_default();
        let Some(len) = encode(sample, &mut last, of_pmds, room) else {
            return false;
        };
        common::store(&last, last_bytes);
        block.used = u32::try_from(used + len).unwrap_or(u32::MAX);
        block.count = block.count.saturating_add(1);
        self.header.samples = self.header.samples.saturating_add(1);
        fence(Ordering::Release);
        common::store(&block, bytes);
        common::store(&self.header, self.bytes);
        true
    }

    /// Where the block of the header's number lies.
    fn block(&self) -> std::ops::Range<usize> {
        let size = usize::try_from(self.header.block_size).unwrap_or(usize::MAX);
        let place = self.header.sequence.saturating_sub(1) % u64::from(self.header.blocks.max(1));
        let place = usize::try_from(place).unwrap_or(usize::MAX);
        let start = BLOCKS.saturating_add(place.saturating_mul(size));
        start..start.saturating_add(size)
    }
}
