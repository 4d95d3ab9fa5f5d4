//! The frame that an exception or interrupt leaves on the stack (SDM
//! vol. 3A, 7.12.1 and 7.14.2), and how to return from it without an IRET.

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};

use super::context::{CpuContext, Gate, GateKind, descriptor_base};
use super::{RFLAGS_RF, RFLAGS_TF, RFLAGS_VM};

/// A frame as it lies on the stack of the handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExceptionFrame {
    /// Error code, or 0.
    pub(crate) error: u64,
    /// Saved instruction pointer.
    pub(crate) ip: u64,
    /// Saved code selector.
    pub(crate) cs: u16,
    /// Saved flags.
    pub(crate) flags: u64,
    /// Saved stack, where the frame has one: pointer and selector.
    pub(crate) stack: Option<(u64, u16)>,
    /// Linear address of the saved flags.
    pub(crate) flags_at: u64,
    size: u64,
}

impl ExceptionFrame {
    /// RSP before the event.
    #[must_use]
    pub(crate) fn stack_before(&self, rsp: u64) -> u64 {
        self.stack
            .map_or(rsp.wrapping_add(self.size), |(rsp, _)| rsp)
    }

    /// Reads the frame at the top of the stack, with the vCPU stopped at the
    /// first instruction of a handler entered through `gate`; `with_error` if
    /// the event pushed an error code.
    ///
    /// `None` where the stack cannot be read or the interrupted code ran in
    /// virtual-8086 mode.
    #[must_use]
    pub(crate) fn read(context: &CpuContext<'_>, gate: &Gate, with_error: bool) -> Option<Self> {
        match gate.kind {
            GateKind::Bits64 => Self::read_64(context, with_error),
            GateKind::Bits32 => Self::read_32(context, with_error),
        }
    }

    fn read_64(context: &CpuContext<'_>, with_error: bool) -> Option<Self> {
        let words = usize::from(with_error) + 5;
        // All at once: each look into the page tables costs.
        let mut bytes = [0; 48];
        let bytes = &mut bytes[..8 * words];
        if context.read_linear(context.regs.rsp, bytes) != bytes.len() {
            return None;
        }
        let word = |index: usize| {
            let (words, _) = bytes.as_chunks::<8>();
            u64::from_le_bytes(words[index])
        };
        let first = usize::from(with_error);
        Some(Self {
            error: if with_error { word(0) } else { 0 },
            ip: word(first),
            cs: selector(word(first + 1)),
            flags: word(first + 2),
            stack: Some((word(first + 3), selector(word(first + 4)))),
            flags_at: context.regs.rsp.wrapping_add(8 * (first as u64 + 2)),
            size: bytes.len() as u64,
        })
    }

    fn read_32(context: &CpuContext<'_>, with_error: bool) -> Option<Self> {
        let error_size = if with_error { 4 } else { 0 };
        let bottom = context.sregs.ss.base.wrapping_add(context.regs.rsp) & 0xffff_ffff;
        let top = bottom.wrapping_add(error_size);
        let word = |index: u64| context.word::<4>(top.wrapping_add(4 * index));
        let (ip, cs, flags) = (word(0)?, word(1)?, word(2)?);
        if flags & RFLAGS_VM != 0 {
            return None;
        }
        let inner = (cs & 3) != u64::from(context.cpl());
        let stack = if inner {
            Some((word(3)?, selector(word(4)?)))
        } else {
            None
        };
        Some(Self {
            error: if with_error {
                context.word::<4>(bottom)?
            } else {
                0
            },
            ip,
            cs: selector(cs),
            flags,
            stack,
            flags_at: top.wrapping_add(8),
            size: error_size + if inner { 20 } else { 12 },
        })
    }

    /// Privilege level of the interrupted code.
    #[must_use]
    pub(crate) fn cpl(&self) -> u8 {
        u8::try_from(self.cs & 3).unwrap_or(0)
    }

    /// The registers with which the interrupted code goes on at `ip`, as an
    /// IRET would load them but for two flags: RF is clear, as after any
    /// instruction that completed, and TF is returned instead of a trap
    /// being taken. `None` where the saved selectors name nothing.
    #[must_use]
    pub(crate) fn resume_at(&self, context: &CpuContext<'_>, ip: u64) -> Option<Return> {
        let mut regs = *context.regs;
        let mut sregs = *context.sregs;
        regs.rip = ip;
        regs.rflags = self.flags & !RFLAGS_RF;
        match self.stack {
            Some((sp, _)) => regs.rsp = sp,
            None => regs.rsp = regs.rsp.wrapping_add(self.size),
        }
        let mut segments_changed = false;
        if sregs.cs.selector != self.cs {
            sregs.cs = load_segment(context, self.cs, self.cpl())?;
            segments_changed = true;
        }
        if let Some((_, ss)) = self.stack
            && (sregs.ss.selector != ss || context.cpl() != self.cpl())
        {
            sregs.ss = load_segment(context, ss, self.cpl())?;
            segments_changed = true;
        }
        Some(Return {
            regs,
            sregs: segments_changed.then_some(sregs),
            trap: self.flags & RFLAGS_TF != 0,
        })
    }
}

fn selector(word: u64) -> u16 {
    u16::try_from(word & 0xffff).unwrap_or(0)
}

/// Registers to go on with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Return {
    /// General registers.
    pub(crate) regs: kvm_regs,
    /// Special registers, where a segment changed.
    pub(crate) sregs: Option<kvm_sregs>,
    /// The interrupted code single-steps itself: it wants a #DB now.
    pub(crate) trap: bool,
}

/// What `selector` would load into a code or stack segment register at
/// privilege `cpl` (SDM vol. 3A, 3.4.5); `None` if no present descriptor is there.
///
/// In 64-bit mode a null SS is legal at CPL 0 to 2 and loads an unusable
/// segment that carries the CPL (SDM vol. 3A, 7.14.4).
#[must_use]
fn load_segment(context: &CpuContext<'_>, selector: u16, cpl: u8) -> Option<kvm_segment> {
    if selector & !3 == 0 {
        return Some(kvm_segment {
            selector,
            dpl: cpl,
            unusable: 1,
            ..Default::default()
        });
    }
    let descriptor = context.descriptor(selector)?;
    let bit = |at: u32| u8::from(descriptor >> at & 1 != 0);
    if bit(47) == 0 || bit(44) == 0 {
        return None;
    }
    let limit = (descriptor & 0xffff) | (descriptor >> 32 & 0xf_0000);
    let limit = u32::try_from(limit).unwrap_or(0);
    let granular = bit(55);
    // The accessed bit is set by every load.
    let kind = u8::try_from(descriptor >> 40 & 0xf).unwrap_or(0) | 1;
    Some(kvm_segment {
        base: descriptor_base(descriptor),
        limit: if granular == 1 {
            limit << 12 | 0xfff
        } else {
            limit
        },
        selector,
        type_: kind,
        present: 1,
        dpl: u8::try_from(descriptor >> 45 & 3).unwrap_or(0),
        db: bit(54),
        s: 1,
        // Reserved outside IA-32e mode, where KVM_SET_SREGS refuses it.
        l: if context.long_mode() { bit(53) } else { 0 },
        g: granular,
        avl: bit(52),
        unusable: 0,
        padding: 0,
    })
}
