//! Kinds of instructions: how they move RIP, what a stepper must know, when a
//! branch is taken.

use iced_x86::ConditionCode;

/// How an instruction moves RIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InsnClass {
    /// To the next instruction.
    Plain,
    /// Jcc, LOOP, JCXZ.
    ConditionalBranch,
    /// JMP near, direct or indirect.
    Jump,
    /// CALL near, direct or indirect.
    Call,
    /// RET near.
    Return,
    /// Far jump, call, return, software interrupt, IRET, system call or return.
    Far,
}

/// Instructions that a stepper must treat specially: they store or load TF,
/// change the privilege level, delay traps, stop, or are trapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// PUSHF: would save a TF that is not the guest's.
    Pushf,
    /// POPF: may set or clear TF.
    Popf,
    /// IRET: may set or clear TF and change the ring.
    Iret,
    /// SYSCALL: flags go to R11 and are masked.
    Syscall,
    /// SYSRET: flags come from R11.
    Sysret,
    Sysenter,
    Sysexit,
    /// INT n.
    SoftInt(u8),
    Int3,
    Int1,
    Into,
    /// MOV SS: traps wait for the next instruction.
    MovSs,
    /// POP SS: likewise.
    PopSs,
    Sti,
    Cli,
    Rdmsr,
    Wrmsr,
    Rdpmc,
    Hlt,
    /// A move to or from a debug register.
    MovDr,
    /// A move to or from a control register.
    MovCr,
    /// LIDT: the addresses of the handlers change.
    Lidt,
    /// Far JMP, CALL or RET: the ring may change.
    FarTransfer,
    /// A fence, SWAPGS, ENDBR and others that touch nothing which a hypervisor
    /// emulates: one that carries out the rest may let the processor do these, and
    /// lose the trap behind them.
    Unemulated,
    /// None of these.
    Other,
}

/// When a branch is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It is no branch.
    Never,
    Always,
    /// Jcc.
    If(ConditionCode),
    /// JCXZ and its like: the count is 0.
    IfZero(CountRegister),
    /// LOOP: the count, lowered by one, is not 0, and the condition holds.
    Loop(CountRegister, Option<ConditionCode>),
    /// INTO: OF is set.
    IfOverflow,
}

/// How much of RCX an instruction counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CountRegister {
    Cx,
    Ecx,
    Rcx,
}

impl CountRegister {
    pub(crate) fn of(self, rcx: u64) -> u64 {
        match self {
            CountRegister::Cx => rcx & 0xffff,
            CountRegister::Ecx => rcx & 0xffff_ffff,
            CountRegister::Rcx => rcx,
        }
    }

    pub(crate) fn of_address_size(bits: u32) -> Self {
        match bits {
            16 => CountRegister::Cx,
            32 => CountRegister::Ecx,
            _ => CountRegister::Rcx,
        }
    }
}
