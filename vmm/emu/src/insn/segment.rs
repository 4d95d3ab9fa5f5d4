//! Segment registers and descriptors (SDM vol. 3A, chapters 3 and 5).

use super::core::{Core, Exec, Trap, Width};
use crate::state::{CR0_PE, Seg, Segment, Shadow, VM};

/// A descriptor with where it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Descriptor {
    pub(super) selector: u16,
    pub(super) low: u64,
    at: u64,
}

impl Descriptor {
    /// Type, 0 to 15.
    pub(super) fn kind(self) -> u8 {
        (self.low >> 40 & 15) as u8
    }

    /// A code or data segment, not one of the system.
    pub(super) fn is_segment(self) -> bool {
        self.low >> 44 & 1 != 0
    }

    pub(super) fn dpl(self) -> u8 {
        (self.low >> 45 & 3) as u8
    }

    pub(super) fn is_present(self) -> bool {
        self.low >> 47 & 1 != 0
    }

    pub(super) fn is_code(self) -> bool {
        self.is_segment() && self.kind() & 8 != 0
    }

    /// Conforming code.
    pub(super) fn is_conforming(self) -> bool {
        self.kind() & 4 != 0
    }

    pub(super) fn is_writable_data(self) -> bool {
        self.is_segment() && self.kind() & 0xa == 2
    }

    pub(super) fn is_long(self) -> bool {
        self.low >> 53 & 1 != 0
    }

    pub(super) fn is_big(self) -> bool {
        self.low >> 54 & 1 != 0
    }

    pub(super) fn error(self) -> u32 {
        u32::from(self.selector & !3)
    }

    /// As a segment register has it.
    pub(super) fn segment(self) -> Segment {
        let raw = (self.low & 0xffff) as u32 | (self.low >> 32) as u32 & 0xf_0000;
        let granular = self.low >> 55 & 1 != 0;
        Segment {
            selector: self.selector,
            attr: (self.low >> 40) as u16 & 0xf0ff,
            limit: if granular { raw << 12 | 0xfff } else { raw },
            base: self.low >> 16 & 0xff_ffff | (self.low >> 56) << 24,
        }
    }
}

/// The descriptor that a selector, which is not null, names; `#GP` where the table ends.
pub(super) fn find(core: &mut Core, selector: u16, bytes: u64) -> Exec<Descriptor> {
    let error = u32::from(selector & !3);
    let (base, limit) = if selector & 4 == 0 {
        (core.state.gdtr.base, u64::from(core.state.gdtr.limit))
    } else {
        let ldt = core.state.segment(Seg::Ldtr);
        if !ldt.is_usable() {
            return core.gp(error);
        }
        (ldt.base, u64::from(ldt.limit))
    };
    let inside = u64::from(selector & !7);
    if inside + bytes - 1 > limit {
        return core.gp(error);
    }
    let at = base.wrapping_add(inside);
    let low = core.system_load::<u64>(at)?;
    Ok(Descriptor { selector, low, at })
}

/// The upper half of a system descriptor's base, in long mode.
pub(super) fn high_base(core: &mut Core, descriptor: Descriptor) -> Exec<u64> {
    core.system_load::<u32>(descriptor.at.wrapping_add(8))
        .map(|high| high.wide() << 32)
}

/// The upper half of a gate's descriptor, in long mode.
pub(super) fn high_half(core: &mut Core, descriptor: Descriptor) -> Exec<u64> {
    core.system_load::<u64>(descriptor.at.wrapping_add(8))
}

/// Sets the accessed bit in the table.
pub(super) fn accessed(core: &mut Core, descriptor: Descriptor) -> Exec<Segment> {
    let marked = descriptor.low | 1 << 40;
    if marked != descriptor.low {
        let byte = (marked >> 40) as u8;
        core.system_store(descriptor.at.wrapping_add(5), byte)?;
    }
    let marked = Descriptor {
        low: marked,
        ..descriptor
    };
    Ok(marked.segment())
}

/// The TSS that a descriptor names is in use.
pub(super) fn mark_busy(core: &mut Core, descriptor: Descriptor) -> Exec {
    let byte = (descriptor.low >> 40) as u8 | 2;
    core.system_store(descriptor.at.wrapping_add(5), byte)
}

/// A segment of real mode, or of virtual 8086 mode.
fn real(core: &Core, seg: Seg, selector: u16) -> Segment {
    Segment {
        selector,
        base: u64::from(selector) << 4,
        ..core.state.segment(seg)
    }
}

pub(super) fn is_real(core: &Core) -> bool {
    core.state.cr0 & CR0_PE == 0 || core.state.system_flags & VM != 0
}

/// MOV, POP and the like to a segment register other than CS.
pub(super) fn load(core: &mut Core, seg: Seg, selector: u16) -> Exec {
    if is_real(core) {
        let loaded = real(core, seg, selector);
        core.state.set_segment(seg, loaded);
    } else if seg == Seg::Ss {
        let cpl = core.state.cpl();
        let loaded = stack(core, selector, cpl, core.state.bits() == 64, 13)?;
        core.state.set_segment(seg, loaded);
    } else {
        let loaded = data(core, seg, selector)?;
        core.state.set_segment(seg, loaded);
    }
    if seg == Seg::Ss {
        core.state.shadow = Shadow::MovSs;
    }
    core.refresh();
    Err(Trap::Leave)
}

/// A null selector in a data segment. AMD's processors leave the base as it was.
fn null(core: &Core, seg: Seg, selector: u16) -> Segment {
    let base = if core.cpuid.is_amd() {
        core.state.segment(seg).base
    } else {
        0
    };
    Segment {
        selector,
        attr: 0,
        limit: 0,
        base,
    }
}

fn data(core: &mut Core, seg: Seg, selector: u16) -> Exec<Segment> {
    if selector & !3 == 0 {
        return Ok(null(core, seg, selector));
    }
    let found = find(core, selector, 8)?;
    let readable = found.is_segment() && (!found.is_code() || found.kind() & 2 != 0);
    let open = found.is_code() && found.is_conforming();
    let rpl = (selector & 3) as u8;
    let most = rpl.max(core.state.cpl());
    if !readable || (!open && found.dpl() < most) {
        return core.gp(found.error());
    }
    if !found.is_present() {
        return core.raise(11, Some(found.error()));
    }
    accessed(core, found)
}

/// SS for code at `cpl`; `long` if that code is of 64 bits. Faults of the selector are #GP, or
/// #TS where a task's stack is meant.
pub(super) fn stack(
    core: &mut Core,
    selector: u16,
    cpl: u8,
    long: bool,
    vector: u8,
) -> Exec<Segment> {
    let rpl = (selector & 3) as u8;
    if selector & !3 == 0 {
        if long && cpl < 3 && rpl == cpl {
            return Ok(null_stack(cpl, selector));
        }
        return core.raise(vector, Some(0));
    }
    let found = find(core, selector, 8)?;
    if rpl != cpl || found.dpl() != cpl || !found.is_writable_data() {
        return core.raise(vector, Some(found.error()));
    }
    if !found.is_present() {
        return core.raise(12, Some(found.error()));
    }
    accessed(core, found)
}

/// A null SS, as 64-bit code below CPL 3 may have: its privilege level is all that matters.
pub(super) fn null_stack(cpl: u8, selector: u16) -> Segment {
    Segment {
        selector,
        attr: u16::from(cpl) << 5,
        limit: 0,
        base: 0,
    }
}

/// CS of real mode.
pub(super) fn real_code(core: &mut Core, selector: u16) {
    core.load_code(real(core, Seg::Cs, selector));
}

/// Data segments that code of a lower privilege may not have become null.
pub(super) fn drop_inner(core: &mut Core, cpl: u8) {
    for seg in [Seg::Es, Seg::Ds, Seg::Fs, Seg::Gs] {
        let one = core.state.segment(seg);
        let open = one.attr & 0x1c == 0x1c;
        if one.is_usable() && one.dpl() < cpl && !open {
            let gone = null(core, seg, 0);
            core.state.set_segment(seg, gone);
        }
    }
}
