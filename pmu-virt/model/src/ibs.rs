//! Instruction-based sampling (AMD): its registers, and what a sample holds.
//!
//! Sources: APM vol. 2, section 13.3; APM vol. 3, appendix E, function 8000_001Bh;
//! the BKDGs from Family 10h on and the PPRs, MSRC001_1030 to 103B.

use crate::ids::low_bits;

/// Function 8000_001Bh EAX, as far as some model has it.
pub mod caps {
    /// The leaf is valid.
    pub const VALID: u32 = 1 << 0;
    /// Fetch sampling.
    pub const FETCH: u32 = 1 << 1;
    /// Execution sampling.
    pub const OP: u32 = 1 << 2;
    /// The op counter can be read and written.
    pub const READ_WRITE_OP_COUNT: u32 = 1 << 3;
    /// Ops can be counted instead of cycles.
    pub const OP_COUNT: u32 = 1 << 4;
    /// The target of a branch is recorded.
    pub const BRANCH_TARGET: u32 = 1 << 5;
    /// Op counter and maximum have 27 bits instead of 20.
    pub const OP_COUNT_EXTENDED: u32 = 1 << 6;
    /// A sample says whether its RIP is valid.
    pub const RIP_INVALID: u32 = 1 << 7;
}

/// A register of instruction-based sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IbsRegister {
    /// `IbsFetchCtl`.
    FetchControl,
    /// `IbsFetchLinAd`.
    FetchLinear,
    /// `IbsFetchPhysAd`.
    FetchPhysical,
    /// `IbsOpCtl`.
    OpControl,
    /// `IbsOpRip`.
    OpRip,
    /// `IbsOpData`.
    OpData,
    /// `IbsOpData2`.
    OpData2,
    /// `IbsOpData3`.
    OpData3,
    /// `IbsDcLinAd`.
    DataLinear,
    /// `IbsDcPhysAd`.
    DataPhysical,
    /// `IBSCTL`.
    Control,
    /// `IbsBrTarget`.
    BranchTarget,
    /// The local APIC's extended feature register (x2APIC mode).
    ApicFeature,
    /// The local APIC's extended control register (x2APIC mode).
    ApicControl,
    /// An entry of the local APIC's extended vector table (x2APIC mode).
    ApicVector(u8),
}

/// `IbsFetchCtl`; the others are behind it.
pub const MSR_BASE: u32 = 0xc001_1030;

impl IbsRegister {
    /// The sampler that the register belongs to; `None` if it is nobody's.
    #[must_use]
    pub fn sampler(self) -> Option<IbsKind> {
        match self {
            IbsRegister::FetchControl | IbsRegister::FetchLinear | IbsRegister::FetchPhysical => {
                Some(IbsKind::Fetch)
            }
            IbsRegister::OpControl
            | IbsRegister::OpRip
            | IbsRegister::OpData
            | IbsRegister::OpData2
            | IbsRegister::OpData3
            | IbsRegister::DataLinear
            | IbsRegister::DataPhysical
            | IbsRegister::BranchTarget => Some(IbsKind::Op),
            IbsRegister::Control
            | IbsRegister::ApicFeature
            | IbsRegister::ApicControl
            | IbsRegister::ApicVector(_) => None,
        }
    }
}

/// Entries of the extended local vector table (APM vol. 2, 16.7: XLC).
pub const EXTENDED_VECTORS: u8 = 4;

/// The entry that samples raise, by [`IbsRegister::Control`].
pub const IBS_VECTOR: u8 = 0;

/// MSR indices of the x2APIC, which KVM's filter does not reach.
pub const X2APIC_MSRS: std::ops::RangeInclusive<u32> = 0x800..=0x8ff;

pub use arbiter::IbsKind;

/// `IbsFetchCtl`.
pub mod fetch {
    /// Maximum count, bits 19:4.
    pub const MAX: u64 = 0xffff;
    /// Present count, bits 19:4.
    pub const COUNT_SHIFT: u32 = 16;
    /// Sampling is on.
    pub const ENABLE: u64 = 1 << 48;
    /// There is a sample.
    pub const VALID: u64 = 1 << 49;
    /// The fetch completed.
    pub const COMPLETE: u64 = 1 << 50;
    /// The physical address is valid, with the size of the page.
    pub const PHYSICAL_VALID: u64 = 1 << 52;
    /// Where the size of the page stands: 0 is 4 KiB, 1 is 2 MiB, 2 is 1 GiB.
    pub const PAGE_SHIFT: u32 = 53;
    /// The count's lowest bits are random.
    pub const RANDOM: u64 = 1 << 57;
    /// What software writes; the rest is what the last sample was.
    pub const WRITABLE: u64 = MAX | MAX << COUNT_SHIFT | ENABLE | VALID | RANDOM;
    /// What a sample says.
    pub const SAMPLE: u64 = 0xffff << 32 | 0x7f << 50 | 1 << 58;
}

/// `IbsOpCtl`.
pub mod op {
    /// Maximum count, bits 19:4.
    pub const MAX: u64 = 0xffff;
    /// Maximum count, bits 26:20, where they stand in the count itself.
    pub const MAX_EXTENDED: u64 = 0x7f << 20;
    /// Sampling is on.
    pub const ENABLE: u64 = 1 << 17;
    /// There is a sample.
    pub const VALID: u64 = 1 << 18;
    /// Count ops instead of cycles.
    pub const COUNT_OPS: u64 = 1 << 19;
    /// Where the present count stands.
    pub const COUNT_SHIFT: u32 = 32;
    /// All below it.
    pub const CONTROL: u64 = (1 << COUNT_SHIFT) - 1;
}

/// `IbsOpData`.
pub mod op_data {
    /// A near return.
    pub const RETURN: u64 = 1 << 34;
    /// A branch that was taken.
    pub const TAKEN: u64 = 1 << 35;
    /// A branch.
    pub const BRANCH: u64 = 1 << 37;
    /// `IbsOpRip` is not the op's.
    pub const RIP_INVALID: u64 = 1 << 38;
}

/// `IbsOpData3`.
pub mod op_data3 {
    /// The op loads.
    pub const LOAD: u64 = 1 << 0;
    /// The op stores.
    pub const STORE: u64 = 1 << 1;
    /// `IbsDcLinAd` is valid.
    pub const LINEAR_VALID: u64 = 1 << 17;
    /// `IbsDcPhysAd` is valid.
    pub const PHYSICAL_VALID: u64 = 1 << 18;
    /// Where the width stands: n is 2^(n-1) bytes, 0 is not known.
    pub const WIDTH_SHIFT: u32 = 22;
}

/// `IBSCTL`: the entry of the extended vector table is valid.
pub const CONTROL_VALID: u64 = 1 << 8;

/// Physical addresses have so many bits.
pub const PHYSICAL: u64 = low_bits(52);

/// The count at which a sampler with this control takes a sample; 0: never.
#[must_use]
pub fn maximum(kind: IbsKind, control: u64) -> u64 {
    match kind {
        IbsKind::Fetch => (control & fetch::MAX) << 4,
        IbsKind::Op => (control & op::MAX) << 4 | control & op::MAX_EXTENDED,
    }
}

/// Whether a control lets its sampler count: it is enabled and holds no sample. A maximum
/// of 0 never comes to its end; the manuals leave open what it does.
#[must_use]
pub fn is_on(kind: IbsKind, control: u64) -> bool {
    let enable = enable_of(kind);
    control & (enable | valid_of(kind)) == enable && maximum(kind, control) != 0
}

/// The bit of a control that enables its sampler.
#[must_use]
pub fn enable_of(kind: IbsKind) -> u64 {
    match kind {
        IbsKind::Fetch => fetch::ENABLE,
        IbsKind::Op => op::ENABLE,
    }
}

/// The bit of a control that says that there is a sample.
#[must_use]
pub fn valid_of(kind: IbsKind) -> u64 {
    match kind {
        IbsKind::Fetch => fetch::VALID,
        IbsKind::Op => op::VALID,
    }
}

/// What there is to say of an op of which one knows where the guest stood soon after, and
/// nothing else; or of one that was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpSample {
    /// The guest was found at this RIP some time after the op.
    Near {
        /// Linear address.
        rip: u64,
    },
    /// The op itself.
    Exact(OpRecord),
}

/// An op that was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpRecord {
    /// Linear address of its instruction.
    pub rip: u64,
    /// If it is a branch.
    pub branch: Option<BranchRecord>,
    /// If it is known to load or store.
    pub memory: Option<MemoryRecord>,
}

/// A branch that was executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BranchRecord {
    /// Where it went, if it was taken.
    pub target: Option<u64>,
    /// A near return.
    pub is_return: bool,
}

/// An access to memory that took place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRecord {
    /// It read.
    pub load: bool,
    /// It wrote.
    pub store: bool,
    /// Where, if that is known.
    pub address: Option<DataAddress>,
}

/// Where an access took place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataAddress {
    /// Linear address.
    pub linear: u64,
    /// Guest-physical address, if it is mapped.
    pub physical: Option<u64>,
    /// Bytes; 0 if that is not known.
    pub bytes: u16,
}

/// A fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchRecord {
    /// Linear address.
    pub linear: u64,
    /// Guest-physical address, and the base-2 logarithm of the page's size, if it is
    /// mapped by page tables that the size is known of.
    pub physical: Option<(u64, u32)>,
}

impl OpRecord {
    /// The registers that describe it: `IbsOpRip`, `IbsOpData`, `IbsOpData3`,
    /// `IbsDcLinAd`, `IbsDcPhysAd`, `IbsBrTarget`.
    fn registers(&self) -> [u64; 6] {
        let mut data = 0;
        if let Some(branch) = self.branch {
            data |= op_data::BRANCH;
            data |= flag(op_data::TAKEN, branch.target.is_some());
            data |= flag(op_data::RETURN, branch.is_return);
        }
        let target = self.branch.and_then(|branch| branch.target).unwrap_or(0);
        let (mut data3, mut linear, mut physical) = (0, 0, 0);
        if let Some(memory) = self.memory {
            data3 |= flag(op_data3::LOAD, memory.load) | flag(op_data3::STORE, memory.store);
            if let Some(address) = memory.address {
                data3 |= op_data3::LINEAR_VALID | width(address.bytes) << op_data3::WIDTH_SHIFT;
                linear = address.linear;
                if let Some(found) = address.physical {
                    data3 |= op_data3::PHYSICAL_VALID;
                    physical = found & PHYSICAL;
                }
            }
        }
        [self.rip, data, data3, linear, physical, target]
    }
}

impl OpSample {
    /// The registers that describe it, in the order of their indices but for
    /// `IbsOpData2`, which is 0: where data came from is never known.
    pub fn registers(&self) -> [(IbsRegister, u64); 7] {
        let [rip, data, data3, linear, physical, target] = match self {
            OpSample::Near { rip } => [*rip, op_data::RIP_INVALID, 0, 0, 0, 0],
            OpSample::Exact(record) => record.registers(),
        };
        [
            (IbsRegister::OpRip, rip),
            (IbsRegister::OpData, data),
            (IbsRegister::OpData2, 0),
            (IbsRegister::OpData3, data3),
            (IbsRegister::DataLinear, linear),
            (IbsRegister::DataPhysical, physical),
            (IbsRegister::BranchTarget, target),
        ]
    }
}

impl FetchRecord {
    /// The addresses: `IbsFetchLinAd`, `IbsFetchPhysAd`.
    fn registers(&self) -> [(IbsRegister, u64); 2] {
        let physical = self.physical.map_or(0, |(physical, _)| physical);
        [
            (IbsRegister::FetchLinear, self.linear),
            (IbsRegister::FetchPhysical, physical),
        ]
    }

    /// What `IbsFetchCtl` says of it.
    pub fn control(&self) -> u64 {
        let page = match self.physical {
            Some((_, 12)) => 0,
            Some((_, 21)) => 1,
            Some((_, 30)) => 2,
            // Pages of other sizes have no code.
            _ => return fetch::COMPLETE,
        };
        fetch::COMPLETE | fetch::PHYSICAL_VALID | page << fetch::PAGE_SHIFT
    }
}

/// A sample that was due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IbsSample {
    /// Of the fetch counter.
    Fetch(FetchRecord),
    /// Of the op counter.
    Op(OpSample),
}

impl IbsSample {
    /// Which sampler's it is.
    #[must_use]
    pub fn kind(&self) -> IbsKind {
        match self {
            IbsSample::Fetch(_) => IbsKind::Fetch,
            IbsSample::Op(_) => IbsKind::Op,
        }
    }

    /// A sampler's control with what it says of the sample, instead of the last one.
    #[must_use]
    pub fn control(&self, before: u64) -> u64 {
        match self {
            IbsSample::Fetch(record) => before & !fetch::SAMPLE | record.control() | fetch::VALID,
            IbsSample::Op(_) => before | op::VALID,
        }
    }

    /// The other registers that describe it.
    pub fn registers(&self) -> impl Iterator<Item = (IbsRegister, u64)> {
        let (fetch, op) = match self {
            IbsSample::Fetch(record) => (Some(record.registers()), None),
            IbsSample::Op(sample) => (None, Some(sample.registers())),
        };
        let fetch = fetch.into_iter().flatten();
        fetch.chain(op.into_iter().flatten())
    }
}

fn flag(bit: u64, on: bool) -> u64 {
    if on { bit } else { 0 }
}

/// `IbsOpMemWidth`.
fn width(bytes: u16) -> u64 {
    match bytes {
        1 | 2 | 4 | 8 | 16 | 32 | 64 => u64::from(bytes.trailing_zeros()) + 1,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(sample: OpSample, expected: &[(IbsRegister, u64)]) {
        for (register, value) in sample.registers() {
            let wanted = expected.iter().find(|(one, _)| *one == register);
            assert_eq!(
                value,
                wanted.map_or(0, |(_, value)| *value),
                "{register:?} of {sample:?}"
            );
        }
    }

    #[test]
    fn what_nobody_saw_is_marked() {
        let expected = [(IbsRegister::OpRip, 0x1234), (IbsRegister::OpData, 1 << 38)];
        check(OpSample::Near { rip: 0x1234 }, &expected);
    }

    #[test]
    fn an_op_is_told_as_it_was() {
        let plain = OpRecord {
            rip: 0x1000,
            ..OpRecord::default()
        };
        check(OpSample::Exact(plain), &[(IbsRegister::OpRip, 0x1000)]);
        let branch = |target, is_return| {
            OpSample::Exact(OpRecord {
                branch: Some(BranchRecord { target, is_return }),
                ..plain
            })
        };
        let at = (IbsRegister::OpRip, 0x1000);
        check(branch(None, false), &[at, (IbsRegister::OpData, 1 << 37)]);
        let taken = [
            at,
            (IbsRegister::OpData, 1 << 37 | 1 << 35 | 1 << 34),
            (IbsRegister::BranchTarget, 0x2000),
        ];
        check(branch(Some(0x2000), true), &taken);
        let memory = |bytes, physical| {
            OpSample::Exact(OpRecord {
                memory: Some(MemoryRecord {
                    load: true,
                    store: false,
                    address: Some(DataAddress {
                        linear: 0x3000,
                        physical,
                        bytes,
                    }),
                }),
                ..plain
            })
        };
        let loads = |data3| {
            [
                at,
                (IbsRegister::OpData3, data3),
                (IbsRegister::DataLinear, 0x3000),
            ]
        };
        check(memory(1, None), &loads(1 | 1 << 17 | 1 << 22));
        check(memory(8, None), &loads(1 | 1 << 17 | 4 << 22));
        check(memory(10, None), &loads(1 | 1 << 17));
        let [rip, data3, linear] = loads(1 | 1 << 17 | 1 << 18 | 3 << 22);
        let physical = (IbsRegister::DataPhysical, 0x7000);
        check(memory(4, Some(0x7000)), &[rip, data3, linear, physical]);
    }

    #[test]
    fn a_fetch_has_a_page_or_none() {
        let check = |physical, expected| {
            let record = FetchRecord {
                linear: 0,
                physical,
            };
            assert_eq!(record.control(), expected, "{physical:x?}");
        };
        check(None, 1 << 50);
        check(Some((0x1000, 12)), 1 << 50 | 1 << 52);
        check(Some((0x1000, 21)), 1 << 50 | 1 << 52 | 1 << 53);
        check(Some((0x1000, 30)), 1 << 50 | 1 << 52 | 2 << 53);
        check(Some((0x1000, 22)), 1 << 50);
    }
}
