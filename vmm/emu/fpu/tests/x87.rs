//! The x87 FPU.
//!
//! `EMU_FPU_ORACLE_CASES` sets the number of cases.

use std::collections::BTreeMap;

use emu_fpu::x87::{Access, Done, F80, ImageFormat, Insn, X87};

use crate::native::{self, Case, DATA_LEN, Fx, Outcome};
use crate::random::Random;

const CASES: usize = 100_000;
const BATCH: usize = 2_000;
const ES: u16 = 0x8080;
const C1: u16 = 0x200;

/// Every instruction: the escape and ModRM, with RSI as the address of memory operands.
fn instructions() -> Vec<(u8, u8)> {
    let mut all = Vec::new();
    for escape in 0xd8..=0xdf {
        for modrm in 0..=255_u8 {
            let is_memory = modrm < 0xc0;
            if is_memory && modrm & 0xc7 != 6 {
                continue;
            }
            if Insn::new(escape, modrm).and_then(Insn::access).is_some() {
                all.push((escape, modrm));
            }
        }
    }
    all
}

/// A register of any class, often near to others.
fn extended(random: &mut Random) -> F80 {
    let sig = random.fraction(63) | u64::from(!random.chance(24)) << 63;
    let field = match random.below(12) {
        0 => 0,
        1 => 0x7fff,
        2 => random.below(80),
        3 => 0x7ffe - random.below(80),
        4 => 0x3fff + 60 + random.below(8),
        5 => 0x3fff + random.below(64),
        6 => 0x3f81 - 24 + random.below(30),
        7 => 0x3c01 - 54 + random.below(60),
        8 => random.below(0x7fff),
        _ => 0x3fff - 3 + random.below(6),
    };
    let se = field as u16 | (random.below(2) as u16) << 15;
    match random.below(16) {
        0 => F80 {
            sig: 0,
            se: se & 0x8000,
        },
        1 => F80 {
            sig: 1 << 63,
            se: se | 0x7fff,
        },
        _ => F80 { sig, se },
    }
}

fn image(fx: &Fx) -> X87 {
    let mut bytes = [0; 160];
    bytes[0..2].copy_from_slice(&fx.control.to_le_bytes());
    bytes[2..4].copy_from_slice(&fx.status.to_le_bytes());
    bytes[4..6].copy_from_slice(&fx.tags.to_le_bytes());
    for (n, st) in fx.st.iter().enumerate() {
        bytes[32 + 16 * n..48 + 16 * n].copy_from_slice(st);
    }
    X87::of_fxsave(&bytes, true)
}

fn data(random: &mut Random) -> [u8; DATA_LEN] {
    let mut data = [0xa5; DATA_LEN];
    for byte in &mut data[..28] {
        *byte = random.next() as u8;
    }
    match random.below(5) {
        0 => data[..10].copy_from_slice(&extended(random).to_bytes()),
        1 => data[..4].copy_from_slice(&(random.single() as u32).to_le_bytes()),
        2 => data[..8].copy_from_slice(&random.double().to_le_bytes()),
        3 => {
            for byte in &mut data[..9] {
                *byte = (random.below(10) << 4 | random.below(10)) as u8;
            }
        }
        _ => data[..8].copy_from_slice(&random.integer().to_le_bytes()),
    }
    data
}

fn case(random: &mut Random, (escape, modrm): (u8, u8)) -> Case {
    let mut st = [[0; 16]; 8];
    for n in 0..8 {
        let mut value = extended(random);
        if n > 0 && random.chance(6) {
            // Near to its neighbour.
            value = F80::of_bytes(st[n - 1][..10].try_into().unwrap());
            value.sig ^= random.below(4);
            value.se ^= (random.below(2) as u16) << 15;
        }
        st[n][..10].copy_from_slice(&value.to_bytes());
    }
    let masks = match random.below(4) {
        0 | 1 => 0x3f,
        2 => 0x3f ^ 1 << random.below(6),
        _ => random.next() as u16 & 0x3f,
    };
    let control = 0x40 | masks | (random.below(16) as u16) << 8;
    let control = if control & 0x300 == 0x100 {
        control | 0x200
    } else {
        control
    };
    // Flags of before, pending ones seldom.
    let flags = if random.chance(16) {
        random.next() as u16 & 0x7f
    } else {
        random.next() as u16 & 0x7f & (masks | 0x40)
    };
    let pending = flags & 0x3f & !masks != 0;
    let status = random.next() as u16 & 0x7f00 | flags | if pending { ES } else { 0 };
    let tags = match random.below(4) {
        0 => random.next() as u8,
        1 => 0x1f_u8.rotate_left(u32::from(status >> 11 & 7)),
        2 => 0x7f_u8.rotate_left(u32::from(status >> 11 & 7)),
        _ => 0xff ^ 1 << random.below(8),
    };
    let mut code = [0xcc; 16];
    code[..2].copy_from_slice(&[escape, modrm]);
    Case {
        code,
        len: 2,
        rax: random.next(),
        rflags: random.next() & 0x8d5 | 0x202,
        fx: Fx {
            control,
            status,
            tags: u16::from(tags),
            opcode: 0,
            ip: 0,
            dp: 0,
            mxcsr: 0x1f80,
            mxcsr_mask: 0,
            st,
            xmm: [[0; 2]; 16],
        },
        data: data(random),
    }
}

/// What ours comes to: the FPU, memory, RAX, RFLAGS.
fn ours(case: &Case, insn: Insn) -> (X87, [u8; DATA_LEN], u64, u64) {
    let x87 = image(&case.fx);
    let mut data = case.data;
    let format = ImageFormat::Protected32;
    let same = (case.rax, case.rflags);
    let access = insn.access().unwrap();
    let stored = match access {
        Access::LoadEnvironment => {
            return (
                x87.load_environment(format, &data[..28]),
                data,
                same.0,
                same.1,
            );
        }
        Access::LoadState => {
            return (x87.load_state(format, &data[..108]), data, same.0, same.1);
        }
        Access::StoreEnvironment => Some(x87.store_environment(format)),
        Access::StoreState => Some(x87.store_state(format)),
        _ => None,
    };
    if let Some((bytes, behind)) = stored {
        data[..bytes.len()].copy_from_slice(&bytes);
        return (behind, data, same.0, same.1);
    }
    let operand = data[..10].try_into().unwrap();
    let Done {
        x87,
        store,
        ax,
        rflags,
    } = x87.execute(insn, operand, case.rflags);
    if let (Some(bytes), Access::Store(len)) = (store, access) {
        let len = usize::from(len);
        data[..len].copy_from_slice(&bytes[..len]);
    }
    let rax = ax.map_or(case.rax, |ax| case.rax & !0xffff | u64::from(ax));
    let rflags = rflags.map_or(case.rflags, |new| case.rflags & !0x8d5 | new);
    (x87, data, rax, rflags)
}

/// D9 F0 to D9 F3, F9, FB, FE, FF: whose last digits are the processor's own.
fn is_elementary(insn: Insn) -> bool {
    matches!(insn.bits(), 0x1f0..=0x1f3 | 0x1f9 | 0x1fb | 0x1fe | 0x1ff)
}

/// Where AMD's processors deviate from SDM vol. 2A, whose word ours is.
struct Deviation {
    of: fn(Insn) -> bool,
    /// Only where the instruction has raised an unmasked exception.
    unmasked: bool,
    /// Bits of the status word, and of RFLAGS.
    bits: (u16, u64),
    /// The page and its words.
    manual: (&'static str, &'static str),
}

const DEVIATIONS: &[Deviation] = &[
    Deviation {
        of: compares,
        unmasked: true,
        bits: (0x4500, 0),
        manual: (
            "FCOM",
            "If [it] is unmasked, the condition code flags are not set",
        ),
    },
    Deviation {
        of: compares_to_flags,
        unmasked: true,
        bits: (0, 0x8d5),
        manual: ("FCOMI", "If [it] is unmasked, the flags are not set"),
    },
    Deviation {
        of: compares_to_flags,
        unmasked: false,
        bits: (C1, 0),
        manual: ("FCOMI", "C1: Set to 0"),
    },
];

/// FCOM, FUCOM, FICOM and FTST.
fn compares(insn: Insn) -> bool {
    let (escape, modrm) = (insn.bits() >> 8, insn.bits() & 0xff);
    if modrm < 0xc0 {
        return escape & 1 == 0 && matches!(modrm >> 3 & 7, 2 | 3);
    }
    matches!(
        (escape, modrm >> 3 & 7),
        (0 | 4 | 6, 2 | 3) | (5, 4 | 5) | (2, 5)
    ) || insn.bits() == 0x1e4
}

/// FCOMI and FUCOMI.
fn compares_to_flags(insn: Insn) -> bool {
    let (escape, modrm) = (insn.bits() >> 8, insn.bits() & 0xff);
    modrm >= 0xc0 && matches!((escape, modrm >> 3 & 7), (3 | 7, 5 | 6))
}

/// Bits of the status word, and of RFLAGS, that are not compared.
fn deviates(insn: Insn, ours: &X87) -> (u16, u64) {
    let unmasked = ours.is_pending();
    DEVIATIONS
        .iter()
        .filter(|one| (one.of)(insn) && (unmasked || !one.unmasked))
        .fold((0, 0), |(status, flags), one| {
            (status | one.bits.0, flags | one.bits.1)
        })
}

fn differ(case: &Case, insn: Insn, native: &Outcome) -> Option<String> {
    let before = image(&case.fx);
    if before.is_pending() && insn.waits() {
        return (native.trap != 16).then(|| format!("trap {}, not #MF", native.trap));
    }
    if native.trap != 3 {
        return Some(format!("trap {}", native.trap));
    }
    let (x87, mut data, rax, rflags) = ours(case, insn);
    let mut theirs = native.data;
    if matches!(
        insn.access(),
        Some(Access::StoreEnvironment | Access::StoreState)
    ) {
        // Pointers: the host's are its own, ours the guest's.
        data[12..28].fill(0);
        theirs[12..28].fill(0);
    }
    if native.fx.control != x87.control() {
        return Some(format!(
            "control {:#x}, not {:#x}",
            x87.control(),
            native.fx.control
        ));
    }
    let status = x87.status() ^ native.fx.status;
    let (codes, flags) = deviates(insn, &x87);
    if status & !codes != 0 {
        return Some(format!(
            "status {:#x}, not {:#x}",
            x87.status(),
            native.fx.status
        ));
    }
    if native.fx.tags & 0xff != u16::from(x87.tags()) {
        return Some(format!("tags {:#x}, not {:#x}", x87.tags(), native.fx.tags));
    }
    for i in 0..8 {
        let theirs = F80::of_bytes(native.fx.st[usize::from(i)][..10].try_into().unwrap());
        if x87.register(i) != theirs {
            return Some(format!("ST({i}) {:x?}, not {theirs:x?}", x87.register(i)));
        }
    }
    if data != theirs {
        return Some(format!("{:x?}, not {:x?}", &data[..28], &theirs[..28]));
    }
    if rax != native.rax || (rflags ^ native.rflags) & 0x8d5 & !flags != 0 {
        let (rax_, flags) = (native.rax, native.rflags);
        return Some(format!("{rax:#x} {rflags:#x}, not {rax_:#x} {flags:#x}"));
    }
    None
}

#[test]
fn every_form_does_what_the_hosts_does() {
    let cases = std::env::var("EMU_FPU_ORACLE_CASES");
    let cases = cases.ok().and_then(|n| n.parse().ok()).unwrap_or(CASES);
    let mut random = Random(0x1234_5678_9abc_def1);
    let all: Vec<(u8, u8)> = instructions()
        .into_iter()
        .filter(|(escape, modrm)| !is_elementary(Insn::new(*escape, *modrm).unwrap()))
        .collect();
    let mut wrong: BTreeMap<String, (usize, String)> = BTreeMap::new();
    let mut done = 0;
    while done < cases {
        let batch: Vec<Case> = (0..BATCH)
            .map(|_| {
                let insn = all[random.below(all.len() as u64) as usize];
                case(&mut random, insn)
            })
            .collect();
        for (case, native) in batch.iter().zip(native::run(&batch)) {
            let [escape, modrm, ..] = case.code;
            let insn = Insn::new(escape, modrm).unwrap();
            if let Some(how) = differ(case, insn, &native) {
                // The stack register is no part of the name.
                let name = format!(
                    "{escape:x} {:x}",
                    if modrm < 0xc0 { modrm } else { modrm & !7 }
                );
                let name = if escape == 0xd9 && modrm >= 0xe0 {
                    format!("d9 {modrm:x}")
                } else {
                    name
                };
                let entry = wrong.entry(name).or_default();
                entry.0 += 1;
                let st = |n: usize| F80::of_bytes(case.fx.st[n][..10].try_into().unwrap());
                entry.1 = format!(
                    "{escape:x} {modrm:x}: {how}; CW {:#x} SW {:#x} tags {:#x} {:x?} {:x?} {:x?} {:x?}",
                    case.fx.control,
                    case.fx.status,
                    case.fx.tags,
                    st(0),
                    st(1),
                    st(usize::from(modrm & 7)),
                    &case.data[..10],
                );
            }
        }
        done += BATCH;
    }
    println!("{done} cases of {} forms", all.len());
    for Deviation {
        manual: (page, words),
        ..
    } in DEVIATIONS
    {
        println!("as SDM vol. 2A, {page}, has it: {words}");
    }
    let lines: Vec<String> = wrong
        .iter()
        .map(|(name, (count, how))| format!("{name} {count}: {how}"))
        .collect();
    assert!(wrong.is_empty(), "{}", lines.join("\n"));
}

/// A state with ST(0) and ST(1), and a control word.
fn two(x: F80, y: F80, control: u16) -> X87 {
    let mut st = [[0; 16]; 8];
    st[0][..10].copy_from_slice(&x.to_bytes());
    st[1][..10].copy_from_slice(&y.to_bytes());
    image(&Fx {
        control,
        status: 0,
        tags: 3,
        opcode: 0,
        ip: 0,
        dp: 0,
        mxcsr: 0x1f80,
        mxcsr_mask: 0,
        st,
        xmm: [[0; 2]; 16],
    })
}

fn number(text: &str) -> F80 {
    let (se, sig) = text.split_once(':').unwrap();
    F80 {
        se: u16::from_str_radix(se, 16).unwrap(),
        sig: u64::from_str_radix(sig, 16).unwrap(),
    }
}

/// Opcode behind D9, and which ST holds the result.
fn elementary(name: &str) -> (u8, u8) {
    match name {
        "f2xm1" => (0xf0, 0),
        "fyl2x" => (0xf1, 0),
        "fptan" => (0xf2, 1),
        "fpatan" => (0xf3, 0),
        "fyl2xp1" => (0xf9, 0),
        "fsin" => (0xfe, 0),
        _ => (0xff, 0),
    }
}

#[test]
fn elementary_functions_are_rounded_correctly() {
    let mut checked = 0;
    let mut wrong = Vec::new();
    for line in include_str!("elementary.txt").lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if line.starts_with('#') {
            continue;
        }
        let (x, y) = (number(words[1]), number(words[2]));
        let (modrm, at) = elementary(words[0]);
        for (rounding, expected) in words[3..].iter().enumerate() {
            let control = 0x37f | (rounding as u16) << 10;
            let insn = Insn::new(0xd9, modrm).unwrap();
            let Done { x87, .. } = two(x, y, control).execute(insn, [0; 10], 0);
            let value = x87.register(at);
            checked += 1;
            if value != number(expected) {
                wrong.push(format!("{line}: {rounding}: {value:x?}"));
            }
        }
    }
    assert!(checked > 2000);
    assert!(
        wrong.is_empty(),
        "{} of {checked}\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// Whether the manual defines the result, and the host's is no further off than its manual says.
fn is_in_range(insn: Insn, x: F80) -> bool {
    let field = x.se & 0x7fff;
    match insn.bits() & 0xff {
        0xf0 => field < 0x3fff || field == 0x7fff,
        // About -0.29 to 0.41.
        0xf9 => field < 0x3ffd || field == 0x7fff && x.se != 0xffff,
        // The host reduces with a π of 66 digits or more: near to its multiples, all else is.
        // Towards 0 those of the smallest normal number are below it and underflow, but on Intel's
        // processors, which give the number itself.
        0xf2 | 0xfb | 0xfe | 0xff => {
            !((0x3ffe..0x403e).contains(&field) || field <= 1 && x.sig == 1 << 63)
        }
        _ => true,
    }
}

/// The distance of two results in last digits; none, if they are not both numbers of a sign.
fn apart(a: F80, b: F80) -> Option<u128> {
    let key = |value: F80| u128::from(value.se & 0x7fff) << 63 | u128::from(value.sig & !(1 << 63));
    (a.se & 0x8000 == b.se & 0x8000).then(|| key(a).abs_diff(key(b)))
}

#[test]
fn elementary_functions_are_near_the_hosts() {
    let mut random = Random(99);
    let mut wrong: BTreeMap<u16, (usize, String)> = BTreeMap::new();
    for _ in 0..10 {
        let batch: Vec<Case> = (0..BATCH)
            .map(|n| {
                let modrm = [0xf0, 0xf1, 0xf2, 0xf3, 0xf9, 0xfb, 0xfe, 0xff][n % 8];
                case(&mut random, (0xd9, modrm))
            })
            .collect();
        for (case, native) in batch.iter().zip(native::run(&batch)) {
            let insn = Insn::new(0xd9, case.code[1]).unwrap();
            let before = image(&case.fx);
            if before.is_pending() || !is_in_range(insn, before.register(0)) {
                continue;
            }
            let (x87, ..) = ours(case, insn);
            let mut how = None;
            // The host calls the logarithm of a power of two inexact.
            let is_power = insn.bits() == 0x1f1 && before.register(0).sig == 1 << 63;
            let apart_from = if is_power { C1 | 0x20 | ES } else { C1 };
            if (x87.status() ^ native.fx.status) & !apart_from != 0 {
                how = Some(format!(
                    "status {:#x}, not {:#x}",
                    x87.status(),
                    native.fx.status
                ));
            }
            for i in 0..8 {
                let theirs = F80::of_bytes(native.fx.st[usize::from(i)][..10].try_into().unwrap());
                if apart(x87.register(i), theirs).is_none_or(|apart| apart > 2) {
                    how = Some(format!("ST({i}) {:x?}, not {theirs:x?}", x87.register(i)));
                }
            }
            if let Some(how) = how {
                let entry = wrong.entry(insn.bits()).or_default();
                entry.0 += 1;
                entry.1 = format!(
                    "{how}; CW {:#x} SW {:#x} tags {:#x} {:x?} {:x?}",
                    case.fx.control,
                    case.fx.status,
                    case.fx.tags,
                    before.register(0),
                    before.register(1)
                );
            }
        }
    }
    let lines: Vec<String> = wrong
        .iter()
        .map(|(insn, (count, how))| format!("{insn:x} {count}: {how}"))
        .collect();
    assert!(wrong.is_empty(), "{}", lines.join("\n"));
}

/// The address of instructions and operands is whoever executes them to set.
#[test]
fn pointers_are_the_guests() {
    let mut x87 = two(F80::of_bytes([0; 10]), F80::of_bytes([0; 10]), 0x37f);
    let insn = Insn::new(0xd8, 0xf1).unwrap();
    x87 = x87.execute(insn, [0; 10], 0).x87;
    assert_eq!((x87.ip, x87.dp, x87.opcode), (0, 0, 0));
    x87.ip = 0x1234_5678_9abc;
    x87.dp = 0xfedc_ba98_7654;
    x87.opcode = insn.bits();
    let mut bytes = [0xff; 160];
    x87.to_fxsave(&mut bytes, true);
    assert_eq!(bytes[6..8], [0xf1, 0]);
    assert_eq!(bytes[8..16], 0x1234_5678_9abc_u64.to_le_bytes());
    assert_eq!(bytes[16..24], 0xfedc_ba98_7654_u64.to_le_bytes());
    assert_eq!(bytes[24..32], [0xff; 8]);
    assert_eq!(X87::of_fxsave(&bytes, true), x87);
    let formats = [
        (ImageFormat::Protected32, 28),
        (ImageFormat::Real32, 28),
        (ImageFormat::Protected16, 14),
        (ImageFormat::Real16, 14),
    ];
    for (format, len) in formats {
        let (image, behind) = x87.store_environment(format);
        assert_eq!(image.len(), len);
        assert_eq!(behind, x87);
        let again = x87.load_environment(format, &image);
        let bits = match format {
            ImageFormat::Protected32 | ImageFormat::Real32 => 32,
            ImageFormat::Protected16 => 16,
            ImageFormat::Real16 => 20,
        };
        let mask = (1_u64 << bits) - 1;
        assert_eq!(
            (again.ip, again.dp),
            (x87.ip & mask, x87.dp & mask),
            "{format:?}"
        );
    }
}

/// Rows of the table in `emu_fpu::x87`.
#[test]
fn what_the_manual_leaves_open_has_one_value() {
    let one = F80 {
        sig: 1 << 63,
        se: 0x3fff,
    };
    let of = |sign: u16, exponent: i32| F80 {
        sig: 1 << 63,
        se: sign << 15 | (0x3fff + exponent) as u16,
    };
    let run = |escape, modrm, x, y, control| {
        let insn = Insn::new(escape, modrm).unwrap();
        let mut operand = [0; 10];
        operand[0] = 0xfa;
        two(x, y, control).execute(insn, operand, 0).x87
    };
    let check = |modrm, x, y, expected: F80, flags: u16| {
        let x87 = run(0xd9, modrm, x, y, 0x37f);
        assert_eq!(x87.register(0), expected, "{modrm:x} {x:x?} {y:x?}");
        assert_eq!(x87.status() & 0x3f, flags, "{modrm:x} {x:x?} {y:x?}");
    };
    let indefinite = F80 {
        sig: 3 << 62,
        se: 0xffff,
    };
    // F2XM1 of 2 and -4.
    check(0xf0, of(0, 1), one, of(0, 1), 0);
    check(0xf0, of(1, 2), one, of(1, 2), 0);
    // FYL2XP1 of 1, -1/2, -1 and -2, times 1: log2 of 2, 1/2, 0 and -1.
    check(0xf9, one, one, one, 0);
    check(0xf9, of(1, -1), one, of(1, 0), 0);
    let infinity = F80 {
        sig: 1 << 63,
        se: 0xffff,
    };
    check(0xf9, of(1, 0), one, infinity, 4);
    check(0xf9, of(1, 1), one, indefinite, 1);
    // FBLD of the digits 15 and 10.
    let x87 = run(0xdf, 0x26, one, one, 0x37f);
    assert_eq!(
        x87.register(0),
        F80 {
            sig: 160 << 56,
            se: 0x4006
        }
    );
    // FDIV of 1 by 3 with precision control 01.
    let three = F80 {
        sig: 3 << 62,
        se: 0x4000,
    };
    let third = F80 {
        sig: 0xaaaa_aaaa_aaaa_aaab,
        se: 0x3ffd,
    };
    assert_eq!(run(0xd8, 0xf1, one, three, 0x17f).register(0), third);
}

/// Operands of any bits, of which the host's processor has not been asked.
#[test]
fn no_operand_of_an_elementary_function_panics() {
    let mut random = Random(3);
    for n in 0..40_000 {
        let modrm = [0xf0, 0xf1, 0xf2, 0xf3, 0xf9, 0xfb, 0xfe, 0xff][n % 8];
        let (x, y) = (extended(&mut random), extended(&mut random));
        let control = 0x40 | random.next() as u16 & 0xf3f;
        let insn = Insn::new(0xd9, modrm).unwrap();
        let before = two(x, y, control);
        let Done { x87, .. } = before.execute(insn, [0; 10], 0);
        // What is out of range stays, and all else that is no fault has a result.
        let stays = x87.status() & 0x400 != 0;
        assert!(!stays || x87.register(0) == x);
    }
}
