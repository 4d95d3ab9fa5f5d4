//! Samples of a stepped guest: the very instruction after which one fell due.

use instruction_facts::{
    AddressRegisters, Decoded, InstructionInfoFactory, Operand, OperandKind, Retirement, operand,
};
use pmu_virt::ibs::{BranchRecord, DataAddress, FetchRecord, MemoryRecord, OpRecord, OpSample};
use pmu_virt::{CorePmu, IbsKind, IbsSample, VcpuPmu};

use crate::pebs::general;
use crate::trap::{CpuContext, Executed};

/// What an instruction found before it was executed.
#[derive(Debug)]
pub(crate) struct Before {
    decoded: Decoded,
    registers: AddressRegisters,
    /// Linear address of address 0 of its code segment.
    code_base: u64,
    bitness: u32,
}

impl Before {
    /// Of the instruction `decoded`, which a stopped guest executes next.
    pub(crate) fn of(context: &CpuContext<'_>, decoded: &Decoded) -> Self {
        let sregs = context.sregs;
        let segments = [
            &sregs.es, &sregs.cs, &sregs.ss, &sregs.ds, &sregs.fs, &sregs.gs,
        ];
        Self {
            decoded: *decoded,
            registers: AddressRegisters {
                general: general(context.regs),
                bases: segments.map(|segment| segment.base),
            },
            code_base: context.code_base(),
            bitness: context.bitness(),
        }
    }

    /// Takes the samples that fell due with `executed`, which did `insn`; `now` is where the
    /// guest has come to.
    pub(crate) fn sample(
        &self,
        (pmu, core): (&mut VcpuPmu, &mut CorePmu),
        now: &CpuContext<'_>,
        (executed, insn): (&Executed, &Retirement),
        factory: &mut InstructionInfoFactory,
    ) {
        while let Some(kind) = pmu.ibs_due() {
            let rip = self.linear(executed.rip);
            let sample = match kind {
                IbsKind::Fetch => IbsSample::Fetch(fetched(now, rip)),
                IbsKind::Op => IbsSample::Op(OpSample::Exact(OpRecord {
                    rip,
                    branch: insn.branch.then(|| BranchRecord {
                        target: insn.taken.then(|| now.code_at(executed.next)),
                        is_return: insn.near_return,
                    }),
                    memory: self.memory(now, (executed, insn), factory),
                })),
            };
            pmu.ibs_sampled(Some(&mut *core), sample);
        }
    }

    fn linear(&self, rip: u64) -> u64 {
        match self.bitness {
            64 => rip,
            _ => self.code_base.wrapping_add(rip) & 0xffff_ffff,
        }
    }

    /// What the instruction accessed.
    fn memory(
        &self,
        now: &CpuContext<'_>,
        (executed, insn): (&Executed, &Retirement),
        factory: &mut InstructionInfoFactory,
    ) -> Option<MemoryRecord> {
        if insn.loads == 0 && insn.stores == 0 {
            return None;
        }
        let Some(Operand {
            linear,
            bytes,
            load,
            store,
        }) = self.operand(executed, insn, OperandKind::Any, factory)
        else {
            return Some(MemoryRecord {
                load: insn.loads > 0,
                store: insn.stores > 0,
                address: None,
            });
        };
        Some(MemoryRecord {
            load,
            store,
            address: Some(DataAddress {
                linear,
                physical: now.physical(linear),
                bytes,
            }),
        })
    }

    /// The operand that the instruction accessed, if it did, and if the registers are known
    /// with which it began.
    pub(crate) fn operand(
        &self,
        executed: &Executed,
        insn: &Retirement,
        kind: OperandKind,
        factory: &mut InstructionInfoFactory,
    ) -> Option<Operand> {
        // Emulators stop once more after the last round of a repeated instruction, when its
        // registers point behind what it accessed.
        let [_, rcx, ..] = self.registers.general;
        let is_over = self.decoded.facts.is_idle(rcx);
        let accessed = insn.loads != 0 || insn.stores != 0;
        if !accessed || !executed.planned || is_over {
            return None;
        }
        operand(&self.decoded.insn, kind, &self.registers, factory)
    }
}

/// The fetch of the instruction at linear address `linear`.
pub(crate) fn fetched(context: &CpuContext<'_>, linear: u64) -> FetchRecord {
    FetchRecord {
        linear,
        physical: context.located(linear),
    }
}
