//! Samples of a stepped guest: the very instruction after which one fell due.

use iced_x86::Register;
use kvm_bindings::{kvm_regs, kvm_segment};
use pmu_virt::ibs::{BranchRecord, DataAddress, FetchRecord, MemoryRecord, OpRecord, OpSample};
use pmu_virt::step::{Operand, OperandKind, Retirement, operand};
use pmu_virt::{CorePmu, IbsKind, IbsSample, VcpuPmu};

use crate::trap::{CpuContext, Executed, MAX_INSTRUCTION};

/// What an instruction found before it was executed.
#[derive(Debug)]
pub(crate) struct Before {
    regs: kvm_regs,
    /// Bases of ES, CS, SS, DS, FS and GS.
    bases: [u64; 6],
    bitness: u32,
    code: [u8; MAX_INSTRUCTION],
    len: usize,
}

impl Before {
    /// Of the instruction that a stopped guest executes next.
    pub(crate) fn of(context: &CpuContext<'_>) -> Self {
        let sregs = context.sregs;
        let bitness = context.bitness();
        let flat = |segment: &kvm_segment| if bitness == 64 { 0 } else { segment.base };
        let mut code = [0; MAX_INSTRUCTION];
        let len = context.read_linear(context.code_at(context.regs.rip), &mut code);
        Self {
            regs: *context.regs,
            bases: [
                flat(&sregs.es),
                flat(&sregs.cs),
                flat(&sregs.ss),
                flat(&sregs.ds),
                sregs.fs.base,
                sregs.gs.base,
            ],
            bitness,
            code,
            len,
        }
    }

    /// Takes the samples that fell due with `executed`, which did `insn`; `now` is where the
    /// guest has come to.
    pub(crate) fn sample(
        &self,
        (pmu, core): (&mut VcpuPmu, &mut CorePmu),
        now: &CpuContext<'_>,
        executed: &Executed,
        insn: &Retirement,
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
                    memory: self.memory(now, executed, insn),
                })),
            };
            pmu.ibs_sampled(Some(&mut *core), sample);
        }
    }

    fn linear(&self, rip: u64) -> u64 {
        match self.bitness {
            64 => rip,
            _ => self.bases[1].wrapping_add(rip) & 0xffff_ffff,
        }
    }

    /// What the instruction accessed.
    fn memory(
        &self,
        now: &CpuContext<'_>,
        executed: &Executed,
        insn: &Retirement,
    ) -> Option<MemoryRecord> {
        if insn.loads == 0 && insn.stores == 0 {
            return None;
        }
        let Some(Operand {
            linear,
            bytes,
            load,
            store,
        }) = self.operand(executed, insn, OperandKind::Any)
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

    /// REP, REPE or REPNE is among the prefixes; it is asked of string instructions only.
    fn is_repeated(&self) -> bool {
        let prefixes = self.code[..self.len].iter();
        let opcode = |byte: &&u8| matches!(byte, 0x6c..=0x6f | 0xa4..=0xa7 | 0xaa..=0xaf);
        prefixes
            .take_while(|byte| !opcode(byte))
            .any(|byte| matches!(byte, 0xf2 | 0xf3))
    }

    /// The operand that the instruction accessed, if it did, and if the registers are known
    /// with which it began.
    pub(crate) fn operand(
        &self,
        executed: &Executed,
        insn: &Retirement,
        kind: OperandKind,
    ) -> Option<Operand> {
        // Emulators stop once more after the last round of a repeated instruction, when its
        // registers point behind what it accessed.
        let is_over = insn.string && self.is_repeated() && self.regs.rcx & 0xffff_ffff == 0;
        let accessed = insn.loads != 0 || insn.stores != 0;
        if !accessed || !executed.planned || is_over {
            return None;
        }
        let code = &self.code[..self.len];
        operand(code, self.bitness, executed.rip, kind, |register| {
            self.value(register)
        })
    }

    fn value(&self, register: Register) -> u64 {
        let regs = &self.regs;
        let full = match register.full_register() {
            Register::RAX => regs.rax,
            Register::RCX => regs.rcx,
            Register::RDX => regs.rdx,
            Register::RBX => regs.rbx,
            Register::RSP => regs.rsp,
            Register::RBP => regs.rbp,
            Register::RSI => regs.rsi,
            Register::RDI => regs.rdi,
            Register::R8 => regs.r8,
            Register::R9 => regs.r9,
            Register::R10 => regs.r10,
            Register::R11 => regs.r11,
            Register::R12 => regs.r12,
            Register::R13 => regs.r13,
            Register::R14 => regs.r14,
            Register::R15 => regs.r15,
            Register::ES => return self.bases[0],
            Register::CS => return self.bases[1],
            Register::SS => return self.bases[2],
            Register::DS => return self.bases[3],
            Register::FS => return self.bases[4],
            Register::GS => return self.bases[5],
            _ => 0,
        };
        match register.size() {
            1 if matches!(
                register,
                Register::AH | Register::CH | Register::DH | Register::BH
            ) =>
            {
                full >> 8 & 0xff
            }
            1 => full & 0xff,
            2 => full & 0xffff,
            4 => full & 0xffff_ffff,
            _ => full,
        }
    }
}

/// The fetch of the instruction at linear address `linear`.
pub(crate) fn fetched(context: &CpuContext<'_>, linear: u64) -> FetchRecord {
    FetchRecord {
        linear,
        physical: context.located(linear),
    }
}
