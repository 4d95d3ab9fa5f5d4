//! The boot processor's registers at the kernel's first instruction, as plain data, and the
//! tables in guest memory that they point to.

use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};

use firmware::layout;

use super::memory::{
    BOOT_STACK_TOP, GDT_START, GuestMemory, MemoryError, PAGE_TABLES_START, TSS_START, write,
};
use super::page_tables::{little_endian, write_page_tables};

/// Code selector that the Linux boot protocol asks for (`__BOOT_CS`).
pub const CODE_SELECTOR: u16 = 0x10;
/// Data selector that the Linux boot protocol asks for (`__BOOT_DS`).
pub const DATA_SELECTOR: u16 = 0x18;
/// Selector of the task state segment.
pub const TSS_SELECTOR: u16 = 0x20;

/// RFLAGS with all flags clear; bit 1 is always set.
const RFLAGS_RESERVED: u64 = 1 << 1;
/// CR0: protected mode.
const CR0_PE: u64 = 1 << 0;
/// CR0: extension type, always set on current CPUs.
const CR0_ET: u64 = 1 << 4;
/// CR0: floating-point errors are exceptions.
const CR0_NE: u64 = 1 << 5;
/// CR0: paging.
const CR0_PG: u64 = 1 << 31;
/// CR4: 64-bit page-table entries.
const CR4_PAE: u64 = 1 << 5;
/// EFER: long mode enabled.
const EFER_LME: u64 = 1 << 8;
/// EFER: long mode active.
const EFER_LMA: u64 = 1 << 10;

/// A segment register with its hidden part (SDM vol. 3A, 3.4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentRegister {
    /// Visible selector.
    pub selector: u16,
    /// Linear base address.
    pub base: u64,
    /// Last valid offset in bytes, the granularity already applied.
    pub limit: u32,
    /// Type field, 4 bits.
    pub kind: u8,
    /// Code or data (`true`), or a system segment.
    pub code_or_data: bool,
    /// 64-bit code.
    pub long: bool,
    /// 32-bit default operand size.
    pub default_32: bool,
    /// Limit counted in pages.
    pub page_granular: bool,
}

impl SegmentRegister {
    /// Executable, readable, accessed.
    pub(crate) const CODE: u8 = 0xb;
    /// Writable, accessed.
    const DATA: u8 = 0x3;
    /// A task state segment in use: VM entry accepts no other in TR.
    const BUSY_TSS: u8 = 0xb;

    pub(crate) const fn flat(selector: u16, kind: u8, long: bool) -> Self {
        Self {
            selector,
            base: 0,
            limit: u32::MAX,
            kind,
            code_or_data: true,
            long,
            default_32: !long,
            page_granular: true,
        }
    }

    const fn tss() -> Self {
        Self {
            selector: TSS_SELECTOR,
            base: TSS_START,
            limit: 0x67,
            kind: Self::BUSY_TSS,
            code_or_data: false,
            long: false,
            default_32: false,
            page_granular: false,
        }
    }

    /// The 8-byte descriptor; the upper half of a 64-bit system descriptor holds base bits 32-63.
    pub(crate) fn descriptor(&self) -> u64 {
        let limit = u64::from(if self.page_granular {
            self.limit >> 12
        } else {
            self.limit
        });
        let present = 1 << 47;
        (limit & 0xffff)
            | (self.base & 0xff_ffff) << 16
            | u64::from(self.kind) << 40
            | u64::from(self.code_or_data) << 44
            | present
            | (limit >> 16 & 0xf) << 48
            | u64::from(self.long) << 53
            | u64::from(self.default_32) << 54
            | u64::from(self.page_granular) << 55
            | (self.base >> 24 & 0xff) << 56
    }
}

impl From<SegmentRegister> for kvm_segment {
    fn from(segment: SegmentRegister) -> Self {
        Self {
            base: segment.base,
            limit: segment.limit,
            selector: segment.selector,
            type_: segment.kind,
            present: 1,
            dpl: 0,
            db: u8::from(segment.default_32),
            s: u8::from(segment.code_or_data),
            l: u8::from(segment.long),
            g: u8::from(segment.page_granular),
            avl: 0,
            unusable: 0,
            padding: 0,
        }
    }
}

/// GDTR or IDTR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorTable {
    /// Linear base address.
    pub base: u64,
    /// Last valid offset in bytes.
    pub limit: u16,
}

impl From<DescriptorTable> for kvm_dtable {
    fn from(table: DescriptorTable) -> Self {
        Self {
            base: table.base,
            limit: table.limit,
            padding: [0; 3],
        }
    }
}

/// Everything that the boot processor's registers must hold. General registers that are not named
/// are 0, all others keep their reset values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InitialState {
    /// First instruction, guest-physical and linear alike.
    pub rip: u64,
    /// Top of a small stack, for kernels that use one before they have their own.
    pub rsp: u64,
    /// All flags clear, interrupts off.
    pub rflags: u64,
    /// Multiboot: the boot loader's magic value; else 0.
    pub rax: u64,
    /// PVH: start info; Multiboot: information structure; else 0.
    pub rbx: u64,
    /// Linux: zero page; firmware: its configuration area; else 0.
    pub rsi: u64,
    /// Control register 0.
    pub cr0: u64,
    /// Root of the identity map, 0 without paging.
    pub cr3: u64,
    /// Control register 4.
    pub cr4: u64,
    /// Extended feature enable register.
    pub efer: u64,
    /// Code segment.
    pub cs: SegmentRegister,
    /// For DS, ES, FS, GS and SS.
    pub data: SegmentRegister,
    /// Task register.
    pub tr: SegmentRegister,
    /// Global descriptor table.
    pub gdt: DescriptorTable,
    /// Interrupt descriptor table: empty, the kernel brings its own.
    pub idt: DescriptorTable,
}

impl InitialState {
    /// General registers, RIP and RFLAGS.
    pub(crate) fn general(&self) -> kvm_regs {
        kvm_regs {
            rip: self.rip,
            rsp: self.rsp,
            rflags: self.rflags,
            rax: self.rax,
            rbx: self.rbx,
            rsi: self.rsi,
            ..Default::default()
        }
    }

    /// Segments, tables and control registers of a processor that has the others as in `reset`.
    pub(crate) fn special(&self, reset: kvm_sregs) -> kvm_sregs {
        let data = self.data.into();
        kvm_sregs {
            cs: self.cs.into(),
            ds: data,
            es: data,
            fs: data,
            gs: data,
            ss: data,
            tr: self.tr.into(),
            gdt: self.gdt.into(),
            idt: self.idt.into(),
            cr0: self.cr0,
            cr3: self.cr3,
            cr4: self.cr4,
            efer: self.efer,
            ..reset
        }
    }

    /// 64-bit mode with the first 4 GiB mapped one to one.
    ///
    /// Source: the kernel's `Documentation/arch/x86/boot.rst`, "64-bit boot protocol".
    #[must_use]
    pub fn linux64(rip: u64, zero_page: u64) -> Self {
        Self {
            rsi: zero_page,
            cr0: CR0_PE | CR0_ET | CR0_NE | CR0_PG,
            cr3: PAGE_TABLES_START,
            cr4: CR4_PAE,
            efer: EFER_LME | EFER_LMA,
            cs: SegmentRegister::flat(CODE_SELECTOR, SegmentRegister::CODE, true),
            ..Self::protected32(rip)
        }
    }

    /// 32-bit protected mode with flat segments, paging off.
    #[must_use]
    pub fn pvh(rip: u64, start_info: u64) -> Self {
        Self {
            rbx: start_info,
            ..Self::protected32(rip)
        }
    }

    /// 32-bit protected mode with flat segments and the magic value in EAX (Multiboot Specification
    /// 0.6.96, 3.2).
    #[must_use]
    pub fn multiboot(rip: u64, info: u64, magic: u32) -> Self {
        Self {
            rax: magic.into(),
            rbx: info,
            ..Self::protected32(rip)
        }
    }

    /// 64-bit mode with the first 4 GiB mapped one to one, and stack and tables in the firmware's
    /// own memory.
    pub(crate) fn firmware(rip: u64) -> Self {
        Self {
            rsp: layout::STACK_TOP,
            cr3: layout::PAGE_TABLES,
            cs: SegmentRegister::flat(layout::CODE_64, SegmentRegister::CODE, true),
            data: SegmentRegister::flat(layout::DATA, SegmentRegister::DATA, false),
            tr: SegmentRegister {
                selector: layout::TASK,
                ..SegmentRegister::tss()
            },
            gdt: DescriptorTable {
                base: layout::GDT,
                limit: layout::GDT_SIZE - 1,
            },
            ..Self::linux64(rip, layout::CONFIG)
        }
    }

    fn protected32(rip: u64) -> Self {
        Self {
            rip,
            rsp: BOOT_STACK_TOP,
            rflags: RFLAGS_RESERVED,
            rax: 0,
            rbx: 0,
            rsi: 0,
            cr0: CR0_PE | CR0_ET,
            cr3: 0,
            cr4: 0,
            efer: 0,
            cs: SegmentRegister::flat(CODE_SELECTOR, SegmentRegister::CODE, false),
            // In 64-bit mode the CPU ignores the size and limit of a data segment.
            data: SegmentRegister::flat(DATA_SELECTOR, SegmentRegister::DATA, false),
            tr: SegmentRegister::tss(),
            gdt: DescriptorTable {
                base: GDT_START,
                limit: GDT_LIMIT,
            },
            idt: DescriptorTable { base: 0, limit: 0 },
        }
    }

    /// Writes the descriptor table, and the page tables if paging is on.
    pub(crate) fn write_tables(&self, mem: &GuestMemory) -> Result<(), MemoryError> {
        let tss_high = 0;
        let entries = [
            0,
            0,
            self.cs.descriptor(),
            self.data.descriptor(),
            self.tr.descriptor(),
            tss_high,
        ];
        write(mem, GDT_START, &little_endian(&entries))?;
        write(mem, TSS_START, &[0; 0x68])?;
        if self.cr0 & CR0_PG != 0 {
            write_page_tables(mem, self.cr3)?;
        }
        Ok(())
    }
}

/// Six entries: two null, code, data, and a task state segment of double width.
const GDT_LIMIT: u16 = 6 * 8 - 1;

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::boot::memory::create;

    fn word(mem: &GuestMemory, address: u64) -> u64 {
        mem.read_obj(GuestAddress(address))
            .expect("inside guest memory")
    }

    #[test]
    fn descriptors_have_the_bits_that_the_boot_protocols_ask_for() {
        let mem = create(2).expect("memory");
        let gdt = |selector: u16| word(&mem, GDT_START + u64::from(selector));
        InitialState::linux64(0, 0)
            .write_tables(&mem)
            .expect("tables");
        assert_eq!(gdt(CODE_SELECTOR), 0x00af_9b00_0000_ffff);
        assert_eq!(gdt(DATA_SELECTOR), 0x00cf_9300_0000_ffff);
        assert_eq!(gdt(TSS_SELECTOR), 0x0000_8b00_0600_0067);
        assert_eq!(gdt(TSS_SELECTOR + 8), 0);
        InitialState::pvh(0, 0).write_tables(&mem).expect("tables");
        assert_eq!(gdt(CODE_SELECTOR), 0x00cf_9b00_0000_ffff);
    }

    #[test]
    fn modes_differ_in_control_registers() {
        let long = InitialState::linux64(0x100_0000, 0x7000);
        assert_eq!((long.cr0, long.cr4, long.efer), (0x8000_0031, 0x20, 0x500));
        assert_eq!(
            (long.rip, long.rsi, long.rbx, long.rflags),
            (0x100_0000, 0x7000, 0, 2)
        );
        let flat = InitialState::multiboot(0x10_0000, 0x8000, 0x2bad_b002);
        assert_eq!((flat.cr0, flat.cr3, flat.cr4, flat.efer), (0x11, 0, 0, 0));
        assert_eq!((flat.rax, flat.rbx, flat.rsi), (0x2bad_b002, 0x8000, 0));
        assert!(flat.cs.default_32 && !flat.cs.long);
    }

    #[test]
    fn kvm_structures_carry_every_field() {
        let cs = kvm_segment::from(InitialState::linux64(0, 0).cs);
        assert_eq!(
            (cs.selector, cs.type_, cs.s, cs.l, cs.db, cs.g),
            (0x10, 0xb, 1, 1, 0, 1)
        );
        let tr = kvm_segment::from(InitialState::linux64(0, 0).tr);
        assert_eq!(
            (tr.base, tr.limit, tr.s, tr.present, tr.unusable),
            (0x600, 0x67, 0, 1, 0)
        );
        let gdt = kvm_dtable::from(InitialState::pvh(0, 0).gdt);
        assert_eq!((gdt.base, gdt.limit), (0x500, 0x2f));
    }
}
