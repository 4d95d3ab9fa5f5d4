//! What the manuals leave undefined, of integer instructions, has one value here, whatever the host
//! is: flags of each mnemonic that has such flags, and three results. The code computes it without
//! the host's flags; x87 and SSE are `emu-fpu`'s.

use std::collections::BTreeSet;

use iced_x86::{Mnemonic, RflagsBits};

use crate::codes::implemented;
use crate::guest::Happened;
use crate::system::{change, guest};

const CF: u64 = 1;
const PF: u64 = 4;
const AF: u64 = 0x10;
const ZF: u64 = 0x40;
const SF: u64 = 0x80;
const OF: u64 = 0x800;
/// The decoder's words for these; it has others for x87's.
const STATUS: u32 = RflagsBits::CF
    | RflagsBits::PF
    | RflagsBits::AF
    | RflagsBits::ZF
    | RflagsBits::SF
    | RflagsBits::OF;
const ALL: u64 = CF | PF | AF | ZF | SF | OF;

/// An instruction and what it leaves.
struct Row {
    /// Those that have this rule.
    of: &'static [Mnemonic],
    /// What the manual leaves undefined (SDM vol. 2, the mnemonic's page), and what it is here.
    rule: &'static str,
    code: &'static [u8],
    rax: u64,
    rcx: u64,
    /// Flags that stay as they were, and those that are set.
    flags: [u64; 2],
    /// RAX behind it.
    result: u64,
}

/// RAX and RCX are the only operands.
const ROWS: &[Row] = {
    use Mnemonic as M;
    &[
        Row {
            of: &[M::And, M::Test],
            rule: "AF: 0",
            code: &[0x21, 0xc8],
            rax: 0xf,
            rcx: 0x33,
            flags: [0, PF],
            result: 3,
        },
        Row {
            of: &[M::Or],
            rule: "AF: 0",
            code: &[0x09, 0xc8],
            rax: 0x1f,
            rcx: 0x20,
            flags: [0, PF],
            result: 0x3f,
        },
        Row {
            of: &[M::Xor],
            rule: "AF: 0",
            code: &[0x31, 0xc8],
            rax: 0xf,
            rcx: 0x33,
            flags: [0, PF],
            result: 0x3c,
        },
        Row {
            of: &[M::Mul],
            rule: "SF, ZF, AF and PF: those of the low half",
            code: &[0xf7, 0xe1],
            rax: 0x8000_0000,
            rcx: 2,
            flags: [0, CF | OF | ZF | PF],
            result: 0,
        },
        Row {
            of: &[M::Imul],
            rule: "SF, ZF, AF and PF: those of the low half",
            code: &[0x0f, 0xaf, 0xc1],
            rax: 0x4000_0001,
            rcx: 2,
            flags: [0, CF | OF | SF],
            result: 0x8000_0002,
        },
        Row {
            of: &[M::Div],
            rule: "all of them: as they were",
            code: &[0xf6, 0xf1],
            rax: 100,
            rcx: 7,
            flags: [ALL, 0],
            result: 0x020e,
        },
        Row {
            of: &[M::Idiv],
            rule: "all of them: as they were",
            code: &[0xf6, 0xf9],
            rax: 100,
            rcx: 0xf9,
            flags: [ALL, 0],
            result: 0x02f2,
        },
        Row {
            of: &[M::Bsf],
            rule: "CF, OF, SF, AF and PF: those of the source; of 0 the destination stays",
            code: &[0x0f, 0xbc, 0xc1],
            rax: 0xdead_beef_0bad_cafe,
            rcx: 0,
            flags: [0, ZF | PF],
            result: 0xdead_beef_0bad_cafe,
        },
        Row {
            of: &[M::Bsr],
            rule: "CF, OF, SF, AF and PF: those of the source; of 0 the destination stays",
            code: &[0x0f, 0xbd, 0xc1],
            rax: 0xdead_beef_0bad_cafe,
            rcx: 0x8000_0003,
            flags: [0, SF | PF],
            result: 31,
        },
        Row {
            of: &[M::Bt],
            rule: "OF, SF, AF and PF: as they were, and so is ZF",
            code: &[0x0f, 0xa3, 0xc8],
            rax: 4,
            rcx: 2,
            flags: [ALL & !CF, CF],
            result: 4,
        },
        Row {
            of: &[M::Bts],
            rule: "OF, SF, AF and PF: as they were, and so is ZF",
            code: &[0x0f, 0xab, 0xc8],
            rax: 0,
            rcx: 2,
            flags: [ALL & !CF, 0],
            result: 4,
        },
        Row {
            of: &[M::Btr],
            rule: "OF, SF, AF and PF: as they were, and so is ZF",
            code: &[0x0f, 0xb3, 0xc8],
            rax: 4,
            rcx: 2,
            flags: [ALL & !CF, CF],
            result: 0,
        },
        Row {
            of: &[M::Btc],
            rule: "OF, SF, AF and PF: as they were, and so is ZF",
            code: &[0x0f, 0xbb, 0xc8],
            rax: 4,
            rcx: 2,
            flags: [ALL & !CF, CF],
            result: 0,
        },
        Row {
            of: &[M::Shl, M::Sal],
            rule: "AF: 0; OF of counts above 1: as if the last step had been the only one",
            code: &[0xd3, 0xe0],
            rax: 0x2000_0001,
            rcx: 2,
            flags: [0, SF | OF],
            result: 0x8000_0004,
        },
        Row {
            of: &[M::Shl, M::Sal],
            rule: "CF of counts from the width on: the last bit that leaves, 0 behind the first",
            code: &[0xd2, 0xe0],
            rax: 0xff,
            rcx: 17,
            flags: [0, ZF | PF],
            result: 0,
        },
        Row {
            of: &[M::Shr],
            rule: "AF: 0; OF of counts above 1: as if the last step had been the only one",
            code: &[0xd3, 0xe8],
            rax: 0x8000_0002,
            rcx: 2,
            flags: [0, CF | PF],
            result: 0x2000_0000,
        },
        Row {
            of: &[M::Sar],
            rule: "AF: 0; OF of counts above 1: 0",
            code: &[0xd3, 0xf8],
            rax: 0x8000_0002,
            rcx: 2,
            flags: [0, CF | SF | PF],
            result: 0xe000_0000,
        },
        Row {
            of: &[M::Rol],
            rule: "OF of counts other than 1: as if the last step had been the only one",
            code: &[0xd3, 0xc0],
            rax: 0x2000_0000,
            rcx: 2,
            flags: [ALL & !(CF | OF), OF],
            result: 0x8000_0000,
        },
        Row {
            of: &[M::Ror],
            rule: "OF of counts other than 1: as if the last step had been the only one",
            code: &[0xd3, 0xc8],
            rax: 2,
            rcx: 2,
            flags: [ALL & !(CF | OF), CF | OF],
            result: 0x8000_0000,
        },
        Row {
            of: &[M::Shld],
            rule: "AF: 0; OF of counts above 1: whether the sign has changed",
            code: &[0x0f, 0xa5, 0xc8],
            rax: 0x2000_0000,
            rcx: 2,
            flags: [0, SF | OF | PF],
            result: 0x8000_0000,
        },
        Row {
            of: &[M::Shrd],
            rule: "AF: 0; OF of counts above 1: whether the sign has changed",
            code: &[0x0f, 0xad, 0xc8],
            rax: 0,
            rcx: 2,
            flags: [0, SF | OF | PF],
            result: 0x8000_0000,
        },
        Row {
            of: &[M::Shld],
            rule: "16 bits by more than 16: of destination, source and destination in a row",
            code: &[0x66, 0x0f, 0xa5, 0xc8],
            rax: 0x1234,
            rcx: 0x5614,
            flags: [0, CF | PF],
            result: 0x6141,
        },
        Row {
            of: &[M::Mov],
            rule: "to and from control and debug registers, all of them: as they were",
            code: &[0x0f, 0x22, 0xd0],
            rax: 0,
            rcx: 0,
            flags: [ALL, 0],
            result: 0,
        },
        Row {
            of: &[M::Bswap],
            rule: "of 16 bits: 0",
            code: &[0x66, 0x0f, 0xc8],
            rax: 0x1234_5678,
            rcx: 0,
            flags: [ALL, 0],
            result: 0x1234_0000,
        },
    ]
};

/// RCL and RCR take CF in, so that their rule asks for two rows.
const THROUGH_CARRY: [(Mnemonic, [u8; 2]); 2] =
    [(Mnemonic::Rcl, [0xd3, 0xd0]), (Mnemonic::Rcr, [0xd3, 0xd8])];

/// RFLAGS' status flags and RAX behind an instruction.
fn done(code: &[u8], [rax, rcx]: [u64; 2], flags: u64) -> (u64, u64) {
    let mut guest = guest(0, code);
    change(&mut guest, |state| {
        state.r[0] = rax;
        state.r[1] = rcx;
        state.set_rflags(2 | flags);
    });
    assert_eq!(guest.one(), Happened::Retired, "{code:02x?}");
    let state = guest.cpu.state();
    (state.rflags() & ALL, state.r[0])
}

#[test]
fn what_the_manual_leaves_undefined_has_one_value() {
    for row in ROWS {
        let [stays, set] = row.flags;
        for before in [0, ALL] {
            let found = done(row.code, [row.rax, row.rcx], before);
            let expected = (before & stays | set, row.result);
            let (of, rule) = (row.of, row.rule);
            assert_eq!(found, expected, "{of:?}, {rule}: {:#x?}", [found, expected]);
        }
    }
    // OF as if the last step of two had been the only one: of 2 and of 1 and CF, to the left.
    let [(_, left), (_, right)] = THROUGH_CARRY;
    assert_eq!(done(&left, [0x2000_0000, 2], 0), (OF, 0x8000_0000));
    assert_eq!(done(&left, [0xa000_0000, 2], CF), (OF, 0x8000_0003));
    assert_eq!(done(&right, [2, 2], 0), (CF, 0));
    assert_eq!(done(&right, [0, 2], CF), (OF, 0x4000_0000));
}

/// Each mnemonic of which the decoder's table says that a flag is undefined has a rule.
#[test]
fn every_undefined_flag_has_a_rule() {
    let ruled: BTreeSet<String> = ROWS
        .iter()
        .flat_map(|row| row.of)
        .chain(THROUGH_CARRY.iter().map(|(mnemonic, _)| mnemonic))
        .map(|mnemonic| format!("{mnemonic:?}"))
        .collect();
    assert!(ruled.len() > 20);
    let mut without = BTreeSet::new();
    for code in implemented() {
        let mut insn = iced_x86::Instruction::default();
        insn.set_code(code);
        let mnemonic = format!("{:?}", code.mnemonic());
        if insn.rflags_undefined() & STATUS != 0 && !ruled.contains(&mnemonic) {
            without.insert(mnemonic);
        }
    }
    assert!(without.is_empty(), "{without:?}");
}

#[test]
fn strings_that_repeat_nothing_change_nothing() {
    // REP STOSB, REP MOVSB, REP SCASB [EDI], by addresses of 32 bits: Intel's processors clear upper
    // halves, AMD's do not, and the manuals (SDM vol. 2B, REP) say nothing of it.
    for code in [[0x67, 0xf3, 0xaa], [0x67, 0xf3, 0xa4], [0x67, 0xf3, 0xae]] {
        let registers = [1_u64 << 40, 2 << 40 | 6, 3 << 40 | 7];
        let mut guest = guest(3, &code);
        change(&mut guest, |state| {
            [state.r[1], state.r[6], state.r[7]] = registers;
        });
        assert_eq!(guest.one(), Happened::Retired);
        let state = guest.cpu.state();
        assert_eq!([state.r[1], state.r[6], state.r[7]], registers);
    }
}
