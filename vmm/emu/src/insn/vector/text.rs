//! PCMPESTRI, PCMPESTRM, PCMPISTRI and PCMPISTRM (SDM vol. 2B, 4.1).

use super::lanes::Lane;
use super::{Args, X, loose, set_xmm, to, xmm};
use crate::flags::{CF, Flags, OF, SF, ZF};
use crate::insn::core::{Core, Exec};

/// Elements of a string, and how many of them count.
#[derive(Debug, Clone, Copy)]
struct Text {
    elements: [i32; 16],
    len: usize,
}

/// How the immediate says that elements are: words or bytes, signed or not.
fn elements(value: X, imm: u8) -> [i32; 16] {
    let mut all = [0; 16];
    match imm & 3 {
        0 => all = u8::split(value).map(i32::from),
        2 => all = i8::split(value).map(i32::from),
        1 => all[..8].copy_from_slice(&u16::split(value).map(i32::from)),
        _ => all[..8].copy_from_slice(&i16::split(value).map(i32::from)),
    }
    all
}

fn most(imm: u8) -> usize {
    if imm & 1 == 0 { 16 } else { 8 }
}

/// It ends at the first element that is 0.
fn implicit(value: X, imm: u8) -> Text {
    let elements = elements(value, imm);
    let most = most(imm);
    let zero = elements[..most].iter().position(|one| *one == 0);
    Text {
        elements,
        len: zero.unwrap_or(most),
    }
}

/// It has as many elements as a register says, its sign apart.
fn explicit(core: &Core, args: &Args, number: u8, value: X) -> Text {
    let count = if args.wide {
        core.reg::<u64>(number).cast_signed().unsigned_abs()
    } else {
        u64::from(core.reg::<u32>(number).cast_signed().unsigned_abs())
    };
    Text {
        elements: elements(value, args.imm),
        len: count.min(most(args.imm) as u64) as usize,
    }
}

/// Whether element `j` of the second matches, as the aggregation has it.
fn matches(a: &Text, b: &Text, imm: u8, j: usize) -> bool {
    let most = most(imm);
    match imm >> 2 & 3 {
        // Equal to any.
        0 => j < b.len && a.elements[..a.len].contains(&b.elements[j]),
        // In a range: pairs of bounds, of which the last may lack one.
        1 => {
            let pairs = a.elements[..a.len].as_chunks::<2>().0;
            let inside = |[low, high]: &[i32; 2]| (*low..=*high).contains(&b.elements[j]);
            j < b.len && pairs.iter().any(inside)
        }
        // Each equal to its counterpart: what is behind both ends is.
        2 => match (j < a.len, j < b.len) {
            (true, true) => a.elements[j] == b.elements[j],
            (before, other) => before == other,
        },
        // The first begins here; what reaches over the register's end is not looked at.
        _ => (0..most - j)
            .take(a.len)
            .all(|i| j + i < b.len && a.elements[i] == b.elements[j + i]),
    }
}

/// The bits after aggregation and polarity.
fn result(a: &Text, b: &Text, imm: u8) -> u32 {
    let most = most(imm);
    let bits: u32 = (0..most)
        .map(|j| u32::from(matches(a, b, imm, j)) << j)
        .sum();
    let all = u32::MAX >> (32 - most);
    match imm >> 4 & 3 {
        1 => bits ^ all,
        3 => bits ^ (all & ((1 << b.len) - 1)),
        _ => bits,
    }
}

fn flags(core: &mut Core, a: &Text, b: &Text, imm: u8) -> u32 {
    let bits = result(a, b, imm);
    let flag = |flag: u64, holds: bool| if holds { flag } else { 0 };
    core.state.flags = Flags::from_bits(
        flag(CF, bits != 0)
            | flag(ZF, b.len < most(imm))
            | flag(SF, a.len < most(imm))
            | flag(OF, bits & 1 != 0),
    );
    bits
}

/// The place of a bit to ECX.
fn index(core: &mut Core, imm: u8, bits: u32) {
    let place = match bits {
        0 => most(imm) as u32,
        _ if imm & 1 << 6 != 0 => bits.ilog2(),
        _ => bits.trailing_zeros(),
    };
    core.set_reg(1, place);
}

/// The bits to XMM0, or an element of ones for each.
fn mask(core: &mut Core, imm: u8, bits: u32) {
    let ones = |at: usize| bits >> at & 1 != 0;
    let value = match (imm & 1 << 6 != 0, imm & 1 != 0) {
        (false, _) => [u64::from(bits), 0],
        (true, false) => i8::join(std::array::from_fn(|at| -i8::from(ones(at)))),
        (true, true) => i16::join(std::array::from_fn(|at| -i16::from(ones(at)))),
    };
    set_xmm(core, 0, value);
}

fn explicit_bits(core: &mut Core, args: &Args) -> Exec<u32> {
    let second = loose(core, args)?;
    let a = explicit(core, args, 0, xmm(core, to(args)));
    let b = explicit(core, args, 2, second);
    Ok(flags(core, &a, &b, args.imm))
}

fn implicit_bits(core: &mut Core, args: &Args) -> Exec<u32> {
    let second = loose(core, args)?;
    let a = implicit(xmm(core, to(args)), args.imm);
    let b = implicit(second, args.imm);
    Ok(flags(core, &a, &b, args.imm))
}

/// PCMPESTRI.
pub(super) fn explicit_index(core: &mut Core, args: &Args) -> Exec {
    let bits = explicit_bits(core, args)?;
    index(core, args.imm, bits);
    Ok(())
}

/// PCMPESTRM.
pub(super) fn explicit_mask(core: &mut Core, args: &Args) -> Exec {
    let bits = explicit_bits(core, args)?;
    mask(core, args.imm, bits);
    Ok(())
}

/// PCMPISTRI.
pub(super) fn implicit_index(core: &mut Core, args: &Args) -> Exec {
    let bits = implicit_bits(core, args)?;
    index(core, args.imm, bits);
    Ok(())
}

/// PCMPISTRM.
pub(super) fn implicit_mask(core: &mut Core, args: &Args) -> Exec {
    let bits = implicit_bits(core, args)?;
    mask(core, args.imm, bits);
    Ok(())
}
