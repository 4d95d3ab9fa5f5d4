//! One sample to bytes, and back.

use thiserror::Error;

use crate::consts::{
    UMPIRE_COMPACT_BODY, UMPIRE_COMPACT_CHAIN, UMPIRE_COMPACT_PLACE, UMPIRE_COMPACT_RESET,
    UMPIRE_COMPACT_SOURCE, UMPIRE_COMPACT_STACK, UMPIRE_COMPACT_TASK,
};
use crate::parse::{Sample, indices};
use crate::place::{
    CallChain, ChainEnd, GuestPlace, MOST_FRAMES, MOST_STACK, MOST_STACK_MAPPINGS, ProgramFrame,
    ProgramStack,
};
use crate::{CompactLast, DefaultEntry};

/// Bytes of a number at most.
const MAX_NUMBER: usize = 10;
/// Numbers of a sample at most: 13 and a value for each PMD.
const MAX_NUMBERS: usize = 13 + crate::consts::PFM_MAX_PMDS as usize;
/// Bytes of callers at most.
pub const MAX_CHAIN: usize = (4 + 3 * MOST_FRAMES) * MAX_NUMBER;
/// Bytes of what comes with a stack at most, without the stack itself.
pub const MAX_STACK_NUMBERS: usize = (5 + MOST_STACK_MAPPINGS) * MAX_NUMBER;
/// Bytes of a sample without callers at most.
pub const MAX_SAMPLE: usize = 1 + MAX_NUMBERS * MAX_NUMBER;

const FLAGS: u8 = UMPIRE_COMPACT_SOURCE
    | UMPIRE_COMPACT_PLACE
    | UMPIRE_COMPACT_RESET
    | UMPIRE_COMPACT_BODY
    | UMPIRE_COMPACT_TASK
    | UMPIRE_COMPACT_CHAIN
    | UMPIRE_COMPACT_STACK;

/// Bytes that are no sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RecordError {
    /// They end too early.
    #[error("a sample ends in the middle")]
    Cut,
    /// A flag that this version does not know.
    #[error("a sample has unknown flags {0:#x}")]
    Flags(u8),
    /// A number that its field cannot hold.
    #[error("a sample has a number that is too large")]
    Number,
}

/// What was recorded last of each PMD in a block.
pub trait Values {
    /// The last value of a PMD; 0 at first.
    fn last(&self, pmd: u16) -> u64;
    /// It is this now.
    fn record(&mut self, pmd: u16, value: u64);
}

impl Values for [u64] {
    fn last(&self, pmd: u16) -> u64 {
        self.get(usize::from(pmd)).copied().unwrap_or(0)
    }
    fn record(&mut self, pmd: u16, value: u64) {
        if let Some(place) = self.get_mut(usize::from(pmd)) {
            *place = value;
        }
    }
}

/// As bytes: 8 for each PMD, little-endian.
impl Values for [u8] {
    fn last(&self, pmd: u16) -> u64 {
        let bytes = self.chunks_exact(8).nth(pmd.into());
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    }
    fn record(&mut self, pmd: u16, value: u64) {
        if let Some(place) = self.chunks_exact_mut(8).nth(pmd.into()) {
            place.copy_from_slice(&value.to_le_bytes());
        }
    }
}

/// A sample to be written.
#[derive(Clone, Copy, Debug)]
pub struct NextSample<'a> {
    /// What the sample after it is told by.
    pub head: &'a CompactLast,
    /// Values of the PMDs in `head.smpl_pmds`, by ascending index.
    pub values: &'a [u64],
    /// The callers.
    pub chain: &'a CallChain,
    /// The program's stack.
    pub stack: &'a ProgramStack,
    /// Bytes of the stack that are written at most; [`MOST_STACK`] is the most anyway.
    pub most_stack: usize,
}

/// Writes a sample to the beginning of `to`, and how many bytes it took; none if
/// `to` has no room for it, and what `last` and `of_pmds` are then means nothing.
/// `last` is the sample before, and becomes this one.
pub fn encode<V: Values + ?Sized>(
    sample: &NextSample<'_>,
    last: &mut CompactLast,
    of_pmds: &mut V,
    to: &mut [u8],
) -> Option<usize> {
    let next = sample.head;
    let mut out = Out { to, len: 1 };
    let mut flags = 0;
    out.difference(next.tstamp, last.tstamp);
    out.difference(next.ip, last.ip);
    let source = |of: &CompactLast| (of.set, of.ovfl_pmd, of.eventid);
    if source(next) != source(last) {
        flags |= UMPIRE_COMPACT_SOURCE;
        out.number(next.set.into());
        out.number(next.ovfl_pmd.into());
        out.number(next.eventid);
    }
    let place = |of: &CompactLast| (of.pid, of.tid, of.cpu);
    if place(next) != place(last) {
        flags |= UMPIRE_COMPACT_PLACE;
        out.number(next.pid.cast_unsigned().into());
        out.number(next.tid.cast_unsigned().into());
        out.number(next.cpu.into());
    }
    if next.last_reset_val != last.last_reset_val {
        flags |= UMPIRE_COMPACT_RESET;
        out.difference(next.last_reset_val, last.last_reset_val);
    }
    if next.smpl_pmds != last.smpl_pmds {
        flags |= UMPIRE_COMPACT_BODY;
        next.smpl_pmds.iter().for_each(|&word| out.number(word));
    }
    let task = |of: &CompactLast| (of.task, of.mapping);
    if task(next) != task(last) {
        flags |= UMPIRE_COMPACT_TASK;
        out.number(next.task);
        out.number(next.mapping);
    }
    if !sample.chain.is_empty() {
        flags |= UMPIRE_COMPACT_CHAIN;
        out.chain(next, sample.chain);
    }
    if !sample.stack.is_empty() && sample.most_stack > 0 {
        flags |= UMPIRE_COMPACT_STACK;
        out.stack(sample.stack, sample.most_stack.min(MOST_STACK));
    }
    for (pmd, &value) in indices(next.smpl_pmds).zip(sample.values) {
        out.difference(value, of_pmds.last(pmd));
        of_pmds.record(pmd, value);
    }
    *last = *next;
    let len = out.len;
    *to.first_mut()? = flags;
    (len <= to.len()).then_some(len)
}

/// Takes a sample from the beginning of `bytes`. `last` is the sample before,
/// and becomes this one.
///
/// # Errors
/// See [`RecordError`]; what `last` and `of_pmds` are then means nothing.
pub fn decode<V: Values + ?Sized>(
    bytes: &mut &[u8],
    last: &mut CompactLast,
    of_pmds: &mut V,
) -> Result<Sample, RecordError> {
    let (&flags, rest) = bytes.split_first().ok_or(RecordError::Cut)?;
    if flags & !FLAGS != 0 {
        return Err(RecordError::Flags(flags));
    }
    *bytes = rest;
    last.tstamp = difference(bytes, last.tstamp)?;
    last.ip = difference(bytes, last.ip)?;
    if flags & UMPIRE_COMPACT_SOURCE != 0 {
        last.set = narrow(bytes)?;
        last.ovfl_pmd = narrow(bytes)?;
        last.eventid = number(bytes)?;
    }
    if flags & UMPIRE_COMPACT_PLACE != 0 {
        last.pid = narrow::<u32>(bytes)?.cast_signed();
        last.tid = narrow::<u32>(bytes)?.cast_signed();
        last.cpu = narrow(bytes)?;
    }
    if flags & UMPIRE_COMPACT_RESET != 0 {
        last.last_reset_val = difference(bytes, last.last_reset_val)?;
    }
    if flags & UMPIRE_COMPACT_BODY != 0 {
        for word in &mut last.smpl_pmds {
            *word = number(bytes)?;
        }
    }
    if flags & UMPIRE_COMPACT_TASK != 0 {
        last.task = number(bytes)?;
        last.mapping = number(bytes)?;
    }
    let mut guest = GuestPlace {
        task: last.task,
        mapping: last.mapping,
        ..GuestPlace::default()
    };
    if flags & UMPIRE_COMPACT_CHAIN != 0 {
        guest.chain = chain(bytes, last)?;
    }
    if flags & UMPIRE_COMPACT_STACK != 0 {
        guest.stack = stack(bytes)?;
    }
    let mut values = Vec::new();
    for pmd in indices(last.smpl_pmds) {
        let value = difference(bytes, of_pmds.last(pmd))?;
        of_pmds.record(pmd, value);
        values.push((pmd, value));
    }
    Ok(Sample {
        ip: Some(last.ip),
        entry: Some(entry(last)),
        eventid: Some(last.eventid),
        values,
        guest,
    })
}

fn chain(bytes: &mut &[u8], sample: &CompactLast) -> Result<CallChain, RecordError> {
    let mut part = || {
        let frames: usize = narrow(bytes)?;
        let end: u8 = narrow(bytes)?;
        let fits = frames <= MOST_FRAMES && (end == 0 || ChainEnd::of(end).is_some());
        fits.then_some((frames, ChainEnd::of(end)))
            .ok_or(RecordError::Number)
    };
    let ((kernel, kernel_end), (program, program_end)) = (part()?, part()?);
    let mut chain = CallChain {
        kernel: Vec::with_capacity(kernel),
        kernel_end,
        program: Vec::with_capacity(program),
        program_end,
    };
    let (mut address, mut mapping) = (sample.ip, sample.mapping);
    for _ in 0..kernel {
        address = difference(bytes, address)?;
        chain.kernel.push(address);
    }
    for _ in 0..program {
        address = difference(bytes, address)?;
        mapping = difference(bytes, mapping)?;
        chain.program.push(ProgramFrame { address, mapping });
    }
    Ok(chain)
}

fn stack(bytes: &mut &[u8]) -> Result<ProgramStack, RecordError> {
    let sp = number(bytes)?;
    let bp = match number(bytes)? {
        0 => None,
        1 => Some(number(bytes)?),
        _ => return Err(RecordError::Number),
    };
    let count: usize = narrow(bytes)?;
    if count > MOST_STACK_MAPPINGS {
        return Err(RecordError::Number);
    }
    let mut mappings = Vec::with_capacity(count);
    let mut mapping = 0;
    for _ in 0..count {
        mapping = difference(bytes, mapping)?;
        mappings.push(mapping);
    }
    let len: usize = narrow(bytes)?;
    if !(1..=MOST_STACK).contains(&len) {
        return Err(RecordError::Number);
    }
    let (found, rest) = bytes.split_at_checked(len).ok_or(RecordError::Cut)?;
    *bytes = rest;
    Ok(ProgramStack {
        sp,
        bp,
        mappings,
        bytes: found.to_vec(),
    })
}

fn entry(of: &CompactLast) -> DefaultEntry {
    DefaultEntry {
        pid: of.pid,
        tid: of.tid,
        ovfl_pmd: of.ovfl_pmd,
        set: of.set,
        cpu: of.cpu,
        last_reset_val: of.last_reset_val,
        tstamp: of.tstamp,
        ip: of.ip,
    }
}

/// Where the bytes of a sample go. What has no room is counted and not written.
struct Out<'a> {
    to: &'a mut [u8],
    len: usize,
}

impl Out<'_> {
    fn number(&mut self, mut value: u64) {
        loop {
            let low = value.to_le_bytes()[0] & 0x7f;
            value >>= 7;
            if let Some(place) = self.to.get_mut(self.len) {
                *place = if value == 0 { low } else { low | 0x80 };
            }
            self.len += 1;
            if value == 0 {
                return;
            }
        }
    }

    fn chain(&mut self, sample: &CompactLast, chain: &CallChain) {
        let kernel = chain.kernel.iter().take(MOST_FRAMES);
        let program = chain.program.iter().take(MOST_FRAMES);
        let ends = [chain.kernel_end, chain.program_end];
        for (frames, end) in [kernel.len(), program.len()].into_iter().zip(ends) {
            self.number(frames as u64);
            self.number(end.map_or(0, |end| end as u64));
        }
        let (mut address, mut mapping) = (sample.ip, sample.mapping);
        for &frame in kernel {
            self.difference(frame, address);
            address = frame;
        }
        for frame in program {
            self.difference(frame.address, address);
            self.difference(frame.mapping, mapping);
            (address, mapping) = (frame.address, frame.mapping);
        }
    }

    fn stack(&mut self, stack: &ProgramStack, most: usize) {
        self.number(stack.sp);
        self.number(stack.bp.is_some().into());
        stack.bp.into_iter().for_each(|bp| self.number(bp));
        let mappings = stack.mappings.iter().take(MOST_STACK_MAPPINGS);
        self.number(mappings.len() as u64);
        let mut last = 0;
        for &mapping in mappings {
            self.difference(mapping, last);
            last = mapping;
        }
        let bytes = &stack.bytes[..stack.bytes.len().min(most)];
        self.number(bytes.len() as u64);
        let end = self.len + bytes.len();
        if let Some(place) = self.to.get_mut(self.len..end) {
            place.copy_from_slice(bytes);
        }
        self.len = end;
    }

    fn difference(&mut self, value: u64, last: u64) {
        let difference = value.wrapping_sub(last).cast_signed();
        self.number((difference << 1 ^ difference >> 63).cast_unsigned());
    }
}

fn number(bytes: &mut &[u8]) -> Result<u64, RecordError> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().ok_or(RecordError::Cut)?;
        *bytes = rest;
        let low = u64::from(byte & 0x7f);
        if low << shift >> shift != low {
            return Err(RecordError::Number);
        }
        value |= low << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(RecordError::Number)
}

fn narrow<T: TryFrom<u64>>(bytes: &mut &[u8]) -> Result<T, RecordError> {
    T::try_from(number(bytes)?).map_err(|_| RecordError::Number)
}

fn difference(bytes: &mut &[u8], last: u64) -> Result<u64, RecordError> {
    let folded = number(bytes)?;
    let difference = folded >> 1 ^ (folded & 1).wrapping_neg();
    Ok(last.wrapping_add(difference))
}
