//! Where things lie in a tiny guest's memory: 4 MiB from address 0, identity
//! mapped and open to both rings, and the local APIC's page. The probes' guests have it, and
//! Umpire's micro-guests.

use kvm_bindings::{kvm_dtable, kvm_segment, kvm_sregs};

use crate::memory::GuestBytes;

/// Size of the memory in bytes.
pub const MEMORY_SIZE: usize = 4 << 20;
/// Kernel code starts here.
pub const KERNEL_CODE: u64 = 0x10_0000;
/// User code starts here.
pub const USER_CODE: u64 = 0x20_0000;
/// Free memory for a guest's own data: 64 KiB.
pub const SCRATCH: u64 = 0x30_0000;
/// Top of the kernel's stack for vCPU 0; those of vCPUs 1 to 7 are 16 KiB below
/// each other.
pub const KERNEL_STACK: u64 = 0x9_0000;
/// Top of the user's stack for vCPU 0; those of vCPUs 1 to 7 are 16 KiB below
/// each other.
pub const USER_STACK: u64 = 0x7_0000;
/// The local APIC's registers in xAPIC mode.
pub const LAPIC: u64 = 0xfee0_0000;

/// Kernel code selector.
pub const KERNEL_CS: u16 = 0x08;
/// Kernel stack selector.
pub const KERNEL_SS: u16 = 0x10;
/// User stack selector (SYSRET loads the selector that follows 0x10 | 3).
pub const USER_SS: u16 = 0x1b;
/// User code selector.
pub const USER_CS: u16 = 0x23;

const STACK_STRIDE: u64 = 0x4000;
/// vCPUs whose stacks are that large; those of the others are 4 KiB each, behind
/// [`SCRATCH`].
const LARGE_STACKS: u32 = 8;
const SMALL_STACKS: u64 = SCRATCH + 0x1_0000;
const SMALL_STACK: u64 = 0x1000;

/// Where the kernel's stack of a vCPU begins, downwards.
#[must_use]
pub fn kernel_stack(vcpu: u32) -> u64 {
    stack(vcpu, KERNEL_STACK, 1)
}

/// Where the user's stack of a vCPU begins, downwards.
#[must_use]
pub fn user_stack(vcpu: u32) -> u64 {
    stack(vcpu, USER_STACK, 2)
}

fn stack(vcpu: u32, first: u64, place: u64) -> u64 {
    match vcpu.checked_sub(LARGE_STACKS) {
        None => first - u64::from(vcpu) * STACK_STRIDE,
        Some(further) => SMALL_STACKS + (u64::from(further) * 2 + place) * SMALL_STACK,
    }
}

/// Code for each vector that nobody handles.
pub const STUBS: u64 = 0x1_0000;
/// Bytes from one to the next.
pub const STUB_SIZE: u64 = 16;

const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD_LOW: u64 = 0x3000;
const PD_APIC: u64 = 0x4000;
const GDT: u64 = 0x5000;
const IDT: u64 = 0x6000;
const TSS: u64 = 0x7000;
const TSS_STRIDE: u64 = 0x80;
const TSS_LIMIT: u32 = 0x67;
const TSS_SELECTOR: u16 = 0x28;

const PRESENT_WRITE_USER: u64 = 7;
const LARGE: u64 = 1 << 7;
const UNCACHED: u64 = 1 << 4;

const CR0_PE: u64 = 1;
const CR0_MP: u64 = 1 << 1;
const CR0_NE: u64 = 1 << 5;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_OSFXSR: u64 = 1 << 9;
const EFER_SCE: u64 = 1;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

/// Writes page tables, GDT and TSSes; the IDT is [`write_gate`]'s.
pub fn write_tables(memory: &dyn GuestBytes, vcpus: u8) {
    let put = |address: u64, value: u64| {
        let written = memory.write(address, &value.to_le_bytes());
        assert!(written, "the tables lie inside the guest's memory");
    };
    put(PML4, PDPT | PRESENT_WRITE_USER);
    put(PDPT, PD_LOW | PRESENT_WRITE_USER);
    put(PDPT + 8 * (LAPIC >> 30), PD_APIC | PRESENT_WRITE_USER);
    for page in 0..(MEMORY_SIZE as u64 >> 21) {
        put(PD_LOW + 8 * page, page << 21 | LARGE | PRESENT_WRITE_USER);
    }
    put(
        PD_APIC + 8 * (LAPIC >> 21 & 0x1ff),
        LAPIC | LARGE | UNCACHED | PRESENT_WRITE_USER,
    );
    for (index, (segment, _)) in [
        (code(KERNEL_CS, 0), 0),
        (data(KERNEL_SS, 0), 0),
        (data(USER_SS, 3), 3),
        (code(USER_CS, 3), 3),
    ]
    .iter()
    .enumerate()
    {
        put(GDT + 8 * (index as u64 + 1), descriptor(segment));
    }
    for vcpu in 0..vcpus {
        // RSP0 is the second doubleword of a 64-bit TSS (SDM vol. 3A, figure 9-11).
        let tss = TSS + u64::from(vcpu) * TSS_STRIDE;
        let bytes = kernel_stack(vcpu.into()).to_le_bytes();
        let written = memory.write(tss + 4, &bytes);
        assert!(written, "the TSS lies inside the guest's memory");
    }
}

/// Points vector `vector` to `handler` through an interrupt gate that CPL 3
/// may call with INT n.
pub fn write_gate(memory: &dyn GuestBytes, vector: u8, handler: u64) {
    const INTERRUPT_GATE_DPL3: u64 = 0xee00;
    let low = (handler & 0xffff)
        | u64::from(KERNEL_CS) << 16
        | INTERRUPT_GATE_DPL3 << 32
        | (handler >> 16 & 0xffff) << 48;
    let at = IDT + 16 * u64::from(vector);
    for (offset, word) in [(0, low), (8, handler >> 32)] {
        let written = memory.write(at + offset, &word.to_le_bytes());
        assert!(written, "the IDT lies inside the guest's memory");
    }
}

/// Special registers of a vCPU that starts in 64-bit mode at CPL `cpl`.
#[must_use]
pub fn special_registers(reset: &kvm_sregs, vcpu: u32, cpl: u8) -> kvm_sregs {
    let mut sregs = *reset;
    sregs.cr0 = CR0_PE | CR0_MP | CR0_NE | CR0_PG;
    sregs.cr3 = PML4;
    sregs.cr4 = CR4_PAE | CR4_OSFXSR;
    sregs.efer = EFER_LME | EFER_LMA | EFER_SCE;
    let (cs, ss) = match cpl {
        3 => (code(USER_CS, 3), data(USER_SS, 3)),
        _ => (code(KERNEL_CS, 0), data(KERNEL_SS, 0)),
    };
    sregs.cs = cs;
    sregs.ss = ss;
    for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs] {
        *segment = data(USER_SS, 3);
    }
    sregs.tr = kvm_segment {
        base: TSS + u64::from(vcpu) * TSS_STRIDE,
        limit: TSS_LIMIT,
        selector: TSS_SELECTOR,
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    sregs.gdt = kvm_dtable {
        base: GDT,
        limit: 0x3f,
        padding: [0; 3],
    };
    sregs.idt = kvm_dtable {
        base: IDT,
        limit: 0xfff,
        padding: [0; 3],
    };
    sregs
}

fn code(selector: u16, dpl: u8) -> kvm_segment {
    kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_: 0xb,
        present: 1,
        dpl,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    }
}

fn data(selector: u16, dpl: u8) -> kvm_segment {
    kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_: 3,
        present: 1,
        dpl,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}

/// The 8 bytes of a flat code or data descriptor (SDM vol. 3A, 3.4.5).
fn descriptor(segment: &kvm_segment) -> u64 {
    let bit = |value: u8, at: u32| u64::from(value) << at;
    0xffff
        | bit(segment.type_, 40)
        | bit(segment.s, 44)
        | bit(segment.dpl, 45)
        | bit(segment.present, 47)
        | 0xf << 48
        | bit(segment.l, 53)
        | bit(segment.db, 54)
        | bit(segment.g, 55)
}
