//! SSE's floating point.
//!
//! `EMU_FPU_ORACLE_CASES` sets the number of cases.

use std::collections::BTreeMap;

use emu_fpu::sse::{self, HOST, Op, execute};

use crate::native::{self, Case, DATA_LEN, Fx};
use crate::random::Random;

const CASES: usize = 100_000;
const BATCH: usize = 2_000;

/// How operands are made and results are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// Operands and result are XMM registers.
    Xmm,
    /// Its result is in RFLAGS.
    Flags,
    /// Its result is RAX.
    ToGeneral,
    /// Its source is RAX.
    OfGeneral,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Elements {
    Singles,
    Doubles,
    Integers,
}

/// Prefix and opcode behind 0F, for xmm0, xmm1 or RAX.
type Row = (Op, &'static [u8], Shape, Elements, bool);

const XMM: u8 = 0xc1;
const RAX: u8 = 0xc0;

/// Encodings of the instructions (SDM vol. 2), by hand, so that none is ours by mistake.
fn rows() -> Vec<Row> {
    use Elements::{Doubles, Integers, Singles};
    use Shape::{Flags, OfGeneral, ToGeneral, Xmm};
    let mut rows: Vec<Row> = Vec::new();
    macro_rules! four {
        ($($ps:ident $pd:ident $ss:ident $sd:ident $code:literal $imm:literal;)*) => { $(
            rows.push((Op::$ps, &[0x0f, $code, XMM], Xmm, Singles, $imm));
            rows.push((Op::$pd, &[0x66, 0x0f, $code, XMM], Xmm, Doubles, $imm));
            rows.push((Op::$ss, &[0xf3, 0x0f, $code, XMM], Xmm, Singles, $imm));
            rows.push((Op::$sd, &[0xf2, 0x0f, $code, XMM], Xmm, Doubles, $imm));
        )* };
    }
    four! {
        Addps Addpd Addss Addsd 0x58 false;
        Mulps Mulpd Mulss Mulsd 0x59 false;
        Subps Subpd Subss Subsd 0x5c false;
        Minps Minpd Minss Minsd 0x5d false;
        Divps Divpd Divss Divsd 0x5e false;
        Maxps Maxpd Maxss Maxsd 0x5f false;
        Sqrtps Sqrtpd Sqrtss Sqrtsd 0x51 false;
        Cmpps Cmppd Cmpss Cmpsd 0xc2 true;
    }
    let others: &[Row] = &[
        (Op::Ucomiss, &[0x0f, 0x2e, XMM], Flags, Singles, false),
        (Op::Ucomisd, &[0x66, 0x0f, 0x2e, XMM], Flags, Doubles, false),
        (Op::Comiss, &[0x0f, 0x2f, XMM], Flags, Singles, false),
        (Op::Comisd, &[0x66, 0x0f, 0x2f, XMM], Flags, Doubles, false),
        (Op::Cvtps2pd, &[0x0f, 0x5a, XMM], Xmm, Singles, false),
        (Op::Cvtpd2ps, &[0x66, 0x0f, 0x5a, XMM], Xmm, Doubles, false),
        (Op::Cvtss2sd, &[0xf3, 0x0f, 0x5a, XMM], Xmm, Singles, false),
        (Op::Cvtsd2ss, &[0xf2, 0x0f, 0x5a, XMM], Xmm, Doubles, false),
        (Op::Cvtdq2ps, &[0x0f, 0x5b, XMM], Xmm, Integers, false),
        (Op::Cvtdq2pd, &[0xf3, 0x0f, 0xe6, XMM], Xmm, Integers, false),
        (Op::Cvtps2dq, &[0x66, 0x0f, 0x5b, XMM], Xmm, Singles, false),
        (Op::Cvttps2dq, &[0xf3, 0x0f, 0x5b, XMM], Xmm, Singles, false),
        (Op::Cvtpd2dq, &[0xf2, 0x0f, 0xe6, XMM], Xmm, Doubles, false),
        (Op::Cvttpd2dq, &[0x66, 0x0f, 0xe6, XMM], Xmm, Doubles, false),
        (
            Op::Cvtss2si32,
            &[0xf3, 0x0f, 0x2d, XMM],
            ToGeneral,
            Singles,
            false,
        ),
        (
            Op::Cvtss2si64,
            &[0xf3, 0x48, 0x0f, 0x2d, XMM],
            ToGeneral,
            Singles,
            false,
        ),
        (
            Op::Cvttss2si32,
            &[0xf3, 0x0f, 0x2c, XMM],
            ToGeneral,
            Singles,
            false,
        ),
        (
            Op::Cvttss2si64,
            &[0xf3, 0x48, 0x0f, 0x2c, XMM],
            ToGeneral,
            Singles,
            false,
        ),
        (
            Op::Cvtsd2si32,
            &[0xf2, 0x0f, 0x2d, XMM],
            ToGeneral,
            Doubles,
            false,
        ),
        (
            Op::Cvtsd2si64,
            &[0xf2, 0x48, 0x0f, 0x2d, XMM],
            ToGeneral,
            Doubles,
            false,
        ),
        (
            Op::Cvttsd2si32,
            &[0xf2, 0x0f, 0x2c, XMM],
            ToGeneral,
            Doubles,
            false,
        ),
        (
            Op::Cvttsd2si64,
            &[0xf2, 0x48, 0x0f, 0x2c, XMM],
            ToGeneral,
            Doubles,
            false,
        ),
        (
            Op::Cvtsi2ss32,
            &[0xf3, 0x0f, 0x2a, RAX],
            OfGeneral,
            Singles,
            false,
        ),
        (
            Op::Cvtsi2ss64,
            &[0xf3, 0x48, 0x0f, 0x2a, RAX],
            OfGeneral,
            Singles,
            false,
        ),
        (
            Op::Cvtsi2sd32,
            &[0xf2, 0x0f, 0x2a, RAX],
            OfGeneral,
            Doubles,
            false,
        ),
        (
            Op::Cvtsi2sd64,
            &[0xf2, 0x48, 0x0f, 0x2a, RAX],
            OfGeneral,
            Doubles,
            false,
        ),
        (Op::Addsubps, &[0xf2, 0x0f, 0xd0, XMM], Xmm, Singles, false),
        (Op::Addsubpd, &[0x66, 0x0f, 0xd0, XMM], Xmm, Doubles, false),
        (Op::Haddps, &[0xf2, 0x0f, 0x7c, XMM], Xmm, Singles, false),
        (Op::Haddpd, &[0x66, 0x0f, 0x7c, XMM], Xmm, Doubles, false),
        (Op::Hsubps, &[0xf2, 0x0f, 0x7d, XMM], Xmm, Singles, false),
        (Op::Hsubpd, &[0x66, 0x0f, 0x7d, XMM], Xmm, Doubles, false),
        (Op::Dpps, &[0x66, 0x0f, 0x3a, 0x40, XMM], Xmm, Singles, true),
        (Op::Dppd, &[0x66, 0x0f, 0x3a, 0x41, XMM], Xmm, Doubles, true),
        (
            Op::Roundps,
            &[0x66, 0x0f, 0x3a, 0x08, XMM],
            Xmm,
            Singles,
            true,
        ),
        (
            Op::Roundpd,
            &[0x66, 0x0f, 0x3a, 0x09, XMM],
            Xmm,
            Doubles,
            true,
        ),
        (
            Op::Roundss,
            &[0x66, 0x0f, 0x3a, 0x0a, XMM],
            Xmm,
            Singles,
            true,
        ),
        (
            Op::Roundsd,
            &[0x66, 0x0f, 0x3a, 0x0b, XMM],
            Xmm,
            Doubles,
            true,
        ),
    ];
    rows.extend_from_slice(others);
    rows
}

/// Not compared with the host, with the reason.
const ELSEWHERE: &[(Op, &str)] = &[
    (Op::Rcpps, APPROXIMATE),
    (Op::Rcpss, APPROXIMATE),
    (Op::Rsqrtps, APPROXIMATE),
    (Op::Rsqrtss, APPROXIMATE),
    (Op::Cvtpi2ps, MMX),
    (Op::Cvtpi2pd, MMX),
    (Op::Cvtps2pi, MMX),
    (Op::Cvttps2pi, MMX),
    (Op::Cvtpd2pi, MMX),
    (Op::Cvttpd2pi, MMX),
];
const APPROXIMATE: &str = "each processor has values of its own: `approximations_are_close`";
const MMX: &str = "the compared instruction of XMM registers, on half of one";

#[test]
fn every_instruction_is_compared_or_says_why_not() {
    let rows = rows();
    for op in Op::ALL {
        let compared = rows.iter().any(|row| row.0 == *op);
        let excused = ELSEWHERE.iter().any(|(one, _)| one == op);
        assert_ne!(compared, excused, "{op:?}");
    }
}

fn elements(random: &mut Random, of: Elements) -> [u64; 2] {
    [(); 2].map(|()| match of {
        Elements::Singles => random.single() | random.single() << 32,
        Elements::Doubles => random.double(),
        Elements::Integers => random.integer() & 0xffff_ffff | random.integer() << 32,
    })
}

/// Registers, with elements that are often equal or near to each other.
pub(crate) fn operands(random: &mut Random, of: Elements) -> ([u64; 2], [u64; 2]) {
    let a = elements(random, of);
    let mut b = elements(random, of);
    for (to, from) in b.iter_mut().zip(a) {
        match random.below(8) {
            0 => *to = from,
            1 => *to = from ^ 0x8000_0000_8000_0000,
            2 => *to = from ^ random.below(4) ^ random.below(4) << 32,
            _ => {}
        }
    }
    (a, b)
}

fn case(random: &mut Random, row: &Row) -> Case {
    let mut code = [0xcc; 16];
    code[..row.1.len()].copy_from_slice(row.1);
    let mut len = row.1.len();
    if row.4 {
        code[len] = random.next() as u8;
        if matches!(row.0, Op::Cmpps | Op::Cmppd | Op::Cmpss | Op::Cmpsd) {
            code[len] &= 7;
        }
        len += 1;
    }
    let (a, b) = operands(random, row.3);
    let masks = match random.below(4) {
        0 => 0x1f80,
        1 => 0x1f80 ^ 0x80 << random.below(6),
        _ => random.next() as u32 & 0x1f80,
    };
    let mut xmm = [[0x5555_aaaa_3333_cccc; 2]; 16];
    xmm[0] = a;
    xmm[1] = b;
    Case {
        code,
        len: len as u64,
        rax: random.integer(),
        rflags: 0x202,
        fx: Fx {
            control: 0x37f,
            status: 0,
            tags: 0,
            opcode: 0,
            ip: 0,
            dp: 0,
            // Flags of before stay, whatever is raised.
            mxcsr: random.next() as u32 & 0xe040 | masks | random.next() as u32 & 0x3f,
            mxcsr_mask: 0,
            st: [[0; 16]; 8],
            xmm,
        },
        data: [0; DATA_LEN],
    }
}

fn is_nan(bits: u64, of: Elements) -> bool {
    match of {
        Elements::Singles => [bits, bits >> 32]
            .iter()
            .any(|one| one & 0x7fff_ffff > 0x7f80_0000),
        _ => bits << 1 > 0xffe0_0000_0000_0000,
    }
}

/// Where the host's result is its own: of two NaNs that meet in a dot product or a horizontal
/// operation the manual does not say which one comes out.
fn either_nan(row: &Row, a: [u64; 2], b: [u64; 2]) -> bool {
    matches!(row.0, Op::Dpps | Op::Dppd) && a.iter().chain(&b).any(|half| is_nan(*half, row.3))
}

fn differ(row: &Row, case: &Case, native: &native::Outcome) -> Option<String> {
    let imm = case.code[case.len as usize - 1];
    let [a, b] = [case.fx.xmm[0], case.fx.xmm[1]];
    let source = if row.2 == Shape::OfGeneral {
        [case.rax, 0]
    } else {
        b
    };
    let mxcsr = case.fx.mxcsr;
    let ours = execute(row.0, a, source, imm, mxcsr);
    let raised = mxcsr | ours.flags;
    if raised != native.fx.mxcsr {
        return Some(format!("MXCSR {raised:#x}, not {:#x}", native.fx.mxcsr));
    }
    let fault = native.trap == 19;
    if fault != ours.faults(mxcsr) || !fault && native.trap != 3 {
        return Some(format!("flags {:#x}, trap {}", ours.flags, native.trap));
    }
    if fault {
        return None;
    }
    let theirs = match row.2 {
        Shape::Xmm | Shape::OfGeneral => native.fx.xmm[0],
        Shape::Flags => [native.rflags & 0x8d5, 0],
        Shape::ToGeneral => [native.rax, 0],
    };
    if ours.value != theirs && !either_nan(row, a, b) {
        return Some(format!("{:x?}, not {theirs:x?}", ours.value));
    }
    None
}

#[test]
fn results_and_exceptions_are_the_hosts() {
    let cases = std::env::var("EMU_FPU_ORACLE_CASES");
    let cases = cases.ok().and_then(|n| n.parse().ok()).unwrap_or(CASES);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let rows = rows();
    let mut wrong: BTreeMap<String, (usize, String)> = BTreeMap::new();
    let mut faults = 0;
    let mut done = 0;
    while done < cases {
        let batch: Vec<(&Row, Case)> = (0..BATCH)
            .map(|n| {
                let row = &rows[(done + n) % rows.len()];
                (row, case(&mut random, row))
            })
            .collect();
        let all: Vec<Case> = batch.iter().map(|(_, case)| case.clone()).collect();
        for ((row, case), native) in batch.iter().zip(native::run(&all)) {
            faults += usize::from(native.trap == 19);
            if let Some(how) = differ(row, case, &native) {
                let entry = wrong.entry(format!("{:?}", row.0)).or_default();
                entry.0 += 1;
                let [a, b] = [case.fx.xmm[0], case.fx.xmm[1]];
                let imm = case.code[case.len as usize - 1];
                entry.1 = format!(
                    "{how}; {a:x?}, {b:x?}, {:#x}, imm {imm:#x}, MXCSR {:#x}",
                    case.rax, case.fx.mxcsr
                );
            }
        }
        done += BATCH;
    }
    println!("{done} cases, {faults} of them #XM");
    assert!(faults > done / 10, "the cases raise too little");
    let lines: Vec<String> = wrong
        .iter()
        .map(|(op, (count, how))| format!("{op} {count}: {how}"))
        .collect();
    assert!(wrong.is_empty(), "{}", lines.join("\n"));
}

/// RCP and RSQRT of a single, as `f64` has it, against ours: SDM vol. 2, RCPSS and RSQRTSS.
#[test]
fn approximations_are_close() {
    let mut random = Random(1);
    for _ in 0..200_000 {
        let bits = random.single() as u32;
        let x = f32::from_bits(bits);
        let of = |op| execute(op, [0; 2], [u64::from(bits), 0], 0, 0).value[0] as u32;
        let [rcp, root] = [of(Op::Rcpss), of(Op::Rsqrtss)].map(f32::from_bits);
        let near = |ours: f32, real: f64| {
            let error = (f64::from(ours) / real - 1.0).abs();
            error <= 1.0 / 4096.0
        };
        if !x.is_normal() {
            continue;
        }
        let real = 1.0 / f64::from(x);
        let tiny = real.abs() < f64::from(f32::MIN_POSITIVE);
        assert!(tiny && rcp == 0.0 || near(rcp, real), "1 / {x:e}: {rcp:e}");
        if x > 0.0 {
            let real = 1.0 / f64::from(x).sqrt();
            assert!(near(root, real), "1 / √{x:e}: {root:e}");
        } else {
            assert_eq!(root.to_bits(), 0xffc0_0000);
        }
    }
}

/// Rows of SDM vol. 2, tables of RCPPS and RSQRTPS.
#[test]
fn approximations_of_what_is_no_number() {
    let check = |op, bits: u32, expected: u32| {
        let ours = execute(op, [u64::MAX; 2], [u64::from(bits), 7], 0, 0);
        let value = [0xffff_ffff_0000_0000 | u64::from(expected), u64::MAX];
        assert_eq!(ours.value, value, "{op:?} {bits:#x}");
        assert_eq!(ours.flags, 0);
    };
    check(Op::Rcpss, 0, 0x7f80_0000);
    check(Op::Rcpss, 0x8000_0000, 0xff80_0000);
    check(Op::Rcpss, 0x8000_0001, 0xff80_0000);
    check(Op::Rcpss, 0x7f80_0000, 0);
    check(Op::Rcpss, 0xff80_0000, 0x8000_0000);
    check(Op::Rcpss, 0x7f80_0001, 0x7fc0_0001);
    check(Op::Rcpss, 0x3f80_0000, 0x3f80_0000);
    check(Op::Rcpss, 0x7f00_0000, 0);
    check(Op::Rsqrtss, 0, 0x7f80_0000);
    check(Op::Rsqrtss, 0x8000_0000, 0xff80_0000);
    check(Op::Rsqrtss, 0x7f80_0000, 0);
    check(Op::Rsqrtss, 0xff80_0000, 0xffc0_0000);
    check(Op::Rsqrtss, 0xbf80_0000, 0xffc0_0000);
    check(Op::Rsqrtss, 0x4080_0000, 0x3f00_0000);
    check(Op::Rsqrtss, 0xffc0_0001, 0xffc0_0001);
}

#[test]
fn the_hosts_instructions_have_their_reasons() {
    let source = include_str!("../src/sys.rs");
    for (name, reason) in HOST {
        assert!(source.contains(name), "{name} is not in `sys`");
        assert!(reason.len() > 20);
    }
    // What `sys` makes and the list, one for one: nothing of the host's is used unlisted.
    let made = source
        .split("\nregisters! {")
        .nth(1)
        .into_iter()
        .flat_map(str::lines)
        .filter(|line| {
            line.starts_with("    ")
                || line.starts_with("predicates!")
                || line.starts_with("ordered!")
        })
        .flat_map(|line| {
            let names = line.split('"').next().unwrap_or(line);
            names.split_whitespace().filter(|word| {
                word.chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
            })
        });
    let made: Vec<&str> = made.collect();
    assert_eq!(made.len(), HOST.len());
    for name in made {
        assert!(HOST.iter().any(|(one, _)| *one == name), "{name}");
    }
}

#[test]
fn tininess_alone_underflows_where_it_is_unmasked() {
    // The least normal number by 2: exact, and denormal (SDM vol. 1, 4.9.1.5).
    let [a, b] = [[0x0080_0000, 0], [0x4000_0000, 0]];
    let flags = |mxcsr| execute(Op::Divss, a, b, 0, mxcsr).flags;
    assert_eq!(flags(0x1f80), 0);
    assert_eq!(flags(0x1780), sse::UNDERFLOW);
}

/// Flags of MXCSR with all masked, by element: what an element raises first hides its DE, and
/// no other element's.
#[test]
fn a_denormal_operand_comes_behind_invalid_operations_and_divisions_by_0() {
    const DENORMAL: u64 = 0x0000_0001;
    const NEGATIVE: u64 = 0x8000_0001;
    const ONE: u64 = 0x3f80_0000;
    const QUIET: u64 = 0x7fc0_0000;
    const SIGNALING: u64 = 0x7f80_0001;
    const INFINITE: u64 = 0x7f80_0000;
    const INVALID: u32 = sse::INVALID;
    const ZERO: u32 = sse::ZERO_DIVIDE;
    const DE: u32 = sse::DENORMAL;
    let check = |op, a: u64, b: u64, expected: u32| {
        let flags = execute(op, [a, 0], [b, 0], 0, 0x1f80).flags;
        let of = INVALID | ZERO | DE;
        assert_eq!(flags & of, expected, "{op:?} {a:#x} {b:#x}");
        // With DAZ a denormal is 0, and no denormal.
        let daz = execute(op, [a, 0], [b, 0], 0, 0x1fc0).flags;
        assert_eq!(daz & DE, 0, "DAZ {op:?} {a:#x} {b:#x}");
    };
    for op in [Op::Addss, Op::Subss, Op::Mulss, Op::Divss] {
        check(op, DENORMAL, ONE, DE);
        check(op, INFINITE, DENORMAL, DE);
        check(op, QUIET, DENORMAL, 0);
        check(op, DENORMAL, QUIET, 0);
        check(op, DENORMAL, SIGNALING, INVALID);
    }
    for op in [Op::Minss, Op::Maxss, Op::Comiss] {
        check(op, ONE, DENORMAL, DE);
        check(op, DENORMAL, QUIET, INVALID);
    }
    check(Op::Ucomiss, DENORMAL, QUIET, 0);
    check(Op::Cmpss, DENORMAL, QUIET, 0);
    check(Op::Cmpss, DENORMAL, ONE, DE);
    check(Op::Divss, DENORMAL, 0, ZERO);
    check(Op::Divss, 0, DENORMAL, DE);
    check(Op::Sqrtss, 0, DENORMAL, DE);
    check(Op::Sqrtss, 0, NEGATIVE, INVALID);
    check(Op::Cvtss2sd, 0, DENORMAL, DE);
    check(Op::Cvtss2si32, 0, DENORMAL, 0);
    // Each element by itself (the upper two are 0 / 0), the scalar's upper ones not at all.
    let all = INVALID | ZERO | DE;
    check(Op::Divps, DENORMAL | ONE << 32, DENORMAL << 32, all);
    check(
        Op::Addps,
        SIGNALING | ONE << 32,
        DENORMAL | DENORMAL << 32,
        INVALID | DE,
    );
    check(Op::Addss, ONE | ONE << 32, ONE | DENORMAL << 32, 0);
    check(Op::Cvtps2pd, 0, ONE | DENORMAL << 32, DE);
}

/// Instructions of the host's of which DE is not asked of it, and the others, which have none.
#[test]
fn no_instruction_takes_de_from_the_host() {
    let rounds = |name: &&str| {
        let to_integer = ["2dq", "2si"].iter().any(|part| name.contains(part));
        let of_integer = ["dq2", "si2"].iter().any(|part| name.contains(part));
        !to_integer && !of_integer
    };
    let denormal = [1 | 1 << 32, 1 | 1 << 32];
    for (name, _) in HOST {
        let op = Op::ALL
            .iter()
            .find(|op| format!("{op:?}").eq_ignore_ascii_case(name));
        let flags = execute(*op.expect(name), denormal, denormal, 0, 0x1f80).flags;
        let expected = if rounds(name) { sse::DENORMAL } else { 0 };
        assert_eq!(flags & sse::DENORMAL, expected, "{name}");
    }
}
