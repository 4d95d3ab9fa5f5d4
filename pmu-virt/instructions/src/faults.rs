//! Vectors that an instruction can raise.

use bitflags::bitflags;
use iced_x86::{CpuidFeature, Instruction, Mnemonic, OpKind};

use crate::classify::is_64_bit;
use crate::kinds::{InsnClass, StepKind};
use crate::memory::Accesses;

bitflags! {
    /// A set of exception vectors; bit n is vector n.
    ///
    /// For an instruction it is an upper bound by kind of instruction: what
    /// the guest's control registers rule out (#AC without CR0.AM or outside
    /// CPL 3, #NM without CR0.TS, #XM with all SIMD exceptions masked) is the
    /// caller's to strike out. Faults of the fetch itself are not included.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct FaultSet: u32 {
        /// #DE, divide error.
        const DE = 1 << 0;
        /// #DB, debug.
        const DB = 1 << 1;
        /// #BP, breakpoint.
        const BP = 1 << 3;
        /// #OF, overflow.
        const OF = 1 << 4;
        /// #BR, BOUND range exceeded.
        const BR = 1 << 5;
        /// #UD, invalid opcode.
        const UD = 1 << 6;
        /// #NM, device not available.
        const NM = 1 << 7;
        /// #TS, invalid TSS.
        const TS = 1 << 10;
        /// #NP, segment not present.
        const NP = 1 << 11;
        /// #SS, stack segment fault.
        const SS = 1 << 12;
        /// #GP, general protection.
        const GP = 1 << 13;
        /// #PF, page fault.
        const PF = 1 << 14;
        /// #MF, x87 floating-point error.
        const MF = 1 << 16;
        /// #AC, alignment check.
        const AC = 1 << 17;
        /// #XM, SIMD floating-point exception.
        const XM = 1 << 19;
    }
}

impl FaultSet {
    /// The vectors in the set, ascending.
    pub fn vectors(self) -> impl Iterator<Item = u8> {
        (0u8..32).filter(move |vector| self.bits() & (1 << vector) != 0)
    }
}

/// Loading a segment or entering another one through descriptors.
const DESCRIPTORS: FaultSet = FaultSet::GP
    .union(FaultSet::NP)
    .union(FaultSet::SS)
    .union(FaultSet::TS)
    .union(FaultSet::PF);

/// Whether the exception with this vector pushes an error code (SDM vol. 3A, table 7-1).
#[must_use]
pub fn pushes_error_code(vector: u8) -> bool {
    matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30)
}

/// The vectors that `insn` can raise in its mode.
pub(crate) fn of(
    insn: &Instruction,
    accesses: &Accesses,
    class: InsnClass,
    kind: StepKind,
) -> FaultSet {
    of_memory(accesses)
        | of_control(insn, class, kind)
        | of_segments(insn)
        | of_features(insn)
        | of_mnemonic(insn)
}

fn of_memory(accesses: &Accesses) -> FaultSet {
    let mut faults = FaultSet::empty();
    if accesses.stack {
        faults |= FaultSet::SS | FaultSet::PF | FaultSet::AC;
    }
    if accesses.data {
        faults |= FaultSet::GP | FaultSet::PF | FaultSet::AC;
    }
    faults
}

fn of_control(insn: &Instruction, class: InsnClass, kind: StepKind) -> FaultSet {
    let of_kind = match kind {
        StepKind::Syscall => FaultSet::UD,
        StepKind::Sysret | StepKind::Sysenter | StepKind::Sysexit => FaultSet::UD | FaultSet::GP,
        StepKind::Int3 => DESCRIPTORS | FaultSet::BP,
        StepKind::Int1 => DESCRIPTORS | FaultSet::DB,
        StepKind::Into => DESCRIPTORS | FaultSet::OF,
        StepKind::Iret | StepKind::SoftInt(_) | StepKind::FarTransfer => DESCRIPTORS,
        StepKind::MovDr => FaultSet::DB | FaultSet::GP | FaultSet::UD,
        StepKind::Pushf
        | StepKind::Popf
        | StepKind::Sti
        | StepKind::Cli
        | StepKind::MovCr
        | StepKind::Lidt
        | StepKind::Rdmsr
        | StepKind::Wrmsr
        | StepKind::Rdpmc
        | StepKind::Hlt => FaultSet::GP,
        StepKind::MovSs | StepKind::PopSs | StepKind::Unemulated | StepKind::Other => {
            FaultSet::empty()
        }
    };
    // A direct near branch in 64-bit mode whose target is canonical cannot
    // fault by itself; elsewhere limits and non-canonical targets do.
    let direct = matches!(insn.op0_kind(), OpKind::NearBranch64)
        && is_64_bit(insn)
        && is_canonical(insn.near_branch_target());
    let of_class = match class {
        InsnClass::ConditionalBranch | InsnClass::Jump | InsnClass::Call if direct => {
            FaultSet::empty()
        }
        InsnClass::Plain | InsnClass::Far => FaultSet::empty(),
        _ => FaultSet::GP,
    };
    let privileged = if insn.is_privileged() {
        FaultSet::GP
    } else {
        FaultSet::empty()
    };
    of_kind | of_class | privileged
}

/// Whether an address is canonical with 48 bits, the strictest case.
#[must_use]
pub const fn is_canonical(address: u64) -> bool {
    let high = address >> 47;
    high == 0 || high == 0x1_ffff
}

fn of_segments(insn: &Instruction) -> FaultSet {
    let loads_far_pointer = matches!(
        insn.mnemonic(),
        Mnemonic::Lds | Mnemonic::Les | Mnemonic::Lfs | Mnemonic::Lgs | Mnemonic::Lss
    );
    let loads_segment = matches!(insn.mnemonic(), Mnemonic::Mov | Mnemonic::Pop)
        && insn.op0_register().is_segment_register();
    if loads_far_pointer || loads_segment {
        FaultSet::GP | FaultSet::NP | FaultSet::SS | FaultSet::PF
    } else {
        FaultSet::empty()
    }
}

/// What the unit that executes the instruction can raise.
fn of_features(insn: &Instruction) -> FaultSet {
    let mut faults = FaultSet::empty();
    for feature in insn.cpuid_features() {
        faults |= match feature {
            CpuidFeature::INTEL8086
            | CpuidFeature::INTEL8086_ONLY
            | CpuidFeature::INTEL186
            | CpuidFeature::INTEL286
            | CpuidFeature::INTEL286_ONLY
            | CpuidFeature::INTEL386
            | CpuidFeature::INTEL386_ONLY
            | CpuidFeature::INTEL486
            | CpuidFeature::X64
            | CpuidFeature::CMOV
            | CpuidFeature::CPUID
            | CpuidFeature::CX8
            | CpuidFeature::TSC
            | CpuidFeature::MSR
            | CpuidFeature::MULTIBYTENOP
            | CpuidFeature::PAUSE
            | CpuidFeature::PREFETCHW
            | CpuidFeature::RDPMC
            | CpuidFeature::CLFSH
            | CpuidFeature::SEP
            | CpuidFeature::SYSCALL => FaultSet::empty(),
            CpuidFeature::FPU
            | CpuidFeature::FPU287
            | CpuidFeature::FPU387
            | CpuidFeature::FPU387SL_ONLY => FaultSet::NM | FaultSet::MF,
            CpuidFeature::MMX => FaultSet::NM | FaultSet::MF | FaultSet::UD,
            _ if is_vector(insn) => FaultSet::NM | FaultSet::UD | FaultSet::XM,
            CpuidFeature::SSE | CpuidFeature::SSE2 | CpuidFeature::FXSR | CpuidFeature::XSAVE => {
                FaultSet::NM | FaultSet::UD
            }
            // Anything newer may be switched off.
            _ => FaultSet::UD,
        };
    }
    faults
}

fn is_vector(insn: &Instruction) -> bool {
    (0..insn.op_count()).any(|n| insn.op_register(n).is_vector_register())
}

fn of_mnemonic(insn: &Instruction) -> FaultSet {
    match insn.mnemonic() {
        Mnemonic::Div | Mnemonic::Idiv | Mnemonic::Aam => FaultSet::DE,
        Mnemonic::Bound => FaultSet::BR,
        Mnemonic::Ud0 | Mnemonic::Ud1 | Mnemonic::Ud2 => FaultSet::UD,
        Mnemonic::Wait => FaultSet::NM | FaultSet::MF,
        // The I/O permission map lies in memory.
        Mnemonic::In
        | Mnemonic::Out
        | Mnemonic::Insb
        | Mnemonic::Insw
        | Mnemonic::Insd
        | Mnemonic::Outsb
        | Mnemonic::Outsw
        | Mnemonic::Outsd => FaultSet::GP | FaultSet::PF,
        // CR4.TSD, and CPUID faulting.
        Mnemonic::Rdtsc | Mnemonic::Rdtscp | Mnemonic::Cpuid => FaultSet::GP,
        Mnemonic::Ltr | Mnemonic::Lldt => DESCRIPTORS,
        // Descriptors read on the way.
        Mnemonic::Lar | Mnemonic::Lsl | Mnemonic::Verr | Mnemonic::Verw => FaultSet::PF,
        Mnemonic::Xsetbv | Mnemonic::Xgetbv | Mnemonic::Swapgs => FaultSet::GP | FaultSet::UD,
        Mnemonic::Wrfsbase | Mnemonic::Wrgsbase => FaultSet::GP | FaultSet::UD,
        _ => FaultSet::empty(),
    }
}
