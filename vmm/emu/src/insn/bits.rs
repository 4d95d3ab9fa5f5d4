//! Single bits, and counting them.

use super::core::{Core, Exec, Width};
use super::op::Op;
use super::operand::RR;
use crate::flags::Flags;

/// BT of a register. The other flags are undefined, but ZF: they stay.
pub(super) fn bt<W: Width, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let bit = if F == RR {
        core.reg::<W>(op.src).wide()
    } else {
        op.imm
    };
    let bit = bit & u64::from(W::BITS - 1);
    let cf = core.reg::<W>(op.dst).wide() >> bit & 1 != 0;
    core.state.flags = core.state.flags.with_carry(cf);
    Ok(())
}

/// What BT (0), BTS (1), BTR (2) and BTC (3) make of a value.
pub(super) fn changed(operation: u8, value: u64, bit: u32) -> u64 {
    let mask = 1 << bit;
    match operation {
        0 => value,
        1 => value | mask,
        2 => value & !mask,
        _ => value ^ mask,
    }
}

/// BSF and BSR: the place of a bit, `None` of 0, where the destination stays as it is. The
/// other flags are undefined: those of the source.
pub(super) fn scan<W: Width>(value: W, reverse: bool) -> (Option<W>, Flags) {
    let wide = value.wide();
    let flags = Flags::logic(value.signed());
    let place = if reverse {
        wide.checked_ilog2()
    } else {
        (wide != 0).then(|| wide.trailing_zeros())
    };
    (place.map(|place| W::of(u64::from(place))), flags)
}

/// POPCNT: ZF alone may be set.
pub(super) fn population<W: Width>(value: W) -> (W, Flags) {
    let count = u64::from(value.wide().count_ones());
    let rflags = if count == 0 { crate::flags::ZF } else { 0 };
    (W::of(count), Flags::from_bits(rflags))
}

/// TZCNT and LZCNT. CF of 0, ZF of a count of 0; the others are undefined: 0.
pub(super) fn zeros<W: Width>(value: W, leading: bool) -> (W, Flags) {
    use crate::flags::{CF, ZF};
    let wide = value.wide();
    let count = if leading {
        wide.leading_zeros() - (64 - W::BITS)
    } else {
        wide.trailing_zeros().min(W::BITS)
    };
    let cf = if wide == 0 { CF } else { 0 };
    let zf = if count == 0 { ZF } else { 0 };
    (W::of(u64::from(count)), Flags::from_bits(cf | zf))
}
