//! What a guest can learn about its counters beyond their values: how long
//! each was enabled, how long it really counted, and where its count comes
//! from. A page of read-only synthetic MSRs, announced by CPUID.
//!
//! The constants and tables here are the ABI; `docs/reference/guest-abi.md` is generated
//! from them in part, and explains how a guest reads without tearing.

use arbiter::CounterId;

use crate::ids::MsrIndex;
use crate::progress::LossReason;
use crate::reading::{Provenance, Reading, UnavailableReason};

/// First CPUID leaf of the block: EAX is its highest leaf, EBX, ECX and EDX
/// are [`SIGNATURE`]. KVM's own block stays at 0x40000000.
pub const CPUID_BASE: u32 = 0x4000_0100;
/// The second leaf: what there is, and where.
pub const CPUID_FEATURES: u32 = CPUID_BASE + 1;
/// What EBX, ECX and EDX of [`CPUID_BASE`] spell.
pub const SIGNATURE: &[u8; 12] = b"UmpireUmpire";
/// Version of this ABI, in EAX of [`CPUID_FEATURES`]. It rises with a change
/// that would break a driver; what is merely added gets a feature bit.
pub const ABI_VERSION: u32 = 1;
/// ECX bit 0 of [`CPUID_FEATURES`]: the accounting page exists. Bits 8 to 15
/// are kept for counter reservations.
pub const FEATURE_ACCOUNTING: u32 = 1 << 0;

/// First MSR of the page, in EBX of [`CPUID_FEATURES`].
pub const MSR_BASE: u32 = 0x554d_5000;
/// MSRs that belong to the page; those without a meaning raise #GP.
pub const MSR_COUNT: u32 = 0x1000;

/// A register of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageRegister {
    /// Reading takes a snapshot of every counter and yields its number.
    Snapshot,
    /// Number of the last snapshot.
    Sequence,
    /// A word of the snapshot.
    Word(CounterId, Word),
}

/// What the snapshot holds of each counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// The status word, [`CounterAccount::status`].
    Status,
    /// TSC ticks of guest time in which the guest had it enabled.
    Enabled,
    /// Those of them in which it was counted.
    Running,
    /// The counter's value.
    Count,
}

/// Registers of the page at even distances.
#[derive(Clone, Copy, Debug)]
pub struct PageRow {
    /// Distance of the first from [`MSR_BASE`].
    pub offset: u32,
    /// Distance from one to the next.
    pub stride: u32,
    /// How many there are.
    pub count: u32,
    /// Name in the documentation.
    pub name: &'static str,
    /// One line of meaning.
    pub meaning: &'static str,
    word: Option<Word>,
}

/// Distance of the first counter's words from [`MSR_BASE`].
const WORDS: u32 = 0x100;

const fn words(word: Word, name: &'static str, meaning: &'static str) -> PageRow {
    PageRow {
        offset: WORDS + word as u32,
        stride: 4,
        count: 64,
        name,
        meaning,
        word: Some(word),
    }
}

/// The page.
pub const PAGE: &[PageRow] = &[
    PageRow {
        offset: 0,
        stride: 1,
        count: 1,
        name: "SNAPSHOT",
        meaning: "reading takes a snapshot of all counters and yields its number, 1 for the first",
        word: None,
    },
    PageRow {
        offset: 1,
        stride: 1,
        count: 1,
        name: "SEQUENCE",
        meaning: "number of the last snapshot, 0 before the first; takes none",
        word: None,
    },
    words(
        Word::Status,
        "STATUS",
        "state, provenance and reasons of counter position n",
    ),
    words(
        Word::Enabled,
        "TIME_ENABLED",
        "TSC ticks of guest time in which the guest had the counter enabled",
    ),
    words(
        Word::Running,
        "TIME_RUNNING",
        "those of them in which it was counted",
    ),
    words(
        Word::Count,
        "COUNT",
        "value of the counter, as its own register would have read",
    ),
];

/// The register at an MSR index, for any model; `None` outside of the page and
/// where the page has none.
pub fn decode(msr: MsrIndex) -> Option<PageRegister> {
    let offset = msr.0.checked_sub(MSR_BASE)?;
    PAGE.iter().find_map(|row| {
        let distance = offset.checked_sub(row.offset)?;
        let index = distance / row.stride;
        if !distance.is_multiple_of(row.stride) || index >= row.count {
            return None;
        }
        Some(match row.word {
            Some(word) => PageRegister::Word(counter_at(u8::try_from(index).ok()?), word),
            None if row.offset == 0 => PageRegister::Snapshot,
            None => PageRegister::Sequence,
        })
    })
}

/// Whether an MSR index lies in the page.
#[inline]
pub fn contains(msr: MsrIndex) -> bool {
    msr.0.wrapping_sub(MSR_BASE) < MSR_COUNT
}

/// Positions are the bits of the Intel global registers.
fn counter_at(position: u8) -> CounterId {
    match position.checked_sub(32) {
        Some(fixed) => CounterId::Fixed(fixed),
        None => CounterId::Programmable(position),
    }
}

/// What a counter is doing; bits 3:0 of the status word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CounterState {
    /// Its control was not written since reset, or there was no snapshot yet.
    #[default]
    Unused,
    /// Not enabled: it keeps its value.
    Stopped,
    Counting,
    /// Enabled, and waiting for a physical counter that others use now.
    Waiting,
    /// Enabled, and nobody can count it: its value means nothing.
    Unavailable,
}

/// Codes of a field of the status word, with their meaning.
pub type Codes = &'static [(u8, &'static str)];

/// Bits 3:0.
pub const STATE_CODES: Codes = &[
    (
        0,
        "unused: its control was not written, or no snapshot was taken",
    ),
    (1, "stopped: not enabled, it keeps its value"),
    (2, "counting"),
    (
        3,
        "waiting: enabled, but others use the physical counters at present",
    ),
    (
        4,
        "unavailable: enabled, but nobody can count it; the value means nothing",
    ),
];

/// Bits 7:4.
pub const PROVENANCE_CODES: Codes = &[
    (0, "none: there is no count"),
    (1, "exact: every event was seen"),
    (2, "hardware: counted by a physical counter"),
    (3, "scaled: events were missed, or extrapolated"),
    (4, "derived: computed from another quantity"),
    (
        5,
        "simulated: made up, by a declared rate or as ticks of virtual time",
    ),
];

/// Bits 15:8.
pub const REASON_CODES: Codes = &[
    (0, "none: the counter is not unavailable"),
    (1, "no source of the host counts the event"),
    (
        2,
        "edge, invert, counter mask or any-thread cannot be counted",
    ),
    (3, "every physical counter is taken"),
    (4, "the counter is not granted to this guest"),
    (5, "the host refused"),
    (6, "the host took the physical counter away"),
    (7, "the host uses the physical counters itself"),
    (8, "counters compete for too few physical ones"),
    (9, "it has not had its turn on a physical counter yet"),
    (10, "the event is counted in both rings together only"),
    (11, "the host cannot see the only ring that is asked for"),
    (
        12,
        "the host lets the guest use fewer counters at a time than it has enabled",
    ),
    (13, "the VM's event filter denies the event"),
    (255, "an error of the hypervisor"),
];

/// Bits 23:16.
pub const LOSS_CODES: Codes = &[
    (0, "none is known"),
    (1, "the guest ran without being stepped"),
    (2, "an event handler was entered unseen"),
    (3, "a system call was entered unseen"),
    (4, "an instruction could not be decoded"),
    (5, "the hypervisor cannot step the guest's ring or mode"),
    (
        6,
        "its reservation ended while it counted, which cleared the counter",
    ),
];

/// What the page tells about one counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterAccount {
    /// What it is doing.
    pub state: CounterState,
    /// Where its count comes from, or why there is none.
    pub reading: Option<Reading>,
    /// Why the count is no longer exact, if it once was.
    pub loss: Option<LossReason>,
}

impl CounterAccount {
    /// What a reader is told of a counter that it may not use.
    pub const NOT_GRANTED: CounterAccount = CounterAccount {
        state: CounterState::Unavailable,
        reading: Some(Reading::Unavailable(UnavailableReason::NotGranted)),
        loss: None,
    };

    /// The status word: state in bits 3:0, provenance in 7:4, reason in 15:8,
    /// loss in 23:16. Bits 63:24 are 0.
    pub fn status(&self) -> u64 {
        let state = match self.state {
            CounterState::Unused => 0,
            CounterState::Stopped => 1,
            CounterState::Counting => 2,
            CounterState::Waiting => 3,
            CounterState::Unavailable => 4,
        };
        let (provenance, reason) = match self.reading {
            None => (0, 0),
            Some(Reading::Counted { provenance, .. }) => (provenance_code(provenance), 0),
            Some(Reading::Unavailable(reason)) => (0, reason_code(&reason)),
        };
        let loss = self.loss.map_or(0, loss_code);
        u64::from(u32::from_le_bytes([
            state | provenance << 4,
            reason,
            loss,
            0,
        ]))
    }
}

fn provenance_code(provenance: Provenance) -> u8 {
    match provenance {
        Provenance::Exact => 1,
        Provenance::Hardware => 2,
        Provenance::Scaled => 3,
        Provenance::Derived => 4,
        Provenance::Simulated => 5,
    }
}

fn reason_code(reason: &UnavailableReason) -> u8 {
    match reason {
        UnavailableReason::Event { .. } => 1,
        UnavailableReason::Modifier { .. } => 2,
        UnavailableReason::NoFreeCounter { .. } => 3,
        UnavailableReason::NotGranted => 4,
        UnavailableReason::Refused { .. } => 5,
        UnavailableReason::Lost { .. } => 6,
        UnavailableReason::Busy { .. } => 7,
        UnavailableReason::Conflict { .. } => 8,
        UnavailableReason::Waiting => 9,
        UnavailableReason::OneRing { .. } => 10,
        UnavailableReason::Unseen { .. } => 11,
        UnavailableReason::Budget { .. } => 12,
        UnavailableReason::Denied { .. } => 13,
        // No guest is told this: it is a tool's event that asks for the host alone.
        UnavailableReason::HostOnly
        | UnavailableReason::NoSuchSlot { .. }
        | UnavailableReason::NotProgrammed { .. }
        | UnavailableReason::Misplaced { .. }
        | UnavailableReason::NoCore => 255,
    }
}

fn loss_code(loss: LossReason) -> u8 {
    match loss {
        LossReason::NotStepped => 1,
        LossReason::EventDelivery => 2,
        LossReason::SystemCall => 3,
        LossReason::Undecodable => 4,
        LossReason::Unsupported => 5,
        LossReason::Taken => 6,
    }
}
