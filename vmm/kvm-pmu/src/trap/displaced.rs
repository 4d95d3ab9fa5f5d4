//! What the first instruction of a #GP handler does, where an OUT stands in its place.
//!
//! One byte is written, the opcode of OUT imm8; the second byte of the instruction
//! becomes the port. So there is no middle that anybody could jump into or see half
//! of, and the bytes that remain tell which instruction it was.

use std::fmt;

use kvm_bindings::kvm_regs;

use super::context::{CpuContext, Gate, GateKind};
use super::paging::page_of;
use super::{RFLAGS_AC, RFLAGS_RF};

const CR4_CET: u64 = 1 << 23;

/// The opcode of OUT imm8, AL (SDM vol. 2, OUT), which is two bytes long.
pub(crate) const OUT: u8 = 0xe6;
pub(crate) const OUT_SIZE: u64 = 2;

/// Bytes of the longest instruction that can be displaced.
pub(crate) const LONGEST: usize = 4;

/// The first bytes of all of them.
const FIRST: [u8; 3] = [0xf3, 0x0f, 0x66];

/// An instruction that an OUT can stand in for, as what it does is done easily.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Displaced {
    /// The byte in whose place that of the OUT stands.
    pub(crate) first: u8,
    /// The port: its second byte.
    pub(crate) port: u8,
    /// Its length.
    pub(crate) size: u8,
    /// It is CLAC; the others do nothing.
    clears_ac: bool,
}

impl Displaced {
    /// The instruction that `bytes` begin with, if it is one that can be displaced:
    /// ENDBR64, which does nothing without CET, CLAC, or a NOP of 3 or 4 bytes.
    #[must_use]
    pub(crate) fn of(bytes: [u8; LONGEST]) -> Option<Self> {
        let (size, clears_ac) = match bytes {
            // ENDBR64, and the two NOPs that Linux writes over one.
            [0xf3, 0x0f, 0x1e, 0xfa] | [0x66, 0x0f, 0x1f, 0x00] | [0x0f, 0x1f, 0x40, _] => {
                (4, false)
            }
            [0x0f, 0x1f, 0x00, _] => (3, false),
            [0x0f, 0x01, 0xca, _] => (3, true),
            _ => return None,
        };
        Some(Self {
            first: bytes[0],
            port: bytes[1],
            size,
            clears_ac,
        })
    }

    /// The instruction that stood here before the OUT that `bytes` begin with.
    #[must_use]
    pub(crate) fn behind_out(bytes: [u8; LONGEST]) -> Option<Self> {
        let [OUT, second, third, fourth] = bytes else {
            return None;
        };
        FIRST
            .into_iter()
            .find_map(|first| Self::of([first, second, third, fourth]))
    }

    /// Whether an OUT to `port` may be one that stands in for an instruction.
    #[must_use]
    pub(crate) fn is_port(port: u16) -> bool {
        matches!(port, 0x01 | 0x0f | 0x1f)
    }

    /// Executes it for a vCPU whose RIP would be `ip` at it.
    pub(crate) fn execute(self, regs: &mut kvm_regs, ip: u64) {
        regs.rip = ip.wrapping_add(self.size.into());
        regs.rflags &= !RFLAGS_RF;
        if self.clears_ac {
            regs.rflags &= !RFLAGS_AC;
        }
    }
}

/// Where the byte of the handler behind `gate` is in guest-physical memory, and what
/// its first instruction is, if that can be displaced.
pub(crate) fn patch_site(
    context: &CpuContext<'_>,
    gate: &Gate,
) -> Result<(u64, Displaced), PatchRefusal> {
    if gate.kind != GateKind::Bits64 {
        return Err(PatchRefusal::NotLongMode);
    }
    if context.sregs.cr4 & CR4_CET != 0 {
        return Err(PatchRefusal::Cet);
    }
    // A conforming segment leaves CPL as it is.
    let segment = context.descriptor(gate.selector);
    let segment = segment.ok_or(PatchRefusal::Unmapped)?;
    let dpl = u8::try_from(segment >> 45 & 3).unwrap_or(3);
    let conforming = segment >> 42 & 1 != 0;
    if dpl != 0 || conforming {
        return Err(PatchRefusal::Privilege(if conforming { 3 } else { dpl }));
    }
    let at = context.physical(gate.handler);
    let at = at.ok_or(PatchRefusal::Unmapped)?;
    let mut bytes = [0; LONGEST];
    context.read_linear(gate.handler, &mut bytes);
    let displaced = Displaced::of(bytes).or(Displaced::behind_out(bytes));
    let displaced = displaced.ok_or(PatchRefusal::Instruction(bytes))?;
    if page_of(at) != page_of(at + u64::from(displaced.size) - 1) {
        return Err(PatchRefusal::PageEnd);
    }
    if processor_stores_to(context, page_of(at)) {
        return Err(PatchRefusal::ProcessorStores);
    }
    Ok((at, displaced))
}

/// Whether the processor itself may well store to the page at `page`: frames to the
/// stack and to those of the 64-bit TSS (SDM vol. 3A, 9.7), accessed bits to the GDT and
/// to the page tables. Such a store to a read-only page does not come to us on all KVMs.
fn processor_stores_to(context: &CpuContext<'_>, page: u64) -> bool {
    let (tss, gdt) = (context.sregs.tr.base, &context.sregs.gdt);
    let tops = [0x04, 0x24, 0x2c, 0x34, 0x3c, 0x44, 0x4c, 0x54];
    let tops = tops.map(|at| context.word::<8>(tss.wrapping_add(at)).unwrap_or(0));
    let stacks = tops.into_iter().chain([context.regs.rsp]);
    let frames = stacks.map(|top| top.wrapping_sub(8));
    let descriptors = [gdt.base, gdt.base.wrapping_add(gdt.limit.into())];
    page_of(context.sregs.cr3) == page
        || frames
            .chain(descriptors)
            .any(|linear| context.physical(linear).map(page_of) == Some(page))
}

/// Why the guest's #GP handler is not patched, or is so no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PatchRefusal {
    /// The VMM has no memory of which a page can be made read-only for the guest.
    NoProtection,
    /// An OUT at CPL 0 does not come to the VMM as it should.
    OutUnnoticed,
    /// A guest's store to a page that is read-only for it does not come to the VMM.
    StoresUnnoticed,
    /// The handler is not mapped.
    Unmapped,
    /// The handler begins with these bytes.
    Instruction([u8; LONGEST]),
    /// The handler's first instruction reaches into another page.
    PageEnd,
    /// The handler runs at this privilege level.
    Privilege(u8),
    /// CR4.CET is set: ENDBR64 may matter.
    Cet,
    /// The guest does not run in 64-bit mode.
    NotLongMode,
    /// The VMM logs which pages change, and does not see this change.
    DirtyLog,
    /// The handler's page is no memory, or not only memory.
    NotRam,
    /// The handler's page can be reached at two guest-physical addresses.
    TwoSlots,
    /// The host does not change the protection of the handler's page (`errno`).
    Protect(i32),
    /// The VM has too many different handlers.
    TooMany,
    /// The guest has just written to the handler's page.
    JustWritten,
    /// The guest has written to its handlers' pages this often.
    Written(u8),
    /// The guest had its handlers patched this often within a minute.
    TooOften(u8),
    /// The guest is single-stepped for a counter.
    Stepped,
    /// The processor stores to the handler's page: a stack, descriptors or page tables.
    ProcessorStores,
    /// A vCPU has left this handler for that of another kernel, which reads this one's code.
    Abandoned,
}

impl fmt::Display for PatchRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoProtection => f.write_str("the guest's memory cannot be protected by pages"),
            Self::OutUnnoticed => f.write_str("an OUT at CPL 0 does not come to the VMM"),
            Self::StoresUnnoticed => {
                f.write_str("stores to a page that is read-only for the guest are not noticed")
            }
            Self::Unmapped => f.write_str("the handler is not mapped"),
            Self::Instruction([a, b, c, d]) => write!(
                f,
                "the handler begins with {a:02x} {b:02x} {c:02x} {d:02x}, which is no ENDBR64, CLAC \
                 or NOP of 3 or 4 bytes"
            ),
            Self::PageEnd => f.write_str("the handler's first instruction ends in another page"),
            Self::Privilege(cpl) => write!(f, "the handler runs at CPL {cpl}"),
            Self::Cet => f.write_str("CR4.CET is set"),
            Self::NotLongMode => f.write_str("the guest does not run in 64-bit mode"),
            Self::DirtyLog => f.write_str("the pages that change are being logged"),
            Self::NotRam => f.write_str("the handler's page is not plain memory"),
            Self::TwoSlots => f.write_str("the handler's page is at two guest-physical addresses"),
            Self::Protect(errno) => {
                let error = std::io::Error::from_raw_os_error(*errno);
                write!(f, "the handler's page cannot be protected: {error}")
            }
            Self::TooMany => f.write_str("the guest has too many #GP handlers"),
            Self::JustWritten => f.write_str("the guest has just written to the handler's page"),
            Self::Written(times) => {
                write!(
                    f,
                    "the guest has written to the handler's page {times} times"
                )
            }
            Self::TooOften(times) => write!(
                f,
                "the guest's handlers were patched {times} times within a minute"
            ),
            Self::Stepped => f.write_str("the guest is single-stepped for a counter"),
            Self::ProcessorStores => {
                f.write_str("a stack, descriptors or page tables lie in the handler's page")
            }
            Self::Abandoned => {
                f.write_str("another vCPU has left this handler for that of another kernel")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_sregs;
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;

    /// Ports that KVM's interrupt controllers and timer answer themselves.
    const KVM_PORTS: [u8; 9] = [0x20, 0x21, 0x40, 0x41, 0x42, 0x43, 0x61, 0xa0, 0xa1];

    #[test]
    fn what_can_be_displaced() {
        fn check(bytes: [u8; LONGEST], expected: Option<(u8, u8, bool)>) {
            let found = Displaced::of(bytes);
            let found = found.map(|found| (found.port, found.size, found.clears_ac));
            assert_eq!(found, expected, "{bytes:02x?}");
        }
        check([0xf3, 0x0f, 0x1e, 0xfa], Some((0x0f, 4, false)));
        check([0x0f, 0x01, 0xca, 0xfc], Some((0x01, 3, true)));
        check([0x0f, 0x1f, 0x00, 0xfc], Some((0x1f, 3, false)));
        check([0x0f, 0x1f, 0x40, 0x00], Some((0x1f, 4, false)));
        check([0x0f, 0x1f, 0x40, 0xd6], Some((0x1f, 4, false)));
        check([0x66, 0x0f, 0x1f, 0x00], Some((0x0f, 4, false)));
        // ENDBR32, STAC, a longer NOP, SWAPGS, PUSH, CLD, a NOP of two bytes.
        check([0xf3, 0x0f, 0x1e, 0xfb], None);
        check([0x0f, 0x01, 0xcb, 0xfc], None);
        check([0x0f, 0x1f, 0x44, 0x00], None);
        check([0x0f, 0x1f, 0x80, 0x00], None);
        check([0x0f, 0x01, 0xf8, 0xfc], None);
        check([0x50, 0x0f, 0x1e, 0xfa], None);
        check([0xfc, 0x0f, 0x1f, 0x00], None);
        check([0x66, 0x90, 0x0f, 0x1f], None);
    }

    #[test]
    fn what_it_does() {
        let check = |bytes, rip, ac| {
            let mut regs = kvm_regs {
                rip: 7,
                rax: 1,
                rflags: RFLAGS_RF | RFLAGS_AC | 2,
                ..Default::default()
            };
            Displaced::of(bytes).unwrap().execute(&mut regs, 0x1000);
            assert_eq!((regs.rip, regs.rax, regs.rflags), (rip, 1, ac | 2));
        };
        check([0xf3, 0x0f, 0x1e, 0xfa], 0x1004, RFLAGS_AC);
        check([0x0f, 0x1f, 0x00, 0x90], 0x1003, RFLAGS_AC);
        check([0x0f, 0x01, 0xca, 0x90], 0x1003, 0);
    }

    const GDT: u64 = 0x100;
    const LONG_MODE: u64 = 1 << 10;
    const CODE: u64 = 0x00af_9b00_0000_ffff;
    const DPL_3: u64 = 3 << 45;
    const CONFORMING: u64 = 1 << 42;
    const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

    /// A guest without paging, whose handler is at `handler` in a segment of `code`.
    fn site(
        (handler, bytes): (u64, &[u8]),
        code: u64,
        kind: GateKind,
        cr4: u64,
    ) -> Result<(u64, Displaced), PatchRefusal> {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap();
        memory
            .write_slice(bytes, GuestAddress(handler))
            .unwrap_or(());
        memory.write_obj(code, GuestAddress(GDT + 8)).unwrap();
        let mut sregs = kvm_sregs {
            efer: LONG_MODE,
            cr4,
            ..Default::default()
        };
        (sregs.gdt.base, sregs.gdt.limit) = (GDT, 15);
        let context = CpuContext {
            regs: &kvm_regs::default(),
            sregs: &sregs,
            memory: &memory,
        };
        let selector = 8;
        patch_site(
            &context,
            &Gate {
                handler,
                kind,
                selector,
            },
        )
    }

    #[test]
    fn where_a_handler_can_be_patched() {
        let endbr = Displaced::of(ENDBR64).unwrap();
        let here = (0x1010, &ENDBR64[..]);
        let check = |handler, code, kind, cr4, expected| {
            assert_eq!(site(handler, code, kind, cr4), expected);
        };
        let long = GateKind::Bits64;
        check(here, CODE, long, 0, Ok((0x1010, endbr)));
        check((0x1ffc, &ENDBR64), CODE, long, 0, Ok((0x1ffc, endbr)));
        let old = [OUT, 0x0f, 0x1e, 0xfa];
        check((0x1010, &old), CODE, long, 0, Ok((0x1010, endbr)));
        let refused = |reason| Err(reason);
        check(
            (0x1ffd, &ENDBR64),
            CODE,
            long,
            0,
            refused(PatchRefusal::PageEnd),
        );
        check(
            here,
            CODE | DPL_3,
            long,
            0,
            refused(PatchRefusal::Privilege(3)),
        );
        check(
            here,
            CODE | CONFORMING,
            long,
            0,
            refused(PatchRefusal::Privilege(3)),
        );
        check(here, CODE, long, CR4_CET, refused(PatchRefusal::Cet));
        check(
            here,
            CODE,
            GateKind::Bits32,
            0,
            refused(PatchRefusal::NotLongMode),
        );
        let push = [0x50, 0x0f, 0x1e, 0xfa];
        check(
            (0x1010, &push),
            CODE,
            long,
            0,
            refused(PatchRefusal::Instruction(push)),
        );
        let nothing = refused(PatchRefusal::Instruction([0; 4]));
        check((0x5000, &ENDBR64), CODE, long, 0, nothing);
    }

    #[test]
    fn every_reason_reads_as_one() {
        let reasons = [
            PatchRefusal::NoProtection,
            PatchRefusal::OutUnnoticed,
            PatchRefusal::StoresUnnoticed,
            PatchRefusal::Unmapped,
            PatchRefusal::Instruction([0x50, 1, 2, 3]),
            PatchRefusal::PageEnd,
            PatchRefusal::Privilege(3),
            PatchRefusal::Cet,
            PatchRefusal::NotLongMode,
            PatchRefusal::DirtyLog,
            PatchRefusal::NotRam,
            PatchRefusal::TwoSlots,
            PatchRefusal::Protect(libc::ENOMEM),
            PatchRefusal::TooMany,
            PatchRefusal::JustWritten,
            PatchRefusal::Written(8),
            PatchRefusal::TooOften(64),
            PatchRefusal::Stepped,
            PatchRefusal::Abandoned,
        ];
        let mut said: Vec<String> = reasons.iter().map(ToString::to_string).collect();
        assert!(said[4].contains("50 01 02 03"), "{said:?}");
        said.sort();
        said.dedup();
        assert_eq!(said.len(), reasons.len());
    }

    proptest! {
        /// The bytes that remain tell which instruction it was, its port comes to us
        /// on every KVM, and an instruction of the guest's own is no patch.
        #[test]
        fn the_rest_tells(first in prop::sample::select(FIRST.to_vec()), rest in any::<[u8; 3]>(),
                          known in 0usize..6) {
            let tails = [[0x0f, 0x1e, 0xfa], [0x01, 0xca, 9], [0x1f, 0, 9], [0x1f, 0x40, 9],
                         [0x0f, 0x1f, 0], rest];
            let [second, third, fourth] = tails[known];
            let patched = Displaced::behind_out([OUT, second, third, fourth]);
            if let Some(original) = Displaced::of([first, second, third, fourth]) {
                prop_assert_eq!(patched, Some(original));
                prop_assert!(!KVM_PORTS.contains(&original.port));
                prop_assert!(Displaced::is_port(original.port.into()));
                prop_assert_eq!(Displaced::behind_out([first, second, third, fourth]), None);
            }
            prop_assert_eq!(Displaced::of([OUT, second, third, fourth]), None);
        }
    }
}
