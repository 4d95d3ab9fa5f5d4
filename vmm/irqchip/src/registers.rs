//! Registers of a local APIC (SDM 3A, tables 11-1 and 11-6), and what may be written to them.

/// Entries of the local vector table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lvt {
    Timer,
    Thermal,
    Counters,
    Lint0,
    Lint1,
    Error,
}

impl Lvt {
    pub(crate) const COUNT: usize = 6;

    pub(crate) const fn index(self) -> usize {
        self as usize
    }

    /// Bits that software sets.
    pub(crate) const fn writable(self) -> u32 {
        match self {
            Self::Timer => 0x0007_00ff,
            Self::Thermal | Self::Counters => 0x0001_07ff,
            Self::Lint0 | Self::Lint1 => 0x0001_a7ff,
            Self::Error => 0x0001_00ff,
        }
    }

    /// Bits that are there to be read: a write changes nothing, and is allowed.
    const fn read_only(self) -> u32 {
        const DELIVERY_STATUS: u32 = 1 << 12;
        const REMOTE_IRR: u32 = 1 << 14;
        match self {
            Self::Lint0 | Self::Lint1 => DELIVERY_STATUS | REMOTE_IRR,
            _ => DELIVERY_STATUS,
        }
    }
}

/// Bits of SVR: spurious vector, software enable.
pub(crate) const SVR_WRITABLE: u32 = 0x1ff;
/// SVR: EOIs of level-triggered interrupts are not broadcast.
pub(crate) const SVR_SUPPRESS: u32 = 1 << 12;
/// Bits 31:0 of ICR but for delivery status.
pub(crate) const ICR_WRITABLE: u32 = 0x000c_cfff;
const ICR_DELIVERY_STATUS: u32 = 1 << 12;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Register {
    Id,
    Version,
    Tpr,
    Apr,
    Ppr,
    Eoi,
    RemoteRead,
    Ldr,
    Dfr,
    Svr,
    /// 32 of the vectors, 0 to 7.
    Isr(u8),
    Tmr(u8),
    Irr(u8),
    Esr,
    IcrLow,
    IcrHigh,
    Lvt(Lvt),
    InitialCount,
    CurrentCount,
    Divide,
    SelfIpi,
}

impl Register {
    /// Bits 11:4 of its address, and its MSR less 800h.
    pub(crate) fn at(number: u8) -> Option<Self> {
        Some(match number {
            0x02 => Self::Id,
            0x03 => Self::Version,
            0x08 => Self::Tpr,
            0x09 => Self::Apr,
            0x0a => Self::Ppr,
            0x0b => Self::Eoi,
            0x0c => Self::RemoteRead,
            0x0d => Self::Ldr,
            0x0e => Self::Dfr,
            0x0f => Self::Svr,
            0x10..=0x17 => Self::Isr(number & 7),
            0x18..=0x1f => Self::Tmr(number & 7),
            0x20..=0x27 => Self::Irr(number & 7),
            0x28 => Self::Esr,
            0x30 => Self::IcrLow,
            0x31 => Self::IcrHigh,
            0x32 => Self::Lvt(Lvt::Timer),
            0x33 => Self::Lvt(Lvt::Thermal),
            0x34 => Self::Lvt(Lvt::Counters),
            0x35 => Self::Lvt(Lvt::Lint0),
            0x36 => Self::Lvt(Lvt::Lint1),
            0x37 => Self::Lvt(Lvt::Error),
            0x38 => Self::InitialCount,
            0x39 => Self::CurrentCount,
            0x3e => Self::Divide,
            0x3f => Self::SelfIpi,
            _ => return None,
        })
    }

    /// Whether it has an address in memory.
    pub(crate) fn in_memory(self) -> bool {
        self != Self::SelfIpi
    }

    /// Whether RDMSR reads it.
    pub(crate) fn readable_msr(self) -> bool {
        !matches!(
            self,
            Self::Apr | Self::Eoi | Self::RemoteRead | Self::Dfr | Self::IcrHigh | Self::SelfIpi
        )
    }

    /// The bits that WRMSR may set; none where there is nothing to be written. `svr` are the
    /// bits of SVR.
    pub(crate) fn writable_msr(self, svr: u32) -> Option<u64> {
        Some(match self {
            Self::Tpr | Self::SelfIpi => 0xff,
            Self::Eoi | Self::Esr => 0,
            Self::Svr => svr.into(),
            Self::IcrLow => 0xffff_ffff << 32 | u64::from(ICR_WRITABLE | ICR_DELIVERY_STATUS),
            Self::Lvt(lvt) => (lvt.writable() | lvt.read_only()).into(),
            Self::InitialCount => 0xffff_ffff,
            Self::Divide => 0xb,
            _ => return None,
        })
    }
}
