//! Samplers of IBS: what their control reads, and the count that a period begins with.
//!
//! A sampler counts up to the maximum of its control. There its sample is due, and who
//! knows the guest takes it ([`Context::sampled`](super::Context::sampled)): it is in the
//! PMDs that describe it, the control's PMD says so, and that PMD has overflowed. It counts
//! on when that PMD is written or reset, as the processor's does when software clears the
//! bit; PFM_STOP does neither.

use pmu_model::IbsKind;
use pmu_model::ibs::{fetch, op};

use crate::carta;

/// The lowest bit of a fetch count that reads.
const FETCH_UNIT: u32 = 4;
/// Bits of it that are random at the begin of a period, with `IbsRandEn`.
const FETCH_RANDOM: u64 = 0xf;

/// A count as the control's register has it.
pub(super) fn bits_of(kind: IbsKind, count: u64) -> u64 {
    match kind {
        IbsKind::Fetch => (count >> FETCH_UNIT & fetch::MAX) << fetch::COUNT_SHIFT,
        IbsKind::Op => count << op::COUNT_SHIFT,
    }
}

/// The count of a value whose other bits are 0.
pub(super) fn count_in(kind: IbsKind, value: u64) -> u64 {
    match kind {
        IbsKind::Fetch => value >> fetch::COUNT_SHIFT << FETCH_UNIT,
        IbsKind::Op => value >> op::COUNT_SHIFT,
    }
}

/// What a period adds to its first count, where `control` asks for random bits, with the
/// generator's next state.
pub(super) fn random_bits(kind: IbsKind, control: u64, state: u32) -> (u64, u32) {
    if kind == IbsKind::Fetch && control & fetch::RANDOM != 0 {
        carta::vary(0, FETCH_RANDOM, state)
    } else {
        (0, state)
    }
}
