//! What a step can lead to: where the instruction itself goes and with which
//! flags, and the first instruction of every handler that it can reach.

use instruction_facts::{
    Decoded, FaultSet, InsnClass, InsnFacts, InstructionInfoFactory, StepKind, decode,
};

use super::context::{CpuContext, Gate, MAX_INSTRUCTION, descriptor_base};
use super::{RFLAGS_AC, RFLAGS_TF};

const CR0_EM_TS: u64 = 1 << 2 | 1 << 3;
const CR0_AM: u64 = 1 << 18;

const DB: u8 = 1;
const BP: u8 = 3;
const OF: u8 = 4;
const DOUBLE_FAULT: u8 = 8;
const NOT_PRESENT: u8 = 11;

/// What stepping has to know of the vCPU beyond its registers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StepInputs {
    /// Target of SYSCALL (LSTAR).
    pub(crate) syscall_target: u64,
    /// Flags that SYSCALL clears (SFMASK).
    pub(crate) syscall_mask: u64,
    /// Target of SYSENTER (`IA32_SYSENTER_EIP`).
    pub(crate) sysenter_target: u64,
    /// Vector of the interrupt or NMI that the guest would take now.
    pub(crate) deliverable: Option<u8>,
    /// A #DB of the guest's own is queued for it.
    pub(crate) debug_queued: bool,
    /// Debug registers that the guest leaves free.
    pub(crate) slots: usize,
    /// The trap behind an instruction that KVM does not emulate may be lost.
    pub(crate) loses_traps: bool,
}

/// The first instruction of something that a step can lead to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Watched {
    pub(super) address: u64,
    pub(super) entry: Entry,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// Through the IDT.
    Event { vector: u8, gate: Gate },
    /// By SYSCALL or SYSENTER.
    SystemCall,
    /// By IRET or SYSRET: the flags come from the guest, without our TF.
    Return,
}

/// The instruction at `rip` of the guest's present code segment.
pub(super) fn fetch(
    context: &CpuContext<'_>,
    rip: u64,
    factory: &mut InstructionInfoFactory,
) -> Option<Decoded> {
    let mut bytes = [0; MAX_INSTRUCTION];
    let len = context.read_linear(context.code_base().wrapping_add(rip), &mut bytes);
    decode(&bytes[..len], context.bitness(), rip, factory).ok()
}

/// The instructions behind one that may be executed before its trap: MOV SS and POP
/// SS take one along, and so does what loses its trap.
pub(super) fn shadowed(
    context: &CpuContext<'_>,
    inputs: &StepInputs,
    facts: &InsnFacts,
    factory: &mut InstructionInfoFactory,
) -> Vec<Decoded> {
    /// Fences come in pairs.
    const MOST: usize = 4;
    let mut all: Vec<Decoded> = Vec::new();
    let mut last = facts;
    while all.len() < MOST
        && match last.kind {
            StepKind::MovSs | StepKind::PopSs => true,
            kind => inputs.loses_traps && kind == StepKind::Unemulated,
        }
        && let Some(next) = fetch(context, after(last), factory)
    {
        all.push(next);
        last = &all[all.len() - 1].facts;
    }
    all
}

pub(super) fn after(facts: &InsnFacts) -> u64 {
    facts.rip.wrapping_add(facts.len.into())
}

/// What the step leads to for certain, or by the guest's own wish.
pub(super) fn certain(
    context: &CpuContext<'_>,
    inputs: &StepInputs,
    facts: Option<&InsnFacts>,
) -> Vec<Watched> {
    let mut watched = Vec::new();
    if inputs.debug_queued {
        watch(context, [DB], &mut watched);
    } else if let Some(vector) = inputs.deliverable {
        watch(context, [vector], &mut watched);
    }
    let system_call = |address| Watched {
        address,
        entry: Entry::SystemCall,
    };
    match facts.map(|facts| facts.kind) {
        Some(StepKind::Syscall) => watched.push(system_call(inputs.syscall_target)),
        Some(StepKind::Sysenter) => watched.push(system_call(inputs.sysenter_target)),
        Some(StepKind::Iret | StepKind::Sysret) => {
            let target = facts.and_then(|facts| return_target(context, facts));
            watched.extend(target.map(|target| Watched {
                address: target.linear,
                entry: Entry::Return,
            }));
        }
        Some(StepKind::SoftInt(vector)) => watch(context, [vector], &mut watched),
        Some(StepKind::Int3) => watch(context, [BP], &mut watched),
        Some(StepKind::Int1) => watch(context, [DB], &mut watched),
        Some(StepKind::Into) => watch(context, [OF], &mut watched),
        _ => {}
    }
    watched
}

/// Adds the handlers of `vectors`. Where a gate is missing, delivery fails into
/// #NP or #DF, so theirs are watched instead.
pub(super) fn watch(
    context: &CpuContext<'_>,
    vectors: impl IntoIterator<Item = u8>,
    watched: &mut Vec<Watched>,
) {
    let mut add = |vector: u8| {
        let gate = context.gate(vector);
        if let Some(gate) = gate {
            let known = watched.iter().any(|one| one.address == gate.handler);
            if !known {
                watched.push(Watched {
                    address: gate.handler,
                    entry: Entry::Event { vector, gate },
                });
            }
        }
        gate.is_some()
    };
    for vector in vectors {
        if !add(vector) {
            add(NOT_PRESENT);
            add(DOUBLE_FAULT);
        }
    }
}

/// The vectors that an instruction can raise in the guest's present state.
pub(super) fn possible(context: &CpuContext<'_>, facts: Option<&InsnFacts>) -> FaultSet {
    let Some(facts) = facts else {
        // Fetching or decoding it faults.
        return FaultSet::PF | FaultSet::UD | FaultSet::GP;
    };
    // Its page may be gone by the time it is fetched.
    let mut faults = facts.may_fault | FaultSet::PF;
    let alignment = context.cpl() == 3
        && context.sregs.cr0 & CR0_AM != 0
        && context.regs.rflags & RFLAGS_AC != 0;
    if !alignment {
        faults -= FaultSet::AC;
    }
    if context.sregs.cr0 & CR0_EM_TS == 0 {
        faults -= FaultSet::NM;
    }
    if context.bitness() == 64 {
        if facts.kind != StepKind::FarTransfer {
            // No task switches in 64-bit mode; the TSS is read for RSP0 alone.
            faults -= FaultSet::TS;
        }
        // An indexed operand of the stack segment may lie anywhere.
        let frame = [context.regs.rsp, context.regs.rbp];
        if frame.into_iter().all(canonical_with_room)
            && facts.class != InsnClass::Far
            && !facts.stack_operand
        {
            faults -= FaultSet::SS;
        }
        if facts.kind == StepKind::Iret || matches!(facts.kind, StepKind::SoftInt(_)) {
            // Its selectors' descriptors are present in any guest that got here
            // through them; #GP and #PF stay watched.
            faults -= FaultSet::NP;
        }
    }
    faults
}

/// True if a stack or frame pointer is far from the edges of the canonical halves.
fn canonical_with_room(rsp: u64) -> bool {
    const ROOM: i64 = 1 << 46;
    let rsp = rsp.cast_signed();
    (-ROOM..ROOM).contains(&rsp)
}

/// TF as POPF, IRET or SYSRET will load it; `None` for other instructions, or
/// where the image cannot be read (the instruction then faults).
pub(super) fn loaded_tf(context: &CpuContext<'_>, facts: &InsnFacts) -> Option<bool> {
    let flags = match facts.kind {
        StepKind::Sysret => context.regs.r11,
        StepKind::Popf | StepKind::Iret => {
            let at = context.sregs.ss.base.wrapping_add(context.regs.rsp);
            context.word::<2>(at.wrapping_add(flags_offset(facts)?))?
        }
        _ => return None,
    };
    Some(flags & RFLAGS_TF != 0)
}

/// Where an IRET, SYSRET, SYSEXIT or far RET goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReturnTarget {
    /// In its code segment.
    pub(super) rip: u64,
    /// With the segment's base.
    pub(super) linear: u64,
    /// Privilege level there.
    pub(super) cpl: u8,
}

/// Where the instruction returns to; `None` for other instructions, or where
/// its frame cannot be read.
pub(super) fn return_target(context: &CpuContext<'_>, facts: &InsnFacts) -> Option<ReturnTarget> {
    let (rip, cs) = match facts.kind {
        StepKind::Sysret => return Some(to_cpl_3(context.regs.rcx, facts)),
        StepKind::Sysexit => return Some(to_cpl_3(context.regs.rdx, facts)),
        // A far RET pops what an IRET pops first; other far transfers have no
        // frame.
        StepKind::Iret | StepKind::FarTransfer => {
            let at = context.sregs.ss.base.wrapping_add(context.regs.rsp);
            let selector = at.wrapping_add(facts.word.into());
            let rip = match facts.word {
                2 => context.word::<2>(at)?,
                4 => context.word::<4>(at)?,
                8 => context.word::<8>(at)?,
                _ => return None,
            };
            (rip, context.word::<2>(selector)?)
        }
        _ => return None,
    };
    let selector = u16::try_from(cs & 0xffff).unwrap_or(0);
    let descriptor = context.descriptor(selector)?;
    let long = context.long_mode() && descriptor >> 53 & 1 != 0;
    let base = if long { 0 } else { descriptor_base(descriptor) };
    Some(ReturnTarget {
        rip,
        linear: base.wrapping_add(rip),
        cpl: u8::try_from(cs & 3).unwrap_or(0),
    })
}

/// Where a SYSRET or SYSEXIT goes to, with this register: all of it in 64-bit mode, else its
/// lower half.
fn to_cpl_3(register: u64, facts: &InsnFacts) -> ReturnTarget {
    let rip = match facts.word {
        8 => register,
        _ => register & 0xffff_ffff,
    };
    ReturnTarget {
        rip,
        linear: rip,
        cpl: 3,
    }
}

/// How far above the stack pointer the flags lie.
fn flags_offset(facts: &InsnFacts) -> Option<u64> {
    match (facts.kind, facts.word) {
        (_, 0) => None,
        (StepKind::Popf, _) => Some(0),
        (StepKind::Iret, word) => Some(2 * u64::from(word)),
        _ => None,
    }
}
