//! Floating-point instructions of SSE to SSE4.1 (SDM vol. 1, 11.5; vol. 2).
//!
//! `a` is the destination's register before, `b` the source. What an instruction leaves of its
//! destination, as the upper elements of scalar ones, comes from `a`.

use crate::approximate;
use crate::soft::{DOUBLE, Format, Number, Rounding, SINGLE};
use crate::sys::{self, Raw, Xmm};

/// IE: MXCSR's flag of an invalid operation. Each flag's mask is seven bits above.
pub const INVALID: u32 = 1;
/// DE: a denormal operand.
pub const DENORMAL: u32 = 2;
/// ZE: a finite number by 0.
pub const ZERO_DIVIDE: u32 = 4;
/// OE: more than the format holds.
pub const OVERFLOW: u32 = 8;
/// UE: less than its least normal number.
pub const UNDERFLOW: u32 = 16;
/// PE: rounded.
pub const PRECISION: u32 = 32;

/// Flags that are known before a result is computed.
const BEFORE: u32 = INVALID | DENORMAL | ZERO_DIVIDE;
const ALL: u32 = 0x3f;
const DAZ: u32 = 1 << 6;
const FTZ: u32 = 1 << 15;

/// What an instruction comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// The destination, low half first. Of conversions to a general register and to MMX it is
    /// the low half; of COMIS and UCOMIS it is ZF, PF and CF in their places of RFLAGS, with the
    /// other status flags 0.
    pub value: [u64; 2],
    /// The exceptions raised (MXCSR bits 0 to 5), which MXCSR gets by OR, with or without #XM.
    pub flags: u32,
}

impl Outcome {
    /// Whether an exception is unmasked: #XM, and the destination stays.
    #[must_use]
    pub fn faults(&self, mxcsr: u32) -> bool {
        unmasked(self.flags, mxcsr) != 0
    }
}

fn unmasked(flags: u32, mxcsr: u32) -> u32 {
    flags & !(mxcsr >> 7) & ALL
}

/// Why the host's result is everyone's. Its flags are too, but for DE, which is not taken from it.
///
/// NaNs are as SDM vol. 1, table 4-7 has them (the first operand's, or the second's, quieted),
/// indefinites as in table 4-3, tininess is found after rounding (4.9.1.5): Intel's and AMD's
/// processors agree on all three (APM vol. 1, 4.10).
pub mod reasons {
    /// IEEE 754-2008, 5.4.1: correctly rounded.
    pub const ROUNDED: &str = "IEEE 754-2008 5.4.1 defines the result: rounded correctly; SDM vol. 1 table 4-7 defines NaNs";
    /// SDM vol. 2, MINPS and MAXPS.
    pub const CHOSEN: &str =
        "one of the operands or 0 of DAZ, as the pseudocode of SDM vol. 2 (MINPS, MAXPS) chooses";
    /// IEEE 754-2008, 5.11.
    pub const COMPARED: &str = "IEEE 754-2008 5.11 and 5.6.1 define predicates; SDM vol. 2 (CMPPS, COMISS, UCOMISS) which of them signal";
    /// IEEE 754-2008, 5.4.1 and 5.8.
    pub const CONVERTED: &str = "IEEE 754-2008 5.4.1 and 5.8 define the result: rounded correctly; SDM vol. 1 table 4-3 and 11.5.2.1 define indefinites";
}

/// Makes of the table the operations and what carries them out.
macro_rules! operations {
    (
        host { $($reason:ident: $($host:ident $function:ident)*;)* }
        ours { $($own:ident = $make:expr;)* }
    ) => {
        /// An instruction, by its mnemonic; those of general registers with their size as well.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Op {
            $($($host,)*)*
            $($own,)*
        }

        impl Op {
            /// Every instruction.
            pub const ALL: &'static [Op] = &[$($(Op::$host,)*)* $(Op::$own,)*];
        }

        /// The instructions that the host's FPU executes, each with the reason why its result is
        /// the same on every host.
        pub const HOST: &[(&str, &str)] = &[
            $($((stringify!($function), reasons::$reason),)*)*
        ];

        fn masked(op: Op, a: Xmm, b: Xmm, imm: u8, mxcsr: u32) -> Raw {
            match op {
                $($(Op::$host => sys::$function(a, b, imm, mxcsr),)*)*
                $(Op::$own => $make(a, b, imm, mxcsr),)*
            }
        }
    };
}

operations! {
    host {
        ROUNDED: Addps addps Addpd addpd Addss addss Addsd addsd
            Subps subps Subpd subpd Subss subss Subsd subsd
            Mulps mulps Mulpd mulpd Mulss mulss Mulsd mulsd
            Divps divps Divpd divpd Divss divss Divsd divsd
            Sqrtps sqrtps Sqrtpd sqrtpd Sqrtss sqrtss Sqrtsd sqrtsd;
        CHOSEN: Minps minps Minpd minpd Minss minss Minsd minsd
            Maxps maxps Maxpd maxpd Maxss maxss Maxsd maxsd;
        COMPARED: Cmpps cmpps Cmppd cmppd Cmpss cmpss Cmpsd cmpsd
            Comiss comiss Comisd comisd Ucomiss ucomiss Ucomisd ucomisd;
        CONVERTED: Cvtps2pd cvtps2pd Cvtpd2ps cvtpd2ps Cvtss2sd cvtss2sd Cvtsd2ss cvtsd2ss
            Cvtdq2ps cvtdq2ps Cvtdq2pd cvtdq2pd Cvtps2dq cvtps2dq Cvttps2dq cvttps2dq
            Cvtpd2dq cvtpd2dq Cvttpd2dq cvttpd2dq
            Cvtss2si32 cvtss2si32 Cvtss2si64 cvtss2si64 Cvttss2si32 cvttss2si32
            Cvttss2si64 cvttss2si64 Cvtsd2si32 cvtsd2si32 Cvtsd2si64 cvtsd2si64
            Cvttsd2si32 cvttsd2si32 Cvttsd2si64 cvttsd2si64
            Cvtsi2ss32 cvtsi2ss32 Cvtsi2ss64 cvtsi2ss64
            Cvtsi2sd32 cvtsi2sd32 Cvtsi2sd64 cvtsi2sd64;
    }
    ours {
        Addsubps = addsub::<Singles>;
        Addsubpd = addsub::<Doubles>;
        Haddps = |a, b, _, mxcsr| across(a, b, Op::Addps, mxcsr);
        Haddpd = |a, b, _, mxcsr| across(a, b, Op::Addpd, mxcsr);
        Hsubps = |a, b, _, mxcsr| across(a, b, Op::Subps, mxcsr);
        Hsubpd = |a, b, _, mxcsr| across(a, b, Op::Subpd, mxcsr);
        Dpps = dpps;
        Dppd = dppd;
        Roundps = round::<Singles, false>;
        Roundpd = round::<Doubles, false>;
        Roundss = round::<Singles, true>;
        Roundsd = round::<Doubles, true>;
        Rcpps = approximate::rcpps;
        Rcpss = approximate::rcpss;
        Rsqrtps = approximate::rsqrtps;
        Rsqrtss = approximate::rsqrtss;
        Cvtpi2ps = |a: Xmm, b: Xmm, imm, mxcsr| {
            low(sys::cvtdq2ps(a, [b[0], 0], imm, mxcsr), a)
        };
        Cvtpi2pd = sys::cvtdq2pd;
        Cvtps2pi = |a, b: Xmm, imm, mxcsr| sys::cvtps2dq(a, [b[0], 0], imm, mxcsr);
        Cvttps2pi = |a, b: Xmm, imm, mxcsr| sys::cvttps2dq(a, [b[0], 0], imm, mxcsr);
        Cvtpd2pi = sys::cvtpd2dq;
        Cvttpd2pi = sys::cvttpd2dq;
    }
}

/// Carries out an instruction. `imm` is its immediate, of those that have one.
///
/// With all exceptions masked the flags are the host's, but for DE (`denormal`). What raises
/// with others (SDM vol. 1, 11.5.1 and 4.9.2): an unmasked one of those before the result hides
/// those of the result; underflow is tininess alone where it is unmasked.
#[must_use]
pub fn execute(op: Op, a: [u64; 2], b: [u64; 2], imm: u8, mxcsr: u32) -> Outcome {
    let raw = step(op, a, b, imm, mxcsr);
    Outcome {
        value: raw.value,
        flags: raw.flags,
    }
}

fn step(op: Op, a: Xmm, b: Xmm, imm: u8, mxcsr: u32) -> Raw {
    let mut raw = masked(op, a, b, imm, mxcsr);
    if raw.flags & BEFORE != 0
        && let Some(flag) = denormal(op, a, b, mxcsr)
    {
        raw.flags = raw.flags & !DENORMAL | flag;
    }
    let masks = mxcsr >> 7 & ALL;
    // A dot product has several steps, and has asked of each.
    if masks == ALL || matches!(op, Op::Dpps | Op::Dppd) {
        return raw;
    }
    if unmasked(raw.flags & BEFORE, mxcsr) != 0 {
        raw.flags &= BEFORE;
    } else if masks & (OVERFLOW | UNDERFLOW) != OVERFLOW | UNDERFLOW
        && let Some(after) = after(op, a, b, mxcsr)
    {
        raw.flags = raw.flags & BEFORE | after;
    }
    raw
}

/// DE, found without the host, of what can raise it: processors are free to set it beside IE or
/// ZE of the same element, and here they never do. A NaN, an invalid operation and a division by
/// 0 come before a denormal operand (SDM vol. 1, 4.9.2 and 11.5.2; APM vol. 1, 4.10.2), and what
/// comes first is all that its element raises. Elements are independent of each other.
fn denormal(op: Op, a: Xmm, b: Xmm, mxcsr: u32) -> Option<u32> {
    let found = match op {
        Op::Addps | Op::Subps | Op::Mulps | Op::Minps | Op::Maxps | Op::Cmpps => {
            any::<Singles>(a, b, 4, |_, _| false)
        }
        Op::Addpd | Op::Subpd | Op::Mulpd | Op::Minpd | Op::Maxpd | Op::Cmppd => {
            any::<Doubles>(a, b, 2, |_, _| false)
        }
        Op::Addss | Op::Subss | Op::Mulss | Op::Minss | Op::Maxss | Op::Cmpss => {
            any::<Singles>(a, b, 1, |_, _| false)
        }
        Op::Addsd | Op::Subsd | Op::Mulsd | Op::Minsd | Op::Maxsd | Op::Cmpsd => {
            any::<Doubles>(a, b, 1, |_, _| false)
        }
        Op::Comiss | Op::Ucomiss => any::<Singles>(a, b, 1, |_, _| false),
        Op::Comisd | Op::Ucomisd => any::<Doubles>(a, b, 1, |_, _| false),
        Op::Divps => any::<Singles>(a, b, 4, |_, b| b.is_zero),
        Op::Divpd => any::<Doubles>(a, b, 2, |_, b| b.is_zero),
        Op::Divss => any::<Singles>(a, b, 1, |_, b| b.is_zero),
        Op::Divsd => any::<Doubles>(a, b, 1, |_, b| b.is_zero),
        Op::Sqrtps => any::<Singles>(b, b, 4, |_, b| b.is_negative),
        Op::Sqrtpd => any::<Doubles>(b, b, 2, |_, b| b.is_negative),
        Op::Sqrtss => any::<Singles>(b, b, 1, |_, b| b.is_negative),
        Op::Sqrtsd => any::<Doubles>(b, b, 1, |_, b| b.is_negative),
        Op::Cvtps2pd => any::<Singles>(b, b, 2, |_, _| false),
        Op::Cvtss2sd => any::<Singles>(b, b, 1, |_, _| false),
        Op::Cvtpd2ps => any::<Doubles>(b, b, 2, |_, _| false),
        Op::Cvtsd2ss => any::<Doubles>(b, b, 1, |_, _| false),
        _ => return None,
    };
    let seen = found && mxcsr & DAZ == 0;
    Some(if seen { DENORMAL } else { 0 })
}

/// What DE asks of an operand.
#[derive(Debug, Clone, Copy)]
struct OperandFacts {
    is_zero: bool,
    is_negative: bool,
    is_denormal: bool,
    is_nan: bool,
}

/// Whether one of the first elements has a denormal operand, no NaN, and nothing `before` it.
fn any<E: Elements>(
    a: Xmm,
    b: Xmm,
    count: u32,
    before: fn(OperandFacts, OperandFacts) -> bool,
) -> bool {
    (0..count).any(|at| {
        let [a, b] = [a, b].map(|value| facts::<E>(E::get(value, at)));
        (a.is_denormal || b.is_denormal) && !a.is_nan && !b.is_nan && !before(a, b)
    })
}

fn facts<E: Elements>(bits: u64) -> OperandFacts {
    let below = E::FORMAT.digits - 1;
    let fraction = bits & ((1 << below) - 1);
    let exponent = bits >> below & E::EXPONENT;
    OperandFacts {
        is_zero: exponent == 0 && fraction == 0,
        is_negative: bits >> (E::BITS - 1) & 1 != 0,
        is_denormal: exponent == 0 && fraction != 0,
        is_nan: exponent == E::EXPONENT && fraction != 0,
    }
}

/// The flags of results, found without the host; [`None`] of what cannot overflow or underflow.
fn after(op: Op, a: Xmm, b: Xmm, mxcsr: u32) -> Option<u32> {
    let scalar = matches!(
        op,
        Op::Addss
            | Op::Addsd
            | Op::Subss
            | Op::Subsd
            | Op::Mulss
            | Op::Mulsd
            | Op::Divss
            | Op::Divsd
            | Op::Cvtsd2ss
    );
    let flags = match op {
        Op::Addps | Op::Addss => results::<Singles>(a, b, scalar, mxcsr, SINGLE, sum),
        Op::Addpd | Op::Addsd => results::<Doubles>(a, b, scalar, mxcsr, DOUBLE, sum),
        Op::Subps | Op::Subss => results::<Singles>(a, b, scalar, mxcsr, SINGLE, difference),
        Op::Subpd | Op::Subsd => results::<Doubles>(a, b, scalar, mxcsr, DOUBLE, difference),
        Op::Mulps | Op::Mulss => results::<Singles>(a, b, scalar, mxcsr, SINGLE, product),
        Op::Mulpd | Op::Mulsd => results::<Doubles>(a, b, scalar, mxcsr, DOUBLE, product),
        Op::Divps | Op::Divss => results::<Singles>(a, b, scalar, mxcsr, SINGLE, quotient),
        Op::Divpd | Op::Divsd => results::<Doubles>(a, b, scalar, mxcsr, DOUBLE, quotient),
        Op::Cvtpd2ps | Op::Cvtsd2ss => results::<Doubles>(b, b, scalar, mxcsr, SINGLE, |a, _| a),
        _ => return None,
    };
    Some(flags)
}

/// A finite operand; [`None`] is 0.
type Finite = Option<Number>;

fn sum(a: Finite, b: Finite) -> Finite {
    match (a, b) {
        (Some(a), Some(b)) => a.add(b),
        (a, b) => a.or(b),
    }
}

fn difference(a: Finite, b: Finite) -> Finite {
    let negated = b.map(|b| Number {
        negative: !b.negative,
        ..b
    });
    sum(a, negated)
}

fn product(a: Finite, b: Finite) -> Finite {
    Some(a?.mul(b?))
}

fn quotient(a: Finite, b: Finite) -> Finite {
    Some(a?.div(b?))
}

/// Flags of all elements' results.
fn results<E: Elements>(
    a: Xmm,
    b: Xmm,
    scalar: bool,
    mxcsr: u32,
    format: Format,
    make: fn(Finite, Finite) -> Finite,
) -> u32 {
    let how = Rounding::of(mxcsr >> 13);
    let count = if scalar { 1 } else { E::COUNT };
    (0..count)
        .map(|at| {
            let operands = [E::get(a, at), E::get(b, at)];
            let [Some(a), Some(b)] = operands.map(|bits| finite::<E>(bits, mxcsr)) else {
                return 0;
            };
            let Some(result) = make(a, b) else {
                return 0;
            };
            let result = result.round(format, how);
            let underflow_masked = mxcsr >> 7 & UNDERFLOW != 0;
            if result.huge {
                let inexact = result.free.inexact || mxcsr >> 7 & OVERFLOW != 0;
                OVERFLOW | if inexact { PRECISION } else { 0 }
            } else if result.tiny && !underflow_masked {
                UNDERFLOW | if result.free.inexact { PRECISION } else { 0 }
            } else if result.tiny && (result.bounded.inexact || mxcsr & FTZ != 0) {
                UNDERFLOW | PRECISION
            } else if result.bounded.inexact {
                PRECISION
            } else {
                0
            }
        })
        .fold(0, |all, one| all | one)
}

/// An element as a number: [`None`] of infinities and NaNs.
fn finite<E: Elements>(bits: u64, mxcsr: u32) -> Option<Finite> {
    let Format { digits, min, .. } = E::FORMAT;
    let fraction = bits & ((1 << (digits - 1)) - 1);
    let exponent = bits >> (digits - 1) & E::EXPONENT;
    if exponent == E::EXPONENT {
        return None;
    }
    let hidden = u64::from(exponent != 0) << (digits - 1);
    if fraction | hidden == 0 || exponent == 0 && mxcsr & DAZ != 0 {
        return Some(None);
    }
    let above = i32::try_from(exponent.max(1)).unwrap_or(0) - 1;
    Some(Some(Number {
        negative: bits >> (E::BITS - 1) & 1 != 0,
        exp: min - digits.cast_signed() + 1 + above,
        sig: u128::from(fraction | hidden),
    }))
}

/// A register's elements of a format.
trait Elements {
    const BITS: u32;
    const COUNT: u32 = 128 / Self::BITS;
    const FORMAT: Format;
    /// The exponent field of infinities and NaNs.
    const EXPONENT: u64;
    const ADD: Op;
    const SUB: Op;

    fn get(value: Xmm, at: u32) -> u64 {
        let bit = at * Self::BITS;
        value[usize::from(bit >= 64)] >> (bit & 63) & (u64::MAX >> (64 - Self::BITS))
    }

    fn set(value: &mut Xmm, at: u32, element: u64) {
        let bit = at * Self::BITS;
        let half = &mut value[usize::from(bit >= 64)];
        let mask = u64::MAX >> (64 - Self::BITS) << (bit & 63);
        *half = *half & !mask | element << (bit & 63) & mask;
    }
}

struct Singles;
struct Doubles;

impl Elements for Singles {
    const BITS: u32 = 32;
    const FORMAT: Format = SINGLE;
    const EXPONENT: u64 = 0xff;
    const ADD: Op = Op::Addps;
    const SUB: Op = Op::Subps;
}

impl Elements for Doubles {
    const BITS: u32 = 64;
    const FORMAT: Format = DOUBLE;
    const EXPONENT: u64 = 0x7ff;
    const ADD: Op = Op::Addpd;
    const SUB: Op = Op::Subpd;
}

/// The low half with the destination's high one.
fn low(raw: Raw, a: Xmm) -> Raw {
    Raw {
        value: [raw.value[0], a[1]],
        flags: raw.flags,
    }
}

/// Elements of even numbers, or of odd ones, the others 0: 0 ± 0 raises nothing.
fn alternate<E: Elements>(value: Xmm, odd: u32) -> Xmm {
    let mut some = [0; 2];
    for at in (odd..E::COUNT).step_by(2) {
        E::set(&mut some, at, E::get(value, at));
    }
    some
}

/// Even elements are subtracted, odd ones added.
fn addsub<E: Elements>(a: Xmm, b: Xmm, imm: u8, mxcsr: u32) -> Raw {
    let part = |op, odd| {
        let (a, b) = (alternate::<E>(a, odd), alternate::<E>(b, odd));
        step(op, a, b, imm, mxcsr)
    };
    let (even, odd) = (part(E::SUB, 0), part(E::ADD, 1));
    let mut value = alternate::<E>(even.value, 0);
    for (to, from) in value.iter_mut().zip(alternate::<E>(odd.value, 1)) {
        *to |= from;
    }
    Raw {
        value,
        flags: even.flags | odd.flags,
    }
}

/// HADD and HSUB: neighbours, the even one first, of `a` and then of `b`.
fn across(a: Xmm, b: Xmm, op: Op, mxcsr: u32) -> Raw {
    let (first, second) = if matches!(op, Op::Addpd | Op::Subpd) {
        ([a[0], b[0]], [a[1], b[1]])
    } else {
        let pick = |odd| {
            let get = |value, at| Singles::get(value, at);
            [
                get(a, odd) | get(a, odd + 2) << 32,
                get(b, odd) | get(b, odd + 2) << 32,
            ]
        };
        (pick(0), pick(1))
    };
    step(op, first, second, 0, mxcsr)
}

/// Steps of one instruction: an unmasked exception of a step ends it.
struct Steps {
    mxcsr: u32,
    flags: u32,
}

impl Steps {
    fn next(&mut self, op: Op, a: Xmm, b: Xmm) -> Xmm {
        if unmasked(self.flags, self.mxcsr) != 0 {
            return [0; 2];
        }
        let raw = step(op, a, b, 0, self.mxcsr);
        self.flags |= raw.flags;
        raw.value
    }
}

/// The elements that a mask chooses, the others 0.
fn chosen<E: Elements>(value: Xmm, mask: u8) -> Xmm {
    let mut some = [0; 2];
    for at in (0..E::COUNT).filter(|at| mask >> at & 1 != 0) {
        E::set(&mut some, at, E::get(value, at));
    }
    some
}

/// SDM vol. 2, DPPS: products, sums of pairs, the sum of these.
fn dpps(a: Xmm, b: Xmm, imm: u8, mxcsr: u32) -> Raw {
    let mut steps = Steps { mxcsr, flags: 0 };
    let take = |value| chosen::<Singles>(value, imm >> 4);
    let products = steps.next(Op::Mulps, take(a), take(b));
    let one = |at| Singles::get(products, at);
    let sums = steps.next(
        Op::Addps,
        [one(0) | one(2) << 32, 0],
        [one(1) | one(3) << 32, 0],
    );
    let sum = steps.next(Op::Addss, [sums[0], 0], [sums[0] >> 32, 0]);
    let both = sum[0] & 0xffff_ffff | sum[0] << 32;
    Raw {
        value: chosen::<Singles>([both, both], imm & 15),
        flags: steps.flags,
    }
}

/// SDM vol. 2, DPPD.
fn dppd(a: Xmm, b: Xmm, imm: u8, mxcsr: u32) -> Raw {
    let mut steps = Steps { mxcsr, flags: 0 };
    let take = |value| chosen::<Doubles>(value, imm >> 4 & 3);
    let products = steps.next(Op::Mulpd, take(a), take(b));
    let sum = steps.next(Op::Addsd, [products[0], 0], [products[1], 0]);
    Raw {
        value: chosen::<Doubles>([sum[0], sum[0]], imm & 3),
        flags: steps.flags,
    }
}

/// ROUND: to an integer by the immediate's rounding or MXCSR's (SDM vol. 2, ROUNDPD, table 4-18).
fn round<E: Elements, const SCALAR: bool>(a: Xmm, b: Xmm, imm: u8, mxcsr: u32) -> Raw {
    let control = if imm & 4 != 0 {
        mxcsr >> 13
    } else {
        u32::from(imm)
    };
    let how = Rounding::of(control);
    let mut raw = Raw { value: a, flags: 0 };
    for at in 0..if SCALAR { 1 } else { E::COUNT } {
        let (element, flags) = integral::<E>(E::get(b, at), how, mxcsr);
        E::set(&mut raw.value, at, element);
        raw.flags |= flags;
    }
    if imm & 8 != 0 {
        raw.flags &= !PRECISION;
    }
    raw
}

/// An element rounded to an integer, and its flags: no denormal operand is one (SDM vol. 2,
/// ROUNDPD).
fn integral<E: Elements>(bits: u64, how: Rounding, mxcsr: u32) -> (u64, u32) {
    let digits = E::FORMAT.digits;
    let sign = bits & 1 << (E::BITS - 1);
    let Some(number) = finite::<E>(bits, mxcsr) else {
        let quiet = 1 << (digits - 2);
        let fraction = bits & ((1 << (digits - 1)) - 1);
        return match fraction {
            0 => (bits, 0),
            _ if fraction & quiet != 0 => (bits, 0),
            _ => (bits | quiet, INVALID),
        };
    };
    let Some(number) = number else {
        return (sign, 0);
    };
    if number.exp >= 0 {
        return (bits, 0);
    }
    let kept = number.integer(how);
    let value = match kept.sig {
        0 => 0,
        whole => {
            // An integer below 2 to the power of `digits`: exact.
            let top = 63 - whole.leading_zeros();
            let field = u64::from((1 - E::FORMAT.min + top.cast_signed()).unsigned_abs());
            let fraction = whole << (digits - 1 - top) & ((1 << (digits - 1)) - 1);
            field << (digits - 1) | fraction
        }
    };
    (sign | value, if kept.inexact { PRECISION } else { 0 })
}
