//! Registers of an emulated processor as KVM's structures, plain data that others know, and
//! back.

use emu::{Seg, Segment, State, Table};
use kvm_bindings::{kvm_debugregs, kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};

use crate::boot::InitialState;

/// RAX to R15 by their numbers, RIP and RFLAGS.
#[must_use]
pub fn general(state: &State) -> kvm_regs {
    let [
        rax,
        rcx,
        rdx,
        rbx,
        rsp,
        rbp,
        rsi,
        rdi,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
        ..,
    ] = state.r;
    kvm_regs {
        rax,
        rbx,
        rcx,
        rdx,
        rsi,
        rdi,
        rsp,
        rbp,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
        rip: state.rip,
        rflags: state.rflags(),
    }
}

/// Segments, tables and control registers; `apic_base` is the local APIC's.
#[must_use]
pub fn special(state: &State, apic_base: u64) -> kvm_sregs {
    let segment = |seg| segment(state.segment(seg));
    kvm_sregs {
        cs: segment(Seg::Cs),
        ds: segment(Seg::Ds),
        es: segment(Seg::Es),
        fs: segment(Seg::Fs),
        gs: segment(Seg::Gs),
        ss: segment(Seg::Ss),
        tr: segment(Seg::Tr),
        ldt: segment(Seg::Ldtr),
        gdt: table(state.gdtr),
        idt: table(state.idtr),
        cr0: state.cr0,
        cr2: state.cr2,
        cr3: state.cr3,
        cr4: state.cr4,
        cr8: state.cr8,
        efer: state.efer,
        apic_base,
        interrupt_bitmap: [0; 4],
    }
}

/// The debug registers.
#[must_use]
pub fn debug(state: &State) -> kvm_debugregs {
    kvm_debugregs {
        db: state.dr,
        dr6: state.dr6,
        dr7: state.dr7,
        ..Default::default()
    }
}

/// A processor before the first instruction of what was loaded.
#[must_use]
pub fn starting_at(start: &InitialState) -> State {
    state_of(&start.general(), &start.special(kvm_sregs::default()))
}

/// A processor that has these registers, and is otherwise as after a reset.
#[must_use]
pub fn state_of(regs: &kvm_regs, sregs: &kvm_sregs) -> State {
    let mut state = State {
        rip: regs.rip,
        cr0: sregs.cr0,
        cr2: sregs.cr2,
        cr3: sregs.cr3,
        cr4: sregs.cr4,
        cr8: sregs.cr8,
        efer: sregs.efer,
        gdtr: Table {
            base: sregs.gdt.base,
            limit: sregs.gdt.limit,
        },
        idtr: Table {
            base: sregs.idt.base,
            limit: sregs.idt.limit,
        },
        ..State::default()
    };
    let general = [
        regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi, regs.r8,
        regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
    ];
    state.r[..general.len()].copy_from_slice(&general);
    for (seg, from) in [
        (Seg::Cs, &sregs.cs),
        (Seg::Ds, &sregs.ds),
        (Seg::Es, &sregs.es),
        (Seg::Fs, &sregs.fs),
        (Seg::Gs, &sregs.gs),
        (Seg::Ss, &sregs.ss),
        (Seg::Tr, &sregs.tr),
        (Seg::Ldtr, &sregs.ldt),
    ] {
        state.set_segment(seg, loaded(from));
    }
    state.set_rflags(regs.rflags);
    state
}

fn segment(from: Segment) -> kvm_segment {
    let bits = |at: u32, mask: u16| (from.attr >> at & mask).to_le_bytes()[0];
    kvm_segment {
        base: from.base,
        limit: from.limit,
        selector: from.selector,
        type_: bits(0, 15),
        s: bits(4, 1),
        dpl: bits(5, 3),
        present: bits(7, 1),
        avl: bits(12, 1),
        l: bits(13, 1),
        db: bits(14, 1),
        g: bits(15, 1),
        unusable: u8::from(!from.is_usable()),
        padding: 0,
    }
}

fn loaded(from: &kvm_segment) -> Segment {
    let bits = |value: u8, at: u32| u16::from(value) << at;
    let attr = bits(from.type_ & 15, 0)
        | bits(from.s & 1, 4)
        | bits(from.dpl & 3, 5)
        | bits(from.present & 1, 7)
        | bits(from.avl & 1, 12)
        | bits(from.l & 1, 13)
        | bits(from.db & 1, 14)
        | bits(from.g & 1, 15);
    Segment {
        selector: from.selector,
        attr: if from.unusable == 0 { attr } else { 0 },
        limit: from.limit,
        base: from.base,
    }
}

fn table(from: Table) -> kvm_dtable {
    kvm_dtable {
        base: from.base,
        limit: from.limit,
        padding: [0; 3],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_come_back_as_they_were() {
        let mut state = State::long_mode(0x1000, 3);
        for (number, register) in (1..).zip(&mut state.r[..16]) {
            *register = number * 0x0101_0101_0101_0101;
        }
        state.rip = 0xffff_8000_0000_1234;
        state.set_rflags(0x246);
        state.cr2 = 5;
        state.cr8 = 7;
        state.gdtr = Table {
            base: 0x5000,
            limit: 0x3f,
        };
        let fs = Segment {
            base: 0x7777_0000,
            ..state.segment(Seg::Fs)
        };
        state.set_segment(Seg::Fs, fs);
        let back = state_of(&general(&state), &special(&state, 0));
        assert_eq!(back, state);
        assert_eq!(general(&back).r15, 0x1010_1010_1010_1010);
    }
}
