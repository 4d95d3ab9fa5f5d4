//! A stopped vCPU as the traps see it: registers, and memory by linear address.

use kvm_bindings::{kvm_regs, kvm_sregs};

use super::paging::{map, paging_of};
use crate::memory::GuestBytes;

const CR0_PE: u64 = 1;
const EFER_LMA: u64 = 1 << 10;

/// Longest instruction (SDM vol. 2, 2.3.11).
pub(super) const MAX_INSTRUCTION: usize = 15;

/// How a gate's handler is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GateKind {
    /// 32-bit interrupt or trap gate.
    Bits32,
    /// 64-bit interrupt or trap gate.
    Bits64,
}

/// One present interrupt or trap gate of the IDT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gate {
    /// Linear address of the handler's first instruction.
    pub(crate) handler: u64,
    /// Size of the frame's words.
    pub(crate) kind: GateKind,
    /// Selector of the handler's code segment.
    pub(crate) selector: u16,
}

/// Registers and memory of a vCPU that is not in the guest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CpuContext<'a> {
    /// General registers.
    pub(crate) regs: &'a kvm_regs,
    /// Special registers.
    pub(crate) sregs: &'a kvm_sregs,
    pub(crate) memory: &'a dyn GuestBytes,
}

impl CpuContext<'_> {
    /// True in IA-32e mode, compatibility mode included.
    #[must_use]
    pub(crate) fn long_mode(&self) -> bool {
        self.sregs.efer & EFER_LMA != 0
    }

    /// Current privilege level (SDM vol. 3A, 6.5: the DPL of SS; KVM keeps CPL there).
    #[must_use]
    pub(crate) fn cpl(&self) -> u8 {
        cpl(self.sregs)
    }

    /// Width of the code that runs: 16, 32 or 64.
    #[must_use]
    pub(crate) fn bitness(&self) -> u32 {
        let cs = &self.sregs.cs;
        match (self.long_mode() && cs.l != 0, cs.db != 0) {
            (true, _) => 64,
            (false, true) => 32,
            (false, false) => 16,
        }
    }

    /// Base of the code segment that runs; 64-bit mode has none.
    #[must_use]
    pub(crate) fn code_base(&self) -> u64 {
        match self.bitness() {
            64 => 0,
            _ => self.sregs.cs.base,
        }
    }

    /// Linear address of `ip` in the code segment that runs.
    #[must_use]
    pub(crate) fn code_at(&self, ip: u64) -> u64 {
        match self.bitness() {
            64 => ip,
            _ => self.sregs.cs.base.wrapping_add(ip) & 0xffff_ffff,
        }
    }

    /// Fills `buffer` from `linear`; says how many bytes from the start could
    /// be read before unmapped memory.
    pub(crate) fn read_linear(&self, linear: u64, buffer: &mut [u8]) -> usize {
        let paging = paging_of(self.sregs);
        let mut done = 0;
        while done < buffer.len() {
            let at = linear.wrapping_add(done as u64);
            let in_page = 0x1000 - usize::try_from(at & 0xfff).unwrap_or(0);
            let len = in_page.min(buffer.len() - done);
            let Some(mapped) = map(self.memory, &paging, at) else {
                break;
            };
            let target = &mut buffer[done..done + len];
            if !self.memory.read(mapped.physical, target) {
                break;
            }
            done += len;
        }
        done
    }

    /// Writes `bytes` at `linear`; false if any of it is unmapped, in which
    /// case nothing was written.
    #[must_use]
    pub(crate) fn write_linear(&self, linear: u64, bytes: &[u8]) -> bool {
        let mut probe = vec![0; bytes.len()];
        if self.read_linear(linear, &mut probe) != bytes.len() {
            return false;
        }
        let paging = paging_of(self.sregs);
        bytes.iter().zip(0u64..).all(|(byte, offset)| {
            map(self.memory, &paging, linear.wrapping_add(offset)).is_some_and(|mapped| {
                self.memory
                    .write(mapped.physical, std::slice::from_ref(byte))
            })
        })
    }

    /// Guest-physical address behind `linear`, if it is mapped.
    #[must_use]
    pub(crate) fn physical(&self, linear: u64) -> Option<u64> {
        Some(self.located(linear)?.0)
    }

    /// The same with the base-2 logarithm of the page's size; 32 without paging.
    #[must_use]
    pub(crate) fn located(&self, linear: u64) -> Option<(u64, u32)> {
        let mapped = map(self.memory, &paging_of(self.sregs), linear)?;
        Some((mapped.physical, mapped.page))
    }

    /// The little-endian word of `N` bytes at `linear`.
    #[must_use]
    pub(crate) fn word<const N: usize>(&self, linear: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        (self.read_linear(linear, &mut bytes[..N]) == N).then(|| u64::from_le_bytes(bytes))
    }

    /// The gate of `vector`, if it is present and one that exceptions are
    /// delivered through (SDM vol. 3A, 7.11 and 7.14.1). Real mode and task or
    /// 16-bit gates give `None`.
    #[must_use]
    pub(crate) fn gate(&self, vector: u8) -> Option<Gate> {
        if self.sregs.cr0 & CR0_PE == 0 {
            return None;
        }
        let idt = &self.sregs.idt;
        let size: u64 = if self.long_mode() { 16 } else { 8 };
        let offset = size * u64::from(vector);
        if offset + size - 1 > u64::from(idt.limit) {
            return None;
        }
        let low = self.word::<8>(idt.base.wrapping_add(offset))?;
        let present = low >> 47 & 1 != 0;
        // 0xE and 0xF: interrupt and trap gate of the mode's full size.
        let full_size = matches!(low >> 40 & 0x1f, 0xe | 0xf);
        if !present || !full_size {
            return None;
        }
        let mut handler = (low & 0xffff) | (low >> 48 << 16);
        let selector = u16::try_from(low >> 16 & 0xffff).unwrap_or(0);
        if self.long_mode() {
            let high = self.word::<8>(idt.base.wrapping_add(offset + 8))?;
            handler |= (high & 0xffff_ffff) << 32;
            return Some(Gate {
                handler,
                kind: GateKind::Bits64,
                selector,
            });
        }
        let base = self.descriptor(selector).map_or(0, descriptor_base);
        Some(Gate {
            handler: handler.wrapping_add(base) & 0xffff_ffff,
            kind: GateKind::Bits32,
            selector,
        })
    }

    /// The 8 descriptor bytes that `selector` names in the GDT or LDT.
    #[must_use]
    pub(crate) fn descriptor(&self, selector: u16) -> Option<u64> {
        let (base, limit) = if selector & 4 == 0 {
            (self.sregs.gdt.base, u32::from(self.sregs.gdt.limit))
        } else {
            (self.sregs.ldt.base, self.sregs.ldt.limit)
        };
        let offset = u32::from(selector & !7);
        if offset + 7 > limit {
            return None;
        }
        self.word::<8>(base.wrapping_add(offset.into()))
    }
}

/// True while 64-bit code runs.
pub(super) fn is_64_bit(sregs: &kvm_sregs) -> bool {
    sregs.efer & EFER_LMA != 0 && sregs.cs.l != 0
}

/// CPL from the special registers.
#[must_use]
pub(crate) fn cpl(sregs: &kvm_sregs) -> u8 {
    if sregs.cr0 & CR0_PE == 0 {
        return 0;
    }
    sregs.ss.dpl & 3
}

/// Base address in a code or data descriptor.
pub(super) fn descriptor_base(descriptor: u64) -> u64 {
    (descriptor >> 16 & 0xff_ffff) | (descriptor >> 56 & 0xff) << 24
}
