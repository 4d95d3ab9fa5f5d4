//! RDPMC, caught at the first instruction of the guest's #GP handler, and the
//! cookie that an access presents.
//!
//! KVM has no user exit for RDPMC; without a vPMU of its own it raises #GP(0).
//! What is decided here is whether the #GP at hand is such a one.

use std::fmt;

use instruction_facts::rip_after_rdpmc;
use kvm_bindings::{kvm_regs, kvm_sregs};
use pmu_virt::Ring;

use super::context::{CpuContext, Gate, MAX_INSTRUCTION, descriptor_base, is_64_bit};
use super::frame::ExceptionFrame;

/// Vector of the general protection exception.
pub(crate) const GP_VECTOR: u8 = 13;

const CR4_PCE: u64 = 1 << 8;

/// A legal RDPMC that raised #GP only because the hardware counts nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rdpmc {
    /// The frame of the #GP.
    pub(crate) frame: ExceptionFrame,
    /// ECX.
    pub(crate) index: u32,
    /// Ring of the RDPMC.
    pub(crate) ring: Ring,
    /// The register that carries a cookie, should the index ask for one.
    pub(crate) presented: Presented,
    /// Address of the instruction after it, in its code segment.
    pub(crate) next: u64,
}

/// What a stop at the #GP handler is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RdpmcTrap {
    /// A legal RDPMC.
    Rdpmc(Rdpmc),
    /// Another #GP, or an RDPMC that may not be executed there: the handler
    /// runs on.
    Foreign,
}

/// Looks at a vCPU that stopped at the first instruction of its #GP handler.
///
/// RDPMC is legal at CPL 0, and with CR4.PCE in every ring (SDM vol. 2,
/// RDPMC). In long mode KPTI's entry code has not switched CR3 yet, so the
/// interrupted code is still mapped.
#[must_use]
pub(crate) fn inspect(context: &CpuContext<'_>, gate: &Gate) -> RdpmcTrap {
    find(context, gate).map_or(RdpmcTrap::Foreign, RdpmcTrap::Rdpmc)
}

fn find(context: &CpuContext<'_>, gate: &Gate) -> Option<Rdpmc> {
    let frame = ExceptionFrame::read(context, gate, true)?;
    let cpl = frame.cpl();
    if frame.error != 0 || (cpl != 0 && context.sregs.cr4 & CR4_PCE == 0) {
        return None;
    }
    // The handler's segment is loaded; any other one is looked up.
    let (base, bitness) = if frame.cs == context.sregs.cs.selector {
        (context.code_base(), context.bitness())
    } else {
        code_segment(context, &frame)?
    };
    let mut bytes = [0; MAX_INSTRUCTION];
    let len = context.read_linear(base.wrapping_add(frame.ip), &mut bytes);
    let next = rip_after_rdpmc(&bytes[..len], bitness, frame.ip)?;
    Some(Rdpmc {
        frame,
        index: u32::try_from(context.regs.rcx & 0xffff_ffff).unwrap_or(0),
        ring: Ring::from_cpl(cpl),
        presented: Presented::by(context.regs, bitness),
        next,
    })
}

/// Base and width of the interrupted code.
fn code_segment(context: &CpuContext<'_>, frame: &ExceptionFrame) -> Option<(u64, u32)> {
    let descriptor = context.descriptor(frame.cs)?;
    let long = descriptor >> 53 & 1 != 0;
    let default_32 = descriptor >> 54 & 1 != 0;
    Some(match (context.long_mode() && long, default_32) {
        (true, _) => (0, 64),
        (false, true) => (descriptor_base(descriptor), 32),
        (false, false) => (descriptor_base(descriptor), 16),
    })
}

/// The cookie that an instruction presented in a general register (`docs/reference/pcr.md`,
/// "Presenting a cookie"). It may be a secret, so it is never printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Presented(pub u64);

impl fmt::Debug for Presented {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Presented(..)")
    }
}

impl Presented {
    /// Of an instruction in code of this width: RSI in 64-bit mode, otherwise EDI
    /// over ESI.
    #[must_use]
    pub(crate) fn by(regs: &kvm_regs, bitness: u32) -> Self {
        const LOW: u64 = 0xffff_ffff;
        Self(match bitness {
            64 => regs.rsi,
            _ => (regs.rdi & LOW) << 32 | regs.rsi & LOW,
        })
    }

    /// Of the instruction that a vCPU stopped at.
    #[must_use]
    pub(crate) fn now(regs: &kvm_regs, sregs: &kvm_sregs) -> Self {
        Self::by(regs, if is_64_bit(sregs) { 64 } else { 32 })
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::super::context::GateKind;
    use super::*;
    use crate::memory::{GuestBytes, OutOfReach};

    #[test]
    fn which_register() {
        let regs = kvm_regs {
            rsi: 0x1111_2222_3333_4444,
            rdi: 0x5555_6666_7777_8888,
            ..Default::default()
        };
        let check = |lma: bool, l: u8, expected| {
            let mut sregs = kvm_sregs {
                efer: if lma { 1 << 10 } else { 0 },
                ..Default::default()
            };
            sregs.cs.l = l;
            assert_eq!(Presented::now(&regs, &sregs), Presented(expected));
        };
        check(true, 1, 0x1111_2222_3333_4444);
        // Compatibility mode, and protected mode with a bit that means nothing there.
        check(true, 0, 0x7777_8888_3333_4444);
        check(false, 1, 0x7777_8888_3333_4444);
        check(false, 0, 0x7777_8888_3333_4444);
    }

    /// In SMM the stack is the kernel's to choose, and so is what lies there in ordinary
    /// memory: a frame of an RDPMC that would lead code of the firmware anywhere.
    #[test]
    fn in_smm_no_frame_is_found() {
        const STACK: u64 = 0x2000;
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x8_0000)]).unwrap();
        let (selector, ip) = (0x3000, 0x9000);
        let frame = [0, ip, selector, 2, STACK, 0];
        for (word, at) in frame.into_iter().zip((STACK..).step_by(8)) {
            memory.write_obj::<u64>(word, GuestAddress(at)).unwrap();
        }
        let code = GuestAddress((selector << 4) + ip);
        memory.write_slice(&[0x0f, 0x33], code).unwrap();
        let mut sregs = kvm_sregs::default();
        (sregs.cs.selector, sregs.cs.base) = (0x3000, 0x3_0000);
        let regs = kvm_regs {
            rsp: STACK,
            ..Default::default()
        };
        let gate = Gate {
            handler: 0x3_8040,
            kind: GateKind::Bits64,
            selector: 8,
        };
        let found = |memory: &dyn GuestBytes| {
            let context = CpuContext {
                regs: &regs,
                sregs: &sregs,
                memory,
            };
            inspect(&context, &gate)
        };
        assert!(matches!(found(&memory), RdpmcTrap::Rdpmc(_)));
        assert_eq!(found(&OutOfReach), RdpmcTrap::Foreign);
    }

    #[test]
    fn it_is_not_printed() {
        assert_eq!(format!("{:x?}", Presented(0xabcd)), "Presented(..)");
    }
}
