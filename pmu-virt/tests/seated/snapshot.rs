//! A moment that is as a test says.

use instruction_facts::{Operand, OperandKind};
use pmu_virt::ibs::{DataAddress, FetchRecord, OpRecord, OpSample};
use pmu_virt::perfmon::{self, Quantities, Wish};
use pmu_virt::{
    CodePlace, IbsSample, LinearMemory, Moment, MomentRegisters, Retirement, SampledInstruction,
};

/// A stopped guest.
pub(crate) struct Snapshot<'a> {
    pub(crate) registers: MomentRegisters,
    pub(crate) tsc: u64,
    pub(crate) xmm: [[u8; 16]; 16],
    /// What the instruction read, and what it wrote.
    pub(crate) operands: [Option<Operand>; 2],
    pub(crate) memory: &'a dyn LinearMemory,
    pub(crate) host: Option<(&'a perfmon::Moment, &'a dyn Quantities)>,
    /// What fails once the host's tools have taken theirs.
    pub(crate) host_fails: Option<&'static str>,
    /// Which operands, and whether XMM registers were asked for.
    pub(crate) asked: (Vec<OperandKind>, bool),
    /// So many samples of the guest can be taken of it.
    pub(crate) left: usize,
}

impl<'a> Snapshot<'a> {
    /// Of a guest that stands at 0 with nothing in its registers.
    pub(crate) fn of(memory: &'a dyn LinearMemory) -> Self {
        Snapshot {
            registers: MomentRegisters::default(),
            tsc: 0,
            xmm: Default::default(),
            operands: [None; 2],
            memory,
            host: None,
            host_fails: None,
            asked: Default::default(),
            left: usize::MAX,
        }
    }

    /// In which one sample comes out as `sample`, with memory that is mapped as it says.
    pub(crate) fn of_sample(sample: &IbsSample, memory: &'a Located) -> Self {
        let mut snapshot = Snapshot::of(memory);
        snapshot.left = 1;
        let registers = &mut snapshot.registers;
        match sample {
            IbsSample::Op(OpSample::Near { rip: linear })
            | IbsSample::Fetch(FetchRecord { linear, .. }) => {
                registers.next = CodePlace::flat(*linear);
            }
            IbsSample::Op(OpSample::Exact(record)) => {
                let target = record.branch.and_then(|branch| branch.target);
                registers.next = CodePlace::flat(target.unwrap_or_default());
                registers.instruction = SampledInstruction::Executed {
                    at: CodePlace::flat(record.rip),
                    did: Retirement {
                        branch: record.branch.is_some(),
                        taken: target.is_some(),
                        near_return: record.branch.is_some_and(|branch| branch.is_return),
                        loads: record.memory.is_some_and(|memory| memory.load).into(),
                        stores: record.memory.is_some_and(|memory| memory.store).into(),
                        ..Retirement::default()
                    },
                };
                snapshot.operands = operands(record);
            }
        }
        snapshot
    }
}

fn operands(record: &OpRecord) -> [Option<Operand>; 2] {
    let operand = record.memory.and_then(|memory| {
        let DataAddress { linear, bytes, .. } = memory.address?;
        Some(Operand {
            linear,
            bytes,
            load: memory.load,
            store: memory.store,
        })
    });
    [
        operand.filter(|operand| operand.load),
        operand.filter(|operand| operand.store),
    ]
}

/// Memory of which nothing can be read, and everything is mapped to one place.
pub(crate) struct Located(Option<(u64, u32)>);

impl Located {
    pub(crate) const NOWHERE: Located = Located(None);

    /// As a sample says.
    pub(crate) fn by(sample: &IbsSample) -> Self {
        Located(match sample {
            IbsSample::Fetch(record) => record.physical,
            IbsSample::Op(OpSample::Exact(record)) => {
                let address = record.memory.and_then(|memory| memory.address);
                let physical = address.and_then(|address| address.physical);
                physical.map(|physical| (physical, 12))
            }
            IbsSample::Op(OpSample::Near { .. }) => None,
        })
    }
}

impl LinearMemory for Located {
    fn read(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }

    fn write(&self, _: u64, _: &[u8]) -> bool {
        false
    }

    fn locate(&self, _: u64) -> Option<(u64, u32)> {
        self.0
    }
}

impl Moment for Snapshot<'_> {
    type Error = &'static str;

    fn registers(&mut self) -> Result<Option<MomentRegisters>, &'static str> {
        let left = self.left.checked_sub(1);
        self.left = left.unwrap_or(0);
        Ok(left.map(|_| self.registers))
    }

    fn xmm(&mut self) -> Result<[[u8; 16]; 16], &'static str> {
        self.asked.1 = true;
        Ok(self.xmm)
    }

    fn tsc(&mut self) -> Result<u64, &'static str> {
        Ok(self.tsc)
    }

    fn operand(&mut self, kind: OperandKind) -> Option<Operand> {
        self.asked.0.push(kind);
        let [read, written] = self.operands;
        match kind {
            OperandKind::Load => read,
            OperandKind::Store => written,
            OperandKind::Any => read.or(written),
        }
    }

    fn memory(&mut self) -> Result<&dyn LinearMemory, &'static str> {
        Ok(self.memory)
    }

    fn host(
        &mut self,
        _: Wish,
        take: &mut dyn FnMut(&perfmon::Moment, &dyn Quantities),
    ) -> Result<(), &'static str> {
        if let Some((place, values)) = self.host {
            take(place, values);
        }
        self.host_fails.map_or(Ok(()), Err)
    }
}
