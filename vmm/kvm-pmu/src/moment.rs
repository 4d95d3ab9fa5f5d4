//! The moment in which a KVM vCPU was stopped, for samples: its registers, the instruction
//! that it has just executed where that was seen, and guest memory.

#[cfg(feature = "contexts")]
mod tools;

#[cfg(feature = "contexts")]
pub(crate) use tools::{Around, Take};

use instruction_facts::{AddressRegisters, Decoded, InstructionInfoFactory, Operand, OperandKind};
use kvm_bindings::kvm_regs;
#[cfg(feature = "contexts")]
use pmu_virt::perfmon::Wish;
use pmu_virt::{CodePlace, LinearMemory, Moment, MomentRegisters, Retirement, SampledInstruction};

use crate::error::VcpuError;
use crate::memory::GuestBytes;
use crate::trap::{CpuContext, Executed, Implicit, RFLAGS_TF};
use crate::vcpu::KvmVcpu;

/// What an instruction found before it was executed.
#[derive(Debug)]
pub(crate) struct Before {
    decoded: Decoded,
    registers: AddressRegisters,
    /// Of its code segment.
    base: u64,
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
            base: context.code_base(),
            bitness: context.bitness(),
        }
    }

    /// A place in the code segment of then.
    fn place(&self, rip: u64) -> CodePlace {
        let linear = match self.bitness {
            64 => rip,
            _ => self.base.wrapping_add(rip) & 0xffff_ffff,
        };
        CodePlace { rip, linear }
    }

    /// The operand that it accessed.
    fn operand(&self, kind: OperandKind, factory: &mut InstructionInfoFactory) -> Option<Operand> {
        // Emulators stop once more after the last round of a repeated instruction, when its
        // registers point behind what it accessed.
        let [_, rcx, ..] = self.registers.general;
        if self.decoded.facts.is_idle(rcx) {
            return None;
        }
        instruction_facts::operand(&self.decoded.insn, kind, &self.registers, factory)
    }
}

fn place(context: &CpuContext<'_>, rip: u64) -> CodePlace {
    CodePlace {
        rip,
        linear: context.code_at(rip),
    }
}

/// In the processor's order.
fn general(regs: &kvm_regs) -> [u64; 16] {
    [
        regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi, regs.r8,
        regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
    ]
}

/// An instruction that was stepped over.
#[derive(Debug)]
pub(crate) struct Stepped<'a> {
    pub(crate) executed: Executed,
    pub(crate) did: Retirement,
    /// What the planned instruction of the step found.
    pub(crate) before: Option<&'a Before>,
    pub(crate) factory: &'a mut InstructionInfoFactory,
    /// RSP and RFLAGS behind it, where an event that was delivered since has changed them.
    pub(crate) interrupted: Option<(u64, u64)>,
    /// TF as the guest has it.
    pub(crate) tf: bool,
}

/// How much is known of the guest in this moment.
#[derive(Debug)]
enum Sight<'a> {
    Stands(SampledInstruction),
    /// What it has just executed.
    Stepped(Stepped<'a>),
}

/// A stopped vCPU.
pub(crate) struct StoppedVcpu<'a> {
    vcpu: &'a KvmVcpu,
    memory: &'a dyn GuestBytes,
    /// `None`: contexts of tools are told alone, and the guest's own samples wait.
    sight: Option<Sight<'a>>,
    /// `None`: contexts of tools are not sampled now.
    #[cfg(feature = "contexts")]
    around: Option<Around<'a>>,
    /// Memory through the page tables, once it was asked for.
    tables: Option<Implicit<'a>>,
}

impl<'a> StoppedVcpu<'a> {
    fn new(vcpu: &'a KvmVcpu, memory: &'a dyn GuestBytes, sight: Option<Sight<'a>>) -> Self {
        Self {
            vcpu,
            memory,
            sight,
            #[cfg(feature = "contexts")]
            around: None,
            tables: None,
        }
    }

    /// One that stands where it was found.
    pub(crate) fn standing(
        vcpu: &'a KvmVcpu,
        memory: &'a dyn GuestBytes,
        instruction: SampledInstruction,
    ) -> Self {
        Self::new(vcpu, memory, Some(Sight::Stands(instruction)))
    }

    /// One behind an instruction of a step. There may be more to tell of the same step, so
    /// contexts of tools are sampled when it is over.
    pub(crate) fn stepped(
        vcpu: &'a KvmVcpu,
        memory: &'a dyn GuestBytes,
        stepped: Stepped<'a>,
    ) -> Self {
        Self::new(vcpu, memory, Some(Sight::Stepped(stepped)))
    }
}

// If it is said to lack `host`: somebody in the build has turned on `contexts` of `pmu-virt`, and
// nobody that of this crate, which is to be turned on too.
impl Moment for StoppedVcpu<'_> {
    type Error = VcpuError;

    fn registers(&mut self) -> Result<Option<MomentRegisters>, VcpuError> {
        let Some(sight) = self.sight.as_ref().filter(|_| !self.vcpu.in_smm()) else {
            return Ok(None);
        };
        let (regs, sregs) = (self.vcpu.get_regs()?, self.vcpu.get_sregs()?);
        let context = CpuContext {
            regs: &regs,
            sregs: &sregs,
            memory: self.memory,
        };
        let mut registers = MomentRegisters {
            instruction: SampledInstruction::Unseen,
            next: place(&context, regs.rip),
            flags: regs.rflags,
            general: general(&regs),
        };
        match sight {
            Sight::Stands(instruction) => registers.instruction = *instruction,
            Sight::Stepped(stepped) => {
                let Executed { rip, next, .. } = stepped.executed;
                // It may have led to another code segment.
                let at = stepped.before.map(|before| before.place(rip));
                registers.instruction = SampledInstruction::Executed {
                    at: at.unwrap_or_else(|| place(&context, rip)),
                    did: stepped.did,
                };
                registers.next = place(&context, next);
                if let Some((rsp, flags)) = stepped.interrupted {
                    registers.general[4] = rsp;
                    registers.flags = flags;
                }
                let tf = if stepped.tf { RFLAGS_TF } else { 0 };
                registers.flags = registers.flags & !RFLAGS_TF | tf;
            }
        }
        Ok(Some(registers))
    }

    fn xmm(&mut self) -> Result<[[u8; 16]; 16], VcpuError> {
        Ok(self.vcpu.get_fpu()?.xmm)
    }

    fn tsc(&mut self) -> Result<u64, VcpuError> {
        self.vcpu.guest_tsc()
    }

    fn operand(&mut self, kind: OperandKind) -> Option<Operand> {
        let Some(Sight::Stepped(stepped)) = &mut self.sight else {
            return None;
        };
        let accessed = stepped.did.loads != 0 || stepped.did.stores != 0;
        // The registers of the others of this step are not known.
        let before = stepped
            .before
            .filter(|_| stepped.executed.planned && accessed)?;
        before.operand(kind, stepped.factory)
    }

    fn memory(&mut self) -> Result<&dyn LinearMemory, VcpuError> {
        let tables = match self.tables.take() {
            Some(tables) => tables,
            None => Implicit::new(self.memory, &self.vcpu.get_sregs()?),
        };
        Ok(self.tables.insert(tables))
    }

    #[cfg(feature = "contexts")]
    fn host(&mut self, wish: Wish, take: &mut Take<'_>) -> Result<(), VcpuError> {
        match &mut self.around {
            Some(around) => around.tell(self.vcpu, wish, take),
            None => Ok(()),
        }
    }
}

impl LinearMemory for Implicit<'_> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.read_all(address, bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.write_all(address, bytes)
    }

    fn locate(&self, address: u64) -> Option<(u64, u32)> {
        self.located(address)
    }
}
