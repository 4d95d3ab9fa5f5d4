//! The synthetic MSRs of the reservations, and which index stands for which.

use crate::CounterId;
use crate::abi;

/// A register of the block of synthetic MSRs. `docs/reference/pcr.md` says what each does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PcrRegister {
    /// `MANAGEMENT_KEY`.
    ManagementKey(CounterId),
    /// `ACCESS_KEY`.
    AccessKey(CounterId),
    Control(CounterId),
    /// `DROP_VALUE`.
    DropValue(CounterId),
    /// `COUNTER`: an alias of the counter.
    Counter(CounterId),
    /// `SELECT`: an alias of the counter's event select or control.
    Select(CounterId),
    /// `OVERFLOW`: the counter's bit of global status.
    Overflow(CounterId),
    /// `IBS`: an alias of the MSR of instruction-based sampling so many behind the first.
    Ibs(u8),
    Status(CounterId),
    /// `LEGACY_MAP`.
    LegacyMap(CounterId),
    Random,
    Phase,
    /// `NOTICE_VECTOR`.
    NoticeVector,
    Request,
    Answer,
    Granted,
    Notice,
    Reply,
    Refusal,
}

/// Positions in each row of registers.
const ROW: u32 = 0x40;
/// The end of the row of samplers' registers.
const MSR_IBS_END: u32 = abi::MSR_IBS + 0x10;

impl PcrRegister {
    /// Whether an MSR index belongs to the block. Not every index of it has a meaning.
    #[inline]
    pub const fn contains(msr: u32) -> bool {
        msr.wrapping_sub(abi::MSR_BASE) < abi::MSR_COUNT
    }

    /// The register at an MSR index. `None` means that the index has no meaning.
    #[inline]
    pub fn decode(msr: u32) -> Option<PcrRegister> {
        let offset = msr.checked_sub(abi::MSR_BASE)?;
        let row: fn(CounterId) -> PcrRegister = match offset / ROW * ROW {
            abi::MSR_MANAGEMENT_KEY => PcrRegister::ManagementKey,
            abi::MSR_ACCESS_KEY => PcrRegister::AccessKey,
            abi::MSR_CONTROL => PcrRegister::Control,
            abi::MSR_DROP_VALUE => PcrRegister::DropValue,
            abi::MSR_COUNTER => PcrRegister::Counter,
            abi::MSR_SELECT => PcrRegister::Select,
            abi::MSR_OVERFLOW => PcrRegister::Overflow,
            abi::MSR_STATUS => PcrRegister::Status,
            abi::MSR_LEGACY_MAP => PcrRegister::LegacyMap,
            _ => return Self::decode_single(offset),
        };
        let position = u8::try_from(offset % ROW).ok()?;
        CounterId::at_position(position).map(row)
    }

    fn decode_single(offset: u32) -> Option<PcrRegister> {
        Some(match offset {
            abi::MSR_RANDOM => PcrRegister::Random,
            abi::MSR_PHASE => PcrRegister::Phase,
            abi::MSR_NOTICE_VECTOR => PcrRegister::NoticeVector,
            abi::MSR_REQUEST => PcrRegister::Request,
            abi::MSR_ANSWER => PcrRegister::Answer,
            abi::MSR_GRANTED => PcrRegister::Granted,
            abi::MSR_NOTICE => PcrRegister::Notice,
            abi::MSR_REPLY => PcrRegister::Reply,
            abi::MSR_REFUSAL => PcrRegister::Refusal,
            abi::MSR_IBS..MSR_IBS_END => {
                PcrRegister::Ibs(u8::try_from(offset - abi::MSR_IBS).ok()?)
            }
            _ => return None,
        })
    }

    /// Whether an access to the register may present a cookie. The caller has to
    /// fetch the register that carries the cookie only then.
    #[inline]
    pub const fn takes_cookie(self, write: bool) -> bool {
        match self {
            PcrRegister::Counter(_)
            | PcrRegister::Select(_)
            | PcrRegister::Overflow(_)
            | PcrRegister::Ibs(_) => true,
            PcrRegister::ManagementKey(_)
            | PcrRegister::AccessKey(_)
            | PcrRegister::Control(_)
            | PcrRegister::DropValue(_)
            | PcrRegister::Request
            | PcrRegister::Reply => write,
            PcrRegister::Status(_)
            | PcrRegister::LegacyMap(_)
            | PcrRegister::Random
            | PcrRegister::Phase
            | PcrRegister::NoticeVector
            | PcrRegister::Answer
            | PcrRegister::Granted
            | PcrRegister::Notice
            | PcrRegister::Refusal => false,
        }
    }

    /// The counter that RDPMC reads with a cookie if ECX is `ecx`. `None` means that
    /// `ecx` asks for no cookie.
    #[inline]
    pub fn rdpmc(ecx: u32) -> Option<CounterId> {
        let position = ecx.checked_sub(abi::RDPMC_COOKIE)?;
        CounterId::at_position(u8::try_from(position).ok()?)
    }
}
