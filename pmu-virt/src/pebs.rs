//! PEBS records and the debug store area that they go to: bytes, bounds and addresses.
//!
//! Sources: SDM vol. 3B, "Processor Event Based Sampling (PEBS)", "Adaptive PEBS", and
//! "BTS and DS Save Area" for the layout of 64 bits. When a counter's record is due is
//! decided in `vcpu/pebs.rs`.

use instruction_facts::OperandKind;
use pmu_model::{CounterId, PebsFormat};
use thiserror::Error;

/// Guest memory at linear addresses, as the processor reaches it by itself: through the
/// page tables in force, at CPL 0, whatever ring runs, and without a fault for the guest.
pub trait LinearMemory {
    /// Fills `bytes` from `address`; false if some of it cannot be read.
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool;
    /// Writes `bytes` at `address`. False if some of it cannot be written; nothing was then.
    fn write(&self, address: u64, bytes: &[u8]) -> bool;
    /// The guest-physical address of what is mapped at `address`, whoever may get at it, and
    /// the base-2 logarithm of the page's size (32 without paging).
    fn locate(&self, address: u64) -> Option<(u64, u32)>;
}

/// A vCPU behind the instruction that a record is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PebsMoment {
    /// RIP of the instruction itself.
    pub(crate) eventing_ip: u64,
    /// RFLAGS.
    pub(crate) flags: u64,
    /// RIP.
    pub(crate) ip: u64,
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub(crate) registers: [u64; 16],
    /// The guest's TSC.
    pub(crate) tsc: u64,
    /// Linear address of the operand in memory that [`PebsNeeds::operand`] names; 0 if the
    /// instruction has none, or nobody knows it.
    pub(crate) data_address: u64,
    /// XMM0 to XMM15, where [`PebsNeeds::xmm`] says so.
    pub(crate) xmm: [[u8; 16]; 16],
}

/// What a record that is due is made of, beyond the general registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PebsNeeds {
    /// XMM0 to XMM15.
    pub(crate) xmm: bool,
    /// Which of the instruction's operands in memory the record tells the address of:
    /// what was loaded where loads are sampled, what was stored where stores are.
    pub(crate) operand: OperandKind,
}

/// Why there is no record of an event. The counter is not reloaded then: it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum PebsSkip {
    /// The management area cannot be read or written.
    #[error(
        "the debug store area at {0:#x} is not mapped for reading and writing; \
         the guest has to map it before it enables PEBS"
    )]
    Area(u64),
    /// The next record would go beyond the absolute maximum.
    #[error("the PEBS buffer is full; the guest has to empty it")]
    Full,
    /// The index lies outside of the buffer.
    #[error("the PEBS index {index:#x} is not in the buffer, which begins at {base:#x}")]
    Index {
        /// As the area has it.
        index: u64,
        /// As the area has it.
        base: u64,
    },
    /// The place of the record cannot be written.
    #[error("the PEBS buffer is not mapped for writing at {0:#x}")]
    Buffer(u64),
}

/// Groups of a format 4 record beside the basic one, as in `MSR_PEBS_DATA_CFG`.
const MEMORY: u64 = 1 << 0;
const GENERAL: u64 = 1 << 1;
pub(crate) const XMM: u64 = 1 << 2;

/// Bytes of the longest record: format 4 with every group.
const LONGEST: usize = 32 + 32 + 18 * 8 + 16 * 16;

/// A record in bytes.
#[derive(Debug)]
pub(crate) struct PebsRecord {
    bytes: [u8; LONGEST],
    len: usize,
}

impl PebsRecord {
    /// The record of `moment` for `counters`, as bits of the global control register; of
    /// format 4 with `groups`.
    ///
    /// What nobody measured is 0: the latency of a memory access, and its source, for
    /// which 0 stands for unknown; nothing of a transaction.
    pub(crate) fn of(format: PebsFormat, groups: u64, counters: u64, moment: &PebsMoment) -> Self {
        let mut record = PebsRecord {
            bytes: [0; LONGEST],
            len: 0,
        };
        match format {
            PebsFormat::Three => record.fill_3(counters, moment),
            PebsFormat::Four => record.fill_4(groups, counters, moment),
        }
        record
    }

    fn fill_3(&mut self, counters: u64, moment: &PebsMoment) {
        let [ax, cx, dx, bx, sp, bp, si, di, rest @ ..] = moment.registers;
        self.words(&[moment.flags, moment.ip, ax, bx, cx, dx, si, di, bp, sp]);
        self.words(&rest);
        // Data source and latency; behind the address of the instruction, what a
        // transaction did.
        let (address, ip) = (moment.data_address, moment.eventing_ip);
        self.words(&[counters, address, 0, 0, ip, 0, moment.tsc]);
    }

    fn fill_4(&mut self, groups: u64, counters: u64, moment: &PebsMoment) {
        self.words(&[0, moment.eventing_ip, counters, moment.tsc]);
        if groups & MEMORY != 0 {
            // Data source, latency, and what a transaction did.
            self.words(&[moment.data_address, 0, 0, 0]);
        }
        if groups & GENERAL != 0 {
            self.words(&[moment.flags, moment.ip]);
            self.words(&moment.registers);
        }
        if groups & XMM != 0 {
            moment.xmm.iter().for_each(|register| self.put(register));
        }
        // The first word: which groups follow, and how long the record is.
        let size = (self.len as u64) << 48;
        self.bytes[..8].copy_from_slice(&(groups | size).to_le_bytes());
    }

    fn words(&mut self, words: &[u64]) {
        for word in words {
            self.put(&word.to_le_bytes());
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        self.bytes[self.len..end].copy_from_slice(bytes);
        self.len = end;
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Where the PEBS half of the management area begins.
const MANAGEMENT: u64 = 0x20;
/// Where the index is in it.
const INDEX: u64 = 0x28;
/// Base, index, absolute maximum and threshold.
const POINTERS: usize = 4;
/// Reset values of programmable counters stand before those of fixed ones.
const PROGRAMMABLE_RESETS: u8 = 8;
/// Words of the area from `MANAGEMENT` on, as far as any model uses them.
const WORDS: usize = POINTERS + PROGRAMMABLE_RESETS as usize + pmu_model::MAX_FIXED as usize;

/// The PEBS half of the management area, as far as the reset value of `last`.
#[derive(Debug)]
pub(crate) struct PebsArea {
    at: u64,
    words: [u64; WORDS],
}

fn reset_word(counter: CounterId) -> usize {
    match counter {
        CounterId::Programmable(n) => POINTERS + usize::from(n),
        CounterId::Fixed(n) => POINTERS + usize::from(PROGRAMMABLE_RESETS + n),
        // Samplers have no PEBS.
        CounterId::Ibs(_) => WORDS,
    }
}

impl PebsArea {
    /// The area at `at`. Nothing behind what `counters` use is read.
    pub(crate) fn read(
        memory: &dyn LinearMemory,
        at: u64,
        counters: impl Iterator<Item = CounterId>,
    ) -> Result<Self, PebsSkip> {
        let last = counters.map(reset_word).max().unwrap_or(POINTERS);
        let used = 8 * (last + 1).min(WORDS);
        let mut bytes = [0; 8 * WORDS];
        let begin = at.checked_add(MANAGEMENT);
        let begin = begin.filter(|begin| memory.read(*begin, &mut bytes[..used]));
        if begin.is_none() {
            return Err(PebsSkip::Area(at));
        }
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        Ok(PebsArea { at, words })
    }

    /// What the counter is set to behind a record.
    pub(crate) fn reset_value(&self, counter: CounterId) -> u64 {
        let word = self.words.get(reset_word(counter));
        word.copied().unwrap_or_default()
    }

    /// Appends a record; true if the index has come to the threshold.
    pub(crate) fn append(
        &self,
        memory: &dyn LinearMemory,
        record: &[u8],
    ) -> Result<bool, PebsSkip> {
        let [base, index, maximum, threshold, ..] = self.words;
        if index < base {
            return Err(PebsSkip::Index { index, base });
        }
        let end = index.checked_add(record.len() as u64);
        let Some(end) = end.filter(|end| *end <= maximum) else {
            return Err(PebsSkip::Full);
        };
        // Whether the index can be moved is known before the record is written.
        let moved = |index: u64| memory.write(self.at + INDEX, &index.to_le_bytes());
        if !moved(index) {
            return Err(PebsSkip::Area(self.at));
        }
        if !memory.write(index, record) {
            return Err(PebsSkip::Buffer(index));
        }
        if !moved(end) {
            return Err(PebsSkip::Area(self.at));
        }
        Ok(end >= threshold)
    }
}
