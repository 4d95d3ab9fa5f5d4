//! PEBS as a property of a model: which records, and how exact.

use std::fmt;

/// Layout of a PEBS record (SDM vol. 3B, "PEBS record format").
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PebsFormat {
    /// 200 bytes, always the same: processors of the Skylake kind.
    Three,
    /// A basic group of 32 bytes, and the groups that `MSR_PEBS_DATA_CFG` names; every
    /// counter and event (`PEBS_BASELINE`).
    Four,
}

impl PebsFormat {
    /// As `IA32_PERF_CAPABILITIES` has it in bits 11:8.
    #[inline]
    pub fn number(self) -> u8 {
        match self {
            PebsFormat::Three => 3,
            PebsFormat::Four => 4,
        }
    }
}

/// How near to the overflow a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PebsPrecision {
    /// Of the very next event after the overflow.
    Exact,
    /// Of the place where the guest was stopped after the overflow.
    Skid,
}

/// PEBS of a model that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pebs {
    /// The layout of records.
    pub format: PebsFormat,
    /// What the user lets the guest be told.
    pub precision: PebsPrecision,
}

impl Pebs {
    /// Its bits of `IA32_PERF_CAPABILITIES` (SDM vol. 4, 345H): records are of the state
    /// behind the instruction (PEBS_TRAP), with the architectural registers
    /// (PEBS_ARCH_REG), of this format, and with format 4 for every counter
    /// (PEBS_BASELINE).
    #[inline]
    pub fn capabilities(self) -> u64 {
        const TRAP: u64 = 1 << 6;
        const ARCH_REG: u64 = 1 << 7;
        const FORMAT: u32 = 8;
        const BASELINE: u64 = 1 << 14;
        let baseline = if self.is_baseline() { BASELINE } else { 0 };
        TRAP | ARCH_REG | u64::from(self.format.number()) << FORMAT | baseline
    }

    /// Every counter and event can be sampled, and records have groups.
    #[inline]
    pub fn is_baseline(self) -> bool {
        self.format == PebsFormat::Four
    }
}

/// The properties, as [`crate::PmuModel::parse`] takes them.
impl fmt::Display for Pebs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.precision {
            PebsPrecision::Exact => "pebs=exact",
            PebsPrecision::Skid => "pebs=skid",
        })?;
        match self.format {
            PebsFormat::Three => f.write_str(",pebs-format=3"),
            PebsFormat::Four => Ok(()),
        }
    }
}
