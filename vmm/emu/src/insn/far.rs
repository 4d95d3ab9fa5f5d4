//! Far jumps, calls and returns, and IRET.

use iced_x86::{Code, Instruction, Mnemonic, OpKind};
use instruction_facts::is_canonical;

use super::core::{Core, Exec, Trap, Width};
use super::interrupt::{push_frame, task_stack};
use super::operand::{below, by_width, drop_stack, linear, peek, set_stack};
use super::segment::{self, Descriptor, is_real, stack};
use crate::entry::Entry;
use crate::state::{AC, DF, ID, IF, IOPL, NT, RF, Seg, Segment, TF, VM};
use crate::stop::Missing;

pub(super) fn is_far(insn: &Instruction) -> bool {
    matches!(insn.op0_kind(), OpKind::FarBranch16 | OpKind::FarBranch32)
        || insn.is_jmp_far_indirect()
        || insn.is_call_far_indirect()
}

/// Selector, offset and operand size of a far jump or call.
fn operand(core: &mut Core, insn: &Instruction) -> Exec<(u16, u64, u32)> {
    match insn.op0_kind() {
        OpKind::FarBranch16 => {
            let offset = u64::from(insn.far_branch16());
            Ok((insn.far_branch_selector(), offset, 16))
        }
        OpKind::FarBranch32 => {
            let offset = u64::from(insn.far_branch32());
            Ok((insn.far_branch_selector(), offset, 32))
        }
        _ => {
            let width = insn.memory_size().size() as u32 * 8 - 16;
            let at = linear(core, insn, false)?;
            let offset = by_width!(width, W => core.load::<W>(at.at, at.seg).map(W::wide))?;
            let behind = core.beyond(at.at, width / 8);
            let selector = core.load::<u16>(behind, at.seg)?;
            Ok((selector, offset, width))
        }
    }
}

/// Whether an address may be RIP in a code segment.
fn check_target(core: &mut Core, code: Segment, target: u64) -> Exec {
    let inside = if core.state.is_long() && code.is_long() {
        is_canonical(target)
    } else {
        target <= u64::from(code.limit)
    };
    if inside { Ok(()) } else { core.gp(0) }
}

/// A descriptor of code that may run in this mode.
fn code_descriptor(core: &mut Core, selector: u16) -> Exec<Descriptor> {
    if selector & !3 == 0 {
        return core.gp(0);
    }
    let found = segment::find(core, selector, 8)?;
    if !found.is_code() || (core.state.is_long() && found.is_long() && found.is_big()) {
        return core.gp(found.error());
    }
    Ok(found)
}

/// The gate that a far jump or call leads to.
fn gate(core: &mut Core, selector: u16) -> Exec<Option<Descriptor>> {
    if selector & !3 == 0 {
        return core.gp(0);
    }
    let found = segment::find(core, selector, 8)?;
    if found.is_segment() {
        return Ok(None);
    }
    match (core.state.is_long(), found.kind()) {
        (true, 12) => segment::find(core, selector, 16).map(Some),
        (false, 4 | 12) => Ok(Some(found)),
        (false, 1 | 5 | 9) => core.missing(Missing::TaskGate),
        _ => Ok(None),
    }
}

/// Through a call gate, to code of more privilege if it is called (SDM vol. 3A, 6.8.3). In long
/// mode it leads to 64-bit code.
fn through(core: &mut Core, gate: Descriptor, is_call: bool) -> Exec {
    let cpl = core.state.cpl();
    let rpl = (gate.selector & 3) as u8;
    if gate.dpl() < cpl.max(rpl) {
        return core.gp(gate.error());
    }
    if !gate.is_present() {
        return core.raise(11, Some(gate.error()));
    }
    let long = core.state.is_long();
    let high = if long {
        segment::high_half(core, gate)?
    } else {
        0
    };
    if high >> 40 & 0x1f != 0 {
        return core.gp(gate.error());
    }
    let width = match (long, gate.kind() & 8 != 0) {
        (true, _) => 64,
        (false, true) => 32,
        (false, false) => 16,
    };
    let target = gate.low & 0xffff | gate.low >> 32 & 0xffff_0000 | high << 32;
    let target = target & (u64::MAX >> (64 - width));
    let selector = (gate.low >> 16) as u16;
    let found = code_descriptor(core, selector)?;
    let inward = !found.is_conforming() && found.dpl() < cpl;
    if found.dpl() > cpl || long && !found.is_long() || inward && !is_call {
        return core.gp(found.error());
    }
    if !found.is_present() {
        return core.raise(11, Some(found.error()));
    }
    check_target(core, found.segment(), target)?;
    core.entry = Entry::Other;
    let new_cpl = if inward { found.dpl() } else { cpl };
    let mut code = segment::accessed(core, found)?;
    let old = core.state.segment(Seg::Cs).selector;
    match (inward, long) {
        (true, true) => inner_frame(core, new_cpl)?,
        (true, false) => {
            let count = (gate.low >> 32 & 31) as u32;
            let mut frame = Vec::new();
            for word in (0..count).rev() {
                frame.push(peek(core, word * width / 8, width)?);
            }
            frame.extend([u64::from(old), core.state.rip]);
            push_frame(core, Some(new_cpl), width, &frame)?;
        }
        (false, _) if is_call => frame(core, width, old, core.state.rip)?,
        (false, _) => {}
    }
    code.selector = selector & !3 | u16::from(new_cpl);
    core.load_code(code);
    core.state.rip = target;
    core.refresh();
    Err(Trap::Leave)
}

/// The return address on the stack of more privilege, which becomes the stack.
fn inner_frame(core: &mut Core, cpl: u8) -> Exec {
    let mut top = task_stack(core, 4 + 8 * u64::from(cpl))?;
    if !is_canonical(top) {
        return core.raise(12, Some(0));
    }
    let state = &core.state;
    let frame = [
        u64::from(state.segment(Seg::Ss).selector),
        state.r[4],
        u64::from(state.segment(Seg::Cs).selector),
        state.rip,
    ];
    for value in frame {
        top = top.wrapping_sub(8);
        core.stack_store(cpl, top, value)?;
    }
    core.state
        .set_segment(Seg::Ss, segment::null_stack(cpl, u16::from(cpl)));
    core.state.r[4] = top;
    Ok(())
}

/// Whether a far branch of real mode may lead there: CS keeps its limit.
fn real_target(core: &mut Core, target: u64) -> Exec {
    if target > u64::from(core.state.segment(Seg::Cs).limit) {
        return core.gp(0);
    }
    Ok(())
}

/// JMP and CALL to another code segment of the same privilege.
pub(super) fn transfer(core: &mut Core, insn: &Instruction) -> Exec {
    let (selector, target, width) = operand(core, insn)?;
    let is_call = insn.mnemonic() == Mnemonic::Call;
    let old = core.state.segment(Seg::Cs).selector;
    let back = core.state.rip;
    if is_real(core) {
        real_target(core, target)?;
        if is_call {
            frame(core, width, old, back)?;
        }
        segment::real_code(core, selector);
        core.state.rip = target;
        return Err(Trap::Leave);
    }
    let cpl = core.state.cpl();
    if let Some(gate) = gate(core, selector)? {
        return through(core, gate, is_call);
    }
    let found = code_descriptor(core, selector)?;
    let rpl = (selector & 3) as u8;
    let allowed = if found.is_conforming() {
        found.dpl() <= cpl
    } else {
        rpl <= cpl && found.dpl() == cpl
    };
    if !allowed {
        return core.gp(found.error());
    }
    if !found.is_present() {
        return core.raise(11, Some(found.error()));
    }
    check_target(core, found.segment(), target)?;
    let mut code = segment::accessed(core, found)?;
    if is_call {
        frame(core, width, old, back)?;
    }
    code.selector = selector & !3 | u16::from(cpl);
    core.load_code(code);
    core.state.rip = target;
    core.refresh();
    Err(Trap::Leave)
}

/// The return address of a far call.
fn frame(core: &mut Core, width: u32, selector: u16, back: u64) -> Exec {
    let bytes = width / 8;
    below(core, bytes, width, u64::from(selector))?;
    below(core, 2 * bytes, width, back)?;
    let top = super::operand::stack_at(core, -i64::from(2 * bytes));
    set_stack(core, top);
    Ok(())
}

/// Who returns to `selector`: checked as the privilege of the code there allows.
fn returned_code(core: &mut Core, selector: u16) -> Exec<(Descriptor, u8)> {
    let cpl = core.state.cpl();
    let rpl = (selector & 3) as u8;
    let found = code_descriptor(core, selector)?;
    let allowed = if found.is_conforming() {
        found.dpl() <= rpl
    } else {
        found.dpl() == rpl
    };
    if rpl < cpl || !allowed {
        return core.gp(found.error());
    }
    if !found.is_present() {
        return core.raise(11, Some(found.error()));
    }
    Ok((found, rpl))
}

pub(super) fn far_return(core: &mut Core, insn: &Instruction) -> Exec {
    let width = match insn.code() {
        Code::Retfw | Code::Retfw_imm16 => 16,
        Code::Retfd | Code::Retfd_imm16 => 32,
        _ => 64,
    };
    let bytes = width / 8;
    let more = if insn.op_count() > 0 {
        u32::from(insn.immediate16())
    } else {
        0
    };
    let target = peek(core, 0, width)?;
    let selector = peek(core, bytes, width)? as u16;
    if is_real(core) {
        real_target(core, target)?;
        drop_stack(core, 2 * bytes + more);
        segment::real_code(core, selector);
        core.state.rip = target;
        return Err(Trap::Leave);
    }
    let (found, cpl) = returned_code(core, selector)?;
    let outward = cpl > core.state.cpl();
    if !outward {
        check_target(core, found.segment(), target)?;
        let code = segment::accessed(core, found)?;
        drop_stack(core, 2 * bytes + more);
        core.load_code(code);
    } else {
        let pointer = peek(core, 2 * bytes + more, width)?;
        let stack_selector = peek(core, 3 * bytes + more, width)? as u16;
        let long = core.state.is_long() && found.is_long();
        let stack = stack(core, stack_selector, cpl, long, 13)?;
        // SDM vol. 2B, RET: the stack comes first.
        check_target(core, found.segment(), target)?;
        let code = segment::accessed(core, found)?;
        core.load_code(code);
        core.state.set_segment(Seg::Ss, stack);
        set_stack(core, pointer.wrapping_add(u64::from(more)));
        segment::drop_inner(core, cpl);
    }
    core.state.rip = target;
    core.refresh();
    Err(Trap::Leave)
}

/// IRET. NMIs come again also if it faults (SDM vol. 3A, 7.7.1: its execution is what counts).
pub(super) fn interrupt_return(core: &mut Core, insn: &Instruction) -> Exec {
    let done = to_interrupted(core, insn);
    if matches!(done, Err(Trap::Leave | Trap::Fault)) {
        core.state.nmi_blocked = false;
    }
    done
}

fn to_interrupted(core: &mut Core, insn: &Instruction) -> Exec {
    let width = match insn.mnemonic() {
        Mnemonic::Iret => 16,
        Mnemonic::Iretd => 32,
        _ => 64,
    };
    let bytes = width / 8;
    if core.state.system_flags & VM != 0 {
        return core.missing(Missing::Virtual8086);
    }
    if is_real(core) {
        let target = peek(core, 0, width)?;
        let selector = peek(core, bytes, width)? as u16;
        let flags = peek(core, 2 * bytes, width)?;
        real_target(core, target)?;
        drop_stack(core, 3 * bytes);
        segment::real_code(core, selector);
        core.state.rip = target;
        set_flags(core, flags, width, 0);
        return Err(Trap::Leave);
    }
    if core.state.system_flags & NT != 0 {
        if core.state.is_long() {
            return core.gp(0);
        }
        return core.missing(Missing::TaskGate);
    }
    let target = peek(core, 0, width)?;
    let selector = peek(core, bytes, width)? as u16;
    let flags = peek(core, 2 * bytes, width)?;
    if flags & VM != 0 && !core.state.is_long() && core.state.cpl() == 0 && width == 32 {
        return core.missing(Missing::Virtual8086);
    }
    let was = core.state.cpl();
    let (found, cpl) = returned_code(core, selector)?;
    // 64-bit code gets its stack from the frame in any case.
    let whole = core.state.bits() == 64 || cpl > was;
    let mut new_stack = None;
    if whole {
        let pointer = peek(core, 3 * bytes, width)?;
        let stack_selector = peek(core, 4 * bytes, width)? as u16;
        let long = core.state.is_long() && found.is_long();
        let segment = stack(core, stack_selector, cpl, long, 13)?;
        new_stack = Some((segment, pointer));
    }
    check_target(core, found.segment(), target)?;
    let code = segment::accessed(core, found)?;
    core.load_code(code);
    match new_stack {
        Some((segment, pointer)) => {
            core.state.set_segment(Seg::Ss, segment);
            set_stack(core, pointer);
        }
        None => drop_stack(core, 3 * bytes),
    }
    core.state.rip = target;
    set_flags(core, flags, width, was);
    if cpl > was {
        segment::drop_inner(core, cpl);
    }
    core.refresh();
    Err(Trap::Leave)
}

/// RFLAGS from a frame, as far as code of that privilege may set them.
fn set_flags(core: &mut Core, flags: u64, width: u32, cpl: u8) {
    let old = core.state.rflags();
    let mut open = crate::flags::STATUS | TF | DF | NT;
    if width > 16 {
        open |= RF | AC | ID;
    }
    if u64::from(cpl) <= (old & IOPL) >> 12 {
        open |= IF;
    }
    if cpl == 0 {
        open |= IOPL;
    }
    core.state.set_rflags(old & !open | flags & open);
}
