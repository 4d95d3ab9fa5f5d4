//! PMU models: which registers exist, how wide they are, what they accept.

mod parse;
mod ranges;
mod table;

pub use parse::ModelError;
pub use ranges::all_pmu_msr_ranges;
use table::RowNeeds;
pub use table::{RegisterKind, RegisterRow};

use std::fmt;
use std::sync::Arc;

use arbiter::{CounterId, PerKind};

use crate::event::{EventCode, EventFamily, FixedFunction, KnownEvent};
use crate::ibs::{self, IbsKind, IbsRegister};
use crate::ids::{MsrIndex, Vendor, low_bits};
use crate::pebs::Pebs;
use crate::register::{Register, Reserved, WriteForm, WriteRule};
use crate::request::CountRequest;

/// Highest number of programmable counters of any model.
pub const MAX_PROGRAMMABLE: u8 = 8;
/// Highest number of fixed-function counters of any model.
pub const MAX_FIXED: u8 = 3;

/// `IA32_DEBUGCTL`.
pub const DEBUGCTL: MsrIndex = MsrIndex(0x1d9);
/// `IA32_MISC_ENABLE`.
pub const MISC_ENABLE: MsrIndex = MsrIndex(0x1a0);

/// `IA32_PERF_CAPABILITIES.FW_WRITE`: full-width counter writes exist.
const FW_WRITE: u64 = 1 << 13;

/// `IA32_PERF_GLOBAL_STATUS.CTR_FRZ`: the counters stand (Intel, from version 4 on). AMD
/// has the same bit in `PerfCntrGlobalStatus`.
pub const CTR_FRZ: u64 = 1 << 59;
/// Bits of `IA32_PERF_GLOBAL_STATUS` from version 4 on that belong to no counter and
/// that software can set: LBR_FRZ, CTR_FRZ, ASCI, Ovf_Uncore, OvfBuffer.
const INDICATORS: u64 = 0b1_1111 << 58;
/// `IA32_PERF_GLOBAL_STATUS.OvfBuffer`: PEBS records have come to their threshold.
pub const OVF_BUFFER: u64 = 1 << 62;
/// `Adaptive_Record` of an event select, where records have groups.
const SELECT_ADAPTIVE: u64 = 1 << 34;
/// The same of fixed-function counter 0; those of the next ones are 4 bits apart.
const FIXED_ADAPTIVE: u64 = 1 << 32;
/// Groups of `MSR_PEBS_DATA_CFG` that records can have: memory, general registers, XMM.
const PEBS_GROUPS: u64 = 0b111;
/// `IA32_PERF_GLOBAL_INUSE.PMI_InUse`.
pub const PMI_IN_USE: u64 = 1 << 63;
/// Ovf_Buffer and CondChgd, which may be cleared in every version.
const ALWAYS_CLEARABLE: u64 = 0b11 << 62;

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
    /// What instruction-based sampling can have: [`ibs::caps`]; 0 where there is none.
    pub(crate) ibs: u32,
}

impl Family {
    /// CPUID has a bitmap of the fixed-function counters (SDM vol. 2A, leaf 0AH, ECX).
    fn has_fixed_map(&self) -> bool {
        self.version >= 5
    }
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

/// What can differ between two PMUs of one name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Properties {
    /// Vocabulary of event selects.
    pub(crate) events: EventFamily,
    pub(crate) programmable: u8,
    /// Fixed-function counters have numbers below this.
    pub(crate) fixed: u8,
    /// One bit for each of them that there is.
    pub(crate) fixed_map: u8,
    pub(crate) width: u8,
    pub(crate) fixed_width: u8,
    pub(crate) full_width: bool,
    /// `IA32_PERF_CAPABILITIES` exists.
    pub(crate) capabilities: bool,
    /// [`ibs::caps`]; 0 without instruction-based sampling.
    pub(crate) ibs: u32,
    /// PMIs can stop the counters (AMD).
    pub(crate) freeze: bool,
    pub(crate) pebs: Option<Pebs>,
}

impl Properties {
    /// What a PMU has of which nothing else was said.
    fn of(family: &Family) -> Self {
        Properties {
            events: family.events,
            programmable: family.programmable.default,
            fixed: family.fixed.default,
            fixed_map: first_bits(family.fixed.default),
            width: family.width.default,
            fixed_width: family.fixed_width.default,
            full_width: family.full_width.default,
            capabilities: family.full_width.default,
            ibs: 0,
            freeze: false,
            pebs: None,
        }
    }
}

/// What a guest sees of a PMU: an immutable description.
#[derive(Clone, Debug)]
pub struct PmuModel {
    family: &'static Family,
    properties: Properties,
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
    /// separated by commas: `counters=N`, `fixed=N` (with `intel-v5` also
    /// `fixed=0xMAP`, a bit for each counter), `width=BITS`, `fixed-width=BITS`,
    /// `full-width=on|off`, `perf-capabilities=on|off` (as `full-width` unless it is
    /// given, and on with PEBS), `pebs=exact|skid|off`, `pebs-format=3|4`, `ibs=on|off` and
    /// `freeze=on|off` (off unless they are given), `events=WORD` (whose event codes,
    /// [`EventFamily::name`]). Example:
    /// `intel-v2,counters=8,fixed=3,width=40,fixed-width=48,full-width=off`.
    ///
    /// # Errors
    /// What is wrong with the text, and what would be accepted.
    pub fn parse(spec: &str) -> Result<PmuModel, ModelError> {
        let (family, properties) = parse::parse(spec)?;
        Ok(PmuModel::of(family, properties))
    }

    /// The model that `auto` stands for.
    pub fn default_for(vendor: Vendor) -> PmuModel {
        let family = match vendor {
            Vendor::Intel => &table::INTEL_V2,
            Vendor::Amd => &table::AMD_CORE,
        };
        PmuModel::of(family, Properties::of(family))
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

    /// The model of a family with these properties.
    fn of(family: &'static Family, properties: Properties) -> PmuModel {
        let model = PmuModel {
            family,
            properties,
            mask: low_bits(properties.width),
            fixed_mask: low_bits(properties.fixed_width),
            by_index: Arc::default(),
        };
        model.with_registers()
    }

    /// The same model with the registers that its properties come to.
    fn with_registers(mut self) -> PmuModel {
        let mut by_index: Vec<_> = self.registers().collect();
        by_index.sort_by_key(|(msr, _)| *msr);
        self.by_index = by_index.into();
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
        self.properties.events
    }

    /// Whether the vocabulary is that of every PMU of this name.
    pub fn has_usual_events(&self) -> bool {
        self.properties.events == self.family.events
    }

    /// The same model with the event codes of a processor: `None` where its event selects
    /// have other bits than the model's.
    #[must_use]
    pub fn with_events(self, events: EventFamily) -> Option<Self> {
        let fits = self.family.events.has_selects_of(events);
        let properties = Properties {
            events,
            ..self.properties
        };
        fits.then_some(PmuModel { properties, ..self })
    }

    /// Number of programmable counters.
    #[inline]
    pub fn programmable(&self) -> u8 {
        self.properties.programmable
    }

    /// Number of fixed-function counters. Where CPUID has a bitmap of them (from version
    /// 5 on), some of these may be absent: [`PmuModel::has`].
    #[inline]
    pub fn fixed(&self) -> u8 {
        self.properties.fixed
    }

    /// Fixed-function counters, one bit for each.
    #[inline]
    pub fn fixed_map(&self) -> u8 {
        self.properties.fixed_map
    }

    /// Number of counters of each kind; see [`PmuModel::fixed`].
    #[inline]
    pub fn counts(&self) -> PerKind {
        PerKind {
            programmable: self.properties.programmable,
            fixed: self.fixed(),
        }
    }

    /// The same model without what nobody counts, where CPUID can say so: fixed-function
    /// counters from version 5 on; instruction-based sampling by ops, or all of it.
    #[must_use]
    pub fn counted(mut self, countable: impl Fn(&CountRequest) -> bool) -> Self {
        let counts = |event| countable(&CountRequest::plain(event, true, true));
        for function in (0..self.properties.fixed).filter_map(FixedFunction::of) {
            if self.has_fixed_map() && !counts(EventCode::Fixed(function)) {
                self.properties.fixed_map &= !(1 << function.index());
            }
        }
        if self.properties.ibs != 0 {
            let known = |event| EventCode::of(self.events(), event).is_some_and(counts);
            let cycles = known(KnownEvent::CoreCycles);
            if !known(KnownEvent::Instructions) {
                self.properties.ibs &= if cycles { !ibs::caps::OP_COUNT } else { 0 };
            }
        }
        self.with_registers()
    }

    /// Whether CPUID has a bitmap of the fixed-function counters.
    #[inline]
    pub(crate) fn has_fixed_map(&self) -> bool {
        self.family.has_fixed_map()
    }

    /// Whether a counter can be told to count for all threads of its core: versions 3
    /// and 4 (SDM vol. 3B, "Architectural Performance Monitoring Version 3" and "5").
    #[inline]
    pub fn has_any_thread(&self) -> bool {
        matches!(self.family.version, 3 | 4)
    }

    /// Whether a PMI that freezes does so by [`CTR_FRZ`], instead of clearing the
    /// enable bits of the global control register (SDM vol. 3B, "Architectural
    /// Performance Monitoring Version 4").
    #[inline]
    pub fn has_frozen_status(&self) -> bool {
        self.family.version >= 4 || self.properties.freeze
    }

    /// What CPUID function 8000_001Bh EAX says of instruction-based sampling:
    /// [`ibs::caps`]; 0 where there is none.
    #[inline]
    pub fn ibs(&self) -> u32 {
        self.properties.ibs
    }

    /// What may be counted for samples, the best first. Ops are instructions here. Where
    /// nobody counts fetches, each instruction is one, or else each cycle: a processor
    /// begins at most one in a cycle.
    pub fn ibs_requests(
        &self,
        kind: IbsKind,
        by_ops: bool,
    ) -> impl Iterator<Item = CountRequest> + use<> {
        /// Instruction cache fetches (BKDG and PPR, PMCx080).
        const FETCHES: u16 = 0x80;
        let fetches = EventCode::Selected {
            family: self.events(),
            select: FETCHES,
            umask: 0,
        };
        // Each is looked up when it is wanted: a write of a control wants one.
        let known = |event| EventCode::of(self.events(), event);
        let cycles = || known(KnownEvent::CoreCycles);
        let instructions = || known(KnownEvent::Instructions);
        let events = match (kind, by_ops) {
            (IbsKind::Fetch, _) => [Some(fetches), instructions(), cycles()],
            (IbsKind::Op, true) => [instructions(), None, None],
            (IbsKind::Op, false) => [cycles(), None, None],
        };
        let request = |event| CountRequest {
            int: true,
            ..CountRequest::plain(event, true, true)
        };
        events.into_iter().flatten().map(request)
    }

    /// Bits of `IbsOpCtl` that hold the op counter.
    #[inline]
    pub fn ibs_op_count_bits(&self) -> u8 {
        if self.properties.ibs & ibs::caps::OP_COUNT_EXTENDED != 0 {
            27
        } else {
            20
        }
    }

    /// Bits of the counters of each kind.
    pub fn widths(&self) -> PerKind {
        PerKind {
            programmable: self.properties.width,
            fixed: self.properties.fixed_width,
        }
    }

    /// MSRs of which the model has some bits and the processor others. They are
    /// not among [`PmuModel::msr_ranges`] and [`all_pmu_msr_ranges`]: only with
    /// this model have they to be trapped.
    pub fn shared_msrs(&self) -> &'static [MsrIndex] {
        match (self.can_freeze(), self.properties.pebs) {
            (_, Some(_)) => &[MISC_ENABLE, DEBUGCTL],
            (true, None) => &[DEBUGCTL],
            (false, None) => &[],
        }
    }

    /// PEBS, where the model has it.
    #[inline]
    pub fn pebs(&self) -> Option<Pebs> {
        self.properties.pebs
    }

    /// Whether PEBS records have groups, and every counter has PEBS.
    #[inline]
    fn has_pebs_groups(&self) -> bool {
        self.properties.pebs.is_some_and(Pebs::is_baseline)
    }

    /// Whether a PMI can stop the counters: IA32_DEBUGCTL bit 12 exists where
    /// IA32_PERF_CAPABILITIES does, from version 2 on (SDM vol. 4, table
    /// "IA-32 Architectural MSRs", 1D9H). AMD's DebugCtl has it where CPUID function
    /// 8000_0022h EAX bit 2 says so (APM vol. 3, appendix E.4.24).
    #[inline]
    pub fn can_freeze(&self) -> bool {
        self.properties.freeze || self.family.version > 1 && self.properties.capabilities
    }

    /// Bits of a programmable counter.
    pub fn width(&self) -> u8 {
        self.properties.width
    }

    /// Bits of a fixed-function counter.
    pub fn fixed_width(&self) -> u8 {
        self.properties.fixed_width
    }

    /// Whether full-width writes exist (Intel).
    pub fn full_width(&self) -> bool {
        self.properties.full_width
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
            CounterId::Programmable(n) => n < self.properties.programmable,
            CounterId::Fixed(n) => n < MAX_FIXED && self.properties.fixed_map >> n & 1 != 0,
            CounterId::Ibs(_) => self.ibs() != 0,
        }
    }

    /// Every counter, programmable ones first; samplers are none.
    #[inline]
    pub fn counters(&self) -> impl Iterator<Item = CounterId> + Clone + use<> {
        (0..self.properties.programmable)
            .map(CounterId::Programmable)
            .chain(self.fixed_counters())
    }

    /// Every fixed-function counter.
    #[inline]
    pub fn fixed_counters(&self) -> impl Iterator<Item = CounterId> + Clone + use<> {
        let map = self.properties.fixed_map;
        let numbers = (0..MAX_FIXED).filter(move |n| map >> n & 1 != 0);
        numbers.map(CounterId::Fixed)
    }

    /// The bits that `counter` has.
    #[inline]
    pub fn counter_mask(&self, counter: CounterId) -> u64 {
        match counter {
            CounterId::Programmable(_) | CounterId::Ibs(_) => self.mask,
            CounterId::Fixed(_) => self.fixed_mask,
        }
    }

    /// One bit per counter, as in the global control register.
    #[inline]
    pub fn global_mask(&self) -> u64 {
        low_bits(self.properties.programmable) | u64::from(self.properties.fixed_map) << 32
    }

    /// Value of the global control register after reset: programmable
    /// counters on, fixed ones off (SDM vol. 3A, table "IA-32 and Intel 64
    /// Processor States Following Power-up, Reset, or INIT"; AMD likewise).
    pub fn global_control_reset(&self) -> u64 {
        if self.family.has_global {
            low_bits(self.properties.programmable)
        } else {
            0
        }
    }

    /// `IA32_PERF_CAPABILITIES`, where the model has it.
    #[inline]
    pub fn perf_capabilities(&self) -> Option<u64> {
        let full_width = if self.properties.full_width {
            FW_WRITE
        } else {
            0
        };
        let pebs = self.properties.pebs.map_or(0, Pebs::capabilities);
        self.properties.capabilities.then_some(full_width | pebs)
    }

    /// Inclusive ranges of MSR indices that the model answers, ascending,
    /// adjacent ones merged; without those of the local APIC, which no filter reaches.
    pub fn msr_ranges(&self) -> Vec<(u32, u32)> {
        let filtered = self
            .registers()
            .filter(|(msr, _)| !ibs::X2APIC_MSRS.contains(msr));
        ranges::merge(filtered.map(|(msr, _)| (msr, msr)).collect())
    }

    /// Every register with its MSR index, in the order of the table.
    #[inline]
    pub fn registers(&self) -> impl Iterator<Item = (u32, Register)> + use<'_> {
        let of_row = |row: &'static RegisterRow| {
            let numbers = 0..row.count.number(&self.properties);
            numbers.map(|n| (row.msr(n), row.kind.register(n)))
        };
        self.rows()
            .flat_map(of_row)
            .filter(|(_, register)| match register {
                Register::Counter { counter, .. } => self.has(*counter),
                _ => true,
            })
    }

    /// The register at an MSR index.
    #[inline]
    pub fn decode(&self, msr: MsrIndex) -> Option<Register> {
        let at = self.by_index.binary_search_by_key(&msr.0, |(msr, _)| *msr);
        Some(self.by_index[at.ok()?].1)
    }

    /// The bits of an event select that say what is counted, and when: those of PEBS are
    /// not among them.
    #[must_use]
    pub fn event_bits(&self) -> u64 {
        self.family.select_bits
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
            Register::Select(_) if self.has_pebs_groups() => {
                self.family.select_bits | SELECT_ADAPTIVE
            }
            Register::Select(_) => self.family.select_bits,
            // Before format 4 the bits above are those of load latency, which no
            // source knows.
            Register::PebsEnable if self.has_pebs_groups() => self.global_mask(),
            Register::PebsEnable => low_bits(self.properties.programmable),
            Register::PebsDataConfig => PEBS_GROUPS,
            Register::FixedControl => self.fixed_control_bits(),
            Register::GlobalControl => self.global_mask(),
            Register::GlobalStatusSet => self.status_bits(),
            // Bits 62 (OvfBuffer) and 63 (CondChgd) may be cleared even where
            // nothing ever sets them.
            Register::GlobalStatusClear if self.vendor() == Vendor::Intel => {
                self.status_bits() | ALWAYS_CLEARABLE
            }
            Register::GlobalStatusClear => self.status_bits(),
            Register::Ibs(register) => self.ibs_bits(register)?,
            Register::Counter { .. }
            | Register::GlobalStatus
            | Register::GlobalInUse
            | Register::PerfCapabilities
            | Register::DsArea => return None,
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

    /// Bits of the global status register that can be set: one for each counter, and
    /// from version 4 on those that belong to none (SDM vol. 3B, "Architectural
    /// Performance Monitoring Version 4"). 0 where the register does not exist.
    #[inline]
    pub fn status_bits(&self) -> u64 {
        let counters = if self.has_status() {
            self.global_mask()
        } else {
            0
        };
        let indicators = match (self.vendor(), self.has_frozen_status()) {
            (_, false) => 0,
            (Vendor::Intel, true) => INDICATORS,
            // Bit 58 belongs to branch records.
            (Vendor::Amd, true) => CTR_FRZ,
        };
        let buffer = if self.properties.pebs.is_some() {
            OVF_BUFFER
        } else {
            0
        };
        counters | indicators | buffer
    }

    /// The bits of `IA32_FIXED_CTR_CTRL` that the model has: enable and PMI
    /// of every counter, and bit 2 of a field, any-thread.
    #[inline]
    fn fixed_control_bits(&self) -> u64 {
        let field = if self.has_any_thread() {
            0b1111
        } else {
            0b1011
        };
        let adaptive = if self.has_pebs_groups() {
            FIXED_ADAPTIVE
        } else {
            0
        };
        let one = |n| (field | adaptive) << (4 * u32::from(n));
        let there = (0..MAX_FIXED).filter(|n| self.properties.fixed_map >> n & 1 != 0);
        there.map(one).sum()
    }

    /// The bits that software can write; `None` for a register that it only reads.
    fn ibs_bits(&self, register: IbsRegister) -> Option<u64> {
        const VECTOR: u64 = 1 << 16 | 0x7ff;
        Some(match register {
            IbsRegister::FetchControl => ibs::fetch::WRITABLE,
            IbsRegister::OpControl => {
                let has = |cap, bits| {
                    if self.properties.ibs & cap != 0 {
                        bits
                    } else {
                        0
                    }
                };
                let count = low_bits(self.ibs_op_count_bits()) << ibs::op::COUNT_SHIFT;
                ibs::op::MAX
                    | ibs::op::ENABLE
                    | ibs::op::VALID
                    | has(ibs::caps::OP_COUNT, ibs::op::COUNT_OPS)
                    | has(ibs::caps::OP_COUNT_EXTENDED, ibs::op::MAX_EXTENDED)
                    | has(ibs::caps::READ_WRITE_OP_COUNT, count)
            }
            IbsRegister::FetchPhysical | IbsRegister::DataPhysical => ibs::PHYSICAL,
            IbsRegister::FetchLinear
            | IbsRegister::OpRip
            | IbsRegister::OpData
            | IbsRegister::OpData2
            | IbsRegister::OpData3
            | IbsRegister::DataLinear
            | IbsRegister::BranchTarget => u64::MAX,
            IbsRegister::ApicVector(_) => VECTOR,
            IbsRegister::ApicControl => 0,
            IbsRegister::Control | IbsRegister::ApicFeature => return None,
        })
    }

    #[inline]
    fn rows(&self) -> impl Iterator<Item = &'static RegisterRow> + use<'_> {
        self.family.rows.iter().filter(|row| match row.needs {
            RowNeeds::Nothing => true,
            RowNeeds::FullWidth => self.properties.full_width,
            RowNeeds::Capabilities => self.properties.capabilities,
            RowNeeds::Ibs(caps) => self.properties.ibs & caps == caps,
            RowNeeds::Pebs => self.properties.pebs.is_some(),
            RowNeeds::PebsGroups => self.has_pebs_groups(),
        })
    }
}

/// The name with every property, as [`PmuModel::parse`] takes it.
impl fmt::Display for PmuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{},counters={},fixed=",
            self.name(),
            self.properties.programmable,
        )?;
        match self.properties.fixed_map.trailing_ones() {
            first if self.properties.fixed_map >> first == 0 => write!(f, "{first}")?,
            _ => write!(f, "{:#x}", self.properties.fixed_map)?,
        }
        let on_off = |on| if on { "on" } else { "off" };
        write!(
            f,
            ",width={},fixed-width={},full-width={}",
            self.properties.width,
            self.properties.fixed_width,
            on_off(self.properties.full_width)
        )?;
        if self.properties.capabilities != self.properties.full_width {
            write!(
                f,
                ",perf-capabilities={}",
                on_off(self.properties.capabilities)
            )?;
        }
        if let Some(pebs) = self.properties.pebs {
            write!(f, ",{pebs}")?;
        }
        if self.properties.ibs != 0 {
            f.write_str(",ibs=on")?;
        }
        if self.properties.freeze {
            f.write_str(",freeze=on")?;
        }
        if !self.has_usual_events() {
            write!(f, ",events={}", self.properties.events.name())?;
        }
        Ok(())
    }
}

/// A map of the first `count` fixed-function counters.
const fn first_bits(count: u8) -> u8 {
    low_bits(count).to_le_bytes()[0]
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
