//! Exceptions and interrupts (SDM vol. 3A, chapter 6).

use instruction_facts::is_canonical;

use super::core::{Core, Exec, Fault, Trap, Width};
use super::segment::{self, null_stack};
use crate::entry::Entry;
use crate::events::DELIVERIES;
use crate::state::{AC, DR7_GD, IF, NT, RF, Seg, TF, VM};
use crate::stop::Missing;

/// What is delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// An exception; RIP is at the instruction.
    Fault(Fault),
    /// #DB of a step or of data, behind an instruction, or of a breakpoint before one: RF is
    /// pushed as it was (SDM vol. 3B, 19.3.1.1).
    Debug,
    /// From outside.
    Interrupt(u8),
    Nmi,
    /// INT n, INT3, INTO: the gate's privilege is checked.
    Software(u8),
    /// INT1: it is not.
    Int1,
}

impl Delivery {
    fn vector(self) -> u8 {
        match self {
            Delivery::Fault(fault) => fault.vector,
            Delivery::Interrupt(vector) | Delivery::Software(vector) => vector,
            Delivery::Nmi => 2,
            Delivery::Debug | Delivery::Int1 => 1,
        }
    }

    /// #DB, for whatever reason.
    fn is_debug(self) -> bool {
        self.vector() == 1 && !matches!(self, Delivery::Software(_) | Delivery::Interrupt(_))
    }

    /// The bit of error codes which says that no instruction of the program asked for it.
    fn external(self) -> u32 {
        u32::from(!matches!(self, Delivery::Software(_)))
    }

    fn entry(self) -> Entry {
        match self {
            Delivery::Fault(_) | Delivery::Debug => Entry::Exception(self.vector()),
            Delivery::Interrupt(_) | Delivery::Nmi => Entry::Interrupt(self.vector()),
            Delivery::Software(_) | Delivery::Int1 => Entry::Software(self.vector()),
        }
    }

    fn code(self) -> Option<u32> {
        match self {
            Delivery::Fault(fault) => fault.code,
            _ => None,
        }
    }
}

/// A gate of the IDT in long mode.
struct Gate {
    selector: u16,
    offset: u64,
    stack: u64,
    masks: bool,
}

fn gate(core: &mut Core, delivery: Delivery) -> Exec<Gate> {
    let vector = u32::from(delivery.vector());
    let error = vector * 8 + 2;
    if vector * 16 + 15 > u32::from(core.state.idtr.limit) {
        return core.gp(error);
    }
    let at = core.state.idtr.base.wrapping_add(u64::from(vector) * 16);
    let low = core.system_load::<u64>(at)?;
    let high = core.system_load::<u64>(at.wrapping_add(8))?;
    let kind = low >> 40 & 0x1f;
    if !matches!(kind, 0xe | 0xf) {
        return core.gp(error);
    }
    let dpl = (low >> 45 & 3) as u8;
    if matches!(delivery, Delivery::Software(_)) && dpl < core.state.cpl() {
        return core.gp(error);
    }
    if low >> 47 & 1 == 0 {
        return core.raise(11, Some(error));
    }
    Ok(Gate {
        selector: (low >> 16) as u16,
        offset: low & 0xffff | low >> 32 & 0xffff_0000 | high << 32,
        stack: low >> 32 & 7,
        masks: kind == 0xe,
    })
}

/// A stack pointer out of the TSS.
pub(super) fn task_stack(core: &mut Core, offset: u64) -> Exec<u64> {
    let task = core.state.segment(Seg::Tr);
    if offset + 7 > u64::from(task.limit) {
        return core.raise(10, Some(u32::from(task.selector & !3)));
    }
    core.system_load::<u64>(task.base.wrapping_add(offset))
}

/// Delivers: on success RIP is at the handler. A fault on the way is another exception, of
/// which nothing has come yet.
pub(crate) fn deliver(core: &mut Core, delivery: Delivery) -> Exec {
    if let Delivery::Fault(Fault { cr2: Some(cr2), .. }) = delivery {
        core.state.cr2 = cr2;
    }
    if segment::is_real(core) {
        deliver_real(core, delivery)?;
    } else {
        let delivered = if core.state.is_long() {
            deliver_long(core, delivery)
        } else {
            deliver_protected(core, delivery)
        };
        if delivered == Err(Trap::Fault) && matches!(core.fault.vector, 10..=13) {
            core.fault.code = core.fault.code.map(|code| code | delivery.external());
        }
        delivered?;
    }
    core.entry = delivery.entry();
    if delivery.is_debug() {
        core.state.dr7 &= !DR7_GD;
    }
    match delivery {
        Delivery::Nmi => core.state.nmi_blocked = true,
        Delivery::Software(_) | Delivery::Int1 => return Ok(()),
        _ => {}
    }
    core.count(DELIVERIES);
    Ok(())
}

/// In long mode; the bit EXT of an error code is the caller's.
fn deliver_long(core: &mut Core, delivery: Delivery) -> Exec {
    let gate = gate(core, delivery)?;
    if gate.selector & !3 == 0 {
        return core.gp(0);
    }
    let found = segment::find(core, gate.selector, 8)?;
    let cpl = core.state.cpl();
    let error = found.error();
    if !found.is_code() || found.dpl() > cpl || !found.is_long() || found.is_big() {
        return core.gp(error);
    }
    if !found.is_present() {
        return core.raise(11, Some(error));
    }
    let new_cpl = if found.is_conforming() {
        cpl
    } else {
        found.dpl()
    };
    let pointer = if gate.stack != 0 {
        task_stack(core, 0x1c + 8 * gate.stack)?
    } else if new_cpl < cpl {
        task_stack(core, 4 + 8 * u64::from(new_cpl))?
    } else {
        core.state.r[4]
    };
    if !is_canonical(pointer) {
        return core.raise(12, Some(0));
    }
    if !is_canonical(gate.offset) {
        return core.gp(0);
    }
    let mut flags = core.state.rflags();
    if matches!(delivery, Delivery::Fault(_)) {
        flags |= RF;
    }
    let state = &core.state;
    let frame = [
        u64::from(state.segment(Seg::Ss).selector),
        state.r[4],
        flags,
        u64::from(state.segment(Seg::Cs).selector),
        state.rip,
    ];
    let mut top = pointer & !15;
    let code = delivery.code().map(u64::from);
    for value in frame.into_iter().chain(code) {
        top = top.wrapping_sub(8);
        core.stack_store(new_cpl, top, value)?;
    }
    let mut code = segment::accessed(core, found)?;
    code.selector = gate.selector & !3 | u16::from(new_cpl);
    core.load_code(code);
    if new_cpl != cpl {
        let null = null_stack(new_cpl, u16::from(new_cpl));
        core.state.set_segment(Seg::Ss, null);
    }
    core.state.r[4] = top;
    core.state.rip = gate.offset;
    core.state.system_flags &= !(TF | NT | RF | VM);
    if gate.masks {
        core.state.system_flags &= !IF;
    }
    core.refresh();
    Ok(())
}

/// In protected mode without long mode, through gates of 16 and 32 bits (SDM vol. 3A, 6.12.1).
fn deliver_protected(core: &mut Core, delivery: Delivery) -> Exec {
    let vector = u32::from(delivery.vector());
    let error = vector * 8 + 2;
    if vector * 8 + 7 > u32::from(core.state.idtr.limit) {
        return core.gp(error);
    }
    let at = core.state.idtr.base.wrapping_add(u64::from(vector) * 8);
    let low = core.system_load::<u64>(at)?;
    let kind = low >> 40 & 0x1f;
    let cpl = core.state.cpl();
    let closed = matches!(delivery, Delivery::Software(_)) && ((low >> 45 & 3) as u8) < cpl;
    if !matches!(kind, 5..=7 | 14 | 15) || closed {
        return core.gp(error);
    }
    if low >> 47 & 1 == 0 {
        return core.raise(11, Some(error));
    }
    if kind == 5 {
        return core.missing(Missing::TaskGate);
    }
    let width = if kind & 8 != 0 { 32 } else { 16 };
    let selector = (low >> 16) as u16;
    if selector & !3 == 0 {
        return core.gp(0);
    }
    let found = segment::find(core, selector, 8)?;
    if !found.is_code() || found.dpl() > cpl {
        return core.gp(found.error());
    }
    if !found.is_present() {
        return core.raise(11, Some(found.error()));
    }
    let target = (low & 0xffff | low >> 32 & 0xffff_0000) & (u64::MAX >> (64 - width));
    if target > u64::from(found.segment().limit) {
        return core.gp(0);
    }
    let inward = !found.is_conforming() && found.dpl() < cpl;
    let new_cpl = if inward { found.dpl() } else { cpl };
    let mut flags = core.state.rflags();
    if matches!(delivery, Delivery::Fault(_)) {
        flags |= RF;
    }
    let cs = u64::from(core.state.segment(Seg::Cs).selector);
    let frame = [Some(flags), Some(cs), Some(core.state.rip)];
    let frame = frame.into_iter().chain([delivery.code().map(u64::from)]);
    let frame: Vec<u64> = frame.flatten().collect();
    let mut code = segment::accessed(core, found)?;
    let inner = inward.then_some(new_cpl);
    match delivery {
        // An instruction, which comes again when a device has answered.
        Delivery::Software(_) | Delivery::Int1 => push_frame(core, inner, width, &frame)?,
        _ => core.internally(|core| push_frame(core, inner, width, &frame))?,
    }
    code.selector = selector & !3 | u16::from(new_cpl);
    core.load_code(code);
    core.state.rip = target;
    core.state.system_flags &= !(TF | NT | RF | VM);
    if kind & 1 == 0 {
        core.state.system_flags &= !IF;
    }
    core.refresh();
    Ok(())
}

/// Pushes a frame onto the stack as it is, or onto that of more privilege, which becomes the stack
/// and has the old one's address first. All of it is pushed or nothing.
pub(super) fn push_frame(core: &mut Core, inner: Option<u8>, width: u32, frame: &[u64]) -> Exec {
    let (old, pointer) = (core.state.segment(Seg::Ss), core.state.r[4]);
    let mut head = Vec::new();
    if let Some(cpl) = inner {
        let (selector, top) = legacy_stack(core, cpl)?;
        let stack = segment::stack(core, selector, cpl, false, 10)?;
        core.state.set_segment(Seg::Ss, stack);
        core.state.r[4] = top;
        core.refresh();
        head = vec![u64::from(old.selector), pointer];
    }
    let pushed = head
        .iter()
        .chain(frame)
        .try_for_each(|value| super::operand::push(core, width, *value));
    if pushed.is_err() {
        let selector = core.state.segment(Seg::Ss).selector;
        if inner.is_some() && core.fault.vector == 12 {
            core.fault.code = Some(u32::from(selector & !3));
        }
        core.state.set_segment(Seg::Ss, old);
        core.state.r[4] = pointer;
        core.refresh();
    }
    pushed
}

/// Selector and pointer of a privilege level's stack, out of a TSS of 16 or 32 bits.
fn legacy_stack(core: &mut Core, cpl: u8) -> Exec<(u16, u64)> {
    let task = core.state.segment(Seg::Tr);
    let (bytes, first) = if task.attr & 8 != 0 { (8, 4) } else { (4, 2) };
    let at = first + bytes * u64::from(cpl);
    if at + bytes - 1 > u64::from(task.limit) {
        return core.raise(10, Some(u32::from(task.selector & !3)));
    }
    let value = core.system_load::<u64>(task.base.wrapping_add(at))?;
    Ok(if bytes == 8 {
        ((value >> 32) as u16, value & 0xffff_ffff)
    } else {
        ((value >> 16) as u16, value & 0xffff)
    })
}

/// By the table of vectors of real mode; there are no error codes.
fn deliver_real(core: &mut Core, delivery: Delivery) -> Exec {
    let vector = u64::from(delivery.vector());
    if vector * 4 + 3 > u64::from(core.state.idtr.limit) {
        return core.gp(0);
    }
    let at = core.state.idtr.base.wrapping_add(vector * 4);
    let entry = core.system_load::<u32>(at)?.wide();
    let frame = [
        core.state.rflags(),
        u64::from(core.state.segment(Seg::Cs).selector),
        core.state.rip,
    ];
    for (value, depth) in frame.into_iter().zip([2, 4, 6]) {
        let offset = super::operand::stack_at(core, -depth);
        let to = super::operand::in_segment(core, Seg::Ss, offset, 2, true)?;
        core.system_store(to.at, value as u16)?;
    }
    let top = super::operand::stack_at(core, -6);
    super::operand::set_stack(core, top);
    segment::real_code(core, (entry >> 16) as u16);
    core.state.rip = entry & 0xffff;
    core.state.system_flags &= !(IF | TF | RF | AC);
    core.refresh();
    Ok(())
}
