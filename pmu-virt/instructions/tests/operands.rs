//! Where an instruction accesses memory.

use instruction_facts::{
    AddressRegisters, InstructionInfoFactory, Operand, OperandKind, decode, operand,
};

const REGISTERS: AddressRegisters = AddressRegisters {
    // RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI.
    general: [
        0x1000, 0x20, 0, 0x1_2340, 0x8000, 0, 0x3000, 0x4000, 0, 0, 0, 0, 0, 0, 0, 0,
    ],
    // ES, CS, SS, DS, FS, GS.
    bases: [
        0x10_0000, 0x20_0000, 0x30_0000, 0x40_0000, 0x6_0000, 0x7_0000,
    ],
};

fn check(bytes: &[u8], expected: Option<(u64, u16, bool, bool)>) {
    check_kind(64, OperandKind::Any, bytes, expected);
}

fn check_kind(
    bitness: u32,
    kind: OperandKind,
    bytes: &[u8],
    expected: Option<(u64, u16, bool, bool)>,
) {
    let factory = &mut InstructionInfoFactory::new();
    let insn = decode(bytes, bitness, 0x100, factory)
        .expect("an instruction")
        .insn;
    let found = operand(&insn, kind, &REGISTERS, factory);
    let expected = expected.map(|(linear, bytes, load, store)| Operand {
        linear,
        bytes,
        load,
        store,
    });
    assert_eq!(found, expected, "{kind:?} {bytes:x?}");
}

#[test]
fn of_several_operands_the_kind_decides() {
    use OperandKind::{Any, Load, Store};
    let push = [0xff, 0x30]; // PUSH [RAX]
    check_kind(64, Load, &push, Some((0x1000, 8, true, false)));
    check_kind(64, Store, &push, Some((0x7ff8, 8, false, true)));
    let movs = [0x48, 0xa5]; // MOVSQ
    check_kind(64, Load, &movs, Some((0x3000, 8, true, false)));
    check_kind(64, Store, &movs, Some((0x4000, 8, false, true)));
    let both = [0x48, 0x01, 0x08]; // ADD [RAX],RCX
    check_kind(64, Load, &both, Some((0x1000, 8, true, true)));
    check_kind(64, Store, &both, Some((0x1000, 8, true, true)));
    check_kind(64, Store, &[0x58], None); // POP RAX
    check_kind(64, Load, &[0x50], None); // PUSH RAX
    // In 32-bit mode every segment has its base: MOVSD, MOV EAX,[BX], PUSH EAX.
    check_kind(32, Load, &[0xa5], Some((0x40_3000, 4, true, false)));
    check_kind(32, Store, &[0xa5], Some((0x10_4000, 4, false, true)));
    let narrow = [0x67, 0x8b, 0x07];
    check_kind(32, Any, &narrow, Some((0x40_2340, 4, true, false)));
    check_kind(32, Any, &[0x50], Some((0x30_7ffc, 4, false, true)));
}

#[test]
fn addresses_are_those_of_the_registers() {
    check(&[0x90], None); // NOP
    check(&[0x48, 0x8d, 0x00], None); // LEA RAX,[RAX]
    check(&[0x8b, 0x04, 0x88], Some((0x1080, 4, true, false))); // MOV EAX,[RAX+RCX*4]
    check(&[0x88, 0x48, 0xff], Some((0xfff, 1, false, true))); // MOV [RAX-1],CL
    check(&[0x48, 0x01, 0x08], Some((0x1000, 8, true, true))); // ADD [RAX],RCX
    check(&[0x50], Some((0x7ff8, 8, false, true))); // PUSH RAX
    check(&[0x58], Some((0x8000, 8, true, false))); // POP RAX
    check(&[0xc3], Some((0x8000, 8, true, false))); // RET
    check(&[0xd7], Some((0x1_2340, 1, true, false))); // XLATB: RBX and AL
    // MOV EAX,[RIP+0x10]: behind six bytes.
    check(&[0x8b, 0x05, 0x10, 0, 0, 0], Some((0x116, 4, true, false)));
    // MOV RAX,GS:[RAX]
    check(&[0x65, 0x48, 0x8b, 0x00], Some((0x7_1000, 8, true, false)));
    // VGATHERDPS: indices in a vector register.
    check(&[0xc4, 0xe2, 0x75, 0x92, 0x04, 0x90], None);
    check(&[0x0f, 0x0b], None); // UD2
}
