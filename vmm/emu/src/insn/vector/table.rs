//! The table of instructions: each stands here once, with its shape and what it makes of its
//! operands. `a` is the destination's value, `b` the source's.

use emu_fpu::sse::Op;
use iced_x86::Mnemonic;

use super::float::{
    compare_double, compare_single, double, double_to_integer, integer, packed, single,
    single_to_integer,
};
use super::lanes::Lane;
use super::lanes::{
    align, blend, blend_by, compare8, compare16, compare32, compare64, differences,
    differences_of_four, horizontal, interleave, map, multiply_add, multiply_add_bytes, pack, pick,
    shift_bytes, shuffle, shuffle_words, signs, smallest, widen, zip,
};
use super::{
    Args, X, by_xmm0, eighth, half, imm_alone, mask, moves, own, quarter, scalar, shift, text,
    value, whole, with_imm,
};
use crate::insn::core::{Core, Exec};

macro_rules! vectors {
    ($($name:ident = $shape:ident($($of:tt)*);)*) => {
        /// An instruction, by the decoder's name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u16)]
        pub(crate) enum V {
            $($name,)*
        }

        impl V {
            /// Every one by its number.
            pub(super) const ALL: &'static [V] = &[$(V::$name,)*];

            /// The one of this name.
            pub(super) fn of(mnemonic: Mnemonic) -> Option<V> {
                match mnemonic {
                    $(Mnemonic::$name => Some(V::$name),)*
                    _ => None,
                }
            }
        }

        /// What an instruction makes of two values, which are all that it reads.
        pub(super) fn value(what: V, a: X, b: X, imm: u8) -> Option<X> {
            match what {
                $(V::$name => value::$shape(a, b, imm, $($of)*),)*
            }
        }

        /// Carries out one instruction.
        pub(super) fn perform(core: &mut Core, what: V, args: Args) -> Exec {
            let args = &args;
            match what {
                $(V::$name => $shape(core, args, $($of)*),)*
            }
        }
    };
}

fn and(a: X, b: X) -> X {
    [a[0] & b[0], a[1] & b[1]]
}

fn and_not(a: X, b: X) -> X {
    [!a[0] & b[0], !a[1] & b[1]]
}

fn or(a: X, b: X) -> X {
    [a[0] | b[0], a[1] | b[1]]
}

fn xor(a: X, b: X) -> X {
    [a[0] ^ b[0], a[1] ^ b[1]]
}

fn sign_of<T: PartialOrd + Default>(value: T, sign: &T, negative: T) -> T {
    let zero = T::default();
    if *sign < zero {
        negative
    } else if *sign == zero {
        zero
    } else {
        value
    }
}

fn shuffle_singles(a: X, b: X, order: u8) -> X {
    let (a, b) = (pick(u32::split(a), order), pick(u32::split(b), order));
    u32::join([a[0], a[1], b[2], b[3]])
}

vectors! {
    // Moves.
    Movaps = own(moves::aligned);
    Movapd = own(moves::aligned);
    Movdqa = own(moves::aligned);
    Movntps = own(moves::aligned);
    Movntpd = own(moves::aligned);
    Movntdq = own(moves::aligned);
    Movntdqa = own(moves::aligned);
    Movups = own(moves::unaligned);
    Movupd = own(moves::unaligned);
    Movdqu = own(moves::unaligned);
    Lddqu = own(moves::unaligned);
    Movss = own(moves::single);
    Movsd = own(moves::double);
    Movd = own(moves::doubleword);
    Movq = own(moves::quadword);
    Movlps = own(moves::low);
    Movlpd = own(moves::low);
    Movhps = own(moves::high);
    Movhpd = own(moves::high);
    Movhlps = whole(|a, b| [b[1], a[1]]);
    Movlhps = whole(|a, b| [a[0], b[0]]);
    Movddup = half(|_, b| [b[0], b[0]]);
    Movshdup = whole(|_, b| u32::join(pick(u32::split(b), 0b11_11_01_01)));
    Movsldup = whole(|_, b| u32::join(pick(u32::split(b), 0b10_10_00_00)));
    Maskmovdqu = own(moves::nowhere);
    Movmskps = mask(signs::<i32, _>);
    Movmskpd = mask(signs::<i64, _>);
    Pmovmskb = mask(signs::<i8, _>);
    // Lanes out of a register and into it.
    Pextrb = own(scalar::extract::<u8, u8, 16>);
    Pextrw = own(scalar::extract::<u16, u16, 8>);
    Pextrd = own(scalar::extract::<u32, u32, 4>);
    Pextrq = own(scalar::extract::<u64, u64, 2>);
    Extractps = own(scalar::extract::<u32, u32, 4>);
    Pinsrb = own(scalar::insert::<u8, u8, 16>);
    Pinsrw = own(scalar::insert::<u16, u16, 8>);
    Pinsrd = own(scalar::insert::<u32, u32, 4>);
    Pinsrq = own(scalar::insert::<u64, u64, 2>);
    Insertps = own(scalar::insert_single);
    // Logic.
    Pand = whole(and);
    Andps = whole(and);
    Andpd = whole(and);
    Pandn = whole(and_not);
    Andnps = whole(and_not);
    Andnpd = whole(and_not);
    Por = whole(or);
    Orps = whole(or);
    Orpd = whole(or);
    Pxor = whole(xor);
    Xorps = whole(xor);
    Xorpd = whole(xor);
    Ptest = own(scalar::test);
    // Sums and differences.
    Paddb = whole(|a, b| zip(a, b, u8::wrapping_add));
    Paddw = whole(|a, b| zip(a, b, u16::wrapping_add));
    Paddd = whole(|a, b| zip(a, b, u32::wrapping_add));
    Paddq = whole(|a, b| zip(a, b, u64::wrapping_add));
    Psubb = whole(|a, b| zip(a, b, u8::wrapping_sub));
    Psubw = whole(|a, b| zip(a, b, u16::wrapping_sub));
    Psubd = whole(|a, b| zip(a, b, u32::wrapping_sub));
    Psubq = whole(|a, b| zip(a, b, u64::wrapping_sub));
    Paddsb = whole(|a, b| zip(a, b, i8::saturating_add));
    Paddsw = whole(|a, b| zip(a, b, i16::saturating_add));
    Psubsb = whole(|a, b| zip(a, b, i8::saturating_sub));
    Psubsw = whole(|a, b| zip(a, b, i16::saturating_sub));
    Paddusb = whole(|a, b| zip(a, b, u8::saturating_add));
    Paddusw = whole(|a, b| zip(a, b, u16::saturating_add));
    Psubusb = whole(|a, b| zip(a, b, u8::saturating_sub));
    Psubusw = whole(|a, b| zip(a, b, u16::saturating_sub));
    Phaddw = whole(|a, b| horizontal(a, b, u16::wrapping_add));
    Phaddd = whole(|a, b| horizontal(a, b, u32::wrapping_add));
    Phaddsw = whole(|a, b| horizontal(a, b, i16::saturating_add));
    Phsubw = whole(|a, b| horizontal(a, b, u16::wrapping_sub));
    Phsubd = whole(|a, b| horizontal(a, b, u32::wrapping_sub));
    Phsubsw = whole(|a, b| horizontal(a, b, i16::saturating_sub));
    Pavgb = whole(|a, b| zip(a, b, |a: u8, b| u16::midpoint(u16::from(a), u16::from(b) + 1) as u8));
    Pavgw = whole(|a, b| zip(a, b, |a: u16, b| u32::midpoint(u32::from(a), u32::from(b) + 1) as u16));
    Psadbw = whole(differences);
    Mpsadbw = with_imm(differences_of_four);
    // Products.
    Pmullw = whole(|a, b| zip(a, b, u16::wrapping_mul));
    Pmulld = whole(|a, b| zip(a, b, u32::wrapping_mul));
    Pmulhw = whole(|a, b| zip(a, b, |a: i16, b| ((i32::from(a) * i32::from(b)) >> 16) as i16));
    Pmulhuw = whole(|a, b| zip(a, b, |a: u16, b| ((u32::from(a) * u32::from(b)) >> 16) as u16));
    Pmulhrsw = whole(|a, b| {
        zip(a, b, |a: i16, b| ((((i32::from(a) * i32::from(b)) >> 14) + 1) >> 1) as i16)
    });
    Pmuludq = whole(|a, b| {
        zip(a, b, |a: u64, b| (a & 0xffff_ffff) * (b & 0xffff_ffff))
    });
    Pmuldq = whole(|a, b| {
        zip(a, b, |a: i64, b| i64::from(a as i32) * i64::from(b as i32))
    });
    Pmaddwd = whole(multiply_add);
    Pmaddubsw = whole(multiply_add_bytes);
    // Comparisons.
    Pcmpeqb = whole(|a, b| compare8(a, b, i8::eq));
    Pcmpeqw = whole(|a, b| compare16(a, b, i16::eq));
    Pcmpeqd = whole(|a, b| compare32(a, b, i32::eq));
    Pcmpeqq = whole(|a, b| compare64(a, b, i64::eq));
    Pcmpgtb = whole(|a, b| compare8(a, b, i8::gt));
    Pcmpgtw = whole(|a, b| compare16(a, b, i16::gt));
    Pcmpgtd = whole(|a, b| compare32(a, b, i32::gt));
    Pcmpgtq = whole(|a, b| compare64(a, b, i64::gt));
    Pmaxsb = whole(|a, b| zip(a, b, i8::max));
    Pmaxsw = whole(|a, b| zip(a, b, i16::max));
    Pmaxsd = whole(|a, b| zip(a, b, i32::max));
    Pmaxub = whole(|a, b| zip(a, b, u8::max));
    Pmaxuw = whole(|a, b| zip(a, b, u16::max));
    Pmaxud = whole(|a, b| zip(a, b, u32::max));
    Pminsb = whole(|a, b| zip(a, b, i8::min));
    Pminsw = whole(|a, b| zip(a, b, i16::min));
    Pminsd = whole(|a, b| zip(a, b, i32::min));
    Pminub = whole(|a, b| zip(a, b, u8::min));
    Pminuw = whole(|a, b| zip(a, b, u16::min));
    Pminud = whole(|a, b| zip(a, b, u32::min));
    Phminposuw = whole(|_, b| smallest(b));
    Pcmpestri = own(text::explicit_index);
    Pcmpestri64 = own(text::explicit_index);
    Pcmpestrm = own(text::explicit_mask);
    Pcmpestrm64 = own(text::explicit_mask);
    Pcmpistri = own(text::implicit_index);
    Pcmpistrm = own(text::implicit_mask);
    // Signs.
    Pabsb = whole(|_, b| map(b, i8::wrapping_abs));
    Pabsw = whole(|_, b| map(b, i16::wrapping_abs));
    Pabsd = whole(|_, b| map(b, i32::wrapping_abs));
    Psignb = whole(|a, b| zip(a, b, |a: i8, b| sign_of(a, &b, a.wrapping_neg())));
    Psignw = whole(|a, b| zip(a, b, |a: i16, b| sign_of(a, &b, a.wrapping_neg())));
    Psignd = whole(|a, b| zip(a, b, |a: i32, b| sign_of(a, &b, a.wrapping_neg())));
    // Shifts.
    Psllw = shift(|a, by| map(a, |a: u16| a.checked_shl(by).unwrap_or(0)));
    Pslld = shift(|a, by| map(a, |a: u32| a.checked_shl(by).unwrap_or(0)));
    Psllq = shift(|a, by| map(a, |a: u64| a.checked_shl(by).unwrap_or(0)));
    Psrlw = shift(|a, by| map(a, |a: u16| a.checked_shr(by).unwrap_or(0)));
    Psrld = shift(|a, by| map(a, |a: u32| a.checked_shr(by).unwrap_or(0)));
    Psrlq = shift(|a, by| map(a, |a: u64| a.checked_shr(by).unwrap_or(0)));
    Psraw = shift(|a, by| map(a, |a: i16| a >> by.min(15)));
    Psrad = shift(|a, by| map(a, |a: i32| a >> by.min(31)));
    Pslldq = imm_alone(|a, by| shift_bytes(a, by, false));
    Psrldq = imm_alone(|a, by| shift_bytes(a, by, true));
    // Orders of lanes.
    Pshufb = whole(shuffle);
    Pshufd = with_imm(|_, b, order| u32::join(pick(u32::split(b), order)));
    Pshuflw = with_imm(|_, b, order| shuffle_words(b, 0, order));
    Pshufhw = with_imm(|_, b, order| shuffle_words(b, 1, order));
    Shufps = with_imm(shuffle_singles);
    Shufpd = with_imm(|a, b, order| {
        [a[usize::from(order & 1)], b[usize::from(order >> 1 & 1)]]
    });
    Palignr = with_imm(align);
    Punpcklbw = whole(|a, b| interleave::<u8, _>(a, b, false));
    Punpcklwd = whole(|a, b| interleave::<u16, _>(a, b, false));
    Punpckldq = whole(|a, b| interleave::<u32, _>(a, b, false));
    Punpcklqdq = whole(|a, b| interleave::<u64, _>(a, b, false));
    Punpckhbw = whole(|a, b| interleave::<u8, _>(a, b, true));
    Punpckhwd = whole(|a, b| interleave::<u16, _>(a, b, true));
    Punpckhdq = whole(|a, b| interleave::<u32, _>(a, b, true));
    Punpckhqdq = whole(|a, b| interleave::<u64, _>(a, b, true));
    Unpcklps = whole(|a, b| interleave::<u32, _>(a, b, false));
    Unpcklpd = whole(|a, b| interleave::<u64, _>(a, b, false));
    Unpckhps = whole(|a, b| interleave::<u32, _>(a, b, true));
    Unpckhpd = whole(|a, b| interleave::<u64, _>(a, b, true));
    Packsswb = whole(|a, b| pack(a, b, |a: i16| a.clamp(-128, 127) as i8));
    Packuswb = whole(|a, b| pack(a, b, |a: i16| a.clamp(0, 255) as u8));
    Packssdw = whole(|a, b| pack(a, b, |a: i32| a.clamp(-32768, 32767) as i16));
    Packusdw = whole(|a, b| pack(a, b, |a: i32| a.clamp(0, 65535) as u16));
    Blendps = with_imm(blend::<u32, _>);
    Blendpd = with_imm(blend::<u64, _>);
    Pblendw = with_imm(blend::<u16, _>);
    Pblendvb = by_xmm0(blend_by::<i8, _>);
    Blendvps = by_xmm0(blend_by::<i32, _>);
    Blendvpd = by_xmm0(blend_by::<i64, _>);
    // Wider lanes.
    Pmovsxbw = half(|_, b| widen(b, |b: i8| i16::from(b)));
    Pmovsxbd = quarter(|_, b| widen(b, |b: i8| i32::from(b)));
    Pmovsxbq = eighth(|_, b| widen(b, |b: i8| i64::from(b)));
    Pmovsxwd = half(|_, b| widen(b, |b: i16| i32::from(b)));
    Pmovsxwq = quarter(|_, b| widen(b, |b: i16| i64::from(b)));
    Pmovsxdq = half(|_, b| widen(b, |b: i32| i64::from(b)));
    Pmovzxbw = half(|_, b| widen(b, |b: u8| u16::from(b)));
    Pmovzxbd = quarter(|_, b| widen(b, |b: u8| u32::from(b)));
    Pmovzxbq = eighth(|_, b| widen(b, |b: u8| u64::from(b)));
    Pmovzxwd = half(|_, b| widen(b, |b: u16| u32::from(b)));
    Pmovzxwq = quarter(|_, b| widen(b, |b: u16| u64::from(b)));
    Pmovzxdq = half(|_, b| widen(b, |b: u32| u64::from(b)));
    // Floating point.
    Addps = packed(Op::Addps);
    Addpd = packed(Op::Addpd);
    Addss = single(Op::Addss);
    Addsd = double(Op::Addsd);
    Subps = packed(Op::Subps);
    Subpd = packed(Op::Subpd);
    Subss = single(Op::Subss);
    Subsd = double(Op::Subsd);
    Mulps = packed(Op::Mulps);
    Mulpd = packed(Op::Mulpd);
    Mulss = single(Op::Mulss);
    Mulsd = double(Op::Mulsd);
    Divps = packed(Op::Divps);
    Divpd = packed(Op::Divpd);
    Divss = single(Op::Divss);
    Divsd = double(Op::Divsd);
    Minps = packed(Op::Minps);
    Minpd = packed(Op::Minpd);
    Minss = single(Op::Minss);
    Minsd = double(Op::Minsd);
    Maxps = packed(Op::Maxps);
    Maxpd = packed(Op::Maxpd);
    Maxss = single(Op::Maxss);
    Maxsd = double(Op::Maxsd);
    Sqrtps = packed(Op::Sqrtps);
    Sqrtpd = packed(Op::Sqrtpd);
    Sqrtss = single(Op::Sqrtss);
    Sqrtsd = double(Op::Sqrtsd);
    Cmpps = packed(Op::Cmpps);
    Cmppd = packed(Op::Cmppd);
    Cmpss = single(Op::Cmpss);
    Cmpsd = double(Op::Cmpsd);
    Addsubps = packed(Op::Addsubps);
    Addsubpd = packed(Op::Addsubpd);
    Haddps = packed(Op::Haddps);
    Haddpd = packed(Op::Haddpd);
    Hsubps = packed(Op::Hsubps);
    Hsubpd = packed(Op::Hsubpd);
    Dpps = packed(Op::Dpps);
    Dppd = packed(Op::Dppd);
    Roundps = packed(Op::Roundps);
    Roundpd = packed(Op::Roundpd);
    Rcpps = packed(Op::Rcpps);
    Rsqrtps = packed(Op::Rsqrtps);
    Roundss = single(Op::Roundss);
    Rcpss = single(Op::Rcpss);
    Rsqrtss = single(Op::Rsqrtss);
    Roundsd = double(Op::Roundsd);
    Comisd = compare_double(Op::Comisd);
    Ucomisd = compare_double(Op::Ucomisd);
    Comiss = compare_single(Op::Comiss);
    Ucomiss = compare_single(Op::Ucomiss);
    Cvtdq2ps = packed(Op::Cvtdq2ps);
    Cvtps2dq = packed(Op::Cvtps2dq);
    Cvttps2dq = packed(Op::Cvttps2dq);
    Cvtpd2ps = packed(Op::Cvtpd2ps);
    Cvtpd2dq = packed(Op::Cvtpd2dq);
    Cvttpd2dq = packed(Op::Cvttpd2dq);
    Cvtps2pd = double(Op::Cvtps2pd);
    Cvtdq2pd = double(Op::Cvtdq2pd);
    Cvtsd2ss = double(Op::Cvtsd2ss);
    Cvtss2sd = single(Op::Cvtss2sd);
    Cvtsi2ss = integer([Op::Cvtsi2ss32, Op::Cvtsi2ss64]);
    Cvtsi2sd = integer([Op::Cvtsi2sd32, Op::Cvtsi2sd64]);
    Cvtsd2si = double_to_integer([Op::Cvtsd2si32, Op::Cvtsd2si64]);
    Cvttsd2si = double_to_integer([Op::Cvttsd2si32, Op::Cvttsd2si64]);
    Cvtss2si = single_to_integer([Op::Cvtss2si32, Op::Cvtss2si64]);
    Cvttss2si = single_to_integer([Op::Cvttss2si32, Op::Cvttss2si64]);
}
