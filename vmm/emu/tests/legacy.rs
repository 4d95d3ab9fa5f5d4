//! Code of 16 and 32 bits.

use emu::{Seg, Segment, State, Table, VmExit};

use crate::guest::{Guest, Happened, PAGES, announcing};
use crate::system::{CODE, DATA, change, guest};

/// Real mode at `selector`:`rip`.
fn real(selector: u16, rip: u64) -> State {
    let mut state = State::default();
    load(&mut state, Seg::Cs, selector);
    state.rip = rip;
    state.r[4] = 0x800;
    state
}

fn load(state: &mut State, seg: Seg, selector: u16) {
    let segment = Segment {
        selector,
        base: u64::from(selector) << 4,
        ..state.segment(seg)
    };
    state.set_segment(seg, segment);
}

#[test]
fn the_same_offset_in_another_segment_is_another_place() {
    let mut guest = Guest::new();
    // INC AX; JMP 9000:0, and INC BX; JMP 8000:0.
    guest.bytes(0x8_0000, &[0x40, 0xea, 0, 0, 0, 0x90]);
    guest.bytes(0x9_0000, &[0x43, 0xea, 0, 0, 0, 0x80]);
    guest.cpu.set_state(real(0x8000, 0));
    assert_eq!(guest.cpu.run(8), VmExit::Budget);
    let state = guest.cpu.state();
    assert_eq!((state.r[0], state.r[3]), (2, 2));
}

#[test]
fn code_ends_where_its_segment_does() {
    for budget in [1, 100] {
        let mut guest = Guest::new();
        // #GP's handler at 8000:200 is HLT.
        guest.bytes(0x34, &[0, 2, 0, 0x80]);
        guest.bytes(0x8_0200, &[0xf4]);
        guest.bytes(0x8_0100, &[0x40; 8]);
        let mut state = real(0x8000, 0x100);
        let cs = Segment {
            limit: 0x103,
            ..state.segment(Seg::Cs)
        };
        state.set_segment(Seg::Cs, cs);
        guest.cpu.set_state(state);
        while guest.cpu.state().rip < 0x104 {
            assert_eq!(guest.cpu.run(1), VmExit::Budget);
        }
        // Its handler is beyond the limit too: nothing but #GP comes of it.
        let _ = guest.cpu.run(budget);
        assert_eq!(guest.cpu.state().r[0], 4, "{budget}");
    }
    // An instruction that crosses the end has no part in it.
    let mut guest = Guest::new();
    guest.bytes(0x34, &[0, 2, 0, 0]);
    guest.bytes(0x200, &[0xf4]);
    guest.bytes(0x8_0100, &[0x40, 0xb8, 1, 1]);
    let mut state = real(0x8000, 0x100);
    let cs = Segment {
        limit: 0x102,
        ..state.segment(Seg::Cs)
    };
    state.set_segment(Seg::Cs, cs);
    guest.cpu.set_state(state);
    assert_eq!(guest.cpu.run(2), VmExit::Budget);
    assert_eq!((guest.cpu.state().r[0], guest.cpu.state().rip), (1, 0x200));
}

#[test]
fn a_stack_in_a_page_of_code() {
    let mut guest = Guest::new();
    // UD2; the handler, at 0:8010, is HLT.
    guest.bytes(0x18, &[0x10, 0, 0, 0x80]);
    guest.bytes(0x8_0000, &[0x90, 0x0f, 0x0b]);
    guest.bytes(0x8_0010, &[0xf4]);
    let mut state = real(0x8000, 0);
    load(&mut state, Seg::Ss, 0x8000);
    guest.cpu.set_state(state);
    assert_eq!(guest.cpu.run(10), VmExit::Halted);
    assert_eq!(guest.word(0x8_07fa) & 0xffff_ffff, 0x8000_0001);
}

#[test]
fn real_mode_has_no_privilege() {
    // MOV EAX,CR0; OR AL,1; MOV CR0,EAX; MOV EAX,CR0, in a segment whose selector has an RPL.
    let code = [
        0x0f, 0x20, 0xc0, 0x0c, 1, 0x0f, 0x22, 0xc0, 0x0f, 0x20, 0xc0, 0xf4,
    ];
    let mut guest = Guest::new();
    guest.bytes(0x8_0000, &code);
    guest.cpu.set_state(real(0x7fff, 0x10));
    assert_eq!(guest.cpu.run(100), VmExit::Halted);
    assert_eq!(guest.cpu.state().cpl(), 0);
}

/// 32-bit code of CPL 3 in long mode.
fn compatible(code: &[u8]) -> Guest {
    let mut guest = guest(3, code);
    change(&mut guest, |state| {
        let cs = Segment {
            selector: 0x3b,
            attr: 0xc0fb,
            limit: u32::MAX,
            base: 0,
        };
        state.set_segment(Seg::Cs, cs);
    });
    guest
}

/// Runs code of one instruction with EAX and RFLAGS; gives EAX and CF and AF.
fn with(code: &[u8], eax: u64, rflags: u64) -> (u64, u64) {
    let mut guest = compatible(code);
    change(&mut guest, |state| {
        state.r[0] = eax;
        state.set_rflags(rflags | 2);
    });
    assert_eq!(guest.one(), Happened::Retired, "{code:x?}");
    (guest.cpu.state().r[0], guest.cpu.state().rflags() & 0x11)
}

#[test]
fn decimals() {
    // The manual's examples (SDM vol. 2A, DAA and DAS), then the edges of both digits.
    assert_eq!(with(&[0x27], 0xae, 0), (0x14, 0x11));
    assert_eq!(with(&[0x2f], 0xee, 0x11), (0x88, 0x11));
    assert_eq!(with(&[0x27], 0x12, 0), (0x12, 0));
    assert_eq!(with(&[0x27], 0x9a, 0), (0x00, 0x11));
    assert_eq!(with(&[0x2f], 0x05, 0x10), (0xff, 0x11));
    // AAA, AAS.
    assert_eq!(with(&[0x37], 0x010b, 0), (0x0201, 0x11));
    assert_eq!(with(&[0x37], 0x0115, 0), (0x0105, 0));
    assert_eq!(with(&[0x3f], 0x020b, 0), (0x0105, 0x11));
    // AAM, AAD, SALC.
    assert_eq!(with(&[0xd4, 10], 0x1234, 0).0, 0x0502);
    assert_eq!(with(&[0xd5, 10], 0x0502, 0).0, 52);
    assert_eq!(with(&[0xd6], 0x1200, 1).0, 0x12ff);
    assert_eq!(with(&[0xd6], 0x1234, 0).0, 0x1200);
    assert_eq!(compatible(&[0xd4, 0]).one(), Happened::Fault(0, 0, 0));
}

#[test]
fn all_registers() {
    // PUSHAD; XOR EAX,EAX; POPAD; HLT.
    let mut guest = compatible(&[0x60, 0x31, 0xc0, 0x61]);
    let before = guest.cpu.state().clone();
    change(&mut guest, |state| state.r[0] = 0x1234_5678);
    assert_eq!(guest.one(), Happened::Retired);
    assert_eq!(guest.cpu.state().r[4], before.r[4] - 32);
    let top = PAGES + 0x1800;
    assert_eq!(guest.word(top - 8), before.r[1] | 0x1234_5678 << 32);
    assert_eq!(guest.word(top - 24), before.r[5] | before.r[4] << 32);
    assert_eq!(guest.word(top - 32), before.r[7] | before.r[6] << 32);
    assert_eq!(guest.one(), Happened::Retired);
    assert_eq!(guest.one(), Happened::Retired);
    let state = guest.cpu.state();
    assert_eq!(state.r[0], 0x1234_5678);
    assert_eq!(state.r[1..16], before.r[1..16]);
}

#[test]
fn bounds_overflow_and_privilege() {
    // BOUND EAX,[ESI].
    let bound = |index: i32| {
        let mut guest = compatible(&[0x62, 0x06]);
        guest.write(PAGES + 0x1000, 0x5_ffff_fffe);
        change(&mut guest, |state| {
            state.r[0] = u64::from(index.cast_unsigned());
        });
        guest.one()
    };
    for inside in [-2, 0, 5] {
        assert_eq!(bound(inside), Happened::Retired, "{inside}");
    }
    for outside in [-3, 6, i32::MAX] {
        assert!(
            matches!(bound(outside), Happened::Fault(5, ..)),
            "{outside}"
        );
    }
    // INTO.
    let mut guest = compatible(&[0xce, 0xce]);
    assert_eq!(guest.one(), Happened::Retired);
    change(&mut guest, |state| state.set_rflags(0x802));
    assert!(matches!(guest.one(), Happened::Fault(4, ..)));
    assert_eq!(guest.frame(4)[0], CODE + 2);
    // ARPL AX,CX.
    let arpl = |a: u64, b: u64| {
        let mut guest = compatible(&[0x63, 0xc8]);
        change(&mut guest, |state| (state.r[0], state.r[1]) = (a, b));
        assert_eq!(guest.one(), Happened::Retired);
        let state = guest.cpu.state();
        (state.r[0], state.rflags() >> 6 & 1)
    };
    assert_eq!(arpl(0x28, 3), (0x2b, 1));
    assert_eq!(arpl(0x2b, 0), (0x2b, 0));
}

#[test]
fn a_return_through_a_gate_is_none() {
    // RETF to a call gate.
    let mut guest = compatible(&[0xcb]);
    guest.write(crate::guest::GDT + 0x20, 0xec << 40);
    guest.write(PAGES + 0x1800, CODE | 0x23 << 32);
    assert_eq!(guest.one(), Happened::Fault(13, 0x20, 0));
}

#[test]
fn accesses_wrap_where_addresses_end() {
    // MOV EAX,[ESI] at the last two bytes of 4 GiB and the first two, in a segment whose base
    // puts them in its middle.
    let mut guest = compatible(&[0x8b, 0x06]);
    guest.map(0xffff_f000, PAGES + 0x3000, 5);
    guest.map(0, PAGES + 0x4000, 5);
    guest.bytes(PAGES + 0x3ffe, &[1, 2]);
    guest.bytes(PAGES + 0x4000, &[3, 4]);
    change(&mut guest, |state| {
        let mut ds = state.segment(Seg::Ds);
        ds.base = 0x8000_0000;
        state.set_segment(Seg::Ds, ds);
        state.r[6] = 0x7fff_fffe;
    });
    assert_eq!(guest.one(), Happened::Retired);
    assert_eq!(guest.cpu.state().r[0], 0x0403_0201);
    // Operands of two parts, of which the first ends where addresses do.
    let codes: [&[u8]; 7] = [
        &[0x62, 0x06],       // BOUND EAX, [ESI]
        &[0x0f, 0xb4, 0x06], // LFS EAX, [ESI]
        &[0x0f, 0xc7, 0x0e], // CMPXCHG8B [ESI]
        &[0x0f, 0x01, 0x06], // SGDT [ESI]
        &[0x0f, 0x01, 0x16], // LGDT [ESI]
        &[0x0f, 0x10, 0x06], // MOVUPS XMM0, [ESI]
        &[0x0f, 0x11, 0x06], // MOVUPS [ESI], XMM0
    ];
    for code in codes {
        let mut guest = compatible(code);
        guest.map(0xffff_f000, PAGES + 0x3000, 7);
        guest.map(0, PAGES + 0x4000, 7);
        let first = if code[..2] == [0x0f, 0x01] { 2 } else { 4 };
        change(&mut guest, |state| {
            let mut ds = state.segment(Seg::Ds);
            ds.base = 0x8000_0000;
            state.set_segment(Seg::Ds, ds);
            state.r[6] = 0x8000_0000 - first;
            state.cr4 |= 1 << 9;
            if code == [0x0f, 0x01, 0x16] {
                for seg in [Seg::Cs, Seg::Ss] {
                    let mut one = state.segment(seg);
                    one.attr &= !(3 << 5);
                    state.set_segment(seg, one);
                }
            }
        });
        assert_eq!(guest.one(), Happened::Retired, "{code:02x?}");
    }
    let mut guest = compatible(&[0x90]);
    change(&mut guest, |state| state.idtr.base = 0x8000_0000_0000);
    // The gate's address is none: #GP, which cannot be delivered, nor can #DF.
    assert_eq!(guest.cpu.interrupt(0x40), Some(VmExit::Shutdown));
    assert_eq!(guest.cpu.state().r[7], DATA + 0x100);
}

const IDT: u64 = 0x9_0000;
const TASK: u64 = 0x9_1000;
pub(crate) const PROGRAM: u64 = 0xa_0000;
pub(crate) const HANDLER: u64 = 0xa_0800;
pub(crate) const OUTER: u64 = 0xb_0000;
pub(crate) const INNER: u64 = 0xc_0000;
const CODE_0: u16 = 0x10;
const DATA_0: u16 = 0x18;
const DATA_3: u16 = 0x2b;
const CODE_3: u16 = 0x3b;

/// 32-bit protected mode without paging, interrupts off, with a TSS whose stack is INNER.
pub(crate) fn protected(cpl: u8, code: &[u8], handler: &[u8]) -> Guest {
    protected_on(Guest::new(), cpl, code, handler)
}

/// The same, on a processor.
pub(crate) fn protected_on(mut guest: Guest, cpl: u8, code: &[u8], handler: &[u8]) -> Guest {
    guest.bytes(PROGRAM, code);
    guest.bytes(HANDLER, handler);
    guest.write(crate::guest::GDT + u64::from(CODE_0), 0x00cf_9b00_0000_ffff);
    guest.write(TASK + 4, INNER | u64::from(DATA_0) << 32);
    let mut state = State::default();
    state.cr0 |= 1;
    let flat = |selector: u16, attr: u16| Segment {
        selector,
        attr: attr | u16::from(cpl) << 5,
        limit: u32::MAX,
        base: 0,
    };
    let (cs, data) = if cpl == 3 {
        (CODE_3, DATA_3)
    } else {
        (CODE_0, DATA_0)
    };
    for seg in [Seg::Es, Seg::Ss, Seg::Ds] {
        state.set_segment(seg, flat(data, 0xc093));
    }
    state.set_segment(Seg::Cs, flat(cs, 0xc09b));
    let task = Segment {
        selector: 0x40,
        attr: 0x8b,
        limit: 0x67,
        base: TASK,
    };
    state.set_segment(Seg::Tr, task);
    state.gdtr = Table {
        base: crate::guest::GDT,
        limit: 0x5f,
    };
    state.idtr = Table {
        base: IDT,
        limit: 0x7ff,
    };
    state.rip = PROGRAM;
    state.r[4] = OUTER;
    guest.cpu.set_state(state);
    guest
}

/// A gate of the IDT to HANDLER.
pub(crate) fn gate(guest: &mut Guest, vector: u64, kind: u64, dpl: u64) {
    let to = HANDLER & 0xffff | u64::from(CODE_0) << 16 | (HANDLER >> 16) << 48;
    guest.write(IDT + 8 * vector, to | (0x80 | kind | dpl << 5) << 40);
}

/// Doublewords at an address.
pub(crate) fn words<const N: usize>(guest: &Guest, at: u64) -> [u64; N] {
    std::array::from_fn(|n| guest.word(at + 4 * n as u64) & 0xffff_ffff)
}

#[test]
fn gates_of_protected_mode() {
    let (cs, ss) = (u64::from(CODE_3), u64::from(DATA_3));
    // INT 40h of CPL 0 and 3, through a trap gate and an interrupt gate; IRETD.
    for (cpl, kind, stays) in [(0, 15, 0x200), (0, 14, 0), (3, 15, 0x200), (3, 14, 0)] {
        let mut guest = protected(cpl, &[0xcd, 0x40, 0x90], &[0xcf]);
        gate(&mut guest, 0x40, kind, 3);
        change(&mut guest, |state| state.set_rflags(0x202));
        assert_eq!(guest.cpu.run(1), VmExit::Budget);
        let state = guest.cpu.state();
        assert_eq!((state.rip, state.cpl()), (HANDLER, 0));
        assert_eq!(state.rflags() & 0x200, stays);
        let back = PROGRAM + 2;
        if cpl == 3 {
            let frame = words::<5>(&guest, INNER - 20);
            assert_eq!(frame, [back, cs, 0x202, OUTER, ss]);
            assert_eq!(guest.cpu.state().r[4], INNER - 20);
        } else {
            let frame = words::<3>(&guest, OUTER - 12);
            assert_eq!(frame, [back, u64::from(CODE_0), 0x202]);
        }
        assert_eq!(guest.cpu.run(1), VmExit::Budget);
        let state = guest.cpu.state();
        assert_eq!((state.rip, state.r[4], state.cpl()), (back, OUTER, cpl));
    }
    // A gate of 16 bits: its offset and frame too.
    let mut guest = protected(3, &[0xcd, 0x40], &[]);
    gate(&mut guest, 0x40, 6, 3);
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    assert_eq!(guest.cpu.state().rip, HANDLER & 0xffff);
    assert_eq!(guest.cpu.state().r[4], INNER - 10);
    // HLT of CPL 3: #GP(0) with its code.
    let mut guest = protected(3, &[0xf4], &[]);
    gate(&mut guest, 13, 14, 0);
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    let frame = words::<4>(&guest, INNER - 24);
    assert_eq!(frame, [0, PROGRAM, cs, 0x1_0002]);
    // INT of a gate that is not its own: #GP of the gate.
    let mut guest = protected(3, &[0xcd, 0x40], &[]);
    gate(&mut guest, 0x40, 14, 0);
    gate(&mut guest, 13, 14, 0);
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    assert_eq!(words::<2>(&guest, INNER - 24), [0x202, PROGRAM]);
    // From outside.
    let mut guest = protected(3, &[0x90], &[]);
    gate(&mut guest, 0x40, 14, 0);
    assert_eq!(guest.cpu.interrupt(0x40), None);
    assert_eq!(words::<1>(&guest, INNER - 20), [PROGRAM]);
    // A task gate is not there.
    let mut guest = protected(0, &[0xcd, 0x40], &[]);
    gate(&mut guest, 0x40, 5, 3);
    assert!(matches!(guest.cpu.run(1), VmExit::Unimplemented { .. }));
}

#[test]
fn stacks_that_a_gate_cannot_use() {
    // The TSS names a stack of CPL 3, one that is none, and one that is absent; a limit.
    for (selector, limit, vector, code) in [
        (0x28, 0x67, 10, 0x28),
        (0, 0x67, 10, 0),
        (0x58, 0x67, 12, 0x58),
        (DATA_0, 8, 10, 0x40),
    ] {
        let mut guest = protected(3, &[0xcd, 0x40], &[]);
        gate(&mut guest, 0x40, 14, 3);
        guest.write(crate::guest::GDT + 0x58, 0x00cf_1300_0000_ffff);
        guest.write(TASK + 4, INNER | u64::from(selector) << 32);
        change(&mut guest, |state| {
            let mut task = state.segment(Seg::Tr);
            task.limit = limit;
            state.set_segment(Seg::Tr, task);
        });
        // Nor can the fault be delivered; registers are as they were.
        let before = guest.cpu.state().clone();
        assert_eq!(guest.cpu.run(1), VmExit::Shutdown, "{selector:#x}");
        let after = guest.cpu.state();
        assert_eq!((after.r, after.segments), (before.r, before.segments));
        // A conforming handler stays at CPL 3 and tells what it was.
        let conforming = 0x00cf_9f00_0000_ffff;
        guest.write(crate::guest::GDT + 0x50, conforming);
        let to = HANDLER & 0xffff | 0x50 << 16 | (HANDLER >> 16) << 48;
        guest.write(IDT + 8 * vector, to | 0x8e << 40);
        guest.cpu.set_state(before);
        assert_eq!(guest.cpu.run(1), VmExit::Budget, "{selector:#x}");
        assert_eq!(guest.cpu.state().cpl(), 3);
        assert_eq!(words::<2>(&guest, OUTER - 16), [code, PROGRAM]);
    }
}

#[test]
fn call_gates_copy_words() {
    // CALL 50h:0 with two words on the stack; RETF 8 of the handler.
    let call = [0x9a, 0, 0, 0, 0, 0x53, 0];
    let mut guest = protected(3, &call, &[0xca, 8, 0]);
    let to = HANDLER & 0xffff | u64::from(CODE_0) << 16 | (HANDLER >> 16) << 48;
    guest.write(crate::guest::GDT + 0x50, to | 2 << 32 | 0xec << 40);
    guest.write(OUTER, 0x2222_2222_1111_1111);
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    let frame = words::<6>(&guest, INNER - 24);
    let (cs, ss) = (u64::from(CODE_3), u64::from(DATA_3));
    assert_eq!(
        frame,
        [PROGRAM + 7, cs, 0x1111_1111, 0x2222_2222, OUTER, ss]
    );
    assert_eq!(guest.cpu.state().cpl(), 0);
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    let state = guest.cpu.state();
    assert_eq!((state.rip, state.r[4]), (PROGRAM + 7, OUTER + 8));
    assert_eq!(state.cpl(), 3);
}

/// FNSTENV and FLDENV in real mode: pointers are linear addresses of 20 bits, beside the opcode.
#[test]
fn the_environment_of_x87_has_real_modes_layout() {
    let mut guest = Guest::new();
    // FLD dword ptr [BX+SI+10]; FNSTENV [40], of 14 bytes and of 28.
    let code = [
        0xd9, 0x40, 0x10, 0xd9, 0x36, 0x40, 0, 0x66, 0xd9, 0x36, 0x80, 0,
    ];
    guest.bytes(0x8_0100, &code);
    guest.bytes(0x9_0000, &[0; 256]);
    let mut state = real(0x8000, 0x100);
    load(&mut state, Seg::Ds, 0x9000);
    state.r[3] = 0x1200;
    state.r[6] = 0x34;
    guest.cpu.set_state(state);
    assert_eq!(guest.cpu.run(3), VmExit::Budget);
    assert_eq!(guest.cpu.state().rip, 0x10c);
    let half = |at: u64| guest.word(0x9_0000 + at) & 0xffff;
    let small: Vec<u64> = (0..7).map(|n| half(0x40 + 2 * n)).collect();
    // R7 holds 0, and masks are those of before FNSTENV.
    assert_eq!(
        small,
        [0x37f, 0x3800, 0x7fff, 0x0100, 0x8140, 0x1244, 0x9000]
    );
    let word = |n: u64| guest.word(0x9_0000 + 0x80 + 4 * n) & 0xffff_ffff;
    let wide: Vec<u64> = (0..7).map(word).collect();
    assert_eq!(
        wide,
        [
            0xffff_037f,
            0xffff_3800,
            0xffff_7fff,
            0x0100,
            0x8140,
            0x1244,
            0x9000
        ]
    );
}

/// What a delivery pushes where no memory is goes nowhere, and the handler runs. INT n is an
/// instruction, whose stores a device sees.
#[test]
fn a_delivery_onto_a_stack_without_memory() {
    const NOWHERE: u64 = 0xf000_0000;
    for (cpl, pushed) in [(0, 12), (3, 20)] {
        let with = |code: &[u8]| {
            let mut guest = protected(cpl, code, &[0xf4]);
            gate(&mut guest, 6, 14, 0);
            gate(&mut guest, 0x40, 14, 3);
            guest.write(TASK + 4, NOWHERE | u64::from(DATA_0) << 32);
            change(&mut guest, |state| state.r[4] = NOWHERE);
            guest
        };
        // UD2.
        let mut guest = with(&[0x0f, 0x0b]);
        assert_eq!(guest.cpu.run(10), VmExit::Halted, "CPL {cpl}");
        let state = guest.cpu.state();
        assert_eq!((state.rip, state.r[4]), (HANDLER + 1, NOWHERE - pushed));
        let mut guest = with(&[0x90]);
        assert_eq!(guest.cpu.interrupt(0x40), None, "CPL {cpl}");
        let state = guest.cpu.state();
        assert_eq!((state.rip, state.r[4]), (HANDLER, NOWHERE - pushed));
        let mut guest = with(&[0xcd, 0x40]);
        let first = guest.cpu.run(1);
        assert!(matches!(first, VmExit::MmioWrite { address, .. } if address == NOWHERE - 4));
        assert_eq!(guest.cpu.state().rip, PROGRAM);
    }
}

/// CLFLUSH may name a segment that can only be executed, unlike a load (SDM vol. 2A).
#[test]
fn a_line_of_code_can_be_flushed() {
    // CLFLUSH CS:[ESI], MOV AL, CS:[ESI]; and by DS.
    let codes: [(&[u8], bool); 3] = [
        (&[0x2e, 0x0f, 0xae, 0x3e], true),
        (&[0x2e, 0x8a, 0x06], false),
        (&[0x0f, 0xae, 0x3e], false),
    ];
    for (code, may) in codes {
        let mut guest = compatible(code);
        change(&mut guest, |state| {
            let mut cs = state.segment(Seg::Cs);
            cs.attr &= !2;
            state.set_segment(Seg::Cs, cs);
            state.set_segment(
                Seg::Ds,
                Segment {
                    selector: 0,
                    attr: 0,
                    limit: 0,
                    base: 0,
                },
            );
        });
        let expected = if may {
            Happened::Retired
        } else {
            Happened::Fault(13, 0, 0)
        };
        assert_eq!(guest.one(), expected, "{code:02x?}");
    }
}

/// RETF and IRET of 32 bits in real mode: beyond CS's limit they fault themselves (SDM vol. 2, "IF
/// EIP is not within code segment limit").
#[test]
fn a_return_beyond_the_limit_of_real_mode() {
    for code in [[0x66, 0xcb], [0x66, 0xcf]] {
        for (target, returns) in [(0xffffu64, true), (0x1_0000, false), (0x1_2345, false)] {
            let mut guest = Guest::new();
            // #GP's handler is 8000:200.
            guest.bytes(0x34, &[0, 2, 0, 0x80]);
            guest.bytes(0x8_0100, &code);
            guest.write(0x800, target | 0x9000 << 32);
            guest.write(0x808, 0x8d7);
            let mut state = real(0x8000, 0x100);
            state.set_rflags(2);
            guest.cpu.set_state(state);
            assert_eq!(guest.cpu.run(1), VmExit::Budget);
            let state = guest.cpu.state();
            let cs = state.segment(Seg::Cs).selector;
            if returns {
                assert_eq!((cs, state.rip), (0x9000, target), "{code:x?}");
                continue;
            }
            assert_eq!((cs, state.rip), (0x8000, 0x200), "{code:x?} {target:#x}");
            assert_eq!(state.r[4], 0x7fa);
            // IP, CS and flags as they were before it.
            assert_eq!(guest.word(0x7fa) & 0xffff_ffff_ffff, 0x2_8000_0100);
        }
    }
}

/// Interrupts of real mode clear AC (SDM vol. 2A, INT n, "REAL-ADDRESS-MODE").
#[test]
fn an_interrupt_of_real_mode_clears_ac() {
    let prepare = || {
        let mut guest = Guest::new();
        guest.bytes(0x100, &[0, 2, 0, 0x80]);
        guest.bytes(0x8_0100, &[0xcd, 0x40]);
        let mut state = real(0x8000, 0x100);
        state.set_rflags(0x4_0202);
        guest.cpu.set_state(state);
        guest
    };
    let mut software = prepare();
    assert_eq!(software.cpu.run(1), VmExit::Budget);
    let mut outside = prepare();
    assert_eq!(outside.cpu.interrupt(0x40), None);
    for guest in [software, outside] {
        let state = guest.cpu.state();
        assert_eq!((state.rip, state.rflags()), (0x200, 2));
    }
}

/// LOCK MOV CR0 is MOV CR8 where CPUID announces it (AltMovCr8), and #UD elsewhere.
#[test]
fn a_lock_prefix_names_cr8() {
    const AMD: [u32; 3] = [0x6874_7541, 0x444d_4163, 0x6974_6e65];
    for (amd, bit, known) in [
        (false, 0, false),
        (false, 1 << 4, false),
        (true, 0, false),
        (true, 1 << 4, true),
    ] {
        let cpuid = || {
            announcing(|leaf, regs| match leaf {
                0 if amd => [regs.ebx, regs.ecx, regs.edx] = AMD,
                0x8000_0001 => regs.ecx |= bit,
                _ => {}
            })
        };
        // LOCK MOV EAX, CR0.
        let mut guest = protected_on(Guest::with(cpuid()), 0, &[0xf0, 0x0f, 0x20, 0xc0], &[0xf4]);
        gate(&mut guest, 6, 14, 0);
        change(&mut guest, |state| {
            state.r[0] = 0x55;
            state.cr8 = 9;
        });
        assert_eq!(guest.cpu.run(1), VmExit::Budget);
        let state = guest.cpu.state();
        let expected = if known {
            (PROGRAM + 4, 9)
        } else {
            (HANDLER, 0x55)
        };
        assert_eq!((state.rip, state.r[0]), expected, "{amd} {bit:#x}");
        // MOV RAX, CR8, by its own name.
        let mut guest = Guest::with(cpuid());
        guest.bytes(PAGES, &[0x44, 0x0f, 0x20, 0xc0]);
        let mut state = guest.state(0);
        state.rip = crate::guest::SYSTEM + PAGES;
        state.cr8 = 9;
        guest.cpu.set_state(state);
        assert_eq!(guest.one(), Happened::Retired);
        assert_eq!(guest.cpu.state().r[0], 9);
    }
}

/// INVLPG faults for no segment: it lists #GP(0) for CPL alone (SDM vol. 2A).
#[test]
fn a_page_is_dropped_whatever_its_segment_says() {
    for (cpl, expected) in [(0, PROGRAM + 3), (3, HANDLER)] {
        // INVLPG [ESI].
        let mut guest = protected(cpl, &[0x0f, 0x01, 0x3e], &[]);
        gate(&mut guest, 13, 14, 0);
        change(&mut guest, |state| {
            state.set_segment(
                Seg::Ds,
                Segment {
                    selector: 0,
                    attr: 0,
                    limit: 0,
                    base: 0,
                },
            );
        });
        assert_eq!(guest.cpu.run(1), VmExit::Budget);
        assert_eq!(guest.cpu.state().rip, expected, "CPL {cpl}");
    }
}
