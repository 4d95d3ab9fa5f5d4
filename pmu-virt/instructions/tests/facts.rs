//! Instructions and what they are: one table per question.

use instruction_facts::{
    FaultSet, InsnClass, InstructionInfoFactory, StepKind, Undecodable, decode, pushes_error_code,
    rip_after_rdpmc,
};
use proptest::prelude::{any, prop_assert, proptest};

use super::{RIP, decoded, facts};

/// Mode, bytes, loads, stores.
#[test]
fn memory_operands_are_counted() {
    let table: &[(&str, u32, &[u8], u8, u8)] = &[
        ("nop", 64, &[0x90], 0, 0),
        ("nop [rax]", 64, &[0x0f, 0x1f, 0x00], 0, 0),
        ("lea rax,[rbx]", 64, &[0x48, 0x8d, 0x03], 0, 0),
        ("prefetcht0 [rax]", 64, &[0x0f, 0x18, 0x08], 0, 0),
        ("prefetchw [rax]", 64, &[0x0f, 0x0d, 0x08], 0, 0),
        ("mov rax,rbx", 64, &[0x48, 0x89, 0xd8], 0, 0),
        ("mov rax,[rbx]", 64, &[0x48, 0x8b, 0x03], 1, 0),
        ("mov [rbx],rax", 64, &[0x48, 0x89, 0x03], 0, 1),
        ("add [rbx],rax", 64, &[0x48, 0x01, 0x03], 1, 1),
        ("add rax,[rbx]", 64, &[0x48, 0x03, 0x03], 1, 0),
        ("cmp [rbx],rax", 64, &[0x48, 0x39, 0x03], 1, 0),
        ("inc dword [rbx]", 64, &[0xff, 0x03], 1, 1),
        ("xchg [rbx],rax", 64, &[0x48, 0x87, 0x03], 1, 1),
        (
            "lock cmpxchg [rbx],rcx",
            64,
            &[0xf0, 0x48, 0x0f, 0xb1, 0x0b],
            1,
            1,
        ),
        ("cmovz rax,[rbx]", 64, &[0x48, 0x0f, 0x44, 0x03], 1, 0),
        ("setz [rbx]", 64, &[0x0f, 0x94, 0x03], 0, 1),
        ("push rax", 64, &[0x50], 0, 1),
        ("push 1", 64, &[0x6a, 0x01], 0, 1),
        ("push [rbx]", 64, &[0xff, 0x33], 1, 1),
        ("pop rax", 64, &[0x58], 1, 0),
        ("pop [rbx]", 64, &[0x8f, 0x03], 1, 1),
        ("pushf", 64, &[0x9c], 0, 1),
        ("popf", 64, &[0x9d], 1, 0),
        ("pusha", 32, &[0x60], 0, 8),
        ("popa", 32, &[0x61], 7, 0),
        ("leave", 64, &[0xc9], 1, 0),
        ("enter 16,0", 64, &[0xc8, 0x10, 0x00, 0x00], 0, 1),
        ("call near", 64, &[0xe8, 0, 0, 0, 0], 0, 1),
        ("call [rax]", 64, &[0xff, 0x10], 1, 1),
        ("ret", 64, &[0xc3], 1, 0),
        ("ret 8", 64, &[0xc2, 0x08, 0x00], 1, 0),
        ("jmp [rax]", 64, &[0xff, 0x20], 1, 0),
        ("jmp rax", 64, &[0xff, 0xe0], 0, 0),
        ("iretq", 64, &[0x48, 0xcf], 5, 0),
        ("iretd", 32, &[0xcf], 3, 0),
        ("movsb", 64, &[0xa4], 1, 1),
        ("rep movsb", 64, &[0xf3, 0xa4], 1, 1),
        ("rep stosq", 64, &[0xf3, 0x48, 0xab], 0, 1),
        ("lodsb", 64, &[0xac], 1, 0),
        ("repe cmpsb", 64, &[0xf3, 0xa6], 2, 0),
        ("repne scasb", 64, &[0xf2, 0xae], 1, 0),
        ("xlatb", 64, &[0xd7], 1, 0),
        ("movaps xmm0,[rax]", 64, &[0x0f, 0x28, 0x00], 1, 0),
        ("movaps [rax],xmm0", 64, &[0x0f, 0x29, 0x00], 0, 1),
        ("fld dword [rax]", 64, &[0xd9, 0x00], 1, 0),
        ("fstp dword [rax]", 64, &[0xd9, 0x18], 0, 1),
        ("clflush [rax]", 64, &[0x0f, 0xae, 0x38], 0, 0),
        ("invlpg [rax]", 64, &[0x0f, 0x01, 0x38], 0, 0),
        ("lidt [rax]", 64, &[0x0f, 0x01, 0x18], 1, 0),
        ("sidt [rax]", 64, &[0x0f, 0x01, 0x08], 0, 1),
        ("syscall", 64, &[0x0f, 0x05], 0, 0),
        ("int 0x80", 64, &[0xcd, 0x80], 0, 0),
        ("mov ax,[bx]", 16, &[0x8b, 0x07], 1, 0),
    ];
    for (name, bitness, bytes, loads, stores) in table {
        let facts = facts(*bitness, bytes);
        assert_eq!((facts.loads, facts.stores), (*loads, *stores), "{name}");
        assert_eq!(usize::from(facts.len), bytes.len(), "{name}");
    }
}

#[test]
fn classes_kinds_and_targets_are_told() {
    use InsnClass::{Call, ConditionalBranch, Far, Jump, Plain, Return};
    type Row = (
        &'static str,
        u32,
        &'static [u8],
        InsnClass,
        StepKind,
        Option<u64>,
    );
    let table: &[Row] = &[
        ("nop", 64, &[0x90], Plain, StepKind::Other, None),
        (
            "jmp short",
            64,
            &[0xeb, 0x10],
            Jump,
            StepKind::Other,
            Some(0x1012),
        ),
        (
            "jmp near",
            32,
            &[0xe9, 0xfb, 0xff, 0xff, 0xff],
            Jump,
            StepKind::Other,
            Some(0x1000),
        ),
        ("jmp rax", 64, &[0xff, 0xe0], Jump, StepKind::Other, None),
        (
            "jz",
            64,
            &[0x74, 0xfe],
            ConditionalBranch,
            StepKind::Other,
            Some(0x1000),
        ),
        (
            "jz near, 16 bits",
            16,
            &[0x0f, 0x84, 0x00, 0xf0],
            ConditionalBranch,
            StepKind::Other,
            Some(0x4),
        ),
        (
            "loop",
            64,
            &[0xe2, 0x00],
            ConditionalBranch,
            StepKind::Other,
            Some(0x1002),
        ),
        (
            "jrcxz",
            64,
            &[0xe3, 0x7f],
            ConditionalBranch,
            StepKind::Other,
            Some(0x1081),
        ),
        (
            "call",
            64,
            &[0xe8, 0, 0, 0, 0],
            Call,
            StepKind::Other,
            Some(0x1005),
        ),
        ("call rax", 64, &[0xff, 0xd0], Call, StepKind::Other, None),
        ("ret", 64, &[0xc3], Return, StepKind::Other, None),
        ("retf", 64, &[0xcb], Far, StepKind::FarTransfer, None),
        (
            "jmp far",
            32,
            &[0xea, 0, 0, 0, 0, 8, 0],
            Far,
            StepKind::FarTransfer,
            None,
        ),
        (
            "jmp far [rax]",
            64,
            &[0xff, 0x28],
            Far,
            StepKind::FarTransfer,
            None,
        ),
        (
            "call far [rax]",
            64,
            &[0xff, 0x18],
            Far,
            StepKind::FarTransfer,
            None,
        ),
        ("iretq", 64, &[0x48, 0xcf], Far, StepKind::Iret, None),
        ("iret", 16, &[0xcf], Far, StepKind::Iret, None),
        ("syscall", 64, &[0x0f, 0x05], Far, StepKind::Syscall, None),
        (
            "sysretq",
            64,
            &[0x48, 0x0f, 0x07],
            Far,
            StepKind::Sysret,
            None,
        ),
        ("sysenter", 64, &[0x0f, 0x34], Far, StepKind::Sysenter, None),
        ("sysexit", 64, &[0x0f, 0x35], Far, StepKind::Sysexit, None),
        (
            "int 0x80",
            64,
            &[0xcd, 0x80],
            Far,
            StepKind::SoftInt(0x80),
            None,
        ),
        ("int3", 64, &[0xcc], Far, StepKind::Int3, None),
        ("int1", 64, &[0xf1], Far, StepKind::Int1, None),
        ("into", 32, &[0xce], Far, StepKind::Into, None),
        ("pushfq", 64, &[0x9c], Plain, StepKind::Pushf, None),
        ("pushf", 16, &[0x9c], Plain, StepKind::Pushf, None),
        ("popfq", 64, &[0x9d], Plain, StepKind::Popf, None),
        ("mov ss,ax", 64, &[0x8e, 0xd0], Plain, StepKind::MovSs, None),
        ("mov ds,ax", 64, &[0x8e, 0xd8], Plain, StepKind::Other, None),
        ("mov ax,ss", 64, &[0x8c, 0xd0], Plain, StepKind::Other, None),
        ("pop ss", 32, &[0x17], Plain, StepKind::PopSs, None),
        ("pop ds", 32, &[0x1f], Plain, StepKind::Other, None),
        ("sti", 64, &[0xfb], Plain, StepKind::Sti, None),
        ("cli", 64, &[0xfa], Plain, StepKind::Cli, None),
        ("rdmsr", 64, &[0x0f, 0x32], Plain, StepKind::Rdmsr, None),
        ("wrmsr", 64, &[0x0f, 0x30], Plain, StepKind::Wrmsr, None),
        ("rdpmc", 64, &[0x0f, 0x33], Plain, StepKind::Rdpmc, None),
        ("hlt", 64, &[0xf4], Plain, StepKind::Hlt, None),
        (
            "mov cr3,rax",
            64,
            &[0x0f, 0x22, 0xd8],
            Plain,
            StepKind::MovCr,
            None,
        ),
        (
            "mov rax,dr7",
            64,
            &[0x0f, 0x21, 0xf8],
            Plain,
            StepKind::MovDr,
            None,
        ),
        (
            "lidt [rax]",
            64,
            &[0x0f, 0x01, 0x18],
            Plain,
            StepKind::Lidt,
            None,
        ),
        (
            "vmmcall",
            64,
            &[0x0f, 0x01, 0xd9],
            Plain,
            StepKind::Other,
            None,
        ),
        (
            "vmcall",
            64,
            &[0x0f, 0x01, 0xc1],
            Plain,
            StepKind::Other,
            None,
        ),
        ("ud2", 64, &[0x0f, 0x0b], Plain, StepKind::Other, None),
        (
            "xbegin",
            64,
            &[0xc7, 0xf8, 0, 0, 0, 0],
            Plain,
            StepKind::Other,
            None,
        ),
    ];
    for (name, bitness, bytes, class, kind, target) in table {
        let facts = facts(*bitness, bytes);
        assert_eq!(
            (facts.class, facts.kind, facts.near_target),
            (*class, *kind, *target),
            "{name}"
        );
        let conditional = *class == ConditionalBranch || *kind == StepKind::Into;
        assert_eq!(facts.conditional, conditional, "{name}");
        let inhibits = matches!(kind, StepKind::MovSs | StepKind::PopSs | StepKind::Sti);
        assert_eq!(facts.inhibits_interrupts, inhibits, "{name}");
        assert!(!facts.rep, "{name}");
    }
}

#[test]
fn repeated_instructions_are_string_instructions_with_a_prefix() {
    let table: &[(&str, &[u8], bool)] = &[
        ("movsb", &[0xa4], false),
        ("rep movsb", &[0xf3, 0xa4], true),
        ("repne scasb", &[0xf2, 0xae], true),
        ("rep insb", &[0xf3, 0x6c], true),
        ("pause", &[0xf3, 0x90], false),
        ("rep ret", &[0xf3, 0xc3], false),
        ("movsd xmm", &[0xf2, 0x0f, 0x10, 0x00], false),
        ("popcnt", &[0xf3, 0x0f, 0xb8, 0xc0], false),
    ];
    for (name, bytes, rep) in table {
        assert_eq!(facts(64, bytes).rep, *rep, "{name}");
    }
}

#[test]
fn faults_are_told() {
    let memory = FaultSet::GP | FaultSet::PF | FaultSet::AC;
    let stack = FaultSet::SS | FaultSet::PF | FaultSet::AC;
    let gate = FaultSet::GP | FaultSet::NP | FaultSet::SS | FaultSet::TS | FaultSet::PF;
    let table: &[(&str, u32, &[u8], FaultSet)] = &[
        ("nop", 64, &[0x90], FaultSet::empty()),
        ("mov rax,rbx", 64, &[0x48, 0x89, 0xd8], FaultSet::empty()),
        ("mov rax,[rbx]", 64, &[0x48, 0x8b, 0x03], memory),
        ("push rax", 64, &[0x50], stack),
        ("push [rbx]", 64, &[0xff, 0x33], memory | stack),
        ("jmp short, 64 bits", 64, &[0xeb, 0x10], FaultSet::empty()),
        ("jmp short, 32 bits", 32, &[0xeb, 0x10], FaultSet::GP),
        ("jmp rax", 64, &[0xff, 0xe0], FaultSet::GP),
        ("call", 64, &[0xe8, 0, 0, 0, 0], stack),
        ("ret", 64, &[0xc3], stack | FaultSet::GP),
        ("div rbx", 64, &[0x48, 0xf7, 0xf3], FaultSet::DE),
        ("rdmsr", 64, &[0x0f, 0x32], FaultSet::GP),
        ("rdpmc", 64, &[0x0f, 0x33], FaultSet::GP),
        ("cli", 64, &[0xfa], FaultSet::GP),
        ("hlt", 64, &[0xf4], FaultSet::GP),
        ("int3", 64, &[0xcc], gate | FaultSet::BP),
        ("int 0x80", 64, &[0xcd, 0x80], gate),
        ("ud2", 64, &[0x0f, 0x0b], FaultSet::UD),
        ("fld1", 64, &[0xd9, 0xe8], FaultSet::NM | FaultSet::MF),
        (
            "addps xmm0,xmm1",
            64,
            &[0x0f, 0x58, 0xc1],
            FaultSet::NM | FaultSet::UD | FaultSet::XM,
        ),
        ("out dx,al", 64, &[0xee], FaultSet::GP | FaultSet::PF),
        ("bound", 32, &[0x62, 0x00], memory | FaultSet::BR),
        (
            "mov dr7,rax",
            64,
            &[0x0f, 0x23, 0xf8],
            FaultSet::GP | FaultSet::UD | FaultSet::DB,
        ),
        (
            "mov ss,ax",
            64,
            &[0x8e, 0xd0],
            FaultSet::GP | FaultSet::NP | FaultSet::SS | FaultSet::PF,
        ),
    ];
    for (name, bitness, bytes, expected) in table {
        let faults = facts(*bitness, bytes).may_fault;
        assert_eq!(
            faults,
            *expected,
            "{name}: {:?}",
            faults.vectors().collect::<Vec<_>>()
        );
    }
    assert_eq!(
        (FaultSet::DE | FaultSet::PF).vectors().collect::<Vec<_>>(),
        [0, 14]
    );
}

#[test]
fn what_cannot_be_decoded_is_told() {
    let truncated = |given| Undecodable::Truncated { rip: RIP, given };
    let invalid = Undecodable::Invalid { rip: RIP };
    let table: &[(&[u8], u32, Undecodable)] = &[
        (&[], 64, truncated(0)),
        (&[0x48], 64, truncated(1)),
        (&[0xe8, 0, 0], 64, truncated(3)),
        (&[0x66; 15], 64, invalid),
        (&[0xce, 0x90, 0x90], 64, invalid),
        (&[0xff, 0xff, 0x90], 64, invalid),
        (&[0xf0, 0x90, 0x90], 64, invalid),
        (&[0x90], 8, Undecodable::Bitness { bitness: 8 }),
    ];
    for (bytes, bitness, expected) in table {
        assert_eq!(decoded(bytes, *bitness), Err(*expected), "{bytes:02x?}");
    }
}

/// Mode, bytes, word.
#[test]
fn what_a_return_reads_is_told() {
    let table: &[(&str, u32, &[u8], u8)] = &[
        ("iretq", 64, &[0x48, 0xcf], 8),
        ("iretd", 64, &[0xcf], 4),
        ("iretw", 64, &[0x66, 0xcf], 2),
        ("retfq", 64, &[0x48, 0xcb], 8),
        ("retf 8", 32, &[0xca, 8, 0], 4),
        ("popfq", 64, &[0x9d], 8),
        ("popf", 16, &[0x9d], 2),
        ("sysretq", 64, &[0x48, 0x0f, 0x07], 8),
        ("sysret", 64, &[0x0f, 0x07], 4),
        ("sysexit", 32, &[0x0f, 0x35], 4),
        ("sysexitq", 64, &[0x48, 0x0f, 0x35], 8),
        ("jmp far [rax]", 64, &[0xff, 0x28], 0),
        ("ret", 64, &[0xc3], 0),
        ("pop rax", 64, &[0x58], 0),
    ];
    for (name, bitness, bytes, word) in table {
        assert_eq!(facts(*bitness, bytes).word, *word, "{name}");
    }
}

#[test]
fn rdpmc_is_found_with_and_without_prefixes() {
    let check = |bitness, code: &[u8], expected: Option<u64>| {
        assert_eq!(rip_after_rdpmc(code, bitness, RIP), expected, "{code:02x?}");
    };
    check(64, &[0x0f, 0x33], Some(RIP + 2));
    check(64, &[0x48, 0x0f, 0x33], Some(RIP + 3));
    check(16, &[0x0f, 0x33, 0x90], Some(RIP + 2));
    check(64, &[0x0f, 0x32], None);
    check(64, &[0x0f], None);
    check(8, &[0x0f, 0x33], None);
}

#[test]
fn vectors_with_an_error_code() {
    let with: Vec<u8> = (0..32)
        .filter(|vector| pushes_error_code(*vector))
        .collect();
    assert_eq!(with, [8, 10, 11, 12, 13, 14, 17, 21, 29, 30]);
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(
        bytes in any::<[u8; 16]>(), length in 0usize..=16, mode in 0usize..3,
        rip in any::<u64>(), next in any::<u64>(), flags in any::<u64>(), rcx in any::<u64>(),
    ) {
        let bitness = [16, 32, 64][mode];
        let factory = &mut InstructionInfoFactory::new();
        if let Ok(decoded) = decode(&bytes[..length], bitness, rip, factory) {
            let facts = decoded.facts;
            prop_assert!((1..=15).contains(&facts.len));
            let done = facts.retire(next, flags, rcx);
            prop_assert!(done.branch || !(done.taken || done.far));
            prop_assert!(done.loads <= facts.loads && done.stores <= facts.stores);
        }
    }
}
