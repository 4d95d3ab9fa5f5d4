//! What an instruction did: taken or not, and REP with its count.

use instruction_facts::{MathUnit, Retirement};

use super::{RIP, facts};

const CF: u64 = 1;
const PF: u64 = 1 << 2;
const ZF: u64 = 1 << 6;
const SF: u64 = 1 << 7;
const OF: u64 = 1 << 11;

/// The condition with number `cc` (SDM vol. 1, appendix B, "tttn").
fn condition(cc: u8, flags: u64) -> bool {
    let set = |flag: u64| flags & flag != 0;
    let base = match cc >> 1 {
        0 => set(OF),
        1 => set(CF),
        2 => set(ZF),
        3 => set(CF) || set(ZF),
        4 => set(SF),
        5 => set(PF),
        6 => set(SF) ^ set(OF),
        _ => set(ZF) || (set(SF) ^ set(OF)),
    };
    base ^ (cc & 1 == 1)
}

fn all_flags() -> impl Iterator<Item = u64> {
    (0u32..32).map(|n| {
        [CF, PF, ZF, SF, OF]
            .iter()
            .enumerate()
            .filter(|(bit, _)| n & (1 << bit) != 0)
            .map(|(_, flag)| flag)
            .sum()
    })
}

#[test]
fn a_branch_to_the_very_next_instruction_is_decided_by_the_flags() {
    for cc in 0..16 {
        let jcc = facts(64, &[0x70 + cc, 0x00]);
        for flags in all_flags() {
            let taken = jcc.retire(RIP + 2, flags, 0).taken;
            assert_eq!(
                taken,
                condition(cc, flags),
                "condition {cc} flags {flags:#x}"
            );
        }
    }
}

#[test]
fn any_other_branch_is_decided_by_where_the_guest_went() {
    for cc in 0..16 {
        let jcc = facts(64, &[0x70 + cc, 0x10]);
        for flags in all_flags() {
            assert!(jcc.retire(RIP + 0x12, flags, 0).taken, "{cc}");
            assert!(!jcc.retire(RIP + 2, flags, 0).taken, "{cc}");
            // Somewhere else entirely (an event unknown to the caller): flags.
            let elsewhere = jcc.retire(0xdead, flags, 0).taken;
            assert_eq!(elsewhere, condition(cc, flags), "{cc}");
        }
    }
}

/// Mode, bytes with displacement 0, RFLAGS, RCX, taken.
#[test]
fn loops_and_count_branches_look_at_as_much_of_rcx_as_they_use() {
    type Row = (&'static str, u32, &'static [u8], u64, u64, bool);
    let table: &[Row] = &[
        ("loop, last round", 64, &[0xe2, 0], 0, 1, false),
        ("loop, more to come", 64, &[0xe2, 0], 0, 2, true),
        ("loop from 0 wraps", 64, &[0xe2, 0], 0, 0, true),
        (
            "loop in 64 bits uses RCX",
            64,
            &[0xe2, 0],
            0,
            1 << 32 | 1,
            true,
        ),
        ("loop with ECX", 64, &[0x67, 0xe2, 0], 0, 1 << 32 | 1, false),
        (
            "loop in 32 bits uses ECX",
            32,
            &[0xe2, 0],
            0,
            1 << 32 | 1,
            false,
        ),
        (
            "loop in 16 bits uses CX",
            16,
            &[0xe2, 0],
            0,
            0x1_0001,
            false,
        ),
        ("loope, ZF clear", 64, &[0xe1, 0], 0, 5, false),
        ("loope, ZF set", 64, &[0xe1, 0], ZF, 5, true),
        ("loope, ZF set, last round", 64, &[0xe1, 0], ZF, 1, false),
        ("loopne, ZF clear", 64, &[0xe0, 0], 0, 5, true),
        ("loopne, ZF set", 64, &[0xe0, 0], ZF, 5, false),
        ("jrcxz, 0", 64, &[0xe3, 0], 0, 0, true),
        ("jrcxz, high half set", 64, &[0xe3, 0], 0, 1 << 32, false),
        (
            "jecxz, high half set",
            64,
            &[0x67, 0xe3, 0],
            0,
            1 << 32,
            true,
        ),
        ("jcxz", 16, &[0xe3, 0], 0, 0x1_0000, true),
        ("into, OF clear", 32, &[0xce], 0, 0, false),
        ("into, OF set", 32, &[0xce], OF, 0, true),
    ];
    for (name, bitness, bytes, flags, rcx, taken) in table {
        let facts = facts(*bitness, bytes);
        let next = RIP + u64::from(facts.len);
        let done = facts.retire(next, *flags, *rcx);
        assert_eq!((done.branch, done.taken), (true, *taken), "{name}");
    }
}

#[test]
fn retirements_say_what_was_done() {
    let plain = Retirement::default();
    let near = Retirement {
        branch: true,
        taken: true,
        ..plain
    };
    let far = Retirement { far: true, ..near };
    let table: &[(&str, &[u8], Retirement)] = &[
        ("nop", &[0x90], plain),
        ("jmp", &[0xeb, 0x10], near),
        ("jmp to the next", &[0xeb, 0x00], near),
        (
            "call",
            &[0xe8, 0, 0, 0, 0],
            Retirement {
                stores: 1,
                call: true,
                ..near
            },
        ),
        (
            "ret",
            &[0xc3],
            Retirement {
                loads: 1,
                near_return: true,
                ..near
            },
        ),
        ("retf", &[0xcb], Retirement { loads: 2, ..far }),
        ("iretq", &[0x48, 0xcf], Retirement { loads: 5, ..far }),
        ("syscall", &[0x0f, 0x05], far),
        ("sysretq", &[0x48, 0x0f, 0x07], far),
        ("int 0x80", &[0xcd, 0x80], far),
        ("ud2", &[0x0f, 0x0b], plain),
    ];
    for (name, bytes, expected) in table {
        assert_eq!(facts(64, bytes).retire(0x5000, 0, 0), *expected, "{name}");
    }
}

#[test]
fn a_repeated_instruction_retires_once_and_accesses_nothing_at_count_0() {
    let movs = facts(64, &[0xf3, 0xa4]);
    assert!(!movs.completes(RIP), "one more iteration to come");
    assert!(movs.completes(RIP + 2));
    assert_eq!(
        (
            movs.retire(RIP + 2, 0, 1).loads,
            movs.retire(RIP + 2, 0, 1).stores
        ),
        (1, 1)
    );
    assert_eq!(
        (
            movs.retire(RIP + 2, 0, 0).loads,
            movs.retire(RIP + 2, 0, 0).stores
        ),
        (0, 0)
    );
    // With 32-bit addresses the count is ECX, with 16-bit ones CX.
    let high = 1 << 32;
    assert_eq!(movs.retire(RIP + 2, 0, high).loads, 1);
    assert_eq!(
        facts(64, &[0x67, 0xf3, 0xa4])
            .retire(RIP + 3, 0, high)
            .loads,
        0
    );
    assert_eq!(
        facts(16, &[0xf3, 0xa4]).retire(RIP + 2, 0, 0x1_0000).loads,
        0
    );
    // A jump to itself is no repetition, and a plain MOVS has no count.
    assert!(facts(64, &[0xeb, 0xfe]).completes(RIP));
    assert_eq!(facts(64, &[0xa4]).retire(RIP + 1, 0, 0).loads, 1);
}

#[test]
fn mnemonics_fall_into_classes() {
    use MathUnit::{Mmx, Sse, X87};
    let table: &[(&str, &[u8], bool, Option<MathUnit>)] = &[
        ("rep movsb", &[0xf3, 0xa4], true, None),
        ("stosq", &[0x48, 0xab], true, None),
        ("repne scasb", &[0xf2, 0xae], true, None),
        ("cmpsb", &[0xa6], true, None),
        ("lodsb", &[0xac], true, None),
        ("insb", &[0x6c], true, None),
        ("outsb", &[0x6e], true, None),
        ("xlatb", &[0xd7], false, None),
        // The MOVSD of SSE2 is no string instruction.
        (
            "movsd xmm1, [rax]",
            &[0xf2, 0x0f, 0x10, 0x08],
            false,
            Some(Sse),
        ),
        ("fld st1", &[0xd9, 0xc1], false, Some(X87)),
        ("fldcw [rax]", &[0xd9, 0x28], false, Some(X87)),
        ("fisttp dword [rax]", &[0xdb, 0x08], false, Some(X87)),
        ("fcmove st0, st1", &[0xda, 0xc9], false, Some(X87)),
        ("fwait", &[0x9b], false, Some(X87)),
        ("fxsave [rax]", &[0x0f, 0xae, 0x00], false, None),
        ("paddb mm0, mm1", &[0x0f, 0xfc, 0xc1], false, Some(Mmx)),
        (
            "pshufw mm0, mm1, 0",
            &[0x0f, 0x70, 0xc1, 0],
            false,
            Some(Mmx),
        ),
        ("movd ecx, mm0", &[0x0f, 0x7e, 0xc1], false, Some(Mmx)),
        ("emms", &[0x0f, 0x77], false, Some(Mmx)),
        ("cvtpi2ps xmm0, mm0", &[0x0f, 0x2a, 0xc0], false, Some(Sse)),
        ("addps xmm0, xmm1", &[0x0f, 0x58, 0xc1], false, Some(Sse)),
        ("movaps [rax], xmm0", &[0x0f, 0x29, 0x00], false, Some(Sse)),
        ("ldmxcsr [rax]", &[0x0f, 0xae, 0x10], false, Some(Sse)),
        (
            "vaddps ymm0, ymm1, ymm2",
            &[0xc5, 0xf4, 0x58, 0xc2],
            false,
            Some(Sse),
        ),
        ("vzeroupper", &[0xc5, 0xf8, 0x77], false, Some(Sse)),
        ("kmovw k1, eax", &[0xc5, 0xf8, 0x92, 0xc8], false, Some(Sse)),
        ("movnti [rax], ecx", &[0x0f, 0xc3, 0x08], false, None),
        ("prefetcht0 [rax]", &[0x0f, 0x18, 0x08], false, None),
        ("sfence", &[0x0f, 0xae, 0xf8], false, None),
        ("popcnt eax, ecx", &[0xf3, 0x0f, 0xb8, 0xc1], false, None),
        ("add eax, ecx", &[0x01, 0xc8], false, None),
    ];
    for (name, bytes, string, unit) in table {
        let done = facts(64, bytes).retire(0x5000, 0, 1);
        assert_eq!((done.string, done.unit), (*string, *unit), "{name}");
    }
    // No iteration is an instruction all the same.
    assert!(facts(64, &[0xf3, 0xa4]).retire(RIP + 2, 0, 0).string);
}
