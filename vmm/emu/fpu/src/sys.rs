//! The host's SSE instructions, each between a guest's MXCSR and the host's.
//!
//! Only SSE and SSE2 in their legacy encodings: every x86-64 processor has them.

use std::arch::asm;
use std::arch::x86_64::__m128i;

/// An XMM register, low half first.
pub(crate) type Xmm = [u64; 2];

/// A result and the exception flags (MXCSR bits 0 to 5) that making it has raised, with all
/// exceptions masked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Raw {
    pub(crate) value: Xmm,
    pub(crate) flags: u32,
}

/// All exceptions masked, none raised.
const MASKED: u32 = 0x1f80;
/// DAZ, rounding control, FTZ: what of a guest's MXCSR reaches the host.
const CONTROL: u32 = 0xe040;
const FLAGS: u32 = 0x3f;

/// MXCSR during the instruction, which holds its flags afterwards, and room for the host's.
#[repr(C)]
struct Swap {
    guest: u32,
    host: u32,
}

impl Swap {
    fn new(mxcsr: u32) -> Self {
        Self {
            guest: mxcsr & CONTROL | MASKED,
            host: 0,
        }
    }
}

fn to_host(value: Xmm) -> __m128i {
    // SAFETY: both are 16 bytes, of which any are a value.
    unsafe { std::mem::transmute(value) }
}

fn of_host(value: __m128i) -> Xmm {
    // SAFETY: both are 16 bytes, of which any are a value.
    unsafe { std::mem::transmute(value) }
}

/// One instruction, with MXCSR the guest's for it alone. The host's is stored first and loaded
/// last, sticky flags included.
macro_rules! under {
    ($swap:ident, [$($text:expr),*], $($operand:tt)*) => {
        // SAFETY: `swap` is 8 bytes that this asm reads and writes; what is loaded to MXCSR has
        // no reserved bit (`Swap::new`, and the host's own value), masks every exception, and is
        // the host's again at the end; registers are those of the operands.
        unsafe {
            asm!(
                "stmxcsr dword ptr [{swap} + 4]",
                "ldmxcsr dword ptr [{swap}]",
                $($text,)*
                "stmxcsr dword ptr [{swap}]",
                "ldmxcsr dword ptr [{swap} + 4]",
                swap = in(reg) &raw mut $swap,
                $($operand)*
            );
        }
    };
}

/// An operation on two XMM registers.
macro_rules! two {
    ($a:ident, $b:ident, $mxcsr:ident, $text:expr) => {{
        let mut swap = Swap::new($mxcsr);
        let mut value = to_host($a);
        under!(swap, [$text], a = inout(xmm_reg) value, b = in(xmm_reg) to_host($b),
            options(nostack, preserves_flags));
        Raw { value: of_host(value), flags: swap.guest & FLAGS }
    }};
}

macro_rules! registers {
    ($($name:ident)*) => { $(
        pub(crate) fn $name(a: Xmm, b: Xmm, _imm: u8, mxcsr: u32) -> Raw {
            two!(a, b, mxcsr, concat!(stringify!($name), " {a}, {b}"))
        }
    )* };
}

/// A comparison by one of the eight predicates of SSE.
macro_rules! predicates {
    ($($name:ident)*) => { $(
        pub(crate) fn $name(a: Xmm, b: Xmm, imm: u8, mxcsr: u32) -> Raw {
            match imm & 7 {
                0 => two!(a, b, mxcsr, concat!(stringify!($name), " {a}, {b}, 0")),
                1 => two!(a, b, mxcsr, concat!(stringify!($name), " {a}, {b}, 1")),
                2 => two!(a, b, mxcsr, concat!(stringify!($name), " {a}, {b}, 2")),
                3 => two!(a, b, mxcsr, concat!(stringify!($name), " {a}, {b}, 3")),
                4 => two!(a, b, mxcsr, concat!(stringify!($name), " {a}, {b}, 4")),
                5 => two!(a, b, mxcsr, concat!(stringify!($name), " {a}, {b}, 5")),
                6 => two!(a, b, mxcsr, concat!(stringify!($name), " {a}, {b}, 6")),
                _ => two!(a, b, mxcsr, concat!(stringify!($name), " {a}, {b}, 7")),
            }
        }
    )* };
}

/// A comparison whose value is ZF, PF and CF in their places of RFLAGS.
macro_rules! ordered {
    ($($name:ident)*) => { $(
        pub(crate) fn $name(a: Xmm, b: Xmm, _imm: u8, mxcsr: u32) -> Raw {
            let mut swap = Swap::new(mxcsr);
            let (zero, parity, carry): (u8, u8, u8);
            under!(
                swap,
                [
                    concat!(stringify!($name), " {a}, {b}"),
                    "sete {zero}",
                    "setp {parity}",
                    "setb {carry}"
                ],
                a = in(xmm_reg) to_host(a),
                b = in(xmm_reg) to_host(b),
                zero = out(reg_byte) zero,
                parity = out(reg_byte) parity,
                carry = out(reg_byte) carry,
                options(nostack)
            );
            let value = u64::from(zero) << 6 | u64::from(parity) << 2 | u64::from(carry);
            Raw { value: [value, 0], flags: swap.guest & FLAGS }
        }
    )* };
}

/// A conversion to a general register, which is the value's low half.
macro_rules! to_general {
    ($($name:ident $text:literal;)*) => { $(
        pub(crate) fn $name(_a: Xmm, b: Xmm, _imm: u8, mxcsr: u32) -> Raw {
            let mut swap = Swap::new(mxcsr);
            let value: u64;
            under!(swap, [$text], r = out(reg) value, b = in(xmm_reg) to_host(b),
                options(nostack, preserves_flags));
            Raw { value: [value, 0], flags: swap.guest & FLAGS }
        }
    )* };
}

/// A conversion from a general register, which is the low half of `b`.
macro_rules! of_general {
    ($($name:ident $text:literal;)*) => { $(
        pub(crate) fn $name(a: Xmm, b: Xmm, _imm: u8, mxcsr: u32) -> Raw {
            let mut swap = Swap::new(mxcsr);
            let mut value = to_host(a);
            under!(swap, [$text], a = inout(xmm_reg) value, r = in(reg) b[0],
                options(nostack, preserves_flags));
            Raw { value: of_host(value), flags: swap.guest & FLAGS }
        }
    )* };
}

registers! {
    addps addpd addss addsd
    subps subpd subss subsd
    mulps mulpd mulss mulsd
    divps divpd divss divsd
    sqrtps sqrtpd sqrtss sqrtsd
    minps minpd minss minsd
    maxps maxpd maxss maxsd
    cvtps2pd cvtpd2ps cvtss2sd cvtsd2ss
    cvtdq2ps cvtdq2pd cvtps2dq cvttps2dq cvtpd2dq cvttpd2dq
}

predicates! { cmpps cmppd cmpss cmpsd }

ordered! { comiss comisd ucomiss ucomisd }

to_general! {
    cvtss2si32 "cvtss2si {r:e}, {b}";
    cvtss2si64 "cvtss2si {r:r}, {b}";
    cvttss2si32 "cvttss2si {r:e}, {b}";
    cvttss2si64 "cvttss2si {r:r}, {b}";
    cvtsd2si32 "cvtsd2si {r:e}, {b}";
    cvtsd2si64 "cvtsd2si {r:r}, {b}";
    cvttsd2si32 "cvttsd2si {r:e}, {b}";
    cvttsd2si64 "cvttsd2si {r:r}, {b}";
}

of_general! {
    cvtsi2ss32 "cvtsi2ss {a}, {r:e}";
    cvtsi2ss64 "cvtsi2ss {a}, {r:r}";
    cvtsi2sd32 "cvtsi2sd {a}, {r:e}";
    cvtsi2sd64 "cvtsi2sd {a}, {r:r}";
}
