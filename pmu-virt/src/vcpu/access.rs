//! What RDMSR, WRMSR and RDPMC name: one counter's part, or a register of its own.

use arbiter::{CounterId, PcrRegister};
use pmu_model::{IbsRegister, MsrIndex, PmuModel, Register, WriteForm, ibs};

/// What belongs to one counter.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// The count, and how a written value becomes one.
    Count(WriteForm),
    /// The event select, or the counter's field of `IA32_FIXED_CTR_CTRL`.
    Control,
    /// Its bit of global status, at bit 0.
    Overflow,
    /// A register of a sampler.
    Sampler(IbsRegister),
}

/// The count as RDPMC reads it.
pub(super) const COUNT: Part = Part::Count(WriteForm::FullWidth);

/// The counter by its legacy name, and what of it, if the register belongs to
/// one.
#[inline]
pub(super) fn part_of(register: Register) -> Option<(CounterId, Part)> {
    match register {
        Register::Counter { counter, form } => Some((counter, Part::Count(form))),
        Register::Select(n) => Some((CounterId::Programmable(n), Part::Control)),
        Register::Ibs(register) => {
            let sampler = CounterId::Ibs(register.sampler()?);
            Some((sampler, Part::Sampler(register)))
        }
        Register::FixedControl
        | Register::GlobalStatus
        | Register::GlobalControl
        | Register::GlobalStatusClear
        | Register::GlobalStatusSet
        | Register::GlobalInUse
        | Register::PerfCapabilities
        | Register::PebsEnable
        | Register::PebsDataConfig
        | Register::DsArea => None,
    }
}

/// What an alias register of the block is another name of.
pub(super) fn alias(model: &PmuModel, register: PcrRegister) -> Option<(CounterId, Part)> {
    match register {
        PcrRegister::Counter(counter) => Some((counter, COUNT)),
        PcrRegister::Select(counter) => Some((counter, Part::Control)),
        PcrRegister::Overflow(counter) => Some((counter, Part::Overflow)),
        PcrRegister::Ibs(n) => {
            let msr = MsrIndex(ibs::MSR_BASE + u32::from(n));
            part_of(model.decode(msr)?)
        }
        PcrRegister::ManagementKey(_)
        | PcrRegister::AccessKey(_)
        | PcrRegister::Control(_)
        | PcrRegister::DropValue(_)
        | PcrRegister::Status(_)
        | PcrRegister::LegacyMap(_)
        | PcrRegister::Random
        | PcrRegister::Phase
        | PcrRegister::NoticeVector
        | PcrRegister::Request
        | PcrRegister::Answer
        | PcrRegister::Granted
        | PcrRegister::Notice
        | PcrRegister::Reply
        | PcrRegister::Refusal => None,
    }
}

/// Whether a counter has such an alias where there are reservations.
pub(super) fn has_alias(model: &PmuModel, counter: CounterId, part: Part) -> bool {
    model.has(counter)
        && match (part, counter) {
            (Part::Sampler(_), _) => true,
            // It has registers of its own.
            (_, CounterId::Ibs(_)) => false,
            (Part::Overflow, _) => model.has_status(),
            (Part::Count(_) | Part::Control, _) => true,
        }
}

/// Whether the register takes a cookie as its value.
pub(super) fn is_key(register: Option<PcrRegister>) -> bool {
    matches!(
        register,
        Some(PcrRegister::ManagementKey(_) | PcrRegister::AccessKey(_))
    )
}

/// Whether a guest writes the register before it reads counts.
pub(super) fn starts_counting(register: Option<PcrRegister>) -> bool {
    matches!(
        register,
        Some(
            PcrRegister::Select(_)
                | PcrRegister::AccessKey(_)
                | PcrRegister::Phase
                | PcrRegister::Request
        )
    )
}
