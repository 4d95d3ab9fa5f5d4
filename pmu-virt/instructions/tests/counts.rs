//! What instructions count for at most, and whatever happens: asked of every code that the
//! decoder knows.

use std::collections::BTreeMap;

use iced_x86::{Code, CodeSize, EncodingKind, Mnemonic, OpCodeOperandKind, OpKind, Register};
use instruction_facts::{EventClass, EventCounts, InsnFacts, Instruction, InstructionInfoFactory};
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

/// An instruction of this code, with its operands in memory where they may be there.
fn any_of(code: Code) -> Instruction {
    let form = code.op_code();
    let mut insn = Instruction::default();
    insn.set_code(code);
    insn.set_len(1);
    insn.set_code_size(match (form.mode64(), form.mode32()) {
        (true, _) => CodeSize::Code64,
        (false, true) => CodeSize::Code32,
        (false, false) => CodeSize::Code16,
    });
    for (n, kind) in (0..).zip(form.op_kinds()) {
        match kind_of(*kind) {
            Some(place) => insn.set_op_kind(n, place),
            None => insn.set_op_register(n, register(*kind)),
        }
    }
    if insn.op_kinds().any(|kind| kind == OpKind::Memory) {
        insn.set_memory_base(Register::BX);
    }
    if insn.mnemonic() == Mnemonic::Enter {
        // The nesting level; 31 is the highest.
        insn.set_op1_kind(OpKind::Immediate8_2nd);
        insn.set_immediate8_2nd(0xff);
    }
    insn
}

/// Where the operand is, if not in a register.
fn kind_of(kind: OpCodeOperandKind) -> Option<OpKind> {
    let name = format!("{kind:?}");
    let begins = |with: &[&str]| with.iter().any(|with| name.starts_with(with));
    Some(match name.as_str() {
        "seg_rSI" => OpKind::MemorySegRSI,
        "seg_rDI" => OpKind::MemorySegRDI,
        "es_rDI" => OpKind::MemoryESRDI,
        // The register is the address.
        "r16_reg_mem" | "r32_reg_mem" | "r64_reg_mem" => return None,
        _ if name.contains("mem") || name == "seg_rBX_al" => OpKind::Memory,
        _ if begins(&["br16", "br32", "br64", "xbegin", "brdisp"]) => OpKind::NearBranch64,
        _ if begins(&["farbr"]) => OpKind::FarBranch32,
        _ if begins(&["imm"]) => OpKind::Immediate8,
        _ => return None,
    })
}

/// A register that the operand can be.
fn register(kind: OpCodeOperandKind) -> Register {
    let name = format!("{kind:?}");
    let of = [
        ("xmm", Register::XMM1),
        ("ymm", Register::YMM1),
        ("zmm", Register::ZMM1),
        ("tmm", Register::TMM1),
        ("mm_", Register::MM1),
        ("k_", Register::K1),
        ("kp1", Register::K2),
        ("st", Register::ST1),
        ("seg", Register::DS),
        ("cr", Register::CR3),
        ("dr", Register::DR6),
        ("tr", Register::TR3),
        ("bnd", Register::BND1),
    ];
    let found = of.iter().find(|(begin, _)| name.starts_with(begin));
    found.map_or(Register::RCX, |(_, register)| *register)
}

/// Calls `look` for an instruction of each code but declared data and those of Knights
/// Corner, which this decoder is built without.
fn each(mut look: impl FnMut(&Instruction, InsnFacts)) {
    let factory = &mut InstructionInfoFactory::new();
    let is_decoded = |code: &Code| {
        let form = code.op_code();
        form.is_instruction() && form.encoding() != EncodingKind::MVEX
    };
    for code in Code::values().filter(is_decoded) {
        let mut insn = any_of(code);
        for rep in [false, true] {
            insn.set_has_rep_prefix(rep);
            look(&insn, InsnFacts::of(&insn, factory));
        }
    }
}

#[test]
fn no_instruction_counts_more_than_the_most() {
    let mut most = [(0, Code::INVALID); EventClass::COUNT];
    each(|insn, facts| {
        for (taken, idle) in [(false, false), (true, false), (false, true)] {
            let counts = EventCounts::of(&facts.retired(taken, idle));
            for (most, count) in most.iter_mut().zip(counts.as_array()) {
                if *count > most.0 {
                    *most = (*count, insn.code());
                }
            }
        }
    });
    // As tight as it can be: some instruction reaches it.
    for (class, (most, code)) in EventClass::ALL.into_iter().zip(most) {
        assert_eq!(class.most(), most, "{class:?} of {code:?}");
    }
}

/// Those that access memory more often than twice.
#[test]
fn who_accesses_memory_most_is_known() {
    let mut found = BTreeMap::new();
    each(|insn, facts| {
        if facts.loads > 2 || facts.stores > 2 {
            found.insert(insn.mnemonic(), (facts.loads, facts.stores));
        }
    });
    let expected = BTreeMap::from([
        (Mnemonic::Pusha, (0, 8)),
        (Mnemonic::Pushad, (0, 8)),
        (Mnemonic::Popa, (7, 0)),
        (Mnemonic::Popad, (7, 0)),
        (Mnemonic::Enter, (30, 32)),
        // In 64-bit mode, whatever the size of their words.
        (Mnemonic::Iret, (5, 0)),
        (Mnemonic::Iretd, (5, 0)),
        (Mnemonic::Iretq, (5, 0)),
        (Mnemonic::Uiret, (3, 0)),
        (Mnemonic::Eretu, (6, 0)),
        (Mnemonic::Erets, (6, 0)),
        // Of VIA's and Zhaoxin's processors.
        (Mnemonic::Xcryptecb, (3, 1)),
        (Mnemonic::Xcryptcbc, (4, 2)),
        (Mnemonic::Xcryptctr, (4, 2)),
        (Mnemonic::Xcryptcfb, (4, 2)),
        (Mnemonic::Xcryptofb, (4, 2)),
        (Mnemonic::Ccs_encrypt, (3, 1)),
    ]);
    assert_eq!(found, expected);
}

#[test]
fn classes_are_numbered_in_their_order() {
    for (n, class) in EventClass::ALL.into_iter().enumerate() {
        assert_eq!(class as usize, n);
    }
}

/// What is known before an instruction is executed is what it does, unless a branch or the
/// count of a repeated instruction decides otherwise.
#[test]
fn events_are_known_before() {
    each(|insn, facts| {
        let done = facts.retire(insn.next_ip(), 0, 5);
        let mut expected = *facts.events().as_array();
        if facts.conditional {
            expected[EventClass::TakenBranches as usize] = done.taken.into();
            let near = done.taken && !done.far;
            expected[EventClass::NearTakenBranches as usize] = near.into();
        }
        let counts = EventCounts::of(&done);
        assert_eq!(counts.as_array(), &expected, "{:?}", insn.code());
        assert_eq!(counts.get(EventClass::Instructions), 1);
        let sum = [EventClass::X87, EventClass::Mmx, EventClass::Sse].map(|unit| counts.get(unit));
        assert_eq!(
            sum.iter().sum::<u8>(),
            counts.get(EventClass::FloatingPoint)
        );
    });
}

proptest! {
    #[test]
    fn whatever_is_decoded_keeps_to_it(bytes in any::<[u8; 15]>(), mode in 0usize..3,
                                       flags in any::<u64>(), rcx in 0u64..3) {
        if let Ok(decoded) = super::decoded(&bytes, [16, 32, 64][mode]) {
            let facts = decoded.facts;
            let done = facts.retire(super::RIP + u64::from(facts.len), flags, rcx);
            let counts = EventCounts::of(&done);
            for class in EventClass::ALL {
                prop_assert!(counts.get(class) <= class.most(), "{class:?}");
                let idle = matches!(class, EventClass::Loads | EventClass::Stores)
                    && facts.is_idle(rcx);
                let taken = facts.conditional
                    && matches!(class, EventClass::TakenBranches | EventClass::NearTakenBranches);
                if !idle && !taken {
                    prop_assert_eq!(counts.get(class), facts.events().get(class), "{:?}", class);
                }
            }
        }
    }
}
