//! A guest of 32 bits, whose handler is never patched: protected mode, flat segments, no
//! paging. Not for L1, whose QEMU ends itself with such a guest.

use iced_x86::code_asm::{CodeAssembler, eax, ebx, ecx, edx};
use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_pmu::{Armed, TrapMode};

use super::can_run;
use super::vmm::{
    COUNT, END, GDT, GP_TAKEN, HANDLER, MAIN, PAUSE, VALUE, Vcpu, Vmm, Written, read, report,
    stopped,
};

const IDT: u64 = 0x7000;
const TSS: u64 = 0x8000;
const STACK: u64 = 0xa000;
const UD_HANDLER: u64 = 0x1_3000;
const USER: u64 = 0x1_4000;
const USER_STACK: u64 = 0xc000;
/// What a program at CPL 3 has read.
const READ: u32 = 0xd000;

const KERNEL_CS: u16 = 0x08;
const KERNEL_SS: u16 = 0x10;
const USER_CS: u16 = 0x1b;
const USER_SS: u16 = 0x23;
const PCE: u64 = 1 << 8;

/// Spins for `ticks` of the TSC.
fn spin_for(a: &mut CodeAssembler, ticks: u64) -> Written {
    let mut again = a.create_label();
    a.rdtsc()?;
    a.mov(ebx, eax)?;
    a.mov(ecx, edx)?;
    a.add(ebx, (ticks & 0xffff_ffff) as u32)?;
    a.adc(ecx, (ticks >> 32) as u32)?;
    a.set_label(&mut again)?;
    a.rdtsc()?;
    a.sub(eax, ebx)?;
    a.sbb(edx, ecx)?;
    a.jb(again)
}

/// The machine, with `main` at CPL 0.
fn guest(main: impl FnOnce(&mut CodeAssembler) -> Written) -> Vmm {
    let vmm = Vmm::new(TrapMode::Auto);
    let gate = |handler: u64| {
        handler & 0xffff | u64::from(KERNEL_CS) << 16 | 0x8e00 << 32 | (handler >> 16) << 48
    };
    for (at, word) in [
        (GDT + 0x08, 0x00cf_9b00_0000_ffff),
        (GDT + 0x10, 0x00cf_9300_0000_ffff),
        (GDT + 0x18, 0x00cf_fb00_0000_ffff),
        (GDT + 0x20, 0x00cf_f300_0000_ffff),
        (IDT + 8 * 13, gate(HANDLER)),
        (IDT + 8 * 6, gate(UD_HANDLER)),
        // ESP0 and SS0.
        (TSS + 4, STACK | u64::from(KERNEL_SS) << 32),
    ] {
        vmm.put(at, &word.to_le_bytes());
    }
    // It would be patched in a guest of 64 bits: NOP of three bytes.
    vmm.code(HANDLER, 32, |a| {
        a.db(&[0x0f, 0x1f, 0x00])?;
        report(a, GP_TAKEN)?;
        a.hlt()
    });
    // CPL 3 ends here, as it has no ports.
    vmm.code(UD_HANDLER, 32, |a| {
        a.mov(eax, iced_x86::code_asm::dword_ptr(READ))?;
        report(a, VALUE)?;
        report(a, END)
    });
    vmm.code(USER, 32, |a| {
        a.xor(ecx, ecx)?;
        a.rdpmc()?;
        a.mov(iced_x86::code_asm::dword_ptr(READ), eax)?;
        a.ud2()
    });
    vmm.code(MAIN, 32, main);
    vmm
}

fn started(vmm: &Vmm, cr4: u64) -> Vcpu {
    let vcpu = vmm.vcpu(0, None);
    let segment = |selector: u16, type_: u8| kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    let mut sregs = vcpu.kvm.get_sregs().unwrap();
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (1 << 5 | 1, 0, cr4, 0);
    sregs.cs = segment(KERNEL_CS, 0xb);
    let data = segment(KERNEL_SS, 3);
    (sregs.ss, sregs.ds, sregs.es, sregs.fs, sregs.gs) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        base: TSS,
        limit: 0x67,
        selector: 0x28,
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 0x2f);
    (sregs.idt.base, sregs.idt.limit) = (IDT, 0x7ff);
    let regs = kvm_regs {
        rip: MAIN,
        rsp: STACK,
        rflags: 2,
        ..Default::default()
    };
    vcpu.set(&regs, &sregs);
    vcpu
}

/// The program at CPL 3 is next.
fn enter_user(vcpu: &mut Vcpu) {
    vcpu.leave();
    let mut sregs = vcpu.kvm.get_sregs().unwrap();
    let user = |segment: kvm_segment, selector| kvm_segment {
        selector,
        dpl: 3,
        ..segment
    };
    sregs.cs = user(sregs.cs, USER_CS);
    let data = user(sregs.ss, USER_SS);
    (sregs.ss, sregs.ds, sregs.es, sregs.fs, sregs.gs) = (data, data, data, data, data);
    let regs = kvm_regs {
        rip: USER,
        rsp: USER_STACK,
        rflags: 2,
        ..Default::default()
    };
    vcpu.set(&regs, &sregs);
}

/// More than six seconds after it stopped its last counter it reads at both rings, where
/// CR4.PCE lets it.
#[test]
fn a_32_bit_guest_reads_long_after_it_stopped_its_counters() {
    if !can_run("a_32_bit_guest_reads_long_after_it_stopped_its_counters") {
        return;
    }
    let tsc_khz = Vmm::new(TrapMode::Auto).vcpu(0, None).pmu.tsc_khz();
    for (cr4, wait_ms) in [(PCE, 6_500), (0, 300)] {
        let vmm = guest(|a| {
            stopped(a)?;
            spin_for(a, u64::from(tsc_khz) * wait_ms)?;
            read(a)?;
            report(a, PAUSE)
        });
        let mut vcpu = started(&vmm, cr4);
        let kernel = vcpu.reports(&vmm);
        assert_eq!(kernel, [(VALUE, COUNT), (PAUSE, COUNT)], "CR4 {cr4:#x}");
        enter_user(&mut vcpu);
        let user = vcpu.reports(&vmm);
        let right = match cr4 {
            0 => matches!(user.as_slice(), [(GP_TAKEN, _)]),
            _ => user == [(VALUE, COUNT), (END, COUNT)],
        };
        assert!(right, "CR4 {cr4:#x}: {user:x?}");
        let armed = vcpu.seen.0.as_slice();
        assert!(matches!(armed, [Armed::Breakpoint(Some(_))]), "{armed:?}");
    }
}
