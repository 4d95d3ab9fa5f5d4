//! PMU models: which registers exist, how wide they are, what they accept.

mod parse;
mod ranges;
mod table;

pub use parse::ModelError;
pub use ranges::all_pmu_msr_ranges;
pub use table::{RegisterKind, RegisterRow};

use std::fmt;
use std::sync::Arc;

use arbiter::{CounterId, PerKind};

use crate::event::{EventFamily, FixedFunction};
use crate::ids::{MsrIndex, Vendor};
use crate::register::{Register, Reserved, WriteForm, WriteRule};

/// Highest number of programmable counters of any model.
pub const MAX_PROGRAMMABLE: u8 = 8;
/// Highest number of fixed-function counters of any model.
pub const MAX_FIXED: u8 = 3;

/// `IA32_DEBUGCTL`.
pub const DEBUGCTL: MsrIndex = MsrIndex(0x1d9);

/// `IA32_PERF_CAPABILITIES.FW_WRITE`: full-width counter writes exist.
const FW_WRITE: u64 = 1 << 13;

/// A model's line in lists for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSummary {
    /// Name to give to [`PmuModel::parse`].
    pub name: &'static str,
    /// Whose architecture it follows.
    pub vendor: Vendor,
    /// One line of description.
    pub summary: &'static str,
}

/// What stays the same for every PMU of one name.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) summary: ModelSummary,
    /// Intel architectural version; 0 on AMD.
    pub(crate) version: u8,
    pub(crate) events: EventFamily,
    pub(crate) rows: &'static [RegisterRow],
    /// Bits of an event select that exist.
    pub(crate) select_bits: u64,
    pub(crate) has_global: bool,
    pub(crate) programmable: Numbers,
    pub(crate) fixed: Numbers,
    pub(crate) width: Numbers,
    pub(crate) fixed_width: Numbers,
    pub(crate) full_width: Switch,
}

/// Default and allowed values of a number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    pub(crate) default: u8,
    pub(crate) least: u8,
    pub(crate) most: u8,
}

/// A yes or no that the user may or may not choose.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Switch {
    pub(crate) default: bool,
    pub(crate) settable: bool,
}

/// What a guest sees of a PMU: an immutable description.
#[derive(Clone, Debug)]
pub struct PmuModel {
    family: &'static Family,
    programmable: u8,
    fixed: u8,
    width: u8,
    fixed_width: u8,
    full_width: bool,
    /// What the properties above come to: the bits of a programmable counter and of
    /// a fixed-function one, and the registers by MSR index.
    mask: u64,
    fixed_mask: u64,
    by_index: Arc<[(u32, Register)]>,
}

impl PmuModel {
    /// The model that a name and its properties describe.
    ///
    /// The name is one of [`PmuModel::names`]; properties follow it,
    /// separated by commas: `counters=N`, `fixed=N`, `width=BITS`,
    /// `fixed-width=BITS`, `full-width=on|off`. Example:
    /// `intel-v2,counters=8,fixed=3,width=40,fixed-width=48,full-width=off`.
    ///
    /// # Errors
    /// What is wrong with the text, and what would be accepted.
    pub fn parse(spec: &str) -> Result<PmuModel, ModelError> {
        parse::parse(spec)
    }

    /// The model that `auto` stands for.
    pub fn default_for(vendor: Vendor) -> PmuModel {
        let family = match vendor {
            Vendor::Intel => &table::INTEL_V2,
            Vendor::Amd => &table::AMD_CORE,
        };
        PmuModel::of(family).completed()
    }

    /// Every model there is.
    pub fn names() -> &'static [ModelSummary] {
        const NAMES: [ModelSummary; table::FAMILIES.len()] = {
            let mut names = [table::FAMILIES[0].summary; table::FAMILIES.len()];
            let mut i = 0;
            while i < names.len() {
                names[i] = table::FAMILIES[i].summary;
                i += 1;
            }
            names
        };
        &NAMES
    }

    /// The model of a family with its defaults; not completed yet.
    fn of(family: &'static Family) -> PmuModel {
        PmuModel {
            family,
            programmable: family.programmable.default,
            fixed: family.fixed.default,
            width: family.width.default,
            fixed_width: family.fixed_width.default,
            full_width: family.full_width.default,
            mask: 0,
            fixed_mask: 0,
            by_index: Arc::default(),
        }
    }

    /// The same model with what follows from its properties, which are final.
    fn completed(mut self) -> PmuModel {
        let mut by_index: Vec<_> = self.registers().collect();
        by_index.sort_by_key(|(msr, _)| *msr);
        self.by_index = by_index.into();
        self.mask = low_bits(self.width);
        self.fixed_mask = low_bits(self.fixed_width);
        self
    }

    /// Name without properties.
    pub fn name(&self) -> &'static str {
        self.family.summary.name
    }

    /// Whose architecture it follows.
    #[inline]
    pub fn vendor(&self) -> Vendor {
        self.family.summary.vendor
    }

    /// Architectural performance monitoring version (Intel); 0 on AMD.
    #[inline]
    pub fn version(&self) -> u8 {
        self.family.version
    }

    /// Vocabulary of its event selects.
    #[inline]
    pub fn events(&self) -> EventFamily {
        self.family.events
    }

    /// Number of programmable counters.
    #[inline]
    pub fn programmable(&self) -> u8 {
        self.programmable
    }

    /// Number of fixed-function counters.
    #[inline]
    pub fn fixed(&self) -> u8 {
        self.fixed
    }

    /// Number of counters of each kind.
    #[inline]
    pub fn counts(&self) -> PerKind {
        PerKind {
            programmable: self.programmable,
            fixed: self.fixed,
        }
    }

    /// Bits of the counters of each kind.
    pub fn widths(&self) -> PerKind {
        PerKind {
            programmable: self.width,
            fixed: self.fixed_width,
        }
    }

    /// MSRs of which the model has some bits and the processor others. They are
    /// not among [`PmuModel::msr_ranges`] and [`all_pmu_msr_ranges`]: only with
    /// this model have they to be trapped.
    pub fn shared_msrs(&self) -> &'static [MsrIndex] {
        if self.can_freeze() { &[DEBUGCTL] } else { &[] }
    }

    /// Whether a PMI can stop the counters: IA32_DEBUGCTL bit 12 exists where
    /// IA32_PERF_CAPABILITIES does, from version 2 on (SDM vol. 4, table
    /// "IA-32 Architectural MSRs", 1D9H).
    #[inline]
    pub fn can_freeze(&self) -> bool {
        self.family.version > 1 && self.full_width
    }

    /// Bits of a programmable counter.
    pub fn width(&self) -> u8 {
        self.width
    }

    /// Bits of a fixed-function counter.
    pub fn fixed_width(&self) -> u8 {
        self.fixed_width
    }

    /// Whether full-width writes and `IA32_PERF_CAPABILITIES` exist (Intel).
    pub fn full_width(&self) -> bool {
        self.full_width
    }

    /// Whether counters are enabled globally as well as locally.
    #[inline]
    pub fn has_global_control(&self) -> bool {
        self.family.has_global
    }

    /// Whether overflows leave a status bit.
    #[inline]
    pub fn has_status(&self) -> bool {
        self.family.has_global
    }

    /// Whether the PMU has `counter`.
    #[inline]
    pub fn has(&self, counter: CounterId) -> bool {
        match counter {
            CounterId::Programmable(n) => n < self.programmable,
            CounterId::Fixed(n) => n < self.fixed,
        }
    }

    /// Every counter, programmable ones first.
    #[inline]
    pub fn counters(&self) -> impl Iterator<Item = CounterId> + Clone + use<> {
        (0..self.programmable)
            .map(CounterId::Programmable)
            .chain((0..self.fixed).map(CounterId::Fixed))
    }

    /// The bits that `counter` has.
    #[inline]
    pub fn counter_mask(&self, counter: CounterId) -> u64 {
        match counter {
            CounterId::Programmable(_) => self.mask,
            CounterId::Fixed(_) => self.fixed_mask,
        }
    }

    /// One bit per counter, as in the global control register.
    #[inline]
    pub fn global_mask(&self) -> u64 {
        low_bits(self.programmable) | low_bits(self.fixed) << 32
    }

    /// Value of the global control register after reset: programmable
    /// counters on, fixed ones off (SDM vol. 3A, table "IA-32 and Intel 64
    /// Processor States Following Power-up, Reset, or INIT"; AMD likewise).
    pub fn global_control_reset(&self) -> u64 {
        if self.family.has_global {
            low_bits(self.programmable)
        } else {
            0
        }
    }

    /// `IA32_PERF_CAPABILITIES`, where the model has it.
    #[inline]
    pub fn perf_capabilities(&self) -> Option<u64> {
        self.full_width.then_some(FW_WRITE)
    }

    /// Inclusive ranges of MSR indices that the model answers, ascending,
    /// adjacent ones merged.
    pub fn msr_ranges(&self) -> Vec<(u32, u32)> {
        let indices = self
            .rows()
            .flat_map(|row| (0..row.count.number(self)).map(|n| (row.msr(n), row.msr(n))));
        ranges::merge(indices.collect())
    }

    /// Every register with its MSR index, in the order of the table.
    #[inline]
    pub fn registers(&self) -> impl Iterator<Item = (u32, Register)> + use<'_> {
        let of_row = |row: &'static RegisterRow| {
            let numbers = 0..row.count.number(self);
            numbers.map(|n| (row.msr(n), row.kind.register(n)))
        };
        self.rows().flat_map(of_row)
    }

    /// The register at an MSR index.
    #[inline]
    pub fn decode(&self, msr: MsrIndex) -> Option<Register> {
        let at = self.by_index.binary_search_by_key(&msr.0, |(msr, _)| *msr);
        Some(self.by_index[at.ok()?].1)
    }

    /// Which values a control register takes; `None` for a register that is
    /// no control register.
    #[inline]
    pub fn write_rule(&self, register: Register) -> Option<WriteRule> {
        let reserved = match self.vendor() {
            Vendor::Intel => Reserved::Gp,
            Vendor::Amd => Reserved::Drop,
        };
        let implemented = match register {
            Register::Select(_) => self.family.select_bits,
            Register::FixedControl => self.fixed_control_bits(),
            Register::GlobalControl | Register::GlobalStatusSet => self.global_mask(),
            // Bits 62 (OvfBuffer) and 63 (CondChgd) may be cleared though
            // nothing here ever sets them.
            Register::GlobalStatusClear if self.vendor() == Vendor::Intel => {
                self.global_mask() | 0b11 << 62
            }
            Register::GlobalStatusClear => self.global_mask(),
            Register::Counter { .. } | Register::GlobalStatus | Register::PerfCapabilities => {
                return None;
            }
        };
        Some(WriteRule {
            implemented,
            reserved,
        })
    }

    /// The counter that RDPMC addresses with `ecx`. Intel: bit 30 selects
    /// fixed counters, any other bit above the index names something that is
    /// absent here (SDM vol. 2B, RDPMC). AMD: the index alone (APM vol. 3).
    #[inline]
    pub fn rdpmc_counter(&self, ecx: u32) -> Option<CounterId> {
        const FIXED: u32 = 1 << 30;
        let counter = match self.vendor() {
            Vendor::Intel if ecx & FIXED != 0 => CounterId::Fixed(u8::try_from(ecx & !FIXED).ok()?),
            _ => CounterId::Programmable(u8::try_from(ecx).ok()?),
        };
        self.has(counter).then_some(counter)
    }

    /// The bits of `IA32_FIXED_CTR_CTRL` that the model has: enable and PMI
    /// of every counter. Any-thread (bit 2 of a field) came with version 3.
    #[inline]
    fn fixed_control_bits(&self) -> u64 {
        (0..self.fixed)
            .filter_map(FixedFunction::of)
            .map(|function| 0b1011 << (4 * u32::from(function.index())))
            .sum()
    }

    #[inline]
    fn rows(&self) -> impl Iterator<Item = &'static RegisterRow> + use<'_> {
        self.family
            .rows
            .iter()
            .filter(|row| !row.full_width_only || self.full_width)
    }
}

/// The name with every property, as [`PmuModel::parse`] takes it.
impl fmt::Display for PmuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{},counters={},fixed={},width={},fixed-width={},full-width={}",
            self.name(),
            self.programmable,
            self.fixed,
            self.width,
            self.fixed_width,
            if self.full_width { "on" } else { "off" }
        )
    }
}

/// The counter's way to take a written value.
#[inline]
pub fn written_count(form: WriteForm, mask: u64, value: u64) -> Option<u64> {
    match form {
        WriteForm::SignExtend32 => {
            let extended = if value & (1 << 31) != 0 {
                value | 0xffff_ffff_0000_0000
            } else {
                value & 0xffff_ffff
            };
            Some(extended & mask)
        }
        WriteForm::FullWidth => (value & !mask == 0).then_some(value),
        WriteForm::Truncate => Some(value & mask),
    }
}

/// A mask of the lowest `bits` bits.
#[inline]
pub const fn low_bits(bits: u8) -> u64 {
    if bits >= 64 {
        u64::MAX
    } else {
        (1 << bits) - 1
    }
}
